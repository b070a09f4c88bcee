"""Weights of a checkpoint that isn't quantised, as values of 8 bits that a load makes of them while it reads.

Their recipes say what those of a checkpoint in `fp8` with blocks say, so all passes take them as they take those. What
no op computes with in 8 bits is read as it is stored after all (`exact`).
"""

from __future__ import annotations

import msgspec
from transformers import PreTrainedModel

from precast.builder.weights.schemes.chosen import unskipped
from precast.builder.weights.schemes.scheme import Scheme, Weight
from precast.ir.graph.schema import Concat, Dequantise, Quantise, Read, Recipe, Stack
from precast.ir.weights import recipes
from precast.ir.weights.quantised import PARTS

BLOCK = (128, 128)
"""Rows and columns that share a scale. A rank that has whole blocks of a matrix reads nothing of the others."""
_ROUTERS = frozenset(("gate", "router", "shared_expert_gate"))
"""What modules are called that choose experts, or weigh them: small, and a wrong choice costs more than a rounding."""


def scheme(model: PreTrainedModel) -> Scheme:
    """All linear layers but the head and routers, and experts; not embeddings, norms, convolutions or recurrences."""
    chosen = unskipped(model)

    def holds(weight: Weight) -> bool:
        return chosen(weight) and _ROUTERS.isdisjoint(weight.module.split("."))

    def recipe(weight: Weight) -> Recipe:
        stored = Read(weight.name, weight.shape)
        return Dequantise(Quantise(stored, "values", BLOCK), Quantise(stored, "scales", BLOCK), "fp8", BLOCK)

    return Scheme("fp8 while it is loaded", holds, recipe, ())


def exact(recipe: Recipe) -> Recipe:
    """The recipe without what quantises and dequantises at once: that would round, and save nothing."""
    if isinstance(recipe, Dequantise) and isinstance(recipe.of, Quantise):
        return recipe.of.of
    changes: dict[str, object] = {
        name: exact(part) for name in PARTS if (part := getattr(recipe, name, None)) is not None
    }
    if isinstance(recipe, (Concat, Stack)):
        changes["parts"] = tuple(map(exact, recipe.parts))
    return msgspec.structs.replace(recipe, **changes) if recipes.parts(recipe) else recipe
