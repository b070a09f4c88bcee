"""The launch that quantises a matrix while weights are read (`triton`). No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from types import MappingProxyType
from typing import Literal

from precast.ir.graph.schema import Dtype
from precast.ir.graph.symbols import ceildiv, mul
from precast.kernels.launch_key import forms, launch_key
from precast.kernels.records import Launch, Pointer

Part = Literal["values", "scales"]
Block = tuple[int, int]
"""Rows and columns that share a scale."""

PARTS: Mapping[Part, Dtype] = MappingProxyType({"values": "float8_e4m3fn", "scales": "float32"})
"""What is made of a matrix, and its element type."""
STORED: tuple[Dtype, ...] = ("bfloat16", "float16", "float32")
"""The element types of matrices that are quantised."""
_THREAD_VALUES = 32
"""Of a tile, for each thread."""


def quantising(part: Part, block: Block) -> Launch:
    """Of a matrix, whose sizes are known with its arguments: `quantising_arguments`."""
    rows, columns = _tile(block)
    return Launch(
        "precast.kernels.dequantise.triton:quantise_kernel",
        (mul(ceildiv("num_rows", "block_rows"), ceildiv("num_columns", "block_columns")),),
        (Pointer("x"), Pointer("out.0"), "num_rows", "num_columns", "block_rows", "block_columns"),
        constants={"IS_VALUES": part == "values", "ROWS": rows, "COLUMNS": columns},
        num_warps=max(1, rows * columns // (32 * _THREAD_VALUES)),
    )


@cache
def quantising_key(part: Part, block: Block, stored: Dtype) -> tuple[str, tuple[str, ...]]:
    """The key of its kernel for matrices of a type, and the forms of its arguments."""
    launch = quantising(part, block)
    known = forms(launch, lambda pointer: stored if pointer.tensor == "x" else PARTS[part])
    return launch_key(launch, known), known


def quantising_arguments(rows: int, columns: int, block: Block) -> tuple[tuple[int, int, int], tuple[int, ...]]:
    """The grid, and the integers after both addresses."""
    block = min(block[0], rows), min(block[1], columns)
    return (-(-rows // block[0]) * -(-columns // block[1]), 1, 1), (rows, columns, *block)


def _tile(block: Block) -> tuple[int, int]:
    """What a program goes over at a time: a square of blocks, or a part of a row or a column that has a scale."""
    if block[0] == 1:
        return 1, 1024
    return (1024, 1) if block[1] == 1 else (64, 128)
