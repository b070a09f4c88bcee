"""Rank 0's side of a world: it hears from all followers, tells them what to do, and ends all when one is lost."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TypeVar

import msgspec

from precast.ir import waits
from precast.ir.errors import PrecastError, TargetError
from precast.loader.world import ring as rings
from precast.loader.world.channel import Channel
from precast.loader.world.ends import call_all
from precast.loader.world.messages import End, Failed, Here, OrdersAt, ReadsOrders, Together
from precast.loader.world.processes import FIX, Processes
from precast.loader.world.timeouts import Timeouts

T = TypeVar("T", bound=msgspec.Struct)

LOOK_SECONDS = 0.25
"""How often it is looked whether a step takes too long."""
REASON_SECONDS = 3.0
"""How long a step that has failed waits to hear which rank is to blame: what ends a process also ends its collectives,
and either is noticed first."""


class Lead:
    """Rank 0 of `num_ranks`, with a channel to each of the others.

    `processes` are those that it has started; others are none of its business beyond their channels.
    """

    rank = 0

    def __init__(self, channels: Mapping[int, Channel], timeouts: Timeouts, processes: Processes | None = None) -> None:
        self.num_ranks = 1 + len(channels)
        self.timeouts = timeouts
        self.num_orders = 0
        self._channels = dict(channels)
        self._processes = processes
        self._ring: rings.Ring | None = None
        self._by_ring: list[int] = []  # ranks that read orders from the ring; the others get them by their channel
        self._by_channel = sorted(channels)
        self._here: dict[int, deque[Here]] = {rank: deque() for rank in channels}
        self._news = threading.Condition()
        self._failure: Failed | None = None
        self._at_failure: list[Callable[[], object]] = []
        self._at_leave: list[Callable[[], object]] = []
        self._at_left: list[Callable[[], object]] = []
        self._busy: tuple[str, float] | None = None
        self._at_close: list[Callable[[], object]] = []
        self._closed = threading.Event()
        self._hearing = [
            threading.Thread(target=self._hear, args=(rank,), name=f"precast-rank-{rank}", daemon=True)
            for rank in channels
        ]
        self._looking = threading.Thread(target=self._look, name="precast-ranks", daemon=True)
        for thread in (*self._hearing, self._looking):
            thread.start()

    # --- agreements --------------------------------------------------------------------------------------------

    def gather(self, phase: str, value: T, *, timeout: str = "agree") -> list[T]:
        """What each rank has to say at the end of a phase, by rank; all ranks call it, and all get the same.

        Raises the failure of the first rank that failed, and TargetError for ranks that are lost or late.
        """
        deadline = time.monotonic() + getattr(self.timeouts, timeout)
        said = [msgspec.msgpack.encode(value)]
        with self._news:
            for rank in self._channels:
                while not self._here[rank] and self._failure is None and (left := deadline - time.monotonic()) > 0:
                    self._news.wait(min(left, waits.LOOK_SECONDS))
                if self._failure is not None:
                    raise self._failure.error()
                if not self._here[rank]:
                    break
                here = self._here[rank].popleft()
                if here.phase != phase:
                    found = f"rank {rank} is at {here.phase}, and rank 0 at {phase}"
                    raise TargetError("ranks-differ", found, fix="start all ranks with the same options")
                said.append(here.value)
        if len(said) < self.num_ranks:
            late = [rank for rank in self._channels if rank >= len(said)]
            raise self._late(late, phase, timeout)
        self._tell(Together(phase, tuple(said)))
        return [msgspec.msgpack.decode(each, type=type(value)) for each in said]

    # --- orders ------------------------------------------------------------------------------------------------

    def share_orders(self, max_order_bytes: int) -> None:
        """Let followers on this host read orders, of so many bytes at most, from shared memory. All ranks call it."""
        created = rings.create(max_order_bytes) if self.num_ranks - 1 <= rings.MAX_FOLLOWERS else None
        place = OrdersAt(*created[1]) if created else OrdersAt()
        self.gather("orders", place)
        attached = self.gather("orders read", ReadsOrders(is_attached=True))
        if created:
            self._ring = created[0]
            os.close(created[2])
            self._by_ring = [rank for rank in self._channels if attached[rank].is_attached]
            self._by_channel = [rank for rank in self._channels if not attached[rank].is_attached]

    def send(self, parts: Sequence[bytes | memoryview]) -> None:
        """Give all followers an order, which is these parts together. In a `step` only."""
        self.num_orders += 1
        if self._ring is not None and self._by_ring:
            self._ring.send(parts, [rank - 1 for rank in self._by_ring], lambda _: self._pause())
        for rank in self._by_channel:
            try:
                self._channels[rank].send_order(parts)
            except OSError:
                self._wait_for_reason()
                self.check()
                raise

    @contextmanager
    def step(self, timeout: str = "step", *, is_told: bool = False) -> Iterator[None]:
        """What all ranks do together: an error in it after an order was given ends all of them.

        `is_told`: the order was given before. Raises what `check` raises, before it begins, and if a rank is lost
        meanwhile.
        """
        self.check()
        before = self.num_orders
        self._busy = timeout, time.monotonic()
        try:
            yield
        except BaseException as error:
            is_told = is_told or self.num_orders > before
            if isinstance(error, Exception) and is_told:
                self._wait_for_reason()
            if self._failure is None and is_told:
                self.fail(error)
                raise
            if self._failure is not None and isinstance(error, Exception):
                raise self._failure.error() from error
            raise
        finally:
            self._busy = None
        self.check()

    def check(self) -> None:
        """Raise the failure that has ended the world, if one has."""
        if self._failure is not None:
            raise self._failure.error()

    # --- the end -----------------------------------------------------------------------------------------------

    def at_failure(self, call: Callable[[], object]) -> None:
        """`call` ends what ranks wait for in each other: it is called, in another thread, when the world fails."""
        with self._news:
            self._at_failure.append(call)

    def at_leave(self, call: Callable[[], object]) -> None:
        """`call` lets go of what other ranks have given: it is called on each rank when the world is closed."""
        self._at_leave.append(call)

    def at_left(self, call: Callable[[], object]) -> None:
        """`call` frees what this rank has given to others: it is called when all have left a world that is closed.

        Of a world that has failed, which ranks leave in any order, rank 0 frees it once the processes that it has
        started are gone. The others leave that to their ends; and so does rank 0 with processes of a launcher's.
        """
        self._at_left.append(call)

    def at_close(self, call: Callable[[], object]) -> None:
        """`call` is called when the world is closed, and all processes that were started here are gone."""
        self._at_close.append(call)

    def fail(self, error: BaseException) -> None:
        """Rank 0 has failed: all others end."""
        self._failed(Failed.of(error, 0))

    def close(self) -> None:
        """End all followers, and wait until those that were started here are gone. Closing again is fine."""
        if self._closed.is_set():
            return
        self._closed.set()
        if self._failure is None:
            self._leave_together()
        if self._processes is not None:
            self._processes.reap(self.timeouts.end)
            call_all(self._at_leave)  # what is left to do in a world that has failed
            call_all(self._at_left)
        for channel in self._channels.values():
            channel.close()
        for thread in (*self._hearing, self._looking):
            thread.join(self.timeouts.end)
        call_all(self._at_failure)  # what connects ranks is freed by this thread: others might do it as Python ends
        for call in self._at_close:
            call()

    def _leave_together(self) -> None:
        """End the followers; once all have left, and said so by ending what they send, end their connections."""
        self._tell(End())
        call_all(self._at_leave)
        deadline = time.monotonic() + self.timeouts.end
        for thread in self._hearing:
            thread.join(max(0.0, deadline - time.monotonic()))
        if not any(thread.is_alive() for thread in self._hearing):
            call_all(self._at_left)
        for channel in self._channels.values():
            channel.close()

    # --- what comes from followers -------------------------------------------------------------------------------

    def _hear(self, rank: int) -> None:
        """A thread: what a follower says, until it is gone."""
        while True:
            try:
                message = self._channels[rank].receive()
                if isinstance(message, Failed):
                    self._failed(message)
                elif isinstance(message, Here):
                    with self._news:
                        self._here[rank].append(message)
                        self._news.notify_all()
                else:
                    raise TargetError("ranks-differ", f"rank {rank} sent what only rank 0 sends")
            except EOFError:
                if not self._closed.is_set() and self._failure is None:
                    self._failed(Failed.of(self._lost(rank), rank))
                return
            except PrecastError as error:
                self._failed(Failed.of(error, rank))
                return

    def _look(self) -> None:
        """A thread: a step that takes too long is a failure; a process that doesn't come back from one is ended."""
        while not self._closed.wait(LOOK_SECONDS):
            busy = self._busy
            if busy is None:
                continue
            timeout, since = busy
            seconds = getattr(self.timeouts, timeout)
            if time.monotonic() < since + seconds:
                continue
            self._failed(Failed.of(self._late(self._behind(), timeout, timeout), 0))
            if self._processes is not None:
                self._processes.kill()  # who waits for what they have to send is told that they are gone
            if self._closed.wait(self.timeouts.end) or self._busy is not busy:
                continue
            assert self._failure is not None
            _leave(self._failure.error())

    def _behind(self) -> list[int]:
        """Ranks that have yet to read orders, as far as is known; else all of them."""
        ring = self._ring
        behind = [rank for rank in self._by_ring if ring is not None and ring.num_read(rank - 1) < self.num_orders]
        return behind or list(self._channels)

    def _failed(self, failure: Failed) -> None:
        with self._news:
            if self._failure is not None or self._closed.is_set():
                return
            self._failure = failure
            calls = tuple(self._at_failure)
            self._news.notify_all()
        self._tell(failure)
        for call in calls:
            with suppress(Exception):
                call()

    def _tell(self, message: Together | Failed | End) -> None:
        for channel in self._channels.values():
            with suppress(OSError):  # whoever is gone is found gone by the thread that hears it
                channel.send(message)

    def _lost(self, rank: int) -> TargetError:
        how = "" if self._processes is None else self._processes.end_of(rank, REASON_SECONDS / 2)
        how = how or "closed its connection"
        return TargetError("rank-lost", f"rank {rank} {how}, and the others end with it", fix=f"load again; {FIX}")

    def _late(self, ranks: Sequence[int], phase: str, timeout: str) -> TargetError:
        names = f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}"
        return TargetError(
            "rank-late",
            f"rank 0 waited {getattr(self.timeouts, timeout):g} s for {names} ({phase})",
            fix=f"see what these processes do, or allow more time with the timeout {timeout}",
        )

    def _wait_for_reason(self) -> None:
        with self._news:
            self._news.wait_for(lambda: self._failure is not None, REASON_SECONDS)

    def _pause(self) -> None:
        self.check()
        time.sleep(0)


def _leave(error: PrecastError) -> None:
    """End this process, whose main thread waits for a device that doesn't answer."""
    with suppress(OSError, ValueError):
        sys.stderr.write(f"error: {error}\n")
        sys.stderr.flush()
    os._exit(error.exit_code)
