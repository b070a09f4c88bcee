"""What a build starts from: the config that the user named, read, and refused by name where it is no decoder's.

`open_source` reads a directory, a `config.json` or a hub id, or takes a config object; `model_class` says which class
the config stands for. Nothing is instantiated here: that is `factory`'s part.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import transformers
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from precast.builder.limits import MAX_DEPTH, MAX_SEQ_LEN
from precast.builder.source import tokenizer_files
from precast.builder.source.model_class import CAUSAL, model_class, needs_code, own_code
from precast.builder.source.quantised_options import check_options, quantisation_of
from precast.ir.errors import BuildError

CONFIG_ERRORS = (
    ValueError, LookupError, AttributeError, TypeError, ImportError, RuntimeError, ArithmeticError, OSError,
    StrictDataclassError,
)  # fmt: skip
"""What transformers raises for configs that its own checks refuse."""

_LEAST = {
    "vocab_size": 1, "hidden_size": 1, "intermediate_size": 1, "num_hidden_layers": 1, "num_attention_heads": 1,
    "num_key_value_heads": 1, "linear_conv_kernel_dim": 2, "conv_kernel": 2, "conv_L_cache": 2, "conv1d_width": 2,
    "mamba_d_conv": 2,
}  # fmt: skip
"""Entries of configs and what they are at least, in every model that has them. A convolution of one token has no state
to keep. The dimensions of heads are not among them: models without rotary embeddings have some of 0."""

_LAYERS = re.compile(r"(num|n)(_\w+)?_layers?")


@dataclasses.dataclass(frozen=True)
class Source:
    """What a build starts from: the config, and the small files beside it that go into the bundle as they are."""

    name: str
    config: PreTrainedConfig
    files: dict[str, bytes]
    entries: dict[str, Any] = dataclasses.field(default_factory=dict)
    """What `config.json` says, as it stands there; empty for a config object."""

    @property
    def has_code(self) -> bool:
        """Whether the model's class is made by code that comes with the model."""
        return own_code(self.config) is not None

    def generation_config(self) -> dict[str, Any]:
        """The generation config's entries; empty without one. Raises BuildError when it is no JSON object."""
        return _json_object(self.files.get("generation_config.json", b"{}"), f"{self.name}: generation_config.json")


def open_source(source: str | Path | PreTrainedConfig, *, allow_code: bool = False) -> Source:
    """Reads a config directory, a `config.json`, a hub id, or takes a config object.

    `allow_code`: code that comes with the model may run, here in the builder.

    Raises BuildError: `config-missing` (no config found), `config-invalid` (transformers refuses it, or it is no
    JSON), `model-unknown` (to transformers), `remote-code`, `model-unsupported` (no decoder),
    `feature-unsupported` (quantised in an unknown way), `tokenizer-invalid`, `dependency-missing`.
    """
    if isinstance(source, PreTrainedConfig):
        name = type(source).__name__
        if own_code(source) is not None and not allow_code:
            raise _refused_code(name, source.auto_map, source.model_type, source.architectures)
        _check_supported(source, name)
        return Source(name, copy.deepcopy(source), {})  # the caller's stays as it is
    name = str(source)
    folder = _folder(name, allow_code)
    entries = _read_entries(folder, name)
    config = _read_config(entries, folder, name, allow_code)
    _check_supported(config, name)
    return Source(name, config, tokenizer_files.read_files(folder, name), entries)


def limit(config: PreTrainedConfig, wanted: int | None) -> int:
    """The longest sequence (prompt and answer) that the bundle serves: `wanted`, at most what the model can."""
    config = config.get_text_config()
    known = getattr(config, "max_position_embeddings", None)
    entry = "the config's " + config.attribute_map.get("max_position_embeddings", "max_position_embeddings")
    if wanted is not None and (type(wanted) is not int or wanted < 1):
        fix = "leave max_seq_len out, for the config's limit"
        raise BuildError("option-invalid", f"max_seq_len is {wanted!r}, expected a number of at least 1", fix=fix)
    if known is not None and (type(known) is not int or known < 1):
        message, fix = f"{entry} is {known!r}, expected a number of at least 1", "correct it in the config"
        raise BuildError("config-invalid", message, fix=fix)
    rope = getattr(config, "rope_parameters", None) or {}
    if known is not None and rope.get("rope_type") == "dynamic":
        known = int(known * rope["factor"])  # this rope stretches what the model was trained on
    if wanted is not None and known is not None and wanted > known:
        more = ", or change the config's rope parameters" if rope else ""
        raise BuildError(
            "option-invalid",
            f"max_seq_len is {wanted}, but {entry} is {known}",
            fix=f"build with max_seq_len of at most {known}{more}",
        )
    longest = wanted or known or 8192
    if longest > MAX_SEQ_LEN:
        whose = "max_seq_len is" if wanted else f"{entry} is"
        fix = f"build with max_seq_len of at most {MAX_SEQ_LEN}"
        raise BuildError("option-invalid", f"{whose} {longest}, expected at most {MAX_SEQ_LEN}", fix=fix)
    return longest


def reason(error: Exception) -> str:
    """The first lines of the error's text in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = " ".join(lines[:3])
    if isinstance(error, ZeroDivisionError):  # of what, it doesn't say
        return f"it holds a 0 in the place of a size ({type(error).__name__}: {text})"
    # the text of a KeyError is its key and nothing else
    return text if text and not isinstance(error, KeyError) else f"{type(error).__name__}: {text}"


# --- reading -----------------------------------------------------------------------------------------------------

_NAMES = "a directory with a config.json, or a model on the hub, such as Qwen/Qwen3-8B"


def _folder(name: str, allow_code: bool) -> Path:
    path = Path(name)
    if path.is_file():
        if path.name != "config.json":
            message = f"{name} is a file, expected a config.json or a directory with one"
            raise BuildError("config-missing", message, fix="name the model's directory")
        return path.parent
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise BuildError("config-missing", f"{name} has no config.json", fix="name a Hugging Face model directory")
        return path
    if path.suffix == ".json":  # no name of a model on the hub: it isn't asked
        raise BuildError("config-missing", f"{name}: no such file", fix="name a directory with a config.json, or that")
    return _download(name, allow_code)


def _download(name: str, allow_code: bool) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    wanted = ["config.json", *tokenizer_files.READ, *(["*.py"] if allow_code else [])]
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


def _read_config(raw: dict[str, Any], folder: Path, name: str, allow_code: bool) -> PreTrainedConfig:
    model_type, code = raw["model_type"], raw.get("auto_map") or {}
    known = CONFIG_MAPPING[model_type] if model_type in CONFIG_MAPPING else None  # noqa: SIM401 - its `get` is lazier
    is_own = needs_code(code, known, raw.get("architectures"))
    if is_own and not allow_code:
        raise _refused_code(name, code, model_type, raw.get("architectures"))
    if is_own and CAUSAL not in code:
        raise BuildError(
            "model-unsupported",
            f"{name}: its own code has no causal language model (auto_map: {', '.join(code)}), expected a decoder",
        )
    if known is None and "AutoConfig" not in code:
        raise BuildError(
            "model-unknown",
            f"{name}: transformers {transformers.__version__} doesn't know the model_type {model_type}",
            fix="check the model_type; if the model is newer than that, update transformers",
        )
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=is_own)
        if not isinstance(config.get_text_config(), PreTrainedConfig):
            raise TypeError("text_config, in the config of a model of text alone, is an object")
        return config
    except CONFIG_ERRORS as error:
        message = f"{name}: {'its own code' if is_own else 'transformers'} refuses the config: {reason(error)}"
        fix = f"correct the config: compare it with that of a published {model_type} model"
        raise BuildError("config-invalid", message, fix=fix) from error


def _read_entries(folder: Path, name: str) -> dict[str, Any]:
    try:
        raw = _json_object((folder / "config.json").read_bytes(), f"{name}: config.json")
    except OSError as error:
        message = f"{name}: config.json can't be read: {error.strerror}"
        raise BuildError("config-invalid", message, fix="check the file's permissions") from error
    if not isinstance(raw.get("model_type"), str):
        fix = "add the model_type of the model's kind, such as llama"
        raise BuildError("config-invalid", f"{name}: config.json names no model_type", fix=fix)
    if not isinstance(raw.get("auto_map") or {}, dict):
        message = f"{name}: config.json: auto_map is {raw['auto_map']!r}, expected an object"
        raise BuildError("config-invalid", message, fix="correct auto_map, or remove it")
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


def _json_object(data: bytes, what: str) -> dict[str, Any]:
    fix = "correct the file, or download it again"
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise BuildError("config-invalid", f"{what} is no JSON: {error}", fix=fix) from error
    if not isinstance(found, dict):
        raise BuildError("config-invalid", f"{what} is no JSON object", fix=fix)
    return found


def _refused_code(name: str, code: Any, model_type: str, architectures: Any) -> BuildError:
    classes = ", ".join(f"{use}: {place}" for use, place in code.items())
    return BuildError(
        "remote-code",
        f"{name}: the config names code to run ({classes}) for {model_type} models of the architectures "
        f"{architectures}, which transformers does not have itself",
        fix="use a model that transformers has itself, or read that code and allow it (--allow-remote-code): it "
        "runs in the builder, with your rights, and no part of it gets into the bundle",
    )


def _check_supported(config: PreTrainedConfig, name: str) -> None:
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
    _check_sizes(config, name)
    quantisation = quantisation_of(config)
    if quantisation is not None:
        check_options(quantisation, name)


def _check_sizes(config: PreTrainedConfig, name: str) -> None:
    text = config.get_text_config()
    for size, least in _LEAST.items():
        entry = text.attribute_map.get(size, size)  # as this config calls it
        found = vars(text).get(entry)
        if type(found) is int and found < least:
            raise BuildError(
                "config-invalid",
                f"{name}: the config's {entry} is {found}, expected a number of at least {least}",
                fix=f"correct {entry} in the config",
            )
