"""A device as the loader sees it: memory, copies, kernels, captured graphs, events. Imports no torch.

There are two backends: `precast.loader.torch_device` for CPUs and CUDA GPUs, and `precast.loader.driver.device` for
CUDA GPUs without torch. What needs no tensor speaks to a device through this interface alone.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, NamedTuple, Protocol

from precast.ir.graph.schema import Dtype

Stream = Any
"""A queue of work, made by `Device.stream`. None, where one is asked for: the current one of this thread."""
Kernel = Any
"""A kernel of a loaded image, made by `Device.load`."""


class Buffer(NamedTuple):
    """Memory of a device: `shape` elements from the address `pointer` on, `strides` elements apart in each dimension.

    It is valid as long as `owner` is alive. The torch backend exchanges it with tensors without a copy
    (`torch_device.tensor_of`).
    """

    pointer: int
    dtype: Dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    owner: object

    def view(
        self, start: int, shape: tuple[int, ...], *, strides: tuple[int, ...] = (1,), dtype: Dtype = "uint8"
    ) -> Buffer:
        """Elements of another type and shape, from byte `start` of this buffer on; the memory is the same."""
        return Buffer(self.pointer + start, dtype, shape, strides, self.owner)


def aligned(num_bytes: int, alignment: int) -> int:
    """The next multiple of `alignment` bytes."""
    return -(-num_bytes // alignment) * alignment


def host_bytes(buffer: Buffer) -> memoryview:
    """A contiguous buffer of bytes in the host's memory, writable. The view keeps that memory alive."""
    memory = (ctypes.c_ubyte * math.prod(buffer.shape)).from_address(buffer.pointer)
    memory.owner = buffer.owner  # type: ignore[attr-defined]
    return memoryview(memory).cast("B")


Dim3 = tuple[int, int, int]
"""Of a grid or a block of threads, by dimension."""
Arguments = Sequence[Buffer | int | float]
"""Of a kernel; a buffer is passed as its address."""


class Event(Protocol):
    """A point in a stream's work."""

    def record(self, stream: Stream = None) -> None:
        """Be the point that the stream has reached now."""

    def wait(self, stream: Stream = None) -> None:
        """Let the stream go on only after this point."""

    def synchronize(self) -> None:
        """Return once the point is passed."""


Pool = Any
"""Memory that captured graphs allocate from, made by `Device.pool`. They share it, so they must not run at once."""


class CapturedGraph(Protocol):
    """Work that was recorded once, and runs as often as it is asked to, on the same addresses."""

    def replay(self) -> None:
        """Run it, in the order of the current stream."""


class Device(Protocol):
    """One device. `name` is `cpu` or, with its index, `cuda:0`; `kind` is the name without the index."""

    name: str
    kind: Literal["cpu", "cuda"]

    def alloc(self, num_bytes: int, *, pinned: bool = False) -> Buffer:
        """New memory, uninitialised, as bytes: of the device, or of the host for fast copies to it (`pinned`)."""
        ...

    def copy(self, target: Buffer, source: Buffer, stream: Stream = None) -> None:
        """Copy the elements of one buffer onto another of the same shape; the host does not wait."""

    def zero(self, buffer: Buffer) -> None:
        """Write zeros over a buffer of bytes, of the device or pinned; what is copied there afterwards stays."""

    def part(self, buffer: Buffer, start: int, num_bytes: int) -> Buffer:
        """So many bytes from byte `start` of a buffer of bytes on, for copies that are made often."""
        ...

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Whether an error of this device's says that memory has run out."""
        ...

    def load(self, image: bytes, name: str) -> Kernel:
        """The kernel called `name` of a compiled image. Raises TargetError where the device takes none."""
        ...

    def launch(
        self, kernel: Kernel, grid: Dim3, block: Dim3, args: Arguments, shared_bytes: int = 0, stream: Stream = None
    ) -> None:
        """Run the kernel once for each place of the grid; the host does not wait."""

    def pool(self) -> Pool:
        """New memory for graphs."""
        ...

    def capture(self, stream: Stream = None, pool: Pool = None) -> AbstractContextManager[CapturedGraph]:
        """Record the copies and launches of the body, and what torch does in it, to be replayed.

        What the body allocates comes from `pool`, or from memory of the graph's own. The body must not wait for the
        device. If it raises, nothing is recorded.
        """
        ...

    def event(self, *, timed: bool = False) -> Event:
        """An event that is yet to be recorded. Waiting for it keeps a core busy, and lets other threads run.

        A thread that sleeps finds its core slow and its caches cold, and every step waits.

        `timed`: it knows when it was passed, for `seconds_between`.
        """
        ...

    def seconds_between(self, first: Event, last: Event) -> float:
        """How long the device took from one event to another; both are timed, and have passed."""
        ...

    def stream(self) -> Stream:
        """A new stream."""

    def capture_stream(self) -> Stream:
        """The stream on which this thread captures: libraries keep memory for each stream that they have worked on."""

    def use(self, stream: Stream = None) -> AbstractContextManager[object]:
        """While open, this thread's work goes to this device, and to `stream` if one is given."""
        ...

    def no_autograd(self) -> AbstractContextManager[object]:
        """While open, what torch does in this thread takes no part in autograd; nothing where there is no torch."""
        ...

    def free_bytes(self) -> int:
        """Bytes that can still be allocated."""
        ...

    def release(self) -> None:
        """Give memory that nothing uses any more back to the driver, where the device keeps some."""

    def synchronize(self) -> None:
        """Wait for all work of the device."""
