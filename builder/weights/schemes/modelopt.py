"""NVIDIA's ModelOpt, and how it names layers."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from fnmatch import translate

from transformers import PreTrainedModel

from precast.builder.source.quantised_options import Quantised, refuse
from precast.builder.weights.conversions import saved_tensors
from precast.builder.weights.rounding import of_modelopt
from precast.builder.weights.schemes.chosen import config_names, is_linear
from precast.builder.weights.schemes.scheme import KV_SCALES, Scheme, Weight
from precast.builder.weights.schemes.stored import nvfp4, one_by_one, per_group_of_32, per_tensor, scaled
from precast.ir.graph.schema import Recipe


def modelopt(model: PreTrainedModel, options: Quantised) -> Scheme:
    """NVIDIA's ModelOpt, of whose formats FP8 with one scale a tensor, MXFP8 and NVFP4; kept as they are: linear layers
    by pattern. With `quantized_layers`, those alone are quantised, each in its format.
    """
    kept = options.get("ignore", None) or ()
    names, layers = config_names(model), options.get("quantized_layers", None)
    is_kept = _listed(kept)
    _check_names(options.method, model, names, kept if layers is None else list(layers))

    @functools.cache
    def algorithm(weight: Weight) -> str | None:
        found = names(weight.module, weight.stem)
        if not is_linear(model, weight) or any(map(is_kept, found)):
            return None
        if layers is None:
            return options.get("quant_algo", None)
        return next((layers[part]["quant_algo"] for name in found for part in _outer(name) if part in layers), None)

    def recipe(weight: Weight) -> Recipe:
        stored = algorithm(weight)

        def one(each: Weight) -> Recipe:
            if stored == "FP8":
                return scaled(each, per_tensor(each, each.name + "_scale"))
            return per_group_of_32(each) if stored == "MXFP8" else nvfp4(each, "", "_scale_2", ())

        return one_by_one(model, weight, options.method, one)

    ignored = ("*.input_scale", "*.k_scale", "*.v_scale")
    return Scheme(
        "modelopt", lambda weight: algorithm(weight) is not None, recipe, ignored, KV_SCALES,
        rounding=lambda weight: of_modelopt(algorithm(weight), weight.stem),
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
