"""Steps to tokens: fills the inputs of a step, runs the program on them, and draws.

`launch` begins a step and `collect` gives its tokens. Another step may be launched before the tokens of the last one
are collected: what it was to draw is on the device by then, and an input token below 0 stands for it
(`precast.loader.cache.sequence`). A step that fits a captured size is replayed, any other one runs op by op.

Where ranks share the model, rank 0 tells the others what each step computes before it begins it, and they do the same
(`Runner.obey`): all draw the same tokens, from equal logits, and none of them is sent.

A step draws one token a row of logits. That is assumed in `Runner._compute` and `_pieces`, `DecodeBatch.advance`,
`Scheduler.launched` and `Answer.take`, and nowhere else.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from precast.ir.errors import RequestError
from precast.ir.graph.schema import Dtype, Graph
from precast.ir.memory import caches
from precast.kernels import registry
from precast.kernels.embedding.drawn import known_ids_on
from precast.kernels.sampling.limits import SAMPLE_VERSION
from precast.kernels.sampling.sample import greedy
from precast.kernels.use import types_in
from precast.loader import sizing
from precast.loader.cache.memory import CacheMemory
from precast.loader.cache.spans import PageCopy
from precast.loader.device import Buffer, Device, Event, host_bytes
from precast.loader.program.instructions import HostCall
from precast.loader.program.restore import Program
from precast.loader.run.batch import Arrays, BatchInputs
from precast.loader.run.capture import Captures, Memory, Size, SizedStep
from precast.loader.run.draws import DTYPES, draw_arrays, draw_padding
from precast.loader.run.places import Layout, Places, places_bytes
from precast.loader.schedule.decoding import DecodeBatch
from precast.loader.schedule.requests import Step
from precast.loader.sizing import EngineLimits
from precast.loader.torch_device import tensor_of
from precast.loader.world.agree import Captured
from precast.loader.world.follower import Follower
from precast.loader.world.lead import Lead
from precast.loader.world.orders import Kind, Order, Orders, Part

if TYPE_CHECKING:
    import numpy.typing as npt


class Ticket(NamedTuple):
    """A step that was launched. It draws `num_rows` tokens, which `arrived` says are in `token_ids` on the host.

    `logits` are `[R, V]` on the device, of a step whose logits are wanted. `ran` says how it ran: "captured",
    "piecewise", or why it ran op by op. The device works on it from `began`, if that was asked for, to `arrived`.
    """

    ran: str
    padding: int
    logits: torch.Tensor | None
    num_rows: int
    token_ids: npt.NDArray[np.int64]
    arrived: Event
    began: Event | None


class _Arrival(NamedTuple):
    """Where the tokens of a step arrive: pinned memory of the host, and the same as numbers."""

    pinned: Buffer
    token_ids: npt.NDArray[np.int64]
    arrived: Event
    began: Event


def _arrival(pinned: Buffer, device: Device) -> _Arrival:
    token_ids = np.frombuffer(host_bytes(pinned), np.int64)
    return _Arrival(pinned, token_ids, device.event(timed=True), device.event(timed=True))


class Runner:
    """A program with its caches, and a fixed place on the device for each of its inputs.

    `graph` and `memory` are those that the program is bound to. No step goes beyond `limits`.
    """

    def __init__(
        self,
        program: Program,
        graph: Graph,
        memory: CacheMemory,
        device: Device,
        limits: EngineLimits,
        *,
        captured_sizes: Sequence[int] = (),
        world: Lead | Follower | None = None,
    ) -> None:
        """`captured_sizes`: steps of so many tokens are captured, in this order, as `capture_next` is called.

        `world`: this is a rank of several. Rank 0 tells the others what it does, and those call `obey` alone.

        Raises what `BatchInputs` raises for the graph.
        """
        self.graph = graph
        self.device = device
        self.num_slabs = memory.num_slabs
        self.limits = limits
        self._inputs = BatchInputs(graph)
        on = torch.device(device.name)
        dtypes: dict[str, Dtype] = {"logits": types_in(graph)[graph.outputs["logits"]].dtype}
        self._known_ids = known_ids_on(on)
        drawing = partial(registry.resolve_into, "precast.sample", SAMPLE_VERSION, on, dtypes=dtypes)
        self._sample, self._sample_captured = drawing(), drawing(control="static")
        capacities = sizing.capacities(graph, limits, memory.num_slabs)
        places = Places(capacities, device)
        groups = [group.name for group in caches.groups(graph.caches)]
        self.orders = Orders(capacities, groups, places_bytes(capacities))
        self._world = world
        self._at_close: list[Callable[[], object]] = []
        self._lead = world if isinstance(world, Lead) else None
        num_rows = min(limits.max_num_seqs, limits.max_num_tokens)
        # What the last step drew, for the next one; and what two steps have drawn, for the host.
        self._drawn_bytes = device.alloc(8 * num_rows)
        self._drawn = tensor_of(self._drawn_bytes).view(torch.int64)
        self._arrivals = deque(_arrival(device.alloc(8 * num_rows, pinned=True), device) for _ in range(2))
        self._prepared = device.event()  # of the inputs of a step that is captured
        self._sizes = {n: Size(n, min(n, num_rows)) for n in captured_sizes}
        self.captures = Captures(device, list(self._sizes.values()))
        self._largest = max(captured_sizes, default=0)
        self._layouts: dict[Size, Layout] = {}
        empty = DecodeBatch(graph.caches, 0)
        self._nothing = self._inputs.arrays([]) | draw_arrays(empty)
        self._opened: tuple[Program, CacheMemory, Places] | None = (program, memory, places)

    def launch(self, step: Step, decoding: DecodeBatch | None = None, *, is_timed: bool = False) -> Ticket:
        """Begin a step: copy its pages, fill its inputs, run the program, draw.

        `decoding` has those of `step.decodes`; None: the logits are wanted, and nothing is drawn. `is_timed`:
        `seconds` will be asked for.

        At most two steps may be launched whose tokens are not collected. Raises RequestError after `close`, and what
        the program raises; where ranks share the model, TargetError for one that is lost.
        """
        if self._lead is None:
            return self._launch(step, decoding, is_timed=is_timed)
        with self._lead.step():
            return self._launch(step, decoding, is_timed=is_timed)

    def _launch(self, step: Step, decoding: DecodeBatch | None, *, is_timed: bool) -> Ticket:
        """See `launch`."""
        self.opened()
        arrays = self._inputs.arrays(step.chunks, decoding)
        drawing = {} if decoding is None else draw_arrays(decoding, step.chunks)
        num_rows = 0 if decoding is None else len(step.sampled)
        size = None if decoding is None else self.captures.size_for(step.num_tokens)
        self._arrivals.rotate()
        arrival = self._arrivals[0]
        with self.device.use(), torch.inference_mode():
            try:
                if is_timed:
                    arrival.began.record()
                copies = [*step.saves, *step.restores]
                logits, padding = None, 0
                if size is None:
                    logits = self._run_eagerly(arrays, drawing, copies, arrival.arrived)
                    ran = self._why_eager(step.num_tokens, is_drawn=decoding is not None)
                else:
                    order = Order(Kind.STEP, copies, size.num_tokens)
                    self._fill(order, arrays | drawing, arrival.arrived, self._layout_of(size))
                    num_graphs = self.captures.replay(size, self._memory())
                    ran, padding = "captured" if num_graphs == 1 else "piecewise", size.num_tokens - step.num_tokens
                # What was drawn for whatever rows; nobody waits for it here.
                self.device.copy(arrival.pinned, self._drawn_bytes)
            finally:
                arrival.arrived.record()
        began = arrival.began if is_timed else None
        return Ticket(
            ran, padding, logits if decoding is None else None, num_rows, arrival.token_ids, arrival.arrived, began
        )

    def collect(self, ticket: Ticket) -> list[int]:
        """Wait for a step: the token id of each row that draws, -1 (`NO_TOKEN`) where its logits are not finite."""
        if not ticket.num_rows:
            return []
        if self._lead is None:
            ticket.arrived.synchronize()
        else:
            with self._lead.step(is_told=True):  # what is lost of a world leaves garbage in the place of tokens
                ticket.arrived.synchronize()
        if self._opened is not None:
            self._opened[2].passed(ticket.arrived)
        token_ids: list[int] = ticket.token_ids[: ticket.num_rows].tolist()
        return token_ids

    def seconds(self, ticket: Ticket) -> float:
        """How long the device took for a step that is timed; it was collected, and drew tokens."""
        assert ticket.began is not None
        return self.device.seconds_between(ticket.began, ticket.arrived)

    def obey(self, order: Order, parts: Sequence[Part]) -> None:
        """Do what rank 0 has ordered: what `launch`, `capture_next` or `copy_pages` does there."""
        _, _, places = self.opened()
        if order.kind == Kind.CAPTURE:
            self._capture_together()
            return
        self._arrivals.rotate()
        arrived = self._arrivals[0].arrived
        with self.device.use(), torch.inference_mode():
            try:
                self._copy(order.copies)
                if order.kind == Kind.STEP:
                    places.receive(parts, arrived)
                    if order.num_tokens:
                        self.captures.replay(self._sizes[order.num_tokens], self._memory())
                    else:
                        self._compute(order)
            finally:
                arrived.record()

    def capture_next(self) -> None:
        """Capture the next size; there is one. What was drawn last stays.

        Where ranks share the model, what one of them can't capture is captured by none.
        """
        if self._lead is None:
            self._capture_next()
            return
        with self._lead.step("capture"):
            self._lead.send(self.orders.encode(Order(Kind.CAPTURE)))
            self._capture_together()

    def _capture_together(self) -> None:
        """Capture the next size; it is kept if all ranks could."""
        assert self._world is not None
        try:
            self._capture_next()
        except RuntimeError as error:
            self.captures.stop("capture failed", error)
        mine = Captured(self.captures.num_captured, self.captures.failure)
        captured = self._world.gather("capture", mine, timeout="capture")
        failures = [f"rank {rank}: {each.failure}" for rank, each in enumerate(captured) if each.failure]
        self.captures.keep(min(each.num_captured for each in captured), ", ".join(failures))

    def _capture_next(self) -> None:
        """See `capture_next`; of this rank."""
        with self.device.use(), torch.inference_mode():
            drawn = self._drawn.clone()
            try:
                self.captures.capture_next(self._step_of, self._memory())
            finally:
                self._drawn.copy_(drawn)

    def capture_all(self) -> None:
        """Capture what is left to capture."""
        while self.captures.num_pending:
            self.capture_next()

    def copy_pages(self, copies: Iterable[PageCopy]) -> None:
        """Copy pages, in this order and in that of the device's stream."""
        if self._lead is None:
            self._copy(copies)
            return
        if listed := list(copies):
            with self._lead.step():
                self._lead.send(self.orders.encode(Order(Kind.COPIES, listed)))
                self._copy(listed)

    def _copy(self, copies: Iterable[PageCopy]) -> None:
        """See `copy_pages`; of this rank."""
        _, memory, _ = self.opened()
        for copy in copies:
            memory.copy_page(copy.group, copy.source, copy.target)

    def opened(self) -> tuple[Program, CacheMemory, Places]:
        """What it runs. Raises RequestError after `close`."""
        if self._opened is None:
            raise RequestError("engine-closed", "the engine is closed", fix="load the bundle again")
        return self._opened

    def at_close(self, call: Callable[[], object]) -> None:
        """`call` is called when the runner is closed."""
        self._at_close.append(call)

    def close(self) -> None:
        """Drop the program with its weights, the caches, the places of its inputs, and what is captured."""
        self.captures.drop()
        self._layouts.clear()
        self._arrivals.clear()
        if self._opened is not None:
            del self._drawn, self._drawn_bytes
        self._opened = None
        while self._at_close:
            self._at_close.pop()()
        if self.device.kind == "cuda":
            # Where a rank was lost amid a collective, the GPU may have been left with an error, which was raised.
            with suppress(RuntimeError) if self._world is not None else nullcontext():
                torch.cuda.empty_cache()
            if hasattr(torch.accelerator, "empty_host_cache"):  # torch 2.12 and newer
                torch.accelerator.empty_host_cache()

    def _fill(self, order: Order, arrays: Arrays, until: Event, layout: Layout) -> None:
        """Make the order's copies, and put the arrays in their places, on all ranks. `until` is recorded afterwards."""
        _, _, places = self.opened()
        if order.copies:
            self._copy(order.copies)
        lengths = places.write(arrays, layout)
        if self._lead is not None:  # before this rank's own work: the others begin at the same time
            self._lead.send(self.orders.encode(order, places.written(lengths, layout)))
        places.copy(lengths, until, layout)

    def _run_eagerly(self, arrays: Arrays, drawing: Arrays, copies: Sequence[PageCopy], arrived: Event) -> torch.Tensor:
        """The logits `[R, V]`; where rows draw, what they drew is in `_drawn`. `arrived` is recorded afterwards."""
        num_rows = len(drawing["temperature"]) if drawing else 0
        # Where all take their likeliest token, that is what `precast.sample` gives, and it need not be told.
        if drawing and not drawing["temperature"].any():
            drawing = {}
        given = arrays | drawing
        lengths = {name: len(values) for name, values in given.items()}
        has_unknown = bool((arrays["input_ids"] < 0).any())
        order = Order(Kind.STEP, copies, 0, lengths, num_rows, has_unknown)
        _, _, places = self.opened()
        self._fill(order, given, arrived, places.widest)
        return self._compute(order)

    def _compute(self, order: Order) -> torch.Tensor:
        """The logits `[R, V]` of what the places hold, op by op; where rows draw, what they drew is in `_drawn`."""
        program, _, places = self.opened()
        tensors = places.filled(order.lengths)
        if order.has_unknown:
            tensors["input_ids"] = self._known_ids(tensors["input_ids"], self._drawn)
        logits = program(**self._given(tensors))["logits"][0]
        if order.num_rows:
            arguments = {name: tensors[name] for name in DTYPES if name in tensors}
            if arguments:
                self._sample(logits=logits, **arguments, out=self._drawn[: order.num_rows])
            else:
                self._drawn[: order.num_rows] = greedy(logits)
        return logits

    def _step_of(self, size: Size) -> SizedStep:
        """What `Captures` runs to warm up and to capture a size: a step with nothing but empty slots."""

        def prepare() -> None:
            _, _, places = self.opened()
            places.fill(self._nothing, self._prepared, self._layout_of(size))
            self._prepared.record()

        return SizedStep(prepare, partial(self._pieces, size, is_warm_up=True), partial(self._pieces, size))

    def _layout_of(self, size: Size) -> Layout:
        """Places for the arrays of a captured step, and for those of what it draws."""
        if size not in self._layouts:
            _, _, places = self.opened()
            self._layouts[size] = places.layout(self._inputs.padding(*size) | draw_padding(size.num_seqs))
        return self._layouts[size]

    def _pieces(self, size: Size, *, is_warm_up: bool = False) -> Iterator[HostCall]:
        """A step of this size over whatever its places hold, cut in front of the calls that read the host.

        `is_warm_up`: what is called many times in it runs once.
        """
        program, _, _ = self.opened()
        tensors = dict(self._layout_of(size).tensors)
        tensors["input_ids"] = self._known_ids(tensors["input_ids"], self._drawn)
        outputs: dict[str, torch.Tensor] = {}
        yield from (program.warm_up if is_warm_up else program.cut)(outputs, **self._given(tensors))
        drawing = {name: tensors[name] for name in DTYPES}
        self._sample_captured(logits=outputs["logits"][0], **drawing, out=self._drawn[: size.num_seqs])

    def _memory(self) -> Memory:
        program, _, places = self.opened()
        return Memory(places.address, program.num_binds)

    def _given(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The graph's inputs, with the dimensions that it gives them."""
        return {name: tensors[name].view(1, -1) if dimensions == 2 else tensors[name]
                for name, dimensions in self._inputs.dimensions.items()}  # fmt: skip

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
