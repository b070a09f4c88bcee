"""A tensor that is computed, of which a part is wanted, as one of fewer values: a rank reads no others.

Values that share a scale, or a word, are kept together, so what is computed may be a little more than what is wanted.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from precast.ir.graph import schema as ir
from precast.ir.weights.quantised import NVFP4_BLOCK, PACKED
from precast.loader.weights.views import Shape, View, contiguous

_PACKED = 8
"""Four-bit values in an int32."""


class _Extent(NamedTuple):
    """Elements `start .. end` of a dimension."""

    start: int
    end: int

    def whole(self, unit: int) -> _Extent:
        """The same in whole units."""
        return _Extent(self.start // unit * unit, -(-self.end // unit) * unit)

    def within(self, most: int) -> _Extent:
        return _Extent(self.start, min(self.end, most))

    def over(self, unit: int) -> _Extent:
        """The units that have these elements."""
        return _Extent(self.start // unit, -(-self.end // unit))


Computation = ir.Dequantise | ir.Quantise
"""What makes numbers of others while they are read."""


def narrowed(recipe: Computation, shape: Shape, shapes: dict[str, Shape], view: View) -> tuple[Computation, View]:
    """The recipe for the rows and columns that `view` looks at, of the result `shape`, and the view of its result.

    `shapes` are those of the recipe's parts by name. What is no part of a matrix, or all of it, is returned as it is.
    """
    found = _box(view, shape)
    if found is None or len(shape) < 2:
        return recipe, view
    extents, axes = found
    rows, columns = extents[-2:]
    made: Computation
    if isinstance(recipe, ir.Quantise):
        made, rows, columns = _at_load(recipe, shapes["of"], rows, columns)
    else:
        made, rows, columns = _CUTS[recipe.format](recipe, shapes, rows, columns)
    size = (*shape[:-2], rows.end - rows.start, columns.end - columns.start)
    if size == shape:
        return recipe, view
    steps = contiguous(size).strides
    starts = [extent.start for extent in extents[:-2]]
    starts += [extents[-2].start - rows.start, extents[-1].start - columns.start]
    offset = sum(start * step for start, step in zip(starts, steps, strict=True))
    return made, View(offset, view.shape, tuple(multiple * steps[axis] for axis, multiple in axes))


def _box(view: View, shape: Shape) -> tuple[list[_Extent], list[tuple[int, int]]] | None:
    """The least box of a contiguous tensor that has all that the view looks at, and along which of its dimensions each
    of the view's goes, in which steps. None where one goes along no dimension, or past its end.
    """
    steps = contiguous(shape).strides
    starts = [view.offset // step % size for size, step in zip(shape, steps, strict=True)]
    ends = [start + 1 for start in starts]
    axes = []
    for count, stride in zip(view.shape, view.strides, strict=True):
        axis = next((i for i, step in enumerate(steps) if shape[i] > 1 and step <= stride and stride % step == 0), None)
        if count > 1 and (axis is None or not stride):
            return None
        multiple = 0 if count == 1 or axis is None else stride // steps[axis]
        axes.append((axis or 0, multiple))
        ends[axis or 0] += multiple * (count - 1)
    if any(end > size for end, size in zip(ends, shape, strict=True)):
        return None
    return [_Extent(start, end) for start, end in zip(starts, ends, strict=True)], axes


_Cut = tuple[ir.Dequantise, _Extent, _Extent]


def _in_blocks(recipe: ir.Dequantise, shapes: dict[str, Shape], rows: _Extent, columns: _Extent) -> _Cut:
    assert recipe.block is not None
    wanted = []
    for extent, unit in zip((rows, columns), recipe.block, strict=True):
        blocks = extent.over(unit)
        # Blocks are counted from the first element; of one block any part has one scale.
        wanted.append(extent if blocks.end - blocks.start == 1 else _Extent(blocks.start * unit, extent.end))
    of, scales, zeros = recipe.of, recipe.scales, recipe.zeros
    for dim, extent, unit in zip((-2, -1), wanted, recipe.block, strict=True):
        of = _sliced(of, shapes["of"], dim, extent)
        scales = _sliced(scales, shapes["scales"], dim, extent.over(unit))
        zeros = None if zeros is None else _sliced(zeros, shapes["zeros"], dim, extent.over(unit))
    return msgspec.structs.replace(recipe, of=of, scales=scales, zeros=zeros), wanted[0], wanted[1]


def _at_load(recipe: ir.Quantise, of: Shape, rows: _Extent, columns: _Extent) -> tuple[ir.Quantise, _Extent, _Extent]:
    """Whole blocks: a scale depends on all that has it."""
    made, wanted = recipe.of, []
    for dim, extent, unit in zip((-2, -1), (rows, columns), recipe.block, strict=True):
        size = of[dim]
        blocks = extent if recipe.part == "scales" else extent.over(unit)
        taken = _Extent(blocks.start * unit, blocks.end * unit).within(size)
        made = _sliced(made, of, dim, taken)
        wanted.append(extent if recipe.part == "scales" else taken)
    return msgspec.structs.replace(recipe, of=made), wanted[0], wanted[1]


def _mxfp4(recipe: ir.Dequantise, shapes: dict[str, Shape], rows: _Extent, columns: _Extent) -> _Cut:
    unit = 2 * shapes["of"][-1]
    columns = columns.whole(unit)
    of = _sliced(_sliced(recipe.of, shapes["of"], -3, rows), shapes["of"], -2, columns.over(unit))
    scales = _sliced(_sliced(recipe.scales, shapes["scales"], -2, rows), shapes["scales"], -1, columns.over(unit))
    return msgspec.structs.replace(recipe, of=of, scales=scales), rows, columns


def _nvfp4(recipe: ir.Dequantise, shapes: dict[str, Shape], rows: _Extent, columns: _Extent) -> _Cut:
    columns = columns.whole(NVFP4_BLOCK)
    of = _sliced(_sliced(recipe.of, shapes["of"], -2, rows), shapes["of"], -1, columns.over(2))
    blocks = columns.over(NVFP4_BLOCK)
    scales = _sliced(_sliced(recipe.scales, shapes["scales"], -2, rows), shapes["scales"], -1, blocks)
    return msgspec.structs.replace(recipe, of=of, scales=scales), rows, columns


def _packed(recipe: ir.Dequantise, shapes: dict[str, Shape], rows: _Extent, columns: _Extent) -> _Cut:
    """Zeros are packed along the rows, values along the columns. With `groups`, any column may have any scale: those of
    all columns are kept.
    """
    each, (outputs, words), count = PACKED[recipe.format], shapes["of"], shapes["scales"][1]
    inputs = words * each
    scales, zeros, groups, kept = recipe.scales, recipe.zeros, recipe.groups, _Extent(0, count)
    if zeros is not None:
        rows = rows.whole(each).within(outputs)
        zeros = _sliced(zeros, shapes["zeros"], 0, rows.over(each))
    if groups is None and count > 1:
        size = inputs // count
        columns = columns.whole(math.lcm(each, size)).within(inputs)
        kept = columns.over(size)
    else:
        columns = columns.whole(each)
    if zeros is not None:
        zeros = _sliced(zeros, shapes["zeros"], 1, kept)

    def of_groups(part: ir.Recipe) -> ir.Recipe:
        return _sliced(_sliced(part, shapes["scales"], 0, rows), shapes["scales"], 1, kept)

    changes = {
        "of": _sliced(_sliced(recipe.of, shapes["of"], 0, rows), shapes["of"], 1, columns.over(each)),
        "scales": of_groups(scales),
        "biases": None if recipe.biases is None else of_groups(recipe.biases),
        "zeros": zeros,
        "groups": None if groups is None else _sliced(groups, shapes["groups"], 0, columns),
    }
    return msgspec.structs.replace(recipe, **changes), rows, columns


def _awq(recipe: ir.Dequantise, shapes: dict[str, Shape], rows: _Extent, columns: _Extent) -> _Cut:
    unit = math.ceil(shapes["of"][0] / shapes["scales"][0])
    rows, columns = rows.whole(unit).within(shapes["of"][0]), columns.whole(_PACKED)
    of = _sliced(_sliced(recipe.of, shapes["of"], 0, rows), shapes["of"], 1, columns.over(_PACKED))
    scales = _sliced(_sliced(recipe.scales, shapes["scales"], 0, rows.over(unit)), shapes["scales"], 1, columns)
    assert recipe.zeros is not None
    zeros = _sliced(
        _sliced(recipe.zeros, shapes["zeros"], 0, rows.over(unit)), shapes["zeros"], 1, columns.over(_PACKED)
    )
    return msgspec.structs.replace(recipe, of=of, scales=scales, zeros=zeros), rows, columns


def _gptq(recipe: ir.Dequantise, shapes: dict[str, Shape], rows: _Extent, columns: _Extent) -> _Cut:
    """With `groups`, any row may have any scale: those of all rows are kept."""
    count, inputs, kept = shapes["scales"][0], shapes["of"][0] * _PACKED, _Extent(0, shapes["scales"][0])
    columns = columns.whole(_PACKED)
    if recipe.groups is None and count > 1:
        size = inputs // count
        rows = rows.whole(math.lcm(_PACKED, size)).within(inputs)
        kept = rows.over(size)
    else:
        rows = rows.whole(_PACKED)
    assert recipe.zeros is not None
    scales = _sliced(recipe.scales, shapes["scales"], 0, kept)
    zeros = _sliced(recipe.zeros, shapes["zeros"], 0, kept)
    changes = {
        "of": _sliced(_sliced(recipe.of, shapes["of"], 0, rows.over(_PACKED)), shapes["of"], 1, columns),
        "scales": _sliced(scales, shapes["scales"], 1, columns),
        "zeros": _sliced(zeros, shapes["zeros"], 1, columns.over(_PACKED)),
        "groups": None if recipe.groups is None else _sliced(recipe.groups, shapes["groups"], 0, rows),
    }
    return msgspec.structs.replace(recipe, **changes), rows, columns


_CUTS: dict[str, Callable[[ir.Dequantise, dict[str, Shape], _Extent, _Extent], _Cut]] = {
    "fp8": _in_blocks,
    "mxfp4": _mxfp4,
    "awq": _awq,
    "gptq": _gptq,
    "nvfp4": _nvfp4,
    "nvfp4_divided": _nvfp4,
    "packed4": _packed,
    "packed8": _packed,
    "int8": _in_blocks,
}


def _sliced(recipe: ir.Recipe, shape: Shape, dim: int, extent: _Extent) -> ir.Recipe:
    """The recipe, or these elements of its dimension `dim`, which has `shape[dim]`."""
    if (extent.start, extent.end) == (0, shape[dim]):
        return recipe
    return ir.Slice(recipe, dim % len(shape), extent.start, extent.end - extent.start)
