"""All-reduce between the GPUs of one host, whose ranks write each other's memory: what `peers.cu` says.

Ranks share memory by CUDA's handles for other processes. NVLink's multicast is not used.
"""

# To pyright the bindings' modules, which are compiled, have no names.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from cuda.bindings import driver

from precast.kernels.collectives.group import Connected, Norm
from precast.kernels.collectives.ways import LAUNCH_BYTES, MAX_PEERS, VECTOR_BYTES, Way, half_bytes, way_of, ways_for
from precast.kernels.cuda_launch import At, Kernel, checked, function_of

Exchange = Callable[[str, bytes], Sequence[bytes]]
"""Gives, under a name, what all ranks have to say, in their order: waits for them."""

_FILE = "precast.kernels.collectives/peers.cu"
_EMPTY = 0x80000000
_THREADS = 512
_MOST_HELD = 4
"""Vectors of a row that a thread holds at most, of a norm."""
_MACROS = {torch.bfloat16: None, torch.float16: "FLOAT16", torch.float32: "FLOAT32"}


class PeerMemory:
    """Memory of each rank that all ranks address: `addresses` in their order. It begins with `word` everywhere."""

    def __init__(
        self, num_bytes: int, rank: int, device: torch.device, exchange: Exchange, name: str, word: int = 0
    ) -> None:
        """All ranks call it, with a name of its own. Raises RuntimeError on all if one cannot open another's memory."""
        self._device = device
        with torch.cuda.device(device):
            torch.cuda.synchronize()  # makes the context current
            own = checked(driver.cuMemAlloc(-(-num_bytes // 4) * 4))
            checked(driver.cuMemsetD32(own, word, -(-num_bytes // 4)))
            torch.cuda.synchronize()
            handles = exchange(f"{name}/handle", _bytes_of(checked(driver.cuIpcGetMemHandle(own))))
            self._own: driver.CUdeviceptr | None = own
            self._opened: list[driver.CUdeviceptr] = []
            self.addresses: list[int] = []
            problem = ""
            for other, handle in enumerate(handles):
                try:
                    self.addresses.append(int(own) if other == rank else self._open(handle))
                except RuntimeError as error:
                    problem = f"rank {rank} can't write the memory of rank {other}: {error}"
                    break
        problems = [each.decode() for each in exchange(f"{name}/opened", problem.encode() or b"all") if each != b"all"]
        if problems:
            self.leave()
            exchange(f"{name}/left", b"")
            self.close()
            raise RuntimeError("; ".join(problems))

    def _open(self, handle: bytes) -> int:
        flags = driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
        opened = checked(driver.cuIpcOpenMemHandle(_handle_of(handle), int(flags)))
        self._opened.append(opened)
        return int(opened)

    def leave(self) -> None:
        """Close the others' memory, which none of them frees before, once this rank's launches have ended."""
        with torch.cuda.device(self._device):
            torch.cuda.synchronize()
            while self._opened:
                checked(driver.cuIpcCloseMemHandle(self._opened.pop()))

    def close(self) -> None:
        """Free this rank's memory, when all ranks have left."""
        own, self._own = self._own, None
        with torch.cuda.device(self._device):
            if own is not None:
                checked(driver.cuMemFree(own))


class _Kind(NamedTuple):
    """What a kernel is compiled for. `width`: vectors of a row, of a norm."""

    way: Way
    dtype: torch.dtype
    width: int = 0
    norm: Norm | None = None


class Peers:
    """One of 2 to 8 processes with a GPU each, on one host. What `peers.cu` does not do is left to `others`.

    `ways` may change between calls, on all ranks alike, to others that take no more memory.
    """

    def __init__(
        self,
        others: Connected,
        device: torch.device,
        exchange: Exchange,
        ways: tuple[Way, ...] = (),
        limit: float = 600.0,
    ) -> None:
        """All ranks call it. `ways` for tensors of all sizes; none: those of `ways_for`.

        A launch fails when another rank lets it wait for `limit` seconds. Raises RuntimeError, on all ranks, if one
        can't open another's memory.
        """
        self.rank, self.size = others.rank, others.size
        self.text = f"memory of each other, beside {others.text}"
        self._others = others
        self.ways = ways or ways_for(self.size)
        half = half_bytes(self.ways, self.size)
        self._calls = torch.zeros(2, dtype=torch.int32, device=device)
        self._exchange, self._stops = exchange, [self._calls]
        self._memory = PeerMemory(2 * half, self.rank, device, exchange, "sums", _EMPTY)
        self._others_memory: list[PeerMemory] = []
        self._beside = torch.cuda.Stream(device)  # other streams may wait for what waits
        self.device, self.limit, self._index = device, limit, device.index
        self.has_pdl = torch.cuda.get_device_capability(device) >= (9, 0)
        addresses = [*self._memory.addresses, *[None] * (MAX_PEERS - self.size)]
        self._args = (self._calls.data_ptr(), half // VECTOR_BYTES, int(limit * 1e9), *addresses)
        self._kernels: dict[_Kind, Kernel] = {}

    def all_reduce(self, out: torch.Tensor, x: torch.Tensor) -> None:
        """See `Group`. Whatever decides here is the same on all ranks."""
        num_bytes = x.numel() * x.element_size()
        way = way_of(self.ways, num_bytes)
        if way.kernel == "nccl" or x.dtype not in _MACROS or num_bytes % VECTOR_BYTES:
            self._others.all_reduce(out, x)
            return
        if not _has_vectors(x):
            x = x.clone(memory_format=torch.contiguous_format)
        assert out.data_ptr() % VECTOR_BYTES == 0, "results begin at whole vectors"
        stream = torch._C._cuda_getCurrentRawStream(self._index)
        for start, count in self._pieces(way, num_bytes // VECTOR_BYTES, LAUNCH_BYTES // VECTOR_BYTES):
            offset, kernel = start * VECTOR_BYTES, self._kernel(_Kind(self._fitting(way, count), x.dtype))
            blocks = min(way.num_blocks, -(-count // _THREADS))
            kernel.launch((blocks, 1, 1), (x.data_ptr() + offset, out.data_ptr() + offset, count), stream)

    def all_reduce_norm(
        self,
        out: torch.Tensor,
        total: torch.Tensor,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        norm: Norm,
    ) -> bool:
        """See `NormsSums`. Whatever decides here is the same on all ranks."""
        num_rows, row_bytes = x.numel() // max(1, x.shape[-1]), x.shape[-1] * x.element_size()
        width, way = row_bytes // VECTOR_BYTES, way_of(self.ways, num_rows * row_bytes)
        fits = row_bytes % VECTOR_BYTES == 0 and 0 < width <= _MOST_HELD * _THREADS
        if way.kernel == "nccl" or x.dtype not in _MACROS or not fits or {residual.dtype, weight.dtype} != {x.dtype}:
            return False
        if not all(map(_has_vectors, (x, residual, weight))):
            return False
        stream = torch._C._cuda_getCurrentRawStream(self._index)
        for start, count in self._pieces(way, num_rows, max(1, LAUNCH_BYTES // row_bytes)):
            kernel = self._kernel(_Kind(self._fitting(way, count), x.dtype, width, norm))
            first = [each.data_ptr() + start * row_bytes for each in (x, out, total, residual)]
            kernel.launch((min(way.num_blocks, count), 1, 1), (*first, weight.data_ptr(), count), stream)
        return True

    def all_gather(self, out: torch.Tensor, x: torch.Tensor) -> None:
        """See `Group`."""
        self._others.all_gather(out, x)

    def reduce_scatter(self, out: torch.Tensor, x: torch.Tensor) -> None:
        """See `Group`."""
        self._others.reduce_scatter(out, x)

    def send(self, x: torch.Tensor, to: int) -> None:
        """See `Group`."""
        self._others.send(x, to)

    def receive(self, out: torch.Tensor, source: int) -> None:
        """See `Group`."""
        self._others.receive(out, source)

    def abort(self) -> None:
        """End, from another thread, what this rank waits for in others that are gone."""
        with torch.cuda.stream(self._beside):
            for each in self._stops:
                each[-1:].fill_(1)
        self._others.abort()

    def leave(self) -> None:
        """See `Connected`."""
        for each in (self._memory, *self._others_memory):
            each.leave()

    def close(self) -> None:
        """See `Connected`."""
        for each in (self._memory, *self._others_memory):
            each.close()

    def memory(self, num_bytes: int) -> PeerMemory:
        """More memory that all ranks address, zeros at first, for kernels of others; all ranks call it."""
        name = f"others/{len(self._others_memory)}"
        made = PeerMemory(num_bytes, self.rank, self.device, self._exchange, name)
        self._others_memory.append(made)
        return made

    def counter(self) -> torch.Tensor:
        """For kernels of others that wait for ranks: a counter, and a word that is not 0 once they are to end."""
        made = torch.zeros(2, dtype=torch.int32, device=self.device)
        self._stops.append(made)
        return made

    def _pieces(self, way: Way, count: int, most: int) -> Iterator[tuple[int, int]]:
        """The first, and how many, of what each launch takes; none is shorter than the ranks are many, if it can be."""
        start = 0
        while start < count:
            size = min(most, count - start)
            if way.kernel == "two_shot" and 0 < count - start - size < self.size < size:
                size -= self.size
            yield start, size
            start += size

    def _fitting(self, way: Way, count: int) -> Way:
        """The way of a launch: where there is not even one for each rank to add up, one shot."""
        return way._replace(kernel="one_shot") if count < self.size else way

    def _kernel(self, kind: _Kind) -> Kernel:
        if kind not in self._kernels:
            self._kernels[kind] = self._made(kind)
        return self._kernels[kind]

    def _made(self, kind: _Kind) -> Kernel:
        macro, norm = _MACROS[kind.dtype], kind.norm
        constants: list[tuple[str, int | float | bool | str]] = [("RANK", self.rank), ("RANKS", self.size)]
        constants += [("DEPTH", kind.way.ahead), *([(macro, True)] if macro else [])]
        name, num_threads, num_given = str(kind.way.kernel), _THREADS, 3
        if norm is not None:
            name, num_threads, num_given = f"norm_{name}", min(_THREADS, -(-kind.width // 32) * 32), 6
            constants += [("WIDTH", kind.width), ("THREADS", num_threads), ("EPS", norm.eps), ("OFFSET", norm.offset)]
            constants += [("CAST_BEFORE_SCALE", norm.cast_before_scale)]
        with torch.cuda.device(self._index):
            function = function_of(f"{_FILE}:{name}", tuple(constants), self._index)
        args = (*map(At, range(num_given)), *self._args)
        return Kernel(function, args, num_given=num_given, num_threads=num_threads, pdl=self.has_pdl)


def _has_vectors(x: torch.Tensor) -> bool:
    return x.is_contiguous() and x.data_ptr() % VECTOR_BYTES == 0


def _bytes_of(handle: driver.CUipcMemHandle) -> bytes:
    return ctypes.string_at(handle.getPtr(), 64)


def _handle_of(content: bytes) -> driver.CUipcMemHandle:
    handle = driver.CUipcMemHandle()
    ctypes.memmove(handle.getPtr(), content, 64)
    return handle
