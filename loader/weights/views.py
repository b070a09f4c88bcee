"""Strided views of tensors, as integers: the arithmetic of narrow, select, transpose and view without any memory."""

from __future__ import annotations

from typing import NamedTuple, TypeVar

T = TypeVar("T")
Shape = tuple[int, ...]


class View(NamedTuple):
    """Element `i` of the view is element `offset + sum(i[d] * strides[d])` of what it looks at."""

    offset: int
    shape: Shape
    strides: Shape


def contiguous(shape: Shape, offset: int = 0) -> View:
    """The view of `shape` on as many elements in a row."""
    strides = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return View(offset, shape, tuple(reversed(strides)))


def narrow(view: View, dim: int, start: int, length: int) -> View:
    """Elements `start .. start + length` of dimension `dim`."""
    shape = (*view.shape[:dim], length, *view.shape[dim + 1 :])
    return View(view.offset + start * view.strides[dim], shape, view.strides)


def select(view: View, dim: int, index: int) -> View:
    """Element `index` of dimension `dim`, which is gone."""
    shape, strides = view.shape, view.strides
    offset = view.offset + index * strides[dim]
    return View(offset, (*shape[:dim], *shape[dim + 1 :]), (*strides[:dim], *strides[dim + 1 :]))


def repeated(view: View, dim: int, copies: int) -> View:
    """Each element of dimension `dim` so often in a row: a dimension of steps of 0 after it."""
    shape = (*view.shape[: dim + 1], copies, *view.shape[dim + 1 :])
    return View(view.offset, shape, (*view.strides[: dim + 1], 0, *view.strides[dim + 1 :]))


def divided(view: View, dim: int, size: int) -> View:
    """Dimension `dim`, a multiple of `size`, as two: how many times `size`, and `size`."""
    shape, strides = view.shape, view.strides
    steps = (*strides[:dim], strides[dim] * size, *strides[dim:])
    return View(view.offset, (*shape[:dim], shape[dim] // size, size, *shape[dim + 1 :]), steps)


def transpose(view: View, dim0: int, dim1: int) -> View:
    """Dimensions `dim0` and `dim1` exchanged."""
    return View(view.offset, swap(view.shape, dim0, dim1), swap(view.strides, dim0, dim1))


def swap(items: tuple[T, ...], i: int, j: int) -> tuple[T, ...]:
    """The tuple with entries `i` and `j` exchanged."""
    out = list(items)
    out[i], out[j] = out[j], out[i]
    return tuple(out)


def reshape(view: View, shape: Shape) -> View | None:
    """The view of the same elements, in row-major order, under another shape; None where no strides describe it.

    Neighbouring dimensions that lie one inside the other count as one, and each of these must be made of whole new
    dimensions. All sizes are at least 1.
    """
    merged = _merged(view)
    strides: list[int] = []
    sizes = list(reversed(shape))
    for count, step in reversed(merged):
        while count > 1 and sizes:
            size = sizes.pop(0)
            if count % size:
                return None
            strides.append(step)
            step *= size
            count //= size
        if count > 1:
            return None
    strides += [1] * len(sizes)
    return View(view.offset, shape, tuple(reversed(strides)))


def split(source: View, destination: View, size: int) -> list[tuple[int, View, View]] | None:
    """Both views cut at each `size` elements of what the source looks at: for each stretch of that size its number, the
    part of the source in it, counted from its beginning, and the same part of the destination.

    None where no dimension goes from stretch to stretch while the others stay in one.
    """
    dims = [dim for dim, count in enumerate(source.shape) if count > 1]
    outer = [dim for dim in dims if source.strides[dim] >= size]
    first, rest = divmod(source.offset, size)
    inner = sum((source.shape[dim] - 1) * source.strides[dim] for dim in dims if dim not in outer)
    if rest + inner >= size or len(outer) > 1 or any(source.strides[dim] % size for dim in outer):
        return None
    within = source._replace(offset=rest)
    if not outer:
        return [(first, within, destination)]
    (dim,) = outer
    step = source.strides[dim] // size
    return [(first + i * step, select(within, dim, 0), select(destination, dim, i)) for i in range(source.shape[dim])]


def _merged(view: View) -> list[tuple[int, int]]:
    """(count, step) of the dimensions after merging those that lie one inside the other, without those of size 1."""
    merged: list[tuple[int, int]] = []
    for size, stride in zip(view.shape, view.strides, strict=True):
        if size == 1:
            continue
        if merged and merged[-1][1] == stride * size:
            merged[-1] = (merged[-1][0] * size, stride)
        else:
            merged.append((size, stride))
    return merged
