"""The CUDA driver by itself, as the driver backend calls it: context, memory, copies, a kernel, a graph, events.

    python benchmarks/checks/check_driver_device.py

Neither torch nor Triton is imported; NVRTC compiles the kernel. Each step says what it found and how long it took; one
that fails doesn't end the others. The last line is JSON.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable

import numpy as np

from precast.loader.device import Buffer, host_bytes
from precast.loader.driver.device import DriverDevice
from precast.loader.driver.kernels import library
from precast.loader.driver.launches import Prepared

SOURCE = r"""
extern "C" __global__ void add(long long* out, const long long* x, long long y, float z, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = x[i] + y + (long long)z;
}
"""
COUNT = 1000


class Checks:
    """Steps that build on one another: what one makes stands in `held` for the next."""

    def __init__(self) -> None:
        self.device: DriverDevice | None = None
        self.held: dict[str, object] = {}
        self.found: dict[str, object] = {}

    def run(self, name: str, check: Callable[[], object]) -> None:
        """Do one step, whatever happens in it."""
        began = time.perf_counter()
        try:
            said = check()
        except BaseException as error:  # noqa: BLE001 - the others are to run
            said = f"FAILED {type(error).__name__}: {error}"
        seconds = time.perf_counter() - began
        self.found[name] = {"said": str(said), "ms": round(1000 * seconds, 3)}
        print(f"{name:<10} {1000 * seconds:9.3f} ms  {said}", flush=True)

    def context(self) -> str:
        """A device."""
        self.device = DriverDevice(0)
        return f"{self.device.model} {self.device.capability}, {self.device.free_bytes() >> 30} GiB free"

    def memory(self) -> str:
        """Memory of the device and of the host, and numbers in it."""
        device = self._device
        for name, pinned in (("x", False), ("out", False), ("host", True), ("back", True)):
            self.held[name] = device.alloc(8 * COUNT, pinned=pinned)
        self._numbers("host")[:] = np.arange(COUNT)
        return "4 buffers"

    def copies(self) -> str:
        """There and back again."""
        device = self._device
        with device.use():
            device.zero(self._buffer("out"))
            device.copy(self._buffer("x"), self._buffer("host"))
            device.copy(self._buffer("back"), self._buffer("x"))
        device.synchronize()
        assert self._numbers("back").tolist() == list(range(COUNT)), self._numbers("back")[:4]
        return "equal"

    def kernel(self) -> str:
        """A kernel of an image."""
        from precast.kernels.cuda_source import _compile

        major, minor = self._device.capability
        self.held["image"] = _compile(SOURCE, "add.cu", {}, (f"--gpu-architecture=sm_{major}{minor}",))
        return f"{len(self.held['image'])} bytes"  # type: ignore[arg-type]

    def load(self) -> str:
        """The kernel, loaded."""
        self.held["kernel"] = self._device.load(self.held["image"], "add")  # type: ignore[arg-type]
        return "loaded"

    def launch(self) -> str:
        """The kernel, launched with each kind of argument, and by programmatic dependent launch."""
        device = self._device
        with device.use():
            for pdl in (False, True):
                self._prepared(5, pdl=pdl).launch(device.current)
            device.copy(self._buffer("back"), self._buffer("out"))
        device.synchronize()
        expected = [i + 5 + 2 for i in range(COUNT)]
        assert self._numbers("back").tolist() == expected, self._numbers("back")[:4]
        return "equal"

    def graph(self) -> str:
        """Launches and a copy, captured, and replayed on other numbers."""
        device = self._device
        prepared = self._prepared(7, pdl=True)
        with device.use():
            with device.capture() as graph:
                for _ in range(4):
                    prepared.launch(device.current)
                device.copy(self._buffer("back"), self._buffer("out"))
            self._numbers("host")[:] = 100
            device.copy(self._buffer("x"), self._buffer("host"))
            graph.replay()
        device.synchronize()
        assert set(self._numbers("back").tolist()) == {109}, self._numbers("back")[:4]
        return "equal"

    def events(self) -> str:
        """The time between two events, and what a launch costs the host."""
        device = self._device
        prepared = self._prepared(7, pdl=True)
        with device.use():
            first, last = device.event(timed=True), device.event(timed=True)
            first.record()
            began = time.perf_counter()
            for _ in range(1000):
                prepared.launch(device.current)
            host = (time.perf_counter() - began) / 1000
            last.record()
            last.synchronize()
            return f"{1e6 * host:.2f} us a launch on the host, {1e3 * device.seconds_between(first, last):.3f} us there"

    def failure(self) -> str:
        """A refusal has the driver's name; memory that there isn't is known as such."""
        try:
            self._device.alloc(1 << 50)
        except library.DriverError as error:
            return str(error) if self._device.is_out_of_memory(error) else f"FAILED: {error}"
        raise AssertionError("a PiB was allocated")

    def imports(self) -> str:
        """What was imported."""
        loaded = sorted({"torch", "triton"} & set(sys.modules))
        assert not loaded, loaded
        return "neither torch nor triton"

    @property
    def _device(self) -> DriverDevice:
        assert self.device is not None, "no device"
        return self.device

    def _buffer(self, name: str) -> Buffer:
        found = self.held[name]
        assert isinstance(found, Buffer)
        return found

    def _numbers(self, name: str) -> np.ndarray:
        return np.frombuffer(host_bytes(self._buffer(name)), np.int64)

    def _prepared(self, plus: int, *, pdl: bool) -> Prepared:
        kernel = self.held["kernel"]
        values = [self._buffer("out").pointer, self._buffer("x").pointer, plus, 2.0, COUNT]
        return Prepared(kernel.handle, (8, 1, 1), (128, 1, 1), 0, values, pdl=pdl)  # type: ignore[attr-defined]


def main() -> None:
    """All steps."""
    checks = Checks()
    for name in ("context", "memory", "copies", "kernel", "load", "launch", "graph", "events", "failure", "imports"):
        checks.run(name, getattr(checks, name))
    print(json.dumps(checks.found))


if __name__ == "__main__":
    main()
