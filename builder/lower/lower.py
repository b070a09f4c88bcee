"""From FX to the bundle's graph: the only bridge in this direction.

Each call becomes a node of the op table, its arguments by name and its sizes as expressions; what is not in the
table is refused by name, with the module that uses it, all at once. `outline` then finds the layers.
"""

from __future__ import annotations

import operator
from collections import Counter
from typing import Any

import torch

from precast.builder.graph.context import FxGraph, FxNode, PassContext, expr_of, tensor
from precast.builder.graph.nodes import by_call, given_arguments, layer_of, op_name
from precast.builder.graph.rounding import Roundings, rounding_of
from precast.builder.limits import MAX_SEQUENCES, MAX_TOKENS
from precast.builder.lower.outline import Flat, outline
from precast.builder.weights.kept import storage
from precast.ir.errors import BuildError
from precast.ir.graph import schema as ir
from precast.ir.graph import symbols
from precast.ir.ops import table as ops
from precast.ir.ops.op import ArgDef

aten = torch.ops.aten

_ADD_AN_OP = "docs/adding_an_op.md says how an operation is added"


def lower(graph: FxGraph, ctx: PassContext) -> ir.Graph:
    """The bundle's graph, layers outlined into blocks. `refuse_unknown_ops` has let it through."""
    flat = lower_flat(graph, ctx)
    return outline(flat, {} if ctx.options.dequantise else _storages(flat, ctx.roundings))


def _storages(flat: Flat, roundings: Roundings) -> dict[str, object]:
    """How the params are stored whose values a checkpoint has in few bits, and how the inputs are rounded that they are
    multiplied with."""
    found = {param.name: (storage(param.recipe, param.type.dtype), param.recipe) for param in flat.params}
    return {
        name: (each, rounding_of(recipe, roundings).kind) for name, (each, recipe) in found.items() if each is not None
    }


def lower_flat(graph: FxGraph, ctx: PassContext) -> Flat:
    """All nodes in order, each with its layer, beside the graph's inputs, params and constants."""
    names = _Names(ctx)
    inputs: list[ir.Value] = []
    params: list[ir.Param] = []
    constants: list[ir.Value] = []
    nodes: list[tuple[ir.Node, str | None]] = []
    outputs: dict[str, str] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            if not isinstance(node.meta["val"], torch.Tensor):
                continue
            value = ir.Value(names.of(node), _type(tensor(node), ctx))
            if node.name in ctx.params:
                params.append(ir.Param(value.name, value.type, ctx.params[node.name].recipe))
            elif node.name in ctx.constants:
                constants.append(value)
            elif node.name not in ctx.cache_tensors and _is_read(node):
                inputs.append(value)
        elif node.op == "output":
            outputs = {name: names.of(value) for name, value in node.args[0].items()}
        elif _is_tensor_op(node):
            nodes.append((_lower_node(node, ctx, names), layer_of(node)))
    return Flat(
        symbols=_symbols(ctx),
        inputs=tuple(sorted(inputs, key=lambda value: value.name)),
        params=tuple(params),
        constants=tuple(sorted(constants, key=lambda value: value.name)),
        nodes=tuple(nodes),
        outputs=outputs,
        caches=ctx.caches,
    )


def _is_read(placeholder: FxNode) -> bool:
    """Whether anything needs the input's values. Its sizes are the graph's symbols: no node reads those."""
    return any(_is_tensor_op(user) or user.op == "output" for user in placeholder.users)


class _Names:
    """The bundle's name of each FX node: params and caches keep theirs, the rest is numbered by op."""

    def __init__(self, ctx: PassContext) -> None:
        self.ctx = ctx
        self.count: Counter[str] = Counter()
        self.known: dict[FxNode, str] = {}

    def of(self, node: FxNode) -> str:
        if node.op == "placeholder":
            tables = self.ctx.params, self.ctx.constants, self.ctx.cache_tensors
            return next((table[node.name].name for table in tables if node.name in table), node.name)
        if node not in self.known:
            if node.target is operator.getitem:
                source, index = node.args
                self.known[node] = f"{self.of(source)}_{index}"
            else:
                short = op_name(node.target).split(".")[1]
                self.known[node] = f"{short}_{self.count[short]}"
                self.count[short] += 1
        return self.known[node]


def _is_tensor_op(node: FxNode) -> bool:
    """A call that computes tensors: sizes become expressions, and picking a result is no operation."""
    if node.op != "call_function" or node.target is operator.getitem:
        return False
    value = node.meta.get("val")
    return not isinstance(value, (int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool))


def refuse_unknown_ops(graph: FxGraph) -> None:
    """Raises BuildError("op-unsupported") naming every op outside the table, and the modules that use it."""
    calls = ((_unknown(node), node) for node in graph.nodes if _is_tensor_op(node))
    unknown = by_call(((call, node) for call, node in calls if call is not None), "used by")
    if unknown:
        message = f"the model uses operations outside the op table: {unknown}"
        raise BuildError("op-unsupported", message, fix=_ADD_AN_OP)


def _unknown(node: FxNode) -> str | None:
    """What the op table doesn't know of this call: the op, or arguments that haven't their defaults."""
    definition = ops.lookup(op_name(node.target))
    if definition is None:
        return op_name(node.target)
    known = {arg.name for arg in definition.args}
    defaults = {arg.name: arg.default_value for arg in node.target._schema.arguments}
    others = [
        f"{name}={value}"
        for name, value in given_arguments(node).items()
        if name not in known and value != defaults[name]
    ]
    return f"{definition.name} with {', '.join(others)}" if others else None


def _type(value: torch.Tensor, ctx: PassContext) -> ir.TensorType:
    dtype = str(value.dtype).removeprefix("torch.")
    return ir.TensorType(dtype, ctx.shape(value))  # type: ignore[arg-type]


def _lower_node(node: FxNode, ctx: PassContext, names: _Names) -> ir.Node:
    definition = ops.lookup(op_name(node.target))
    assert definition is not None
    value = node.meta["val"]
    results: list[ir.Value] = []
    if isinstance(value, torch.Tensor):
        results.append(ir.Value(names.of(node), _type(value, ctx)))
    elif value is not None:
        results += [ir.Value(f"{names.of(node)}_{i}", _type(part, ctx)) for i, part in enumerate(value)]
    given = given_arguments(node)
    given.update(_written_out(node, ctx))
    args = {}
    for arg in definition.args:
        lowered = _argument(arg, given.get(arg.name, arg.default if arg.has_default else None), ctx, names)
        if lowered is not None:
            args[arg.name] = lowered
    return ir.Node(definition.name, args, tuple(results), definition.version)


def _written_out(node: FxNode, ctx: PassContext) -> dict[str, Any]:
    """Sizes that FX leaves implicit (-1, missing ends), as expressions."""
    shape = {aten.reshape.default: "shape", aten.expand.default: "size"}.get(node.target)
    if shape is not None:
        return {shape: list(ctx.shape(node))}
    if node.target is aten.slice.Tensor:
        _, dim, start, end, *_ = node.args
        size = expr_of(tensor(node.args[0]).shape[dim], ctx.symbols)
        whole = end is None or (isinstance(end, int) and end >= (1 << 62))
        return {"start": start or 0, "end": size if whole else end}
    return {}


def _argument(arg: ArgDef, value: Any, ctx: PassContext, names: _Names) -> ir.Arg | None:
    """The argument as the bundle writes it; None: it has its default, and is left out."""
    if arg.has_default and type(value) is type(arg.default) and value == arg.default:
        return None
    if value is None:
        return None if arg.has_default and arg.default is None else ir.Const(None)
    if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        return ir.Items(tuple(_item(arg, item, ctx, names) for item in value))
    return _item(arg, value, ctx, names)


def _item(arg: ArgDef, value: Any, ctx: PassContext, names: _Names) -> Any:
    if isinstance(value, FxNode):
        meta = value.meta["val"]
        if isinstance(meta, torch.Tensor):
            return ir.Ref(names.of(value))
        return _integer(expr_of(meta, ctx.symbols))
    if isinstance(value, torch.dtype):
        return ir.DtypeArg(str(value).removeprefix("torch."))  # type: ignore[arg-type]
    if isinstance(value, torch.SymInt):
        return _integer(expr_of(value, ctx.symbols))
    if arg.kind in ("int[]", "int[]?", "int") and not isinstance(value, (bool, int)):
        return _integer(value)
    if arg.kind in ("float", "float?"):
        return ir.Const(float(value))
    if isinstance(value, (bool, int, float, str)):
        return ir.Const(value)
    message = f"argument {arg.name} is a {type(value).__name__}, which a bundle can't hold"
    raise BuildError("op-unsupported", message, fix=_ADD_AN_OP)


def _integer(expr: ir.Expr) -> ir.Const | ir.Dim:
    return ir.Const(expr) if isinstance(expr, int) else ir.Dim(expr)


def _symbols(ctx: PassContext) -> tuple[ir.Symbol, ...]:
    known = {"T": ir.Symbol("T", 1, MAX_TOKENS), "B": ir.Symbol("B", 1, MAX_SEQUENCES)}
    for expr in ctx.symbols.values():
        for name in symbols.free_symbols(expr):
            known.setdefault(name, ir.Symbol(name, 0))
    return tuple(known[name] for name in sorted(known))
