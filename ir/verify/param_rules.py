"""The verifier's rules about params and their recipes."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from precast.ir.errors import RecipeError
from precast.ir.graph import symbols
from precast.ir.graph.schema import Dequantise, Param, Quantise, Read, Recipe, Symbol, TensorType, Tie
from precast.ir.graph.text import format_type
from precast.ir.ops.checks import WORLD
from precast.ir.verify.facts import Facts, Fault, Rule, same_type
from precast.ir.weights import recipes

_MOST_RANKS = 8
"""Ranks of the largest world in which recipes are tried; a larger one cuts the same tensors finer."""


def _recipes(facts: Facts) -> Iterator[Fault]:
    good: set[bytes] = set()
    for param in facts.graph.params:
        if isinstance(param.recipe, Tie):
            continue
        # Layers differ in the names of their tensors, which nothing here depends on: each kind is looked at once. As
        # bytes, since a stranger can make structs that all have one hash.
        kind = msgspec.msgpack.encode((param.type, recipes.map_reads(param.recipe, _nameless)))
        if kind in good:
            continue
        faults = list(_recipe(param, facts))
        yield from ((f"param %{param.name}", message) for message in faults)
        if not faults:
            good.add(kind)


def _nameless(read: Read) -> Read:
    return Read("", read.shape, read.dtype)


def _worlds(facts: Facts) -> list[dict[str, int]]:
    """The worlds to try: those of the plan, but for large ones, by their first and last rank; without a plan the least
    and the largest that the symbols allow; none for other ranges."""
    planned = {world.tp: world for world in facts.graph.shards.worlds if 1 <= world.tp <= _MOST_RANKS and world.ep}
    if planned:
        return [
            {"tp": world.tp, "rank": rank, "ep": ep}
            for world in planned.values()
            for ep in sorted({world.ep[0], world.ep[-1]})
            for rank in sorted({0, world.tp - 1})
        ]
    ranges = {symbol.name: symbol for symbol in facts.graph.symbols if symbol.name in WORLD}

    def allowed(world: dict[str, int]) -> bool:
        return all(
            each.min <= world[name] and (each.max is None or world[name] <= each.max) for name, each in ranges.items()
        )

    tp = ranges.get("tp", Symbol("tp", 1, 1))
    sizes = {max(tp.min, 1), min(_MOST_RANKS if tp.max is None else tp.max, _MOST_RANKS)}
    worlds = [{"tp": size, "rank": rank, "ep": 1} for size in sorted(sizes) for rank in sorted({0, size - 1})]
    return [world for world in worlds if world["tp"] > 0 and allowed(world)]


def _in_worlds(param: Param, facts: Facts) -> Iterator[str]:
    """Where the sizes of a recipe don't make sense once the symbols have values."""
    free = set[str]().union(*map(symbols.free_symbols, recipes.sizes(param.recipe)))
    declared = {symbol.name for symbol in facts.graph.symbols}
    if unknown := free & declared - WORLD:
        yield f"{', '.join(sorted(unknown))}: has no value when weights are read; expected {', '.join(sorted(WORLD))}"
        return
    for world in _worlds(facts) if free else ():
        try:
            recipes.shape(recipes.in_world(param.recipe, world))
        except (RecipeError, symbols.ExprError) as error:
            yield f"{error}, where {', '.join(f'{name} is {value}' for name, value in world.items())}"
            return


def _recipe(param: Param, facts: Facts) -> Iterator[str]:
    try:
        shape, dtype = recipes.shape(param.recipe), recipes.dtype(param.recipe)
        same = same_type(param.type, TensorType(param.type.dtype, shape))
    except (RecipeError, symbols.ExprError) as error:
        yield str(error)
        return
    if _is_nested(param.recipe, inside=False):
        yield "what is computed while it is read (dequantise, quantise) is made of what is stored, not of another one"
    if any(isinstance(size, int) and size < 0 for size in recipes.sizes(param.recipe)):
        yield "a size of the recipe is negative"
    if not same:
        found = ", ".join(map(symbols.text, shape))
        yield f"expected {format_type(param.type)}, the recipe makes [{found}]"
    else:
        yield from _in_worlds(param, facts)
    if dtype != param.type.dtype:
        yield f"expected {param.type.dtype}, the recipe makes {dtype or 'the dtype of the checkpoint: it needs a cast'}"


def _is_nested(recipe: Recipe, *, inside: bool) -> bool:
    """Whether one computation stands in another."""
    computes = isinstance(recipe, (Dequantise, Quantise))
    return (inside and computes) or any(_is_nested(part, inside=inside or computes) for part in recipes.parts(recipe))


def _ties(facts: Facts) -> Iterator[Fault]:
    params = {param.name: param for param in facts.graph.params}
    for param in facts.graph.params:
        if not isinstance(param.recipe, Tie):
            continue
        source = params.get(param.recipe.param)
        where = f"param %{param.name}"
        if source is None:
            yield where, f"tied to %{param.recipe.param}, which is no param"
        elif isinstance(source.recipe, Tie):
            yield where, f"tied to %{source.name}, which is tied itself"
        elif not same_type(source.type, param.type):
            yield where, f"tied to %{source.name}: expected {format_type(source.type)}, found {format_type(param.type)}"


PARAM_RULES = (
    Rule("IR035", "each param has a recipe of its shape and dtype", _recipes),
    Rule("IR036", "a tied param shares an untied one of equal type", _ties),
)
