"""The sequences that decode, as arrays with a place for each: what a step changes costs no work a sequence.

In decode each sequence has one token a step. Positions, last tokens, last pages and page counts are numpy arrays that
are advanced for all at once; only a sequence that needs a page, or has one to give back, is looked at by itself. What
they say is what the requests and their tables say, after each method: `add` takes them from those.

What a step takes and what it leaves as it was is the same array as in the step before, and can't be written to.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from precast.ir.graph.schema import CachePlan
from precast.loader.cache.sequence import expect_tokens
from precast.loader.cache.tables import PageTables, SequenceTable, forgets, unseen_from
from precast.loader.schedule.requests import Request

if TYPE_CHECKING:
    import numpy.typing as npt

Ints: TypeAlias = "npt.NDArray[np.int64]"
NEVER = sys.maxsize


class PageLists(NamedTuple):
    """Of one group: page indices `[N]`, where each sequence's begin `[B + 1]`, and at which tokens `[B]`; int32."""

    indices: npt.NDArray[np.int32]
    indptr: npt.NDArray[np.int32]
    starts: npt.NDArray[np.int32]


class _Columns(NamedTuple):
    """A place for each sequence: `[B]`, and of groups `[groups, B]`. The last ones are the fields of `Draw`.

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
    temperature: npt.NDArray[np.float32]
    top_k: npt.NDArray[np.int32]
    top_p: npt.NDArray[np.float32]
    min_p: npt.NDArray[np.float32]
    seeds: Ints

    @property
    def draws(self) -> tuple[npt.NDArray[Any], ...]:
        """The fields of `Draw`."""
        return self.temperature, self.top_k, self.top_p, self.min_p, self.seeds

    def cut(self, count: int) -> _Columns:
        """The same memory, of the first `count` sequences."""
        return _Columns._make(column[..., :count] for column in self)


def _no_columns(num_groups: int, num_states: int, capacity: int) -> _Columns:
    """Room for `capacity` sequences."""
    row, rows = np.zeros(capacity, np.int64), np.zeros((num_groups, capacity), np.int64)
    floats, integers = np.zeros(capacity, np.float32), np.zeros(capacity, np.int32)
    return _Columns(
        token_ids=row, positions=row.copy(), last_positions=row.copy(), prompt_lengths=row.copy(),
        first=rows, counts=rows.copy(), slots=rows.copy(), ends=rows.copy(), unseen=rows + NEVER,
        states=np.zeros((num_states, capacity), np.int32),
        temperature=floats, top_k=integers, top_p=floats.copy(), min_p=floats.copy(), seeds=row.copy(),
    )  # fmt: skip


class DecodeBatch:
    """Place `i` of each array belongs to `requests[i]`, whose `decode_index` it is; the last moves where one leaves."""

    def __init__(self, plan: CachePlan, capacity: int) -> None:
        """Room for `capacity` sequences."""
        self.requests: list[Request] = []
        self._paged = [group.name for group in plan.groups]
        self._states = [group.name for group in plan.states]
        sizes = [group.spec.page_size for group in plan.groups]
        self._sizes: Ints = np.array(sizes, np.int64).reshape(-1, 1)
        self._columns = _no_columns(len(sizes), len(self._states), capacity)
        self._forgetting = [(i, group.spec) for i, group in enumerate(plan.groups) if forgets(group.spec)]
        self._pages: list[list[array[int]]] = [[] for _ in sizes]
        self._bounds = _fixed(np.arange(capacity + 1, dtype=np.int32))
        self._numbers: Ints = _fixed(np.arange(capacity, dtype=np.int64))
        self._references: Ints = -1 - self._numbers
        self._changed()

    def _changed(self) -> None:
        """Sequences have come or gone."""
        count = len(self.requests)
        self._rows = self._columns.cut(count)
        self._counted = self._bounds[: count + 1], self._numbers[:count]
        self._draws: tuple[npt.NDArray[Any], ...] | None = None  # made when they are asked for, as are these:
        self._steps_to_end: int | None = None  # in so many steps the first has all its tokens
        self._pages_changed()

    def _pages_changed(self) -> None:
        self._page_lists: list[PageLists] | None = None
        self._steps_to_page: int | None = None  # in so many steps the first needs a page

    def __len__(self) -> int:
        return len(self.requests)

    def add(self, request: Request) -> None:
        """A request with one token to compute."""
        index = len(self.requests)
        assert request.num_pending == 1
        self.requests.append(request)
        self._changed()
        rows = self._rows
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
            for column in self._columns:
                column[..., index] = column[..., last]
        for lists in self._pages:
            pages = lists.pop()
            if index != last:
                lists[index] = pages
        self._changed()

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
        self._pages_changed()

    def evict(self, tables: PageTables) -> None:
        """Give back the pages that the sequences' next tokens don't see."""
        if not self._forgetting:
            return
        rows = self._rows
        is_due = rows.positions >= rows.unseen
        if not is_due.any():
            return
        for i, spec in self._forgetting:
            (indices,) = is_due[i].nonzero()
            while len(indices):
                tables.drop_first_page(self._paged[i], self._tables_of(indices))
                first = rows.first[i]
                first[indices] += 1
                rows.counts[i, indices] -= 1
                ends = (first[indices] + 1) * spec.page_size
                rows.unseen[i, indices] = unseen = unseen_from(spec, ends)
                self._pages_changed()
                # More than once where a whole chunk of attention ends.
                indices = indices[rows.positions[indices] >= unseen]

    def short(self) -> dict[str, Ints]:
        """By group, the indices of those whose next token has no place; groups where all have one are left out."""
        rows = self._rows
        if self._steps_to_page is None:
            self._steps_to_page = int((rows.ends - rows.positions).min(initial=NEVER))
        if self._steps_to_page > 0:
            return {}
        lacking = rows.positions >= rows.ends
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
        self._pages_changed()

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
        if self._steps_to_page is not None:
            self._steps_to_page -= 1
        if self._steps_to_end is not None:
            self._steps_to_end -= 1
        expect_tokens(self.requests)

    def learn(self, requests: Iterable[Request]) -> None:
        """Tokens of these requests have arrived; some of the requests may not be here."""
        for request in requests:
            if request.decode_index >= 0 and not request.num_unknown:
                self._rows.token_ids[request.decode_index] = request.token_ids[-1]

    def full(self) -> list[Request]:
        """The requests of which no more tokens are computed: with the one that is pending they have all."""
        rows = self._rows
        if self._steps_to_end is None:
            self._steps_to_end = int((rows.last_positions - rows.positions).min(initial=NEVER)) + 1
        if self._steps_to_end > 0:
            return []
        return [self.requests[i] for i in np.flatnonzero(rows.positions > rows.last_positions)]

    def of_length(self, length: int) -> list[Request]:
        """The requests that have `length` tokens, the one to compute included."""
        return [self.requests[i] for i in np.flatnonzero(self._rows.positions == length - 1)]

    # --- what a step takes -------------------------------------------------------------------------------------

    def tokens(self) -> tuple[Ints, Ints, npt.NDArray[np.int32], Ints]:
        """The next tokens `[B]`, their positions `[B]`, `cu_seqlens` `[B + 1]` and the rows' numbers `[B]`: views.

        A token below 0 is not known yet: `CachedSequence`.
        """
        return self._rows.token_ids, self._rows.positions, *self._counted

    def draws(self) -> tuple[npt.NDArray[Any], ...]:
        """How the next tokens are drawn: the fields of `Draw`, and how many tokens each answer has, `[B]` each."""
        rows = self._rows
        if self._draws is None:
            self._draws = tuple(_fixed(column.copy()) for column in rows.draws)
        return *self._draws, rows.positions + 1 - rows.prompt_lengths

    def page_lists(self) -> list[PageLists]:
        """For each group with pages: those of all sequences."""
        rows = self._rows
        if self._page_lists is None:
            indptr = np.zeros((len(self._paged), len(self.requests) + 1), np.int32)
            indptr[:, 1:] = np.add.accumulate(rows.counts, axis=1)
            starts = (rows.first * self._sizes).astype(np.int32)
            self._page_lists = [
                PageLists(np.frombuffer(b"".join(pages), np.int32), _fixed(indptr[i]), _fixed(starts[i]))
                for i, pages in enumerate(self._pages)
            ]
        return self._page_lists

    def slots(self) -> list[Ints]:
        """For each group with pages, where the next tokens are written: `[B]`, a view."""
        return list(self._rows.slots)

    def slot_ids(self) -> list[npt.NDArray[np.int32]]:
        """For each group of states: `[B]`, a view."""
        return list(self._rows.states)


def _fixed(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The array, which can't be written to any more."""
    array.flags.writeable = False
    return array
