"""`quant_method: mxfp4`: gpt-oss."""

from __future__ import annotations

from transformers import PreTrainedModel

from precast.builder.source.quantised_options import Quantised, refuse, refuse_groups
from precast.builder.weights.schemes.chosen import all_but
from precast.builder.weights.schemes.scheme import Scheme, Weight
from precast.ir.graph.schema import Dequantise, Read, Recipe, Transpose
from precast.ir.weights.quantised import MX_BLOCK


def mxfp4(model: PreTrainedModel, options: Quantised) -> Scheme:
    """GPT-OSS: stacked experts, which the checkpoint holds with their rows and columns exchanged."""
    known = [path for path, module in model.named_modules() if type(module).__name__ == "GptOssExperts"]
    if not known:
        raise refuse("mxfp4", f"model type {model.config.model_type}")
    chosen = all_but(model, options.get("modules_to_not_convert", None))

    def recipe(weight: Weight) -> Recipe:
        experts, columns, rows = weight.shape
        if columns % MX_BLOCK:
            raise refuse_groups("mxfp4", weight.name, columns, MX_BLOCK)
        blocks = Read(weight.name + "_blocks", (experts, rows, columns // MX_BLOCK, MX_BLOCK // 2), "uint8")
        scales = Read(weight.name + "_scales", (experts, rows, columns // MX_BLOCK), "uint8")
        return Transpose(Dequantise(blocks, scales, "mxfp4"), 1, 2)

    return Scheme("mxfp4", lambda weight: weight.module in known and chosen(weight), recipe, ())
