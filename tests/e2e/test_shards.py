"""One type of each kind of layer over several ranks: the ranks' logits are those of the model on one.

`make models ONLY=--shards` covers all types; here each way to split is tried once.
"""

from __future__ import annotations

import json
from pathlib import Path

import families
import pytest
import torch
from safetensors.torch import load_file, save_file

import precast
from precast.check.shards import prove, unsharded
from precast.ir.graph import symbols
from precast.ir.graph.data_parallel import refusal
from precast.ir.graph.infer import references
from precast.ir.graph.schema import Block, Graph, Node
from precast.ir.memory import caches

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
    "deepseek_v4": [(1, 1), (2, 1), (2, 2)],
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


def test_heads_over_entries_are_divided_by_groups_of_the_output_and_their_selection_is_whole(tmp_path: Path) -> None:
    """8 heads, whose results are projected in 4 groups; index and entries are of all heads."""
    families.make_model("deepseek_v4-more-groups").save_pretrained(tmp_path / "ckpt")

    bundle = precast.build(tmp_path / "ckpt", tmp_path / "b", dtype="float32")

    graph = bundle.graph
    assert worlds_of(graph) == [(1, 1), (2, 1), (2, 2), (4, 1), (4, 2)]
    assert {row.units for row in graph.shards.rows if row.kind == "entry attention"} == {4}
    assert not any(
        "tp" in symbols.free_symbols(size) for name in caches.tensors(graph.caches) for size in name.type.shape
    )
    (block,) = (
        block for block in graph.blocks if any(node.op == "precast.paged_select_entries" for node in block.nodes)
    )
    (select,) = (node for node in block.nodes if node.op == "precast.paged_select_entries")
    assert not sums_before(block, select)
    alone = unsharded(bundle, tmp_path / "ckpt")
    for tp, dp in ((2, 1), (4, 1), (4, 4)):
        assert prove(bundle, tmp_path / "ckpt", tp=tp, dp=dp, alone=alone).holds


def sums_before(block: Block, node: Node) -> list[str]:
    """The sums over ranks that the node's arguments depend on, within the block."""
    makers = {value.name: step for step in block.nodes for value in step.outputs}
    waiting, found = [node], set()
    while waiting:
        for name in references(waiting.pop().args):
            if name in makers and name not in found:
                found.add(name)
                waiting.append(makers[name])
    return [name for name in sorted(found) if makers[name].op == "precast.all_reduce"]


def test_a_plan_file_keeps_heads_over_entries_whole_and_leaves_more_worlds(tmp_path: Path) -> None:
    config, plan = families.make_config("deepseek_v4"), tmp_path / "plan.json"
    plan.write_text(json.dumps({"model.layers.*.self_attn.o_a_proj": "replicate"}))

    graph = precast.build(config, tmp_path / "b", dtype="float32", shard_plan=plan).graph

    assert max(world.tp for world in graph.shards.worlds) == 8
    assert all(row.kind != "entry attention" or row.mode == "replicated" for row in graph.shards.rows)


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
