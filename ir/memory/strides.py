"""Where the elements of a tensor lie in its memory: which results are views of an argument, and which are copies.

Sizes here are plain numbers. The rules are PyTorch's, for the ops of the op table that may give a view.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

Shape = tuple[int, ...]


class Layout(NamedTuple):
    """A tensor's sizes, and for each of its dimensions how many elements of memory one step is."""

    shape: Shape
    strides: Shape

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements lie in row-major order without gaps."""
        expected = contiguous(self.shape).strides
        return 0 in self.shape or all(
            size == 1 or stride == wanted
            for size, stride, wanted in zip(self.shape, self.strides, expected, strict=True)
        )


def contiguous(shape: Sequence[int]) -> Layout:
    """The layout of new memory in row-major order."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return Layout(tuple(shape), tuple(reversed(strides)))


def like(layout: Layout) -> Layout:
    """The layout of new memory that keeps the order of `layout`'s dimensions, as elementwise ops give it."""
    order = sorted(range(len(layout.shape)), key=lambda dim: -layout.strides[dim])
    dense = contiguous([layout.shape[dim] for dim in order])
    strides = dict(zip(order, dense.strides, strict=True))
    return Layout(layout.shape, tuple(strides[dim] for dim in range(len(order))))


def made_by(op: str, shape: Shape, alike: Iterable[Layout]) -> Layout:
    """The layout of the new memory that an op gives. `alike` are those of its arguments with the result's `shape`."""
    # Elementwise: dimensions are ordered as those of the first such argument.
    is_elementwise = op.startswith("aten.") and not op.startswith(_ROW_MAJOR)
    return next(map(like, alike), contiguous(shape)) if is_elementwise else contiguous(shape)


_ROW_MAJOR = ("aten.linear", "aten.addmm", "aten.matmul", "aten.cat", "aten.one_hot")
"""Ops whose results lie in row-major order, whatever the order of their arguments' dimensions."""


def permuted(layout: Layout, dims: Sequence[int]) -> Layout:
    """`permute`."""
    return Layout(tuple(layout.shape[dim] for dim in dims), tuple(layout.strides[dim] for dim in dims))


def transposed(layout: Layout, dim0: int, dim1: int) -> Layout:
    """`transpose`."""
    dims = list(range(len(layout.shape)))
    dims[dim0], dims[dim1] = dims[dim1], dims[dim0]
    return permuted(layout, dims)


def unsqueezed(layout: Layout, dim: int) -> Layout:
    """`unsqueeze`."""
    at = dim if dim >= 0 else dim + len(layout.shape) + 1
    step = layout.shape[at] * layout.strides[at] if at < len(layout.shape) else 1
    return Layout((*layout.shape[:at], 1, *layout.shape[at:]), (*layout.strides[:at], step, *layout.strides[at:]))


def without(layout: Layout, dim: int) -> Layout:
    """`select`, and `squeeze` of a dimension of size 1."""
    at = dim % len(layout.shape)
    return Layout((*layout.shape[:at], *layout.shape[at + 1 :]), (*layout.strides[:at], *layout.strides[at + 1 :]))


def sliced(layout: Layout, shape: Sequence[int], dim: int, step: int = 1) -> Layout:
    """`slice` to `shape`."""
    at = dim % len(layout.shape)
    strides = list(layout.strides)
    strides[at] *= step
    return Layout(tuple(shape), tuple(strides))


def expanded(layout: Layout, shape: Sequence[int]) -> Layout:
    """`expand` to `shape`."""
    new = len(shape) - len(layout.shape)
    strides = [0] * new
    for size, wanted, stride in zip(layout.shape, shape[new:], layout.strides, strict=True):
        strides.append(stride if size == wanted else 0)
    return Layout(tuple(shape), tuple(strides))


def reshaped(layout: Layout, shape: Sequence[int]) -> Layout | None:
    """`reshape` to `shape` as a view; None where it copies."""
    if math.prod(shape) == 0 or not layout.shape:
        return contiguous(shape)
    strides, new = [0] * len(shape), len(shape) - 1
    base, elements, viewed = layout.strides[-1], 1, 1
    for dim in reversed(range(len(layout.shape))):
        elements *= layout.shape[dim]
        joins = dim > 0 and (layout.shape[dim - 1] == 1 or layout.strides[dim - 1] == elements * base)
        if joins:
            continue
        while new >= 0 and (viewed < elements or shape[new] == 1):
            strides[new] = viewed * base
            viewed *= shape[new]
            new -= 1
        if viewed != elements:
            return None
        if dim > 0:
            base, elements, viewed = layout.strides[dim - 1], 1, 1
    return Layout(tuple(shape), tuple(strides)) if new == -1 else None
