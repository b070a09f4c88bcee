"""Tiles of experts in few bits, for more tokens, on Hopper: which it takes, and its launches. No torch, no triton here.

`tiles.cu` describes it. Pairs are put into the order of experts first, and added up last, by the launches of
`precast.kernels.experts.launches`.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from precast.ir.graph.schema import Dtype, Expr
from precast.ir.graph.symbols import add, floordiv, mul
from precast.ir.weights.quantised import PACKED
from precast.kernels.experts import launches as experts
from precast.kernels.few_bits_tiles import E4M3, E8M0, ELEMENT, FLOAT16, FLOAT32, FORMATS, MIDDLE, MOST_TAKEN
from precast.kernels.quantised_experts import launches, streamed
from precast.kernels.quantised_experts.launches import Constants
from precast.kernels.quantised_experts.rounding import rounding_of
from precast.kernels.records import Condition, Launch, Pointer, Record
from precast.kernels.use import Use

_LARGEST = 4096
STEPS = (64, 128, 256, 1024, _LARGEST, None)
"""Tokens of a step at most, None for any number: a record each."""
_LEAST = 17
"""Of fewer tokens Triton is as fast. Up to 64 the weight stream is faster, where it takes them."""
_FILE = "precast.kernels.quantised_experts/tiles.cu"
_BAND, _WINDOW, _EIGHT_BYTES = 128, 128, 2 * 8 * 128
"""Rows of the weight in a band of a tile, inputs of a window, and bytes of a window of eight rows."""
_THREADS, _LAYING, _WINDOWS_LAID = 384, 256, 8
"""Threads of a block, and of one that lays rows, which has so many windows."""
_NUM_SMS, _BARRIER_BYTES, _MOST_STAGES = 132, 512, 16
_SHARED_BYTES = (227 << 10, 113 << 10)
"""What a block may have of shared memory, alone on a multiprocessor of Hopper's GPUs, and where there are two."""
_TILES = ((16, 1, 6.0), (32, 1, 20.0), (64, 1, 200.0), (128, 2, None))
"""Rows of a tile, and bands of rows of the weight, of experts that have so many rows on average at most: in the largest
step that a record takes, or in the smallest where there is no largest. Two bands are those of four bits: rows of a
weight of eight are twice as large."""
_ALONE = 128
"""Rows of a tile, counted for each band, from which on a block is alone on its multiprocessor, for its registers."""
_X_STAGES = {16: 6, 32: 5, 64: 3, 128: 3}
"""Stages of the rows at least that a block holds; the weight gets what is left."""
_MOST_EXPERTS = 1024
_HALF: tuple[Dtype, ...] = ("bfloat16", "float16")


class Plan(NamedTuple):
    """Rows of a tile, bands of the weight in it, blocks that are on a multiprocessor at once, windows of a stage of the
    weight, stages of it and of the rows, and the shared memory that a block fills."""

    columns: int
    bands: int
    at_once: int
    windows: int
    w_stages: int
    x_stages: int
    shared_bytes: int


def plan_of(average: float, bits: int, num_experts: int, *, in_steps: bool = False) -> Plan:
    """The plan for experts that have so many rows on average. `in_steps`: sums of steps are multiplied by scales, so a
    thread has twice as many, and a tile one band."""
    columns, bands = next(tile for *tile, most in _TILES if most is None or average <= most)
    if in_steps or bits == 8:
        bands = 1
    at_once = 1 if columns * bands >= _ALONE else 2
    windows, w_stage, x_stage = 8 // bits, bands * _BAND * 128, columns // 8 * _EIGHT_BYTES
    head = -(-(_BARRIER_BYTES + 8 * (num_experts + 1)) // 128) * 128
    room = _SHARED_BYTES[at_once - 1] - head
    w_stages = min((room - _X_STAGES[columns] * x_stage) // w_stage, _MOST_STAGES)
    x_stages = min((room - w_stages * w_stage) // x_stage, _MOST_STAGES)
    used = head + w_stages * w_stage + x_stages * x_stage
    return Plan(columns, bands, at_once, windows, w_stages, x_stages, used)


def _laid_windows(plan: Plan, size_k: int) -> int:
    """Windows of a row that is laid: of whole stages."""
    return -(-size_k // (plan.windows * _WINDOW)) * plan.windows


def _stored(use: Use, name: str, size_k: int) -> Constants | None:
    """Constants of how the weight `name` is stored; None if the kernel can't take it."""
    format = str(use.constant("format"))
    if format not in FORMATS or use.has(f"{name}_zeros"):
        return None
    kind, bits = FORMATS[format]
    if size_k % 8 or size_k * bits // 8 % 16:
        return None
    rows, group = launches.shared_by(use, name, size_k)
    scales, offset = use.operands[f"{name}_scales"].type.dtype, int(use.constant("zero_offset") or 0)
    made: Constants = {kind: True, "SCALED_ROWS": rows}
    if kind == "FP4":
        return made | {"SCALE": E8M0 if format == "mxfp4" else E4M3, "GROUP": group}
    if scales not in ("float32", "float16", use.dtype):
        return None
    stored = ELEMENT if scales == use.dtype else FLOAT32 if scales == "float32" else FLOAT16
    made["SCALE"] = stored
    if group < size_k:
        in_steps = stored != ELEMENT
        if size_k % group or group % (_WINDOW if in_steps else 32 if bits == 4 else 16):
            return None
        made |= {"GROUP": group, "STEPS": in_steps}
    if format in PACKED:
        if not 0 <= offset <= MOST_TAKEN if bits == 4 else offset != MIDDLE:
            return None
        made["OFFSET"] = f"{offset}"
    return made


def _products(use: Use) -> dict[str, Constants] | None:
    """How both weights are stored, by name; None if the kernel can't take one of them."""
    sizes = launches.sizes_of(use)
    if sizes is None or sizes.num_experts > _MOST_EXPERTS:
        return None
    found = dict[str, Constants]()
    for name, size_k, size_n in (("up", sizes.width, sizes.inner), ("down", sizes.inner, sizes.width)):
        stored, whole = _stored(use, name, size_k), streamed.of_all(use, name)
        if stored is None or whole is None or size_n % 8:
            return None
        found[name] = stored | whole | {"SIZE_N": size_n, "SIZE_K": size_k}
    return found


class _Space(NamedTuple):
    """In the workspace, after the order of pairs: rows that are laid, of tokens and activated ones; the rows of all
    pairs; the end."""

    x: Pointer
    h: Pointer
    rows: Pointer
    end: Expr


def _eights(use: Use) -> Expr:
    """Of all experts, at most: each begins with one of its own."""
    sizes = launches.known(use)
    return add(floordiv(sizes.pairs, 8), sizes.num_experts)


def _places(use: Use, most: int | None) -> experts.Places:
    sizes = launches.known(use)
    return experts.places_of(sizes.pairs, sizes.num_experts, is_counted=experts.are_many(most))


def _plan(use: Use, most: int | None) -> Plan:
    sizes = launches.known(use)
    average = (_LARGEST + 1 if most is None else most) * sizes.top_k / sizes.num_experts
    in_steps = any(each.get("STEPS") for each in (_products(use) or {}).values())
    return plan_of(average, FORMATS[str(use.constant("format"))][1], sizes.num_experts, in_steps=in_steps)


def _space(use: Use, most: int | None) -> _Space:
    sizes, plan, start = launches.known(use), _plan(use, most), _places(use, most).end
    dtype = use.operands["x"].type.dtype
    kept: Dtype = dtype if experts.are_many(most) else "float32"
    h = add(start, mul(_EIGHT_BYTES * _laid_windows(plan, sizes.width), _eights(use)))
    rows = add(h, mul(_EIGHT_BYTES * _laid_windows(plan, sizes.inner), _eights(use)))
    end = add(rows, experts.aligned(mul((4 if kept == "float32" else 2) * sizes.width, sizes.pairs)))
    return _Space(
        Pointer("workspace", dtype, start), Pointer("workspace", dtype, h), Pointer("workspace", kept, rows), end
    )


def _workspace(use: Use, most: int | None) -> Expr:
    return _space(use, most).end


def _product(
    use: Use, name: str, plan: Plan, places: experts.Places, to: Pointer, x: Pointer, own: Constants
) -> Launch:
    sizes = launches.known(use)
    products = _products(use)
    assert products is not None, "the record's condition"
    return Launch(
        f"{_FILE}:product_experts",
        grid=(plan.at_once * _NUM_SMS,),
        args=(
            to, x, Pointer(name), Pointer(f"{name}_scales"), experts.given(use, f"{name}_global_scale"),
            experts.given(use, f"{name}_bias"), places.starts, places.pairs,
        ),
        constants={**_common(use, plan, sizes), **products[name], **own, "BIAS": use.has(f"{name}_bias")},
        block=_THREADS,
        shared_bytes=plan.shared_bytes,
        pdl=True,
    )  # fmt: skip


def _common(use: Use, plan: Plan, sizes: experts.Sizes) -> Constants:
    return {
        "FLOAT16": use.dtype == "float16", "COLUMNS": plan.columns, "BANDS": plan.bands, "AT_ONCE": plan.at_once,
        "WINDOWS": plan.windows, "STAGES": plan.w_stages, "X_STAGES": plan.x_stages, "EXPERTS": sizes.num_experts,
        "TOP_K": sizes.top_k, "SIZE_H": sizes.inner,
    }  # fmt: skip


def run(use: Use, most: int | None) -> tuple[Launch, ...]:
    """The order of pairs, rows as products take them, both products, and the sum."""
    sizes, plan, places, space = launches.known(use), _plan(use, most), _places(use, most), _space(use, most)
    products = _products(use)
    assert products is not None, "the record's condition"
    ids = (experts.step_of(use, "expert_ids", 0), experts.step_of(use, "expert_ids", 1))
    x_windows, h_windows = _laid_windows(plan, sizes.width), _laid_windows(plan, sizes.inner)
    rows = Launch(
        f"{_FILE}:lay_rows",
        grid=(_eights(use), -(-x_windows // _WINDOWS_LAID)),
        args=(space.x, space.h, places.starts, places.pairs, Pointer("x"), h_windows),
        constants={**_common(use, plan, sizes), **products["up"]},
        block=_LAYING,
        pdl=True,
    )
    first: Constants = {**streamed.between(use), "LAYS": h_windows, "STARTS_ARE_NEW": True}
    counted = None if most is None or experts.are_many(most) else most * sizes.top_k
    return (
        *experts.order_of(use, places, sizes.pairs, ids, sizes.top_k, sizes.num_experts, counted),
        rows,
        _product(use, "up", plan, places, space.h, space.x, first),
        _product(use, "down", plan, places, space.rows, space.h, {"WIDE": not experts.are_many(most)}),
        experts.sum_of(use, space.rows, sizes),
    )


def is_taken(use: Use) -> bool:
    """Whether both weights are stored in a way that the kernel can take, and rows aren't rounded."""
    return _products(use) is not None and rounding_of(use) == "none"


def _record(least: int, most: int | None) -> Record:
    """Steps of `least` tokens to `most`."""
    return Record(
        name="cuda.quantised_experts_in_tiles" + (f"_to_{most}" if most else ""), op="precast.quantised_experts",
        kind="cuda", devices=("cuda",), min_capability=(9, 0), max_capability=(9, 0), allocates=False,
        sizes={"T": (least, most)}, dtypes=dict.fromkeys(("x", "up_bias", "down_bias"), _HALF),
        workspace=partial(_workspace, most=most), runs=partial(run, most=most),
        takes=(
            Condition(
                "values of 4 or 8 bits without points in rows of a multiple of 16 bytes; groups of 32 n of packed4, of"
                " 16 n of 8 bits, of 128 n where scales aren't of the rows' type, or none; 8 n outputs; at most"
                f" {_MOST_EXPERTS} experts; rows that aren't rounded", is_taken,
            ),
            Condition("Triton, which orders and adds up pairs", lambda use: "triton" in use.target.kinds),
            Condition("weights, scales and biases that no op makes, and rows, in row-major order", streamed.is_static),
        ),
    )  # fmt: skip


RECORDS = tuple(
    _record(least, most) for least, most in zip((_LEAST, *(each + 1 for each in STEPS if each)), STEPS, strict=True)
)
