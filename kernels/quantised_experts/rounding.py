"""How the rows are rounded that experts in few bits multiply: the launches, and the memory for what they make. No torch
and no triton here.

`round_kernel` of `precast.kernels.quantised_linear.triton` rounds a row once, however many experts multiply it.
"""

from __future__ import annotations

from typing import NamedTuple

from precast.ir.graph.schema import Dtype, Expr
from precast.ir.graph.symbols import add, ceildiv, mul
from precast.ir.ops.rows_rounded import has_powers_of_two, in_groups
from precast.kernels.blocks import power_of_two
from precast.kernels.experts.launches import aligned, has_pdl
from precast.kernels.quantised_linear.launches import INPUT_GROUP, LONGEST_ROUNDED
from precast.kernels.records import Launch, Pointer, Stride
from precast.kernels.use import Use

_KERNEL = "precast.kernels.quantised_linear.triton:round_kernel"
_ROUNDED_AT_ONCE = 1024
"""Numbers of a row that a program rounds in groups; a row with one scale is one program's."""


class Rounded(NamedTuple):
    """Rows of few bits in a workspace, their scales, float32, and the end of both."""

    rows: Pointer
    scales: Pointer
    end: Expr


def rounding_of(use: Use) -> str:
    """The op's `rounding`."""
    return str(use.constant("rounding") or "none")


def is_short(use: Use, *widths: int) -> bool:
    """Whether one program can round a row of each of these widths, if rows are rounded."""
    return rounding_of(use) == "none" or max(widths) <= LONGEST_ROUNDED


def row_scales_of(use: Use) -> str:
    """The kernels' `ROW_SCALES`."""
    kind = rounding_of(use)
    return "none" if kind == "none" else "steps" if in_groups(kind) else "rows"


def rounded_at(use: Use, start: Expr, count: Expr, width: int, *, is_exact: bool) -> Rounded:
    """Where `count` rows of `width` numbers lie, from a byte on: as numbers of 8 bits if they are multiplied as such
    (`is_exact`), else in `x`'s dtype, which holds them."""
    narrow: Dtype = "int8" if rounding_of(use) == "int8_token" else "float8_e4m3fn"
    dtype = narrow if is_exact else use.operands["x"].type.dtype
    scales = add(start, aligned(mul(1 if is_exact else use.width("x"), count, width)))
    groups = -(-width // INPUT_GROUP) if in_groups(rounding_of(use)) else 1
    return Rounded(
        Pointer("workspace", dtype, start), Pointer("workspace", "float32", scales),
        add(scales, aligned(mul(4 * groups, count))),
    )  # fmt: skip


def rounding(
    use: Use, rounded: Rounded, rows: Pointer, count: Expr, width: int, steps: tuple[Stride | int, Stride | int]
) -> Launch:
    """The launch that rounds `count` rows, `steps` between two of them and between neighbours of one."""
    kind = rounding_of(use)
    if in_groups(kind):
        group, block = INPUT_GROUP, _ROUNDED_AT_ONCE
    else:
        group = block = power_of_two(max(width, INPUT_GROUP))
    return Launch(
        _KERNEL,
        (count, ceildiv(width, block)),
        # No scale is one of all, none of the weight's is written out for rows, and rows lie along one axis.
        (rounded.rows, rounded.scales, rows, None, None, None, 1, steps[0], 0, steps[1], width),
        {
            "KIND": kind.partition("_")[0], "GROUP": group, "POWERS_OF_TWO": has_powers_of_two(kind),
            "BY_GROUPS": False, "OUTPUTS": 0, "BLOCK": block, "PDL": has_pdl(use),
        },
        max(4, min(block // 1024, 16)),
        pdl=has_pdl(use),
    )  # fmt: skip
