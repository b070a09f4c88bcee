"""compressed-tensors: groups of layers, each with a format of its own."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from transformers import PreTrainedModel

from precast.builder.graph.rounding import Rounding
from precast.builder.source.quantised_options import Quantised, refuse, refuse_groups, stored_as
from precast.builder.weights.rounding import of_compressed_tensors
from precast.builder.weights.schemes.chosen import config_names, is_linear
from precast.builder.weights.schemes.scheme import KV_SCALES, Scheme, Weight
from precast.builder.weights.schemes.stored import (
    Scales,
    nvfp4,
    of_each,
    one_by_one,
    packed_mxfp4,
    per_group_of_32,
    per_row,
    per_tensor,
    per_tile,
    same,
    scaled,
)
from precast.ir.graph.schema import Dequantise, Dtype, Read, Recipe
from precast.ir.weights.quantised import PACKED
from precast.ir.weights.recipes import map_reads


def compressed_tensors(model: PreTrainedModel, options: Quantised) -> Scheme:
    """Of each layer the group that compressed-tensors gives it: that of the layer's own name, before those of patterns,
    before that of all linear layers. Of a target of several groups the last counts, and of several patterns the first
    by alphabet. `ignore` lists layers of none. Of stacked experts each linear layer has its own name.
    """
    targets = {target: group for group in options.get("config_groups", {}).values() for target in group["targets"]}
    is_ignored, target_of = _first(options.get("ignore", None) or ()), _first(set(targets) - {_ALL})
    names = config_names(model)

    @functools.cache
    def groups_of(weight: Weight) -> list[Any]:
        if not is_linear(model, weight):
            return [None]
        ignored, named = (of_each(weight, names, first) for first in (is_ignored, target_of))
        return [None if left else targets.get(name or _ALL) for left, name in zip(ignored, named, strict=True)]

    def group_of(weight: Weight) -> Any:
        """The group of a weight that is of one; two groups that differ in their targets alone are the same."""
        found = groups_of(weight)
        same(options.method, weight, [group and {**group, "targets": ()} for group in found])
        return found[0]

    def recipe(weight: Weight) -> Recipe:
        group = group_of(weight)
        args, kind = group["weights"], stored_as(group, options.get("format", None)) or ""
        return one_by_one(model, weight, options.method, lambda each: _compressed(each, args, kind))

    ignored = (
        "*.input_scale", "*.input_zero_point", "*.input_global_scale", "*.output_scale", "*.weight_shape", "*.k_scale",
        "*.v_scale",
    )  # fmt: skip
    scales = (*KV_SCALES, "?_proj.output_scale")

    def rounding(weight: Weight) -> Rounding:
        return of_compressed_tensors(group_of(weight).get("input_activations"), weight.stem)

    return Scheme(
        "compressed-tensors", lambda weight: any(groups_of(weight)), recipe, ignored, scales, rounding=rounding
    )


_ALL = "Linear"
"""The target that is no name: the class of layers."""


def _first(patterns: Iterable[str]) -> Callable[[tuple[str, ...]], str | None]:
    """Gives the first of compressed-tensors' patterns that one of some names fits: a name, before all that are after
    `re:` a regular expression for a name's beginning, each by alphabet."""
    in_order = sorted(set(patterns))
    whole = frozenset(each for each in in_order if not each.startswith("re:"))
    begins = [(each, re.compile(each.removeprefix("re:"))) for each in in_order if each not in whole]

    def first(names: tuple[str, ...]) -> str | None:
        if found := whole.intersection(names):
            return min(found)
        return next((each for each, begin in begins if any(map(begin.match, names))), None)

    return first


def _compressed(weight: Weight, args: Mapping[str, Any], kind: str) -> Recipe:
    """The recipe of a weight that compressed-tensors stored as `kind`, one of those of `stored_as`."""
    name, strategy = weight.name + "_scale", args["strategy"]
    if kind == "nvfp4":
        return nvfp4(weight, "_packed", "_global_scale", (1,), divided=True)
    if kind == "mxfp4":
        return packed_mxfp4("compressed-tensors", weight, "_packed")
    if kind == "mxfp8":
        return per_group_of_32(weight)
    if kind in PACKED:
        return _packed(weight, args, kind)
    if strategy == "tensor":
        scales = per_tensor(weight, name, (1,))
    elif strategy == "channel":
        scales = per_row(weight, name)
    else:
        tile = (1, args["group_size"]) if strategy == "group" else tuple(args["block_structure"])
        scales = per_tile(weight, name, tile)
    return scaled(weight, scales) if kind == "fp8" else _int8(weight, scales, symmetric=args.get("symmetric", True))


def _int8(weight: Weight, scales: Scales, *, symmetric: bool) -> Recipe:
    values = Read(weight.name, weight.shape, "int8")
    if symmetric:
        return Dequantise(values, scales.recipe, "int8", scales.tile)

    def point(read: Read) -> Recipe:
        return Read(weight.name + "_zero_point", read.shape, "int8")

    return Dequantise(values, scales.recipe, "int8", scales.tile, map_reads(scales.recipe, point))


_SCALES: dict[str, Dtype] = {"torch.float32": "float32", "torch.float16": "float16", "torch.bfloat16": "bfloat16"}
"""What `scale_dtype` may say; if nothing, scales are of the model's dtype."""


def _packed(weight: Weight, args: Mapping[str, Any], kind: str) -> Recipe:
    """Integers in groups of inputs: signed ones, stored with half of their range added, as their zeros are."""
    each, (outputs, inputs) = PACKED[kind], weight.shape
    size = inputs if args["strategy"] == "channel" else args["group_size"]
    if inputs % each:
        why = f"inputs that are no multiple of {each}, the values in an int32"
        raise refuse("compressed-tensors", f"{weight.name} of {list(weight.shape)}", why=why)
    if inputs % size:
        raise refuse_groups("compressed-tensors", weight.name, inputs, size)
    scales = Read(weight.name + "_scale", (outputs, inputs // size), _SCALES.get(str(args.get("scale_dtype"))))
    zeros = groups = None
    if not args.get("symmetric", True):
        zeros = Read(weight.name + "_zero_point", (-(-outputs // each), inputs // size), "int32")
    if args.get("actorder") in ("group", "dynamic"):
        groups = Read(weight.name + "_g_idx", (inputs,), "int32")
    values = Read(weight.name + "_packed", (outputs, inputs // each), "int32")
    half = 1 << 32 // each - 1
    return Dequantise(values, scales, kind, None, zeros, groups, 0 if zeros else half)  # type: ignore[arg-type]
