"""ModelOpt's NVFP4, and its lists of layers."""

from __future__ import annotations

from pathlib import Path

import pytest
import quantised
import torch
from published_configs import MODELOPT
from quantised import Stored
from stored_weights import check, config_of, linear


@pytest.mark.parametrize("model_type", ["llama", "qwen3_moe"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_modelopts_nvfp4(model_type: str, dtype: str, tmp_path: Path) -> None:
    """Experts are stored one by one; scales of activations and caches are passed over."""
    weights = {"num_bits": 4, "type": "float", "group_size": 16, "dynamic": False}
    entries = MODELOPT | {
        "quant_algo": "NVFP4", "group_size": 16,
        "config_groups": {"group_0": {"weights": weights, "targets": ["Linear"]}},
    }  # fmt: skip

    def quantise(name: str, tensor: torch.Tensor) -> Stored | None:
        if not linear(name) or "layers.0.mlp" in name:
            return None
        stored, dense = quantised.nvfp4(name, tensor)
        scale = {name.replace("weight", "k_scale"): torch.ones(())} if "k_proj" in name else {}
        return stored | scale, dense

    config = config_of(model_type, num_experts=4, moe_intermediate_size=32)
    check(config, entries, quantise, tmp_path, dtype=dtype)


def test_modelopts_mixed_precision(tmp_path: Path) -> None:
    """A list says the format of each layer, or of all experts of one; what it doesn't name is kept."""
    names = [f"model.layers.{i}" for i in range(2)]
    layers = {f"{name}.self_attn.q_proj": {"quant_algo": "FP8"} for name in names}
    layers |= {f"{name}.mlp.experts": {"quant_algo": "W4A16_NVFP4", "group_size": 16} for name in names}
    entries = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}

    def quantise(name: str, tensor: torch.Tensor) -> Stored | None:
        if "experts" in name:
            return quantised.nvfp4(name, tensor)
        return quantised.float8(name, tensor, None, "_scale", ()) if "q_proj" in name else None

    check(config_of("qwen3_moe", num_experts=4, moe_intermediate_size=32), entries, quantise, tmp_path)
