"""What connects a rank with the others of its host, without torch: memory of each other's GPUs, and NCCL."""

from __future__ import annotations

from collections.abc import Callable
from ctypes import byref
from pathlib import Path
from typing import NamedTuple

from precast.kernels.collectives.launches import Among
from precast.kernels.collectives.ways import EMPTY, MAX_PEERS
from precast.kernels.use import Target
from precast.loader.device import Buffer
from precast.loader.driver import library
from precast.loader.driver.collectives import ALL_GATHER, ALL_REDUCE, CALLS, COPY_ROWS, PEER, Collectives
from precast.loader.driver.device import DriverDevice
from precast.loader.driver.nccl import Nccl
from precast.loader.driver.peer_memory import Meeting, PeerMemory, PeersUnfitError
from precast.loader.world.descriptors import Exchange

_COUNTER_BYTES = 8
"""A counter, and a word that is not 0 once who waits is to end."""


class Shared(NamedTuple):
    """Memory that kernels of all ranks work on: that of each, and a counter of this one's, by the names of launches."""

    memory: PeerMemory
    calls: Buffer

    @property
    def by_name(self) -> dict[str, Buffer]:
        """The memory as launches name it."""
        return {**self.memory.by_name, "calls": self.calls}


class Connection:
    """This rank's connection with the others. `collectives` say what a program launches, `text` what connects them."""

    def __init__(
        self, among: Among, device: DriverDevice, target: Target, folder: Path, exchange: Exchange, *, seconds: float
    ) -> None:
        """All ranks call it, once each has its context. A kernel waits `seconds` for the others.

        Raises what `PeerMemory` raises, but PeersUnfitError: what ranks can't write to each other goes by NCCL.
        """
        self._device, self._among, self._exchange = device, among, exchange
        self._meeting = Meeting(among, folder, exchange)
        self.limit = int(seconds * 1e9)
        self._shared: list[Shared] = []
        self._nccl: Nccl | None = None
        self._beside = device.stream()  # other streams may wait for what waits
        has_pdl, has_peers = target.capability >= (9, 0), 2 <= among.size <= MAX_PEERS
        self.collectives = Collectives(among, has_peers=has_peers, pdl=has_pdl, limit=self.limit)
        self.text = "memory of each other"
        try:
            if has_peers:
                self.share(self.collectives.memory_bytes, EMPTY)
        except PeersUnfitError as error:
            has_peers, self.text = False, f"NCCL, as {error}"
        if not has_peers:
            self.collectives = Collectives(among, has_peers=False, pdl=has_pdl, limit=self.limit)

    @property
    def memory(self) -> dict[str, Buffer]:
        """The memory that `collectives` name."""
        if not self.collectives.has_peers:
            return {}
        named = self._shared[0].by_name
        found = {PEER.format(rank): named[f"peer.{rank}"] for rank in range(self._among.size)}
        return {**found, CALLS: named["calls"]}

    @property
    def calls(self) -> dict[str, Callable[..., None]]:
        """What launches call in the place of kernels, by name."""
        if self._nccl is None:
            return {}
        return {ALL_REDUCE: self._nccl.all_reduce, ALL_GATHER: self._nccl.all_gather, COPY_ROWS: copy_rows}

    def share(self, num_bytes: int, word: int = 0) -> Shared:
        """Memory of each rank that all address, which begins with this word everywhere; all ranks call it."""
        memory = PeerMemory(num_bytes, self._device, self._meeting, f"peers/{len(self._shared)}", word)
        with self._device.use():
            calls = self._device.alloc(_COUNTER_BYTES)
            self._device.zero(calls)
            self._device.synchronize()
        self._shared.append(Shared(memory, calls))
        return self._shared[-1]

    def connect_nccl(self) -> None:
        """Connect by NCCL too; all ranks call it. Raises what `Nccl` raises."""
        if self._nccl is None:
            with self._device.use():
                self._nccl = Nccl(self._among, self._exchange)
            if self.collectives.has_peers:
                self.text = "memory of each other, beside NCCL"

    def abort(self) -> None:
        """End, from another thread, what this rank waits for in others that are gone."""
        try:
            with self._device.use(self._beside):
                for each in self._shared:  # no kernel, which might not begin beside one that waits
                    library.call("cuStreamWriteValue32_v2", self._beside, each.calls.pointer + 4, 1, 0)
        finally:
            if self._nccl is not None:
                self._nccl.abort()

    def leave(self) -> None:
        """Let go of what the other ranks have given, when this one has done all that it will do."""
        if self._nccl is not None:
            with self._device.use():
                self._nccl.close()
        for each in self._shared:
            each.memory.leave()

    def close(self) -> None:
        """Give back what this rank has given to others, when all ranks have left."""
        for each in self._shared:
            each.memory.close()


def copy_rows(
    target: int, target_step: int, source: int, source_step: int, width: int, rows: int, *, stream: int
) -> None:
    """Copy rows of `width` bytes, which begin every so many bytes, on a stream."""

    copy = library.Copy2D(
        source_type=library.MEMORY_DEVICE, source=source, source_pitch=source_step, target_type=library.MEMORY_DEVICE,
        target=target, target_pitch=target_step, width=width, height=rows,
    )  # fmt: skip
    library.call("cuMemcpy2DAsync_v2", byref(copy), stream)
