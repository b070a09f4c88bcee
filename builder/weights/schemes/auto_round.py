"""AutoRound's own configs (`quant_method: auto-round`), of what it packs as AutoGPTQ and AutoAWQ do."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from transformers import PreTrainedModel

from precast.builder.source.quantised_options import AUTO_ROUND, Quantised, refuse, refuse_groups
from precast.builder.weights.conversions import saved_tensors
from precast.builder.weights.schemes.awq_gptq import awq, gptq
from precast.builder.weights.schemes.chosen import config_names
from precast.builder.weights.schemes.scheme import Scheme, Weight
from precast.ir.graph.schema import Recipe

_FEW_BITS = 8
"""At most: layers of more are stored as they were."""


def auto_round(model: PreTrainedModel, options: Quantised) -> Scheme:
    """Linear layers whose names begin as `block_name_to_quantize` says, or all in layers, and those that `extra_config`
    names; not those that it gives 16 bits. Groups are of neighbours, and zeros of GPTQ's packing are stored less 1.
    """
    packing = options.entries["packing_format"]
    method, blocks = AUTO_ROUND[packing], _blocks(options.get("block_name_to_quantize", None))
    names, own = config_names(model), _own(model, options)
    named = (options.get("extra_config", None) or {}).keys()

    @functools.cache
    def packed(bits: int, size: int) -> Scheme:
        entries = {"bits": bits, "group_size": size}
        if method == "awq":
            return awq(model, Quantised(method, entries))
        return gptq(model, Quantised(method, entries | {"desc_act": False}))

    def sizes(weight: Weight) -> tuple[int, int]:
        """Its bits, and inputs of a group."""
        said = {**options.entries, **own(names(weight.module, weight.stem))}
        return said["bits"], said["group_size"]

    def holds(weight: Weight) -> bool:
        bits, size = sizes(weight)
        found = names(weight.module, weight.stem)
        inside = blocks is None or any(name.startswith(blocks) or name in named for name in found)
        return bits <= _FEW_BITS and inside and packed(bits, size).holds(weight)

    def recipe(weight: Weight) -> Recipe:
        bits, size = sizes(weight)
        if method == "awq" and bits != 4:
            raise refuse(options.method, f"{weight.name} of {bits} bits in {packing}", why="4 are known")
        if size > 0 and weight.shape[-1] % size:
            raise refuse_groups(options.method, weight.name, weight.shape[-1], size)
        return packed(bits, size).recipe(weight)

    if (head := own(("lm_head",))) and {**options.entries, **head}["bits"] <= _FEW_BITS:
        raise refuse(options.method, "a head of few bits (lm_head)")
    return Scheme(options.method, holds, recipe, ())


def _blocks(said: str | list[str] | None) -> tuple[str, ...] | None:
    """How the names of quantised layers begin; None: in any way."""
    listed = said.split(",") if isinstance(said, str) else said
    return None if listed is None else tuple(name.strip() for name in listed)


def _own(model: PreTrainedModel, options: Quantised) -> Callable[[tuple[str, ...]], Mapping[str, Any]]:
    """What `extra_config` says of a layer by its names: under one of these, else under the first regular expression
    that is found in one. What is the name of a layer is no expression: of experts there may be tens of thousands."""
    extra: Mapping[str, Any] = options.get("extra_config", None) or {}
    names, stored = config_names(model), saved_tensors(model, ()) if extra else ()
    linear = (path for path, part in model.named_modules() if isinstance(part, torch.nn.Linear))
    stems = (name.removesuffix(".weight") for name in stored)
    layers = {name for each in (*linear, *stems) for name in names(each)}
    patterns = [(re.compile(key), said) for key, said in extra.items() if key not in layers and said]

    def own(found: tuple[str, ...]) -> Mapping[str, Any]:
        said = next((extra[name] for name in found if name in extra), None)
        if said is None:
            said = next((each for pattern, each in patterns if any(map(pattern.search, found))), {})
        return {name: value for name, value in said.items() if value is not None}

    return own
