"""NVIDIA's ModelOpt, and how it names layers."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import translate
from typing import Any

from transformers import PreTrainedModel

from precast.builder.source.quantised_options import IN_BLOCKS, Quantised, check_layers, is_known_layer, refuse
from precast.builder.weights.conversions import saved_tensors
from precast.builder.weights.rounding import of_modelopt
from precast.builder.weights.schemes.chosen import config_names, is_linear
from precast.builder.weights.schemes.scheme import KV_SCALES, Scheme, Weight
from precast.builder.weights.schemes.stored import (
    expert_layers,
    nvfp4,
    of_each,
    one_by_one,
    per_block,
    per_group_of_32,
    per_tensor,
    same,
    scaled,
)
from precast.ir.graph.schema import Recipe


def modelopt(
    model: PreTrainedModel, options: Quantised, is_left_out: Callable[[str], bool] = lambda _: False
) -> Scheme:
    """NVIDIA's ModelOpt, of whose formats FP8 with one scale a tensor or in blocks, MXFP8 and NVFP4; kept as they are:
    linear layers by pattern. With `quantized_layers`, those alone are quantised, each in its format. Of stacked experts
    each linear layer has its own name. `is_left_out` says which names are of layers that are no part of the model.

    Of blocks ModelOpt writes `weight_scale` [r, 1, c, 1]; publishers who take them from checkpoints of DeepSeek's
    format keep `weight_scale_inv` [r, c]. Both are factors of the values, and no config says which it is.
    """
    kept = options.get("ignore", None) or ()
    names, layers = config_names(model), options.get("quantized_layers", None)
    is_kept = _listed(kept)
    if layers is not None:
        layers = _read_layers(options.method, model, names, layers, is_left_out)
    _check_names(options.method, model, names, kept if layers is None else list(layers), is_left_out)

    def said_of(found: tuple[str, ...]) -> str | None:
        if layers is None:
            return options.get("quant_algo", None)
        return next((layers[part]["quant_algo"] for name in found for part in _outer(name) if part in layers), None)

    @functools.cache
    def algorithms(weight: Weight) -> list[str | None]:
        if not is_linear(model, weight):
            return [None]
        left = of_each(weight, names, lambda found: any(map(is_kept, found)))
        return [None if kept else each for kept, each in zip(left, of_each(weight, names, said_of), strict=True)]

    def algorithm(weight: Weight) -> str | None:
        return same(options.method, weight, algorithms(weight))

    def recipe(weight: Weight) -> Recipe:
        stored = algorithm(weight)

        def one(each: Weight) -> Recipe:
            if stored == IN_BLOCKS:
                return scaled(each, per_block(each, each.name + "_scale"))
            if stored == "FP8":
                return scaled(each, per_tensor(each, each.name + "_scale"))
            return per_group_of_32(each) if stored == "MXFP8" else nvfp4(each, "", "_scale_2", ())

        return one_by_one(model, weight, options.method, one)

    ignored = ("*.input_scale", "*.k_scale", "*.v_scale")
    said = {options.get("quant_algo", None), *(each["quant_algo"] for each in (layers or {}).values())}
    return Scheme(
        "modelopt", lambda weight: any(algorithms(weight)), recipe, ignored, KV_SCALES,
        rounding=lambda weight: of_modelopt(algorithm(weight), weight.stem),
        endings={".weight_scale": ".weight_scale_inv"} if IN_BLOCKS in said else {},
    )  # fmt: skip


def listed_experts(model: PreTrainedModel, options: Quantised) -> Callable[[Weight], bool]:
    """Which weights are of experts that ModelOpt made NVFP4; it may name them without the model's prefix, as
    DeepSeek-V4's publishers do."""
    layers = options.get("quantized_layers", None) or {}
    prefix, names = f"{model.base_model_prefix}.", config_names(model)

    def called(*found: str) -> tuple[str, ...]:
        return tuple(dict.fromkeys(part for name in names(*found) for part in (name, name.removeprefix(prefix))))

    if layers:
        _check_names(options.method, model, called, list(layers))
    return lambda weight: any(part in layers for name in called(weight.module, weight.stem) for part in _outer(name))


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
    method: str, model: PreTrainedModel, names: Callable[..., tuple[str, ...]], patterns: Sequence[str],
    is_left_out: Callable[[str], bool] = lambda _: False,
) -> None:  # fmt: skip
    """Refuse a list that names layers, and none of this model's, or of parts that are left out: what it says would be
    passed over."""
    numbered = [each for each in patterns if re.search(r"\.\d+", each)]
    is_listed = _listed(numbered)
    if not numbered or any(is_listed(name) for path in _paths(model) for name in names(path)):
        return
    others = [each for each in numbered if not is_left_out(each)]
    if others:
        raise refuse(method, f"names of layers that are none of this model ({others[0]})")


def _paths(model: PreTrainedModel) -> Iterator[str]:
    """What layers are called in the module, then in the checkpoint, there also those that stacked experts are stored
    as."""
    yield from (path for path, _ in model.named_modules())
    for name, tensor in saved_tensors(model, ()).items():
        yield name.removesuffix(".weight")
        yield from (f"{name.rpartition('.')[0]}.{end}" for end in expert_layers(name, tensor.shape))


def _read_layers(
    method: str, model: PreTrainedModel, names: Callable[..., tuple[str, ...]], layers: Mapping[str, Any],
    is_left_out: Callable[[str], bool],
) -> dict[str, Any]:  # fmt: skip
    """ModelOpt's `quantized_layers` whose format is known. Others are refused, unless they are of a part that is left
    out, and none of this model's."""
    unknown = {name: said for name, said in layers.items() if not is_known_layer(said)}
    if unknown:
        own = {part for path in _paths(model) for name in names(path) for part in _outer(name)}
        check_layers(method, {name: said for name, said in unknown.items() if name in own or not is_left_out(name)})
    return {name: said for name, said in layers.items() if name not in unknown}
