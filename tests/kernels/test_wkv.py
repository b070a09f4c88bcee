"""The attention of RWKV by hand, and against transformers' own function."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from op_samples.draw import Draw
from transformers.models.rwkv.modeling_rwkv import rwkv_linear_attention_cpu

from precast.kernels.wkv import doubled
from precast.kernels.wkv.wkv import stateful_wkv, wkv

each_form = pytest.mark.parametrize("attend", [stateful_wkv, doubled.stateful_wkv], ids=["reference", "implementation"])


@pytest.fixture
def draw() -> Draw:
    """Draws on the CPU: that other devices agree, `test_specs.py` tests."""
    return Draw(torch.float32, torch.device("cpu"))


def i32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@each_form
def test_by_hand(attend: Callable[..., torch.Tensor]) -> None:
    # So far 2 of weight 3. Keys weigh 1 later, and 4 for their own token; half of each weight stays.
    k, v = torch.zeros(1, 2, 1), torch.tensor([6.0, 1.0]).view(1, 2, 1)
    half, first = torch.tensor([0.5]).log(), torch.tensor([4.0]).log()
    state = torch.tensor([[6.0, 3.0, 0.0], [1.0, 1.0, 1.0]]).view(2, 3, 1)

    y = attend(k, v, half, first, state, i32(0), i32(0, 2), i32(5))

    # (3 * 2 + 4 * 6) / 7, then 1.5 of 2 and 1 of 6: (9 + 4 * 1) / (2.5 + 4); then half of that, and 1 of 1.
    torch.testing.assert_close(y.flatten(), torch.tensor([30 / 7, 13 / 6.5]))
    values, weights, top = state[0].flatten().tolist()
    assert values * math.exp(top) == pytest.approx(5.5)
    assert weights * math.exp(top) == pytest.approx(2.25)
    assert state[1].flatten().tolist() == [1.0, 1.0, 1.0]


@each_form
@pytest.mark.parametrize("scale", [1.0, 90.0])
def test_equals_transformers(attend: Callable[..., torch.Tensor], draw: Draw, scale: float) -> None:
    k, v = draw.normal(1, 93, 6, scale=scale), draw.normal(1, 93, 6)
    time_decay, first = draw.normal(6), draw.normal(6)
    state = torch.full((2, 3, 6), torch.nan)

    found = attend(k, v, -time_decay.exp(), first, state, i32(1, 0), i32(0, 3, 93), i32(3, 90))

    for rows, slot in ((slice(0, 3), 1), (slice(3, 93), 0)):
        expected, last = rwkv_linear_attention_cpu(time_decay, first, k[:, rows], v[:, rows], return_state=True)
        torch.testing.assert_close(found[:, rows], expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(state[slot], torch.cat(last), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("attend", [wkv, doubled.wkv], ids=["reference", "implementation"])
def test_a_first_token_sees_itself_however_little_it_weighs(attend: Callable[..., torch.Tensor], draw: Draw) -> None:
    v = draw.normal(1, 4, 3)

    found = attend(torch.full_like(v, -300.0), v, -torch.ones(3), torch.zeros(3), i32(0, 1, 4))

    torch.testing.assert_close(found[:, [0, 1]], v[:, [0, 1]])
