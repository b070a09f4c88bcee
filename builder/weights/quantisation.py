"""Quantised checkpoints: which tensors `quantization_config` says are stored in few bits, and their recipes.

The module is built as if nothing were quantised; each weight that the checkpoint holds in few bits is read by a
`Dequantise`. A method or an option that isn't known here is refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel
from transformers.quantizers.base import HfQuantizer
from transformers.quantizers.quantizers_utils import should_convert_module

from precast.builder.source.quantised_options import Quantised, check_options, refuse
from precast.ir.graph.schema import Dequantise, Read, Recipe, Reshape, Transpose

INT32 = 8
"""Values of four bits in an int32."""


class Weight(NamedTuple):
    """A checkpoint tensor as it would be without quantisation: its name and shape, and its param's name."""

    name: str
    shape: tuple[int, ...]
    param: str

    @property
    def module(self) -> str:
        """Where the module stands whose param this is."""
        return self.param.rpartition(".")[0]

    @property
    def stem(self) -> str:
        """The checkpoint's name of what holds the weight."""
        return self.name.removesuffix(".weight")


class Scheme(NamedTuple):
    """How a checkpoint is quantised: `recipe` makes a weight's values, of those that `holds` says are quantised.

    `ignored` are patterns of tensors that only other ways of computing need.
    """

    method: str
    holds: Callable[[Weight], bool]
    recipe: Callable[[Weight], Recipe]
    ignored: tuple[str, ...]


def scheme_of(model: PreTrainedModel, entries: Mapping[str, Any] | None) -> Scheme | None:
    """How the checkpoint of `model` is quantised, by its config's `quantization_config`; None: not at all.

    Raises BuildError: `feature-unsupported` for a method or an option that isn't known, naming it.
    """
    if not entries:
        return None
    options = check_options(entries)
    return _SCHEMES[options.method](model, options)


# --- which weights are quantised ---------------------------------------------------------------------------------


def _linear(model: PreTrainedModel, weight: Weight) -> bool:
    """Whether this is the weight of a linear layer, or of one of the experts that transformers keeps stacked."""
    leaf = weight.param.rpartition(".")[2]
    if weight.module.endswith(".experts"):
        return "bias" not in leaf and len(weight.shape) in (2, 3)
    return leaf == "weight" and isinstance(model.get_submodule(weight.module), torch.nn.Linear)


def _chosen(
    model: PreTrainedModel, skipped: list[str] | None, *, default_too: bool = False
) -> Callable[[Weight], bool]:
    """All linear layers but those of `skipped`, by transformers' rules; None: all but the head.

    A name may be the module's or the checkpoint's.
    """
    in_float32 = list(model._keep_in_fp32_modules or ())
    patterns = HfQuantizer.get_modules_to_not_convert(model, skipped, in_float32, add_default_skips=default_too)

    def holds(weight: Weight) -> bool:
        kept = (weight.module, weight.stem)
        return _linear(model, weight) and all(should_convert_module(name, patterns) for name in kept)

    return holds


# --- FP8 ---------------------------------------------------------------------------------------------------------


def _fp8(model: PreTrainedModel, options: Quantised) -> Scheme:
    tile = options.get("weight_block_size", None)
    # Checkpoints without the key are AutoFP8's: one scale a tensor, under another name.
    suffix = "_scale_inv" if "weight_block_size" in options.entries else "_scale"
    skipped = options.get("modules_to_not_convert", options.get("ignored_layers", None))

    def recipe(weight: Weight) -> Recipe:
        name = weight.name + suffix
        return _scaled(weight, _per_tensor(weight, name) if tile is None else _per_tile(weight, name, tuple(tile)))

    ignored = ("*.activation_scale", "*.input_scale", "*.k_scale", "*.v_scale")
    return Scheme("fp8", _chosen(model, skipped), recipe, ignored)


def _fbgemm_fp8(model: PreTrainedModel, options: Quantised) -> Scheme:
    def recipe(weight: Weight) -> Recipe:
        if len(weight.shape) != 2:
            raise refuse("fbgemm_fp8", f"stacked experts ({weight.name})")
        return _scaled(weight, _per_row(weight, weight.name + "_scale"))

    skipped = options.get("modules_to_not_convert", None)
    return Scheme("fbgemm_fp8", _chosen(model, skipped), recipe, ("*.input_scale_ub",))


class _Scales(NamedTuple):
    recipe: Recipe
    tile: tuple[int, int]


def _scaled(weight: Weight, scales: _Scales) -> Recipe:
    return Dequantise(Read(weight.name, weight.shape, "float8_e4m3fn"), scales.recipe, "fp8", scales.tile)


def _per_tensor(weight: Weight, name: str, stored: tuple[int, ...] = ()) -> _Scales:
    *outer, rows, columns = weight.shape
    whole: tuple[int, ...] = (*outer, 1, 1)
    scale = Read(name, whole) if outer else Reshape(Read(name, stored), whole)
    return _Scales(scale, (rows, columns))


def _per_row(weight: Weight, name: str) -> _Scales:
    return _Scales(Read(name, (*weight.shape[:-1], 1)), (1, weight.shape[-1]))


def _per_tile(weight: Weight, name: str, tile: tuple[int, int]) -> _Scales:
    *outer, rows, columns = weight.shape
    return _Scales(Read(name, (*outer, -(-rows // tile[0]), -(-columns // tile[1]))), tile)


def _compressed_tensors(model: PreTrainedModel, options: Quantised) -> Scheme:
    groups = list(options.get("config_groups", {}).values())
    ignore = list(options.get("ignore", None) or ())

    def group_of(weight: Weight) -> Any:
        if not _linear(model, weight) or any(_matches(pattern, weight.stem, weight.module) for pattern in ignore):
            return None
        return next((group for group in groups if _targets(group["targets"], weight)), None)

    def recipe(weight: Weight) -> Recipe:
        name, args = weight.name + "_scale", group_of(weight)["weights"]
        if len(weight.shape) != 2:
            raise refuse("compressed-tensors", f"stacked experts ({weight.name})")
        if args["strategy"] == "tensor":
            return _scaled(weight, _per_tensor(weight, name, (1,)))
        if args["strategy"] == "channel":
            return _scaled(weight, _per_row(weight, name))
        return _scaled(weight, _per_tile(weight, name, tuple(args["block_structure"])))

    ignored = ("*.input_scale", "*.input_zero_point", "*.output_scale", "*.k_scale", "*.v_scale")
    return Scheme("compressed-tensors", lambda weight: group_of(weight) is not None, recipe, ignored)


def _targets(targets: list[str], weight: Weight) -> bool:
    return any(target == "Linear" or _matches(target, weight.stem, weight.module) for target in targets)


def _matches(pattern: str, *names: str) -> bool:
    """compressed-tensors' patterns: a name, or after `re:` a regular expression for its beginning."""
    if pattern.startswith("re:"):
        return any(re.match(pattern.removeprefix("re:"), name) for name in names)
    return pattern in names


def _modelopt(model: PreTrainedModel, options: Quantised) -> Scheme:
    """NVIDIA's ModelOpt, of whose formats FP8 with one scale a tensor; kept as they are: linear layers by pattern."""
    kept = options.get("exclude_modules", options.get("ignore", None)) or ()
    is_quantised = options.get("quant_algo", None) is not None

    def holds(weight: Weight) -> bool:
        names = (weight.module, weight.stem)
        is_kept = any(fnmatchcase(name, each) or name.startswith(f"{each}.") for each in kept for name in names)
        return is_quantised and _linear(model, weight) and not is_kept

    def recipe(weight: Weight) -> Recipe:
        if len(weight.shape) != 2:
            raise refuse("modelopt", f"stacked experts ({weight.name})")
        return _scaled(weight, _per_tensor(weight, weight.name + "_scale"))

    return Scheme("modelopt", holds, recipe, ("*.input_scale", "*.k_scale", "*.v_scale"))


# --- four bits ---------------------------------------------------------------------------------------------------


def _mxfp4(model: PreTrainedModel, options: Quantised) -> Scheme:
    """GPT-OSS: stacked experts, which the checkpoint holds with their rows and columns exchanged."""
    known = [path for path, module in model.named_modules() if type(module).__name__ == "GptOssExperts"]
    if not known:
        raise refuse("mxfp4", f"model type {model.config.model_type}")
    chosen = _chosen(model, options.get("modules_to_not_convert", None))

    def recipe(weight: Weight) -> Recipe:
        experts, columns, rows = weight.shape
        blocks = Read(weight.name + "_blocks", (experts, rows, columns // 32, 16), "uint8")
        scales = Read(weight.name + "_scales", (experts, rows, columns // 32), "uint8")
        return Transpose(Dequantise(blocks, scales, "mxfp4"), 1, 2)

    return Scheme("mxfp4", lambda weight: weight.module in known and chosen(weight), recipe, ())


def _awq(model: PreTrainedModel, options: Quantised) -> Scheme:
    def recipe(weight: Weight) -> Recipe:
        size, columns, zeros, scales = _grouped("awq", weight, options)
        values = Read(weight.stem + ".qweight", (size, columns // INT32), "int32")
        return Transpose(Dequantise(values, scales, "awq", zeros=zeros), 0, 1)

    skipped = options.get("modules_to_not_convert", None)
    return Scheme("awq", _chosen(model, skipped, default_too=True), recipe, ())


def _gptq(model: PreTrainedModel, options: Quantised) -> Scheme:
    format = options.get("checkpoint_format", options.get("format", "gptq"))
    kept = options.get("modules_in_block_to_quantize", None) or ()
    suffixes = [name for names in kept for name in ([names] if isinstance(names, str) else names)]
    skipped = [pattern.removeprefix("-:") for pattern in options.get("dynamic", None) or ()]
    chosen = _chosen(model, [] if options.get("lm_head", False) else None)

    def holds(weight: Weight) -> bool:
        # Layers are quantised, and what stands beside them is not.
        names = (weight.module, weight.stem)
        inside = re.search(r"\.\d+\.", weight.module) is not None or weight.module == "lm_head"
        if not inside or not chosen(weight) or any(re.match(each, name) for each in skipped for name in names):
            return False
        return not suffixes or any(weight.stem.endswith("." + suffix) for suffix in suffixes)

    def recipe(weight: Weight) -> Recipe:
        size, columns, zeros, scales = _grouped("gptq", weight, options)
        values = Read(weight.stem + ".qweight", (size // INT32, columns), "int32")
        groups = Read(weight.stem + ".g_idx", (size,), "int32")
        offset = 1 if format == "gptq" else 0
        return Transpose(Dequantise(values, scales, "gptq", None, zeros, groups, offset), 0, 1)

    return Scheme("gptq", holds, recipe, _zero_biases(model))


def _zero_biases(model: PreTrainedModel) -> tuple[str, ...]:
    """Biases of linear layers that have none: AutoGPTQ stores zeros for them."""
    layers = (
        path for path, module in model.named_modules() if isinstance(module, torch.nn.Linear) and module.bias is None
    )
    return tuple(sorted({re.sub(r"\.\d+\.", ".*.", path) + ".bias" for path in layers}))


def _grouped(method: str, weight: Weight, options: Quantised) -> tuple[int, int, Read, Read]:
    """Inputs and outputs of a linear layer, of which eight are packed together, and its groups' zeros and scales."""
    if len(weight.shape) != 2 or not weight.name.endswith(".weight"):
        raise refuse(method, f"stacked experts ({weight.name})")
    outputs, inputs = weight.shape
    if inputs % INT32 or outputs % INT32:
        raise refuse(method, f"{weight.name} of {list(weight.shape)}, sizes that are no multiples of {INT32}")
    size = inputs if options.get("group_size", 128) == -1 else options.get("group_size", 128)
    if method == "awq" and inputs % size:
        raise refuse(method, f"{weight.name}: {inputs} inputs in groups of {size}")
    rows = -(-inputs // size)
    zeros = Read(weight.stem + ".qzeros", (rows, outputs // INT32), "int32")
    return inputs, outputs, zeros, Read(weight.stem + ".scales", (rows, outputs))


_SCHEMES: dict[str, Callable[[PreTrainedModel, Quantised], Scheme]] = {
    "fp8": _fp8,
    "fbgemm_fp8": _fbgemm_fp8,
    "compressed-tensors": _compressed_tensors,
    "modelopt": _modelopt,
    "mxfp4": _mxfp4,
    "awq": _awq,
    "gptq": _gptq,
}
