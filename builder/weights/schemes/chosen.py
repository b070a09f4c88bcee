"""Which weights of a model are quantised, by the names that configs have for layers."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Sequence

import torch
from transformers import PreTrainedModel
from transformers.quantizers.base import HfQuantizer

from precast.builder.weights.conversions import other_prefixes
from precast.builder.weights.schemes.scheme import Weight


def is_linear(model: PreTrainedModel, weight: Weight) -> bool:
    """Whether this is the weight of a linear layer, or of one of the experts that transformers keeps stacked."""
    leaf = weight.param.rpartition(".")[2]
    if weight.module.endswith(".experts"):
        return "bias" not in leaf and len(weight.shape) in (2, 3)
    return leaf == "weight" and isinstance(model.get_submodule(weight.module), torch.nn.Linear)


def all_but(
    model: PreTrainedModel, skipped: list[str] | None, *, default_too: bool = False,
    is_meant: Callable[[PreTrainedModel, Weight], bool] = is_linear,
) -> Callable[[Weight], bool]:  # fmt: skip
    """All linear layers but those of `skipped`, by transformers' rules; None: all but the head.

    A name may be the module's or the checkpoint's. `is_meant` says which weights are those of linear layers.
    """
    in_float32 = list(model._keep_in_fp32_modules or ())
    patterns = HfQuantizer.get_modules_to_not_convert(model, skipped, in_float32, add_default_skips=default_too)
    is_kept = kept_by(patterns)

    def holds(weight: Weight) -> bool:
        return is_meant(model, weight) and not is_kept(weight.module) and not is_kept(weight.stem)

    return holds


def tables(model: PreTrainedModel, ends: list[str] | None, skipped: list[str] | None) -> Callable[[Weight], bool]:
    """The embeddings whose modules' names end so, but those of `skipped`."""
    is_kept = kept_by(skipped or [])

    def holds(weight: Weight) -> bool:
        is_named = weight.module.endswith(tuple(ends or ())) and weight.param == f"{weight.module}.weight"
        return (
            is_named and type(model.get_submodule(weight.module)) is torch.nn.Embedding and not is_kept(weight.module)
        )

    return holds


def kept_by(patterns: Sequence[str]) -> Callable[[str], bool]:
    """Whether a module of a name is not quantised: what transformers' `should_convert_module` denies.

    A pattern is the name's end, or a regular expression for its beginning, up to where a part of it begins or ends. A
    checkpoint may list tens of thousands, and has as many weights. Most are names, which are looked up: their dots
    stand for dots. Those without groups are compiled as one; others each by itself, as names of groups, numbers and
    flags hold for one pattern.
    """
    names = {each for each in patterns if _NAME.fullmatch(each)}
    others = [each for each in dict.fromkeys(patterns) if each not in names]
    simple = [each for each in others if "(" not in each]
    begins = [_begin("", "|".join(f"(?:{each})" for each in simple))] if simple else []
    begins += [_begin(*_FLAGS.match(each).group(1, 2)) for each in others if "(" in each]  # type: ignore[union-attr]
    ends = _by_length(patterns)

    def is_kept(name: str) -> bool:
        if any(not length or name[-length:] in found for length, found in ends.items()):
            return True
        wholes = itertools.accumulate(name.split("."), "{}.{}".format)
        return not names.isdisjoint(wholes) or any(begin.match(name) for begin in begins)

    return is_kept


_NAME = re.compile(r"\w+(?:[.-]\w+)*")
"""What is no more than a name."""
_FLAGS = re.compile(r"((?:\(\?[aiLmsux]+\))?)(.*)", re.DOTALL)
"""The flags that a pattern begins with, which may stand nowhere else, and the rest."""


def _begin(flags: str, pattern: str) -> re.Pattern[str]:
    """The pattern up to where a part of a name begins or ends."""
    return re.compile(rf"{flags}(?:{pattern})(?:(?<=\.)|(?=\.|$))")


def _by_length(names: Iterable[str]) -> dict[int, set[str]]:
    """The names by how many letters they have."""
    found: dict[int, set[str]] = {}
    for name in names:
        found.setdefault(len(name), set()).add(name)
    return found


def config_names(model: PreTrainedModel) -> Callable[..., tuple[str, ...]]:
    """What a config may call a layer, by its names in module and checkpoint: these, or those of a multimodal model."""
    prefixes = other_prefixes(model)

    def names(*found: str) -> tuple[str, ...]:
        others = (
            other + name.removeprefix(prefix)
            for name in found
            for prefix, other in prefixes.items()
            if name.startswith(prefix)
        )
        return (*found, *others)

    return names
