"""From a config to a module on the meta device."""

from __future__ import annotations

import families
import pytest
import torch

from precast.builder.capture.factory import make_module
from precast.builder.capture.routing import IMPLEMENTATION


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_module_takes_no_memory(dtype: str) -> None:
    module = make_module(families.make_config("qwen2"), dtype)

    assert all(parameter.is_meta for parameter in module.parameters())
    assert {parameter.dtype for parameter in module.parameters()} == {getattr(torch, dtype)}
    assert module.config._attn_implementation == IMPLEMENTATION
    assert not module.training


@pytest.mark.parametrize(
    ("family", "dtype", "kept"),
    [("deepseek_v3", "bfloat16", "e_score_correction_bias"), ("deepseek_v3", "float16", "e_score_correction_bias"),
     ("gpt_oss", "float16", "norm"), ("gpt_oss", "bfloat16", None)],
)  # fmt: skip
def test_what_transformers_keeps_in_float32(family: str, dtype: str, kept: str | None) -> None:
    tensors = make_module(families.make_config(family), dtype).state_dict()

    in_float32 = {name for name, tensor in tensors.items() if tensor.dtype == torch.float32}
    assert in_float32 == {name for name in tensors if kept and kept in name}
    assert bool(in_float32) == bool(kept)
    assert all(tensor.is_meta for tensor in tensors.values())


def test_the_default_dtype_stays() -> None:
    make_module(families.make_config("qwen2"), "bfloat16")

    assert torch.get_default_dtype() == torch.float32
