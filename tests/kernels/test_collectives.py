"""Collectives over several ranks: threads of one process, and processes over gloo."""

from __future__ import annotations

import gc
import signal
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from collected import CASES, Tensors, collect, given, one_of_several
from torch import multiprocessing

from precast.kernels.collectives.collectives import all_gather, all_reduce, receive, reduce_scatter, send
from precast.kernels.collectives.group import Group
from precast.kernels.collectives.together import run_ranks, run_stages

SIZES = (1, 2, 3, 4)


def expected(rank: int, size: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensors:
    """The same from torch's own words, of all ranks' tensors."""
    all_given = [given(each, shape, dtype) for each in range(size)]
    total = torch.stack([each.float() for each in all_given]).sum(0)
    found = [total]
    found += [torch.cat(all_given, dim) for dim in range(-len(shape), len(shape))]
    whole = [dim for dim in range(-len(shape), len(shape)) if shape[dim] % size == 0]
    found.append(all_given[0] + (rank > 0))
    return [*found, *(total.chunk(size, dim)[rank] for dim in whole)]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("shape", "dtype"), CASES, ids=str)
def test_ranks_together(size: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    found = run_ranks(size, lambda group: collect(group, shape, dtype))

    for rank, results in enumerate(found):
        for result, wanted in zip(results, expected(rank, size, shape, dtype), strict=True):
            assert result.dtype == dtype
            assert result.is_contiguous()
            torch.testing.assert_close(result.float(), wanted.to(dtype).float())


def test_sums_are_the_same_bits_on_all_ranks_and_rounded_once() -> None:
    # In bfloat16, 256 + 1 is 256; together with the fourth rank's 1 the sum is 258.
    values = (256.0, 1.0, 0.0, 1.0)

    found = run_ranks(4, lambda group: all_reduce(torch.tensor([values[group.rank]]).bfloat16(), group=group))

    assert [result.item() for result in found] == [258.0] * 4


def test_any_bits_are_gathered() -> None:
    for dtype in (torch.bool, torch.int64, torch.float8_e4m3fn):
        (found, _) = run_ranks(
            2,
            lambda group: all_gather(torch.tensor([group.rank]).to(dtype), dim=0, group=group, size=2),  # noqa: B023
        )
        assert found.dtype == dtype
        assert found.float().tolist() == [0.0, 1.0]


def test_what_is_gathered_may_lie_with_gaps() -> None:
    x = torch.arange(24.0).view(4, 6)

    found = run_ranks(2, lambda group: all_gather(x[:, group.rank :: 2], dim=1, group=group, size=2))

    assert found[0].tolist() == torch.cat([x[:, ::2], x[:, 1::2]], 1).tolist()


class Broken(Exception):
    pass


def test_a_rank_that_fails_ends_the_others() -> None:
    def run(group: Group) -> None:
        if group.rank == 2:
            raise Broken
        all_reduce(torch.ones(3), group=group)

    with pytest.raises(Broken) as error:
        run_ranks(3, run)
    assert error.value.__notes__ == ["on rank 2 of 3"]


def test_a_rank_that_fails_after_some_collectives_ends_the_others() -> None:
    def run(group: Group) -> None:
        for step in range(20):
            if (group.rank, step) == (1, 13):
                raise Broken
            all_reduce(torch.ones(3), group=group)

    with pytest.raises(Broken):
        run_ranks(4, run)


OTHERS: dict[str, tuple[Callable[[Group], Any], str]] = {
    "shape": (lambda group: all_reduce(torch.ones(3 + group.rank), group=group), r"rank 1: all_reduce .* \[4\]"),
    "dtype": (lambda group: all_reduce(given(0, (2,), (torch.half, torch.float)[group.rank]), group=group), "float16"),
    "what": (
        lambda group: (
            all_reduce(torch.ones(4), group=group)
            if group.rank
            else reduce_scatter(torch.ones(4), dim=0, group=group, size=2)
        ),
        "rank 0: reduce_scatter .*, rank 1: all_reduce",
    ),
    "end": (lambda group: None if group.rank else all_reduce(torch.ones(4), group=group), "rank 1: the end"),
}


@pytest.mark.parametrize("case", OTHERS)
def test_ranks_that_do_different_things_are_told_so(case: str) -> None:
    run, message = OTHERS[case]
    with pytest.raises(RuntimeError, match=f"different things at the same time: .*{message}"):
        run_ranks(2, run)


# --- stages ----------------------------------------------------------------------------------------------------------


def test_stages_of_two_ranks_send_to_the_rank_of_their_number() -> None:
    def run(groups: Mapping[str, Group]) -> list[float]:
        stage, line = groups["tp"], groups["pp"]
        x = torch.tensor([float(stage.rank)])
        if line.rank:
            x = receive([1], dtype=torch.float32, group=line, source=line.rank - 1)
        total = all_reduce(x + 10, group=stage)
        if line.rank < line.size - 1:
            send(total + stage.rank, group=line, target=line.rank + 1)
        return total.tolist()

    # 0 + 10 + 1 + 10; then 21 + 10 + 22 + 10; then 63 + 10 + 64 + 10
    assert run_stages(3, 2, run) == [[21.0], [21.0], [63.0], [63.0], [147.0], [147.0]]


def test_what_is_sent_may_change_afterwards() -> None:
    def run(groups: Mapping[str, Group]) -> list[float]:
        line, x = groups["pp"], torch.ones(2)
        if line.rank:
            return receive([2], dtype=torch.float32, group=line, source=0).tolist()
        send(x, group=line, target=1)
        x.zero_()
        return []

    assert run_stages(2, 1, run)[1] == [1.0, 1.0]


STRAY: dict[str, tuple[Callable[[Group], Any], str]] = {
    "never sent": (
        lambda line: receive([1], dtype=torch.float32, group=line, source=0) if line.rank else None,
        "rank 1 waits for what rank 0 sends, and that one has ended",
    ),
    "never received": (
        lambda line: None if line.rank else send(torch.ones(1), group=line, target=1),
        "rank 1 has ended, and not received what rank 0 has sent",
    ),
    "another": (
        lambda line: (
            receive([3], dtype=torch.float32, group=line, source=0)
            if line.rank
            else send(torch.ones(2), group=line, target=1)
        ),
        r"another tensor than rank 1 wants: receive torch.float32 \[2\], receive torch.float32 \[3\]",
    ),
}


@pytest.mark.parametrize("case", STRAY)
def test_stages_that_wait_for_ever_or_send_to_nobody_are_told_so(case: str) -> None:
    run, message = STRAY[case]
    with pytest.raises(RuntimeError, match=message):
        run_stages(2, 1, lambda groups: run(groups["pp"]))


def test_ranks_that_all_wait_for_each_other_are_told_so() -> None:
    def receives(groups: Mapping[str, Group]) -> None:
        receive([1], dtype=torch.float32, group=groups["pp"], source=1 - groups["pp"].rank)

    def receives_or_adds_up(groups: Mapping[str, Group]) -> None:
        if groups["tp"].rank:
            receives(groups)
        elif not groups["pp"].rank:
            all_reduce(torch.ones(3), group=groups["tp"])

    with pytest.raises(RuntimeError, match="all ranks wait for each other: rank 0 in receive, rank 1 in receive"):
        run_stages(2, 1, receives)
    others = r"rank 0 in all_reduce torch.float32 \[3\], rank 1 in receive, rank 2 in the end, rank 3 in receive"
    with pytest.raises(RuntimeError, match=f"all ranks wait for each other: {others}"):
        run_stages(2, 2, receives_or_adds_up)


def test_an_interrupt_ends_the_wait_for_ranks_whenever_it_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal that another thread takes doesn't wake the main one: as if it had come just before its wait."""
    waits, go_on, ended = threading.Event(), threading.Event(), threading.Event()
    join = threading.Thread.join

    def joining(thread: threading.Thread, timeout: float | None = None) -> None:
        waits.set()
        join(thread, timeout)

    def run(group: Group) -> None:
        if group.rank:
            waits.wait()
            signal.raise_signal(signal.SIGINT)
            go_on.wait()
            return
        try:
            all_reduce(torch.ones(3), group=group)
        finally:
            ended.set()

    monkeypatch.setattr(threading.Thread, "join", joining)
    gc.disable()  # Python drops an interrupt that comes while an object is finalized
    try:
        with pytest.raises(KeyboardInterrupt):
            run_ranks(2, run)
        assert ended.wait(60), "a rank waits for others still"
    finally:
        gc.enable()
        go_on.set()


def test_a_stage_that_fails_ends_those_that_wait_for_it() -> None:
    def run(groups: Mapping[str, Group]) -> None:
        if groups["pp"].rank == 0:
            raise Broken
        receive([1], dtype=torch.float32, group=groups["pp"], source=0)

    with pytest.raises(Broken) as error:
        run_stages(3, 2, run)
    assert error.value.__notes__[0] in ("on rank 0 of 6", "on rank 1 of 6")


def test_a_graph_for_another_number_of_ranks_is_refused() -> None:
    with pytest.raises(ValueError, match="bound to 4 ranks, and the group has 2"):
        run_ranks(2, lambda group: all_gather(torch.ones(3), dim=0, group=group, size=4))
    with pytest.raises(ValueError, match="bound to 2 ranks, and the group has 1"):
        reduce_scatter(torch.ones(4), dim=0, group="tp", size=2)


def test_processes_over_gloo_compute_the_bits_that_threads_do(tmp_path: Path) -> None:
    multiprocessing.spawn(one_of_several, (3, tmp_path), 3)

    wanted = run_ranks(3, lambda group: [collect(group, *case) for case in CASES])
    for rank in range(3):
        for results, others in zip(torch.load(tmp_path / f"{rank}.pt"), wanted[rank], strict=True):
            assert all(torch.equal(a, b) for a, b in zip(results, others, strict=True))
    assert all(wanted[0])
