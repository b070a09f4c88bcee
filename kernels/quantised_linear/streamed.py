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
from precast.kernels.linear.stream_plan import MAX_ROWS, THREADS, TILE, Plan, Stored, Way, plan_that_fits
from precast.kernels.quantised_linear import launches
from precast.kernels.records import Condition, Launch, Pointer, Record, Stride
from precast.kernels.use import Use

_BITS = {"fp8": 8, "packed4": 4}
"""Formats whose weights lie in rows, and of an element of theirs."""
_STEPS = (128, 64)
"""Inputs that a warp multiplies at a time: the most that divide a row, and a group."""
_MOST_OFFSET = 100
"""What is subtracted from values of four bits, which are made in bfloat16's range of whole numbers from 128 to 256."""
_ALIGNED = 16
"""Bytes of which a row's scales of groups are a multiple."""
_WAYS = {
    2: {8: Way(piece=4096, kept_bytes=36 << 10, kept_from=3), 4: Way(piece=8192, kept_bytes=36 << 10, kept_from=3)},
    MAX_ROWS: {8: Way(piece=2048, kept_bytes=72 << 10), 4: Way(piece=4096, kept_bytes=72 << 10)},
}
"""By the most rows, and by a weight's bits: as many bytes of a row at once as of weights of 16 bits."""
_HALF: tuple[Dtype, ...] = ("bfloat16", "float16")


class _Lies(NamedTuple):
    """A layer as the stream takes it. `shared`: rows of the weight that have the same scales."""

    stored: Stored
    shared: int
    offset: int


def _lies(use: Use) -> _Lies | None:
    """None if the stream can't take it."""
    sizes, format, activation = launches.sizes_of(use), str(use.constant("format")), use.constant("activation")
    if format not in _BITS or sizes is None or any(use.has(part) for part in ("zeros", "groups", "global_scale")):
        return None
    is_rounded = activation not in (None, "none")
    scales, offset = use.operands["scales"].type, use.constant("zero_offset") or 0
    if scales.dtype not in ("float32", use.dtype) or not isinstance(offset, int) or not 0 <= offset <= _MOST_OFFSET:
        return None
    if is_rounded and not (format == "fp8" and str(activation).startswith("fp8")):
        return None
    if launches.input_scales_of(use)[0] == "one" and use.operands["input_scale"].type.dtype != "float32":
        return None
    group = sizes.group if sizes.num_groups > 1 else None
    if (activation == "fp8_group") != (is_rounded and group is not None) or (
        is_rounded and group not in (None, launches.INPUT_GROUP)
    ):
        return None
    step = next((step for step in _STEPS if sizes.inputs % step == 0 and (group or step) % step == 0), None)
    if step is None or (group is not None and (sizes.inputs % group or (sizes.rows > 1 and sizes.rows % TILE))):
        return None
    width = 4 if scales.dtype == "float32" else 2
    if group is not None and sizes.num_groups * width % _ALIGNED:
        return None
    of_tile = group is not None and sizes.rows > 1
    stored = Stored(_BITS[format], 1 if is_rounded else 2, step, group, width, of_tile)
    return _Lies(stored, sizes.rows, offset)


def _is_static(use: Use) -> bool:
    """The weight and its scales are read before the kernels in front have ended."""
    given = [use.operands[name] for name in ("weight", "scales", "bias") if use.has(name)]
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
    return plan_that_fits(_WAYS[most][stored.bits], most, sizes.outputs, sizes.inputs, stored=stored)


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
        "SCALED_ROWS": lies.shared, "SCALE_BYTES": stored.scale_bytes,
        "GROUP": False if stored.group is None else stored.group,
    }  # fmt: skip
    constants |= {"FLOAT8": True} if stored.bits == 8 else {"PACKED4": True, "OFFSET": lies.offset}
    if _is_rounded(use):
        constants |= {"X_FLOAT8": True, "X_SCALES": int(launches.input_scales_of(use)[0] != "one")}
    product = Launch(
        "precast.kernels.linear/stream.cu:stream_linear",
        grid=(plan.grid,),
        args=(
            Pointer("out.0"), input[0], Pointer("weight"), bias, None, *input[1:], 0, rows, sizes.outputs, sizes.inputs,
            *plan.args, plan.scale_slots, Pointer("scales"), launches.input_scales_of(use)[1],
        ),
        constants=constants,
        block=THREADS,
        shared_bytes=plan.shared_bytes,
        pdl=True,
    )  # fmt: skip
    return (*((launches.rounding(use, launches.own_scales(use)),) if rounds else ()), product)


def _counts(use: Use, most: int) -> bool:
    shape = use.shape("input")
    rows = shape[-2] if len(shape) > 1 else None
    return (rows == "T" or (isinstance(rows, int) and rows <= most)) and all(size == 1 for size in shape[:-2])


def _has_room(use: Use, most: int) -> bool:
    return _plan(use, most) is not None


_TAKES = (
    Condition(
        "float8, rounded as the input is or not, or packed4 without points; of rows, or groups of 64 n inputs",
        lambda use: _lies(use) is not None,
    ),
    Condition(
        "Triton, which rounds the input, if it is rounded",
        lambda use: not _is_rounded(use) or "triton" in use.target.kinds,
    ),
    Condition(f"rows of at most {launches.LONGEST_ROUNDED} inputs that have one scale", launches.is_short),
    Condition("weight, scales and bias in row-major order that no op makes", _is_static),
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
