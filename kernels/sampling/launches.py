"""The launches that draw a token for each row of logits without sorting: see `precast.kernels.sampling.triton`."""

from __future__ import annotations

from typing import NamedTuple

from precast.ir.graph.schema import Dtype, Expr
from precast.ir.graph.symbols import floordiv, maximum, minimum, mul, numel
from precast.kernels.records import Launch, Pointer, Stride
from precast.kernels.rows import known, overlaps
from precast.kernels.sampling import limits
from precast.kernels.use import Use


class _Workspace(NamedTuple):
    """The parts of the workspace in their order, int64 first: [R, n] by split, some by pass too."""

    sums: Pointer
    maxima: Pointer
    tops: Pointer
    least: Pointer
    places: Pointer
    scores: Pointer
    drawn: Pointer
    plan: Pointer
    limits: Pointer


def workspace(use: Use) -> Expr:
    """Bytes that the launches hold: lists of each row, whose sizes don't depend on the vocabulary's."""
    return mul(limits.row_bytes(), numel(use.shape("logits")[:-1]))


def sample(use: Use) -> tuple[Launch, ...]:
    """The launches of version 2 of the op: a scan, what it tells of each row, passes over the row, and the end."""
    rows = numel(use.shape("logits")[:-1])
    splits = minimum(limits.MAX_SPLITS, maximum(limits.MIN_SPLITS, floordiv(limits.PROGRAMS, maximum(rows, 1))))
    held, has_pdl = _divided(rows), overlaps(use)
    listed = held.maxima._replace(dtype="int64")
    line = (Pointer("logits"), Stride("logits", 0), Stride("logits", 1))
    asked = ("temperature", "top_k", "top_p", "min_p", "seeds", "steps")
    parameters: tuple[Pointer | Stride, ...] = (
        *(Pointer(name) for name in asked),
        *(Stride(name, 0) for name in asked),
    )
    scanned = (held.tops, held.least, held.places, held.maxima)
    passed = (held.sums, held.scores, held.drawn, held.plan, held.limits, listed)
    sizes = {"SIZE": known(use, "logits", -1), "SPLITS": limits.MAX_SPLITS, "PDL": has_pdl}
    grouped = {"OWN_GROUPS": limits.OWN_GROUPS}
    lists = {"CAPACITY": limits.CAPACITY, "KEYS": limits.MAX_SPLITS * limits.OWN_GROUPS // 2, "PASSES": limits.PASSES}
    scan = Launch(
        kernel="precast.kernels.sampling.triton:scan_kernel",
        grid=(rows, splits),
        args=(*line, *scanned, splits),
        constants={**sizes, **grouped, "BLOCK": limits.BLOCK},
        num_warps=limits.NUM_WARPS,
        pdl=has_pdl,
    )
    prepare = Launch(
        kernel="precast.kernels.sampling.triton:prepare_kernel",
        grid=(rows,),
        args=(Pointer("out.0"), *parameters, *scanned, held.plan, held.limits, splits),
        constants={**sizes, **grouped, "GROUPS": limits.GROUPS},
        num_warps=limits.NUM_WARPS,
        pdl=has_pdl,
    )
    passes = [
        Launch(
            kernel="precast.kernels.sampling.triton:pass_kernel",
            grid=(rows, splits),
            args=(*line, *passed, splits),
            constants={**sizes, **lists, "PASS": i, "BLOCK": limits.BLOCK},
            num_warps=limits.NUM_WARPS,
            pdl=has_pdl,
        )
        for i in range(limits.PASSES)
    ]
    finish = Launch(
        kernel="precast.kernels.sampling.triton:finish_kernel",
        grid=(rows,),
        args=(Pointer("out.0"), *line, *passed, splits),
        constants={**sizes, **lists, "SHORT": limits.SHORT, "BLOCK": limits.CAPACITY},
        num_warps=limits.NUM_WARPS,
        pdl=has_pdl,
    )
    return (scan, prepare, *passes, finish)


def _divided(rows: Expr) -> _Workspace:
    """One piece of memory, divided: `limits.row_bytes` for each row."""
    splits, passes = limits.MAX_SPLITS, limits.PASSES
    parts: list[tuple[Dtype, int]] = [
        ("int64", splits * passes), ("float32", splits * limits.OWN_GROUPS), ("float32", splits), ("float32", splits),
        ("int32", splits), ("float32", splits * passes), ("int32", splits * passes), ("int32", limits.PLAN),
        ("float32", limits.LIMITS),
    ]  # fmt: skip
    found, offset = [], 0
    for dtype, count in parts:
        found.append(Pointer("workspace", dtype, mul(offset, rows)))
        offset += count * (8 if dtype == "int64" else 4)
    assert offset == limits.row_bytes()
    return _Workspace(*found)
