"""Ranks that are threads of one process: the simulated world, in which ranks are compared with the unsharded model.

Sums are computed in the order of ranks in float32, so that each run gives the same bits. A rank that fails ends the
others, one that does something else than the others is told so, and so are ranks that all wait for each other: no rank
waits for ever.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeVar

import torch

from precast.ir.waits import LOOK_SECONDS
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


class _Ranks:
    """All ranks: which of them wait, and whether one has failed. What tables hold changes under `news` alone."""

    def __init__(self, size: int) -> None:
        self.news = threading.Condition()
        self._size = size
        self._waiting: dict[str, tuple[str, Callable[[], bool]]] = {}
        self._is_ended = False

    def wait_for(self, what: str, is_there: Callable[[], bool]) -> None:
        """Wait, with `news` held, until `is_there`. Raises `_Ended` if a rank has failed, and RuntimeError where all
        ranks wait, each for another.
        """
        name = threading.current_thread().name
        self._waiting[name] = what, is_there
        try:
            while not is_there():
                if self._is_ended:
                    raise _Ended
                if self._all_wait():
                    told = ", ".join(f"{each} in {its}" for each, (its, _) in sorted(self._waiting.items()))
                    raise RuntimeError(f"all ranks wait for each other: {told}")
                self.news.wait()
        finally:
            del self._waiting[name]

    def end(self) -> None:
        """All who wait, or ever will, are woken with `_Ended`."""
        with self.news:
            self._is_ended = True
            self.news.notify_all()

    def _all_wait(self) -> bool:
        """Whether nobody is left who could give one of them what it waits for."""
        return len(self._waiting) == self._size and not any(is_there() for _, is_there in self._waiting.values())


class _Table:
    """Where all ranks of a group put what they give, and wait until all have."""

    def __init__(self, ranks: _Ranks, size: int) -> None:
        self._ranks = ranks
        self._size = size
        self._given: list[_Given] = [_Given("nothing")] * size
        self._num_here = 0
        self._num_meetings = 0
        self._mail: dict[tuple[int, int], deque[torch.Tensor]] = {}
        self._done: set[int] = set()

    def meet(self, rank: int, given: _Given) -> list[_Given]:
        """What all ranks give to this meeting, in their order. None of it may change before the next `part`."""
        self._given[rank] = given
        self.part(rank)
        found = list(self._given)
        if len({each.text for each in found}) > 1:
            self.part(rank)  # all see it, and all say it
            told = ", ".join(f"rank {other}: {each.text}" for other, each in enumerate(found))
            raise RuntimeError(f"the ranks do different things at the same time: {told}")
        return found

    def part(self, rank: int) -> None:
        """Wait for all others. Raises `_Ended` if one of them has failed."""
        with self._ranks.news:
            meeting = self._num_meetings
            self._num_here += 1
            if self._num_here == self._size:
                self._num_here, self._num_meetings = 0, meeting + 1
                self._ranks.news.notify_all()
            self._ranks.wait_for(self._given[rank].text, lambda: self._num_meetings > meeting)

    def put(self, source: int, target: int, x: torch.Tensor) -> None:
        """Leave a copy of `x` for a rank; nobody waits for that."""
        with self._ranks.news:
            self._mail.setdefault((source, target), deque()).append(x.clone())
            self._ranks.news.notify_all()

    def take(self, source: int, target: int) -> torch.Tensor:
        """The next that `source` leaves for `target`. Raises `_Ended` if one of the ranks has failed."""
        with self._ranks.news:
            mail = self._mail.setdefault((source, target), deque())
            self._ranks.wait_for("receive", lambda: bool(mail) or source in self._done)
            if not mail:
                raise RuntimeError(f"rank {target} waits for what rank {source} sends, and that one has ended")
            return mail.popleft()

    def done(self, rank: int) -> None:
        """The rank sends nothing more. Raises RuntimeError if another has left something that it hasn't received."""
        with self._ranks.news:
            self._done.add(rank)
            self._ranks.news.notify_all()
        self.meet(rank, _Given("the end"))
        left = [source for (source, target), mail in self._mail.items() if target == rank and mail]
        if left:
            raise RuntimeError(f"rank {rank} has ended, and not received what rank {left[0]} has sent")


class Together:
    """One of `size` ranks in threads of one process; `run_ranks` makes them."""

    def __init__(self, table: _Table, rank: int, size: int) -> None:
        self._table = table
        self.rank, self.size = rank, size

    def all_reduce(self, out: torch.Tensor, x: torch.Tensor) -> None:
        """See `Group`."""
        sum_in_order(out, self._all("all_reduce", x))
        self._table.part(self.rank)

    def all_gather(self, out: torch.Tensor, x: torch.Tensor) -> None:
        """See `Group`."""
        for place, each in zip(out, self._all("all_gather", x), strict=True):
            place.copy_(each)
        self._table.part(self.rank)

    def reduce_scatter(self, out: torch.Tensor, x: torch.Tensor) -> None:
        """See `Group`."""
        sum_in_order(out, [each[self.rank] for each in self._all("reduce_scatter", x)])
        self._table.part(self.rank)

    def send(self, x: torch.Tensor, to: int) -> None:
        """See `Group`. It waits for nobody."""
        self._table.put(self.rank, to, x)

    def receive(self, out: torch.Tensor, source: int) -> None:
        """See `Group`."""
        x = self._table.take(source, self.rank)
        if (x.dtype, x.shape) != (out.dtype, out.shape):
            sent, wanted = _Given("receive", x).text, _Given("receive", out).text
            raise RuntimeError(f"rank {source} has sent another tensor than rank {self.rank} wants: {sent}, {wanted}")
        out.copy_(x)

    def _all(self, what: str, x: torch.Tensor) -> list[torch.Tensor]:
        met = self._table.meet(self.rank, _Given(what, x))
        return [each.tensor for each in met if each.tensor is not None]


def run_ranks(size: int, run: Callable[[Together], Result]) -> list[Result]:
    """What `run` returns on each of `size` ranks, in their order; each is a thread, and is given its group.

    Raises the first error of a rank, with a note that names it, when all ranks have ended; RuntimeError if ranks call
    different collectives at the same time, one is done while another calls a collective, or all wait for each other. An
    interrupt ends the wait for the ranks; they end when next they would wait for another.
    """
    return run_stages(1, size, lambda groups: run(groups["tp"]))


def run_stages(pp: int, tp: int, run: Callable[[Mapping[str, Together]], Result]) -> list[Result]:
    """The same for `pp` stages of `tp` ranks each, stage by stage. A rank is given two groups: `tp`, its stage, and
    `pp`, the ranks of its number in all stages.

    Raises RuntimeError also for a rank that is sent something that it doesn't receive.
    """
    size = pp * tp
    ranks = _Ranks(size)
    stages, lines = [_Table(ranks, tp) for _ in range(pp)], [_Table(ranks, pp) for _ in range(tp)]
    results: dict[int, Result] = {}
    errors: list[tuple[int, BaseException]] = []  # in the order in which they came

    def work(rank: int) -> None:
        stage, place = divmod(rank, tp)
        try:
            results[rank] = run({"tp": Together(stages[stage], place, tp), "pp": Together(lines[place], stage, pp)})
            stages[stage].done(place)
            lines[place].done(stage)
        except _Ended:
            pass
        except BaseException as error:  # noqa: BLE001 - raised again by the thread that waits
            errors.append((rank, error))
            ranks.end()

    threads = [threading.Thread(target=work, args=(rank,), name=f"rank {rank}", daemon=True) for rank in range(size)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive():
                thread.join(LOOK_SECONDS)
    except BaseException:  # an interrupt: whoever waits for another rank ends, and nobody waits for the ranks
        ranks.end()
        raise
    if errors:
        rank, error = errors[0]
        error.add_note(f"on rank {rank} of {size}")
        raise error
    return [results[rank] for rank in range(size)]
