"""Which params of a graph are parts of weights in few bits, by the nodes that take them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from precast.ir.graph.schema import Call, Const, Graph, Node, Ref
from precast.ir.weights.quantised import PACKED

_WEIGHTS: Mapping[str, tuple[tuple[str, str], ...]] = MappingProxyType({
    "precast.quantised_linear": (("weight", ""),), "precast.rounded_linear": (("weight", ""),),
    "precast.quantised_embedding": (("weight", ""),), "precast.quantised_sharded_embedding": (("weight", ""),),
    "precast.quantised_experts": (("up", "up_"), ("down", "down_")),
})  # fmt: skip
"""By op: the arguments that are stored values, and what the names of the other parts begin with."""

_OTHERS = ("scales", "zeros", "groups", "global_scale", "input_scale")


class StoredPart(NamedTuple):
    """A part of a weight: its format, its name among those of a `Dequantise`, or `input_scale`, by which the layer's
    input is divided, and the name of the param of scales."""

    format: str
    part: str
    scales: str


def stored_parts(graph: Graph) -> dict[str, StoredPart]:
    """The parts, by the names of their params."""
    nodes = {block.name: block.nodes for block in graph.blocks}
    found: dict[str, StoredPart] = {}
    for step in graph.main:
        if isinstance(step, Call):
            for node in nodes[step.block]:
                found |= _parts(node, step.args)
        else:
            found |= _parts(step, {})
    params = {param.name for param in graph.params}
    return {name: part for name, part in found.items() if name in params}


def groups_dim(format: str) -> int:
    """The dimension of scales that counts groups of inputs, of the formats that have such groups."""
    return -1 if format in PACKED else -2


def arg_name(op: str, weight: str, part: str) -> str:
    """What an op for stored weights calls a part, or the block, of the weight that is its argument `weight`."""
    return weight if part == "of" else dict(_WEIGHTS[op])[weight] + part


def _parts(node: Node, bound: Mapping[str, str]) -> dict[str, StoredPart]:
    format = node.args.get("format")
    if node.op not in _WEIGHTS or not isinstance(format, Const):
        return {}
    found: dict[str, StoredPart] = {}
    for weight, _ in _WEIGHTS[node.op]:
        args = {part: arg_name(node.op, weight, part) for part in ("of", *_OTHERS)}
        names = {part: given.name for part, arg in args.items() if isinstance(given := node.args.get(arg), Ref)}
        actual = {part: bound.get(name, name) for part, name in names.items()}
        found |= {name: StoredPart(str(format.value), part, actual["scales"]) for part, name in actual.items()}
    return found
