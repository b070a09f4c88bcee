"""Samples of linear layers whose weights are in few bits: each format, with each of its parts, and each rounding."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from op_samples.draw import Draw, Sample
from precast.ir.ops.rows_tokens import QUANTISED_INPUTS

ANY_INT32 = (-(1 << 31), 1 << 31)
"""Between these all values of four and eight bits are as likely as others."""
Make = Callable[[Draw, int, int], Sample]


def words(draw: Draw, *shape: int) -> torch.Tensor:
    """Random bits, int32."""
    return draw.integers(*ANY_INT32, *shape).to(torch.int32)


def float8(draw: Draw, *shape: int, scale: float = 100.0) -> torch.Tensor:
    """Normally distributed values of eight bits."""
    return draw.normal(*shape, scale=scale, dtype=torch.float32).clamp_(-448, 448).to(torch.float8_e4m3fn)


def fp8(draw: Draw, outputs: int, inputs: int, block: tuple[int, int] = (4, 8)) -> Sample:
    """A scale for each block."""
    scales = draw.uniform(-(-outputs // block[0]), -(-inputs // block[1]), low=2e-4, high=6e-4, dtype=torch.float32)
    return {"weight": float8(draw, outputs, inputs), "scales": scales, "format": "fp8", "block": block}


def int8(draw: Draw, outputs: int, inputs: int, block: tuple[int, int] | None = None, *, zeros: bool = False) -> Sample:
    """A scale for each block; None: for each row. With points that stand for 0, or without."""
    block = block or (1, max(inputs, 1))
    shape = (-(-outputs // block[0]), -(-inputs // block[1]))
    made = {
        "weight": draw.integers(-128, 128, outputs, inputs, dtype=torch.int8),
        "scales": draw.uniform(*shape, low=2e-4, high=6e-4, dtype=torch.bfloat16), "format": "int8", "block": block,
    }  # fmt: skip
    return {**made, "zeros": draw.integers(-20, 20, *shape, dtype=torch.int8)} if zeros else made


def packed(
    draw: Draw, outputs: int, inputs: int, bits: int = 4, *, size: int | None = None, zeros: bool = False,
    order: bool = False,
) -> Sample:  # fmt: skip
    """Groups of `size` inputs; None: of all. `order`: of inputs anywhere."""
    each, groups = 32 // bits, inputs // (size or inputs)
    scales = draw.uniform(outputs, groups, low=0.01 / (1 << bits), high=0.1 / (1 << bits), dtype=torch.bfloat16)
    made = {"weight": words(draw, outputs, inputs // each), "scales": scales, "format": f"packed{bits}"}
    if zeros:
        made["zeros"] = words(draw, -(-outputs // each), groups)
    else:
        made["zero_offset"] = 1 << bits - 1
    return {**made, "groups": draw.integers(0, groups, inputs, dtype=torch.int32)} if order else made


def mxfp4(draw: Draw, outputs: int, inputs: int) -> Sample:
    """A power of two for each 32 inputs."""
    blocks = draw.integers(0, 256, outputs, inputs // 32, 16, dtype=torch.uint8)
    scales = draw.integers(116, 122, outputs, inputs // 32, dtype=torch.uint8)
    return {"weight": blocks, "scales": scales, "format": "mxfp4"}


def nvfp4(draw: Draw, outputs: int, inputs: int, *, divided: bool = False, rows: bool = False) -> Sample:
    """A scale of float8 for each 16 inputs, and one of all or of each row."""
    values = draw.integers(0, 256, outputs, inputs // 2, dtype=torch.uint8)
    scales = draw.uniform(outputs, inputs // 16, low=1.0, high=400.0, dtype=torch.float32).to(torch.float8_e4m3fn)
    whole = draw.uniform(outputs if rows else 1, 1, low=5e-5, high=1e-4, dtype=torch.float32)
    format = "nvfp4_divided" if divided else "nvfp4"
    return {"weight": values, "scales": scales, "global_scale": 1 / whole if divided else whole, "format": format}


def gptq(draw: Draw, outputs: int, inputs: int, size: int | None = None, *, order: bool = False) -> Sample:
    """AutoGPTQ's layout. `order`: groups of inputs anywhere."""
    groups = inputs // (size or inputs)
    made = {
        "weight": words(draw, inputs // 8, outputs), "zeros": words(draw, groups, outputs // 8), "format": "gptq",
        "scales": draw.uniform(groups, outputs, low=1e-3, high=1e-2, dtype=torch.float16), "zero_offset": 1,
    }  # fmt: skip
    return {**made, "groups": draw.integers(0, groups, inputs, dtype=torch.int32)} if order else made


def call(input: torch.Tensor, weight: Sample, **more: object) -> Sample:
    """The arguments of a linear layer, in the order of the signature."""
    given = {"input": input, **weight, **more}
    tensors = ("input", "weight", "scales", "zeros", "groups", "global_scale", "input_scale", "bias")
    return {name: given.get(name) for name in tensors} | given


def quantised_linear(draw: Draw) -> Iterator[Sample]:
    for weight in _weights(draw):
        yield call(draw.normal(1, 5, _inputs(weight)), weight)
    for activation in QUANTISED_INPUTS[1:]:
        scale = draw.uniform(1, low=0.004, high=0.008, dtype=torch.float32) if activation == "fp8_tensor" else None
        for weight in (fp8(draw, 24, 264), int8(draw, 24, 264)):
            yield call(draw.normal(1, 3, 264), weight, input_scale=scale, activation=activation)
    yield call(draw.normal(1, 6, 66)[..., 1::2], int8(draw, 3, 33), bias=draw.normal(3))
    yield call(draw.normal(2, 1, 16), fp8(draw, 5, 16, (5, 16)), bias=draw.normal(5))
    yield call(draw.normal(1, 0, 16), packed(draw, 5, 16, 8))
    yield call(draw.normal(0, 64), mxfp4(draw, 8, 64), bias=draw.normal(8))
    for activation in ("fp8_group", "fp8_group_e8m0"):
        yield call(torch.zeros_like(draw.normal(1, 1, 264)), fp8(draw, 4, 264), activation=activation)


def _weights(draw: Draw) -> Iterator[Sample]:
    yield gptq(draw, 24, 48, 16, order=True)
    yield gptq(draw, 24, 48, 16)
    yield fp8(draw, 27, 45)
    yield int8(draw, 27, 45, (4, 8), zeros=True)
    for bits in (4, 8):
        yield packed(draw, 27, 48, bits, size=16)
        yield packed(draw, 27, 48, bits, size=16, zeros=True, order=True)
        yield packed(draw, 27, 48, bits, zeros=True)
    yield mxfp4(draw, 27, 64)
    for divided in (False, True):
        yield nvfp4(draw, 27, 48, divided=divided, rows=divided)


def _inputs(weight: Sample) -> int:
    """How many inputs the layer has."""
    rows, columns = weight["weight"].shape[:2]
    factors = {"fp8": 1, "int8": 1, "packed8": 4, "packed4": 8, "mxfp4": 32, "nvfp4": 2, "nvfp4_divided": 2}
    return 8 * rows if weight["format"] == "gptq" else columns * factors[weight["format"]]


SAMPLES = {("precast.quantised_linear", 1): quantised_linear}
