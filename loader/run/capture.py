"""Steps captured as graphs: which sizes, each recorded once, and what a replay needs.

A captured step has a fixed number of tokens and of slots for sequences. It serves every step that fits: slots without a
sequence are empty sequences, and tokens without one are written nowhere. It is one graph where nothing reads the host.
Else it is cut in front of each call that does: graphs and calls then take turns, and a call's results lie in memory of
the graph in front of it.

Each size goes through three phases. *Warm-up* runs it once, of equal layers the first alone, so that kernels are
compiled and libraries have their workspaces. *Capture* records it. *Replay* is what steps do from then on. Both of the
first run with empty slots: no cache is written, and of what they make nothing is kept but the graph. Every step fills
all of its inputs, so there is none to restore; what was drawn last, which the next step may take as its tokens, the
runner saves and puts back.

All graphs are captured on one stream and share one pool of memory, the largest first: they never run at once, and no
result is read from a graph's memory after its step.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from precast.loader.collector import collector_held
from precast.loader.device import CapturedGraph, Device

if TYPE_CHECKING:
    from precast.loader.program.instructions import HostCall

MAX_PADDING = 2
"""A step takes a captured size of at most so many times its own tokens, while nearer ones are yet to be captured."""


class Size(NamedTuple):
    """Tokens of a captured step, and slots for sequences; it has as many rows of logits as slots."""

    num_tokens: int
    num_seqs: int


class SizedStep(NamedTuple):
    """What runs a step of one size over the places of its inputs: see `Runner`. `warm_up` uses each kernel once."""

    prepare: Callable[[], None]
    warm_up: Callable[[], Iterator[HostCall]]
    pieces: Callable[[], Iterator[HostCall]]


class Memory(NamedTuple):
    """What tells whether a captured step finds its tensors: where its inputs begin, and how often params were bound."""

    address: int
    num_binds: int


class CapturedStep(NamedTuple):
    """Graphs and calls that read the host, in the order in which they run, and on what they were captured."""

    parts: tuple[CapturedGraph | HostCall, ...]
    memory: Memory

    @property
    def num_graphs(self) -> int:
        """Graphs and calls take turns, and graphs begin and end."""
        return len(self.parts) // 2 + 1

    def replay(self) -> None:
        """Run it on what its places hold now."""
        for part in self.parts:
            part.replay()


class Captures:
    """The captured steps of one runner: those made so far, and the sizes that are still to be captured."""

    def __init__(self, device: Device, sizes: Sequence[Size]) -> None:
        """`sizes` in the order in which they are wanted."""
        self.sizes = tuple(size.num_tokens for size in sizes)
        self._device = device
        self._pool = device.pool()
        largest = max(sizes, default=None)
        self._pending = [] if largest is None else [largest, *(size for size in sizes if size != largest)]
        self._steps: dict[Size, CapturedStep] = {}
        self._size_for: dict[int, Size | None] = {}  # by tokens, as long as `_steps` are the same
        self.seconds = 0.0
        self.failure = ""  # why no more are captured, in a few words

    @property
    def num_captured(self) -> int:
        """Sizes that are replayed."""
        return len(self._steps)

    @property
    def num_pending(self) -> int:
        """Sizes that are still to be captured."""
        return len(self._pending)

    @property
    def num_pieces(self) -> int:
        """The most graphs that one step consists of."""
        return max((step.num_graphs for step in self._steps.values()), default=0)

    def size_for(self, num_tokens: int) -> Size | None:
        """The least captured size with so many tokens; None if there is none, or none near enough."""
        if num_tokens not in self._size_for:
            fitting = [size for size in self._steps if num_tokens <= size.num_tokens <= MAX_PADDING * num_tokens]
            self._size_for[num_tokens] = min(fitting, default=None)
        return self._size_for[num_tokens]

    def replay(self, size: Size, memory: Memory) -> int:
        """Run the captured step of this size: so many graphs. `memory` must be what it was captured on."""
        step = self._steps[size]
        if step.memory != memory:
            found = f"a step of {size.num_tokens} tokens was captured for"
            if step.memory.address != memory.address:
                raise RuntimeError(f"{found} inputs at {step.memory.address:#x}, and they are at {memory.address:#x}")
            raise RuntimeError(f"{found} params and caches before the program was bound to other tensors")
        step.replay()
        return step.num_graphs

    def capture_next(self, step_of: Callable[[Size], SizedStep], memory: Memory) -> None:
        """Warm up and capture the next size, on `memory`; there is one.

        If memory runs out, no more are captured, and that is said. Any other error is raised, and leaves the size
        pending.
        """
        size = self._pending[0]
        began = time.perf_counter()
        try:
            self._steps[size] = CapturedStep(self._capture(step_of(size)), memory)
        except BaseException as error:
            if isinstance(error, Exception) and self._device.is_out_of_memory(error):
                self.stop("memory ran out for graphs", error)
                self.seconds += time.perf_counter() - began
                return
            if not self._steps:  # torch gives up a pool with the last graph that used it
                self._pool = self._device.pool()
            raise
        else:
            self._pending.remove(size)
            self._size_for.clear()
        self.seconds += time.perf_counter() - began

    def stop(self, reason: str, error: Exception) -> None:
        """Capture no more, because of this, and say so; what is captured stays. Some size is pending."""
        first_line = next(iter(str(error).splitlines()), "")
        found = f"a step of {self._pending[0].num_tokens} tokens: {first_line}"
        self.failure = reason
        self._pending.clear()
        logging.getLogger("precast").warning("warning: %s: %s", reason, found)

    def keep(self, count: int, failure: str) -> None:
        """Keep the first `count` sizes that were captured. `failure`: why no more are, "" if more are."""
        for size in list(self._steps)[count:]:
            del self._steps[size]
        self._size_for.clear()
        if failure:
            if not self.failure:
                logging.getLogger("precast").warning("warning: no more steps are captured: %s", failure)
            self.failure = failure
            self._pending.clear()

    def drop(self) -> None:
        """Give up all captured steps, and capture no more."""
        self._steps.clear()
        self._size_for.clear()
        self._pending.clear()

    def _capture(self, step: SizedStep) -> tuple[CapturedGraph | HostCall, ...]:
        parts: list[CapturedGraph | HostCall] = []
        with collector_held(), self._device.no_autograd():
            step.prepare()
            for call in step.warm_up():
                call.replay()
            # The device may still be at the warm-up, and at the step in front of it: what is recorded doesn't run.
            pieces = step.pieces()
            while True:
                with self._device.capture(self._device.capture_stream(), self._pool) as graph:
                    call_or_end = next(pieces, None)
                parts.append(graph)
                if call_or_end is None:
                    return tuple(parts)
                parts.append(call_or_end.without_owners())
