"""Elements brought from where they lie to where they are wanted: one launch for each tensor that is copied.

A load copies so, too, what stands otherwise in a checkpoint than in memory (`rearranged`): of any sizes and steps, by
one kernel for each size of an element. AWQ's words become packed4's on the way (`repacked`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Literal

from precast.ir.graph.schema import Dtype, Expr, Items
from precast.ir.graph.symbols import add, ceildiv, mul, numel
from precast.ir.weights.tensorfile import element_bytes
from precast.kernels.fused.launches import tile
from precast.kernels.launch_key import forms, launch_key
from precast.kernels.records import Launch, Pointer, Stride
from precast.kernels.use import Use

MAX_AXES = 3
"""Axes before the last whose size isn't 1, for which the kernel has strides."""

REARRANGED: Mapping[int, Dtype] = MappingProxyType({1: "uint8", 2: "float16", 4: "int32"})
"""By the bytes of an element, as what a load copies it: of its bits nothing is changed."""
_ROWS, _COLUMNS, _MOST_BLOCKS = 32, 128, 65535
_SIZES = ("num_rows", "num_columns", "size_a", "size_b", "size_c")
REPACKED: tuple[Literal["values", "zeros", "groups"], ...] = ("values", "zeros", "groups")
"""The parts of AWQ's weights that a load repacks, each by a kernel of its own."""
_WORDS: Dtype = "int32"
_WORD_ROWS, _WORD_COLUMNS = 16, 32
_STEPS = tuple(f"{of}_{axis}" for of in ("x", "out") for axis in ("a", "b", "c", "column"))


def joined(use: Use) -> tuple[Launch, ...]:
    """`cat`: each tensor goes to its part of the result."""
    result, dim = use.result, use.constant("dim") or 0
    assert isinstance(dim, int)
    axis, steps = dim % len(result.shape), _row_major(result.shape)
    begin: Expr = 0
    found = []
    for name in _listed(use):
        at = mul(element_bytes(result.dtype), begin, steps[axis])
        found.append(_copy(use, name, Pointer("out.0", offset=at), steps))
        begin = add(begin, use.shape(name)[axis])
    return tuple(found)


def dense(use: Use) -> tuple[Launch, ...]:
    """The elements of `self` in row-major order without gaps."""
    return (_copy(use, "self", Pointer("out.0"), _row_major(use.shape("self"))),)


def rearranged() -> Launch:
    """A load's copy, whose sizes and steps are known with its arguments: `rearranged_arguments`."""
    return Launch(
        "precast.kernels.without_torch.triton:copy_kernel",
        (ceildiv("num_rows", _ROWS), ceildiv("num_columns", _COLUMNS)),
        (Pointer("x"), Pointer("out.0"), *_SIZES, *_STEPS),
        constants={"ROWS": _ROWS, "COLUMNS": _COLUMNS, "PDL": False},
    )


def rearranged_key(dtype: Dtype) -> tuple[str, tuple[str, ...]]:
    """The key of its kernel for elements of a type, and the forms of its arguments."""
    known = forms(rearranged(), lambda _: dtype)
    return launch_key(rearranged(), known), known


def rearranged_arguments(
    shape: Sequence[int], source: Sequence[int], out: Sequence[int]
) -> tuple[tuple[int, int, int], tuple[int, ...]] | None:
    """The grid, and the integers after both addresses, for elements of this shape in these steps; None for more axes or
    elements than the kernel takes."""
    *outer, columns = shape or (1,)
    missing = MAX_AXES - len(outer)
    grid = -(-math.prod(outer) // _ROWS), -(-columns // _COLUMNS), 1
    if missing < 0 or grid[1] > _MOST_BLOCKS:
        return None
    zeros = (0,) * missing
    sizes = (math.prod(outer), columns, *(1,) * missing, *outer)
    return grid, (*sizes, *zeros, *(source or (1,)), *zeros, *(out or (1,)))


def repacked(part: str) -> Launch:
    """A load's copy of words that become others, whose sizes and steps are `repacked_arguments`."""
    return Launch(
        "precast.kernels.without_torch.triton:repack_kernel",
        (ceildiv("num_rows", _WORD_ROWS), ceildiv("num_columns", _WORD_COLUMNS)),
        (
            Pointer("x"), Pointer("out.0"), "num_rows", "num_columns", "x_row", "x_word", "x_column", "out_row",
            "out_word", "out_column",
        ),
        constants={
            "EXCHANGED": part != "zeros", "IN_ORDER": part == "groups", "ROWS": _WORD_ROWS, "COLUMNS": _WORD_COLUMNS,
        },
    )  # fmt: skip


def repacked_key(part: str) -> tuple[str, tuple[str, ...]]:
    """As `rearranged_key`."""
    known = forms(repacked(part), lambda _: _WORDS)
    return launch_key(repacked(part), known), known


def repacked_arguments(
    part: str, shape: Sequence[int], source: Sequence[int], out: Sequence[int]
) -> tuple[tuple[int, int, int], tuple[int, ...]] | None:
    """As `rearranged_arguments`: of `zeros` for words [a, b], else for [a, 8, b], of which eight go together."""
    if part != "zeros":
        rows, _, columns = shape
        steps = (*source, *out)
    else:
        missing = 2 - len(shape)
        if missing < 0:
            return None
        rows, columns = (*(1,) * missing, *shape)
        (x_row, x_column), (out_row, out_column) = ((*(0,) * missing, *each) for each in (source, out))
        steps = (x_row, 0, x_column, out_row, 0, out_column)
    grid = -(-rows // _WORD_ROWS), -(-columns // _WORD_COLUMNS), 1
    return None if grid[1] > _MOST_BLOCKS else (grid, (rows, columns, *steps))


def has_few_axes(use: Use) -> bool:
    """Whether the kernel has as many axes as all tensors."""
    return all(sum(size != 1 for size in each.type.shape[:-1]) <= MAX_AXES for each in use.operands.values())


def _listed(use: Use) -> list[str]:
    items = use.node.args["tensors"]
    assert isinstance(items, Items)
    return [f"tensors.{i}" for i in range(len(items.items))]


def _copy(use: Use, name: str, into: Pointer, steps: Sequence[Expr]) -> Launch:
    """`steps`: elements from one index to the next in the result, by the axes of the tensor."""
    shape, has_pdl = use.shape(name), use.target.capability >= (9, 0)
    axes = [axis for axis, size in enumerate(shape[:-1]) if size != 1]
    missing, last = MAX_AXES - len(axes), len(shape) - 1
    num_columns = shape[-1] if shape else 1
    columns, rows = tile(num_columns, whole=False)
    num_rows = numel(shape[axis] for axis in axes)
    given = [Stride(name, axis) for axis in (*axes, *([last] if shape else []))]
    taken = [steps[axis] for axis in (*axes, *([last] if shape else []))]
    places = MAX_AXES + 1 - missing
    return Launch(
        "precast.kernels.without_torch.triton:copy_kernel",
        (ceildiv(num_rows, rows), ceildiv(num_columns, columns)),
        (
            Pointer(name), into, num_rows, num_columns, *[1] * missing, *(shape[axis] for axis in axes),
            *[0] * missing, *given, *[0] * (places - len(given)),
            *[0] * missing, *taken, *[0] * (places - len(taken)),
        ),
        constants={"ROWS": rows, "COLUMNS": columns, "PDL": has_pdl},
        num_warps=max(1, min(16, rows * columns // 256)),
        pdl=has_pdl,
    )  # fmt: skip


def _row_major(shape: Sequence[Expr]) -> list[Expr]:
    return [numel(shape[axis + 1 :]) for axis in range(len(shape))]
