"""Byte ranges, read into memory by as few system calls as their places allow."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from open_files import new_since

from precast.ir.errors import WeightsError
from precast.ir.weights.checkpoint import CheckpointFiles
from precast.ir.weights.sources import MAX_VECTORS, LocalFile, LocalFolder
from precast.loader.weights.files import Range, opened, read_ranges


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """10,000 bytes that tell where they stand."""
    path = tmp_path / "model.safetensors"
    path.write_bytes(bytes(range(250)) * 40)
    return path


def read(file: Path, ranges: Sequence[Range]) -> int:
    """The bytes that `read_ranges` says it read."""
    with LocalFile(file) as source:
        return read_ranges(source, ranges)


def checkpoint(file: Path) -> CheckpointFiles:
    """The file's folder, with the stamp that the file has now."""
    with LocalFile(file) as source:
        return CheckpointFiles(LocalFolder(file.parent), {}, {file.name: source.stamp})


def to_memory(start: int, length: int) -> Range:
    """A range into memory of its own."""
    return Range(start, memoryview(bytearray(length)))


def test_each_range_gets_its_bytes(file: Path) -> None:
    content = file.read_bytes()
    ranges = [to_memory(3, 10), to_memory(13, 0), to_memory(13, 500), to_memory(700, 1), to_memory(9_990, 10)]

    assert read(file, ranges) == 521
    assert all(bytes(memory) == content[start : start + len(memory)] for start, memory in ranges)


def test_neighbours_are_one_system_call(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, int]] = []
    preadv = os.preadv

    def recording(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        calls.append((offset, len(buffers)))
        return preadv(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", recording)
    read(file, [to_memory(3, 10), to_memory(13, 5), to_memory(18, 2), to_memory(30, 4), to_memory(34, 1)])

    assert calls == [(3, 3), (30, 2)]


def test_more_neighbours_than_one_call_takes(file: Path) -> None:
    content = file.read_bytes()
    ranges = [to_memory(place, 1) for place in range(2 * MAX_VECTORS + 7)]

    assert read(file, ranges) == len(ranges)
    assert b"".join(memory for _, memory in ranges) == content[: len(ranges)]


def test_a_call_that_reads_less_than_asked_is_carried_on(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = file.read_bytes()
    preadv = os.preadv

    def at_most_seven(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        return preadv(descriptor, [buffers[0][:7]], offset)

    monkeypatch.setattr(os, "preadv", at_most_seven)
    ranges = [to_memory(5, 20), to_memory(25, 7), to_memory(32, 3), to_memory(100, 15)]

    assert read(file, ranges) == 45
    assert all(bytes(memory) == content[start : start + len(memory)] for start, memory in ranges)


def test_the_end_of_the_file_is_an_error(file: Path) -> None:
    with pytest.raises(WeightsError, match="ends at byte 10000") as caught:
        read(file, [to_memory(9_999, 2)])

    assert caught.value.code == "checkpoint-read"
    assert caught.value.where == str(file)


def test_a_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="directory") as caught:
        read(tmp_path, [to_memory(0, 1)])

    assert caught.value.code == "checkpoint-read"


def test_descriptors_are_closed_when_one_file_is_missing(file: Path) -> None:
    before = new_since()

    with pytest.raises(WeightsError, match="No such file"), opened(checkpoint(file), [file.name, "gone"]):
        pass

    assert new_since(before) == set()


# --- files that somebody writes to ---------------------------------------------------------------------------------


def overwrite(file: Path) -> None:
    """Other bytes, as many; the clock has gone on, whatever its steps are."""
    file.write_bytes(file.read_bytes()[::-1])
    then = file.stat().st_mtime_ns + 1
    os.utime(file, ns=(then, then))


def shorten(file: Path) -> None:
    os.truncate(file, 9_000)


def replace(file: Path) -> None:
    """Another file of the same size and time under the same name."""
    then = file.stat().st_mtime_ns
    other = file.with_name("other")
    other.write_bytes(file.read_bytes()[::-1])
    os.utime(other, ns=(then, then))
    other.rename(file)


@pytest.mark.parametrize("change", [overwrite, shorten, replace])
def test_a_file_that_changes_after_its_header_was_read(change: Callable[[Path], None], file: Path) -> None:
    files = checkpoint(file)
    change(file)

    with pytest.raises(WeightsError) as caught, opened(files, [file.name]):
        pass

    assert (caught.value.code, caught.value.where) == ("checkpoint-changed", str(file))


@pytest.mark.parametrize("change", [overwrite, shorten])
def test_a_file_that_changes_while_it_is_read(change: Callable[[Path], None], file: Path) -> None:
    def read_both_halves() -> None:
        with opened(checkpoint(file), [file.name]) as sources:
            read_ranges(sources[file.name], [to_memory(0, 5_000)])
            change(file)
            read_ranges(sources[file.name], [to_memory(5_000, 5_000)])

    with pytest.raises(WeightsError) as caught:
        read_both_halves()

    assert caught.value.code == "checkpoint-changed"
    if change is shorten:
        assert "it had 10000 bytes, and has 9000 now" in caught.value.message


def test_a_file_that_is_replaced_while_it_is_read_is_read_to_its_end(file: Path) -> None:
    content = file.read_bytes()
    whole = to_memory(0, 10_000)

    with opened(checkpoint(file), [file.name]) as sources:
        replace(file)
        read_ranges(sources[file.name], [whole])

    assert bytes(whole.memory) == content


def test_times_of_access_do_not_count(file: Path) -> None:
    files = checkpoint(file)
    os.utime(file, ns=(1, file.stat().st_mtime_ns))

    with opened(files, [file.name]):
        pass


def test_a_folder_that_is_stopped_reads_no_more(file: Path) -> None:
    folder = LocalFolder(file.parent)
    with folder.open(file.name) as source:
        read_ranges(source, [to_memory(0, 10)])
        folder.stop()
        with pytest.raises(WeightsError, match="the read was stopped"):
            read_ranges(source, [to_memory(0, 10)])
