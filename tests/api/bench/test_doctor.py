"""`precast doctor` on this machine, and on machines that lack something."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from recitation import MODEL, Command

from precast.bench import doctor, floor
from precast.bench.doctor import Check
from precast.cli.doctor_view import text

HIDDEN = """
import builtins, sys
found = builtins.__import__
def without(name, *rest, **more):
    if name.partition(".")[0] == "torch":
        raise ModuleNotFoundError("No module named 'torch'", name="torch")
    return found(name, *rest, **more)
builtins.__import__ = without
"""


def by_name(checks: list[Check]) -> dict[str, Check]:
    return {check.name: check for check in checks}


def test_this_machine(command: Command) -> None:
    result = command("doctor", "--device", "cpu", "--weights", MODEL, "--json")

    assert result.exit_code == 0, result.stdout
    report = json.loads(result.stdout)
    found = {check["name"]: check for check in report["checks"]}
    assert report["fine"] is True
    assert list(found) == ["system", "packages", "memory", "torch", "imports", "matmul", "disk", "page cache"]
    assert found["packages"]["numbers"]["msgspec"] is not None
    assert found["imports"]["numbers"]["loader"] > 0
    assert found["matmul"]["numbers"]["flops"] > 0
    assert [found[name]["status"] for name in ("disk", "page cache")] == ["unknown", "unknown"]  # its file is small
    assert all(check["why"] and check["fix"] for check in found.values() if check["status"] == "slow")


def test_a_gpu_that_must_be_there_ends_with_4(monkeypatch: pytest.MonkeyPatch, command: Command) -> None:
    monkeypatch.setattr(doctor, "_child", lambda code, *rest, **more: ({}, "there is no driver"))

    result = command("doctor", "--device", "cuda", "--weights", MODEL)

    assert result.exit_code == 4
    assert "missing  gpu" in result.stdout
    assert "why: there is no driver" in result.stdout


@pytest.mark.parametrize("verb", [["doctor"], ["bench", "startup", "b", "--weights", "w"]])
@pytest.mark.parametrize("device", ["", "gpu", "cuda:", "cuda:x", "cuda:-1"])
def test_a_device_that_is_none(verb: list[str], device: str, command: Command) -> None:
    result = command(*verb, "--device", device)

    assert result.exit_code == 2
    assert f"{device!r} is none of cpu, cuda, or a certain GPU such as cuda:1" in result.stderr


def test_no_driver() -> None:
    """In a process that finds no library of the driver's."""
    code = doctor._DRIVER.replace(
        "cuda = ", "floor['CudaDriver'].__init__.__globals__['LIBRARY'] = 'libno.so'\ncuda = "
    )

    found, said = doctor._child(code, str(floor.__file__), "0", bare=True)

    assert (found, said) == ({}, "there is no libno.so: no NVIDIA driver is installed")


def test_without_torch(tmp_path: Path) -> None:
    """A process in which torch can't be imported, and all that it starts: `sitecustomize` is read by each."""
    (tmp_path / "sitecustomize.py").write_text(HIDDEN)
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "PYTHONSAFEPATH": "1"}
    command = [sys.executable, "-m", "precast", "doctor", "--device", "cpu", "--weights", str(MODEL), "--json"]

    ran = subprocess.run(command, env=environment, capture_output=True, text=True)

    assert ran.returncode == 4, ran.stderr
    (torch,) = (check for check in json.loads(ran.stdout)["checks"] if check["name"] == "torch")
    assert (torch["status"], torch["fix"]) == ("missing", "pip install torch")
    assert "No module named 'torch'" in torch["why"]


def test_nowhere_to_write(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As on a read-only system: no folder for temporary files."""
    monkeypatch.setattr(doctor.tempfile, "tempdir", str(tmp_path / "nowhere"))

    (disk,) = doctor._disk(None)

    assert (disk.name, disk.status) == ("disk", "unknown")
    assert "--weights" in disk.fix


def test_the_disk_of_temporary_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(doctor.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(doctor, "PROBE_BYTES", doctor.LEAST_BYTES)

    disk, cache = doctor._disk(None)

    assert (disk.name, cache.name) == ("disk", "page cache")
    assert cache.numbers["bytes_per_second"] > 0
    assert list(tmp_path.iterdir()) == []


def test_weights_that_are_none(tmp_path: Path) -> None:
    (disk,) = doctor._disk(tmp_path)
    (nowhere,) = doctor._disk(tmp_path / "nowhere")

    assert (disk.status, nowhere.status) == ("missing", "missing")
    assert "no safetensors files" in disk.found
    assert "no such file or directory" in nowhere.found


def test_a_file_that_is_too_small_to_tell_a_rate_from(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(bytes(600_000))

    checks = list(doctor._disk(tmp_path))

    assert [(check.name, check.status, check.numbers) for check in checks] == [
        ("disk", "unknown", {}), ("page cache", "unknown", {}),
    ]  # fmt: skip
    assert "600,000 bytes" in checks[0].found


@pytest.mark.parametrize(("writable", "status"), [(True, "fine"), (False, "slow")])
def test_where_compiled_kernels_are_kept(
    writable: bool, status: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(os, "access", lambda path, mode: writable)  # root may write everywhere

    (found,) = doctor._kernel_cache(True)

    assert (found.name, found.status) == ("kernel cache", status)
    assert list(doctor._kernel_cache(False)) == []


@pytest.mark.gpu
def test_a_gpu(command: Command) -> None:
    found = by_name(doctor.examine("cuda", MODEL))

    assert {"gpu", "context", "bus", "kernel cache"} <= set(found)
    assert found["bus"].numbers["bytes_per_second"] > 1e9


def test_text_says_what_to_do() -> None:
    checks = [Check("disk", "slow", "1 GB/s", "it is far", "move it"), Check("memory", "fine", "24 GB")]

    assert text(checks).splitlines() == [
        "slow     disk    1 GB/s",
        "                 why: it is far",
        "                 fix: move it",
        "fine     memory  24 GB",
    ]
