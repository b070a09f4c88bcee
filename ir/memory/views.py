"""Where the results of view ops lie: the layout within the memory of the first argument, and where it begins there."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from precast.ir.graph.schema import Arg, Const, Items, Node
from precast.ir.memory import strides
from precast.ir.memory.strides import Layout, Shape

Number = Callable[[Arg], int]
"""The value of an integer argument."""


class View(NamedTuple):
    """A layout, and how many elements behind the first one of the viewed tensor it begins."""

    layout: Layout
    offset: int = 0


def view_of(node: Node, layout: Layout, shape: Shape, number: Number) -> View | None:
    """Where the result of a node has its elements, of `shape`, if its first argument has this layout; None for an op
    whose result is new memory."""

    def numbers(name: str) -> list[int]:
        """Of an argument: one, or those of its list; none where it is left out."""
        arg = node.args.get(name, Items(()))
        return [number(item) for item in (arg.items if isinstance(arg, Items) else (arg,))]

    match node.op.removeprefix("aten."):
        case "reshape.default":
            found = strides.reshaped(layout, shape)
            return None if found is None else View(found)
        case "transpose.int":
            return View(strides.transposed(layout, *numbers("dim0"), *numbers("dim1")))
        case "permute.default":
            return View(strides.permuted(layout, numbers("dims")))
        case "unsqueeze.default":
            return View(strides.unsqueezed(layout, *numbers("dim")))
        case "squeeze.dim":
            return View(layout if len(shape) == len(layout.shape) else strides.without(layout, *numbers("dim")))
        case "select.int":
            (dim,) = numbers("dim")
            return View(strides.without(layout, dim), _begin(node, "index", layout, dim, number))
        case "expand.default":
            return View(strides.expanded(layout, shape))
        case "slice.Tensor":
            (dim,) = numbers("dim") or [0]
            found = strides.sliced(layout, shape, dim, *numbers("step"))
            return View(found, _begin(node, "start", layout, dim, number))
    return None


def _begin(node: Node, name: str, layout: Layout, dim: int, number: Number) -> int:
    """Elements in front of the index that an argument names; the last ones are counted from -1 down."""
    arg = node.args.get(name, Const(None))
    index = 0 if arg == Const(None) else number(arg)
    size = layout.shape[dim]
    return layout.strides[dim] * min(max(index + size if index < 0 else index, 0), size)
