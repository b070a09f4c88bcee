"""The linear recurrence by hand, and against the loop of transformers' RG-LRU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from op_samples.draw import Draw
from transformers.models.recurrent_gemma.modeling_recurrent_gemma import RecurrentGemmaRglru

from precast.kernels.linear_recurrence import doubled
from precast.kernels.linear_recurrence.linear_recurrence import linear_recurrence, stateful_linear_recurrence

each_form = pytest.mark.parametrize(
    "scan", [stateful_linear_recurrence, doubled.stateful_linear_recurrence], ids=["reference", "implementation"]
)


@pytest.fixture
def draw() -> Draw:
    """Draws on the CPU: that other devices agree, `test_specs.py` tests."""
    return Draw(torch.float32, torch.device("cpu"))


def i32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@each_form
def test_by_hand(scan: Callable[..., torch.Tensor]) -> None:
    # Of a state of 8 half stays, and 1 comes; of that a quarter stays, and 2 come.
    x, factor = torch.tensor([1.0, 2.0]).view(1, 2, 1), torch.tensor([0.5, 0.25]).view(1, 2, 1)
    state = torch.tensor([[8.0], [6.0]])

    y = scan(x, factor, state, i32(0), i32(0, 2), i32(5))

    assert y.flatten().tolist() == [5.0, 3.25]
    assert state.flatten().tolist() == [3.25, 6.0]


@each_form
def test_the_largest_by_hand(scan: Callable[..., torch.Tensor]) -> None:
    # Of 8 half stays, more than 1; of that a quarter, less than 2; of that a half, more than nothing.
    x, factor = torch.tensor([1.0, 2.0, 0.0]).view(1, 3, 1), torch.tensor([0.5, 0.25, 0.5]).view(1, 3, 1)
    state = torch.tensor([[8.0], [6.0]])

    y = scan(x, factor, state, i32(0), i32(0, 3), i32(5), kind="max")

    assert y.flatten().tolist() == [4.0, 2.0, 1.0]
    assert state.flatten().tolist() == [1.0, 6.0]


@each_form
def test_the_largest_since_a_factor_of_nothing_by_hand(scan: Callable[..., torch.Tensor]) -> None:
    # Two sequences, of which the shorter ends in a state below zero.
    x = torch.tensor([-3.0, -1.0, -2.0, -5.0, -4.0]).view(1, 5, 1)
    factor = torch.tensor([0.0, 1.0, 1.0, 0.0, 1.0]).view(1, 5, 1)
    state = torch.tensor([[8.0], [6.0]])

    y = scan(x, factor, state, i32(1, 0), i32(0, 2, 5), i32(2, 9), kind="max")

    assert y.flatten().tolist() == [-3.0, -1.0, 8.0, -5.0, -4.0]
    assert state.flatten().tolist() == [-4.0, -1.0]


@each_form
def test_a_factor_of_nearly_nothing_is_more_than_nothing(scan: Callable[..., torch.Tensor]) -> None:
    x, factor = torch.tensor([0.0, 0.0]).view(1, 2, 1), torch.tensor([1e-9, 1.0]).view(1, 2, 1)

    y = scan(x, factor, torch.ones(1, 1), i32(0), i32(0, 2), i32(9), kind="max")

    torch.testing.assert_close(y.flatten(), torch.tensor([1e-9, 1e-9]), rtol=1e-6, atol=0)


@each_form
def test_other_kinds_are_refused(scan: Callable[..., torch.Tensor]) -> None:
    x = torch.ones(1, 2, 1)

    with pytest.raises(ValueError, match="kind: expected one of sum, max, found 'min'"):
        scan(x, x, torch.zeros(1, 1), i32(0), i32(0, 2), i32(2), kind="min")


@each_form
def test_equals_transformers(scan: Callable[..., torch.Tensor], draw: Draw) -> None:
    x, factor = draw.normal(1, 93, 6), draw.uniform(1, 93, 6)
    state = torch.full((2, 6), torch.nan)

    found = scan(x, factor, state, i32(1, 0), i32(0, 3, 93), i32(3, 90))

    for rows, slot in ((slice(0, 3), 1), (slice(3, 93), 0)):
        reset = torch.zeros(1, rows.stop - rows.start, 1, dtype=torch.bool)
        expected, last = RecurrentGemmaRglru._rnn_scan(None, x[:, rows], factor[:, rows], reset, None)
        torch.testing.assert_close(found[:, rows], expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(state[slot], last[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("scan", [linear_recurrence, doubled.linear_recurrence], ids=["reference", "implementation"])
def test_what_is_multiplied_by_nothing_is_gone(scan: Callable[..., torch.Tensor], draw: Draw) -> None:
    x, factor = draw.normal(1, 50, 3), torch.ones(1, 50, 3)
    factor[:, 20] = 0.0

    found = scan(x, factor, i32(0, 50))

    torch.testing.assert_close(found[:, 20:], x[:, 20:].cumsum(1), rtol=1e-5, atol=1e-5)
