"""A tensor as rows: its last axis, along which a kernel goes, over all axes before it, which may lie anywhere.

Row `r` is `[r // inner, r % inner]` of the axes that are longer than 1; there are two of them at most.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from precast.ir.graph.schema import Dtype, Expr
from precast.ir.graph.symbols import numel
from precast.kernels.blocks import num_warps, power_of_two
from precast.kernels.records import Condition, Launches, Record, Stride, nothing
from precast.kernels.use import Use

COMPUTED: tuple[Dtype, ...] = ("float16", "bfloat16", "float32")
"""What the kernels over rows compute in float32."""

_LONGEST_ROW = 32768
"""Elements of a row that one program holds at most: 64 for each of 512 threads."""
_TILE = 1024
"""Elements of narrow rows that one program takes together."""


class Rows(NamedTuple):
    """How many rows there are, how many of them the inner axis has, and how far rows and elements are apart."""

    total: Expr
    inner: Expr
    strides: tuple[Stride | int, Stride | int, Stride]


class Tile(NamedTuple):
    """What one program holds: `rows` rows of `width` elements, in a `block` that is a power of two."""

    rows: int
    width: int
    block: int
    num_warps: int


def in_triton(
    op: str, runs: Launches, computed: tuple[str, ...], *takes: Condition, workspace: Callable[[Use], Expr] = nothing
) -> Record:
    """What computes an op by launches of Triton's kernels, with the arguments `computed` of a dtype of `COMPUTED`."""
    return Record(
        name=f"triton.{op.removeprefix('precast.')}", op=op, kind="triton", devices=("cuda",), min_capability=(8, 0),
        dtypes=dict.fromkeys(computed, COMPUTED), takes=takes, allocates=False, workspace=workspace, runs=runs,
    )  # fmt: skip


def rows_of(use: Use, name: str) -> Rows:
    """The rows of an argument, of `x`'s leading axes, for which `HAS_ROWS` or `HAS_SHORT_ROWS` holds."""
    sizes = use.shape(name)
    axes = _axes(sizes)
    inner = sizes[axes[1]] if len(axes) == 2 else 1
    outer_step = Stride(name, axes[0]) if axes else 0
    inner_step = Stride(name, axes[1]) if len(axes) == 2 else 0
    return Rows(numel(sizes[:-1]), inner, (outer_step, inner_step, Stride(name, len(sizes) - 1)))


def tile_of(use: Use, name: str) -> Tile:
    """Whole rows of an argument for which `HAS_SHORT_ROWS` holds: one wide row, or several narrow ones."""
    width = known(use, name, -1)
    block = power_of_two(width)
    rows = max(_TILE // block, 1)
    return Tile(rows, width, block, num_warps(rows * block))


def known(use: Use, name: str, axis: int) -> int:
    """A size of an argument that a record's conditions ask for."""
    size = use.number(name, axis)
    assert size is not None, f"{name}, axis {axis}: the record's conditions want a size that is known"
    return size


def real(use: Use, name: str) -> float:
    """The value of a literal argument; 0.0 where it isn't given."""
    value = use.constant(name)
    assert not isinstance(value, str), f"{name} is no number"
    return float(value or 0.0)


def _axes(sizes: tuple[Expr, ...]) -> list[int]:
    return [axis for axis, size in enumerate(sizes[:-1]) if size != 1]


def has_rows(use: Use, name: str) -> bool:
    """Whether `rows_of` can say how the rows of an argument lie, and their length is known."""
    return len(_axes(use.shape(name))) <= 2 and bool(use.number(name, -1))


HAS_ROWS = Condition(
    "x with at most two axes of more than one row, and a last one of known size", lambda use: has_rows(use, "x")
)
HAS_SHORT_ROWS = Condition(
    f"x with at most two axes of more than one row, and a last one of 1 to {_LONGEST_ROW} elements",
    lambda use: has_rows(use, "x") and known(use, "x", -1) <= _LONGEST_ROW,
)


def overlaps(use: Use, *early: str) -> bool:
    """Whether the launch may begin while the kernel in front still runs: `early` arguments are read by then.

    So no op of the step may make them.
    """
    made = [use.operands[name].is_activation for name in early if use.has(name)]
    return use.target.capability >= (9, 0) and not any(made)
