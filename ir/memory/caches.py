"""What a cache plan comes to: its slots and their tensors, and the arithmetic of their memory.

Cache memory is one arena of slabs. A page of a pool holds the page of each layer of its group, one tensor after the
other; page `p` of a pool begins at byte `p * page_stride` of the arena, `page_stride = slab_bytes / pages_per_slab`.
The builder chooses slabs by this arithmetic, and the loader allocates by it.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import TypeVar

import msgspec

from precast.ir.graph import symbols
from precast.ir.graph.schema import (
    CacheGroup,
    CachePlan,
    CacheSpec,
    EntrySpec,
    Expr,
    Group,
    IndexSpec,
    LatentSpec,
    PagedSpec,
    Slot,
    StateGroup,
    StateSpec,
    TensorType,
    Value,
)
from precast.ir.weights.tensorfile import element_bytes

G = TypeVar("G", Group, StateGroup)

UNSHARDED: Mapping[str, int] = MappingProxyType({"tp": 1, "rank": 0})
"""The symbols that a page's sizes may hold, with their values on the one rank of one."""
PAGE_ALIGNMENT = 256
"""Bytes to which pages and each tensor's part of them are aligned: the widest load of a kernel, and whole sectors."""
MAX_SLAB_BYTES = 1 << 30
"""Of a slab that holds pages of several sizes well; one page of a larger state is a slab all the same."""
MAX_REST = 0.01
"""The share of a slab that may be left over beside its pages, for a slab to be large enough. That part of the padding
is decided by the size of slabs; the other part aligns tensors within pages."""


def groups(plan: CachePlan) -> tuple[CacheGroup, ...]:
    """All groups, those with page tables first."""
    return (*plan.groups, *plan.states)


def slots(plan: CachePlan) -> Iterator[tuple[CacheGroup, Slot]]:
    """Every slot, with its group."""
    return ((group, slot) for group in groups(plan) for slot in group.slots)


def tensors(plan: CachePlan) -> Iterator[Value]:
    """The cache tensors of every slot."""
    return (tensor for _, slot in slots(plan) for tensor in slot.tensors)


def input_names(group: CacheGroup) -> tuple[str, ...]:
    """The group's metadata inputs."""
    if isinstance(group, StateGroup):
        return (group.slot_ids,)
    names = group.inputs
    return (names.page_indices, names.page_indptr, names.page_start, names.slot_mapping)


def slot_types(spec: CacheSpec, pages: str) -> tuple[TensorType, ...]:
    """The types of a slot's tensors in a pool whose pages `pages` counts."""
    if isinstance(spec, StateSpec):
        return (TensorType(spec.dtype, (pages, *spec.shape)),)
    if isinstance(spec, LatentSpec):
        return (TensorType(spec.dtype, (pages, spec.page_size, spec.latent_size + spec.rope_size)),)
    if isinstance(spec, IndexSpec):
        return (TensorType(spec.dtype, (pages, spec.page_size, spec.key_size)),)
    if isinstance(spec, EntrySpec):
        # Of a plan that was not verified: a page without a whole block has no entry, and is refused for it.
        return (TensorType(spec.dtype, (pages, spec.page_size // max(spec.rate, 1), spec.entry_size)),)
    keys = (pages, spec.page_size, spec.num_kv_heads, spec.head_size)
    return TensorType(spec.dtype, keys), TensorType(spec.dtype, (*keys[:-1], spec.value_size))


def spec_sizes(group: CacheGroup) -> Iterator[tuple[str, Expr]]:
    """The sizes that the group's spec says, by the names of its fields."""
    for name in group.spec.__struct_fields__:
        found = getattr(group.spec, name)
        if name not in ("kind", "dtype") and found is not None:
            yield from ((name, size) for size in (found if name == "shape" else (found,)))


def token_bytes(group: CacheGroup) -> int:
    """Bytes that one more token keeps in all layers of the group, on one rank of one; 0 for states."""
    return 0 if isinstance(group, StateGroup) else filled_bytes(group) // group.spec.page_size


def state_bytes(group: CacheGroup) -> int:
    """Bytes that a sequence keeps in all layers of the group whatever its length, on one rank of one; 0 for pages."""
    return filled_bytes(group) if isinstance(group, StateGroup) else 0


def sequence_bytes(group: CacheGroup, length: int) -> int:
    """Bytes of the pages that a sequence of `length` tokens keeps in the group. What its window has left is free."""
    return kept_pages(group, length) * filled_bytes(group)


def kept_pages(group: CacheGroup, length: int) -> int:
    """Pages of the group that hold a token which the next one, after `length`, can see."""
    if isinstance(group, StateGroup):
        return 1
    return sequence_pages(group, length) - first_visible(group.spec, length) // group.spec.page_size


def sequence_pages(group: CacheGroup, length: int) -> int:
    """Pages that hold `length` tokens in the group; 1 for states."""
    return 1 if isinstance(group, StateGroup) else -(-length // group.spec.page_size)


def peak_pages(group: CacheGroup, length: int, step: int) -> int:
    """The most pages that a sequence holds while it grows to `length` tokens, up to `step` of them at a time.

    Behind a window or chunk pages are given back between steps. The worst alignment counts: `n` tokens in a row stand
    on up to `ceil((n - 1) / page_size) + 1` pages.
    """
    whole = sequence_pages(group, length)
    sizes = dict(spec_sizes(group))
    reach = sizes.get("window", sizes.get("chunk"))
    if isinstance(group, StateGroup) or not isinstance(reach, int):
        return whole
    tokens = reach - 1 + step
    return min(whole, -(-(tokens - 1) // group.spec.page_size) + 1)


def whole_blocks(page_size: int, rate: int) -> int:
    """Tokens of the smallest page that holds whole blocks of `rate` tokens, and `page_size` tokens."""
    return -(-page_size // rate) * rate


def first_visible(spec: PagedSpec | LatentSpec | IndexSpec | EntrySpec, position: int) -> int:
    """The position of the first token that the one at `position` can see."""
    if isinstance(spec, IndexSpec):
        return 0
    if spec.window is not None:
        return max(0, position - spec.window + 1)
    if isinstance(spec, PagedSpec) and spec.chunk is not None:
        return position // spec.chunk * spec.chunk
    return 0


def visible_bytes(group: CacheGroup, length: int) -> int:
    """Bytes of the group that the next token, after `length`, can see."""
    if isinstance(group, StateGroup):
        return state_bytes(group)
    return min(length, length + 1 - first_visible(group.spec, length)) * token_bytes(group)


# --- memory ------------------------------------------------------------------------------------------------------


def page_layout(group: CacheGroup) -> dict[str, int]:
    """The byte in the group's page at which each tensor's part begins, a multiple of 256, on one rank of one."""
    return _laid_out(group)[0]


def filled_bytes(group: CacheGroup) -> int:
    """Bytes of a full page of the group in all its layers, without padding: that is what its stride has besides."""
    return len(group.slots) * sum(map(_one_page, slot_types(group.spec, "P")))


def page_bytes(group: CacheGroup) -> int:
    """Bytes of the group's page from the first tensor's part to the end of the last, up to a multiple of 256."""
    return _laid_out(group)[1]


def pool_page_bytes(plan: CachePlan) -> dict[str, int]:
    """`page_bytes` by pool; of the largest page, for groups that share one."""
    return _largest_pages(groups(plan))


def page_stride(plan: CachePlan, pool: str) -> int:
    """Bytes from one page of the pool to the next, in a plan that has slabs."""
    (per_slab,) = (found.pages_per_slab for found in plan.pools if found.name == pool)
    return plan.slab_bytes // per_slab


def with_slabs(plan: CachePlan) -> CachePlan:
    """The plan as it is if it has slabs, else with slabs of our choice. Without groups there is nothing to choose."""
    if plan.slab_bytes or not (plan.groups or plan.states):
        return plan
    slab_bytes, per_slab = choose_slabs(groups(plan))
    pools = tuple(msgspec.structs.replace(pool, pages_per_slab=per_slab[pool.name]) for pool in plan.pools)
    return msgspec.structs.replace(plan, pools=pools, slab_bytes=slab_bytes)


def without_slabs(plan: CachePlan) -> CachePlan:
    """The plan without slabs: those of one rank's pages don't fit the pages of a rank among several."""
    pools = tuple(msgspec.structs.replace(pool, pages_per_slab=1) for pool in plan.pools)
    return msgspec.structs.replace(plan, pools=pools, slab_bytes=0)


def with_slots(plan: CachePlan, kept: Callable[[Slot], bool]) -> CachePlan:
    """The plan with these slots alone. Groups stay that have none of them left, and hold no bytes.

    In a plan with slabs each holds as many pages of each pool as before, so that page tables are the same; pages, and
    with them slabs, are as much smaller as they can be.
    """

    def left(group: G) -> G:
        slots = tuple(slot for slot in group.slots if kept(slot))
        return msgspec.structs.replace(group, slots=slots)

    made = msgspec.structs.replace(plan, groups=tuple(map(left, plan.groups)), states=tuple(map(left, plan.states)))
    if not plan.slab_bytes:
        return made
    pages = pool_page_bytes(made)
    unit = PAGE_ALIGNMENT * math.lcm(*(pool.pages_per_slab for pool in plan.pools))
    needed = max(pool.pages_per_slab * max(pages[pool.name], PAGE_ALIGNMENT) for pool in plan.pools)
    return msgspec.structs.replace(made, slab_bytes=-(-needed // unit) * unit)


def slabs_for(plan: CachePlan, num_seqs: int, seq_len: int, step: int) -> int:
    """Slabs of the plan for `num_seqs` sequences that grow to `seq_len` tokens, up to `step` of them at a time."""
    pages = dict.fromkeys((pool.name for pool in plan.pools), 0)
    for group in groups(plan):
        pages[group.pool] += num_seqs * peak_pages(group, seq_len, step)
    return sum(-(-pages[pool.name] // pool.pages_per_slab) for pool in plan.pools)


def choose_slabs(groups: Iterable[CacheGroup]) -> tuple[int, dict[str, int]]:
    """Bytes of a slab, and pages of each pool in it: the smallest slab tried of which at most 1 % is left over.

    That is so of each pool of pages with tokens, and of all states together, of which a sequence has one each. Where
    no slab up to 1 GiB is good enough, the best counts; a larger page is a slab all the same. Pages and slabs are whole
    units of 256 bytes, and so are the page strides.
    """
    groups = tuple(groups)
    units = {pool: size // PAGE_ALIGNMENT for pool, size in _largest_pages(groups).items()}
    states = {group.pool for group in groups if isinstance(group, StateGroup)}
    best: tuple[float, int, dict[str, int]] | None = None
    for slab in _tried_slabs(units):
        divisors = _divisors(slab)
        counts = {pool: divisors[bisect.bisect_right(divisors, slab // size) - 1] for pool, size in units.items()}
        rest = _rest(units, states, slab, counts)
        if best is None or rest < best[0]:
            best = rest, slab, counts
        if rest <= MAX_REST:
            break
    assert best is not None, "a plan has groups, and its largest page is a slab"
    return best[1] * PAGE_ALIGNMENT, best[2]


def _tried_slabs(units: dict[str, int]) -> list[int]:
    """Units of slabs that may hold pages of all these sizes well, in ascending order.

    A slab is divided evenly, so its units must have divisors near `slab / size` for each size. That is so of multiples
    of the largest page; of those rounded up to what common multiples of such divisors need; and, for sizes that have
    little in common, of numbers with many divisors.
    """
    largest = max(units.values())
    most = max(MAX_SLAB_BYTES // PAGE_ALIGNMENT, largest * 102 // 100)
    tried = {largest * k for k in range(1, _LARGEST_PAGES + 1)}
    tried |= {_rounded(units, least) for least in tuple(tried) if least <= most}
    tried |= set(range(-(-largest // _MANY_DIVISORS) * _MANY_DIVISORS, most + 1, _MANY_DIVISORS))
    return sorted(slab for slab in tried if slab <= most)


_LARGEST_PAGES = 64
"""Pages of the largest size in a slab, at most."""
_MANY_DIVISORS = 5040
"""Divided by all numbers up to 10."""
_NEAR = 64
"""Counts of pages that are tried for a pool and a size of slab."""


def _rounded(units: dict[str, int], least: int) -> int:
    """At least `least` units, divided by a count of pages near `least / size` for each size."""
    common = 1
    for size in sorted(units.values(), reverse=True):
        most = least // size
        fewest = max(math.ceil(least * (1 - MAX_REST) / size), most - _NEAR, 1)
        multiples = [(math.lcm(common, count), count) for count in range(most, min(fewest, most) - 1, -1)]
        # The stride that comes of it, up to a constant; among equals the multiple that leaves most to the others.
        _, common = min((-(-least // many) * many / count, many) for many, count in multiples)
    return -(-least // common) * common


def _divisors(number: int) -> list[int]:
    """All divisors, in ascending order."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return small + [number // d for d in reversed(small) if d * d != number]


def _rest(units: dict[str, int], states: set[str], slab: int, counts: dict[str, int]) -> float:
    """The share of slabs that is left over: the largest of the pools with tokens and of all states together."""
    shares = [1 - counts[pool] * size / slab for pool, size in units.items() if pool not in states]
    if states:
        strides = sum(slab // counts[pool] for pool in states)
        shares.append(1 - sum(units[pool] for pool in states) / strides)
    return max(shares)


def _largest_pages(groups: Iterable[CacheGroup]) -> dict[str, int]:
    found: dict[str, int] = {}
    for group in groups:
        found[group.pool] = max(page_bytes(group), found.get(group.pool, 0))
    return found


def _laid_out(group: CacheGroup) -> tuple[dict[str, int], int]:
    offsets, end = {}, 0
    for tensor in (tensor for slot in group.slots for tensor in slot.tensors):
        offsets[tensor.name] = end
        end += -(-_one_page(tensor.type) // PAGE_ALIGNMENT) * PAGE_ALIGNMENT
    return offsets, end


def _one_page(kind: TensorType) -> int:
    """Bytes of one page of a cache tensor, whose first size counts pages."""
    return math.prod(symbols.evaluate(size, UNSHARDED) for size in kind.shape[1:]) * element_bytes(kind.dtype)
