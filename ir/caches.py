"""What a cache plan comes to: its slots and their tensors, whatever kind of cache they are."""

from __future__ import annotations

import math
from collections.abc import Iterator

from precast.ir import symbols
from precast.ir.schema import CachePlan, Group, LatentSpec, PagedSpec, Slot, StateGroup, StateSpec, TensorType, Value
from precast.ir.tensorfile import element_bytes


def groups(plan: CachePlan) -> tuple[Group | StateGroup, ...]:
    """All groups, those with page tables first."""
    return (*plan.groups, *plan.states)


def slots(plan: CachePlan) -> Iterator[tuple[Group | StateGroup, Slot]]:
    """Every slot, with its group."""
    return ((group, slot) for group in groups(plan) for slot in group.slots)


def tensors(plan: CachePlan) -> Iterator[Value]:
    """The cache tensors of every slot."""
    return (tensor for _, slot in slots(plan) for tensor in slot.tensors)


def input_names(group: Group | StateGroup) -> tuple[str, ...]:
    """The group's metadata inputs."""
    if isinstance(group, StateGroup):
        return (group.slot_ids,)
    names = group.inputs
    return (names.page_indices, names.page_indptr, names.page_start, names.slot_mapping)


def slot_types(spec: PagedSpec | LatentSpec | StateSpec, pages: str) -> tuple[TensorType, ...]:
    """The types of a slot's tensors in a pool whose pages `pages` counts."""
    if isinstance(spec, StateSpec):
        return (TensorType(spec.dtype, (pages, *spec.shape)),)
    if isinstance(spec, LatentSpec):
        return (TensorType(spec.dtype, (pages, spec.page_size, spec.latent_size + spec.rope_size)),)
    keys = (pages, spec.page_size, spec.num_kv_heads, spec.head_size)
    return TensorType(spec.dtype, keys), TensorType(spec.dtype, (*keys[:-1], spec.value_size))


def token_bytes(group: Group | StateGroup) -> int:
    """Bytes that one more token keeps in all layers of the group, on one rank of one; 0 for states."""
    if isinstance(group, StateGroup):
        return 0
    spec = group.spec
    return _page_bytes(group) // spec.page_size


def state_bytes(group: Group | StateGroup) -> int:
    """Bytes that a sequence keeps in all layers of the group whatever its length, on one rank of one; 0 for pages."""
    return _page_bytes(group) if isinstance(group, StateGroup) else 0


def sequence_bytes(group: Group | StateGroup, length: int) -> int:
    """Bytes of the whole pages that a sequence of `length` tokens takes in the group."""
    if isinstance(group, StateGroup):
        return state_bytes(group)
    return -(-length // group.spec.page_size) * _page_bytes(group)


def first_visible(spec: PagedSpec | LatentSpec, position: int) -> int:
    """The position of the first token that the one at `position` can see."""
    if spec.window is not None:
        return max(0, position - spec.window + 1)
    if isinstance(spec, PagedSpec) and spec.chunk is not None:
        return position // spec.chunk * spec.chunk
    return 0


def visible_bytes(group: Group | StateGroup, length: int) -> int:
    """Bytes of the group that the token behind `length` others can see."""
    if isinstance(group, StateGroup):
        return state_bytes(group)
    return min(length, length + 1 - first_visible(group.spec, length)) * token_bytes(group)


def _page_bytes(group: Group | StateGroup) -> int:
    known = {"P": 1, "tp": 1, "rank": 0}
    return len(group.slots) * sum(
        math.prod(symbols.evaluate(size, known) for size in kind.shape) * element_bytes(kind.dtype)
        for kind in slot_types(group.spec, "P")
    )
