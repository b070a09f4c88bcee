"""How many tokens a page of each group holds, and how large the slabs are that pages are cut from."""

from __future__ import annotations

import msgspec

from precast.builder.graph.context import FxGraph, PassContext, tensor
from precast.builder.passes.graph_pass import graph_pass
from precast.ir.graph.schema import CachePlan, EntrySpec, Group, Slot, Value
from precast.ir.memory import caches

PAGE_SIZES = (64, 32, 16, 8)
"""Tokens a page, large ones first: long lists of small pages cost the host time in every step. Kernels take any."""
REFERENCE_LENGTH = 1024
"""Tokens of the sequence for which waste counts: a short one, since long ones waste a smaller share."""
MAX_UNFILLED = 0.01
"""The share of that sequence's bytes that a group's pages may hold unfilled, on average."""
SMALL_SLAB_BYTES = 32 << 20
"""Slabs up to here are small: hundreds of them fit any GPU, so free pages in slabs that are in use weigh little."""


@graph_pass(stage="plan", version=1, requires=("insert_caches", "insert_states"))
def plan_pages(graph: FxGraph, ctx: PassContext) -> bool:
    """Cache tensors get the page sizes that fit the plan, unless the option sets one; the plan gets its slabs."""
    plan = caches.with_slabs(ctx.caches)
    if ctx.options.page_size is None:
        plan = with_small_slabs(choose_page_sizes(ctx.caches))
    if plan == ctx.caches:
        return False
    ctx.caches = plan
    types = {value.name: value.type for value in caches.tensors(plan)}
    for node in graph.nodes:
        if node.op == "placeholder" and node.name in ctx.cache_tensors:
            name, old = ctx.cache_tensors[node.name].name, tensor(node)
            ctx.cache_tensors[node.name] = Value(name, types[name])
            node.meta["val"] = ctx.empty((old.shape[0], *types[name].shape[1:]), old.dtype)
    return True


def choose_page_sizes(plan: CachePlan) -> CachePlan:
    """The plan with 8 to 64 tokens a page in each group: the most whose unfilled part is small enough.

    A page at the end of a sequence is half full on average, and so is one at the beginning of a window. What that
    costs is compared with all that a sequence of 1024 tokens keeps: where states, or other groups, are most of it,
    pages may be larger.
    """
    total = sum(caches.visible_bytes(group, REFERENCE_LENGTH - 1) for group in caches.groups(plan))
    counters = {pool.name: pool.pages for pool in plan.pools}
    groups = []
    for group in plan.groups:
        sizes = _page_sizes(group)
        fitting = (size for size in sizes if _unfilled_bytes(group, size) <= MAX_UNFILLED * total)
        groups.append(_with_page_size(group, next(fitting, sizes[-1]), counters[group.pool]))
    return msgspec.structs.replace(plan, groups=tuple(groups))


def _page_sizes(group: Group) -> tuple[int, ...]:
    """Tokens a page that are tried, large ones first: whole blocks, where the group keeps entries of some."""
    rate = group.spec.rate if isinstance(group.spec, EntrySpec) else 1
    return tuple(dict.fromkeys(caches.whole_blocks(size, rate) for size in PAGE_SIZES))


def with_small_slabs(plan: CachePlan) -> CachePlan:
    """The plan with slabs, and with smaller pages where slabs would be large because page sizes have little in common.

    The largest page is halved until slabs are small, or hardly larger than the largest state. Where that can't be had
    the smallest slabs count. (Gemma 3 27B: 52 layers with 8 tokens a page beside 10 with 64 would need 65 MiB, beside
    10 with 16 they need 16 MiB; in 70 GB of short chats 1.5 % more of what is allocated is useful then.)
    """
    best = caches.with_slabs(plan)
    states = max((caches.page_bytes(group) for group in plan.states), default=0)
    while best.slab_bytes > max(SMALL_SLAB_BYTES, 1.05 * states):
        smaller = _with_smaller_page(plan)
        if smaller is None:
            break
        plan = smaller
        slabs = caches.with_slabs(plan)
        if slabs.slab_bytes < best.slab_bytes:
            best = slabs
    return best


def _with_smaller_page(plan: CachePlan) -> CachePlan | None:
    """The plan with half as many tokens in its largest page; None: no page can be smaller."""
    shrinkable = [group for group in plan.groups if group.spec.page_size > _page_sizes(group)[-1]]
    if not shrinkable:
        return None
    largest = max(shrinkable, key=caches.page_bytes)
    (pages,) = (pool.pages for pool in plan.pools if pool.name == largest.pool)
    smaller = next(size for size in _page_sizes(largest) if size < largest.spec.page_size)
    halved = _with_page_size(largest, smaller, pages)
    return msgspec.structs.replace(plan, groups=tuple(halved if g is largest else g for g in plan.groups))


def _unfilled_bytes(group: Group, page_size: int) -> float:
    """Bytes of a sequence's pages that hold no visible token, on average over its length."""
    has_end = caches.first_visible(group.spec, 1 << 40) > 0
    return (page_size - 1) / 2 * (2 if has_end else 1) * caches.token_bytes(group)


def _with_page_size(group: Group, page_size: int, pages: str) -> Group:
    spec = msgspec.structs.replace(group.spec, page_size=page_size)
    types = caches.slot_types(spec, pages)
    slots = tuple(
        Slot(slot.name, tuple(Value(value.name, kind) for value, kind in zip(slot.tensors, types, strict=True)))
        for slot in group.slots
    )
    return msgspec.structs.replace(group, spec=spec, slots=slots)
