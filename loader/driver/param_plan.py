"""How a checkpoint's tensors become the params of a graph without torch: what is read where, what of it is made on the
host, and what is looked at. No byte is read here, and numpy is not imported."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple, Protocol

import msgspec

from precast.ir.graph.schema import Graph
from precast.ir.manifest import Checkpoint
from precast.ir.native import NativeLayer
from precast.ir.weights import fit, scales
from precast.ir.weights.checkpoint import CheckpointFiles, StoredTensor
from precast.ir.weights.tensorfile import element_bytes
from precast.kernels.native import Native
from precast.kernels.without_torch.copies import rearranged_arguments, repacked_arguments
from precast.loader.device import aligned
from precast.loader.weights.parts import Assembly, Target, param_parts
from precast.loader.weights.read_plan import DEFAULT_SIZES, REMOTE_SIZES, Copy, Plan, plan_reads
from precast.loader.weights.stored_checks import Check, checks, is_rounded

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

BUFFER_BYTES = 16 << 20
"""Of a thread's pinned buffer: while it is on its way, others read. Smaller ones keep Python busy, more of them take
longer to pin."""
PARAM_ALIGNMENT = 256
"""Where params begin, in bytes."""

_CONVERTED = frozenset(("float16", "bfloat16", "float32", "float64", "F8_E8M0"))
"""Types that are converted here, from each to each; nothing becomes F8_E8M0."""


class Planned(NamedTuple):
    """How params are read from the files of a checkpoint: the plan, which of its targets are made on the host, and
    what is looked at once they are there."""

    assembly: Assembly
    plan: Plan
    on_host: frozenset[int]
    files: CheckpointFiles
    checks: Mapping[int, Check] = MappingProxyType({})
    """What is to be looked at, by target."""
    rounded: Check | None = None
    """Scales that may be rounded while they are read."""
    scales: tuple[str, ...] = ()
    """The params by which caches are divided."""
    stored: Mapping[str, StoredTensor] = MappingProxyType({})
    """The tensors that recipes read, by their names there."""
    on_device: frozenset[int] = frozenset()
    """Of the targets that are made on the host, those that copies on the device could make, too."""


class Made(Protocol):
    """Targets that are made on the host: which, and the bytes of each."""

    @property
    def targets(self) -> Collection[int]: ...
    def __getitem__(self, target: int, /) -> npt.NDArray[np.uint8]: ...


def planned(graph: Graph, rules: Checkpoint, files: CheckpointFiles) -> Planned:
    """The plan for all params of a verified graph that is bound to its rank.

    Raises WeightsError (weights-mismatch) with everything that doesn't fit.
    """
    stored = fit.require(graph, rules, files)
    assembly = param_parts(scales.settled(graph.params, stored), lambda name: stored[name].dtype)
    plan = read_plan(assembly, stored, files)
    on_host, on_device = made_where(plan, [i for i, target in enumerate(plan.targets) if target.name is not None])
    found = {check.param: check for check in checks(graph)}
    wanted = {i: found[target.name] for i, target in enumerate(plan.targets) if target.name in found}
    rounded = next((check for check in found.values() if is_rounded(check, lambda name: stored[name].dtype)), None)
    divided_by = tuple(scales.names(graph.params))
    return Planned(assembly, plan, on_host, files, wanted, rounded, divided_by, stored, on_device)


def read_plan(assembly: Assembly, stored: Mapping[str, StoredTensor], files: CheckpointFiles) -> Plan:
    """The jobs that fill all targets of an assembly, each as large as a thread's buffer."""
    sizes = DEFAULT_SIZES if files.folder.readers is None else REMOTE_SIZES
    return plan_reads(assembly, stored.__getitem__, msgspec.structs.replace(sizes, job=BUFFER_BYTES))


def made_where(plan: Plan, there: Collection[int]) -> tuple[frozenset[int], frozenset[int]]:
    """The targets that are made on the host, and those of them that copies on the device could make, too. `there`:
    those that lie on the device."""
    moved = {target for move in plan.moves for target in (move.source, move.target)}
    on_host = frozenset(moved | {copy.target for job in plan.jobs for copy in job.copies})
    others = moved | {copy.target for job in plan.jobs for copy in job.copies if kernel_arguments(copy) is None}
    return on_host, (on_host - others).intersection(there)


def kernel_arguments(copy: Copy) -> tuple[tuple[int, int, int], tuple[int, ...]] | None:
    """The grid of the kernel that makes a copy on the device, and the integers after both addresses; None where
    elements are converted, or have more axes than the kernel."""
    of = copy.source.shape, copy.source.strides, copy.destination.strides
    if copy.casts:
        return None
    return rearranged_arguments(*of) if copy.repack is None else repacked_arguments(copy.repack, *of)


def planned_bytes(what: Planned) -> int:
    """The memory that all params take."""
    return sum(
        aligned(math.prod(target.shape) * element_bytes(target.dtype), PARAM_ALIGNMENT)
        for target in what.plan.targets
        if target.name is not None
    )


def uncovered(what: Planned) -> str:
    """Why params aren't made here; empty if they are."""
    if what.assembly.computed:
        from precast.loader.driver import quantise_plan

        targets = what.plan.targets
        why = quantise_plan.refusal(what.assembly.computed, what.stored, lambda i: targets[i].name is not None)
        if why:
            return why
    if what.rounded is not None:
        return f"{what.rounded.tensors[0]}: that {what.rounded.dtype} holds such scales is looked at by torch"
    for copy in (copy for job in what.plan.jobs for copy in job.copies):
        odd = sorted({copy.dtype, *copy.casts} - _CONVERTED) if copy.casts else []
        if odd:
            return f"the checkpoint's tensors are converted from {copy.dtype} to {' to '.join(copy.casts)}"
    return ""


def lacking(what: Planned, layer: NativeLayer) -> str:
    """Why params aren't made here with this layer; empty if they are."""
    if not what.assembly.computed:
        return ""
    from precast.loader.driver import quantise_plan

    native = Native(layer)
    there = all(native.of_key(key) for key in quantise_plan.keys(what.assembly.computed, what.stored))
    return "" if there else "the native layer has no kernels that quantise weights while they are read"


def bytes_needed(what: Planned) -> int:
    """The bytes of the checkpoint that params are made of."""
    if not what.assembly.computed:
        return what.plan.bytes_needed
    from precast.loader.driver import quantise_plan

    return what.plan.bytes_needed + quantise_plan.num_bytes(what.assembly.computed, what.stored)


def target_bytes(target: Target) -> int:
    """The bytes of a target."""
    return math.prod(target.shape) * element_bytes(target.dtype)
