"""The steps of one of several ranks that each have sequences of their own.

Rank 0 makes the inputs of all ranks, and gives each its own with the order of a step. All have equally many tokens and
rows of logits, so all ranks draw all rows, those of rank 0 first. A token that is not known yet names a row of its own
rank in the step before; here it becomes the row among those of all ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from precast.ir.graph.schema import Graph
from precast.loader import sizing
from precast.loader.cache.memory import CacheMemory
from precast.loader.cache.spans import PageCopy
from precast.loader.device import Device, Event
from precast.loader.program.restore import Program
from precast.loader.run.batch import Arrays, longer
from precast.loader.run.capture import Size
from precast.loader.run.draws import draw_arrays, draw_padding
from precast.loader.run.places import Layout, Places
from precast.loader.run.rank_runner import RankRunner
from precast.loader.run.steps import Given, Ticket
from precast.loader.schedule.decoding import DecodeBatch
from precast.loader.schedule.requests import Sizes, Step
from precast.loader.sizing import EngineLimits
from precast.loader.torch_device import open_device
from precast.loader.world.follower import Follower
from precast.loader.world.lead import Lead
from precast.loader.world.orders import Order, Part


class _Own(NamedTuple):
    """What one rank is given: the graph's inputs, and the pages that it copies first."""

    arrays: Arrays
    copies: Sequence[PageCopy]


class ShareRunner(RankRunner):
    """A `RankRunner` of a rank with sequences of its own. Rank 0's takes steps of all ranks (`Step.shares`); any
    other step is rank 0's alone, and the others have nothing to do in it."""

    def __init__(
        self, program: Program, graph: Graph, memory: CacheMemory, device: Device, limits: EngineLimits,
        world: Lead | Follower, **more: Any,
    ) -> None:  # fmt: skip
        """`more`: as `Runner`."""
        super().__init__(program, graph, memory, device, limits, world, **more)
        self._num_others = limits.dp - 1
        self._others: list[_Own] = []  # what the other ranks are given in the step that is launched
        self._rows_before = 0  # of each rank, in the step that drew tokens last
        self._other_places: list[Places] = []
        self._other_layouts: dict[Size, list[Layout]] = {}
        if isinstance(world, Lead):
            capacities, host = sizing.capacities(graph, limits, memory.num_slabs), open_device("cpu")
            self._other_places = [Places(capacities, host) for _ in range(self._num_others)]

    @property
    def max_order_bytes(self) -> int:
        """As `RankRunner.max_order_bytes`."""
        return self.orders.max_bytes_of_each(self._num_others)

    def decode(self, raw: memoryview) -> tuple[Order, list[Part]]:
        """As `RankRunner.decode`."""
        assert isinstance(self._world, Follower), "rank 0 orders"
        return self.orders.decode_own(raw, self._world.rank - 1, self._num_others)

    def launch(
        self, step: Step, decoding: DecodeBatch | Sequence[DecodeBatch] | None = None, *, is_timed: bool = False
    ) -> Ticket:
        """As `StepRunner.launch`, on all ranks; the logits are those of rank 0's rows."""
        ticket = super().launch(step, decoding, is_timed=is_timed)
        if ticket.logits is None:
            return ticket
        count = sum(chunk.length for chunk in step.chunks if chunk.logits == "all")
        return ticket._replace(logits=ticket.logits[:count])

    def _inputs_for(self, step: Step, decoding: DecodeBatch | Sequence[DecodeBatch] | None) -> Given:
        if not step.shares:
            assert decoding is None, "who draws knows of all ranks"
            step = self._of_rank_0(step)
        sizes = step.sizes
        assert sizes is not None, "all shares are of one size"
        size = None if decoding is None else self.captures.size_for(sizes.num_tokens)
        assert not isinstance(decoding, DecodeBatch), "there is one for each rank"
        own, *self._others = [
            self._own(rank, share, None if decoding is None else decoding[rank])
            for rank, share in enumerate(step.shares)
        ]
        num_tokens = len(step.shares) * (sizes.num_tokens if size is None else size.num_tokens)
        if decoding is None:
            return Given(own.arrays, {}, own.copies, size, num_tokens - step.num_tokens, 0, None)
        num_rows = self._rows_before = sizes.num_rows if size is None else size.num_seqs
        drawn = [draw_arrays(batch, share.chunks) for share, batch in zip(step.shares, decoding, strict=True)]
        padding = draw_padding(num_rows)
        drawing = {name: np.concatenate([longer(each[name], padding[name]) for each in drawn]) for name in padding}
        rows = np.concatenate([np.arange(len(share.sampled)) + i * num_rows for i, share in enumerate(step.shares)])
        return Given(own.arrays, drawing, own.copies, size, num_tokens - step.num_tokens, len(rows), rows)

    def _of_rank_0(self, step: Step) -> Step:
        """A step whose logits are wanted, with nothing to do for the others."""
        num_rows = sum(chunk.length for chunk in step.chunks if chunk.logits == "all")
        sizes = Sizes(step.num_tokens, len(step.requests), max(num_rows, 1))
        shares = [Step([], [], sizes=sizes) for _ in range(self._num_others)]
        first = Step([], step.chunks, step.saves, step.restores, sizes)
        return Step([], step.chunks, sizes=sizes, shares=[first, *shares])

    def _own(self, rank: int, share: Step, batch: DecodeBatch | None) -> _Own:
        assert share.sizes is not None, "all shares are of one size"
        arrays = self._inputs.padded(self._inputs.arrays(share.chunks, batch), share.sizes)
        if rank:
            ids = arrays["input_ids"]
            arrays["input_ids"] = np.where(ids < 0, ids - rank * self._rows_before, ids)
        return _Own(arrays, [*share.saves, *share.restores])

    def copy_pages(self, copies: Iterable[PageCopy]) -> None:
        """As `StepRunner.copy_pages`: pages of rank 0, which needs nobody for that."""
        self._copy(copies)

    def _message(self, order: Order) -> list[bytes | memoryview]:
        return self.orders.encode_each([self.orders.encode(order)] * self._num_others)

    def _fill(self, order: Order, arrays: Arrays, until: Event, layout: Layout) -> None:
        assert self._lead is not None, "the others obey"
        self._copy(order.copies)
        lengths = self._places.write(arrays, layout)
        messages = []
        for other, places, own_layout in zip(self._others, self._other_places, self._layouts_like(layout), strict=True):
            given = {name: other.arrays.get(name, values) for name, values in arrays.items()}
            parts = places.written(places.write(given, own_layout), own_layout)
            has_unknown = bool((given["input_ids"] < 0).any())
            own_lengths = {name: len(given[name]) for name in order.lengths}
            own_order = order._replace(copies=other.copies, lengths=own_lengths, has_unknown=has_unknown)
            messages.append(self.orders.encode(own_order, parts))
        self._lead.send(self.orders.encode_each(messages))
        self._places.copy(lengths, until, layout)

    def _layouts_like(self, layout: Layout) -> list[Layout]:
        """The same layout in the places of each other rank."""
        if layout is self._places.widest:
            return [places.widest for places in self._other_places]
        size = next(size for size, each in self._layouts.items() if each is layout)
        if size not in self._other_layouts:
            self._other_layouts[size] = [places.layout(layout.padding) for places in self._other_places]
        return self._other_layouts[size]
