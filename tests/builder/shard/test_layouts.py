"""Pieces of dimensions: where they are on a rank, and what slices and reshapes make of them."""

from __future__ import annotations

import pytest

from precast.builder.shard.layouts import (
    Misfit,
    Piece,
    Units,
    cut,
    local_place,
    local_size,
    reshaped,
    with_piece,
)
from precast.ir.graph import symbols
from precast.ir.graph.schema import Expr

HEADS = Units(4, "tp", 4, 0)
KEYS = Units(2, "tp", 4, 0)
FUSED = (Piece(0, HEADS, 12), Piece(48, KEYS, 12), Piece(72, KEYS, 12))
"""Queries, keys and values in one dimension of 100 elements, of which nobody splits the last four."""
TOKENS_BY_HEADS = symbols.mul(4, "T")


def values(expr: Expr, tp: int, rank: int = 0, ep: int = 1) -> int:
    return symbols.evaluate(expr, {"tp": tp, "rank": rank, "ep": ep})


@pytest.mark.parametrize(("tp", "size", "place"), [(1, 100, 72), (2, 52, 36), (4, 40, 24)])
def test_a_rank_has_its_units_and_what_all_have(tp: int, size: int, place: int) -> None:
    assert values(local_size(100, FUSED), tp) == size
    assert values(local_place(72, FUSED), tp) == place


@pytest.mark.parametrize(
    ("units", "world", "starts"),
    [
        (Units(4, "tp", 4, 0), (2, 1), [0, 2]),
        (Units(2, "tp", 4, 0), (4, 1), [0, 0, 1, 1]),
        (Units(6, "ep", 6, 0), (4, 2), [0, 0, 3, 3]),
        (Units(6, "within", 6, 0), (4, 2), [0, 3, 0, 3]),
        (Units(7, "vocab", 7, 0), (4, 1), [0, 2, 4, 6]),
    ],
)
def test_each_rank_begins_where_the_one_before_it_ends(units: Units, world: tuple[int, int], starts: list[int]) -> None:
    tp, ep = world
    assert [values(units.start, tp, rank, ep) for rank in range(tp)] == starts


def test_a_place_inside_of_a_piece_is_nowhere_on_a_rank() -> None:
    with pytest.raises(Misfit, match="units of 12"):
        local_place(24, FUSED)


def test_a_slice_takes_whole_pieces() -> None:
    assert cut(FUSED, 48, 52) == (Piece(0, KEYS, 12), Piece(24, KEYS, 12))
    with pytest.raises(Misfit, match="some of 4 units"):
        cut(FUSED, 24, 48)


def test_pieces_do_not_overlap() -> None:
    assert with_piece(FUSED, FUSED[1]) == FUSED
    with pytest.raises(Misfit, match="two ways"):
        with_piece(FUSED, Piece(60, KEYS, 12))


@pytest.mark.parametrize(
    ("pieces", "dim", "before", "after", "expected"),
    [
        ((Piece(0, HEADS, 12),), 2, (1, "T", 48), (1, "T", 4, 12), {2: (Piece(0, HEADS, 1),)}),
        ((Piece(0, HEADS, 1),), 2, (1, "T", 4, 12), (1, "T", 48), {2: (Piece(0, HEADS, 12),)}),
        ((Piece(0, HEADS, 1),), 2, (1, "T", 4, 12), (1, "T", 4, 3, 4), {2: (Piece(0, HEADS, 1),)}),
        ((Piece(0, KEYS, 28),), 3, (1, "T", 1, 56), (1, "T", 4, 14), {2: (Piece(0, KEYS, 2),)}),
        # heads of each token, token after token, and back
        ((Piece(0, HEADS, 1),), 2, (1, "T", 4, 14), (TOKENS_BY_HEADS, 14), {0: (Piece(0, HEADS, 1, "T"),)}),
        ((Piece(0, HEADS, 1, "T"),), 0, (TOKENS_BY_HEADS, 14), (1, "T", 4, 14), {2: (Piece(0, HEADS, 1),)}),
        # gate after values, in rows of their own; half of it says nothing yet
        ((Piece(0, HEADS, 2), Piece(8, HEADS, 2)), 0, (16, 5), (2, 8, 5), {1: (Piece(0, HEADS, 2),)}),
        ((Piece(0, HEADS, 2),), 0, (16, 5), (2, 8, 5), {}),
        ((Piece(0, HEADS, 2),), 1, (2, 8, 5), (16, 5), {0: (Piece(0, HEADS, 2), Piece(8, HEADS, 2))}),
    ],
)
def test_a_reshape_carries_pieces(
    pieces: tuple[Piece, ...], dim: int, before: tuple[Expr, ...], after: tuple[Expr, ...],
    expected: dict[int, tuple[Piece, ...]],
) -> None:  # fmt: skip
    assert reshaped(pieces, dim, before, after) == expected


@pytest.mark.parametrize(
    ("before", "after"),
    [((1, "T", 96), (1, "T", 3, 32)), ((1, "T", 96), (1, "T", 5, 7)), ((1, "T", 96), (1, symbols.mul("T", 3), 32))],
)
def test_a_reshape_that_tears_units_apart_is_refused(before: tuple[Expr, ...], after: tuple[Expr, ...]) -> None:
    with pytest.raises(Misfit, match="reshape"):
        reshaped((Piece(0, Units(6, "tp", 6, 0), 16),), 2, before, after)
