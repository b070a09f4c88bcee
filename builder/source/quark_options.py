"""What Quark's configs say of layers: the formats of their weights that are known, and of keys and values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

_MX = {"qscheme": ("per_group",), "group_size": (32,), "scale_format": ("e8m0",), "ch_axis": (-1, 1),
       "is_dynamic": (False, None), "is_scale_quant": (False, None)}  # fmt: skip
"""What is said of the MX formats of weights, whose rows are in groups."""
_ELEMENTS = {"fp8_e4m3": "mxfp8", "fp4": "mxfp4"}
_FLOAT8 = {"dtype": ("fp8_e4m3",), "qscheme": ("per_tensor",), "is_dynamic": (False, None)}
_FLOAT8_ROWS = _FLOAT8 | {"qscheme": ("per_channel",), "ch_axis": (0,)}
_FOLDED = ("awq", "autosmoothquant", "gptq", "smooth")
"""Algorithms after which a model computes what it did before: what they change is in its weights."""

FOLDED = f"algorithms of {', '.join(_FOLDED)}"
"""What messages say is known of `algo_config`."""
KNOWN = (
    "weights of fp8_e4m3, static, per_tensor or per_channel (ch_axis 0), or of fp8_e4m3 or fp4 per_group of 32 with "
    "scales in e8m0; no bias, and output_tensors of keys and values alone"
)
"""What messages say is known of layers."""


def weight_format(weight: Any) -> str | None:
    """What the `weight` of a layer's config is stored as: fp8, fp8_rows, mxfp8 or mxfp4. None: it isn't known."""
    if not isinstance(weight, Mapping):
        return None
    if _is(weight, _MX):
        return _ELEMENTS.get(str(weight.get("dtype")))
    return "fp8" if _is(weight, _FLOAT8) else "fp8_rows" if _is(weight, _FLOAT8_ROWS) else None


def is_folded(algorithms: Any) -> bool:
    """Whether `algo_config` names nothing that is left to do when the model runs, as rotations may be."""
    listed = algorithms if isinstance(algorithms, list) else [algorithms] if algorithms else []
    return all(isinstance(each, Mapping) and each.get("name") in _FOLDED for each in listed)


def unknown_layers(entries: Mapping[str, Any]) -> Iterator[str]:
    """The layers' configs that say something that isn't known, each in words: what it says, and where."""
    whole = entries.get("global_quant_config")
    kept = _kv_layers(entries)
    for name, layer in [("global_quant_config", whole), *_mapping(entries.get("layer_quant_config")).items()]:
        if not isinstance(layer, Mapping):
            yield f"{name} = {layer!r}"
            continue
        weight = layer.get("weight")
        if weight and weight_format(weight) is None:
            told = ("dtype", *_MX) if isinstance(weight, Mapping) else ()
            said = [f"{key} = {weight[key]!r}" for key in told if weight.get(key) is not None]
            yield f"{name}.weight: {', '.join(said) or repr(weight)}"
        for part in ("bias", "output_tensors"):
            if layer.get(part) and not (part == "output_tensors" and name in kept):
                yield f"{name}.{part} = {layer[part]!r}"


def kv_outputs(entries: Mapping[str, Any]) -> list[Any]:
    """What is said of keys and values: of the outputs of the layers that make them."""
    found = (layer.get("output_tensors") for layer in _kv_layers(entries).values())
    return [each for each in found if each]


def is_float8(output: Any) -> bool:
    """Whether numbers have 8 bits, and one scale, known beforehand, for all that a layer has of them."""
    return isinstance(output, Mapping) and _is(output, _FLOAT8)


def _kv_layers(entries: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """The configs of the layers that make keys and values, by their patterns."""
    given = _mapping(entries.get("export")).get("kv_cache_group")
    patterns = [str(each) for each in given] if isinstance(given, list) else []
    layers = _mapping(entries.get("layer_quant_config"))
    named = {name: each for name, each in layers.items() if any(fnmatchcase(name, pattern) for pattern in patterns)}
    return {name: _mapping(each) for name, each in (named | _mapping(entries.get("kv_cache_quant_config"))).items()}


def _is(spec: Mapping[str, Any], wanted: Mapping[str, tuple[Any, ...]]) -> bool:
    return all(spec.get(name) in values for name, values in wanted.items())


def _mapping(value: Any) -> dict[str, Any]:
    """What a config says, which may be anything, where it is names and values."""
    return {str(name): each for name, each in value.items()} if isinstance(value, Mapping) else {}
