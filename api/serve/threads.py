"""Threads for what would hold up the event loop. The process doesn't wait for them when it ends."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

R = TypeVar("R")


class Threads:
    """At most so many calls at once; others wait for their turn."""

    def __init__(self, most: int) -> None:
        self._free = asyncio.Semaphore(most)

    async def call(self, function: Callable[[], R]) -> R:
        """What the function returns, or raises. It goes on where who waits for it is cancelled."""
        await self._free.acquire()
        loop = asyncio.get_running_loop()
        future: asyncio.Future[R] = loop.create_future()

        def ended(set_it: Callable[[Any], None], found: Any) -> None:
            self._free.release()
            if not future.done():
                set_it(found)

        def run() -> None:
            try:
                outcome: tuple[Callable[[Any], None], Any] = future.set_result, function()
            except Exception as error:  # noqa: BLE001 - it is raised where it is waited for
                outcome = future.set_exception, error
            with suppress(RuntimeError):  # the loop is closed: nobody waits
                loop.call_soon_threadsafe(ended, *outcome)

        threading.Thread(target=run, name="precast-text", daemon=True).start()
        return await future
