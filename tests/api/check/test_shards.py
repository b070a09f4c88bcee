"""The proof of a shard plan: it holds for what is built, and not for plans with a mistake in them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
from graph_text import parse_graph
from transformers import LlamaConfig

from precast.builder.build import build
from precast.builder.source.shrink import random_model, shrink
from precast.check.shards import PROMPTS, STEPS, proofs, prove, prove_with_random_weights, unsharded
from precast.ir.artifact import Bundle
from precast.ir.errors import RequestError
from precast.ir.graph.schema import Graph, Pipeline
from precast.ir.graph.stages import stage_graph
from precast.ir.graph.text import format_graph
from precast.ir.graph.world import unsharded as of_one_rank


class Model:
    """A small Llama with its checkpoint; `edited` is the same with another graph."""

    def __init__(self, folder: Path) -> None:
        self.weights = folder / "checkpoint"
        random_model(shrink(LlamaConfig())).save_pretrained(self.weights)
        self.bundle = build(self.weights, folder / "bundle", dtype="float32")

    def edited(self, pattern: str, change: str) -> Bundle:
        text, count = re.subn(pattern, change, format_graph(self.bundle.graph))
        assert count
        return msgspec.structs.replace(self.bundle, graph=parse_graph(text))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(tmp_path_factory.mktemp("sharded"))


def test_all_tokens_of_the_prompts_are_computed() -> None:
    assert [sum(column) for column in zip(*STEPS, strict=True)] == [len(prompt) for prompt in PROMPTS]


def test_every_world_gives_the_unsharded_logits(model: Model) -> None:
    found = list(proofs(model.bundle, model.weights, most=4))

    assert [(each.tp, each.ep, each.pp) for each in found] == [(2, 1, 1), (4, 1, 1), (1, 1, 2), (1, 1, 3)]
    assert all(each.holds for each in found)
    assert all(len(each.rank_bytes) == each.tp * each.pp for each in found)


def test_a_small_vocabulary(tmp_path: Path) -> None:
    config = shrink(LlamaConfig())
    config.vocab_size = 96
    bundle = build(config, tmp_path / "bundle", dtype="float32")

    assert prove_with_random_weights(bundle, tp=2).proof.holds


def test_ranks_need_their_share(model: Model) -> None:
    found = prove(model.bundle, model.weights, tp=4)

    norms = 7 * 64 * 4
    assert found.rank_bytes[:3] == (((found.model_bytes - norms) // 4 + norms + 128),) * 3  # 131 rows are 33 on a rank


def test_stages_compute_the_bits_of_one_rank_and_need_their_layers(model: Model) -> None:
    found = prove(model.bundle, model.weights, tp=1, pp=3)

    assert found.error == 0
    assert sum(found.rank_bytes) == found.model_bytes


def test_stages_of_several_ranks(model: Model) -> None:
    found = prove(model.bundle, model.weights, tp=2, pp=2)

    assert found.text == "2 stages of 2 ranks"
    assert found.holds
    assert all(each < found.model_bytes / 2 for each in found.rank_bytes)


def test_a_stage_that_has_another_layer_is_seen(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    def one_late(graph: Graph, layers: Sequence[int], stage: int) -> Graph:
        return stage_graph(graph, (2, 1) if stage == 0 else layers, stage)

    alone = unsharded(model.bundle, model.weights)
    monkeypatch.setattr("precast.ir.graph.stages.stage_graph", one_late)
    plan = msgspec.structs.replace(model.bundle.graph.shards, pipelines=(Pipeline((1, 2)),))
    bundle = msgspec.structs.replace(model.bundle, graph=msgspec.structs.replace(model.bundle.graph, shards=plan))

    found = prove(bundle, model.weights, tp=1, pp=2, alone=alone)

    assert not found.holds


def test_one_rank_computes_what_the_model_without_a_world_does(model: Model) -> None:
    plain = msgspec.structs.replace(model.bundle, graph=of_one_rank(model.bundle.graph))

    found, expected = unsharded(model.bundle, model.weights), unsharded(plain, model.weights)

    assert found.num_bytes == expected.num_bytes
    assert all((a == b).all() for a, b in zip(found.logits, expected.logits, strict=True))


WRONG = {
    "a slice of another rank": (r"(down_proj.*)start=floordiv\(\(176 \* rank\), tp\)", r"\1start=0"),
    "a slice of another tensor's rows": (
        r'(read\("model.layers.1.self_attn.k_proj[^)]*\), dim=0, start=)\(16 \* floordiv\(\(4 \* rank\), tp\)\)',
        r"\g<1>(16 * (ceildiv(4, tp) * (tp + (-1 * rank) + -1)))",
    ),
    "a part that nobody adds": (
        r"%linear_3_sum: (.*) = precast.all_reduce@1\(x=%linear_3, .*",
        r"%linear_3_sum: \1 = aten.mul.Tensor@1(self=%linear_3, other=2)",
    ),
    "a sum that is added twice": (
        r"  (%linear_1_sum): (.*) = precast.all_reduce@1\(x=(.*), group=(.*)\)",
        r"  %once: \2 = precast.all_reduce@1(x=\3, group=\4)"
        "\n"
        r"  \1: \2 = precast.all_reduce@1(x=%once, group=\4)",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_plan_is_seen(model: Model, case: str) -> None:
    found = prove(model.edited(*WRONG[case]), model.weights, tp=2, alone=unsharded(model.bundle, model.weights))

    assert not found.holds
    assert found.error > 0.01


def test_a_number_of_stages_that_the_bundle_excludes(model: Model) -> None:
    with pytest.raises(RequestError, match="pp is 4, and the graph calls 3 layers"):
        prove(model.bundle, model.weights, tp=1, pp=4)


def test_a_world_that_the_bundle_excludes(model: Model) -> None:
    with pytest.raises(RequestError, match="tp is 8, and the bundle can be split over 1, 2, 4 ranks"):
        prove(model.bundle, model.weights, tp=8)
