"""Snapshots of the pipeline: the graph before caches are planned, on disk, by the content of all that went in.

The key covers the config, the options that matter up to here, the passes and the sources of this package, and the
versions of torch and transformers. What is stored is data in the bundle's own language, with a digest; what does
not read back whole is a miss, never an error and never a wrong graph.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import torch
import transformers
import zstandard
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from precast.builder.capture.capture import Captured
from precast.builder.graph.constants import tensor_bytes, tensor_from_bytes
from precast.builder.graph.context import ConstantInfo, Options, ParamInfo, PassContext
from precast.builder.graph.fx_types import FxGraph, FxNode
from precast.builder.lower.lower import lower_flat
from precast.builder.pipeline import Pass
from precast.builder.source.source import Source
from precast.ir.errors import BuildError
from precast.ir.graph import symbols
from precast.ir.graph.schema import (
    Arg,
    Const,
    Dim,
    DtypeArg,
    Expr,
    Items,
    Node,
    Param,
    Ref,
    TensorType,
    Value,
    Wire,
)  # fmt: skip
from precast.ir.manifest import Checkpoint, ModelInfo, PassRecord

aten = torch.ops.aten
_MAGIC = b"precast-snapshot-1\n"


class _Constant(Wire, frozen=True):
    value: Value
    data: bytes


class _Snapshot(Wire, frozen=True):
    inputs: tuple[Value, ...]
    params: tuple[Param, ...]
    constants: tuple[_Constant, ...]
    nodes: tuple[tuple[Node, str | None], ...]
    outputs: dict[str, str]
    model: ModelInfo
    checkpoint: Checkpoint
    history: tuple[PassRecord, ...]


def key(source: Source, options: Options, passes: tuple[Pass, ...]) -> str:
    """The content key of the pipeline's state after `passes`: 64 hexadecimal digits."""
    config = source.config.to_dict()
    config.pop("_name_or_path", None)  # where it was read from
    parts = {
        "config": config,
        "architecture": type(source.config).__name__,
        "generation": source.generation_config(),
        "dtype": options.dtype,
        "max_seq_len": options.max_seq_len,
        "passes": [(step.name, step.version) for step in passes],
        "sources": _sources_digest(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


@cache
def _sources_digest() -> str:
    """The sources of this package and of those that it stands on."""
    total = hashlib.sha256()
    here = Path(__file__).parent
    for module in ("precast.ir", "precast.kernels"):
        folder = here.parent / module.rpartition(".")[2]
        for file in sorted(folder.rglob("*.py")):
            total.update(file.read_bytes())
    for file in sorted(here.rglob("*.py")):
        total.update(file.read_bytes())
    return total.hexdigest()


@dataclasses.dataclass(frozen=True)
class Store:
    """A directory of snapshots, one file a key."""

    path: Path

    def write(self, key: str, captured: Captured, history: tuple[PassRecord, ...]) -> bool:
        """Stores the state; False when the graph holds what a snapshot can't (several unknown sizes in one shape).

        Raises BuildError("write-failed") when the directory can't be written to.
        """
        flat = lower_flat(captured.graph, captured.ctx)
        if any(_unwritable(node) for node, _ in flat.nodes):
            return False
        by_name = {info.name: info.value for info in captured.ctx.constants.values()}
        content = msgspec.msgpack.encode(
            _Snapshot(
                inputs=flat.inputs,
                params=flat.params,
                constants=tuple(_Constant(value, tensor_bytes(by_name[value.name])) for value in flat.constants),
                nodes=flat.nodes,
                outputs=flat.outputs,
                model=captured.model,
                checkpoint=captured.checkpoint,
                history=history,
            )
        )
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            # In place: half of it is a miss by its digest, and a build that is killed here leaves nothing else.
            (self.path / key).write_bytes(_MAGIC + _digest(key, content) + zstandard.compress(content))
        except OSError as error:
            raise BuildError(
                "write-failed", f"the snapshot can't be written: {error.strerror}", where=str(self.path)
            ) from error
        return True

    def read(self, key: str, options: Options) -> tuple[Captured, tuple[PassRecord, ...]] | None:
        """The state of this key, ready for the next pass; None when there is none, or it is damaged."""
        try:
            raw = (self.path / key).read_bytes()
        except OSError:
            return None
        head = len(_MAGIC) + 64
        if raw[: len(_MAGIC)] != _MAGIC:
            return None
        try:
            content = zstandard.decompress(raw[head:])
        except zstandard.ZstdError:
            return None
        if _digest(key, content) != raw[len(_MAGIC) : head]:
            return None
        stored = msgspec.msgpack.decode(content, type=_Snapshot)
        return _Rebuilt(stored, options).captured(), stored.history


def _digest(key: str, content: bytes) -> bytes:
    """What ties a snapshot's content to its key: under another name it is another build's."""
    return hashlib.sha256(key.encode() + content).hexdigest().encode()


def _unwritable(node: Node) -> bool:
    """Whether the node's arguments need a symbolic size that the fake tensors of a rebuilt graph don't imply."""
    implied = {"aten.reshape.default": "shape", "aten.expand.default": "size"}.get(node.op)
    for name, arg in node.args.items():
        if isinstance(arg, Dim):
            return True
        if isinstance(arg, Items):
            unknown = sum(isinstance(item, Dim) for item in arg.items)
            if unknown > 1 or (unknown and name != implied):
                return True
    return False


class _Rebuilt:
    """An FX graph made from a snapshot, with fake values propagated anew."""

    def __init__(self, stored: _Snapshot, options: Options) -> None:
        self.stored = stored
        self.mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
        self.graph = FxGraph()
        self.nodes: dict[str, FxNode] = {}
        self.ctx = PassContext(options=options, params={}, constants={}, symbols={}, fake_mode=self.mode)
        self.sizes: dict[str, Any] = {"T": self._size("T", 7), "B": self._size("B", 4)}

    def captured(self) -> Captured:
        for value in self.stored.inputs:
            self._placeholder(value.name, value.name, value.type)
        for param in self.stored.params:
            node = self._placeholder("p_" + param.name.replace(".", "_"), param.name, param.type)
            self.ctx.params[node.name] = ParamInfo(param.name, param.recipe)
        for constant in self.stored.constants:
            value = constant.value
            node = self._placeholder("c_" + value.name.replace(".", "_"), value.name, value.type)
            self.ctx.constants[node.name] = ConstantInfo(value.name, tensor_from_bytes(value, constant.data))
        for stored, layer in self.stored.nodes:
            self._call(stored, layer)
        self.graph.output({name: self.nodes[value] for name, value in self.stored.outputs.items()})
        return Captured(self.graph, self.ctx, self.stored.model, self.stored.checkpoint)

    def _size(self, name: str, example: int) -> Any:
        context: Any = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC])
        size: Any = self.mode.from_tensor(torch.empty(example), symbolic_context=context).shape[0]
        self.ctx.symbols[str(size.node.expr)] = name
        return size

    def _placeholder(self, place: str, name: str, type: TensorType) -> FxNode:
        node = self.graph.placeholder(place)
        shape = [self._evaluate(size) for size in type.shape]
        node.meta["val"] = self.ctx.empty(shape, getattr(torch, type.dtype))
        self.nodes[name] = node
        return node

    def _evaluate(self, size: Expr) -> Any:
        if isinstance(size, int):
            return size
        return symbols.evaluate(size, self.sizes)

    def _call(self, node: Node, layer: str | None) -> None:
        target: Any = torch.ops
        for part in node.op.split(".") if node.op.startswith("aten.") else [*node.op.split("."), "default"]:
            target = getattr(target, part)
        args, kwargs = _as_called(target, {name: self._argument(arg) for name, arg in node.args.items()})
        call = self.graph.call_function(target, args, kwargs)
        if layer is not None:
            call.meta["nn_module_stack"] = {"layer": (layer, "")}
        call.meta["val"] = self.ctx.fake(target, call.args, call.kwargs)
        if len(node.outputs) == 1:
            self.nodes[node.outputs[0].name] = call
        else:
            for index, value in enumerate(node.outputs):
                self.nodes[value.name] = self.ctx.item(self.graph, call, index)

    def _argument(self, arg: Arg) -> Any:
        if isinstance(arg, Ref):
            return self.nodes[arg.name]
        if isinstance(arg, Const):
            return arg.value
        if isinstance(arg, DtypeArg):
            return getattr(torch, arg.dtype)
        if isinstance(arg, Items):
            return [-1 if isinstance(item, Dim) else self._argument(item) for item in arg.items]
        raise AssertionError("a snapshot holds no lone symbolic size")


def _as_called(target: Any, given: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments by name as the exporter spells a call: positional as far as something is given, then by keyword."""
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    positional = [arg for arg in target._schema.arguments if not arg.kwarg_only]
    last = max((index for index, arg in enumerate(positional) if arg.name in given), default=-1)
    for arg in positional[: last + 1]:
        args.append(given.get(arg.name, arg.default_value))
    kwargs.update({name: value for name, value in given.items() if name not in {arg.name for arg in positional}})
    return tuple(args), kwargs
