"""Weights of a checkpoint that isn't quantised, as values of 8 bits that a load makes of them while it reads.

Their recipes say what those of a checkpoint in `fp8` with blocks say, or of one by channels, so all passes take them as
they take those. What no op computes with in 8 bits is read as it is stored after all (`exact`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec
import torch
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from precast.builder.graph.rounding import NONE, Rounding
from precast.builder.named import CHANNELS
from precast.builder.weights.schemes.chosen import all_but, is_linear, kept_by
from precast.builder.weights.schemes.scheme import Scheme, Weight
from precast.ir.graph.schema import Concat, Dequantise, Quantise, Read, Recipe, Stack
from precast.ir.weights import recipes
from precast.ir.weights.quantised import PARTS

BLOCK = (128, 128)
"""Rows and columns that share a scale. A rank that has whole blocks of a matrix reads nothing of the others."""
_ROUTERS = frozenset(("gate", "router", "shared_expert_gate"))
"""What modules are called that choose experts, or weigh them: small, and a wrong choice costs more than a rounding."""


def scheme(model: PreTrainedModel, quantise: str) -> Scheme:
    """All linear layers but the head and routers, and experts; not embeddings, norms, convolutions or recurrences.

    `quantise`: one of `precast.builder.named.QUANTISED`. By channels inputs are rounded, too, token by token, as in
    compressed-tensors' `FP8_DYNAMIC` and FBGEMM's checkpoints.
    """
    by_channels = quantise == CHANNELS
    chosen = all_but(model, None, is_meant=_is_multiplied)

    def holds(weight: Weight) -> bool:
        return chosen(weight) and not _is_router(weight.module)

    def recipe(weight: Weight) -> Recipe:
        # by channels: of a matrix that is stored transposed, `of_columns` says which these are
        return _made(Read(weight.name, weight.shape), (1, weight.shape[-1]) if by_channels else BLOCK)

    rounding = Rounding("fp8_token") if by_channels else NONE
    return Scheme(f"{quantise} while it is loaded", holds, recipe, (), rounding=lambda _: rounding)


def _made(stored: Recipe, block: tuple[int, int]) -> Dequantise:
    return Dequantise(Quantise(stored, "values", block), Quantise(stored, "scales", block), "fp8", block)


def reasons(model: PreTrainedModel, recipes_of: Mapping[str, Recipe]) -> dict[str, str]:
    """Why the scheme leaves weights as they are, by the tensors that these entries of the state dict are made of.

    Those that it quantises have an entry, too, which means nothing.
    """
    in_float32 = kept_by(list(model._keep_in_fp32_modules or ()))
    found: dict[str, str] = {}
    for name, recipe in recipes_of.items():
        module = name.rpartition(".")[0]
        part = model.get_submodule(module)
        if _is_router(module):
            reason = "experts are chosen or weighed with it"
        elif in_float32(module):
            reason = "transformers keeps it in float32"
        elif part is model.get_output_embeddings() or isinstance(part, torch.nn.Embedding):
            reason = "logits are made with it"
        elif isinstance(part, torch.nn.Linear):
            reason = "transformers leaves it out of what it quantises"
        else:
            reason = f"{type(part).__name__} is none of the linear layers and experts that are known"
        found |= {read.tensor: reason for read in recipes.each_leaf(recipe)}
    return found


def _is_multiplied(model: PreTrainedModel, weight: Weight) -> bool:
    """Whether the weight is that of a linear layer, also of GPT-2's, which stores it transposed, or of experts, also
    of those that are stacked in a module for each of their products (JetMoE)."""
    if is_linear(model, weight):
        return True
    leaf, part = weight.param.rpartition(".")[2], model.get_submodule(weight.module)
    is_stack = "Experts" in type(part).__name__ and len(weight.shape) == 3
    return leaf == "weight" and (is_stack or isinstance(part, Conv1D))


def _is_router(module: str) -> bool:
    return not _ROUTERS.isdisjoint(module.split("."))


def exact(recipe: Recipe) -> Recipe:
    """The recipe without what quantises and dequantises at once: that would round, and save nothing."""
    return _changed(recipe, lambda stored, block: stored)


def of_columns(recipe: Recipe) -> Recipe:
    """The recipe with a scale for each column of what the checkpoint stores, where it has one for each row: columns are
    the outputs of a matrix that is stored transposed."""

    def turned(stored: Recipe, block: tuple[int, int]) -> Recipe:
        return _made(stored, block if block == BLOCK else (_rows(stored), 1))

    return _changed(recipe, turned)


def _rows(stored: Recipe) -> int:
    rows = recipes.shape(stored)[-2]
    assert isinstance(rows, int), "what a checkpoint holds has known sizes"
    return rows


def _changed(recipe: Recipe, change: Callable[[Recipe, tuple[int, int]], Recipe]) -> Recipe:
    """The recipe with what `change` makes of each matrix that is quantised while it is read, and of its block."""
    if isinstance(recipe, Dequantise) and isinstance(recipe.of, Quantise):
        return change(recipe.of.of, recipe.of.block)
    changes: dict[str, object] = {
        name: _changed(part, change) for name in PARTS if (part := getattr(recipe, name, None)) is not None
    }
    if isinstance(recipe, (Concat, Stack)):
        changes["parts"] = tuple(_changed(part, change) for part in recipe.parts)
    return msgspec.structs.replace(recipe, **changes) if recipes.parts(recipe) else recipe
