"""Makes one op of what is done to queries, keys and values between their product and attention over a cache."""

from __future__ import annotations

from typing import Any

import torch

from precast.builder.graph.context import FxGraph, FxNode, PassContext
from precast.builder.graph.nodes import argument
from precast.builder.passes.graph_pass import graph_pass

ops = torch.ops.precast


@graph_pass(stage="cache", version=1, requires=("insert_caches",))
def fuse_rotary_write(graph: FxGraph, ctx: PassContext) -> bool:
    """rotary(q), rotary(k), write_kv(k, v) -> rotary_write_kv(q, k, v), with the norms of q and k before them, if any.

    Legal when nothing but the cache takes the turned keys, and nothing takes the turned queries before they are
    written. The norms are taken in when both heads have one, equal but for its weight, for the rotation alone.
    """
    changed = False
    for write in list(graph.nodes):
        if write.target is not ops.write_kv.default:
            continue
        k, q = write.args[0], _turned_query(write)
        if q is None or k.target is not ops.rotary.default or len(k.users) > 1 or not _turned_alike(q, k):
            continue
        (q_heads, q_weight), (k_heads, k_weight), norm = _before_rotation(q, k)
        _, v, *cached = write.args
        with ctx.before(write):
            new = ctx.call(
                ops.rotary_write_kv.default, q_heads, k_heads, v, *k.args[1:], q_weight, k_weight, *cached,
                **k.kwargs, **norm, **write.kwargs,
            )  # fmt: skip
        ctx.replace(q, new)
        write.graph.erase_node(write)
        changed = True
    return changed


def _turned_query(write: FxNode) -> FxNode | None:
    """The rotation whose result is the query of the first attention over what is written, made before the write."""
    attentions = (ops.paged_attention.default, ops.paged_block_sparse_attention.default)
    readers = [user for user in write.args[2].users if user.target in attentions and write < user]
    q = min(readers).args[0] if readers else None
    if q is None or q.target is not ops.rotary.default or not q < write:
        return None
    return q if all(write < user for user in q.users) else None


def _turned_alike(q: FxNode, k: FxNode) -> bool:
    return q.args[1:] == k.args[1:] and q.kwargs == k.kwargs


def _before_rotation(
    q: FxNode, k: FxNode
) -> tuple[tuple[FxNode, FxNode | None], tuple[FxNode, FxNode | None], dict[str, Any]]:
    """The heads of both with the weight of their norm, and the norm's numbers; without a norm if there is no such."""
    norms = (q.args[0], k.args[0])
    if all(norm.target is ops.rms_norm.default and len(norm.users) == 1 for norm in norms):
        of_q, of_k = ({name: argument(norm, name) for name in ("eps", "offset", "cast_before_scale")} for norm in norms)
        if of_q == of_k:
            return (norms[0].args[0], norms[0].args[1]), (norms[1].args[0], norms[1].args[1]), of_q
    return (norms[0], None), (norms[1], None), {}
