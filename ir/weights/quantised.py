"""What a `Dequantise` must be made of, format by format: shapes and element types, nothing else."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from precast.ir import limits
from precast.ir.errors import RecipeError
from precast.ir.graph import symbols
from precast.ir.graph.schema import Dequantise, Dtype, Expr

PER_INT32 = 8
"""Values of four bits in an int32."""

PACKED = {"packed4": 8, "packed8": 4}
"""Values in an int32, of the formats that have groups along its rows."""

NVFP4_BLOCK = 16
"""Values that share a scale in NVFP4."""

PARTS = ("of", "scales", "zeros", "groups", "global_scale")
"""The parts of a `Dequantise`, in the order in which they are handed on; all but the first two may be absent."""

_STORED: dict[str, Dtype] = {
    "fp8": "float8_e4m3fn", "mxfp4": "uint8", "awq": "int32", "gptq": "int32", "nvfp4": "uint8",
    "nvfp4_divided": "uint8", "packed4": "int32", "packed8": "int32", "int8": "int8",
}  # fmt: skip
_SCALES: dict[str, tuple[Dtype | None, ...]] = {
    "mxfp4": ("uint8",), "nvfp4": ("float8_e4m3fn",), "nvfp4_divided": ("float8_e4m3fn",),
}  # fmt: skip
_ANY_FLOAT: tuple[Dtype | None, ...] = (None, "float32", "bfloat16", "float16")

_NEEDED = {
    # format: the parts beside values and scales, and the block
    "fp8": ("block",),
    "mxfp4": (),
    "awq": ("zeros",),
    "gptq": ("zeros", "groups"),
    "nvfp4": ("global_scale",),
    "nvfp4_divided": ("global_scale",),
    "packed4": (),
    "packed8": (),
    "int8": ("block",),
}
_OPTIONAL = {"packed4": ("zeros", "groups"), "packed8": ("zeros", "groups"), "int8": ("zeros",)}

Sizes = tuple[int, ...]


def shape(recipe: Dequantise, *parts: Sequence[Expr]) -> tuple[Expr, ...]:
    """The sizes of the values, from those of the parts that the recipe has, in the order of `PARTS`.

    Raises RecipeError where parts don't fit each other.
    """
    needed, optional = _NEEDED[recipe.format], _OPTIONAL.get(recipe.format, ())
    for name in ("block", "zeros", "groups", "global_scale"):
        given, wanted = getattr(recipe, name) is not None, name in needed
        fits = given == wanted or name in optional
        expect(fits, f"{recipe.format}: {name} is {'missing' if wanted else 'not part of the format'}")
    has_zeros = recipe.zeros is not None or recipe.format in PACKED
    expect(recipe.zero_offset == 0 or has_zeros, f"{recipe.format}: a zero_offset without zeros")
    names = (name for name in PARTS if getattr(recipe, name) is not None)
    sizes = {name: _constant(recipe.format, part) for name, part in zip(names, parts, strict=True)}
    of = sizes["of"]
    matrices = of[0] if len(of) > 2 else 1
    expect(matrices <= limits.MAX_EACH, f"{recipe.format}: {matrices} matrices, expected at most {limits.MAX_EACH}")
    if recipe.format in ("fp8", "int8"):
        return _in_blocks(recipe, sizes)
    if recipe.format == "mxfp4":
        return _mxfp4(of, sizes["scales"])
    if recipe.format in ("nvfp4", "nvfp4_divided"):
        return _nvfp4(recipe.format, sizes)
    if recipe.format in PACKED:
        return _packed(recipe.format, sizes)
    if recipe.format == "awq":
        return _awq(of, sizes["scales"], sizes["zeros"])
    return _gptq(of, sizes["scales"], sizes["zeros"], sizes["groups"])


def dtype(recipe: Dequantise, *parts: Dtype | None) -> Dtype:
    """float32. Raises RecipeError for parts of other element types than the format has; `parts` as in `shape`."""
    names = (name for name in PARTS if getattr(recipe, name) is not None)
    found = dict(zip(names, parts, strict=True))
    stored = _STORED[recipe.format]
    expect(
        found["of"] == stored,
        f"{recipe.format}: expected values of {stored}, found {found['of'] or 'any floating type'}",
    )
    scales = found["scales"]
    expect(scales in _SCALES.get(recipe.format, _ANY_FLOAT), f"{recipe.format}: scales of {scales}")
    whole = found.get("global_scale", "float32")
    expect(whole in _ANY_FLOAT, f"{recipe.format}: a global scale of {whole}")
    integer: Dtype = "int8" if recipe.format == "int8" else "int32"
    fits = all(found.get(name, integer) == integer for name in ("zeros", "groups"))
    expect(fits, f"{recipe.format}: zeros and groups are of {integer}")
    return "float32"


def _in_blocks(recipe: Dequantise, sizes: Mapping[str, Sizes]) -> Sizes:
    of, scales, block, format = sizes["of"], sizes["scales"], recipe.block, recipe.format
    expect(block is not None and min(block) > 0, f"{format}: a block of {block}")
    assert block is not None
    expect(len(of) >= 2, f"{format}: values of {list(of)}, expected rows and columns")
    expected = (*of[:-2], -(-of[-2] // block[0]), -(-of[-1] // block[1]))
    expect(scales == expected, f"{format}: expected scales of {list(expected)}, found {list(scales)}")
    zeros = sizes.get("zeros", expected)
    expect(zeros == expected, f"{format}: expected zeros of {list(expected)}, found {list(zeros)}")
    return of


def _mxfp4(of: Sizes, scales: Sizes) -> Sizes:
    fits = len(of) >= 2 and scales == of[:-1]
    expect(fits, f"mxfp4: blocks of {list(of)} and scales of {list(scales)} don't fit")
    return (*of[:-2], math.prod(of[-2:]) * 2)


def _nvfp4(format: str, sizes: Mapping[str, Sizes]) -> Sizes:
    of, scales, whole = sizes["of"], sizes["scales"], sizes["global_scale"]
    fits = len(of) >= 2 and of[:-1] == scales[:-1] and of[-1] * 2 == scales[-1] * NVFP4_BLOCK
    fits = fits and whole == (*of[:-2], 1, 1)
    found = f"values of {list(of)}, scales of {list(scales)}, a global scale of {list(whole)}"
    expect(fits, f"{format}: {found} don't fit")
    return (*of[:-1], scales[-1] * NVFP4_BLOCK)


def _packed(format: str, sizes: Mapping[str, Sizes]) -> Sizes:
    of, scales, each = sizes["of"], sizes["scales"], PACKED[format]
    expect(len(of) == 2 and len(scales) == 2, f"{format}: values of {list(of)} and scales of {list(scales)}")
    columns = of[1] * each
    fits = scales[0] == of[0] and scales[1] > 0 and ("groups" in sizes or columns % scales[1] == 0)
    zeros, groups = sizes.get("zeros"), sizes.get("groups")
    fits = fits and zeros in (None, (-(-of[0] // each), scales[1])) and groups in (None, (columns,))
    found = ", ".join(f"{name} of {list(size)}" for name, size in sizes.items())
    expect(fits, f"{format}: {found} don't fit")
    return (of[0], columns)


def _awq(of: Sizes, scales: Sizes, zeros: Sizes) -> Sizes:
    fits = len(of) == 2 and len(scales) == 2 and scales[0] > 0 and of[0] % scales[0] == 0
    fits = fits and scales[1] == of[1] * PER_INT32 and zeros == (scales[0], of[1])
    expect(fits, f"awq: values of {list(of)}, scales of {list(scales)} and zeros of {list(zeros)} don't fit")
    return (of[0], of[1] * PER_INT32)


def _gptq(of: Sizes, scales: Sizes, zeros: Sizes, groups: Sizes) -> Sizes:
    fits = len(of) == 2 and len(scales) == 2 and scales[0] > 0 and scales[1] == of[1]
    fits = fits and len(zeros) == 2 and (zeros[0], zeros[1] * PER_INT32) == scales
    fits = fits and groups == (of[0] * PER_INT32,)
    found = f"values of {list(of)}, scales of {list(scales)}, zeros of {list(zeros)}, groups of {list(groups)}"
    expect(fits, f"gptq: {found} don't fit")
    return (of[0] * PER_INT32, of[1])


def _constant(format: str, sizes: Sequence[Expr]) -> Sizes:
    found = tuple(size for size in sizes if isinstance(size, int))
    written = ", ".join(map(symbols.text, sizes))
    expect(len(found) == len(sizes), f"{format}: a part of [{written}], expected constants")
    return found


def expect(ok: bool, message: str) -> None:
    """Raise RecipeError unless this holds."""
    if not ok:
        raise RecipeError(message)
