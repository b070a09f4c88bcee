"""A bundle's model with random weights on the GPU, and engines on it: what steps take without a checkpoint's files."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence

import msgspec
import torch

from precast.ir.artifact import Bundle
from precast.ir.memory import caches
from precast.kernels.registry import Implementation, implementations, target_of
from precast.kernels.rounded.fusing import with_rounded_inputs
from precast.kernels.use import Use
from precast.loader import sizing
from precast.loader.cache.memory import CacheMemory
from precast.loader.engine.engine import Engine
from precast.loader.placement import bind_world, place
from precast.loader.program.restore import restore
from precast.loader.run.runner import Runner
from precast.loader.sizing import EngineLimits, captured_sizes
from precast.loader.timeline import Timeline
from precast.loader.torch_device import cut_blocks_to_size, tensor_of
from precast.loader.torch_load import constant_tensors
from support import random_checkpoints


class RandomModel:
    """The model; its runners have caches of their own, and share the weights."""

    def __init__(self, bundle: Bundle, limits: EngineLimits) -> None:
        placement = place("cuda")
        self.device, self.limits, self._bundle = placement.device, limits, bundle
        graph = bind_world(bundle.graph, placement)
        graph = msgspec.structs.replace(graph, caches=caches.with_slabs(graph.caches))
        self._on = torch.device(self.device.name)
        self.graph = with_rounded_inputs(graph, target_of(self._on)._replace(tp=placement.tp))
        self.default_sizes = captured_sizes(self.graph, limits)
        self._tensors = random_checkpoints.tensors(self.graph, self._on)
        self._tensors |= constant_tensors(self.graph, bundle.constants, self.device)
        cut_blocks_to_size(self._on)

    def arena(self, sizes: Sequence[int]) -> sizing.ArenaSize:
        """What the caches and the rest get beside the weights, if steps of these sizes are captured."""
        free = self.device.free_bytes()
        return sizing.size_arena(self.graph, self.limits, self.device, free=free, captured_sizes=sizes)

    def runner(
        self,
        sizes: Sequence[int],
        *,
        is_placed: bool = True,
        choose: Callable[[Use], Sequence[Implementation]] = implementations,
    ) -> Runner:
        """A new one, nothing captured yet. `is_placed`: values lie at planned addresses, as `load` has it."""
        arena = self.arena(sizes)
        memory = CacheMemory(self.graph.caches, arena.num_slabs, self.device)
        program = restore(self.graph, device=self._on, choose=choose)
        program.bind(self._tensors | memory.tensors)
        if is_placed:
            program.place(arena.addresses, tensor_of(self.device.alloc(arena.addresses.num_bytes)))
        return Runner(program, self.graph, memory, self.device, self.limits, captured_sizes=sizes)

    def engine(self, runner: Runner, *, reuses_prefixes: bool = True) -> Engine:
        """An engine on a runner."""
        return Engine(
            runner, self._bundle.manifest.model, tokenizer_files={}, timeline=Timeline(),
            reuses_prefixes=reuses_prefixes,
        )  # fmt: skip


def collect() -> None:
    """Gives memory back to whoever comes next."""
    gc.collect()
    torch.cuda.empty_cache()
