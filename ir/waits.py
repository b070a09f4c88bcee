"""Waits for threads that Ctrl-C ends.

Python handles a signal between two instructions of the main thread. One that comes in the moment before that thread
begins to wait for a lock is handled only when the wait is over. So no wait here is longer than a moment; there are as
many as it takes.
"""

from __future__ import annotations

from collections.abc import Collection
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from typing import TypeVar

T = TypeVar("T")
LOOK_SECONDS = 0.1
"""The longest of these waits: so much later an interrupt is handled at worst."""


def all_ended(futures: Collection[Future[T]]) -> list[T]:
    """The results of all, in their order. Raises the error of one that failed, without waiting for the others."""
    left = set(futures)
    while left:
        ended, left = wait(left, LOOK_SECONDS, FIRST_EXCEPTION)
        for future in ended:
            future.result()
    return [future.result() for future in futures]


def ended(future: Future[T]) -> T:
    """What the future gives or raises, once it is there."""
    return all_ended([future])[0]
