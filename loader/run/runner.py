"""Steps to tokens: fills the inputs of a step, runs the program on them, and draws.

`launch` begins a step and `collect` gives its tokens. For now one follows the other; nothing here relies on it but
that the inputs of a step are overwritten by the next.

A step draws one token a row of logits. That is assumed in `Runner._draw`, `DecodeBatch.advance`, `Scheduler.complete`
and `Answer.take`, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch

from precast.ir.errors import RequestError
from precast.ir.graph.schema import Graph
from precast.kernels import registry
from precast.kernels.sampling.sample import greedy
from precast.loader import sizing
from precast.loader.cache.memory import CacheMemory
from precast.loader.cache.spans import PageCopy
from precast.loader.device import Device
from precast.loader.run.batch import BatchInputs
from precast.loader.run.draws import Draw, draw_arrays
from precast.loader.run.places import Places
from precast.loader.schedule.decoding import DecodeBatch
from precast.loader.schedule.requests import Step
from precast.loader.sizing import EngineLimits

Program = Callable[..., dict[str, torch.Tensor]]


class Ticket(NamedTuple):
    """A step that was launched. `logits` are `[R, V]`, `drawn` a token id for each of the rows that draw, `[R]`.

    Both are on the device, and may not be computed yet.
    """

    logits: torch.Tensor
    drawn: torch.Tensor | None


class Runner:
    """A program with its caches, and a fixed place on the device for each of its inputs.

    `graph` and `memory` are those that the program is bound to. No step goes beyond `limits`.
    """

    def __init__(
        self, program: Program, graph: Graph, memory: CacheMemory, device: Device, limits: EngineLimits
    ) -> None:
        """Raises what `BatchInputs` raises for the graph."""
        self.graph = graph
        self.device = device
        self.num_slabs = memory.num_slabs
        self.limits = limits
        self._inputs = BatchInputs(graph)
        self._sample = registry.resolve("precast.sample", 2, torch.device(device.name))
        places = Places(sizing.capacities(graph, limits, memory.num_slabs), device)
        self._opened: tuple[Program, CacheMemory, Places] | None = (program, memory, places)

    def launch(self, step: Step, decoding: DecodeBatch | None = None, draws: Sequence[Draw] = ()) -> Ticket:
        """Begin a step: copy its pages, fill its inputs, run the program, draw.

        `decoding` has those of `step.decodes`. `draws`: how the token of each row of logits is drawn, in their order,
        for all rows or, where only logits are wanted, for none.

        Raises RequestError after `close`, and what the program raises.
        """
        program, _, places = self.opened()
        arrays = self._inputs.arrays(step.chunks, decoding)
        drawing = draw_arrays(draws)
        with self.device.use(), torch.inference_mode():
            self.copy_pages([*step.saves, *step.restores])
            tensors = places.fill(arrays | drawing)
            given = {name: tensors[name].view(1, -1) if dimensions == 2 else tensors[name]
                     for name, dimensions in self._inputs.dimensions.items()}  # fmt: skip
            logits = program(**given)["logits"][0]
            drawn = self._draw(logits, {name: tensors[name] for name in drawing}) if draws else None
        return Ticket(logits, drawn)

    def collect(self, ticket: Ticket) -> list[int]:
        """Wait for a step: the token id of each row that draws, -1 (`NO_TOKEN`) where its logits are not finite."""
        if ticket.drawn is None:
            return []
        token_ids: list[int] = ticket.drawn.tolist()
        return token_ids

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
        """Drop the program with its weights, the caches, and the places of its inputs."""
        self._opened = None
        if self.device.kind == "cuda":
            torch.cuda.empty_cache()
            if hasattr(torch.accelerator, "empty_host_cache"):  # torch 2.12 and newer
                torch.accelerator.empty_host_cache()

    def _draw(self, logits: torch.Tensor, arguments: dict[str, torch.Tensor]) -> torch.Tensor:
        """One token a row. Without arguments all rows are greedy: what `precast.sample` gives, without its sort."""
        if not arguments:
            return greedy(logits)
        drawn: torch.Tensor = self._sample(logits=logits, **arguments)
        return drawn
