"""Steps to tokens: fills the inputs of a step, runs the program on them, and draws.

`launch` begins a step and `collect` gives its tokens. Another step may be launched before the tokens of the last one
are collected: what it was to draw is on the device by then, and an input token below 0 stands for it
(`precast.loader.cache.sequence`). A step that fits a captured size is replayed, any other one runs op by op.

A step draws one token a row of logits. That is assumed in `Runner._run_eagerly` and `_pieces`, `DecodeBatch.advance`,
`Scheduler.launched` and `Answer.take`, and nowhere else.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch

from precast.ir.errors import RequestError
from precast.ir.graph.schema import Dtype, Graph
from precast.kernels import registry
from precast.kernels.sampling.limits import SAMPLE_VERSION
from precast.kernels.sampling.sample import greedy
from precast.kernels.use import types_in
from precast.loader import sizing
from precast.loader.cache.memory import CacheMemory
from precast.loader.cache.spans import PageCopy
from precast.loader.device import Device, Event
from precast.loader.program.instructions import HostCall
from precast.loader.program.restore import Program
from precast.loader.run.batch import Arrays, BatchInputs, Padding
from precast.loader.run.capture import Captures, Memory, Size, SizedStep
from precast.loader.run.draws import DTYPES, draw_arrays, draw_padding
from precast.loader.run.places import Places
from precast.loader.schedule.decoding import DecodeBatch
from precast.loader.schedule.requests import Step
from precast.loader.sizing import EngineLimits
from precast.loader.torch_device import tensor_of


class Ticket(NamedTuple):
    """A step that was launched. It draws `num_rows` tokens, which `arrived` says are in `token_ids` on the host.

    `logits` are `[R, V]` on the device, of a step whose logits are wanted. `ran` says how it ran: "captured",
    "piecewise", or why it ran op by op. The device works on it from `began` to `arrived`.
    """

    ran: str
    padding: int
    logits: torch.Tensor | None
    num_rows: int
    token_ids: torch.Tensor
    arrived: Event
    began: Event


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
    ) -> None:
        """`captured_sizes`: steps of so many tokens are captured, in this order, as `capture_next` is called.

        Raises what `BatchInputs` raises for the graph.
        """
        self.graph = graph
        self.device = device
        self.num_slabs = memory.num_slabs
        self.limits = limits
        self._inputs = BatchInputs(graph)
        on = torch.device(device.name)
        dtypes: dict[str, Dtype] = {"logits": types_in(graph)[graph.outputs["logits"]].dtype}
        drawing = partial(registry.resolve, "precast.sample", SAMPLE_VERSION, on, dtypes=dtypes)
        self._sample, self._sample_captured = drawing(), drawing(control="static")
        places = Places(sizing.capacities(graph, limits, memory.num_slabs), device)
        num_rows = min(limits.max_num_seqs, limits.max_num_tokens)
        # What the last step drew, for the next one; and what two steps have drawn, for the host.
        self._drawn = tensor_of(device.alloc(8 * num_rows)).view(torch.int64)
        self._arrivals = deque(
            (
                tensor_of(device.alloc(8 * num_rows, pinned=True)).view(torch.int64),
                device.event(timed=True),
                device.event(timed=True),
            )
            for _ in range(2)
        )
        self.captures = Captures(device, [Size(n, min(n, num_rows)) for n in captured_sizes])
        self._largest = max(captured_sizes, default=0)
        self._padding: dict[Size, dict[str, Padding]] = {}
        empty = DecodeBatch(graph.caches, 0)
        self._nothing = self._inputs.arrays([]) | draw_arrays(empty)
        self._opened: tuple[Program, CacheMemory, Places] | None = (program, memory, places)

    def launch(self, step: Step, decoding: DecodeBatch | None = None) -> Ticket:
        """Begin a step: copy its pages, fill its inputs, run the program, draw.

        `decoding` has those of `step.decodes`; None: the logits are wanted, and nothing is drawn.

        At most two steps may be launched whose tokens are not collected. Raises RequestError after `close`, and what
        the program raises.
        """
        _, _, places = self.opened()
        arrays = self._inputs.arrays(step.chunks, decoding)
        drawing = {} if decoding is None else draw_arrays(decoding, step.chunks)
        num_rows = 0 if decoding is None else len(step.sampled)
        size = None if decoding is None else self.captures.size_for(step.num_tokens)
        self._arrivals.rotate()
        token_ids, arrived, began = self._arrivals[0]
        with self.device.use(), torch.inference_mode():
            began.record()
            if step.saves or step.restores:
                self.copy_pages([*step.saves, *step.restores])
            logits, padding = None, 0
            if size is None:
                logits = self._run_eagerly(arrays, drawing)
                ran = self._why_eager(step.num_tokens, is_drawn=decoding is not None)
            else:
                places.fill(arrays | drawing, self._padding_to(size))
                num_graphs = self.captures.replay(size, self._memory())
                ran, padding = "captured" if num_graphs == 1 else "piecewise", size.num_tokens - step.num_tokens
            # What was drawn for whatever rows; nobody waits for it here.
            token_ids.copy_(self._drawn, non_blocking=True)
            arrived.record()
        return Ticket(ran, padding, logits if decoding is None else None, num_rows, *self._arrivals[0])

    def collect(self, ticket: Ticket) -> list[int]:
        """Wait for a step: the token id of each row that draws, -1 (`NO_TOKEN`) where its logits are not finite."""
        if not ticket.num_rows:
            return []
        ticket.arrived.synchronize()
        token_ids: list[int] = ticket.token_ids[: ticket.num_rows].tolist()
        return token_ids

    def seconds(self, ticket: Ticket) -> float:
        """How long the device took for a step; it was collected, and drew tokens."""
        return self.device.seconds_between(ticket.began, ticket.arrived)

    def capture_next(self) -> None:
        """Capture the next size; there is one. What was drawn last stays."""
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
        _, memory, _ = self.opened()
        for copy in copies:
            memory.copy_page(copy.group, copy.source, copy.target)

    def opened(self) -> tuple[Program, CacheMemory, Places]:
        """What it runs. Raises RequestError after `close`."""
        if self._opened is None:
            raise RequestError("engine-closed", "the engine is closed", fix="load the bundle again")
        return self._opened

    def close(self) -> None:
        """Drop the program with its weights, the caches, the places of its inputs, and what is captured."""
        self.captures.drop()
        self._opened = None
        if self.device.kind == "cuda":
            torch.cuda.empty_cache()
            if hasattr(torch.accelerator, "empty_host_cache"):  # torch 2.12 and newer
                torch.accelerator.empty_host_cache()

    def _run_eagerly(self, arrays: Arrays, drawing: Arrays) -> torch.Tensor:
        """The logits `[R, V]`; where rows draw, what they drew is in `_drawn`."""
        program, _, places = self.opened()
        num_rows = len(drawing["temperature"]) if drawing else 0
        # Where all take their likeliest token, that is what `precast.sample` gives, and it need not be told.
        if drawing and not drawing["temperature"].any():
            drawing = {}
        places.fill(arrays | drawing)
        tensors = places.filled(arrays | drawing)
        if (arrays["input_ids"] < 0).any():
            tensors["input_ids"] = self._known(tensors["input_ids"])
        logits = program(**self._given(tensors))["logits"][0]
        if num_rows:
            arguments = {name: tensors[name] for name in drawing}
            self._drawn[:num_rows] = self._sample(logits=logits, **arguments) if drawing else greedy(logits)
        return logits

    def _step_of(self, size: Size) -> SizedStep:
        """What `Captures` runs to warm up and to capture a size: a step with nothing but empty slots."""

        def prepare() -> None:
            _, _, places = self.opened()
            places.fill(self._nothing, self._padding_to(size))

        return SizedStep(prepare, partial(self._pieces, size))

    def _padding_to(self, size: Size) -> dict[str, Padding]:
        """What makes the arrays of a step, and those of what it draws, as long as a captured one's."""
        if size not in self._padding:
            self._padding[size] = self._inputs.padding(*size) | draw_padding(size.num_seqs)
        return self._padding[size]

    def _pieces(self, size: Size) -> Iterator[HostCall]:
        """A step of this size over whatever its places hold, cut in front of the calls that read the host."""
        program, _, places = self.opened()
        padding = self._padding_to(size)
        tensors = {
            name: tensor[: padding[name].length] if name in padding else tensor
            for name, tensor in places.tensors.items()
        }
        tensors["input_ids"] = self._known(tensors["input_ids"])
        outputs: dict[str, torch.Tensor] = {}
        yield from program.cut(outputs, **self._given(tensors))
        drawing = {name: tensors[name] for name in DTYPES}
        self._drawn[: size.num_seqs] = self._sample_captured(logits=outputs["logits"][0], **drawing)

    def _memory(self) -> Memory:
        program, _, places = self.opened()
        return Memory(places.address, program.num_binds)

    def _given(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The graph's inputs, with the dimensions that it gives them."""
        return {name: tensors[name].view(1, -1) if dimensions == 2 else tensors[name]
                for name, dimensions in self._inputs.dimensions.items()}  # fmt: skip

    def _known(self, ids: torch.Tensor) -> torch.Tensor:
        """`ids` `[T]` with what was drawn last in the place of `-1 - row`, and 0 where that is no token."""
        drawn = self._drawn[(-1 - ids).clamp_(min=0)]
        return torch.where(ids < 0, drawn, ids).clamp_(min=0)

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
