"""Linear layers with weights in few bits, in Triton, against their definition: each format, odd sizes, all numbers of
rows; in Triton's interpreter and on GPUs.

`test_triton.py` runs this file in a process of its own. The interpreter cuts what it converts to bfloat16
where devices round, so that dtype is tried on GPUs only.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from op_samples import quantised
from op_samples.draw import Draw, Sample

from precast.ir.ops.rows_tokens import QUANTISED_INPUTS
from precast.kernels.choices import fitting
from precast.kernels.dequantise.dequantise import Quantised, dequantise
from precast.kernels.launch import Launched, as_function, use_of_tensors
from precast.kernels.quantised_linear import float8, launches
from precast.kernels.quantised_linear.launches import dequantised
from precast.kernels.quantised_linear.quantised_linear import QUANTISED_LINEAR, quantise_input, quantised_linear
from precast.kernels.records import Pointer, Record

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if IS_INTERPRETED else "cuda")
DTYPES = [torch.float16] + ([] if IS_INTERPRETED else [torch.bfloat16])
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)

FORMATS: dict[str, Callable[[Draw], tuple[int, Sample]]] = {
    # name: inputs and the weight
    "fp8 in blocks": lambda draw: (300, quantised.fp8(draw, 70, 300, (128, 128))),
    "fp8 in whole blocks": lambda draw: (512, quantised.fp8(draw, 256, 512, (128, 128))),
    "fp8 in blocks of a head": lambda draw: (320, quantised.fp8(draw, 70, 320, (128, 64))),
    "fp8 in blocks of a head, odd": lambda draw: (301, quantised.fp8(draw, 70, 301, (128, 64))),
    "fp8 in odd blocks": lambda draw: (45, quantised.fp8(draw, 37, 45, (4, 9))),
    "fp8 in short blocks": lambda draw: (96, quantised.fp8(draw, 33, 96, (1, 32))),
    "fp8 of rows": lambda draw: (77, quantised.fp8(draw, 33, 77, (1, 77))),
    "fp8 of all": lambda draw: (77, quantised.fp8(draw, 33, 77, (33, 77))),
    "int8 of rows": lambda draw: (77, quantised.int8(draw, 33, 77)),
    "int8 in words": lambda draw: (100, quantised.int8(draw, 33, 100)),
    "int8 in words, with points": lambda draw: (128, quantised.int8(draw, 33, 128, (3, 64), zeros=True)),
    "fp8 in words": lambda draw: (100, quantised.fp8(draw, 33, 100, (1, 100))),
    "int8 with points": lambda draw: (77, quantised.int8(draw, 33, 77, (3, 10), zeros=True)),
    "int8 of rows with points": lambda draw: (77, quantised.int8(draw, 33, 77, zeros=True)),
    "packed4 of rows": lambda draw: (200, quantised.packed(draw, 37, 200)),
    "packed4": lambda draw: (256, quantised.packed(draw, 37, 256, size=128)),
    "packed4 with points": lambda draw: (256, quantised.packed(draw, 37, 256, size=128, zeros=True)),
    "packed4 in short groups": lambda draw: (96, quantised.packed(draw, 37, 96, size=32, zeros=True)),
    "packed4 in any order": lambda draw: (96, quantised.packed(draw, 37, 96, size=32, zeros=True, order=True)),
    "packed8": lambda draw: (256, quantised.packed(draw, 37, 256, 8, size=128, zeros=True)),
    "packed8 of rows": lambda draw: (100, quantised.packed(draw, 37, 100, 8)),
    "mxfp4": lambda draw: (96, quantised.mxfp4(draw, 37, 96)),
    "nvfp4": lambda draw: (80, quantised.nvfp4(draw, 37, 80)),
    "nvfp4, divided": lambda draw: (80, quantised.nvfp4(draw, 37, 80, divided=True)),
    "nvfp4 of rows, divided": lambda draw: (80, quantised.nvfp4(draw, 37, 80, divided=True, rows=True)),
    "gptq": lambda draw: (256, quantised.gptq(draw, 40, 256, 128)),
    "gptq in order": lambda draw: (
        384,
        quantised.gptq(draw, 40, 384, 128, order=True)
        | {"groups": draw.of([2] * 128 + [0] * 128 + [7] * 128, torch.int32)},
    ),
    "gptq in any order": lambda draw: (96, quantised.gptq(draw, 40, 96, 32, order=True)),
}
each_format = pytest.mark.parametrize("format", FORMATS)


def record_for(sample: Sample, tokens: int) -> Record:
    """Triton's, of those that take it: the others have no interpreter."""
    use = use_of_tensors("precast.quantised_linear", 1, sample)
    return next(record for record in fitting(use, {"T": tokens}) if record.kind == "triton")


def check(sample: Sample, tokens: int, same: Callable[..., None]) -> None:
    """With the tiles for so many tokens."""
    record = record_for(sample, tokens)
    found = as_function(record)(**sample)

    expected = quantised_linear(**{name: x.cpu() if isinstance(x, torch.Tensor) else x for name, x in sample.items()})
    same(QUANTISED_LINEAR, found.cpu(), expected)


@each_format
@each_dtype
def test_formats(format: str, dtype: torch.dtype, same: Callable[..., None]) -> None:
    draw = Draw(dtype, DEVICE)
    inputs, weight = FORMATS[format](draw)
    check(quantised.call(draw.normal(1, 3, inputs), weight), 3, same)


@pytest.mark.parametrize("rows", [0, 1, 17, 33, 130, 257])
@pytest.mark.parametrize("format", ["fp8 in blocks", "fp8 in whole blocks", "packed4", "gptq"])
@each_dtype
def test_rows(rows: int, format: str, dtype: torch.dtype, same: Callable[..., None]) -> None:
    draw = Draw(dtype, DEVICE)
    inputs, weight = FORMATS[format](draw)
    bias = draw.normal(40 if format == "gptq" else len(weight["weight"]))
    check(quantised.call(draw.normal(1, rows, inputs), weight, bias=bias), rows, same)


@pytest.mark.parametrize(
    ("format", "activation"),
    [
        (format, activation)
        for format in (
            "fp8 in blocks", "fp8 in whole blocks", "fp8 in blocks of a head", "fp8 in blocks of a head, odd",
            "fp8 in odd blocks", "int8 of rows", "packed4", "gptq",
        )
        for activation in QUANTISED_INPUTS[1:]
    ],
)  # fmt: skip
@each_dtype
def test_rounded_inputs(activation: str, format: str, dtype: torch.dtype, same: Callable[..., None]) -> None:
    draw = Draw(dtype, DEVICE)
    inputs, weight = FORMATS[format](draw)
    scale = draw.uniform(1, low=0.004, high=0.008, dtype=torch.float32) if activation == "fp8_tensor" else None
    input = draw.normal(2, 3, 2 * inputs)[..., 1::2]
    input[0, 0] = 0
    check(quantised.call(input, weight, input_scale=scale, activation=activation), 6, same)


@pytest.mark.parametrize("make", [quantised.packed, partial(quantised.fp8, block=(1, 2048)), quantised.gptq])
def test_sums_in_parts(make: Callable[..., Sample], same: Callable[..., None]) -> None:
    draw = Draw(torch.float16, DEVICE)
    sample = quantised.call(draw.normal(3, 2048), make(draw, 40, 2048), bias=draw.normal(40))
    launches: Any = record_for(sample, 3).runs
    assert len(launches(use_of_tensors("precast.quantised_linear", 1, sample))) == 2

    check(sample, 3, same)


@pytest.mark.parametrize("in_parts", [False, True], ids=["whole", "in parts"])
@each_format
@each_dtype
def test_values_are_the_definitions(
    format: str, dtype: torch.dtype, in_parts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that cuBLASLt multiplies with, of many rows: of all outputs, or of 16 at a time, for as many columns."""
    if in_parts:
        monkeypatch.setattr(launches, "_WHOLE_BYTES", 0)
        monkeypatch.setattr(launches, "_LEAST_OUTPUTS", 16)
    draw = Draw(dtype, DEVICE)
    inputs, weight = FORMATS[format](draw)
    outputs = weight["weight"].shape[1 if format.startswith("gptq") else 0]
    sample = quantised.call(draw.normal(1, 300, inputs), weight, bias=draw.normal(outputs))
    expected = dequantise(Quantised(**{name: sample.get(name, of) for name, of in Quantised._field_defaults.items()},
                                    weight=sample["weight"], scales=sample["scales"]))  # fmt: skip
    expected = (expected.t() if format.startswith("gptq") else expected).to(dtype)
    made = dequantised(use_of_tensors("precast.quantised_linear", 1, sample))
    firsts = range(0, outputs, 16 if in_parts else outputs)
    assert len(made) == 2 * len(firsts)

    for first, launch, product in zip(firsts, made[::2], made[1::2], strict=True):
        count = int(product.constants["outputs"])
        values = torch.full((count, inputs), torch.nan, dtype=dtype, device=DEVICE)
        args = tuple(Pointer("out.0") if arg == launch.args[0] else arg for arg in launch.args)
        Launched([launch._replace(args=args)])(**{name: x for name, x in sample.items() if x is not None}, out=values)

        rows = expected[first : first + 16] if in_parts else expected
        torch.testing.assert_close(values, rows, rtol=2 * torch.finfo(dtype).eps, atol=0)
        assert product.library
        assert product.args[0] == Pointer("out.0", offset=2 * first)
        assert product.args[3] == Pointer("bias", offset=2 * first)
        assert product.constants.get("out_stride", count) == outputs


@pytest.mark.parametrize("rows", [3, 4, 18])
@pytest.mark.parametrize(
    ("activation", "block", "lie_as"),
    [
        ("fp8_tensor", (208, 1536), "one"), ("fp8_tensor", (1, 1536), "rows"), ("fp8_token", (1, 1536), "rows"),
        ("fp8_token", (208, 1536), "rows"), ("fp8_group", (128, 128), "blocks"),
        ("fp8_group_e8m0", (128, 128), "blocks"),
    ],
)  # fmt: skip
def test_what_cublaslt_is_given(activation: str, block: tuple[int, int], lie_as: str, rows: int) -> None:
    """The input rounded, its scales, and one scale of the weight for each output, where the launch says that they are:
    together they are the definition's."""
    draw = Draw(torch.float16, DEVICE)
    scale = draw.uniform(1, low=0.004, high=0.008, dtype=torch.float32) if activation == "fp8_tensor" else None
    x = draw.normal(1, rows, 2 * 1536)[..., 1::2]
    x[0, 1] = 0
    weight = quantised.fp8(draw, 208, 1536, block)
    sample = quantised.call(x, weight, input_scale=scale, activation=activation)
    use = use_of_tensors("precast.quantised_linear", 1, sample)
    assert float8.scales_of(use) == lie_as
    rounding, product = float8.launches(use)
    memory = torch.full((int(float8.workspace(use)),), 0x7F, dtype=torch.uint8, device=DEVICE)  # of NaN

    args = tuple(
        arg._replace(tensor="out.0") if isinstance(arg, Pointer) and arg.tensor == "workspace" else arg
        for arg in rounding.args
    )
    Launched([rounding._replace(args=args)])(**{name: x for name, x in sample.items() if x is not None}, out=memory)

    def held(arg: Any, count: int, dtype: torch.dtype) -> torch.Tensor:
        """What an argument of the product begins with."""
        if arg.tensor != "workspace":
            found: torch.Tensor = sample[arg.tensor].flatten()[:count]
            return found
        return memory[arg.offset :].view(dtype)[:count]

    _, input, _, _, of_weight, of_input, *_ = product.args
    found = held(input, rows * 1536, torch.float8_e4m3fn).view(rows, 1536).float()
    if lie_as == "blocks":
        whole = rows // 4 * 4
        scales = held(of_input, 12 * -(-rows // 4) * 4, torch.float32)
        parts = (scales[: 12 * whole].view(12, whole), scales[12 * whole :].view(12, -1)[:, : rows - whole])
        found = found * torch.cat(parts, 1).t().repeat_interleave(128, 1)
    else:
        found = found * held(of_input, 1 if lie_as == "one" else rows, torch.float32).view(-1, 1)
        weights = weight["scales"].flatten().expand(1 if lie_as == "one" else 208)
        assert torch.equal(held(of_weight, len(weights), torch.float32), weights)
    expected = quantise_input(x[0].float(), activation, scale)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("inputs", [96, 256])
def test_inputs_of_no_group_count_for_nothing(inputs: int, same: Callable[..., None]) -> None:
    """Those of one group together, too."""
    draw = Draw(torch.float16, DEVICE)
    weight = quantised.gptq(draw, 40, inputs, inputs // 2, order=True)
    weight["groups"] = (torch.arange(inputs, device=DEVICE) // (inputs // 2)).int()
    if inputs == 96:
        weight["groups"][5] = -1
    weight["groups"][inputs // 2 :] = 2
    check(quantised.call(draw.normal(3, inputs), weight), 3, same)


def test_an_input_with_gaps_is_laid_side_by_side(same: Callable[..., None]) -> None:
    draw = Draw(torch.float16, DEVICE)
    check(quantised.call(draw.normal(1, 2, 5, 77)[:, :, 1:4], quantised.int8(draw, 9, 77)), 6, same)
