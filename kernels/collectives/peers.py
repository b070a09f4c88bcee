"""All-reduce between the GPUs of one host, whose ranks write each other's memory: what `peers.cu` says.

Ranks share memory by CUDA's handles for other processes. NVLink's multicast is not used.
"""

# To pyright the bindings' modules, which are compiled, have no names.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence

import torch
from cuda.bindings import driver

from precast.ir.graph.schema import Dtype
from precast.kernels.collectives.group import Connected
from precast.kernels.collectives.launches import Among, Kind, Norm, launch_of, norm_pieces, sum_pieces
from precast.kernels.collectives.ways import EMPTY, VECTOR_BYTES, Way, half_bytes, ways_for
from precast.kernels.cuda_launch import At, Kernel, checked, function_in, function_of
from precast.kernels.dtypes import NAMES
from precast.kernels.launch_key import forms, launch_key
from precast.kernels.native import Native
from precast.kernels.records import Launch, Pointer

Exchange = Callable[[str, bytes], Sequence[bytes]]
"""Gives, under a name, what all ranks have to say, in their order: waits for them."""


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

    @property
    def by_name(self) -> dict[str, int]:
        """The addresses as launches name them."""
        return {f"peer.{rank}": address for rank, address in enumerate(self.addresses)}

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
        native: Native | None = None,
    ) -> None:
        """All ranks call it. `ways` for tensors of all sizes; none: those of `ways_for`. Kernels come from `native`, or
        are compiled.

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
        self._memory = PeerMemory(2 * half, self.rank, device, exchange, "sums", EMPTY)
        self._others_memory: list[PeerMemory] = []
        self._beside = torch.cuda.Stream(device)  # other streams may wait for what waits
        self._context = checked(driver.cuCtxGetCurrent())
        self.device, self.limit, self._index = device, limit, device.index
        self.has_pdl = torch.cuda.get_device_capability(device) >= (9, 0)
        self.native = Native() if native is None else native
        self._among = Among(self.rank, self.size)
        self._same = {"calls": self._calls.data_ptr(), "half": half // VECTOR_BYTES, "limit": int(limit * 1e9)}
        self._same |= self._memory.by_name
        self._kernels: dict[Kind, Kernel] = {}

    def all_reduce(self, out: torch.Tensor, x: torch.Tensor) -> None:
        """See `Group`. Whatever decides here is the same on all ranks."""
        pieces = sum_pieces(self.ways, self._among, NAMES[x.dtype], x.numel() * x.element_size())
        if pieces is None:
            self._others.all_reduce(out, x)
            return
        if not _has_vectors(x):
            x = x.clone(memory_format=torch.contiguous_format)
        assert out.data_ptr() % VECTOR_BYTES == 0, "results begin at whole vectors"
        stream = torch._C._cuda_getCurrentRawStream(self._index)
        for start, count, kind, blocks in pieces:
            offset = start * VECTOR_BYTES
            self._kernel(kind).launch((blocks, 1, 1), (x.data_ptr() + offset, out.data_ptr() + offset, count), stream)

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
        dtypes: list[Dtype] = [NAMES[each.dtype] for each in (x, residual, weight)]
        pieces = norm_pieces(self.ways, self._among, dtypes, num_rows, x.shape[-1], norm)
        if pieces is None or not all(map(_has_vectors, (x, residual, weight))):
            return False
        stream = torch._C._cuda_getCurrentRawStream(self._index)
        for start, count, kind, blocks in pieces:
            first = [each.data_ptr() + start * row_bytes for each in (x, out, total, residual)]
            self._kernel(kind).launch((blocks, 1, 1), (*first, weight.data_ptr(), count), stream)
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
        """End, from another thread, what this rank waits for in others that are gone.

        The stream itself writes the word. A kernel might not begin beside one that waits; and a copy takes pinned
        memory, which torch can't free once a launch has failed: it ends the process.
        """
        try:
            checked(driver.cuCtxPushCurrent(self._context))
            for each in self._stops:
                checked(driver.cuStreamWriteValue32(self._beside.cuda_stream, each.data_ptr() + 4, 1, 0))
            checked(driver.cuCtxPopCurrent())
        finally:
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

    def _kernel(self, kind: Kind) -> Kernel:
        if kind not in self._kernels:
            launch = launch_of(kind, self._among, pdl=self.has_pdl)
            given = ("x", "out.0", *(("out.1", "residual", "weight") if kind.norm else ()), "count")
            self._kernels[kind] = kernel_of(launch, given, self._same, self.native, self._index)
        return self._kernels[kind]


def kernel_of(launch: Launch, given: Sequence[str], same: Mapping[str, int], native: Native, device: int) -> Kernel:
    """The kernel of a launch of CUDA C++, taken from `native`, or compiled.

    `given` names the arguments that each launch is given, in order; `same` has those that stay.
    """
    places = {name: At(i) for i, name in enumerate(given)}
    names = [arg.tensor if isinstance(arg, Pointer) else arg for arg in launch.args]
    args = [None if name is None else places[name] if name in places else same[name] for name in names]  # type: ignore[index]
    found = native.find(launch_key(launch, forms(launch, lambda pointer: "uint8")), [0] * len(args))
    with torch.cuda.device(device):
        if found is None:
            native.compilations += 1
            function = function_of(launch.kernel, tuple(launch.constants.items()), device)
        else:
            function = function_in(native.image(found), found.function, device, wants_shared=True)
    return Kernel(function, args, num_given=len(given), num_threads=launch.block, pdl=launch.pdl)


def _has_vectors(x: torch.Tensor) -> bool:
    return x.is_contiguous() and x.data_ptr() % VECTOR_BYTES == 0


def _bytes_of(handle: driver.CUipcMemHandle) -> bytes:
    return ctypes.string_at(handle.getPtr(), 64)


def _handle_of(content: bytes) -> driver.CUipcMemHandle:
    handle = driver.CUipcMemHandle()
    ctypes.memmove(handle.getPtr(), content, 64)
    return handle
