"""Cache memory: how many pages fit into it, the tensors that hold them, and which pages are free.

The graph's cache plan is the only source: a pool's pages are counted by its symbol, over which the cache tensors of
all its slots are typed. Each group has a page table, and therefore a free list, of its own: page 3 of one group and
page 3 of another are different memory also where the groups share a pool, since no slot belongs to two groups.
A sequence has one page of a group of states, whatever its length. No page is set aside for padding: tokens that must
not be cached have slot -1.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Mapping

import msgspec
import torch

from precast.ir import caches, symbols
from precast.ir.schema import CachePlan, Group, StateGroup
from precast.kernels.dtypes import BY_NAME

SequencePages = Mapping[str, "array[int]"]
"""The pages of one sequence by group, in the order of their positions."""


class PoolUsage(msgspec.Struct, frozen=True):
    """Pages of one pool, counted over the page tables of its groups."""

    pages: int
    pages_in_use: int


class PageAllocator:
    """The free pages `0 .. num_pages - 1` of one group, last freed first. Taking and giving back cost O(1) a page."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._is_used = bytearray(num_pages)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> array[int]:
        """`count` free pages as int32, which are in use from now on. The caller has looked at `num_free`."""
        assert count <= len(self._free), f"{count} pages wanted, {len(self._free)} are free"
        pages = array("i", [self._free.pop() for _ in range(count)])
        for page in pages:
            self._is_used[page] = 1
        return pages

    def free(self, pages: Iterable[int]) -> None:
        """Give back pages, each of which is in use."""
        for page in pages:
            assert self._is_used[page], f"page {page} is freed, and is not in use"
            self._is_used[page] = 0
            self._free.append(page)


class PageTables:
    """Which pages are free in each group. Sequences reserve all the pages they can come to need, and give all back."""

    def __init__(self, plan: CachePlan, num_pages: Mapping[str, int]) -> None:
        """`num_pages` by pool."""
        self.groups = caches.groups(plan)
        self._allocators = {group.name: PageAllocator(num_pages[group.pool]) for group in self.groups}

    def needed(self, num_tokens: int) -> dict[str, int]:
        """Pages by group that hold `num_tokens` cached tokens."""
        return {
            group.name: 1 if isinstance(group, StateGroup) else math.ceil(num_tokens / group.spec.page_size)
            for group in self.groups
        }

    def can_hold(self, num_tokens: int) -> bool:
        """Whether `num_tokens` fit when all pages are free."""
        return all(count <= self._allocators[name].num_pages for name, count in self.needed(num_tokens).items())

    def can_reserve(self, num_tokens: int) -> bool:
        """Whether `num_tokens` fit now."""
        return all(count <= self._allocators[name].num_free for name, count in self.needed(num_tokens).items())

    def reserve(self, num_tokens: int) -> SequencePages:
        """Take the pages that hold `num_tokens` in every group. The caller has asked `can_reserve`."""
        return {name: self._allocators[name].allocate(count) for name, count in self.needed(num_tokens).items()}

    def release(self, pages: SequencePages) -> None:
        """Give back what `reserve` gave."""
        for name, taken in pages.items():
            self._allocators[name].free(taken)

    def arithmetic(self, num_tokens: int) -> str:
        """How the pages for `num_tokens` compare with the pages there are, a clause a group, for messages."""
        return "; ".join(
            f"group {group.name}: {count} {_unit_name(group)} needed, "
            f"{self._allocators[group.name].num_free} free of {self._allocators[group.name].num_pages}"
            for group, count in zip(self.groups, self.needed(num_tokens).values(), strict=True)
        )

    def usage(self) -> dict[str, PoolUsage]:
        """Pages in use by pool. Pages are in use from a request's admission to its end."""
        found: dict[str, PoolUsage] = {}
        for group in self.groups:
            allocator, before = self._allocators[group.name], found.get(group.pool, PoolUsage(0, 0))
            in_use = allocator.num_pages - allocator.num_free
            found[group.pool] = PoolUsage(before.pages + allocator.num_pages, before.pages_in_use + in_use)
        return found


def _unit_name(group: Group | StateGroup) -> str:
    return "state" if isinstance(group, StateGroup) else f"pages of {group.spec.page_size} tokens"


def page_bytes(plan: CachePlan) -> dict[str, int]:
    """Bytes by pool that one more page takes, over all slots of all groups of the pool."""
    counters = {pool.name: pool.pages for pool in plan.pools}
    total = dict.fromkeys(counters, 0)
    for group in caches.groups(plan):
        one_page = {counters[group.pool]: 1}
        for tensor in (tensor for slot in group.slots for tensor in slot.tensors):
            elements = math.prod(symbols.evaluate(size, one_page) for size in tensor.type.shape)
            total[group.pool] += elements * BY_NAME[tensor.type.dtype].itemsize
    return total


def cache_bytes_for(plan: CachePlan, num_seqs: int, seq_len: int) -> int:
    """Bytes of cache that hold `num_seqs` sequences of `seq_len` tokens in every group, in whole pages."""
    return num_seqs * (math.ceil(seq_len / _unit(plan)) * _unit_bytes(plan) + _state_bytes(plan))


def plan_pages(plan: CachePlan, *, cache_bytes: int, max_num_seqs: int, max_seq_len: int) -> dict[str, int]:
    """Pages by pool that fit into `cache_bytes`, and no more than `max_num_seqs` sequences of `max_seq_len` fill.

    States come first. Of what they leave, all pools get room for the same number of tokens, counted in units of the
    page sizes' least common multiple: `units = bytes // bytes_of_a_unit`, `pages = units * unit // page_size`.
    """
    left = max(cache_bytes, 0)
    states = _num_states(plan, left, max_num_seqs, max_seq_len) if plan.states else 0
    left -= states * _state_bytes(plan)
    unit = _unit(plan)
    useful = max_num_seqs * math.ceil(max_seq_len / unit)
    units = min(left // max(_unit_bytes(plan), 1), useful)
    pages = {name: units * unit // size for name, size in _page_sizes(plan).items()}
    return pages | {group.pool: states for group in plan.states}


def _num_states(plan: CachePlan, num_bytes: int, max_num_seqs: int, max_seq_len: int) -> int:
    """One state, and room for pages of a sequence as long as may be. Of further bytes at most half are states, or what
    pages have no use for."""
    state, one = _state_bytes(plan), cache_bytes_for(plan, 1, max_seq_len)
    rest = max(num_bytes - one, 0)
    spare = max(rest // 2, rest - (max_num_seqs - 1) * (one - state))
    return min(num_bytes // state, 1 + spare // state, max_num_seqs)


def cache_tensors(plan: CachePlan, num_pages: Mapping[str, int], *, device: torch.device) -> dict[str, torch.Tensor]:
    """The cache tensors of all slots by name, uninitialised: what no token wrote enters no product (`kernels/`)."""
    counters = {pool.pages: num_pages[pool.name] for pool in plan.pools}
    tensors = {}
    for tensor in caches.tensors(plan):
        shape = [symbols.evaluate(size, counters) for size in tensor.type.shape]
        tensors[tensor.name] = torch.empty(shape, dtype=BY_NAME[tensor.type.dtype], device=device)
    return tensors


def _page_sizes(plan: CachePlan) -> dict[str, int]:
    """Tokens a page by pool: groups of one pool have one page geometry."""
    return {group.pool: group.spec.page_size for group in plan.groups}


def _unit(plan: CachePlan) -> int:
    return math.lcm(*_page_sizes(plan).values())  # 1 without pages


def _state_bytes(plan: CachePlan) -> int:
    """Bytes of the states of one sequence, in all groups."""
    of_pools = page_bytes(plan)
    return sum(of_pools[group.pool] for group in plan.states)


def _unit_bytes(plan: CachePlan) -> int:
    sizes, unit = _page_sizes(plan), _unit(plan)
    of_pools = page_bytes(plan)
    return sum(of_pools[pool] * (unit // size) for pool, size in sizes.items())
