"""The launches of norms and gates that round what they compute to few bits. No torch and no triton here."""

from __future__ import annotations

from precast.ir.graph.symbols import ceildiv, mul
from precast.ir.ops.rows_rounded import INPUT_GROUP, has_powers_of_two, in_groups
from precast.kernels.blocks import num_warps, power_of_two
from precast.kernels.quantised_linear.launches import LONGEST_ROUNDED
from precast.kernels.records import Launch, Pointer, Stride
from precast.kernels.rows import known, overlaps, real, rows_of, tile_of
from precast.kernels.use import Use

_KERNELS = "precast.kernels.rounded.triton"
_BLOCK = 1024
_MOST_WARPS = 16
_MOST_BLOCKS, _RUN = 8, 8
"""Of a cluster that shares a row; and elements that a thread takes together."""


def rounded_norm(use: Use) -> tuple[Launch, ...]:
    """One launch for `rounded_rms_norm` and `rounded_residual_rms_norm`."""
    rows, tile, has_pdl = rows_of(use, "x"), tile_of(use, "x"), overlaps(use, "weight")
    has_residual, block = use.has("residual"), max(tile.block, INPUT_GROUP)
    at_once = max(tile.rows * tile.block // block, 1)
    return (
        Launch(
            f"{_KERNELS}:rounded_norm_kernel",
            grid=(ceildiv(rows.total, at_once),),
            args=(
                Pointer("out.0"),
                Pointer("out.1"),
                Pointer("out.2") if has_residual else None,
                Pointer("x"),
                Pointer("residual") if has_residual else None,
                Pointer("weight") if use.has("weight") else None,
                _input_scale(use),
                rows.total,
                rows.inner,
                real(use, "eps"),
                *rows.strides,
                *(rows_of(use, "residual").strides if has_residual else (0, 0, 0)),
                Stride("weight", 0) if use.has("weight") else 0,
            ),
            constants={
                "OFFSET": real(use, "offset"),
                "CAST_BEFORE_SCALE": bool(use.constant("cast_before_scale")),
                "WIDTH": tile.width,
                "ROWS": at_once,
                "BLOCK": block,
                **_rounding(use, block),
                "PDL": has_pdl,
            },
            num_warps=num_warps(at_once * block),
            pdl=has_pdl,
        ),
    )


def rounded_gate(use: Use) -> tuple[Launch, ...]:
    """One launch; where a row has one scale of its own, one program finds the largest of it."""
    rows, has_pdl = rows_of(use, "x"), use.target.capability >= (9, 0)
    width = known(use, "x", -1) // 2
    whole = max(power_of_two(width), INPUT_GROUP)
    block = whole if _has_scale_of_row(use) else min(whole, _BLOCK)
    return (
        Launch(
            f"{_KERNELS}:rounded_gate_kernel",
            grid=(mul(rows.total, -(-width // block)),),
            args=(Pointer("out.0"), Pointer("out.1"), Pointer("x"), _input_scale(use), rows.inner, *rows.strides),
            constants={
                "WIDTH": width,
                "BLOCK": block,
                "ACTIVATION": str(use.constant("kind")),
                **_rounding(use, block),
                "PDL": has_pdl,
            },
            num_warps=max(4, min(block // 1024, _MOST_WARPS)),
            pdl=has_pdl,
        ),
    )


def cluster_gate(use: Use, runs: int = 1, most_warps: int = 8) -> tuple[Launch, ...]:
    """One launch of `gate.cu`: a cluster for each row, of as many blocks as have so many times eight elements a thread,
    or eight."""
    rows, width = rows_of(use, "x"), known(use, "x", -1) // 2
    warps = min(most_warps, -(-width // (32 * _RUN * runs)))
    cluster = min(_MOST_BLOCKS, power_of_two(-(-width // (32 * _RUN * runs * warps))))
    return (
        Launch(
            "precast.kernels.rounded/gate.cu:rounded_gate",
            grid=(mul(cluster, rows.total),),
            args=(Pointer("out.0"), Pointer("out.1"), Pointer("x"), rows.inner, *rows.strides),
            constants={
                "FLOAT16": use.operands["x"].type.dtype == "float16", "GATE": str(use.constant("kind")), "WIDTH": width,
                "CLUSTER": cluster, "WARPS": warps,
            },
            block=32 * warps,
            shared_bytes=4 * cluster * warps,
            pdl=True,
        ),
    )  # fmt: skip


def gate_fits(use: Use) -> bool:
    """Whether one program can round a row of the result, where all of it has one scale."""
    return not _has_scale_of_row(use) or known(use, "x", -1) // 2 <= LONGEST_ROUNDED


def _input_scale(use: Use) -> Pointer | None:
    return Pointer("input_scale") if use.has("input_scale") else None


def _has_scale_of_row(use: Use) -> bool:
    return use.constant("activation") in ("fp8_token", "int8_token")


def _rounding(use: Use, block: int) -> dict[str, int | float | bool | str]:
    activation = str(use.constant("activation"))
    group = block if _has_scale_of_row(use) else INPUT_GROUP if in_groups(activation) else 0
    return {"KIND": activation.partition("_")[0], "GROUP": group, "POWERS_OF_TWO": has_powers_of_two(activation)}
