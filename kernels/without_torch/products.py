"""Products of matrices, one or many side by side, with any strides."""

from __future__ import annotations

from precast.ir.graph.symbols import ceildiv, mul, numel
from precast.kernels.records import Launch, Pointer, Stride
from precast.kernels.use import Use

MAX_AXES = 2
"""Axes of matrices side by side whose size isn't 1."""
_TILE = 32


def matmul(use: Use) -> tuple[Launch, ...]:
    """`self` [..., M, K] times `other` [..., K, N]: a program for a tile of each product. Sums are in float32."""
    (rows, inner), columns = use.shape("self")[-2:], use.shape("other")[-1]
    batch, has_pdl = use.result.shape[:-2], use.target.capability >= (9, 0)
    axes = _axes(use)
    return (
        Launch(
            "precast.kernels.without_torch.triton:matmul_kernel",
            (mul(numel(batch), ceildiv(rows, _TILE)), ceildiv(columns, _TILE)),
            (
                Pointer("self"), Pointer("other"), Pointer("out.0"), rows, columns, inner,
                batch[axes[-1]] if axes else 1, *_steps(use, "self", axes), *_steps(use, "other", axes),
            ),
            constants={"ROWS": _TILE, "COLUMNS": _TILE, "INNER": _TILE, "PDL": has_pdl},
            pdl=has_pdl,
        ),
    )  # fmt: skip


def has_matrices(use: Use) -> bool:
    """Whether both arguments are matrices, on few axes."""
    return all(len(use.shape(name)) >= 2 for name in ("self", "other")) and len(_axes(use)) <= MAX_AXES


def _axes(use: Use) -> list[int]:
    """The axes of matrices, counted in the result, that have more than one."""
    return [axis for axis, size in enumerate(use.result.shape[:-2]) if size != 1]


def _steps(use: Use, name: str, axes: list[int]) -> list[Stride | int]:
    """Elements from one matrix to the next on two axes, and between its rows and columns; 0 where all have the same."""
    shape = use.shape(name)
    missing = len(use.result.shape) - len(shape)
    places = [axis - missing for axis in axes]
    found = [Stride(name, place) if place >= 0 and shape[place] != 1 else 0 for place in places]
    return [*[0] * (MAX_AXES - len(axes)), *found, Stride(name, len(shape) - 2), Stride(name, len(shape) - 1)]
