"""What computes norms and gates whose results are rounded to few bits: Triton on GPUs, gates by token in CUDA C++ on
Hopper, else the definitions."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import msgspec

from precast.ir.graph.schema import Expr
from precast.ir.graph.symbols import add, mul, numel
from precast.kernels.gated_activation import records as gates
from precast.kernels.quantised_linear.launches import LONGEST_ROUNDED
from precast.kernels.records import Condition, Launches, Record, nothing, reference
from precast.kernels.rms_norm import records as norms
from precast.kernels.rounded import launches
from precast.kernels.rows import HAS_ROWS, HAS_SHORT_ROWS, in_triton
from precast.kernels.use import Use, width

_FLOAT8 = (8, 9)
"""The compute capability from which on there are instructions for it."""


def _has_float8(use: Use) -> bool:
    return use.target.capability >= _FLOAT8 or use.constant("activation") == "int8_token"


_GATE_FITS = Condition(f"rows of at most {LONGEST_ROUNDED} values that have one scale", launches.gate_fits)


def _triton(op: str, runs: Launches, *takes: Condition, computed: tuple[str, ...] = ("x",)) -> Record:
    has_float8 = Condition("compute capability 8.9 or higher for float8", _has_float8)
    return in_triton(f"precast.{op}", runs, computed, *takes, has_float8)


_BY_TOKEN = Condition(
    "rows that are rounded to float8 by token, of a multiple of 8 values",
    lambda use: use.constant("activation") == "fp8_token" and (use.number("x", -1) or 0) % 16 == 0,
)


def _rounding(use: Use) -> Expr:
    """The result before it is rounded, in its type and in float32, its magnitudes, quotients, and these bounded."""
    return mul(width(use.operands["x"]) + 4 * 5, numel(use.result.shape))


def _norm(use: Use) -> Expr:
    return add(norms.rms_norm_workspace(use), _rounding(use))


def _gate(use: Use) -> Expr:
    return add(gates.gated_activation_workspace(use), _rounding(use))


_WIDE = Record(
    name="cuda.rounded_gated_activation_of_wide_rows", op="precast.rounded_gated_activation", kind="cuda",
    devices=("cuda",), min_capability=(9, 0), max_capability=(9, 0), dtypes={"x": ("float16", "bfloat16")},
    allocates=False, takes=(HAS_ROWS, _BY_TOKEN), workspace=nothing, runs=launches.cluster_gate,
)  # fmt: skip
"""Rows too long for Triton's, in steps of any size."""


def _clusters() -> Iterator[Record]:
    """By clusters in steps of few tokens, which are faster than Triton's: of 512 rows of 14,336 by a twentieth, of
    4,096 no more. Fewer rows are shared by more blocks."""
    for (least, most), runs, warps in (((0, 64), 1, 8), ((65, 128), 2, 28), ((129, 512), 4, 8)):
        yield msgspec.structs.replace(
            _WIDE, name=f"cuda.rounded_gated_activation_to_{most}", sizes={"T": (least, most)},
            runs=partial(launches.cluster_gate, runs=runs, most_warps=warps),
        )  # fmt: skip


RECORDS = (
    _triton("rounded_rms_norm", launches.rounded_norm, HAS_SHORT_ROWS, computed=("x", "weight")),
    reference("precast.rounded_rms_norm", "rounded.rounded", _norm),
    _triton("rounded_residual_rms_norm", launches.rounded_norm, HAS_SHORT_ROWS, computed=("x", "weight")),
    reference("precast.rounded_residual_rms_norm", "rounded.rounded", _norm),
    *_clusters(),
    _triton("rounded_gated_activation", launches.rounded_gate, HAS_ROWS, _GATE_FITS),
    _WIDE,
    reference("precast.rounded_gated_activation", "rounded.rounded", _gate),
)
