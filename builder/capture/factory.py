"""From a config to a module on the meta device, ready to be traced: no weights, no memory, no GPU.

`make_module` instantiates the model that transformers has for a config; `materialise_buffers` computes the few values
of it that no checkpoint holds.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING

from precast.builder import named
from precast.builder.capture.experts import routed_experts
from precast.builder.capture.mixtures import drop_unread_rows, has_unread_rows
from precast.builder.capture.rope import route_dynamic_rope
from precast.builder.capture.routing import IMPLEMENTATION, implementation_for, routed_attention
from precast.builder.source.model_class import from_config, model_class, own_code
from precast.builder.source.quantised_options import unquantised
from precast.builder.source.source import CONFIG_ERRORS, reason
from precast.ir.errors import BuildError

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in named.DTYPES}


def make_module(config: PreTrainedConfig, dtype: str) -> PreTrainedModel:
    """The model that transformers has for `config`, on the meta device, with its attention routed to our op.

    Raises BuildError: `config-invalid` (transformers can't make it), `feature-unsupported` (its attention or its
    rotary embedding can't be routed).
    """
    with routed_attention(), routed_experts(), torch.device("meta"):
        try:
            model = _routed(unquantised(config), DTYPES[dtype])
        except CONFIG_ERRORS as error:
            raise BuildError(
                "config-invalid",
                f"transformers can't make a {config.model_type} model from this config: {reason(error)}",
                fix=f"correct the config: compare it with that of a published {config.model_type} model",
            ) from error
    _keep_in_float32(model, DTYPES[dtype])
    route_dynamic_rope(model)
    drop_unread_rows(model)
    return model.eval()


def make_whole(config: PreTrainedConfig, module: PreTrainedModel) -> PreTrainedModel | None:
    """A model, on the meta device, of whose checkpoints the module that `make_module` made reads a part: the multimodal
    model that it is the text decoder of, or itself with what it doesn't read.

    None where there is no such model, or where transformers can't make it: what a checkpoint holds beside the part is
    then unknown, and reported as unexpected when weights are read.
    """
    if own_code(config) is not None:
        return None
    whole: Any = MODEL_FOR_MULTIMODAL_LM_MAPPING.get(type(config), None)
    is_part = whole is not None and not isinstance(module, whole)
    if not is_part and not has_unread_rows(module):
        return None
    factory = AutoModelForMultimodalLM if is_part else AutoModelForCausalLM
    with torch.device("meta"):
        try:
            return factory.from_config(unquantised(config))
        except CONFIG_ERRORS:
            return None


def _routed(config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    found = model_class(config)
    assert found is not None, "open_source refuses configs without a model"
    options: dict[str, Any] = {"experts_implementation": IMPLEMENTATION, "dtype": dtype}
    try:
        return from_config(config, attn_implementation=implementation_for(found), **options)
    except KeyError as error:
        if error.args != (IMPLEMENTATION,):
            raise
        # a table of the model's own, of attention classes by name: they write their attention out
        return from_config(config, attn_implementation="eager", **options)


def _keep_in_float32(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """What transformers keeps in float32 as it loads a checkpoint into a smaller dtype: the classes name them."""
    kept = "|".join(f"(?:{name.replace('*', '.*')})" for name in model._get_dtype_plan(dtype))
    if not kept:
        return
    for path, module in model.named_modules():
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None and tensor.is_floating_point() and re.search(kept, f"{path}.{name}".lstrip(".")):
                tensor.data = tensor.data.float()


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
