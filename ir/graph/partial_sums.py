"""Parts of sums: what ops make of inputs that ranks have parts of, and through which ops a part goes as it is.

The sizes of a graph that is not bound to a world say it: what is split has symbols of the world.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from precast.ir.graph import symbols
from precast.ir.graph.infer import references
from precast.ir.graph.schema import Arg, Node, Ref, Steps, TensorType
from precast.ir.ops.checks import WORLD

_SUMMED: Mapping[str, tuple[tuple[str, int], ...]] = {
    "aten.linear.default": (("weight", 1),),
    "precast.gated_linear": (("weight", 1),),
    "precast.quantised_linear": (("input", -1),),
    "precast.rounded_linear": (("input", -1),),
    "precast.quantised_experts": (("down", 0), ("down", 1), ("down", 2)),
    "aten.addmm.default": (("mat2", 0),),
    "aten.matmul.default": (("self", -1),),
    "precast.experts": (("down", 0), ("down", 2)),
    "precast.grouped_linear": (("weight", 0), ("weight", 2)),
    "precast.sharded_embedding": (("weight", 0),),
    "precast.quantised_sharded_embedding": (("weight", 0),),
}
"""The dimensions of arguments over which ops sum."""


def makes_parts(node: Node, types: Mapping[str, TensorType]) -> bool:
    """Whether each rank's result is a part of a sum: the op sums over a dimension that ranks have parts of."""
    for arg, dim in _SUMMED.get(node.op, ()):
        given = node.args.get(arg)
        kind = types.get(given.name) if isinstance(given, Ref) else None
        if kind is not None and len(kind.shape) > max(dim, 0) and not isinstance(kind.shape[dim], int):
            return bool(symbols.free_symbols(kind.shape[dim]) & WORLD)
    return False


def kept(node: Node, partial: Collection[str]) -> list[str]:
    """The results that are parts of sums as what the node takes is; none where it computes with parts alone."""
    body = node.args.get("steps")
    if not isinstance(body, Steps):
        return [node.outputs[0].name] if _keeps(node.op, node.args, partial) else []
    inside = {name for name, arg in node.args.items() if isinstance(arg, Ref) and arg.name in partial}
    for index, step in enumerate(body.steps):
        if inside.isdisjoint(references(step.args)):
            continue
        if not _keeps(step.op, step.args, inside):
            return []
        inside.add(f"s{index}")
    return [value.name for name, value in zip(body.results, node.outputs, strict=False) if name in inside]


_VIEWS = frozenset(f"aten.{name}" for name in (
    "reshape.default", "unsqueeze.default", "squeeze.dim", "transpose.int", "permute.default", "expand.default",
    "slice.Tensor", "select.int", "neg.default",
))  # fmt: skip


def _keeps(op: str, args: Mapping[str, Arg], partial: Collection[str]) -> bool:
    """Whether a sum over ranks may be made after the op as well as before."""
    names = list(references(args))
    parts = [name in partial for name in names]
    if op in _VIEWS:
        return True
    if op in ("aten.add.Tensor", "aten.sub.Tensor"):
        return len(parts) == 2 and all(parts)
    if op == "aten.mul.Tensor":
        return parts.count(True) == 1
    return op == "aten.div.Tensor" and parts == [True, *([False] * (len(parts) - 1))]
