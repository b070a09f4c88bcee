"""Gives each attention a cache: keys and values are written into pages, and read from them."""

from __future__ import annotations

from typing import Any

import torch

from precast.builder.context import PassContext, tensor
from precast.builder.fx_types import FxGraph, FxNode
from precast.builder.pipeline import graph_pass
from precast.ir.schema import CachePlan, Group, PagedInputs, PagedSpec, Pool, Slot, TensorType, Value

_INPUTS = {
    # a group's metadata inputs: dtype, sizes ("N": its page table's entries)
    "page_indices": ("int32", "N"),
    "page_indptr": ("int32", "B + 1"),
    "page_start": ("int32", "B"),
    "slot_mapping": ("int64", "T"),
}


@graph_pass(stage="cache", version=1)
def insert_caches(graph: FxGraph, ctx: PassContext) -> bool:
    """attention(q, k, v) -> write_kv(k, v, cache), paged_attention(q, cache).

    Layers of equal geometry and window form a group, with one page table and one set of metadata inputs; groups of
    equal page geometry share a pool. The plan is recorded in the context.
    """
    layers = [node for node in graph.nodes if node.target is torch.ops.precast.attention.default]
    specs: dict[PagedSpec, list[FxNode]] = {}
    for node in layers:
        specs.setdefault(_spec(node, ctx), []).append(node)
    if not specs:
        return False
    sizes = _Sizes(graph, ctx)
    kv_lens = sizes.add_input("kv_lens", "int32", "B")
    pools: dict[Any, Pool] = {}
    groups = []
    number = {node: index for index, node in enumerate(layers)}
    for spec, nodes in specs.items():
        name = _group_name(spec, specs)
        pool = pools.setdefault(_page_geometry(spec), Pool(f"pool{len(pools)}", f"P_pool{len(pools)}"))
        fields = {field: f"{field}_{name}" for field in _INPUTS}
        entries = sizes.symbol(f"N_{name}")
        metadata = {
            field: sizes.add_input(fields[field], dtype, size, entries) for field, (dtype, size) in _INPUTS.items()
        }
        pages = sizes.symbol(pool.pages)
        slots = tuple(
            _insert(graph, ctx, node, f"layers.{number[node]}", spec, pool, pages, kv_lens, metadata) for node in nodes
        )
        groups.append(Group(name, pool.name, spec, PagedInputs(**fields), slots))
    ctx.caches = CachePlan(tuple(pools.values()), tuple(groups))
    return True


def _spec(node: FxNode, ctx: PassContext) -> PagedSpec:
    key, value = tensor(node.args[1]), tensor(node.args[2])
    dtype = str(key.dtype).removeprefix("torch.")
    window = node.kwargs.get("window")
    return PagedSpec(
        num_kv_heads=int(key.shape[2]), head_size=int(key.shape[3]), value_size=int(value.shape[3]),
        dtype=dtype, page_size=ctx.options.page_size, window=window,  # type: ignore[arg-type]
    )  # fmt: skip


def _page_geometry(spec: PagedSpec) -> Any:
    return (spec.num_kv_heads, spec.head_size, spec.value_size, spec.dtype, spec.page_size)


def _group_name(spec: PagedSpec, specs: dict[PagedSpec, list[FxNode]]) -> str:
    """`full`, `window1024`; with the heads' geometry where that alone doesn't tell groups apart."""

    def short(of: PagedSpec) -> str:
        return "full" if of.window is None else f"window{of.window}"

    name = short(spec)
    alike = sum(short(other) == name for other in specs)
    return name if alike == 1 else f"{name}_{spec.num_kv_heads}x{spec.head_size}x{spec.value_size}"


class _Sizes:
    """Makes inputs over symbols: fake tensors for the graph, types for the bundle."""

    def __init__(self, graph: FxGraph, ctx: PassContext) -> None:
        self.graph, self.ctx = graph, ctx
        places = {node.name: node for node in graph.nodes if node.op == "placeholder"}
        self.after = places["cu_seqlens"]
        bounds = tensor(self.after).shape[0]
        self.known: dict[str, Any] = {"T": tensor(places["input_ids"]).shape[1], "B": bounds - 1, "B + 1": bounds}

    def symbol(self, name: str) -> Any:
        """The size of this name; a new one is unknown to the exporter, and enters its table of symbols."""
        if name not in self.known:
            self.known[name] = self.ctx.new_symbol(name)
        return self.known[name]

    def add_input(self, name: str, dtype: str, size: str, entries: Any = None) -> FxNode:
        """A one-dimensional graph input."""
        length = entries if size == "N" else self.known[size]
        return self.ctx.new_input(self.graph, self.after, name, self.ctx.empty((length,), getattr(torch, dtype)))


def _insert(
    graph: FxGraph, ctx: PassContext, node: FxNode, slot: str, spec: PagedSpec, pool: Pool, pages: Any,
    kv_lens: FxNode, metadata: dict[str, FxNode],
) -> Slot:  # fmt: skip
    q, k, v, sinks, cu_seqlens = node.args
    values, places = [], []
    for short, source, size in (("k", k, spec.head_size), ("v", v, spec.value_size)):
        value = Value(f"{slot}.{short}", TensorType(spec.dtype, (pool.pages, spec.page_size, spec.num_kv_heads, size)))
        fake = ctx.empty((pages, spec.page_size, spec.num_kv_heads, size), tensor(source).dtype)
        places.append(ctx.new_cache(graph, kv_lens, value, fake))
        values.append(value)
    with ctx.before(node):
        ctx.call(graph, torch.ops.precast.write_kv.default, k, v, *places, metadata["slot_mapping"])
        paged = ctx.call(
            graph, torch.ops.precast.paged_attention.default, q, *places, sinks, cu_seqlens, kv_lens,
            metadata["page_indices"], metadata["page_indptr"], metadata["page_start"], **node.kwargs,
        )  # fmt: skip
    ctx.replace(node, paged)
    graph.erase_node(node)
    return Slot(slot, tuple(values))
