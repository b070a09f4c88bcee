"""One type of each kind of layer over several ranks: the ranks' logits are those of the model on one.

`make models ONLY=--shards` covers all types; here each way to split is tried once.
"""

from __future__ import annotations

from pathlib import Path

import families
import pytest
import torch
from safetensors.torch import load_file, save_file

import precast
from precast.check.shards import prove, unsharded
from precast.ir.graph.data_parallel import refusal
from precast.ir.graph.schema import Graph

WORLDS = {
    # by variant: the worlds that it can be split over, of those of up to eight ranks
    "llama-tied-bias": [(1, 1), (2, 1), (4, 1)],
    "gemma-mqa": [(1, 1), (2, 1), (4, 1)],
    "gpt2": [(1, 1), (2, 1), (4, 1)],
    "gpt_neox": [(1, 1), (2, 1), (4, 1)],
    "gemma3": [(1, 1), (2, 1), (4, 1)],
    "olmo2": [(1, 1), (2, 1)],
    "mixtral-window-tied": [(1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (4, 4)],
    "gpt_oss": [(1, 1), (2, 1), (2, 2), (4, 1), (4, 2)],
    "qwen2_moe": [(1, 1), (2, 1), (2, 2), (4, 1), (4, 2)],
    "deepseek_v3": [(1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (4, 4)],
    "deepseek_v32": [(1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (4, 4)],
    "minimax_m3": [(1, 1), (2, 1), (2, 2), (4, 1), (4, 2)],
    "minimax_m3-blocks-of-one-key": [(1, 1), (2, 1), (4, 1)],
    "qwen3_next": [(1, 1), (2, 1), (2, 2), (4, 1), (4, 2)],
    "nemotron_h": [(1, 1), (2, 1)],
    "lfm2": [(1, 1), (2, 1), (4, 1)],
    "mamba": [(1, 1), (2, 1), (3, 1), (4, 1), (6, 1), (8, 1)],
}

EIGHT_BITS = 5e-3
"""Sums of ranks round otherwise, and a key that is nearly between two values of 8 bits may go to the other."""


@pytest.mark.parametrize("variant", WORLDS)
def test_ranks_together_give_the_logits_of_one(variant: str, tmp_path: Path) -> None:
    families.make_model(variant).save_pretrained(tmp_path / "ckpt")

    bundle = precast.build(tmp_path / "ckpt", tmp_path / "b", dtype="float32")

    worlds = worlds_of(bundle.graph)
    assert [world for world in worlds if world[0] <= 8] == WORLDS[variant]
    alone = unsharded(bundle, tmp_path / "ckpt")
    for tp, ep in (world for world in worlds if 1 < world[0] <= 4):
        assert prove(bundle, tmp_path / "ckpt", tp=tp, ep=ep, alone=alone).holds
        if refusal(bundle.graph, tp, tp) is None:
            assert prove(bundle, tmp_path / "ckpt", tp=tp, ep=ep, dp=tp, alone=alone).holds
        else:
            assert variant == "mamba"


def test_a_selection_is_whole_on_every_rank_and_handed_from_stage_to_stage(tmp_path: Path) -> None:
    """Layers 3 and 4 attend to what layer 2 selected, which stands at the end of the stage before theirs."""
    families.make_model("glm_moe_dsa").save_pretrained(tmp_path / "ckpt")

    bundle = precast.build(tmp_path / "ckpt", tmp_path / "b", dtype="float32")

    whole = [row for row in bundle.graph.shards.rows if row.reason.startswith("it selects keys for all heads")]
    assert sum(len(row.params) for row in whole) == 3 * 2  # of the blocks of layers 0 and 2
    assert [pipeline.layers for pipeline in bundle.graph.shards.pipelines if len(pipeline.layers) == 2] == [(3, 2)]
    assert prove(bundle, tmp_path / "ckpt", tp=1, pp=2).holds
    assert prove(bundle, tmp_path / "ckpt", tp=2, pp=2).holds


def test_ranks_with_keys_and_values_of_8_bits(tmp_path: Path) -> None:
    """Every rank has the scales of all heads: with those of others it would round its own otherwise."""
    model = families.make_model("llama-tied-bias")
    model.config.quantization_config = {"quant_method": "modelopt", "quant_algo": None, "kv_cache_quant_algo": "FP8"}
    model.save_pretrained(tmp_path / "ckpt")
    weights = tmp_path / "ckpt" / "model.safetensors"
    layers = range(model.config.num_hidden_layers)
    scales = {
        f"model.layers.{layer}.self_attn.{which}_proj.{which}_scale": torch.tensor(0.013 * (layer + 1))
        for layer in layers
        for which in "kv"
    }
    save_file(load_file(weights) | scales, weights)

    bundle = precast.build(tmp_path / "ckpt", tmp_path / "b", dtype="float32")

    kept = {param.name: param.type.shape for param in bundle.graph.params if param.name.endswith("_scale")}
    assert list(kept.values()) == [(1,)] * (2 * len(layers))
    for dp in (1, 2):
        assert prove(bundle, tmp_path / "ckpt", tp=2, dp=dp).error < EIGHT_BITS


def worlds_of(graph: Graph) -> list[tuple[int, int]]:
    return [(world.tp, ep) for world in graph.shards.worlds for ep in world.ep]


@pytest.mark.parametrize("variant", ["llama-tied-bias", "qwen2_moe", "gpt_oss", "gpt_neox"])
def test_one_rank_runs_the_graph_that_is_built_without_shards(variant: str, tmp_path: Path) -> None:
    config = families.make_config(variant)

    split = precast.build(config, tmp_path / "a", dtype="float32").graph
    whole = precast.build(config, tmp_path / "b", dtype="float32", disabled_passes=("shard",)).graph

    from precast.ir.graph.world import unsharded as on_one_rank

    assert split != whole
    assert on_one_rank(split) == whole
