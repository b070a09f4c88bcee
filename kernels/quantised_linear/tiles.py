"""Weights in few bits with 9 to 256 rows, on Hopper: which layers it takes, and its launches. No torch, no triton here.

`tiles.cu` describes it. The input is laid in another order first, and parts of tiles that several blocks have computed
are added up last.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

from precast.ir.graph.schema import Dtype, Expr
from precast.ir.graph.symbols import ceildiv, mul, numel
from precast.kernels.few_bits_tiles import E4M3, E8M0, ELEMENT, FLOAT16, FLOAT32, FORMATS, MIDDLE, MOST_TAKEN
from precast.kernels.quantised_linear import launches
from precast.kernels.records import Condition, Launch, Pointer, Record
from precast.kernels.use import Use

ROWS = (16, 32, 64, 128, 256)
"""Rows of the input at most: a record each."""
_LEAST = 9
"""Of fewer rows it is the weight stream."""
_TILE, _WINDOW, _PRODUCTS = 128, 128, 8
"""Rows of the weight in a tile, inputs of a window, and products over 16 inputs in one."""
_THREADS, _MULTIPLYING, _LAYING = 384, 256, 256
"""Threads of a block, those of it that multiply, and those of one that lays the input."""
_ADDED_AT_ONCE = 32
"""Rows of which the last block that has a part of a tile adds up all parts; of more a kernel does."""
_NUM_SMS, _SHARED_BYTES, _HEAD_BYTES = 132, (227 << 10, 113 << 10), 640
"""Shared memory: of a block that has a multiprocessor to itself, and of one of two."""
_MOST_STAGES = 16
_X_STAGES = {16: 8, 32: 6, 64: 4, 128: 3, 256: 3}
"""Stages of the input at least that a block holds, by columns; the weight gets what is left, and they the rest."""
_MOST_IN_STEPS = 128
"""Rows of which a thread has room for the sums of a window beside those of the tile."""
_HALF: tuple[Dtype, ...] = ("bfloat16", "float16")


class _Lies(NamedTuple):
    """A layer as the kernel takes it. `rows`: those of the weight that have the same scales. `in_steps`: sums are
    multiplied by scales, window by window."""

    kind: str
    bits: int
    scale: int
    group: int | None
    rows: int
    in_steps: bool
    offset: int


def _lies(use: Use) -> _Lies | None:
    """None if the kernel can't take it."""
    format, sizes = str(use.constant("format")), launches.sizes_of(use)
    if format not in FORMATS or sizes is None or use.has("groups") or sizes.inputs % _WINDOW:
        return None
    kind, bits = FORMATS[format]
    scales, offset = use.operands["scales"].type.dtype, use.constant("zero_offset") or 0
    if use.has("zeros") and format not in ("packed4", "packed8"):
        return None
    if use.has("global_scale") and use.operands["global_scale"].type.dtype != "float32":
        return None
    if not isinstance(offset, int) or (bits == 4 and not 0 <= offset <= MOST_TAKEN):
        return None
    if format == "packed8" and offset not in ((0, 1) if use.has("zeros") else (MIDDLE,)):
        return None
    if kind == "FP4":
        return _Lies(kind, bits, E8M0 if format == "mxfp4" else E4M3, sizes.group, 1, False, 0)
    if scales not in ("float32", "float16", use.dtype):
        return None
    stored = ELEMENT if scales == use.dtype else FLOAT32 if scales == "float32" else FLOAT16
    group = sizes.group if sizes.num_groups > 1 or use.has("zeros") else None
    in_steps = group is not None and stored != ELEMENT
    least = _WINDOW if in_steps or (bits == 8 and use.has("zeros")) else 32 if bits == 4 else 16
    if group is not None and (sizes.inputs % group or group % least):
        return None
    return _Lies(kind, bits, stored, group, sizes.rows, in_steps, offset)


class Plan(NamedTuple):
    """Rows of the input in a tile; `windows` of a stage of the weight, blocks that are on a multiprocessor at once,
    stages of the weight and of the input in shared memory, tiles, blocks, and the shared memory that one fills."""

    columns: int
    windows: int
    at_once: int
    w_stages: int
    x_stages: int
    tiles: int
    grid: int
    shared_bytes: int

    @property
    def part_bytes(self) -> int:
        """Of the sums of a tile."""
        return 4 * _TILE * self.columns


def plan_of(
    rows: int, outputs: int, inputs: int, bits: int, *, in_steps: bool = False, blocks: int | None = None
) -> Plan:
    """The plan for up to so many of `ROWS`, of a layer with a multiple of 128 inputs, over as many blocks at most, or
    as a GPU has room for."""
    columns = min(rows, _MOST_IN_STEPS) if in_steps else rows
    # Of four bits what a block does for each value takes longer than to read it: a second block helps. With more rows
    # that is lost again, as twice as many write parts of tiles, which are larger.
    at_once = 2 if bits == 4 and columns == ROWS[0] else 1
    blocks = at_once * _NUM_SMS if blocks is None else blocks
    windows = next(each for each in (16 // bits, 8 // bits, 1) if inputs // _WINDOW % each == 0)
    row = windows * _WINDOW * bits // 8
    w_stage = _TILE * (row + 64 if row % 256 == 0 else row)
    x_stage = 32 * columns * (_PRODUCTS if columns <= 128 else _PRODUCTS // 2)
    room = _SHARED_BYTES[at_once - 1] - _HEAD_BYTES
    tiles = -(-outputs // _TILE) * (rows // columns)
    units = tiles * (inputs // (_WINDOW * windows))
    w_stages = min((room - _X_STAGES[columns] * x_stage) // w_stage, _MOST_STAGES, max(units // blocks + 1, 2))
    x_stages = min((room - w_stages * w_stage) // x_stage, _MOST_STAGES)
    used = _HEAD_BYTES + w_stages * w_stage + x_stages * x_stage
    return Plan(columns, windows, at_once, w_stages, x_stages, tiles, min(blocks, units), used)


def _is_static(use: Use) -> bool:
    """The weight and what belongs to it are read before the kernels in front have ended."""
    names = ("weight", "scales", "zeros", "global_scale", "bias")
    given = [use.operands[name] for name in names if use.has(name)]
    return all(each.is_contiguous and not each.is_activation for each in given)


def _has_plain_rows(use: Use) -> bool:
    """Rows of the input that are tokens, side by side, and not rounded."""
    shape = use.shape("input")
    rows = shape[-2] if len(shape) > 1 else None
    counts = (rows == "T" or isinstance(rows, int)) and all(size == 1 for size in shape[:-2])
    return counts and use.operands["input"].is_contiguous and use.constant("activation") in (None, "none")


def _fits(use: Use, most: int) -> bool:
    rows = use.number("input", -2)
    return rows is None or rows <= most


def _image_bytes(use: Use, most: int) -> int:
    return -(-2 * most * _inputs(use) // 256) * 256


def _parts_bytes(plan: Plan) -> int:
    """Of each block's first tile and of its last."""
    return 2 * plan.grid * plan.part_bytes


def _inputs(use: Use) -> int:
    sizes = launches.sizes_of(use)
    assert sizes is not None
    return sizes.inputs


def _plan(use: Use, most: int) -> Plan:
    lies, sizes = _lies(use), launches.sizes_of(use)
    assert lies is not None
    assert sizes is not None
    return plan_of(most, sizes.outputs, sizes.inputs, lies.bits, in_steps=lies.in_steps)


def _workspace(use: Use, most: int) -> Expr:
    """The input as it is laid, the parts of tiles, and a counter for each tile."""
    plan = _plan(use, most)
    return _image_bytes(use, most) + _parts_bytes(plan) + 4 * plan.tiles


def _launches(use: Use, most: int) -> tuple[Launch, ...]:
    lies, sizes, plan = _lies(use), launches.sizes_of(use), _plan(use, most)
    assert lies is not None
    assert sizes is not None
    rows = numel(use.shape("input")[:-1])
    constants = _constants(use, lies, plan)
    given = {name: Pointer(name) if use.has(name) else None for name in ("zeros", "global_scale", "bias")}
    dtype = use.operands["input"].type.dtype
    image, parts = Pointer("workspace", dtype), Pointer("workspace", "float32", _image_bytes(use, most))
    file = "precast.kernels.quantised_linear/tiles.cu"
    counters = Pointer("workspace", "int32", _image_bytes(use, most) + _parts_bytes(plan))
    made = (
        Launch(
            f"{file}:lay_input",
            grid=(mul(sizes.inputs // _WINDOW, ceildiv(rows, 8)),),
            args=(image, counters, Pointer("input"), rows, sizes.inputs, plan.tiles),
            constants=constants, block=_LAYING, pdl=True,
        ),
        Launch(
            f"{file}:product_tiles",
            grid=(plan.grid,),
            args=(
                Pointer("out.0"), parts, counters, image, Pointer("weight"), Pointer("scales"), *given.values(), rows,
                sizes.outputs, sizes.inputs, plan.w_stages, plan.x_stages,
            ),
            constants=constants, block=_THREADS, shared_bytes=plan.shared_bytes, pdl=True,
        ),
    )  # fmt: skip
    if plan.columns <= _ADDED_AT_ONCE:
        return made
    added = Launch(
        f"{file}:sum_tiles",
        grid=(plan.tiles, plan.columns // 16),
        args=(
            Pointer("out.0"), parts, Pointer("scales"), given["global_scale"], given["bias"], rows, sizes.outputs,
            sizes.inputs, plan.grid,
        ),
        constants=constants, block=_MULTIPLYING, pdl=True,
    )  # fmt: skip
    return (*made, added)


def _constants(use: Use, lies: _Lies, plan: Plan) -> dict[str, int | float | bool | str]:
    offset: int | bool = lies.offset if lies.kind == "PACKED4" or use.constant("format") == "packed8" else False
    of_all = 0
    if use.has("global_scale"):
        of_all = 1 if use.number("global_scale", 0) == 1 else 2
    return {
        lies.kind: True, "FLOAT16": use.dtype == "float16", "BIAS": use.has("bias"), "POINTS": use.has("zeros"),
        "COLUMNS": plan.columns, "WINDOWS": plan.windows, "AT_ONCE": plan.at_once,
        "SUMS_APART": plan.columns > _ADDED_AT_ONCE,
        "SCALED_ROWS": lies.rows, "SCALE": lies.scale, "STEPS": lies.in_steps,
        "GROUP": False if lies.group is None else lies.group,
        "GLOBAL": of_all or False, "DIVIDES": "divided" in str(use.constant("format")),
        **({} if offset is False else {"OFFSET": f"{offset}"}),
    }  # fmt: skip


_TAKES = (
    Condition("rows that are tokens, along one axis, without gaps, and aren't rounded", _has_plain_rows),
    Condition(
        "values of 4 or 8 bits in rows of a multiple of 128, in groups of 16 n (of float32: 128 n) or none",
        lambda use: _lies(use) is not None,
    ),
    Condition("weight, scales, points and bias in row-major order that no op makes", _is_static),
)


def records() -> Iterator[Record]:
    """A record for each number of rows."""
    for least, most in zip((_LEAST, *(each + 1 for each in ROWS)), ROWS, strict=False):
        yield Record(
            name=f"cuda.quantised_linear_to_{most}", op="precast.quantised_linear", kind="cuda", devices=("cuda",),
            min_capability=(9, 0), max_capability=(9, 0), allocates=False, sizes={"T": (least, most)},
            dtypes=dict.fromkeys(("input", "bias"), _HALF), workspace=partial(_workspace, most=most),
            runs=partial(_launches, most=most),
            takes=(*_TAKES, Condition(f"at most {most} rows", partial(_fits, most=most))),
        )  # fmt: skip
