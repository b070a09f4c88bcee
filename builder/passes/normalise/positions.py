"""Finds positions that a model counts itself: those of its tokens in a single sequence."""

from __future__ import annotations

import torch

from precast.builder.graph.context import FxNode, PassContext, tensor
from precast.builder.graph.nodes import placeholder
from precast.builder.passes.graph_pass import node_pass
from precast.ir.graph import symbols

aten = torch.ops.aten

_COUNTS = (aten.arange.default, aten.arange.start)
_VIEWS = (
    # give back each of the numbers, looked at otherwise
    aten.unsqueeze.default, aten.squeeze.dim, aten.expand.default, aten.view.default, aten.reshape.default,
    aten.to.device, aten.to.dtype, aten.alias.default,
)  # fmt: skip
_EACH = (
    # an element of the result comes of the elements at its place
    aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor, aten.rsub.Scalar, aten.pow.Tensor_Scalar,
    aten.neg.default, aten.floor.default, aten.exp.default, aten.log.default, aten.log1p.default, aten.sqrt.default,
    aten.rsqrt.default, aten.clamp.default, aten.clamp_min.default, aten.minimum.default, aten.maximum.default,
)  # fmt: skip


@node_pass(stage="normalise", version=1)
def match_positions(ctx: PassContext, node: FxNode) -> FxNode | None:
    """arange(T) -> positions[0], where the numbers find rows of a table, or are computed with one by one.

    The model sees one sequence from its start, and counts its tokens; a batch has several, and parts of them: there
    each token has its own position, and what a token's number says of that token alone, its position says. Numbers
    that tell of anything else, such as which rows of the tokens to take, how far two tokens are apart, or how many
    are to come, are left, and refused after the passes.
    """
    if node.target not in _COUNTS or not _is_count_of_tokens(node, ctx):
        return None
    if not all(_is_of_one_token(user, node, ctx) for user in node.users):
        return None
    return ctx.call(aten.select.int, placeholder(node.graph, "positions"), 0, 0)


def _is_count_of_tokens(node: FxNode, ctx: PassContext) -> bool:
    """Whether these are 0, 1, ... up to the number of tokens."""
    starts = node.target is aten.arange.default or node.args[0] == 0
    return starts and tensor(node).dtype == torch.int64 and ctx.shape(node) == ("T",)


def _is_of_one_token(user: FxNode, numbers: FxNode, ctx: PassContext) -> bool:
    """Whether this user of the numbers, and whoever uses its result, makes of each what belongs to its token.

    Where a token's own values come in, the result is one of them: the last check of the graph looks after those.
    """
    if user.target is aten.embedding.default:
        return user.args[1] is numbers and _is_table(user.args[0], ctx)
    if user.target not in (*_VIEWS, *_EACH) or _num_token_dims(user, ctx) > 1:
        return False
    if user.target in _VIEWS:
        return user.args[0] is numbers and _all_of_one_token(user, ctx)
    others = [node for node in user.all_input_nodes if node is not numbers]
    if not all(isinstance(node.meta["val"], torch.Tensor) for node in others):
        return False
    is_value = tensor(user).dtype.is_floating_point and not all(_is_table(node, ctx) for node in others)
    return is_value or _all_of_one_token(user, ctx)


def _all_of_one_token(numbers: FxNode, ctx: PassContext) -> bool:
    return bool(numbers.users) and all(_is_of_one_token(user, numbers, ctx) for user in numbers.users)


def _is_table(node: FxNode, ctx: PassContext) -> bool:
    return bool(ctx.is_param(node)) or ctx.constant(node) is not None


def _num_token_dims(node: FxNode, ctx: PassContext) -> int:
    sizes = ctx.shape(node)
    return sum(not isinstance(size, int) and "T" in symbols.free_symbols(size) for size in sizes)
