"""The verifier's rules about params and their recipes."""

from __future__ import annotations

from collections.abc import Iterator

from precast.ir.errors import RecipeError
from precast.ir.graph import symbols
from precast.ir.graph.schema import Param, TensorType, Tie
from precast.ir.graph.text import format_type
from precast.ir.verify.facts import Facts, Fault, Rule, same_type
from precast.ir.weights import recipes


def _recipes(facts: Facts) -> Iterator[Fault]:
    for param in facts.graph.params:
        if not isinstance(param.recipe, Tie):
            yield from ((f"param %{param.name}", message) for message in _recipe(param))


def _recipe(param: Param) -> Iterator[str]:
    try:
        shape, dtype = recipes.shape(param.recipe), recipes.dtype(param.recipe)
        same = same_type(param.type, TensorType(param.type.dtype, shape))
    except (RecipeError, symbols.ExprError) as error:
        yield str(error)
        return
    if any(isinstance(size, int) and size < 0 for size in recipes.sizes(param.recipe)):
        yield "a size of the recipe is negative"
    if not same:
        found = ", ".join(map(symbols.text, shape))
        yield f"expected {format_type(param.type)}, the recipe makes [{found}]"
    if dtype != param.type.dtype:
        yield f"expected {param.type.dtype}, the recipe makes {dtype or 'the dtype of the checkpoint: it needs a cast'}"


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
