"""A recipe in the fewest steps, once the sizes of the world are numbers."""

from __future__ import annotations

import msgspec

from precast.ir.errors import RecipeError
from precast.ir.graph import schema, symbols
from precast.ir.weights import recipes
from precast.ir.weights.quantised import expect


def shortest(recipe: schema.Recipe) -> schema.Recipe:
    """What makes the same in the fewest steps, of a recipe whose sizes are numbers: nothing that takes all there is,
    joins one part, or cuts a join whose parts can be cut instead.

    A recipe that doesn't fit together is returned as it is: `precast.ir.weights.recipes.shape` says why.
    """
    try:
        return _shortest(recipe)
    except (RecipeError, IndexError):
        return recipe


def _shortest(recipe: schema.Recipe) -> schema.Recipe:
    changes: dict[str, object] = {name: _shortest(part) for name, part in recipes.named_parts(recipe).items()}
    if isinstance(recipe, (schema.Concat, schema.Stack)):
        changes["parts"] = tuple(map(_shortest, recipe.parts))
    made: schema.Recipe = msgspec.structs.replace(recipe, **changes) if changes else recipe
    if isinstance(made, schema.Slice):
        return _taken(made.of, made.dim, made.start, made.length)
    if isinstance(made, schema.Concat):
        return _concatenated(made.parts, made.dim)
    return made.of if isinstance(made, schema.Repeat) and made.count == 1 else made


def _taken(of: schema.Recipe, dim: int, start: schema.Expr, length: schema.Expr) -> schema.Recipe:
    """Elements of a recipe, from the parts of a join that have them."""
    size = recipes.shape(of)[dim]
    if start == 0 and length == size:
        return of
    if isinstance(of, schema.Concat) and of.dim == dim and isinstance(start, int) and isinstance(length, int):
        parts, place = [], 0
        for part in of.parts:
            end = place + _known(recipes.shape(part)[dim])
            low, high = max(start, place), min(start + length, end)
            if low < high:
                parts.append(_taken(part, dim, low - place, high - low))
            place = end
        if parts:
            return _concatenated(tuple(parts), dim)
    return schema.Slice(of, dim, start, length)


def _concatenated(parts: tuple[schema.Recipe, ...], dim: int) -> schema.Recipe:
    """The parts in a row; those that were one are one again."""
    joined: list[schema.Recipe] = []
    for part in parts:
        last = joined[-1] if joined else None
        if isinstance(last, schema.Slice) and isinstance(part, schema.Slice) and _follows(last, part, dim):
            joined[-1] = _taken(last.of, dim, last.start, symbols.add(last.length, part.length))
        else:
            joined.append(part)
    return joined[0] if len(joined) == 1 else schema.Concat(tuple(joined), dim)


def _follows(last: schema.Slice, part: schema.Slice, dim: int) -> bool:
    end = symbols.add(last.start, last.length)
    return last.of == part.of and last.dim == part.dim == dim and symbols.equal(end, part.start)


def _known(size: schema.Expr) -> int:
    expect(isinstance(size, int), f"a part of {symbols.text(size)} elements, expected a number")
    assert isinstance(size, int)
    return size
