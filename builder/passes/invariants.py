"""What passes rely on, and what they promise: each function gives the ops that contradict its docstring."""

from __future__ import annotations

import torch

from precast.builder.graph.context import FxGraph
from precast.builder.graph.nodes import op_counts

aten = torch.ops.aten

VIEWS = frozenset(
    (aten.view.default, aten._unsafe_view.default, aten.flatten.using_ints, aten.unflatten.int, aten.view_as.default,
     aten.reshape_as.default)
)  # fmt: skip
"""Other spellings of `reshape`."""

CONVERSIONS = frozenset((aten.to.device, aten.to.dtype_layout, aten.type_as.default, aten._to_copy.default))
"""Other spellings of `to.dtype`: a graph has one device."""


def one_spelling_of_views(graph: FxGraph) -> set[str]:
    """A tensor is looked at otherwise by `reshape`, and converted by `to.dtype`."""
    return {str(node.target) for node in graph.nodes if node.target in VIEWS | CONVERSIONS}


def all_have_caches(graph: FxGraph) -> set[str]:
    """Attention reads its keys and values from a cache, and recurrences go on from a state."""
    names = [name for name in op_counts(graph) if name.startswith("precast.")]
    return {name for name in names if _has("paged", name) or _has("stateful", name)}


def _has(form: str, name: str) -> bool:
    """Whether there is an op that does the same with a cache."""
    return hasattr(torch.ops.precast, name.replace("precast.", f"{form}_"))
