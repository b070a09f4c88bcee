"""Samples of norms and gates that round what they make, and of the linear layers that take it."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from op_samples.draw import Draw, Sample
from op_samples.quantised import fp8, int8
from precast.ir.ops.rows_rounded import ROUNDINGS
from precast.kernels.quantised_linear.quantised_linear import few_bits


def _static(draw: Draw, activation: str) -> torch.Tensor | None:
    return draw.uniform(1, low=0.004, high=0.008, dtype=torch.float32) if activation == "fp8_tensor" else None


def rounded_linear(draw: Draw) -> Iterator[Sample]:
    for activation in ROUNDINGS:
        for tokens, outputs, inputs in ((3, 24, 264), (0, 8, 16), (1, 5, 40)):
            make = int8 if activation == "int8_token" else fp8
            scale = _static(draw, activation)
            x = draw.normal(1, tokens, inputs, dtype=torch.float32)
            values, scales = few_bits(x, activation, scale)
            yield {
                "input": values.contiguous(), "input_scales": scales.contiguous(), **make(draw, outputs, inputs),
                "input_scale": scale, "bias": draw.normal(outputs) if tokens == 3 else None,
                "dtype": draw.dtype, "activation": activation,
            }  # fmt: skip


def _norms(draw: Draw, *, residual: bool) -> Iterator[Sample]:
    for i, activation in enumerate(ROUNDINGS):
        for shape in ((1, 5, 264), (2, 3, 40), (0, 17), (3, 128)):
            x = draw.normal(*shape)
            yield {
                "x": x, **({"residual": draw.normal(*shape)} if residual else {}), "weight": draw.normal(shape[-1]),
                "input_scale": _static(draw, activation), "eps": 1e-5, "offset": float(i % 2),
                "cast_before_scale": i > 1, "activation": activation,
            }  # fmt: skip
    if not residual:
        yield {
            "x": draw.normal(3, 130)[..., ::2], "weight": None, "input_scale": None, "eps": 1e-6,
            "cast_before_scale": False, "activation": "fp8_group",
        }  # fmt: skip
    zeros = torch.zeros_like(draw.normal(2, 33))
    yield {
        "x": zeros, **({"residual": zeros.clone()} if residual else {}), "weight": draw.normal(33), "input_scale": None,
        "eps": 1e-6, "cast_before_scale": True, "activation": "fp8_token",
    }  # fmt: skip


def rounded_rms_norm(draw: Draw) -> Iterator[Sample]:
    yield from _norms(draw, residual=False)


def rounded_residual_rms_norm(draw: Draw) -> Iterator[Sample]:
    yield from _norms(draw, residual=True)


def rounded_gated_activation(draw: Draw) -> Iterator[Sample]:
    for activation in ROUNDINGS:
        for kind, shape in (("silu", (1, 3, 2400)), ("gelu", (2, 66)), ("gelu_tanh", (0, 256)), ("silu", (1, 1, 512))):
            yield {
                "x": draw.normal(*shape), "input_scale": _static(draw, activation), "kind": kind,
                "activation": activation,
            }  # fmt: skip


SAMPLES = {
    ("precast.rounded_linear", 1): rounded_linear,
    ("precast.rounded_rms_norm", 1): rounded_rms_norm,
    ("precast.rounded_residual_rms_norm", 1): rounded_residual_rms_norm,
    ("precast.rounded_gated_activation", 1): rounded_gated_activation,
}
