"""Runs launches, which records give as data, over torch's tensors.

`Launched` does it for a node of a graph, `as_function` for tensors alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import cache
from importlib import import_module
from typing import Any

import torch

from precast.ir.graph import symbols
from precast.ir.graph.infer import apply_shape_rule
from precast.ir.graph.schema import Apply, Arg, Const, DtypeArg, Expr, Items, Node, Ref, TensorType, Value
from precast.ir.memory.liveness import Operand
from precast.ir.ops import table as ops
from precast.ir.ops.op import OpDef
from precast.kernels.calls import with_signature
from precast.kernels.dtypes import BY_NAME, NAMES
from precast.kernels.records import Launch, Pointer, Record, Stride
from precast.kernels.use import Target, Use

Tensors = Mapping[str, torch.Tensor]


class Launched:
    """The launches of one use, called with the op's arguments by name, `out`, and `sizes`.

    `sizes` are the values of `expressions`, which depend on the step.
    """

    def __init__(self, record: Record, use: Use) -> None:
        assert not isinstance(record.runs, str), f"{record.name} names a function"
        self._launches = record.runs(use)
        self._workspace = record.workspace(use)
        given = (self._workspace, *(expr for launch in self._launches for expr in _expressions(launch)))
        self.expressions = tuple(dict.fromkeys(expr for expr in given if not isinstance(expr, int)))

    def __call__(self, /, *, sizes: Sequence[int] = (), out: Any = (), **arguments: Any) -> None:
        """Launch all of them, on the current stream. `out`: the result, or a tuple of several."""
        known = dict(zip(self.expressions, sizes, strict=True))

        def number(expr: Expr) -> int:
            return expr if isinstance(expr, int) else known[expr]

        tensors = dict(_by_name(arguments, out))
        first = next(iter(tensors.values()))
        num_bytes = number(self._workspace)
        if num_bytes:
            tensors["workspace"] = torch.empty(num_bytes, dtype=torch.uint8, device=first.device)
        # Triton launches on the current device, whatever device the tensors are on.
        with torch.cuda.device_of(first) if first.is_cuda else nullcontext():
            for launch in self._launches:
                grid = [number(size) for size in launch.grid]
                if 0 not in grid:
                    _run(launch, grid, [_argument(each, tensors, number) for each in launch.args])


def as_function(record: Record) -> Callable[..., Any]:
    """The op over tensors, whose launches are made anew in each call: for whoever has no node.

    It takes the op's arguments, and `out` where the op has results: None for new memory.
    """

    def run(arguments: dict[str, Any]) -> Any:
        out = arguments.pop("out", None)
        use = _use_of(record, arguments)
        made = tuple(_empty(value.type, arguments) for value in use.node.outputs)
        if out is None:
            out = made[0] if len(made) == 1 else made
        launched = Launched(record, use)
        launched(sizes=[symbols.evaluate(expr, {}) for expr in launched.expressions], out=out, **arguments)
        return out if made else None

    definition = _definition(record)
    return with_signature(definition, run, like=_with_results if definition.num_outputs else _without_results)


def _with_results(out: Any) -> Any:
    """Launched."""


def _without_results() -> None:
    """Launched."""


def _definition(record: Record) -> OpDef:
    definition = ops.lookup(record.op, record.op_versions[0])
    assert definition is not None, f"{record.op} is not in the op table"
    return definition


def _use_of(record: Record, arguments: Mapping[str, Any]) -> Use:
    """The use that these arguments are, all sizes of which are known."""
    args = {name: _arg(name, value) for name, value in arguments.items() if value is not None}
    tensors = dict(_by_name(arguments, ()))
    types = {name: TensorType(NAMES[each.dtype], tuple(each.shape)) for name, each in tensors.items()}
    results = apply_shape_rule(_definition(record), args, types)
    outputs = tuple(Value(f"out.{i}", kind) for i, kind in enumerate(results))
    operands = {name: Operand(kind, tensors[name].is_contiguous()) for name, kind in types.items() if name in args}
    on = next(iter(tensors.values())).device
    capability = torch.cuda.get_device_capability(on) if on.type == "cuda" else (9, 0)
    return Use(Node(record.op, args, outputs, record.op_versions[0]), operands, Target("cuda", capability))


def _arg(name: str, value: Any) -> Arg:
    if isinstance(value, torch.Tensor):
        return Ref(name)
    if isinstance(value, torch.dtype):
        return DtypeArg(NAMES[value])
    if isinstance(value, (list, tuple)):
        named = enumerate(value)
        return Items(tuple(Ref(f"{name}.{i}") if isinstance(each, torch.Tensor) else Const(each) for i, each in named))
    return Const(value)


def _empty(kind: TensorType, arguments: Mapping[str, Any]) -> torch.Tensor:
    device = next(iter(dict(_by_name(arguments, ())).values())).device
    return torch.empty([symbols.evaluate(size, {}) for size in kind.shape], dtype=BY_NAME[kind.dtype], device=device)


def _by_name(arguments: Mapping[str, Any], out: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors as launches name them."""
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor):
            yield name, value
        elif isinstance(value, (list, tuple)):
            yield from ((f"{name}.{i}", each) for i, each in enumerate(value) if isinstance(each, torch.Tensor))
    yield from ((f"out.{i}", each) for i, each in enumerate((out,) if isinstance(out, torch.Tensor) else out))


def _expressions(launch: Launch) -> Iterator[Expr]:
    yield from launch.grid
    for arg in launch.args:
        if isinstance(arg, Pointer):
            yield arg.offset
        elif isinstance(arg, (int, str, Apply)):
            yield arg


def _argument(arg: Pointer | Stride | Expr | float | None, tensors: Tensors, number: Callable[[Expr], int]) -> Any:
    if isinstance(arg, Pointer):
        tensor = tensors[arg.tensor]
        return tensor if arg.dtype is None else tensor[number(arg.offset) :].view(BY_NAME[arg.dtype])
    if isinstance(arg, Stride):
        return tensors[arg.tensor].stride(arg.axis)
    return arg if arg is None or isinstance(arg, float) else number(arg)


def _run(launch: Launch, grid: Sequence[int], args: Sequence[Any]) -> None:
    kernel = _triton_kernel(launch.kernel)
    options = {"launch_pdl": True} if launch.pdl else {}
    kernel[tuple(grid)](*args, **launch.constants, num_warps=launch.num_warps, num_stages=launch.num_stages, **options)


@cache
def _triton_kernel(named: str) -> Any:
    module, _, name = named.partition(":")
    return getattr(import_module(module), name)
