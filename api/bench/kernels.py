"""`precast bench kernels`: which of an op's records computes each node of a bundle the fastest on this machine.

The graph runs over random tensors, step by step. Before a node is computed, each record that fits it is timed on its
arguments, in CUDA graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import msgspec
import torch

from precast.bench.steps import Step, random_tensors, sizes_of, step_inputs, steps_of
from precast.ir.artifact import Bundle
from precast.ir.graph import symbols
from precast.ir.graph.schema import Graph
from precast.ir.memory import caches
from precast.kernels.choices import fitting
from precast.kernels.dtypes import BY_NAME
from precast.kernels.launch import Launched
from precast.kernels.linear import cublaslt
from precast.kernels.linear.records import LIBRARY, MAX_ROWS
from precast.kernels.linear.tuning import tune
from precast.kernels.measured import Machine, Measured, MeasuredProduct, Table
from precast.kernels.records import Record
from precast.kernels.registry import Implementation, function_for, implementations, target_of
from precast.kernels.rounded.fusing import with_rounded_inputs
from precast.kernels.timing import Timer
from precast.kernels.use import Target, Use, uses_in
from precast.loader.placement import Placement, bind_world
from precast.loader.program.restore import restore

ROTATED_BYTES = 256 << 20
"""Weights in turn of that many bytes together: several times a GPU's L2, so that each is read from memory."""
FEWEST_CALLS = 8
"""So many at least are timed together: beside them a graph begins in no time."""
MOST_COPIES = 64
SYMBOLS = ("T", "B", "R")
"""Sizes of a step by which implementations are chosen: tokens, sequences, rows of logits."""

Say = Callable[[int, int, Table], None]
"""Told how many steps are done, of how many, and what was measured until now."""


def measure(
    bundle: Bundle,
    placement: Placement,
    machine: Machine,
    timer: Timer,
    *,
    steps: Sequence[Step] | None = None,
    say: Say | None = None,
) -> Table:
    """The table of a bundle's nodes on the placement's device, which is the `machine`; what fits alone has no row.

    `steps` are those that run; None: `steps_of` the bundle's limit.
    """
    device = torch.device(placement.device.name)
    graph = bind_world(bundle.graph, placement)
    graph = msgspec.structs.replace(graph, caches=caches.with_slabs(graph.caches))
    steps = steps_of(bundle.manifest.model.max_seq_len) if steps is None else steps
    target = target_of(device, Table(machine))
    graph = with_rounded_inputs(graph, target)
    products = tuned(graph, target, steps, timer)
    if say is not None:
        say(0, len(steps), Table(machine, products=products))
    target = target._replace(table=Table(machine, products=products))
    found = _Rows(target, device, timer)
    program = restore(graph, device=device, choose=found.watched, target=target)
    tensors = random_tensors(graph, steps, device)
    program.bind(tensors)
    values = (*graph.inputs, *caches.tensors(graph.caches))
    for done, step in enumerate(steps):
        inputs = step_inputs(graph, step, device)
        found.begin(step, sizes_of(values, tensors | inputs))
        program(**inputs)
        if say is not None:
            say(done + 1, len(steps), Table(machine, tuple(found.rows), products))
    return Table(machine, tuple(found.rows), products)


def tuned(graph: Graph, target: Target, steps: Sequence[Step], timer: Timer) -> tuple[MeasuredProduct, ...]:
    """The fastest of cuBLASLt's algorithms for each linear layer that it computes, by the rows of the steps.

    A layer and rows for which none computes what it should have none.
    """
    found: dict[Any, MeasuredProduct] = {}
    for use in uses_in(graph, target):
        fits = [record for record in fitting(use) if record.name in LIBRARY]
        for record, step in ((record, step) for record in fits for step in steps):
            (symbol,) = record.sizes
            rows = cublaslt.class_of(step.sizes.get(symbol, (0, 0))[1] or 0)[1]
            outputs, inputs = use.number("weight", 0), use.number("weight", 1)
            key = (use.dtype, outputs, inputs, use.has("bias"), rows)
            if symbol not in step.sizes or rows <= MAX_ROWS or key in found:
                continue
            assert use.dtype is not None
            assert outputs is not None
            assert inputs is not None
            with suppress(RuntimeError):
                found[key] = tune(use.dtype, outputs, inputs, rows=rows, bias=use.has("bias"), timer=timer).product
    return tuple(found.values())


class _Rows:
    """The rows of a table, made while a program runs the implementations that `watched` gives it."""

    def __init__(self, target: Target, device: torch.device, timer: Timer) -> None:
        self.rows: list[Measured] = []
        self._target, self._device, self._timer = target, device, timer
        self._step, self._sizes = Step(0, 0, 0, {}), dict[str, int]()
        self._done: set[Any] = set()

    def begin(self, step: Step, sizes: dict[str, int]) -> None:
        """From now on this step runs, with these values of its symbols."""
        self._step, self._sizes = step, sizes
        self._done.clear()

    def watched(self, use: Use) -> tuple[Implementation, ...]:
        """What computes a use, and measures it before."""

        def run(function: Callable[..., Any], **arguments: Any) -> Any:
            self._measure(use, arguments)
            return function(**arguments)

        return tuple(each._replace(function=partial(run, each.function)) for each in implementations(use))

    def _measure(self, use: Use, arguments: dict[str, Any]) -> None:
        """Add the row of a node in this step, unless it is there or only one record fits."""
        named = _symbols(use)
        key = (use.node.op, use.node.version, use.text)
        if key in self._done or not named <= self._step.sizes.keys():
            return
        self._done.add(key)
        records = fitting(use, self._sizes)
        replayable = [record for record in records if record.control == "static"]
        times = self._times(use, replayable or records, arguments)
        if len(times) > 1:
            order = sorted(times, key=lambda name: times[name])
            sizes = {name: self._step.sizes[name] for name in SYMBOLS if name in named}
            microseconds = tuple(round(times[name], 2) for name in order)
            assert use.dtype is not None
            self.rows.append(Measured(use.node.op, use.dtype, sizes, tuple(order), microseconds, use.text))

    def _times(self, use: Use, records: Sequence[Record], arguments: dict[str, Any]) -> dict[str, float]:
        """Microseconds by record; one that fails has none."""
        given = self._in_turn(use, {name: value for name, value in arguments.items() if name not in ("out", "sizes")})
        found = {}
        for record in records if len(records) > 1 else ():
            function = function_for(record, use)
            more: dict[str, Any] = {}
            if isinstance(function, Launched) and function.expressions:
                more["sizes"] = [symbols.evaluate(expr, self._sizes) for expr in function.expressions]
            if not record.allocates and use.node.outputs:
                more["out"] = self._out(use)
            try:
                (time,) = self._timer([partial(_all, function, given, more)])
            except Exception:  # noqa: BLE001 - the compiler's, the driver's, torch's: the others are measured
                continue
            found[record.name] = time / len(given)
        return found

    def _in_turn(self, use: Use, arguments: dict[str, Any]) -> list[dict[str, Any]]:
        """The arguments again and again, with copies of the weights, so many that L2 holds none of them."""
        weights = {name: arguments[name] for name, each in use.operands.items() if not each.is_activation}
        num_bytes = sum(weight.nbytes for weight in weights.values())
        is_gpu = self._device.type == "cuda" and num_bytes > 0
        count = min(MOST_COPIES, -(-ROTATED_BYTES // num_bytes)) if is_gpu else 1
        copies = [arguments, *(
            arguments | {name: weight.clone() for name, weight in weights.items()} for _ in range(count - 1)
        )]  # fmt: skip
        return copies * -(-FEWEST_CALLS // count)

    def _out(self, use: Use) -> Any:
        made = tuple(
            torch.empty(
                [symbols.evaluate(size, self._sizes) for size in value.type.shape],
                dtype=BY_NAME[value.type.dtype],
                device=self._device,
            )
            for value in use.node.outputs
        )
        return made[0] if len(made) == 1 else made


def _symbols(use: Use) -> set[str]:
    """The symbols of a step that the use knows the values of."""
    types = [each.type for each in use.operands.values()] + [value.type for value in use.node.outputs]
    return {name for kind in types for size in kind.shape for name in symbols.free_symbols(size)} & set(SYMBOLS)


def _all(function: Callable[..., Any], given: Sequence[dict[str, Any]], more: dict[str, Any]) -> None:
    for arguments in given:
        function(**arguments, **more)
