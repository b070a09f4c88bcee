"""A CUDA GPU through the driver alone, as a device of the loader's (`precast.loader.device`). No torch.

It works in the device's primary context, which other libraries of the process share.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from ctypes import c_float, c_int, c_size_t, c_uint64, c_void_p
from typing import Literal, NamedTuple

from precast.ir.errors import TargetError
from precast.ir.weights.tensorfile import element_bytes
from precast.loader.device import Arguments, Buffer, Dim3, Event, Kernel, Pool, Stream
from precast.loader.driver import library
from precast.loader.driver.library import call, made

_LOOKS_BETWEEN_SLEEPS = 64
"""How often an event is asked for before other threads are let run."""


class DriverDevice:
    """A CUDA GPU, by its index. Memory, events and graphs are given back when nobody holds them any more.

    A thread works on the stream that `use` gave it last, at first on the device's own.
    """

    kind: Literal["cpu", "cuda"] = "cuda"

    def __init__(self, index: int = 0) -> None:
        """Makes the device's context. Raises TargetError where the driver or the device is missing."""
        _check_there(index)
        self.name = f"cuda:{index}"
        self._device = made("cuDeviceGet", c_int, index)
        self.context: int = made("cuDevicePrimaryCtxRetain", c_void_p, self._device)
        self._streams = threading.local()
        with self.use():
            self._own_stream = self.stream()
        self._captures_on: int | None = None

    @property
    def capability(self) -> tuple[int, int]:
        """The compute capability."""
        return self._attribute(library.COMPUTE_MAJOR), self._attribute(library.COMPUTE_MINOR)

    @property
    def number(self) -> int:
        """The device as the driver counts it."""
        found: int = self._device
        return found

    @property
    def uuid(self) -> str:
        """What tells the GPU from all others."""
        found = (ctypes.c_ubyte * 16)()
        call("cuDeviceGetUuid_v2", found, self._device)
        return bytes(found).hex()

    @property
    def model(self) -> str:
        """The GPU's name, as NVIDIA gives it."""
        text = ctypes.create_string_buffer(256)
        call("cuDeviceGetName", text, len(text), self._device)
        return text.value.decode()

    @property
    def current(self) -> int:
        """The stream that this thread works on."""
        return getattr(self._streams, "current", None) or self._own_stream

    def alloc(self, num_bytes: int, *, pinned: bool = False) -> Buffer:
        """As the interface says."""
        owner = _Memory(self, num_bytes, pinned=pinned)
        return Buffer(owner.address, "uint8", (num_bytes,), (1,), owner)

    def pin(self, memory: mmap.mmap) -> Buffer:
        """Memory of this process, pinned until nobody holds the buffer. Raises DriverError where it can't be, or where
        kernels would have to read it at another address."""
        owner = _Registered(self, memory)
        return Buffer(owner.address, "uint8", (len(memory),), (1,), owner)

    def copy(self, target: Buffer, source: Buffer, stream: Stream = None) -> None:
        """As the interface says; both lie in row-major order without gaps."""
        num_bytes = math.prod(target.shape) * element_bytes(target.dtype)
        if num_bytes:
            call("cuMemcpyAsync", target.pointer, source.pointer, num_bytes, stream or self.current)

    def zero(self, buffer: Buffer) -> None:
        """As the interface says."""
        num_bytes = math.prod(buffer.shape)
        if isinstance(buffer.owner, _Memory) and buffer.owner.pinned:
            ctypes.memset(buffer.pointer, 0, num_bytes)
        elif num_bytes:
            call("cuMemsetD8Async", buffer.pointer, 0, num_bytes, self.current)

    def part(self, buffer: Buffer, start: int, num_bytes: int) -> Buffer:
        """As the interface says."""
        return buffer.view(start, (num_bytes,))

    def load(self, image: bytes, name: str) -> Kernel:
        """As the interface says, of a cubin; it may take all shared memory that the device has."""
        with self.use(), relaxed_capture():
            module = _Module(self, image)
            found = LoadedKernel(module, made("cuModuleGetFunction", c_void_p, module.handle, name.encode()))
            fixed = made("cuFuncGetAttribute", c_int, library.FUNCTION_SHARED_BYTES, found.handle)
            most = self._attribute(library.MOST_SHARED_BYTES) - fixed
            call("cuFuncSetAttribute", found.handle, library.FUNCTION_MOST_DYNAMIC_BYTES, most)
        return found

    def launch(
        self, kernel: Kernel, grid: Dim3, block: Dim3, args: Arguments, shared_bytes: int = 0, stream: Stream = None
    ) -> None:
        """As the interface says. Integers and addresses are passed as 64 bits, floats as float32."""
        from precast.loader.driver.launches import Prepared

        assert isinstance(kernel, LoadedKernel)
        values = [each.pointer if isinstance(each, Buffer) else each for each in args]
        Prepared(kernel.handle, grid, block, shared_bytes, values).launch(stream or self.current)

    def pool(self) -> Pool:
        """None: graphs of the driver's hold no memory for what they compute."""
        return None

    @contextmanager
    def capture(self, stream: Stream = None, pool: Pool = None) -> Iterator[_Graph]:
        """As the interface says: a CUDA graph. Other threads may go on working with the GPU."""
        graph = _Graph(self)
        with self.use(stream or self.stream()):
            call("cuStreamBeginCapture_v2", self.current, library.CAPTURE_THREAD_LOCAL)
            try:
                yield graph
            except BaseException:
                with suppress(library.DriverError):  # a capture that has failed says so once more as it ends
                    _destroy("cuGraphDestroy", made_graph(self.current))
                raise
            graph.instantiate(made_graph(self.current))

    def event(self, *, timed: bool = False) -> Event:
        """As the interface says."""
        with self.use():
            return _Event(self, timed=timed)

    def seconds_between(self, first: Event, last: Event) -> float:
        """As the interface says."""
        assert isinstance(first, _Event) and isinstance(last, _Event), "events of another device"  # noqa: PT018
        with self.use():
            milliseconds: float = made("cuEventElapsedTime", c_float, first.handle, last.handle)
        return milliseconds / 1000

    def stream(self) -> int:
        """As the interface says; it lives as long as the process."""
        with self._pushed():
            found: int = made("cuStreamCreate", c_void_p, library.STREAM_NON_BLOCKING)
        return found

    def capture_stream(self) -> int:
        """As the interface says."""
        if self._captures_on is None:
            self._captures_on = self.stream()
        return self._captures_on

    @contextmanager
    def use(self, stream: Stream = None) -> Iterator[None]:
        """As the interface says."""
        before = getattr(self._streams, "current", None)
        with self._pushed():
            if stream is not None:
                self._streams.current = stream
            try:
                yield
            finally:
                self._streams.current = before

    def no_autograd(self) -> AbstractContextManager[object]:
        """Nothing to do."""
        return nullcontext()

    def is_out_of_memory(self, error: BaseException) -> bool:
        """As the interface says."""
        return isinstance(error, library.DriverError) and error.status == library.OUT_OF_MEMORY

    def free_bytes(self) -> int:
        """As the interface says."""
        total = c_size_t()
        with self.use():
            free: int = made("cuMemGetInfo_v2", c_size_t, ctypes.byref(total))
        return free

    def release(self) -> None:
        """Nothing is kept."""

    def synchronize(self) -> None:
        """As the interface says."""
        with self.use():
            call("cuCtxSynchronize")

    def _attribute(self, which: int) -> int:
        found: int = made("cuDeviceGetAttribute", c_int, which, self._device)
        return found

    @contextmanager
    def _pushed(self) -> Iterator[None]:
        call("cuCtxPushCurrent_v2", self.context)
        try:
            yield
        finally:
            call("cuCtxPopCurrent_v2", ctypes.byref(c_void_p()))


class LoadedKernel(NamedTuple):
    """A kernel of a module that was loaded, which it keeps."""

    module: _Module
    handle: int


@contextmanager
def relaxed_capture() -> Iterator[None]:
    """Lets this thread load a module and allocate memory while it captures a stream."""
    mode = c_int(library.CAPTURE_RELAXED)
    call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
    try:
        yield
    finally:
        call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))


def made_graph(stream: int) -> int:
    """The graph of a capture, which ends."""
    graph = c_void_p()
    call("cuStreamEndCapture", stream, ctypes.byref(graph))
    assert graph.value is not None
    return graph.value


def _check_there(index: int) -> None:
    try:
        call("cuInit", 0)
        count = made("cuDeviceGetCount", c_int)
    except library.DriverError as error:
        raise TargetError(
            "device-missing", str(error), fix="use device='cpu', or check the driver with nvidia-smi"
        ) from None
    if index >= count:
        raise TargetError(
            "device-missing",
            f"device is cuda:{index}, and the CUDA driver sees {count} devices",
            fix="use device='cpu', or check the driver with nvidia-smi",
        )


def _destroy(name: str, handle: int) -> None:
    """Give something of the driver's back; at the end of the process the driver may be gone before."""
    with suppress(library.DriverError, TypeError):
        call(name, handle)


class _Memory:
    """Memory of the device or of the host, given back with this object."""

    def __init__(self, device: DriverDevice, num_bytes: int, *, pinned: bool) -> None:
        self.pinned, self.address = pinned, 0
        self._device = device
        with device.use(), relaxed_capture():
            if num_bytes and pinned:
                self.address = made("cuMemHostAlloc", c_void_p, num_bytes, 1)  # 1: for all contexts
            elif num_bytes:
                self.address = made("cuMemAlloc_v2", c_uint64, num_bytes)

    def __del__(self) -> None:
        if getattr(self, "address", 0):
            with suppress(library.DriverError, TypeError), self._device.use():
                call("cuMemFreeHost" if self.pinned else "cuMemFree_v2", self.address)


class _Registered:
    """Memory of this process that is pinned as long as this object is there."""

    def __init__(self, device: DriverDevice, memory: mmap.mmap) -> None:
        self._device, self._is_pinned = device, False
        self._held = ctypes.c_char.from_buffer(memory)
        self.address = ctypes.addressof(self._held)
        with device.use(), relaxed_capture():
            call("cuMemHostRegister_v2", self.address, len(memory), 1)  # 1: for all contexts
            self._is_pinned = True
            if made("cuMemHostGetDevicePointer_v2", c_uint64, self.address, 0) != self.address:
                raise library.DriverError(library.NOT_SUPPORTED, "cuMemHostRegister_v2")

    def __del__(self) -> None:
        if getattr(self, "_is_pinned", False):
            with suppress(library.DriverError, TypeError), self._device.use():
                call("cuMemHostUnregister", self.address)


class _Module:
    """An image that was loaded."""

    def __init__(self, device: DriverDevice, image: bytes) -> None:
        self._device = device
        self.handle: int = made("cuModuleLoadData", c_void_p, image)

    def __del__(self) -> None:
        if getattr(self, "handle", 0):
            with suppress(library.DriverError, TypeError), self._device.use():
                call("cuModuleUnload", self.handle)


class _Graph:
    """A captured graph."""

    def __init__(self, device: DriverDevice) -> None:
        self._device, self._runs = device, 0

    def instantiate(self, graph: int) -> None:
        """Make the graph ready to run; it is given back itself."""
        try:
            self._runs = made("cuGraphInstantiateWithFlags", c_void_p, graph, 0)
        finally:
            _destroy("cuGraphDestroy", graph)

    def replay(self) -> None:
        """Run it on this thread's stream."""
        call("cuGraphLaunch", self._runs, self._device.current)

    def __del__(self) -> None:
        if getattr(self, "_runs", 0):
            with suppress(library.DriverError, TypeError), self._device.use():
                call("cuGraphExecDestroy", self._runs)


class _Event:
    """An event of the driver's."""

    def __init__(self, device: DriverDevice, *, timed: bool) -> None:
        self._device = device
        flags = 0 if timed else library.EVENT_WITHOUT_TIMING
        self.handle: int = made("cuEventCreate", c_void_p, flags)

    def record(self, stream: Stream = None) -> None:
        """As the interface says."""
        call("cuEventRecord", self.handle, stream or self._device.current)

    def wait(self, stream: Stream = None) -> None:
        """As the interface says."""
        call("cuStreamWaitEvent", stream or self._device.current, self.handle, 0)

    def synchronize(self) -> None:
        """As the interface says: it asks until it is passed, and lets other threads run between."""
        query = library.function("cuEventQuery")
        looks = 0
        with self._device.use():
            while (status := query(self.handle)) == library.NOT_READY:
                looks += 1
                if looks % _LOOKS_BETWEEN_SLEEPS == 0:
                    time.sleep(0)
        if status:
            raise library.DriverError(status, "cuEventQuery")

    def __del__(self) -> None:
        if getattr(self, "handle", 0):
            with suppress(library.DriverError, TypeError), self._device.use():
                call("cuEventDestroy_v2", self.handle)
