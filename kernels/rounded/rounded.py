"""rounded_<op>@1: `op`, then its result rounded to few bits as `quantised_linear` rounds its input (`few_bits`).

The result of `op` is rounded to x's dtype first, as where both are ops of their own: equal results by definition. The
scales are float32: [..., 1], or in groups one for each 128 neighbours.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from precast.kernels.dtypes import FLOAT
from precast.kernels.gated_activation.gated_activation import gated_activation
from precast.kernels.quantised_linear.quantised_linear import few_bits
from precast.kernels.rms_norm.residual_rms_norm import residual_rms_norm
from precast.kernels.rms_norm.rms_norm import rms_norm
from precast.kernels.spec import ELEMENTWISE, OpSpec, Tolerance

_SCALES = (torch.float32, torch.bfloat16, torch.float16)


def rounded_rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    input_scale: torch.Tensor | None = None,
    *,
    eps: float,
    offset: float = 0.0,
    cast_before_scale: bool,
    activation: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The norm of `x` [..., D] in few bits, [..., D], and its scales. `input_scale` [1]: of `fp8_tensor`."""
    y = rms_norm(x, weight, eps=eps, offset=offset, cast_before_scale=cast_before_scale)
    return _rounded(y, activation, input_scale)


def rounded_residual_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    input_scale: torch.Tensor | None = None,
    *,
    eps: float,
    offset: float = 0.0,
    cast_before_scale: bool,
    activation: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The norm of `x + residual` [..., D] in few bits, its scales, and the sum in `x`'s dtype."""
    y, total = residual_rms_norm(x, residual, weight, eps=eps, offset=offset, cast_before_scale=cast_before_scale)
    return (*_rounded(y, activation, input_scale), total)


def rounded_gated_activation(
    x: torch.Tensor, input_scale: torch.Tensor | None = None, *, kind: str, activation: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gated half of `x` [..., 2F] in few bits, [..., F], and its scales."""
    return _rounded(gated_activation(x, kind=kind), activation, input_scale)


def _rounded(y: torch.Tensor, activation: str, input_scale: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    values, scales = few_bits(y.float(), activation, input_scale)
    return values.contiguous(), scales.clone(memory_format=torch.contiguous_format)


# A kernel's result before it is rounded may be the next number of its type: then scales are as far apart, and values
# may be neighbours.
_NEIGHBOURS = {
    **ELEMENTWISE, torch.float32: Tolerance(1.6e-2, 1e-6), torch.float8_e4m3fn: Tolerance(0.13, 2.0**-9),
    torch.int8: Tolerance(0.0, 1.0),
}  # fmt: skip


def _spec(name: str, axes: dict[str, str], results: dict[str, str], reference: Callable[..., Any]) -> OpSpec:
    floats = dict.fromkeys((tensor for tensor in axes if tensor != "input_scale"), FLOAT)
    return OpSpec(
        name=f"precast.{name}", axes=axes | {"input_scale": "1"}, results=results,
        dtypes=floats | {"input_scale": _SCALES}, reference=reference, tolerances=_NEIGHBOURS,
    )  # fmt: skip


ROUNDED_RMS_NORM = _spec(
    "rounded_rms_norm", {"x": "... D", "weight": "D"}, {"values": "... D", "scales": "... G"}, rounded_rms_norm
)
ROUNDED_RESIDUAL_RMS_NORM = _spec(
    "rounded_residual_rms_norm",
    {"x": "... D", "residual": "... D", "weight": "D"},
    {"values": "... D", "scales": "... G", "s": "... D"},
    rounded_residual_rms_norm,
)
ROUNDED_GATED_ACTIVATION = _spec(
    "rounded_gated_activation", {"x": "... 2F"}, {"values": "... F", "scales": "... G"}, rounded_gated_activation
)
