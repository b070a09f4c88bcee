"""How long work takes on a GPU, as captured steps run it: replayed, without what the host does for it."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import partial

import torch

Timer = Callable[[Sequence[Callable[[], object]]], list[float]]
"""The microseconds of each of several pieces of work, on the current device."""


def replayed(runs: Sequence[Callable[[], object]], *, rounds: int = 7, warm_ups: int = 2) -> list[float]:
    """The median microseconds of each, captured as a CUDA graph; they are replayed in turn, round by round.

    So what changes meanwhile, as the GPU's clock, is the same for all.
    """
    graphs = [_captured(run) for run in runs]
    times: list[list[float]] = [[] for _ in graphs]
    for number in range(warm_ups + rounds):
        for graph, found in zip(graphs, times, strict=True):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            if number >= warm_ups:
                found.append(1000 * start.elapsed_time(end))
    return [statistics.median(found) for found in times]


replayed_briefly: Timer = partial(replayed, rounds=3, warm_ups=1)
"""The same by fewer rounds: enough to see what may be the fastest."""


def _captured(run: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """`run` once, and then as a graph."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph
