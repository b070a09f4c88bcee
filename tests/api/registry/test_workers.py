"""Blobs that travel at once: results in order, and what ends the others."""

from __future__ import annotations

import queue
import signal
import threading
from typing import Any

import pytest

from precast.registry.transport import Transport
from precast.registry.workers import each


def test_an_interrupt_that_does_not_wake_the_main_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that comes just before it begins to wait; here another thread takes it."""
    transport, waits = Transport("127.0.0.1:1"), threading.Event()

    class Queue(queue.SimpleQueue[Any]):
        def get(self, *args: Any, **more: Any) -> object:
            waits.set()
            return super().get(*args, **more)

    def action(item: int) -> None:
        if item == 0:
            waits.wait()
            signal.raise_signal(signal.SIGINT)
        transport.stop.wait()

    monkeypatch.setattr(queue, "SimpleQueue", Queue)

    with pytest.raises(KeyboardInterrupt):
        each([0, 1], action, transport, 2)

    assert transport.stop.is_set()


def test_the_first_failure_ends_the_others() -> None:
    transport = Transport("127.0.0.1:1")

    def action(item: int) -> int:
        if item == 1:
            raise ValueError("of item 1")
        transport.stop.wait()
        return item

    with pytest.raises(ValueError, match="of item 1"):
        each([0, 1, 2], action, transport, 3)

    assert transport.stop.is_set()


def test_results_are_in_the_order_of_the_items() -> None:
    assert each([3, 1, 2], lambda item: item * 2, Transport("127.0.0.1:1"), 2) == [6, 2, 4]
