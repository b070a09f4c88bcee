"""Orders from rank 0 to the followers on its host, through memory that they share: no system calls.

    page 0      magic[16]; from byte 64 * (1 + i) on: how many orders follower i has read[8]
    slot n      number[8], length[8], the order

Order `n` lies in slot `n % num_slots`, and its number, `n + 1`, is written last: whoever sees it sees the whole order.
Rank 0 writes over a slot once all followers have read what was there.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from precast.loader.device import aligned

NUM_SLOTS = 4
"""Two steps may be in flight, and one may be a capture or copies between them."""
PAGE_BYTES = 4096
LINE_BYTES = 64
"""A line of the processor's caches: counters on lines of their own don't slow one another."""
MAX_FOLLOWERS = PAGE_BYTES // LINE_BYTES - 1
LONGEST_SLEEP = 1e-3
"""Seconds. A follower that has slept through a pause looks this often whether there is an order."""


class RingPlace(NamedTuple):
    """Where a ring is found by other processes of its host: a file of a process, and the magic that stands in it."""

    path: str
    magic: bytes
    num_bytes: int


class Ring:
    """The memory, as rank 0 or as one of the followers sees it."""

    def __init__(self, memory: mmap.mmap, slot_bytes: int) -> None:
        self._bytes = memoryview(memory)
        self._words = self._bytes.cast("Q")  # a store of one is not torn
        self._slot_bytes = slot_bytes
        self._lock = threading.Lock()
        self._next = 0

    def send(
        self, parts: Sequence[bytes | memoryview], followers: Sequence[int], wait: Callable[[list[int]], None]
    ) -> None:
        """Write an order, which is these parts together, for the followers of these indices.

        `wait` is called again and again while some of them, those it is given, have yet to read older ones. It may
        raise.
        """
        oldest = self._next + 1 - NUM_SLOTS
        while behind := [i for i in followers if self.num_read(i) < oldest]:
            wait(behind)
        start = PAGE_BYTES + self._next % NUM_SLOTS * self._slot_bytes
        at = start + 16
        for part in parts:
            end = at + len(part)
            assert end <= start + self._slot_bytes, "an order is longer than a slot"
            self._bytes[at:end] = part
            at = end
        self._words[start // 8 + 1] = at - start - 16
        self._fence()
        self._next += 1
        self._words[start // 8] = self._next

    def receive(self, wait: Callable[[], None]) -> memoryview:
        """The next order, in place: to be read before `done`. `wait` is called while there is none, and may raise."""
        start = PAGE_BYTES + self._next % NUM_SLOTS * self._slot_bytes
        while self._words[start // 8] != self._next + 1:
            wait()
        self._fence()
        length = self._words[start // 8 + 1]
        return self._bytes[start + 16 : start + 16 + length]

    def done(self, follower: int) -> None:
        """The follower of this index has read the order: its place may be written to."""
        self._next += 1
        self._fence()
        self._words[LINE_BYTES * (1 + follower) // 8] = self._next

    def num_read(self, follower: int) -> int:
        """Orders that the follower has read."""
        return self._words[LINE_BYTES * (1 + follower) // 8]

    def _fence(self) -> None:
        """Nothing written or read before this is written or read after it, also where processors reorder.

        Python has no such instruction; a lock is released after all before it, and taken before all after it.
        """
        with self._lock:
            pass
        with self._lock:
            pass


def create(max_order_bytes: int) -> tuple[Ring, RingPlace, int] | None:
    """A new ring, where others find it, and the descriptor that holds it open for them. None where there can be none.

    It has no name in any file system, so nothing is left of it when the processes are gone, however they end.
    """
    if not hasattr(os, "memfd_create"):
        return None
    slot_bytes = aligned(max_order_bytes + 16, PAGE_BYTES)
    num_bytes = PAGE_BYTES + NUM_SLOTS * slot_bytes
    descriptor = os.memfd_create("precast-orders", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, num_bytes)  # pages of it are taken when they are first written to
    memory, magic = mmap.mmap(descriptor, num_bytes), os.urandom(16)
    memory[:16] = magic
    return Ring(memory, slot_bytes), RingPlace(f"/proc/{os.getpid()}/fd/{descriptor}", magic, num_bytes), descriptor


def attach(place: RingPlace, max_order_bytes: int) -> Ring | None:
    """The ring at this place; None where there is none, as on another host or in another container."""
    try:
        descriptor = os.open(place.path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        memory = mmap.mmap(descriptor, place.num_bytes)
    except (OSError, ValueError):
        return None
    finally:
        os.close(descriptor)
    slot_bytes = aligned(max_order_bytes + 16, PAGE_BYTES)
    if memory[:16] != place.magic or place.num_bytes != PAGE_BYTES + NUM_SLOTS * slot_bytes:
        return None
    return Ring(memory, slot_bytes)


class Waiting:
    """How a follower waits for orders: it keeps looking for `spin_seconds` after the last one, then ever less often."""

    def __init__(self, spin_seconds: float, check: Callable[[], None]) -> None:
        self._spin_seconds = spin_seconds
        self._check = check
        self.begin()

    def begin(self) -> None:
        """An order has come."""
        self._since = time.monotonic()
        self._sleep = 2e-5

    def __call__(self) -> None:
        """Look away for a moment. It raises what `check` raises."""
        self._check()
        if time.monotonic() - self._since < self._spin_seconds:
            time.sleep(0)  # other threads of this process, and other processes, get their turn
            return
        time.sleep(self._sleep)
        self._sleep = min(2 * self._sleep, LONGEST_SLEEP)
