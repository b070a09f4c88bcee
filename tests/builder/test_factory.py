"""From a config to a module on the meta device."""

from __future__ import annotations

import families
import pytest
import torch

from precast.builder.factory import make_module
from precast.builder.routing import IMPLEMENTATION


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_module_takes_no_memory(dtype: str) -> None:
    module = make_module(families.make_config("qwen2"), dtype)

    assert all(parameter.is_meta for parameter in module.parameters())
    assert {parameter.dtype for parameter in module.parameters()} == {getattr(torch, dtype)}
    assert module.config._attn_implementation == IMPLEMENTATION
    assert not module.training


def test_the_default_dtype_stays() -> None:
    make_module(families.make_config("qwen2"), "bfloat16")

    assert torch.get_default_dtype() == torch.float32
