"""quantised_linear@1: y[..., o] = sum_i q(x)[..., i] * w[o, i] + b[o], w the values of a weight in few bits.

What w is, `docs/format/v1.md` says at `dequantise`: the same parts and the same formulas. gptq gives [I, O], which is
read transposed. The input may be rounded to few bits first, as those do who publish such checkpoints:

- `none`: q(x) = x, and w is rounded to x's dtype before the product, as a weight that is dequantised while it loads;
- `fp8_token`: float8_e4m3fn times a scale for each row, amax / 448 (compressed-tensors' dynamic scales of tokens);
- `fp8_group`: the same with a scale for each 128 neighbours of a row (transformers' FP8Linear, DeepSeek-V3);
- `fp8_group_e8m0`: the same with powers of two, 2^ceil(log2(amax / 448)), 2^-126 or more (`act_quant` of DeepSeek-V3.1
  and later with `scale_fmt` ue8m0, DeepGEMM's `ceil_to_ue8m0`);
- `fp8_tensor`: the same with the one scale that the checkpoint has, `input_scale`;
- `int8_token`: integers from -128 to 127 times a scale for each row, amax / 127, rounded to nearest even.

But for `none` all is computed in float32 and rounded once: the numbers of few bits are exact, so what is left is the
order of the sum. A row or group of zeros is zeros.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from precast.ir.ops.rows_rounded import INPUT_GROUP, has_powers_of_two, in_groups
from precast.kernels.calls import implements
from precast.kernels.dequantise.dequantise import Quantised, dequantise
from precast.kernels.dequantise.quantise import divided
from precast.kernels.dtypes import FLOAT, widened
from precast.kernels.spec import PRODUCT, OpSpec

FP8_MAX, INT8_MAX = 448.0, 127.0


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
    if parts.format == "gptq":
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
    return from_few_bits(*few_bits(x, activation, input_scale), activation)


def from_few_bits(values: torch.Tensor, scales: torch.Tensor, activation: str) -> torch.Tensor:
    """What `few_bits` made, multiplied out: [..., I] in the scales' dtype."""
    groups = _in_groups(values.to(scales.dtype), activation)
    return (groups * scales.unsqueeze(-1)).flatten(-2)[..., : values.shape[-1]]


def few_bits(
    x: torch.Tensor, activation: str, input_scale: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The values of few bits that `x` [..., I] is rounded to, float8_e4m3fn or int8, and the scales [..., G] that they
    are multiplied by, in `x`'s dtype: G is 1, or the groups of a row, where there are. Raises as `quantise_input` does.
    """
    groups = _in_groups(x, activation)
    if activation == "fp8_tensor":
        assert input_scale is not None
        scales = input_scale.to(x.dtype).expand(groups.shape[:-1])
    elif activation in ("fp8_token", "int8_token") or in_groups(activation):
        scales = divided(_largest(groups), INT8_MAX if activation == "int8_token" else FP8_MAX)
        scales = _powers_of_two(scales) if has_powers_of_two(activation) else scales
    else:
        expected = "none, fp8_token, fp8_group, fp8_group_e8m0, fp8_tensor or int8_token"
        raise ValueError(f"activation: expected {expected}, found {activation!r}")
    quotients = (groups / torch.where(scales == 0, 1.0, scales).unsqueeze(-1)).flatten(-2)[..., : x.shape[-1]]
    if activation == "int8_token":
        return quotients.round().clamp(-INT8_MAX - 1, INT8_MAX).to(torch.int8), scales
    return quotients.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn), scales


def _in_groups(x: torch.Tensor, activation: str) -> torch.Tensor:
    """`x` [..., I] as [..., G, I / G], the last group filled up with zeros."""
    if not in_groups(activation):
        return x.unsqueeze(-2)
    return functional.pad(x, (0, -x.shape[-1] % INPUT_GROUP)).unflatten(-1, (-1, INPUT_GROUP))


def _largest(x: torch.Tensor) -> torch.Tensor:
    """The largest magnitude along the last dimension, which may be empty."""
    return functional.pad(x.abs(), (0, 1)).amax(-1)


def _powers_of_two(scales: torch.Tensor) -> torch.Tensor:
    """Each scale, or the next power of two above it, at least float32's smallest normal number. What is 0 or no finite
    number stays so."""
    scales = torch.where(scales == 0, scales, scales.clamp(min=torch.finfo(torch.float32).tiny))
    digits, _ = torch.frexp(scales)  # from 0.5 to 1
    return torch.where((digits > 0.5) & (digits < 1), scales / digits, scales)


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
