"""Puts the rounding of a layer's input into the norm or gate that makes it, where a GPU's kernels do both at once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from precast.ir.errors import TargetError
from precast.ir.graph.infer import apply_shape_rule, references
from precast.ir.graph.schema import Arg, Block, Call, Const, DtypeArg, Graph, Node, Ref, TensorType, Value
from precast.ir.ops import table
from precast.kernels.choices import cases
from precast.kernels.measured import NOTHING
from precast.kernels.use import GPU, Target, statics_in, types_in, use_of

_PRODUCT = "precast.quantised_linear"
_MAKERS = {
    name: "precast.rounded_" + name.removeprefix("precast.")
    for name in ("precast.rms_norm", "precast.residual_rms_norm", "precast.gated_activation")
}
"""Ops whose first result may be rounded as it is made, and what does that."""
_LEFT_OUT = ("zeros", "groups", "global_scale")
"""Parts of weights that no product of numbers of few bits has."""


def with_rounded_inputs(graph: Graph, target: Target) -> Graph:
    """quantised_linear(norm(x)) -> rounded_linear(rounded_norm(x)), in a graph that is bound to its world.

    Equal by definition; kernels may add up a norm's squares in another order. Done on GPUs alone, where layers alone
    take what a norm or a gate makes, all of them round it in the same way, and kernels compute all of it: whatever is
    installed or was measured.
    """
    if target.device == "cpu":
        return graph
    target = GPU._replace(capability=target.capability, tp=target.tp, table=NOTHING).without_torch
    blocks = tuple(msgspec.structs.replace(block, nodes=_fused(block, block.nodes, target)) for block in graph.blocks)
    made = msgspec.structs.replace(graph, main=_fused(graph, graph.main, target), blocks=blocks)
    return graph if made == graph else made


def _fused(function: Graph | Block, steps: Sequence[Node | Call], target: Target) -> tuple[Node | Call, ...]:
    returned = set(function.outputs.values() if isinstance(function, Graph) else function.outputs)
    params = {param.name for param in function.params}
    types, statics = types_in(function), statics_in(function)
    takers: dict[str, list[Node | Call]] = {}
    for step in steps:
        for name in references(step.args) if isinstance(step, Node) else step.args.values():
            takers.setdefault(name, []).append(step)
    names = {*types, *takers}
    replaced: dict[int, Node | Call] = {}
    for step in steps:
        if not isinstance(step, Node) or step.op not in _MAKERS or step.outputs[0].name in returned:
            continue
        layers = takers.get(step.outputs[0].name, [])
        found = _rounding(step.outputs[0].name, layers)
        if found is None or not all(name in params for name in references(found)):
            continue
        scales = _unused(f"{step.outputs[0].name}_scales", names)
        products = [_product(each, scales) for each in layers if isinstance(each, Node)]
        made = [_maker(step, found, scales, types), *products]
        known = types | {value.name: value.type for value in made[0].outputs}
        if all(_has_kernels(node, known, target, statics) for node in made):
            names.add(scales)
            replaced |= {id(old): new for old, new in zip((step, *layers), made, strict=True)}
    return tuple(replaced.get(id(step), step) for step in steps)


def _rounding(name: str, layers: Iterable[Node | Call]) -> dict[str, Arg] | None:
    """How all of these layers round the value that is the input of each; None if they don't, or otherwise."""
    ways = list[dict[str, Arg]]()
    for step in layers:
        if not isinstance(step, Node) or step.op != _PRODUCT or step.version != 1:
            return None
        if step.args.get("input") != Ref(name) or list(references(step.args)).count(name) != 1:
            return None
        if any(isinstance(step.args.get(part), Ref) for part in _LEFT_OUT):
            return None
        ways.append({key: step.args[key] for key in ("activation", "input_scale") if key in step.args})
    if not ways or any(way != ways[0] for way in ways) or ways[0].get("activation", Const("none")) == Const("none"):
        return None
    return ways[0]


def _maker(node: Node, rounding: Mapping[str, Arg], scales: str, types: Mapping[str, TensorType]) -> Node:
    """The node that makes few bits of its first result, and these scales."""
    op = table.lookup(_MAKERS[node.op])
    assert op is not None, "it is in the table"
    first, *others = node.outputs
    args = {**node.args, **rounding}
    values, own, *_ = apply_shape_rule(op, args, types)
    return Node(op.name, args, (Value(first.name, values), Value(scales, own), *others))


def _product(node: Node, scales: str) -> Node:
    """The layer over an input that is rounded."""
    kept = {key: arg for key, arg in node.args.items() if key not in (*_LEFT_OUT, "zero_offset")}
    dtype = DtypeArg(node.outputs[0].type.dtype)
    return Node("precast.rounded_linear", {**kept, "input_scales": Ref(scales), "dtype": dtype}, node.outputs)


def _has_kernels(node: Node, types: Mapping[str, TensorType], target: Target, statics: frozenset[str]) -> bool:
    """Whether launches compute the node in steps of all sizes."""
    try:
        return bool(cases(use_of(node, types, target, statics)))
    except TargetError:
        return False


def _unused(name: str, names: set[str]) -> str:
    while name in names:
        name += "_"
    return name
