"""The device's context, made by a thread of its own: it takes the driver longer than a bundle takes to be opened.

Imports little, so that it is soon begun: what the thread needs besides it imports while the driver is at work.
"""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from precast.ir.errors import RequestError, TargetError
from precast.loader.driver import library

if TYPE_CHECKING:
    from precast.loader.driver.device import DriverDevice


class Begun(NamedTuple):
    """A device with its context, whose making began at `start` (of `time.perf_counter`) and took so many seconds."""

    device: DriverDevice
    start: float
    seconds: float


def begin(device: Any) -> Future[Begun]:
    """The GPU that is asked for, the first if none is said, once its context is made.

    Raises TargetError where there is no driver, RequestError for what is no GPU. The future raises TargetError for a
    GPU that is missing.
    """
    index = _index(device)
    library.function("cuInit")
    pool = ThreadPoolExecutor(1, thread_name_prefix="precast-context")
    made = pool.submit(_opened, index)
    pool.shutdown(wait=False)
    return made


def begin_early(device: Any) -> None:
    """Begin the context for whoever will want it, where there may be such a GPU: nothing is said of it here."""
    if device is None or str(device).startswith("cuda"):
        with suppress(TargetError, RequestError):
            begin(device)


def _opened(index: int) -> Begun:
    start = time.perf_counter()
    library.function("cuInit")(0)  # the device asks again, and says what is wrong
    from precast.loader.driver.device import DriverDevice

    device = DriverDevice(index)
    return Begun(device, start, time.perf_counter() - start)


def _index(device: Any) -> int:
    name, _, number = ("cuda" if device is None else str(device)).partition(":")
    if name != "cuda" or not (number.isdecimal() or number == ""):
        found = f"device is {device!r}, expected 'cuda' or a certain GPU like 'cuda:1' for the driver backend"
        raise RequestError("engine-option-invalid", found)
    return int(number or 0)
