"""AutoRound's own configs, of what it packs as AutoGPTQ and AutoAWQ do."""

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
from precast.ir.errors import BuildError
from precast.ir.weights.recipes import leaves

WRITTEN = {
    "quant_method": "auto-round", "packing_format": "auto_round:auto_gptq", "bits": 4, "group_size": 32, "sym": True,
    "data_type": "int", "block_name_to_quantize": "model.layers", "autoround_version": "0.16.1",
    "enable_quanted_input": False,
}  # fmt: skip
"""As AutoRound 0.16 writes it."""


def packed(packing: str, stem: str, tensor: torch.Tensor, size: int, bits: int = 4) -> Stored:
    if packing.endswith("awq"):
        return quantised.awq(stem, tensor, size)
    stored, dense = quantised.gptq(stem, tensor, size, order=False, bits=bits)
    return {name: each for name, each in stored.items() if not name.endswith("g_idx")}, dense


@pytest.mark.parametrize("group_size", [32, -1])
@pytest.mark.parametrize(
    "packing", ["auto_round:auto_gptq", "auto_round:gptq", "auto_round:auto_awq", "auto_round:awq"]
)
@pytest.mark.parametrize("model_type", ["llama", "qwen3_moe"])
def test_packings(model_type: str, packing: str, group_size: int, tmp_path: Path) -> None:
    """Routers are left out by a pattern, and another layer by its name."""
    router = {".*model\\.layers\\.[01]\\.mlp\\.gate$": {"bits": 16, "data_type": "float"}}
    extra = router | {"model.layers.1.self_attn.o_proj": {"bits": 16}}
    entries = WRITTEN | {"packing_format": packing, "group_size": group_size, "extra_config": extra}

    def quantise(name: str, tensor: torch.Tensor) -> Stored | None:
        if not linear(name) or "1.self_attn.o_proj" in name:
            return None
        size = tensor.shape[-1] if group_size == -1 else group_size
        return packed(packing, name.removesuffix(".weight"), tensor, size)

    check(config_of(model_type, num_experts=4, moe_intermediate_size=32), entries, quantise, tmp_path)


def test_layers_that_differ(tmp_path: Path) -> None:
    """What is said under a layer's name counts before what is said by a pattern, and of patterns the first."""
    extra = {
        ".*_proj.*": {"bits": 8, "group_size": 16}, ".*up_proj.*": {"bits": 16}, "model.layers.0.mlp.up_proj": {},
        "model.layers.0.mlp.down_proj": {"group_size": 8, "sym": False},
        "model.layers.1.self_attn.q_proj": {"bits": 16},
    }  # fmt: skip

    def quantise(name: str, tensor: torch.Tensor) -> Stored | None:
        if not linear(name) or "1.self_attn.q_proj" in name:
            return None
        own = {"0.mlp.up_proj": (32, 4), "0.mlp.down_proj": (8, 4)}
        said = next((each for part, each in own.items() if part in name), (16, 8))
        return packed("auto_round:auto_gptq", name.removesuffix(".weight"), tensor, *said)

    check(config_of("llama"), WRITTEN | {"extra_config": extra}, quantise, tmp_path)


@pytest.mark.parametrize("key", ["model.layers.0.mlp", "0.mlp", ".*0\\.mlp.*", r"layers\.[0]\.mlp\.(up|gate|down)"])
def test_patterns_are_found_anywhere_in_a_name(key: str, tmp_path: Path) -> None:
    """Also what is the name of a part of the model that is no layer."""

    def quantise(name: str, tensor: torch.Tensor) -> Stored | None:
        if not linear(name) or "0.mlp" in name:
            return None
        return packed("auto_round:auto_gptq", name.removesuffix(".weight"), tensor, 32)

    check(config_of("llama"), WRITTEN | {"extra_config": {key: {"bits": 16}}}, quantise, tmp_path)


@pytest.mark.parametrize("blocks", ["model.layers.1,model.other", ["model.layers.1"]])
def test_blocks_that_are_quantised(blocks: Any, tmp_path: Path) -> None:
    def quantise(name: str, tensor: torch.Tensor) -> Stored | None:
        inside = linear(name) and "layers.1." in name
        return packed("auto_round:auto_gptq", name.removesuffix(".weight"), tensor, 32) if inside else None

    check(config_of("llama"), WRITTEN | {"block_name_to_quantize": blocks}, quantise, tmp_path)


def test_what_is_named_is_quantised_outside_of_the_blocks_too(tmp_path: Path) -> None:
    own = "model.layers.0.mlp.up_proj"

    def quantise(name: str, tensor: torch.Tensor) -> Stored | None:
        inside = linear(name) and ("layers.1." in name or name.startswith(own))
        size = 16 if name.startswith(own) else 32
        return packed("auto_round:auto_gptq", name.removesuffix(".weight"), tensor, size) if inside else None

    extra = {"extra_config": {own: {"group_size": 16}, ".*gate_proj": {"group_size": 32}}}
    check(config_of("llama"), WRITTEN | extra | {"block_name_to_quantize": "model.layers.1"}, quantise, tmp_path)


def recipes_of(entries: dict[str, Any]) -> dict[str, Any]:
    with torch.device("meta"):
        meta = AutoModelForCausalLM.from_config(config_of("llama"))
    return dict(ModelCheckpoint(meta, entries).recipes(meta.state_dict()))


@pytest.mark.parametrize(
    "entries",
    [
        {"lr": 0.01, "minmax_lr": None, "amp": True, "gradient_accumulate_steps": 2, "enable_minmax_tuning": False},
        {"act_bits": 16, "act_data_type": "float", "act_sym": True, "act_group_size": 128, "act_dynamic": True},
        {"model_free": True, "supported_types": ["Linear"], "quant_lm_head": False, "regex_config": {}},
        {"scale_dtype": "torch.float16", "modules_in_block_to_quantize": None},
    ],
)
def test_what_says_nothing_of_tensors(entries: dict[str, Any]) -> None:
    assert recipes_of(WRITTEN | entries) == recipes_of(WRITTEN)


def test_all_layers_where_no_blocks_are_named() -> None:
    found = recipes_of({name: value for name, value in WRITTEN.items() if name != "block_name_to_quantize"})

    assert found == recipes_of(WRITTEN)
    assert any(read.tensor.endswith("q_proj.qweight") for recipe in found.values() for read in leaves(recipe))


@pytest.mark.parametrize(
    ("entries", "told"),
    [
        ({"packing_format": "auto_round"}, "packing_format = 'auto_round'"),
        ({"packing_format": "auto_round:fp8_static"}, "packing_format"),
        ({"packing_format": None}, "packing_format"),
        ({"bits": 3}, "bits = 3"),
        ({"group_size": 0}, "group_size = 0"),
        ({"group_size": 48}, "groups of 48"),
        ({"data_type": "mx_fp"}, "data_type = 'mx_fp'"),
        ({"act_bits": 8}, "act_bits = 8"),
        ({"extra_config": {"model.layers.0.mlp.up_proj": {"bits": 2}}}, "extra_config"),
        ({"extra_config": {"model.layers.0.mlp.up_proj": {"act_bits": 8}}}, "extra_config"),
        ({"extra_config": {"model.layers.0.mlp.up_proj": {"tool": 8}}}, "extra_config"),
        ({"extra_config": {"(": {"bits": 16}}}, "no regular expression"),
        ({"extra_config": {"lm_head": {"bits": 4}}}, "lm_head"),
        ({"extra_config": {"lm_head": {"group_size": 16}}}, "lm_head"),
        ({"modules_in_block_to_quantize": ["self_attn.q_proj"]}, "modules_in_block_to_quantize"),
        ({"quant_lm_head": True}, "quant_lm_head"),
        ({"packing_format": "auto_round:auto_awq", "bits": 8}, "8 bits in auto_round:auto_awq"),
        ({"rotation_config": {"hadamard_type": "random"}}, "rotation_config"),
    ],
)
def test_what_is_refused(entries: dict[str, Any], told: str) -> None:
    with pytest.raises(BuildError, match=told) as error:
        recipes_of(WRITTEN | entries)

    assert error.value.code == "feature-unsupported"
