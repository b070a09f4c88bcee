"""Runs of bytes, read into memory by as few system calls as their places allow."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from precast.ir.errors import WeightsError
from precast.loader.weights.files import MAX_VECTORS, Run, byte_view, opened, read_runs


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """10,000 bytes that tell where they stand."""
    path = tmp_path / "model.safetensors"
    path.write_bytes(bytes(range(250)) * 40)
    return path


def read(file: Path, runs: Sequence[Run]) -> int:
    """The bytes that `read_runs` says it read."""
    with opened([file]) as descriptors:
        return read_runs(descriptors[file], file, runs)


def run(start: int, length: int) -> Run:
    """A run into memory of its own."""
    return Run(start, memoryview(bytearray(length)))


def test_each_run_gets_its_bytes(file: Path) -> None:
    content = file.read_bytes()
    runs = [run(3, 10), run(13, 0), run(13, 500), run(700, 1), run(9_990, 10)]

    assert read(file, runs) == 521
    assert all(bytes(memory) == content[start : start + len(memory)] for start, memory in runs)


def test_neighbours_are_one_system_call(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, int]] = []
    preadv = os.preadv

    def recording(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        calls.append((offset, len(buffers)))
        return preadv(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", recording)
    read(file, [run(3, 10), run(13, 5), run(18, 2), run(30, 4), run(34, 1)])

    assert calls == [(3, 3), (30, 2)]


def test_more_neighbours_than_one_call_takes(file: Path) -> None:
    content = file.read_bytes()
    runs = [run(place, 1) for place in range(2 * MAX_VECTORS + 7)]

    assert read(file, runs) == len(runs)
    assert b"".join(memory for _, memory in runs) == content[: len(runs)]


def test_a_call_that_reads_less_than_asked_is_carried_on(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = file.read_bytes()
    preadv = os.preadv

    def at_most_seven(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        return preadv(descriptor, [buffers[0][:7]], offset)

    monkeypatch.setattr(os, "preadv", at_most_seven)
    runs = [run(5, 20), run(25, 7), run(32, 3), run(100, 15)]

    assert read(file, runs) == 45
    assert all(bytes(memory) == content[start : start + len(memory)] for start, memory in runs)


def test_the_end_of_the_file_is_an_error(file: Path) -> None:
    with pytest.raises(WeightsError, match="ends at byte 10000") as caught:
        read(file, [run(9_999, 2)])

    assert caught.value.code == "checkpoint-read"
    assert caught.value.where == str(file)


def test_a_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="directory") as caught:
        read(tmp_path, [run(0, 1)])

    assert caught.value.code == "checkpoint-read"


def test_descriptors_are_closed_when_one_file_is_missing(file: Path, tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else 0

    with pytest.raises(WeightsError, match="No such file"), opened([file, tmp_path / "gone"]):
        pass

    if before:
        assert len(os.listdir("/proc/self/fd")) == before


def test_a_byte_view_is_the_tensor_itself() -> None:
    tensor = torch.zeros(5, dtype=torch.uint8)

    byte_view(tensor)[1:3] = b"ab"

    assert tensor.tolist() == [0, 97, 98, 0, 0]
    assert len(byte_view(torch.empty(0, dtype=torch.uint8))) == 0
