"""Orders through shared memory: written once, read by each follower, never written over too early."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from precast.loader.world import ring as rings
from precast.loader.world.ring import Ring, RingPlace

MOST = 5000


@pytest.fixture
def made() -> Iterator[tuple[Ring, RingPlace]]:
    created = rings.create(MOST)
    if created is None:
        pytest.skip("this system has no memory without a name")
    yield created[:2]
    os.close(created[2])


def nobody_waits(*_: object) -> None:
    raise AssertionError("there is nothing to wait for")


def attached(place: RingPlace) -> Ring:
    found = rings.attach(place, MOST)
    assert found is not None
    return found


def test_each_follower_reads_each_order(made: tuple[Ring, RingPlace]) -> None:
    lead, place = made
    followers = [attached(place), attached(place)]
    for i in range(3 * rings.NUM_SLOTS):
        order = bytes([i]) * (i * MOST // 12)
        lead.send([order[:1], memoryview(order)[1:]], [0, 1], nobody_waits)
        for number, follower in enumerate(followers):
            assert bytes(follower.receive(nobody_waits)) == order
            follower.done(number)


def test_a_slot_is_kept_until_the_slowest_has_read_it(made: tuple[Ring, RingPlace]) -> None:
    lead, place = made
    fast, slow = attached(place), attached(place)
    for i in range(rings.NUM_SLOTS):
        lead.send([bytes([i])], [0, 1], nobody_waits)
        fast.receive(nobody_waits)
        fast.done(0)
    waited: list[list[int]] = []

    def slow_reads(behind: list[int]) -> None:
        waited.append(behind)
        assert bytes(slow.receive(nobody_waits)) == b"\0"
        slow.done(1)

    lead.send([b"next"], [0, 1], slow_reads)

    assert waited == [[1]]
    assert [bytes(slow.receive(nobody_waits)) for _ in range(3) if slow.done(1) is None or True] == [
        b"\2",
        b"\3",
        b"next",
    ]


def test_a_follower_waits_for_an_order(made: tuple[Ring, RingPlace]) -> None:
    lead, place = made
    follower = attached(place)

    def comes() -> None:
        lead.send([b"late"], [0], nobody_waits)

    assert bytes(follower.receive(comes)) == b"late"


def test_what_waits_may_give_up(made: tuple[Ring, RingPlace]) -> None:
    _, place = made

    def lost() -> None:
        raise EOFError("rank 0")

    with pytest.raises(EOFError, match="rank 0"):
        attached(place).receive(lost)


def test_what_is_not_the_ring_is_not_attached_to(made: tuple[Ring, RingPlace]) -> None:
    _, place = made
    assert rings.attach(place._replace(magic=bytes(16)), MOST) is None
    assert rings.attach(place._replace(path="/proc/self/fd/999999"), MOST) is None
    assert rings.attach(place, 10 * MOST) is None
