"""Experts in few bits with more tokens: which layers `tiles.cu` takes; its source on a CPU; on a GPU against the
definition."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from compiled_on_cpu import compiled
from op_samples.draw import Draw, Sample
from op_samples.quantised import fp8, int8, mxfp4, nvfp4, packed
from op_samples.quantised_experts import CLAMPED, Make, experts
from plain_source import plain_source

from precast.kernels import cuda_source
from precast.kernels.choices import fitting
from precast.kernels.launch import as_function, use_of_tensors
from precast.kernels.quantised_experts import tiles
from precast.kernels.quantised_experts.quantised_experts import QUANTISED_EXPERTS
from precast.kernels.records import Record
from precast.kernels.use import Use

FILE = "quantised_experts/tiles.cu"
HOPPER = (9, 0)
BLOCK_BYTES = (227 << 10, 113 << 10)
"""Shared memory that a block may have on Hopper, alone on a multiprocessor, and where there are two."""


def in_float32(make: Make) -> Make:
    """With scales of that type."""

    def made(draw: Draw, *sizes: int) -> Sample:
        weight = make(draw, *sizes)
        return {**weight, "scales": weight["scales"].float()}

    return made


MAKES: dict[str, Make] = {
    "mxfp4": mxfp4, "nvfp4": nvfp4, "nvfp4 in rows": partial(nvfp4, rows=True),
    "nvfp4_divided": partial(nvfp4, divided=True), "packed4": partial(packed, size=32), "packed4 of rows": packed,
    "packed4, float32": in_float32(partial(packed, size=128)), "packed8": partial(packed, bits=8, size=64),
    "fp8 in blocks": partial(fp8, block=(128, 128)), "fp8 of rows": partial(fp8, block=(1, 256)), "int8": int8,
}  # fmt: skip
each_format = pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)


def sample_of(draw: Draw, make: Make, tokens: int = 70, width: int = 256, inner: int = 256, **more: Any) -> Sample:
    """A call of experts as GPT-OSS has them; scales that aren't float32 are of the rows' type."""
    sample = {**experts(draw, make, tokens, 2, 3, width, inner, **{"bias": True, **more}), **CLAMPED}
    for name in ("up_scales", "down_scales"):
        if sample[name].dtype == torch.bfloat16:
            sample[name] = sample[name].to(sample["x"].dtype)
    return sample


def use_of(sample: Sample) -> Use:
    """Of a step that makes the rows and what the router gives."""
    use = use_of_tensors("precast.quantised_experts", 1, sample)
    made = ("x", "expert_ids", "expert_weights")
    operands = {name: each._replace(is_activation=name in made) for name, each in use.operands.items()}
    return use._replace(operands=operands, target=use.target._replace(device="cuda", capability=HOPPER))


def record_of(sample: Sample, tokens: int) -> Record | None:
    """The record of this room that takes it in a step of so many tokens."""
    return next((each for each in fitting(use_of(sample), {"T": tokens}) if each in tiles.RECORDS), None)


CPU = Draw(torch.bfloat16, torch.device("cpu"))


@pytest.mark.parametrize("format", MAKES)
def test_it_takes(format: str) -> None:
    sample = sample_of(CPU, MAKES[format])
    found = {tokens: record_of(sample, tokens) for tokens in (16, 17, 64, 65, 128, 129, 1024, 4097)}

    assert {tokens: each and each.name.rpartition("_")[2] for tokens, each in found.items()} == {
        16: None, 17: "64", 64: "64", 65: "128", 128: "128", 129: "256", 1024: "1024", 4097: "tiles",
    }  # fmt: skip


def test_it_leaves_to_others_what_it_cannot_copy_or_scale() -> None:
    refused = {
        "points": sample_of(CPU, partial(packed, size=32, zeros=True)),
        "groups of 16": sample_of(CPU, partial(packed, size=16)),
        "scales in float32 of fewer than 128": sample_of(CPU, in_float32(partial(packed, size=32))),
        "rows that are no multiple of 16 bytes": sample_of(CPU, packed, width=200),
        "rows that are rounded": {**sample_of(CPU, packed), "rounding": "int8_token"},
        "float32": sample_of(Draw(torch.float32, torch.device("cpu")), mxfp4),
        "columns": {**sample_of(CPU, mxfp4), "x": CPU.normal(256, 70).t()},
    }  # fmt: skip

    assert {name for name, sample in refused.items() if record_of(sample, 70)} == set()


@pytest.mark.parametrize("num_experts", [1, 8, 128, 1024])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("average", [0.5, 8.0, 64.0, 300.0])
@pytest.mark.parametrize("in_steps", [False, True])
def test_plans_fit_into_shared_memory_and_hold_two_stages(
    average: float, bits: int, num_experts: int, in_steps: bool
) -> None:
    plan = tiles.plan_of(average, bits, num_experts, in_steps=in_steps)

    assert plan.shared_bytes <= BLOCK_BYTES[plan.at_once - 1]
    assert plan.w_stages >= 2 <= plan.x_stages


def test_many_rows_have_tiles_of_two_bands_in_four_bits() -> None:
    plans = {
        "few rows": tiles.plan_of(200, 4, 32), "many": tiles.plan_of(201, 4, 32),
        "in eight bits": tiles.plan_of(201, 8, 32),
        "with sums that are scaled": tiles.plan_of(201, 4, 32, in_steps=True),
    }  # fmt: skip

    assert {name: (plan.columns, plan.bands, plan.at_once) for name, plan in plans.items()} == {
        "few rows": (64, 1, 2), "many": (128, 2, 1), "in eight bits": (128, 1, 1),
        "with sums that are scaled": (128, 1, 1),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("tokens", "num_experts", "columns"), [(1024, 16, 64), (1025, 16, 128), (4097, 16, 128), (4097, 64, 64)]
)
def test_a_record_has_tiles_for_its_largest_step(tokens: int, num_experts: int, columns: int) -> None:
    """Of two experts a token; that for any number for its smallest step."""
    sample = {**experts(CPU, mxfp4, 70, 2, num_experts, 256, 128), **CLAMPED}
    record = record_of(sample, tokens)

    assert record is not None
    assert not isinstance(record.runs, str)
    found = {each.constants.get("COLUMNS") for each in record.runs(use_of(sample))} - {None}
    assert found == {columns}


@pytest.mark.skipif(not cuda_source.is_installed(), reason="cuda-bindings are not installed")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@each_format
def test_it_compiles_for_hopper(make: Make, dtype: torch.dtype) -> None:
    sample = sample_of(Draw(dtype, torch.device("cpu")), make)

    launches = [each for each in tiles.run(use_of(sample), 1024) if f"/{FILE.rpartition('/')[2]}:" in each.kernel]

    assert len(launches) == 3
    for launch in launches:
        assert launch.shared_bytes <= BLOCK_BYTES[int(launch.constants["AT_ONCE"]) - 1]
        assert cuda_source.compiled(FILE, tuple(launch.constants.items()), HOPPER).startswith(b"\x7fELF")


# --- its source on a CPU -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[float, int]]:
    """Runs the kernels' source: the largest error of a variant, and the checksum of the first pair's row."""
    folder = tmp_path_factory.mktemp("expert_tiles")
    (folder / "tiles.inc").write_text(plain_source(FILE), encoding="utf-8")

    @cache
    def built(defines: str) -> Path:
        program = folder / f"tiles{len(list(folder.iterdir()))}"
        return compiled("expert_tiles_on_cpu.cpp", program, *defines.split())

    def execute(defines: str, tokens: int, ids: int, blocks: int) -> tuple[float, int]:
        numbers = (tokens, ids, blocks, BLOCK_BYTES["AT_ONCE=2" in defines])
        done = subprocess.run(
            [built(defines), *map(str, numbers)], capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0, f"{numbers}: {done.stdout} {done.stderr}"
        error, checksum = done.stdout.split()
        return float(error), int(checksum)

    return execute


ANY, SOME_OF_NONE, ONE, NONE = range(4)
"""How ids are drawn: `expert_tiles_on_cpu.cpp` says."""
GATED = "-DGATED -DACTIVATION=silu -DALPHA=1.702 -DLIMIT=0.7 -DPLUS=1.0 -DSTARTS_ARE_NEW"
FOUR, EIGHT = "-DWINDOWS=2 -DSTAGES=2 -DX_STAGES=3", "-DWINDOWS=1 -DSTAGES=3 -DX_STAGES=2"
COMMON = "-DEXPERTS=35 -DTOP_K=2 -DCOLUMNS=16 -DBANDS=1 -DAT_ONCE=2 -DSIZE_H=72"
VARIANTS = {
    # More experts than a warp has lanes; inputs that end within a window, and outputs within a tile.
    "mxfp4, laid": f"{COMMON} {FOUR} -DFP4 -DGROUP=32 -DSCALE=3 -DSCALED_ROWS=1 -DSIZE_N=72 -DSIZE_K=352 -DBIAS"
    f" -DLAYS=2 {GATED}",
    "mxfp4": f"{COMMON} {FOUR} -DFP4 -DGROUP=32 -DSCALE=3 -DSCALED_ROWS=1 -DSIZE_N=136 -DSIZE_K=64 -DWIDE -DBIAS",
    "nvfp4": f"{COMMON} {FOUR} -DFP4 -DGROUP=16 -DSCALE=2 -DSCALED_ROWS=1 -DWHOLE=1 -DSIZE_N=24 -DSIZE_K=96 -DWIDE",
    "nvfp4, divided in rows, laid": f"{COMMON} {FOUR} -DFP4 -DGROUP=16 -DSCALE=2 -DSCALED_ROWS=1 -DWHOLE=2 -DDIVIDED"
    f" -DSIZE_N=72 -DSIZE_K=64 -DLAYS=1 {GATED}",
    "packed4": f"{COMMON} {FOUR} -DPACKED4 -DOFFSET=8 -DGROUP=32 -DSCALE=0 -DSCALED_ROWS=1 -DSIZE_N=40 -DSIZE_K=320",
    "packed4, float16, laid": f"{COMMON} {FOUR} -DFLOAT16 -DPACKED4 -DOFFSET=8 -DSCALE=1 -DSCALED_ROWS=1 -DSIZE_N=72"
    " -DSIZE_K=96 -DLAYS=2 -DACTIVATION=relu2 -DALPHA=1.0",
    "packed8": f"{COMMON} {EIGHT} -DINT8 -DOFFSET=128 -DGROUP=64 -DSCALE=0 -DSCALED_ROWS=1 -DSIZE_N=24 -DSIZE_K=192"
    " -DWIDE",
    "float8 in blocks, laid": f"{COMMON} {EIGHT} -DFLOAT8 -DGROUP=128 -DSTEPS -DSCALE=1 -DSCALED_ROWS=32 -DSIZE_N=72"
    f" -DSIZE_K=256 -DLAYS=1 {GATED}",
    "packed4, scales of float16": f"{COMMON} {FOUR} -DPACKED4 -DOFFSET=8 -DGROUP=128 -DSTEPS -DSCALE=4 -DSCALED_ROWS=1"
    " -DSIZE_N=24 -DSIZE_K=256 -DWIDE",
    "float8 of rows": f"{COMMON} {EIGHT} -DFLOAT8 -DSCALE=1 -DSCALED_ROWS=1 -DSIZE_N=24 -DSIZE_K=144 -DWIDE",
    "int8": f"{COMMON} {EIGHT} -DINT8 -DSCALE=1 -DSCALED_ROWS=1 -DSIZE_N=24 -DSIZE_K=144 -DBIAS -DWIDE",
}


@pytest.mark.parametrize("defines", VARIANTS.values(), ids=VARIANTS)
def test_source_on_a_cpu(on_cpu: Callable[..., tuple[float, int]], defines: str) -> None:
    """A pair's row has the same bits whatever other pairs there are, and the grid."""
    steps = ((1, ANY, 1), (9, SOME_OF_NONE, 3), (19, ONE, 2))

    found = [on_cpu(defines, *step) for step in steps]

    assert max(error for error, _ in found) < 1.5 * 2**-7
    assert len({checksum for _, checksum in found}) == 1


@pytest.mark.parametrize(("columns", "bands"), [(32, 1), (64, 1), (64, 2), (128, 1), (128, 2)])
@pytest.mark.parametrize("variant", ["mxfp4, laid", "mxfp4", "packed8"])
def test_source_on_a_cpu_with_wide_tiles(
    on_cpu: Callable[..., tuple[float, int]], variant: str, columns: int, bands: int
) -> None:
    """Outputs that end within the first band of a tile, and within the second."""
    defines = VARIANTS[variant].replace("COLUMNS=16", f"COLUMNS={columns}").replace("EXPERTS=35", "EXPERTS=2")
    if columns * bands >= 128:
        defines = defines.replace("AT_ONCE=2", "AT_ONCE=1").replace("BANDS=1", f"BANDS={bands}")

    found = [on_cpu(defines, *step) for step in ((150, ANY, 2), (1, ONE, 1))]

    assert max(error for error, _ in found) < 1.5 * 2**-7
    assert len({checksum for _, checksum in found}) == 1


def test_source_on_a_cpu_without_experts(on_cpu: Callable[..., tuple[float, int]]) -> None:
    assert on_cpu(VARIANTS["mxfp4"], 3, NONE, 2) == (0.0, 0)


# --- on a GPU ----------------------------------------------------------------------------------------------------


@pytest.fixture(params=[torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def gpu(request: pytest.FixtureRequest) -> Draw:
    """Numbers on the GPU, if it is one that the kernels run on."""
    if torch.cuda.get_device_capability() != HOPPER:
        pytest.skip(f"needs compute capability 9.0, and this GPU has {torch.cuda.get_device_capability()}")
    return Draw(request.param, torch.device("cuda"))


def on_gpu(sample: Sample, tokens: int) -> torch.Tensor:
    """By the record for so many tokens."""
    record = record_of(sample, tokens)
    assert record is not None
    found: torch.Tensor = as_function(record)(**sample)
    return found


@pytest.mark.gpu
@each_format
@pytest.mark.parametrize("tokens", [17, 65, 130, 300, 1500])
def test_it_is_the_definition(make: Make, tokens: int, gpu: Draw, same: Callable[..., None]) -> None:
    """With ids of no expert, and experts that two of a token's pairs go to."""
    sample = sample_of(gpu, make, tokens)
    sample["expert_ids"] = gpu.integers(-1, 5, tokens, 2)
    at_home = {name: x.cpu() if isinstance(x, torch.Tensor) else x for name, x in sample.items()}

    same(QUANTISED_EXPERTS, on_gpu(sample, tokens).cpu(), QUANTISED_EXPERTS.reference(**at_home))


@pytest.mark.gpu
@pytest.mark.parametrize("format", ["mxfp4", "nvfp4 in rows", "packed4", "packed4 of rows"])
def test_tiles_whose_second_band_is_not_full(format: str, gpu: Draw, same: Callable[..., None]) -> None:
    """Of 416 outputs the last tile has 160, of 2 x 352 gated ones it has 192."""
    sample = sample_of(gpu, MAKES[format], 1500, width=416, inner=352)
    at_home = {name: x.cpu() if isinstance(x, torch.Tensor) else x for name, x in sample.items()}

    same(QUANTISED_EXPERTS, on_gpu(sample, 1500).cpu(), QUANTISED_EXPERTS.reference(**at_home))


@pytest.mark.gpu
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "relu", "relu2"])
@pytest.mark.parametrize("gated", [True, False])
def test_activations(activation: str, gated: bool, gpu: Draw, same: Callable[..., None]) -> None:
    """Sizes that end within a window and within a tile."""
    sample = {**experts(gpu, mxfp4, 80, 2, 5, 352, 416, bias=True, gated=gated), "activation": activation}
    at_home = {name: x.cpu() if isinstance(x, torch.Tensor) else x for name, x in sample.items()}

    same(QUANTISED_EXPERTS, on_gpu(sample, 80).cpu(), QUANTISED_EXPERTS.reference(**at_home))


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [40, 65, 256, 700])
def test_a_row_has_the_same_bits_among_others(tokens: int, gpu: Draw) -> None:
    sample = sample_of(gpu, mxfp4, tokens, width=2880, inner=704)
    order = torch.randperm(tokens, device="cuda")
    others = {name: sample[name][order] for name in ("x", "expert_ids", "expert_weights")}

    assert torch.equal(on_gpu({**sample, **others}, tokens), on_gpu(sample, tokens)[order])


@pytest.mark.gpu
def test_a_chain_of_layers_gives_the_same_each_time(gpu: Draw) -> None:
    """Each layer's kernels begin while those in front still run."""
    layers = [sample_of(gpu, mxfp4, 200) for _ in range(6)]

    def chained() -> torch.Tensor:
        x = layers[0]["x"]
        for each in layers:
            x = on_gpu({**each, "x": x / x.float().std().to(x.dtype)}, 200)
        return x

    first = chained()
    assert torch.isfinite(first).all()
    assert all(torch.equal(chained(), first) for _ in range(4))
