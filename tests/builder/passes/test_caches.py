"""The cache plan, and logits for the rows that are wanted."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from fx_text import SmallGraph, compute, read_graph, write_graph

from precast.builder import pipeline
from precast.builder.graph.context import Options
from precast.builder.lower.lower import lower
from precast.builder.passes.cache.insert_caches import insert_caches
from precast.builder.passes.graph_pass import Pass
from precast.builder.passes.plan.gather_logits import gather_logits
from precast.builder.passes.plan.plan_pages import SMALL_SLAB_BYTES, choose_page_sizes, plan_pages, with_small_slabs
from precast.ir.graph.schema import (
    CachePlan,
    Group,
    PagedInputs,
    PagedSpec,
    Pool,
    Ref,
    Slot,
    StateGroup,
    StateSpec,
    Value,
)
from precast.ir.memory import caches

BATCH = """
input_ids: input(int64, 1, T)
cu_seqlens: input(int32, B1)
"""
ATTENTION = """
q{n} = aten.reshape({q}, [1, -1, 4, 6])
k{n} = aten.reshape({k}, [1, -1, {heads}, {size}])
y{n} = precast.attention(q{n}, k{n}, k{n}, None, cu_seqlens, scale=0.5{keywords})
"""


def attention(n: int, *, heads: int = 2, **options: Any) -> str:
    """The lines of one attention over the inputs `wide` (queries) and `narrow` (keys and values)."""
    keywords = "".join(f", {name}={value}" for name, value in options.items())
    return ATTENTION.format(n=n, q="wide", k=f"narrow{heads}", heads=heads, size=6, keywords=keywords)


def planned(*layers: str, page_size: int | None = 16) -> SmallGraph:
    """A graph with these attentions, after `insert_caches`."""
    inputs = "wide: input(bfloat16, 1, T, 24)\nnarrow1: input(bfloat16, 1, T, 6)\nnarrow2: input(bfloat16, 1, T, 12)\n"
    returned = ", ".join(f"y{n}" for n in range(len(layers)))
    source = read_graph(
        BATCH + inputs + "".join(layers) + f"return {returned}", options=Options("bfloat16", 64, page_size)
    )
    run(source, insert_caches)
    return source


def run(source: SmallGraph, step: Pass) -> None:
    (record,) = pipeline.run(source.graph, source.ctx, (dataclasses.replace(step, requires=()),))
    assert record.changed


def inputs_of(source: SmallGraph) -> dict[str, str]:
    """The type of each input that lowering finds."""
    graph = lower(source.graph, source.ctx)
    return {value.name: f"{value.type.dtype}{list(value.type.shape)}" for value in graph.inputs}


# --- caches ------------------------------------------------------------------------------------------------------


def test_an_attention_writes_and_reads_its_cache() -> None:
    source = planned(attention(0, window=8))

    lines = write_graph(source.graph, source.ctx).splitlines()

    assert lines[2:] == [
        "v2 = precast.write_kv(v1, v1, cache_layers_0_k, cache_layers_0_v, slot_mapping_window8)",
        "v3 = precast.paged_attention(v0, cache_layers_0_k, cache_layers_0_v, None, cu_seqlens, kv_lens, "
        "page_indices_window8, page_indptr_window8, page_start_window8, scale=0.5, window=8)",
        "return v3",
    ]


def test_the_metadata_inputs_of_a_group() -> None:
    found = inputs_of(planned(attention(0)))

    metadata = {name: kind for name, kind in found.items() if "narrow" not in name and name != "wide"}
    assert metadata == {
        "cu_seqlens": "int32[Apply(op='add', args=(1, 'B'))]",
        "kv_lens": "int32['B']",
        "page_indices_full": "int32['N_full']",
        "page_indptr_full": "int32[Apply(op='add', args=(1, 'B'))]",
        "page_start_full": "int32['B']",
        "slot_mapping_full": "int64['T']",
    }


def groups_of(plan: CachePlan) -> dict[str, tuple[str, list[str]]]:
    return {group.name: (group.pool, [slot.name for slot in group.slots]) for group in plan.groups}


def test_equal_layers_share_a_group() -> None:
    source = planned(attention(0), attention(1))

    assert groups_of(source.ctx.caches) == {"full": ("pool0", ["layers.0", "layers.1"])}


def test_each_window_has_a_pool() -> None:
    source = planned(attention(0, window=8), attention(1), attention(2, window=8))

    assert source.ctx.caches.pools == (Pool("pool0", "P_pool0"), Pool("pool1", "P_pool1"))
    assert groups_of(source.ctx.caches) == {
        "window8": ("pool0", ["layers.0", "layers.2"]),
        "full": ("pool1", ["layers.1"]),
    }


def test_layers_with_chunks_form_a_group() -> None:
    source = planned(attention(0, chunk=8), attention(1), attention(2, chunk=8))

    assert groups_of(source.ctx.caches) == {
        "chunk8": ("pool0", ["layers.0", "layers.2"]),
        "full": ("pool1", ["layers.1"]),
    }
    assert [(group.spec.window, group.spec.chunk) for group in source.ctx.caches.groups] == [(None, 8), (None, None)]
    assert "page_start_chunk8, scale=0.5, chunk=8)" in write_graph(source.graph, source.ctx)


def test_slopes_stay_with_the_attention() -> None:
    slopes = "slopes: constant(float32, [0.5, 0.25, 0.125, 0.0625])\n"
    source = planned(slopes + attention(0, slopes="slopes"))

    assert "page_start_full, scale=0.5, slopes=slopes)" in write_graph(source.graph, source.ctx)
    node = next(node for node in lower(source.graph, source.ctx).main if node.op == "precast.paged_attention")
    assert node.args["slopes"] == Ref("slopes")


def test_layers_of_other_heads_have_a_pool_of_their_own() -> None:
    source = planned(attention(0), attention(1, heads=1))

    assert groups_of(source.ctx.caches) == {
        "full_2x6x6": ("pool0", ["layers.0"]),
        "full_1x6x6": ("pool1", ["layers.1"]),
    }


def test_a_slots_tensors_are_pages_of_the_pool() -> None:
    source = planned(attention(0), page_size=32)

    (group,) = source.ctx.caches.groups
    (slot,) = group.slots
    assert [(value.name, value.type.dtype, value.type.shape) for value in slot.tensors] == [
        ("layers.0.k", "bfloat16", ("P_pool0", 32, 2, 6)),
        ("layers.0.v", "bfloat16", ("P_pool0", 32, 2, 6)),
    ]


def test_a_model_without_attention_has_no_caches() -> None:
    source = read_graph(BATCH + "x: input(float32, 1, T, 8)\ny = aten.neg(x)\nreturn y")

    (record,) = pipeline.run(source.graph, source.ctx, (insert_caches,))

    assert not record.changed
    assert source.ctx.caches == CachePlan()


# --- pages -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("page_size", "expected"), [(None, 8), (32, 32), (48, 48)])
def test_pages_are_sized_unless_the_option_says_how(page_size: int | None, expected: int) -> None:
    source = planned(attention(0, window=64), attention(1), page_size=page_size)
    run(source, plan_pages)

    plan = source.ctx.caches
    assert [group.spec.page_size for group in plan.groups] == [expected, 16 if page_size is None else expected]
    assert caches.with_slabs(plan) is plan
    assert plan.slab_bytes > 0
    for group, pool in zip(plan.groups, plan.pools, strict=True):
        expected_types = caches.slot_types(group.spec, pool.pages)
        assert all(tuple(value.type for value in slot.tensors) == expected_types for slot in group.slots)


def test_cache_tensors_of_the_graph_get_the_page_size() -> None:
    source = planned(attention(0), page_size=None)
    run(source, plan_pages)

    graph = lower(source.graph, source.ctx)
    declared = {value.name: value.type for value in caches.tensors(graph.caches)}
    shapes = {
        source.ctx.cache_tensors[node.name].name: list(node.meta["val"].shape[1:])
        for node in source.graph.nodes
        if node.name in source.ctx.cache_tensors
    }
    assert shapes == {name: list(kind.shape[1:]) for name, kind in declared.items()}
    assert all(source.ctx.cache_tensors[f"cache_layers_0_{part}"].type == declared[f"layers.0.{part}"] for part in "kv")


def test_a_model_without_caches_has_no_slabs() -> None:
    source = read_graph(BATCH + "x: input(float32, 1, T, 8)\ny = aten.neg(x)\nreturn y")

    (record,) = pipeline.run(source.graph, source.ctx, (dataclasses.replace(plan_pages, requires=()),))

    assert not record.changed
    assert source.ctx.caches == CachePlan()


def paged(name: str, layers: int, window: int | None = None, heads: int = 8) -> Group:
    spec = PagedSpec(heads, 128, 128, "bfloat16", 16, window)
    slots = tuple(
        Slot(f"{name}.{i}", tuple(Value(f"{name}.{i}.{part}", kind) for part, kind in zip("kv", types, strict=True)))
        for i in range(layers)
        for types in [caches.slot_types(spec, f"P_{name}")]
    )
    return Group(name, name, spec, PagedInputs("a", "b", "c", "d"), slots)


def state(layers: int, size: int) -> StateGroup:
    spec = StateSpec("state", (size,), "float32")
    slots = tuple(Slot(f"s{i}", (Value(f"s{i}.state", *caches.slot_types(spec, "S")),)) for i in range(layers))
    return StateGroup("state", "state", spec, "ids", slots)


def plan_of(*groups: Group | StateGroup) -> CachePlan:
    return CachePlan(
        tuple(Pool(group.pool, f"P_{group.name}") for group in groups),
        tuple(group for group in groups if isinstance(group, Group)),
        tuple(group for group in groups if isinstance(group, StateGroup)),
    )


@pytest.mark.parametrize(
    ("groups", "sizes"),
    [
        # half a page at the end of 1024 tokens: 7.5 of them are 0.7 %, 15.5 are 1.5 %
        ((paged("full", 32),), [16]),
        # a page of the window is lost at both of its ends; the full layers are a third of what is kept
        ((paged("window", 8, window=1024), paged("full", 4)), [16, 32]),
        # no page is small enough for a short window
        ((paged("window", 8, window=128),), [8]),
        # a state that weighs as much as 10,000 tokens: what pages leave unfilled is nothing beside it
        ((paged("full", 2), state(2, 10_000 * 1024)), [64]),
    ],
)
def test_the_largest_pages_that_waste_little(groups: tuple[Group | StateGroup, ...], sizes: list[int]) -> None:
    assert [group.spec.page_size for group in choose_page_sizes(plan_of(*groups)).groups] == sizes


def test_pages_shrink_until_slabs_are_small() -> None:
    # Pages of 13 and 20 units of 256 KiB: a slab of both would be 65 MiB. 13 and 5 are 16.25 MiB.
    plan = choose_page_sizes(plan_of(paged("window", 52, window=1024, heads=16), paged("full", 10, heads=16)))
    assert caches.with_slabs(plan).slab_bytes == 260 << 18 > SMALL_SLAB_BYTES

    found = with_small_slabs(plan)

    assert [group.spec.page_size for group in found.groups] == [8, 16]
    assert found.slab_bytes == 65 << 18


def test_pages_stay_where_slabs_are_small() -> None:
    plan = choose_page_sizes(plan_of(paged("window", 8, window=1024), paged("full", 4)))
    assert with_small_slabs(plan) == caches.with_slabs(plan)


def test_pages_stay_where_a_state_makes_the_slab() -> None:
    plan = choose_page_sizes(plan_of(paged("full", 2), state(40, 1 << 20)))
    assert caches.with_slabs(plan).slab_bytes > SMALL_SLAB_BYTES
    assert with_small_slabs(plan) == caches.with_slabs(plan)


# --- logits ------------------------------------------------------------------------------------------------------

HEAD = """
input_ids: input(int64, 1, T)
x: input(float32, 1, T, 8)
w: param(float32, 9, 8)
bias: param(float32, 9)
z: input(float32, 1, T, 9)
scale: param(float32)
logits = aten.linear(x, w{bias})
{behind}
return {result}
"""


def gathered(*, bias: str = "", behind: str = "", result: str = "logits") -> str:
    """The graph as text after the pass; its rows are compared with those of all logits."""
    source = read_graph(HEAD.format(bias=bias, behind=behind, result=result))
    inputs = _inputs()
    everything = compute(source, inputs)[0]
    run(source, gather_logits)
    assert torch.equal(compute(source, inputs)[0], everything[:, inputs["logit_rows"]])
    return write_graph(source.graph, source.ctx)


def _inputs() -> dict[str, torch.Tensor]:
    shapes: dict[str, Any] = {"x": (1, 7, 8), "w": (9, 8), "bias": (9,), "z": (1, 7, 9), "scale": ()}
    drawn = {name: torch.randn(shape) for name, shape in shapes.items()}
    return {**drawn, "input_ids": torch.zeros(1, 7, dtype=torch.int64), "logit_rows": torch.tensor([6, 2])}


def test_rows_are_gathered_before_the_head() -> None:
    assert gathered().splitlines() == [
        "v0 = precast.gather_rows(x, logit_rows)",
        "v1 = aten.linear.default(v0, w)",
        "return v1",
    ]


def test_also_through_a_soft_cap_a_scale_and_a_bias() -> None:
    behind = """
small = aten.div.Tensor(logits, 30.0)
capped = aten.tanh(small)
large = aten.mul.Tensor(capped, 30.0)
scaled = aten.mul.Tensor(large, scale)
"""

    lines = gathered(bias=", bias", behind=behind, result="scaled").splitlines()

    assert lines[:2] == ["v0 = precast.gather_rows(x, logit_rows)", "v1 = aten.linear.default(v0, w, bias)"]


@pytest.mark.parametrize(
    ("behind", "result"),
    [
        pytest.param("y = aten.add.Tensor(logits, z)", "y", id="a sum with other rows"),
        pytest.param("y = aten.cumsum(logits, 1)", "y", id="an op over the rows"),
        pytest.param("y = aten.neg(logits)", "logits, y", id="all logits are wanted too"),
    ],
)
def test_other_logits_are_gathered_at_the_end(behind: str, result: str) -> None:
    lines = gathered(behind=behind, result=result).splitlines()

    assert "gather_rows" in lines[-2]
    assert lines[0] == "v0 = aten.linear.default(x, w)"


def test_a_head_that_is_no_product_is_gathered_behind() -> None:
    lines = gathered(result="z").splitlines()

    assert lines == ["v0 = precast.gather_rows(z, logit_rows)", "return v0"]


def test_the_rows_are_an_input_of_their_own_size() -> None:
    source = read_graph(HEAD.format(bias="", behind="", result="logits"))
    run(source, gather_logits)

    assert inputs_of(source)["logit_rows"] == "int64['R']"
    (output,) = lower(source.graph, source.ctx).outputs.values()
    assert output == "linear_0"
