"""Waits for threads: results, the first error, and an interrupt that comes before the wait has begun."""

from __future__ import annotations

import concurrent.futures
import signal
import threading
from concurrent.futures import Future
from typing import Any

import pytest

from precast.ir import waits


def test_results_are_in_the_order_of_the_futures() -> None:
    first: Future[int] = Future()
    second: Future[int] = Future()
    second.set_result(2)
    threading.Timer(2 * waits.LOOK_SECONDS, lambda: first.set_result(1)).start()

    assert waits.all_ended([first, second]) == [1, 2]
    assert waits.ended(second) == 2
    assert waits.all_ended([]) == []


def test_an_error_does_not_wait_for_the_others() -> None:
    failed: Future[None] = Future()
    failed.set_exception(TimeoutError("of its own"))

    with pytest.raises(TimeoutError, match="of its own"):
        waits.all_ended([Future(), failed])
    with pytest.raises(TimeoutError, match="of its own"):
        waits.ended(failed)


def test_an_interrupt_just_before_a_wait_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal that another thread takes doesn't wake the main one: as if it had come just before the wait."""
    begins = threading.Event()
    real = concurrent.futures.wait

    def wait(*args: Any) -> object:
        begins.set()
        return real(*args)

    def interrupt() -> None:
        begins.wait()
        signal.raise_signal(signal.SIGINT)  # in this thread

    monkeypatch.setattr(waits, "wait", wait)
    threading.Thread(target=interrupt, daemon=True).start()

    with pytest.raises(KeyboardInterrupt):
        waits.ended(Future())
