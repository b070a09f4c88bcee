"""Recipes of ranks: their parts, together, are the param, and on one rank nothing is left of the cuts."""

from __future__ import annotations

import pytest
import torch
from reference import evaluate

from precast.builder.shard.layouts import Piece, Pieces, Units
from precast.builder.shard.recipes import split
from precast.ir.graph.schema import Cast, Concat, Each, Read, Recipe, Reshape, Slice, Stack, Tie, Transpose
from precast.ir.weights import recipes
from precast.ir.weights.shortest import shortest

UNITS = Units(4, "tp", 4, 0)


def read(name: str, *shape: int) -> Read:
    return Read(name, shape)


def of_rank(recipe: Recipe, tp: int, rank: int) -> Recipe:
    return recipes.in_world(recipe, {"tp": tp, "rank": rank, "ep": 1})


def tensors(recipe: Recipe) -> dict[str, torch.Tensor]:
    """What the recipe reads; no two elements are equal."""
    made: dict[str, torch.Tensor] = {}
    for leaf in recipes.each_leaf(recipe):
        start = 1000 * len(made)
        made[leaf.tensor] = torch.arange(start, start + torch.Size(leaf.shape).numel()).reshape(leaf.shape).float()
    return made


ALTERNATING = Reshape(Transpose(Reshape(read("w", 16, 3), (8, 2, 3)), 0, 1), (16, 3))
"""Gate and up that alternate in the checkpoint, and lie one after the other in the param."""

CASES: list[tuple[Recipe, int, Pieces]] = [
    (Cast(read("w", 8, 3), "float32"), 0, (Piece(0, UNITS, 2),)),
    (Cast(read("w", 3, 8), "float32"), 1, (Piece(0, UNITS, 2),)),
    (Transpose(Cast(read("w", 3, 24), "float32"), 0, 1), 0, tuple(Piece(8 * i, UNITS, 2) for i in range(3))),
    (Concat((read("q", 8, 3), read("k", 4, 3), read("rest", 5, 3)), 0), 0, (Piece(0, UNITS, 2), Piece(8, UNITS, 1))),
    (Concat((read("a", 8, 3), read("b", 8, 2)), 1), 0, (Piece(0, UNITS, 2),)),
    (Each(read("e.*.w", 8, 3), 0, 4), 0, (Piece(0, UNITS, 1),)),
    (Each(read("e.*.w", 3, 8), 0, 4), 2, (Piece(0, UNITS, 2),)),
    (Stack((read("a", 8, 3), read("b", 8, 3)), 1), 0, (Piece(0, UNITS, 2),)),
    (Reshape(read("conv", 8, 1, 3), (8, 3)), 0, (Piece(0, UNITS, 2),)),
    (ALTERNATING, 0, (Piece(0, UNITS, 2), Piece(8, UNITS, 2))),
    (Slice(read("w", 20, 3), 0, 10, 8), 0, (Piece(0, UNITS, 2),)),
    (Reshape(read("w", 6, 4), (8, 3)), 0, (Piece(0, UNITS, 2),)),
]


@pytest.mark.parametrize(("recipe", "dim", "pieces"), CASES)
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_each_rank_makes_its_units(recipe: Recipe, dim: int, pieces: Pieces, tp: int) -> None:
    stored = tensors(recipe)
    whole = evaluate(recipe, stored)

    mine = split(recipe, {dim: pieces})

    for rank in range(tp):
        expected, place = [], 0
        for piece in pieces:
            assert isinstance(piece.inner, int)
            count = piece.units.count // tp * piece.inner
            expected.append(whole.narrow(dim, place, piece.start - place))
            expected.append(whole.narrow(dim, piece.start + rank * count, count))
            place = piece.end
        expected.append(whole.narrow(dim, place, whole.shape[dim] - place))
        made = evaluate(of_rank(mine, tp, rank), stored)
        assert torch.equal(made, torch.cat(expected, dim))
        assert torch.equal(evaluate(shortest(of_rank(mine, tp, rank)), stored), made)


@pytest.mark.parametrize(("recipe", "dim", "pieces"), CASES)
def test_on_one_rank_the_recipe_is_what_it_was(recipe: Recipe, dim: int, pieces: Pieces) -> None:
    assert shortest(of_rank(split(recipe, {dim: pieces}), 1, 0)) == recipe


def test_gate_and_up_that_alternate_are_cut_where_they_are_read() -> None:
    mine = split(ALTERNATING, {0: (Piece(0, UNITS, 2), Piece(8, UNITS, 2))})

    (cut,) = (part for part in parts_of(of_rank(mine, 2, 1)) if isinstance(part, Slice))
    assert cut.of == read("w", 16, 3) or cut.of == Reshape(read("w", 16, 3), (8, 2, 3))
    assert (cut.start, cut.length) in ((8, 8), (4, 4))


def parts_of(recipe: Recipe) -> list[Recipe]:
    return [recipe, *(inner for part in recipes.parts(recipe) for inner in parts_of(part))]


def test_a_vocabulary_that_ranks_do_not_divide_is_filled_up() -> None:
    recipe = read("embed", 7, 2)
    stored = tensors(recipe)

    mine = split(recipe, {0: (Piece(0, Units(7, "vocab", 7, 0), 1),)}, ranks=(1, 2, 4))

    parts = [evaluate(of_rank(mine, 4, rank), stored) for rank in range(4)]
    assert [len(part) for part in parts] == [2, 2, 2, 2]
    assert torch.equal(torch.cat(parts)[:7], stored["embed"])
    assert shortest(of_rank(mine, 1, 0)) == recipe


def test_a_tie_stays_a_tie() -> None:
    assert split(Tie("embed"), {0: (Piece(0, UNITS, 2),)}) == Tie("embed")
