"""Which op of a program holds other amounts than predicted: each op's own bytes, and what is alive before it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from precast.ir.graph.schema import Graph
from precast.ir.memory.liveness import ROUNDING, Moment
from precast.kernels import registry, step_memory
from precast.kernels.registry import Implementation
from precast.kernels.use import Use
from precast.loader.program.restore import restore

Run = Callable[..., dict[str, torch.Tensor]]
MAX_SHOWN = 24


class WatchedOps:
    """A graph's program on a GPU, of whose last run it is known what each op held."""

    def __init__(self, graph: Graph, tensors: Mapping[str, torch.Tensor], device: torch.device) -> None:
        self._graph = graph
        self._found: list[tuple[int, int]] = []  # own bytes, bytes that were alive before
        self._base = 0
        self._target = registry.target_of(device)
        self._program = restore(graph, device=device, choose=self._choose)
        self._program.bind(tensors)

    def __call__(self, **inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        self._found = []
        self._base = torch.cuda.memory_allocated()
        return self._program(**inputs)

    def mispredicted(self, sizes: Mapping[str, int]) -> list[dict[str, Any]]:
        """The ops that are off by more than 3 %, those that hold most first."""
        run, _ = step_memory.runs(self._graph, self._target)
        found = [_compared(moment, *held, sizes) for moment, held in zip(run.moments, self._found, strict=True)]
        wrong = [row for row in found if _is_off(row, "own", 4096) or _is_off(row, "alive", 65536)]
        return sorted(wrong, key=lambda row: -max(row["own"], row["predicted_own"]))[:MAX_SHOWN]

    def _choose(self, use: Use) -> tuple[Implementation, ...]:
        return tuple(each._replace(function=self._watched(each.function)) for each in registry.implementations(use))

    def _watched(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def watched(**arguments: Any) -> Any:
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            made = function(**arguments)
            given = arguments.get("out", ())
            written = given if isinstance(given, tuple) else (given,)
            results = sum(-(-each.nbytes // ROUNDING) * ROUNDING for each in written)
            held = torch.cuda.max_memory_allocated() - before
            self._found.append((held + results, before - results - self._base))
            return made

        return watched


def _compared(moment: Moment, own: int, alive: int, sizes: Mapping[str, int]) -> dict[str, Any]:
    before = moment._replace(made=frozenset(), workspace=0)
    predicted = step_memory.moment_bytes(before, sizes)
    return {
        "op": f"{moment.path} {moment.node.op} {[value.name for value in moment.node.outputs]}",
        "own": own,
        "predicted_own": step_memory.moment_bytes(moment, sizes) - predicted,
        "alive": alive,
        "predicted_alive": predicted,
    }


def _is_off(row: Mapping[str, Any], what: str, few: int) -> bool:
    return abs(row[what] - row[f"predicted_{what}"]) > max(0.03 * row[what], few)
