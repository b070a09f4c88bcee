"""Runs launches, which records give as data, over torch's tensors.

`Launched` does it for a node of a graph, `as_function` for tensors alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import torch

from precast.ir.graph import symbols
from precast.ir.graph.infer import apply_shape_rule
from precast.ir.graph.schema import Apply, Arg, Const, Dtype, DtypeArg, Expr, Items, Node, Ref, Steps, TensorType, Value
from precast.ir.memory.liveness import Operand
from precast.ir.ops import table as ops
from precast.ir.ops.op import OpDef
from precast.kernels.calls import with_signature
from precast.kernels.dtypes import BY_NAME, NAMES
from precast.kernels.launch_key import forms, launch_key
from precast.kernels.named import named
from precast.kernels.native import Native
from precast.kernels.records import Launch, Pointer, Record, Stride
from precast.kernels.use import Target, Use

_Reader = Callable[[Mapping[str, Any], Sequence[int]], Any]
_Run = Callable[[Mapping[str, Any], Sequence[int]], None]
"""Runs a launch with a call's tensors, by the names that launches give them, and its `sizes`."""


class Launched:
    """The launches of one use, called with the op's arguments by name, `out`, and `sizes`.

    `sizes` are the values of `expressions`, which depend on the step. `workspace` are the bytes that are given to it.
    Kernels come from `native`, or are compiled.
    """

    def __init__(self, launches: Sequence[Launch], workspace: Expr = 0, native: Native | None = None) -> None:
        self._native = Native() if native is None else native
        given = (workspace, *(expr for launch in launches for expr in _expressions(launch)))
        self.expressions = tuple(dict.fromkeys(expr for expr in given if not isinstance(expr, int)))
        self._places: dict[Expr, int] = {expr: i for i, expr in enumerate(self.expressions)}
        self._num_bytes = _number(workspace, self._places)
        self._launches = launches
        names = [arg.tensor for launch in launches for arg in launch.args if isinstance(arg, Pointer)]
        self._first = next(name for name in names if name != "workspace")
        self._listed = {name.partition(".")[0] for name in names if "." in name} - {"out"}
        self._runs: dict[int, list[_Run]] = {}  # by the index of the GPU; -1 for the CPU

    def __call__(self, /, *, sizes: Sequence[int] = (), out: Any = (), **tensors: Any) -> None:
        """Launch all of them, on the current stream. `out`: the result, or a tuple of several."""
        if isinstance(out, torch.Tensor):
            tensors["out.0"] = out
        else:
            tensors |= _named("out", out)
        for name in self._listed:
            tensors |= _named(name, tensors[name])
        first = tensors[self._first]
        if num_bytes := self._num_bytes(sizes):
            tensors["workspace"] = torch.empty(num_bytes, dtype=torch.uint8, device=first.device)
        index = first.get_device()
        # A kernel runs on the current device, whatever device the tensors are on.
        if index >= 0 and index != torch.cuda.current_device():
            with torch.cuda.device(index):
                self._run(index, tensors, sizes)
        else:
            self._run(index, tensors, sizes)

    def _run(self, index: int, tensors: Mapping[str, Any], sizes: Sequence[int]) -> None:
        runs = self._runs.get(index)
        if runs is None:
            on = _On(index, self._native, {name: NAMES[each.dtype] for name, each in _by_name(tensors)})
            runs = self._runs[index] = [_run_of(launch, self._places, on) for launch in self._launches]
        for run in runs:
            run(tensors, sizes)


def _named(name: str, listed: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors of a list as launches name them."""
    return {f"{name}.{i}": each for i, each in enumerate(listed)}


def launched_of(record: Record, use: Use) -> Launched:
    """What a record launches for a use."""
    assert not isinstance(record.runs, str), f"{record.name} names a function"
    return Launched(record.runs(use), record.workspace(use), use.target.native)


def as_function(record: Record, native: Native | None = None) -> Callable[..., Any]:
    """The op over tensors, whose launches are made once for arguments of the same kind: for whoever has no node.

    It takes the op's arguments, and `out` where the op has results: None for new memory. Kernels come from `native`, or
    are compiled.
    """
    known: dict[Any, tuple[Sequence[Value], Launched]] = {}

    def run(arguments: dict[str, Any]) -> Any:
        out = arguments.pop("out", None)
        key = tuple((name, _key(value)) for name, value in arguments.items())
        if key not in known:
            use = use_of_tensors(record.op, record.op_versions[0], arguments)
            use = use._replace(target=use.target._replace(native=native))
            known[key] = use.node.outputs, launched_of(record, use)
        outputs, launched = known[key]
        if out is None:
            made = tuple(_empty(value.type, arguments) for value in outputs)
            out = made[0] if len(made) == 1 else made
        launched(sizes=[symbols.evaluate(expr, {}) for expr in launched.expressions], out=out, **arguments)
        return out if outputs else None

    definition = _definition(record.op, record.op_versions[0])
    return with_signature(definition, run, like=_with_results if definition.num_outputs else _without_results)


def _with_results(out: Any) -> Any:
    """Launched."""


def _without_results() -> None:
    """Launched."""


def _definition(op: str, version: int) -> OpDef:
    definition = ops.lookup(op, version)
    assert definition is not None, f"{op}@{version} is not in the op table"
    return definition


def use_of_tensors(op: str, version: int, arguments: Mapping[str, Any]) -> Use:
    """The use of an op that these arguments are, all sizes of which are known."""
    args = {name: _arg(name, value) for name, value in arguments.items() if value is not None}
    tensors = dict(_by_name(arguments))
    types = {name: TensorType(NAMES[each.dtype], tuple(each.shape)) for name, each in tensors.items()}
    results = apply_shape_rule(_definition(op, version), args, types)
    outputs = tuple(Value(f"out.{i}", kind) for i, kind in enumerate(results))
    operands = {name: Operand(kind, tensors[name].is_contiguous()) for name, kind in types.items()}
    on = next((x.device for x in tensors.values()), torch.device("cpu"))
    capability = torch.cuda.get_device_capability(on) if on.type == "cuda" else (9, 0)
    return Use(Node(op, args, outputs, version), operands, Target("cuda", capability))


def _key(value: Any) -> Any:
    """What launches depend on of an argument: the value, or the kind of a tensor and where it lies."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.shape, value.is_contiguous(), value.device
    if isinstance(value, Steps):
        return repr(value)
    return tuple(map(_key, value)) if isinstance(value, (list, tuple)) else value


def _arg(name: str, value: Any) -> Arg:
    if isinstance(value, torch.Tensor):
        return Ref(name)
    if isinstance(value, torch.dtype):
        return DtypeArg(NAMES[value])
    if isinstance(value, Steps):
        return value
    if isinstance(value, (list, tuple)):
        named = enumerate(value)
        return Items(tuple(Ref(f"{name}.{i}") if isinstance(each, torch.Tensor) else Const(each) for i, each in named))
    return Const(value)


def _empty(kind: TensorType, arguments: Mapping[str, Any]) -> torch.Tensor:
    device = next(iter(dict(_by_name(arguments)).values())).device
    return torch.empty([symbols.evaluate(size, {}) for size in kind.shape], dtype=BY_NAME[kind.dtype], device=device)


def _by_name(arguments: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors as launches name them."""
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor):
            yield name, value
        elif isinstance(value, (list, tuple)):
            yield from ((f"{name}.{i}", each) for i, each in enumerate(value) if isinstance(each, torch.Tensor))


def _expressions(launch: Launch) -> Iterator[Expr]:
    yield from launch.grid
    for arg in launch.args:
        if isinstance(arg, Pointer):
            yield arg.offset
        elif isinstance(arg, (int, str, Apply)):
            yield arg


def _number(expr: Expr, places: Mapping[Expr, int]) -> Callable[[Sequence[int]], int]:
    """What gives the expression's value, of the `sizes` of a call."""
    return (lambda sizes: expr) if isinstance(expr, int) else itemgetter(places[expr])


def _reader(arg: Pointer | Stride | Expr | float | None, places: Mapping[Expr, int]) -> _Reader:
    """What gives the argument of a launch, of a call's tensors and `sizes`."""
    if isinstance(arg, Pointer):
        name, offset = arg.tensor, _number(arg.offset, places)
        if arg.dtype is None:
            return (lambda tensors, sizes: tensors[name]) if arg.offset == 0 else _beginning_later(name, offset)
        dtype = BY_NAME[arg.dtype]
        return lambda tensors, sizes: tensors[name][offset(sizes) :].view(dtype)
    if isinstance(arg, Stride):
        name, axis = arg.tensor, arg.axis
        return lambda tensors, sizes: tensors[name].stride(axis)
    if arg is None or isinstance(arg, float):
        return lambda tensors, sizes: arg
    value = _number(arg, places)
    return lambda tensors, sizes: value(sizes)


def _beginning_later(name: str, offset: Callable[[Sequence[int]], int]) -> _Reader:
    """What gives a tensor's elements from a byte on, in the order of their addresses."""

    def read(tensors: Mapping[str, Any], sizes: Sequence[int]) -> torch.Tensor:
        tensor = tensors[name]
        return tensor.view(-1)[offset(sizes) // tensor.element_size() :]

    return read


class _On(NamedTuple):
    """Where launches run: the GPU's index, -1 for the CPU, the kernels at hand, and the element types of tensors."""

    device: int
    native: Native
    dtypes: Mapping[str, Dtype]


def _run_of(launch: Launch, places: Mapping[Expr, int], on: _On) -> _Run:
    """What runs the launch there."""
    readers = [_reader(arg, places) for arg in launch.args]

    def read_args(tensors: Mapping[str, Any], sizes: Sequence[int]) -> list[Any]:
        return [read(tensors, sizes) for read in readers]

    if on.device >= 0:
        from precast.kernels import gpu_launch

        known = () if launch.library else forms(launch, lambda pointer: pointer.dtype or on.dtypes[pointer.tensor])
        lookup = gpu_launch.Lookup(on.native, launch_key(launch, known))
        return gpu_launch.run_of(launch, places, read_args, on.device, lookup)
    grid = [_number(size, places) for size in launch.grid]
    options = {"num_warps": launch.num_warps, "num_stages": launch.num_stages}

    def interpret(tensors: Mapping[str, Any], sizes: Sequence[int]) -> None:
        blocks = tuple(size(sizes) for size in grid)
        if 0 not in blocks:
            named(launch.kernel)[blocks](*read_args(tensors, sizes), **launch.constants, **options)

    return interpret
