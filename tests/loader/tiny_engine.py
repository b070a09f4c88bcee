"""Engines on the tiny model of `tiny.py`, with captured sizes of steps and tokens in flight, for tests of both."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from tiny import random_weights, tiny_graph, tiny_model

from precast.ir.graph.schema import Graph
from precast.kernels.registry import Implementation, implementations
from precast.kernels.use import Use
from precast.loader import sizing
from precast.loader.cache.memory import CacheMemory
from precast.loader.device import Device
from precast.loader.engine.engine import Engine
from precast.loader.program.restore import restore
from precast.loader.run.places import Places
from precast.loader.run.runner import Runner
from precast.loader.sizing import EngineLimits
from precast.loader.timeline import Timeline

SIZES = (1, 2, 4, 8, 16, 32)
WEIGHTS = random_weights()


def engine_on(
    device: Device,
    *,
    sizes: Sequence[int] = SIZES,
    runs_ahead: bool = True,
    graph: Graph | None = None,
    weights: dict[str, torch.Tensor] = WEIGHTS,
    choose: Callable[[Use], Sequence[Implementation]] | None = None,
    wrap: Callable[[Any], Any] = lambda program: program,
    seqs: int = 8,
    slabs: int = 90,
    eos: tuple[int, ...] = (),
    reuses: bool = False,
    tokens: int = 64,
    max_prefill_tokens: int | None = None,
) -> Engine:
    """The tiny model; its caches and activations are NaN where nothing was written."""
    graph = tiny_graph() if graph is None else graph
    on = torch.device(device.name)
    program = restore(graph, device=on) if choose is None else restore(graph, device=on, choose=choose)
    program.bind({name: tensor.to(on) for name, tensor in weights.items() if name in program.unbound})
    memory = CacheMemory(graph.caches, slabs, device)
    memory.arena.fill_(0xFF)
    program.bind(memory.tensors)
    limits = EngineLimits(seqs, tokens, 64)
    addresses = sizing.addresses_of(graph, limits, device)
    program.place(addresses, torch.full((addresses.num_bytes,), 0xFF, dtype=torch.uint8, device=on))
    runner = Runner(wrap(program), graph, memory, device, limits, captured_sizes=sizes)
    return Engine(
        runner,
        tiny_model(64, eos),
        tokenizer_files={},
        timeline=Timeline(),
        reuses_prefixes=reuses,
        runs_ahead=runs_ahead,
        max_prefill_tokens=max_prefill_tokens,
    )


class FailsOnce:
    """A program that runs out of memory at its n-th call."""

    def __init__(self, program: Any, call: int) -> None:
        self.program, self.left = program, call

    def __call__(self, **inputs: torch.Tensor) -> Any:
        self.left -= 1
        if self.left == 0:
            raise torch.OutOfMemoryError("no memory")
        return self.program(**inputs)


class Interrupts:
    """For `choose`: makes one op of the model raise at its n-th call, op by op, as it is warmed up, or captured.

    There are three such calls in each run of the model, one a layer, and two in a warm-up, one a block.
    """

    def __init__(self, error: BaseException, call: int) -> None:
        self.error, self.left = error, call

    def __call__(self, use: Use) -> Sequence[Implementation]:
        found = implementations(use)
        if use.node.op != "precast.rms_norm":
            return found
        return [each._replace(function=self.raising(each.function)) for each in found]

    def raising(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, which counts its calls."""

        def run(**arguments: Any) -> Any:
            self.left -= 1
            if self.left == 0:
                raise self.error
            return function(**arguments)

        return run


def poison(places: Places, number: int) -> None:
    """Let all places hold this number, lengths and pages too; whatever a step needs it has to write again."""
    with torch.inference_mode():  # as steps see them
        for tensor in places.widest.tensors.values():
            tensor.fill_(number)
    for host in places._hosts:  # on a CPU they are the places, and hold nothing of the last step any more
        host._written = {}
