"""What a `Dequantise` must be made of, format by format: shapes and element types, nothing else."""

from __future__ import annotations

import math
from collections.abc import Sequence

from precast.ir import limits
from precast.ir.errors import RecipeError
from precast.ir.graph import symbols
from precast.ir.graph.schema import Dequantise, Dtype, Expr

PER_INT32 = 8
"""Values of four bits in an int32."""

_STORED: dict[str, Dtype] = {"fp8": "float8_e4m3fn", "mxfp4": "uint8", "awq": "int32", "gptq": "int32"}
_ALLOWED = {
    # format: the optional parts that it has
    "fp8": ("block",),
    "mxfp4": (),
    "awq": ("zeros",),
    "gptq": ("zeros", "groups"),
}


def shape(recipe: Dequantise, of: Sequence[Expr], scales: Sequence[Expr], *rest: Sequence[Expr]) -> tuple[Expr, ...]:
    """The sizes of the values, from those of the parts: `of`, `scales`, then `zeros` and `groups` where there are some.

    Raises RecipeError where parts don't fit each other.
    """
    for name in ("block", "zeros", "groups"):
        given, wanted = getattr(recipe, name) is not None, name in _ALLOWED[recipe.format]
        expect(given == wanted, f"{recipe.format}: {name} is {'missing' if wanted else 'not part of the format'}")
    expect(recipe.zero_offset == 0 or recipe.zeros is not None, f"{recipe.format}: a zero_offset without zeros")
    sizes = [_constant(recipe.format, part) for part in (of, scales, *rest)]
    matrices = sizes[0][0] if len(sizes[0]) > 2 else 1
    expect(matrices <= limits.MAX_EACH, f"{recipe.format}: {matrices} matrices, expected at most {limits.MAX_EACH}")
    if recipe.format == "fp8":
        return _fp8(sizes[0], sizes[1], recipe.block)
    if recipe.format == "mxfp4":
        return _mxfp4(sizes[0], sizes[1])
    return _awq(*sizes) if recipe.format == "awq" else _gptq(*sizes)


def dtype(recipe: Dequantise, of: Dtype | None, scales: Dtype | None, *rest: Dtype | None) -> Dtype:
    """float32. Raises RecipeError for parts of other element types than the format has."""
    stored = _STORED[recipe.format]
    expect(of == stored, f"{recipe.format}: expected values of {stored}, found {of or 'any floating type'}")
    wanted = ("uint8",) if recipe.format == "mxfp4" else (None, "float32", "bfloat16", "float16")
    expect(scales in wanted, f"{recipe.format}: scales of {scales}")
    expect(all(part == "int32" for part in rest), f"{recipe.format}: zeros and groups are of int32")
    return "float32"


def _fp8(of: tuple[int, ...], scales: tuple[int, ...], block: tuple[int, int] | None) -> tuple[int, ...]:
    expect(block is not None and min(block) > 0, f"fp8: a block of {block}")
    assert block is not None
    expect(len(of) >= 2, f"fp8: values of {list(of)}, expected rows and columns")
    expected = (*of[:-2], -(-of[-2] // block[0]), -(-of[-1] // block[1]))
    expect(scales == expected, f"fp8: expected scales of {list(expected)}, found {list(scales)}")
    return of


def _mxfp4(of: tuple[int, ...], scales: tuple[int, ...]) -> tuple[int, ...]:
    fits = len(of) >= 2 and scales == of[:-1]
    expect(fits, f"mxfp4: blocks of {list(of)} and scales of {list(scales)} don't fit")
    return (*of[:-2], math.prod(of[-2:]) * 2)


def _awq(of: tuple[int, ...], scales: tuple[int, ...], zeros: tuple[int, ...]) -> tuple[int, ...]:
    fits = len(of) == 2 and len(scales) == 2 and scales[0] > 0 and of[0] % scales[0] == 0
    fits = fits and scales[1] == of[1] * PER_INT32 and zeros == (scales[0], of[1])
    expect(fits, f"awq: values of {list(of)}, scales of {list(scales)} and zeros of {list(zeros)} don't fit")
    return (of[0], of[1] * PER_INT32)


def _gptq(
    of: tuple[int, ...], scales: tuple[int, ...], zeros: tuple[int, ...], groups: tuple[int, ...]
) -> tuple[int, ...]:
    fits = len(of) == 2 and len(scales) == 2 and scales[0] > 0 and scales[1] == of[1]
    fits = fits and len(zeros) == 2 and (zeros[0], zeros[1] * PER_INT32) == scales
    fits = fits and groups == (of[0] * PER_INT32,)
    found = f"values of {list(of)}, scales of {list(scales)}, zeros of {list(zeros)}, groups of {list(groups)}"
    expect(fits, f"gptq: {found} don't fit")
    return (of[0] * PER_INT32, of[1])


def _constant(format: str, sizes: Sequence[Expr]) -> tuple[int, ...]:
    found = tuple(size for size in sizes if isinstance(size, int))
    written = ", ".join(map(symbols.text, sizes))
    expect(len(found) == len(sizes), f"{format}: a part of [{written}], expected constants")
    return found


def expect(ok: bool, message: str) -> None:
    """Raise RecipeError unless this holds."""
    if not ok:
        raise RecipeError(message)
