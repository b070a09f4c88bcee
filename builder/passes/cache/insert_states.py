"""Gives each conv and each recurrence a state: what it needs of a sequence's earlier tokens, kept between steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from precast.builder.graph.context import PassContext, tensor
from precast.builder.graph.fx_types import FxGraph, FxNode
from precast.builder.graph.metadata import MetadataInputs, new_pool
from precast.builder.passes.graph_pass import graph_pass
from precast.ir.graph.schema import CachePlan, Slot, StateGroup, StateSpec, TensorType, Value


def _conv(node: FxNode) -> StateSpec:
    channels, taps = tensor(node.args[1]).shape
    dtype = str(tensor(node.args[0]).dtype).removeprefix("torch.")
    return StateSpec("conv", (int(channels), int(taps) - 1), dtype)  # type: ignore[arg-type]


def _selective_scan(node: FxNode) -> StateSpec:
    channels, size = tensor(node.args[2]).shape
    return StateSpec("state", (int(channels), int(size)), "float32")


def _state_space_scan(node: FxNode) -> StateSpec:
    _, _, heads, head_size = tensor(node.args[0]).shape
    return StateSpec("state", (int(heads), int(head_size), int(tensor(node.args[3]).shape[-1])), "float32")


def _key_value(node: FxNode) -> StateSpec:
    key_size = int(tensor(node.args[1]).shape[-1])
    _, _, heads, value_size = tensor(node.args[2]).shape
    return StateSpec("state", (int(heads), key_size, int(value_size)), "float32")


def _recurrence(node: FxNode) -> StateSpec:
    return StateSpec("state", (int(tensor(node.args[0]).shape[-1]),), "float32")


def _wkv(node: FxNode) -> StateSpec:
    return StateSpec("state", (3, int(tensor(node.args[1]).shape[-1])), "float32")


_SPECS: dict[str, Callable[[FxNode], StateSpec]] = {
    # the cache-free op -> the state that `stateful_<op>` keeps
    "causal_conv": _conv,
    "selective_scan": _selective_scan,
    "state_space_scan": _state_space_scan,
    "delta_rule": _key_value,
    "linear_attention": _key_value,
    "linear_recurrence": _recurrence,
    "wkv": _wkv,
}


@graph_pass(stage="cache", version=1)
def insert_states(graph: FxGraph, ctx: PassContext) -> bool:
    """scan(..., cu_seqlens) -> stateful_scan(..., state, slots, cu_seqlens, kv_lens), and convs likewise.

    Layers whose states are of equal spec form a group, with slot ids and a pool of its own. The plan is recorded in
    the context.
    """
    ops = {getattr(torch.ops.precast, name).default: name for name in _SPECS}
    specs: dict[StateSpec, list[FxNode]] = {}
    for node in graph.nodes:
        if node.op == "call_function" and node.target in ops:
            specs.setdefault(_SPECS[ops[node.target]](node), []).append(node)
    if not specs:
        return False
    inputs = MetadataInputs(graph, ctx)
    kv_lens = inputs.add_input("kv_lens", "int32", "B")
    for spec, nodes in specs.items():
        name = f"{spec.kind}_{'x'.join(map(str, spec.shape))}"
        pool = new_pool(len(ctx.caches.pools))
        slot_ids = inputs.add_input(f"slot_ids_{name}", "int32", "B")
        states = inputs.symbol(pool.pages)
        type = TensorType(spec.dtype, (pool.pages, *spec.shape))
        slots = tuple(
            _insert(
                graph, ctx, node, Value(f"{name}.{i}.{spec.kind}", type), states, ops[node.target], slot_ids, kv_lens
            )
            for i, node in enumerate(nodes)
        )
        group = StateGroup(name, pool.name, spec, slot_ids.name, slots)
        ctx.caches = CachePlan((*ctx.caches.pools, pool), ctx.caches.groups, (*ctx.caches.states, group))
    return True


def _insert(
    graph: FxGraph, ctx: PassContext, node: FxNode, value: Value, states: Any, op: str, slot_ids: FxNode,
    kv_lens: FxNode,
) -> Slot:  # fmt: skip
    shape = (states, *value.type.shape[1:])
    state = ctx.new_cache(graph, kv_lens, value, ctx.empty(shape, getattr(torch, value.type.dtype)))
    *tensors, cu_seqlens = node.args
    with ctx.before(node):
        target = getattr(torch.ops.precast, f"stateful_{op}").default
        stateful = ctx.call(graph, target, *tensors, state, slot_ids, cu_seqlens, kv_lens, **node.kwargs)
    ctx.replace(node, stateful)
    graph.erase_node(node)
    return Slot(value.name.rpartition(".")[0], (value,))
