"""What a step gives to a graph, by name and type: the loader makes it, and ops may address memory by it.

`T` counts the tokens of a step, `B` its sequences, `R` the rows whose logits are wanted (`docs/format/v1.md`, Inputs).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from precast.ir.graph import symbols
from precast.ir.graph.schema import CacheGroup, CachePlan, Dtype, Expr, Group, TensorType
from precast.ir.memory import caches

TOKENS, SEQUENCES, LOGIT_ROWS = "T", "B", "R"
_BOUNDS = symbols.add(SEQUENCES, 1)

STEP_INPUTS: Mapping[str, TensorType] = MappingProxyType({
    "input_ids": TensorType("int64", (1, TOKENS)),
    "positions": TensorType("int64", (1, TOKENS)),
    "rope_lengths": TensorType("int64", (1, TOKENS)),
    "cu_seqlens": TensorType("int32", (_BOUNDS,)),
    "kv_lens": TensorType("int32", (SEQUENCES,)),
    "logit_rows": TensorType("int64", (LOGIT_ROWS,)),
})  # fmt: skip
"""Those of every graph that lists them."""

_GROUP_INPUTS: Mapping[str, tuple[Dtype, Expr | None]] = MappingProxyType({
    "page_indices": ("int32", None),
    "page_indptr": ("int32", _BOUNDS),
    "page_start": ("int32", SEQUENCES),
    "slot_mapping": ("int64", TOKENS),
})  # fmt: skip


def given_names(plan: CachePlan) -> frozenset[str]:
    """The names of all that a step gives to a graph with these caches."""
    return frozenset((*STEP_INPUTS, *(name for group in caches.groups(plan) for name in group_inputs(group))))


def group_inputs(group: CacheGroup) -> dict[str, tuple[Dtype, Expr | None]]:
    """The dtype and the one size of each of the group's metadata inputs, by name; None: a size of its own."""
    if isinstance(group, Group):
        return {getattr(group.inputs, role): wanted for role, wanted in _GROUP_INPUTS.items()}
    (name,) = caches.input_names(group)
    return {name: ("int32", SEQUENCES)}
