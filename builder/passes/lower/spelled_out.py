"""Ops over rows as the steps that compute them, where these become a part of a fused op: gated norms, and gates."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from precast.builder.passes.graph_pass import lowered_pass
from precast.ir.graph import schema as ir
from precast.ir.graph.infer import references
from precast.ir.ops.rows_fused import FUNCTIONS
from precast.kernels.fused.launches import MAX_ROW

_F32: ir.Dtype = "float32"
_LAST = ir.Items((ir.Const(-1),))


@lowered_pass(version=1)
def spell_out_gates(graph: ir.Graph) -> ir.Graph:
    """sigmoid(linear(x, w)) * z -> sigmoid(sum(x * w)) * z, where w makes one output, as a shared expert's gate does.

    `fuse_pointwise` makes one launch of it. Legal when nothing else takes the product, and z has the shape of x. The
    sum is computed in float32 and rounded as a product is; it may be added up in another order.
    """
    types = types_of(graph)
    blocks = tuple(
        msgspec.structs.replace(
            block, nodes=tuple(_spelled(block.nodes, types_of(block), block.outputs, _gate)),
        )
        for block in graph.blocks
    )  # fmt: skip
    main = tuple(_spelled(graph.main, types, graph.outputs.values(), _gate))
    return msgspec.structs.replace(graph, blocks=blocks, main=main)


def spelled_norms(
    steps: Sequence[ir.Node | ir.Call], types: Mapping[str, ir.TensorType], outputs: Iterable[str]
) -> list[ir.Node | ir.Call]:
    """The steps of a function, in which norms of heads are chains of steps that a fused op may have.

    Only those whose result goes into arithmetic with others, in one op: gated norms. `types` are those of all values.
    What the function had before keeps its name and type, and the steps compute what the op computes, to the last bit.
    """
    return _spelled(steps, types, outputs, _norm)


def types_of(function: ir.Graph | ir.Block) -> dict[str, ir.TensorType]:
    """The types of all values of a function."""
    given: list[ir.Value | ir.Param] = [*function.inputs, *function.params]
    steps: Sequence[ir.Node | ir.Call]
    if isinstance(function, ir.Graph):
        given += function.constants
        steps = function.main
    else:
        steps = function.nodes
    return {each.name: each.type for each in (*given, *(value for step in steps for value in step.outputs))}


_Takers = Mapping[str, ir.Node]
"""Of values that one node takes: that node."""
_Spell = Callable[[ir.Node, _Takers, Mapping[str, ir.TensorType]], "Iterator[ir.Node] | None"]


def _spelled(
    steps: Sequence[ir.Node | ir.Call], types: Mapping[str, ir.TensorType], outputs: Iterable[str], spell: _Spell
) -> list[ir.Node | ir.Call]:
    taken = Counter(outputs)
    takers: dict[str, ir.Node] = {}
    for step in steps:
        names = list(references(step.args)) if isinstance(step, ir.Node) else list(step.args.values())
        taken.update(names)
        if isinstance(step, ir.Node):
            takers |= dict.fromkeys(names, step)
    alone = {name: node for name, node in takers.items() if taken[name] == 1}
    made: list[ir.Node | ir.Call] = []
    for step in steps:
        is_taken_once = isinstance(step, ir.Node) and len(step.outputs) == 1 and step.outputs[0].name in alone
        spelled = spell(step, alone, types) if is_taken_once and isinstance(step, ir.Node) else None
        made += [step] if spelled is None else spelled
    return made


def _norm(node: ir.Node, takers: _Takers, types: Mapping[str, ir.TensorType]) -> Iterator[ir.Node] | None:
    is_norm = node.op == "precast.rms_norm" and node.version == 1
    return _norm_steps(node, types) if is_norm and _is_gated_norm(node, takers, types) else None


def _gate(node: ir.Node, takers: _Takers, types: Mapping[str, ir.TensorType]) -> Iterator[ir.Node] | None:
    is_product = node.op == "aten.linear.default" and node.version == 1
    return _product_steps(node, types) if is_product and _is_gate(node, takers, types) else None


def _is_gated_norm(node: ir.Node, takers: _Takers, types: Mapping[str, ir.TensorType]) -> bool:
    """Whether it is a norm of heads, by a weight of their type, whose result goes into arithmetic with others."""
    x, weight, taker = node.args.get("x"), node.args.get("weight"), takers[node.outputs[0].name]
    if taker.op not in FUNCTIONS or not isinstance(x, ir.Ref) or not isinstance(weight, ir.Ref):
        return False
    given, others = types[x.name], [types[name] for name in references(taker.args)]
    has_heads = sum(size != 1 for size in given.shape[:-1]) > 1
    return (
        has_heads and _is_short(given) and types[weight.name].dtype == given.dtype
        and len(others) > 1 and all(other.shape == given.shape for other in others)
    )  # fmt: skip


def _is_gate(node: ir.Node, takers: _Takers, types: Mapping[str, ir.TensorType]) -> bool:
    """Whether it is y in sigmoid(y) * z, of one output without a bias, and z has the shape of its input."""
    x, weight, taker = node.args["input"], node.args["weight"], takers[node.outputs[0].name]
    if taker.op != "aten.sigmoid.default" or node.args.get("bias", ir.Const(None)) != ir.Const(None):
        return False
    assert isinstance(x, ir.Ref)
    assert isinstance(weight, ir.Ref)
    given, gate = types[x.name], taker.outputs[0].name
    product = takers.get(gate)
    is_one = types[weight.name].shape[0] == 1 and types[weight.name].dtype == given.dtype
    if not is_one or not _is_short(given) or product is None or product.op != "aten.mul.Tensor":
        return False
    others = [types[name] for name in references(product.args) if name != gate]
    return [other.shape for other in others] == [given.shape]


def _is_short(x: ir.TensorType) -> bool:
    size = x.shape[-1]
    return isinstance(size, int) and 1 < size <= MAX_ROW and x.dtype in ("float32", "float16", "bfloat16")


class _Written:
    """Nodes that are written one after the other, with names of their own for what is new."""

    def __init__(self, name: str, types: Mapping[str, ir.TensorType]) -> None:
        self._name = name
        self._types = dict(types)
        self.nodes: list[ir.Node] = []

    def add(self, op: str, kind: ir.TensorType, /, **args: Any) -> str:
        """Another node, whose result has this type; its name."""
        name = f"{self._name}.{len(self.nodes)}"
        given = {key: ir.Ref(arg) if isinstance(arg, str) else arg for key, arg in args.items()}
        self.nodes.append(ir.Node(f"aten.{op}", given, (ir.Value(name, kind),)))
        self._types[name] = kind
        return name

    def converted(self, name: str, dtype: ir.Dtype) -> str:
        """A value in this element type."""
        kind = self._types[name]
        if kind.dtype == dtype:
            return name
        return self.add("to.dtype", ir.TensorType(dtype, kind.shape), self=name, dtype=ir.DtypeArg(dtype))

    def finished(self, values: tuple[ir.Value, ...]) -> Iterator[ir.Node]:
        """The nodes, of which the last makes what the op made."""
        *before, last = self.nodes
        yield from before
        yield ir.Node(last.op, last.args, values)


def _norm_steps(node: ir.Node, types: Mapping[str, ir.TensorType]) -> Iterator[ir.Node]:
    """As `precast.kernels.rms_norm.rms_norm` computes it."""
    written = _Written(node.outputs[0].name, types)
    x, weight = node.args["x"], node.args["weight"]
    assert isinstance(x, ir.Ref)
    assert isinstance(weight, ir.Ref)
    kind = types[x.name]
    full, row = ir.TensorType(_F32, kind.shape), ir.TensorType(_F32, (*kind.shape[:-1], 1))
    wide = written.converted(x.name, _F32)
    squares = written.add("pow.Tensor_Scalar", full, self=wide, exponent=ir.Const(2))
    mean = written.add("mean.dim", row, self=squares, dim=_LAST, keepdim=ir.Const(True))
    shifted = written.add("add.Tensor", row, self=mean, other=node.args["eps"])
    normed = written.add("mul.Tensor", full, self=wide, other=written.add("rsqrt.default", row, self=shifted))
    dtype = kind.dtype if node.args["cast_before_scale"] == ir.Const(True) else _F32
    scale = written.converted(weight.name, dtype)
    offset = node.args.get("offset", ir.Const(0.0))
    if offset != ir.Const(0.0):
        scale = written.add("add.Tensor", ir.TensorType(dtype, types[weight.name].shape), self=scale, other=offset)
    product = ir.TensorType(dtype, kind.shape)
    written.converted(
        written.add("mul.Tensor", product, self=scale, other=written.converted(normed, dtype)), kind.dtype
    )
    return written.finished(node.outputs)


def _product_steps(node: ir.Node, types: Mapping[str, ir.TensorType]) -> Iterator[ir.Node]:
    """The sum of products, in float32, rounded once."""
    written = _Written(node.outputs[0].name, types)
    x, weight = node.args["input"], node.args["weight"]
    assert isinstance(x, ir.Ref)
    assert isinstance(weight, ir.Ref)
    kind = types[x.name]
    full, row = ir.TensorType(_F32, kind.shape), ir.TensorType(_F32, (*kind.shape[:-1], 1))
    products = written.add(
        "mul.Tensor", full, self=written.converted(x.name, _F32), other=written.converted(weight.name, _F32)
    )
    total = written.add("sum.dim_IntList", row, self=products, dim=_LAST, keepdim=ir.Const(True))
    written.converted(total, kind.dtype)
    return written.finished(node.outputs)
