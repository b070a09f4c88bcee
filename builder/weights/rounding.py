"""What a quantised checkpoint's config says of the inputs of its linear layers, by the method that it names.

Whoever published the checkpoint rounds them, most often to 8 bits, before they are multiplied. What the op for stored
weights can't do is left out, with the reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from precast.builder.graph.rounding import NONE, Rounding
from precast.ir.graph.schema import Read

EXPONENTS = Rounding(reason="groups of 32 inputs have an exponent each: known are groups of 128")
"""Of MX formats: on Hopper sums of each 32 would have to be scaled apart, and a product of 16 bits is more exact."""
FOUR_BITS = Rounding(reason="inputs of 4 bits are not made")
"""Of NVFP4 and MXFP4."""
FOUR_BIT_WEIGHT = Rounding(reason="weights of 4 bits are multiplied with numbers of 16")
"""Of DeepSeek-V4's experts, whose inputs its publisher rounds as those of FP8."""
GROUP = 128
"""Neighbours of a row that have a scale together, where inputs are rounded in groups."""
FBGEMM_BOUND = 1200.0
"""What transformers' `FbgemmFp8Config` has where a config names no `activation_scale_ub`."""


def of_fp8(entries: Mapping[str, Any], stem: str) -> Rounding:
    """Of `quant_method: fp8`, as transformers' `FP8Linear` rounds (`integrations/finegrained_fp8.py`).

    Dynamic: amax / 448 of each 128 neighbours, DeepSeek-V3's `act_quant`; without blocks, of each token. With the
    `scale_fmt` ue8m0 it is the next power of two, as in DeepSeek's code since V3.1; transformers' own on Hopper takes
    amax / 448 all the same. Static: by `activation_scale`, which AutoFP8 calls `input_scale`. `stem`: the layer's name
    in the checkpoint.
    """
    scheme, block = entries.get("activation_scheme", "dynamic"), entries.get("weight_block_size")
    one = entries.get("act_per_tensor")
    if one is not None and one is (scheme != "static"):
        return Rounding(reason=f"act_per_tensor is {one} and activation_scheme is {_short(scheme)}: not made")
    if scheme == "static":
        # As the scale of the weight: checkpoints without the key are AutoFP8's.
        name = "activation_scale" if "weight_block_size" in entries else "input_scale"
        return Rounding("fp8_tensor", Read(f"{stem}.{name}", ()))
    if scheme != "dynamic":
        return Rounding(reason=f"activation_scheme is {_short(scheme)}, which is not known")
    is_power_of_two = entries.get("scale_fmt") == "ue8m0"
    if block is not None:
        return _in_groups(block[1], "fp8_group_e8m0" if is_power_of_two else "fp8_group")
    if is_power_of_two:
        return Rounding(reason="scale_fmt is ue8m0: scales of tokens that are powers of two are not made")
    return Rounding("fp8_token")


def of_fbgemm(entries: Mapping[str, Any]) -> Rounding:
    """FBGEMM's `quantize_fp8_per_row`: min(amax, bound) / 448 of each token, and values saturate at 448."""
    bound = entries.get("activation_scale_ub", FBGEMM_BOUND)
    if type(bound) not in (int, float) or not 0 < bound < float("inf"):
        return Rounding(reason=f"activation_scale_ub is {_short(bound)}, expected a positive number")
    return Rounding("fp8_token", bound=float(bound))


def of_compressed_tensors(inputs: Any, stem: str) -> Rounding:
    """Of compressed-tensors' `input_activations` (its `calculate_qparams` and `quantize`).

    `stem`: the layer's name in the checkpoint, which beside the weight has `input_scale`, if scales are static.
    """
    if not inputs:
        return NONE
    if not isinstance(inputs, Mapping):
        return Rounding(reason=f"input_activations are {_short(inputs)}, which is not known")
    strategy, dynamic = inputs.get("strategy") or "tensor", inputs.get("dynamic", False)
    kind = inputs.get("num_bits", 8), inputs.get("type", "int"), inputs.get("symmetric", True)
    if kind == (8, "float", True):
        if (strategy, dynamic) == ("token", True):
            return Rounding("fp8_token")
        if (strategy, dynamic) == ("tensor", False):
            return Rounding("fp8_tensor", Read(f"{stem}.input_scale", (1,)))
        if (strategy, dynamic) == ("group", True):
            return _in_groups(inputs.get("group_size"))
    if kind == (8, "int", True) and (strategy, dynamic) == ("token", True):
        return Rounding("int8_token")
    told = ("num_bits", "type", "strategy", "symmetric", "dynamic", "group_size")
    said = ", ".join(f"{name} = {inputs[name]!r}" for name in told if inputs.get(name) is not None)
    return Rounding(reason=f"input_activations of {_short(said)}: such a rounding is not made")


def of_modelopt(algorithm: str | None, stem: str) -> Rounding:
    """ModelOpt's FP8 has one scale a tensor, found while it calibrated: amax / 448, stored as `input_scale`."""
    if algorithm == "FP8":
        return Rounding("fp8_tensor", Read(f"{stem}.input_scale", ()))
    if algorithm == "MXFP8":
        return EXPONENTS
    return FOUR_BITS if algorithm == "NVFP4" else NONE


def of_quark(inputs: Any, stem: str) -> Rounding:
    """Of Quark's `input_tensors` (its `QParamsLinear`), of which MX formats have an exponent for each 32 neighbours.

    `stem`: the layer's name in the checkpoint, which beside the weight has `input_scale`, if it is static.
    """
    if not inputs:
        return NONE
    known = {"fp8_e4m3": EXPONENTS, "fp4": FOUR_BITS}
    if isinstance(inputs, Mapping) and inputs.get("scale_format") == "e8m0" and inputs.get("dtype") in known:
        return known[inputs["dtype"]]
    if isinstance(inputs, Mapping) and inputs.get("dtype") == "fp8_e4m3":
        way = inputs.get("qscheme"), bool(inputs.get("is_dynamic"))
        if way == ("per_tensor", False):
            return Rounding("fp8_tensor", Read(f"{stem}.input_scale", ()))
        if way == ("per_channel", True):  # of activations, tokens are what it calls channels
            return Rounding("fp8_token")
    told = ("dtype", "qscheme", "group_size", "is_dynamic", "symmetric", "scale_format")
    given = inputs if isinstance(inputs, Mapping) else {}
    said = ", ".join(f"{name} = {given[name]!r}" for name in told if given.get(name) is not None) or repr(inputs)
    return Rounding(reason=f"input_tensors of {_short(said)}: such a rounding is not made")


def _in_groups(size: object, activation: str = "fp8_group") -> Rounding:
    if size == GROUP:
        return Rounding(activation)
    return Rounding(reason=f"groups of {_short(size)} inputs have a scale each: known are groups of {GROUP}")


def _short(value: object) -> str:
    """What a config says, which may be anything, in few words."""
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= 120 else f"{text[:117]}..."
