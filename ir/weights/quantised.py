"""What a `Dequantise` must be made of, format by format: shapes and element types, nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from precast.ir import limits
from precast.ir.errors import RecipeError
from precast.ir.graph import symbols
from precast.ir.graph.schema import Dequantise, Dtype, Expr, Quantise, Read, ReadDtype, Repack
from precast.ir.graph.symbols import shape_text

PER_INT32 = 8
"""Values of four bits in an int32."""

PACKED = {"packed4": 8, "packed8": 4}
"""Values in an int32, of the formats that have groups along its rows."""

NVFP4_BLOCK = 16
"""Values that share a scale in NVFP4."""

MX_BLOCK = 32
"""Values that share an exponent in the MX formats, as the OCP's specification has them."""

PARTS = ("of", "scales", "zeros", "groups", "global_scale", "biases")
"""The parts of a `Dequantise`, in the order in which they are handed on; all but the first two may be absent."""

_STORED: dict[str, Dtype] = {
    "fp8": "float8_e4m3fn", "mxfp4": "uint8", "awq": "int32", "gptq": "int32", "nvfp4": "uint8",
    "nvfp4_divided": "uint8", "packed4": "int32", "packed8": "int32", "int8": "int8",
}  # fmt: skip
_SCALES: dict[str, tuple[Dtype | None, ...]] = {
    "mxfp4": ("uint8",), "nvfp4": ("float8_e4m3fn",), "nvfp4_divided": ("float8_e4m3fn",),
}  # fmt: skip
_ANY_FLOAT: tuple[Dtype | None, ...] = (None, "float32", "bfloat16", "float16")
_EXPONENTS = frozenset({"fp8"})
"""The formats whose scales may also be read as exponents, float8_e8m0fnu; ops take them as floating-point numbers."""

_NEEDED = {
    # format: the parts beside values and scales, and the block
    "fp8": ("block",),
    "mxfp4": (),
    "awq": ("zeros",),
    "gptq": ("zeros",),
    "nvfp4": ("global_scale",),
    "nvfp4_divided": ("global_scale",),
    "packed4": (),
    "packed8": (),
    "int8": ("block",),
}
_OPTIONAL = {
    "gptq": ("groups",), "packed4": ("zeros", "groups", "biases"), "packed8": ("zeros", "groups", "biases"),
    "int8": ("zeros",),
}  # fmt: skip

Sizes = tuple[Expr, ...]


def shape(recipe: Dequantise, *parts: Sequence[Expr]) -> tuple[Expr, ...]:
    """The sizes of the values, from those of the parts that the recipe has, in the order of `PARTS`.

    Raises RecipeError where parts don't fit each other.
    """
    names = [name for name in PARTS if getattr(recipe, name) is not None]
    _expect_parts(recipe.format, names, recipe.block, recipe.zero_offset)
    sizes = {name: _constant(recipe.format, part) for name, part in zip(names, parts, strict=True)}
    of, whole = sizes["of"], sizes.get("global_scale")
    matrices = of[0] if len(of) > (3 if recipe.format == "mxfp4" else 2) else 1
    assert isinstance(matrices, int)
    expect(matrices <= limits.MAX_EACH, f"{recipe.format}: {matrices} matrices, expected at most {limits.MAX_EACH}")
    one: Sizes = (*of[:-2], 1, 1)
    if whole is not None:
        expect(
            whole == one, f"{recipe.format}: expected a global scale of {shape_text(one)}, found {shape_text(whole)}"
        )
    return _shape(recipe.format, sizes, recipe.block)


def shape_in_op(
    format: str, sizes: Mapping[str, Sequence[Expr]], block: Sequence[Expr] | None, zero_offset: int
) -> tuple[Expr, ...]:
    """The sizes of the values that an op reads from parts, named as in `PARTS`, for what stands in a `Dequantise`.

    Sizes are expressions over the world's symbols here. One part may be another way than in a recipe: the
    `global_scale` may have one value for each row, [.., R, 1]. No op has `biases`, and which formats it takes is the
    op's to say.

    Raises RecipeError where parts don't fit each other.
    """
    _expect_parts(format, sizes, block, zero_offset)
    return _shape(format, {name: tuple(size) for name, size in sizes.items()}, block)


def shape_at_load(recipe: Quantise, of: Sequence[Expr]) -> Sizes:
    """The sizes of a part of matrices that are quantised while they are read. Raises RecipeError for no matrices."""
    expect(len(of) >= 2, f"quantise: {shape_text(tuple(of))}, expected rows and columns")
    expect(all(size > 0 for size in recipe.block), f"quantise: a block of {recipe.block}")
    if recipe.part == "values":
        return tuple(of)
    return (*of[:-2], *(symbols.ceildiv(size, each) for size, each in zip(of[-2:], recipe.block, strict=True)))


def dtype_at_load(recipe: Quantise, of: ReadDtype | None) -> Dtype:
    """The element type of such a part. Raises RecipeError for what holds no numbers of a floating type."""
    expect(of in (*_ANY_FLOAT, "float64"), f"quantise: of {of}, expected a floating type")
    return "float8_e4m3fn" if recipe.part == "values" else "float32"


def repacked_shape(recipe: Repack, of: Sequence[Expr]) -> Sizes:
    """The sizes of `packed4`'s words, from those that are read. Raises RecipeError for what is no matrix of words."""
    fits = isinstance(recipe.of, Read) and len(of) == 2
    expect(fits, f"repack: expected a matrix that is read, found {type(recipe.of).__name__.lower()} {shape_text(of)}")
    if recipe.part == "zeros":
        return of[1], of[0]
    rows = "inputs" if recipe.part == "values" else "outputs"
    expect(_divides(PER_INT32, of[0]), f"repack: {symbols.text(of[0])} {rows}, expected a multiple of {PER_INT32}")
    more, fewer = symbols.mul(of[1], PER_INT32), symbols.floordiv(of[0], PER_INT32)
    return (more, fewer) if recipe.part == "values" else (fewer, more)


def repacked_dtype(of: ReadDtype | None) -> Dtype:
    """The element type of such words. Raises RecipeError for others."""
    expect(of == "int32", f"repack: of {of or 'any floating type'}, expected int32")
    return "int32"


def stored_dtype(format: str) -> Dtype:
    """The element type of a format's values."""
    return _STORED[format]


def scales_dtypes(format: str) -> tuple[Dtype, ...]:
    """The element types that a format's scales may have."""
    return tuple(dtype for dtype in _SCALES.get(format, _ANY_FLOAT) if dtype is not None)


def _expect_parts(format: str, given: Iterable[str], block: Sequence[Expr] | None, zero_offset: int) -> None:
    has = {"of", *given} | ({"block"} if block is not None else set())
    for name in ("scales", "block", "zeros", "groups", "global_scale", "biases"):
        wanted = name == "scales" or name in _NEEDED[format]
        fits = (name in has) == wanted or name in _OPTIONAL.get(format, ())
        expect(fits, f"{format}: {name} is {'missing' if wanted else 'not part of the format'}")
    has_zeros = "zeros" in has or format in PACKED
    expect(zero_offset == 0 or has_zeros, f"{format}: a zero_offset without zeros")


def _shape(format: str, sizes: Mapping[str, Sizes], block: Sequence[Expr] | None) -> Sizes:
    of, scales = sizes["of"], sizes["scales"]
    if format in ("fp8", "int8"):
        return _in_blocks(format, sizes, block)
    if format == "mxfp4":
        return _mxfp4(of, scales)
    if format in ("nvfp4", "nvfp4_divided"):
        return _nvfp4(format, sizes)
    if format in PACKED:
        return _packed(format, sizes)
    return _awq(of, scales, sizes["zeros"]) if format == "awq" else _gptq(sizes)


def dtype(recipe: Dequantise, *parts: ReadDtype | None) -> Dtype:
    """float32. Raises RecipeError for parts of other element types than the format has; `parts` as in `shape`."""
    names = (name for name in PARTS if getattr(recipe, name) is not None)
    found = dict(zip(names, parts, strict=True))
    stored = _STORED[recipe.format]
    expect(
        found["of"] == stored,
        f"{recipe.format}: expected values of {stored}, found {found['of'] or 'any floating type'}",
    )
    scales = found["scales"]
    are_exponents = scales == "float8_e8m0fnu" and recipe.format in _EXPONENTS
    fits = are_exponents or scales in _SCALES.get(recipe.format, _ANY_FLOAT)
    expect(fits, f"{recipe.format}: scales of {scales}")
    whole = found.get("global_scale", "float32")
    expect(whole in _ANY_FLOAT, f"{recipe.format}: a global scale of {whole}")
    biases = found.get("biases", "float32")
    expect(biases in _ANY_FLOAT, f"{recipe.format}: biases of {biases}")
    integer: Dtype = "int8" if recipe.format == "int8" else "int32"
    fits = all(found.get(name, integer) == integer for name in ("zeros", "groups"))
    expect(fits, f"{recipe.format}: zeros and groups are of {integer}")
    return "float32"


def _in_blocks(format: str, sizes: Mapping[str, Sizes], block: Sequence[Expr] | None) -> Sizes:
    of, scales = sizes["of"], sizes["scales"]
    assert block is not None
    is_block = len(block) == 2 and all(not isinstance(each, int) or each > 0 for each in block)
    expect(is_block, f"{format}: a block of {block}")
    expect(len(of) >= 2, f"{format}: values of {shape_text(of)}, expected rows and columns")
    expected = (*of[:-2], *(_in_parts(size, each) for size, each in zip(of[-2:], block, strict=True)))
    expect(_equal(scales, expected), f"{format}: expected scales of {shape_text(expected)}, found {shape_text(scales)}")
    zeros = sizes.get("zeros", expected)
    expect(_equal(zeros, expected), f"{format}: expected zeros of {shape_text(expected)}, found {shape_text(zeros)}")
    return of


def _in_parts(size: Expr, part: Expr) -> Expr:
    """How many parts there are; one, too, of a size that in one rank's world, the largest, is no more than a part."""
    alone = symbols.substitute(size, {"tp": 1, "ep": 1, "rank": 0})
    return 1 if isinstance(alone, int) and isinstance(part, int) and 0 < alone <= part else symbols.ceildiv(size, part)


def _mxfp4(of: Sizes, scales: Sizes) -> Sizes:
    fits = len(of) >= 2 and _equal(scales, of[:-1])
    expect(fits, f"mxfp4: blocks of {shape_text(of)} and scales of {shape_text(scales)} don't fit")
    return (*of[:-2], symbols.mul(*of[-2:], 2))


def _nvfp4(format: str, sizes: Mapping[str, Sizes]) -> Sizes:
    of, scales, whole = sizes["of"], sizes["scales"], sizes["global_scale"]
    fits = len(of) >= 2 and len(scales) == len(of) and _equal(of[:-1], scales[:-1])
    values, scaled = (tuple(symbols.mul(e, n) for e in each[-1:]) for each, n in ((of, 2), (scales, NVFP4_BLOCK)))
    fits = fits and _equal(values, scaled)
    fits = fits and any(_equal(whole, (*of[:-2], each, 1)) for each in (1, *of[-2:-1]))
    found = f"values of {shape_text(of)}, scales of {shape_text(scales)}, a global scale of {shape_text(whole)}"
    expect(fits, f"{format}: {found} don't fit")
    return (*of[:-1], symbols.mul(scales[-1], NVFP4_BLOCK))


def _packed(format: str, sizes: Mapping[str, Sizes]) -> Sizes:
    of, scales, each = sizes["of"], sizes["scales"], PACKED[format]
    expect(
        len(of) == 2 and len(scales) == 2, f"{format}: values of {shape_text(of)} and scales of {shape_text(scales)}"
    )
    columns = symbols.mul(of[1], each)
    fits = symbols.equal(scales[0], of[0]) and scales[1] != 0 and ("groups" in sizes or _divides(scales[1], columns))
    zeros, groups = sizes.get("zeros"), sizes.get("groups")
    fits = fits and (zeros is None or _equal(zeros, (symbols.ceildiv(of[0], each), scales[1])))
    fits = fits and (groups is None or (_equal(groups, (columns,)) and "biases" not in sizes))
    fits = fits and _equal(sizes.get("biases", scales), scales)
    found = ", ".join(f"{name} of {shape_text(size)}" for name, size in sizes.items())
    expect(fits, f"{format}: {found} don't fit")
    return (of[0], columns)


def _awq(of: Sizes, scales: Sizes, zeros: Sizes) -> Sizes:
    fits = len(of) == 2 and len(scales) == 2 and _divides(scales[0], of[0])
    fits = fits and symbols.equal(scales[1], symbols.mul(of[1], PER_INT32)) and _equal(zeros, (scales[0], of[1]))
    expect(
        fits,
        f"awq: values of {shape_text(of)}, scales of {shape_text(scales)} and zeros of {shape_text(zeros)} don't fit",
    )
    return (of[0], symbols.mul(of[1], PER_INT32))


def _gptq(sizes: Mapping[str, Sizes]) -> Sizes:
    of, scales, zeros = sizes["of"], sizes["scales"], sizes["zeros"]
    fits = len(of) == 2 and len(scales) == 2 and scales[0] != 0 and symbols.equal(scales[1], of[1])
    fits = fits and len(zeros) == 2 and _equal((zeros[0], symbols.mul(zeros[1], PER_INT32)), scales)
    rows = symbols.mul(of[0], PER_INT32) if len(of) == 2 else 0
    groups = sizes.get("groups")
    fits = fits and (_divides(scales[0], rows) if groups is None else _equal(groups, (rows,)))
    found = ", ".join(f"{name} of {shape_text(size)}" for name, size in sizes.items())
    expect(fits, f"gptq: {found} don't fit")
    return (rows, of[1])


def _equal(a: Sizes, b: Sizes) -> bool:
    return len(a) == len(b) and all(map(symbols.equal, a, b))


def _divides(by: Expr, size: Expr) -> bool:
    """Whether `size` is so often `by`, which is one product, whatever their symbols are."""
    parts = symbols.terms(by)
    if len(parts) != 1:
        return False
    ((factors, count),) = parts.items()

    def is_multiple(term: tuple[Expr, ...], times: int) -> bool:
        return times % count == 0 and all(term.count(factor) >= factors.count(factor) for factor in factors)

    return all(is_multiple(term, times) for term, times in symbols.terms(size).items())


def _constant(format: str, sizes: Sequence[Expr]) -> Sizes:
    found = tuple(size for size in sizes if isinstance(size, int))
    written = ", ".join(map(symbols.text, sizes))
    expect(len(found) == len(sizes), f"{format}: a part of [{written}], expected constants")
    return found


def expect(ok: bool, message: str) -> None:
    """Raise RecipeError unless this holds."""
    if not ok:
        raise RecipeError(message)
