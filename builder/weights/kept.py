"""A weight that a recipe dequantises, as the tensors that a bundle's graph can hold in its place.

What a recipe does to the dequantised values (cut, join, stack, transpose, reshape) is done to each of the parts that
they are made of instead: to the stored values, scales, zeros and so on. Where that can't be said exactly, `Misfit` has
the reason.

Every part is looked at in the weight's own dimensions: `steps` says for each of them how many of the weight's elements
one of the part's stands for. 0: whatever is taken of the weight, all of the part is needed, as of the one scale of a
tensor. So a cut at multiples of the steps is a cut of each part, and scales of larger steps become finer by repetition.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import msgspec

from precast.builder.weights import compact
from precast.ir.errors import RecipeError
from precast.ir.graph import symbols
from precast.ir.graph.schema import (
    Cast,
    Concat,
    Dequantise,
    Dtype,
    Each,
    Expr,
    Param,
    Recipe,
    Repack,
    Reshape,
    Slice,
    Stack,
    TensorType,
    Transpose,
)
from precast.ir.weights import recipes
from precast.ir.weights.quantised import NVFP4_BLOCK, PACKED, PER_INT32

ALONE = {"tp": 1, "ep": 1, "rank": 0}
"""The world of one rank."""

T = TypeVar("T")

_IN_GROUPS = ("gptq", *PACKED)
"""Formats that have a scale for a few inputs each; others have so few that float32 costs nothing."""


class Misfit(Exception):
    """The weight has to be dequantised while it is read; the message is a reason that people read."""


class Part(NamedTuple):
    """What makes one of the parts, with a dimension for each of the weight's, and their steps; see the module."""

    recipe: Recipe
    steps: tuple[int, ...]

    @property
    def shape(self) -> tuple[Expr, ...]:
        return recipes.shape(self.recipe)


class Kept(NamedTuple):
    """A weight of these sizes as the parts of a `Dequantise`, by the names of its fields."""

    format: str
    zero_offset: int
    shape: tuple[Expr, ...]
    parts: dict[str, Part]

    @property
    def kind(self) -> tuple[object, ...]:
        """What two weights have in common that one piece of a graph can compute with."""
        types = tuple((name, part.steps, recipes.dtype(part.recipe)) for name, part in self.parts.items())
        return self.format, self.zero_offset, self.shape, types

    def each(self, change: Callable[[str, Part], Part]) -> Kept:
        """The same with what `change` makes of each part, by its name."""
        return self._replace(parts={name: change(name, part) for name, part in self.parts.items()})


def is_quantised(recipe: Recipe) -> bool:
    """Whether anything of it is stored in few bits."""
    return isinstance(recipe, Dequantise) or any(map(is_quantised, recipes.parts(recipe)))


def kept(recipe: Recipe, dtype: Dtype) -> Kept:
    """The parts of a weight of `dtype`. Raises Misfit."""
    try:
        return _kept(recipe, dtype)
    except (RecipeError, symbols.ExprError) as error:
        raise Misfit(str(error)) from error


def _kept(recipe: Recipe, dtype: Dtype) -> Kept:
    if isinstance(recipe, Dequantise):
        return _dequantised(recipe)
    if isinstance(recipe, Cast):
        if recipe.dtype not in ("float32", dtype):
            raise Misfit(f"its values are rounded to {recipe.dtype} on the way to {dtype}")
        return _kept(recipe.of, dtype)
    if isinstance(recipe, Slice):
        return _sliced(_kept(recipe.of, dtype), recipe)
    if isinstance(recipe, Transpose):
        return _transposed(_kept(recipe.of, dtype), recipe.dim0, recipe.dim1)
    if isinstance(recipe, Reshape):
        return _reshaped(_kept(recipe.of, dtype), recipe.shape)
    if isinstance(recipe, Concat):
        return _joined([_kept(part, dtype) for part in recipe.parts], recipe.dim)
    if isinstance(recipe, Each):
        return _repeated(_kept(recipe.of, dtype), recipe)
    if isinstance(recipe, Stack):
        return _stacked([_kept(part, dtype) for part in recipe.parts], recipe.dim)
    raise Misfit("not all of it is stored in few bits")


# --- a checkpoint's tensors --------------------------------------------------------------------------------------


def _dequantised(recipe: Dequantise) -> Kept:
    if recipe.biases is not None:
        raise Misfit("its groups have biases, and no op adds these")
    if recipe.format == "awq" or (recipe.format == "gptq" and recipe.groups is None):
        return _transposed(_dequantised(_in_rows(recipe)), 0, 1)
    shape = recipes.shape(recipe)
    rank = len(shape)
    given = {name: part for name in _STEPS if (part := getattr(recipe, name)) is not None}
    found: dict[str, Part] = {}
    for name, part in given.items():
        last = _STEPS[name](recipe, shape)
        if name == "of" and recipe.format == "mxfp4":
            part = compact.reshaped(part, (*shape[:-1], symbols.floordiv(shape[-1], 2)))
        if name == "groups":
            part = compact.reshaped(part, (1, shape[1]) if last[1] else (shape[0], 1))
        found[name] = Part(part, (*[1] * (rank - 2), *last))
    return Kept(recipe.format, recipe.zero_offset, shape, found)


def _in_rows(recipe: Dequantise) -> Dequantise:
    """The weight [inputs, outputs] as packed4 [outputs, inputs]: GPTQ's words with rows and columns exchanged, and
    AWQ's values in other words.

    Kernels read the words of a row one after the other. Where each input has a group of its own, they want the scales
    of a group side by side instead, as GPTQ has them.
    """
    assert recipe.zeros is not None, "verified"
    scales = compact.transposed(recipe.scales, 0, 1)
    if recipe.format == "awq":
        of: Recipe = Repack(recipe.of, "values")
        zeros: Recipe = Repack(recipe.zeros, "zeros")
    else:
        of, zeros = (compact.transposed(part, 0, 1) for part in (recipe.of, recipe.zeros))
    return msgspec.structs.replace(recipe, of=of, scales=scales, zeros=zeros, format="packed4")


_PACKED_VALUES = {
    "mxfp4": (1, 2), "nvfp4": (1, 2), "nvfp4_divided": (1, 2), "gptq": (PER_INT32, 1),
    **{format: (1, each) for format, each in PACKED.items()},
}  # fmt: skip
"""The steps of values along rows and columns; in other formats each stands for itself."""


def _values(format: str) -> tuple[int, int]:
    return _PACKED_VALUES.get(format, (1, 1))


def _scales(recipe: Dequantise, shape: Sequence[Expr]) -> tuple[int, int]:
    rows, columns = (_int(size) for size in shape[-2:])
    of, scales = (tuple(map(_int, recipes.shape(part))) for part in (recipe.of, recipe.scales))
    if recipe.format in ("fp8", "int8"):
        assert recipe.block is not None, "verified"
        first, second = (
            0 if count == 1 and block >= size else block
            for block, size, count in zip(recipe.block, (rows, columns), scales[-2:], strict=True)
        )
        return first, second
    if recipe.format == "mxfp4":
        return 1, 2 * of[-1]
    if recipe.format in ("nvfp4", "nvfp4_divided"):
        return 1, NVFP4_BLOCK
    inputs, count = (columns, scales[1]) if recipe.format in PACKED else (rows, scales[0])
    size = 0 if recipe.groups is not None or count == 1 else inputs // count
    return (1, size) if recipe.format in PACKED else (size, 1)


def _zeros(recipe: Dequantise, shape: Sequence[Expr]) -> tuple[int, int]:
    """As scales, but packed along the outputs."""
    rows, columns = _scales(recipe, shape)
    if recipe.format in PACKED:
        return PACKED[recipe.format], columns
    return (rows, PER_INT32) if recipe.format == "gptq" else (rows, columns)


_STEPS = {
    "of": lambda recipe, shape: _values(recipe.format),
    "scales": _scales,
    "zeros": _zeros,
    "groups": lambda recipe, shape: (0, 1) if recipe.format in PACKED else (1, 0),
    "global_scale": lambda recipe, shape: (0, 0),
}
"""The steps of each part along the rows and columns of what is dequantised."""


def _int(size: Expr) -> int:
    assert isinstance(size, int), "what a checkpoint holds has known sizes"
    return size


class Granule(NamedTuple):
    """How many elements of a dimension are stored together, so that a cut at multiples of it leaves all parts as they
    are; and the least number at whose multiples cuts can be made at all."""

    block: int
    least: int


def granule(recipe: Recipe, dtype: Dtype, dim: int) -> Granule:
    """That of a weight; 1 where it is dequantised."""
    try:
        whole = kept(recipe, dtype)
    except Misfit:
        return Granule(1, 1)
    steps = {name: part.steps[dim] or 1 for name, part in whole.parts.items()}
    fixed = [step for name, step in steps.items() if not _is_divisible(whole, name, dim)]
    return Granule(math.lcm(*steps.values()), math.lcm(*fixed))


def fit_together(given: Sequence[Recipe], dtype: Dtype) -> bool:
    """Whether these, joined along their rows, are stored in few bits as each of them is, or none of them is."""
    if not any(map(is_quantised, given)):
        return True
    try:
        kept(Concat(tuple(given), 0), dtype)
    except Misfit:
        return False
    return True


def storage(recipe: Recipe, dtype: Dtype) -> object:
    """How the weight is stored: two of one storage can be computed with by one piece of a graph."""
    if not is_quantised(recipe):
        return None
    try:
        return kept(recipe, dtype).kind
    except Misfit:
        return "dequantised"


# --- what recipes do ---------------------------------------------------------------------------------------------


def _sliced(whole: Kept, recipe: Slice) -> Kept:
    dim, start, length = recipe.dim, recipe.start, recipe.length
    size = whole.shape[dim]
    if start == 0 and symbols.equal(length, size):
        return whole
    to_the_end = isinstance(start, int) and isinstance(length, int) and start + length == size
    whole = finer(whole, dim, math.gcd(_unit(start), 0 if to_the_end else _unit(length)))

    def cut(name: str, part: Part) -> Part:
        step = part.steps[dim]
        if step == 0:
            return part
        first, count = symbols.floordiv(start, step), symbols.ceildiv(length, step)
        return Part(compact.sliced(part.recipe, dim, first, count), part.steps)

    return whole.each(cut)._replace(shape=_with(whole.shape, dim, length))


def _transposed(whole: Kept, dim0: int, dim1: int) -> Kept:
    def exchange(name: str, part: Part) -> Part:
        return Part(compact.transposed(part.recipe, dim0, dim1), _swapped(part.steps, dim0, dim1))

    return whole.each(exchange)._replace(shape=_swapped(whole.shape, dim0, dim1))


def _reshaped(whole: Kept, shape: Sequence[Expr]) -> Kept:
    """Dimensions that become others have a part's element for each of the weight's, or one for all of them."""
    runs = compact.runs(whole.shape, shape)
    if runs is None:
        raise Misfit("a reshape mixes its dimensions")
    for before, after in runs:
        if not len(before) == len(after) == 1:
            for dim in before:
                whole = finer(whole, dim, 1)

    def view(name: str, part: Part) -> Part:
        sizes: list[Expr] = [1] * len(shape)
        steps = [1] * len(shape)
        for before, after in runs:
            inside = {part.steps[dim] for dim in before}
            alone = len(before) == len(after) == 1
            if len(inside) > 1 or (inside == {0} and not alone and any(part.shape[dim] != 1 for dim in before)):
                raise Misfit("dimensions of different scales become one")
            (step,) = inside
            for dim in after:
                steps[dim] = step
                sizes[dim] = 1 if step == 0 else shape[dim]
            if alone:
                sizes[after[0]] = part.shape[before[0]]
        return Part(compact.reshaped(part.recipe, tuple(sizes)), tuple(steps))

    return whole.each(view)._replace(shape=tuple(shape))


def _repeated(one: Kept, each: Each) -> Kept:
    def stack(name: str, part: Part) -> Part:
        return Part(Each(part.recipe, each.dim, each.count, each.start), _inserted(part.steps, each.dim, 1))

    return one.each(stack)._replace(shape=_inserted(one.shape, each.dim, each.count))


def _stacked(ones: Sequence[Kept], dim: int) -> Kept:
    first = _alike(ones)
    if any(one.kind != first.kind for one in ones):
        raise Misfit("parts that are stored in different ways are stacked")

    def stack(name: str, part: Part) -> Part:
        return Part(Stack(tuple(one.parts[name].recipe for one in ones), dim), _inserted(part.steps, dim, 1))

    return first.each(stack)._replace(shape=_inserted(first.shape, dim, len(ones)))


def _joined(ones: Sequence[Kept], dim: int) -> Kept:
    """Parts of one format in a row. Where one has a scale for all of the dimension, or a larger block, all get as many
    scales as the finest needs."""
    first = _alike(ones)
    if len(ones) == 1:
        return first
    for other in range(len(first.shape)):
        if other != dim:
            ones = _agreed(ones, other)
    ones = _agreed(ones, dim, between=math.gcd(*(_unit(one.shape[dim]) for one in ones[:-1])))

    def join(name: str, part: Part) -> Part:
        given = [one.parts[name].recipe for one in ones]
        if part.steps[dim] == 0:
            if any(recipe != part.recipe for recipe in given):
                raise Misfit(f"what is joined has {name} of its own for each part")
            return part
        return Part(compact.joined(given, dim), part.steps)

    size = symbols.add(*(one.shape[dim] for one in ones))
    return ones[0].each(join)._replace(shape=_with(first.shape, dim, size))


def _alike(ones: Sequence[Kept]) -> Kept:
    """The first of these, which have one format and the same parts."""
    first = ones[0]
    for one in ones:
        if (one.format, one.zero_offset, list(one.parts)) != (first.format, first.zero_offset, list(first.parts)):
            raise Misfit(f"{first.format} and {one.format} are joined")
    return first


def _agreed(ones: Sequence[Kept], dim: int, between: int | None = None) -> Sequence[Kept]:
    """The same with equal steps along `dim`; `between`: what joints lie at multiples of."""
    made = list(ones)
    for name in ones[0].parts:
        if name == "groups" and between is not None and any(one.parts[name] != made[0].parts[name] for one in made):
            raise Misfit("each part that is joined has groups of inputs of its own")
        found = {one.parts[name].steps[dim] for one in made}
        alone = between is not None and any(one.parts[name].recipe != made[0].parts[name].recipe for one in made)
        if (found == {0} and not alone) or (len(found) == 1 and 0 not in found and (between or 0) % max(found) == 0):
            continue
        unit = math.gcd(*found, between or 0) or 1
        unit = 1 if found == {0} else unit
        made = [finer(_spread(one, name, dim, unit), dim, unit) for one in made]
    return made


def _spread(one: Kept, name: str, dim: int, unit: int) -> Kept:
    """With one element of a part for every `unit` along `dim`, where it has one for all."""
    part = one.parts[name]
    if part.steps[dim] != 0:
        return one
    if part.shape[dim] != 1:
        raise Misfit("groups of inputs in any order are joined with others")
    count = symbols.ceildiv(one.shape[dim], unit)
    spread = Part(compact.repeated(part.recipe, dim, count), _with(part.steps, dim, unit))
    return one._replace(parts={**one.parts, name: spread})


def finer(whole: Kept, dim: int, unit: int) -> Kept:
    """With steps along `dim` that divide `unit`. Raises Misfit where values or zeros are packed in larger ones."""

    def divide(name: str, part: Part) -> Part:
        step = part.steps[dim]
        smaller = math.gcd(step, unit)
        if step == 0 or smaller == step:
            return part
        if not _is_divisible(whole, name, dim):
            raise Misfit(f"it would be cut at multiples of {unit}, inside of {step} values that are stored together")
        count = symbols.ceildiv(whole.shape[dim], smaller)
        many = compact.repeated(part.recipe, dim, step // smaller)
        return Part(compact.sliced(many, dim, 0, count), _with(part.steps, dim, smaller))

    return whole.each(divide)


def _is_divisible(whole: Kept, name: str, dim: int) -> bool:
    """Whether a part could have more elements along `dim`, each several times: scales, but for those of blocks that the
    format fixes, and zeros, but where several are packed together."""
    if name == "scales":
        return whole.format not in ("mxfp4", "nvfp4", "nvfp4_divided")
    return name == "zeros" and whole.parts[name].steps[dim] == whole.parts["scales"].steps[dim]


def _unit(size: Expr) -> int:
    """What is a multiple of it in every world; 0: nothing is left to say."""
    return math.gcd(*symbols.terms(size).values())


def _with(items: Sequence[T], dim: int, item: T) -> tuple[T, ...]:
    return (*items[:dim], item, *items[dim + 1 :])


def _inserted(items: Sequence[T], dim: int, item: T) -> tuple[T, ...]:
    return (*items[:dim], item, *items[dim:])


def _swapped(items: Sequence[T], i: int, j: int) -> tuple[T, ...]:
    out = list(items)
    out[i], out[j] = out[j], out[i]
    return tuple(out)


# --- what a graph holds ------------------------------------------------------------------------------------------


class Stored(NamedTuple):
    """What an op takes in place of a weight: a param for each part, by the names of a `Dequantise`, and its block."""

    params: dict[str, Param]
    block: tuple[int, int] | None


def stored(whole: Kept, name: str, scales: Dtype = "float32") -> Stored:
    """The params for the weight [.., outputs, inputs] that was called `name`. `scales`: what the many scales of groups
    of inputs are held in, where the format doesn't say it; a load refuses those that this type would round. Others are
    held in float32. Raises Misfit where no `Dequantise` could say it."""
    rank = len(whole.shape)
    if whole.format == "gptq":
        whole = _transposed(whole, rank - 2, rank - 1)
    block = _checked_block(whole)
    params: dict[str, Param] = {}
    for part_name, part in whole.parts.items():
        recipe = part.recipe
        if part_name == "of" and whole.format == "mxfp4":
            step = whole.parts["scales"].steps[-1]
            blocks = symbols.floordiv(whole.shape[-1], step)
            recipe = compact.reshaped(recipe, (*whole.shape[:-1], blocks, step // 2))
        if part_name == "groups":
            recipe = compact.reshaped(recipe, (*whole.shape[:-2], whole.shape[-1 if whole.format in PACKED else -2]))
        dtype = recipes.dtype(recipe)
        if dtype is None or dtype == "float8_e8m0fnu":
            dtype = scales if part_name == "scales" and whole.format in _IN_GROUPS else "float32"
            recipe = Cast(recipe, dtype)
        own = name if part_name == "of" else f"{name}.{part_name}"
        params[part_name] = Param(own, TensorType(dtype, recipes.shape(recipe)), recipe)
    return Stored(params, block)


def _checked_block(whole: Kept) -> tuple[int, int] | None:
    """The block of scales, of the formats that have one, where the steps of all parts are what the format has."""
    lead = len(whole.shape) - 2
    steps = {name: part.steps for name, part in whole.parts.items()}
    first, second = steps["scales"][lead:]
    fits = all(each[:lead] == (1,) * lead for each in steps.values())
    if whole.format in ("fp8", "int8"):
        fits = fits and steps["of"][lead:] == (1, 1) and steps.get("zeros", steps["scales"]) == steps["scales"]
        sizes = (symbols.substitute(size, ALONE) for size in whole.shape[lead:])
        blocks = tuple(step or size for step, size in zip((first, second), sizes, strict=True))
    else:
        fits = fits and steps["of"][lead:] == _values(whole.format)
        fits = fits and (second if whole.format == "gptq" else first) == 1
        if whole.format == "mxfp4":
            fits = fits and second > 0 and second % 2 == 0
        blocks = None
    if "global_scale" in steps:
        fits = fits and steps["global_scale"][lead + 1] == 0 and steps["global_scale"][lead] in (0, 1)
    if not fits or not all(isinstance(size, int) for size in blocks or ()):
        raise Misfit("its rows and columns don't stand as the format has them")
    return blocks  # type: ignore[return-value]
