"""Memory of each rank's GPU that all ranks of the host address, without torch.

Physical memory is made apart from its addresses (CUDA's virtual memory management); a file descriptor stands for it,
which other processes map. NVLink's multicast is not used.
"""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress
from ctypes import c_int, c_size_t, c_uint64
from pathlib import Path
from typing import NamedTuple

from precast.ir.errors import TargetError
from precast.kernels.collectives.launches import Among
from precast.loader.device import Buffer, aligned
from precast.loader.driver import library
from precast.loader.driver.device import DriverDevice
from precast.loader.driver.library import AllocationProperties, DriverError, Location, call, made
from precast.loader.world.descriptors import Exchange, exchanged

SECONDS = 60.0
"""That ranks wait for each other's memory."""


class PeersUnfitError(Exception):
    """Ranks can't write each other's memory: which one, and why. On all of them."""


class Meeting(NamedTuple):
    """How ranks of one host give each other what opens their memory."""

    among: Among
    folder: Path
    exchange: Exchange
    seconds: float = SECONDS


class PeerMemory:
    """`num_bytes` of each rank; it begins with the word `word` everywhere. `addresses` are those of all, in order."""

    def __init__(self, num_bytes: int, device: DriverDevice, meeting: Meeting, name: str, word: int = 0) -> None:
        """All ranks call it, with a name of its own. Raises PeersUnfitError on all if one can't open another's memory,
        TargetError (rank-late) for a rank that doesn't come."""
        self._device, self._mapped = device, dict[int, tuple[int, int]]()
        self._rank, self._handle = meeting.among.rank, 0
        problem, descriptor = "", -1
        try:
            with device.use():
                self._make(num_bytes, word)
                descriptor = made("cuMemExportToShareableHandle", c_int, self._handle, library.HANDLE_DESCRIPTOR, 0)
        except DriverError as error:
            problem = f"rank {self._rank} can't make memory that others may open: {error}"
        try:
            self._raise_together(meeting, f"{name}/made", problem)
            given = self._given(meeting, descriptor, name.replace("/", "-"))
        finally:
            if descriptor >= 0:
                os.close(descriptor)
        self._raise_together(meeting, f"{name}/opened", self._open_all(given))
        self.addresses = [self._mapped[rank][0] for rank in range(meeting.among.size)]

    @property
    def by_name(self) -> dict[str, Buffer]:
        """The memory of each rank as launches name it."""
        return {
            f"peer.{rank}": Buffer(address, "uint8", (self._mapped[rank][1],), (1,), self)
            for rank, address in enumerate(self.addresses)
        }

    def leave(self) -> None:
        """Close the others' memory, once this rank's launches have ended."""
        with self._device.use():
            call("cuCtxSynchronize")
            for rank in [rank for rank in self._mapped if rank != self._rank]:
                self._unmap(rank)

    def close(self) -> None:
        """Give this rank's memory back; it is gone when the last of the others has closed it."""
        with self._device.use():
            if self._rank in self._mapped:
                self._unmap(self._rank)

    def _given(self, meeting: Meeting, descriptor: int, name: str) -> dict[int, int]:
        """The others' memory, as descriptors by rank."""
        among, folder, exchange, seconds = meeting
        try:
            return exchanged(folder, among.rank, descriptor, exchange, name, seconds=seconds)
        except TargetError:
            self.close()
            raise

    def _make(self, num_bytes: int, word: int) -> None:
        about = AllocationProperties(
            type=library.ALLOCATION_PINNED, handle_types=library.HANDLE_DESCRIPTOR, location=self._here
        )
        self._step = made("cuMemGetAllocationGranularity", c_size_t, ctypes.byref(about), 0)
        self._num_bytes = aligned(max(num_bytes, 1), self._step)
        self._handle = made("cuMemCreate", c_uint64, self._num_bytes, ctypes.byref(about), 0)
        address = self._map(self._rank, self._handle)
        call("cuMemsetD32Async", address, word, self._num_bytes // 4, None)
        call("cuCtxSynchronize")

    @property
    def _here(self) -> Location:
        return Location(library.LOCATION_DEVICE, self._device.number)

    def _map(self, rank: int, handle: int) -> int:
        """Address what the handle stands for, which is given back: the memory stays as long as it is mapped."""
        try:
            address: int = made("cuMemAddressReserve", c_uint64, self._num_bytes, self._step, 0, 0)
            try:
                call("cuMemMap", address, self._num_bytes, 0, handle, 0)
            except DriverError:
                call("cuMemAddressFree", address, self._num_bytes)
                raise
        except DriverError:
            call("cuMemRelease", handle)
            raise
        self._mapped[rank] = address, self._num_bytes
        if rank != self._rank:
            call("cuMemRelease", handle)
        access = library.Access(self._here, library.ACCESS_READ_WRITE)
        call("cuMemSetAccess", address, self._num_bytes, ctypes.byref(access), 1)
        return address

    def _unmap(self, rank: int) -> None:
        address, num_bytes = self._mapped.pop(rank)
        call("cuMemUnmap", address, num_bytes)
        call("cuMemAddressFree", address, num_bytes)
        if rank == self._rank:
            call("cuMemRelease", self._handle)

    def _open_all(self, given: dict[int, int]) -> str:
        """Map what the others have given; why that can't be, if it can't."""
        try:
            with self._device.use():
                for rank, descriptor in sorted(given.items()):
                    try:
                        handle = made("cuMemImportFromShareableHandle", c_uint64, descriptor, library.HANDLE_DESCRIPTOR)
                        self._map(rank, handle)
                    except DriverError as error:
                        return f"rank {self._rank} can't write the memory of rank {rank}: {error}"
        finally:
            for descriptor in given.values():
                os.close(descriptor)
        return ""

    def _raise_together(self, meeting: Meeting, name: str, problem: str) -> None:
        problems = [each.decode() for each in meeting.exchange(name, problem.encode()) if each]
        if problems:
            with suppress(DriverError):
                self.leave()
            meeting.exchange(f"{name}/left", b"")
            with suppress(DriverError):
                self.close()
            raise PeersUnfitError("; ".join(problems))
