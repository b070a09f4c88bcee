"""Gives each conv and each recurrence a state: what it needs of a sequence's earlier tokens, kept between steps."""

from __future__ import annotations

from typing import Any

import torch

from precast.builder.graph.context import FxGraph, FxNode, PassContext, tensor
from precast.builder.graph.metadata import MetadataInputs, new_pool
from precast.builder.passes.graph_pass import graph_pass
from precast.ir.graph.schema import CachePlan, Slot, StateGroup, StateSpec, TensorType, Value
from precast.ir.ops import table as ops
from precast.ir.ops.op import OpDef


def _states() -> dict[Any, OpDef]:
    """The cache-free ops that have a stateful form, by torch's name."""
    rows = [row for name, version in ops.names() if (row := ops.lookup(name, version)) is not None and row.state]
    return {getattr(torch.ops.precast, row.name.removeprefix("precast.")).default: row for row in rows}


def _spec(node: FxNode, row: OpDef) -> StateSpec:
    assert row.state is not None
    given = zip(row.args, node.args, strict=False)
    shape = row.state.shape({arg.name: tensor(value) for arg, value in given if isinstance(value, FxNode)})
    dtype = str(tensor(node).dtype).removeprefix("torch.") if row.state.kind == "conv" else "float32"
    return StateSpec(row.state.kind, tuple(map(int, shape)), dtype)  # type: ignore[arg-type]


@graph_pass(stage="cache", version=1)
def insert_states(graph: FxGraph, ctx: PassContext) -> bool:
    """scan(..., cu_seqlens) -> stateful_scan(..., state, slots, cu_seqlens, kv_lens), and convs likewise.

    Layers whose states are of equal spec form a group, with slot ids and a pool of its own. The plan is recorded in
    the context.
    """
    states = _states()
    specs: dict[StateSpec, list[FxNode]] = {}
    for node in graph.nodes:
        if node.op == "call_function" and node.target in states:
            specs.setdefault(_spec(node, states[node.target]), []).append(node)
    if not specs:
        return False
    inputs = MetadataInputs(graph, ctx)
    kv_lens = inputs.add_input("kv_lens", "int32", "B")
    for spec, nodes in specs.items():
        name = f"{spec.kind}_{'x'.join(map(str, spec.shape))}"
        pool = new_pool(len(ctx.caches.pools))
        slot_ids = inputs.add_input(f"slot_ids_{name}", "int32", "B")
        pages = inputs.symbol(pool.pages)
        type = TensorType(spec.dtype, (pool.pages, *spec.shape))
        slots = tuple(
            _insert(ctx, node, Value(f"{name}.{i}.{spec.kind}", type), pages, states[node.target], slot_ids, kv_lens)
            for i, node in enumerate(nodes)
        )
        group = StateGroup(name, pool.name, spec, slot_ids.name, slots)
        ctx.caches = CachePlan((*ctx.caches.pools, pool), ctx.caches.groups, (*ctx.caches.states, group))
    return True


def _insert(
    ctx: PassContext, node: FxNode, value: Value, pages: Any, row: OpDef, slot_ids: FxNode,
    kv_lens: FxNode,
) -> Slot:  # fmt: skip
    shape = (pages, *value.type.shape[1:])
    state = ctx.new_cache(kv_lens, value, ctx.empty(shape, getattr(torch, value.type.dtype)))
    *tensors, cu_seqlens = node.args
    with ctx.before(node):
        target = getattr(torch.ops.precast, f"stateful_{row.name.removeprefix('precast.')}").default
        stateful = ctx.call(target, *tensors, state, slot_ids, cu_seqlens, kv_lens, **node.kwargs)
    ctx.replace(node, stateful)
    return Slot(value.name.rpartition(".")[0], (value,))
