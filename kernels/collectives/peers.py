"""All-reduce between the GPUs of one host, whose ranks write each other's memory: what `peers.cu` says.

Ranks share memory by CUDA's handles for other processes. NVLink's multicast is not used.
"""

# To pyright the bindings' modules, which are compiled, have no names.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import torch
from cuda.bindings import driver

from precast.kernels.collectives.group import MAX_PEERS, Connected
from precast.kernels.cuda_launch import At, Kernel, checked, function_of

Exchange = Callable[[str, bytes], Sequence[bytes]]
"""Gives, under a name, what all ranks have to say, in their order: waits for them."""
KernelName = Literal["one_shot", "two_shot"]

SMALL_BYTES = 512 << 10
"""Up to so many bytes, each rank writes all it has to all others."""
LARGE_BYTES = 16 << 20
"""Of more bytes, so many go in one launch."""

_FILE = "precast.kernels.collectives/peers.cu"
_VECTOR_BYTES = 16
_EMPTY = 0x80000000
_THREADS = 512
_MACROS = {torch.bfloat16: None, torch.float16: "FLOAT16", torch.float32: "FLOAT32"}


class Way(NamedTuple):
    """How vectors are added up: the kernel, its grid, how many vectors one launch takes, and how many of those that a
    thread has are sent `ahead` of the one that it waits for."""

    kernel: KernelName
    num_blocks: int
    capacity: int
    ahead: int = 2

    def slot(self, num_ranks: int) -> int:
        """Vectors of one rank's slot."""
        return self.capacity if self.kernel == "one_shot" else -(-self.capacity // num_ranks)

    def num_bytes(self, num_ranks: int) -> int:
        """The memory of a rank: both halves, each with the slots of all ranks; for two shots those of the sums too."""
        return 2 * (1 if self.kernel == "one_shot" else 2) * num_ranks * self.slot(num_ranks) * _VECTOR_BYTES


def ways_for(num_ranks: int) -> tuple[Way, Way]:
    """For up to `SMALL_BYTES`, and for more.

    Between two ranks one shot moves no more than two: each sends half of what it has and half of the sums, or all.
    """
    large: KernelName = "one_shot" if num_ranks == 2 else "two_shot"
    return Way("one_shot", 64, SMALL_BYTES // _VECTOR_BYTES), Way(large, 128, LARGE_BYTES // _VECTOR_BYTES)


class PeerMemory:
    """Memory of each rank that all ranks address: `addresses` in their order. It begins as `peers.cu` wants it."""

    def __init__(self, num_bytes: int, rank: int, device: torch.device, exchange: Exchange) -> None:
        """All ranks call it. Raises RuntimeError on all of them if one cannot open another's memory."""
        self._device = device
        with torch.cuda.device(device):
            torch.cuda.synchronize()  # makes the context current
            own = checked(driver.cuMemAlloc(num_bytes))
            checked(driver.cuMemsetD32(own, _EMPTY, num_bytes // 4))
            torch.cuda.synchronize()
            handles = exchange("handle", _bytes_of(checked(driver.cuIpcGetMemHandle(own))))
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
        problems = [each.decode() for each in exchange("opened", problem.encode() or b"all") if each != b"all"]
        if problems:
            self.leave()
            exchange("left", b"")
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


class PeerSum:
    """One way to add up what the ranks have; ranks run it in the same order."""

    def __init__(self, way: Way, addresses: Sequence[int], rank: int, device: torch.device, limit: float) -> None:
        """`addresses`: where the way's memory lies, of each rank. A launch fails after `limit` seconds of waiting."""
        self.way = way
        self._rank, self._num_ranks, self._index = rank, len(addresses), device.index
        self._calls = torch.zeros(way.num_blocks + 1, dtype=torch.int32, device=device)
        others = [*addresses, *[None] * (MAX_PEERS - len(addresses))]
        self._args = (At(0), At(1), At(2), self._calls.data_ptr(), way.slot(len(addresses)), int(limit * 1e9), *others)
        self._kernels: dict[torch.dtype, Kernel] = {}

    def run(self, out: torch.Tensor, x: torch.Tensor) -> None:
        """The sum of all ranks' `x` into `out`, on the current stream; both contiguous, of whole vectors."""
        kernel = self._kernels.get(x.dtype) or self._kernel(x.dtype)
        stream = torch._C._cuda_getCurrentRawStream(self._index)
        source, target, left = x.data_ptr(), out.data_ptr(), x.numel() * x.element_size() // _VECTOR_BYTES
        while left:
            count = min(left, self.way.capacity)
            kernel.launch((self.way.num_blocks, 1, 1), (source, target, count), stream)
            source, target, left = source + count * _VECTOR_BYTES, target + count * _VECTOR_BYTES, left - count

    def stop(self) -> None:
        """End, with an error, a launch that waits, and all that follow. On the current stream."""
        self._calls[-1:].fill_(1)

    def _kernel(self, dtype: torch.dtype) -> Kernel:
        macro = _MACROS[dtype]
        constants: list[tuple[str, int | float | bool | str]] = [("RANK", self._rank), ("RANKS", self._num_ranks)]
        constants += [("DEPTH", self.way.ahead), *([(macro, True)] if macro else [])]
        with torch.cuda.device(self._index):
            function = function_of(f"{_FILE}:{self.way.kernel}", tuple(constants), self._index)
        self._kernels[dtype] = made = Kernel(function, self._args, num_given=3, num_threads=_THREADS)
        return made


class Peers:
    """One of 2 to 8 processes with a GPU each, on one host. What `peers.cu` does not do is left to `others`."""

    def __init__(
        self,
        others: Connected,
        device: torch.device,
        exchange: Exchange,
        ways: Sequence[Way] = (),
        limit: float = 600.0,
    ) -> None:
        """All ranks call it. `ways`: the first whose capacity is enough adds up, for more the last.

        A launch fails when another rank lets it wait for `limit` seconds. Raises RuntimeError, on all ranks, if one
        can't open another's memory.
        """
        self.rank, self.size = others.rank, others.size
        self.text = f"memory of each other, beside {others.text}"
        self._others = others
        ways = ways or ways_for(self.size)
        sizes = [way.num_bytes(self.size) for way in ways]
        self._memory = PeerMemory(sum(sizes), self.rank, device, exchange)
        self._beside = torch.cuda.Stream(device)  # other streams may wait for what waits
        offsets = [sum(sizes[:i]) for i in range(len(sizes))]
        self._sums = [
            PeerSum(way, [each + offset for each in self._memory.addresses], self.rank, device, limit)
            for way, offset in zip(ways, offsets, strict=True)
        ]

    def all_reduce(self, out: torch.Tensor, x: torch.Tensor) -> None:
        """See `Group`. Whatever decides here is the same on all ranks."""
        num_bytes = x.numel() * x.element_size()
        if x.dtype not in _MACROS or num_bytes % _VECTOR_BYTES:
            self._others.all_reduce(out, x)
            return
        if not x.is_contiguous() or x.data_ptr() % _VECTOR_BYTES:
            x = x.clone(memory_format=torch.contiguous_format)
        assert out.data_ptr() % _VECTOR_BYTES == 0, "results begin at whole vectors"
        count = num_bytes // _VECTOR_BYTES
        next((each for each in self._sums if count <= each.way.capacity), self._sums[-1]).run(out, x)

    def all_gather(self, out: torch.Tensor, x: torch.Tensor) -> None:
        """See `Group`."""
        self._others.all_gather(out, x)

    def reduce_scatter(self, out: torch.Tensor, x: torch.Tensor) -> None:
        """See `Group`."""
        self._others.reduce_scatter(out, x)

    def abort(self) -> None:
        """End, from another thread, what this rank waits for in others that are gone."""
        with torch.cuda.stream(self._beside):
            for each in self._sums:
                each.stop()
        self._others.abort()

    def leave(self) -> None:
        """See `Connected`."""
        self._memory.leave()

    def close(self) -> None:
        """See `Connected`."""
        self._memory.close()


def _bytes_of(handle: driver.CUipcMemHandle) -> bytes:
    return ctypes.string_at(handle.getPtr(), 64)


def _handle_of(content: bytes) -> driver.CUipcMemHandle:
    handle = driver.CUipcMemHandle()
    ctypes.memmove(handle.getPtr(), content, 64)
    return handle
