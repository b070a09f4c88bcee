"""A checkpoint's `config.json` against what the build of a bundle read.

A number such as `rope_theta` or `sliding_window` changes what a model computes and no tensor's shape: only the config
tells. What is compared, and what is left out, is in `docs/format/v1.md`, Config facts. No transformers here: what its
classes make of missing entries and old names was written down by the build (`precast.builder.source.config_facts`).
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from precast.ir import files, limits
from precast.ir.errors import WeightsError, shown
from precast.ir.manifest import ConfigFacts, Fact
from precast.ir.nesting import is_too_deep
from precast.ir.weights.sources import Folder, LocalFolder, as_folder, read_small

CONFIG = "config.json"
_GPTQ_CONFIG = "quantize_config.json"
"""What says how a GPTQ checkpoint is quantised whose `config.json` doesn't."""
ROPE = "rope_parameters"
_QUANTISATION = "quantization_config"
_QUANTISATION_NAMES = (_QUANTISATION, "compression_config")
"""What publishers call the entry that says how a checkpoint is quantised."""
_QUANTISATION_ENTRIES = ("quant_method", "bits", "checkpoint_format", "zero_point")
"""What says how stored numbers are read; which tensors are quantised, the tensors themselves say."""
_GPTQ_FORMAT = ("checkpoint_format", "format")
"""The names of GPTQ's format, by which zeros are read; a config without any means `gptq`."""

_IGNORED = re.compile(
    # where the config comes from, and which program wrote it
    r"_?name_or_path|_commit_hash|_auto_class|_?(attn|experts)_implementation.*|.*version|architectures|auto_map"
    r"|tokenizer_class|(torch_)?dtype"
    # checked with the tensors, or decided by the bundle and the request
    r"|tie_word_embeddings|.*token_ids?|.*token_index|use_cache"
    # how transformers returns results
    r"|return_dict|output_(attentions|hidden_states|router_logits)|is_encoder_decoder|torchscript"
    r"|chunk_size_feed_forward"
    # training
    r"|.*dropout.*|.*_pdrop|.*initializer_.*|init_(std|device|method.*)|.*aux_loss.*|z_loss.*|.*jitter_noise"
    r"|gradient_checkpointing|pretraining_tp"
    # heads that a causal language model does not have
    r"|id2label|label2id|num_labels|problem_type|finetuning_task|classifier_.*|summary_.*"
    # sampling, as old configs have it
    r"|task_specific_params|max_length|min_length|do_sample|early_stopping|num_beams|num_beam_groups"
    r"|diversity_penalty|temperature|top_k|top_p|typical_p|repetition_penalty|length_penalty|bad_words_ids"
    r"|(encoder_)?no_repeat_ngram_size|num_return_sequences|remove_invalid_values|prefix|(begin_)?suppress_tokens"
)
"""Names of entries, at the top or in a nested object, that do not change what a decoder computes."""

_NEUTRAL: dict[str, Fact] = {"partial_rotary_factor": 1.0, "rope_type": "default"}
"""What entries of `rope_parameters` mean that the build did not see."""


class Difference(NamedTuple):
    """An entry whose value differs between the bundle's config and the checkpoint's; None: `null`, or no such entry."""

    name: str
    bundle: Fact
    checkpoint: Fact


def check(facts: ConfigFacts | None, checkpoint: str | os.PathLike[str] | Folder) -> None:
    """Raise WeightsError (`config-mismatch`), with all differences, if a checkpoint has another config.

    Nothing is compared for a bundle that keeps no facts, and for a checkpoint without a `config.json`. Also raises
    WeightsError (`checkpoint-config`) for a `config.json` that cannot be read.
    """
    config = None if facts is None else read_config(checkpoint)
    if facts is not None and config is not None and facts.values.get(f"{_QUANTISATION}.quant_method") == "gptq":
        config = _with_gptqs_file(config, facts.part, checkpoint)
    found = [] if facts is None or config is None else differences(facts, config)
    if not found:
        return
    lines = [
        f"    {shown(each.name)}: {_shown(each.bundle)} in the bundle, {_shown(each.checkpoint)} here" for each in found
    ]
    count = "1 entry differs" if len(found) == 1 else f"{len(found)} entries differ"
    is_other = any(each.name == "model_type" for each in found)
    build = "this is another model: name the checkpoint of the bundle's, or build" if is_other else "build"
    raise WeightsError(
        "config-mismatch",
        "\n".join([f"{count} from the config that the bundle was built from", *lines]),
        where=f"{as_folder(checkpoint).name.rstrip('/')}/{CONFIG}",
        fix=f"{build} a bundle from this config; or, to serve these weights with the bundle's numbers, load with "
        "allow_config_mismatch=True",
    )


def _with_gptqs_file(
    config: dict[str, Any], part: tuple[str, ...], checkpoint: str | os.PathLike[str] | Folder
) -> dict[str, Any]:
    """The config with what GPTQ's own file says of quantisation, where it says nothing of it itself."""
    said = None if quantisation_entries(config, part) else read_config(checkpoint, _GPTQ_CONFIG)
    return config if said is None else config | {_QUANTISATION: {"quant_method": "gptq"} | said}


def read_config(checkpoint: str | os.PathLike[str] | Folder, name: str = CONFIG) -> dict[str, Any] | None:
    """The `config.json` of a checkpoint: of a directory, of a file's directory, or of a folder; None without one.

    `name`: that of another file beside it. Raises WeightsError (`checkpoint-config`), and what the folder raises.
    """
    folder = as_folder(checkpoint)
    file = f"{folder.name.rstrip('/')}/{name}"
    try:
        data = _content(folder, name)
        if data is None:
            return None
        if len(data) > limits.MAX_CONFIG_BYTES:
            message = f"more than {limits.MAX_CONFIG_BYTES} bytes"
            raise WeightsError("checkpoint-config", message, where=file)
        config = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise WeightsError("checkpoint-config", f"expected JSON: {error}", where=file) from None
    if not isinstance(config, dict):
        raise WeightsError("checkpoint-config", "expected a JSON object", where=file)
    if is_too_deep(config):
        message = f"nested more than {limits.MAX_JSON_NESTING} levels deep"
        raise WeightsError("checkpoint-config", message, where=file)
    return config


def _content(folder: Folder, name: str) -> bytes | None:
    if isinstance(folder, LocalFolder):
        # What stands there and is no file is an error: who put it there meant something.
        try:
            return files.read_file(folder.root / name, limits.MAX_CONFIG_BYTES)
        except FileNotFoundError:
            return None
        except OSError as error:
            message = f"can't be read: {error.strerror}"
            raise WeightsError("checkpoint-config", message, where=str(folder.root / name)) from None
    if not folder.has(name):
        return None
    with folder.open(name) as source:
        return read_small(source, limits.MAX_CONFIG_BYTES)


def differences(facts: ConfigFacts, config: Mapping[str, Any]) -> list[Difference]:
    """All entries in which a checkpoint's config differs from what the build read, by name."""
    found = _spelt_as(facts, decoder_entries(config, facts.part) | quantisation_entries(config, facts.part))
    objects = {name.partition(".")[0] for name in found}
    differ = []
    for name, value in facts.values.items():
        outer, dot, _ = name.partition(".")
        absent = facts.absent if outer in objects or not dot else facts.absent_objects
        if name in found:
            if not any(_equal(found[name], meant) for meant in (value, *facts.same.get(name, ()))):
                differ.append(_difference(name, value, found[name]))
        elif name in absent:
            differ.append(_difference(name, value, absent[name]))
    for name, value in found.items():
        # Only this object is read whatever is in it; elsewhere, an entry that the build did not see has no meaning.
        if name.startswith(ROPE + ".") and name not in facts.values:
            neutral = _NEUTRAL.get(name.rpartition(".")[2])
            if value is not None and not _equal(value, neutral):
                differ.append(Difference(name, None, value))
    return sorted(differ, key=lambda difference: difference.name)


def entries(config: Mapping[str, Any]) -> dict[str, Fact]:
    """The entries of a config that are compared, flat: names of nested objects are joined with dots."""
    return dict(_flat("", config))


def decoder_entries(config: Mapping[str, Any], part: tuple[str, ...]) -> dict[str, Fact]:
    """The entries of the decoder's part of a config."""
    return entries(decoder_part(config, part))


def quantisation_entries(config: Mapping[str, Any], part: tuple[str, ...]) -> dict[str, Fact]:
    """The entries that say how a quantised checkpoint is read, of the whole config or of its decoder's part."""
    places = [(each, name) for name in _QUANTISATION_NAMES for each in (config, decoder_part(config, part))]
    found = next((each[name] for each, name in places if each.get(name)), None)
    if not isinstance(found, Mapping):
        return {}
    named = {name: found[name] for name in _QUANTISATION_ENTRIES if name in found}
    if found.get("quant_method") == "fp8":
        named["activation_scheme"] = found.get("activation_scheme") or "dynamic"
    if found.get("quant_method") == "gptq":
        formats = {str(found[name]) for name in _GPTQ_FORMAT if found.get(name) is not None}
        named["checkpoint_format"] = " and ".join(sorted(formats)) or "gptq"
    return dict(_flat(f"{_QUANTISATION}.", named))


def decoder_part(config: Mapping[str, Any], part: tuple[str, ...]) -> Mapping[str, Any]:
    """The part of a config that describes the decoder: the whole, for a checkpoint of the decoder alone."""
    for name in part or ("text_config",):
        inner = config.get(name)
        if not isinstance(inner, Mapping):
            break
        config = inner
    return config


def _flat(prefix: str, config: Mapping[str, Any]) -> Iterator[tuple[str, Fact]]:
    for key, value in config.items():
        name = f"{prefix}{key}"
        if len(name) > limits.MAX_STRING_BYTES or name in _QUANTISATION_NAMES or _IGNORED.fullmatch(key):
            continue
        if _is_object(value):
            in_rope = key == "rope_scaling" or name.startswith(ROPE)
            yield from _flat(f"{name}.", _with_rope_type(value) if in_rope else value)
        elif not isinstance(value, (list, tuple)):
            yield name, _scalar(value)
        elif any(_is_object(item) or isinstance(item, (list, tuple)) for item in value):
            yield from _flat(f"{name}.", {str(index): item for index, item in enumerate(value)})
        else:
            yield name, tuple(map(_scalar, value))


def _with_rope_type(rope: Mapping[str, Any]) -> dict[str, Any]:
    """A rope's entries, its kind under the name of today."""
    renamed = {name: value for name, value in rope.items() if name != "type"}
    return {"rope_type": rope["type"]} | renamed if "type" in rope else renamed


def _is_object(value: Any) -> bool:
    return isinstance(value, Mapping) and "__float__" not in value


def _scalar(value: Any) -> bool | int | float | str | None:
    if isinstance(value, Mapping):  # as transformers writes what JSON has no number for
        value = value.get("__float__")
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        return str(value)
    return value if isinstance(value, (bool, int, float, str)) else None


def _spelt_as(facts: ConfigFacts, found: dict[str, Fact]) -> dict[str, Fact]:
    """The entries by the names that the build knows them by; where both names are given, that one counts."""
    renamed = dict(found)
    for name, value in found.items():
        if len(renamed) > limits.MAX_CONFIG_ENTRIES:
            raise WeightsError("checkpoint-config", f"more than {limits.MAX_CONFIG_ENTRIES} entries, by all names")
        if name in facts.values:
            continue
        inner = name.partition(".")
        for target in facts.spellings.get(name, ()):
            renamed.setdefault(target, value)
        for target in facts.spellings.get(inner[0], ()) if inner[1] else ():
            renamed.setdefault(f"{target}.{inner[2]}", value)
    return renamed


def _equal(a: Fact, b: Fact) -> bool:
    """Whether two values mean the same: 1 and 1.0 do, 1 and true don't."""
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(_equal, a, b))
    return a == b and isinstance(a, bool) == isinstance(b, bool)


def _difference(name: str, ours: Fact, theirs: Fact) -> Difference:
    """Of lists of one length, the first items that differ."""
    if isinstance(ours, tuple) and isinstance(theirs, tuple) and len(ours) == len(theirs):
        for index, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            if not _equal(one, other):
                return Difference(f"{name}[{index}]", one, other)
    return Difference(name, ours, theirs)


def _shown(value: Fact) -> str:
    text = json.dumps(value)
    return text if len(text) <= 100 else f"{text[:97]}..."
