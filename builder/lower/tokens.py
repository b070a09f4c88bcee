"""The last check of a graph before it is lowered: tokens meet in ops that know sequences, and nowhere else.

A step packs tokens of several sequences, and of each only a part. An op that looks across tokens (a product over
them, a sum, a shift) and knows nothing of sequences and caches would give other results than the model, in silence.
So: no dimension that counts tokens is contracted, reduced, cut, joined or indexed by an `aten` op, or normalised by one
of ours; no result has two of them; a reshape keeps them where they are; and how many tokens there are is no number to
compute with.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from precast.builder.graph.context import PassContext, tensor
from precast.builder.graph.fx_types import FxGraph, FxNode
from precast.builder.graph.layers import module_path
from precast.builder.graph.nodes import op_name
from precast.builder.graph.sizes import shape_of
from precast.ir.errors import BuildError
from precast.ir.graph import symbols
from precast.ir.graph.schema import Expr

aten = torch.ops.aten


def refuse_mixed_tokens(graph: FxGraph, ctx: PassContext) -> None:
    """Raises BuildError("feature-unsupported") naming what looks across tokens, all at once."""
    found: dict[str, set[str]] = {}
    for node in graph.nodes:
        if node.op != "call_function" or getattr(node.target, "namespace", "") not in ("aten", "precast"):
            continue
        if isinstance(node.meta.get("val"), (torch.Tensor, tuple, list)) and _mixes(node, ctx):
            found.setdefault(op_name(node.target), set()).add(module_path(node) or "the model itself")
    if found:
        calls = "; ".join(f"{call} (in {', '.join(sorted(paths)[:3])})" for call, paths in sorted(found.items()))
        raise BuildError(
            "feature-unsupported",
            f"the model looks across tokens outside of the ops that know sequences: {calls}",
            fix="attention, convolutions and recurrences have ops of their own; this one has none yet",
        )


def _mixes(node: FxNode, ctx: PassContext) -> bool:
    results = node.meta["val"] if isinstance(node.meta["val"], (tuple, list)) else [node.meta["val"]]
    if any(len(_token_dims(result, ctx)) > 1 for result in results if isinstance(result, torch.Tensor)):
        return True
    if _computes_with_count(node):
        return True
    if not any(
        isinstance(n.meta.get("val"), torch.Tensor) and _token_dims(tensor(n), ctx) for n in node.all_input_nodes
    ):
        return False
    looks = _LOOKS.get(node.target) or _OURS.get(op_name(node.target))
    return looks is not None and looks(node, ctx)


def _computes_with_count(node: FxNode) -> bool:
    """Whether how many tokens or sequences the batch has stands where elements or a number do, and not in sizes."""
    given = zip(node.target._schema.arguments, node.args, strict=False)
    named = ((arg, node.kwargs[arg.name]) for arg in node.target._schema.arguments if arg.name in node.kwargs)
    numbers = [value for arg, value in (*given, *named) if str(arg.type) in _NUMBERS and isinstance(value, FxNode)]
    return any(isinstance(node.meta["val"], (torch.SymInt, torch.SymFloat)) for node in numbers)


_NUMBERS = ("Tensor", "number", "Optional[number]", "float", "Optional[float]")
"""Types of arguments that are computed with."""


def _token_dims(value: torch.Tensor, ctx: PassContext) -> list[int]:
    """The dimensions that count tokens."""
    return [dim for dim, size in enumerate(shape_of(value, ctx.symbols)) if _counts_tokens(size)]


def _counts_tokens(size: Expr) -> bool:
    return not isinstance(size, int) and "T" in symbols.free_symbols(size)


def _over(position: int, default: Any = None) -> Callable[[FxNode, PassContext], bool]:
    """An op over the dimension, or dimensions, in its argument at `position`; without one, over `default`'s."""

    def looks(node: FxNode, ctx: PassContext) -> bool:
        source = node.args[0][0] if isinstance(node.args[0], (list, tuple)) else node.args[0]
        dims = node.args[position] if len(node.args) > position else node.kwargs.get("dim", default)
        rank = tensor(source).dim()
        wanted = range(rank) if dims is None else [dims] if isinstance(dims, int) else dims
        return any(dim % max(rank, 1) in _token_dims(tensor(source), ctx) for dim in wanted)

    return looks


def _last(node: FxNode, ctx: PassContext) -> bool:
    """One of our ops over the last dimension of its first argument."""
    source = tensor(node.args[0])
    return source.dim() - 1 in _token_dims(source, ctx)


def _joined(node: FxNode, ctx: PassContext) -> bool:
    """A join along a dimension that counts tokens in any of the parts."""
    parts = [tensor(part) for part in node.args[0]]
    dim = (node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)) % parts[0].dim()
    return any(dim in _token_dims(part, ctx) for part in parts)


def _cut(node: FxNode, ctx: PassContext) -> bool:
    return _over(1)(node, ctx) and shape_of(tensor(node), ctx.symbols) != shape_of(tensor(node.args[0]), ctx.symbols)


def _contracted(node: FxNode, ctx: PassContext) -> bool:
    """A product whose inner dimension counts tokens."""
    left = tensor(node.args[1] if node.target is aten.addmm.default else node.args[0])
    return left.dim() - 1 in _token_dims(left, ctx)


def _moved(node: FxNode, ctx: PassContext) -> bool:
    """A reshape after which tokens are another number of elements apart."""
    return _stride(tensor(node.args[0]), ctx) != _stride(tensor(node), ctx)


def _stride(value: torch.Tensor, ctx: PassContext) -> int | None:
    """Elements from one token to the next; None where no dimension counts tokens, or none is a multiple of them."""
    dims = _token_dims(value, ctx)
    if len(dims) != 1:
        return None
    shape = shape_of(value, ctx.symbols)
    inner = math.prod(size for size in shape[dims[0] + 1 :] if isinstance(size, int))
    return inner * symbols.evaluate(shape[dims[0]], dict.fromkeys(symbols.free_symbols(shape[dims[0]]), 1))


def _table_of_tokens(position: int) -> Callable[[FxNode, PassContext], bool]:
    """A table, the argument at `position`, whose rows are made of tokens."""
    return lambda node, ctx: bool(_token_dims(tensor(node.args[position]), ctx))


_LOOKS: dict[Any, Callable[[FxNode, PassContext], bool]] = {
    aten.linear.default: _contracted,
    aten.matmul.default: _contracted,
    aten.addmm.default: _contracted,
    aten.mean.dim: _over(1),
    aten.sum.dim_IntList: _over(1),
    aten.softmax.int: _over(1),
    aten.cumsum.default: _over(1),
    aten.topk.default: _over(2, -1),
    aten.sort.default: _over(1, -1),
    aten.max.dim: _over(1),
    aten.argmax.default: _over(1),
    aten.amax.default: _over(1),
    aten.any.dim: _over(1),
    aten.gather.default: _over(1),
    aten.scatter.value: _over(1),
    aten.scatter.src: _over(1),
    aten.index_select.default: _over(1),
    aten.cat.default: _joined,
    aten.slice.Tensor: _cut,
    aten.select.int: _over(1),
    aten.reshape.default: _moved,
    aten.embedding.default: _table_of_tokens(0),
}
_OURS: dict[str, Callable[[FxNode, PassContext], bool]] = {
    # by name: they are registered later than this
    "precast.embedding": _table_of_tokens(1),
    "precast.rms_norm": _last,
    "precast.residual_rms_norm": _last,
    "precast.layer_norm": _last,
    "precast.gated_activation": _last,
}
