"""How the time without a kernel is counted, from what a GPU did."""

from __future__ import annotations

import pytest
from bench_gpu_idle import Activity, Idle, idle


def kernel(start: int, end: int) -> Activity:
    return Activity(start, end, is_transfer=False)


def transfer(start: int, end: int) -> Activity:
    return Activity(start, end, is_transfer=True)


def test_gaps_are_told_apart_by_the_transfers_in_them() -> None:
    """Two steps, each with a gap of 5, and 20 from the one to the next: 100 in all."""
    first = [transfer(-9, -2), kernel(0, 30), kernel(35, 40)]
    second = [transfer(42, 44), transfer(50, 55), kernel(60, 90), kernel(95, 100), transfer(101, 103)]

    assert idle(second + first) == pytest.approx(Idle(0.3, 0.2, 0.1))


def test_kernels_that_overlap_count_once() -> None:
    assert idle([kernel(0, 50), kernel(10, 20), kernel(40, 80), kernel(90, 100)]) == pytest.approx(Idle(0.1, 0.0, 0.1))


def test_a_transfer_beside_kernels_is_no_gap() -> None:
    assert idle([kernel(0, 50), transfer(10, 20), kernel(50, 100)]) == Idle(0.0, 0.0, 0.0)


def test_without_kernels_there_is_no_time() -> None:
    assert idle([transfer(0, 5)]) == Idle(0.0, 0.0, 0.0)
