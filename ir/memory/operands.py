"""What a row of the workspace table is given: a node with the types of its tensors, and a few words about them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from precast.ir.graph.schema import Const, Expr, Node, TensorType
from precast.ir.graph.symbols import mul, numel
from precast.ir.weights.tensorfile import element_bytes

LONGEST = "longest sequence"
"""The symbol for the tokens of the longest sequence of a step, those of its cache among them. No graph has it."""


class Operand(NamedTuple):
    """A tensor that an op takes: its type, and whether its elements lie in row-major order without gaps."""

    type: TensorType
    is_contiguous: bool


class Use(NamedTuple):
    """One use of an op: the node, its tensors by argument, and the kind of device, "cpu" or "cuda"."""

    node: Node
    operands: Mapping[str, Operand]
    device: str

    def shape(self, name: str) -> tuple[Expr, ...]:
        """The sizes of an argument."""
        return self.operands[name].type.shape

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

    @property
    def result(self) -> TensorType:
        """The type of the first result."""
        return self.node.outputs[0].type


Row = Callable[[Use], Expr]
"""The bytes that an op holds beside its results at most."""


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
