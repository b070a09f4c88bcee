"""One type of each kind of layer over several ranks: the ranks' logits are those of the model on one.

`make models ONLY=--shards` covers all types; here each way to split is tried once.
"""

from __future__ import annotations

from pathlib import Path

import families
import pytest

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
    "qwen3_next": [(1, 1), (2, 1), (2, 2), (4, 1), (4, 2)],
    "nemotron_h": [(1, 1), (2, 1)],
    "lfm2": [(1, 1), (2, 1), (4, 1)],
    "mamba": [(1, 1), (2, 1), (3, 1), (4, 1), (6, 1), (8, 1)],
}


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
