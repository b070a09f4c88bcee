"""A param's recipe, cut to what a rank has of it.

A cut is made where what is read is still apart, so that a rank reads its own bytes: below casts, exchanges of
dimensions and reshapes, and in each part of a join.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from precast.builder.shard.layouts import Misfit, Piece, Pieces, cut, local_shape, local_size, reshaped
from precast.ir.graph import symbols
from precast.ir.graph.schema import Cast, Concat, Each, Expr, Recipe, Reshape, Slice, Stack, Tie, Transpose
from precast.ir.weights import recipes


def split(recipe: Recipe, dims: Mapping[int, Pieces], ranks: Sequence[int] = (1,)) -> Recipe:
    """The recipe of what this rank has, where dimensions are split so; in worlds of these many `ranks`.

    Raises Misfit where a dimension can't be cut.
    """
    if isinstance(recipe, Tie):
        return recipe
    for dim, pieces in dims.items():
        recipe = _split(recipe, dim, pieces, ranks)
    return recipe


def _split(recipe: Recipe, dim: int, pieces: Pieces, ranks: Sequence[int]) -> Recipe:
    if not pieces:
        return recipe
    if isinstance(recipe, Cast):
        return msgspec.structs.replace(recipe, of=_split(recipe.of, dim, pieces, ranks))
    if isinstance(recipe, Transpose):
        inner = {recipe.dim0: recipe.dim1, recipe.dim1: recipe.dim0}.get(dim, dim)
        return msgspec.structs.replace(recipe, of=_split(recipe.of, inner, pieces, ranks))
    if isinstance(recipe, (Stack, Each)) and dim != recipe.dim:
        inner = dim - (dim > recipe.dim)
        if isinstance(recipe, Each):
            return msgspec.structs.replace(recipe, of=_split(recipe.of, inner, pieces, ranks))
        made = tuple(_split(part, inner, pieces, ranks) for part in recipe.parts)
        return msgspec.structs.replace(recipe, parts=made)
    if isinstance(recipe, Concat):
        apart = _in_parts(recipe, dim, pieces, ranks)
        if apart is not None:
            return apart
    if isinstance(recipe, Reshape):
        below = _below_reshape(recipe, dim, pieces, ranks)
        if below is not None:
            return below
    return _cut(recipe, dim, pieces, ranks)


def _in_parts(recipe: Concat, dim: int, pieces: Pieces, ranks: Sequence[int]) -> Recipe | None:
    """Each part cut by itself; None where units are made of several parts."""
    if dim != recipe.dim:
        return Concat(tuple(_split(part, dim, pieces, ranks) for part in recipe.parts), recipe.dim)
    parts: list[Recipe] = []
    start = 0
    for part in recipe.parts:
        size = recipes.shape(part)[dim]
        if not isinstance(size, int):
            return None
        try:
            inside = cut(pieces, start, size)
        except Misfit:
            return None
        parts.append(_split(part, dim, inside, ranks))
        start += size
    return Concat(tuple(parts), dim)


def _below_reshape(recipe: Reshape, dim: int, pieces: Pieces, ranks: Sequence[int]) -> Recipe | None:
    """Cut before the reshape; None where the units are not those of one dimension there."""
    inside = recipes.shape(recipe.of)
    try:
        found = reshaped(pieces, dim, recipe.shape, inside)
    except Misfit:
        return None
    size = symbols.add(0, *(piece.size for piece in pieces))
    if len(found) != 1:
        return None
    ((below, parts),) = found.items()
    others = symbols.floordiv(recipe.shape[dim], inside[below])
    if not symbols.equal(symbols.mul(symbols.add(0, *(piece.size for piece in parts)), others), size) and others != 0:
        return None
    return Reshape(_split(recipe.of, below, parts, ranks), local_shape(recipe.shape, {dim: pieces}))


def _cut(recipe: Recipe, dim: int, pieces: Pieces, ranks: Sequence[int]) -> Recipe:
    """The pieces, and what lies between them, one after the other."""
    size = recipes.shape(recipe)[dim]
    parts: list[Recipe] = []
    place = 0
    for piece in pieces:
        if piece.outer != 1:
            raise Misfit("what counts tokens is no param's")
        if piece.start > place:
            parts.append(Slice(recipe, dim, place, piece.start - place))
        parts.append(_part(recipe, dim, piece, size, ranks))
        place = piece.end
    if isinstance(size, int) and place < size:
        parts.append(Slice(recipe, dim, place, size - place))
    return parts[0] if len(parts) == 1 else Concat(tuple(parts), dim)


def _part(recipe: Recipe, dim: int, piece: Piece, size: Expr, ranks: Sequence[int]) -> Recipe:
    units = piece.units
    if units.by == "vocab" and (rest := _padding(units.count, ranks)):
        # The last ranks' rows beyond the vocabulary: no token has them, and they are cut off again where it matters.
        recipe = Concat((recipe, Slice(recipe, dim, 0, symbols.mul(rest, piece.inner))), dim)
    start = symbols.add(piece.start, symbols.mul(units.start, piece.inner))
    return Slice(recipe, dim, start, local_size(piece.size, (piece._replace(start=0),)))


def _padding(count: int, ranks: Sequence[int]) -> int:
    """The most rows that are missing in one of these worlds."""
    return max((-count % each for each in ranks), default=0)
