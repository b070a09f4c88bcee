"""On the GPUs of one host: microseconds of an all-reduce of rows of 4096 bfloat16 numbers, by NCCL and by our kernels.

Each rank is a process. All-reduces follow one another in a CUDA graph, over other tensors, and the graph is replayed;
the time is the slowest rank's. Every way is compared with the sum in float32, eagerly and after replays, and its bits
with those of the other ranks. `one_shot` and `two_shot` are tried over several grids; `norm` is the sum with the
residual stream and its norm besides, in the same launch. `moved` is the time that the bytes of one rank take over the
link, at the rate of a copy to another GPU that is measured in the same run. What is best for which rows is printed:
`kernels/collectives/ways.py` says it as data.

    python benchmarks/bench_gpu_collectives.py [--ranks N] [--out FILE]
"""

from __future__ import annotations

import argparse
import contextlib
import io
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
from support import harness
from torch import distributed

from precast.kernels.collectives.group import Norm
from precast.kernels.collectives.peers import Peers
from precast.kernels.collectives.processes import Nccl
from precast.kernels.collectives.ways import Way

WIDTH = 4096
ROWS = (1, 8, 64, 256, 1024, 2048, 4096, 8192)
CALLS, REPLAYS = 20, 10
SECONDS = 100
"""After which ranks that are still at it are ended."""

ONE_SHOT = [Way("one_shot", None, blocks, ahead) for blocks, ahead in
            ((16, 2), (64, 2), (128, 1), (128, 2), (264, 1), (264, 2), (264, 4), (528, 2))]  # fmt: skip
TWO_SHOT = [Way("two_shot", None, blocks) for blocks in (64, 128, 264)]
NORM = [Way("one_shot", None, blocks, ahead) for blocks, ahead in ((132, 2), (264, 1), (264, 2), (264, 4), (528, 2))]
WAYS = {
    "nccl": Way("nccl", None),
    **{f"{way.kernel} {way.num_blocks} {way.ahead}": way for way in (*ONE_SHOT, *TWO_SHOT)},
    **{f"norm {way.num_blocks} {way.ahead}": way for way in NORM},
}  # fmt: skip
WAYS |= {f"norm two_shot {way.num_blocks}": way for way in TWO_SHOT[1:]}
"""By name: the kernel, its grid, and how many of a thread's vectors are sent ahead."""


def given(rank: int, rows: int, device: torch.device) -> torch.Tensor:
    """What a rank has: the same numbers wherever they are drawn."""
    made = torch.Generator(device).manual_seed(1000 * rows + rank)
    return torch.randn(rows, WIDTH, generator=made, device=device).bfloat16()


def wrong(out: torch.Tensor, size: int) -> str:
    """What is wrong with a sum; empty if it is within two roundings of that in float32."""
    parts = [given(each, len(out), out.device).float() for each in range(size)]
    expected = sum(parts[1:], parts[0])
    excess = float(((out.float() - expected).abs() - expected.abs() * 2**-7 - 1e-5).max())
    return f"an element is off by {excess:.3g} more than roundings" if excess > 0 or excess != excess else ""


def timed(run: Callable[[torch.Tensor, torch.Tensor], None], x: torch.Tensor, outs: list[torch.Tensor]) -> float:
    """Microseconds of a call in a graph of `CALLS`, the median of replays."""
    xs = [x.clone() for _ in outs]
    run(outs[0], xs[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for i in range(CALLS):
            run(outs[i % len(outs)], xs[i % len(xs)])
    begins, ends = ([torch.cuda.Event(enable_timing=True) for _ in range(REPLAYS)] for _ in range(2))
    for begin, end in zip(begins, ends, strict=True):
        begin.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    times = [1000 * begin.elapsed_time(end) / CALLS for begin, end in zip(begins, ends, strict=True)]
    return statistics.median(times[2:])


def measured(run: Callable[[torch.Tensor, torch.Tensor], None], rank: int, size: int, rows: int) -> dict[str, Any]:
    """A way's time for so many rows, what was wrong, and a checksum of its bits."""
    x = given(rank, rows, torch.device("cuda", rank))
    outs = [torch.full_like(x, float("nan")) for _ in range(4)]
    microseconds = timed(run, x, outs)
    after = wrong(outs[3], size)
    outs[0].fill_(float("nan"))
    run(outs[0], x)
    bits = int(outs[0].view(torch.int16).long().sum())
    return {"microseconds": microseconds, "wrong": after or wrong(outs[0], size), "bits": bits}


def copy_rate(rank: int, size: int) -> float:
    """Bytes a second of a copy of 256 MiB to the next GPU, while its ranks do the same."""
    source = torch.empty(256 << 20, dtype=torch.uint8, device=f"cuda:{rank}")
    target = torch.empty_like(source, device=f"cuda:{(rank + 1) % size}")
    target.copy_(source)
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(4):
        target.copy_(source)
    torch.cuda.synchronize()
    return 4 * source.numel() / (time.perf_counter() - started)


def rank_main(rank: int, size: int, folder: str, pipe: Connection) -> None:
    """One rank: sends ("name", rows, result) for each measurement, in the order of all ranks."""
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    store = distributed.FileStore(f"{folder}/store", size)
    options = distributed.ProcessGroupNCCL.Options()
    nccl = Nccl(distributed.ProcessGroupNCCL(store, rank, size, options), rank, size)

    def exchange(name: str, said: bytes) -> list[bytes]:
        store.set(f"{name}/{rank}", said)
        return [store.get(f"{name}/{each}") for each in range(size)]

    store.set_timeout(timedelta(seconds=60))
    group = Peers(nccl, device, exchange, (ONE_SHOT[0], TWO_SHOT[0]), limit=20.0)
    pipe.send(("copy", 0, copy_rate(rank, size)))
    weight = torch.linspace(0.5, 1.5, WIDTH, device=device).bfloat16()

    def normed(out: torch.Tensor, x: torch.Tensor) -> None:
        """The residual stream is 0, so that the sum is what an all-reduce gives."""
        assert group.all_reduce_norm(scratch[: len(x)], out, x, zeros[: len(x)], weight, Norm(1e-5, 0.0, True))

    zeros, scratch = (torch.zeros(ROWS[-1], WIDTH, device=device, dtype=torch.bfloat16) for _ in range(2))
    for rows in ROWS:
        for name, way in WAYS.items():
            group.ways = (way,)
            run = normed if name.startswith("norm") else group.all_reduce
            pipe.send((name, rows, measured(run, rank, size, rows)))
    exchange("end", b"")
    pipe.send(("end", 0, None))


def gathered(size: int) -> dict[tuple[str, int], list[Any]]:
    """What all ranks measured, by way and rows; as far as they came, if one fails or hangs."""
    context, found = multiprocessing.get_context("spawn"), {}
    with tempfile.TemporaryDirectory() as folder:
        pairs = [context.Pipe(duplex=False) for _ in range(size)]
        ranks = [context.Process(target=rank_main, args=(rank, size, folder, pairs[rank][1])) for rank in range(size)]
        for process in ranks:
            process.start()
        for _, theirs in pairs:
            theirs.close()
        until, reading = time.monotonic() + SECONDS, {mine for mine, _ in pairs}
        while reading and time.monotonic() < until:
            for pipe in wait(list(reading), timeout=max(0.0, until - time.monotonic())):
                try:
                    name, rows, result = pipe.recv()  # of our own processes
                    found.setdefault((name, rows), []).append(result)
                except EOFError:
                    reading.discard(pipe)
        for process in ranks:
            process.join(timeout=5 if not reading else 0)
            if process.is_alive():
                process.kill()
    return found


def row(found: dict[tuple[str, int], list[Any]], rows: int, size: int) -> dict[str, Any]:
    """The slowest rank's microseconds of each way, and what was wrong."""
    made: dict[str, Any] = {}
    for (name, at), results in found.items():
        if at != rows or name in ("copy", "end"):
            continue
        if len(results) < size:
            made[name] = f"{len(results)} of {size} ranks"
        elif any(each["wrong"] for each in results):
            made[name] = next(each["wrong"] for each in results if each["wrong"])
        elif len({each["bits"] for each in results}) > 1:
            made[name] = "the ranks have different bits"
        else:
            made[name] = round(max(each["microseconds"] for each in results), 2)
    return made


KINDS = ("nccl", "one_shot", "two_shot", "norm")


def has(times: dict[str, float], kind: str) -> bool:
    """Whether a way of this kind was measured."""
    return any(name.split()[0] == kind for name in times)


def main() -> None:
    """Measure and write `results/gpu_collectives.json`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--out", type=Path, default=harness.RESULTS / "gpu_collectives.json")
    arguments = parser.parse_args()
    if torch.cuda.device_count() < arguments.ranks:
        sys.exit(f"wants {arguments.ranks} GPUs, torch sees {torch.cuda.device_count()}")
    started = time.perf_counter()
    found = gathered(arguments.ranks)
    rate = min(found.get(("copy", 0), [1.0]))
    figures: dict[str, Any] = {"ranks": arguments.ranks, "copy_gigabytes_per_second": round(rate / 1e9), "rows": {}}
    for rows in ROWS:
        made = row(found, rows, arguments.ranks)
        moved = 1e6 * 2 * rows * WIDTH * 2 * (arguments.ranks - 1) / arguments.ranks / rate
        figures["rows"][str(rows)] = {"moved": round(moved, 2), **made}
        times = {name: value for name, value in made.items() if isinstance(value, float)}
        best = [min((v, n) for n, v in times.items() if n.split()[0] == kind) for kind in KINDS if has(times, kind)]
        failed = {name: value for name, value in made.items() if not isinstance(value, float)}
        print(
            f"{rows} rows: moved {moved:.1f};", *(f"{name}: {value}" for value, name in best), failed or "", flush=True
        )
    ended = len(found.get(("end", 0), []))
    figures["ranks_that_ended"], figures["seconds"] = ended, round(time.perf_counter() - started)
    print(f"copy {rate / 1e9:.0f} GB/s, {ended} ranks ended, {figures['seconds']} s")
    with contextlib.redirect_stdout(io.StringIO()):
        harness.write(arguments.out, "gpu_collectives", figures)


if __name__ == "__main__":
    main()
