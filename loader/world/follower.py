"""A follower's side of a world: it says what it has, does what rank 0 orders, and ends when rank 0 is gone."""

from __future__ import annotations

import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import TypeVar

import msgspec

from precast.ir.errors import PrecastError, TargetError
from precast.loader.world import ring as rings
from precast.loader.world.channel import Channel
from precast.loader.world.ends import call_all
from precast.loader.world.messages import End, Failed, Here, OrdersAt, ReadsOrders, Together
from precast.loader.world.timeouts import Timeouts

T = TypeVar("T", bound=msgspec.Struct)

SPIN_SECONDS = 0.02
"""A follower with a GPU keeps looking for so long after an order: longer than a step, so that while requests are
served it never sleeps."""
MARGIN_SECONDS = 5.0
"""Rank 0 says who is late; its followers wait a little longer for that."""


class Ended(Exception):
    """Rank 0 needs this rank no more."""


class Follower:
    """Rank `rank` of `num_ranks`, with a channel to rank 0."""

    def __init__(self, rank: int, num_ranks: int, channel: Channel, timeouts: Timeouts) -> None:
        self.rank = rank
        self.num_ranks = num_ranks
        self.timeouts = timeouts
        self._channel = channel
        self._ring: rings.Ring | None = None
        self._orders: queue.SimpleQueue[bytes] = queue.SimpleQueue()  # those that come by the channel
        self._together: deque[Together] = deque()
        self._news = threading.Condition()
        self._failure: Failed | None = None
        self._is_ended = False
        self._at_failure: list[Callable[[], object]] = []
        self._at_leave: list[Callable[[], object]] = []
        self._at_left: list[Callable[[], object]] = []
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._hear, name="precast-rank-0", daemon=True)
        self._thread.start()

    def gather(self, phase: str, value: T, *, timeout: str = "agree") -> list[T]:
        """As `Lead.gather`."""
        with suppress(OSError):  # if rank 0 is gone, the thread that hears it says so
            self._channel.send(Here(phase, msgspec.msgpack.encode(value)))
        # Rank 0 may come to this phase later than this rank, by all that the phase takes.
        seconds = max(self.timeouts.load, getattr(self.timeouts, timeout)) + MARGIN_SECONDS
        with self._news:
            self._news.wait_for(lambda: self._together or self._failure or self._is_ended, seconds)
            self.check()
            if not self._together:
                found = f"rank {self.rank} waited {seconds:g} s for rank 0 ({phase})"
                raise TargetError("rank-late", found)
            together = self._together.popleft()
        if together.phase != phase or len(together.values) != self.num_ranks:
            found = f"rank 0 is at {together.phase} with {len(together.values)} ranks"
            raise TargetError("ranks-differ", f"{found}, and rank {self.rank} at {phase} with {self.num_ranks}")
        return [msgspec.msgpack.decode(each, type=type(value)) for each in together.values]

    def share_orders(self, max_order_bytes: int) -> None:
        """As `Lead.share_orders`."""
        self._channel.max_order_bytes = max_order_bytes
        found = self.gather("orders", OrdersAt())[0]
        place = rings.RingPlace(found.path, found.magic, found.num_bytes)
        self._ring = rings.attach(place, max_order_bytes) if found.path else None
        self.gather("orders read", ReadsOrders(is_attached=self._ring is not None))

    def orders(self, *, spins: bool) -> Iterator[memoryview]:
        """The orders, each to be read before the next is asked for; they end when rank 0 closes the world.

        `spins`: keep a core busy rather than come late. Raises the failure that has ended the world.
        """
        waiting = rings.Waiting(SPIN_SECONDS if spins else 0.0, self.check)
        ring = self._ring
        try:
            while True:
                waiting.begin()
                if ring is None:
                    yield memoryview(self._next_by_channel())
                else:
                    yield ring.receive(waiting)
                    ring.done(self.rank - 1)
        except Ended:
            return

    def check(self) -> None:
        """Raise the failure that has ended the world, or `Ended`, if one has."""
        if self._failure is not None:
            raise self._failure.error()
        if self._is_ended:
            raise Ended

    def at_failure(self, call: Callable[[], object]) -> None:
        """As `Lead.at_failure`."""
        with self._news:
            self._at_failure.append(call)

    def at_leave(self, call: Callable[[], object]) -> None:
        """As `Lead.at_leave`."""
        self._at_leave.append(call)

    def at_left(self, call: Callable[[], object]) -> None:
        """As `Lead.at_left`."""
        self._at_left.append(call)

    def fail(self, error: BaseException) -> None:
        """This rank has failed: rank 0 is told, and ends all."""
        if self._failure is None and not self._is_ended:
            with suppress(OSError):
                self._channel.send(Failed.of(error, self.rank))

    def close(self) -> None:
        """This rank has ended. Rank 0 ends the connection when all have left."""
        self._closed.set()
        if self._is_ended:
            call_all(self._at_leave)
            self._channel.end_sending()
            self._channel.wait_for_end(self.timeouts.end)
            call_all(self._at_left)
        self._channel.close()
        self._thread.join(self.timeouts.end)
        call_all(self._at_failure)  # what connects ranks is freed by this thread: others might do it as Python ends

    def wait_for_reason(self, seconds: float = 3.0) -> None:
        """After an error: wait to hear whether another rank is to blame."""
        with self._news:
            self._news.wait_for(lambda: self._failure or self._is_ended, seconds)

    def _next_by_channel(self) -> bytes:
        while True:
            self.check()
            with suppress(queue.Empty):
                return self._orders.get(timeout=0.1)

    def _hear(self) -> None:
        """A thread: what rank 0 says, until it is gone. Then the process has a little time to end by itself."""
        try:
            while not self._heard(self._channel.receive()):
                pass
        except EOFError:
            lost = TargetError("rank-lost", "rank 0 ended, and the others end with it")
            self._end(Failed.of(lost, 0))
        except PrecastError as error:
            self.fail(error)
            self._end(Failed.of(error, self.rank))
        if not self._closed.wait(self.timeouts.end):
            os._exit(4)  # its main thread waits for a device, or a rank, that doesn't answer

    def _heard(self, message: object) -> bool:
        """Whether it was the last one."""
        if isinstance(message, bytes):
            self._orders.put(message)
        elif isinstance(message, Together):
            with self._news:
                self._together.append(message)
                self._news.notify_all()
        elif isinstance(message, End):
            with self._news:
                self._is_ended = True
                self._news.notify_all()
            return True
        elif isinstance(message, Failed):
            self._end(message)
            return True
        else:
            raise TargetError("ranks-differ", "rank 0 sent what only followers send")
        return False

    def _end(self, failure: Failed) -> None:
        with self._news:
            self._failure = failure
            calls = tuple(self._at_failure)
            self._news.notify_all()
        for call in calls:
            with suppress(Exception):
                call()
