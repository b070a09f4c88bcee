"""On a GPU: microseconds to draw one token for each row, without a sort, against the definition, which sorts.

Goal: `precast.sample@2` in Triton takes at most 60 us for 64 rows of 151,936 logits with top-k and top-p, and at most
30 us for up to 16 rows that are greedy or have no filters. Logits are bfloat16, normal with a deviation of 2.5. Both
implementations are replayed as CUDA graphs, many times in a row, so that logits that fit the L2 cache lie there, as
they do when a model has just made them. The tokens are compared too.

    python benchmarks/bench_gpu_sampling.py [--out FILE]
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import harness
import torch

from precast.kernels import registry
from precast.kernels.sampling.sample import sample_2

VOCABULARIES = (128_256, 151_936, 262_208)
ROWS = (1, 8, 16, 64, 256)
ASKED: dict[str, dict[str, float]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.8},
    "top-k, top-p": {"temperature": 0.8, "top_k": 50, "top_p": 0.9},
    "top-p": {"temperature": 0.8, "top_p": 0.9},
    "mixed": {},
}
"""What all rows ask for; in `mixed` they ask for one after the other."""
SIMPLE_ROWS, SIMPLE_MICROSECONDS = 16, 30.0
FILTERED, FILTERED_MICROSECONDS = "64 x 151936, top-k, top-p", 60.0


def arguments(rows: int, size: int, asked: str) -> dict[str, torch.Tensor]:
    """The op's arguments on the GPU, the same numbers in every run."""
    generator = torch.Generator("cuda").manual_seed(rows)
    logits = torch.randn(rows, size, generator=generator, device="cuda", dtype=torch.float32)
    each = [one for name, one in ASKED.items() if name != "mixed"] if asked == "mixed" else [ASKED[asked]]

    def column(name: str, off: float, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor([each[row % len(each)].get(name, off) for row in range(rows)], device="cuda").to(dtype)

    return {
        "logits": (2.5 * logits).bfloat16(),
        "temperature": column("temperature", 1.0, torch.float32),
        "top_k": column("top_k", 0, torch.int32),
        "top_p": column("top_p", 1.0, torch.float32),
        "min_p": column("min_p", 0.0, torch.float32),
        "seeds": torch.arange(rows, device="cuda"),
        "steps": torch.full((rows,), 7, device="cuda"),
    }


def microseconds(
    function: Callable[..., torch.Tensor], given: dict[str, torch.Tensor], *, replays: int, runs: int = 7
) -> tuple[float, torch.Tensor]:
    """The median over `runs` of the time of a replay, each the mean of `replays`; and the tokens."""
    function(**given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens = function(**given)
    graph.replay()
    times = []
    for _ in range(runs):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(replays):
            graph.replay()
        end.record()
        end.synchronize()
        times.append(1000 * start.elapsed_time(end) / replays)
    return statistics.median(times), tokens


def measure(rows: int, size: int, asked: str) -> dict[str, Any]:
    """One row of the table."""
    given = arguments(rows, size, asked)
    ours, tokens = microseconds(registry.resolve("precast.sample", 2, torch.device("cuda")), given, replays=20)
    sorts, expected = microseconds(sample_2, given, replays=2, runs=3)
    return {
        "microseconds": round(ours, 1),
        "definition_microseconds": round(sorts, 1),
        "times_as_fast": round(sorts / ours, 1),
        "different_tokens": int((tokens != expected).sum()),
    }


def main() -> None:
    """Measure and write `results/gpu_sampling.json`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=harness.RESULTS / "gpu_sampling.json")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("needs a CUDA GPU: nothing measured")
        return
    table = {
        f"{rows} x {size}, {asked}": measure(rows, size, asked)
        for size in VOCABULARIES
        for rows in ROWS
        for asked in ASKED
    }
    simple = [
        table[f"{rows} x {size}, {asked}"]["microseconds"]
        for size in VOCABULARIES
        for rows in ROWS
        for asked in ("greedy", "temperature")
        if rows <= SIMPLE_ROWS
    ]
    figures = {
        "rows": table,
        "filtered_microseconds": table[FILTERED]["microseconds"],
        "most_simple_microseconds": max(simple),
        "is_goal_met": table[FILTERED]["microseconds"] <= FILTERED_MICROSECONDS and max(simple) <= SIMPLE_MICROSECONDS,
        "different_tokens": sum(row["different_tokens"] for row in table.values()),
    }
    harness.write(arguments.out, "gpu_sampling", figures)


if __name__ == "__main__":
    main()
