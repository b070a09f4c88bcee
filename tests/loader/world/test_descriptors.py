"""Descriptors pass from each rank to all others; strangers and late ranks are found out."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from open_files import new_since

from precast.ir.errors import TargetError
from precast.loader.world.descriptors import Exchange, exchanged


class Table:
    """What ranks, which are threads, say to one another."""

    def __init__(self, size: int) -> None:
        self._said: dict[str, dict[int, bytes]] = {}
        self._barrier = threading.Barrier(size, timeout=60)

    def exchange(self, rank: int, after: Callable[[str], None] = lambda name: None) -> Exchange:
        """As one of them says it; `after` is called when all have."""

        def meet(name: str, said: bytes) -> Sequence[bytes]:
            self._said.setdefault(name, {})[rank] = said
            self._barrier.wait()
            after(name)
            return [self._said[name][each] for each in sorted(self._said[name])]

        return meet


def written(text: str) -> int:
    """A descriptor from which this can be read."""
    reads, writes = os.pipe()
    os.write(writes, text.encode())
    os.close(writes)
    return reads


def read(descriptor: int) -> str:
    text = os.read(descriptor, 100).decode()
    os.close(descriptor)
    return text


def assert_(condition: bool) -> None:
    assert condition


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """One with a name that is too long for a socket's."""
    made = tmp_path / ("x" * 100) / ("y" * 100)
    made.mkdir(parents=True)
    return made


@pytest.mark.parametrize("size", [2, 4])
def test_each_rank_gets_what_all_others_give(folder: Path, size: int) -> None:
    before, table = new_since(), Table(size)

    def run(rank: int) -> dict[int, str]:
        mine = written(f"of {rank}")
        others = exchanged(folder, rank, mine, table.exchange(rank), "memory", seconds=60)
        os.close(mine)
        return {other: str(given) for other, given in others.items()}

    with ThreadPoolExecutor(size) as pool:
        found = list(pool.map(run, range(size)))

    for rank, others in enumerate(found):
        assert sorted(others) == [other for other in range(size) if other != rank]
    # One pipe of each rank, which all others have: it is read once.
    texts = [read(int(found[(rank + 1) % size][rank])) for rank in range(size)]
    assert texts == [f"of {rank}" for rank in range(size)]
    for rank, others in enumerate(found):
        for other, given in others.items():
            if (other + 1) % size != rank:
                os.close(int(given))
    assert new_since(before) == set()
    assert os.listdir(folder) == []


def test_who_does_not_know_the_number_is_not_heard(folder: Path) -> None:
    """A stranger is in front of the rank: one says nothing, one shows another number."""
    table, waits = Table(2), threading.Event()

    def strangers(name: str) -> None:
        if name.endswith("/listens"):
            place = os.open(folder, os.O_RDONLY)
            for said in (b"", (1).to_bytes(4, "little") + bytes(16)):
                with socket.socket(socket.AF_UNIX) as stranger:
                    stranger.connect(f"/proc/self/fd/{place}/memory-0")
                    if said:
                        null = os.open("/dev/null", os.O_RDONLY)
                        socket.send_fds(stranger, [said], [null])
                        os.close(null)
            os.close(place)
            waits.set()

    def run(rank: int) -> dict[int, int]:
        mine = written(f"of {rank}")
        after = strangers if rank == 0 else lambda name: assert_(waits.wait(60))
        others = exchanged(folder, rank, mine, table.exchange(rank, after), "memory", seconds=60)
        os.close(mine)
        return others

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(run, range(2)))

    assert [list(each) for each in found] == [[1], [0]]
    assert [read(found[0][1]), read(found[1][0])] == ["of 1", "of 0"]


def test_a_rank_that_gives_nothing_is_named(folder: Path) -> None:
    mine, before = written("of 0"), new_since()

    def alone(name: str, said: bytes) -> list[bytes]:
        listener = socket.socket(socket.AF_UNIX)  # rank 1 listens, and is heard of no more
        place = os.open(folder, os.O_RDONLY)
        listener.bind(f"/proc/self/fd/{place}/memory-1")
        listener.listen()
        os.close(place)
        kept.append(listener)
        return [said, bytes(16)]

    kept: list[socket.socket] = []
    with pytest.raises(TargetError, match=r"rank 0 waited 0\.1 s for the memory of rank 1") as error:
        exchanged(folder, 0, mine, alone, "memory", seconds=0.1)

    assert error.value.code == "rank-late"
    kept[0].close()
    assert new_since(before) == set()


def test_a_rank_that_is_gone_is_named(folder: Path) -> None:
    with pytest.raises(TargetError, match="rank 0 can't give its memory to rank 1: ") as error:
        exchanged(folder, 0, written("of 0"), lambda name, said: [said, bytes(16)], "memory", seconds=5)

    assert error.value.code == "rank-late"
