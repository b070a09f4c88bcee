"""compressed-tensors: float8, NVFP4, MXFP4 and integers, in one group of layers or several."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import quantised
import torch
from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
from published_configs import compressed, groups, rotated
from quantised import Stored
from stored_weights import blocks, check, config_of, linear, projections
from transformers import AutoModelForCausalLM

from precast.builder.weights.recipes import ModelCheckpoint
from precast.ir.weights.recipes import leaves


@pytest.mark.parametrize("model_type", ["llama", "qwen3_moe"])
@pytest.mark.parametrize(
    ("entries", "block", "shape"),
    [
        (compressed("tensor"), None, lambda _: (1,)),
        (compressed("channel"), (1, 1 << 20), lambda tensor: (tensor.shape[0], 1)),
        (compressed("block", block_structure=[32, 32]), (32, 32), blocks),
        ({**compressed("tensor"), "transform_config": rotated("weight_output", "weight_input")}, None, lambda _: (1,)),
    ],
    ids=["tensor", "channel", "block", "rotated weights"],
)
def test_compressed_tensors(model_type: str, entries: dict[str, Any], block: Any, shape: Any, tmp_path: Path) -> None:
    """Names are those of the checkpoint, where each expert is a layer of its own."""

    def quantise(name: str, tensor: torch.Tensor) -> Stored | None:
        chosen = linear(name) and "down_proj" not in name
        return quantised.float8(name, tensor, block, "_scale", shape(tensor)) if chosen else None

    check(config_of(model_type, num_experts=4, moe_intermediate_size=32), entries, quantise, tmp_path)


@pytest.mark.parametrize("model_type", ["llama", "qwen3_moe"])
def test_compressed_nvfp4(model_type: str, tmp_path: Path) -> None:
    weights = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True}

    def stored(name: str, tensor: torch.Tensor) -> Stored:
        tensors, dense = quantised.nvfp4(name, tensor, divided=True)
        return tensors | {name.replace("weight", "input_global_scale"): torch.ones(1)}, dense

    config = config_of(model_type, num_experts=4, moe_intermediate_size=32)
    check(config, groups("nvfp4-pack-quantized", weights), projections(stored), tmp_path)


def test_compressed_mxfp4(tmp_path: Path) -> None:
    weights = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}

    check(config_of("llama"), groups("mxfp4-pack-quantized", weights), projections(quantised.packed_mxfp4), tmp_path)


@pytest.mark.parametrize("model_type", ["llama", "qwen3_moe"])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(
    ("size", "zeros", "order"),
    [(16, False, None), (32, True, "weight"), (32, False, "group"), (16, True, "group"), (None, False, None),
     (None, True, None)],
)  # fmt: skip
def test_packed_integers(
    model_type: str, bits: int, size: int | None, zeros: bool, order: str | None, tmp_path: Path
) -> None:
    """In groups, or of whole channels; with zero points, and in the order of activations, where `g_idx` is stored."""
    weights = {
        "num_bits": bits, "type": "int", "strategy": "group" if size else "channel", "group_size": size,
        "symmetric": not zeros, "actorder": order,
    }  # fmt: skip

    def stored(name: str, tensor: torch.Tensor) -> Stored:
        return quantised.integers(name, tensor, bits, size, zeros=zeros, order=order == "group", packed=True)

    config = config_of(model_type, num_experts=4, moe_intermediate_size=32)
    check(config, groups("pack-quantized", weights), projections(stored), tmp_path)


def test_packed_integers_with_scales_of_a_dtype_of_their_own(tmp_path: Path) -> None:
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 16, "scale_dtype": "torch.float32"}

    def stored(name: str, tensor: torch.Tensor) -> Stored:
        return quantised.integers(name, tensor, 4, 16, zeros=False, order=False, packed=True, scales=torch.float32)

    check(config_of("llama"), groups("pack-quantized", weights), projections(stored), tmp_path, dtype="bfloat16")


@pytest.mark.parametrize("size", [None, 16])
@pytest.mark.parametrize("zeros", [False, True])
def test_integers_of_eight_bits(size: int | None, zeros: bool, tmp_path: Path) -> None:
    weights = {
        "num_bits": 8, "type": "int", "strategy": "group" if size else "channel", "group_size": size,
        "symmetric": not zeros,
    }  # fmt: skip

    def stored(name: str, tensor: torch.Tensor) -> Stored:
        return quantised.integers(name, tensor, 8, size, zeros=zeros, order=False, packed=False)

    check(config_of("llama"), groups("int-quantized", weights), projections(stored), tmp_path)


DOWN, QUERY = "model.layers.0.mlp.down_proj", "model.layers.0.self_attn.q_proj"
TARGETS = {
    "a class first": [["Linear"], ["re:.*mlp.*", DOWN], ["re:.*self_attn.*"]],
    "a class last": [["re:.*self_attn.*"], ["re:.*mlp.*", DOWN], ["Linear"]],
    "a name after a pattern that fits it": [["re:.*proj"], [DOWN, QUERY], ["Linear"]],
    "patterns by alphabet": [["re:.*proj"], ["re:.*down_proj"], ["re:.*[qk]_proj"]],
    "a target of several groups": [["Linear", DOWN], ["Linear"], [DOWN]],
}  # of three groups


@pytest.mark.parametrize("case", TARGETS)
def test_a_layer_gets_the_group_that_the_library_gives_it(case: str) -> None:
    entries = groups("pack-quantized", {}) | {"config_groups": {}}
    for size, targets in zip((8, 16, 32), TARGETS[case], strict=True):
        weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": size, "symmetric": True}
        entries["config_groups"][f"group_{size}"] = {"targets": targets, "weights": weights}
    with torch.device("meta"):
        theirs, meta = (AutoModelForCausalLM.from_config(config_of("llama")) for _ in range(2))
    apply_quantization_config(theirs, QuantizationConfig.model_validate(entries))
    schemes = {name: getattr(each, "quantization_scheme", None) for name, each in theirs.named_modules()}
    expected = {name: scheme.weights.group_size for name, scheme in schemes.items() if scheme is not None}

    made = ModelCheckpoint(meta, entries).recipes([f"{name}.weight" for name in expected])

    read = {leaf.tensor: leaf.shape for recipe in made.values() for leaf in leaves(recipe)}
    inputs = {name: meta.get_submodule(name).in_features for name in expected}
    assert {name: inputs[name] // read[f"{name}.weight_scale"][1] for name in expected} == expected


def test_groups_of_different_formats(tmp_path: Path) -> None:
    four = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 16, "symmetric": True}
    eight = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
    entries = groups("mixed-precision", four, targets=["re:.*down_proj"])
    entries["config_groups"]["group_0"]["format"] = "pack-quantized"
    entries["config_groups"]["group_1"] = {"targets": ["Linear"], "weights": eight, "format": "float-quantized"}

    def stored(name: str, tensor: torch.Tensor) -> Stored:
        if "down_proj" in name:
            return quantised.integers(name, tensor, 4, 16, zeros=False, order=False, packed=True)
        return quantised.float8(name, tensor, (1, 1 << 20), "_scale", (tensor.shape[0], 1))

    check(config_of("llama"), entries, projections(stored), tmp_path)
