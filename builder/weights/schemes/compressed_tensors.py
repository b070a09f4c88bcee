"""compressed-tensors: groups of layers, each with a format of its own."""

from __future__ import annotations

import re
from collections.abc import Mapping
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
    one_by_one,
    packed_mxfp4,
    per_group_of_32,
    per_row,
    per_tensor,
    per_tile,
    scaled,
)
from precast.ir.graph.schema import Dequantise, Read, Recipe
from precast.ir.weights.quantised import PACKED
from precast.ir.weights.recipes import map_reads


def compressed_tensors(model: PreTrainedModel, options: Quantised) -> Scheme:
    """Of each layer the group that compressed-tensors gives it: that of the layer's own name, before those of patterns,
    before that of all linear layers. Of a target of several groups the last counts, and of several patterns the first
    by alphabet. `ignore` lists layers of none.
    """
    targets = {target: group for group in options.get("config_groups", {}).values() for target in group["targets"]}
    in_order = sorted(targets, key=lambda target: (target == _ALL, target.startswith("re:"), target))
    ignore = list(options.get("ignore", None) or ())

    names = config_names(model)

    def called(weight: Weight) -> tuple[str, ...]:
        return names(weight.module, weight.stem)

    def group_of(weight: Weight) -> Any:
        found = called(weight)
        if not is_linear(model, weight) or any(_matches(pattern, *found) for pattern in ignore):
            return None
        return next((targets[each] for each in in_order if each == _ALL or _matches(each, *found)), None)

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
        "compressed-tensors", lambda weight: group_of(weight) is not None, recipe, ignored, scales, rounding=rounding
    )


_ALL = "Linear"
"""The target that is no name: the class of layers."""


def _matches(pattern: str, *names: str) -> bool:
    """compressed-tensors' patterns: a name, or after `re:` a regular expression for its beginning."""
    if pattern.startswith("re:"):
        return any(re.match(pattern.removeprefix("re:"), name) for name in names)
    return pattern in names


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


def _packed(weight: Weight, args: Mapping[str, Any], kind: str) -> Recipe:
    """Integers in groups of inputs: signed ones, stored with half of their range added, as their zeros are."""
    each, (outputs, inputs) = PACKED[kind], weight.shape
    size = inputs if args["strategy"] == "channel" else args["group_size"]
    if inputs % each:
        why = f"inputs that are no multiple of {each}, the values in an int32"
        raise refuse("compressed-tensors", f"{weight.name} of {list(weight.shape)}", why=why)
    if inputs % size:
        raise refuse_groups("compressed-tensors", weight.name, inputs, size)
    scales = Read(weight.name + "_scale", (outputs, inputs // size))
    zeros = groups = None
    if not args.get("symmetric", True):
        zeros = Read(weight.name + "_zero_point", (-(-outputs // each), inputs // size), "int32")
    if args.get("actorder") in (True, "group", "dynamic"):
        groups = Read(weight.name + "_g_idx", (inputs,), "int32")
    values = Read(weight.name + "_packed", (outputs, inputs // each), "int32")
    half = 1 << 32 // each - 1
    return Dequantise(values, scales, kind, None, zeros, groups, 0 if zeros else half)  # type: ignore[arg-type]
