"""What several methods store: MXFP8, and stacked experts one by one."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

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


FOUR = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
REST = ["lm_head", "re:.*self_attn.*", "re:.*router.*", r"re:.*mlp\..*"]
LISTED = [f"model.layers.1.experts.{i}.{part}_proj" for i in range(4) for part in ("gate", "up", "down")]


def mixed(names: list[str], **others: Any) -> dict[str, Any]:
    layers = {name: {"quant_algo": "NVFP4", "group_size": 16} for name in names}
    return {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers | others}


@pytest.mark.parametrize(
    "entries",
    [
        groups("nvfp4-pack-quantized", FOUR, targets=[r"re:.*layers\.1\..*experts\.\d+\.(gate|up|down)_proj$"]),
        groups("nvfp4-pack-quantized", FOUR, targets=LISTED),
        groups("nvfp4-pack-quantized", FOUR) | {"ignore": [*REST, r"re:.*layers\.0\..*experts\.\d+\..*"]},
        groups("nvfp4-pack-quantized", FOUR) | {"ignore": [*REST, "re:.*layers.0.experts$"]},
        mixed(LISTED),
        {
            "quant_method": "modelopt", "quant_algo": "NVFP4",
            "ignore": ["lm_head", "*.mlp.*", "*_attn*", "*.router*", "model.layers.0.experts.?.*"],
        },
    ],
    ids=["targets", "names", "ignore", "the stack's name", "ModelOpt's layers", "ModelOpt's ignore"],
)  # fmt: skip
def test_stacked_experts_by_the_names_of_single_ones(entries: dict[str, Any], tmp_path: Path) -> None:
    """All of a layer: the tensors that are stored have these names."""

    def one(name: str, tensor: torch.Tensor) -> Stored:
        return quantised.nvfp4(name, tensor, divided=entries["quant_method"] == "compressed-tensors")

    def quantise(name: str, tensor: torch.Tensor) -> Stored | None:
        chosen = tensor.dim() == 3 and ".layers.1.experts." in name
        return quantised.one_by_one(name, tensor, one) if chosen else None

    check(gemma4(), entries, quantise, tmp_path)


@pytest.mark.parametrize(
    ("entries", "told"),
    [
        (
            groups("nvfp4-pack-quantized", FOUR, targets=[r"re:.*experts\.[012]\.down_proj"]),
            r"1 of the 4 layers of model.layers.*.experts.down_proj, such as model.layers.*.experts.*.down_proj",
        ),
        (
            groups("nvfp4-pack-quantized", FOUR) | {"ignore": [*REST, r"re:.*layers\.0\.experts\.\d+\.up_proj"]},
            "4 of the 8 layers of model.layers.0.experts.gate_up_proj, such as model.layers.0.experts.0.up_proj, are "
            "not quantised as model.layers.0.experts.0.gate_proj is, expected all in one format, or none",
        ),
        (mixed(LISTED[1:]), "7 of the 8 layers of model.layers.1.experts.gate_up_proj, such as model.layers.1.experts"),
        (
            mixed(LISTED[:-1], **{LISTED[-1]: {"quant_algo": "FP8"}}),
            "1 of the 4 layers of model.layers.1.experts.down_proj, such as model.layers.1.experts.3.down_proj, are",
        ),
    ],
    ids=["some of the targets", "some ignored", "some of ModelOpt's layers", "other formats"],
)
def test_some_experts_of_a_stack(entries: dict[str, Any], told: str) -> None:
    with torch.device("meta"):
        meta = AutoModelForCausalLM.from_config(gemma4())

    with pytest.raises(BuildError) as error:
        ModelCheckpoint(meta, entries).recipes(meta.state_dict())

    assert error.value.code == "feature-unsupported"
    assert f"by {entries['quant_method']}, with experts of a stack that are quantised in" in error.value.message
    assert told in error.value.message


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
