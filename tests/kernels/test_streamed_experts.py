"""The weight stream over experts in four bits: which it takes, what its source computes on a CPU, and on a GPU against
the definition."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from compiled_on_cpu import compiled
from op_samples.draw import Draw, Sample
from op_samples.quantised import fp8, mxfp4, nvfp4, packed
from op_samples.quantised_experts import CLAMPED, Make, experts
from plain_source import plain_source

from precast.kernels import cuda_source
from precast.kernels.choices import fitting
from precast.kernels.launch import as_function, use_of_tensors
from precast.kernels.quantised_experts import streamed
from precast.kernels.quantised_experts.quantised_experts import QUANTISED_EXPERTS
from precast.kernels.use import Use

FILE = "quantised_experts/stream.cu"
HOPPER = (9, 0)
RECORD = streamed.RECORDS[0]
BLOCK_BYTES = 227 << 10
"""Shared memory that a block may have on Hopper."""
MAKES: dict[str, Make] = {
    "mxfp4": mxfp4, "nvfp4": nvfp4, "nvfp4 in rows": partial(nvfp4, rows=True),
    "nvfp4_divided": partial(nvfp4, divided=True), "packed4": partial(packed, size=32), "packed4 of rows": packed,
}  # fmt: skip
each_format = pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)


def sample_of(draw: Draw, make: Make, tokens: int = 3, width: int = 192, inner: int = 320, **more: Any) -> Sample:
    """A call in bfloat16, of experts as GPT-OSS has them."""
    return {**experts(draw, make, tokens, 2, 3, width, inner, **{"bias": True, **more}), **CLAMPED}


def use_of(sample: Sample) -> Use:
    """Of a step that makes the rows and what the router gives."""
    use = use_of_tensors("precast.quantised_experts", 1, sample)
    made = ("x", "expert_ids", "expert_weights")
    operands = {name: each._replace(is_activation=name in made) for name, each in use.operands.items()}
    return use._replace(operands=operands, target=use.target._replace(device="cuda", capability=HOPPER))


def is_taken(sample: Sample, tokens: int = 3) -> bool:
    return any(record in streamed.RECORDS for record in fitting(use_of(sample), {"T": tokens}))


def sizes_taken(sample: Sample) -> list[int]:
    return [tokens for tokens in (0, 1, 2, 8, 9, 16, 17, 32, 33, 64, 65) if is_taken(sample, tokens)]


CPU = Draw(torch.bfloat16, torch.device("cpu"))


@pytest.mark.parametrize("format", MAKES)
def test_it_takes(format: str) -> None:
    assert sizes_taken(sample_of(CPU, MAKES[format])) == [1, 2, 8, 9, 16, 17, 32, 33, 64]


@pytest.mark.parametrize(("top_k", "most"), [(4, 64), (8, 32), (16, 8), (17, 0)])
def test_a_block_sorts_all_pairs(top_k: int, most: int) -> None:
    sample = {**experts(CPU, mxfp4, 3, top_k, 20, 192, 320), **CLAMPED}

    assert max(sizes_taken(sample), default=0) == most


def test_it_leaves_to_others_what_it_cannot_copy_or_scale() -> None:
    refused = {
        "float8": sample_of(CPU, partial(fp8, block=(32, 64))),
        "points": sample_of(CPU, partial(packed, size=32, zeros=True)),
        "groups of 16": sample_of(CPU, partial(packed, size=16)),
        "an odd number of scales in a row": sample_of(CPU, mxfp4, width=160),
        "rows that are no multiple of 16 bytes": sample_of(CPU, packed, width=200),
        "rows that are rounded": {**sample_of(CPU, packed), "rounding": "int8_token"},
        "float32": sample_of(Draw(torch.float32, torch.device("cpu")), mxfp4),
        "columns": {**sample_of(CPU, mxfp4), "x": CPU.normal(192, 3).t()},
    }  # fmt: skip

    assert {name for name, sample in refused.items() if is_taken(sample)} == set()


each_step = pytest.mark.parametrize("few", streamed.STEPS, ids=lambda few: str(few.tokens))


@each_step
@pytest.mark.parametrize(
    ("group", "scales", "size_k"),
    [(32, 90, 2880), (16, 128, 2048), (128, 0, 4096), (None, 0, 768), (None, 0, 2048)],
)
def test_ways_have_four_pieces_in_shared_memory(group: int | None, scales: int, size_k: int, few: streamed.Few) -> None:
    way = streamed.way_of(group, scales, size_k, few)

    assert way is not None
    assert way.stages >= 4
    assert way.shared_bytes <= BLOCK_BYTES
    assert size_k // way.pieces % way.step == 0


def test_rows_that_are_too_long_for_registers_are_left_to_others() -> None:
    assert streamed.way_of(32, 512, 16384) is None


@pytest.mark.skipif(not cuda_source.is_installed(), reason="cuda-bindings are not installed")
@each_step
@each_format
def test_it_compiles_for_hopper(make: Make, few: streamed.Few) -> None:
    up, down, _ = streamed.run(use_of(sample_of(CPU, make)), few)

    for launch in (up, down):
        assert launch.shared_bytes <= BLOCK_BYTES
        assert cuda_source.compiled(FILE, tuple(launch.constants.items()), HOPPER).startswith(b"\x7fELF")


# --- its source on a CPU -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[float, int]]:
    """Runs the kernel's source: the largest error of a variant and the checksum of the first pair's row."""
    folder = tmp_path_factory.mktemp("experts")
    (folder / "experts.inc").write_text(plain_source(FILE), encoding="utf-8")

    @cache
    def built(defines: str) -> Path:
        program = folder / f"experts{len(list(folder.iterdir()))}"
        return compiled("experts_on_cpu.cpp", program, *defines.split())

    def execute(defines: str, tokens: int, ids: int, blocks: int) -> tuple[float, int]:
        numbers = (tokens, ids, blocks)
        done = subprocess.run(
            [built(defines), *map(str, numbers)], capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0, f"{numbers}: {done.stdout} {done.stderr}"
        error, checksum = done.stdout.split()
        return float(error), int(checksum)

    return execute


ANY, SOME_OF_NONE, ONE, NONE = range(4)
"""How ids are drawn: `experts_on_cpu.cpp` says."""
GATED = "-DOF_TOKENS -DIDS_ARE_NEW -DGATED -DACTIVATION=silu -DALPHA=1.702 -DLIMIT=0.7 -DPLUS=1.0"
COMMON = "-DEXPERTS=4 -DTOP_K=2 -DBIAS"
FEW, MORE = "-DCOLUMNS=8 -DMOST_PAIRS=128", "-DCOLUMNS=16 -DMOST_PAIRS=48"
PACKED4 = f"{COMMON} -DPACKED4 -DZERO=8"
VARIANTS = {
    "mxfp4": f"{COMMON} -DFP4 -DGROUP=32 -DSIZE_N=40 -DSIZE_K=576 -DPIECES=1 -DSTAGES=3 -DIN_FLIGHT=1"
    f" -DSTEP=32 {GATED}",
    "mxfp4 in pieces": f"{COMMON} -DFP4 -DGROUP=32 -DSIZE_N=24 -DSIZE_K=1216 -DPIECES=2 -DSTAGES=4 -DIN_FLIGHT=2"
    " -DSTEP=32 -DWIDE",
    "nvfp4": f"{COMMON} -DFP4 -DGROUP=16 -DFLOAT8_SCALES -DWHOLE=1 -DSIZE_N=24 -DSIZE_K=96 -DPIECES=1 -DSTAGES=3"
    " -DIN_FLIGHT=3 -DSTEP=32 -DWIDE -DACTIVATION=relu2 -DALPHA=1.0",
    "nvfp4, divided in rows": f"{COMMON} -DFP4 -DGROUP=16 -DFLOAT8_SCALES -DWHOLE=2 -DDIVIDED -DSIZE_N=16 -DSIZE_K=64"
    f" -DPIECES=1 -DSTAGES=2 -DIN_FLIGHT=2 -DSTEP=32 {GATED}",
    "packed4": f"{PACKED4} -DGROUP=128 -DSCALE_BYTES=2 -DSIZE_N=24 -DSIZE_K=1280 -DPIECES=2 -DSTAGES=3 -DIN_FLIGHT=1"
    f" -DSTEP=64 {GATED}",
    "packed4 of rows": f"{PACKED4} -DSCALE_BYTES=4 -DSIZE_N=24 -DSIZE_K=96 -DPIECES=1 -DSTAGES=2 -DIN_FLIGHT=2"
    " -DSTEP=32 -DWIDE",
}  # fmt: skip


@pytest.mark.parametrize("columns", [FEW, MORE], ids=["few", "more"])
@pytest.mark.parametrize("defines", VARIANTS.values(), ids=VARIANTS)
def test_source_on_a_cpu(on_cpu: Callable[..., tuple[float, int]], defines: str, columns: str) -> None:
    """A pair's row has the same bits whatever other pairs there are, and the grid."""
    steps = ((1, ANY, 1), (1, ANY, 3), (5, SOME_OF_NONE, 2), (8, ANY, 3), (8 if columns == FEW else 23, ONE, 1))

    found = [on_cpu(f"{defines} {columns}", *step) for step in steps]

    assert max(error for error, _ in found) < (2**-16 if "WIDE" in defines else 1.1 * 2**-8)
    assert len({checksum for _, checksum in found}) == 1


def test_source_on_a_cpu_without_experts(on_cpu: Callable[..., tuple[float, int]]) -> None:
    assert on_cpu(f"{VARIANTS['mxfp4']} {FEW}", 3, NONE, 2) == (0.0, 0)


# --- on a GPU ----------------------------------------------------------------------------------------------------


@pytest.fixture
def gpu() -> Draw:
    """Numbers on the GPU, if it is one that the weight stream runs on."""
    if torch.cuda.get_device_capability() != HOPPER:
        pytest.skip(f"needs compute capability 9.0, and this GPU has {torch.cuda.get_device_capability()}")
    return Draw(torch.bfloat16, torch.device("cuda"))


def on_gpu(sample: Sample, few: streamed.Few = streamed.FEW) -> torch.Tensor:
    record = msgspec.structs.replace(RECORD, runs=partial(streamed.run, few=few))
    found: torch.Tensor = as_function(record)(**sample)
    return found


@pytest.mark.gpu
@each_format
@pytest.mark.parametrize("tokens", [1, 2, 8])
def test_it_is_the_definition(make: Make, tokens: int, gpu: Draw, same: Callable[..., None]) -> None:
    """With ids of no expert, and experts that two of a token's pairs go to."""
    sample = sample_of(gpu, make, tokens)
    sample["expert_ids"] = gpu.integers(-1, 5, tokens, 2)
    at_home = {name: x.cpu() if isinstance(x, torch.Tensor) else x for name, x in sample.items()}

    same(QUANTISED_EXPERTS, on_gpu(sample).cpu(), QUANTISED_EXPERTS.reference(**at_home))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (mxfp4, (2880, 2880)), (nvfp4, (2048, 768)), (partial(packed, size=128), (4096, 1536)),
        (nvfp4, (7168, 2048)),
    ],
    ids=["gpt-oss", "qwen3 in nvfp4", "packed4", "deepseek in nvfp4"],
)  # fmt: skip
def test_it_is_the_definition_of_models(
    make: Make, shape: tuple[int, int], gpu: Draw, same: Callable[..., None]
) -> None:
    sample = sample_of(gpu, make, 8, *shape)
    at_home = {name: x.cpu() if isinstance(x, torch.Tensor) else x for name, x in sample.items()}

    same(QUANTISED_EXPERTS, on_gpu(sample).cpu(), QUANTISED_EXPERTS.reference(**at_home))


@pytest.mark.gpu
@each_format
def test_pairs_of_more_tokens_are_the_definition(make: Make, gpu: Draw, same: Callable[..., None]) -> None:
    """Of which experts have more than 16, and some none."""
    sample = sample_of(gpu, make, 60)
    sample["expert_ids"] = gpu.integers(-1, 5, 60, 2)
    at_home = {name: x.cpu() if isinstance(x, torch.Tensor) else x for name, x in sample.items()}

    same(QUANTISED_EXPERTS, on_gpu(sample, streamed.MORE).cpu(), QUANTISED_EXPERTS.reference(**at_home))


@pytest.mark.gpu
def test_a_token_has_the_same_bits_among_others(gpu: Draw) -> None:
    sample = sample_of(gpu, mxfp4, 8, 2880, 2880)
    alone = {**sample, **{name: sample[name][5:6] for name in ("x", "expert_ids", "expert_weights")}}

    assert torch.equal(on_gpu(alone)[0], on_gpu(sample)[5])
