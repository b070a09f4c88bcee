"""How the module's params are made from a checkpoint as `save_pretrained` writes it.

Renames that transformers declares for a model become the names that recipes read. What it declares beyond renames
(tensors merged or split while loading) is refused by name until there is a recipe for it: no weight is guessed.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import PrefixChange, WeightConverter, WeightRenaming, apply_renamings

from precast.ir.errors import BuildError
from precast.ir.schema import Cast, Checkpoint, Read, Recipe, Tie

_ALWAYS_IGNORED = ("*rotary_emb.inv_freq",)
_PATTERN_TOKEN = re.compile(r"\\d\+|\.\*|\\\.|[A-Za-z0-9_.]")


def param_recipes(model: PreTrainedModel) -> dict[str, Recipe]:
    """A recipe for each entry of the model's state dict, by its name there.

    Raises BuildError("recipe-unsupported") for a conversion that is more than a rename.
    """
    tied = _tied(model)
    renamings, converters = _reverse_conversions(model)
    recipes: dict[str, Recipe] = {}
    for name, tensor in model.state_dict().items():
        _refuse_conversion(name, converters)
        if name in tied:
            recipes[name] = Tie(tied[name])
        elif tensor.is_floating_point():
            shape = tuple(tensor.shape)
            recipes[name] = Cast(Read(apply_renamings(name, renamings), shape), _dtype(tensor))
        else:
            recipes[name] = Read(apply_renamings(name, renamings), tuple(tensor.shape), _dtype(tensor))
    return recipes


def checkpoint_rules(model: PreTrainedModel) -> Checkpoint:
    """The names that a checkpoint may hold beyond those that recipes read."""
    prefix = model.base_model_prefix
    patterns = sorted(set(model._keys_to_ignore_on_load_unexpected or ()))
    ignored = [glob for pattern in patterns for glob in _globs(pattern)]
    renamings, _ = _reverse_conversions(model)
    tied = {apply_renamings(a, renamings): apply_renamings(b, renamings) for a, b in sorted(_tied(model).items())}
    return Checkpoint(
        optional_prefixes=(prefix + ".",) if prefix else (),
        ignored=tuple(sorted({*ignored, *_ALWAYS_IGNORED})),
        tied=tied,
    )


def _reverse_conversions(model: PreTrainedModel) -> tuple[list[WeightRenaming], list[WeightConverter]]:
    """What transformers does to a module's names and tensors when it saves them."""
    transforms = [
        transform
        for transform in get_model_conversion_mapping(model, add_legacy=False)
        if not isinstance(transform, PrefixChange)
    ]
    reverse = [transform.reverse_transform() for transform in transforms[::-1]]
    renamings = [transform for transform in reverse if isinstance(transform, WeightRenaming)]
    return renamings, [transform for transform in reverse if isinstance(transform, WeightConverter)]


def _tied(model: PreTrainedModel) -> dict[str, str]:
    """Tied names, each with the param that it shares the memory of."""
    expanded: dict[str, str] = dict(getattr(model, "all_tied_weights_keys", None) or {})
    return expanded


def _dtype(tensor: torch.Tensor) -> Any:
    """The dtype's name; the verifier refuses one that the schema doesn't have."""
    return str(tensor.dtype).removeprefix("torch.")


def _refuse_conversion(name: str, converters: list[WeightConverter]) -> None:
    for converter in converters:
        _, pattern = converter.rename_source_key(name)
        if pattern is not None:
            raise BuildError(
                "recipe-unsupported",
                f"{name} is made by a checkpoint conversion that has no recipe: {converter}",
            )


def _globs(pattern: str) -> list[str]:
    """A regular expression of transformers as patterns with `*`; those that say more than that are left out.

    Leaving one out is safe: its tensors are then reported as unexpected.
    """
    anchored_start, anchored_end = pattern.startswith("^"), pattern.endswith("$")
    body = pattern.removeprefix("^").removesuffix("$")
    tokens: list[str] = _PATTERN_TOKEN.findall(body)
    if "".join(tokens) != body:
        return []
    spelled = {"\\d+": "*", ".*": "*", "\\.": "."}
    text = "".join(spelled.get(token, token) for token in tokens)
    return [("" if anchored_start else "*") + text + ("" if anchored_end else "*")]
