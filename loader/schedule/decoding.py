"""The sequences that decode, as arrays with a place for each: what a step changes costs no work a sequence.

In decode each sequence has one token a step. Positions, last tokens, last pages and page counts are numpy arrays that
are advanced for all at once; only a sequence that needs a page, or has one to give back, is looked at by itself. What
they say is what the requests and their tables say, after each method: `add` takes them from those.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from precast.ir.graph.schema import CachePlan
from precast.loader.cache.tables import PageTables, SequenceTable, forgets, unseen_from
from precast.loader.schedule.requests import Request

if TYPE_CHECKING:
    import numpy.typing as npt

Ints: TypeAlias = "npt.NDArray[np.int64]"
NEVER = sys.maxsize
DRAW_DTYPES = (np.float32, np.int32, np.float32, np.float32, np.int64)
"""Of the fields of `Draw`."""


class _Columns(NamedTuple):
    """A place for each sequence: `[B]`, of groups `[groups, B]`, of what is drawn one array for each field of `Draw`.

    `positions` are those of the tokens that the next step computes, `last_positions` those of the last tokens that are
    ever computed. Of the pages of each group: how many were evicted, how many are held, the slot of the next token, the
    position from which on there is no place, and that from which on the first page is not seen.
    """

    token_ids: Ints
    positions: Ints
    last_positions: Ints
    prompt_lengths: Ints
    first: Ints
    counts: Ints
    slots: Ints
    ends: Ints
    unseen: Ints
    states: npt.NDArray[np.int32]
    draws: tuple[npt.NDArray[Any], ...]

    def each(self) -> tuple[npt.NDArray[Any], ...]:
        """All arrays."""
        return *self[:-1], *self.draws

    def cut(self, count: int) -> _Columns:
        """The same memory, of the first `count` sequences."""
        *others, draws = self
        return _Columns(*(column[..., :count] for column in others), tuple(column[:count] for column in draws))


class DecodeBatch:
    """Place `i` of each array belongs to `requests[i]`, whose `decode_index` it is; the last moves where one leaves."""

    def __init__(self, plan: CachePlan, capacity: int) -> None:
        """Room for `capacity` sequences."""
        self.requests: list[Request] = []
        self._paged = [group.name for group in plan.groups]
        self._states = [group.name for group in plan.states]
        sizes = [group.spec.page_size for group in plan.groups]
        self._sizes: Ints = np.array(sizes, np.int64).reshape(-1, 1)
        paged = (len(sizes), capacity)
        self._columns = _Columns(
            *(np.zeros(capacity, np.int64) for _ in range(4)),
            *(np.zeros(paged, np.int64) for _ in range(4)),
            np.full(paged, NEVER, np.int64),
            np.zeros((len(self._states), capacity), np.int32),
            tuple(np.zeros(capacity, dtype) for dtype in DRAW_DTYPES),
        )
        self._rows = self._columns.cut(0)  # of the sequences that are here
        self._forgetting = [(i, group.spec) for i, group in enumerate(plan.groups) if forgets(group.spec)]
        self._pages: list[list[array[int]]] = [[] for _ in sizes]
        self._bounds = np.arange(capacity + 1, dtype=np.int32)
        self._numbers: Ints = np.arange(capacity, dtype=np.int64)
        self._references: Ints = -1 - self._numbers

    def __len__(self) -> int:
        return len(self.requests)

    def add(self, request: Request) -> None:
        """A request with one token to compute."""
        index = len(self.requests)
        assert request.num_pending == 1
        self.requests.append(request)
        rows = self._rows = self._columns.cut(index + 1)
        rows.token_ids[index] = request.token_ids[-1]
        rows.positions[index] = len(request.token_ids) - 1
        rows.last_positions[index] = request.max_length - 2
        rows.prompt_lengths[index] = request.prompt_length
        for column, value in zip(rows.draws, request.draw, strict=True):
            column[index] = value
        request.decode_index = index
        for lists, name in zip(self._pages, self._paged, strict=True):
            lists.append(request.table.pages[name])
        for i, name in enumerate(self._states):
            rows.states[i, index] = request.table.pages[name][0]
        self.refresh(index)

    def remove(self, request: Request) -> None:
        """Forget a request."""
        index, last = request.decode_index, len(self.requests) - 1
        request.decode_index = -1
        moved = self.requests.pop()
        if index != last:
            self.requests[index] = moved
            moved.decode_index = index
            for column in self._columns.each():
                column[..., index] = column[..., last]
        for lists in self._pages:
            pages = lists.pop()
            if index != last:
                lists[index] = pages
        self._rows = self._columns.cut(last)

    def refresh(self, index: int) -> None:
        """Look again at the table of the request at `index`, which has changed."""
        table, rows = self.requests[index].table, self._rows
        for i, name in enumerate(self._paged):
            pages, first, size = table.pages[name], table.first[name], int(self._sizes[i, 0])
            rows.first[i, index] = first
            rows.counts[i, index] = len(pages)
            rows.slots[i, index] = (pages[-1] if pages else 0) * size + int(rows.positions[index]) % size
            rows.ends[i, index] = (first + len(pages)) * size
        for i, spec in self._forgetting:
            rows.unseen[i, index] = unseen_from(spec, (int(rows.first[i, index]) + 1) * spec.page_size)

    def evict(self, tables: PageTables) -> None:
        """Give back the pages that the sequences' next tokens don't see."""
        rows = self._rows
        for i, spec in self._forgetting:
            # More than once where a whole chunk of attention ends.
            while len(indices := np.flatnonzero(rows.positions >= rows.unseen[i])):
                tables.drop_first_page(self._paged[i], self._tables_of(indices))
                first = rows.first[i]
                first[indices] += 1
                rows.counts[i, indices] -= 1
                ends = (first[indices] + 1) * spec.page_size
                rows.unseen[i, indices] = unseen_from(spec, ends)

    def short(self) -> dict[str, Ints]:
        """By group, the indices of those whose next token has no place; groups where all have one are left out."""
        lacking = self._rows.positions >= self._rows.ends
        if not lacking.any():
            return {}
        found = {name: np.flatnonzero(lacking[i]) for i, name in enumerate(self._paged)}
        return {name: indices for name, indices in found.items() if len(indices)}

    def grow(self, tables: PageTables, short: Mapping[str, Ints]) -> None:
        """One page more for those of `short`. The caller has asked whether there are so many."""
        rows = self._rows
        for i, name in enumerate(self._paged):
            if name in short:
                indices, size = short[name], self._sizes[i, 0]
                pages = np.array(tables.append_page(name, self._tables_of(indices)), np.int64)
                rows.slots[i, indices] = pages * size + rows.positions[indices] % size
                rows.counts[i, indices] += 1
                rows.ends[i, indices] += size

    def _tables_of(self, indices: Ints) -> list[SequenceTable]:
        requests = self.requests
        return [requests[index].table for index in indices.tolist()]

    def advance(self) -> None:
        """Each sequence's token is computed by a step that was launched, which draws the next one in the same row.

        One token each: the one that was pending is computed, and another is pending, unknown as yet.
        """
        rows = self._rows
        rows.token_ids[:] = self._references[: len(self.requests)]
        rows.positions[:] += 1
        rows.slots[:] += 1  # where the page has an end, `grow` or `refresh` says where it goes
        for row, request in enumerate(self.requests):
            request.expect(row)

    def learn(self, requests: Iterable[Request]) -> None:
        """Tokens of these requests have arrived; some of the requests may not be here."""
        for request in requests:
            if request.decode_index >= 0 and not request.num_unknown:
                self._rows.token_ids[request.decode_index] = request.token_ids[-1]

    def full(self) -> list[Request]:
        """The requests of which no more tokens are computed: with the one that is pending they have all."""
        return [self.requests[i] for i in np.flatnonzero(self._rows.positions > self._rows.last_positions)]

    def of_length(self, length: int) -> list[Request]:
        """The requests that have `length` tokens, the one to compute included."""
        return [self.requests[i] for i in np.flatnonzero(self._rows.positions == length - 1)]

    # --- what a step takes -------------------------------------------------------------------------------------

    def tokens(self) -> tuple[Ints, Ints, npt.NDArray[np.int32], Ints]:
        """The next tokens `[B]`, their positions `[B]`, `cu_seqlens` `[B + 1]` and the rows' numbers `[B]`: views.

        A token below 0 is not known yet: `CachedSequence`.
        """
        count = len(self.requests)
        return self._rows.token_ids, self._rows.positions, self._bounds[: count + 1], self._numbers[:count]

    def draws(self) -> tuple[npt.NDArray[Any], ...]:
        """How the next tokens are drawn: the fields of `Draw`, and how many tokens each answer has, `[B]` each."""
        rows = self._rows
        return *rows.draws, rows.positions + 1 - rows.prompt_lengths

    def group_arrays(self) -> list[tuple[npt.NDArray[np.int32], Ints, Ints, Ints]]:
        """For each group with pages: indices `[N]`, counts `[B]`, starts `[B]` in tokens, slots `[B]`."""
        rows = self._rows
        starts = rows.first * self._sizes
        return [
            (np.frombuffer(b"".join(pages), np.int32), rows.counts[i], starts[i], rows.slots[i])
            for i, pages in enumerate(self._pages)
        ]

    def slot_ids(self) -> list[npt.NDArray[np.int32]]:
        """For each group of states: `[B]`, a view."""
        return list(self._rows.states)
