"""Reuse of what other sequences computed: pages and states of a prefix, found by the content of its tokens.

A sequence is cut into blocks of whole pages of every group. The digest of a block covers all tokens up to its end, so
equal digests mean equal prefixes. A computed block stays known when its sequence has ended, with its pages in the
groups that see everything. A sequence can go on from the end of a block only if two more things are there, which are
kept at some blocks only, the points:

- in groups with a window or chunk, the pages that the next token sees (not those of the block, which may be behind),
- in groups of states, a copy of the state behind the block's last token, in a page of its own.

Points are made where a chunk of a prompt ends, where a prompt leaves what was known, and where a sequence ends.
What is reused is what would have been computed: no digest is shared by sequences whose keys are rotated differently,
and at least one token of a sequence is always computed.

Pages that only known blocks hold are given up, those used longest ago first, whenever a sequence needs pages.
"""

from __future__ import annotations

import hashlib
import math
from array import array
from collections import Counter
from collections.abc import Callable, Hashable, Iterable

from precast.ir.memory import caches
from precast.loader.cache.tables import PageTables, forgets
from precast.loader.schedule.requests import PageCopy, Request

STATE_BLOCK = 64
"""Tokens a block where no group has pages."""
MAX_BLOCKS = 1 << 16
"""Known blocks that no sequence uses: without pages nothing else bounds them."""


class Point:
    """What a sequence needs to go on behind a block: pages of the groups that forget, and states, by group."""

    __slots__ = ("first", "pages", "states")

    def __init__(self, first: dict[str, int], pages: dict[str, array[int]]) -> None:
        self.first = first
        self.pages = pages
        self.states: dict[str, int] = {}


class Block:
    """A known block: its pages in the groups that see everything, and how many running sequences stand on it."""

    __slots__ = ("digest", "num_users", "pages", "point")

    def __init__(self, digest: bytes, pages: dict[str, array[int]]) -> None:
        self.digest = digest
        self.pages = pages
        self.point: Point | None = None
        self.num_users = 0


class Prefixes:
    """The known blocks. They hold pages of the pools like any sequence, and give them up when they are asked to."""

    def __init__(self, tables: PageTables, *, kind_of: Callable[[int], Hashable] = lambda _: 0) -> None:
        """Sequences of unequal `kind_of(prefill_length)` share nothing."""
        self._tables = tables
        self._kind_of = kind_of
        plan = tables.plan
        self._full = [group for group in plan.groups if not forgets(group.spec)]
        self._forgetting = [group for group in plan.groups if forgets(group.spec)]
        self._states = plan.states
        self.block = math.lcm(*(group.spec.page_size for group in plan.groups)) if plan.groups else STATE_BLOCK
        self._known: dict[bytes, Block] = {}
        self._unused: dict[bytes, Block] = {}  # of the known ones, those without users: used longest ago first
        self._points: dict[bytes, Block] = {}  # of the known ones, those with a point: made or used longest ago first
        self._reclaimable = dict.fromkeys(tables.pool_of, 0)
        self._saves: dict[tuple[str, int], int] = {}  # group and target: the source, in the order of the copies

    @property
    def num_blocks(self) -> int:
        return len(self._known)

    @property
    def has_states(self) -> bool:
        return bool(self._states)

    def reclaimable(self) -> dict[str, int]:
        """Pages by group that `drop_one` gives back at most; some of windows may still be in use."""
        return self._reclaimable

    # --- going on behind a prefix --------------------------------------------------------------------------------

    def match(self, request: Request) -> int:
        """The longest prefix of the request that need not be computed, in tokens. Notes how far it is known."""
        blocks = self._chain(request) if request.shares else []
        request.shared_length = len(blocks) * self.block
        if self._forgetting or self._states:
            while blocks and blocks[-1].point is None:
                blocks.pop()
        return len(blocks) * self.block

    def adopt(self, request: Request, length: int) -> None:
        """Let the request, which has no pages, go on behind its first `length` tokens, as `match` gave them."""
        count = length // self.block
        request.num_computed = request.num_reused = length
        request.num_registered = count
        if not count:
            return
        blocks = self._chain(request)[:count]
        for block in blocks:
            self._use(block, request)
        pages: dict[str, array[int]] = {group.name: array("i") for group in self._full}
        for block in blocks:
            for name, some in block.pages.items():
                pages[name].extend(some)
        first: dict[str, int] = {}
        point = blocks[-1].point
        if point is not None:
            pages |= point.pages
            first = point.first
            for name, page in point.states.items():
                self._tables.pool_of[name].retain(page)
                request.restores[name] = page
            self._points[blocks[-1].digest] = self._points.pop(blocks[-1].digest)
        assert request.table is not None
        self._tables.adopt(request.table, length, pages, first)

    def restores(self, request: Request) -> list[PageCopy]:
        """The states that the request goes on from, to be copied before its first chunk."""
        assert request.table is not None
        table = request.table
        return [PageCopy(name, page, table.pages[name][0]) for name, page in request.restores.items()]

    def restored(self, request: Request) -> None:
        """The request's first chunk is computed: the states that it went on from may be dropped."""
        for name, page in request.restores.items():
            self._free_state(name, page)
        request.restores.clear()

    # --- what sequences leave ------------------------------------------------------------------------------------

    def register(self, request: Request) -> None:
        """Make known what the request has computed, while it has its pages. A point is made at its last whole block.

        Where the request left what was known, and its pages still show it, there is a point too; and where all of its
        tokens are whole blocks, one block before, for who begins with the same ones and has to compute the last.
        """
        # With states to restore nothing is computed yet, and its states are not its own.
        if request.restores or not request.shares:
            return
        count = request.num_cached // self.block
        digests = self._digests(request, count)
        for index in range(request.num_registered, count):
            block = self._known.get(digests[index])
            if block is None:
                self._add(digests[index], index, request)
            elif not block.num_users:
                self._take_over(block, index, request)
        request.num_registered = max(request.num_registered, count)
        if self._forgetting or self._states:
            same = min(request.num_cached, len(request.token_ids) - 1) // self.block
            for end in {count, same, min(request.shared_length // self.block, count)} - {0}:
                self._make_point(digests[end - 1], end * self.block, request)

    def leave(self, request: Request) -> None:
        """The request gives up its pages: its blocks may be dropped, the last ones first."""
        self.restored(request)
        while request.blocks:
            block = request.blocks.pop()
            block.num_users -= 1
            if not block.num_users:
                self._unused[block.digest] = block
                self._count(block.pages, 1)
        request.num_registered = 0
        request.shared_length = 0
        while len(self._unused) > MAX_BLOCKS:
            self.drop_one()

    def take_saves(self) -> list[PageCopy]:
        """The states to be copied into points before the next step, each target once."""
        return [PageCopy(name, source, target) for (name, target), source in self._saves.items()]

    def saved(self) -> None:
        """The copies of `take_saves` are made."""
        self._saves.clear()

    # --- giving up -----------------------------------------------------------------------------------------------

    def drop_one(self) -> bool:
        """Give up the block that was used longest ago, or where all are in use a point; False: nothing left to free."""
        if self._unused:
            digest, block = next(iter(self._unused.items()))
            del self._unused[digest], self._known[digest]
            self._count(block.pages, -1)
            for name, pages in block.pages.items():
                self._tables.pool_of[name].free_many(pages)
            self._drop_point(block)
            return True
        found = next(filter(self._frees, self._points.values()), None)
        if found is None:
            found = next(filter(self._frees_with_others(), self._points.values()), None)
        if found is not None:
            self._drop_point(found)
        return found is not None

    def _frees(self, block: Block) -> bool:
        """Whether a page becomes free without the block's point: windows of running sequences may show the same ones.

        Of a row of pages sequences give back the first ones first, and share the first ones with longer rows.
        """
        point = block.point
        assert point is not None
        rows = [(self._tables.pool_of[name], pages) for name, pages in point.pages.items() if pages]
        return bool(point.states) or any(1 in (pool.holders(row[0]), pool.holders(row[-1])) for pool, row in rows)

    def _frees_with_others(self) -> Callable[[Block], bool]:
        """Whether a page becomes free without the block's point and others: none but points hold it.

        So it is where several points begin with the first page of all, which a sequence has given back since.
        """
        points = [block.point for block in self._points.values() if block.point is not None]
        counts = Counter((name, page) for point in points for name, pages in point.pages.items() for page in pages)

        def frees(block: Block) -> bool:
            rows = {} if block.point is None else block.point.pages
            return any(
                self._tables.pool_of[name].holders(page) == counts[name, page]
                for name, pages in rows.items()
                for page in pages
            )

        return frees

    def drop_points(self) -> None:
        """Give up all points, for states that may be wrong."""
        for block in list(self._points.values()):
            self._drop_point(block)

    def clear(self) -> None:
        """Give up everything that no running sequence stands on, and all points."""
        while self.drop_one():
            pass
        self.drop_points()

    # --- blocks --------------------------------------------------------------------------------------------------

    def _chain(self, request: Request) -> list[Block]:
        """The known blocks that the request begins with, leaving one token to compute."""
        found: list[Block] = []
        most = (len(request.token_ids) - 1) // self.block
        while len(found) < most:
            # Digests are made as far as they are needed: most requests differ from all others early.
            digests = self._digests(request, len(found) + 1)
            block = self._known.get(digests[len(found)])
            if block is None:
                break
            found.append(block)
        return found

    def _digests(self, request: Request, count: int) -> list[bytes]:
        """The digests of at least the first `count` blocks, which have all their tokens."""
        made = request.digests
        while len(made) < count:
            before = made[-1] if made else repr(self._kind_of(request.prefill_length)).encode()
            start = len(made) * self.block
            tokens = request.token_ids[start : start + self.block].tobytes()
            made.append(hashlib.blake2b(before + tokens, digest_size=32).digest())
        return made

    def _add(self, digest: bytes, index: int, request: Request) -> None:
        block = self._known[digest] = self._unused[digest] = Block(digest, self._pages_of(index, request))
        self._count(block.pages, 1)
        self._use(block, request)

    def _take_over(self, block: Block, index: int, request: Request) -> None:
        """A known block that the request has computed itself, as no point led there: its own pages are kept instead.

        So its later blocks aren't kept without this one, and nothing is kept twice.
        """
        pages = self._pages_of(index, request)
        for name, some in block.pages.items():
            self._tables.pool_of[name].free_many(some)
        block.pages = pages
        self._use(block, request)

    def _pages_of(self, index: int, request: Request) -> dict[str, array[int]]:
        """The request's pages of a block, with one holder more."""
        assert request.table is not None
        pages = {}
        for group in self._full:
            a_block = self.block // group.spec.page_size
            pages[group.name] = request.table.pages[group.name][index * a_block : (index + 1) * a_block]
            self._retain(group.name, pages[group.name])
        return pages

    def _use(self, block: Block, request: Request) -> None:
        if not block.num_users:
            del self._unused[block.digest]
            self._count(block.pages, -1)
        block.num_users += 1
        request.blocks.append(block)

    # --- points --------------------------------------------------------------------------------------------------

    def _make_point(self, digest: bytes, length: int, request: Request) -> None:
        """A point behind the first `length` tokens, if the request's pages and states show it."""
        block, table = self._known.get(digest), request.table
        if block is None or block.point is not None or (self._states and length != request.num_cached):
            return
        assert table is not None
        first, pages = {}, {}
        for group in self._forgetting:
            name, size = group.name, group.spec.page_size
            begin, evicted = caches.first_visible(group.spec, length) // size, table.first[group.name]
            if begin < evicted:
                return
            first[name] = begin
            pages[name] = table.pages[name][begin - evicted : length // size - evicted]
        point = Point(first, pages)
        if self._states and not self._save_states(point, block, request):
            return
        for name, some in pages.items():
            self._retain(name, some)
        self._count(pages, 1)
        block.point = point
        self._points[digest] = block

    def _save_states(self, point: Point, block: Block, request: Request) -> bool:
        """Take pages for copies of the request's states. Older blocks give way to them, running sequences don't."""
        assert request.table is not None
        wanted = {group.name: 1 for group in self._states}
        while not self._tables.can_take(wanted):
            if not self._unused or next(iter(self._unused.values())) is block:
                return False
            self.drop_one()
        for name in wanted:
            page = point.states[name] = self._tables.pool_of[name].allocate()
            self._saves[name, page] = request.table.pages[name][0]
            self._reclaimable[name] += 1
        return True

    def _drop_point(self, block: Block) -> None:
        point, block.point = block.point, None
        if point is None:
            return
        del self._points[block.digest]
        self._count(point.pages, -1)
        for name, pages in point.pages.items():
            self._tables.pool_of[name].free_many(pages)
        for name, page in point.states.items():
            self._free_state(name, page)
            self._reclaimable[name] -= 1

    def _free_state(self, name: str, page: int) -> None:
        """One holder less of a copy of states; without any it need not be made."""
        pool = self._tables.pool_of[name]
        pool.free(page)
        if not pool.holders(page):
            self._saves.pop((name, page), None)

    def _retain(self, name: str, pages: Iterable[int]) -> None:
        pool = self._tables.pool_of[name]
        for page in pages:
            pool.retain(page)

    def _count(self, pages: dict[str, array[int]], sign: int) -> None:
        for name, some in pages.items():
            self._reclaimable[name] += sign * len(some)
