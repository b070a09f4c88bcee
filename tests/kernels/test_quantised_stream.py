"""The weight stream over weights in few bits: which layers it takes; on a GPU against the definition.

What its source computes on a CPU: `test_linear.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from compiled_launches import resource_usage
from op_samples import quantised
from op_samples.draw import Draw, Sample

from precast.kernels import cuda_source
from precast.kernels.choices import fitting
from precast.kernels.launch import as_function, use_of_tensors
from precast.kernels.quantised_linear.quantised_linear import quantised_linear
from precast.kernels.quantised_linear.streamed import records
from precast.kernels.records import Launch, Record
from precast.kernels.use import Use

BLOCK_BYTES = 227 << 10
"""Shared memory that a block may have on Hopper."""
RECORDS = tuple(records())
HOPPER = (9, 0)


def fp8(block: tuple[int, int], activation: str = "none") -> Callable[[Draw, int, int], Sample]:
    """Of rows with `block` of one row, or of all rows with one of 0."""

    def drawn(draw: Draw, outputs: int, inputs: int) -> Sample:
        weight = quantised.fp8(draw, outputs, inputs, (block[0] or outputs, block[1] or inputs))
        return {**weight, "activation": activation}

    return drawn


def packed(
    size: int | None = None, dtype: torch.dtype = torch.bfloat16, *, bits: int = 4, **more: Any
) -> Callable[[Draw, int, int], Sample]:
    """With `zeros`, or less `zero_offset`, which are half of the values' range without."""

    def drawn(draw: Draw, outputs: int, inputs: int) -> Sample:
        offset = {name: more[name] for name in ("zero_offset",) if name in more}
        weight = quantised.packed(draw, outputs, inputs, bits, size=size, zeros=more.get("zeros", False))
        return {**weight, **offset, "scales": weight["scales"].to(dtype)}

    return drawn


def int8(block: tuple[int, int] | None = None) -> Callable[[Draw, int, int], Sample]:
    return lambda draw, outputs, inputs: quantised.int8(draw, outputs, inputs, block)


def nvfp4(**more: bool) -> Callable[[Draw, int, int], Sample]:
    return lambda draw, outputs, inputs: quantised.nvfp4(draw, outputs, inputs, **more)


FORMATS: dict[str, Callable[[Draw, int, int], Sample]] = {
    "fp8 of rows": fp8((1, 0)),
    "fp8 of all": fp8((0, 0)),
    "fp8 in blocks": fp8((128, 128)),
    "fp8 in groups": fp8((1, 256)),
    "fp8 of rows, by token": fp8((1, 0), "fp8_token"),
    "fp8 of all, by tensor": fp8((0, 0), "fp8_tensor"),
    "fp8 in blocks, by group": fp8((128, 128), "fp8_group"),
    "fp8 in blocks, by powers of two": fp8((128, 128), "fp8_group_e8m0"),
    "packed4": packed(128),
    "packed4, short": packed(64),
    "packed4 of rows": packed(),
    "packed4, float32": packed(128, torch.float32),
    "packed4, float16": packed(128, torch.float16),
    "packed4 of rows, float16": packed(dtype=torch.float16),
    "packed4, shorter than a step": packed(32),
    "packed4, points": packed(128, zeros=True),
    "packed4, points and more": packed(64, torch.float32, zeros=True, zero_offset=1),
    "packed8": packed(128, bits=8),
    "packed8 of rows": packed(bits=8),
    "packed8, points": packed(128, bits=8, zeros=True),
    "int8 of rows": int8(),
    "int8 in blocks": int8((128, 128)),
    "mxfp4": quantised.mxfp4,
    "nvfp4": nvfp4(),
    "nvfp4 of rows": nvfp4(rows=True),
    "nvfp4, divided": nvfp4(divided=True),
}


def called(
    format: str, draw: Draw, rows: int, outputs: int, inputs: int, *, bias: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> Sample:  # fmt: skip
    """A layer's arguments."""
    weight = FORMATS[format](draw, outputs, inputs)
    if weight["scales"].dtype == torch.bfloat16:
        weight["scales"] = weight["scales"].to(dtype)
    activation = weight.pop("activation", "none")
    more: dict[str, Any] = {"bias": draw.normal(outputs, dtype=dtype)} if bias else {}
    if activation == "fp8_tensor":
        more["input_scale"] = draw.of([0.013], torch.float32)
    x = draw.normal(1, rows, inputs, dtype=dtype)
    return quantised.call(x, weight, activation=activation, **more)


def use_of(sample: Sample) -> Use:
    """Of a layer whose input alone is made in the step."""
    use = use_of_tensors("precast.quantised_linear", 1, sample)
    operands = {name: each._replace(is_activation=name == "input") for name, each in use.operands.items()}
    return use._replace(operands=operands, target=use.target._replace(device="cuda", capability=HOPPER))


def taken(sample: Sample, rows: int) -> list[str]:
    """The names of the stream's records that take it."""
    names = {record.name for record in RECORDS}
    return [record.name for record in fitting(use_of(sample), {"T": rows}) if record.name in names]


CPU = Draw(torch.float32, torch.device("cpu"))


@pytest.mark.parametrize("format", FORMATS)
def test_it_takes(format: str) -> None:
    names = [taken(called(format, CPU, rows, 128, 1024), rows) for rows in (1, 2, 3, 8, 9)]

    assert names == [[f"cuda.quantised_linear_to_{most}"] for most in (1, 2, 8, 8)] + [[]]


def test_it_leaves_to_others_what_it_cannot_copy_or_scale() -> None:
    rows, blocks = (called(format, CPU, 1, 128, 1024) for format in ("fp8 of rows", "fp8 in blocks"))
    short, long = CPU.normal(1, 1, 1024, dtype=torch.bfloat16), CPU.normal(1, 1, 4096, dtype=torch.bfloat16)
    refused = {
        "points of rows": quantised.call(short, quantised.packed(CPU, 128, 1024, zeros=True)),
        "points of int8": quantised.call(short, quantised.int8(CPU, 128, 1024, (128, 128), zeros=True)),
        "groups of inputs anywhere": quantised.call(short, quantised.packed(CPU, 128, 1024, size=128, order=True)),
        "words of a column": quantised.call(short, quantised.gptq(CPU, 128, 1024, 128)),
        "groups of 16": quantised.call(long, quantised.packed(CPU, 128, 4096, size=16)),
        "groups of 32 of eight bits": quantised.call(long, quantised.packed(CPU, 128, 4096, 8, size=32)),
        "another offset of eight bits": {**called("packed8 of rows", CPU, 1, 128, 1024), "zero_offset": 127},
        "powers for a row that are no multiple of 16 bytes": called("mxfp4", CPU, 1, 128, 1152),
        "a whole scale of another type": {
            **called("nvfp4", CPU, 1, 128, 1024), "global_scale": CPU.normal(1, 1, dtype=torch.float16)},
        "inputs that are no multiple of 64": called("fp8 of rows", CPU, 1, 128, 1000),
        "scales of a row that are no multiple of 16 bytes": called("packed4", CPU, 1, 128, 512),
        "rounded in groups, and scales of rows": {**rows, "activation": "fp8_group"},
        "rounded by powers of two, and scales of rows": {**rows, "activation": "fp8_group_e8m0"},
        "rounded in rows, and scales of blocks": {**blocks, "activation": "fp8_token"},
        "rounded otherwise than the weight": {**called("packed4", CPU, 1, 128, 1024), "activation": "fp8_token"},
        "float32": {**called("packed4", CPU, 1, 128, 1024), "input": CPU.normal(1, 1, 1024)},
    }  # fmt: skip

    assert {name for name, sample in refused.items() if taken(sample, 1)} == set()


def test_rows_that_leave_no_room_for_a_ring_are_left_to_others() -> None:
    """Scales of 832 groups for each of 16 rows, in slots for all tiles of a pass, are more than shared memory."""
    meta = Draw(torch.float32, torch.device("meta"))
    shapes = {"8B": (4096, 14336), "of Mistral Large": (12288, 28672), "405B": (16384, 53248)}
    names = {name: taken(called("packed4, short", meta, 8, *shape), 8) for name, shape in shapes.items()}

    assert names == {
        "8B": ["cuda.quantised_linear_to_8"],
        "of Mistral Large": ["cuda.quantised_linear_to_8"],
        "405B": [],
    }


def launches(record: Record, sample: Sample) -> tuple[Launch, ...]:
    assert not isinstance(record.runs, str)
    return record.runs(use_of(sample))


@pytest.mark.skipif(not cuda_source.is_installed(), reason="cuda-bindings are not installed")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("format", FORMATS)
def test_it_compiles_for_hopper(format: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """With as few registers as its threads may have, and without more memory for them."""
    launch = launches(RECORDS[-1], called(format, CPU, 8, 128, 1024, bias=True, dtype=dtype))[-1]
    teams = launch.constants["TEAMS"]
    most = 4 if launch.block > 512 else 8
    for tiles, keeps_x in ((teams, launch.constants["KEEPS_X"]), (teams, False), (most, False)):
        constants = {**launch.constants, "PASS": tiles, "KEEPS_X": keeps_x}
        cubin = cuda_source.compiled("linear/stream.cu", tuple(constants.items()), HOPPER)
        used = resource_usage(cubin, tmp_path)

        assert used["REG"] * launch.block <= 65536
        assert (used["STACK"], used["LOCAL"]) == (0, 0)


# --- on a GPU ----------------------------------------------------------------------------------------------------


@pytest.fixture
def gpu() -> Draw:
    """Numbers on the GPU, if it is one that the weight stream runs on."""
    if torch.cuda.get_device_capability() != HOPPER:
        pytest.skip(f"needs compute capability 9.0, and this GPU has {torch.cuda.get_device_capability()}")
    return Draw(torch.float32, torch.device("cuda"))


def run(sample: Sample, rows: int) -> torch.Tensor:
    """By the record for so many rows, into memory full of NaN."""
    record = next(each for each in RECORDS if rows <= (each.sizes["T"][1] or 0))
    outputs = sample["weight"].shape[0]
    out = torch.full((1, rows, outputs), torch.nan, dtype=sample["input"].dtype, device="cuda")
    as_function(record)(**sample, out=out)
    return out


@pytest.mark.gpu
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(("outputs", "inputs"), [(24, 1024), (2000, 4096), (4097, 14336)])
def test_products(gpu: Draw, format: str, outputs: int, inputs: int) -> None:
    """Of 1 to 8 rows, of which each has the same bits as alone."""
    sample = called(format, gpu, 8, outputs, inputs, bias=True)
    expected = quantised_linear(**{**sample, "input": sample["input"].float(), "bias": sample["bias"].float()})
    together = run(sample, 8)

    torch.testing.assert_close(together.float(), expected, rtol=1e-2, atol=1e-2)
    for rows in (1, 2, 3, 7):
        assert torch.equal(run({**sample, "input": sample["input"][:, :rows]}, rows), together[:, :rows])


@pytest.mark.gpu
@pytest.mark.parametrize("format", FORMATS)
def test_products_in_float16(gpu: Draw, format: str) -> None:
    sample = called(format, gpu, 8, 2000, 4096, bias=True, dtype=torch.float16)
    expected = quantised_linear(**{**sample, "input": sample["input"].float(), "bias": sample["bias"].float()})

    torch.testing.assert_close(run(sample, 8).float(), expected, rtol=2e-3, atol=2e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("format", FORMATS)
def test_a_chain_of_layers_gives_the_same_each_time(gpu: Draw, format: str) -> None:
    """Each layer's kernels begin while those in front still run."""
    layers = [called(format, gpu, 3, 1024, 1024) for _ in range(12)]

    def chained() -> torch.Tensor:
        x = layers[0]["input"]
        for each in layers:
            x = run({**each, "input": x}, 3)
        return x

    first = chained()
    expected = layers[0]["input"]
    for each in layers:
        expected = quantised_linear(**{**each, "input": expected})
    assert torch.isfinite(first).all()
    largest = float(expected.float().abs().max())
    torch.testing.assert_close(first.float(), expected.float(), rtol=0.1, atol=0.1 * largest)
    assert all(torch.equal(chained(), first) for _ in range(5))
