"""Page tables: which pages each sequence holds, by group, over pools that share one arena.

A sequence grows by the pages that its next tokens need and gives back, in groups with a window or chunk, those that no
later token can see. In a group of states it holds one page, whatever its length. No page is set aside for padding:
tokens that must not be cached have slot -1.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

import msgspec
import numpy as np

from precast.ir.graph.schema import CachePlan, EntrySpec, IndexSpec, LatentSpec, PagedSpec, StateGroup
from precast.ir.memory import caches
from precast.loader.cache.arena import Arena
from precast.loader.cache.pages import PagePool

if TYPE_CHECKING:
    import numpy.typing as npt

Positions = TypeVar("Positions", int, "npt.NDArray[np.int64]")


class PoolUsage(msgspec.Struct, frozen=True):
    """One pool at a moment. `pages` could be in use: those in its slabs, and those that the free slabs hold.

    Of `pages_in_use` up to `pages_reclaimable` are only kept for reuse, and are given up when they are needed.
    `pages_free` are in the pool's own slabs, `pages_evicted` were given back behind windows since the start.
    `waste_bytes` of the pool's slabs belong to no page in use, or are its padding.
    """

    pages: int
    pages_in_use: int
    pages_free: int = 0
    pages_evicted: int = 0
    waste_bytes: int = 0
    pages_reclaimable: int = 0


class SequenceTable:
    """The pages of one sequence. Only `PageTables` changes it.

    `pages[group]` are in the order of their positions, `first[group]` were evicted in front of them: the page of
    position `p` is `pages[group][p // page_size - first[group]]`. A group of states has one page, its slot.
    """

    __slots__ = ("first", "pages")

    def __init__(self, groups: Iterable[str]) -> None:
        self.pages: dict[str, array[int]] = {name: array("i") for name in groups}
        self.first = dict.fromkeys(self.pages, 0)


class PageTables:
    """The tables of all sequences, and the pools behind them.

    `pools` by name, and `pool_of` by group, are for those who share pages between sequences.
    """

    def __init__(self, plan: CachePlan, arena: Arena) -> None:
        """Slabs are those of the plan, or for a plan without them those of `caches.with_slabs`."""
        self.plan = caches.with_slabs(plan)
        self.arena = arena
        self.groups = caches.groups(self.plan)
        self.pools = {pool.name: PagePool(arena, pool.pages_per_slab) for pool in self.plan.pools}
        self.pool_of = {group.name: self.pools[group.pool] for group in self.groups}
        self._forgetting = tuple(group for group in self.plan.groups if forgets(group.spec))
        self._lasting = {group.name for group in self.plan.groups if not forgets(group.spec)}
        self._filled_bytes = {group.pool: caches.filled_bytes(group) for group in self.groups}
        self._evicted = dict.fromkeys(self.pool_of, 0)

    def new_table(self) -> SequenceTable:
        """The table of a sequence without pages."""
        return SequenceTable(group.name for group in self.groups)

    # --- what fits ---------------------------------------------------------------------------------------------

    def missing(self, table: SequenceTable, length: int) -> dict[str, int]:
        """Pages by group that the sequence must get to grow to `length` tokens; groups that need none are left out."""
        found = {}
        for group in self.groups:
            held = table.first[group.name] + len(table.pages[group.name])
            count = caches.sequence_pages(group, length) - held
            if count > 0:
                found[group.name] = count
        return found

    def can_take(self, pages: Mapping[str, int], freed: Mapping[str, int] | None = None) -> bool:
        """Whether so many pages by group can be had, all of them, if `freed` ones by pool are given back first.

        At best: those given back may lie on slabs of which other pages stay.
        """
        return self.slabs_left(pages, freed or {}) >= 0

    def by_pool(self, pages: Mapping[str, int]) -> dict[str, int]:
        """Pages by pool, from those by group."""
        found = dict.fromkeys(self.pools, 0)
        for group in self.groups:
            found[group.pool] += pages.get(group.name, 0)
        return found

    def with_growth(
        self, table: SequenceTable, length: int, step: int, num_running: int, growth: int
    ) -> dict[str, int]:
        """Pages by group that a sequence needs to grow to `length` tokens, and by which all that run can grow then.

        Up to `step` tokens are computed at a time. Each of `num_running` grows by a page, or `growth` tokens if pages
        are larger; where pages are given back, one page more is enough for all.
        """
        found = self.missing(table, length)
        for group in self.plan.groups:
            missing, size = found.get(group.name, 0), group.spec.page_size
            if group.name in self._lasting:
                found[group.name] = missing - (-num_running * min(growth, size) // size)
            else:
                most = caches.peak_pages(group, length, step) + 1 - len(table.pages[group.name])
                found[group.name] = max(min(missing + 1, most), 0)
        return found

    def can_hold(self, length: int, step: int) -> bool:
        """Whether the empty cache holds a sequence that grows to `length` tokens, up to `step` of them at a time."""
        return caches.slabs_for(self.plan, 1, length, step) <= self.arena.num_slabs

    def step_for(self, length: int, most: int) -> int:
        """Tokens to compute at a time, so that the empty cache holds the sequence: `most`, halved until it does.

        The caller knows that it does at one token at a time.
        """
        step = most
        while step > 1 and not self.can_hold(length, step):
            step //= 2
        return step

    def arithmetic(self, length: int) -> str:
        """How a sequence of `length` tokens, computed one by one, compares with the empty cache, for messages."""
        clauses = []
        for group in self.groups:
            count, per_slab = caches.peak_pages(group, length, 1), self.pool_of[group.name].pages_per_slab
            kind = "a state" if isinstance(group, StateGroup) else f"{count} pages of {group.spec.page_size} tokens"
            clauses.append(f"group {group.name}: {kind}, {per_slab} a slab")
        needed = caches.slabs_for(self.plan, 1, length, 1)
        return (
            f"{'; '.join(clauses)}: {needed} slabs of {self.plan.slab_bytes} bytes needed, {self.arena.num_slabs} there"
        )

    def slabs_left(self, pages: Mapping[str, int], freed: Mapping[str, int]) -> int:
        """Free slabs, once `freed` pages by pool are given back and `pages` by group taken; below 0: so many lack."""
        slabs, wanted = self.arena.num_free, self.by_pool(pages)
        for name, pool in self.pools.items():
            given = freed.get(name, 0)
            slabs += min((pool.num_room + given - wanted[name]) // pool.pages_per_slab, given)
        return slabs

    # --- one sequence ------------------------------------------------------------------------------------------

    def grow(self, table: SequenceTable, length: int) -> None:
        """Take the missing pages. The caller has asked whether they can be had."""
        missing = self.missing(table, length)
        if not missing:
            return
        assert self.can_take(missing), f"pages {missing} wanted, {self.arena.num_free} slabs are free"
        # Pages that stay until the sequence ends are given back together: they get slabs of their own, as long as that
        # leaves the others half of the free ones.
        spare = self.slabs_left(missing, {}) // 2 // max(1, len(self._lasting))
        for name, count in missing.items():
            pool = self.pool_of[name]
            table.pages[name].extend(pool.allocate(count, spare=spare if name in self._lasting else 0))

    def hold(self, table: SequenceTable) -> None:
        """Share the pages of a table that was put together from those of others: one holder more for each page."""
        for name, pages in table.pages.items():
            self.pool_of[name].retain(pages)

    def evict(self, table: SequenceTable, position: int) -> None:
        """Give back the pages that the token at `position`, and those after it, can't see any more."""
        for group in self._forgetting:
            name = group.name
            seen = caches.first_visible(group.spec, position) // group.spec.page_size
            count = min(seen - table.first[name], len(table.pages[name]))
            if count > 0:
                self.pool_of[name].free(table.pages[name][:count])
                del table.pages[name][:count]
                table.first[name] += count
                self._evicted[name] += count

    def append_page(self, group: str, tables: Sequence[SequenceTable]) -> array[int]:
        """One page more of the group for each of the sequences, in their order. The caller has asked."""
        taken = self.pool_of[group].allocate(len(tables))
        for table, page in zip(tables, taken, strict=True):
            table.pages[group].append(page)
        return taken

    def drop_first_page(self, group: str, tables: Sequence[SequenceTable]) -> None:
        """Give back the first page of the group in each of the sequences, whose next tokens don't see it."""
        self.pool_of[group].free([table.pages[group].pop(0) for table in tables])
        for table in tables:
            table.first[group] += 1
        self._evicted[group] += len(tables)

    def release(self, table: SequenceTable) -> None:
        """Give back all pages; the table is as new."""
        for name, pages in table.pages.items():
            self.pool_of[name].free(pages)
            del pages[:]
            table.first[name] = 0

    def usage(self, reclaimable: Mapping[str, int] | None = None) -> dict[str, PoolUsage]:
        """All pools, by name. `reclaimable`: pages by group that are only kept for reuse, at most."""
        found, kept, evicted = {}, self.by_pool(reclaimable or {}), self.by_pool(self._evicted)
        for name, pool in self.pools.items():
            held = pool.num_held
            waste = pool.num_slabs * self.plan.slab_bytes - held * self._filled_bytes[name]
            found[name] = PoolUsage(
                held + pool.num_available, held, pool.num_room, evicted[name], waste, min(kept[name], held)
            )
        return found


def forgets(spec: PagedSpec | LatentSpec | IndexSpec | EntrySpec) -> bool:
    """Whether tokens become invisible."""
    if isinstance(spec, IndexSpec):
        return False
    return spec.window is not None or (isinstance(spec, PagedSpec) and spec.chunk is not None)


def unseen_from(spec: PagedSpec | LatentSpec | IndexSpec | EntrySpec, end: Positions) -> Positions:
    """The first position whose token sees none of the tokens before `end`, where `forgets`; of an array, for each."""
    assert not isinstance(spec, IndexSpec)
    if spec.window is not None:
        return end + (spec.window - 1)
    assert isinstance(spec, PagedSpec)
    assert spec.chunk is not None
    return -(-end // spec.chunk) * spec.chunk
