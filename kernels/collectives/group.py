"""`Group`: the ranks that share a layer, as one of them sees them; a program is given one for each name in its graph.

Collectives are called by all ranks, in the same order, with tensors of the same shape and dtype.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch

from precast.kernels.collectives.launches import Norm


class Group(Protocol):
    """What connects a rank with the others. Results are the same, bit by bit, on all ranks.

    No result may lie in the memory of an argument. Sums of half precision are computed in float32 and rounded once.
    An implementation for GPUs launches on the current stream, reads nothing back, and can be captured.
    """

    @property
    def rank(self) -> int:
        """This rank, from 0."""
        ...

    @property
    def size(self) -> int:
        """How many ranks there are."""
        ...

    def all_reduce(self, out: torch.Tensor, x: torch.Tensor) -> None:
        """The sum of all ranks' `x` into `out`; both of one shape and dtype, `out` contiguous."""
        ...

    def all_gather(self, out: torch.Tensor, x: torch.Tensor) -> None:
        """All ranks' `x` into `out` [size, *x.shape], in the order of ranks; `out` contiguous."""
        ...

    def reduce_scatter(self, out: torch.Tensor, x: torch.Tensor) -> None:
        """The sum of all ranks' `x[rank]` into `out`; `x` is [size, *out.shape], `out` contiguous."""
        ...

    def send(self, x: torch.Tensor, to: int) -> None:
        """Give `x` to the rank `to`, which calls `receive`. It may wait until that has begun."""
        ...

    def receive(self, out: torch.Tensor, source: int) -> None:
        """What the rank `source` sends, of the same sizes and dtype, into `out`, contiguous. What one rank sends to
        another is received in its order."""
        ...


class Connected(Group, Protocol):
    """A group of processes."""

    @property
    def text(self) -> str:
        """What connects them, in words."""
        ...

    def abort(self) -> None:
        """End, from another thread, what this rank waits for in others that are gone."""
        ...

    def leave(self) -> None:
        """Let go of what the other ranks have given, when this one has done all that it will do."""
        ...

    def close(self) -> None:
        """Give back what this rank has given to others, when all ranks have left."""
        ...


@runtime_checkable
class NormsSums(Protocol):
    """A group that adds up, adds what is to be added, and norms that, at once."""

    def all_reduce_norm(
        self,
        out: torch.Tensor,
        total: torch.Tensor,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        norm: Norm,
    ) -> bool:
        """The sum of all ranks' `x`, with `residual`, into `total`, and its norm into `out`, both contiguous.

        False, on all ranks: not these tensors; nothing is done.
        """
        ...


class Alone:
    """A group of one rank."""

    rank, size = 0, 1

    def all_reduce(self, out: torch.Tensor, x: torch.Tensor) -> None:
        """`x` itself."""
        out.copy_(x)

    def all_gather(self, out: torch.Tensor, x: torch.Tensor) -> None:
        """`x` itself, as the only one."""
        out.copy_(x[None])

    def reduce_scatter(self, out: torch.Tensor, x: torch.Tensor) -> None:
        """`x`'s only part."""
        out.copy_(x[0])

    def send(self, x: torch.Tensor, to: int) -> None:
        """Nothing: there is nobody."""

    def receive(self, out: torch.Tensor, source: int) -> None:
        """Zeros: there is nobody."""
        out.zero_()


def sum_in_order(out: torch.Tensor, parts: list[torch.Tensor]) -> None:
    """The sum of the parts into `out`, one after another in the type that ops compute in, rounded once."""
    total = parts[0].to(torch.float64 if out.dtype == torch.float64 else torch.float32, copy=True)
    for part in parts[1:]:
        total += part
    out.copy_(total)
