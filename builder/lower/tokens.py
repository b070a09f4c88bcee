"""The last check of a graph before it is lowered: only ops that know sequences may look across tokens.

A step packs tokens of several sequences, and of each only a part. An op that looks across tokens (a product over
them, a sum, a shift) and knows nothing of sequences and caches would give other results than the model, in silence.
So: no dimension that counts tokens is contracted, reduced, cut, joined or indexed, but by ops that are told of
sequences; no result has two of them; a reshape keeps them where they are; and how many tokens there are is no number to
compute with. What an op does along which dimension stands in its row of the op table; an op without a row is refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from precast.builder.graph.context import FxGraph, FxNode, PassContext, tensor
from precast.builder.graph.nodes import by_call, given_arguments, op_name
from precast.ir.errors import BuildError
from precast.ir.graph import symbols
from precast.ir.graph.schema import Expr
from precast.ir.ops import table as ops
from precast.ir.ops.op import OpDef

Given = Mapping[str, Any]
"""A call's arguments by name."""


def refuse_mixed_tokens(graph: FxGraph, ctx: PassContext) -> None:
    """Raises BuildError("feature-unsupported") naming what looks across tokens, all at once."""
    calls = [node for node in graph.nodes if isinstance(node.target, torch._ops.OpOverload)]
    found = by_call(((op_name(node.target), node) for node in calls if _mixes(node, ctx)), "in")
    if found:
        raise BuildError(
            "feature-unsupported",
            f"the model looks across tokens outside of the ops that know sequences: {found}",
            fix="attention, convolutions and recurrences have ops of their own; this one has none yet",
        )


def _mixes(node: FxNode, ctx: PassContext) -> bool:
    value = node.meta.get("val")
    results = value if isinstance(value, (tuple, list)) else [value]
    if not isinstance(value, (torch.Tensor, tuple, list)):
        return False
    if any(len(_token_dims(result, ctx)) > 1 for result in results if isinstance(result, torch.Tensor)):
        return True
    args = given_arguments(node)
    if _computes_with_count(node, args):
        return True
    if not any(
        isinstance(n.meta.get("val"), torch.Tensor) and _token_dims(tensor(n), ctx) for n in node.all_input_nodes
    ):
        return False
    op = ops.lookup(op_name(node.target))
    return op is None or _LOOKS[op.tokens.kind](op, node, args, ctx)


def _computes_with_count(node: FxNode, args: Given) -> bool:
    """Whether how many tokens or sequences the batch has stands where elements or a number do, and not in sizes."""
    kinds = {arg.name: str(arg.type) for arg in node.target._schema.arguments}
    numbers = [value for name, value in args.items() if kinds[name] in _NUMBERS and isinstance(value, FxNode)]
    return any(isinstance(number.meta["val"], (torch.SymInt, torch.SymFloat)) for number in numbers)


_NUMBERS = ("Tensor", "number", "Optional[number]", "float", "Optional[float]")
"""Types of arguments that are computed with."""


def _token_dims(value: torch.Tensor, ctx: PassContext) -> list[int]:
    """The dimensions that count tokens."""
    return [dim for dim, size in enumerate(ctx.shape(value)) if _counts_tokens(size)]


def _counts_tokens(size: Expr) -> bool:
    return not isinstance(size, int) and "T" in symbols.free_symbols(size)


def _over(op: OpDef, node: FxNode, args: Given, ctx: PassContext) -> bool:
    (default,) = (arg.default for arg in op.args if arg.name == op.tokens.arg)
    dims = args.get(op.tokens.arg, default)
    first = next(iter(args.values()))
    for part in first if isinstance(first, (list, tuple)) else (first,):
        rank = tensor(part).dim()
        wanted = range(rank) if dims is None else [dims] if isinstance(dims, int) else dims
        if any(dim % max(rank, 1) in _token_dims(tensor(part), ctx) for dim in wanted):
            return True
    return False


def _last(op: OpDef, node: FxNode, args: Given, ctx: PassContext) -> bool:
    source = tensor(args[op.tokens.arg])
    return source.dim() - 1 in _token_dims(source, ctx)


def _cuts(op: OpDef, node: FxNode, args: Given, ctx: PassContext) -> bool:
    is_whole = ctx.shape(node) == ctx.shape(args["self"])
    return not is_whole and _over(op, node, args, ctx)


def _reshapes(op: OpDef, node: FxNode, args: Given, ctx: PassContext) -> bool:
    return _stride(tensor(args["self"]), ctx) != _stride(tensor(node), ctx)


def _stride(value: torch.Tensor, ctx: PassContext) -> int | None:
    """Elements from one token to the next; None where no dimension counts tokens, or none is a multiple of them."""
    dims = _token_dims(value, ctx)
    if len(dims) != 1:
        return None
    shape = ctx.shape(value)
    inner = math.prod(size for size in shape[dims[0] + 1 :] if isinstance(size, int))
    return inner * symbols.evaluate(shape[dims[0]], dict.fromkeys(symbols.free_symbols(shape[dims[0]]), 1))


def _table(op: OpDef, node: FxNode, args: Given, ctx: PassContext) -> bool:
    return bool(_token_dims(tensor(args[op.tokens.arg]), ctx))


_LOOKS: dict[str, Callable[[OpDef, FxNode, Given, PassContext], bool]] = {
    # what `precast.ir.ops.op.Tokens` says of how an op looks across tokens -> whether the call mixes them
    "each": lambda *_: False, "sequences": lambda *_: False, "over": _over, "last": _last, "cuts": _cuts,
    "reshapes": _reshapes, "table": _table,
}  # fmt: skip
