"""The CUDA driver as its documentation describes it, for tests without a GPU: a GPU whose memory is this process's.

Copies are made at once, kernels do nothing and are counted. `precast.loader.driver.library.function` is replaced by
`CudaDriver.function`.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

OUT_OF_MEMORY = 2
_NAMES = {OUT_OF_MEMORY: b"CUDA_ERROR_OUT_OF_MEMORY"}


class CudaDriver:
    """The calls that `precast.loader.driver` makes.

    `device_bytes` and `pinned_bytes` are what can be had of each kind of memory; `calls` counts the calls by name, and
    `most_pinned`, `most_device` are the most bytes that were held at once. `before`: called with the name and the
    arguments of each call, before it is made; a number that it returns is the call's status.
    """

    def __init__(self, *, device_bytes: int = 1 << 40, pinned_bytes: int = 1 << 40) -> None:
        self.limits = {"device": device_bytes, "pinned": pinned_bytes}
        self.held = {"device": 0, "pinned": 0}
        self.most = dict(self.held)
        self.calls: Counter[str] = Counter()
        self.before: Callable[..., int | None] = lambda name, *args: None
        self._memory: dict[int, tuple[str, int, object]] = {}
        self._numbers = itertools.count(1)
        self._lock = threading.RLock()  # whatever is collected may give memory back at any time

    def function(self, name: str) -> Callable[..., int]:
        """As `library.function`."""

        def run(*args: Any) -> int:
            self.calls[name] += 1
            status = self.before(name, *args)
            return getattr(self, name, self._number)(*args) if status is None else status

        return run

    def address_of(self, place: int) -> tuple[str, int]:
        """Which kind of memory an address lies in, "other" for none of the driver's, and how far from its beginning."""
        with self._lock:
            for start, (kind, size, *_) in self._memory.items():
                if 0 <= place - start < size:
                    return kind, place - start
        return "other", place

    def cuDeviceGetCount(self, count: Any) -> int:
        count._obj.value = 1
        return 0

    def cuDeviceGet(self, device: Any, index: int) -> int:
        device._obj.value = index
        return 0

    def cuDeviceGetName(self, text: Any, size: int, device: int) -> int:
        text.value = b"by hand"
        return 0

    def cuDeviceGetAttribute(self, found: Any, which: int, device: int) -> int:
        found._obj.value = {75: 9, 76: 0, 97: 227 << 10}[which]
        return 0

    def cuMemGetInfo_v2(self, free: Any, total: Any) -> int:
        free._obj.value, total._obj.value = self.limits["device"] - self.held["device"], self.limits["device"]
        return 0

    def cuMemAlloc_v2(self, found: Any, num_bytes: int) -> int:
        return self._alloc("device", found, num_bytes)

    def cuMemHostAlloc(self, found: Any, num_bytes: int, flags: int) -> int:
        return self._alloc("pinned", found, num_bytes)

    def cuMemHostRegister_v2(self, address: int, num_bytes: int, flags: int) -> int:
        return self._hold("pinned", num_bytes) or self._known(address, "pinned", num_bytes)

    def cuMemHostGetDevicePointer_v2(self, found: Any, address: int, flags: int) -> int:
        found._obj.value = address
        return 0

    def cuMemFree_v2(self, address: int) -> int:
        with self._lock:
            kind, num_bytes, _ = self._memory.pop(address)
            self.held[kind] -= num_bytes
        return 0

    cuMemFreeHost = cuMemHostUnregister = cuMemFree_v2

    def cuMemcpyAsync(self, target: int, source: int, num_bytes: int, stream: Any) -> int:
        ctypes.memmove(target, source, num_bytes)
        return 0

    def cuMemsetD8Async(self, target: int, value: int, num_bytes: int, stream: Any) -> int:
        ctypes.memset(target, value, num_bytes)
        return 0

    def cuFuncGetAttribute(self, found: Any, which: int, function: int) -> int:
        found._obj.value = 0
        return 0

    def cuEventElapsedTime(self, found: Any, first: int, last: int) -> int:
        found._obj.value = 1.0
        return 0

    def cuStreamEndCapture(self, stream: int, graph: Any) -> int:
        return self._number(graph)

    def cuGetErrorName(self, status: int, text: Any) -> int:
        text._obj.value = _NAMES.get(status, b"CUDA_ERROR_UNKNOWN")
        return 0

    def _number(self, *args: Any) -> int:
        """What makes something gives its number; of what else there is nothing to do."""
        if args and hasattr(args[0], "_obj"):
            args[0]._obj.value = next(self._numbers)
        return 0

    def _alloc(self, kind: str, found: Any, num_bytes: int) -> int:
        if status := self._hold(kind, num_bytes):
            return status
        memory = mmap.mmap(-1, num_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0))
        kept_here = ctypes.c_char.from_buffer(memory)
        found._obj.value = ctypes.addressof(kept_here)
        return self._known(found._obj.value, kind, num_bytes, kept_here)

    def _hold(self, kind: str, num_bytes: int) -> int:
        with self._lock:
            if self.held[kind] + num_bytes > self.limits[kind]:
                return OUT_OF_MEMORY
            self.held[kind] += num_bytes
            self.most[kind] = max(self.most[kind], self.held[kind])
        return 0

    def _known(self, address: int, kind: str, num_bytes: int, kept: object = None) -> int:
        with self._lock:
            self._memory[address] = kind, num_bytes, kept
        return 0
