"""Reading a checkpoint file through the page cache, and past it (O_DIRECT): which is faster, cold and warm.

Claim: past the page cache a cold file arrives somewhat faster, but is as cold at the next load; through it, the next
load is several times faster. So `precast.ir.weights.sources` reads through the cache. Threads read jobs of 8 MiB, as a
load does, into memory of their own that has been touched before. Modes alternate; cold means that the kernel has
dropped the file's pages, of which a sample says how many were left.

    python benchmarks/bench_reads.py [--folder DIR] [--gib 2] [--out FILE]
"""

from __future__ import annotations

import argparse
import mmap
import os
import statistics
import tempfile
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from support import harness

JOB = 8 << 20
THREADS = (1, 4, 8, 16)
RUNS = 5


def write_file(path: Path, num_bytes: int) -> None:
    """Bytes that no file system compresses, on the disk when this returns."""
    block = os.urandom(JOB)
    with path.open("wb") as file:
        for _ in range(num_bytes // JOB):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())


def drop(path: Path) -> float:
    """Ask the kernel to forget the file's pages; the share of a sample that is cached afterwards."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        return cached_share(descriptor, os.fstat(descriptor).st_size)
    finally:
        os.close(descriptor)


def cached_share(descriptor: int, size: int, samples: int = 256) -> float:
    """The share of pages, one at each of `samples` places, that a read gets without waiting for the disk."""
    found = 0
    for index in range(samples):
        try:
            found += os.preadv(descriptor, [bytearray(1)], size * index // samples, os.RWF_NOWAIT)
        except BlockingIOError:
            continue
    return found / samples


def read(path: Path, flags: int, threads: int, buffers: list[mmap.mmap]) -> float:
    """The seconds in which so many threads read the whole file."""
    descriptor = os.open(path, os.O_RDONLY | flags)
    starts = deque(range(0, os.fstat(descriptor).st_size, JOB))

    def work(buffer: mmap.mmap) -> None:
        while starts:
            try:
                start = starts.popleft()
            except IndexError:
                return
            os.preadv(descriptor, [buffer], start)

    try:
        started = time.perf_counter()
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(work, buffers[:threads]))
        return time.perf_counter() - started
    finally:
        os.close(descriptor)


def measured(path: Path) -> list[dict[str, float | int | str | None]]:
    """Each mode at each number of threads, cold and warm."""
    buffers = [mmap.mmap(-1, JOB) for _ in range(max(THREADS))]
    for buffer in buffers:
        buffer.write(bytes(JOB))
    size = path.stat().st_size
    rows: list[dict[str, float | int | str | None]] = []
    modes = {"page cache": 0, "O_DIRECT": getattr(os, "O_DIRECT", None)}
    for cache in ("cold", "warm"):
        for threads in THREADS:
            times: dict[str, list[float]] = {mode: [] for mode in modes}
            left = 0.0
            for _ in range(RUNS):
                for mode, flags in modes.items():
                    if cache == "cold":
                        left = max(left, drop(path))
                    try:
                        times[mode].append(read(path, flags or 0, threads, buffers))
                    except OSError:  # a file system that has no O_DIRECT
                        continue
            for mode, found in times.items():
                rate = size / statistics.median(found) / 1e9 if found else None
                rows.append({"cache": cache, "threads": threads, "mode": mode, "gb_per_second": rate, "left": left})
                print(rows[-1], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, help="on the disk to measure; by default the temporary one")
    parser.add_argument("--gib", type=int, default=2)
    parser.add_argument("--out", type=Path, default=harness.RESULTS / "reads.json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        path = Path(folder) / "model.safetensors"
        write_file(path, options.gib << 30)
        read(path, 0, 4, [mmap.mmap(-1, JOB) for _ in range(4)])
        rows = measured(path)
    harness.write(options.out, "reading a checkpoint file", {"gib": options.gib, "runs": RUNS, "rows": rows})


if __name__ == "__main__":
    main()
