"""The causal convolution by hand, and against transformers' own functions."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from captured_steps import STEPS, stateful_step
from op_samples.draw import Draw, Sample
from transformers.models.mamba2.modeling_mamba2 import causal_conv1d_fn, causal_conv1d_update

from precast.kernels.causal_conv import gathered
from precast.kernels.causal_conv.causal_conv import STATEFUL_CAUSAL_CONV, causal_conv, stateful_causal_conv

each_form = pytest.mark.parametrize("conv", [causal_conv, gathered.causal_conv], ids=["reference", "implementation"])
each_stateful = pytest.mark.parametrize(
    "conv", [stateful_causal_conv, gathered.stateful_causal_conv], ids=["reference", "implementation"]
)


@pytest.fixture
def draw() -> Draw:
    """Draws on the CPU: that other devices agree, `test_specs.py` tests."""
    return Draw(torch.float32, torch.device("cpu"))


def i32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@each_stateful
def test_by_hand(conv: Callable[..., torch.Tensor]) -> None:
    # Two sequences of one channel: the first continues behind 10, 20, the second begins.
    x = torch.tensor([1.0, 2.0, 3.0, 4.0]).view(1, 4, 1)
    state = torch.tensor([[5.0, 5.0], [torch.nan, torch.nan], [10.0, 20.0]])[:, None]

    y = conv(x, torch.tensor([[100.0, 10.0, 1.0]]), torch.tensor([0.5]), state, i32(2, 1), i32(0, 1, 4), i32(9, 3))

    # 100 * 10 + 10 * 20 + 1; then 2, 10 * 2 + 3, 100 * 2 + 10 * 3 + 4.
    assert y.flatten().tolist() == [1201.5, 2.5, 23.5, 234.5]
    assert state[:, 0].tolist() == [[5.0, 5.0], [3.0, 4.0], [20.0, 1.0]]


@each_stateful
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_states_are_copies_of_tokens(conv: Callable[..., torch.Tensor], draw: Draw, dtype: torch.dtype) -> None:
    x = draw.normal(1, 9, 3, dtype=dtype)
    state = draw.normal(2, 3, 3, dtype=dtype)
    before = state.clone()

    conv(x, draw.normal(3, 4, dtype=dtype), None, state, i32(1, 0), i32(0, 7, 9), i32(7, 12))

    assert torch.equal(state[1], x[0, 4:7].T)
    assert torch.equal(state[0], torch.cat((before[0, :, 2:], x[0, 7:9].T), 1))


@pytest.mark.parametrize("step", STEPS)
def test_steps_with_unused_sequences(
    step: str, draw: Draw, copied: Callable[[Sample], Sample], same: Callable[..., None]
) -> None:
    sample = stateful_step("causal_conv", draw, step, channels=5, taps=4)
    expected = copied(sample)

    same(STATEFUL_CAUSAL_CONV, gathered.stateful_causal_conv(**sample), stateful_causal_conv(**expected))
    same(STATEFUL_CAUSAL_CONV, sample["state"], expected["state"])


@each_stateful
def test_where_no_sequence_has_tokens_nothing_is_written(conv: Callable[..., torch.Tensor], draw: Draw) -> None:
    state = draw.normal(3, 2, 3)
    before = state.clone()

    y = conv(draw.normal(1, 4, 2), draw.normal(2, 4), None, state, i32(2, -1), i32(0, 0, 0), i32(7, 0))

    assert not y.any()
    assert torch.equal(state, before)


@each_form
@pytest.mark.parametrize("activation", ["none", "silu"])
@pytest.mark.parametrize("biased", [True, False])
def test_equals_transformers(conv: Callable[..., torch.Tensor], draw: Draw, activation: str, biased: bool) -> None:
    x, weight = draw.normal(1, 17, 6), draw.normal(6, 4)
    bias = draw.normal(6) if biased else None

    found = conv(x, weight, bias, i32(0, 2, 2, 17), activation=activation)

    named = None if activation == "none" else activation
    for rows in (slice(0, 2), slice(2, 17)):
        expected = causal_conv1d_fn(x[:, rows].transpose(1, 2), weight, bias, named).transpose(1, 2)
        torch.testing.assert_close(found[:, rows], expected, rtol=1e-5, atol=1e-5)


@each_stateful
def test_a_step_equals_transformers(conv: Callable[..., torch.Tensor], draw: Draw) -> None:
    x, weight, bias = draw.normal(1, 3, 6), draw.normal(6, 4), draw.normal(6)
    state = draw.normal(4, 6, 3)
    theirs = state[[3, 0, 2]].clone()

    found = conv(x, weight, bias, state, i32(3, 0, 2), i32(0, 1, 2, 3), i32(5, 9, 30), activation="silu")
    expected = causal_conv1d_update(x[0, :, :, None], theirs, weight, bias, "silu")

    torch.testing.assert_close(found[0], expected[..., 0], rtol=1e-5, atol=1e-5)
    assert torch.equal(state[[3, 0, 2]], theirs)


@each_form
def test_refuses_an_unknown_activation(conv: Callable[..., torch.Tensor], draw: Draw) -> None:
    with pytest.raises(ValueError, match="activation: expected one of none, silu, found 'swish'"):
        conv(draw.normal(1, 2, 3), draw.normal(3, 2), None, i32(0, 2), activation="swish")
