"""Quark: FP8, MXFP8 and MXFP4, and what it says of keys and values."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import quantised
import torch
from published_configs import MX, quark
from quantised import Stored
from stored_weights import check, config_of, fp8, gemma4, linear, projections

from precast.builder.capture.factory import make_module
from precast.builder.source.quantised_options import kv_dtype_of
from precast.builder.weights.recipes import ModelCheckpoint
from precast.ir.errors import BuildError
from precast.ir.weights.recipes import leaves

quark_mxfp4 = functools.partial(quantised.packed_mxfp4, packed="")
"""As compressed-tensors packs it, under the weight's own name."""


@pytest.mark.parametrize("model_type", ["llama", "qwen3_moe"])
@pytest.mark.parametrize(("dtype", "stored"), [("fp8_e4m3", quantised.mxfp8), ("fp4", quark_mxfp4)])
def test_quark(dtype: str, stored: Callable[[str, torch.Tensor], Stored], model_type: str, tmp_path: Path) -> None:
    config = config_of(model_type, num_experts=4, moe_intermediate_size=32)

    check(config, quark(dtype, algo_config=[{"name": "awq"}]), projections(stored), tmp_path)


@pytest.mark.parametrize(
    ("qscheme", "ch_axis", "block", "shape"),
    [("per_tensor", None, None, lambda _: ()), ("per_channel", 0, (1, 1 << 20), lambda tensor: (tensor.shape[0],))],
)
@pytest.mark.parametrize("model_type", ["llama", "qwen3_moe"])
def test_quarks_fp8(qscheme: str, ch_axis: int | None, block: Any, shape: Any, model_type: str, tmp_path: Path) -> None:
    weight = {"dtype": "fp8_e4m3", "qscheme": qscheme, "ch_axis": ch_axis, "is_dynamic": False, "symmetric": True}
    entries = quark("fp8_e4m3", global_quant_config={"weight": weight, "input_tensors": weight})
    config = config_of(model_type, num_experts=4, moe_intermediate_size=32)

    check(config, entries, fp8("_scale", block, shape), tmp_path)


def test_layers_of_quark_by_the_first_pattern_that_fits(tmp_path: Path) -> None:
    """What is excluded stays as it is, whatever other patterns say; so does what has no weight's format."""
    eight = {"weight": MX | {"dtype": "fp8_e4m3"}}
    layers = {"*down_proj": eight, "*layers.1.mlp*": {"weight": None}, "*.mlp.*": eight}
    entries = quark("fp4", exclude=["lm_head", "*layers.0*down_proj"], layer_quant_config=layers)

    def stored(name: str, tensor: torch.Tensor) -> Stored:
        eights = name.endswith("1.mlp.down_proj.weight") or "layers.0.mlp" in name
        return quantised.mxfp8(name, tensor) if eights else quark_mxfp4(name, tensor)

    def quantise(name: str, tensor: torch.Tensor) -> Stored | None:
        kept = "layers.0.mlp.down_proj" in name or ("layers.1.mlp" in name and "down_proj" not in name)
        return stored(name, tensor) if linear(name) and not kept else None

    check(config_of("llama"), entries, quantise, tmp_path)


KV = {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_dynamic": False, "group_size": None, "symmetric": True}


@pytest.mark.parametrize(
    ("output", "expected"), [(None, (None, None)), (KV, ("float8_e4m3fn", None)), (KV | {"qscheme": "per_head"}, None)]
)
@pytest.mark.parametrize("in_layers", [True, False])
def test_what_quark_says_of_keys_and_values(output: Any, expected: Any, in_layers: bool) -> None:
    """Beside the layers that make them, whose weights it quantises as it does others; scales are the layers' own."""
    layer = quark("fp8_e4m3")["global_quant_config"] | {"output_tensors": output}
    layers = {"*k_proj": layer, "*v_proj": layer}
    kept = {"layer_quant_config": layers, "export": {"kv_cache_group": ["*k_proj", "*v_proj"]}}
    entries = quark("fp8_e4m3", **(kept if in_layers else {"kv_cache_quant_config": layers}))
    meta = make_module(config_of("llama"), "float32")

    dtype, note = kv_dtype_of(entries)

    assert (dtype, note) == (expected or (None, note))
    assert (note is not None and "per_head" in note and "keep the model's dtype" in note) == (expected is None)
    checkpoint = ModelCheckpoint(meta, entries)
    assert "model.layers.0.self_attn.k_proj.output_scale" in checkpoint.scales()["model.layers.0.self_attn"].k
    assert "model.layers.0.self_attn.k_proj.weight_scale" in {
        leaf.tensor for recipe in checkpoint.recipes(["model.layers.0.self_attn.k_proj.weight"]).values()
        for leaf in leaves(recipe)
    }  # fmt: skip


def test_stacked_experts_of_quark_are_refused() -> None:
    meta = make_module(gemma4(), "float32")

    with pytest.raises(BuildError, match=r"by quark, with stacked experts \(.*experts\.down_proj\)"):
        ModelCheckpoint(meta, quark("fp8_e4m3")).recipes(["model.layers.0.experts.down_proj"])
