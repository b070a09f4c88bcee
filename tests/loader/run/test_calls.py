"""What a step asks of the device: each copy, event and launch costs the host microseconds, and there are few."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tiny_engine import engine_on

from precast.loader.device import Buffer
from precast.loader.engine.params import SamplingParams
from precast.loader.schedule.prefill_budget import DECODE_EVERY
from precast.loader.torch_device import CpuDevice


class CountedEvent:
    """An event of a device that counts what is done with its events."""

    def __init__(self, calls: Counter[str]) -> None:
        self._calls = calls

    def record(self, stream: Any = None) -> None:
        self._calls["record"] += 1

    def wait(self, stream: Any = None) -> None:
        self._calls["wait"] += 1

    def synchronize(self) -> None:
        self._calls["synchronize"] += 1


class CountingDevice(CpuDevice):
    """A CPU that has memory of its own, as a GPU has, and counts what is asked of it."""

    kind = "cuda"

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.copied: list[int] = []

    def copy(self, target: Buffer, source: Buffer, stream: Any = None) -> None:
        self.calls["copy"] += 1
        self.copied.append(target.shape[0])
        super().copy(target, source, stream)

    def event(self, *, timed: bool = False) -> Any:
        self.calls["event"] += 1
        return CountedEvent(self.calls)

    def seconds_between(self, first: object, last: object) -> float:
        self.calls["seconds_between"] += 1
        return 0.001

    def alloc(self, num_bytes: int, *, pinned: bool = False) -> Buffer:
        self.calls["alloc"] += 1
        return super().alloc(num_bytes, pinned=pinned)

    def synchronize(self) -> None:
        self.calls["synchronize the device"] += 1

    @contextmanager
    def capture(self, stream: Any = None, pool: Any = None) -> Iterator[Any]:
        with super().capture(stream, pool) as graph:
            yield Counted(graph, self.calls)


class Counted:
    """A captured graph whose replays are counted."""

    def __init__(self, graph: Any, calls: Counter[str]) -> None:
        self._graph, self._calls = graph, calls

    def replay(self) -> None:
        self._calls["replay"] += 1
        self._graph.replay()


def test_a_decode_step_is_two_copies_one_launch_and_one_event() -> None:
    """Its inputs in one copy and its tokens in another, the graphs, the event of its end, and one wait for that.

    Of steps that are alike, one in some is timed, which is one event more. Nothing is allocated or made.
    """
    device = CountingDevice()
    engine = engine_on(device, slabs=400)
    engine.wait_until_captured()
    for prompt in ([5], [7, 8], [9]):
        engine.submit(prompt, SamplingParams(max_tokens=60, ignore_eos=True))
    for _ in range(10):
        engine.step()
    device.calls.clear()
    device.copied.clear()

    steps = 2 * DECODE_EVERY
    for _ in range(steps):
        engine.step()

    stats = engine.stats
    assert stats.piecewise_steps == stats.steps, "attention reads the host on a CPU"
    assert device.calls == {
        "copy": 2 * steps,
        "replay": engine._runner.captures.num_pieces * steps,
        "record": steps + 2,
        "synchronize": steps,
        "seconds_between": 2,
    }
    assert max(device.copied) < 2000, "of all places, which are longer, the step's own are copied"


def test_steps_of_a_budget_that_is_given_are_not_timed() -> None:
    device = CountingDevice()
    engine = engine_on(device, max_prefill_tokens=16)
    engine.wait_until_captured()
    engine.generate([[5], [7, 8]], SamplingParams(max_tokens=20, ignore_eos=True))

    assert device.calls["seconds_between"] == 0


def test_a_capture_waits_for_no_device() -> None:
    """What is recorded doesn't run: the device may be at the step in front of it meanwhile."""
    device = CountingDevice()
    engine = engine_on(device)
    engine.wait_until_captured()

    assert device.calls["synchronize the device"] == 0
    assert engine.stats.graphs > 0
