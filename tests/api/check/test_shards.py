"""The proof of a shard plan, on a small Llama that is sharded by hand: in its text, line by line."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest
from graph_text import parse_graph
from transformers import LlamaConfig

from precast.builder.build import build
from precast.builder.source.shrink import random_model, shrink
from precast.check.shards import prove
from precast.ir.artifact import Bundle
from precast.ir.errors import RequestError
from precast.ir.graph.text import format_graph
from precast.ir.verify import verifier

HEADS, HEAD, HIDDEN, INNER = 4, 16, 64, 176
QUERY = HEADS * HEAD


class Sharded:
    """A bundle with its checkpoint; `graph_with` changes its text."""

    def __init__(self, folder: Path) -> None:
        self.weights = folder / "checkpoint"
        random_model(shrink(LlamaConfig())).save_pretrained(self.weights)
        self.plain = build(self.weights, folder / "bundle", dtype="float32")
        self.text = sharded(format_graph(self.plain.graph))

    def with_text(self, text: str) -> Bundle:
        graph = parse_graph(text)
        verifier.check(graph)
        return msgspec.structs.replace(self.plain, graph=graph)


def sharded(text: str) -> str:
    """Heads and the inner width of MLPs are split over `tp`; embedding, norms and head are on every rank."""
    part = {HEADS: f"floordiv({HEADS}, tp)", INNER: f"floordiv({INNER}, tp)"}
    part[QUERY] = f"({HEAD} * {part[HEADS]})"
    rules = (
        # recipes: rows of what is concatenated, columns of what is added up
        (r"(cast\(read\([^()]*\.(?:q|k|v)_proj\.weight[^()]*\), float32\))", sliced(0, part[QUERY])),
        (r"(cast\(read\([^()]*\.(?:gate|up)_proj\.weight[^()]*\), float32\))", sliced(0, part[INNER])),
        (r"(cast\(read\([^()]*\.o_proj\.weight[^()]*\), float32\))", sliced(1, part[QUERY])),
        (r"(cast\(read\([^()]*\.down_proj\.weight[^()]*\), float32\))", sliced(1, part[INNER])),
        # the types of params, values and caches
        (rf"\[{3 * QUERY}, {HIDDEN}\]", f"[({3 * HEAD} * {part[HEADS]}), {HIDDEN}]"),
        (rf"\[{2 * INNER}, {HIDDEN}\]", f"[(2 * {part[INNER]}), {HIDDEN}]"),
        (rf"(o_proj.weight|param2): float32\[{HIDDEN}, {QUERY}\]", rf"\1: float32[{HIDDEN}, {part[QUERY]}]"),
        (rf"(down_proj.weight|param5): float32\[{HIDDEN}, {INNER}\]", rf"\1: float32[{HIDDEN}, {part[INNER]}]"),
        (rf"\[1, T, {3 * QUERY}\]", f"[1, T, ({3 * HEAD} * {part[HEADS]})]"),
        (rf"\[1, T, {INNER}\]", f"[1, T, {part[INNER]}]"),
        (rf"\[1, T, {HEADS}, {HEAD}\]", f"[1, T, {part[HEADS]}, {HEAD}]"),
        (rf"\[P_pool0, 16, {HEADS}, {HEAD}\]", f"[P_pool0, 16, {part[HEADS]}, {HEAD}]"),
        (rf"num_kv_heads={HEADS}", f"num_kv_heads={part[HEADS]}"),
        # the parts of the product, and the heads side by side
        (rf"(%slice_\d): float32\[1, T, {QUERY}\]", rf"\1: float32[1, T, {part[QUERY]}]"),
        (r"start=64, end=128", f"start={part[QUERY]}, end=({2 * HEAD} * {part[HEADS]})"),
        (r"start=0, end=64", f"start=0, end={part[QUERY]}"),
        (r"start=128, end=192", f"start=({2 * HEAD} * {part[HEADS]}), end=({3 * HEAD} * {part[HEADS]})"),
        (
            rf"(%reshape_3): float32\[1, T, {QUERY}\](.*)shape=\[1, T, {QUERY}\]",
            rf"\1: float32[1, T, {part[QUERY]}]\2shape=[1, T, {part[QUERY]}]",
        ),
        # what each rank adds up in part
        (
            r"  (%linear_[13]): (float32\[1, T, 64\]) = (aten.linear.*)",
            r"  \1_part: \2 = \3\n  \1: \2 = precast.all_reduce@1(x=\1_part, group='tp')".replace("'", '"'),
        ),
        (r"  R: 0\.\.\n", "  R: 0..\n  rank: 0..3\n  tp: 1..4\n"),
    )
    for pattern, changed in rules:
        text, count = re.subn(pattern, changed, text)
        assert count, pattern
    return text


def sliced(dim: int, part: str) -> str:
    return rf"slice(\1, dim={dim}, start=(rank * {part}), length={part})"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Sharded:
    return Sharded(tmp_path_factory.mktemp("sharded"))


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_ranks_give_the_unsharded_logits(model: Sharded, tp: int) -> None:
    found = prove(model.with_text(model.text), model.weights, tp=tp)

    assert found.holds
    assert len(found.rank_bytes) == tp


def test_a_rank_needs_its_share(model: Sharded) -> None:
    found = prove(model.with_text(model.text), model.weights, tp=4)

    layer = 4 * (4 * QUERY * HIDDEN + 3 * INNER * HIDDEN)
    on_every_rank = found.model_bytes - 3 * layer
    assert found.rank_bytes == (on_every_rank + 3 * layer // 4,) * 4


def test_one_rank_computes_what_the_model_without_a_world_does(model: Sharded) -> None:
    one = prove(model.with_text(model.text), model.weights, tp=1)
    plain = prove(model.plain, model.weights, tp=1)

    assert one.error == plain.error == 0
    assert one.model_bytes == plain.model_bytes


WRONG = {
    "a slice of another rank": (r"dim=1, start=\(rank \* floordiv\(176, tp\)\)", "dim=1, start=0"),
    "a part that nobody adds": (r"(.*)_part: (.*)\n.*all_reduce.*\n", r"\1: \2\n"),
    "a sum that is added twice": (r"  (%linear_3): (.*) = precast.all_reduce@1\(x=(.*), group=(.*)\)",
                                  r"  \1_once: \2 = precast.all_reduce@1(x=\3, group=\4)" "\n"
                                  r"  \1: \2 = precast.all_reduce@1(x=\1_once, group=\4)"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_plan_is_seen(model: Sharded, case: str) -> None:
    text, count = re.subn(*WRONG[case], model.text)
    assert count

    found = prove(model.with_text(text), model.weights, tp=2)

    assert not found.holds
    assert found.error > 0.01


def test_a_world_that_the_bundle_excludes(model: Sharded) -> None:
    with pytest.raises(RequestError, match="tp is 8, and the bundle allows 1 to 4"):
        prove(model.with_text(model.text), model.weights, tp=8)
