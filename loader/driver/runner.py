"""The steps of a model without torch: see `precast.loader.run.steps`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from precast.ir.errors import TargetError
from precast.ir.graph.schema import Graph
from precast.ir.memory import strides
from precast.kernels.native import Native
from precast.loader.cache.memory import CacheMemory
from precast.loader.cache.spans import PageCopy
from precast.loader.device import Buffer, Event
from precast.loader.driver.device import DriverDevice
from precast.loader.driver.kernels import Run
from precast.loader.driver.model import Model
from precast.loader.driver.weights import Ring
from precast.loader.run.batch import Arrays
from precast.loader.run.capture import Memory, Size
from precast.loader.run.draws import DTYPES
from precast.loader.run.steps import StepRunner, Ticket
from precast.loader.schedule.decoding import DecodeBatch
from precast.loader.schedule.requests import Step
from precast.loader.sizing import EngineLimits
from precast.loader.world.orders import Kind, Order

if TYPE_CHECKING:
    from precast.loader.program.instructions import HostCall


class DriverRunner(StepRunner):
    """A model with its caches, and a fixed place on the device for each of its inputs.

    `memory` has the caches that the model works on. Steps that draw nothing have no logits to give: there is nobody to
    read them without torch.
    """

    gives_logits = False

    def __init__(
        self,
        model: Model,
        graph: Graph,
        memory: CacheMemory,
        device: DriverDevice,
        limits: EngineLimits,
        native: Native,
        *,
        captured_sizes: Sequence[int] = (),
    ) -> None:
        """As `StepRunner`."""
        super().__init__(graph, memory, device, limits, captured_sizes, native)
        self._stream_of = device
        self._model: Model | None = model
        self._spare = device.alloc(self._drawn_bytes.shape[0])
        self._ids = device.alloc(8 * limits.max_num_tokens)
        self.ring: Ring | None = None
        """Pinned memory that is not needed any more. Giving it back takes as long as a step, so it is kept until a step
        begins after the first token, or a size is to be captured."""
        self.unchecked: Iterator[None] = iter(())
        """What is still to be looked up: which kernels steps take. It raises TargetError (kernel-missing) if some are
        not there, and is left until then, too."""
        self._lack: TargetError | None = None
        self._has_drawn = False

    def warm_up(self, num_tokens: int, is_over: Callable[[], bool]) -> None:
        """Compute a prompt of so many tokens that nobody asked for, as far as it goes without one: no cache is written,
        and what is drawn stays. Kernels and libraries are ready afterwards. It ends between two launches where
        `is_over` says that there is something better to do."""
        self.opened()
        if is_over():
            return
        size = Size(num_tokens, 1)
        with self.device.use(), self._drawn_kept():
            self._step_of(size).prepare()
            for launch in self._launches(self._layout_of(size).buffers, size.num_seqs):
                launch(self._stream_of.current)
                if is_over():
                    return

    def launch(
        self, step: Step, decoding: DecodeBatch | Sequence[DecodeBatch] | None = None, *, is_timed: bool = False
    ) -> Ticket:
        """As `StepRunner.launch`. Raises TargetError (kernel-missing) once a token was drawn, if some step has none."""
        if self._has_drawn:
            self._settle()
        return super().launch(step, decoding, is_timed=is_timed)

    def collect(self, ticket: Ticket) -> list[int]:
        """As `StepRunner.collect`."""
        drawn = super().collect(ticket)
        self._has_drawn = self._has_drawn or bool(drawn)
        return drawn

    def capture_next(self) -> None:
        """As `StepRunner.capture_next`."""
        self._settle()
        super().capture_next()

    def _settle(self) -> None:
        """What the first token didn't wait for."""
        if self.ring is not None:
            self.ring.give_back()
            self.ring = None
        if self._lack is not None:
            raise self._lack
        try:
            for _ in self.unchecked:
                pass
        except TargetError as error:
            self._lack = error
            raise

    @contextmanager
    def _drawn_kept(self) -> Iterator[None]:
        self.device.copy(self._spare, self._drawn_bytes)
        try:
            yield
        finally:
            self.device.copy(self._drawn_bytes, self._spare)

    def _run_eagerly(self, arrays: Arrays, drawing: Arrays, copies: Sequence[PageCopy], arrived: Event) -> None:
        given = arrays | drawing
        lengths = {name: len(values) for name, values in given.items()}
        order = Order(Kind.STEP, copies, 0, lengths, len(drawing["temperature"]) if drawing else 0)
        self._fill(order, given, arrived, self._places.widest)
        self._compute(order)

    def _compute(self, order: Order) -> None:
        """Compute a step of what the places hold, op by op, and draw."""
        buffers = self._places.widest.buffers
        self._run({name: _first(buffers[name], length) for name, length in order.lengths.items()}, order.num_rows)

    def _pieces(self, size: Size, *, is_warm_up: bool = False) -> Iterator[HostCall]:
        self._run(self._layout_of(size).buffers, size.num_seqs)
        yield from ()

    def _run(self, given: Mapping[str, Buffer], num_rows: int) -> None:
        """Launch a step over inputs, flat, and draw for so many rows."""
        stream = self._stream_of.current
        for launch in self._launches(given, num_rows):
            launch(stream)

    def _launches(self, given: Mapping[str, Buffer], num_rows: int) -> Iterator[Run]:
        """What `_run` launches, in order, each made ready as it is asked for."""
        model = self._model
        assert model is not None, "it is opened"
        inputs = {
            name: _row(given[name]) if dimensions == 2 else given[name]
            for name, dimensions in self._inputs.dimensions.items()
        }
        ids = self._ids.view(0, given["input_ids"].shape, dtype="int64")
        yield from model.known_ids(given["input_ids"], self._drawn_bytes, ids)
        yield from model.step({**inputs, "input_ids": _row(ids)})
        if num_rows:
            yield from model.draw({name: given[name] for name in DTYPES}, self._drawn_bytes, num_rows)

    def _memory(self) -> Memory:
        return Memory(self._places.address, 0)

    def _drop(self) -> None:
        self._model = self.ring = None
        del self._spare, self._ids


def _first(buffer: Buffer, count: int) -> Buffer:
    """The first elements of a row of them."""
    return buffer.view(0, (count,), dtype=buffer.dtype)


def _row(buffer: Buffer) -> Buffer:
    """`[n]` as `[1, n]`."""
    shape = (1, *buffer.shape)
    return buffer.view(0, shape, strides=strides.contiguous(shape).strides, dtype=buffer.dtype)
