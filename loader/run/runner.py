"""The steps of a program of torch's: see `precast.loader.run.steps`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch

from precast.ir.graph.schema import Dtype, Graph
from precast.kernels import registry
from precast.kernels.embedding.drawn import known_ids_on
from precast.kernels.native import Native
from precast.kernels.sampling.limits import SAMPLE_VERSION
from precast.kernels.sampling.sample import greedy
from precast.kernels.use import Target, types_in
from precast.loader.cache.memory import CacheMemory
from precast.loader.device import Device, Event
from precast.loader.program.instructions import HostCall
from precast.loader.program.restore import Program
from precast.loader.run.batch import Arrays
from precast.loader.run.capture import Memory, Size
from precast.loader.run.draws import DTYPES
from precast.loader.run.places import Places
from precast.loader.run.steps import StepRunner
from precast.loader.sizing import EngineLimits
from precast.loader.torch_device import tensor_of


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
    ) -> None:
        """`captured_sizes`: steps of so many tokens are captured, in this order, as `capture_next` is called.

        `target` is what the device is, as `restore` was told.

        Raises what `BatchInputs` raises for the graph.
        """
        on = torch.device(device.name)
        target = target or registry.target_of(on)
        super().__init__(graph, memory, device, limits, captured_sizes, target.native or Native())
        dtypes: dict[str, Dtype] = {"logits": types_in(graph)[graph.outputs["logits"]].dtype}
        self._known_ids = known_ids_on(on, target)
        drawing = partial(registry.resolve_into, "precast.sample", SAMPLE_VERSION, on, dtypes=dtypes, target=target)
        self._sample, self._sample_captured = drawing(), drawing(control="static")
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

    def _run_eagerly(self, arrays: Arrays, drawing: Arrays, arrived: Event) -> torch.Tensor:
        program, _, places = self.opened()
        num_rows = len(drawing["temperature"]) if drawing else 0
        # Where all take their likeliest token, that is what `precast.sample` gives, and it need not be told.
        if drawing and not drawing["temperature"].any():
            drawing = {}
        places.fill(arrays | drawing, arrived)
        tensors = places.filled(arrays | drawing)
        if (arrays["input_ids"] < 0).any():
            tensors["input_ids"] = self._known_ids(tensors["input_ids"], self._drawn)
        logits = program(**self._given(tensors))["logits"][0]
        if num_rows:
            arguments = {name: tensors[name] for name in drawing}
            if drawing:
                self._sample(logits=logits, **arguments, out=self._drawn[:num_rows])
            else:
                self._drawn[:num_rows] = greedy(logits)
        return logits

    def _pieces(self, size: Size, *, is_warm_up: bool = False) -> Iterator[HostCall]:
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
