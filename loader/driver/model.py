"""A graph on a device without torch: its launches with what they write and hold, ready to run."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from precast.ir.graph.schema import Graph, TensorType
from precast.ir.memory.addresses import Addresses
from precast.ir.weights.tensorfile import element_bytes
from precast.kernels.sampling.limits import row_bytes
from precast.kernels.step_launches import (
    DrawnPart,
    LaunchAt,
    drawing_launches,
    known_ids_launches,
    part_drawing_launches,
)
from precast.kernels.use import Target, types_in
from precast.loader.device import Buffer, Device, aligned
from precast.loader.driver.kernels import Kernels, Run
from precast.loader.driver.node_ways import Sizes
from precast.loader.driver.placed import ACTIVATIONS, OUTPUT, WORKSPACE, Number
from precast.loader.driver.program import NativeProgram, Ready
from precast.loader.program.sources import sources_of

ALIGNMENT = 256
"""Of parts of the workspace, in bytes."""
KEPT_STEPS = 16
"""Of so many sizes of steps it is kept what they launch: a few kilobytes a launch."""


class Held(NamedTuple):
    """Memory of a model beside params, caches and inputs: of values, of what launches hold, of the logits."""

    activations: Buffer
    workspace: Buffer
    logits: Buffer


class PartDrawing(NamedTuple):
    """How a rank with a part of the logits draws, of up to `most_rows` rows: on `memory`, the counter `calls` and that
    of the ranks, and waiting `limit` nanoseconds for them."""

    part: DrawnPart
    most_rows: int
    limit: int
    memory: Mapping[str, Buffer]


def hold(
    program: NativeProgram, graph: Graph, addresses: Addresses, sizes: Sizes, device: Device,
    drawing: PartDrawing | None = None,
) -> Held:  # fmt: skip
    """The memory, for steps of at most these sizes."""
    drawn = drawing_bytes(graph, sizes["R"], program.target)
    if drawing is not None:
        drawn = _held_bytes(sizes["R"]) + sizes["R"] * drawing.part.size * element_bytes(logits_type(graph).dtype)
    workspace = max(program.workspace_bytes(sizes), drawn)
    return Held(
        device.alloc(addresses.num_bytes), device.alloc(workspace), device.alloc(program.output_bytes("logits", sizes))
    )


def _held_bytes(num_rows: int) -> int:
    """Of the workspace what drawing from parts notes of rows; rows of all logits begin there."""
    return aligned(num_rows * row_bytes(), ALIGNMENT)


def logits_type(graph: Graph) -> TensorType:
    """The type of the graph's logits."""
    return types_in(graph)[graph.outputs["logits"]]


def drawing_bytes(graph: Graph, num_rows: int, target: Target) -> int:
    """What drawing tokens holds beside the logits."""
    from precast.ir.graph import symbols
    from precast.kernels.step_memory import drawing

    kind = logits_type(graph)
    rows = TensorType(kind.dtype, (num_rows, kind.shape[-1]))
    return symbols.evaluate(drawing(rows, target, captured=True), {})


class Model:
    """A program whose params, constants and caches lie in `memory` by their names."""

    def __init__(
        self,
        program: NativeProgram,
        graph: Graph,
        kernels: Kernels,
        addresses: Addresses,
        memory: Mapping[str, Buffer],
        held: Held,
        pages: Sizes,
        part_drawing: PartDrawing | None = None,
    ) -> None:
        """`pages`: by symbol, how many pages pools have. `part_drawing`: the logits are those of a rank's part."""
        self._part_drawing = part_drawing
        self._program, self._graph, self._kernels, self._addresses = program, graph, kernels, addresses
        self._logits, self._workspace = held.logits, held.workspace
        self._memory = {
            **memory, ACTIVATIONS: held.activations, WORKSPACE: held.workspace,
            OUTPUT + graph.outputs["logits"]: held.logits,
        }  # fmt: skip
        self._sources = sources_of(graph.inputs)
        self._pages = pages
        self._steps: OrderedDict[tuple[object, ...], list[Run]] = OrderedDict()
        self._known_ids: dict[int, Sequence[LaunchAt]] = {}
        self._drawing: dict[int, Sequence[LaunchAt]] = {}

    def step(self, inputs: Mapping[str, Buffer]) -> Iterator[Run]:
        """What computes the logits of these inputs, in order; kept for the next step of the same sizes.

        Each may be launched as it comes: the device is at work while the rest is prepared.
        """
        sizes = {**self._pages}
        for symbol, name, axis, factor, offset in self._sources:
            sizes[symbol] = (inputs[name].shape[axis] - offset) // factor
        key = (*(sizes[name] for name in sorted(self._program.symbols)), *(each.pointer for each in inputs.values()))
        if key in self._steps:
            self._steps.move_to_end(key)
            yield from self._steps[key]
            return
        ready, _ = self._program.ready(sizes, {**self._memory, **inputs}, self._addresses)
        made = []
        for each in ready:
            made.append(self._kernels.prepared(each))
            yield made[-1]
        if len(self._steps) >= KEPT_STEPS:
            self._steps.popitem(last=False)
        self._steps[key] = made

    def known_ids(self, ids: Buffer, drawn: Buffer, out: Buffer) -> list[Run]:
        """What puts the tokens that the step before drew in their places: `ids` [T] and `drawn` in, `out` [T]."""
        count = ids.shape[0]
        if count not in self._known_ids:
            self._known_ids[count] = known_ids_launches(self._program.target, count)
        return self._prepared(self._known_ids[count], {"ids": ids, "drawn": drawn, "known_ids": out})

    def draw(self, parameters: Mapping[str, Buffer], out: Buffer, num_rows: int) -> list[Run]:
        """What draws a token for each of the rows of logits into `out`."""
        tensors = {**parameters, "logits": self._logits, "tokens": out}
        if self._part_drawing is not None:
            whole = self._workspace.view(_held_bytes(num_rows), (0,))
            tensors |= {**self._part_drawing.memory, "held": self._workspace, "whole": whole}
        if num_rows not in self._drawing:
            self._drawing[num_rows] = self._drawn_by(num_rows)
        return self._prepared(self._drawing[num_rows], tensors)

    def _drawn_by(self, num_rows: int) -> Sequence[LaunchAt]:
        kind, target = logits_type(self._graph), self._program.target
        if self._part_drawing is None:
            return drawing_launches(kind, target, num_rows, captured=True)
        part, most_rows, limit, _ = self._part_drawing
        return part_drawing_launches(kind.dtype, target, num_rows, part, most_rows=most_rows, limit=limit)

    def _prepared(self, launches: Sequence[LaunchAt], tensors: Mapping[str, Buffer]) -> list[Run]:
        made = []
        for each in launches:
            values: list[Number] = []
            for arg in each.args:
                if arg is None or isinstance(arg, (int, float)):
                    values.append(arg)
                else:
                    of = self._workspace if arg.memory.kind == "workspace" else tensors[arg.memory.name]
                    values.append(of.pointer + arg.offset)
            made.append(self._kernels.prepared(Ready(each.launch, each.key, each.grid, tuple(values))))
        return made
