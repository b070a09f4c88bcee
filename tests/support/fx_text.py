"""Small FX graphs as text, for tests of passes: the graph in, the pass, the graph out.

    x: input(float32, 1, T, 8)
    w: param(float32, 8)
    c: constant(float32, [0.5])
    with layer("layers.0"):
        y = aten.mul.Tensor(x, w)
        a, b = precast.rotary_tables(...)
        part = item(y, 0)
    return y

The text is read as Python's grammar and nothing in it is run. `T` is the number of tokens and `B1` the number of
sequences and one. Each graph is also computed before and after the pass, on random numbers: a pass that changes what
its graph means fails wherever it is tested.
"""

from __future__ import annotations

import ast
import dataclasses
import operator
import textwrap
from collections.abc import Iterator
from typing import Any

import torch
from reference import evaluate
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from precast.builder import pipeline
from precast.builder.graph.context import ConstantInfo, Options, ParamInfo, PassContext
from precast.builder.graph.nodes import eliminate_dead_code, op_name
from precast.builder.passes.graph_pass import Pass
from precast.ir.graph import symbols
from precast.ir.graph.schema import Read
from precast.ir.graph.text import format_recipe
from precast.kernels.registry import register

SIZES = {"T": 7, "B1": 3}


@dataclasses.dataclass
class SmallGraph:
    """A graph that was read: with its context, ready for a pass."""

    graph: fx.Graph
    ctx: PassContext
    outputs: int


@dataclasses.dataclass(frozen=True)
class Applied:
    """What a pass made of a graph: as text, and what the runner recorded."""

    text: str
    changed: bool
    ctx: PassContext
    graph: fx.Graph


def apply(step: Pass, text: str) -> Applied:
    """Runs one pass over the graph, and asserts that the graph's results stay what they were."""
    source = read_graph(text)
    inputs = _random_inputs(source)
    before = compute(source, inputs)
    alone = dataclasses.replace(step, requires=(), before=())
    (record,) = pipeline.run(source.graph, source.ctx, (alone,))
    for found, expected in zip(compute(source, inputs), before, strict=True):
        tolerance = {torch.bfloat16: 2e-2, torch.float16: 4e-3}.get(found.dtype, 1e-5)
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance, equal_nan=True)
    return Applied(write_graph(source.graph, source.ctx), record.changed, source.ctx, source.graph)


def assert_rewrites(step: Pass, before: str, after: str) -> Applied:
    """The pass turns the one graph into the other."""
    applied = apply(step, before)
    assert applied.text == textwrap.dedent(after).strip(), f"found:\n{applied.text}"
    assert applied.changed
    return applied


def assert_leaves(step: Pass, text: str) -> None:
    """The pass finds nothing to do: its pattern is nearly there."""
    source = read_graph(text)
    eliminate_dead_code(source.graph, source.ctx)
    expected = write_graph(source.graph, source.ctx)
    applied = apply(step, text)
    assert applied.text == expected, f"found:\n{applied.text}"
    assert not applied.changed


# --- reading -----------------------------------------------------------------------------------------------------


def read_graph(text: str, *, options: Options | None = None) -> SmallGraph:
    """The graph of the text. Its output is `{"logits": first}`, further results are `out1`, `out2`, ..."""
    register()
    return _Reader(options or Options("float32", 64)).read(ast.parse(textwrap.dedent(text)))


class _Reader:
    def __init__(self, options: Options) -> None:
        self.mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
        self.graph = fx.Graph()
        self.ctx = PassContext(options=options, params={}, constants={}, symbols={}, fake_mode=self.mode)
        self.nodes: dict[str, Any] = {}
        self.sizes = {name: self._size(name, example) for name, example in SIZES.items()}
        self.layer: str | None = None
        self.outputs = 0

    def read(self, module: ast.Module) -> SmallGraph:
        for statement in module.body:
            self._statement(statement)
        return SmallGraph(self.graph, self.ctx, self.outputs)

    def _size(self, name: str, example: int) -> Any:
        context: Any = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC])
        fake = self.mode.from_tensor(torch.empty(example), symbolic_context=context)
        self.ctx.symbols[str(fake.shape[0].node.expr)] = symbols.add("B", 1) if name == "B1" else name
        return fake.shape[0]

    def _statement(self, statement: ast.stmt) -> None:
        match statement:
            case ast.AnnAssign(target=ast.Name(id=name), annotation=ast.Call(func=ast.Name(id=kind), args=args)):
                self.nodes[name] = self._placeholder(name, kind, args)
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Call() as call):
                self.nodes[name] = self._call(call)
            case ast.Assign(targets=[ast.Tuple(elts=targets)], value=ast.Call() as call):
                node = self._call(call)
                for index, target in enumerate(targets):
                    assert isinstance(target, ast.Name)
                    self.nodes[target.id] = self._item(node, index)
            case ast.Expr(value=ast.Call() as call):
                self._call(call)
            case ast.With(
                items=[ast.withitem(context_expr=ast.Call(args=[ast.Constant(value=str(layer))]))], body=body
            ):
                self.layer = layer
                for inner in body:
                    self._statement(inner)
                self.layer = None
            case ast.Return(value=ast.Tuple(elts=values)):
                self._output([self._value(value) for value in values])
            case ast.Return(value=ast.expr() as value):
                self._output([self._value(value)])
            case _:
                raise SyntaxError(ast.unparse(statement))

    def _placeholder(self, name: str, kind: str, args: list[ast.expr]) -> fx.Node:
        dtype = self._value(args[0])
        node = self.graph.placeholder(name)
        if kind == "constant":
            value = torch.tensor(self._value(args[1]), dtype=dtype)
            self.ctx.constants[node.name] = ConstantInfo(name, value)
            node.meta["val"] = self.ctx.empty(value.shape, dtype)
            return node
        shape = [self.sizes[size.id] if isinstance(size, ast.Name) else self._value(size) for size in args[1:]]
        node.meta["val"] = self.ctx.empty(shape, dtype)
        if kind == "param":
            self.ctx.params[node.name] = ParamInfo(name, Read(name, tuple(shape), str(dtype).removeprefix("torch.")))
        else:
            assert kind == "input", kind
        return node

    def _call(self, call: ast.Call) -> fx.Node:
        args = tuple(self._value(arg) for arg in call.args)
        kwargs = {keyword.arg: self._value(keyword.value) for keyword in call.keywords}
        if isinstance(call.func, ast.Name):
            assert call.func.id == "item"
            return self._item(*args)
        target = torch.ops
        for part in ast.unparse(call.func).split("."):
            target = getattr(target, part)
        target = getattr(target, "default", target) if isinstance(target, torch._ops.OpOverloadPacket) else target
        node = self.graph.call_function(target, args, kwargs)
        self._in_layer(node)
        node.meta["val"] = self.ctx.fake(target, args, kwargs)
        return node

    def _item(self, node: fx.Node, index: int) -> fx.Node:
        item = self.graph.call_function(operator.getitem, (node, index))
        self._in_layer(item)
        item.meta["val"] = node.meta["val"][index]
        return item

    def _in_layer(self, node: fx.Node) -> None:
        if self.layer is not None:
            node.meta["nn_module_stack"] = {"layer": (self.layer, "")}

    def _output(self, values: list[fx.Node]) -> None:
        self.outputs = len(values)
        self.graph.output({f"out{index}" if index else "logits": value for index, value in enumerate(values)})

    def _value(self, value: ast.expr) -> Any:
        match value:
            case ast.Name(id=name) if name in self.nodes:
                return self.nodes[name]
            case ast.Name(id=name):
                dtype = getattr(torch, name)
                assert isinstance(dtype, torch.dtype), f"{name} is not defined"
                return dtype
            case ast.List(elts=items):
                return [self._value(item) for item in items]
        return ast.literal_eval(value)


# --- writing -----------------------------------------------------------------------------------------------------


def write_graph(graph: fx.Graph, ctx: PassContext) -> str:
    """The calls in order, results numbered; before them, the params that are more than one checkpoint tensor."""
    names: dict[fx.Node, str] = {}
    lines = []
    for node in graph.nodes:
        if node.op == "placeholder":
            info = ctx.params.get(node.name) or ctx.constants.get(node.name)
            names[node] = info.name if info else node.name
            if isinstance(info, ParamInfo) and not isinstance(info.recipe, Read):
                lines.append(f"{info.name} = {format_recipe(info.recipe)}")
        elif node.op == "call_function":
            names[node] = f"v{sum(name[0] == 'v' and name[1:].isdigit() for name in names.values())}"
            lines.append(f"{names[node]} = {_expression(node, names)}")
        elif node.op == "output":
            lines.append("return " + ", ".join(names[value] for value in node.args[0].values()))
    return "\n".join(lines)


def _expression(node: fx.Node, names: dict[fx.Node, str]) -> str:
    args = [_text(arg, names) for arg in node.args]
    if node.target is operator.getitem:
        return f"{args[0]}[{args[1]}]"
    keywords = [f"{name}={_text(arg, names)}" for name, arg in node.kwargs.items()]
    return f"{op_name(node.target)}({', '.join([*args, *keywords])})"


def _text(arg: Any, names: dict[fx.Node, str]) -> str:
    if isinstance(arg, fx.Node):
        return names[arg]
    if isinstance(arg, (list, tuple)):
        return f"[{', '.join(_text(item, names) for item in arg)}]"
    return str(arg).removeprefix("torch.")


# --- computing ---------------------------------------------------------------------------------------------------


def compute(source: SmallGraph, inputs: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """The results on the CPU. `inputs` holds the graph's inputs, and the checkpoint's tensors by name."""
    values = {place: info.value for place, info in source.ctx.constants.items()}
    values |= {place: evaluate(info.recipe, inputs) for place, info in source.ctx.params.items()}
    values = {**inputs, **values}
    places = [node.name for node in source.graph.nodes if node.op == "placeholder"]
    with torch.no_grad():
        out = fx.Interpreter(fx.GraphModule({}, source.graph)).run(*[values[place] for place in places])
    return list(out.values())


def _random_inputs(source: SmallGraph) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return dict(_draws(source, generator))


def _draws(source: SmallGraph, generator: torch.Generator) -> Iterator[tuple[str, torch.Tensor]]:
    for node in source.graph.nodes:
        if node.op != "placeholder" or node.name in source.ctx.constants:
            continue
        fake = node.meta["val"]
        shape = [_number(size, source.ctx) for size in fake.shape]
        if node.name == "cu_seqlens":
            yield node.name, torch.tensor([0, 4, SIZES["T"]], dtype=torch.int32)
        elif fake.dtype.is_floating_point:
            yield node.name, torch.randn(shape, generator=generator).to(fake.dtype)
        else:
            yield node.name, torch.arange(shape[-1]).expand(shape).to(fake.dtype)


def _number(size: Any, ctx: PassContext) -> int:
    if isinstance(size, int):
        return size
    return int(symbols.evaluate(ctx.symbols[str(size.node.expr)], {"T": SIZES["T"], "B": SIZES["B1"] - 1}))
