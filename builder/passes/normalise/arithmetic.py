"""One spelling for sums, products and powers: rarely used arithmetic becomes that of the op table."""

from __future__ import annotations

import math
from typing import Any

import torch

from precast.builder.graph.context import FxNode, PassContext, tensor
from precast.builder.graph.match import Bind, Op, match
from precast.builder.graph.nodes import argument
from precast.builder.passes.graph_pass import NodeFunction, node_pass
from precast.ir.graph.schema import Transpose

aten = torch.ops.aten


@node_pass(stage="normalise", version=2)
def normalise_arithmetic(ctx: PassContext, node: FxNode) -> FxNode | None:
    """square -> x * x; std -> sqrt of a mean; where with a number -> masked_fill; cat of mixed types -> of one; ..."""
    spell = _SPELLINGS.get(node.target)
    return spell(ctx, node) if spell else None


def _as(target: Any) -> NodeFunction:
    """The same arguments for an op of another name, if it has as many (`alpha` of a sum is none of them)."""
    count = sum(not arg.kwarg_only for arg in target._schema.arguments)
    return lambda ctx, node: ctx.call(target, *node.args, **node.kwargs) if len(node.args) <= count else None


def _of_truth_values(target: Any) -> NodeFunction:
    """Logical operations on truth values are minima and maxima of them; on numbers they have no other spelling."""

    def spell(ctx: PassContext, node: FxNode) -> FxNode | None:
        are_truth_values = all(tensor(arg).dtype == torch.bool for arg in node.args)
        return ctx.call(target, *node.args) if are_truth_values else None

    return spell


def _spread(*, root: bool) -> NodeFunction:
    """The sum of squared distances from the mean / n, or its root; n: all elements, one less where it is unbiased."""

    def spell(ctx: PassContext, node: FxNode) -> FxNode | None:
        x, dims, unbiased, keep = (argument(node, name) for name in ("self", "dim", "unbiased", "keepdim"))
        sizes = [tensor(x).shape[dim] for dim in dims or ()]
        if not sizes or node.kwargs or not all(isinstance(size, int) for size in sizes):
            return None
        wide = _widened(ctx, x)
        distance = ctx.call(aten.sub.Tensor, wide, ctx.call(aten.mean.dim, wide, dims, True))
        total = ctx.call(aten.sum.dim_IntList, ctx.call(aten.mul.Tensor, distance, distance), dims, keep)
        result = ctx.call(aten.div.Tensor, total, math.prod(sizes) - bool(unbiased))
        result = ctx.call(aten.sqrt.default, result) if root else result
        return result if wide is x else ctx.call(aten.to.dtype, result, tensor(x).dtype)

    return spell


def _widened(ctx: PassContext, x: FxNode) -> FxNode:
    """`x` in the type that torch computes such sums in."""
    return x if tensor(x).dtype in (torch.float32, torch.float64) else ctx.call(aten.to.dtype, x, torch.float32)


def _sum(ctx: PassContext, node: FxNode) -> FxNode | None:
    """A sum in another type is the sum of what is converted first."""
    dtype = node.kwargs.get("dtype")
    if dtype is None:
        return None
    x = node.args[0] if tensor(node.args[0]).dtype == dtype else ctx.call(aten.to.dtype, node.args[0], dtype)
    return ctx.call(aten.sum.dim_IntList, x, *node.args[1:])


def _where_scalar(ctx: PassContext, node: FxNode) -> FxNode | None:
    """where(condition, x, number) -> x, filled where the condition doesn't hold; the other way round likewise."""
    condition, *values = node.args
    (x,) = (value for value in values if isinstance(value, FxNode))
    (number,) = (value for value in values if value is not x)
    result = tensor(node)
    if tensor(x).dtype != result.dtype or ctx.shape(x) != ctx.shape(result):
        return None  # the number widens it, or the condition spreads it
    mask = condition if x is values[1] else ctx.call(aten.logical_not.default, condition)
    return ctx.call(aten.masked_fill.Scalar, x, mask, number)


def _rms_norm(ctx: PassContext, node: FxNode) -> FxNode | None:
    x, shape, weight, eps = (argument(node, name) for name in ("input", "normalized_shape", "weight", "eps"))
    if len(shape) != 1:
        return None
    if eps is None:  # that of the type that torch computes it in
        eps = torch.finfo(torch.float64 if tensor(x).dtype == torch.float64 else torch.float32).eps
    return ctx.call(torch.ops.precast.rms_norm.default, x, weight, eps=eps, cast_before_scale=False)


def _baddbmm(ctx: PassContext, node: FxNode) -> FxNode | None:
    if any(node.kwargs.get(name, 1) != 1 for name in ("beta", "alpha")):
        return None
    bias, left, right = node.args
    product = ctx.call(aten.matmul.default, left, right)
    return ctx.call(aten.add.Tensor, product, bias)


def _vector_norm(ctx: PassContext, node: FxNode) -> FxNode | None:
    """The root of a sum of powers, in the type that the norm is computed in."""
    x, order, dims, keep, dtype = (argument(node, name) for name in ("self", "ord", "dim", "keepdim", "dtype"))
    if not 0 < order < math.inf or dims is None or dtype is not None:
        return None
    wide = _widened(ctx, x)
    total = ctx.call(aten.sum.dim_IntList, _power(ctx, wide, order), dims, keep)
    norm = total
    if order != 1:
        rooted = (aten.sqrt.default, total) if order == 2 else (aten.pow.Tensor_Scalar, total, 1 / order)
        norm = ctx.call(*rooted)
    return norm if wide is x else ctx.call(aten.to.dtype, norm, tensor(x).dtype)


def _power(ctx: PassContext, x: FxNode, order: float) -> FxNode:
    """The size of each number, to this power."""
    if order == 2:
        return ctx.call(aten.mul.Tensor, x, x)
    size = ctx.call(aten.abs.default, x)
    return size if order == 1 else ctx.call(aten.pow.Tensor_Scalar, size, order)


def _index_put(ctx: PassContext, node: FxNode) -> FxNode | None:
    """x[mask] = number: x, filled where the mask, of its shape, is true."""
    x, indices, values, accumulate = (argument(node, name) for name in ("self", "indices", "values", "accumulate"))
    number = ctx.constant(values)
    if accumulate or len(indices) != 1 or number is None or number.numel() != 1:
        return None
    if tensor(indices[0]).dtype != torch.bool or ctx.shape(indices[0]) != ctx.shape(x):
        return None
    return ctx.call(aten.masked_fill.Scalar, x, indices[0], number.item())


def _cat(ctx: PassContext, node: FxNode) -> FxNode | None:
    """Parts of several types are converted first, to the type that they have together."""
    parts, dtype = node.args[0], tensor(node).dtype
    if all(tensor(part).dtype == dtype for part in parts):
        return None
    alike = [part if tensor(part).dtype == dtype else ctx.call(aten.to.dtype, part, dtype) for part in parts]
    return ctx.call(aten.cat.default, alike, *node.args[1:])


_SAME = {
    # ops of the table -> others that do the same with the same arguments
    aten.mul.Tensor: (aten.mul.Scalar, aten.multiply.Tensor), aten.add.Tensor: (aten.add.Scalar,),
    aten.sub.Tensor: (aten.sub.Scalar,), aten.div.Tensor: (aten.div.Scalar,),
    aten.matmul.default: (aten.bmm.default, aten.mm.default), aten.gt.Scalar: (aten.greater.Scalar,),
    aten.minimum.default: (aten.min.other,), aten.maximum.default: (aten.max.other,),
    aten.clamp.default: (aten.clamp_min.default,),
}  # fmt: skip
_SAME_OF_TRUTH_VALUES = {
    aten.minimum.default: (aten.logical_and.default, aten.__and__.Tensor, aten.bitwise_and.Tensor),
    aten.maximum.default: (aten.logical_or.default, aten.__or__.Tensor, aten.bitwise_or.Tensor),
}
_SPELLINGS: dict[Any, NodeFunction] = {
    **{other: _as(op) for op, others in _SAME.items() for other in others},
    **{other: _of_truth_values(op) for op, others in _SAME_OF_TRUTH_VALUES.items() for other in others},
    aten.square.default: lambda ctx, node: ctx.call(aten.mul.Tensor, node.args[0], node.args[0]),
    aten.baddbmm.default: _baddbmm,
    aten.cat.default: _cat,
    aten.index_put.default: _index_put,
    aten.linalg_vector_norm.default: _vector_norm,
    aten.reciprocal.default: lambda ctx, node: ctx.call(aten.pow.Tensor_Scalar, node.args[0], -1.0),
    aten.std.dim: _spread(root=True),
    aten.var.dim: _spread(root=False),
    aten.sum.dim_IntList: _sum,
    aten.where.ScalarOther: _where_scalar,
    aten.where.ScalarSelf: _where_scalar,
    aten.rms_norm.default: _rms_norm,
}


_CONV1D = Op(
    aten.reshape.default,
    Op(aten.addmm.default, Bind("bias"), Op(aten.reshape.default, Bind("x"), Bind("flat")), Bind("weight")),
    Bind("shape"),
)


@node_pass(stage="normalise", version=1, requires=("normalise_views",))
def normalise_linear(ctx: PassContext, node: FxNode) -> FxNode | None:
    """addmm(bias, x.view(-1, in), weight[in, out]).view(..., out) -> linear(x, weight^T, bias); x @ W^T -> linear."""
    if node.target is aten.matmul.default and _is_transposed(node.args[1], ctx):
        return ctx.call(aten.linear.default, node.args[0], node.args[1].args[0])
    found = match(_CONV1D, node)
    if found is None or not ctx.is_param(found["weight"]) or not ctx.is_param(found["bias"]):
        return None
    x, weight = found["x"], found["weight"]
    in_size, out_size = tensor(weight).shape
    if ctx.shape(node) != (*ctx.shape(x)[:-1], out_size):
        return None
    info = ctx.params[weight.name]
    recipe = Transpose(info.recipe, 0, 1)
    transposed = ctx.new_param(weight, info.name + ".transposed", recipe, (out_size, in_size))
    return ctx.call(aten.linear.default, x, transposed, found["bias"])


def _is_transposed(node: FxNode, ctx: PassContext) -> bool:
    """Whether the node is a matrix param with its two dimensions exchanged."""
    if not node.args or not ctx.is_param(node.args[0]) or tensor(node).dim() != 2:
        return False
    exchanged = {aten.transpose.int: ([0, 1], [1, 0]), aten.permute.default: ([[1, 0]],)}.get(node.target, ())
    return list(node.args[1:]) in exchanged
