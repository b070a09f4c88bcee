"""Steps to tokens, whatever runs them: fills a step's inputs, launches it, and collects what it has drawn.

`launch` begins a step and `collect` gives its tokens. Another step may be launched before the tokens of the last one
are collected: what it was to draw is on the device by then, and an input token below 0 stands for it
(`precast.loader.cache.sequence`). A step that fits a captured size is replayed, any other one runs op by op.

A step draws one token a row of logits. That is assumed in the backends' `_run_eagerly` and `_pieces`,
`DecodeBatch.advance`, `Scheduler.launched` and `Answer.take`, and nowhere else.

No torch: `precast.loader.run.runner` computes with it, `precast.loader.driver.runner` without.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from precast.ir.errors import RequestError
from precast.ir.graph.schema import Graph
from precast.kernels.native import Native
from precast.loader import sizing
from precast.loader.cache.memory import CacheMemory
from precast.loader.cache.spans import PageCopy
from precast.loader.device import Buffer, Device, Event, host_bytes
from precast.loader.run.batch import Arrays, BatchInputs
from precast.loader.run.capture import Captures, Memory, Size, SizedStep
from precast.loader.run.draws import draw_arrays, draw_padding
from precast.loader.run.places import Layout, Places
from precast.loader.schedule.decoding import DecodeBatch
from precast.loader.schedule.requests import Step
from precast.loader.sizing import EngineLimits
from precast.loader.world.orders import Kind, Order

if TYPE_CHECKING:
    import numpy.typing as npt
    import torch

    from precast.loader.program.instructions import HostCall


class Ticket(NamedTuple):
    """A step that was launched. It draws `num_rows` tokens, which `arrived` says are in `token_ids` on the host.

    `logits` are `[R, V]` on the device, of a step whose logits are wanted. `ran` says how it ran: "captured",
    "piecewise", or why it ran op by op. The device works on it from `began`, if that was asked for, to `arrived`. The
    tokens are the first ones of `token_ids`, or those at `rows`.
    """

    ran: str
    padding: int
    logits: torch.Tensor | None
    num_rows: int
    token_ids: npt.NDArray[np.int64]
    arrived: Event
    began: Event | None
    rows: npt.NDArray[np.int64] | None = None


class Given(NamedTuple):
    """What a step is: the graph's inputs, how each row draws (nothing: the logits are wanted), and the pages that are
    copied first; the captured `size` that it fits, or None.

    `padding` tokens are of no sequence. It draws `num_rows` tokens: those of the first rows, or of `rows`.
    """

    arrays: Arrays
    drawing: Arrays
    copies: Sequence[PageCopy]
    size: Size | None
    padding: int
    num_rows: int
    rows: npt.NDArray[np.int64] | None


class _Arrival(NamedTuple):
    """Where the tokens of a step arrive: pinned memory of the host, and the same as numbers."""

    pinned: Buffer
    token_ids: npt.NDArray[np.int64]
    arrived: Event
    began: Event


def _arrival(pinned: Buffer, device: Device) -> _Arrival:
    token_ids = np.frombuffer(host_bytes(pinned), np.int64)
    return _Arrival(pinned, token_ids, device.event(timed=True), device.event(timed=True))


class StepRunner(ABC):
    """A model with its caches, and a fixed place on the device for each of its inputs.

    `graph` and `memory` belong together. No step goes beyond `limits`. `gives_logits`: as tensors of torch, of
    steps that draw nothing.
    """

    gives_logits = True

    def __init__(
        self,
        graph: Graph,
        memory: CacheMemory,
        device: Device,
        limits: EngineLimits,
        captured_sizes: Sequence[int],
        native: Native,
    ) -> None:
        """`captured_sizes`: steps of so many tokens are captured, in this order, as `capture_next` is called. `native`
        counts what is compiled.

        Raises what `BatchInputs` raises for the graph.
        """
        self.graph = graph
        self.device = device
        self.num_slabs = memory.num_slabs
        self.limits = limits
        self.native = native
        self._inputs = BatchInputs(graph)
        places = Places(sizing.capacities(graph, limits, memory.num_slabs), device)
        num_rows = limits.dp * limits.num_rows
        # What the last step drew, for the next one; and what two steps have drawn, for the host.
        self._drawn_bytes = device.alloc(8 * num_rows)
        self._arrivals = deque(_arrival(device.alloc(8 * num_rows, pinned=True), device) for _ in range(2))
        self._prepared = device.event()  # of the inputs of a step that is captured
        self._sizes = {n: Size(n, min(n, limits.num_rows)) for n in captured_sizes}
        self.captures = Captures(device, list(self._sizes.values()))
        self._largest = max(captured_sizes, default=0)
        self._layouts: dict[Size, Layout] = {}
        empty = DecodeBatch(graph.caches, 0)
        self._nothing = self._inputs.arrays([]) | draw_arrays(empty)
        self._held: tuple[CacheMemory, Places] | None = (memory, places)

    def launch(
        self, step: Step, decoding: DecodeBatch | Sequence[DecodeBatch] | None = None, *, is_timed: bool = False
    ) -> Ticket:
        """Begin a step: copy its pages, fill its inputs, run the program, draw.

        `decoding` has those of `step.decodes`, by rank where ranks have sequences of their own; None: the logits are
        wanted, and nothing is drawn. `is_timed`: `seconds` will be asked for.

        At most two steps may be launched whose tokens are not collected. Raises RequestError after `close`, and what
        running the step raises.
        """
        self.opened()
        given = self._inputs_for(step, decoding)
        arrays, drawing, copies, size, padding, num_rows, rows = given
        self._arrivals.rotate()
        arrival = self._arrivals[0]
        with self.device.use(), self.device.no_autograd():
            try:
                if is_timed:
                    arrival.began.record()
                logits = None
                if size is None:
                    logits = self._run_eagerly(arrays, drawing, copies, arrival.arrived)
                    ran = self._why_eager(len(arrays["input_ids"]), is_drawn=decoding is not None)
                else:
                    order = Order(Kind.STEP, copies, size.num_tokens)
                    self._fill(order, arrays | drawing, arrival.arrived, self._layout_of(size))
                    num_graphs = self.captures.replay(size, self._memory())
                    ran = "captured" if num_graphs == 1 else "piecewise"
                # What was drawn for whatever rows; nobody waits for it here.
                self.device.copy(arrival.pinned, self._drawn_bytes)
            finally:
                arrival.arrived.record()
        began = arrival.began if is_timed else None
        return Ticket(
            ran, padding, logits if decoding is None else None, num_rows, arrival.token_ids, arrival.arrived, began,
            rows,
        )  # fmt: skip

    def _inputs_for(self, step: Step, decoding: DecodeBatch | Sequence[DecodeBatch] | None) -> Given:
        """The step's inputs on this rank."""
        assert decoding is None or isinstance(decoding, DecodeBatch), "one rank has all sequences"
        arrays, copies = self._inputs.arrays(step.chunks, decoding), [*step.saves, *step.restores]
        if step.sizes is not None:
            arrays = self._inputs.padded(arrays, step.sizes)
        if decoding is None:
            return Given(arrays, {}, copies, None, 0, 0, None)
        size = self.captures.size_for(step.num_tokens)
        padding = 0 if size is None else size.num_tokens - step.num_tokens
        drawing = draw_arrays(decoding, step.chunks)
        return Given(arrays, drawing, copies, size, padding, len(step.sampled), None)

    def collect(self, ticket: Ticket) -> list[int]:
        """Wait for a step: the token id of each row that draws, -1 (`NO_TOKEN`) where its logits are not finite."""
        if not ticket.num_rows:
            return []
        ticket.arrived.synchronize()
        if self._held is not None:
            self._held[1].passed(ticket.arrived)
        drawn = ticket.token_ids[: ticket.num_rows] if ticket.rows is None else ticket.token_ids[ticket.rows]
        token_ids: list[int] = drawn.tolist()
        return token_ids

    def seconds(self, ticket: Ticket) -> float:
        """How long the device took for a step that is timed; it was collected, and drew tokens."""
        assert ticket.began is not None
        return self.device.seconds_between(ticket.began, ticket.arrived)

    def capture_next(self) -> None:
        """Capture the next size; there is one. What was drawn last stays."""
        self.opened()
        with self.device.use(), self.device.no_autograd(), self._drawn_kept():
            self.captures.capture_next(self._step_of, self._memory())

    def capture_all(self) -> None:
        """Capture what is left to capture."""
        while self.captures.num_pending:
            self.capture_next()

    def copy_pages(self, copies: Iterable[PageCopy]) -> None:
        """Copy pages, in this order and in that of the device's stream."""
        self._copy(copies)

    def _copy(self, copies: Iterable[PageCopy]) -> None:
        self.opened()
        assert self._held is not None
        memory, _ = self._held
        for copy in copies:
            memory.copy_page(copy.group, copy.source, copy.target)

    def opened(self) -> object:
        """Nothing. Raises RequestError after `close`."""
        if self._held is None:
            raise RequestError("engine-closed", "the engine is closed", fix="load the bundle again")
        return None

    def close(self) -> None:
        """Drop the program with its weights, the caches, the places of its inputs, and what is captured."""
        self.captures.drop()
        self._layouts.clear()
        self._arrivals.clear()
        if self._held is not None:
            self._drop()
            del self._drawn_bytes
        self._held = None
        self._release()

    def _release(self) -> None:
        self.device.release()

    @property
    def _places(self) -> Places:
        assert self._held is not None, "it is opened"
        return self._held[1]

    def _fill(self, order: Order, arrays: Arrays, until: Event, layout: Layout) -> None:
        """Make the order's copies, and put the arrays in their places. `until` is recorded afterwards."""
        self._copy(order.copies)
        self._places.fill(arrays, until, layout)

    @abstractmethod
    def _run_eagerly(
        self, arrays: Arrays, drawing: Arrays, copies: Sequence[PageCopy], arrived: Event
    ) -> torch.Tensor | None:
        """The logits `[R, V]`, where the backend gives them; where rows draw, what they drew is in `_drawn_bytes`.

        It makes the copies and fills the places; `arrived` is recorded afterwards.
        """

    @abstractmethod
    def _compute(self, order: Order) -> torch.Tensor | None:
        """What `_run_eagerly` gives, of an order whose inputs are in their places."""

    @abstractmethod
    def _pieces(self, size: Size, *, is_warm_up: bool = False) -> Iterator[HostCall]:
        """A step of this size over whatever its places hold, cut in front of the calls that read the host.

        `is_warm_up`: what is called many times in it runs once.
        """

    @abstractmethod
    def _memory(self) -> Memory:
        """Where the tensors of a captured step lie now."""

    @abstractmethod
    def _drawn_kept(self) -> AbstractContextManager[object]:
        """While open, what is drawn changes; afterwards it is as it was."""

    @abstractmethod
    def _drop(self) -> None:
        """Give up what the backend holds."""

    def _step_of(self, size: Size) -> SizedStep:
        """What `Captures` runs to warm up and to capture a size: a step with nothing but empty slots."""

        def prepare() -> None:
            self._places.fill(self._nothing, self._prepared, self._layout_of(size))
            self._prepared.record()

        return SizedStep(prepare, partial(self._pieces, size, is_warm_up=True), partial(self._pieces, size))

    def _layout_of(self, size: Size) -> Layout:
        """Places for the arrays of a captured step, and for those of what it draws."""
        if size not in self._layouts:
            padding = self._inputs.padding(*size) | draw_padding(self.limits.dp * size.num_seqs)
            self._layouts[size] = self._places.layout(padding)
        return self._layouts[size]

    def _why_eager(self, num_tokens: int, *, is_drawn: bool) -> str:
        if not is_drawn:
            return "logits are wanted"
        if not self._largest:
            return "capture is off"
        if num_tokens > self._largest:
            return "more tokens than any captured size"
        if self.captures.failure:
            return self.captures.failure
        return "not captured yet" if self.captures.num_pending else "no captured size is near enough"
