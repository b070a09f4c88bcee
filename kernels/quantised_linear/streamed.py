"""The weight stream over weights in few bits: which layers it takes, and its launches. No torch and no triton here.

`kernels/linear/stream.cu` describes it. An input that is rounded here is rounded by a launch in front, while the
first weights are on their way.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

from precast.ir.graph.schema import Dtype, Expr
from precast.ir.graph.symbols import numel
from precast.ir.ops.rows_rounded import in_groups
from precast.ir.weights.tensorfile import element_bytes
from precast.kernels.linear.stream_plan import MAX_ROWS, TILE, Plan, Stored, Way, plan_that_fits
from precast.kernels.quantised_linear import launches
from precast.kernels.records import Condition, Launch, Pointer, Record, Stride
from precast.kernels.use import Use


class _Format(NamedTuple):
    """How the kernel knows a format whose weights lie in rows, and bits of an element of theirs."""

    define: str
    bits: int


_FORMATS = {
    "fp8": _Format("FLOAT8", 8), "int8": _Format("INT8", 8), "packed8": _Format("PACKED8", 8),
    "packed4": _Format("PACKED4", 4), "mxfp4": _Format("MXFP4", 4), "nvfp4": _Format("NVFP4", 4),
    "nvfp4_divided": _Format("NVFP4", 4),
}  # fmt: skip
_SCALES: dict[str, Dtype] = {"mxfp4": "uint8", "nvfp4": "float8_e4m3fn", "nvfp4_divided": "float8_e4m3fn"}
"""Of formats whose scales are of few bits themselves."""
_STEPS = (128, 64)
"""Inputs that a warp multiplies at a time."""
_LEAST_GROUP = 32
"""What is summed together at least, in four bits; a scale for less is multiplied with each value."""
_MOST_OFFSET = {"packed4": 100, "packed8": 255}
"""What is subtracted from values at most: no less than a format's values reach, and few enough for 16 bits."""
_BYTES_OFFSET = 128
"""What values of packed8 are made without, whatever their offset is."""
_ALIGNED = 16
"""Bytes of which a row's scales of groups are a multiple."""
_EIGHT_BITS_OF_FEW = tuple(Way(piece, kept_bytes=36 << 10, kept_from=3) for piece in (2048, 1024))
"""For one and two rows."""
_WAYS: dict[int, dict[int, tuple[Way, ...]]] = {
    1: {
        8: _EIGHT_BITS_OF_FEW,
        4: tuple(Way(piece, kept_bytes=36 << 10, in_flight=36 << 10) for piece in (4096, 2048, 1024)),
    },
    2: {
        8: _EIGHT_BITS_OF_FEW,
        4: tuple(Way(piece, kept_bytes=60 << 10, in_flight=36 << 10) for piece in (4096, 2048, 1024)),
    },
    MAX_ROWS: {
        8: tuple(Way(piece, kept_bytes=72 << 10) for piece in (2048, 1024)),
        4: tuple(Way(piece, kept_bytes=72 << 10, in_flight=36 << 10) for piece in (4096, 2048, 1024)),
    },
}
"""By the most rows, and by a weight's bits: the first for which there is room. In pieces of 4096 weights of four bits a
stage of each team is more than `in_flight`."""
_LONGEST_OF_ONE_ROW = {"packed4": 2048, "mxfp4": 1024}
"""Weights in a piece at most, for one row: in these formats shorter pieces are faster, as the first comes sooner."""
_HALF: tuple[Dtype, ...] = ("bfloat16", "float16")


class _Lies(NamedTuple):
    """A layer as the stream takes it. `shared`: rows of the weight that have the same scales."""

    stored: Stored
    shared: int
    offset: int


def _lies(use: Use) -> _Lies | None:
    """None if the stream can't take it."""
    sizes, format, activation = launches.sizes_of(use), str(use.constant("format")), use.constant("activation")
    if format not in _FORMATS or sizes is None or use.has("groups"):
        return None
    is_rounded, bits = activation not in (None, "none"), _FORMATS[format].bits
    scales, offset = use.operands["scales"].type, use.constant("zero_offset") or 0
    if scales.dtype not in ((_SCALES[format],) if format in _SCALES else ("float32", "float16", use.dtype)):
        return None
    if use.has("global_scale") and use.operands["global_scale"].type.dtype not in ("float32", use.dtype):
        return None
    if not isinstance(offset, int) or not 0 <= offset <= _MOST_OFFSET.get(format, 0):
        return None
    if is_rounded and not (format == "fp8" and str(activation).startswith("fp8")):
        return None
    if launches.input_scales_of(use)[0] == "one" and use.operands["input_scale"].type.dtype != "float32":
        return None
    group = sizes.group if sizes.num_groups > 1 else None
    if in_groups(activation) != (is_rounded and group is not None) or (
        is_rounded and group not in (None, launches.INPUT_GROUP)
    ):
        return None
    if use.has("zeros") and (group is None or format not in _MOST_OFFSET):
        return None
    if group is None and format == "packed8" and offset != _BYTES_OFFSET:
        return None
    step = _step(format, bits, sizes.inputs, group)
    if step is None or (group is not None and (sizes.inputs % group or (sizes.rows > 1 and sizes.rows % TILE))):
        return None
    of_tile = group is not None and sizes.rows > 1
    width = element_bytes(scales.dtype)
    stored = Stored(bits, 1 if is_rounded else 2, step, group, width, of_tile, use.has("zeros"))
    if _subtracts(use, offset):
        stored = stored._replace(summed=min(group or step, step))
    return _Lies(stored, sizes.rows, offset)


def _subtracts(use: Use, offset: int) -> bool:
    """Whether sums begin with what values are too large by, times a sum of x: it is subtracted so."""
    format = use.constant("format")
    made_exactly = offset == _BYTES_OFFSET if format == "packed8" else use.dtype == "float16" or offset == 0
    return format in _MOST_OFFSET and (use.has("zeros") or not made_exactly)


def _step(format: str, bits: int, inputs: int, group: int | None) -> int | None:
    """Inputs that a warp multiplies at a time: whole groups, or a part of one. Such that the warps have as much to do
    as each other, and else as many as can be."""

    def fits(step: int) -> bool:
        if format in _SCALES:  # whose scales are read four at a time and more
            return step == _STEPS[0]
        if group is None or group % step == 0:
            return True
        return bits == 4 and step % group == 0 and group % _LEAST_GROUP == 0

    def of_a_warp(step: int) -> int:
        stored = Stored(bits)
        return -(-inputs // (step * stored.warps // stored.teams)) * step

    steps = [step for step in _STEPS if inputs % step == 0 and fits(step)]
    return min(steps, key=of_a_warp, default=None) if bits == 4 else next(iter(steps), None)


def _is_static(use: Use) -> bool:
    """The weight, its scales and its points are read before the kernels in front have ended."""
    names = ("weight", "scales", "zeros", "global_scale", "bias")
    given = [use.operands[name] for name in names if use.has(name)]
    return all(each.is_contiguous and not each.is_activation for each in given)


def _is_rounded(use: Use) -> bool:
    return use.constant("activation") not in (None, "none")


def _workspace(use: Use) -> Expr:
    """The input in few bits, and its scales."""
    return launches.rounded_bytes(use) if _is_rounded(use) else 0


def _plan(use: Use, most: int) -> Plan | None:
    """None for a layer that the stream can't take, or whose rows are too long for shared memory."""
    lies, sizes = _lies(use), launches.sizes_of(use)
    if lies is None or sizes is None:
        return None
    stored = lies.stored
    longest = _LONGEST_OF_ONE_ROW.get(str(use.constant("format")), 4096) if most == 1 else 4096
    ways = (way for way in _WAYS[most][stored.bits] if way.piece <= longest)
    found = (plan_that_fits(way, most, sizes.outputs, sizes.inputs, stored=stored) for way in ways)
    return next((plan for plan in found if plan is not None), None)


def _launches(use: Use, most: int) -> tuple[Launch, ...]:
    lies, sizes, plan = _lies(use), launches.sizes_of(use), _plan(use, most)
    assert lies is not None
    assert sizes is not None
    assert plan is not None
    stored = lies.stored
    rows, bias = numel(use.shape("input")[:-1]), Pointer("bias") if use.has("bias") else None
    input: tuple[Pointer, Stride | int, Stride | int] = Pointer("input"), Stride("input", -2), Stride("input", -1)
    rounds = _is_rounded(use) and not launches.is_given(use)
    if rounds:
        input = launches.input_of(use), sizes.inputs, 1
    constants: dict[str, int | float | bool | str] = {
        "FLOAT16": use.dtype == "float16", "BIAS": use.has("bias"), "PASS": plan.tiles_a_pass, "STEP": stored.step,
        "KEEPS_X": plan.keeps_x, "TEAMS": stored.teams, "SCALED_ROWS": lies.shared, "SCALE_BYTES": stored.scale_bytes,
        "GROUP": False if stored.group is None else stored.group,
        "SCALES_FLOAT16": use.operands["scales"].type.dtype == "float16" != use.dtype,
    }  # fmt: skip
    format = str(use.constant("format"))
    constants |= {_FORMATS[format].define: True, "POINTS": stored.points}
    if format in _MOST_OFFSET:
        constants["OFFSET"] = lies.offset
    if use.has("global_scale"):
        constants |= {
            "WHOLE_BYTES": use.width("global_scale"), "WHOLE_ROWS": int(use.number("global_scale", 0) != 1),
            "DIVIDES": format == "nvfp4_divided",
        }  # fmt: skip
    if _is_rounded(use):
        constants |= {"X_FLOAT8": True, "X_SCALES": int(launches.input_scales_of(use)[0] != "one")}
    product = Launch(
        "precast.kernels.linear/stream.cu:stream_linear",
        grid=(plan.grid,),
        args=(
            Pointer("out.0"), input[0], Pointer("weight"), bias, None, *input[1:], 0, rows, sizes.outputs, sizes.inputs,
            *plan.args, plan.scale_slots, Pointer("scales"), launches.input_scales_of(use)[1],
            *(Pointer(name) if use.has(name) else None for name in ("zeros", "global_scale")),
        ),
        constants=constants,
        block=plan.threads,
        shared_bytes=plan.shared_bytes,
        pdl=True,
    )  # fmt: skip
    return (*((launches.rounding(use, launches.own_scales(use)),) if rounds else ()), product)


def _counts(use: Use, most: int) -> bool:
    shape = use.shape("input")
    rows = shape[-2] if len(shape) > 1 else None
    return (rows == "T" or (isinstance(rows, int) and rows <= most)) and all(size == 1 for size in shape[:-2])


def _has_aligned_scales(use: Use) -> bool:
    """Rows of groups can be copied."""
    lies, sizes = _lies(use), launches.sizes_of(use)
    if lies is None or sizes is None or lies.stored.group is None:
        return True
    return sizes.num_groups * lies.stored.scale_bytes % _ALIGNED == 0


def _has_room(use: Use, most: int) -> bool:
    return _plan(use, most) is not None


_TAKES = (
    Condition(
        "float8, also rounded as the input is, int8 without points, packed4 or packed8, of rows or of groups of 64 n "
        "inputs (packed4 of 32), points in groups alone; or fp4 of 128 n inputs",
        lambda use: _lies(use) is not None,
    ),
    Condition(f"scales of groups whose rows are multiples of {_ALIGNED} bytes", _has_aligned_scales),
    Condition(
        "Triton, which rounds the input, if it is rounded",
        lambda use: not _is_rounded(use) or "triton" in use.target.kinds,
    ),
    Condition(f"rows of at most {launches.LONGEST_ROUNDED} inputs that have one scale", launches.is_short),
    Condition("parts of the weight and a bias in row-major order that no op makes", _is_static),
)


def records() -> Iterator[Record]:
    """A record for each way, by how many rows there are."""
    for least, most in zip((1, *(most + 1 for most in _WAYS)), _WAYS, strict=False):
        yield Record(
            name=f"cuda.quantised_linear_to_{most}", op="precast.quantised_linear", kind="cuda", devices=("cuda",),
            min_capability=(9, 0), max_capability=(9, 0), allocates=False, sizes={"T": (least, most)},
            dtypes=dict.fromkeys(("input", "bias"), _HALF), workspace=_workspace, runs=partial(_launches, most=most),
            takes=(
                Condition("rows that are tokens, along one axis", partial(_counts, most=most)), *_TAKES,
                Condition("rows whose scales fit beside a ring of two stages", partial(_has_room, most=most)),
            ),
        )  # fmt: skip
