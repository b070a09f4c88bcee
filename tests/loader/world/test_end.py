"""A world that is closed, where nobody frees what others may still have open; and one that is interrupted."""

from __future__ import annotations

import gc
import os
import signal
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from precast.loader.world.channel import Channel
from precast.loader.world.follower import Follower
from precast.loader.world.lead import Lead
from precast.loader.world.messages import OrdersAt
from precast.loader.world.processes import Processes
from precast.loader.world.timeouts import Timeouts

WAITS = Timeouts()._replace(end=60.0)


@pytest.fixture
def pairs() -> Iterator[list[tuple[socket.socket, socket.socket]]]:
    made = [socket.socketpair() for _ in range(2)]
    yield made
    for pair in made:
        for each in pair:
            each.close()


def follow(side: Follower) -> None:
    for _ in side.orders(spins=False):
        pass
    side.close()


def test_all_ranks_leave_before_one_frees_what_they_had(pairs: list[tuple[socket.socket, socket.socket]]) -> None:
    lead = Lead({rank: Channel(ours) for rank, (ours, _) in enumerate(pairs, 1)}, WAITS)
    followers = [Follower(rank, 3, Channel(theirs), WAITS) for rank, (_, theirs) in enumerate(pairs, 1)]
    said: list[tuple[str, int]] = []
    slow = threading.Event()
    for side in (lead, *followers):
        if side.rank == 2:  # it leaves when rank 0 has: not by the time that it takes, but by the order
            side.at_leave(lambda: slow.wait(60))
        side.at_leave(lambda rank=side.rank: said.append(("left", rank)))
        side.at_left(lambda rank=side.rank: said.append(("freed", rank)))
    lead.at_leave(slow.set)

    with ThreadPoolExecutor(2) as pool:
        ends = [pool.submit(follow, side) for side in followers]
        lead.close()
        for end in ends:
            end.result(60)

    assert sorted(said[:3]) == [("left", 0), ("left", 1), ("left", 2)]
    assert sorted(said[3:]) == [("freed", 0), ("freed", 1), ("freed", 2)]


def test_nothing_is_freed_in_a_world_that_has_failed(pairs: list[tuple[socket.socket, socket.socket]]) -> None:
    """Others may still have it open, whose ends rank 0 doesn't see."""
    lead = Lead({rank: Channel(ours) for rank, (ours, _) in enumerate(pairs, 1)}, WAITS)
    said: list[str] = []
    lead.at_left(lambda: said.append("freed"))
    lead.at_close(lambda: said.append("closed"))

    lead.fail(ValueError("out of paper"))
    lead.close()

    assert said == ["closed"]


def test_rank_0_frees_what_it_had_once_the_processes_of_a_failed_world_are_gone(
    pairs: list[tuple[socket.socket, socket.socket]],
) -> None:
    processes = Processes(3)
    lead = Lead({rank: Channel(ours) for rank, (ours, _) in enumerate(pairs, 1)}, WAITS._replace(end=0), processes)
    said: list[str] = []
    lead.at_left(lambda: said.append(" ".join(["freed", *map(str, running(processes))])))
    lead.at_leave(lambda: said.append("left"))

    lead.fail(ValueError("out of paper"))
    lead.close()

    assert said == ["left", "freed"]


def running(processes: Processes) -> list[int]:
    """The ranks whose processes haven't ended."""
    found = []
    for rank in range(1, processes.num_ranks):
        with suppress(ProcessLookupError):
            os.kill(processes[rank], 0)
            found.append(rank)
    return found


def test_an_interrupt_just_before_a_wait_for_other_ranks_ends_it(
    pairs: list[tuple[socket.socket, socket.socket]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal that another thread takes doesn't wake the main one: as if it had come just before its wait."""
    lead = Lead({rank: Channel(ours) for rank, (ours, _) in enumerate(pairs, 1)}, WAITS._replace(load=3600.0))
    waits, wait = threading.Event(), lead._news.wait

    def waiting(timeout: float | None = None) -> bool:
        waits.set()
        return wait(timeout)

    def interrupt() -> None:
        waits.wait()
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(lead._news, "wait", waiting)
    threading.Thread(target=interrupt, daemon=True).start()
    gc.disable()  # Python drops an interrupt that comes while an object is finalized
    try:
        with pytest.raises(KeyboardInterrupt):
            lead.gather("loaded", OrdersAt(), timeout="load")
    finally:
        gc.enable()
        lead.fail(KeyboardInterrupt())
        lead.close()
