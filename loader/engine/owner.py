"""One thread at a time: who is inside an engine's method, and the refusal of whoever comes meanwhile."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from precast.ir.errors import RequestError

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


class Owner:
    """The thread that is inside; as a context, entered for the time of a call. The same thread may enter again.

    Raises RequestError (`engine-busy`) for another thread, which doesn't wait.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._depth = 0  # how often the thread inside has entered
        self._thread = ""
        self._later: deque[Callable[[], object]] = deque()

    def __enter__(self) -> None:
        here = threading.current_thread().name
        if not self._lock.acquire(blocking=False):
            raise RequestError(
                "engine-busy",
                f"thread {here!r} called the engine while thread {self._thread!r} was inside it",
                fix="call it from one thread, which others reach over queues: docs/python_api.md has such a loop",
            )
        self._depth += 1
        self._thread = here

    def __exit__(self, *_: object) -> None:
        try:
            while self._depth == 1 and self._later:
                self._later.popleft()()
        finally:
            self._depth -= 1
            self._lock.release()

    def later(self, call: Callable[[], object]) -> None:
        """Call it when nobody is inside: now, or when whoever is leaves.

        For what the garbage collector finds: it runs in any thread, and amid any step.
        """
        self._later.append(call)
        with contextlib.suppress(RequestError), self:
            pass


def one_thread(method: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], R]:
    """A method of an object with an `_owner`, entered for the time of each call."""

    @functools.wraps(method)
    def call(self: Any, *args: P.args, **kwargs: P.kwargs) -> R:
        with self._owner:
            return method(self, *args, **kwargs)

    return call


class Stream(Iterator[T], Generic[T]):
    """What a generator gives, one thread at a time inside; between two items nobody is.

    A thread that is refused changes nothing: the generator doesn't hear of it.
    """

    def __init__(self, items: Generator[T], owner: Owner) -> None:
        self._items = items
        self._owner = owner

    def __next__(self) -> T:
        with self._owner:
            return next(self._items)

    def close(self) -> None:
        """End the generator; closing again is fine."""
        with self._owner:
            self._items.close()
