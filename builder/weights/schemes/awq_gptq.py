"""AWQ and GPTQ: values of four bits, GPTQ's also of eight, in groups of inputs; but for AutoAWQ's `gemv` with the
inputs of a layer first.
"""

from __future__ import annotations

import re

import torch
from transformers import PreTrainedModel

from precast.builder.source.quantised_options import Quantised, pattern_of, refuse, refuse_groups
from precast.builder.weights import compact
from precast.builder.weights.schemes.chosen import all_but
from precast.builder.weights.schemes.scheme import Scheme, Weight
from precast.ir.graph.schema import Dequantise, Read, Recipe, Repack, Transpose

_AWQ_WORD = 8
"""Values in an int32."""


def awq(model: PreTrainedModel, options: Quantised) -> Scheme:
    """AutoAWQ's `gemm`, eight outputs of an input in an int32, or its `gemv`, eight inputs of an output."""
    of = _gemv if options.get("checkpoint_format", None) == "gemv" else _gemm
    skipped = options.get("modules_to_not_convert", None)
    return Scheme("awq", all_but(model, skipped, default_too=True), lambda weight: of(weight, options), ())


def _gemm(weight: Weight, options: Quantised) -> Recipe:
    inputs, outputs, zeros, scales = _grouped("awq", weight, options, _AWQ_WORD)
    values = Read(weight.stem + ".qweight", (inputs, outputs // _AWQ_WORD), "int32")
    return Transpose(Dequantise(values, scales, "awq", zeros=zeros), 0, 1)


def _gemv(weight: Weight, options: Quantised) -> Recipe:
    """Values are those of `packed4`. Zeros of eight groups of an output have a word; zeros and scales are filled up."""
    inputs, outputs, size = _sizes("awq", weight, options, _AWQ_WORD)
    groups, width = inputs // size, _gemv_words(weight, inputs, size)
    values = Read(weight.stem + ".qweight", (outputs, inputs // _AWQ_WORD), "int32")
    zeros = Repack(Read(weight.stem + ".qzeros", (outputs, width), "int32"), "groups")
    scales = Read(weight.stem + ".scales", (outputs, width * _AWQ_WORD))
    zeros_of, scales_of = (compact.sliced(part, 1, 0, groups) for part in (zeros, scales))
    return Dequantise(values, scales_of, "packed4", zeros=zeros_of)


def _gemv_words(weight: Weight, inputs: int, size: int) -> int:
    """The words of zeros that an output has: AutoAWQ's `calculate_zeros_width`, which knows no other groups."""
    if size not in (32, 64) and size < 128:
        raise refuse("awq", f"groups of {size} in gemv", why=f"{weight.name}: expected 32, 64, or 128 and more")
    several = max(1, 128 // size)
    return -(-(inputs // size) // (_AWQ_WORD * several)) * several


def gptq(model: PreTrainedModel, options: Quantised) -> Scheme:
    """GPTQ, whose `g_idx` has the group of each input. Without act order (`desc_act`) groups are of neighbours: it is
    read only where the last of them is a smaller one.
    """
    format = options.get("checkpoint_format", "gptq")
    kept = options.get("modules_in_block_to_quantize", None) or ()
    suffixes = [name for names in kept for name in ([names] if isinstance(names, str) else names)]
    overrides = options.get("dynamic", None) or {}
    chosen = all_but(model, [] if options.get("lm_head", False) else None)
    in_order, group_size = options.get("desc_act", None) is False, options.get("group_size", 128)

    def own(weight: Weight) -> Quantised | None:
        # Of the first override that the layer fits; None where it is left out.
        for override, said in overrides.items():
            if any(re.match(pattern_of(override), name) for name in (weight.module, weight.stem)):
                return None if override.startswith("-:") else options._replace(entries={**options.entries, **said})
        return options

    def holds(weight: Weight) -> bool:
        # Layers are quantised, and what stands beside them is not.
        inside = re.search(r"\.\d+\.", weight.module) is not None or weight.module == "lm_head"
        if not inside or not chosen(weight) or own(weight) is None:
            return False
        return not suffixes or any(weight.stem.endswith("." + suffix) for suffix in suffixes)

    def recipe(weight: Weight) -> Recipe:
        said = own(weight)
        assert said is not None, "it is quantised"
        bits, is_alike = said.get("bits", 4), said.get("group_size", 128) == group_size
        size, columns, zeros, scales = _grouped("gptq", weight, said, 32 // bits)
        values = Read(weight.stem + ".qweight", (size // (32 // bits), columns), "int32")
        # Of a layer with groups of its own `g_idx` is read: what is in order is known of all alike.
        is_whole = in_order and said.get("desc_act", None) is False and is_alike and size % max(1, group_size) == 0
        groups = None if is_whole else Read(weight.stem + ".g_idx", (size,), "int32")
        offset = 1 if format == "gptq" else 0
        if bits == 8:  # of which there is no format with inputs first
            of, scales_of, zeros_of = (Transpose(part, 0, 1) for part in (values, scales, zeros))
            return Dequantise(of, scales_of, "packed8", None, zeros_of, groups, offset)
        return Transpose(Dequantise(values, scales, "gptq", None, zeros, groups, offset), 0, 1)

    zeros = _zero_biases(model)
    ignored = tuple(zeros)
    if not in_order:
        return Scheme("gptq", holds, recipe, ignored, zeros=zeros)
    return Scheme("gptq", holds, recipe, (*ignored, _G_IDX), groups_in_order={_G_IDX: max(0, group_size)}, zeros=zeros)


_G_IDX = "*.g_idx"


def _zero_biases(model: PreTrainedModel) -> dict[str, int]:
    """Biases of linear layers that have none, with their sizes (0: layers differ): AutoGPTQ stores zeros for them."""
    layers = (
        (path, module.out_features) for path, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and module.bias is None
    )  # fmt: skip
    found: dict[str, set[int]] = {}
    for path, outputs in layers:
        found.setdefault(re.sub(r"\.\d+\.", ".*.", path) + ".bias", set()).add(outputs)
    return {pattern: min(sizes) if len(sizes) == 1 else 0 for pattern, sizes in sorted(found.items())}


def _grouped(method: str, weight: Weight, options: Quantised, word: int) -> tuple[int, int, Read, Read]:
    """Inputs and outputs of a linear layer, of which `word` are packed together, and its groups' zeros and scales."""
    inputs, outputs, size = _sizes(method, weight, options, word)
    rows = -(-inputs // size)
    zeros = Read(weight.stem + ".qzeros", (rows, outputs // word), "int32")
    return inputs, outputs, zeros, Read(weight.stem + ".scales", (rows, outputs))


def _sizes(method: str, weight: Weight, options: Quantised, word: int) -> tuple[int, int, int]:
    """Inputs and outputs of a linear layer, of which `word` are packed together, and the inputs of a group."""
    if len(weight.shape) != 2 or not weight.name.endswith(".weight"):
        raise refuse(method, f"stacked experts ({weight.name})")
    outputs, inputs = weight.shape
    if inputs % word or outputs % word:
        what = f"{weight.name} of {list(weight.shape)}"
        raise refuse(method, what, why=f"sizes that are no multiples of {word}, the values in an int32")
    size = inputs if options.get("group_size", 128) == -1 else options.get("group_size", 128)
    if method == "awq" and inputs % size:
        raise refuse_groups(method, weight.name, inputs, size)
    return inputs, outputs, size
