"""`Use`: a node with the types of its tensors, on a target. Records are asked whether they take it, and what it holds.

No torch: `inspect` asks too.
"""

from __future__ import annotations

import re
from collections.abc import Container, Mapping, Sequence
from typing import Literal, NamedTuple

import msgspec

from precast.ir.graph import symbols
from precast.ir.graph.infer import flat, named_references
from precast.ir.graph.schema import Arg, Block, Call, Const, Dim, Dtype, Expr, Graph, Items, Node, Ref, TensorType
from precast.ir.graph.symbols import mul, numel
from precast.ir.graph.text import format_arg
from precast.ir.memory import caches
from precast.ir.memory.liveness import Operand
from precast.ir.memory.step_inputs import LOGIT_ROWS, TOKENS
from precast.ir.weights.tensorfile import element_bytes
from precast.kernels.measured import NOTHING, Table
from precast.kernels.native import Native

Kind = Literal["torch", "triton", "cuda", "library", "library 12.9", "view", "group"]
"""What an implementation needs to be installed: a library is cuBLASLt, of any version, or of 12.9 and later. A view
needs nothing: an address and strides are left of it. What a group of ranks computes, the group knows that a program is
given."""

LONGEST = "longest sequence"
"""The symbol for the tokens of the longest sequence of a step, those of its cache among them. No graph has it."""


class Target(NamedTuple):
    """Where a graph runs: the kind of device, a GPU's compute capability, over how many ranks, what can run, what was
    measured there, and which kernels are compiled already."""

    device: Literal["cpu", "cuda"]
    capability: tuple[int, int] = (0, 0)
    tp: int = 1
    kinds: frozenset[Kind] = frozenset(("torch", "triton", "cuda", "library", "library 12.9", "view", "group"))
    table: Table = NOTHING
    native: Native | None = None

    @classmethod
    def parse(cls, text: str) -> Target:
        """`cpu`, or `sm_90` for compute capability 9.0. Raises ValueError for anything else."""
        if text == "cpu":
            return cls("cpu")
        found = re.fullmatch(r"sm_(\d{1,2})(\d)", text)
        if found is None:
            raise ValueError(f"{text!r} is no target: expected cpu, or a compute capability such as sm_90 (H100, H200)")
        return cls("cuda", (int(found[1]), int(found[2])))

    @property
    def without_torch(self) -> Target:
        """The same where torch is not installed: what is left computes by launches, which are data."""
        return self._replace(kinds=self.kinds - {"torch"})

    @property
    def text(self) -> str:
        """The target as `parse` takes it."""
        return self.device if self.device == "cpu" else "sm_{}{}".format(*self.capability)


COUNTS = frozenset((TOKENS, LOGIT_ROWS))
"""Symbols that count what ranks can have more of together: tokens, and rows of logits."""
GPU = Target("cuda", (9, 0))
"""The GPU that is assumed where none is at hand."""


class Use(NamedTuple):
    """One use of an op: the node, its tensors by argument, those of lists as "tensors.0", and where it runs."""

    node: Node
    operands: Mapping[str, Operand]
    target: Target

    def shape(self, name: str) -> tuple[Expr, ...]:
        """The sizes of an argument."""
        return self.operands[name].type.shape

    def number(self, name: str, axis: int) -> int | None:
        """A size of an argument on one rank of the target's world; None where it depends on the step."""
        size = self.shape(name)[axis]
        if not isinstance(size, int):
            size = self._on_a_rank(size)
        return size if isinstance(size, int) else None

    def width(self, name: str) -> int:
        """Bytes of an element of an argument."""
        return width(self.operands[name])

    def has(self, name: str) -> bool:
        """Whether a tensor is given for an argument that may be none."""
        return name in self.operands

    def constant(self, name: str) -> bool | int | float | str | None:
        """The value of a literal argument; None where it isn't given."""
        arg = self.node.args.get(name)
        return arg.value if isinstance(arg, Const) else None

    def integers(self, name: str) -> tuple[int, ...] | None:
        """The values of an argument that is a list of integers, on one rank of the target's world; None where it isn't
        given, or one of them depends on the step."""
        given = self.node.args.get(name)
        if not isinstance(given, Items):
            return None
        found: list[int] = []
        for arg in given.items:
            size = self._on_a_rank(arg.expr) if isinstance(arg, Dim) else arg.value if isinstance(arg, Const) else None
            if not isinstance(size, int):
                return None
            found.append(size)
        return tuple(found)

    @property
    def dtype(self) -> Dtype | None:
        """The element type that names the use: its first result's, or its first tensor's where it has none."""
        kinds = [*(value.type for value in self.node.outputs), *(each.type for each in self.operands.values())]
        return kinds[0].dtype if kinds else None

    @property
    def text(self) -> str:
        """What the op is given and gives on one rank: types and literals. It is equal for equal work."""
        given = [
            f"{name}={self._type(self.operands[name].type) if name in self.operands else self._literal(arg)}"
            for name, arg in sorted(self.node.args.items())
        ]
        return f"{', '.join(given)} -> {', '.join(self._type(value.type) for value in self.node.outputs)}"

    def _type(self, kind: TensorType) -> str:
        return f"{kind.dtype}[{', '.join(symbols.text(self._on_a_rank(size)) for size in kind.shape)}]"

    def _literal(self, arg: Arg) -> str:
        """An argument without the names of tensors, which say nothing."""
        if isinstance(arg, Items):
            return f"[{', '.join(map(self._literal, arg.items))}]"
        if isinstance(arg, Dim):
            return symbols.text(self._on_a_rank(arg.expr))
        return "tensor" if isinstance(arg, Ref) else format_arg(arg)

    def _on_a_rank(self, size: Expr) -> Expr:
        """The size with the values of the target's world."""
        return symbols.substitute(size, {"tp": self.target.tp, "rank": 0})

    @property
    def result(self) -> TensorType:
        """The type of the first result."""
        return self.node.outputs[0].type


def of_one_rank(use: Use) -> tuple[Use, int]:
    """The use as it would be with one rank's tokens, and how many ranks' it has: all those of the target's world where
    every size that counts tokens `T`, or rows of logits `R`, is so many times these; else 1, and the use itself."""
    ranks = use.target.tp
    kinds = [*(each.type for each in use.operands.values()), *(value.type for value in use.node.outputs)]
    args = [arg.expr for _, arg in flat(use.node.args) if isinstance(arg, Dim)]
    counts = {size for size in (*(size for kind in kinds for size in kind.shape), *args)
              if not isinstance(size, int) and symbols.free_symbols(size) & COUNTS}  # fmt: skip
    of_all = {symbols.mul(ranks, symbol): symbol for symbol in COUNTS}
    if ranks == 1 or not counts or not counts <= of_all.keys():
        return use, 1

    def one(kind: TensorType) -> TensorType:
        return TensorType(kind.dtype, tuple(of_all.get(size, size) for size in kind.shape))

    operands = {name: each._replace(type=one(each.type)) for name, each in use.operands.items()}
    outputs = tuple(msgspec.structs.replace(value, type=one(value.type)) for value in use.node.outputs)
    renamed = {name: _of_one(arg, of_all) for name, arg in use.node.args.items()}
    return Use(msgspec.structs.replace(use.node, args=renamed, outputs=outputs), operands, use.target), ranks


def _of_one(arg: Arg, of_all: Mapping[Expr, Expr]) -> Arg:
    if isinstance(arg, Items):
        return Items(tuple(_of_one(item, of_all) for item in arg.items))  # type: ignore[misc]
    return Dim(of_all.get(arg.expr, arg.expr)) if isinstance(arg, Dim) else arg


def use_of(node: Node, types: Mapping[str, TensorType], target: Target, statics: Container[str] = frozenset()) -> Use:
    """The use that a node is, by its tensors' types and which are `statics`, as if all lay in row-major order."""
    refs = named_references(node.args)
    operands = {name: Operand(types[value], True, value not in statics) for name, value in refs}
    return Use(node, operands, target)


def uses_in(graph: Graph, target: Target) -> list[Use]:
    """The nodes of a graph, those of a block once."""
    found: list[Use] = []
    functions: list[Graph | Block] = [graph, *graph.blocks]
    for function in functions:
        types, statics = types_in(function), statics_in(function)
        nodes = function.main if isinstance(function, Graph) else function.nodes
        found += [use_of(node, types, target, statics) for node in nodes if isinstance(node, Node)]
    return found


def types_in(function: Graph | Block) -> dict[str, TensorType]:
    """The type of every name in `main` or in a block."""
    found: dict[str, TensorType] = {value.name: value.type for value in (*function.inputs, *function.params)}
    steps: Sequence[Node | Call]
    if isinstance(function, Graph):
        others, steps = (*function.constants, *caches.tensors(function.caches)), function.main
    else:
        others, steps = function.caches, function.nodes
    made = (value for step in steps for value in step.outputs)
    return found | {value.name: value.type for value in (*others, *made)}


def statics_in(function: Graph | Block) -> frozenset[str]:
    """The names in `main` or in a block of what no op makes or writes: params, and in `main` constants."""
    constants = function.constants if isinstance(function, Graph) else ()
    return frozenset(value.name for value in (*function.params, *constants))


def width(operand: Operand) -> int:
    """Bytes of an element."""
    return element_bytes(operand.type.dtype)


def wide(operand: Operand) -> int:
    """Bytes of an element in the type that ops compute in: float32, or float64 for float64."""
    return 8 if operand.type.dtype == "float64" else 4


def copied(operand: Operand) -> int:
    """Bytes of an element of the copy in that type; 0 where the tensor has it and no copy is made."""
    return wide(operand) if width(operand) < wide(operand) else 0


def numbers(operand: Operand) -> Expr:
    """How many elements the tensor has."""
    return numel(operand.type.shape)


def size(operand: Operand) -> Expr:
    """The tensor's bytes."""
    return mul(width(operand), numbers(operand))


def type_bytes(kind: TensorType) -> Expr:
    """The bytes of a tensor of this type."""
    return mul(element_bytes(kind.dtype), numel(kind.shape))
