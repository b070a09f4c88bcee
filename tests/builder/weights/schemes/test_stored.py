"""What several methods store: MXFP8, and stacked experts one by one."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import quantised
import torch
from published_configs import EIGHT, MODELOPT, groups
from quantised import Stored
from stored_weights import check, config_of, gemma4, projections
from transformers import AutoModelForCausalLM

from precast.builder.weights.recipes import ModelCheckpoint
from precast.ir.errors import BuildError


@pytest.mark.parametrize("method", ["modelopt", "compressed-tensors"])
def test_stacked_experts_that_are_stored_one_by_one(method: str, tmp_path: Path) -> None:
    """Gemma 4's, which transformers stores stacked."""
    weights = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
    entries = {
        "modelopt": {
            "quant_method": method, "quant_algo": "NVFP4", "ignore": ["lm_head", "*.mlp.*", "*_attn*", "*.router*"],
        },
        "compressed-tensors": groups("nvfp4-pack-quantized", weights, targets=["re:.*experts.*"]),
    }  # fmt: skip

    def one(name: str, tensor: torch.Tensor) -> Stored:
        return quantised.nvfp4(name, tensor, divided=method == "compressed-tensors")

    def quantise(name: str, tensor: torch.Tensor) -> Stored | None:
        return quantised.one_by_one(name, tensor, one) if tensor.dim() == 3 and ".experts." in name else None

    check(gemma4(), entries[method], quantise, tmp_path)


def test_mxfp8_of_whole_groups_alone() -> None:
    config = config_of("llama", intermediate_size=48)
    with torch.device("meta"):
        meta = AutoModelForCausalLM.from_config(config)

    with pytest.raises(BuildError, match=r"groups of 32: .* so\n  .*down_proj\.weight has 48 inputs, which they"):
        ModelCheckpoint(meta, groups("mxfp8-quantized", EIGHT)).recipes(meta.state_dict())


@pytest.mark.parametrize("model_type", ["llama", "qwen3_moe"])
@pytest.mark.parametrize("method", ["compressed-tensors", "modelopt", "mxfp8"])
def test_mxfp8(method: str, model_type: str, tmp_path: Path) -> None:
    entries = {
        "compressed-tensors": groups("mxfp8-quantized", EIGHT),
        "modelopt": MODELOPT | {"quant_algo": "MXFP8", "exclude_modules": ["lm_head", "*.gate"]},
        "mxfp8": {"quant_method": "mxfp8", "ignored_layers": ["lm_head", "gate"], "activation_scheme": "dynamic"},
    }[method]
    suffix = "_scale_inv" if method == "mxfp8" else "_scale"
    config = config_of(model_type, num_experts=4, moe_intermediate_size=32)

    check(config, entries, projections(functools.partial(quantised.mxfp8, suffix=suffix)), tmp_path)
