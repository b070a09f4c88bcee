"""Convs and recurrences get states: their specs, groups, pools and metadata."""

from __future__ import annotations

import dataclasses

import pytest
from fx_text import SmallGraph, assert_leaves, read_graph, write_graph

from precast.builder import pipeline
from precast.builder.lower.lower import lower
from precast.builder.passes.cache.insert_caches import insert_caches, insert_states
from precast.builder.passes.graph_pass import Pass
from precast.ir.graph.schema import Pool, StateSpec
from precast.ir.verify.verifier import verify

INPUTS = """
input_ids: input(int64, 1, T)
cu_seqlens: input(int32, B1)
x: input({dtype}, 1, T, 6)
heads: input({dtype}, 1, T, 6, 4)
keys: input({dtype}, 1, T, 2, 5)
queries: input({dtype}, 1, T, 6, 5)
small: input({dtype}, 1, T, 5)
w: param({dtype}, 6, 4)
a: param(float32, 6, 5)
rates: param(float32, 6)
"""
CALLS = {
    "causal_conv": "precast.causal_conv(x, w, None, cu_seqlens, activation='silu')",
    "selective_scan": "precast.selective_scan(x, x, a, small, small, None, rates, cu_seqlens, softplus=True)",
    "state_space_scan": (
        "precast.state_space_scan(heads, x, rates, keys, keys, None, None, cu_seqlens, softplus=True, dt_min=0.0, "
        "dt_max=1e999)"
    ),
    "delta_rule": "precast.delta_rule(keys, keys, heads, None, x, cu_seqlens, scale=0.5, normalise=True)",
    "linear_attention": "precast.linear_attention(queries, queries, heads, rates, cu_seqlens, scale=0.5)",
    "linear_recurrence": "precast.linear_recurrence(x, x, cu_seqlens)",
    "wkv": "precast.wkv(x, x, rates, rates, cu_seqlens)",
}
SPECS = {
    "causal_conv": StateSpec("conv", (6, 3), "bfloat16"),
    "selective_scan": StateSpec("state", (6, 5), "float32"),
    "state_space_scan": StateSpec("state", (6, 4, 5), "float32"),
    "delta_rule": StateSpec("state", (6, 5, 4), "float32"),
    "linear_attention": StateSpec("state", (6, 5, 4), "float32"),
    "linear_recurrence": StateSpec("state", (6,), "float32"),
    "wkv": StateSpec("state", (3, 6), "float32"),
}


def graph(*names: str, dtype: str = "bfloat16", more: str = "") -> SmallGraph:
    """A graph of these calls, each in a layer of its own."""
    layers = "".join(f'with layer("layers.{n}"):\n    y{n} = {CALLS[name]}\n' for n, name in enumerate(names))
    returned = ", ".join(f"y{n}" for n in range(len(names)))
    return read_graph(f"{INPUTS.format(dtype=dtype)}{layers}{more}return {returned}")


def run(source: SmallGraph, step: Pass = insert_states) -> SmallGraph:
    (record,) = pipeline.run(source.graph, source.ctx, (dataclasses.replace(step, requires=()),))
    assert record.changed
    return source


@pytest.mark.parametrize("op", CALLS)
def test_each_op_keeps_a_state(op: str) -> None:
    source = run(graph(op))

    (group,) = source.ctx.caches.states
    assert group.spec == SPECS[op]
    lowered = lower(source.graph, source.ctx)
    assert verify(lowered) == ()  # the state has the shape that the op's rule asks for
    assert [node.op for block in lowered.blocks for node in block.nodes] == [f"precast.stateful_{op}"]


def test_what_an_op_takes() -> None:
    source = run(graph("causal_conv", "state_space_scan"))

    assert write_graph(source.graph, source.ctx).splitlines()[-3:] == [
        "v0 = precast.stateful_causal_conv(x, w, None, cache_conv_6x3_0_conv, slot_ids_conv_6x3, cu_seqlens, kv_lens, "
        "activation=silu)",
        "v1 = precast.stateful_state_space_scan(heads, x, rates, keys, keys, None, None, cache_state_6x4x5_0_state, "
        "slot_ids_state_6x4x5, cu_seqlens, kv_lens, softplus=True, dt_min=0.0, dt_max=inf)",
        "return v0, v1",
    ]


def test_metadata_and_tensors() -> None:
    source = run(graph("causal_conv", "wkv"))

    lowered = lower(source.graph, source.ctx)

    inputs = {value.name: (value.type.dtype, value.type.shape) for value in lowered.inputs}
    assert inputs["slot_ids_conv_6x3"] == inputs["slot_ids_state_3x6"] == inputs["kv_lens"] == ("int32", ("B",))
    conv, state = lowered.caches.states
    assert [(slot.name, slot.tensors[0].name) for slot in (*conv.slots, *state.slots)] == [
        ("conv_6x3.0", "conv_6x3.0.conv"), ("state_3x6.0", "state_3x6.0.state"),
    ]  # fmt: skip
    assert conv.slots[0].tensors[0].type.shape == ("P_pool0", 6, 3)
    assert state.slots[0].tensors[0].type.shape == ("P_pool1", 3, 6)


def test_equal_states_are_a_group_and_each_group_has_a_pool() -> None:
    plan = run(graph("causal_conv", "wkv", "causal_conv", "linear_attention", "delta_rule")).ctx.caches

    assert {group.name: (group.pool, len(group.slots)) for group in plan.states} == {
        "conv_6x3": ("pool0", 2),
        "state_3x6": ("pool1", 1),
        "state_6x5x4": ("pool2", 2),
    }
    assert plan.pools == (Pool("pool0", "P_pool0"), Pool("pool1", "P_pool1"), Pool("pool2", "P_pool2"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_conv_keeps_its_inputs_as_they_are(dtype: str) -> None:
    (conv, state) = run(graph("causal_conv", "linear_recurrence", dtype=dtype)).ctx.caches.states

    assert (conv.spec.dtype, state.spec.dtype) == (dtype, "float32")


def test_a_conv_and_a_scan_of_one_shape_are_two_groups() -> None:
    source = read_graph(
        """
        input_ids: input(int64, 1, T)
        cu_seqlens: input(int32, B1)
        x: input(float32, 1, T, 6)
        w: param(float32, 6, 4)
        a: param(float32, 6, 3)
        b: input(float32, 1, T, 3)
        y = precast.causal_conv(x, w, None, cu_seqlens)
        z = precast.selective_scan(y, y, a, b, b, None, None, cu_seqlens, softplus=True)
        return z
        """
    )

    assert [group.name for group in run(source).ctx.caches.states] == ["conv_6x3", "state_6x3"]


def test_attention_in_the_same_model_shares_the_lengths() -> None:
    attention = "q = aten.reshape(heads, [1, -1, 6, 4])\nz = precast.attention(q, q, q, None, cu_seqlens, scale=0.5)\n"
    source = graph("wkv", more=attention)
    output = next(node for node in source.graph.nodes if node.op == "output")
    z = next(node for node in source.graph.nodes if "precast.attention" in str(node.target))
    output.args = ({**output.args[0], "out1": z},)

    run(run(source), insert_caches)

    plan = source.ctx.caches
    assert [group.pool for group in plan.states] == ["pool0"]
    assert [group.pool for group in plan.groups] == ["pool1"]
    lowered = lower(source.graph, source.ctx)
    assert verify(lowered) == ()
    assert [value.name for value in lowered.inputs].count("kv_lens") == 1


def test_a_graph_without_states_stays() -> None:
    assert_leaves(insert_states, f"{INPUTS.format(dtype='float32')}y = aten.add.Tensor(x, x)\nreturn y")
