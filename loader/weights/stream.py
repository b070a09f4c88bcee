"""A checkpoint's tensors into the params of a graph, by the graph's recipes.

All params lie in one allocation, and each byte of the checkpoint goes to its place there in one step: what has to be
cast or rearranged passes through a buffer of a job's size, never through a second copy of the model. What is
quantised is read and computed in rounds, a few matrices at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import msgspec
import torch

from precast.ir.errors import TargetError
from precast.ir.graph.schema import Cast, Dequantise, Graph, Param, Quantise, Read, Recipe, TensorType, Tie
from precast.ir.manifest import Checkpoint
from precast.ir.weights import fit, recipes, scales
from precast.ir.weights.checkpoint import CheckpointFiles, StoredTensor
from precast.kernels import dtypes
from precast.kernels.dequantise.dequantise import Quantised, dequantise
from precast.kernels.dequantise.quantise import quantised
from precast.loader.device import Device, aligned
from precast.loader.torch_device import tensor_of
from precast.loader.weights.faults import refusal
from precast.loader.weights.parts import Assembly, Computed, Target, param_parts
from precast.loader.weights.read_plan import DEFAULT_SIZES, REMOTE_SIZES, Granularity, grouped, plan_reads
from precast.loader.weights.stored_checks import (
    BITS,
    Check,
    Fault,
    are_bad,
    checks,
    checks_of_inputs,
    is_rounded,
    rounding,
    widened,
)
from precast.loader.weights.workers import PinnedBuffers, copy_converted, move_all, read_all, strided

PARAM_ALIGNMENT = 256
"""Where params begin, in bytes: what CUDA's own allocations guarantee, and kernels with wide loads rely on."""

_LENT = 8
"""Times the memory that is free, which a host may lend of what is swapped, shared or never touched."""

ROUND_BYTES = 256 << 20
"""What is read for one round of dequantising; one matrix may be more."""


class Weights(msgspec.Struct, frozen=True):
    """The params by name, on their device, and what it took to load them.

    `bytes_needed` are the bytes of the checkpoint that the recipes ask for, each counted once; `bytes_read` are those
    that were read.
    """

    tensors: dict[str, torch.Tensor]
    bytes_read: int
    bytes_needed: int


def load_weights(
    graph: Graph,
    rules: Checkpoint,
    files: CheckpointFiles,
    *,
    device: Device,
    buffers: PinnedBuffers | None = None,
    whole: Graph | None = None,
) -> Weights:
    """All params of a verified graph that is bound to its rank, made from a checkpoint.

    `whole` is the graph before it was bound, where it may read tensors that this rank has no part of.
    `buffers` that were made beforehand save the time that pinning takes. Recipes and headers are compared before
    memory is taken or a tensor read. Raises WeightsError (weights-mismatch) with everything that does not fit, and
    for scales of weights that are no numbers, (scale-invalid) for scales of caches that are no numbers above 0,
    (checkpoint-read) for a file that can't be read to its end, (checkpoint-changed) for one that somebody writes to;
    TargetError (device-memory) if the params don't fit a GPU.
    """
    with PinnedBuffers(device) if buffers is None else buffers as pinned:
        stored = fit.require(graph, rules, files, whole=whole)
        params = scales.settled(graph.params, stored)
        _check_room(params_bytes(graph), device)  # what is planned grows with it
        assembly = param_parts(params, lambda name: stored[name].dtype)
        sizes = DEFAULT_SIZES if files.folder.readers is None else REMOTE_SIZES
        plan = plan_reads(assembly, stored.__getitem__, sizes)
        memory = _allocate(plan.targets, device)
        counts = [(read_all(plan, memory, pinned, files), plan.bytes_needed)]
        try:
            rounds = _in_rounds(assembly.computed, stored)
            counts += [_round(part, memory, stored, pinned, files, sizes) for part in rounds]
            move_all(plan, memory)
            made = _by_name(graph, plan.targets, memory)
            _check_stored(graph, made)
        except Fault as fault:
            raise refusal(fault.check, files, stored) from None
    for target, value in assembly.filled.items():
        memory[target].view(torch.float32).fill_(value)
    bytes_read, bytes_needed = (sum(column) for column in zip(*counts, strict=True))
    _check_scales(graph, made, files.folder.name)
    _check_exact(graph, made, files, stored, device)
    return Weights(made, bytes_read, bytes_needed)


def _by_name(graph: Graph, targets: Sequence[Target], memory: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """The params by their names; what is tied has the memory of the other one."""
    tensors = dict(zip((target.name for target in targets), _typed(targets, memory), strict=True))
    recipe_of = {param.name: param.recipe for param in graph.params}
    return {param.name: tensors[_made_name(param.name, recipe_of)] for param in graph.params}


def _check_scales(graph: Graph, made: Mapping[str, torch.Tensor], where: str) -> None:
    names = scales.names(graph.params)
    if names:
        found = torch.cat([made[name] for name in names]).tolist()
        scales.check(dict(zip(names, found, strict=True)), where)


def _check_stored(graph: Graph, tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise Fault for scales and groups that can't be meant, waiting for the device once."""
    _check([(tensors[check.param], check) for check in checks(graph)])


def _check(found: Sequence[tuple[torch.Tensor, Check]]) -> None:
    faults = [_has_fault(values, check) for values, check in found]
    if faults and bool(torch.stack(faults).any()):
        raise next(Fault(check) for (_, check), fault in zip(found, faults, strict=True) if fault)


def _check_exact(
    graph: Graph, made: Mapping[str, torch.Tensor], files: CheckpointFiles, stored: Mapping[str, StoredTensor],
    device: Device,
) -> None:  # fmt: skip
    """Raise WeightsError (weights-mismatch) for scales that were rounded: those of another type are read once more."""
    wanted = [check for check in checks(graph) if is_rounded(check, lambda name: stored[name].dtype)]
    if not wanted:
        return
    wide = _in_float32({check.param: widened(check.recipe) for check in wanted}, files, stored, device)
    for check in wanted:
        if not torch.equal(made[check.param].float(), wide[check.param]):
            reads = {name: Cast(Read(name, stored[name].shape), "float32") for name in check.tensors}
            each = _in_float32(reads, files, stored, device)
            narrow = dtypes.BY_NAME[check.dtype]
            name = next(name for name, values in each.items() if not torch.equal(values.to(narrow).float(), values))
            raise rounding(check, name, f"{files.folder.name}/{stored[name].file}")


def _in_float32(
    made: Mapping[str, Recipe], files: CheckpointFiles, stored: Mapping[str, StoredTensor], device: Device
) -> dict[str, torch.Tensor]:
    """What recipes make, in float32."""
    params = [Param(name, TensorType("float32", recipes.shape(recipe)), recipe) for name, recipe in made.items()]
    assembly = param_parts(params, lambda name: stored[name].dtype)
    plan = plan_reads(assembly, stored.__getitem__)
    memory = _allocate(plan.targets, device)
    with PinnedBuffers(device) as pinned:
        read_all(plan, memory, pinned, files)
    move_all(plan, memory)
    typed = zip(plan.targets, _typed(plan.targets, memory), strict=True)
    return {target.name: values for target, values in typed if target.name is not None}


def _has_fault(values: torch.Tensor, check: Check) -> torch.Tensor:
    """Whether anything in there isn't what is asked, on the values' device."""
    bits = values if check.num_groups is not None else values.view(getattr(torch, BITS[check.dtype][0]))
    found: torch.Tensor = are_bad(bits, check).any()
    return found


def params_bytes(graph: Graph) -> int:
    """The bytes of all params of a graph that is bound to its rank."""
    return sum(map(_param_bytes, graph.params))


def _round(
    computed: Sequence[Computed],
    memory: Sequence[torch.Tensor],
    stored: Mapping[str, StoredTensor],
    buffers: PinnedBuffers,
    files: CheckpointFiles,
    sizes: Granularity,
) -> tuple[int, int]:
    """Read what these computations need, make them, and forget it; the bytes read, and those needed.

    Raises Fault for scales and groups that can't be meant.
    """
    assembly = Assembly(lambda name: stored[name].dtype)
    inputs = [assembly.add_inputs(each) for each in computed]
    assert not assembly.computed, "verified: what is computed is made of what is stored"
    plan = plan_reads(assembly, stored.__getitem__, sizes)
    read = _allocate(plan.targets, buffers.device)
    num_bytes = read_all(plan, read, buffers, files)
    move_all(plan, read)
    tensors = _typed(plan.targets, read)
    _check([
        (tensors[places[name]], check)
        for each, places in zip(computed, inputs, strict=True)
        for name, check in checks_of_inputs(each.recipe).items()
    ])  # fmt: skip
    for each, places in zip(computed, inputs, strict=True):
        made = _made(each.recipe, {name: tensors[place] for name, place in places.items()})
        source = strided(made.contiguous().flatten(), each.source)
        copy_converted(source, memory[each.target], each.destination, each.casts)
        del made, source  # before the next is made
    return num_bytes, plan.bytes_needed


def _made(recipe: Dequantise | Quantise, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
    if isinstance(recipe, Quantise):
        return quantised(parts["of"], recipe.part, recipe.block)
    return _values(recipe, parts)


def _values(recipe: Dequantise, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """What the recipe makes of its parts, float32."""
    others = {name: part for name, part in parts.items() if name not in ("of", "biases")}
    format, block, offset = recipe.format, recipe.block, recipe.zero_offset
    stored = Quantised(parts["of"], **others, format=format, block=block, zero_offset=offset)
    return dequantise(stored, parts.get("biases"))


def _in_rounds(computed: Sequence[Computed], stored: Mapping[str, StoredTensor]) -> Iterator[list[Computed]]:
    """The computations in the order of the files, as many together as `ROUND_BYTES` are read for."""

    def place(each: Computed) -> tuple[str, int, int]:
        first = stored[recipes.leaves(each.recipe)[0].tensor]
        return first.file, first.offset, each.index or 0

    def num_bytes(each: Computed) -> int:
        size = sum(stored[read.tensor].nbytes for read in recipes.leaves(each.recipe))
        return size if each.index is None else size // int(recipes.shape(each.recipe)[0])  # type: ignore[arg-type]

    return grouped(sorted(computed, key=place), num_bytes, ROUND_BYTES)


def _allocate(targets: Sequence[Target], device: Device) -> list[torch.Tensor]:
    """The bytes of each target, uint8: those of params in one allocation, those of temporary tensors in their own."""
    sizes = [math.prod(target.shape) * dtypes.BY_NAME[target.dtype].itemsize for target in targets]
    total = sum(
        aligned(size, PARAM_ALIGNMENT) for target, size in zip(targets, sizes, strict=True) if target.name is not None
    )
    _check_room(sum(aligned(size, PARAM_ALIGNMENT) for size in sizes), device)
    params = tensor_of(device.alloc(total))
    memory: list[torch.Tensor] = []
    used = 0
    for target, size in zip(targets, sizes, strict=True):
        if target.name is None:
            memory.append(tensor_of(device.alloc(size)))
        else:
            memory.append(params[used : used + size])
            used += aligned(size, PARAM_ALIGNMENT)
    return memory


def _param_bytes(param: Param) -> int:
    sizes = [size for size in param.type.shape if isinstance(size, int)]
    made = math.prod(sizes) if len(sizes) == len(param.type.shape) else 0  # without a value: `param_parts` says so
    return 0 if isinstance(param.recipe, Tie) else made * dtypes.BY_NAME[param.type.dtype].itemsize


def _check_room(wanted: int, device: Device) -> None:
    """A GPU must have the memory free. A host's system decides what it lends, but never many times what it has."""
    lent = 1 if device.kind == "cuda" else _LENT
    if wanted > lent * (free := device.free_bytes()):
        message = f"the params take {wanted / 1e9:.2f} GB, and {free / 1e9:.2f} GB are free"
        fix = "free memory on the device, or use one with more"
        raise TargetError("device-memory", message, where=device.name, fix=fix)


def _typed(targets: Sequence[Target], memory: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The targets' tensors, from their bytes."""
    return [
        raw.view(dtypes.BY_NAME[target.dtype]).view(target.shape) for target, raw in zip(targets, memory, strict=True)
    ]


def _made_name(name: str, recipe_of: Mapping[str, Recipe]) -> str:
    """The param whose memory the one called `name` has: its own, or that of the one that it is tied to."""
    recipe = recipe_of[name]
    return _made_name(recipe.param, recipe_of) if isinstance(recipe, Tie) else name
