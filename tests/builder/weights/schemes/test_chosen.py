"""Which weights are quantised, by the names that configs have for layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import quantised
import torch
from published_configs import groups
from quantised import Stored
from stored_weights import blocks, check, config_of, linear
from transformers import AutoConfig
from transformers.quantizers.quantizers_utils import should_convert_module

from precast.builder.capture.factory import make_module
from precast.builder.source.shrink import shrink
from precast.builder.weights.recipes import ModelCheckpoint
from precast.builder.weights.schemes.chosen import kept_by
from precast.ir.weights.recipes import leaves


def test_modules_that_are_left_as_they_are(tmp_path: Path) -> None:
    """By the names of the checkpoint, which transformers renames: Mixtral's `block_sparse_moe`."""
    config = config_of("mixtral", num_local_experts=4)
    skipped = ["lm_head", "model.layers.0.block_sparse_moe", "model.layers.1.self_attn.q_proj"]
    entries = {"quant_method": "fp8", "weight_block_size": [32, 32], "modules_to_not_convert": skipped}

    def quantise(name: str, tensor: torch.Tensor) -> Stored | None:
        experts = name.startswith("model.layers.1.block_sparse_moe.experts")
        projections = "self_attn" in name and not name.startswith("model.layers.1.self_attn.q_proj")
        return (
            quantised.float8(name, tensor, (32, 32), "_scale_inv", blocks(tensor)) if experts or projections else None
        )

    check(config, entries, quantise, tmp_path)


NAMES = (
    "lm_head", "model.layers.1.mlp", "model.layers.11.mlp", "model.layers.1.mlp.gate", "model.layers.1.mlp.gate_proj",
    "model.decoder.layers.23.fc1", "layer", "layer.1.attn", "mlp.gate", "", "xlm_head",
)  # fmt: skip


PATTERNS = (
    "lm_head", "model.layers.1", "model.layers.*", r"model\.layers\.\d+\.mlp.gate", "fc1", "layer.", "mlp.gate",
    "a|layer", "gate_proj", ".*gate", "", r"(?P<part>mlp|layer)\.", r".*(?P<part>gate)", r"(.)\w*\1",
)  # fmt: skip


def test_patterns_keep_what_transformers_keeps() -> None:
    lists = [[one] for one in PATTERNS] + [[one, other] for one in PATTERNS for other in PATTERNS] + [[*PATTERNS], []]
    for patterns in lists:
        is_kept = kept_by(patterns)
        expected = {name: not should_convert_module(name, patterns) for name in NAMES}
        assert {name: is_kept(name) for name in NAMES} == expected, patterns


def test_a_list_of_many_names_is_looked_up() -> None:
    patterns = [f"model.layers.{layer}.mlp.experts.{i}.up_proj" for layer in range(20) for i in range(1000)]

    is_kept = kept_by(patterns)

    assert all(map(is_kept, patterns))
    assert not any(is_kept(name.replace("up", "down")) for name in patterns)


def test_flags_hold_for_the_pattern_that_begins_with_them() -> None:
    is_kept = kept_by(["(?i)LM_(HEAD|TAIL)", "MLP", "(?s)layer", "(?:GATE)"])

    assert [name for name in NAMES if is_kept(name)] == ["lm_head", "layer", "layer.1.attn"]


def test_an_expert_that_is_left_as_it_is(tmp_path: Path) -> None:
    skipped = ["lm_head", "model.layers.0.mlp.experts.2.up_proj"]
    entries = {"quant_method": "fp8", "weight_block_size": [32, 32], "modules_to_not_convert": skipped}

    def quantise(name: str, tensor: torch.Tensor) -> Stored | None:
        chosen = linear(name) and name.removesuffix(".weight") not in skipped
        return quantised.float8(name, tensor, (32, 32), "_scale_inv", blocks(tensor)) if chosen else None

    check(config_of("qwen3_moe", num_experts=4, moe_intermediate_size=32), entries, quantise, tmp_path)


@pytest.mark.parametrize(
    "entries",
    [
        {
            "quant_method": "modelopt",
            "quant_algo": "NVFP4",
            "ignore": ["lm_head", "model.language_model.layers.0.mlp*"],
        },
        groups("pack-quantized", {"num_bits": 4, "type": "int", "strategy": "channel"})
        | {"ignore": ["lm_head", "model.language_model.layers.0.mlp.down_proj"]},
    ],
    ids=["ModelOpt", "compressed-tensors"],
)
def test_layers_by_the_names_of_a_multimodal_checkpoint(entries: dict[str, Any]) -> None:
    """Which the text model's checkpoint doesn't have, and which transformers reads as well."""
    meta = make_module(shrink(AutoConfig.for_model("qwen3_5_text")), "float32")
    names = [f"model.layers.{i}.mlp.down_proj.weight" for i in range(2)]

    made = ModelCheckpoint(meta, entries).recipes(names)

    read = [[leaf.tensor.rpartition("down_proj.")[2] for leaf in leaves(made[name])] for name in names]
    assert read[0] == ["weight"]
    assert len(read[1]) > 1
