"""Float8 weights times inputs that are rounded to float8, by cuBLASLt: what it takes of them, the launches, and the
memory between them. No torch and no triton here.

`round_kernel` writes the input and its scales into the workspace, and the library multiplies both with their scales.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from precast.ir.graph.schema import Expr
from precast.ir.graph.symbols import add, ceildiv, floordiv, mul, numel
from precast.ir.ops.rows_rounded import in_groups
from precast.ir.weights.tensorfile import element_bytes
from precast.kernels.linear import records as linear
from precast.kernels.linear.cublaslt import ALIGNED, BLOCK, BLOCK_ROWS
from precast.kernels.quantised_linear.launches import aligned, input_laid, input_of, is_given, rounding, sizes_of
from precast.kernels.records import Launch, Pointer
from precast.kernels.use import Use

Scales = Literal["one", "rows", "blocks"]
"""What has a scale together, as `ScaledProduct` says it."""
_STRIDE = 4
"""What the number of a row's scales is a multiple of, in blocks of the weight."""


def scales_of(use: Use) -> Scales | None:
    """How the library is told of the scales of a layer; None where it can't be, or sizes aren't known at load.

    In `rows`, one scale of the whole weight, or of the whole input, is written out for each row before.
    """
    sizes, activation = sizes_of(use), use.constant("activation")
    others = ("zeros", "groups", "global_scale")
    if sizes is None or use.constant("format") != "fp8" or any(map(use.has, others)):
        return None
    if in_groups(activation):
        in_blocks = (sizes.rows, sizes.group) == (BLOCK, BLOCK) and sizes.inputs % (BLOCK * _STRIDE) == 0
        return "blocks" if in_blocks else None
    if sizes.num_groups != 1 or not (has_one_scale(use) or sizes.rows == 1):
        return None
    if activation == "fp8_tensor":
        return "one" if has_one_scale(use) else "rows"
    return "rows" if activation == "fp8_token" else None


def has_even_sizes(use: Use) -> bool:
    """Whether inputs and outputs are multiples of what the library wants, and known at load."""
    sizes = sizes_of(use)
    return sizes is not None and sizes.inputs % ALIGNED == 0 and sizes.outputs % ALIGNED == 0


def lies_ready(use: Use) -> bool:
    """Whether all but the input lies in row-major order, at addresses of params, and a bias has the result's type."""
    given = [operand for name, operand in use.operands.items() if name not in ("input", "input_scales")]
    is_alike = not use.has("bias") or use.operands["bias"].type.dtype == use.result.dtype
    return is_alike and all(each.is_contiguous and not each.is_activation for each in given)


class _Space(NamedTuple):
    """The workspace: the rounded input, and from these bytes on its last rows, which are multiplied as `BLOCK_ROWS`;
    its scales; the weight's scale for each output; the result of `BLOCK_ROWS` rows; what the library takes; its end.

    Of an input that is given, copies of the last rows alone are there.
    """

    last: Expr
    scales: Expr
    spread: Expr
    spare: Expr
    library: Expr
    end: Expr


def _space(use: Use) -> _Space:
    sizes, kind, rows = sizes_of(use), scales_of(use), numel(use.shape("input")[:-1])
    assert sizes is not None, "the record's conditions want sizes that are known"
    in_blocks = kind == "blocks"
    held = mul(BLOCK_ROWS, ceildiv(rows, BLOCK_ROWS)) if in_blocks else rows
    each = sizes.inputs // BLOCK if in_blocks else 0 if kind == "one" or is_given(use) else 1
    last = 0 if is_given(use) else mul(BLOCK_ROWS * sizes.inputs, floordiv(rows, BLOCK_ROWS))
    copied = BLOCK_ROWS if in_blocks else 0
    scales = aligned(mul(copied if is_given(use) else held, sizes.inputs))
    spread = add(scales, aligned(mul(4 * each, held)))
    spare = add(spread, aligned(4 * sizes.outputs) if _is_spread(use) else 0)
    library = add(spare, aligned(element_bytes(use.result.dtype) * BLOCK_ROWS * sizes.outputs) if in_blocks else 0)
    return _Space(last, scales, spread, spare, library, add(library, linear.workspace_bytes(sizes.outputs)))


def _is_spread(use: Use) -> bool:
    return scales_of(use) == "rows" and has_one_scale(use)


def has_one_scale(use: Use) -> bool:
    """Whether the whole weight has one scale."""
    return (use.number("scales", 0), use.number("scales", 1)) == (1, 1)


def workspace(use: Use) -> Expr:
    """The input's few bits and their scales, what is written out of others, and what cuBLASLt takes."""
    return _space(use).end


def launches(use: Use) -> tuple[Launch, ...]:
    """The input rounded, if it isn't yet, and the product."""
    sizes, kind, rows, space = sizes_of(use), scales_of(use), numel(use.shape("input")[:-1]), _space(use)
    assert sizes is not None, "the record's conditions want sizes that are known"
    assert kind is not None, "and scales that the library takes"
    assert use.dtype is not None
    scales = None if kind == "one" else Pointer("workspace", "float32", space.scales)
    if is_given(use) and kind == "rows":
        scales = Pointer("input_scales")
    spread = Pointer("workspace", "float32", space.spread) if _is_spread(use) else None
    in_blocks = kind == "blocks"
    product = Launch(
        "precast.kernels.linear.cublaslt:ScaledProduct",
        grid=(rows,),
        args=(
            Pointer("out.0"), input_of(use), Pointer("weight"),
            Pointer("bias") if use.has("bias") else None, spread or Pointer("scales"),
            scales or Pointer("input_scale"), Pointer("workspace", "uint8", space.library),
            Pointer("workspace", "float8_e4m3fn", space.last) if in_blocks else None,
            Pointer("workspace", use.dtype, space.spare) if in_blocks else None, rows,
        ),
        constants={
            "dtype": use.dtype, "outputs": sizes.outputs, "inputs": sizes.inputs, "bias": use.has("bias"),
            "workspace_bytes": linear.workspace_bytes(sizes.outputs), "scales": kind,
        },
        library=True,
    )  # fmt: skip
    if not is_given(use):
        return rounding(use, scales, by_groups=in_blocks, spread=spread), product
    if in_blocks:
        return input_laid(use, scales, Pointer("workspace", "int32", space.last), None), product
    return (*((input_laid(use, None, None, spread),) if spread else ()), product)
