"""What a build starts from: the config that the user named, read, and refused by name where it is no decoder's.

`open_source` reads a directory, a `config.json` or a hub id, or takes a config object; `model_class` says which class
the config stands for. Nothing is instantiated here: that is `factory`'s part.
"""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import transformers
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from precast.builder.limits import MAX_DEPTH
from precast.builder.source import nemotron_nas, quantised_files, quantised_options, tokenizer_files
from precast.builder.source.facts import Facts, decoder_way, read_facts
from precast.builder.source.json_object import parse_object, read_object
from precast.builder.source.model_class import (
    CAUSAL,
    check_architectures,
    model_class,
    model_types,
    needs_code,
    own_code,
)  # fmt: skip
from precast.builder.source.numbers import check_numbers
from precast.builder.source.other_names import differences, known_as, republished
from precast.builder.source.small_files import GENERATION
from precast.ir.errors import BuildError, shown, shown_value, some
from precast.ir.weights.config_facts import decoder_part

CONFIG_ERRORS = (
    ValueError, LookupError, AttributeError, TypeError, ImportError, RuntimeError, ArithmeticError, OSError,
    AssertionError, StrictDataclassError,
)  # fmt: skip
"""What transformers raises for configs that its own checks refuse."""

_LAYERS = re.compile(r"(num|n)(_\w+)?_layers?")


@dataclasses.dataclass(frozen=True)
class Source:
    """What a build starts from: the config, and the small files beside it that go into the bundle as they are."""

    name: str
    config: PreTrainedConfig
    files: dict[str, bytes]
    facts: Facts
    entries: dict[str, Any] = dataclasses.field(default_factory=dict)
    """What `config.json` says, as it stands there; empty for a config object."""
    beside: tuple[str, ...] = ()
    """Patterns of tensors of the checkpoint that belong to other parts than the decoder, of which transformers' class
    for the config knows nothing."""

    @property
    def has_code(self) -> bool:
        """Whether the model's class is made by code that comes with the model."""
        return own_code(self.config) is not None


def open_source(
    source: str | Path | PreTrainedConfig, *, allow_code: bool = False, model_type: str | None = None
) -> Source:
    """Reads a config directory, a `config.json`, a hub id, or takes a config object.

    `allow_code`: code that comes with the model may run, here in the builder. `model_type`: the config is read as that
    of a model of this type, which transformers has, whatever it says itself and whatever code it names.

    Raises BuildError: `config-missing` (no config found), `config-invalid` (transformers refuses it, it is no JSON, or
    a number is out of range), `model-unknown` (to transformers), `remote-code`, `model-unsupported` (no decoder),
    `feature-unsupported` (quantised in an unknown way), `tokenizer-invalid`, `dependency-missing`, `option-invalid`.
    """
    _check_model_type(model_type, source)
    if isinstance(source, PreTrainedConfig):
        name = type(source).__name__
        if own_code(source) is not None and not allow_code:
            raise _refused_code(name, source.auto_map, source.to_dict())
        config = copy.deepcopy(source)  # the caller's stays as it is
        return Source(name, config, {}, _checked_facts(config, name))
    name = str(source)
    folder = _folder(name, allow_code)
    entries = _read_entries(folder, name)
    if entries["model_type"] == nemotron_nas.MODEL_TYPE:
        nemotron_nas.register()
    same = None if model_type else known_as(entries)
    raw = {entry: value for entry, value in entries.items() if same is None or entry != "architectures"}
    config = _read_config(raw, folder, name, allow_code, model_type or (same and same.model_type))
    beside = {file: read_object(folder / file, f"{name}: {file}") for file in quantised_files.FILES}
    said = {file: found for file, found in beside.items() if found is not None}
    quantised_files.add_quantisation(config, said, name)
    files = tokenizer_files.read_files(folder, name)
    generation = parse_object(files.get(GENERATION, b"{}"), f"{name}: {GENERATION}")
    facts = _checked_facts(config, name, entries, generation)
    if same is not None:
        known = f"transformers' {same.model_type} under another name"
        note = f"its {entries['model_type']} decoder is {known}, and is built as that"
        facts = facts._replace(notes=(*facts.notes, note))
    return Source(name, config, files, facts, entries, same.beside if same else ())


def reason(error: Exception) -> str:
    """The first lines of the error's text in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = " ".join(lines[:3]).rstrip(": ")
    if isinstance(error, ZeroDivisionError):  # of what, it doesn't say
        return f"it holds a 0 in the place of a size ({type(error).__name__}: {text})"
    # the text of a KeyError is its key and nothing else
    return text if text and not isinstance(error, KeyError) else f"{type(error).__name__}: {text}"


# --- reading -----------------------------------------------------------------------------------------------------

_NAMES = "a directory with a config.json, or a model on the hub, such as Qwen/Qwen3-8B"


def _folder(name: str, allow_code: bool) -> Path:
    path = Path(name)
    if path.is_dir():
        return path
    if path.exists():
        if path.name != "config.json":
            message = f"{name} is a file, expected a config.json or a directory with one"
            fix = "name the model's directory"
            if path.suffix == ".gguf":
                message = f"{name} is a GGUF file, expected a directory with a config.json and safetensors files"
                fix = "name the directory, or the hub's model, that the GGUF file was made from"
            raise BuildError("config-missing", message, fix=fix)
        return path.parent
    if path.suffix == ".json":  # no name of a model on the hub: it isn't asked
        raise BuildError("config-missing", f"{name}: no such file", fix="name a directory with a config.json, or that")
    return _download(name, allow_code)


def _download(name: str, allow_code: bool) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    wanted = ["config.json", *tokenizer_files.READ, *quantised_files.FILES, *(["*.py"] if allow_code else [])]
    try:
        folder = Path(snapshot_download(name, allow_patterns=wanted))
    except (HFValidationError, HfHubHTTPError, OSError) as error:
        if isinstance(error, HFValidationError):
            found, fix = "its form is not that of a model's name on the hub", f"name {_NAMES}"
        elif isinstance(error, HfHubHTTPError):
            found = f"the hub, which was asked, doesn't give such a model ({type(error).__name__})"
            fix = f"name {_NAMES}; where a model asks for a login, log in with `hf auth login`"
        else:
            found = f"the hub, which was to be asked, can't be reached ({type(error).__name__})"
            fix = "name a directory with a config.json; or, if it is a model's name on the hub, connect to the network"
        raise BuildError("config-missing", f"{name} is no directory here, and {found}", fix=fix) from error
    if not (folder / "config.json").is_file():
        raise BuildError("config-missing", f"{name} on the hub has no config.json", fix="name a model's repository")
    return folder


def _read_config(
    raw: dict[str, Any], folder: Path, name: str, allow_code: bool, wanted: str | None
) -> PreTrainedConfig:
    model_type, code = wanted or raw["model_type"], {} if wanted else raw.get("auto_map") or {}
    known = CONFIG_MAPPING[model_type] if model_type in CONFIG_MAPPING else None  # noqa: SIM401 - its `get` is lazier
    is_own = needs_code(code, known, raw.get("architectures"))
    if is_own and not allow_code:
        raise _refused_code(name, code, raw)
    if is_own and CAUSAL not in code:
        raise BuildError(
            "model-unsupported",
            f"{name}: its own code has no causal language model (auto_map: {', '.join(some(list(code)))}), expected a "
            "decoder",
        )
    if known is None and "AutoConfig" not in code:
        raise BuildError(
            "model-unknown",
            f"{name}: transformers {transformers.__version__} doesn't know the config's model_type {shown(model_type)}",
            fix="check it; if the model is newer than that, update transformers" + _other_types(raw),
        )
    try:
        if wanted and known is not None:
            entries = {entry: value for entry, value in raw.items() if entry != "auto_map"} | {"model_type": wanted}
            config: PreTrainedConfig = known.from_dict(entries, name_or_path=str(folder))
        else:
            config = AutoConfig.from_pretrained(folder, trust_remote_code=is_own)
        if not isinstance(config.get_text_config(), PreTrainedConfig):
            raise TypeError("text_config, in the config of a model of text alone, is an object")
        return config
    except CONFIG_ERRORS as error:
        message = f"{name}: {'its own code' if is_own else 'transformers'} refuses the config: {reason(error)}"
        fix = f"correct the config: compare it with that of a published {shown(model_type)} model"
        raise BuildError("config-invalid", message, fix=fix) from error


def _read_entries(folder: Path, name: str) -> dict[str, Any]:
    raw = read_object(folder / "config.json", f"{name}: config.json")
    if raw is None:
        fix = "name a Hugging Face model directory"
        if any(folder.glob("*.gguf")):
            fix += ": that from which the GGUF file in this one was made"
        raise BuildError("config-missing", f"{name} has no config.json", fix=fix)
    if "configuration_files" in raw:
        message = f"{name}: config.json leads to other files, by transformers' version (configuration_files)"
        raise BuildError("config-invalid", message, fix="build from a config.json that says itself what the model is")
    if not isinstance(raw.get("model_type"), str):
        found = shown_value(raw["model_type"]) if "model_type" in raw else "missing"
        message = f"{name}: the config's model_type is {found}, expected a name such as llama"
        fix = "correct it in config.json: it says of what kind the model is"
        raise BuildError("config-invalid", message, fix=fix)
    if not isinstance(raw.get("auto_map") or {}, dict):
        message = f"{name}: config.json: auto_map is {raw['auto_map']!r}, expected an object"
        raise BuildError("config-invalid", message, fix="correct auto_map, or remove it")
    quantisation = raw.get("quantization_config")
    if quantisation is not None and not isinstance(quantisation, dict):
        message = f"{name}: config.json: quantization_config is {shown_value(quantisation)}, expected an object"
        fix = "take config.json whole from the publisher, or remove quantization_config if nothing is quantised"
        raise BuildError("config-invalid", message, fix=fix)
    named = raw.get("architectures") or []
    if not isinstance(named, list) or not all(isinstance(each, str) for each in named):
        message = f"{name}: config.json: architectures is {named!r}, expected a list of names"
        raise BuildError("config-invalid", message, fix="correct architectures, or remove them")
    for entry, count in _layer_counts(raw):
        if count > MAX_DEPTH:
            message = f"{name}: the config's {entry} is {count}, expected at most {MAX_DEPTH}"
            raise BuildError("config-invalid", message, fix=f"correct {entry} in the config")
    return raw


def _layer_counts(raw: dict[str, Any]) -> Iterator[tuple[str, int]]:
    """The numbers of layers in a config and in the objects within it, by name."""
    pending = [raw]
    while pending:
        for entry, value in pending.pop().items():
            if isinstance(value, dict):
                pending.append(value)
            elif isinstance(value, int) and _LAYERS.fullmatch(entry):
                yield entry, value


def _check_model_type(wanted: str | None, source: object) -> None:
    if wanted is None:
        return
    if isinstance(source, PreTrainedConfig):
        message, fix = "model_type goes with files, not with a config object", "leave model_type out"
        raise BuildError("option-invalid", message, fix=fix)
    if not isinstance(wanted, str) or wanted not in CONFIG_MAPPING:
        message = f"transformers {transformers.__version__} doesn't know the model_type {shown(str(wanted))}"
        raise BuildError("option-invalid", message, fix="name one that it has, such as llama")


def _refused_code(name: str, code: Any, entries: dict[str, Any]) -> BuildError:
    classes = ", ".join(some([f"{use}: {place}" for use, place in code.items()]))
    return BuildError(
        "remote-code",
        f"{name}: the config names code to run ({classes}) for {shown(str(entries['model_type']))} models of the "
        f"architectures {shown(str(entries.get('architectures')))}, which transformers does not have itself",
        fix="use a model that transformers has itself, or read that code and allow it (--allow-remote-code): it "
        "runs in the builder, with your rights, and no part of it gets into the bundle" + _other_types(entries),
    )


def _other_types(entries: dict[str, Any]) -> str:
    """How to build a model of transformers' that goes under another name, or was published anew for it."""
    first = next(iter(model_types(entries.get("architectures"))), None)
    if first is None:
        other = republished(entries.get("architectures"))
        return f"; or: {other}" if other else ""
    option = f"--model-type {first}, model_type={first!r} in Python"
    unlike = differences(entries)
    but = f", but for {', '.join(unlike)}, which nobody has compared with it" if unlike else ""
    return f"; or, if it is a {first} model under another name{but}, build it as that ({option})"


def _checked_facts(
    config: PreTrainedConfig, name: str, entries: dict[str, Any] | None = None, generation: dict[str, Any] | None = None
) -> Facts:
    """The config's facts. Raises BuildError for a config that no bundle can be built of."""
    if getattr(config, "is_encoder_decoder", False):
        raise BuildError("model-unsupported", f"{name}: {config.model_type} is an encoder-decoder, expected a decoder")
    try:
        found = model_class(config)
    except Exception as error:  # whatever that code raises
        message = f"{name}: its own code can't be used: {reason(error)}"
        raise BuildError("config-invalid", message, fix="correct that code, or install what it imports") from error
    if found is None:
        raise BuildError(
            "model-unsupported",
            f"{name}: transformers has no causal language model for {config.model_type}, expected a decoder",
        )
    _check_read(config, entries or {}, name)
    check_architectures(config, found, name)
    check_numbers(config, name)
    facts = read_facts(config, entries or {}, generation or {}, name)
    if facts.quantisation is not None:
        quantised_options.check_options(facts.quantisation, name)
    return facts


_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


def _check_read(config: PreTrainedConfig, entries: dict[str, Any], name: str) -> None:
    """Refuse a flat config of a model whose class reads a nested one: its sizes would be the class's defaults."""
    way = decoder_way(config)
    if not way or decoder_part(entries, way) is not entries:
        return
    for size in _SIZES:
        read = getattr(config.get_text_config(), size, None)
        if type(entries.get(size)) is int and entries[size] != read:
            raise BuildError(
                "config-invalid",
                f"{name}: {size} is {entries[size]} at the config's top level, where no {type(config).__name__} reads "
                f"it: without {'.'.join(way)} it is {read}",
                fix=f"take config.json whole from the publisher, with its {'.'.join(way)}: what is left out of that is "
                f"the default of {config.model_type} models",
            )
