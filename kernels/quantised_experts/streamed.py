"""The weight stream over experts in four bits, for few tokens: which it takes, and its launches. No torch and no triton
here.

`stream.cu` describes it. Between its two launches are the activated rows of all pairs; a sum in Triton follows.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from precast.ir.graph.schema import Expr
from precast.ir.graph.symbols import add, mul
from precast.kernels.experts import launches as experts
from precast.kernels.experts.launches import given, step_of
from precast.kernels.quantised_experts import launches
from precast.kernels.quantised_experts.rounding import rounding_of
from precast.kernels.records import Condition, Launch, Pointer, Record
from precast.kernels.use import Use

_FILE = "precast.kernels.quantised_experts/stream.cu"
_WARPS, THREADS = 16, 32 * 19
"""Warps that multiply; of a block: these, one that copies, and two that add up."""
_TILE, _NUM_SMS = 16, 132
_SHARED_BYTES = 227 << 10
"""Shared memory that a block may have."""
_LEAST_STAGES, _MOST_STAGES, _MOST_PIECES = 4, 12, 8
_IN_FLIGHT = 48 << 10
"""Bytes that a block asks memory for at a time."""
_ALIGNED = 16
"""Bytes of which a row's piece is a multiple."""
_MOST_INPUTS = 64
"""Registers of a thread that may hold its part of x."""
_MOST_ZERO = 100
"""What is subtracted from values of four bits, which are made in bfloat16's range of whole numbers from 128 to 256."""
_FP4 = {"mxfp4": 32, "nvfp4": 16, "nvfp4_divided": 16}
"""Values that share a scale."""
Constants = dict[str, int | float | bool | str]


class Few(NamedTuple):
    """Steps of up to so many tokens, and so many pairs of a token and an expert, of which so many of an expert are
    multiplied together."""

    tokens: int
    pairs: int
    columns: int

    @property
    def head_bytes(self) -> int:
        """What lies in front of the ring in shared memory."""
        return 256 + 24 * self.pairs + 2048 * self.columns


FEW, MORE = Few(8, 128, 8), Few(64, 256, 16)
STEPS = (FEW, Few(16, 128, 8), Few(32, 256, 8), MORE)
"""Of 8 pairs of an expert at a time up to 32 tokens, then of 16, as long as a block can sort all pairs: the faster ones
of GPT-OSS with 8, 16, 32 and 64 tokens."""


class Way(NamedTuple):
    """How a weight goes through shared memory: `step` columns are a warp's at a time; of a row so many pieces are
    copied, into a ring of so many stages, so many of which are on their way at a time, in so many bytes with what lies
    in front of it."""

    step: int
    pieces: int
    stages: int
    in_flight: int
    shared_bytes: int


class _Stored(NamedTuple):
    """How a weight is stored: columns that share a scale, None for all; scales of `row_scales` bytes are copied with a
    row."""

    group: int | None
    row_scales: int
    constants: Constants


def way_of(group: int | None, row_scales: int, size_k: int, few: Few = FEW) -> Way | None:
    """The longest pieces of which four fit into shared memory; None if there are none."""
    room = _SHARED_BYTES - few.head_bytes
    steps = (32,) if row_scales else (64, 32)
    found = []
    for pieces in range(1, _MOST_PIECES + 1):
        piece = size_k // pieces
        piece_bytes = piece // 2
        if size_k % pieces or piece_bytes % _ALIGNED:
            continue
        fitting = [step for step in steps if piece % step == 0 and (group is None or row_scales or group % step == 0)]
        stage_bytes = _TILE * (_pitch(piece_bytes, is_whole=pieces == 1) + row_scales)
        stages = min(room // stage_bytes, _MOST_STAGES)
        for step in fitting:
            inputs = pieces * -(-piece // step // _WARPS) * step
            if stages >= _LEAST_STAGES and inputs // 8 * few.columns // 8 <= _MOST_INPUTS:
                in_flight = min(max(1, _IN_FLIGHT // stage_bytes), stages)
                way = Way(step, pieces, stages, in_flight, few.head_bytes + stages * stage_bytes)
                found.append((pieces, inputs, -step, way))
    return min(found)[-1] if found else None


def _pitch(piece_bytes: int, *, is_whole: bool) -> int:
    """Bytes from a row of a piece to the next one in shared memory, as `stream.cu` says."""
    is_together = is_whole and piece_bytes // 16 % 4 != 0
    return piece_bytes + (0 if is_together or piece_bytes % 32 else 16)


def _stored(use: Use, name: str, size_k: int) -> _Stored | None:
    """None if the stream can't take it."""
    format, offset = use.constant("format"), int(use.constant("zero_offset") or 0)
    scales = use.operands[f"{name}_scales"].type.dtype
    if use.has(f"{name}_zeros"):
        return None
    if format in _FP4:
        each, is_float8 = _FP4[str(format)], format != "mxfp4"
        count = size_k // each
        if size_k % each or count % 2 or scales != ("float8_e4m3fn" if is_float8 else "uint8"):
            return None
        return _Stored(each, count, {"FP4": True, "GROUP": each, "FLOAT8_SCALES": is_float8})
    if format != "packed4" or scales not in ("float32", "bfloat16") or not 0 <= offset <= _MOST_ZERO:
        return None
    _, columns = launches.shared_by(use, name, size_k)
    group = columns if columns < size_k else None
    kind: Constants = {"PACKED4": True, "ZERO": offset, "SCALE_BYTES": 4 if scales == "float32" else 2}
    return _Stored(group, 0, kind | ({"GROUP": group} if group else {}))


def of_all(use: Use, name: str) -> Constants | None:
    """Of the global scales; None if the stream can't take them."""
    if not use.has(f"{name}_global_scale"):
        return {}
    if use.operands[f"{name}_global_scale"].type.dtype != "float32":
        return None
    each = use.number(f"{name}_global_scale", 1) == 1
    return {"WHOLE": 1 if each else 2, "DIVIDED": use.constant("format") == "nvfp4_divided"}


def _product(use: Use, name: str, few: Few) -> tuple[Way, Constants] | None:
    """How a weight is gone through, and the constants of how it is stored; None if the stream can't take it."""
    sizes = launches.sizes_of(use)
    if sizes is None:
        return None
    size_k, size_n = (sizes.width, sizes.inner) if name == "up" else (sizes.inner, sizes.width)
    stored, whole = _stored(use, name, size_k), of_all(use, name)
    if stored is None or whole is None or size_n % 8:
        return None
    way = way_of(stored.group, stored.row_scales, size_k, few)
    if way is None:
        return None
    constants = stored.constants | whole | {"STEP": way.step, "PIECES": way.pieces, "STAGES": way.stages}
    constants |= {"IN_FLIGHT": way.in_flight, "COLUMNS": few.columns, "MOST_PAIRS": few.pairs}
    return way, constants | {"SIZE_N": size_n, "SIZE_K": size_k}


def is_taken(use: Use, few: Few) -> bool:
    """Whether both weights are stored in a way that the stream can take, and there are few enough pairs."""
    sizes = launches.sizes_of(use)
    if sizes is None or sizes.top_k * few.tokens > few.pairs or rounding_of(use) != "none":
        return False
    return None not in (_product(use, "up", few), _product(use, "down", few))


def is_static(use: Use) -> bool:
    """Weights are read before the kernels in front have ended; rows lie side by side."""
    weights = [use.operands[name] for name in use.operands if name.startswith(("up", "down"))]
    return use.operands["x"].is_contiguous and all(each.is_contiguous and not each.is_activation for each in weights)


class _Rows(NamedTuple):
    """In the workspace, by pairs: activated rows, and those of the second product; the end of both."""

    h: Pointer
    rows: Pointer
    end: Expr


def _rows(use: Use) -> _Rows:
    sizes = launches.known(use)
    second = experts.aligned(mul(use.width("x") * sizes.inner, sizes.pairs))
    end = add(second, experts.aligned(mul(4 * sizes.width, sizes.pairs)))
    return _Rows(Pointer("workspace", use.operands["x"].type.dtype), Pointer("workspace", "float32", second), end)


def _workspace(use: Use) -> Expr:
    return _rows(use).end


def _launch(use: Use, name: str, few: Few, to: Pointer, rows: Pointer, constants: Constants) -> Launch:
    sizes, product = launches.known(use), _product(use, name, few)
    assert product is not None, "the record's condition"
    way, stored = product
    return Launch(
        f"{_FILE}:stream_experts",
        grid=(_NUM_SMS,),
        args=(
            to, rows, Pointer(name), Pointer(f"{name}_scales"), given(use, f"{name}_global_scale"),
            given(use, f"{name}_bias"), Pointer("expert_ids"), step_of(use, "expert_ids", 0),
            step_of(use, "expert_ids", 1), sizes.pairs,
        ),
        constants={
            **stored, **constants, "EXPERTS": sizes.num_experts, "TOP_K": sizes.top_k,
            "BIAS": use.has(f"{name}_bias"),
        },
        block=THREADS,
        shared_bytes=way.shared_bytes,
        pdl=True,
    )  # fmt: skip


def between(use: Use) -> Constants:
    """Of what is done with the first product."""
    found = experts.between_of(use)
    made: Constants = {
        "ACTIVATION": found["ACTIVATION"], "ALPHA": found["ALPHA"], "GATED": found["IS_GATED"],
        "PLUS": found["OFFSET"],
    }  # fmt: skip
    return made | ({"LIMIT": found["LIMIT"]} if found["IS_GATED"] and found["LIMIT"] else {})


def run(use: Use, few: Few = FEW) -> tuple[Launch, ...]:
    """Both products, and the sum."""
    rows = _rows(use)
    # The first waits for the ids before it lets the second start, which so may read them at once, as the sum may.
    first: Constants = {**between(use), "OF_TOKENS": True, "IDS_ARE_NEW": True}
    return (
        _launch(use, "up", few, rows.h, Pointer("x"), first),
        _launch(use, "down", few, rows.rows, rows.h, {"WIDE": True}),
        launches.sum_of_pairs(use, rows.rows, 1),
    )


def _record(least: int, few: Few) -> Record:
    """Steps of `least` tokens and more."""
    return Record(
        name=f"cuda.quantised_experts_to_{few.tokens}", op="precast.quantised_experts", kind="cuda",
        devices=("cuda",), min_capability=(9, 0), max_capability=(9, 0), allocates=False,
        sizes={"T": (least, few.tokens)}, dtypes=dict.fromkeys(("x", "up_bias", "down_bias"), ("bfloat16",)),
        workspace=_workspace, runs=partial(run, few=few),
        takes=(
            Condition(
                "mxfp4, nvfp4 or packed4 without points, of rows that are not rounded and fit into registers, and"
                f" 8 n outputs; at most {few.pairs // few.tokens} experts of a token",
                partial(is_taken, few=few),
            ),
            Condition("Triton, which adds up the pairs of a token", lambda use: "triton" in use.target.kinds),
            Condition("weights, scales and biases that no op makes, and rows, in row-major order", is_static),
        ),
    )  # fmt: skip


RECORDS = tuple(
    _record(least, few) for least, few in zip((1, *(each.tokens + 1 for each in STEPS)), STEPS, strict=False)
)
