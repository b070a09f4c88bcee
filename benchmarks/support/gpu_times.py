"""Times of calls on a GPU, in CUDA graphs, and the rates that the machine itself reaches."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch


def microseconds(calls: Sequence[Callable[[], Any]], *, runs: int = 5) -> float:
    """The time of one of these calls, captured in a row: the median over `runs` replays."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    return statistics.median(_replayed(graph, 1) for _ in range(runs)) / len(calls)


def replay_microseconds(once: Callable[[], Any], *, runs: int = 5, budget_ms: float = 8.0) -> float:
    """The time of a replay of `once`: the median of `runs` times, each of as many replays as take `budget_ms`."""
    once()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        once()
    graph.replay()
    replays = max(1, min(50, int(1000 * budget_ms / max(_replayed(graph, 1), 1.0))))
    return statistics.median(_replayed(graph, replays) for _ in range(runs))


def _replayed(graph: torch.cuda.CUDAGraph, replays: int) -> float:
    """Microseconds of a replay."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(replays):
        graph.replay()
    end.record()
    end.synchronize()
    return 1000 * start.elapsed_time(end) / replays


def copy_rate() -> float:
    """Bytes a second that are read and written by a copy of 1 GiB."""
    x = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    y = torch.empty_like(x)
    return 2 * x.numel() / microseconds([lambda: y.copy_(x)] * 10) * 1e6


def read_bytes_per_second() -> float:
    """How fast the machine sums 8 GB."""
    x = torch.ones(1 << 31, dtype=torch.float32, device="cuda")
    return 4 * x.numel() / (replay_microseconds(lambda: x.sum()) / 1e6)


def product_flops_per_second() -> float:
    """How fast the machine multiplies square matrices of 8192 in bfloat16."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * 8192**3 / (replay_microseconds(lambda: a @ b, budget_ms=40) / 1e6)
