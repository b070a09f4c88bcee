"""Ranks that are processes: groups over a backend of torch.distributed, NCCL on GPUs and gloo on CPUs.

The backend is an object of its own, made over a store: nothing is registered in torch.distributed's global state.
"""

# torch names what torch.distributed has in C++ there, and doesn't list it.
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch

from precast.kernels.collectives.group import Connected, sum_in_order
from precast.kernels.collectives.ways import MAX_PEERS
from precast.kernels.native import Native

if TYPE_CHECKING:
    from torch.distributed import Store


def connect(
    store: Store, rank: int, size: int, device: torch.device, timeout: timedelta, *, sums: bool = True,
    native: Native | None = None,
) -> Connected:  # fmt: skip
    """The group of `size` ranks that meet at `store`; all ranks call it. `sums`: they add up what they have; else they
    send it to one another. Kernels come from `native`, or are compiled.

    Over gloo for a CPU. Over NCCL for a GPU, and if the ranks' GPUs can write each other's memory, by kernels of our
    own where these are faster. A collective that the others don't join within `timeout` fails. Raises RuntimeError if
    they don't come to the store.
    """
    from torch import distributed

    if device.type == "cpu":
        return Gloo(distributed.ProcessGroupGloo(store, rank, size, timeout), rank, size)
    options = distributed.ProcessGroupNCCL.Options()
    options._timeout = timeout
    backend = distributed.ProcessGroupNCCL(store, rank, size, options)
    if not sums:  # what is sent would else have a communicator for each pair, made when they first meet in a step
        backend.eager_connect_single_device(device)
        return Nccl(backend, rank, size)
    return _with_peers(Nccl(backend, rank, size), store, device, timeout, native)


def _with_peers(nccl: Nccl, store: Store, device: torch.device, timeout: timedelta, native: Native | None) -> Connected:
    """The same group, with kernels of our own if each rank can write the memory of all."""
    from precast.kernels import cuda_source

    def exchange(name: str, said: bytes) -> list[bytes]:
        store.set(f"peers/{name}/{nccl.rank}", said)  # type: ignore[arg-type]
        return [store.get(f"peers/{name}/{rank}") for rank in range(nccl.size)]

    if not 2 <= nccl.size <= MAX_PEERS:
        return nccl
    if b"none" in exchange("bindings", b"some" if cuda_source.is_installed() else b"none"):
        nccl.text = "NCCL, as cuda-bindings are not installed everywhere"
        return nccl
    from precast.kernels.collectives.peers import Peers

    try:
        return Peers(nccl, device, exchange, limit=timeout.total_seconds(), native=native)
    except RuntimeError as error:  # on other hosts, or without a link: on all ranks
        nccl.text = f"NCCL, as {error}"
        return nccl


class Gloo:
    """One of `size` processes on CPUs. Sums are computed by each rank in the order of ranks, as `Together` does.

    Gloo's own sums go around a ring, in half precision where tensors are of it.
    """

    def __init__(self, backend: Any, rank: int, size: int) -> None:
        """`backend`: a ProcessGroupGloo, of whose methods torch's types don't speak."""
        self._backend = backend
        self.rank, self.size, self.text = rank, size, "gloo"

    def abort(self) -> None:
        """End, from another thread, what this rank waits for in others that are gone."""
        self._backend.abort()

    def leave(self) -> None:
        """See `Connected`: nothing is held."""

    def close(self) -> None:
        """See `Connected`: nothing is held."""

    def all_reduce(self, out: torch.Tensor, x: torch.Tensor) -> None:
        """See `Group`."""
        sum_in_order(out, self._all(x))

    def all_gather(self, out: torch.Tensor, x: torch.Tensor) -> None:
        """See `Group`."""
        for place, each in zip(out, self._all(x), strict=True):
            place.copy_(each)

    def reduce_scatter(self, out: torch.Tensor, x: torch.Tensor) -> None:
        """See `Group`."""
        sum_in_order(out, [each[self.rank] for each in self._all(x)])

    def send(self, x: torch.Tensor, to: int) -> None:
        """See `Group`."""
        if x.numel():
            self._backend.send([_sent(x.contiguous())], to, 0).wait()

    def receive(self, out: torch.Tensor, source: int) -> None:
        """See `Group`."""
        if out.numel():
            self._backend.recv([_sent(out)], source, 0).wait()

    def _all(self, x: torch.Tensor) -> list[torch.Tensor]:
        """All ranks' `x`. Their bytes are sent: gloo does not know all element types."""
        sent = x.contiguous().view(-1).view(torch.uint8)
        found = [torch.empty_like(sent) for _ in range(self.size)]
        if sent.numel():
            self._backend.allgather([found], [sent]).wait()
        return [each.view(x.dtype).view(x.shape) for each in found]


class Nccl:
    """One of `size` processes with a GPU each; NCCL sums in the tensors' own type."""

    def __init__(self, backend: Any, rank: int, size: int) -> None:
        """`backend`: a ProcessGroupNCCL."""
        self._backend = backend
        self.rank, self.size, self.text = rank, size, "NCCL"

    def abort(self) -> None:
        """End, from another thread, what this rank waits for in others that are gone."""
        self._backend.abort()

    def leave(self) -> None:
        """See `Connected`: nothing is held."""

    def close(self) -> None:
        """See `Connected`: nothing is held."""

    def all_reduce(self, out: torch.Tensor, x: torch.Tensor) -> None:
        """See `Group`."""
        out.copy_(x)
        self._backend.allreduce([out]).wait()

    def all_gather(self, out: torch.Tensor, x: torch.Tensor) -> None:
        """See `Group`."""
        self._backend._allgather_base(out, x.contiguous()).wait()

    def reduce_scatter(self, out: torch.Tensor, x: torch.Tensor) -> None:
        """See `Group`."""
        self._backend._reduce_scatter_base(out, x.contiguous()).wait()

    def send(self, x: torch.Tensor, to: int) -> None:
        """See `Group`."""
        self._backend.send([_sent(x.contiguous())], to, 0).wait()

    def receive(self, out: torch.Tensor, source: int) -> None:
        """See `Group`."""
        self._backend.recv([_sent(out)], source, 0).wait()


def _sent(x: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor: backends don't know all element types."""
    return x.view(-1).view(torch.uint8)
