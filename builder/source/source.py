"""What a build starts from: the config that the user named, read, and refused by name where it is no decoder's.

`open_source` reads a directory, a `config.json` or a hub id, or takes a config object; `model_class` says which class
the config stands for. Nothing is instantiated here: that is `factory`'s part.
"""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import transformers
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, model_type_to_module_name
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

from precast.builder.source import tokenizer_files
from precast.builder.source.quantised_options import check_options
from precast.builder.weights.quantisation import quantisation_of
from precast.ir.errors import BuildError

CONFIG_ERRORS = (
    ValueError,
    KeyError,
    AttributeError,
    TypeError,
    ImportError,
    RuntimeError,
    ArithmeticError,
    OSError,
    StrictDataclassError,
)
"""What transformers raises for configs that its own checks refuse."""

MAX_SEQ_LEN = 1 << 24
"""Tokens; the longest config in use says 10 Mi. The masks' rules are evaluated over as many positions."""

_LEAST = {
    "vocab_size": 1, "hidden_size": 1, "intermediate_size": 1, "num_hidden_layers": 1, "num_attention_heads": 1,
    "num_key_value_heads": 1, "linear_conv_kernel_dim": 2, "conv_kernel": 2, "conv_L_cache": 2, "conv1d_width": 2,
    "mamba_d_conv": 2,
}  # fmt: skip
"""Entries of configs and what they are at least, in every model that has them. A convolution of one token has no state
to keep. The dimensions of heads are not among them: models without rotary embeddings have some of 0."""

_CAUSAL = "AutoModelForCausalLM"
"""The entry of a config's `auto_map` that names the model's own causal language model."""


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
        try:
            entries = json.loads(self.files.get("generation_config.json", b"{}"))
        except ValueError as error:
            raise BuildError("config-invalid", f"{self.name}: generation_config.json is no JSON: {error}") from error
        if not isinstance(entries, dict):
            raise BuildError("config-invalid", f"{self.name}: generation_config.json is no JSON object")
        return entries


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


def model_class(config: PreTrainedConfig) -> type[PreTrainedModel] | None:
    """The class of the decoder, or of a model with a decoder in it, that a config stands for; None: there is none.

    It comes from the model's own code where that is needed (`own_code`), else from transformers, or from whoever
    registered it with `AutoModelForCausalLM`.
    """
    code = own_code(config)
    if code is not None:
        found: type[PreTrainedModel] = get_class_from_dynamic_module(code, str(config.name_or_path))
        found.register_for_auto_class(_CAUSAL)  # its checkpoints take the code along
        return found
    known = _known_classes(type(config))
    return known[0] if known else _class_for_part(config)


def own_code(config: PreTrainedConfig) -> str | None:
    """The causal language model that comes with the model's files, `file.Class`; None where transformers has it."""
    code = getattr(config, "auto_map", None) or {}
    needed = _needs_code(code, type(config), config.architectures)
    return code.get(_CAUSAL) if needed else None


def limit(config: PreTrainedConfig, wanted: int | None) -> int:
    """The longest sequence (prompt and answer) that the bundle serves: `wanted`, at most what the model can."""
    config = config.get_text_config()
    known = getattr(config, "max_position_embeddings", None)
    entry = "the config's " + config.attribute_map.get("max_position_embeddings", "max_position_embeddings")
    if wanted is not None and (type(wanted) is not int or wanted < 1):
        raise BuildError("option-invalid", f"max_seq_len is {wanted!r}, expected a number of at least 1")
    if known is not None and (type(known) is not int or known < 1):
        raise BuildError("config-invalid", f"{entry} is {known!r}, expected a number of at least 1")
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


def _folder(name: str, allow_code: bool) -> Path:
    path = Path(name)
    if path.is_file():
        if path.name != "config.json":
            raise BuildError("config-missing", f"{name} is a file, expected a config.json or a directory with one")
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
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    wanted = ["config.json", *tokenizer_files.READ, *(["*.py"] if allow_code else [])]
    try:
        folder = Path(snapshot_download(name, allow_patterns=wanted))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise BuildError(
            "config-missing",
            f"{name} is no directory here, and the hub gave no such model: {reason(error)}",
            fix="name a directory with a config.json, or a hub id such as meta-llama/Llama-3.1-8B",
        ) from error
    if not (folder / "config.json").is_file():
        raise BuildError("config-missing", f"{name} on the hub has no config.json", fix="name a model's repository")
    return folder


def _read_config(raw: dict[str, Any], folder: Path, name: str, allow_code: bool) -> PreTrainedConfig:
    model_type, code = raw["model_type"], raw.get("auto_map") or {}
    known = CONFIG_MAPPING[model_type] if model_type in CONFIG_MAPPING else None  # noqa: SIM401 - its `get` is lazier
    needs_code = _needs_code(code, known, raw.get("architectures"))
    if needs_code and not allow_code:
        raise _refused_code(name, code, model_type, raw.get("architectures"))
    if needs_code and _CAUSAL not in code:
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
        return AutoConfig.from_pretrained(folder, trust_remote_code=needs_code)
    except CONFIG_ERRORS as error:
        whose = "its own code" if needs_code else "transformers"
        raise BuildError("config-invalid", f"{name}: {whose} refuses the config: {reason(error)}") from error


def _read_entries(folder: Path, name: str) -> dict[str, Any]:
    try:
        raw = json.loads((folder / "config.json").read_bytes())
    except OSError as error:
        raise BuildError("config-invalid", f"{name}: config.json can't be read: {error.strerror}") from error
    except ValueError as error:
        raise BuildError("config-invalid", f"{name}: config.json is no JSON: {error}") from error
    if not isinstance(raw, dict):
        raise BuildError("config-invalid", f"{name}: config.json is no JSON object")
    if not isinstance(raw.get("model_type"), str):
        raise BuildError("config-invalid", f"{name}: config.json names no model_type")
    if not isinstance(raw.get("auto_map") or {}, dict):
        raise BuildError("config-invalid", f"{name}: config.json: auto_map is {raw['auto_map']!r}, expected an object")
    return raw


# --- which model it is -------------------------------------------------------------------------------------------


def _needs_code(code: Any, config_class: type | None, architectures: Iterable[str] | None) -> bool:
    """Whether a config with this `auto_map` needs code from its repository.

    Models that transformers took over often still name the code that they came with: what counts is whether
    transformers has the architecture itself.
    """
    if not code:
        return False
    known = {each.__name__ for each in _known_classes(config_class)}
    named = set(architectures or ())
    return not named or not named <= known


def _known_classes(config_class: Any) -> tuple[type[PreTrainedModel], ...]:
    """What transformers' factories have for configs of this class, the default first; nothing for None."""
    for mapping in (MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING):
        if config_class in mapping:
            known: Any = mapping[config_class]
            return tuple(known) if isinstance(known, (list, tuple)) else (known,)
    return ()


def _class_for_part(config: PreTrainedConfig) -> type[PreTrainedModel] | None:
    """The causal language model that is made of this part of a config alone, and so saves it as its own."""
    whole = model_type_to_module_name(config.model_type)
    known = _known_classes(CONFIG_MAPPING[whole]) if whole in CONFIG_MAPPING else ()
    return next((each for each in known if each.config_class is type(config)), None)


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
        raise BuildError("config-invalid", f"{name}: its own code can't be used: {reason(error)}") from error
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
