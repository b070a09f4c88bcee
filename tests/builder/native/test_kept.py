"""Compiled kernels that are kept: found again by all that they are made from, and compiled again where damaged."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from precast.builder.native.kept import Kept
from precast.builder.native.worker import Job, Made
from precast.ir.errors import BuildError

JOB = Job(
    "precast.kernels.without_torch.triton:copy_kernel", (9, 0), {"ROWS": 4}, ("*float32", "n"), (0,), (), (), 4, 3, 0,
    0, False,
)  # fmt: skip
MADE = Made("digest", "copy_kernel", 128, 0, (), (0,), (), ("precast.kernels.without_torch.triton",))
VERSIONS = {"triton": "3.6.0"}


def test_a_kernel_is_found_by_its_job_and_the_compilers(tmp_path: Path) -> None:
    kept = Kept(tmp_path / "kernels", VERSIONS)
    kept.write(JOB, MADE, b"cubin")

    assert Kept(tmp_path / "kernels", VERSIONS).read(JOB) == (MADE, b"cubin")
    assert kept.read(replace(JOB, constants={"ROWS": 8})) is None
    assert kept.read(replace(JOB, kernel="precast.kernels.fused.triton:fused_kernel")) is None
    assert Kept(tmp_path / "kernels", {"triton": "3.7.0"}).read(JOB) is None


def test_what_is_damaged_is_missed(tmp_path: Path) -> None:
    kept = Kept(tmp_path, VERSIONS)
    kept.write(JOB, MADE, b"cubin")
    (file,) = tmp_path.iterdir()
    file.write_bytes(file.read_bytes()[:-1] + b"?")

    assert kept.read(JOB) is None


def test_a_folder_that_is_none_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    with pytest.raises(BuildError, match="can't be kept") as error:
        Kept(tmp_path / "file", VERSIONS).write(JOB, MADE, b"cubin")
    assert error.value.code == "write-failed"
