"""rounded_linear@1: y[..., o] = sum_i x[..., i] * w[o, i] + b[o], both x and w of few bits, with their scales.

It is `quantised_linear` behind its rounding: `input` and `input_scales` are what an op in front made of it, as
`few_bits` says. All is computed in float32 and rounded once, to `dtype`.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from precast.kernels.dequantise.dequantise import Quantised, dequantise
from precast.kernels.dtypes import FLOAT
from precast.kernels.quantised_linear.quantised_linear import from_few_bits
from precast.kernels.spec import PRODUCT, OpSpec


def rounded_linear(
    input: torch.Tensor,
    input_scales: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    input_scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    format: str,
    block: tuple[int, int] | None = None,
    dtype: torch.dtype,
    activation: str,
) -> torch.Tensor:
    """The product of `input` [..., I], float8_e4m3fn or int8, times `input_scales` [..., G], float32, with a weight of
    O outputs in `format` fp8 or int8, plus `bias` [O]; [..., O] in `dtype`. `input_scale` [1], of `fp8_tensor`, is what
    all of `input_scales` are.
    """
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    weights = dequantise(Quantised(weight, scales, format=format, block=block)).to(wide)
    x = from_few_bits(input, input_scales, activation).to(wide)
    return functional.linear(x, weights, None if bias is None else bias.to(wide)).to(dtype)


_FEW_BITS = (torch.float8_e4m3fn, torch.int8)
_SCALES = (torch.float32, torch.bfloat16, torch.float16)

ROUNDED_LINEAR = OpSpec(
    name="precast.rounded_linear",
    axes={
        "input": "... I", "input_scales": "... G", "weight": "*", "scales": "*", "input_scale": "1", "bias": "O",
    },
    results={"y": "... O"},
    dtypes={
        "input": _FEW_BITS, "input_scales": (torch.float32,), "weight": _FEW_BITS, "scales": _SCALES,
        "input_scale": _SCALES, "bias": FLOAT,
    },
    reference=rounded_linear,
    tolerances=PRODUCT,
)  # fmt: skip
