"""Short names for the parts of a graph that a test writes by hand."""

from __future__ import annotations

from precast.ir.graph.schema import Arg, Const, Dim, Dtype, Expr, Items, Node, TensorType, Value


def value(name: str, *shape: Expr, dtype: Dtype = "bfloat16") -> Value:
    """A value of this name, shape and dtype."""
    return Value(name, TensorType(dtype, shape))


def node(op: str, *outputs: Value, **args: Arg) -> Node:
    """A node whose arguments are given by name."""
    return Node(op, args, outputs)


def ints(*sizes: Expr) -> Items:
    """A list of integers as an argument: constants as `Const`, everything else as `Dim`."""
    return Items(tuple(Const(size) if isinstance(size, int) else Dim(size) for size in sizes))
