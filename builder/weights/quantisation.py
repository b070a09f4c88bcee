"""Quantised checkpoints: which tensors `quantization_config` says are stored in few bits, and their recipes.

The module is built as if nothing were quantised; each weight that the checkpoint holds in few bits is read by a
`Dequantise`. A method or an option that isn't known here is refused by name.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import translate
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel
from transformers.quantizers.base import HfQuantizer

from precast.builder.graph.rounding import NONE, Rounding
from precast.builder.source.quantised_options import Quantised, check_options, refuse, stored_as
from precast.builder.weights.conversions import other_prefixes, saved_tensors
from precast.builder.weights.rounding import EXPONENTS, of_compressed_tensors, of_fbgemm, of_fp8, of_modelopt
from precast.ir.graph.schema import Concat, Dequantise, Each, Read, Recipe, Reshape, Transpose
from precast.ir.weights.quantised import MX_BLOCK, NVFP4_BLOCK, PACKED
from precast.ir.weights.recipes import map_reads

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

    `ignored` are patterns of tensors that only other ways of computing need. `scales` are what an attention layer calls
    the scales of its cached keys and values, with `?` for k or v, the likeliest first. `groups_in_order` is that of the
    manifest's `Checkpoint`. `rounding` says how the inputs of a weight's layer are rounded.
    """

    method: str
    holds: Callable[[Weight], bool]
    recipe: Callable[[Weight], Recipe]
    ignored: tuple[str, ...]
    scales: tuple[str, ...] = ()
    groups_in_order: Mapping[str, int] = MappingProxyType({})
    rounding: Callable[[Weight], Rounding] = lambda _: NONE


_KV_SCALES = ("?_scale", "?_proj.?_scale", "attn.?_scale", "qkv_proj.?_scale")
"""As compressed-tensors and vLLM, ModelOpt, Quark, and what fuses projections name them."""


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
    is_kept = kept_by(patterns)

    def holds(weight: Weight) -> bool:
        return _linear(model, weight) and not is_kept(weight.module) and not is_kept(weight.stem)

    return holds


def kept_by(patterns: Sequence[str]) -> Callable[[str], bool]:
    """Whether a module of a name is not quantised: what transformers' `should_convert_module` denies.

    A pattern is the name's end, or a regular expression for its beginning, up to where a part of it begins or ends. All
    are compiled as one: a checkpoint of experts may list hundreds, and has tens of thousands of weights.
    """
    if not patterns:
        return lambda name: False
    ends = tuple(patterns)
    begins = re.compile(rf"(?:{'|'.join(f'(?:{each})' for each in patterns)})(?:(?<=\.)|(?=\.|$))")
    return lambda name: name.endswith(ends) or begins.match(name) is not None


def unskipped(model: PreTrainedModel) -> Callable[[Weight], bool]:
    """All linear layers but the head and those that transformers keeps in float32, and experts."""
    return _chosen(model, None)


# --- FP8 ---------------------------------------------------------------------------------------------------------


def _fp8(model: PreTrainedModel, options: Quantised) -> Scheme:
    tile = options.get("weight_block_size", None)
    # Checkpoints without the key are AutoFP8's: one scale a tensor, under another name.
    suffix = "_scale_inv" if "weight_block_size" in options.entries else "_scale"
    skipped = options.get("modules_to_not_convert", options.get("ignored_layers", None))
    beside, is_fp4 = model.config.model_type in _SCALES_BESIDE, options.get("expert_dtype", None) == "fp4"
    is_nvfp4 = _listed_experts(model, options)

    def recipe(weight: Weight) -> Recipe:
        name = weight.stem + ".scale" if beside else weight.name + suffix
        if is_nvfp4(weight):
            return _nvfp4(weight, "", "_scale_2", ())
        if is_fp4 and weight.module.endswith(".experts"):
            return _fp4(weight, name)
        return _scaled(weight, _per_tensor(weight, name) if tile is None else _per_tile(weight, name, tuple(tile)))

    def rounding(weight: Weight) -> Rounding:
        if is_nvfp4(weight):
            return of_modelopt("NVFP4", weight.stem)
        return of_fp8(options.entries, weight.stem)

    scales = (*_KV_SCALES, "kv_scale")
    return Scheme("fp8", _chosen(model, skipped), recipe, _UNUSED_SCALES, scales, rounding=rounding)


_UNUSED_SCALES = ("*.activation_scale", "*.input_scale", "*.k_scale", "*.v_scale", "*.kv_scale")

_SCALES_BESIDE = frozenset({"deepseek_v4"})
"""Model types whose publishers call a weight's scales `<layer>.scale`, as what writes their checkpoints does."""


def _listed_experts(model: PreTrainedModel, options: Quantised) -> Callable[[Weight], bool]:
    """Which weights are of experts that ModelOpt made NVFP4; it may name them without the model's prefix, as
    DeepSeek-V4's publishers do."""
    layers, prefix, names = options.get("quantized_layers", None) or {}, f"{model.base_model_prefix}.", _names(model)

    def called(*found: str) -> tuple[str, ...]:
        return tuple(dict.fromkeys(part for name in names(*found) for part in (name, name.removeprefix(prefix))))

    if layers:
        _check_names("fp8", model, called, list(layers))
    return lambda weight: any(part in layers for name in called(weight.module, weight.stem) for part in _outer(name))


def _fp4(weight: Weight, scales: str) -> Recipe:
    """DeepSeek-V4's experts, one by one: two values in a byte, the first in its lower half, in groups of 32 of a row,
    each with an exponent."""
    if len(weight.shape) != 2 or weight.shape[1] % 32:
        raise refuse("fp8", f"experts of FP4 of {list(weight.shape)} ({weight.name}), expected rows in groups of 32")
    rows, columns = weight.shape
    values = Reshape(Read(weight.name, (rows, columns // 2), "uint8"), (rows, columns // 32, 16))
    return Dequantise(values, Read(scales, (rows, columns // 32), "uint8"), "mxfp4")


def _fbgemm_fp8(model: PreTrainedModel, options: Quantised) -> Scheme:
    def recipe(weight: Weight) -> Recipe:
        if len(weight.shape) != 2:
            raise refuse("fbgemm_fp8", f"stacked experts ({weight.name})")
        return _scaled(weight, _per_row(weight, weight.name + "_scale"))

    skipped = options.get("modules_to_not_convert", None)
    rounding = of_fbgemm(options.entries)
    return Scheme(
        "fbgemm_fp8", _chosen(model, skipped), recipe, ("*.input_scale_ub",), rounding=lambda weight: rounding
    )


class _Scales(NamedTuple):
    recipe: Recipe
    tile: tuple[int, int]


def _scaled(weight: Weight, scales: _Scales) -> Recipe:
    return Dequantise(Read(weight.name, weight.shape, "float8_e4m3fn"), scales.recipe, "fp8", scales.tile)


def _names(model: PreTrainedModel) -> Callable[..., tuple[str, ...]]:
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


def _mxfp8(model: PreTrainedModel, options: Quantised) -> Scheme:
    """MiniMax's and SGLang's `mxfp8`, which names layers and scales as `fp8` with blocks does."""
    chosen = _chosen(model, options.get("modules_to_not_convert", options.get("ignored_layers", None)))

    def recipe(weight: Weight) -> Recipe:
        return _one_by_one(model, weight, options.method, lambda each: _per_group_of_32(each, "_scale_inv"))

    return Scheme("mxfp8", chosen, recipe, _UNUSED_SCALES, _KV_SCALES, rounding=lambda _: EXPONENTS)


def _per_group_of_32(weight: Weight, suffix: str = "_scale") -> Recipe:
    """MXFP8: 32 neighbours of a row have an exponent."""
    rows, columns = weight.shape
    if columns % MX_BLOCK:
        raise refuse("MXFP8", f"{weight.name}: {columns} inputs in groups of {MX_BLOCK}")
    scales = Read(weight.name + suffix, (rows, columns // MX_BLOCK), "float8_e8m0fnu")
    return _scaled(weight, _Scales(scales, (1, MX_BLOCK)))


def _compressed_tensors(model: PreTrainedModel, options: Quantised) -> Scheme:
    groups = list(options.get("config_groups", {}).values())
    ignore = list(options.get("ignore", None) or ())

    names = _names(model)

    def called(weight: Weight) -> tuple[str, ...]:
        return names(weight.module, weight.stem)

    def group_of(weight: Weight) -> Any:
        if not _linear(model, weight) or any(_matches(pattern, *called(weight)) for pattern in ignore):
            return None
        return next((group for group in groups if _targets(group["targets"], called(weight))), None)

    def recipe(weight: Weight) -> Recipe:
        group = group_of(weight)
        args, kind = group["weights"], stored_as(group, options.get("format", None)) or ""
        return _one_by_one(model, weight, options.method, lambda each: _compressed(each, args, kind))

    ignored = (
        "*.input_scale", "*.input_zero_point", "*.input_global_scale", "*.output_scale", "*.weight_shape", "*.k_scale",
        "*.v_scale",
    )  # fmt: skip
    scales = (*_KV_SCALES, "?_proj.output_scale")

    def rounding(weight: Weight) -> Rounding:
        return of_compressed_tensors(group_of(weight).get("input_activations"), weight.stem)

    return Scheme(
        "compressed-tensors", lambda weight: group_of(weight) is not None, recipe, ignored, scales, rounding=rounding
    )


def _compressed(weight: Weight, args: Mapping[str, Any], kind: str) -> Recipe:
    """The recipe of a weight that compressed-tensors stored as `kind`, one of those of `stored_as`."""
    name, strategy = weight.name + "_scale", args["strategy"]
    if kind == "nvfp4":
        return _nvfp4(weight, "_packed", "_global_scale", (1,), divided=True)
    if kind == "mxfp4":
        return _packed_mxfp4(weight)
    if kind == "mxfp8":
        return _per_group_of_32(weight)
    if kind in PACKED:
        return _packed(weight, args, kind)
    if strategy == "tensor":
        scales = _per_tensor(weight, name, (1,))
    elif strategy == "channel":
        scales = _per_row(weight, name)
    else:
        tile = (1, args["group_size"]) if strategy == "group" else tuple(args["block_structure"])
        scales = _per_tile(weight, name, tile)
    return _scaled(weight, scales) if kind == "fp8" else _int8(weight, scales, symmetric=args.get("symmetric", True))


def _int8(weight: Weight, scales: _Scales, *, symmetric: bool) -> Recipe:
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
    if inputs % each or inputs % size:
        raise refuse("compressed-tensors", f"{weight.name}: {inputs} inputs, {each} in an int32, in groups of {size}")
    scales = Read(weight.name + "_scale", (outputs, inputs // size))
    zeros = groups = None
    if not args.get("symmetric", True):
        zeros = Read(weight.name + "_zero_point", (-(-outputs // each), inputs // size), "int32")
    if args.get("actorder") in (True, "group", "dynamic"):
        groups = Read(weight.name + "_g_idx", (inputs,), "int32")
    values = Read(weight.name + "_packed", (outputs, inputs // each), "int32")
    half = 1 << 32 // each - 1
    return Dequantise(values, scales, kind, None, zeros, groups, 0 if zeros else half)  # type: ignore[arg-type]


_EXPERT_PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
"""What transformers stacks, and the linear layers of an expert that quantisers store instead."""


def _one_by_one(model: PreTrainedModel, weight: Weight, method: str, recipe: Callable[[Weight], Recipe]) -> Recipe:
    """The recipe of a linear layer's weight, or of stacked experts, whose linear layers ModelOpt and compressed-tensors
    store one by one, as `experts.0.gate_proj` and so on; `recipe` makes that of one.
    """
    if len(weight.shape) == 2:
        return recipe(weight)
    experts, rows, columns = weight.shape
    stem, _, leaf = weight.name.rpartition(".")
    parts, module = _EXPERT_PARTS.get(leaf, ()), model.get_submodule(weight.module)
    plain = (getattr(module, "is_transposed", True), getattr(module, "is_concatenated", False)) == (False, True)
    if not parts or not plain or not weight.module.endswith(".experts"):
        raise refuse(method, f"stacked experts ({weight.name})")
    each = [Weight(f"{stem}.*.{part}.weight", (rows // len(parts), columns), weight.param) for part in parts]
    made = tuple(Each(recipe(one), 0, experts) for one in each)
    return made[0] if len(made) == 1 else Concat(made, 1)


def _targets(targets: list[str], names: tuple[str, ...]) -> bool:
    return any(target == "Linear" or _matches(target, *names) for target in targets)


def _matches(pattern: str, *names: str) -> bool:
    """compressed-tensors' patterns: a name, or after `re:` a regular expression for its beginning."""
    if pattern.startswith("re:"):
        return any(re.match(pattern.removeprefix("re:"), name) for name in names)
    return pattern in names


def _modelopt(model: PreTrainedModel, options: Quantised) -> Scheme:
    """NVIDIA's ModelOpt, of whose formats FP8 with one scale a tensor, MXFP8 and NVFP4; kept as they are: linear layers
    by pattern. With `quantized_layers`, those alone are quantised, each in its format.
    """
    kept = options.get("exclude_modules", options.get("ignore", None)) or ()
    names, layers = _names(model), options.get("quantized_layers", None)
    is_kept = _listed(kept)
    _check_names(options.method, model, names, kept if layers is None else list(layers))

    @functools.cache
    def algorithm(weight: Weight) -> str | None:
        found = names(weight.module, weight.stem)
        if not _linear(model, weight) or any(map(is_kept, found)):
            return None
        if layers is None:
            return options.get("quant_algo", None)
        return next((layers[part]["quant_algo"] for name in found for part in _outer(name) if part in layers), None)

    def recipe(weight: Weight) -> Recipe:
        stored = algorithm(weight)

        def one(each: Weight) -> Recipe:
            if stored == "FP8":
                return _scaled(each, _per_tensor(each, each.name + "_scale"))
            return _per_group_of_32(each) if stored == "MXFP8" else _nvfp4(each, "", "_scale_2", ())

        return _one_by_one(model, weight, options.method, one)

    ignored = ("*.input_scale", "*.k_scale", "*.v_scale")
    return Scheme(
        "modelopt", lambda weight: algorithm(weight) is not None, recipe, ignored, _KV_SCALES,
        rounding=lambda weight: of_modelopt(algorithm(weight), weight.stem),
    )  # fmt: skip


def _listed(patterns: Sequence[str]) -> Callable[[str], bool]:
    """Whether a name is one of ModelOpt's patterns, or lies in a module that is."""
    whole = frozenset(each for each in patterns if not _GLOB.search(each))
    begins = tuple(each[:-1] for each in patterns if each.endswith("*") and not _GLOB.search(each[:-1]))
    others = [each for each in patterns if _GLOB.search(each[:-1])]
    glob = re.compile("|".join(translate(each) + "|" + translate(f"{each}.*") for each in others) or r"(?!)")

    def is_listed(name: str) -> bool:
        return name.startswith(begins) or any(part in whole for part in _outer(name)) or glob.match(name) is not None

    return is_listed


_GLOB = re.compile(r"[*?\[]")


def _outer(name: str) -> Iterator[str]:
    """The modules that this one lies in, from the outermost on, and itself."""
    return itertools.accumulate(name.split("."), "{}.{}".format)


def _check_names(
    method: str, model: PreTrainedModel, names: Callable[..., tuple[str, ...]], patterns: Sequence[str]
) -> None:
    """Refuse a list that names layers, and none of this model's: what it says would be passed over."""
    numbered = [each for each in patterns if re.search(r"\.\d+", each)]
    is_listed = _listed(numbered)
    modules = (path for path, _ in model.named_modules())
    if not numbered or any(is_listed(name) for path in modules for name in names(path)):
        return
    stored = (name.removesuffix(".weight") for name in saved_tensors(model, ()))
    if not any(is_listed(name) for path in stored for name in names(path)):
        raise refuse(method, f"names of layers that are none of this model ({numbered[0]})")


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


def _packed_mxfp4(weight: Weight) -> Recipe:
    """compressed-tensors' MXFP4, whose rows are not stored in blocks."""
    rows, columns = weight.shape
    if columns % 32:
        raise refuse("compressed-tensors", f"{weight.name}: {columns} inputs in groups of 32")
    values = Reshape(Read(weight.name + "_packed", (rows, columns // 2), "uint8"), (rows, columns // 32, 16))
    return Dequantise(values, Read(weight.name + "_scale", (rows, columns // 32), "uint8"), "mxfp4")


def _nvfp4(weight: Weight, packed: str, whole: str, stored: tuple[int, ...], *, divided: bool = False) -> Recipe:
    """`packed` and `whole` end the names of the values and of the scale of all of them, which is `stored` so."""
    rows, columns = weight.shape
    if columns % NVFP4_BLOCK:
        raise refuse("NVFP4", f"{weight.name}: {columns} inputs in groups of {NVFP4_BLOCK}")
    values = Read(weight.name + packed, (rows, columns // 2), "uint8")
    scales = Read(weight.name + "_scale", (rows, columns // NVFP4_BLOCK), "float8_e4m3fn")
    total = Reshape(Read(weight.name + whole, stored), (1, 1))
    return Dequantise(values, scales, "nvfp4_divided" if divided else "nvfp4", global_scale=total)


def _awq(model: PreTrainedModel, options: Quantised) -> Scheme:
    def recipe(weight: Weight) -> Recipe:
        size, columns, zeros, scales = _grouped("awq", weight, options)
        values = Read(weight.stem + ".qweight", (size, columns // INT32), "int32")
        return Transpose(Dequantise(values, scales, "awq", zeros=zeros), 0, 1)

    skipped = options.get("modules_to_not_convert", None)
    return Scheme("awq", _chosen(model, skipped, default_too=True), recipe, ())


_AS_IN_MLX = ("llama", "mistral", "qwen2", "qwen3")
"""Types of models whose tensors MLX stores under transformers' names, with the same values: in mlx_lm.models, the
`sanitize` of llama (which mistral is read as, too), qwen2 and qwen3 only leaves some out. That of others renames and
stacks tensors, or adds 1 to norms."""


def _mlx(model: PreTrainedModel, options: Quantised) -> Scheme:
    """MLX's affine groups, of all linear layers and embeddings that whole groups fit into: `quantize_model` of mlx_lm.

    Where a publisher chose layers, the config has entries by their names, which are refused, or the checkpoint lacks
    scales.
    """
    if model.config.model_type not in _AS_IN_MLX:
        raise refuse("mlx", f"model type {model.config.model_type}")
    bits, size = options.entries["bits"], options.entries["group_size"]

    def holds(weight: Weight) -> bool:
        module = model.get_submodule(weight.module)
        has_groups = isinstance(module, (torch.nn.Linear, torch.nn.Embedding)) and weight.param.endswith(".weight")
        return has_groups and weight.shape[-1] % size == 0

    def recipe(weight: Weight) -> Recipe:
        outputs, inputs = weight.shape
        values = Read(weight.name, (outputs, inputs * bits // 32), "int32")
        scales, biases = (Read(f"{weight.stem}.{part}", (outputs, inputs // size)) for part in ("scales", "biases"))
        return Dequantise(values, scales, "packed4" if bits == 4 else "packed8", biases=biases)

    return Scheme("mlx", holds, recipe, ())


def _gptq(model: PreTrainedModel, options: Quantised) -> Scheme:
    """GPTQ, whose `g_idx` has the group of each input. Without act order (`desc_act`) groups are of neighbours: it is
    read only where the last of them is a smaller one.
    """
    format = options.get("checkpoint_format", options.get("format", "gptq"))
    kept = options.get("modules_in_block_to_quantize", None) or ()
    suffixes = [name for names in kept for name in ([names] if isinstance(names, str) else names)]
    skipped = [pattern.removeprefix("-:") for pattern in options.get("dynamic", None) or ()]
    chosen = _chosen(model, [] if options.get("lm_head", False) else None)
    in_order, group_size = options.get("desc_act", None) is False, options.get("group_size", 128)

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
        is_whole = in_order and size % max(1, group_size) == 0
        groups = None if is_whole else Read(weight.stem + ".g_idx", (size,), "int32")
        offset = 1 if format == "gptq" else 0
        return Transpose(Dequantise(values, scales, "gptq", None, zeros, groups, offset), 0, 1)

    ignored = _zero_biases(model)
    if not in_order:
        return Scheme("gptq", holds, recipe, ignored)
    return Scheme("gptq", holds, recipe, (*ignored, _G_IDX), groups_in_order={_G_IDX: max(0, group_size)})


_G_IDX = "*.g_idx"


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
    "mxfp8": _mxfp8,
    "compressed-tensors": _compressed_tensors,
    "modelopt": _modelopt,
    "mxfp4": _mxfp4,
    "awq": _awq,
    "gptq": _gptq,
    "mlx": _mlx,
}
