"""What ranks compare before anything starts, so that they run the same bundle in the same way, or none of them does.

All ranks are given what all have said, and each draws the same conclusion from it, or raises the same error.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

import msgspec

from precast.ir.errors import TargetError
from precast.loader.world.messages import Failed


class Facts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a rank is, in the order in which differences are told. All but the last four must be equal on all ranks.

    `gpu` and `capability` are "" on a CPU. `choices` is the digest of the table of measured choices, `options` what was
    asked of the load.
    """

    bundle: str
    precast: str
    torch: str
    device: str
    gpu: str
    capability: str
    choices: str
    options: str
    machine: str
    host: str
    gpu_id: str
    weights_bytes: int
    free_bytes: int


OWN = frozenset(("host", "gpu_id", "weights_bytes", "free_bytes"))
"""Facts in which ranks may differ."""


class Said(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a rank says that only others of its kind understand."""

    value: bytes


class Verdict(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a rank says of the bundle's native layer, whose digest is `layer`, "" for none: whether it would use it, and
    the sentence of `precast.loader.native.Chosen` that names the rule. `rules`: what it was asked by."""

    layer: str
    is_used: bool
    note: str
    rules: str


class Sized(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The slabs that a rank has room for, the arithmetic (`ArenaSize.counters`), and the error where there is none."""

    num_slabs: int
    counters: dict[str, int]
    failure: Failed | None = None


class Captured(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How many sizes a rank has captured, and why it captures no more, or ""."""

    num_captured: int
    failure: str


class Loaded(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A rank has all that it needs: its timeline, as JSON."""

    timeline: bytes


def machine() -> str:
    """What the bytes of orders depend on."""
    return f"{sys.byteorder}-endian, {sys.maxsize.bit_length() + 1} bits"


def check_facts(facts: Sequence[Facts]) -> None:
    """Raise TargetError (ranks-differ) with all facts that differ, and (device-memory) where weights have no room."""
    different = []
    for name in Facts.__struct_fields__:
        values = [getattr(each, name) for each in facts]
        if name not in OWN and len(set(values)) > 1:
            different.append(f"{name}: {by_rank(values)}")
    if different:
        raise TargetError(
            "ranks-differ", f"the ranks differ in {'; '.join(different)}",
            fix="give all ranks the same bundle, options, releases and kind of GPU",
        )  # fmt: skip
    ids = [each.gpu_id for each in facts if each.gpu_id]
    if len(set(ids)) < len(ids):
        found = f"two ranks have the same GPU: {by_rank([f'{each.gpu_id} of {each.host}' for each in facts])}"
        raise TargetError("ranks-differ", found, fix="let each process see as many GPUs as its host has ranks")
    if any(each.weights_bytes > each.free_bytes for each in facts if each.gpu):
        room = [f"{each.weights_bytes} bytes of weights, {each.free_bytes} free on {each.host}" for each in facts]
        found = f"the weights don't fit: {by_rank(room)}"
        raise TargetError("device-memory", found, fix="free memory on the device, or use more ranks")


def why_no_layer(verdicts: Sequence[Verdict]) -> str:
    """Why no rank may use the native layer that some would use; "" if all do, of one digest and by the same rules, or
    none would."""
    if not any(each.is_used for each in verdicts):
        return ""
    if len({each.layer for each in verdicts}) > 1:
        return f"the ranks have other native layers: {by_rank([each.layer for each in verdicts])}"
    refused = [f"rank {rank} says: {each.note}" for rank, each in enumerate(verdicts) if not each.is_used]
    if refused:
        return f"native layer {verdicts[0].layer} is used by all ranks or by none, and {'; '.join(refused)}"
    if len({each.rules for each in verdicts}) > 1:
        return f"the ranks ask different rules for native layers: {by_rank([each.rules for each in verdicts])}"
    return ""


def slabs_of_all(sizes: Sequence[Sized]) -> int:
    """The slabs that all ranks have room for. Raises the error of one with too little, and the arithmetic of all."""
    failed = [(rank, each.failure) for rank, each in enumerate(sizes) if each.failure is not None]
    if not failed:
        return min(each.num_slabs for each in sizes)
    rank, failure = failed[0]
    told = [each.failure.message if each.failure else _arithmetic(each.counters) for each in sizes]
    error = msgspec.structs.replace(failure, message=f"{failure.message}; {by_rank(told)}", rank=rank).error()
    raise error


def by_rank(values: Sequence[object]) -> str:
    """Each value with the ranks that have it."""
    ranks: dict[str, list[str]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(str(value), []).append(str(rank))
    return ", ".join(f"rank {'+'.join(names)} {value or 'none'}" for value, names in ranks.items())


def _arithmetic(counters: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counters.items())
