"""All-reduce over GPUs that write each other's memory: its source on a CPU, compiled for a GPU, and on two GPUs."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from compiled_on_cpu import compiled
from gpu_ranks import CASES, NORMS, TURNS, add_up, given, norm_sums, wait_in_vain, weight_of
from torch import multiprocessing

from precast.kernels import cuda_source
from precast.kernels.rms_norm.residual_rms_norm import residual_rms_norm
from precast.kernels.spec import TWICE

FILE = "collectives/peers.cu"
HERE = Path(__file__).parent
PTX, PLAIN = "// --- what PTX has and C++ has not", "// --- words"
"""Between these lines of the source are the functions that `peers_on_cpu.cpp` has too."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Has the source without PTX, as the harness includes it."""
    made = tmp_path_factory.mktemp("peers")
    source = (HERE.parents[1] / "kernels" / FILE).read_text(encoding="utf-8")
    head = re.sub(r"^(typedef|struct|constexpr) .*\n", "", source[: source.index(PTX)], flags=re.MULTILINE)
    plain = re.sub(r"^#ifndef (WIDTH|THREADS)\n(.*\n)+?#endif\n", "", head, flags=re.MULTILINE)
    plain += source[source.index(PLAIN) :]
    (made / "peers.inc").write_text(plain.replace('extern "C"', ""), encoding="utf-8")
    return made


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_ranks_of_any_pace_add_up_on_a_cpu(folder: Path, ranks: int) -> None:
    """And where one is lost, the others' calls end."""
    program = compiled("peers_on_cpu.cpp", folder / f"peers{ranks}", f"-DRANKS={ranks}")

    done, left = (
        subprocess.run([program, "1", *more], capture_output=True, text=True, timeout=300) for more in ([], ["lost"])
    )

    assert done.returncode == 0, done.stdout
    assert int(done.stdout) == 400
    assert left.returncode == 0, left.stdout
    assert int(left.stdout) == 4


@pytest.mark.skipif(not cuda_source.is_installed(), reason="cuda-bindings are not installed")
@pytest.mark.parametrize("ranks", [2, 8])
@pytest.mark.parametrize(
    "dtype",
    [{}, {"FLOAT16": True}, {"FLOAT32": True}, {"CAST_BEFORE_SCALE": True, "WIDTH": 1100, "EPS": 1e-6, "OFFSET": 1.0}],
    ids=lambda each: " ".join(each) or "plain",
)
def test_it_compiles(ranks: int, dtype: dict[str, Any]) -> None:
    given = (("RANK", ranks - 1), ("RANKS", ranks), *dtype.items())

    assert cuda_source.compiled(FILE, given, (9, 0)).startswith(b"\x7fELF")


needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@pytest.mark.gpu
@needs_two
def test_gpus_add_up_eagerly_and_in_replays(tmp_path: Path) -> None:
    multiprocessing.spawn(add_up, (2, tmp_path), 2)

    found = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    for turn in range(TURNS):
        for i, (shape, dtype) in enumerate(CASES):
            parts = [given(rank, turn, shape, dtype).double() for rank in range(2)]
            expected = (parts[0] + parts[1]).to(dtype)
            for rank in range(2):
                assert torch.equal(found[rank][turn][i], expected), f"turn {turn}, {shape}, {dtype}, rank {rank}"


@pytest.mark.gpu
@needs_two
def test_gpus_add_up_and_norm(tmp_path: Path) -> None:
    multiprocessing.spawn(norm_sums, (2, tmp_path), 2)

    found = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    for turn in range(TURNS):
        for i, (shape, dtype, offset, cast) in enumerate(NORMS):
            parts = [given(rank, turn, shape, dtype).double() for rank in range(2)]
            total, stream, weight = (parts[0] + parts[1]).to(dtype), given(77, 0, shape, dtype), weight_of(shape, dtype)
            normed, both = residual_rms_norm(total, stream, weight, eps=1e-5, offset=offset, cast_before_scale=cast)
            for rank in range(2):
                told = f"turn {turn}, {shape}, {dtype}, rank {rank}"
                assert torch.equal(found[rank][turn][i][1], both), told
                torch.testing.assert_close(found[rank][turn][i][0], normed, **TWICE[dtype]._asdict(), msg=told)
            assert torch.equal(found[0][turn][i][0], found[1][turn][i][0]), f"turn {turn}, {shape}, {dtype}"


@pytest.mark.gpu
@needs_two
def test_a_rank_that_waits_in_vain_can_be_told_to_stop(tmp_path: Path) -> None:
    """And its GPU computes what it is told afterwards."""
    multiprocessing.spawn(wait_in_vain, (2, tmp_path), 2)

    assert (tmp_path / "said").read_text() == "4096.0"
