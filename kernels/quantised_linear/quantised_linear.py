"""quantised_linear@1: y[..., o] = sum_i q(x)[..., i] * w[o, i] + b[o], w the values of a weight in few bits.

What w is, `docs/format/v1.md` says at `dequantise`: the same parts and the same formulas. awq and gptq give [I, O],
which is read transposed. The input may be rounded to few bits first, as those do who publish such checkpoints:

- `none`: q(x) = x, and w is rounded to x's dtype before the product, as a weight that is dequantised while it loads;
- `fp8_token`: float8_e4m3fn times a scale for each row, amax / 448 (compressed-tensors' dynamic scales of tokens);
- `fp8_group`: the same with a scale for each 128 neighbours of a row (transformers' FP8Linear, DeepSeek-V3);
- `fp8_tensor`: the same with the one scale that the checkpoint has, `input_scale`;
- `int8_token`: integers from -128 to 127 times a scale for each row, amax / 127, rounded to nearest even.

But for `none` all is computed in float32 and rounded once: the numbers of few bits are exact, so what is left is the
order of the sum. A row or group of zeros is zeros.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from precast.kernels.calls import implements
from precast.kernels.dequantise.dequantise import Quantised, dequantise
from precast.kernels.dequantise.quantise import divided
from precast.kernels.dtypes import FLOAT, widened
from precast.kernels.spec import PRODUCT, OpSpec

FP8_MAX, INT8_MAX = 448.0, 127.0
GROUP = 128
"""Neighbours that have a scale together in `fp8_group`."""


@implements("quantised_linear")
def quantised_linear(
    input: torch.Tensor,
    parts: Quantised,
    input_scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    activation: str,
) -> torch.Tensor:
    """The product of `input` [..., I] with a quantised weight of O outputs, plus `bias` [O]; [..., O] in `input`'s
    dtype. `input_scale` [1]: of `fp8_tensor`. Raises ValueError for an `activation` that isn't known.
    """
    weight = dequantise(parts)
    if parts.format in ("awq", "gptq"):
        weight = weight.t()
    if activation == "none":
        return functional.linear(input, weight.to(input.dtype), bias)
    x = widened(input)
    rounded = quantise_input(x, activation, input_scale)
    return functional.linear(rounded, weight.to(x.dtype), None if bias is None else bias.to(x.dtype)).to(input.dtype)


def quantise_input(x: torch.Tensor, activation: str, input_scale: torch.Tensor | None = None) -> torch.Tensor:
    """`x` [..., I], of float32 or float64, rounded as `activation` says, in the same dtype.

    Raises ValueError for one that isn't known, or is `none`.
    """
    if activation == "fp8_tensor":
        assert input_scale is not None
        return _fp8(x, input_scale.to(x.dtype))
    if activation == "fp8_token":
        return _fp8(x, divided(_largest(x), FP8_MAX))
    if activation == "fp8_group":
        groups = functional.pad(x, (0, -x.shape[-1] % GROUP)).unflatten(-1, (-1, GROUP))
        return _fp8(groups, divided(_largest(groups), FP8_MAX)).flatten(-2)[..., : x.shape[-1]]
    if activation == "int8_token":
        scale = divided(_largest(x), INT8_MAX)
        return (x / _divisor(scale)).round().clamp(-INT8_MAX - 1, INT8_MAX) * scale
    raise ValueError(f"activation: expected none, fp8_token, fp8_group, fp8_tensor or int8_token, found {activation!r}")


def _fp8(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (x / _divisor(scale)).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).to(x.dtype) * scale


def _largest(x: torch.Tensor) -> torch.Tensor:
    """The largest magnitude along the last dimension, which may be empty."""
    return functional.pad(x.abs(), (0, 1)).amax(-1, keepdim=True)


def _divisor(scale: torch.Tensor) -> torch.Tensor:
    """The scale, and 1 in place of 0: zeros are divided by it."""
    return torch.where(scale == 0, 1.0, scale)


_QUANTISED = (torch.float8_e4m3fn, torch.int8, torch.uint8, torch.int32)
_SCALES = (torch.float32, torch.bfloat16, torch.float16)

QUANTISED_LINEAR = OpSpec(
    name="precast.quantised_linear",
    axes={
        "input": "... I", "weight": "*", "scales": "*", "zeros": "*", "groups": "I", "global_scale": "*",
        "input_scale": "1", "bias": "O",
    },
    results={"y": "... O"},
    dtypes={
        "input": FLOAT, "weight": _QUANTISED, "scales": (*_SCALES, torch.float8_e4m3fn, torch.uint8),
        "zeros": (torch.int8, torch.int32), "groups": (torch.int32,), "global_scale": _SCALES, "input_scale": _SCALES,
        "bias": FLOAT,
    },
    reference=quantised_linear,
    tolerances=PRODUCT,
)  # fmt: skip
