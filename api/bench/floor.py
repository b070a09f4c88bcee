"""What no load can do without, by the standard library alone: a context, and all bytes of a checkpoint on the device.

On a GPU by the driver: its context, a ring of pinned buffers, and threads that read into it and copy from it. On a CPU
threads read into new memory. `python floor.py DEVICE FILE...` does it once, and prints the seconds of each part as
JSON; it is run by its path, so that nothing is imported that isn't needed.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import sys
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

JOB_BYTES = 8 << 20
DEVICE_THREADS = 8
MAX_HOST_THREADS = 16
BUFFERS_A_THREAD = 2
LIBRARY = "libcuda.so.1"
_MULTIPROCESSORS, _MAJOR, _MINOR = 16, 75, 76

Job = tuple[int, int, int, int]
"""A part of a file: the file's descriptor, its place there, its size, and its place in the memory of all files."""


class CudaError(Exception):
    """The driver refuses, or there is none. Says which call, and why."""


class CudaDriver:
    """The driver's own interface, of which little is needed. `context` and what is below it want `open`."""

    def __init__(self) -> None:
        """Raises CudaError without a driver."""
        try:
            self._library = ctypes.CDLL(LIBRARY)
        except OSError:
            raise CudaError(f"there is no {LIBRARY}: no NVIDIA driver is installed") from None
        self.call("cuInit", 0)
        self.context = ctypes.c_void_p()

    def call(self, name: str, *arguments: object) -> None:
        """Raises CudaError."""
        result = getattr(self._library, name)(*arguments)
        if result:
            text = ctypes.c_char_p()
            self._library.cuGetErrorString(result, ctypes.byref(text))
            raise CudaError(f"{name}: {(text.value or b'error').decode()} ({result})")

    def number(self, name: str, *arguments: object) -> int:
        """What a call that gives one integer gives."""
        found = ctypes.c_int()
        self.call(name, ctypes.byref(found), *arguments)
        return found.value

    def count(self) -> int:
        """Devices that this process may use."""
        return self.number("cuDeviceGetCount")

    def describe(self, index: int) -> dict[str, object]:
        """A device's name, memory, capability and the CUDA that its driver has."""
        device = self.number("cuDeviceGet", index)
        name, size = ctypes.create_string_buffer(100), ctypes.c_size_t()
        self.call("cuDeviceGetName", name, len(name), device)
        self.call("cuDeviceTotalMem_v2", ctypes.byref(size), device)
        major, minor, units = (
            self.number("cuDeviceGetAttribute", attribute, device) for attribute in (_MAJOR, _MINOR, _MULTIPROCESSORS)
        )
        version = self.number("cuDriverGetVersion")
        return {
            "name": name.value.decode(), "total_bytes": size.value, "capability": f"{major}.{minor}",
            "multiprocessors": units, "driver_cuda": f"{version // 1000}.{version % 1000 // 10}",
        }  # fmt: skip

    def open(self, index: int) -> None:
        """Make the device's context, for this thread too."""
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(self.context), self.number("cuDeviceGet", index))
        self.use()

    def use(self) -> None:
        """Let this thread's calls go to the context."""
        self.call("cuCtxSetCurrent", self.context)

    def free_bytes(self) -> int:
        """Memory of the device that is free."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self.call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value

    def alloc(self, num_bytes: int) -> int:
        """An address on the device."""
        address = ctypes.c_uint64()
        self.call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(num_bytes))
        return address.value

    def pin(self, num_bytes: int) -> int:
        """An address of pinned memory."""
        address = ctypes.c_void_p()
        self.call("cuMemHostAlloc", ctypes.byref(address), ctypes.c_size_t(num_bytes), 0)
        return address.value or 0

    def stream(self) -> ctypes.c_void_p:
        """A new stream."""
        stream = ctypes.c_void_p()
        self.call("cuStreamCreate", ctypes.byref(stream), 1)
        return stream

    def copy(self, target: int, source: int, num_bytes: int, stream: ctypes.c_void_p) -> None:
        """Queue a copy from the host to the device."""
        self.call(
            "cuMemcpyHtoDAsync_v2", ctypes.c_uint64(target), ctypes.c_void_p(source), ctypes.c_size_t(num_bytes), stream
        )

    def wait(self, stream: ctypes.c_void_p) -> None:
        """Return when all that is queued is done."""
        self.call("cuStreamSynchronize", stream)


def host_threads() -> int:
    """As many as a load on a CPU takes."""
    return min(MAX_HOST_THREADS, 2 * len(os.sched_getaffinity(0)))


def jobs_of(files: list[str]) -> tuple[list[Job], int]:
    """The files, opened and in parts, and the bytes of all."""
    jobs, total = [], 0
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        size = os.fstat(descriptor).st_size
        jobs += [
            (descriptor, start, min(JOB_BYTES, size - start), total + start) for start in range(0, size, JOB_BYTES)
        ]
        total += size
    return jobs, total


def read_to_host(jobs: list[Job], total: int, threads: int) -> memoryview:
    """All parts into new memory, which is returned."""
    memory = memoryview(mmap.mmap(-1, total))

    def work(next_job: Callable[[], Job | None]) -> None:
        for descriptor, start, size, place in iter(next_job, None):
            fill(descriptor, start, memory[place : place + size])

    _share(jobs, work, threads)
    return memory


def read_to_device(cuda: CudaDriver, jobs: list[Job], total: int) -> None:
    """All parts into the device's memory, through a ring of pinned buffers."""
    target = cuda.alloc(total)
    buffers = [cuda.pin(JOB_BYTES) for _ in range(DEVICE_THREADS * BUFFERS_A_THREAD)]

    def work(next_job: Callable[[], Job | None]) -> None:
        cuda.use()
        ring = deque((buffers.pop(), cuda.stream()) for _ in range(BUFFERS_A_THREAD))
        for descriptor, start, size, place in iter(next_job, None):
            ring.rotate(-1)
            address, stream = ring[-1]
            cuda.wait(stream)
            fill(descriptor, start, memoryview((ctypes.c_ubyte * size).from_address(address)).cast("B"))
            cuda.copy(target + place, address, size, stream)
        for _, stream in ring:
            cuda.wait(stream)

    _share(jobs, work, DEVICE_THREADS)


def fill(descriptor: int, start: int, memory: memoryview) -> None:
    """Read a part of a file. Raises OSError, also where the file has become shorter."""
    while len(memory):
        count = os.preadv(descriptor, [memory], start)
        if not count:
            raise OSError(0, "the file ends too early")
        start, memory = start + count, memory[count:]


def _share(jobs: list[Job], work: Callable[[Callable[[], Job | None]], None], threads: int) -> None:
    waiting = deque(jobs)

    def next_job() -> Job | None:
        try:
            return waiting.popleft()
        except IndexError:
            return None

    with ThreadPoolExecutor(threads) as pool:
        for future in [pool.submit(work, next_job) for _ in range(threads)]:
            future.result()


def main(device: str, files: list[str]) -> dict[str, float]:
    """Do it once; the seconds of each part."""
    started = time.perf_counter()
    seconds = {}
    jobs, total = jobs_of(files)
    if device == "cpu":
        read_to_host(jobs, total, host_threads())
    else:
        cuda = CudaDriver()
        cuda.open(int(device.partition(":")[2] or 0))
        seconds["context"] = time.perf_counter() - started
        read_to_device(cuda, jobs, total)
    seconds["read"] = time.perf_counter() - started - sum(seconds.values())
    return seconds


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(sys.argv[1], sys.argv[2:])) + "\n")
    sys.stdout.flush()
    os._exit(0)  # what the system frees by itself is not freed one by one
