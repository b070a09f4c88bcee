"""An FX graph and its tables as data, and back: what a snapshot holds, at any point between the trace and lowering.

It says what stands in FX, node by node, in no other language: a target by its name, a size as an expression, a value
by its type. So nothing is inferred when it is read, and nothing depends on what the op table knows.
"""

from __future__ import annotations

import functools
import math
import operator
from typing import Any

import msgspec
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from precast.builder.graph.constants import tensor_bytes, tensor_from_bytes
from precast.builder.graph.context import (
    ConstantInfo,
    FxGraph,
    FxNode,
    KvScales,
    Options,
    ParamInfo,
    PassContext,
    expr_of,
)
from precast.builder.graph.rounding import Rounding
from precast.ir.errors import BuildError
from precast.ir.graph import symbols
from precast.ir.graph.schema import CachePlan, Expr, TensorType, Value, Wire

_MODULES = {"operator": operator, "torch": torch, "math": math}
"""Where targets are that are no ops: arithmetic of sizes, and picking a result."""
_NAMED = (torch.dtype, torch.layout, torch.memory_format)
"""Arguments that torch knows by name."""
_EXAMPLES = {"T": 7, "B": 4}
"""What the exporter's symbols have as examples; nothing depends on it."""


_OPERATIONS: dict[str, Any] = {
    # by torch's own functions: of sizes without an example, Python's `max` would ask which is larger
    "add": operator.add, "mul": operator.mul, "floordiv": operator.floordiv, "mod": operator.mod,
    "min": torch.sym_min, "max": torch.sym_max, "ceildiv": lambda a, b: (a + b - 1) // b,
}  # fmt: skip


class StoredNode(Wire, frozen=True):
    """A node. In `args`, `kwargs` and `value`, an object says by its only key what it is: see `_data`."""

    name: str
    op: str
    target: str
    args: Any
    kwargs: Any
    modules: tuple[str, ...]
    """The paths of the modules that it was traced in, the outermost first."""
    value: Any


class StoredGraph(Wire, frozen=True):
    """A graph, and what a `PassContext` says of its placeholders."""

    nodes: tuple[StoredNode, ...]
    symbols: tuple[str, ...]
    params: dict[str, ParamInfo]
    constants: dict[str, tuple[Value, bytes]]
    cache_tensors: dict[str, Value]
    caches: CachePlan
    scales: dict[str, KvScales]
    roundings: dict[str, Rounding]
    wide: dict[str, str]


def store(graph: FxGraph, ctx: PassContext) -> StoredGraph | None:
    """The graph as data; None for one that holds what has no name or size here."""
    try:
        nodes = tuple(_stored(node, ctx) for node in graph.nodes)
    except (BuildError, TypeError):
        return None
    names = dict.fromkeys(name for expr in ctx.symbols.values() for name in sorted(symbols.free_symbols(expr)))
    return StoredGraph(
        nodes=nodes,
        symbols=tuple(names),
        params=ctx.params,
        constants={place: (_type(info), tensor_bytes(info.value)) for place, info in ctx.constants.items()},
        cache_tensors=ctx.cache_tensors,
        caches=ctx.caches,
        scales=dict(ctx.scales),
        roundings=dict(ctx.roundings),
        wide=dict(ctx.wide),
    )


def _type(info: ConstantInfo) -> Value:
    dtype: Any = str(info.value.dtype).removeprefix("torch.")
    return Value(info.name, TensorType(dtype, tuple(info.value.shape)))


def _stored(node: FxNode, ctx: PassContext) -> StoredNode:
    stack = node.meta.get("nn_module_stack") or {}
    return StoredNode(
        name=node.name,
        op=node.op,
        target=_target_name(node) if node.op == "call_function" else str(node.target),
        args=_data(list(node.args), ctx),
        kwargs=_data(dict(node.kwargs), ctx),
        modules=tuple(path for path, _ in stack.values()),
        value=_data(node.meta.get("val"), ctx),
    )


def _target_name(node: FxNode) -> str:
    if isinstance(node.target, torch._ops.OpOverload):
        return str(node.target)
    for module, scope in _MODULES.items():
        name = getattr(node.target, "__name__", "")
        if getattr(scope, name, None) is node.target:
            return f"{module}.{name}"
    raise TypeError(f"a target of no known module: {node.target}")


def _data(value: Any, ctx: PassContext) -> Any:
    """An argument or a value as data; raises TypeError, or BuildError for a size of no batch."""
    match value:
        case None | bool() | int() | float() | str():
            return value
        case FxNode():
            return {"node": value.name}
        case torch.Tensor():
            sizes = [[expr_of(size, ctx.symbols) for size in part] for part in (value.shape, value.stride())]
            return {"tensor": [str(value.dtype).removeprefix("torch."), *sizes]}
        case torch.SymInt():
            return {"size": expr_of(value, ctx.symbols)}
        case torch.device():
            return {"device": str(value)}
        case tuple():
            return {"tuple": [_data(item, ctx) for item in value]}
        case list():
            return [_data(item, ctx) for item in value]
        case dict():
            return {"dict": {name: _data(item, ctx) for name, item in value.items()}}
        case _ if isinstance(value, _NAMED):
            return {"torch": str(value).removeprefix("torch.")}
        case _:
            raise TypeError(f"no data stands for a {type(value).__name__}")


def load(stored: StoredGraph, options: Options) -> tuple[FxGraph, PassContext]:
    """The graph, and a context of its own, ready for the next pass."""
    return _Loader(stored, options).load()


class _Loader:
    def __init__(self, stored: StoredGraph, options: Options) -> None:
        self.stored = stored
        self.graph = FxGraph()
        self.mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
        self.ctx = PassContext(
            options=options,
            params=dict(stored.params),
            constants={
                place: ConstantInfo(value.name, tensor_from_bytes(value, data))
                for place, (value, data) in stored.constants.items()
            },
            symbols={},
            cache_tensors=dict(stored.cache_tensors),
            caches=stored.caches,
            fake_mode=self.mode,
            scales=stored.scales,
            roundings=stored.roundings,
            wide=stored.wide,
        )
        self.nodes: dict[str, FxNode] = {}
        self.fakes: dict[bytes, torch.Tensor] = {}
        # the exporter's sizes by our names: those of the batch have an example, others are unknown to it
        self.sizes: dict[str, Any] = {name: self._batch_size(name) for name in _EXAMPLES}
        self.sizes |= {name: self.ctx.new_symbol(name) for name in stored.symbols if name not in self.sizes}

    def _batch_size(self, name: str) -> Any:
        context: Any = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC])
        fake: Any = self.mode.from_tensor(torch.empty(_EXAMPLES[name]), symbolic_context=context)
        self.ctx.symbols[str(fake.shape[0].node.expr)] = name
        return fake.shape[0]

    def load(self) -> tuple[FxGraph, PassContext]:
        for stored in self.stored.nodes:
            target: Any = _target(stored.target) if stored.op == "call_function" else stored.target
            args, kwargs = self._value(stored.args), self._value(stored.kwargs)
            node: Any = self.graph.create_node(stored.op, target, tuple(args), kwargs, name=stored.name)
            node.meta["val"] = self._value(stored.value)
            if stored.modules:
                node.meta["nn_module_stack"] = {str(depth): (path, "") for depth, path in enumerate(stored.modules)}
            self.nodes[stored.name] = node
        return self.graph, self.ctx

    def _value(self, data: Any) -> Any:
        """What `_data` made this of."""
        if isinstance(data, list):
            return [self._value(item) for item in data]
        if not isinstance(data, dict):
            return data
        ((kind, content),) = data.items()
        match kind:
            case "node":
                return self.nodes[content]
            case "tensor":
                return self._fake(content)
            case "size":
                return self._size(content)
            case "device":
                return torch.device(content)
            case "tuple":
                return tuple(self._value(item) for item in content)
            case "dict":
                return {name: self._value(item) for name, item in content.items()}
            case _:
                return getattr(torch, content)

    def _fake(self, content: list[Any]) -> torch.Tensor:
        """A fake tensor of this type, one for all values that have it."""
        key = msgspec.msgpack.encode(content)
        if key not in self.fakes:
            dtype, shape, strides = content
            with self.mode:
                sizes = [[self._size(expr) for expr in part] for part in (shape, strides)]
                self.fakes[key] = torch.empty_strided(*sizes, dtype=getattr(torch, dtype))
        return self.fakes[key]

    def _size(self, data: Any) -> Any:
        return self._evaluated(msgspec.convert(data, Expr))

    def _evaluated(self, expr: Expr) -> Any:
        if isinstance(expr, int):
            return expr
        if isinstance(expr, str):
            return self.sizes[expr]
        return functools.reduce(_OPERATIONS[expr.op], [self._evaluated(arg) for arg in expr.args])


def _target(name: str) -> Any:
    module, _, rest = name.partition(".")
    found: Any = _MODULES.get(module) or getattr(torch.ops, module)
    for part in rest.split("."):
        found = getattr(found, part)
    return found
