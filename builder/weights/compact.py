"""Recipes written in few steps: nothing that undoes what an earlier step did, or takes all there is."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from precast.ir.graph import symbols
from precast.ir.graph.schema import Cast, Concat, Each, Expr, Recipe, Repeat, Reshape, Slice, Transpose
from precast.ir.weights import recipes


def sliced(of: Recipe, dim: int, start: Expr, length: Expr) -> Recipe:
    """Elements `start .. start + length` of dimension `dim`."""
    whole = start == 0 and symbols.equal(length, recipes.shape(of)[dim])
    return of if whole else Slice(of, dim, start, length)


def repeated(of: Recipe, dim: int, count: Expr) -> Recipe:
    """Each element of dimension `dim` `count` times in a row."""
    if isinstance(of, Repeat) and of.dim == dim:
        return Repeat(of.of, dim, symbols.mul(of.count, count))
    return of if count == 1 else Repeat(of, dim, count)


def joined(parts: Sequence[Recipe], dim: int) -> Recipe:
    """The parts one after the other."""
    return parts[0] if len(parts) == 1 else Concat(tuple(parts), dim)


def transposed(of: Recipe, dim0: int, dim1: int) -> Recipe:
    """Two dimensions exchanged, as near to what is read as can be, where another exchange may undo it."""
    other = {dim0: dim1, dim1: dim0}
    if isinstance(of, Transpose) and {of.dim0, of.dim1} == {dim0, dim1}:
        return of.of
    if isinstance(of, Concat):
        return Concat(tuple(transposed(part, dim0, dim1) for part in of.parts), other.get(of.dim, of.dim))
    if isinstance(of, (Slice, Repeat)):
        return msgspec.structs.replace(of, of=transposed(of.of, dim0, dim1), dim=other.get(of.dim, of.dim))
    if isinstance(of, Cast):
        return Cast(transposed(of.of, dim0, dim1), of.dtype)
    if isinstance(of, Each) and of.dim not in other:
        inside = (dim - (dim > of.dim) for dim in (dim0, dim1))
        return msgspec.structs.replace(of, of=transposed(of.of, *inside))
    return Transpose(of, dim0, dim1)


def reshaped(of: Recipe, shape: Sequence[Expr]) -> Recipe:
    """The same elements under another shape."""
    inner = of.of if isinstance(of, Reshape) else of
    found = recipes.shape(inner)
    same = len(found) == len(shape) and all(map(symbols.equal, found, shape))
    return inner if same else Reshape(inner, tuple(shape))


def runs(before: Sequence[Expr], after: Sequence[Expr]) -> list[tuple[list[int], list[int]]] | None:
    """The least runs of dimensions that hold the same elements before and after a reshape, without those of size 1;
    None where none are found."""
    inside, outside = ([dim for dim, size in enumerate(sizes) if size != 1] for sizes in (before, after))
    found: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(inside) and j < len(outside):
        ends = (
            (m, n)
            for m in range(i + 1, len(inside) + 1)
            for n in range(j + 1, len(outside) + 1)
            if symbols.equal(_count(before, inside[i:m]), _count(after, outside[j:n]))
        )
        m, n = next(ends, (0, 0))
        if not m:
            return None
        found.append((inside[i:m], outside[j:n]))
        i, j = m, n
    return found if (i, j) == (len(inside), len(outside)) else None


def _count(sizes: Sequence[Expr], dims: Sequence[int]) -> Expr:
    return symbols.numel(sizes[dim] for dim in dims)
