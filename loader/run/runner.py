"""The steps of a program of torch's: see `precast.loader.run.steps`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from precast.ir.graph.schema import Graph
from precast.kernels import registry
from precast.kernels.embedding.drawn import known_ids_on
from precast.kernels.native import Native
from precast.kernels.use import Target
from precast.loader.cache.memory import CacheMemory
from precast.loader.cache.spans import PageCopy
from precast.loader.device import Device, Event
from precast.loader.program.instructions import HostCall
from precast.loader.program.restore import Program
from precast.loader.run.batch import Arrays
from precast.loader.run.capture import Memory, Size
from precast.loader.run.drawing import Drawing
from precast.loader.run.draws import DTYPES
from precast.loader.run.places import Places
from precast.loader.run.steps import StepRunner
from precast.loader.sizing import EngineLimits
from precast.loader.torch_device import tensor_of
from precast.loader.world.orders import Kind, Order


class Runner(StepRunner):
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
        target: Target | None = None,
        drawing: Drawing | None = None,
    ) -> None:
        """`captured_sizes`: steps of so many tokens are captured, in this order, as `capture_next` is called.

        `target` is what the device is, as `restore` was told. `drawing` draws; None: from logits that are all here.

        Raises what `BatchInputs` raises for the graph.
        """
        on = torch.device(device.name)
        target = target or registry.target_of(on)
        super().__init__(graph, memory, device, limits, captured_sizes, target.native or Native())
        self._known_ids = known_ids_on(on, target)
        self._drawing = drawing or Drawing(graph, on, target)
        self._drawn = tensor_of(self._drawn_bytes).view(torch.int64)
        self._program: Program | None = program

    def opened(self) -> tuple[Program, CacheMemory, Places]:
        """What it runs. Raises RequestError after `close`."""
        super().opened()
        assert self._program is not None
        assert self._held is not None
        return self._program, *self._held

    def _drop(self) -> None:
        del self._drawn
        self._program = None

    @contextmanager
    def _drawn_kept(self) -> Iterator[None]:
        drawn = self._drawn.clone()
        try:
            yield
        finally:
            self._drawn.copy_(drawn)

    def _run_eagerly(
        self, arrays: Arrays, drawing: Arrays, copies: Sequence[PageCopy], arrived: Event
    ) -> torch.Tensor | None:
        num_rows, wants_logits = len(drawing["temperature"]) if drawing else 0, not drawing
        # Where all take their likeliest token, that is what `precast.sample` gives, and it need not be told.
        if drawing and not drawing["temperature"].any():
            drawing = {}
        given = arrays | drawing
        lengths = {name: len(values) for name, values in given.items()}
        has_unknown = bool((arrays["input_ids"] < 0).any())
        order = Order(Kind.STEP, copies, 0, lengths, num_rows, has_unknown, wants_logits)
        self._fill(order, given, arrived, self._places.widest)
        return self._compute(order)

    def _compute(self, order: Order) -> torch.Tensor | None:
        """The logits `[R, V]` of what the places hold, op by op; where rows draw, what they drew is in `_drawn`, and
        the logits may be the rank's part, or another stage's."""
        program, _, places = self.opened()
        tensors = places.filled(order.lengths)
        if order.has_unknown:
            tensors["input_ids"] = self._known_ids(tensors["input_ids"], self._drawn)
        logits = _logits(program(**self._given(tensors)))
        if not order.num_rows:
            return self._drawing.whole(logits, len(tensors["logit_rows"]) if order.wants_logits else 0)
        asked = {name: tensors[name] for name in DTYPES if name in tensors}
        self._drawing.draw(logits, asked, self._drawn[: order.num_rows])
        return logits

    def _pieces(self, size: Size, *, is_warm_up: bool = False) -> Iterator[HostCall]:
        program, _, _ = self.opened()
        tensors = dict(self._layout_of(size).tensors)
        tensors["input_ids"] = self._known_ids(tensors["input_ids"], self._drawn)
        outputs: dict[str, torch.Tensor] = {}
        yield from (program.warm_up if is_warm_up else program.cut)(outputs, **self._given(tensors))
        drawing = {name: tensors[name] for name in DTYPES}
        yield from self._drawing.captured(_logits(outputs), drawing, self._drawn[: self.limits.dp * size.num_seqs])

    def _memory(self) -> Memory:
        program, _, places = self.opened()
        return Memory(places.address, program.num_binds)

    def _given(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The graph's inputs, with the dimensions that it gives them."""
        return {name: tensors[name].view(1, -1) if dimensions == 2 else tensors[name]
                for name, dimensions in self._inputs.dimensions.items()}  # fmt: skip


def _logits(outputs: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
    """The logits `[R, V]` among a graph's outputs; None: this stage has none."""
    return outputs["logits"][0] if "logits" in outputs else None
