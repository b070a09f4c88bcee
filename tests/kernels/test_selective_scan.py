"""The scan of Mamba 1 by hand, and against transformers' own function."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from op_samples.draw import Draw
from transformers.models.jamba.modeling_jamba import mamba_selective_scan, mamba_selective_state_update

from precast.kernels.selective_scan import tiled
from precast.kernels.selective_scan.selective_scan import selective_scan, stateful_selective_scan

each_form = pytest.mark.parametrize(
    "scan", [stateful_selective_scan, tiled.stateful_selective_scan], ids=["reference", "implementation"]
)


@pytest.fixture
def draw() -> Draw:
    """Draws on the CPU: that other devices agree, `test_specs.py` tests."""
    return Draw(torch.float32, torch.device("cpu"))


def i32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@each_form
def test_by_hand(scan: Callable[..., torch.Tensor]) -> None:
    # One channel, one row, steps of 1, half of the state decays; it begins behind a state of 8.
    x, ones = torch.tensor([1.0, 2.0]).view(1, 2, 1), torch.ones(1, 2, 1)
    state = torch.tensor([8.0, 6.0]).view(2, 1, 1)
    a = torch.tensor([[0.5]]).log()

    y = scan(x, ones, a, ones, 10 * ones, torch.ones(1), None, state, i32(0), i32(0, 2), i32(5), softplus=False)

    # States 8 / 2 + 1, 5 / 2 + 2.
    torch.testing.assert_close(y.flatten(), torch.tensor([51.0, 47.0]))
    torch.testing.assert_close(state.flatten(), torch.tensor([4.5, 6.0]))


@each_form
@pytest.mark.parametrize("extras", [True, False])
def test_equals_transformers(scan: Callable[..., torch.Tensor], draw: Draw, extras: bool) -> None:
    lengths, channels, width = (3, 90), 6, 4
    bounds = i32(0, 3, 93)
    x, dt = draw.normal(1, 93, channels), draw.normal(1, 93, channels)
    b, c = draw.normal(1, 93, width), draw.normal(1, 93, width)
    a = -draw.uniform(channels, width, low=0.1, high=3.0)
    d, bias = (draw.normal(channels), draw.normal(channels)) if extras else (None, None)
    state = torch.full((2, channels, width), torch.nan)

    found = scan(x, dt, a, b, c, d, bias, state, i32(1, 0), bounds, i32(*lengths), softplus=True)

    for rows, slot in ((slice(0, 3), 1), (slice(3, 93), 0)):
        theirs = [z[:, rows].transpose(1, 2) for z in (x, dt, b, c)]
        expected, last = mamba_selective_scan(
            theirs[0], theirs[1], a, *theirs[2:], D=d, delta_bias=bias, delta_softplus=True, return_last_state=True
        )
        torch.testing.assert_close(found[:, rows], expected.transpose(1, 2), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(state[slot], last[0], rtol=1e-5, atol=1e-5)


@each_form
def test_a_step_equals_transformers(scan: Callable[..., torch.Tensor], draw: Draw) -> None:
    channels, width = 6, 4
    x, dt = draw.normal(1, 3, channels), draw.normal(1, 3, channels)
    b, c = draw.normal(1, 3, width), draw.normal(1, 3, width)
    a = -draw.uniform(channels, width, low=0.1, high=3.0)
    d, bias = draw.normal(channels), draw.normal(channels)
    state = draw.normal(4, channels, width)
    theirs = state[[3, 0, 2]].clone()

    found = scan(x, dt, a, b, c, d, bias, state, i32(3, 0, 2), i32(0, 1, 2, 3), i32(5, 9, 30), softplus=True)
    expected = mamba_selective_state_update(theirs, x[0], dt[0], a, b[0], c[0], d, bias, dt_softplus=True)

    torch.testing.assert_close(found[0], expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(state[[3, 0, 2]], theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("scan", [selective_scan, tiled.selective_scan], ids=["reference", "implementation"])
def test_what_decays_at_once_leaves_nothing(scan: Callable[..., torch.Tensor], draw: Draw) -> None:
    x, dt = draw.normal(1, 50, 3), torch.full((1, 50, 3), 100.0)
    b, c = draw.normal(1, 50, 2), draw.normal(1, 50, 2)

    found = scan(x, dt, torch.full((3, 2), -50.0), b, c, None, None, i32(0, 50), softplus=False)

    expected = dt * x * (b * c).sum(-1, keepdim=True)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)
