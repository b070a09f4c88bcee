"""AWQ and GPTQ."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import quantised
import torch
from quantised import Stored
from stored_weights import check, config_of, linear
from transformers import AutoModelForCausalLM

from precast.builder.weights.recipes import ModelCheckpoint
from precast.ir.weights.recipes import leaves

BY_AUTOAWQ = {"zero_point": True, "version": "gemm"}
BY_GPTQMODEL = {
    "zero_point": True, "method": "awq", "format": "gemm", "checkpoint_format": "gemm", "pack_dtype": "int32",
    "lm_head": False, "sym": False, "desc_act": False, "meta": {"quantizer": ["gptqmodel:7.7.0"]},
}  # fmt: skip


@pytest.mark.parametrize("said", [BY_AUTOAWQ, BY_GPTQMODEL], ids=["AutoAWQ", "GPTQModel"])
@pytest.mark.parametrize("group_size", [32, -1])
@pytest.mark.parametrize("model_type", ["qwen2", "qwen3_moe"])
def test_awq(model_type: str, group_size: int, said: dict[str, Any], tmp_path: Path) -> None:
    entries = {"quant_method": "awq", "bits": 4, "group_size": group_size, **said}

    def quantise(name: str, tensor: torch.Tensor) -> Stored | None:
        size = tensor.shape[-1] if group_size == -1 else group_size
        return quantised.awq(name.removesuffix(".weight"), tensor, size) if linear(name) else None

    check(config_of(model_type, num_experts=4, moe_intermediate_size=32), entries, quantise, tmp_path)


@pytest.mark.parametrize(
    "said",
    [{"version": "gemv"}, {"version": "GEMV", "checkpoint_format": "gemv"}, {"format": "gemv", "method": "awq"}],
    ids=["AutoAWQ", "its enumeration's", "GPTQModel"],
)
@pytest.mark.parametrize(("group_size", "inputs"), [(32, 1088), (64, 192), (128, 1152), (-1, 64)])
def test_awq_of_gemv(group_size: int, inputs: int, said: dict[str, Any], tmp_path: Path) -> None:
    """Of 34 groups a row of zeros has 8 words, of 3 groups of 64 it has 2, and of 9 of 128 also 2."""
    entries = {"quant_method": "awq", "bits": 4, "group_size": group_size, "zero_point": True, **said}

    def quantise(name: str, tensor: torch.Tensor) -> Stored | None:
        if not linear(name) or "down_proj" not in name:
            return None
        return quantised.awq_gemv(name.removesuffix(".weight"), tensor, inputs if group_size == -1 else group_size)

    others = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj"]
    check(
        config_of("llama", intermediate_size=inputs), entries | {"modules_to_not_convert": others}, quantise, tmp_path
    )


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3_moe"])
def test_awq_of_gemv_in_all_layers(model_type: str, tmp_path: Path) -> None:
    entries = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemv"}

    def quantise(name: str, tensor: torch.Tensor) -> Stored | None:
        return quantised.awq_gemv(name.removesuffix(".weight"), tensor, 32) if linear(name) else None

    check(config_of(model_type, num_experts=4, moe_intermediate_size=32), entries, quantise, tmp_path)


def test_awq_in_its_own_spelling(tmp_path: Path) -> None:
    entries = {"quant_method": "awq", "w_bit": 4, "q_group_size": 16, **BY_AUTOAWQ}

    def quantise(name: str, tensor: torch.Tensor) -> Stored | None:
        return quantised.awq(name.removesuffix(".weight"), tensor, 16) if linear(name) else None

    check(config_of("qwen2"), entries, quantise, tmp_path)


@pytest.mark.parametrize("order", [False, True], ids=["in order", "by activation"])
@pytest.mark.parametrize(("format", "offset"), [("gptq", 1), ("gptq_v2", 0)])
@pytest.mark.parametrize("bits", [4, 8])
def test_gptq(bits: int, order: bool, format: str, offset: int, tmp_path: Path) -> None:
    entries = {
        "quant_method": "gptq", "bits": bits, "group_size": 48, "desc_act": order, "sym": False,
        "checkpoint_format": format, "damp_percent": 0.01, "dynamic": {"-:.*o_proj": {}},
    }  # fmt: skip

    def quantise(name: str, tensor: torch.Tensor) -> Stored | None:
        if not linear(name) or "o_proj" in name:
            return None
        return quantised.gptq(name.removesuffix(".weight"), tensor, 48, order=order, offset=offset, bits=bits)

    check(config_of("llama", attention_bias=True), entries, quantise, tmp_path)


def test_the_format_of_gptq_by_its_other_name(tmp_path: Path) -> None:
    entries = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "format": "gptq_v2"}

    def quantise(name: str, tensor: torch.Tensor) -> Stored | None:
        stem = name.removesuffix(".weight")
        return quantised.gptq(stem, tensor, 32, order=False, offset=0) if linear(name) else None

    check(config_of("llama"), entries, quantise, tmp_path)


@pytest.mark.parametrize("order", [False, True], ids=["in order", "by activation"])
def test_gptq_whose_layers_differ(order: bool, tmp_path: Path) -> None:
    """GPTQModel's overrides: of patterns that a layer fits, the first counts."""
    entries = {
        "quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": order, "sym": False,
        "dynamic": {
            "-:.*0\\.self_attn": {}, "+:.*v_proj": {"bits": 8, "mse": 2.4}, ".*down_proj": {"group_size": 16},
            ".*up_proj": {"desc_act": True}, ".*self_attn": {"bits": 8, "group_size": 8},
        },
    }  # fmt: skip

    def quantise(name: str, tensor: torch.Tensor) -> Stored | None:
        if not linear(name) or "0.self_attn" in name:
            return None
        bits = 8 if "self_attn" in name else 4
        size = 32 if "v_proj" in name else 16 if "down_proj" in name else 8 if "self_attn" in name else 32
        own = order or "up_proj" in name
        return quantised.gptq(name.removesuffix(".weight"), tensor, size, order=own, bits=bits)

    check(config_of("llama"), entries, quantise, tmp_path)


@pytest.mark.parametrize(
    ("entries", "sizes"),
    [
        ({"desc_act": False, "group_size": 32}, {"*.g_idx": 32}),
        ({"desc_act": False, "group_size": -1}, {"*.g_idx": 0}),
        ({"desc_act": True, "group_size": 32}, {}),
        ({"desc_act": None, "group_size": 32}, {}),
        ({"group_size": 32}, {}),
        ({"bits": 8, "desc_act": False, "group_size": 32}, {"*.g_idx": 32}),
        ({"bits": 8, "desc_act": True, "group_size": 32}, {}),
    ],
)
def test_groups_of_gptq_are_read_unless_the_config_says_that_they_are_in_order(
    entries: dict[str, Any], sizes: dict[str, int]
) -> None:
    with torch.device("meta"):
        meta = AutoModelForCausalLM.from_config(config_of("llama"))
    name = "model.layers.0.mlp.down_proj.weight"

    checkpoint = ModelCheckpoint(meta, {"quant_method": "gptq", "bits": 4} | entries)

    read = {leaf.tensor.rpartition(".")[2] for leaf in leaves(checkpoint.recipes([name])[name])}
    rules = checkpoint.known_names()
    assert read == {"qweight", "scales", "qzeros"} | (set() if sizes else {"g_idx"})
    assert rules.groups_in_order == sizes
    assert ("*.g_idx" in rules.ignored) == bool(sizes)


def test_biases_that_autogptq_stores_must_be_zeros() -> None:
    with torch.device("meta"):
        meta = AutoModelForCausalLM.from_config(config_of("qwen2"))

    rules = ModelCheckpoint(meta, {"quant_method": "gptq", "bits": 4}).known_names()

    assert rules.zeros["model.layers.*.self_attn.o_proj.bias"] == 64
    assert "model.layers.*.self_attn.q_proj.bias" not in rules.zeros
    assert rules.zeros.keys() <= set(rules.ignored)


def test_gptq_of_some_modules(tmp_path: Path) -> None:
    kept = [["self_attn.q_proj", "self_attn.k_proj"], ["mlp.down_proj"]]
    entries = {"quant_method": "gptq", "bits": 4, "group_size": 32, "modules_in_block_to_quantize": kept}

    def quantise(name: str, tensor: torch.Tensor) -> Stored | None:
        chosen = name.endswith(("q_proj.weight", "k_proj.weight", "down_proj.weight"))
        return quantised.gptq(name.removesuffix(".weight"), tensor, 32, order=False) if chosen else None

    check(config_of("llama"), entries, quantise, tmp_path)
