"""Torch as a backend of `precast.loader.device`: the CPU, and CUDA GPUs. The one room that knows how torch does it."""

from __future__ import annotations

import os
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from precast.ir.errors import RequestError, TargetError
from precast.kernels import dtypes
from precast.loader.device import Arguments, Buffer, Device, Dim3, Event, Kernel, Pool, Stream

ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""With these a user configures torch's allocator of GPU memory."""


def open_device(device: str | torch.device | None) -> Device:
    """The device, with its index and, for a GPU, its context made. None: a GPU if there is one.

    Raises TargetError for a device that isn't there and for one that Precast doesn't run on, RequestError for what is
    no device at all.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError):
        expected = "'cpu', 'cuda' or a certain GPU like 'cuda:1'"
        raise RequestError("engine-option-invalid", f"device is {device!r}, expected {expected}") from None
    if found.type == "cpu":
        return CpuDevice()
    if found.type != "cuda":
        raise TargetError("device-invalid", f"device is {found}, and Precast runs on 'cpu' and 'cuda'")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if (found.index or 0) >= count:
        raise TargetError(
            "device-missing",
            f"device is {found}, and torch {torch.__version__} sees {count} CUDA devices",
            fix="use device='cpu', or install a torch with CUDA and check the driver with nvidia-smi",
        )
    opened = CudaDevice(torch.cuda.current_device() if found.index is None else found.index)
    opened.synchronize()
    return opened


def open_gpu(device: str | torch.device | None, index: int) -> Device:
    """The device of one of several ranks on a host: the GPU of this index, or the CPU, where that is asked for.

    Raises what `open_device` raises, and RequestError for a certain GPU: all ranks can't have it.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if str(device) not in ("cpu", "cuda"):
        found = f"device is {str(device)!r}, and each rank takes a GPU of its own"
        raise RequestError("engine-option-invalid", found, fix="give 'cuda' or 'cpu'; CUDA_VISIBLE_DEVICES says which")
    return open_device(f"cuda:{index}" if str(device) == "cuda" else "cpu")


def cut_blocks_to_size(device: torch.device) -> bool:
    """Let torch give each tensor on a GPU a block of its own size, rounded up to 512 bytes; whether that was set.

    `precast.kernels.step_memory` counts such blocks. By default, a tensor above 1 MiB that takes a free block keeps
    what it leaves of it, up to 1 MiB, so that the same step holds more or less, as it happens. Segments that can grow
    are cut to size (`expandable_segments`). The setting is the process's; where the user has made settings of the kind,
    they stay. PyTorch has no public function for it: a version without the one used here keeps its default.
    """
    can_be_set = device.type == "cuda" and hasattr(torch._C, "_accelerator_setAllocatorSettings")
    if not can_be_set or any(name in os.environ for name in ALLOCATOR_VARIABLES):
        return False
    torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    return True


def tensor_of(buffer: Buffer) -> torch.Tensor:
    """The memory of a buffer of this backend as a tensor."""
    owner = buffer.owner
    assert isinstance(owner, torch.Tensor), "the buffer is of another backend"
    if buffer.dtype == "uint8" and len(buffer.shape) == 1 and buffer.strides == (1,) and owner.dtype == torch.uint8:
        if buffer.shape == owner.shape and buffer.pointer == owner.data_ptr():
            return owner
        return owner.narrow(0, buffer.pointer - owner.data_ptr(), buffer.shape[0])
    dtype = dtypes.BY_NAME[buffer.dtype]
    flat = owner if owner.dtype == dtype else owner.view(dtype)
    offset = (buffer.pointer - owner.data_ptr()) // flat.element_size()
    return flat.as_strided(buffer.shape, buffer.strides, flat.storage_offset() + offset)


def unowned(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory, which is not kept alive: for what a captured graph's pool may give to others in between.

    On a CPU the tensor itself: there nothing is given to others.
    """
    if tensor.device.type != "cuda" or not tensor.numel():
        return tensor
    flat = torch.as_tensor(_Memory(tensor.data_ptr(), _extent(tensor) * tensor.element_size()), device=tensor.device)
    return flat.view(tensor.dtype).as_strided(tensor.shape, tensor.stride())


class _Memory:
    """Bytes on a GPU by their address, in the form that `torch.as_tensor` takes."""

    def __init__(self, pointer: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "data": (pointer, False), "shape": (num_bytes,), "typestr": "|u1", "strides": None, "version": 3,
        }  # fmt: skip


def _extent(tensor: torch.Tensor) -> int:
    """Elements from the first to the last, those between included that are not the tensor's."""
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _buffer_of(flat: torch.Tensor) -> Buffer:
    return Buffer(flat.data_ptr(), "uint8", (len(flat),), (1,), flat)


class _Torch:
    """What both do alike."""

    def zero(self, buffer: Buffer) -> None:
        """As the interface says."""
        tensor_of(buffer).zero_()

    def part(self, buffer: Buffer, start: int, num_bytes: int) -> Buffer:
        """As the interface says: it has its tensor."""
        return _buffer_of(tensor_of(buffer.view(start, (num_bytes,))))

    def is_out_of_memory(self, error: BaseException) -> bool:
        """As the interface says."""
        return isinstance(error, torch.OutOfMemoryError)

    def no_autograd(self) -> AbstractContextManager[object]:
        """As the interface says."""
        return torch.inference_mode()


class CpuDevice(_Torch):
    """The host. Work is done when a call returns; what is captured is a list of calls."""

    name = "cpu"
    kind: Literal["cpu", "cuda"] = "cpu"

    def __init__(self) -> None:
        self._captured: _Calls | None = None

    def alloc(self, num_bytes: int, *, pinned: bool = False) -> Buffer:
        """As the interface says; no copy from the host to itself is faster for pinned memory."""
        return _buffer_of(torch.empty(num_bytes, dtype=torch.uint8))

    def copy(self, target: Buffer, source: Buffer, stream: Stream = None) -> None:
        """As the interface says."""
        self._run(partial(tensor_of(target).copy_, tensor_of(source)))

    def load(self, image: bytes, name: str) -> Kernel:
        """Refused: kernels of images are a GPU's."""
        raise TargetError("device-invalid", f"kernel {name} is for a GPU, and the device is cpu")

    def launch(
        self, kernel: Kernel, grid: Dim3, block: Dim3, args: Arguments, shared_bytes: int = 0, stream: Stream = None
    ) -> None:
        """Call `kernel`, a function, as a GPU's kernels are called; the whole grid is one call."""
        self._run(partial(kernel, grid, block, _arguments(args), shared_bytes, stream))

    def pool(self) -> Pool:
        """None: what is captured keeps its memory."""
        return None

    @contextmanager
    def capture(self, stream: Stream = None, pool: Pool = None) -> Iterator[_Calls]:
        """As the interface says, but what torch does is done once in the body too.

        It is recorded op by op, and a replay writes where the recorded one did.
        """
        assert self._captured is None, "a capture is open"
        self._captured = calls = _Calls()
        try:
            with _Recorder(calls):
                yield calls
        finally:
            self._captured = None

    def event(self, *, timed: bool = False) -> Event:
        """An event that is passed when it is recorded."""
        return _Passed()

    def seconds_between(self, first: Event, last: Event) -> float:
        """As the interface says."""
        assert isinstance(first, _Passed) and isinstance(last, _Passed), "events of another device"  # noqa: PT018
        return last.at - first.at

    def stream(self) -> Stream:
        """None: the host has one."""
        return None

    def capture_stream(self) -> Stream:
        """None: the host has one."""
        return None

    def use(self, stream: Stream = None) -> AbstractContextManager[object]:
        """Nothing to do."""
        return nullcontext()

    def free_bytes(self) -> int:
        """The available memory; where the system doesn't tell, what the machine has."""
        meminfo = Path("/proc/meminfo")
        if not meminfo.exists():
            return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        sizes = dict(line.split(":", 1) for line in meminfo.read_text(encoding="ascii").splitlines())
        return int(sizes["MemAvailable"].split()[0]) * 1024

    def release(self) -> None:
        """Nothing is kept."""

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def _run(self, call: Callable[[], object]) -> None:
        if self._captured is None:
            call()
        else:
            self._captured.append(call)


_OF_THREAD = threading.local()
"""By the device's name, the stream on which the thread captures."""


class CudaDevice(_Torch):
    """A CUDA GPU, by its index."""

    kind: Literal["cpu", "cuda"] = "cuda"

    def __init__(self, index: int) -> None:
        self.name = f"cuda:{index}"
        self._index = index
        self._device = torch.device("cuda", index)

    def alloc(self, num_bytes: int, *, pinned: bool = False) -> Buffer:
        """As the interface says."""
        place = torch.device("cpu") if pinned else self._device
        return _buffer_of(torch.empty(num_bytes, dtype=torch.uint8, device=place, pin_memory=pinned))

    def copy(self, target: Buffer, source: Buffer, stream: Stream = None) -> None:
        """As the interface says."""
        if stream is None:
            tensor_of(target).copy_(tensor_of(source), non_blocking=True)
            return
        with torch.cuda.stream(stream):
            tensor_of(target).copy_(tensor_of(source), non_blocking=True)

    def load(self, image: bytes, name: str) -> Kernel:
        """As the interface says, of PTX or a cubin."""
        from torch.cuda import _utils

        with self.use():
            kernels: Any = _utils._cuda_load_module(image, [name])
        kernel: Kernel = kernels[name]
        return kernel

    def launch(
        self, kernel: Kernel, grid: Dim3, block: Dim3, args: Arguments, shared_bytes: int = 0, stream: Stream = None
    ) -> None:
        """As the interface says. Integers are passed as int32, floats as doubles."""
        with self.use():
            kernel(grid, block, _arguments(args), shared_bytes, stream)

    def pool(self) -> Pool:
        """As the interface says."""
        return torch.cuda.graph_pool_handle()

    @contextmanager
    def capture(self, stream: Stream = None, pool: Pool = None) -> Iterator[torch.cuda.CUDAGraph]:
        """As the interface says: a CUDA graph. Other threads may go on working with the GPU.

        `torch.cuda.graph` does more than that: it waits for the GPU and gives torch's free memory back to the driver.
        """
        graph = torch.cuda.CUDAGraph()
        with self.use(self.stream() if stream is None else stream):
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                yield graph
            except BaseException:
                with suppress(RuntimeError):  # a capture that has failed says so once more as it ends
                    _end(graph)
                raise
            _end(graph)

    def event(self, *, timed: bool = False) -> Event:
        """As the interface says."""
        return torch.cuda.Event(enable_timing=timed)

    def seconds_between(self, first: Event, last: Event) -> float:
        """As the interface says."""
        assert isinstance(first, torch.cuda.Event), "an event of another device"
        assert isinstance(last, torch.cuda.Event), "an event of another device"
        return float(first.elapsed_time(last)) / 1000

    def stream(self) -> Stream:
        """As the interface says."""
        return torch.cuda.Stream(self._device)

    def capture_stream(self) -> Stream:
        """As the interface says: cuBLAS keeps 40 MiB for each."""
        known = _OF_THREAD.__dict__
        return known[self.name] if self.name in known else known.setdefault(self.name, self.stream())

    def use(self, stream: Stream = None) -> AbstractContextManager[object]:
        """As the interface says."""
        return torch.cuda.device(self._index) if stream is None else torch.cuda.stream(stream)

    def free_bytes(self) -> int:
        """What the driver and torch's allocator have free."""
        unused = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
        return int(torch.cuda.mem_get_info(self._device)[0]) + unused

    def release(self) -> None:
        """As the interface says."""
        torch.cuda.empty_cache()
        if hasattr(torch.accelerator, "empty_host_cache"):  # torch 2.12 and newer
            torch.accelerator.empty_host_cache()

    def synchronize(self) -> None:
        """As the interface says; the first call makes the context."""
        torch.cuda.synchronize(self._device)


def _end(graph: torch.cuda.CUDAGraph) -> None:
    """End its capture. Between two calls that read the host there may be nothing to record, of which torch warns."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The CUDA Graph is empty")
        graph.capture_end()


class _Recorder(TorchDispatchMode):
    """Appends to `calls` what torch does, so that it can be done again on the same memory."""

    def __init__(self, calls: _Calls) -> None:
        super().__init__()
        self._calls = calls

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if _READS_HOST.intersection(func.tags) and not _has_fixed_shape(func, args):
            raise RuntimeError(f"{func} reads on the host what a captured graph has yet to compute")
        kwargs = kwargs or {}
        made = func(*args, **kwargs)
        self._calls.append(partial(_do_again, func, args, kwargs, _tensors(made)))
        return made

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: torch would import its compiler to keep out of here, and nothing is compiled."""
        return False


def _has_fixed_shape(func: Any, args: tuple[Any, ...]) -> bool:
    """Indexing has a tag for the shape of its result, which depends on the values of masks alone."""
    indices = args[1] if func is torch.ops.aten.index.Tensor else ()
    return bool(indices) and all(each is None or each.dtype not in (torch.bool, torch.uint8) for each in indices)


_READS_HOST = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


def _do_again(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], made: list[torch.Tensor]) -> None:
    again = func(*args, **kwargs)
    for old, new in zip(made, _tensors(again), strict=True):
        if old.data_ptr() != new.data_ptr():  # neither a view nor written in place
            old.copy_(new)


def _tensors(made: object) -> list[torch.Tensor]:
    listed = made if isinstance(made, (tuple, list)) else (made,)
    return [each for each in listed if isinstance(each, torch.Tensor)]


class _Calls(list[Callable[[], object]]):
    """Calls that run again, in order."""

    def replay(self) -> None:
        for call in self:
            call()


class _Passed:
    """The event of a device that has done its work when a call returns. `at` is when it was recorded, in seconds."""

    at = 0.0

    def record(self, stream: Stream = None) -> None:
        self.at = time.perf_counter()

    def wait(self, stream: Stream = None) -> None:
        pass

    synchronize = wait


def _arguments(args: Arguments) -> list[torch.Tensor | int | float]:
    """Arguments as torch's kernels take them: a tensor stands for its address."""
    return [tensor_of(each) if isinstance(each, Buffer) else each for each in args]
