"""The sequences that decode, as arrays with a place for each: what a step changes costs no work a sequence.

In decode each sequence has one token a step. Positions, last tokens, last pages and page counts are numpy arrays that
are advanced for all at once; only a sequence that needs a page, or has one to give back, is looked at by itself. What
they say is what the requests and their tables say, after each method: `add` takes them from those.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from precast.ir.graph.schema import CachePlan
from precast.loader.cache.tables import PageTables, SequenceTable, forgets, unseen_from
from precast.loader.schedule.requests import Request

if TYPE_CHECKING:
    import numpy.typing as npt

Ints: TypeAlias = "npt.NDArray[np.int64]"
NEVER = sys.maxsize


class DecodeBatch:
    """Place `i` of each array belongs to `requests[i]`, whose `decode_index` it is; the last moves where one leaves."""

    def __init__(self, plan: CachePlan, capacity: int) -> None:
        """Room for `capacity` sequences."""
        self.requests: list[Request] = []
        self._paged = [group.name for group in plan.groups]
        self._states = [group.name for group in plan.states]
        sizes = [group.spec.page_size for group in plan.groups]
        self._sizes: Ints = np.array(sizes, np.int64).reshape(-1, 1)
        self._token_ids: Ints = np.zeros(capacity, np.int64)
        self._positions: Ints = np.zeros(capacity, np.int64)  # of the tokens that the next step computes
        self._last_positions: Ints = np.zeros(capacity, np.int64)  # of the last tokens that are ever computed
        self._last_pages: Ints = np.zeros((len(sizes), capacity), np.int64)
        self._first: Ints = np.zeros((len(sizes), capacity), np.int64)  # pages evicted
        self._counts: Ints = np.zeros((len(sizes), capacity), np.int64)  # pages held
        # From this position on there is no place, and from this one on the first page is not seen.
        self._ends: Ints = np.zeros((len(sizes), capacity), np.int64)
        self._unseen: Ints = np.full((len(sizes), capacity), NEVER, np.int64)
        self._forgetting = [(i, group.spec) for i, group in enumerate(plan.groups) if forgets(group.spec)]
        self._slots = np.zeros((len(self._states), capacity), np.int32)
        self._pages: list[list[array[int]]] = [[] for _ in sizes]
        self._bounds = np.arange(capacity + 1, dtype=np.int32)
        self._references: Ints = -1 - np.arange(capacity, dtype=np.int64)

    def __len__(self) -> int:
        return len(self.requests)

    def add(self, request: Request) -> None:
        """A request with one token to compute."""
        index = len(self.requests)
        assert request.num_pending == 1
        self._token_ids[index] = request.token_ids[-1]
        self._positions[index] = len(request.token_ids) - 1
        self._last_positions[index] = request.max_length - 2
        self.requests.append(request)
        request.decode_index = index
        for lists, name in zip(self._pages, self._paged, strict=True):
            lists.append(request.table.pages[name])
        for i, name in enumerate(self._states):
            self._slots[i, index] = request.table.pages[name][0]
        self.refresh(index)

    def remove(self, request: Request) -> None:
        """Forget a request."""
        index, last = request.decode_index, len(self.requests) - 1
        request.decode_index = -1
        moved = self.requests.pop()
        if index != last:
            self.requests[index] = moved
            moved.decode_index = index
            for column in (self._token_ids, self._positions, self._last_positions):
                column[index] = column[last]
            for table in (self._last_pages, self._first, self._counts, self._ends, self._unseen, self._slots):
                table[:, index] = table[:, last]
        for lists in self._pages:
            pages = lists.pop()
            if index != last:
                lists[index] = pages

    def refresh(self, index: int) -> None:
        """Look again at the table of the request at `index`, which has changed."""
        table = self.requests[index].table
        for i, name in enumerate(self._paged):
            pages, first = table.pages[name], table.first[name]
            self._first[i, index] = first
            self._counts[i, index] = len(pages)
            self._last_pages[i, index] = pages[-1] if pages else 0
            self._ends[i, index] = (first + len(pages)) * int(self._sizes[i, 0])
        for i, spec in self._forgetting:
            self._unseen[i, index] = unseen_from(spec, (int(self._first[i, index]) + 1) * spec.page_size)

    def evict(self, tables: PageTables) -> None:
        """Give back the pages that the sequences' next tokens don't see."""
        count = len(self.requests)
        for i, spec in self._forgetting:
            # More than once where a whole chunk of attention ends.
            while len(indices := np.flatnonzero(self._positions[:count] >= self._unseen[i, :count])):
                tables.drop_first_page(self._paged[i], self._tables_of(indices))
                first = self._first[i]
                first[indices] += 1
                self._counts[i, indices] -= 1
                ends = (first[indices] + 1) * spec.page_size
                self._unseen[i, indices] = unseen_from(spec, ends)

    def short(self) -> dict[str, Ints]:
        """By group, the indices of those whose next token has no place; groups where all have one are left out."""
        count = len(self.requests)
        lacking = self._positions[:count] >= self._ends[:, :count]
        if not lacking.any():
            return {}
        found = {name: np.flatnonzero(lacking[i]) for i, name in enumerate(self._paged)}
        return {name: indices for name, indices in found.items() if len(indices)}

    def grow(self, tables: PageTables, short: Mapping[str, Ints]) -> None:
        """One page more for those of `short`. The caller has asked whether there are so many."""
        for i, name in enumerate(self._paged):
            if name in short:
                indices = short[name]
                self._last_pages[i, indices] = tables.append_page(name, self._tables_of(indices))
                self._counts[i, indices] += 1
                self._ends[i, indices] += self._sizes[i, 0]

    def _tables_of(self, indices: Ints) -> list[SequenceTable]:
        requests = self.requests
        return [requests[index].table for index in indices.tolist()]

    def advance(self) -> None:
        """Each sequence's token is computed by a step that was launched, which draws the next one in the same row.

        One token each: the one that was pending is computed, and another is pending, unknown as yet.
        """
        count = len(self.requests)
        self._token_ids[:count] = self._references[:count]
        self._positions[:count] += 1
        for row, request in enumerate(self.requests):
            request.expect(row)

    def learn(self, requests: Iterable[Request]) -> None:
        """Tokens of these requests have arrived; some of the requests may not be here."""
        for request in requests:
            if request.decode_index >= 0 and not request.num_unknown:
                self._token_ids[request.decode_index] = request.token_ids[-1]

    def full(self) -> list[Request]:
        """The requests of which no more tokens are computed: with the one that is pending they have all."""
        count = len(self.requests)
        return [self.requests[i] for i in np.flatnonzero(self._positions[:count] > self._last_positions[:count])]

    def of_length(self, length: int) -> list[Request]:
        """The requests that have `length` tokens, the one to compute included."""
        return [self.requests[i] for i in np.flatnonzero(self._positions[: len(self.requests)] == length - 1)]

    # --- what a step takes -------------------------------------------------------------------------------------

    def tokens(self) -> tuple[Ints, Ints, npt.NDArray[np.int32]]:
        """The next tokens `[B]`, their positions `[B]`, and `cu_seqlens` `[B + 1]`: views.

        A token below 0 is not known yet: `CachedSequence`.
        """
        count = len(self.requests)
        return self._token_ids[:count], self._positions[:count], self._bounds[: count + 1]

    def group_arrays(self) -> list[tuple[npt.NDArray[np.int32], Ints, Ints, Ints]]:
        """For each group with pages: indices `[N]`, counts `[B]`, starts `[B]` in tokens, slots `[B]`."""
        count = len(self.requests)
        offsets = self._positions[:count] % self._sizes
        slots = self._last_pages[:, :count] * self._sizes + offsets
        starts = self._first[:, :count] * self._sizes
        counts = self._counts[:, :count]
        return [
            (np.frombuffer(b"".join(pages), np.int32), counts[i], starts[i], slots[i])
            for i, pages in enumerate(self._pages)
        ]

    def slot_ids(self) -> list[npt.NDArray[np.int32]]:
        """For each group of states: `[B]`, a view."""
        return list(self._slots[:, : len(self.requests)])
