"""Computes a part of a graph on numbers, on the CPU, for passes that compare it with one of our ops."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, cast

import torch
from torch.fx.node import map_arg
from torch.utils._pytree import tree_map

from precast.builder.graph.context import FxGraph, FxNode, PassContext, tensor
from precast.builder.graph.nodes import origins
from precast.ir.graph import symbols


class NotComputable(Exception):
    """The part depends on something that has no value here: a param, or an input that wasn't given."""


def evaluate(wanted: FxNode, known: Mapping[FxNode, Any], ctx: PassContext, *, exact: bool = False) -> Any:
    """The value of `wanted`, given those of the nodes in `known`; constants have their own.

    `exact`: what the graph computes in half precision is computed in float32, so that numbers which a pass reads off
    the results are those that the model's author wrote. The values in `known` are taken as they are.
    Raises NotComputable.
    """
    values = dict(known)
    for node in _needed(wanted, values, ctx):
        if node.target in _LIKE:
            values[node] = _filled(node, values, ctx)
            continue
        args, kwargs = map_arg((node.args, node.kwargs), lambda n: _value(cast(FxNode, n), values, ctx))
        if exact:
            args, kwargs = tree_map(_widened, (args, kwargs))
        kwargs = {name: torch.device("cpu") if name == "device" else value for name, value in kwargs.items()}
        if node.target is torch.ops.aten.to.device:
            values[node] = args[0].to(args[2])
        else:
            values[node] = node.target(*args, **kwargs)
    return _value(wanted, values, ctx)


def example_inputs(graph: FxGraph, size: int) -> dict[FxNode, torch.Tensor]:
    """The graph's inputs for one sequence of `size` tokens, all different."""
    ids = torch.arange(size)[None]
    values = {
        "input_ids": ids,
        "positions": ids,
        "rope_lengths": torch.full((1, size), size),
        "cu_seqlens": torch.tensor([0, size], dtype=torch.int32),
    }
    return {node: values[node.name] for node in graph.nodes if node.op == "placeholder" and node.name in values}


def _needed(wanted: FxNode, known: Mapping[FxNode, Any], ctx: PassContext) -> Iterable[FxNode]:
    """The nodes to compute for `wanted`, in the graph's order."""

    def is_computed(node: FxNode) -> bool:
        return node not in known and ctx.constant(node) is None

    found = origins(wanted, goes_on=lambda node: is_computed(node) and node.target not in _LIKE)
    needed = {node for node in found if is_computed(node)}
    unknown = [node.name for node in needed if node.op != "call_function"]
    if unknown:
        raise NotComputable(unknown[0])
    return [node for node in wanted.graph.nodes if node in needed]


_LIKE = {torch.ops.aten.zeros_like.default: 0, torch.ops.aten.ones_like.default: 1}
"""What these fill the shape of their argument with; its values don't matter."""


def _filled(node: FxNode, values: Mapping[FxNode, Any], ctx: PassContext) -> torch.Tensor:
    """The tensor of zeros or ones, in the sizes that the packed batch in `values` has."""
    ids = next((value for known, value in values.items() if known.name == "input_ids"), None)
    sizes = {} if ids is None else {"T": int(ids.shape[1])}
    try:
        shape = [symbols.evaluate(size, sizes) for size in ctx.shape(node)]
    except KeyError:
        raise NotComputable(node.name) from None
    return torch.full(shape, _LIKE[node.target], dtype=tensor(node).dtype)


def _widened(value: Any) -> Any:
    """Float32 in the place of half precision, whether it is a dtype or a tensor of it."""
    if isinstance(value, torch.Tensor) and value.dtype in _HALVES:
        return value.float()
    return torch.float32 if isinstance(value, torch.dtype) and value in _HALVES else value


_HALVES = (torch.bfloat16, torch.float16)


def _value(node: FxNode, values: Mapping[FxNode, Any], ctx: PassContext) -> Any:
    return values[node] if node in values else ctx.constant(node)
