"""Gives each attention a cache: keys and values, or latents, are written into pages, and read from them."""

from __future__ import annotations

from typing import Any

import torch

from precast.builder.graph.context import FxGraph, FxNode, PassContext, tensor
from precast.builder.graph.metadata import MetadataInputs, new_pool
from precast.builder.passes.graph_pass import graph_pass
from precast.ir.errors import BuildError
from precast.ir.graph.schema import CachePlan, Group, LatentSpec, PagedInputs, PagedSpec, Pool, Slot, Value
from precast.ir.memory import caches
from precast.kernels.dtypes import BY_NAME

Spec = PagedSpec | LatentSpec

DEFAULT_PAGE_SIZE = 16
"""Tokens a page until `plan_pages` chooses."""

_INPUTS = {
    # a group's metadata inputs: dtype, sizes ("N": its page table's entries)
    "page_indices": ("int32", "N"),
    "page_indptr": ("int32", "B + 1"),
    "page_start": ("int32", "B"),
    "slot_mapping": ("int64", "T"),
}


@graph_pass(stage="cache", version=1)
def insert_caches(graph: FxGraph, ctx: PassContext) -> bool:
    """attention(q, k, v) -> write_kv(k, v, cache), paged_attention(q, cache); latent_attention likewise.

    Layers of equal geometry, window and chunk form a group, with a page table, a pool and a set of metadata inputs. A
    layer with the very keys and values of an earlier one has no cache of its own: it reads that one's. The plan is
    recorded in the context; `plan_pages` sizes its pages.

    What a step writes it reads back from the cache, its own keys too. So with a cache of another dtype than the model's
    a token sees the same keys however its prompt was cut, and whoever computed them.
    """
    kinds = (torch.ops.precast.attention.default, torch.ops.precast.latent_attention.default)
    layers = [node for node in graph.nodes if node.op == "call_function" and node.target in kinds]
    specs: dict[Spec, list[FxNode]] = {}
    for node in layers:
        specs.setdefault(_spec(node, ctx), []).append(node)
    if not specs:
        _refuse_kv_dtype(ctx)
        return False
    sizes = MetadataInputs(graph, ctx)
    kv_lens = sizes.add_input("kv_lens", "int32", "B")
    pools: list[Pool] = []
    groups = []
    number = {node: index for index, node in enumerate(layers)}
    for spec, nodes in specs.items():
        name = _group_name(spec, specs)
        pool = new_pool(len(ctx.caches.pools) + len(pools))
        pools.append(pool)
        fields = {field: f"{field}_{name}" for field in _INPUTS}
        entries = sizes.symbol(f"N_{name}")
        metadata = {
            field: sizes.add_input(fields[field], dtype, size, entries) for field, (dtype, size) in _INPUTS.items()
        }
        pages = sizes.symbol(pool.pages)
        slots: list[Slot] = []
        written: dict[tuple[FxNode, FxNode], tuple[FxNode, ...]] = {}
        for node in nodes:
            kept = node.args[1], node.args[2]
            if kept not in written:
                values = _values(f"layers.{number[node]}", spec, pool)
                slots.append(Slot(f"layers.{number[node]}", values))
                written[kept] = _write(ctx, node, values, pages, kv_lens, metadata)
            _read(ctx, node, written[kept], kv_lens, metadata)
        groups.append(Group(name, pool.name, spec, PagedInputs(**fields), tuple(slots)))
    ctx.caches = CachePlan((*ctx.caches.pools, *pools), tuple(groups), ctx.caches.states)
    return True


def _refuse_kv_dtype(ctx: PassContext) -> None:
    """Raise BuildError where the option is given to a model without such caches."""
    if ctx.options.kv_dtype is not None:
        kept = "only states, which keep their dtype" if ctx.caches.states else "no caches"
        message = f"kv_dtype is given, but the model has no keys, values or latents to keep: it has {kept}"
        raise BuildError("option-invalid", message, fix="leave kv_dtype out")


def _spec(node: FxNode, ctx: PassContext) -> Spec:
    first, second = tensor(node.args[1]), tensor(node.args[2])
    dtype: Any = ctx.options.kv_dtype or str(first.dtype).removeprefix("torch.")
    page_size, window = ctx.options.page_size or DEFAULT_PAGE_SIZE, node.kwargs.get("window")
    if node.target is torch.ops.precast.latent_attention.default:
        return LatentSpec(int(first.shape[2]), int(second.shape[2]), dtype, page_size, window)
    sizes = int(first.shape[2]), int(first.shape[3]), int(second.shape[3])
    return PagedSpec(*sizes, dtype, page_size, window, node.kwargs.get("chunk"))


def _group_name(spec: Spec, specs: dict[Spec, list[FxNode]]) -> str:
    """`full`, `window1024`, `chunk8192`, `latent_full`; with the geometry where that alone is not enough."""
    name = _short_name(spec)
    if sum(_short_name(other) == name for other in specs) == 1:
        return name
    if isinstance(spec, LatentSpec):
        return f"{name}_{spec.latent_size}x{spec.rope_size}"
    return f"{name}_{spec.num_kv_heads}x{spec.head_size}x{spec.value_size}"


def _short_name(spec: Spec) -> str:
    reach = "full" if spec.window is None else f"window{spec.window}"
    if isinstance(spec, PagedSpec) and spec.chunk is not None:
        reach = f"chunk{spec.chunk}"
    return reach if isinstance(spec, PagedSpec) else f"latent_{reach}"


def _values(slot: str, spec: Spec, pool: Pool) -> tuple[Value, ...]:
    """The cache tensors of a slot."""
    names = ("latent",) if isinstance(spec, LatentSpec) else ("k", "v")
    types = caches.slot_types(spec, pool.pages)
    return tuple(Value(f"{slot}.{short}", type) for short, type in zip(names, types, strict=True))


def _write(
    ctx: PassContext, node: FxNode, values: tuple[Value, ...], pages: Any, kv_lens: FxNode,
    metadata: dict[str, FxNode],
) -> tuple[FxNode, ...]:  # fmt: skip
    """Writes what the attention `node` keeps; the cache tensors that it is written into."""
    _, first, second, *_ = node.args
    places = tuple(
        ctx.new_cache(kv_lens, value, ctx.empty((pages, *value.type.shape[1:]), BY_NAME[value.type.dtype]))
        for value in values
    )
    is_latent = node.target is torch.ops.precast.latent_attention.default
    write = torch.ops.precast.write_latent.default if is_latent else torch.ops.precast.write_kv.default
    with ctx.before(node):
        ctx.call(write, first, second, *places, metadata["slot_mapping"])
    return places


def _read(
    ctx: PassContext, node: FxNode, places: tuple[FxNode, ...], kv_lens: FxNode,
    metadata: dict[str, FxNode],
) -> None:  # fmt: skip
    """Puts attention over the pages in the place of `node`."""
    is_latent = node.target is torch.ops.precast.latent_attention.default
    read = torch.ops.precast.paged_latent_attention.default if is_latent else torch.ops.precast.paged_attention.default
    q, _, _, other, cu_seqlens = node.args
    with ctx.before(node):
        paged = ctx.call(
            read, q, *places, other, cu_seqlens, kv_lens,
            metadata["page_indices"], metadata["page_indptr"], metadata["page_start"], **node.kwargs,
        )  # fmt: skip
    ctx.replace(node, paged)
