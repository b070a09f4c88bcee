"""Which elements of a dimension each rank has: units of equal size, in pieces, and how reshapes carry them.

A dimension that is split is covered by pieces, each a number of units of equal size; every rank has some of the units
of each piece. The rows of a joint projection of 32 query and 8 key heads of 128 elements are two pieces, of 32 and of 8
units of 128. What no piece covers, every rank has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from precast.ir.graph import symbols
from precast.ir.graph.schema import Expr

MOST_PIECES = 64
"""Of one dimension."""

Split = Literal["tp", "ep", "within", "vocab"]
"""What units are split over: all ranks; parts of the experts; the ranks that share a part of the experts; or all ranks,
the last of which may have fewer."""

EXPERT_RANKS = symbols.floordiv("tp", "ep")
"""The ranks that share a part of the experts."""


class Misfit(Exception):
    """A layer can't be split as it was tried; the message is a reason that people read."""


class Units(NamedTuple):
    """`count` units over all ranks. Where `finest` is more, that many parts of the layer share them, and in worlds of
    more ranks than units each unit stands on several ranks. `seed` is the number of the layer that they belong to."""

    count: int  # type: ignore[assignment]
    by: Split
    finest: int
    seed: int

    @property
    def local(self) -> Expr:
        """How many a rank has."""
        ranks = {"ep": "ep", "within": EXPERT_RANKS}.get(self.by, "tp")
        return symbols.ceildiv(self.count, ranks)

    @property
    def start(self) -> Expr:
        """The first that this rank has."""
        if self.by == "vocab":
            return symbols.mul("rank", self.local)
        if self.by == "ep":
            return symbols.mul(symbols.floordiv("rank", EXPERT_RANKS), self.local)
        if self.by == "within":
            return symbols.mul(symbols.Apply("mod", ("rank", EXPERT_RANKS)), self.local)
        return symbols.floordiv(symbols.mul("rank", self.count), "tp")


class Piece(NamedTuple):
    """From element `start` on: `outer` times all units, each of `inner` elements. `outer` is 1, or counts tokens."""

    start: int
    units: Units
    inner: Expr
    outer: Expr = 1

    @property
    def size(self) -> Expr:
        """Its elements over all ranks."""
        return symbols.mul(self.outer, self.units.count, self.inner)

    @property
    def local(self) -> Expr:
        """Its elements on one rank."""
        return symbols.mul(self.outer, self.units.local, self.inner)

    @property
    def end(self) -> int:
        """Past its last element; only of pieces of known size."""
        size = self.size
        assert isinstance(size, int), "a piece that counts tokens is alone"
        return self.start + size


Pieces = tuple[Piece, ...]
"""Of one dimension, in order, without overlaps."""


def local_size(size: Expr, pieces: Pieces) -> Expr:
    """How many elements of a dimension of `size` a rank has."""
    rest = symbols.add(size, *(symbols.mul(-1, piece.size) for piece in pieces))
    return symbols.add(rest, *(piece.local for piece in pieces))


def local_shape(shape: Sequence[Expr], dims: Mapping[int, Pieces]) -> tuple[Expr, ...]:
    """The sizes that a rank has of a tensor."""
    return tuple(local_size(size, dims.get(dim, ())) for dim, size in enumerate(shape))


def local_place(place: int, pieces: Pieces) -> Expr:
    """Where on a rank the element stands that is `place` of all; it must be no piece's inside."""
    moved: Expr = place
    for piece in pieces:
        if piece.end <= place:
            moved = symbols.add(moved, piece.local, symbols.mul(-1, piece.size))
        elif piece.start < place:
            raise Misfit(f"a slice begins within units of {symbols.text(piece.inner)} elements")
    return moved


def covers(size: Expr, pieces: Pieces) -> bool:
    """Whether every element is a piece's."""
    return symbols.equal(size, symbols.add(*(piece.size for piece in pieces), 0))


def with_piece(pieces: Pieces, piece: Piece) -> Pieces:
    """The pieces and this one. Raises Misfit where it contradicts them."""
    if piece in pieces:
        return pieces
    if isinstance(piece.size, int):
        for other in pieces:
            if not isinstance(other.size, int) or (piece.start < other.end and other.start < piece.end):
                raise Misfit("its parts would have to be split in two ways at once")
    elif pieces:
        raise Misfit("its parts would have to be split in two ways at once")
    if len(pieces) >= MOST_PIECES:
        raise Misfit(f"a dimension falls into more than {MOST_PIECES} pieces")
    return tuple(sorted((*pieces, piece), key=lambda each: each.start))


def cut(pieces: Pieces, start: int, length: Expr) -> Pieces:
    """The pieces of the elements `start .. start + length`, counted from there."""
    if not isinstance(length, int):
        return pieces
    found = []
    for piece in pieces:
        if not isinstance(piece.size, int):
            raise Misfit("a part of the tokens is taken")
        if start <= piece.start and piece.end <= start + length:
            found.append(piece._replace(start=piece.start - start))
        elif piece.start < start + length and start < piece.end:
            raise Misfit(f"a slice takes some of {piece.units.count} units alone")
    return tuple(found)


# --- reshapes --------------------------------------------------------------------------------------------------------


def reshaped(pieces: Pieces, dim: int, before: Sequence[Expr], after: Sequence[Expr]) -> dict[int, Pieces]:
    """Where pieces of dimension `dim` are once a tensor of sizes `before` has the sizes `after`.

    Pieces that are known for a part of what would be one dimension's are left out. Raises Misfit where units would be
    torn apart.
    """
    group = next((group for group in _groups(before, after) if dim in group[0]), None)
    if group is None:
        raise Misfit("a reshape mixes its parts")
    inside, outside = group
    flat = _flattened(pieces, [before[each] for each in inside], dim - inside[0])
    return {outside[0] + place: found for place, found in _unflattened(flat, [after[each] for each in outside]).items()}


def _groups(before: Sequence[Expr], after: Sequence[Expr]) -> list[tuple[range, range]]:
    """Runs of dimensions that hold the same elements before and after."""
    groups: list[tuple[range, range]] = []
    i = j = 0
    while i < len(before) and j < len(after):
        found = next(
            ((m, n) for m in range(i + 1, len(before) + 1) for n in range(j + 1, len(after) + 1)
             if symbols.equal(symbols.numel(before[i:m]), symbols.numel(after[j:n]))),
            None,
        )  # fmt: skip
        if found is None:
            break
        groups.append((range(i, found[0]), range(j, found[1])))
        i, j = found
    if i < len(before) and groups:  # sizes of 1 at the end
        groups[-1] = (range(groups[-1][0].start, len(before)), groups[-1][1])
    if j < len(after) and groups:
        groups[-1] = (groups[-1][0], range(groups[-1][1].start, len(after)))
    return groups


def _flattened(pieces: Pieces, sizes: Sequence[Expr], dim: int) -> Pieces:
    """The pieces of one dimension as those of all elements in a row."""
    prefix, suffix, size = symbols.numel(sizes[:dim]), symbols.numel(sizes[dim + 1 :]), sizes[dim]
    if isinstance(prefix, int) and isinstance(suffix, int) and isinstance(size, int):
        row = size * suffix
        if prefix * len(pieces) > MOST_PIECES:
            raise Misfit(f"a dimension falls into more than {MOST_PIECES} pieces")
        return tuple(
            Piece(copy * row + piece.start * suffix, piece.units, symbols.mul(piece.inner, suffix))
            for copy in range(prefix)
            for piece in pieces
        )
    if len(pieces) != 1 or not covers(sizes[dim], pieces):
        return ()
    (piece,) = pieces
    return (Piece(0, piece.units, symbols.mul(piece.inner, suffix), symbols.mul(prefix, piece.outer)),)


def _unflattened(flat: Pieces, sizes: Sequence[Expr]) -> dict[int, Pieces]:
    """The pieces of all elements in a row as those of one of these dimensions."""
    if not flat:
        return {}
    torn = None
    for dim in range(len(sizes)):
        prefix, suffix = symbols.numel(sizes[:dim]), symbols.numel(sizes[dim + 1 :])
        try:
            found = _in_dimension(flat, prefix, sizes[dim], suffix)
        except Misfit as error:
            torn = torn or error
            continue
        if found is not None:
            return {dim: found} if found else {}
    raise torn or Misfit("a reshape tears its units apart")


def _in_dimension(flat: Pieces, prefix: Expr, size: Expr, suffix: Expr) -> Pieces | None:
    """The pieces in a dimension between others; empty where not all of it is known yet, None where they don't fit."""
    if not isinstance(flat[0].size, int):
        (piece,) = flat
        inner = _quotient(piece.inner, suffix)
        outer = _quotient(piece.outer, prefix)
        if inner is None or outer is None:
            return None
        found = Piece(0, piece.units, inner, outer)
        return (found,) if covers(size, (found,)) else None
    if not (isinstance(prefix, int) and isinstance(size, int) and isinstance(suffix, int)):
        return None
    row = size * suffix
    fits = all(
        piece.start % suffix == 0 and isinstance(piece.inner, int) and piece.inner % suffix == 0
        and piece.start // row == (piece.end - 1) // row
        for piece in flat
    )  # fmt: skip
    if not fits:
        return None
    rows = [
        tuple(
            Piece(piece.start % row // suffix, piece.units, symbols.floordiv(piece.inner, suffix))
            for piece in flat
            if piece.start // row == index
        )
        for index in range(prefix)
    ]
    return rows[0] if all(each == rows[0] for each in rows) else ()


def _quotient(size: Expr, by: Expr) -> Expr | None:
    """`size / by`, where that is a whole number of the same symbols."""
    if symbols.equal(size, by):
        return 1
    if by == 1:
        return size
    if isinstance(by, int):
        found = symbols.floordiv(size, by)
        return found if symbols.equal(symbols.mul(found, by), size) else None
    factors = symbols.terms(size).values()
    return next((factor for factor in factors if symbols.equal(symbols.mul(factor, by), size)), None)
