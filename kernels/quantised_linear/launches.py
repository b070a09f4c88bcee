"""The launches of linear layers with weights in few bits, and the memory between them. No torch and no triton here.

How a product is cut into tiles depends on how many rows the input has at most, in a record's sizes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from precast.ir.graph.schema import Dtype, Expr, TensorType
from precast.ir.graph.symbols import add, ceildiv, mul, numel
from precast.ir.memory.liveness import Operand
from precast.ir.ops.rows_rounded import has_powers_of_two, in_groups
from precast.ir.weights.quantised import NVFP4_BLOCK
from precast.ir.weights.tensorfile import element_bytes
from precast.kernels.blocks import power_of_two
from precast.kernels.linear import records as linear
from precast.kernels.records import Launch, Launches, Pointer, Stride
from precast.kernels.rows import rows_of
from precast.kernels.use import Use

_KERNELS = "precast.kernels.quantised_linear.triton"
_VALUES = {"packed8": 4, "packed4": 8, "gptq": 8, "mxfp4": 8, "nvfp4": 8, "nvfp4_divided": 8}
"""Inputs of a word, by format; those of other formats are up to the sizes."""
_SAME = {"gptq": "packed4", "nvfp4": "fp4", "nvfp4_divided": "fp4"}
"""Formats whose values are stored as those of another."""
_MXFP4_BLOCK = 32
_ROW_TILES = {16: 1, 32: 1, 96: 2, 256: 4, None: 8}
"""Tiles that at least so many rows are; how many they are at most depends on the step."""
INPUT_GROUP = 128
"""Inputs that have a scale together where they are rounded in groups, as kernels know it too, and that are summed at a
time where groups of weights allow it."""
LONGEST_ROUNDED = 32768
"""Inputs of a row of which one program finds the largest."""
_ROUNDED_AT_ONCE = 1024
_PROGRAMS = 396
"""Programs for three on each of the 132 multiprocessors of Hopper's GPUs: one waits while another computes."""
_MOST_PARTS = 8
_SMALL_BYTES, _LARGE_BYTES, _SHARED_BYTES = 56 << 10, 144 << 10, 72 << 10
"""What is on its way to a program's shared memory: of few rows, where three programs share a multiprocessor of
Hopper's; of many there, and on other GPUs, some of which have 99 KiB."""
_SUM_BLOCK = 1024
_VALUES_AT_ONCE, _WORDS_AT_ONCE = (32, 128), (32, 32)
"""Outputs and inputs, or outputs and words of these, of which a program makes values."""
_WHOLE_BYTES, _LEAST_OUTPUTS, _MOST_OUTPUTS = 64 << 20, 2048, 4096
"""Bytes of a weight's values above which it is made and multiplied in parts, and outputs of a part: the fewer where the
most would be above it, too. With 300 to 8,192 tokens a weight of 28,672 outputs took 22 % less to 7 % more time in
parts of 4,096 than whole (H100); parts of 512 and 1,024 of one with 4,096 took up to twice as long."""
_ALIGNED = 256
"""Bytes that each part of a workspace is a multiple of."""
ROWS = (16, 32, 96, 256)
"""Up to so many rows tiles are of one size each; above, of the largest."""


class Sizes(NamedTuple):
    """Outputs and inputs of a layer, inputs and outputs that have a scale together, and groups of a row."""

    outputs: int
    inputs: int
    group: int
    rows: int
    num_groups: int


class Tile(NamedTuple):
    """How a product is cut: rows, outputs, and words of a row that are multiplied at a time; parts of the sums."""

    m: int
    n: int
    k: int
    parts: int
    num_warps: int
    num_stages: int


def sizes_of(use: Use) -> Sizes | None:
    """The sizes on one rank; None if one of them isn't known at load."""
    format = str(use.constant("format"))
    first, second, inputs = use.number("weight", 0), use.number("weight", 1), use.number("input", -1)
    scales = use.number("scales", 0), use.number("scales", 1)
    if first is None or second is None or not inputs or None in scales:
        return None
    outputs, num_groups = (second, scales[0]) if format == "gptq" else (first, scales[1])
    if not outputs or not num_groups:
        return None
    if format in ("fp8", "int8"):
        block = use.integers("block")
        return None if block is None else Sizes(outputs, inputs, block[1], block[0], num_groups)
    given = {"mxfp4": _MXFP4_BLOCK, "nvfp4": NVFP4_BLOCK, "nvfp4_divided": NVFP4_BLOCK}
    return Sizes(outputs, inputs, given.get(format, inputs // num_groups), 1, num_groups)


def is_short(use: Use) -> bool:
    """Whether one program can round a row of the input, where all of it has one scale, and isn't rounded yet."""
    return is_given(use) or not _has_scale_of_row(use) or (use.number("input", -1) or 0) <= LONGEST_ROUNDED


def _has_scale_of_row(use: Use) -> bool:
    return _activation(use) in ("fp8_token", "int8_token")


def values_of_a_word(use: Use) -> int:
    """Inputs of a word of the weight, which is an int32 but where one value is multiplied as it is stored, or is left
    over."""
    format, sizes = str(use.constant("format")), sizes_of(use)
    if format not in ("fp8", "int8"):
        return _VALUES.get(format, 1)
    if sizes is None or is_exact(use) or sizes.inputs % 4 or (sizes.num_groups > 1 and sizes.group % 4):
        return 1
    return 4


def _activation(use: Use) -> str:
    return str(use.constant("activation") or "none")


def is_given(use: Use) -> bool:
    """Whether an op in front has rounded the input: `rounded_linear`'s."""
    return use.has("input_scales")


def is_exact(use: Use) -> bool:
    """Whether numbers of eight bits are multiplied as they are, of input and weight alike."""
    format, activation, group = use.constant("format"), _activation(use), _sizes(use).group
    fits = (format == "fp8" and activation.startswith("fp8")) or (format == "int8" and activation == "int8_token")
    return fits and not use.has("zeros") and (_sizes(use).num_groups == 1 or group % INPUT_GROUP == 0)


def _sizes(use: Use) -> Sizes:
    sizes = sizes_of(use)
    assert sizes is not None, "the record's conditions want sizes that are known"
    return sizes


def _scales_at(use: Use, inputs: int) -> str:
    """Where scales are multiplied by, if so many inputs are summed at a time."""
    sizes = _sizes(use)
    if use.has("groups"):
        return "listed"
    if sizes.num_groups == 1:
        return "end"
    return "steps" if sizes.group % inputs == 0 else "values"


def tile_of(use: Use, most: int | None) -> Tile:
    """The tile for so many rows; None: for any number."""
    sizes, each = _sizes(use), values_of_a_word(use)
    # Values of words of several are made into operands of few rows without a detour over shared memory.
    if most == ROWS[0]:
        m = 16
    elif each > 1 or (most == ROWS[1] and not is_exact(use)):
        m = 32
    else:
        m = 64 if most is not None else 128
    # A warp has all rows of the input: with fewer outputs each, bringing these there would take most of the time.
    n = 128 if m == 32 or (m > 64 and sizes.outputs > 2048) else 64
    # Of a tile of 64 rows as many parts as for the most rows that it is meant for, if not for more.
    parts = 1 if m > 64 else _parts(sizes, n, most if most is None or m < 64 else max(most, ROWS[2]))
    inputs = INPUT_GROUP if each > 1 or is_exact(use) or in_groups(_activation(use)) else 64
    if _scales_at(use, inputs) == "values" and each in (1, 4) and sizes.group in (16 * each, 32 * each, 64):
        inputs = sizes.group
    bits = 4 if each == 8 else 8
    stage = m * inputs * element_bytes(use.result.dtype) + n * inputs * bits // 8
    many = _LARGE_BYTES if use.target.capability[0] == 9 else _SHARED_BYTES
    held = _SMALL_BYTES if m == 16 else many // 2 if m == 32 else many
    return Tile(m, n, inputs // each, parts, 8 if m > 64 else 4, max(2, min(held // stage, 8)))


def _parts(sizes: Sizes, n: int, most: int | None) -> int:
    """Programs that share the sum of `n` outputs, of 512 inputs each at least, where tiles of rows are few."""
    tiles = -(-sizes.outputs // n) * _ROW_TILES[most]
    return max(1, min(_PROGRAMS // tiles, _MOST_PARTS, sizes.inputs // 512))


class _Space(NamedTuple):
    """The workspace: where the scales of the rounded input and parts of sums begin, in bytes, and its end."""

    scales: Expr
    parts: Expr
    end: Expr


def _space(use: Use, most: int | None) -> _Space:
    tile, parts = tile_of(use, most), rounded_bytes(use)
    sums = mul(4 * tile.parts if tile.parts > 1 else 0, numel(use.shape("input")[:-1]), _sizes(use).outputs)
    return _Space(_values_bytes(use), parts, add(parts, sums))


def rounded_bytes(use: Use) -> Expr:
    """What the input takes that is written anew, and its scales after it."""
    rows, sizes = numel(use.shape("input")[:-1]), _sizes(use)
    groups = -(-sizes.inputs // INPUT_GROUP) if in_groups(_activation(use)) else 1
    has_scales = _activation(use) != "none" and not is_given(use)
    return add(_values_bytes(use), aligned(mul(4 * groups, rows)) if has_scales else 0)


def _values_bytes(use: Use) -> Expr:
    width = 0 if not _is_rounded(use) else 1 if is_exact(use) else use.width("input")
    return aligned(mul(width, numel(use.shape("input")[:-1]), _sizes(use).inputs))


def aligned(size: Expr) -> Expr:
    """What a part of a workspace takes that has so many bytes."""
    return mul(_ALIGNED, ceildiv(size, _ALIGNED))


def _is_rounded(use: Use) -> bool:
    """Whether the input is written anew first: rounded, or laid side by side."""
    return not is_given(use) and (_activation(use) != "none" or not use.operands["input"].is_contiguous)


def workspace(most: int | None) -> Callable[[Use], Expr]:
    """The input's few bits and their scales, and the parts of sums, for up to so many rows."""
    return lambda use: _space(use, most).end


def launches(most: int | None) -> Launches:
    """The input rounded, if it is; the product; and the sum of its parts, if there are some. For up to so many rows."""

    def made(use: Use) -> tuple[Launch, ...]:
        first = (rounding(use, own_scales(use)),) if _is_rounded(use) else ()
        return (*first, _product(use, most), *((_sum(use, most),) if tile_of(use, most).parts > 1 else ()))

    return made


def _sum(use: Use, most: int | None) -> Launch:
    tile, sizes, rows = tile_of(use, most), _sizes(use), numel(use.shape("input")[:-1])
    parts, has_pdl = Pointer("workspace", "float32", _space(use, most).parts), use.target.capability >= (9, 0)
    return Launch(
        f"{_KERNELS}:sum_kernel",
        grid=(rows, -(-sizes.outputs // _SUM_BLOCK)),
        args=(Pointer("out.0"), parts, Pointer("bias") if use.has("bias") else None, rows, sizes.outputs),
        constants={"SPLIT": tile.parts, "BLOCK": _SUM_BLOCK, "PDL": has_pdl},
        pdl=has_pdl,
    )


def rounding(use: Use, scales: Pointer | None, *, by_groups: bool = False, spread: Pointer | None = None) -> Launch:
    """The input of few bits, at the begin of the workspace, and the scales of its rows or groups, float32.

    `by_groups`: those of one group lie together. `spread` gets the one scale of the weight for each output.
    """
    rows, sizes, activation = rows_of(use, "input"), _sizes(use), _activation(use)
    has_pdl = use.target.capability >= (9, 0)
    kind = activation.partition("_")[0]
    if _has_scale_of_row(use):
        group = block = power_of_two(max(sizes.inputs, INPUT_GROUP))
    else:
        group, block = INPUT_GROUP if in_groups(activation) else 0, _ROUNDED_AT_ONCE
    return Launch(
        f"{_KERNELS}:round_kernel",
        grid=(rows.total, -(-sizes.inputs // block)),
        args=(
            input_of(use), scales, Pointer("input"), Pointer("input_scale") if use.has("input_scale") else None, spread,
            None if spread is None else Pointer("scales"), rows.inner, *rows.strides, sizes.inputs,
        ),
        constants={
            "KIND": kind, "GROUP": group, "POWERS_OF_TWO": has_powers_of_two(activation), "BY_GROUPS": by_groups,
            "OUTPUTS": 0 if spread is None else sizes.outputs, "BLOCK": block, "PDL": has_pdl,
        },
        num_warps=max(4, min(block // 1024, 16)),
        pdl=has_pdl,
    )  # fmt: skip


def input_laid(use: Use, scales: Pointer | None, last: Pointer | None, spread: Pointer | None) -> Launch:
    """Of an input that is given, the scales of groups as `rounding` lays them `by_groups`, and as int32 the last rows,
    whose scales lie apart; or `spread` as there."""
    sizes, rows, has_pdl = _sizes(use), numel(use.shape("input")[:-1]), use.target.capability >= (9, 0)
    count = 0 if scales is None else -(-sizes.inputs // INPUT_GROUP)
    return Launch(
        f"{_KERNELS}:lay_input_kernel",
        grid=(ceildiv(mul(count, rows), _ROUNDED_AT_ONCE) if count else ceildiv(sizes.outputs, _ROUNDED_AT_ONCE),),
        args=(
            scales, last, spread, None if scales is None else Pointer("input_scales"),
            None if last is None else Pointer("input", "int32"), None if spread is None else Pointer("scales"), rows,
        ),
        constants={
            "GROUPS": count, "OUTPUTS": 0 if spread is None else sizes.outputs, "BLOCK": _ROUNDED_AT_ONCE,
            "PDL": has_pdl,
        },
        pdl=has_pdl,
    )  # fmt: skip


def input_of(use: Use) -> Pointer:
    """What the product reads."""
    if not _is_rounded(use):
        return Pointer("input")
    exact: Dtype = "float8_e4m3fn" if use.constant("format") == "fp8" else "int8"
    return Pointer("workspace", exact if is_exact(use) else use.operands["input"].type.dtype)


def input_scales_of(use: Use) -> tuple[str, Pointer | None]:
    """Of what the product reads: as the kernels' `INPUT_SCALES`, and where they are."""
    activation = _activation(use)
    kind = "steps" if in_groups(activation) else {"none": "none", "fp8_tensor": "one"}.get(activation, "row")
    if is_given(use) and kind == "one":
        kind = "row"
    return kind, Pointer("input_scale") if kind == "one" else own_scales(use)


def own_scales(use: Use) -> Pointer | None:
    """Where the scales are that the rounded input has; None where it has none of its own."""
    if is_given(use):
        return Pointer("input_scales")
    of_rows = _activation(use) not in ("none", "fp8_tensor")
    return Pointer("workspace", "float32", _values_bytes(use)) if of_rows else None


def _offset(use: Use) -> int:
    offset = use.constant("zero_offset")
    return int(offset) if isinstance(offset, int) else 0


class _Parts(NamedTuple):
    """How kernels are told of the weight's parts: their addresses, how far outputs and inputs are apart in them, and
    what is compiled in."""

    pointers: tuple[Pointer | None, ...]
    strides: tuple[Stride | int, ...]
    constants: dict[str, int | float | bool | str]


def _parts_of(use: Use, each: int) -> _Parts:
    """The weight as words of so many values."""
    format, sizes = str(use.constant("format")), _sizes(use)
    k, n = (0, 1) if format == "gptq" else (1, 0)
    is_bytes = each > 1 and use.width("weight") == 1
    words = (sizes.inputs // each, 1) if is_bytes else (Stride("weight", n), Stride("weight", k))
    zeros = (Stride("zeros", n), Stride("zeros", k)) if use.has("zeros") else (0, 0)
    of_all = "none"
    if use.has("global_scale"):
        of_all = ("rows" if use.number("global_scale", 0) != 1 else "one") + ("_divided" if "div" in format else "")
    names = ("scales", "zeros", "groups", "global_scale")
    return _Parts(
        (Pointer("weight", "int32") if is_bytes else Pointer("weight"),
         *(Pointer(name) if use.has(name) else None for name in names)),
        (*words, Stride("scales", n), Stride("scales", k), *zeros),
        {"FORMAT": _SAME.get(format, format), "VALUES": each, "GROUP": sizes.group, "ROWS": sizes.rows,
         "OFFSET": _offset(use), "GLOBAL": of_all},
    )  # fmt: skip


def _product(use: Use, most: int | None) -> Launch:
    tile, sizes, each = tile_of(use, most), _sizes(use), values_of_a_word(use)
    of, rows, has_pdl = _parts_of(use, each), numel(use.shape("input")[:-1]), use.target.capability >= (9, 0)
    kind, input_scales = input_scales_of(use)
    parts = Pointer("workspace", "float32", _space(use, most).parts) if tile.parts > 1 else None
    bias = Pointer("bias") if use.has("bias") and parts is None else None
    return Launch(
        f"{_KERNELS}:product_kernel",
        grid=(ceildiv(rows, tile.m), -(-sizes.outputs // tile.n), tile.parts),
        args=(
            Pointer("out.0"), parts, input_of(use), *of.pointers, input_scales, bias, rows, sizes.outputs,
            sizes.inputs // each, sizes.num_groups, *of.strides,
        ),
        constants={
            **of.constants, "SCALES": _scales_at(use, tile.k * each), "INPUT_SCALES": kind, "SPLIT": tile.parts,
            "BLOCK_M": tile.m, "BLOCK_N": tile.n, "BLOCK_K": tile.k, "PDL": has_pdl,
        },
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        pdl=has_pdl,
    )  # fmt: skip


def dequantised(use: Use) -> tuple[Launch, ...]:
    """The weight's values in the input's dtype, and cuBLASLt's product with them: a part of the outputs at a time."""
    sizes, at_once = _sizes(use), _outputs_at_once(use)
    parts = range(0, sizes.outputs, at_once)
    return tuple(each for first in parts for each in _part(use, first, min(first + at_once, sizes.outputs)))


def _outputs_at_once(use: Use) -> int:
    """Outputs whose values are made before they are multiplied."""
    sizes = _sizes(use)
    fit = _WHOLE_BYTES // (use.width("input") * sizes.inputs)
    if sizes.outputs <= fit:
        return sizes.outputs
    most = _MOST_OUTPUTS if fit >= _MOST_OUTPUTS else _LEAST_OUTPUTS
    return min(sizes.outputs, most)


def _part(use: Use, first: int, end: int) -> tuple[Launch, Launch]:
    """Of the outputs from one on to another."""
    sizes, format = _sizes(use), str(use.constant("format"))
    each = _VALUES.get(format, 1)
    of = _parts_of(use, each)
    dtype = use.operands["input"].type.dtype
    values = Pointer("workspace", dtype, linear.workspace_bytes(_outputs_at_once(use)))
    has_pdl = use.target.capability >= (9, 0)
    if by_words := each > 1 and not use.has("groups"):
        n, k = _WORDS_AT_ONCE
        pointers, inputs = (*of.pointers[:3], of.pointers[4]), sizes.inputs // each
    else:
        n, k = _VALUES_AT_ONCE
        pointers, inputs = of.pointers, sizes.inputs
    made = Launch(
        f"{_KERNELS}_whole:{'words' if by_words else 'values'}_kernel",
        grid=(-(-(end - first) // n), -(-inputs // k)),
        args=(values, *pointers, first, end, inputs, sizes.num_groups, *of.strides),
        constants={**of.constants, "BLOCK_N": n, "BLOCK_K": k, "PDL": has_pdl},
        pdl=has_pdl,
    )
    operands = {**use.operands, "weight": Operand(TensorType(dtype, (end - first, sizes.inputs)), is_contiguous=True)}
    product = linear.product_into(
        use._replace(operands=operands), Pointer("out.0"), Pointer("workspace"), columns=(first, sizes.outputs)
    )
    return made, product._replace(args=tuple(values if arg == Pointer("weight") else arg for arg in product.args))


def dequantised_workspace(use: Use) -> Expr:
    """What cuBLASLt takes, and the values."""
    at_once = _outputs_at_once(use)
    return linear.workspace_bytes(at_once) + use.width("input") * at_once * _sizes(use).inputs
