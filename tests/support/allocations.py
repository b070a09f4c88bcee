"""How many bytes a piece of code has allocated at most, as torch's allocators count them."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch.profiler import ProfilerActivity, profile

from precast.loader.torch_device import cut_blocks_to_size


def peak_bytes(run: Callable[[], object], device: torch.device | None = None) -> int:
    """The most bytes that `run` holds at one time beyond those that are allocated when it begins.

    On a CPU these are the bytes that were asked for, each allocation and each release in the order in which they
    happen; on a GPU the allocator's blocks. What `run` returns is still held at the end.
    """
    if device is not None and device.type == "cuda":
        cut_blocks_to_size(device)
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        with _without_collection():
            result = run()
            torch.cuda.synchronize(device)
        del result
        return torch.cuda.max_memory_allocated(device) - before
    with _without_collection(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        result = run()
        del result
    changes = [event for event in record.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = peak = 0
    for event in sorted(changes, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


@contextmanager
def _without_collection() -> Iterator[None]:
    """Older garbage stays for the time: its release would be taken for one of the code's.

    To collect it first would take seconds each time in a process that has traced many models.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
