"""`quant_method: fp8`, `fbgemm_fp8` and `mxfp8`: DeepSeek's, AutoFP8's, FBGEMM's and MiniMax's float8."""

from __future__ import annotations

import re

from transformers import PreTrainedModel

from precast.builder.graph.rounding import NONE, Rounding
from precast.builder.source.quantised_options import Quantised, refuse
from precast.builder.weights.rounding import EXPONENTS, FOUR_BIT_WEIGHT, of_fbgemm, of_fp8, of_modelopt
from precast.builder.weights.schemes.chosen import all_but, tables
from precast.builder.weights.schemes.modelopt import listed_experts
from precast.builder.weights.schemes.scheme import KV_SCALES, Scheme, Weight
from precast.builder.weights.schemes.stored import (
    nvfp4,
    one_by_one,
    per_group_of_32,
    per_row,
    per_tensor,
    per_tile,
    scaled,
)
from precast.ir.graph.schema import Dequantise, Read, Recipe, Reshape


def fp8(model: PreTrainedModel, options: Quantised) -> Scheme:
    """DeepSeek's blocks, or AutoFP8's one scale a tensor; DeepSeek-V4's experts may be of four bits. Embeddings that
    `modules_to_convert` names, such as Qwen4-Exp's of n-grams, have one scale."""
    tile = options.get("weight_block_size", None)
    # Checkpoints without the key are AutoFP8's: one scale a tensor, under another name.
    suffix = "_scale_inv" if "weight_block_size" in options.entries else "_scale"
    skipped = options.get("modules_to_not_convert", None)
    beside, is_fp4 = model.config.model_type in _SCALES_BESIDE, options.get("expert_dtype", None) == "fp4"
    is_nvfp4 = listed_experts(model, options)
    is_layer, is_table = all_but(model, skipped), tables(model, options.get("modules_to_convert", None), skipped)

    def recipe(weight: Weight) -> Recipe:
        if is_table(weight):
            return scaled(weight, per_tensor(weight, _SHARD.sub("", weight.name) + "_scale", (1,)))
        name = weight.stem + ".scale" if beside else weight.name + suffix
        if is_nvfp4(weight):
            return nvfp4(weight, "", "_scale_2", ())
        if is_fp4 and weight.module.endswith(".experts"):
            return _fp4(weight, name)
        return scaled(weight, per_tensor(weight, name) if tile is None else per_tile(weight, name, tuple(tile)))

    def rounding(weight: Weight) -> Rounding:
        if is_table(weight):
            return NONE
        if is_nvfp4(weight):
            return of_modelopt("NVFP4", weight.stem)
        if is_fp4 and weight.module.endswith(".experts"):
            return FOUR_BIT_WEIGHT
        return of_fp8(options.entries, weight.stem)

    scales = (*KV_SCALES, "kv_scale")
    return Scheme(
        "fp8", lambda weight: is_layer(weight) or is_table(weight), recipe, _UNUSED_SCALES, scales, rounding=rounding
    )


_SHARD = re.compile(r"\.shard_\d+(?=\.weight$)")
"""Which part of a table a tensor has: all parts have the table's scale."""
_UNUSED_SCALES = ("*.activation_scale", "*.input_scale", "*.k_scale", "*.v_scale", "*.kv_scale")

_SCALES_BESIDE = frozenset({"deepseek_v4"})
"""Model types whose publishers call a weight's scales `<layer>.scale`, as what writes their checkpoints does."""


def _fp4(weight: Weight, scales: str) -> Recipe:
    """DeepSeek-V4's experts, one by one: two values in a byte, the first in its lower half, in groups of 32 of a row,
    each with an exponent."""
    if len(weight.shape) != 2 or weight.shape[1] % 32:
        raise refuse("fp8", f"experts of FP4 of {list(weight.shape)} ({weight.name}), expected rows in groups of 32")
    rows, columns = weight.shape
    values = Reshape(Read(weight.name, (rows, columns // 2), "uint8"), (rows, columns // 32, 16))
    return Dequantise(values, Read(scales, (rows, columns // 32), "uint8"), "mxfp4")


def fbgemm_fp8(model: PreTrainedModel, options: Quantised) -> Scheme:
    """FBGEMM's: a scale for each row."""

    def recipe(weight: Weight) -> Recipe:
        if len(weight.shape) != 2:
            raise refuse("fbgemm_fp8", f"stacked experts ({weight.name})")
        return scaled(weight, per_row(weight, weight.name + "_scale"))

    skipped = options.get("modules_to_not_convert", None)
    rounding = of_fbgemm(options.entries)
    ignored = ("*.input_scale_ub", *_UNUSED_SCALES)
    scales = (*KV_SCALES, "kv_scale")
    return Scheme("fbgemm_fp8", all_but(model, skipped), recipe, ignored, scales, rounding=lambda weight: rounding)


def mxfp8(model: PreTrainedModel, options: Quantised) -> Scheme:
    """MiniMax's and SGLang's `mxfp8`, which names layers and scales as `fp8` with blocks does."""
    chosen = all_but(model, options.get("modules_to_not_convert", None))

    def recipe(weight: Weight) -> Recipe:
        return one_by_one(model, weight, options.method, lambda each: per_group_of_32(each, "_scale_inv"))

    return Scheme("mxfp8", chosen, recipe, _UNUSED_SCALES, KV_SCALES, rounding=lambda _: EXPONENTS)
