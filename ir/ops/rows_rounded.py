"""Linear layers whose inputs come in few bits, and the ops that make such inputs of what they compute.

No bundle needs them: a graph says `quantised_linear`, which rounds its input itself. Where kernels can round it as the
op in front writes it, a load puts these in its place (`kernels/rounded/fusing.py`).
"""

from __future__ import annotations

from precast.ir.graph import symbols
from precast.ir.graph.schema import Dtype, TensorType
from precast.ir.ops.checks import COMPUTED, expect, expect_dtype, expect_given, expect_one_of, expect_rank, expect_shape
from precast.ir.ops.op import Args, last_of, row
from precast.ir.ops.rows_tokens import (
    QUANTISED_INPUTS,
    SCALES,
    gated_activation,
    quantised_values,
    residual_rms_norm,
    rms_norm,
)
from precast.ir.ops.work import product

ROUNDINGS = QUANTISED_INPUTS[1:]
INPUT_GROUP = 128
"""Neighbours of a row that have a scale together, where there are groups."""


def in_groups(activation: object) -> bool:
    """Whether each `INPUT_GROUP` neighbours of a row have a scale: of an `activation`, or a `rounding` of experts."""
    return activation in ("fp8_group", "fp8_group_e8m0")


def has_powers_of_two(activation: object) -> bool:
    """Whether scales are powers of two."""
    return activation == "fp8_group_e8m0"


def rounded_linear(args: Args) -> tuple[TensorType, ...]:
    x, dtype = args["input"], args["dtype"]
    expect(len(x.shape) >= 1, "input: expected at least one dimension")
    expect_one_of("format", args["format"], ("fp8", "int8"))
    expect_one_of("dtype", dtype, COMPUTED)
    weight = quantised_values("weight", args)
    expect_rank("weight, dequantised", weight, 2)
    outputs, inputs = weight.shape
    expect_shape("input's last dimension", x.shape[-1:], (inputs,))
    values, scales = _rounded(x, args)
    expect_dtype("input", x, values.dtype)
    expect_given(args, "input_scales", scales.shape, "float32")
    expect_given(args, "bias", (outputs,), dtype)
    return (TensorType(dtype, (*x.shape[:-1], outputs)),)


def rounded_rms_norm(args: Args) -> tuple[TensorType, ...]:
    (y,) = rms_norm(args)
    return _rounded(y, args)


def rounded_residual_rms_norm(args: Args) -> tuple[TensorType, ...]:
    y, total = residual_rms_norm(args)
    return (*_rounded(y, args), total)


def rounded_gated_activation(args: Args) -> tuple[TensorType, ...]:
    (y,) = gated_activation(args)
    return _rounded(y, args)


def _rounded(x: TensorType, args: Args) -> tuple[TensorType, TensorType]:
    """The values of few bits that x is rounded to, and the scales that they are multiplied by."""
    activation = args["activation"]
    expect_one_of("activation", activation, ROUNDINGS)
    is_static, scale = activation == "fp8_tensor", args.get("input_scale")
    expect((scale is not None) == is_static, f"input_scale: {'missing' if is_static else f'not taken by {activation}'}")
    expect_given(args, "input_scale", (1,), *SCALES)
    count = symbols.ceildiv(x.shape[-1], INPUT_GROUP) if in_groups(activation) else 1
    dtype: Dtype = "int8" if activation == "int8_token" else "float8_e4m3fn"
    return TensorType(dtype, x.shape), TensorType("float32", (*x.shape[:-1], count))


ROWS = (
    row(
        "precast.rounded_linear(Tensor input, Tensor input_scales, Tensor weight, Tensor scales,"
        " Tensor? input_scale=None, Tensor? bias=None, *, str format, int[]? block=None, Dtype dtype,"
        " str activation) -> Tensor",
        rounded_linear,
        last_of("input"),
        product("input"),
    ),
    row(
        "precast.rounded_rms_norm(Tensor x, Tensor? weight, Tensor? input_scale=None, *, float eps, float offset=0.0,"
        " bool cast_before_scale, str activation) -> (Tensor, Tensor)",
        rounded_rms_norm,
        last_of("x"),
    ),
    row(
        "precast.rounded_residual_rms_norm(Tensor x, Tensor residual, Tensor weight, Tensor? input_scale=None, *,"
        " float eps, float offset=0.0, bool cast_before_scale, str activation) -> (Tensor, Tensor, Tensor)",
        rounded_residual_rms_norm,
        last_of("x"),
    ),
    row(
        "precast.rounded_gated_activation(Tensor x, Tensor? input_scale=None, *, str kind, str activation)"
        " -> (Tensor, Tensor)",
        rounded_gated_activation,
        last_of("x"),
    ),
)
