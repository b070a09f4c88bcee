"""Float8 weights times inputs that are rounded to float8, with 9 to 256 rows, on Hopper: which layers it takes, and its
launches. No torch, no triton here.

`float8_tiles.cu` describes it. The input is rounded first, if it isn't yet.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

from precast.ir.graph.schema import Dtype
from precast.ir.graph.symbols import numel
from precast.kernels.quantised_linear import float8, launches
from precast.kernels.records import Condition, Launch, Pointer, Record
from precast.kernels.use import Use

ROWS = (16, 32, 64, 128, 256)
"""Rows of the input at most: a record each."""
_FEW, _MOST_COLUMNS = 64, 128
"""With more rows than the first cuBLASLt is faster, but for two kinds of layers: with scales of rows, those whose tiles
fill the GPU (`_FULL`), up to the second; and with scales of blocks those whose tiles clusters share. The second is also
how many rows of the input a tile has at most."""
_FULL = 0.8
"""The least part of all multiprocessors that has a tile, on average over the turns in which tiles are taken. With 0.6
cuBLASLt was faster."""
_MOST_STEPS = 16
"""With more rows than `_FEW`, and scales of blocks, so many stages of a block at most: of more cuBLASLt is faster."""
_LEAST = 9
"""Of fewer rows it is the weight stream."""
_TILE, _INPUTS = 128, 128
"""Rows of the weight in a tile, and inputs of a stage."""
_FINISHED = 16
"""Columns of a tile that one block of a cluster finishes together."""
_THREADS, _MULTIPLYING = 384, 256
"""Threads of a block, and those of it that multiply."""
_SHARED_BYTES, _MOST_STAGES = 227 << 10, 12
"""Of a block: shared memory, and stages of which more didn't help."""
_NUM_SMS, _IN_CLUSTERS, _MOST_CLUSTER = 132, 96, 8
"""Multiprocessors of Hopper's GPUs, each of which has room for one block; blocks in clusters of three or more, which
must lie near each other: 40 clusters of three took longer than 40 of two, 32 didn't; and blocks of a cluster."""
_HALF: tuple[Dtype, ...] = ("bfloat16", "float16")


class Plan(NamedTuple):
    """Stages of the ring, blocks of a cluster, blocks, and the shared memory that one fills."""

    stages: int
    cluster: int
    grid: int
    shared_bytes: int


def plan_of(rows: int, outputs: int, inputs: int, *, in_blocks: bool) -> Plan:
    """The plan for so many of `ROWS`, of a layer with a multiple of 128 inputs."""
    columns = min(rows, _MOST_COLUMNS)
    tiles, steps = -(-outputs // _TILE) * (rows // columns), inputs // _INPUTS
    cluster = max(1, min(max(_IN_CLUSTERS // tiles, min(_NUM_SMS // tiles, 2)), _MOST_CLUSTER, steps))
    of_block = -(-tiles // _NUM_SMS)  # tiles: 1, but where clusters are of one block
    grid = cluster * -(-tiles // of_block)
    share = -(-columns // _FINISHED // cluster) * _FINISHED // 2  # sums of a thread
    beside = (cluster - 1) * share * 4 * _MULTIPLYING + 4 * _MULTIPLYING
    stage = (_TILE + columns) * _INPUTS + 16 + 4 * (columns + 1) * in_blocks
    stages = min((_SHARED_BYTES - beside) // stage, _MOST_STAGES, of_block * steps // cluster + 1)
    return Plan(stages, cluster, grid, beside + stages * stage)


def _plan(use: Use, most: int) -> Plan:
    sizes = launches.sizes_of(use)
    assert sizes is not None, "the record's conditions want sizes that are known"
    return plan_of(most, sizes.outputs, sizes.inputs, in_blocks=float8.scales_of(use) == "blocks")


def _launches(use: Use, most: int) -> tuple[Launch, ...]:
    sizes, plan, rows = launches.sizes_of(use), _plan(use, most), numel(use.shape("input")[:-1])
    assert sizes is not None, "the record's conditions want sizes that are known"
    kind, x_scales = launches.input_scales_of(use)
    product = Launch(
        "precast.kernels.quantised_linear/float8_tiles.cu:product_float8",
        grid=(plan.grid,),
        args=(
            Pointer("out.0"), launches.input_of(use), Pointer("weight"), Pointer("scales"), x_scales,
            Pointer("bias") if use.has("bias") else None, rows, sizes.outputs, sizes.inputs,
        ),
        constants={
            "FLOAT16": use.result.dtype == "float16", "COLUMNS": min(most, _MOST_COLUMNS), "STAGES": plan.stages,
            "CLUSTER": plan.cluster, "BLOCKS": kind == "steps", "ONE_SCALE": float8.has_one_scale(use),
            "ONE_X_SCALE": kind == "one", "BIAS": use.has("bias"),
        },
        block=_THREADS, shared_bytes=plan.shared_bytes, pdl=True,
    )  # fmt: skip
    return (product,) if launches.is_given(use) else (launches.rounding(use, launches.own_scales(use)), product)


def _fits(use: Use, most: int) -> bool:
    sizes, rows = launches.sizes_of(use), use.number("input", -2)
    return sizes is not None and sizes.inputs % _INPUTS == 0 and (rows is None or rows <= most)


def _shared_outputs(most: int) -> int:
    """Of layers whose tiles are so few that each is a cluster's."""
    return _NUM_SMS // 2 // -(-most // _MOST_COLUMNS) * _TILE


def _is_faster(use: Use, most: int) -> bool:
    """Than cuBLASLt, with more rows than `_FEW`."""
    sizes, kind = launches.sizes_of(use), float8.scales_of(use)
    if sizes is None:
        return False
    if kind == "blocks":
        is_short = sizes.inputs // _INPUTS <= _MOST_STEPS * _plan(use, most).cluster
        return sizes.outputs <= _shared_outputs(most) and is_short
    tiles = -(-sizes.outputs // _TILE)
    return kind == "rows" and most <= _MOST_COLUMNS and tiles >= _FULL * _NUM_SMS * -(-tiles // _NUM_SMS)


def _has_rows_of_tokens(use: Use) -> bool:
    shape = use.shape("input")
    rows = shape[-2] if len(shape) > 1 else None
    return (rows == "T" or isinstance(rows, int)) and all(size == 1 for size in shape[:-2])


def records() -> Iterator[Record]:
    """A record for each number of rows."""
    for least, most in zip((_LEAST, *(each + 1 for each in ROWS)), ROWS, strict=False):
        is_few = most <= _FEW
        yield Record(
            name=f"cuda.quantised_linear_of_float8_to_{most}", op="precast.quantised_linear", kind="cuda",
            devices=("cuda",), min_capability=(9, 0), max_capability=(9, 0), allocates=False,
            sizes={"T": (least, most)}, dtypes={
                **dict.fromkeys(("input", "bias"), _HALF), "weight": ("float8_e4m3fn",), "scales": ("float32",),
                "input_scale": ("float32",),
            },
            workspace=launches.rounded_bytes, runs=partial(_launches, most=most),
            takes=(
                Condition("a float8 weight and an input rounded to float8, with scales of all, of rows, or of 128 "
                          "inputs and of blocks of 128 x 128", lambda use: float8.scales_of(use) is not None),
                Condition("params in row-major order, and a bias of the result's type", float8.lies_ready),
                Condition("rows that are tokens, along one axis", _has_rows_of_tokens),
                Condition(f"at most {most} rows of a multiple of {_INPUTS} inputs", partial(_fits, most=most)),
                *(() if is_few else (
                    Condition(f"scales of blocks, at most {_shared_outputs(most)} outputs, and few inputs"
                              + ("; or scales of rows, and outputs whose tiles fill the GPU"
                                 if most <= _MOST_COLUMNS else ""),
                              partial(_is_faster, most=most)),
                )),
                Condition("Triton, which rounds",
                          lambda use: launches.is_given(use) or "triton" in use.target.kinds),
                Condition(f"rows of at most {launches.LONGEST_ROUNDED} inputs that have one scale", launches.is_short),
            ),
        )  # fmt: skip
