"""Ctrl-C and SIGTERM while a command loads or answers: the process ends at once, whatever it is doing.

A load keeps nothing that would have to be undone: no temporary file, no shared memory, no process that outlives it. So
nothing is unwound, which may take seconds (threads that wait for a server, gigabytes to be freed one by one).

Python handles a signal between two instructions of the main thread. One that comes in the moment before that thread
begins to wait for a server would be handled when the wait is over. So a thread that does nothing else hears it as well.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from types import FrameType

_WORDS = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}
_ENDING = threading.Lock()
"""Held by the one that ends the process, and says so."""
_NO_SIGNAL = b"\0"
_SHOW_CURSOR = "\x1b[?25h"
"""Progress bars hide it."""


@contextmanager
def ends_at_once(*, alone: bool = True) -> Iterator[None]:
    """While open, SIGINT and SIGTERM end the process, with 130 and 143; one that was ignored (`nohup`) stays so.

    A process that isn't `alone`, but has ranks beside it, tells them first: it unwinds.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in _WORDS}
    ours = [number for number, handler in before.items() if handler != signal.SIG_IGN]
    with _heard_by_a_thread(ours) if alone else nullcontext():
        for number in ours:
            signal.signal(number, _end if alone else _unwind)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


@contextmanager
def _heard_by_a_thread(numbers: Collection[int]) -> Iterator[None]:
    """While open, one of these signals ends the process whatever the main thread does: Python's own handler, which the
    system calls at once, writes each to a pipe.
    """
    reads, writes = os.pipe()
    os.set_blocking(writes, False)

    def hear() -> None:
        with open(reads, "rb", buffering=0) as pipe:
            while (heard := pipe.read(1)) != _NO_SIGNAL:
                if heard[0] in numbers:
                    _end(heard[0], None)

    thread = threading.Thread(target=hear, name="precast-signals", daemon=True)
    thread.start()
    before = signal.set_wakeup_fd(writes, warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        os.write(writes, _NO_SIGNAL)  # a process that was forked meanwhile may hold the pipe open
        thread.join()
        os.close(writes)


def _end(number: int, frame: FrameType | None) -> None:
    if not _ENDING.acquire(blocking=False):  # the other thread, or the signal before this one, is about to
        return
    try:
        word = _WORDS[signal.Signals(number)]
        with suppress(OSError):  # nobody may be reading any more
            os.write(2, f"{_SHOW_CURSOR if sys.stderr.isatty() else ''}\n{word}\n".encode())
        _end_children()
    finally:
        os._exit(128 + number)


def _unwind(number: int, frame: FrameType | None) -> None:
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    raise SystemExit(128 + number)


def _end_children() -> None:
    """Compilers that a library has started, where the system lists them.

    Bytes, no text: a codec may have to be imported, and the signal may have come while just that is being imported.
    """
    for file in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError, ValueError):
            for child in file.read_bytes().split():
                os.kill(int(child), signal.SIGKILL)
