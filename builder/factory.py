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
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from precast.builder.rope import route_dynamic_rope
from precast.builder.routing import IMPLEMENTATION, routed_attention
from precast.ir.errors import BuildError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

# what transformers raises for configs that its own checks refuse
_CONFIG_ERRORS = (ValueError, KeyError, AttributeError, TypeError, ImportError, RuntimeError, OSError, StrictDataclassError)

TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja",
    "chat_template.json", "generation_config.json",
)  # fmt: skip


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


def open_source(source: str | Path | PreTrainedConfig) -> Source:
    """Reads a config directory, a `config.json`, a hub id, or takes a config object.

    Raises BuildError: `config-missing` (no config found), `config-invalid` (transformers refuses it, or it is no
    JSON), `remote-code`, `quantisation-unsupported`, `model-unsupported` (no decoder, or unknown).
    """
    if isinstance(source, PreTrainedConfig):
        config, files, name = copy.deepcopy(source), {}, type(source).__name__  # the caller's stays as it is
    else:
        name = str(source)
        folder = _folder(name)
        config = _read_config(folder, name)
        files = {file: (folder / file).read_bytes() for file in TOKENIZER_FILES if (folder / file).is_file()}
    _check_supported(config, name)
    return Source(name, config, files)


def make_module(config: PreTrainedConfig, dtype: str, max_seq_len: int) -> PreTrainedModel:
    """The model that transformers has for `config`, on the meta device, with its attention routed to our op."""
    with routed_attention(), torch.device("meta"):
        try:
            model = AutoModelForCausalLM.from_config(config, attn_implementation=IMPLEMENTATION, dtype=DTYPES[dtype])
        except _CONFIG_ERRORS as error:
            raise BuildError(
                "config-invalid", f"transformers can't make a {config.model_type} model from this config: {error}"
            ) from error
    route_dynamic_rope(model)
    return model.eval()


def limit(config: PreTrainedConfig, wanted: int | None) -> int:
    """The longest sequence (prompt and answer) that the bundle serves: `wanted`, at most what the model can."""
    known = getattr(config, "max_position_embeddings", None)
    if wanted is not None and wanted < 1:
        raise BuildError("option-invalid", f"max_seq_len is {wanted}, expected at least 1")
    if wanted is not None and known is not None and wanted > known:
        raise BuildError(
            "option-invalid",
            f"max_seq_len is {wanted}, but the config's max_position_embeddings is {known}",
            fix=f"build with max_seq_len of at most {known}, or change the config's rope parameters",
        )
    return int(wanted or known or 8192)


def materialise_buffers(model: PreTrainedModel, wanted: set[str]) -> dict[str, torch.Tensor]:
    """The values of the named non-persistent buffers (rope frequencies, scales), computed on the CPU.

    transformers gives such buffers their values in `_init_weights`, so that is asked, module by module. A buffer
    that it leaves untouched has no known value, and is refused.
    """
    values: dict[str, torch.Tensor] = {}
    for path, module in model.named_modules():
        names = [name for name in module._buffers if f"{path}.{name}".lstrip(".") in wanted]
        if not names:
            continue
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.full(buffer.shape, _untouched(buffer.dtype), dtype=buffer.dtype)
        owner = _owner(model, path)
        with torch.no_grad():
            owner._init_weights(module)
        for name in names:
            value = module._buffers[name]
            if value is None or bool((value == _untouched(value.dtype)).all()):
                raise BuildError(
                    "feature-unsupported",
                    f"{path}.{name} is used by the model but transformers gives it no value outside of its constructor",
                )
            values[f"{path}.{name}".lstrip(".")] = value.detach().clone()
    return values


def _untouched(dtype: torch.dtype) -> float | int | bool:
    return -1.2345e30 if dtype.is_floating_point and dtype != torch.float16 else -12345 if dtype != torch.bool else False


def _owner(model: PreTrainedModel, path: str) -> PreTrainedModel:
    owner = model
    module: torch.nn.Module = model
    for part in path.split("."):
        module = getattr(module, part) if part else module
        owner = module if isinstance(module, PreTrainedModel) else owner
    return owner


def _folder(name: str) -> Path:
    path = Path(name)
    if path.is_file():
        if path.name != "config.json":
            raise BuildError("config-missing", f"{name} is a file, expected a config.json or a directory with one")
        return path.parent
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise BuildError("config-missing", f"{name} has no config.json", fix="name a Hugging Face model directory")
        return path
    return _download(name)


def _download(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=["config.json", *TOKENIZER_FILES]))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise BuildError(
            "config-missing",
            f"{name} is no directory here, and the hub gave no such model: {str(error).splitlines()[0]}",
            fix="name a directory with a config.json, or a hub id such as meta-llama/Llama-3.1-8B",
        ) from error


def _read_config(folder: Path, name: str) -> PreTrainedConfig:
    try:
        raw: dict[str, Any] = json.loads((folder / "config.json").read_bytes())
    except (ValueError, UnicodeDecodeError) as error:
        raise BuildError("config-invalid", f"{name}: config.json is no JSON: {error}") from error
    if not isinstance(raw, dict) or not isinstance(raw.get("model_type"), str):
        raise BuildError("config-invalid", f"{name}: config.json names no model_type")
    if raw.get("auto_map"):
        raise BuildError(
            "remote-code",
            f"{name}: the config names code to run (auto_map: {', '.join(sorted(raw['auto_map']))})",
            fix="use a model that transformers has itself",
        )
    try:
        return AutoConfig.from_pretrained(folder)
    except _CONFIG_ERRORS as error:
        raise BuildError("config-invalid", f"{name}: transformers refuses the config: {_short(error)}") from error


def _short(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def _check_supported(config: PreTrainedConfig, name: str) -> None:
    if getattr(config, "is_encoder_decoder", False):
        raise BuildError("model-unsupported", f"{name}: {config.model_type} is an encoder-decoder, expected a decoder")
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise BuildError(
            "model-unsupported",
            f"{name}: transformers has no causal language model for {config.model_type}, expected a decoder",
        )
    quantisation = getattr(config, "quantization_config", None)
    if quantisation is not None:
        method = quantisation.get("quant_method") if isinstance(quantisation, dict) else type(quantisation).__name__
        raise BuildError("feature-unsupported", f"{name}: the checkpoint is quantised ({method})")
