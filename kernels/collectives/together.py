"""Ranks that are threads of one process: the simulated world, in which ranks are compared with the unsharded model.

Sums are computed in the order of ranks in float32, so that each run gives the same bits. A rank that fails ends the
others, and one that does something else than the others is told so: no rank waits for ever.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import torch

from precast.kernels.collectives.group import sum_in_order

Result = TypeVar("Result")


class _Given(NamedTuple):
    """What a rank brings to a meeting."""

    what: str
    tensor: torch.Tensor | None = None

    @property
    def text(self) -> str:
        return self.what if self.tensor is None else f"{self.what} {self.tensor.dtype} {list(self.tensor.shape)}"


class _Ended(Exception):
    """Another rank has failed."""


class _Table:
    """Where all ranks put what they give, and wait until all have."""

    def __init__(self, size: int) -> None:
        self._barrier = threading.Barrier(size)
        self._given: list[_Given] = [_Given("nothing")] * size

    def meet(self, rank: int, given: _Given) -> list[_Given]:
        """What all ranks give to this meeting, in their order. None of it may change before the next `part`."""
        self._given[rank] = given
        self.part()
        found = list(self._given)
        if len({each.text for each in found}) > 1:
            self.part()  # all see it, and all say it
            told = ", ".join(f"rank {other}: {each.text}" for other, each in enumerate(found))
            raise RuntimeError(f"the ranks do different things at the same time: {told}")
        return found

    def part(self) -> None:
        """Wait for all others. Raises `_Ended` if one of them has failed."""
        try:
            self._barrier.wait()
        except threading.BrokenBarrierError:
            raise _Ended from None

    def end(self) -> None:
        """All who wait, or ever will, are woken with `_Ended`."""
        self._barrier.abort()


class Together:
    """One of `size` ranks in threads of one process; `run_ranks` makes them."""

    def __init__(self, table: _Table, rank: int, size: int) -> None:
        self._table = table
        self.rank, self.size = rank, size

    def all_reduce(self, out: torch.Tensor, x: torch.Tensor) -> None:
        """See `Group`."""
        sum_in_order(out, self._all("all_reduce", x))
        self._table.part()

    def all_gather(self, out: torch.Tensor, x: torch.Tensor) -> None:
        """See `Group`."""
        for place, each in zip(out, self._all("all_gather", x), strict=True):
            place.copy_(each)
        self._table.part()

    def reduce_scatter(self, out: torch.Tensor, x: torch.Tensor) -> None:
        """See `Group`."""
        sum_in_order(out, [each[self.rank] for each in self._all("reduce_scatter", x)])
        self._table.part()

    def _all(self, what: str, x: torch.Tensor) -> list[torch.Tensor]:
        met = self._table.meet(self.rank, _Given(what, x))
        return [each.tensor for each in met if each.tensor is not None]


def run_ranks(size: int, run: Callable[[Together], Result]) -> list[Result]:
    """What `run` returns on each of `size` ranks, in their order; each is a thread, and is given its group.

    Raises the first error of a rank, with a note that names it, when all ranks have ended; RuntimeError if ranks call
    different collectives at the same time, or one is done while another calls a collective.
    """
    table = _Table(size)
    results: dict[int, Result] = {}
    errors: list[tuple[int, BaseException]] = []  # in the order in which they came

    def work(rank: int) -> None:
        try:
            results[rank] = run(Together(table, rank, size))
            table.meet(rank, _Given("the end"))
        except _Ended:
            pass
        except BaseException as error:  # noqa: BLE001 - raised again by the thread that waits
            errors.append((rank, error))
            table.end()

    threads = [threading.Thread(target=work, args=(rank,), name=f"rank {rank}", daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        rank, error = errors[0]
        error.add_note(f"on rank {rank} of {size}")
        raise error
    return [results[rank] for rank in range(size)]
