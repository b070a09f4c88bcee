"""Weights in few bits with 9 to 256 rows: which layers `tiles.cu` takes; its source on a CPU; on a GPU against the
definition."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from compiled_on_cpu import compiled
from op_samples import quantised
from op_samples.draw import Draw, Sample
from plain_source import plain_source

from precast.kernels import cuda_source
from precast.kernels.choices import fitting
from precast.kernels.launch import as_function, use_of_tensors
from precast.kernels.quantised_linear.quantised_linear import quantised_linear
from precast.kernels.quantised_linear.tiles import ROWS, plan_of, records
from precast.kernels.records import Launch, Record
from precast.kernels.use import Use

BLOCK_BYTES = 227 << 10
"""Shared memory that a block may have on Hopper."""
MULTIPROCESSOR_BYTES = 228 << 10
"""Of a multiprocessor, with 1 KiB for each block."""
HOPPER = (9, 0)
RECORDS = {record.name for record in records()}


# --- layers ------------------------------------------------------------------------------------------------------


def fp8(rows: int, inputs: int) -> Callable[[Draw, int, int], Sample]:
    """In blocks of so many; 0: all there are."""
    return lambda draw, outputs, size: quantised.fp8(draw, outputs, size, (rows or outputs, inputs or size))


def packed(scales: torch.dtype = torch.bfloat16, **kind: Any) -> Callable[[Draw, int, int], Sample]:
    def drawn(draw: Draw, outputs: int, size: int) -> Sample:
        weight = quantised.packed(draw, outputs, size, **kind)
        return {**weight, "scales": weight["scales"].to(scales)}

    return drawn


FORMATS: dict[str, Callable[[Draw, int, int], Sample]] = {
    "fp8 of rows": fp8(1, 0),
    "fp8 of all": fp8(0, 0),
    "fp8 in blocks": fp8(128, 128),
    "packed4": packed(size=128),
    "packed4, short groups": packed(size=32),
    "packed4 of rows": packed(),
    "packed4, points": packed(size=128, zeros=True),
    "packed4, float16": packed(torch.float16, size=128),
    "packed4 of rows, points": packed(zeros=True),
    "packed8": packed(bits=8, size=128),
    "packed8, points": packed(bits=8, size=128, zeros=True),
    "mxfp4": quantised.mxfp4,
    "nvfp4": quantised.nvfp4,
}


def called(
    format: str, draw: Draw, rows: int, outputs: int, inputs: int, dtype: torch.dtype = torch.bfloat16
) -> Sample:
    """A layer's arguments, with a bias."""
    weight = FORMATS[format](draw, outputs, inputs)
    if weight["scales"].dtype == torch.bfloat16:
        weight["scales"] = weight["scales"].to(dtype)
    x = draw.normal(1, rows, inputs, dtype=dtype)
    return quantised.call(x, weight, bias=draw.normal(outputs, dtype=dtype))


def use_of(sample: Sample) -> Use:
    """Of a layer whose input alone is made in the step."""
    use = use_of_tensors("precast.quantised_linear", 1, sample)
    operands = {name: each._replace(is_activation=name == "input") for name, each in use.operands.items()}
    return use._replace(operands=operands, target=use.target._replace(device="cuda", capability=HOPPER))


def record_of(sample: Sample, rows: int) -> Record | None:
    """The record of this room that takes it in a step of so many tokens."""
    return next((each for each in fitting(use_of(sample), {"T": rows}) if each.name in RECORDS), None)


CPU = Draw(torch.float32, torch.device("cpu"))


@pytest.mark.parametrize("format", FORMATS)
def test_it_takes(format: str) -> None:
    def named(rows: int) -> str | None:
        record = record_of(called(format, CPU, rows, 128, 1024), rows)
        return record and record.name.rpartition("_")[2]

    assert [named(rows) for rows in (8, 9, 16, 17, 33, 65, 128, 129, 256, 257)] == [
        None, "16", "16", "32", "64", "128", "128", "256", "256", None,
    ]  # fmt: skip


def test_it_leaves_to_others_what_it_cannot_copy_or_scale() -> None:
    plain, in_blocks, nvfp4 = (called(each, CPU, 9, 128, 1024) for each in ("packed4", "fp8 in blocks", "nvfp4"))
    gaps = CPU.normal(1, 9, 2048, dtype=torch.bfloat16)[..., :1024]
    refused = {
        "inputs that are no multiple of 128": called("fp8 of rows", CPU, 9, 128, 1088),
        "rounded": {**in_blocks, "activation": "fp8_group"},
        "a global scale in bfloat16": {**nvfp4, "global_scale": nvfp4["global_scale"].bfloat16()},
        "points of eight bits, and an offset beyond them": called("packed8, points", CPU, 9, 128, 1024)
        | {"zero_offset": 2},
        "float32": {**plain, "input": CPU.normal(1, 9, 1024), "bias": CPU.normal(128)},
        "an input with gaps": {**plain, "input": gaps},
        "scales in float32, of fewer than 128 inputs": called("packed4, short groups", CPU, 9, 128, 1024)
        | {"scales": torch.ones(128, 32)},
    }  # fmt: skip

    assert record_of(plain, 9) is not None
    assert {name for name, sample in refused.items() if record_of(sample, 9)} == set()


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("in_steps", [False, True])
def test_plans_fit_into_shared_memory_and_hold_two_stages(rows: int, bits: int, in_steps: bool) -> None:
    for outputs, inputs in ((16, 128), (4096, 4096), (28672, 4096), (4096, 14336), (2048, 896), (152064, 5120)):
        plan = plan_of(rows, outputs, inputs, bits, in_steps=in_steps)

        assert plan.shared_bytes <= BLOCK_BYTES
        assert plan.at_once * (plan.shared_bytes + 1024) <= MULTIPROCESSOR_BYTES
        assert plan.w_stages >= 2 <= plan.x_stages
        assert inputs % (128 * plan.windows) == 0


def launches(sample: Sample, rows: int) -> tuple[Launch, ...]:
    record = record_of(sample, rows)
    assert record is not None
    assert not isinstance(record.runs, str)
    return record.runs(use_of(sample))


@pytest.mark.skipif(not cuda_source.is_installed(), reason="cuda-bindings are not installed")
@pytest.mark.parametrize("format", FORMATS)
def test_it_compiles_for_hopper(format: str) -> None:
    launch = launches(called(format, CPU, 65, 128, 1024), 65)[-1]

    found = cuda_source.compiled("quantised_linear/tiles.cu", tuple(launch.constants.items()), HOPPER)

    assert found.startswith(b"\x7fELF")


# --- its source on a CPU -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[float, int]]:
    """Runs the kernels' source: the largest error of a layer, and the checksum of the first row's results."""
    folder = tmp_path_factory.mktemp("tiles")
    (folder / "tiles.inc").write_text(plain_source("quantised_linear/tiles.cu"), encoding="utf-8")

    @cache
    def built(defines: str) -> Path:
        return compiled("tiles_on_cpu.cpp", folder / f"tiles{defines.replace(' ', '_')}", *defines.split())

    def execute(
        kind: str, rows: int, most: int, outputs: int, inputs: int, *, blocks: int, apart: bool = False
    ) -> tuple[float, int]:
        bits, in_steps = 4 if "4" in kind.split()[0] else 8, "-DSTEPS" in kind
        plan = plan_of(most, outputs, inputs, bits, in_steps=in_steps, blocks=blocks)
        numbers = (rows, outputs, inputs, plan.w_stages, plan.x_stages, plan.grid, plan.shared_bytes)
        more = f"-DCOLUMNS={plan.columns} -DWINDOWS={plan.windows} -DAT_ONCE={plan.at_once}"
        more += " -DSUMS_APART" if apart else ""
        done = subprocess.run(
            [built(f"{kind} {more}"), *map(str, numbers)], capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, f"{numbers}: {done.stdout} {done.stderr}"
        error, checksum = done.stdout.split()
        return float(error), int(checksum)

    return execute


KINDS = {
    "packed4": "-DPACKED4 -DOFFSET=8 -DGROUP=128 -DSCALED_ROWS=1 -DSCALE=0 -DBIAS",
    "packed4, points": "-DPACKED4 -DOFFSET=1 -DPOINTS -DGROUP=64 -DSCALED_ROWS=1 -DSCALE=0",
    "packed4, float32": "-DPACKED4 -DOFFSET=8 -DGROUP=128 -DSCALED_ROWS=1 -DSCALE=1 -DSTEPS",
    "packed4, scales of float16": "-DPACKED4 -DOFFSET=8 -DGROUP=128 -DSCALED_ROWS=1 -DSCALE=4 -DSTEPS",
    "packed4 of rows, scales of float16": "-DPACKED4 -DOFFSET=8 -DSCALED_ROWS=1 -DSCALE=4",
    "packed4 of rows": "-DPACKED4 -DOFFSET=8 -DSCALED_ROWS=1 -DSCALE=0",
    "packed4, float16": "-DPACKED4 -DFLOAT16 -DOFFSET=8 -DGROUP=32 -DSCALED_ROWS=1 -DSCALE=0",
    "mxfp4": "-DFP4 -DGROUP=32 -DSCALED_ROWS=1 -DSCALE=3 -DBIAS",
    "nvfp4": "-DFP4 -DGROUP=16 -DSCALED_ROWS=1 -DSCALE=2 -DGLOBAL=2",
    "nvfp4, divided": "-DFP4 -DGROUP=16 -DSCALED_ROWS=1 -DSCALE=2 -DGLOBAL=1 -DDIVIDES",
    "float8 in blocks": "-DFLOAT8 -DGROUP=128 -DSCALED_ROWS=32 -DSCALE=1 -DSTEPS",
    "float8 of rows": "-DFLOAT8 -DSCALED_ROWS=1 -DSCALE=1 -DBIAS",
    "int8": "-DINT8 -DSCALED_ROWS=1 -DSCALE=1",
    "packed8": "-DINT8 -DOFFSET=128 -DGROUP=32 -DSCALED_ROWS=1 -DSCALE=0",
    "packed8, points": "-DINT8 -DOFFSET=1 -DPOINTS -DGROUP=128 -DSCALED_ROWS=1 -DSCALE=0",
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_source_on_a_cpu(on_cpu: Callable[..., tuple[float, int]], kind: str) -> None:
    """Tiles that one block has, and that two or three have; the last one isn't full."""
    for rows, outputs, inputs, blocks in ((9, 150, 1024, 3), (16, 24, 256, 2)):
        error, _ = on_cpu(KINDS[kind], rows, 16, outputs, inputs, blocks=blocks)

        assert error < 2**-7


def test_source_on_a_cpu_with_two_tiles_of_rows(on_cpu: Callable[..., tuple[float, int]]) -> None:
    error, _ = on_cpu(KINDS["float8 in blocks"], 137, 256, 136, 512, blocks=3, apart=True)

    assert error < 2**-7


@pytest.mark.parametrize("most", ROWS)
def test_source_on_a_cpu_gives_a_row_the_same_bits_among_others(
    on_cpu: Callable[..., tuple[float, int]], most: int
) -> None:
    """Also where a kernel of its own adds up the parts of tiles."""
    rows = min(most - 3, 40)
    ways = ((rows, False), (1, True))

    found = [on_cpu(KINDS["packed4"], each, most, 136, 512, blocks=3, apart=apart) for each, apart in ways]

    assert all(error < 2**-7 for error, _ in found)
    assert len({checksum for _, checksum in found}) == 1


# --- on a GPU ----------------------------------------------------------------------------------------------------


@pytest.fixture
def gpu() -> Draw:
    """Numbers on the GPU, if it is one that the kernels run on."""
    if torch.cuda.get_device_capability() != HOPPER:
        pytest.skip(f"needs compute capability 9.0, and this GPU has {torch.cuda.get_device_capability()}")
    return Draw(torch.float32, torch.device("cuda"))


def run(sample: Sample, rows: int) -> torch.Tensor:
    """Into memory full of NaN."""
    record = record_of(sample, rows)
    assert record is not None
    out = torch.full((1, rows, sample["weight"].shape[0]), torch.nan, dtype=sample["input"].dtype, device="cuda")
    as_function(record)(**sample, out=out)
    return out


@pytest.mark.gpu
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(("outputs", "inputs"), [(24, 128), (2000, 1280), (4104, 4096)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products(gpu: Draw, format: str, outputs: int, inputs: int, dtype: torch.dtype) -> None:
    """Each row has the same bits as among fewer."""
    for rows in (9, 32, 50, 128, 200):
        sample = called(format, gpu, rows, outputs, inputs, dtype)
        expected = quantised_linear(**{**sample, "input": sample["input"].float(), "bias": sample["bias"].float()})

        together = run(sample, rows)

        # Values are rounded to the input's type, as the definition rounds them for such an input.
        assert (together.float() - expected).norm() < 6e-3 * expected.norm()
        fewer = rows - 1 if rows > 9 else rows
        assert torch.equal(run({**sample, "input": sample["input"][:, :fewer]}, fewer), together[:, :fewer])


@pytest.mark.gpu
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("rows", [12, 60, 120])
def test_a_chain_of_layers_gives_the_same_each_time(gpu: Draw, format: str, rows: int) -> None:
    """Each layer's kernels begin while those in front still run, also where blocks have whole tiles alone (512)."""
    sizes = ((512, 1024), (1024, 512), (1024, 1024), (1024, 1024)) * 2
    layers = [called(format, gpu, rows, *size) for size in sizes]

    def chained() -> torch.Tensor:
        x = layers[0]["input"]
        for each in layers:
            x = run({**each, "input": x}, rows)
        return x

    first = chained()
    assert torch.isfinite(first).all()
    assert all(torch.equal(chained(), first) for _ in range(4))
