"""From a config to a module on the meta device, ready to be traced: no weights, no memory, no GPU.

`open_source` reads what the user named (a directory, a `config.json`, a hub id); `make_module` instantiates the
model that transformers has for it. Both refuse, by name and with the reason, what is not a decoder.
"""

from __future__ import annotations

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
)

from precast.builder import tokenizer_files
from precast.builder.experts import routed_experts
from precast.builder.quantisation import quantisation_of, unquantised
from precast.builder.quantised_options import check_options
from precast.builder.rope import route_dynamic_rope
from precast.builder.routing import IMPLEMENTATION, implementation_for, routed_attention
from precast.ir.errors import BuildError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

# what transformers raises for configs that its own checks refuse
_CONFIG_ERRORS = (
    ValueError,
    KeyError,
    AttributeError,
    TypeError,
    ImportError,
    RuntimeError,
    OSError,
    StrictDataclassError,
)

MAX_SEQ_LEN = 1 << 24
"""Tokens; the longest config in use says 10 Mi. The masks' rules are evaluated over as many positions."""


@dataclasses.dataclass(frozen=True)
class Source:
    """What a build starts from: the config, and the small files beside it that go into the bundle as they are."""

    name: str
    config: PreTrainedConfig
    files: dict[str, bytes]

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
        _check_supported(source, name)
        return Source(name, copy.deepcopy(source), {})  # the caller's stays as it is
    name = str(source)
    folder = _folder(name, allow_code)
    config = _read_config(folder, name, allow_code)
    _check_supported(config, name)
    return Source(name, config, tokenizer_files.read_files(folder, name))


def make_module(config: PreTrainedConfig, dtype: str) -> PreTrainedModel:
    """The model that transformers has for `config`, on the meta device, with its attention routed to our op.

    Raises BuildError: `config-invalid` (transformers can't make it), `feature-unsupported` (its attention or its
    rotary embedding can't be routed).
    """
    with routed_attention(), routed_experts(), torch.device("meta"):
        try:
            family, model_class = _model_class(config)
            model = family.from_config(
                unquantised(config), attn_implementation=implementation_for(model_class),
                experts_implementation=IMPLEMENTATION, dtype=DTYPES[dtype],
                trust_remote_code=_own_code(config) is not None,
            )  # fmt: skip
        except _CONFIG_ERRORS as error:
            raise BuildError(
                "config-invalid",
                f"transformers can't make a {config.model_type} model from this config: {_reason(error)}",
            ) from error
    route_dynamic_rope(model)
    return model.eval()


def _model_class(config: PreTrainedConfig) -> tuple[Any, type[PreTrainedModel]]:
    """transformers' factory of such models, and the class that it makes: a decoder, or a model with one in it."""
    code = _own_code(config)
    if code is not None:
        return AutoModelForCausalLM, get_class_from_dynamic_module(code, config.name_or_path)
    families = ((AutoModelForCausalLM, MODEL_FOR_CAUSAL_LM_MAPPING),
                (AutoModelForImageTextToText, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING))  # fmt: skip
    family, known = next((family, mapping[type(config)]) for family, mapping in families if type(config) in mapping)
    return family, known[0] if isinstance(known, (tuple, list)) else known


def _own_code(config: PreTrainedConfig) -> str | None:
    """The class that comes with the model, where its code was allowed: only then a config says so."""
    code = getattr(config, "auto_map", None) or {}
    is_known = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING or type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    return None if is_known else code.get("AutoModelForCausalLM")


def limit(config: PreTrainedConfig, wanted: int | None) -> int:
    """The longest sequence (prompt and answer) that the bundle serves: `wanted`, at most what the model can."""
    config = config.get_text_config()
    known = getattr(config, "max_position_embeddings", None)
    if wanted is not None and (type(wanted) is not int or wanted < 1):
        raise BuildError("option-invalid", f"max_seq_len is {wanted!r}, expected a number of at least 1")
    if known is not None and (type(known) is not int or known < 1):
        raise BuildError(
            "config-invalid", f"the config's max_position_embeddings is {known!r}, expected a number of at least 1"
        )
    rope = getattr(config, "rope_parameters", None) or {}
    if known is not None and rope.get("rope_type") == "dynamic":
        known = int(known * rope["factor"])  # this rope stretches what the model was trained on
    if wanted is not None and known is not None and wanted > known:
        raise BuildError(
            "option-invalid",
            f"max_seq_len is {wanted}, but the config's max_position_embeddings is {known}",
            fix=f"build with max_seq_len of at most {known}, or change the config's rope parameters",
        )
    longest = wanted or known or 8192
    if longest > MAX_SEQ_LEN:
        whose = "max_seq_len is" if wanted else "the config's max_position_embeddings is"
        fix = f"build with max_seq_len of at most {MAX_SEQ_LEN}"
        raise BuildError("option-invalid", f"{whose} {longest}, expected at most {MAX_SEQ_LEN}", fix=fix)
    return longest


def materialise_buffers(model: PreTrainedModel, wanted: set[str]) -> dict[str, torch.Tensor]:
    """The values of the named non-persistent buffers (rope frequencies, scales), computed on the CPU.

    transformers gives such buffers their values in `_init_weights`, so that is asked, module by module: for the
    buffer's own module, and where that leaves it untouched, for those that it is a part of. A buffer that none of them
    touches has no known value, and is refused.
    """
    holders = {path: module for path, module in model.named_modules() if _names(path, module, wanted)}
    for module in holders.values():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.full(buffer.shape, _untouched(buffer.dtype), dtype=buffer.dtype)
    for path, module in holders.items():
        names = _names(path, module, wanted)
        _initialise(model, path)
        above = path
        while above and any(_is_untouched(module._buffers[name]) for name in names):
            above = above.rpartition(".")[0]
            _initialise(model, above)
    return {
        f"{path}.{name}".lstrip("."): _value(path, module, name)
        for path, module in holders.items()
        for name in _names(path, module, wanted)
    }


def _names(path: str, module: torch.nn.Module, wanted: set[str]) -> list[str]:
    return [name for name in module._buffers if f"{path}.{name}".lstrip(".") in wanted]


def _initialise(model: PreTrainedModel, path: str) -> None:
    with torch.no_grad():
        _owner(model, path)._init_weights(model.get_submodule(path))


def _value(path: str, module: torch.nn.Module, name: str) -> torch.Tensor:
    value = module._buffers[name]
    if value is None or _is_untouched(value):
        raise BuildError(
            "feature-unsupported",
            f"{path}.{name} is used by the model but transformers gives it no value outside of its constructor",
        )
    return value.detach().clone()


def _untouched(dtype: torch.dtype) -> float | int | bool:
    """A value that no buffer is given. A bool has none to spare: one of all False counts as untouched."""
    if dtype == torch.bool:
        return False
    return -12345.0 if dtype.is_floating_point else torch.iinfo(dtype).max - 5


def _is_untouched(value: torch.Tensor | None) -> bool:
    """Whether elements were left as they were: a part has no more of a known value than the whole."""
    if value is None:
        return True
    left = value == torch.full((), _untouched(value.dtype), dtype=value.dtype)
    return bool(left.all() if value.dtype == torch.bool else left.any())


def _owner(model: PreTrainedModel, path: str) -> PreTrainedModel:
    owner = model
    module: torch.nn.Module = model
    for part in path.split("."):
        module = getattr(module, part) if part else module
        owner = module if isinstance(module, PreTrainedModel) else owner
    return owner


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
    return _download(name, allow_code)


def _download(name: str, allow_code: bool) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(name, allow_patterns=["config.json", *tokenizer_files.READ, *(["*.py"] if allow_code else [])]))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise BuildError(
            "config-missing",
            f"{name} is no directory here, and the hub gave no such model: {_reason(error)}",
            fix="name a directory with a config.json, or a hub id such as meta-llama/Llama-3.1-8B",
        ) from error
    if not (folder / "config.json").is_file():
        raise BuildError("config-missing", f"{name} on the hub has no config.json", fix="name a model's repository")
    return folder


def _read_config(folder: Path, name: str, allow_code: bool) -> PreTrainedConfig:
    try:
        raw: dict[str, Any] = json.loads((folder / "config.json").read_bytes())
    except OSError as error:
        raise BuildError("config-invalid", f"{name}: config.json can't be read: {error.strerror}") from error
    except ValueError as error:
        raise BuildError("config-invalid", f"{name}: config.json is no JSON: {error}") from error
    if not isinstance(raw, dict) or not isinstance(raw.get("model_type"), str):
        raise BuildError("config-invalid", f"{name}: config.json names no model_type")
    needs_code = _needs_code(raw)
    if needs_code and not allow_code:
        raise BuildError(
            "remote-code",
            f"{name}: the config names code to run (auto_map: {', '.join(raw['auto_map'])}) for {raw['model_type']} "
            f"models of the architectures {raw.get('architectures')}, which transformers does not have itself",
            fix="use a model that transformers has itself, or read that code and allow it (--allow-remote-code): it "
            "runs in the builder, with its rights, and no part of it gets into the bundle",
        )
    if raw["model_type"] not in CONFIG_MAPPING and not needs_code:
        raise BuildError(
            "model-unknown",
            f"{name}: transformers {transformers.__version__} doesn't know the model_type {raw['model_type']}",
            fix="check the model_type; if the model is newer than that, update transformers",
        )
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=needs_code)
    except _CONFIG_ERRORS as error:
        raise BuildError("config-invalid", f"{name}: transformers refuses the config: {_reason(error)}") from error


def _needs_code(raw: dict[str, Any]) -> bool:
    """Whether a config needs code from its repository.

    Models that transformers took over often still name the code that they came with: what counts is whether
    transformers has the architecture itself.
    """
    if not raw.get("auto_map"):
        return False
    known = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(raw["model_type"], ())
    return raw.get("architectures") not in ([known], *([architecture] for architecture in known))


def _reason(error: Exception) -> str:
    """The first lines of the error's text in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = " ".join(lines[:3])
    # the text of a KeyError is its key and nothing else
    return text if text and not isinstance(error, KeyError) else f"{type(error).__name__}: {text}"


def _check_supported(config: PreTrainedConfig, name: str) -> None:
    if getattr(config, "is_encoder_decoder", False):
        raise BuildError("model-unsupported", f"{name}: {config.model_type} is an encoder-decoder, expected a decoder")
    is_known = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING or type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    if not is_known and _own_code(config) is None:
        raise BuildError(
            "model-unsupported",
            f"{name}: transformers has no causal language model for {config.model_type}, expected a decoder",
        )
    quantisation = quantisation_of(config)
    if quantisation is not None:
        check_options(quantisation, name)
