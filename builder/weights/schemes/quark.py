"""AMD's Quark, of whose formats FP8 with a scale a tensor or a row, MXFP8 and MXFP4."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from fnmatch import translate
from typing import Any

from transformers import PreTrainedModel

from precast.builder.graph.rounding import Rounding
from precast.builder.source.quantised_options import Quantised, refuse
from precast.builder.source.quark_options import weight_format
from precast.builder.weights.rounding import of_quark
from precast.builder.weights.schemes.chosen import config_names, is_linear
from precast.builder.weights.schemes.scheme import KV_SCALES, Scheme, Weight
from precast.builder.weights.schemes.stored import Scales, packed_mxfp4, per_group_of_32, per_tensor, scaled
from precast.ir.graph.schema import Read, Recipe, Reshape


def quark(model: PreTrainedModel, options: Quantised) -> Scheme:
    """Of each layer the first pattern of `layer_quant_config` that its name fits, else `global_quant_config`; `exclude`
    has the patterns of layers that are not quantised (Quark's `get_layer_quant_config`)."""
    names = config_names(model)
    is_excluded = _fits(options.get("exclude", None) or ())
    layers = [(_fits([pattern]), layer) for pattern, layer in (options.get("layer_quant_config", None) or {}).items()]

    def layer_of(weight: Weight) -> Mapping[str, Any]:
        found = names(weight.module, weight.stem)
        if not is_linear(model, weight) or any(map(is_excluded, found)):
            return {}
        whole: Mapping[str, Any] = options.entries["global_quant_config"]
        return next((layer for fits, layer in layers if any(map(fits, found))), whole)

    def recipe(weight: Weight) -> Recipe:
        if len(weight.shape) != 2:
            raise refuse(options.method, f"stacked experts ({weight.name})")
        stored, scales = weight_format(layer_of(weight)["weight"]), weight.name + "_scale"
        if stored == "fp8":
            return scaled(weight, per_tensor(weight, scales))
        if stored == "fp8_rows":
            rows, columns = weight.shape
            return scaled(weight, Scales(Reshape(Read(scales, (rows,)), (rows, 1)), (1, columns)))
        return per_group_of_32(weight) if stored == "mxfp8" else packed_mxfp4(options.method, weight, "")

    def rounding(weight: Weight) -> Rounding:
        return of_quark(layer_of(weight).get("input_tensors"), weight.stem)

    return Scheme(
        "quark", lambda weight: bool(layer_of(weight).get("weight")), recipe, ("*.input_scale", "*.output_scale"),
        (*KV_SCALES, "?_proj.output_scale"), rounding=rounding,
    )  # fmt: skip


def _fits(patterns: Iterable[str]) -> Callable[[str], bool]:
    """Whether a layer's name is one of these, in which `*` is any text."""
    any_of = re.compile("|".join(map(translate, patterns)) or r"(?!)")
    return lambda name: any_of.match(name) is not None
