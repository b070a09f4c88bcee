"""What a step waits for, from what a profiler saw."""

from __future__ import annotations

import pytest
from bench_gpu_step_kernels import LEAST_LAYERS, Ran, layer_of, waited_us


def test_kernels_that_overlap_are_waited_for_from_the_end_of_those_in_front() -> None:
    """The second ends before the first one does, and the third begins long before it is waited for."""
    step = [Ran("a", 0, 9000), Ran("b", 500, 8000), Ran("c", 1000, 11000), Ran("d", 12000, 12500)]

    assert waited_us([step]) == [("a", 9.0), ("b", 0.0), ("c", 2.0), ("d", 1.5)]


def test_of_steps_the_median_counts() -> None:
    steps = [[Ran("a", 5000, 5000 + end)] for end in (1000, 90000, 3000)]

    assert waited_us(steps) == [("a", 3.0)]


def test_a_layer_is_what_comes_again() -> None:
    """Behind what comes before all layers. The median of layers counts, but for the first two and the last one."""
    layer = ["norm", "product", "attention", "product", "gate"]
    times = [1000, 1000, *range(LEAST_LAYERS + 1), 1000]
    names = ["embedding", *layer * len(times), "norm", "head"]
    kernels = [(name, float(times[min(max(i - 1, 0) // 5, len(times) - 1)])) for i, name in enumerate(names)]

    found = layer_of(kernels)

    assert [name for name, _ in found] == ["norm", "product", "attention", "product", "gate"]
    assert {us for _, us in found} == {LEAST_LAYERS / 2}


def test_without_layers_there_is_nothing_to_say() -> None:
    with pytest.raises(ValueError, match="3 kernels, and no 15 layers"):
        layer_of([("a", 1.0), ("b", 2.0), ("c", 3.0)])
