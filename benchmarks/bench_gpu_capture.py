"""On a GPU: what it takes to capture all default sizes of a model's steps, and what a server sees of it.

Claims: all of it takes seconds and little memory beside the weights, and each pause while requests are served is short.
Beside it, in the same run, the usual way: `torch.cuda.graph` with memory of its own for each size, after three runs.
The shape is a published one, with random weights.

    python benchmarks/bench_gpu_capture.py --build DIR [SHAPE ...]
    python benchmarks/bench_gpu_capture.py --bundles DIR [SHAPE ...]
"""

from __future__ import annotations

import argparse
import statistics
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from support import harness, shapes
from support.random_model import RandomModel

import precast
from precast.ir.artifact import Bundle
from precast.loader.engine.params import SamplingParams
from precast.loader.run.capture import Size
from precast.loader.run.runner import Runner
from precast.loader.sizing import EngineLimits

SHAPES = ("llama-3.1-8b",)
GOALS = {"seconds": 4.0, "gib": 0.8, "longest_pause_ms": 20.0}
MAX_SEQ_LEN = 8192
LIMITS = EngineLimits(256, 8192, MAX_SEQ_LEN, 4 << 30)
WARM_UPS = 3
"""Runs before a capture, in PyTorch's examples."""


def served(model: RandomModel) -> dict[str, Any]:
    """All sizes captured between the steps of eight requests, the first of which runs op by op; twice, the second time
    with all kernels compiled."""
    found, counted = {}, model.arena(model.default_sizes).graphs
    for name in ("first", "again"):
        runner = model.runner(model.default_sizes)
        engine = model.engine(runner)
        pauses = timed(runner)
        for i in range(8):
            engine.submit([3 + i] * (20 + i), SamplingParams(max_tokens=1000, ignore_eos=True))
        engine.step()
        before = bytes_in_use()
        while engine.stats.graphs_pending:
            engine.step()
        stats, taken = engine.stats, bytes_in_use() - before
        found[name] = {
            "sizes": stats.graphs, "largest": max(model.default_sizes), "pieces": runner.captures.num_pieces,
            "seconds": round(stats.capture_seconds, 2), "bytes": taken, "bytes_counted": counted,
            "pauses_ms": pauses, "longest_pause_ms": max(pauses.values()),
            "median_pause_ms": round(statistics.median(pauses.values()), 1),
        }  # fmt: skip
        engine.close()
    return found


def timed(runner: Runner) -> dict[int, float]:
    """Milliseconds of each capture from now on, by size; the device has nothing left to do when one begins."""
    found: dict[int, float] = {}
    capture_next = runner.capture_next

    def noted() -> None:
        size = runner.captures._pending[0]
        torch.cuda.synchronize()
        found[size.num_tokens] = milliseconds(capture_next)

    runner.capture_next = noted  # type: ignore[method-assign]
    return found


def naive(model: RandomModel) -> dict[str, Any]:
    """The same steps, each captured by `torch.cuda.graph` into a pool of its own, after `WARM_UPS` runs."""
    runner = model.runner(model.default_sizes, is_placed=False)
    graphs, pauses = [], {}
    before = bytes_in_use()
    for size in runner.captures._pending:

        def capture(size: Size = size) -> None:
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(WARM_UPS):
                    run(runner, size)
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                run(runner, size)
            graphs.append(graph)

        pauses[size.num_tokens] = milliseconds(capture)
    taken = bytes_in_use() - before
    runner.close()
    return {
        "sizes": len(graphs), "seconds": round(sum(pauses.values()) / 1000, 2), "bytes": taken,
        "longest_pause_ms": max(pauses.values()), "median_pause_ms": round(statistics.median(pauses.values()), 1),
    }  # fmt: skip


def nodes(model: RandomModel) -> dict[str, int]:
    """Nodes of the graphs of the smallest and the largest step: kernels, copies and fills."""
    from cuda.bindings import runtime

    runner, found = model.runner(model.default_sizes), {}
    for count in (min(model.default_sizes), max(model.default_sizes)):
        size = next(size for size in runner.captures._pending if size.num_tokens == count)
        run(runner, size)
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        with torch.cuda.graph(graph):
            run(runner, size)
        _, _, number = runtime.cudaGraphGetNodes(runtime.cudaGraph_t(init_value=graph.raw_cuda_graph()))
        found[str(count)] = int(number)
    runner.close()
    return found


def run(runner: Runner, size: Size) -> None:
    """A step of empty slots, where nothing reads the host."""
    with torch.inference_mode():
        if not torch.cuda.is_current_stream_capturing():
            runner._step_of(size).prepare()
        for call in runner._pieces(size):
            call.replay()


def milliseconds(work: Callable[[], object]) -> float:
    """Until the device has done it, too."""
    started = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return round(1000 * (time.perf_counter() - started), 1)


def bytes_in_use() -> int:
    """Of the GPU, by whomever."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return total - free


def measure(bundle: Path) -> dict[str, Any]:
    """All cases; one that fails says so, and the others go on."""
    model = RandomModel(Bundle.open(bundle), LIMITS)
    found: dict[str, Any] = {}
    for case in (served, naive, nodes):
        started = time.perf_counter()
        try:
            found[case.__name__] = case(model)
        except Exception as error:  # noqa: BLE001
            traceback.print_exc()
            found[case.__name__] = {"error": repr(error)}
        print(f"{case.__name__}: {time.perf_counter() - started:.1f} s", flush=True)
    first = found["served"].get("first")
    if first is not None:
        reached = {"seconds": first["seconds"], "gib": first["bytes"] / 2**30}
        reached["longest_pause_ms"] = found["served"]["again"]["longest_pause_ms"]
        found["goals"] = {
            name: {"goal": goal, "found": round(reached[name], 3), "is_met": reached[name] <= goal}
            for name, goal in GOALS.items()
        }
    return found


def main() -> None:
    """Build, or measure and write `results/gpu_capture.json`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=Path)
    parser.add_argument("--bundles", type=Path)
    parser.add_argument("--out", type=Path, default=harness.RESULTS / "gpu_capture.json")
    parser.add_argument("shapes", nargs="*", default=SHAPES)
    arguments = parser.parse_args()
    if arguments.build:
        for name in arguments.shapes:
            source = shapes.write_config(name, arguments.build / f"{name}.config")
            precast.build(source, arguments.build / f"{name}.bundle", dtype="bfloat16", max_seq_len=MAX_SEQ_LEN)
        return
    if not torch.cuda.is_available() or arguments.bundles is None:
        print("needs a CUDA GPU and --bundles: nothing measured")
        return
    found = {}
    for name in arguments.shapes:
        found[name] = measure(arguments.bundles / f"{name}.bundle")
        torch.cuda.empty_cache()
        harness.write(arguments.out, "gpu_capture", found)


if __name__ == "__main__":
    main()
