"""A checkpoint's tensors into the params of a graph, by the graph's recipes.

All params lie in one allocation, and each byte of the checkpoint goes to its place there in one step: what has to be
cast or rearranged passes through a buffer of a job's size, never through a second copy of the model. What is
quantised is read and computed in rounds, a few matrices at a time.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

import msgspec
import torch

from precast.ir.errors import TargetError
from precast.ir.graph.schema import Graph
from precast.ir.manifest import Checkpoint
from precast.ir.weights import recipes
from precast.ir.weights.checkpoint import CheckpointFiles, StoredTensor
from precast.kernels import dtypes
from precast.loader.weights.dequantise import dequantise
from precast.loader.weights.pieces import Computed, Inputs, Target, lay_out, lay_out_inputs
from precast.loader.weights.read_plan import Plan, plan_reads
from precast.loader.weights.workers import PinnedBuffers, copy_converted, execute, move_all, read_all, strided

PARAM_ALIGNMENT = 256
"""Where params begin, in bytes: what CUDA's own allocations guarantee, and kernels with wide loads rely on."""

ROUND_BYTES = 256 << 20
"""What is read for one round of dequantising; one matrix may be more."""

NO_SYMBOLS: Mapping[str, int] = MappingProxyType({})


class Weights(msgspec.Struct, frozen=True):
    """The params by name, on their device, and what it took to load them.

    `bytes_needed` are the bytes of the checkpoint that the recipes ask for, each counted once; `bytes_read` are those
    that were read.
    """

    tensors: dict[str, torch.Tensor]
    bytes_read: int
    bytes_needed: int
    seconds: float


def load_weights(
    graph: Graph,
    rules: Checkpoint,
    files: CheckpointFiles,
    *,
    device: torch.device,
    symbols: Mapping[str, int] = NO_SYMBOLS,
    buffers: PinnedBuffers | None = None,
) -> Weights:
    """All params of a verified graph, made from a checkpoint; `symbols` are those that its recipes' sizes depend on.

    `buffers` for a GPU, made beforehand, save the time that pinning takes; they are closed afterwards.
    Recipes and headers are compared before memory is taken or a tensor read. Raises WeightsError (weights-mismatch)
    with everything that does not fit, (checkpoint-read) for a file that can't be read to its end; TargetError
    (device-memory) if the params don't fit a GPU; BundleError for symbols that don't fit the graph.
    """
    started = time.perf_counter()
    if buffers is None and device.type == "cuda":
        buffers = PinnedBuffers(device)
    try:
        stored = recipes.require(graph, rules, files)
        layout = lay_out(graph.params, symbols, lambda name: stored[name].dtype)
        plan = plan_reads(layout, stored.__getitem__)
        memory = _allocate(plan.targets, device)
        counts = [(read_all(plan, memory, buffers), plan.bytes_needed)]
        rounds = _Rounds(memory, symbols, stored, buffers)
        counts += [rounds.run(part) for part in _in_rounds(layout.computed, stored)]
        move_all(plan, memory)
    finally:
        if buffers is not None:
            buffers.close()
    bytes_read, bytes_needed = (sum(column) for column in zip(*counts, strict=True))
    return Weights(_named(graph, plan, memory), bytes_read, bytes_needed, time.perf_counter() - started)


class _Rounds:
    """Reads what some computations need, makes them, and forgets it."""

    def __init__(
        self,
        memory: Sequence[torch.Tensor],
        symbols: Mapping[str, int],
        stored: Mapping[str, StoredTensor],
        buffers: PinnedBuffers | None,
    ) -> None:
        self._memory = memory
        self._symbols = symbols
        self._stored = stored
        self._buffers = buffers

    def run(self, computed: Sequence[Computed]) -> tuple[int, int]:
        """Fill the elements that are computed; the bytes that were read, and those that were needed."""
        layout, inputs = lay_out_inputs(computed, self._symbols, lambda name: self._stored[name].dtype)
        plan = plan_reads(layout, self._stored.__getitem__)
        read = _allocate(plan.targets, self._memory[0].device)
        num_bytes = execute(plan, read, self._buffers)
        tensors = [
            raw.view(dtypes.BY_NAME[target.dtype]).view(target.shape)
            for target, raw in zip(plan.targets, read, strict=True)
        ]
        for each, places in zip(computed, inputs, strict=True):
            self._compute(each, places, tensors)
        return num_bytes, plan.bytes_needed

    def _compute(self, computed: Computed, inputs: Inputs, tensors: Sequence[torch.Tensor]) -> None:
        zeros, groups = (None if place is None else tensors[place] for place in (inputs.zeros, inputs.groups))
        made = dequantise(computed.recipe, tensors[inputs.values], tensors[inputs.scales], zeros, groups)
        source = strided(made.contiguous().flatten(), computed.source)
        copy_converted(source, self._memory[computed.target], computed.destination, computed.casts)


def _in_rounds(computed: Sequence[Computed], stored: Mapping[str, StoredTensor]) -> Iterator[list[Computed]]:
    """The computations in the order of the files, as many together as `ROUND_BYTES` are read for."""

    def place(each: Computed) -> tuple[str, int, int]:
        first = stored[recipes.leaves(each.recipe)[0].tensor]
        return str(first.file), first.offset, each.index or 0

    found: list[Computed] = []
    size = 0
    for each in sorted(computed, key=place):
        num_bytes = sum(stored[read.tensor].nbytes for read in recipes.leaves(each.recipe))
        if each.index is not None:
            num_bytes //= int(recipes.shape(each.recipe)[0])  # type: ignore[arg-type]
        if found and size + num_bytes > ROUND_BYTES:
            yield found
            found, size = [], 0
        found.append(each)
        size += num_bytes
    if found:
        yield found


def _allocate(targets: Sequence[Target], device: torch.device) -> list[torch.Tensor]:
    """The bytes of each target, uint8: those of params in one allocation, those of temporary tensors in their own."""
    sizes = [math.prod(target.shape) * dtypes.BY_NAME[target.dtype].itemsize for target in targets]
    total = sum(_aligned(size) for target, size in zip(targets, sizes, strict=True) if target.name is not None)
    _check_room(sum(map(_aligned, sizes)), device)
    params = torch.empty(total, dtype=torch.uint8, device=device)
    memory: list[torch.Tensor] = []
    used = 0
    for target, size in zip(targets, sizes, strict=True):
        if target.name is None:
            memory.append(torch.empty(size, dtype=torch.uint8, device=device))
        else:
            memory.append(params[used : used + size])
            used += _aligned(size)
    return memory


def _check_room(wanted: int, device: torch.device) -> None:
    """A GPU must have the memory free. A host's system decides for itself what it lends."""
    if device.type != "cuda":
        return
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    free = torch.cuda.mem_get_info(device)[0] + unused
    if wanted > free:
        message = f"the params take {wanted / 1e9:.2f} GB, and {free / 1e9:.2f} GB are free"
        fix = "free memory on the device, or use one with more"
        raise TargetError("device-memory", message, where=str(device), fix=fix)


def _named(graph: Graph, plan: Plan, memory: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """The params by name, in the graph's order; a tied one is the tensor that it is tied to."""
    tensors = {
        target.name: raw.view(dtypes.BY_NAME[target.dtype]).view(target.shape)
        for target, raw in zip(plan.targets, memory, strict=True)
        if target.name is not None
    }
    return {param.name: tensors[_made_name(param.name, plan.ties)] for param in graph.params}


def _made_name(name: str, ties: Mapping[str, str]) -> str:
    while name in ties:
        name = ties[name]
    return name


def _aligned(size: int) -> int:
    return -(-size // PARAM_ALIGNMENT) * PARAM_ALIGNMENT
