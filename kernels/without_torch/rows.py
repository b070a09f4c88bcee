"""Ops along the last dimension, row by row: elements by their numbers, softmax, the largest ones."""

from __future__ import annotations

from precast.ir.graph.symbols import ceildiv
from precast.kernels.fused.launches import MAX_ROW, tile
from precast.kernels.records import Launch, Pointer
from precast.kernels.rows import COMPUTED, has_rows, known, rows_of
from precast.kernels.use import Use

_MOST = 64
"""Elements of a row that are looked for one after the other."""


def gather(use: Use) -> tuple[Launch, ...]:
    """`gather` along the last dimension, of rows that are all there in the index."""
    x, index, taken = rows_of(use, "self"), rows_of(use, "index"), use.shape("index")[-1]
    columns, rows = tile(taken, whole=False)
    has_pdl = use.target.capability >= (9, 0)
    return (
        Launch(
            "precast.kernels.without_torch.triton:gather_kernel",
            (ceildiv(index.total, rows), ceildiv(taken, columns)),
            (
                Pointer("self"), Pointer("index"), Pointer("out.0"), index.total, use.shape("self")[-1], taken,
                x.inner, index.inner, *x.strides, *index.strides,
            ),
            constants={"ROWS": rows, "COLUMNS": columns, "PDL": has_pdl},
            pdl=has_pdl,
        ),
    )  # fmt: skip


def softmax(use: Use) -> tuple[Launch, ...]:
    """`softmax` along the last dimension."""
    x, width = rows_of(use, "self"), known(use, "self", -1)
    columns, rows = tile(width, whole=True)
    has_pdl = use.target.capability >= (9, 0)
    return (
        Launch(
            "precast.kernels.without_torch.triton:softmax_kernel",
            (ceildiv(x.total, rows),),
            (Pointer("self"), Pointer("out.0"), x.total, width, x.inner, *x.strides),
            constants={"ROWS": rows, "COLUMNS": columns, "PDL": has_pdl},
            num_warps=max(4, min(16, rows * columns // 512)),
            pdl=has_pdl,
        ),
    )


def topk(use: Use) -> tuple[Launch, ...]:
    """`topk` along the last dimension."""
    x, width = rows_of(use, "self"), known(use, "self", -1)
    columns, rows = tile(width, whole=True)
    has_pdl = use.target.capability >= (9, 0)
    return (
        Launch(
            "precast.kernels.without_torch.triton:topk_kernel",
            (ceildiv(x.total, rows),),
            (Pointer("self"), Pointer("out.0"), Pointer("out.1"), x.total, width, x.inner, *x.strides),
            constants={"COUNT": _count(use), "ROWS": rows, "COLUMNS": columns, "PDL": has_pdl},
            num_warps=max(4, min(16, rows * columns // 512)),
            pdl=has_pdl,
        ),
    )


def has_few_of_rows(use: Use) -> bool:
    """Whether a `topk` is of few elements, along the last dimension, of rows that a program can hold."""
    is_wanted = use.constant("largest") is not False and 0 < _count(use) <= _MOST
    return is_wanted and has_rows_of_numbers(use)


def _count(use: Use) -> int:
    count = use.constant("k")
    return count if isinstance(count, int) else 0


def takes_all_rows(use: Use) -> bool:
    """Whether a gather is along the last dimension, and has each row of `self`."""
    is_even = use.shape("self")[:-1] == use.shape("index")[:-1]
    return is_even and _is_last(use) and has_rows(use, "self") and has_rows(use, "index")


def has_rows_of_numbers(use: Use) -> bool:
    """Whether an op is along the last dimension, of rows that a program can hold."""
    is_float = {use.result.dtype, use.operands["self"].type.dtype} <= set(COMPUTED)
    return is_float and _is_last(use) and has_rows(use, "self") and known(use, "self", -1) <= MAX_ROW


def _is_last(use: Use) -> bool:
    return use.constant("dim") in (None, -1, len(use.shape("self")) - 1)
