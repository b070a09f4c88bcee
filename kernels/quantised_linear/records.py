"""What computes linear layers whose weights are in few bits, in half precision on GPUs. Of few rows it is the weight
stream, on Hopper, or, where groups have inputs in any order, `listed`; of many cuBLASLt, with float8 as it is, or with
weights made whole; else Triton. Elsewhere the definition.
The same compute `rounded_linear`, whose input an op in front has rounded.

How Triton's kernels cut their work depends on how many tokens a step has. GPUs below compute capability 8.9 have no
instructions for float8: there the definition dequantises such a weight for each product.
"""

from __future__ import annotations

from typing import Any

import msgspec

from precast.ir.graph.schema import Dtype, Expr
from precast.ir.graph.symbols import add, largest, mul, numel
from precast.ir.ops.rows_rounded import in_groups
from precast.kernels.quantised_linear import float8, float8_tiles, launches, streamed, tiles
from precast.kernels.quantised_linear.listed import LISTED
from precast.kernels.records import Condition, Record, reference
from precast.kernels.rows import has_rows
from precast.kernels.use import Use, numbers


def _dequantised(use: Use) -> Expr:
    """Values that are unpacked, scaled and rounded, some of these side by side; and copies of the input.

    Of packed values the scales of groups are copied in float32, and their points are unpacked and shifted. In blocks
    both are spread over the values one after the other, in the same place.
    """
    format = str(use.constant("format"))
    value, scale = (27, 0) if "fp4" in format else (9, 0) if format in ("fp8", "int8") else (12, 4)
    if scale and use.has("zeros"):
        scale += 8
    copies = 0 if use.constant("activation") in (None, "none") else 20
    values, results = mul(use.result.shape[-1], use.shape("input")[-1]), mul(copies // 5, numel(use.result.shape))
    scales = mul(scale, numbers(use.operands["scales"]))
    return add(mul(value, values), scales, mul(copies, numbers(use.operands["input"])), results)


def _dequantised_rounded(use: Use) -> Expr:
    """First the values as they are scaled; then, beside them in float32, the input multiplied out by its groups; then
    the input and the result, where this isn't float32 itself.
    """
    inputs, outputs = numbers(use.operands["input"]), numel(use.result.shape)
    values = mul(use.result.shape[-1], use.shape("input")[-1])
    wide = mul(4 if use.dtype in _HALF else 0, outputs)
    after = largest((mul(12, inputs), add(mul(4, inputs), wide)))
    return largest((mul(9, values), add(mul(4, values), after)))


_FLOAT8 = (8, 9)
"""The compute capability from which on there are instructions for it."""
_HOPPER = (9, 0)
_TILE_ROWS = 64
"""Rows of which others multiply float8 faster than cuBLASLt: on Hopper `float8_tiles`, elsewhere Triton."""
_MOST_OFFSET = 128
"""Values minus points are whole numbers that half precision holds."""


def _has_float8(use: Use) -> bool:
    kinds = [use.operands[name].type.dtype for name in ("weight", "scales")]
    return use.target.capability >= _FLOAT8 or not (
        "float8_e4m3fn" in kinds or str(use.constant("activation")).startswith("fp8")
    )


def _has_whole_words(use: Use) -> bool:
    sizes, each = launches.sizes_of(use), launches.values_of_a_word(use)
    offset = use.constant("zero_offset")
    return (
        sizes is not None
        and sizes.inputs % each == 0
        and (sizes.group % each == 0 or use.has("groups"))
        and abs(int(offset or 0)) <= _MOST_OFFSET
        and not (in_groups(use.constant("activation")) and use.has("groups"))
    )


def _has_plain_rows(use: Use) -> bool:
    is_plain = use.constant("activation") in (None, "none") and use.operands["input"].is_contiguous
    return is_plain and sum(size != 1 for size in use.shape("input")[:-1]) <= 1


def _lie_side_by_side(use: Use) -> bool:
    return all(operand.is_contiguous for name, operand in use.operands.items() if name != "input")


_HALF: tuple[Dtype, ...] = ("bfloat16", "float16")
_TRITON: dict[str, Any] = {
    "op": "precast.quantised_linear", "kind": "triton", "devices": ("cuda",), "min_capability": (8, 0),
    "allocates": False, "dtypes": {"input": _HALF},
    "takes": (
        Condition("sizes that are known at load, and inputs and groups of whole words", _has_whole_words),
        Condition("compute capability 8.9 or higher for float8", _has_float8),
        Condition("parts of the weight in row-major order", _lie_side_by_side),
        Condition("an input with at most two axes of more than one row", lambda use: has_rows(use, "input")),
        Condition(f"rows of at most {launches.LONGEST_ROUNDED} inputs that have one scale", launches.is_short),
    ),
}  # fmt: skip


def _up_to(least: int, most: int | None) -> Record:
    """Tiles for so many rows, which are no more than a step's tokens."""
    return Record(
        name="triton.quantised_linear" if most is None else f"triton.quantised_linear_to_{most}",
        sizes={"T": (least, most)}, workspace=launches.workspace(most), runs=launches.launches(most), **_TRITON,
    )  # fmt: skip


def _whole(formats: tuple[str, ...], least: int) -> Record:
    """Weights of such formats made whole once for all rows, of so many tokens at least: what that takes is less then
    than to make tiles of them for each tile of rows."""
    return Record(
        name=f"cublaslt.quantised_linear_from_{least}", op="precast.quantised_linear", kind="library",
        devices=("cuda",), min_capability=(8, 0), allocates=False, dtypes=dict.fromkeys(("input", "bias"), _HALF),
        sizes={"T": (least, None)}, workspace=launches.dequantised_workspace, runs=launches.dequantised,
        takes=(
            Condition(f"a weight of {', '.join(formats)}", lambda use: use.constant("format") in formats),
            *_TRITON["takes"][:3],
            Condition("Triton, which dequantises", lambda use: "triton" in use.target.kinds),
            Condition("an input that isn't rounded, without gaps, with rows along one axis", _has_plain_rows),
        ),
    )  # fmt: skip


_WHOLE = (
    _whole(("mxfp4", "nvfp4", "nvfp4_divided"), launches.ROWS[0] + 1),
    _whole(("gptq",), launches.ROWS[1] + 1),
    _whole(("packed4", "fp8", "int8", "packed8"), launches.ROWS[2] + 1),
)


def _float8(
    scales: float8.Scales,
    of: str,
    tokens: int,
    least: tuple[int, int] = _HOPPER,
    most: tuple[int, int] | None = _HOPPER,
) -> Record:
    """cuBLASLt's products of float8 with such scales, of so many tokens at least; `of` says of what the scales are."""
    return Record(
        name=f"cublaslt.quantised_linear_of_float8_{scales}", op="precast.quantised_linear", kind="library 12.9",
        devices=("cuda",), min_capability=least, max_capability=most, allocates=False,
        sizes={"T": (tokens, None)}, workspace=float8.workspace, runs=float8.launches,
        dtypes={
            **dict.fromkeys(("input", "bias"), _HALF), "weight": ("float8_e4m3fn",), "scales": ("float32",),
            "input_scale": ("float32",),
        },
        takes=(
            Condition(f"a float8 weight and an input rounded to float8, with scales of {of}",
                      lambda use: float8.scales_of(use) == scales),
            Condition("inputs and outputs that are multiples of 16", float8.has_even_sizes),
            Condition("params in row-major order, and a bias of the result's type", float8.lies_ready),
            Condition("Triton, which rounds", lambda use: "triton" in use.target.kinds),
            *_TRITON["takes"][3:],
        ),
    )  # fmt: skip


_FLOAT8_RECORDS = (
    _float8("one", "all", _TILE_ROWS + 1, _FLOAT8, None),
    _float8("rows", "rows, or of all of one of them", _TILE_ROWS + 1),
    _float8("blocks", "128 inputs and of blocks of 128 x 128, a multiple of 4 in a row", _TILE_ROWS + 1),
)
_FROM = (0, *(most + 1 for most in launches.ROWS))
_QUANTISED = (
    *streamed.records(),
    LISTED,
    *tiles.records(),
    *float8_tiles.records(),
    *_FLOAT8_RECORDS,
    *_WHOLE,
    *(_up_to(least, most) for least, most in zip(_FROM, launches.ROWS, strict=False)),
    _up_to(_FROM[-1], None),
)


_GIVEN = "input", "input_scales"


def _takes_as_stored(use: Use) -> bool:
    is_known = launches.sizes_of(use) is not None
    return is_known and launches.is_exact(use) and all(use.operands[each].is_contiguous for each in _GIVEN)


def _of_rounded(record: Record) -> Record:
    """What takes inputs that are rounded already by the same launches but the first."""
    return msgspec.structs.replace(
        record, op="precast.rounded_linear", name=record.name.replace("quantised_linear", "rounded_linear"),
        dtypes={**record.dtypes, "input": ("float8_e4m3fn", "int8")},
        takes=(
            Condition("a result of 16 bits", lambda use: use.dtype in _HALF),
            Condition("input and weight multiplied as they are stored, without gaps", _takes_as_stored),
            *record.takes,
        ),
    )  # fmt: skip


RECORDS = (
    *_QUANTISED,
    reference("precast.quantised_linear", "quantised_linear.quantised_linear", _dequantised),
    *(_of_rounded(record) for record in _QUANTISED if record not in (LISTED, *_WHOLE)),
    reference("precast.rounded_linear", "quantised_linear.rounded_linear", _dequantised_rounded),
)
