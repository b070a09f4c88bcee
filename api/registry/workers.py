"""A few threads for blobs that travel at once. The first failure, or Ctrl-C, ends the others."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

from precast.ir.waits import LOOK_SECONDS
from precast.registry.transport import Stopped, Transport

T = TypeVar("T")
R = TypeVar("R")


def each(items: Sequence[T], action: Callable[[T], R], transport: Transport, most: int) -> list[R]:
    """What `action` returns for each item, by at most `most` threads; the largest share first in `items` is best.

    Raises what the first `action` that failed raised. Threads that are still waiting for the network then end by
    themselves: no caller waits for them.
    """
    if len(items) < 2 or most < 2:
        return [action(item) for item in items]
    pending = iter(range(len(items)))
    lock = threading.Lock()
    done: queue.SimpleQueue[tuple[int, R | None, BaseException | None]] = queue.SimpleQueue()

    def work() -> None:
        while not transport.stop.is_set():
            with lock:
                index = next(pending, None)
            if index is None:
                return
            try:
                done.put((index, action(items[index]), None))
            except BaseException as error:  # noqa: BLE001 - it is raised again by whoever waits
                done.put((index, None, error))
                return

    results: dict[int, R] = {}
    try:
        for _ in range(min(most, len(items))):
            threading.Thread(target=work, name="precast-transfer", daemon=True).start()
        while len(results) < len(items):
            try:
                index, result, error = done.get(timeout=LOOK_SECONDS)
            except queue.Empty:  # a moment in which Ctrl-C is noticed, whenever it came
                continue
            if error is not None and not isinstance(error, Stopped):
                raise error
            results[index] = result  # type: ignore[assignment]
    except BaseException:
        transport.close()
        raise
    return [results[index] for index in range(len(items))]
