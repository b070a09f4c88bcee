"""Recipes: what they read, and what comes out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache

import msgspec

from precast.ir import limits
from precast.ir.errors import RecipeError
from precast.ir.graph import schema, symbols
from precast.ir.graph.symbols import shape_text
from precast.ir.weights import quantised, scales
from precast.ir.weights.quantised import PARTS, expect


def parts(recipe: schema.Recipe) -> tuple[schema.Recipe, ...]:
    """The recipes that this one is made of, in order; those of an `Each` as they are written, once."""
    listed: tuple[schema.Recipe, ...] = getattr(recipe, "parts", ())
    return (*listed, *named_parts(recipe).values()) if _names_of_parts(type(recipe)) else listed


def named_parts(recipe: schema.Recipe) -> dict[str, schema.Recipe]:
    """Those that are fields of their own, by name."""
    given = {name: getattr(recipe, name) for name in _names_of_parts(type(recipe))}
    return {name: part for name, part in given.items() if part is not None}


@cache
def _names_of_parts(kind: type[schema.Recipe]) -> tuple[str, ...]:
    return tuple(name for name in PARTS if name in kind.__struct_fields__)


def leaves(recipe: schema.Recipe) -> tuple[schema.Read, ...]:
    """What the recipe reads, in order, that of an `Each` for each number; nothing for `Tie`."""
    return tuple(each_leaf(recipe))


def each_leaf(recipe: schema.Recipe) -> Iterator[schema.Read]:
    """As `leaves`, one by one: nobody holds all that an `Each` stands for."""
    if isinstance(recipe, schema.Read):
        yield recipe
    elif isinstance(recipe, schema.Each):
        written = leaves(recipe.of)  # there is no Each inside
        for index in range(recipe.count):
            yield from (numbered(read, recipe.start + index) for read in written)
    else:
        for part in parts(recipe):
            yield from each_leaf(part)


def nth(each: schema.Each, index: int) -> schema.Recipe:
    """Part `index` of those that `each` stands for, counted from 0."""
    return map_reads(each.of, lambda read: numbered(read, each.start + index))


def numbered(read: schema.Read, number: int) -> schema.Read:
    """What an `Each` reads for a number."""
    return schema.Read(read.tensor.replace("*", str(number)), read.shape, read.dtype)


def map_reads(recipe: schema.Recipe, made: Callable[[schema.Read], schema.Recipe]) -> schema.Recipe:
    """The recipe with what `made` gives in place of each `Read`."""
    if isinstance(recipe, schema.Read):
        return made(recipe)
    changes: dict[str, object] = {name: map_reads(part, made) for name, part in named_parts(recipe).items()}
    if isinstance(recipe, (schema.Concat, schema.Stack)):
        changes["parts"] = tuple(map_reads(part, made) for part in recipe.parts)
    return msgspec.structs.replace(recipe, **changes)


def in_world(recipe: schema.Recipe, world: Mapping[str, schema.Expr]) -> schema.Recipe:
    """The recipe with values in place of the symbols in its sizes."""
    changes: dict[str, object] = {name: in_world(part, world) for name, part in named_parts(recipe).items()}
    if isinstance(recipe, (schema.Concat, schema.Stack)):
        changes["parts"] = tuple(in_world(part, world) for part in recipe.parts)
    elif isinstance(recipe, schema.Slice):
        changes |= {name: symbols.substitute(getattr(recipe, name), world) for name in ("start", "length")}
    elif isinstance(recipe, schema.Reshape):
        changes["shape"] = tuple(symbols.substitute(size, world) for size in recipe.shape)
    elif isinstance(recipe, schema.Repeat):
        changes["count"] = symbols.substitute(recipe.count, world)
    return msgspec.structs.replace(recipe, **changes)


def sizes(recipe: schema.Recipe) -> Iterator[schema.Expr]:
    """The sizes that a recipe writes out: starts, lengths, counts of `Repeat`, and shapes of `Reshape`."""
    if isinstance(recipe, schema.Slice):
        yield from (recipe.start, recipe.length)
    elif isinstance(recipe, schema.Repeat):
        yield recipe.count
    elif isinstance(recipe, schema.Reshape):
        yield from recipe.shape
    for part in parts(recipe):
        yield from sizes(part)


def shape(recipe: schema.Recipe) -> tuple[schema.Expr, ...]:
    """The sizes of what the recipe makes.

    Raises RecipeError where parts don't fit each other, for a scale that is one of them, and for a `Tie`, which has the
    shape of its param.
    """
    if isinstance(recipe, schema.Read):
        expect(all(size >= 0 for size in recipe.shape), f"read of {recipe.tensor}: a negative size")
        return recipe.shape
    if isinstance(recipe, schema.Tie):
        raise _part_tied(recipe)
    if isinstance(recipe, schema.Scale):
        return scales.shape(recipe)
    if any(isinstance(part, schema.Scale) for part in parts(recipe)):
        raise RecipeError("a scale is a recipe of its own, never a part of one")
    if isinstance(recipe, (schema.Concat, schema.Stack)):
        return _joined(recipe)
    if isinstance(recipe, schema.Dequantise):
        return quantised.shape(recipe, *map(shape, parts(recipe)))
    found = shape(recipe.of)
    if isinstance(recipe, schema.Quantise):
        return quantised.shape_at_load(recipe, found)
    if isinstance(recipe, schema.Repack):
        return quantised.repacked_shape(recipe, found)
    if isinstance(recipe, schema.Each):
        return _repeated(recipe, found)
    if isinstance(recipe, schema.Slice):
        return _sliced(recipe, found)
    if isinstance(recipe, schema.Repeat):
        _axis("repeat", recipe.dim, len(found))
        expect(not isinstance(recipe.count, int) or recipe.count > 0, f"repeat: {symbols.text(recipe.count)} times")
        return (*found[: recipe.dim], symbols.mul(found[recipe.dim], recipe.count), *found[recipe.dim + 1 :])
    if isinstance(recipe, schema.Transpose):
        _axis("transpose", recipe.dim0, len(found))
        _axis("transpose", recipe.dim1, len(found))
        sizes = list(found)
        sizes[recipe.dim0], sizes[recipe.dim1] = sizes[recipe.dim1], sizes[recipe.dim0]
        return tuple(sizes)
    if isinstance(recipe, schema.Reshape):
        same = symbols.equal(symbols.numel(found), symbols.numel(recipe.shape))
        expect(same, f"reshape: {shape_text(found)} has other elements than {shape_text(recipe.shape)}")
        return recipe.shape
    return found


def dtype(recipe: schema.Recipe) -> schema.ReadDtype | None:
    """The element type of what the recipe makes; None: the one that the checkpoint has.

    Raises RecipeError for parts of different types, and for a `Tie`, which has the type of its param.
    """
    if isinstance(recipe, (schema.Read, schema.Cast)):
        return recipe.dtype
    if isinstance(recipe, schema.Tie):
        raise _part_tied(recipe)
    if isinstance(recipe, (schema.Concat, schema.Stack)):
        found: set[schema.ReadDtype | None] = {dtype(part) for part in recipe.parts}
        expect(len(found) == 1, f"parts of different dtypes: {', '.join(sorted(map(str, found)))}")
        return found.pop()
    if isinstance(recipe, schema.Dequantise):
        return quantised.dtype(recipe, *map(dtype, parts(recipe)))
    if isinstance(recipe, schema.Scale):
        return "float32"
    if isinstance(recipe, schema.Quantise):
        return quantised.dtype_at_load(recipe, dtype(recipe.of))
    if isinstance(recipe, schema.Repack):
        return quantised.repacked_dtype(dtype(recipe.of))
    return dtype(recipe.of)


def _part_tied(recipe: schema.Tie) -> RecipeError:
    return RecipeError(f"tie to {recipe.param}: a tie is a recipe of its own, never a part of one")


def _joined(recipe: schema.Concat | schema.Stack) -> tuple[schema.Expr, ...]:
    kind = type(recipe).__name__.lower()
    expect(len(recipe.parts) > 0, f"{kind}: no parts")
    shapes = [shape(part) for part in recipe.parts]
    first, dim = shapes[0], recipe.dim
    stacked = isinstance(recipe, schema.Stack)
    _axis(kind, dim, len(first) + stacked)
    for other in shapes[1:]:
        fits = len(other) == len(first) and all(
            symbols.equal(a, b) for i, (a, b) in enumerate(zip(first, other, strict=True)) if stacked or i != dim
        )
        expect(fits, f"{kind} along {dim}: {shape_text(first)} and {shape_text(other)} don't fit")
    if stacked:
        return (*first[:dim], len(shapes), *first[dim:])
    return (*first[:dim], symbols.add(*(sizes[dim] for sizes in shapes)), *first[dim + 1 :])


def _repeated(recipe: schema.Each, found: tuple[schema.Expr, ...]) -> tuple[schema.Expr, ...]:
    _axis("each", recipe.dim, len(found) + 1)
    in_bounds = 0 < recipe.count <= limits.MAX_EACH and recipe.start >= 0
    expect(in_bounds, f"each: {recipe.count} parts from {recipe.start} on, expected 1 to {limits.MAX_EACH}")
    expect(not _repeats(recipe.of), "each: another each inside of it")
    return (*found[: recipe.dim], recipe.count, *found[recipe.dim :])


def _repeats(recipe: schema.Recipe) -> bool:
    return isinstance(recipe, schema.Each) or any(map(_repeats, parts(recipe)))


def _sliced(recipe: schema.Slice, found: tuple[schema.Expr, ...]) -> tuple[schema.Expr, ...]:
    _axis("slice", recipe.dim, len(found))
    start, length, size = recipe.start, recipe.length, found[recipe.dim]
    for bound in (start, length):
        expect(not isinstance(bound, int) or bound >= 0, f"slice: {bound} is negative")
    if isinstance(start, int) and isinstance(length, int) and isinstance(size, int):
        expect(
            start + length <= size, f"slice: {start} and {length} more are past the {size} of dimension {recipe.dim}"
        )
    return (*found[: recipe.dim], length, *found[recipe.dim + 1 :])


def _axis(kind: str, dim: int, rank: int) -> None:
    expect(0 <= dim < rank, f"{kind}: dimension {dim} is not one of {rank}")
