"""The delta rule by hand, and against transformers' own functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from op_samples.draw import Draw
from transformers.models.kimi_linear.modeling_kimi_linear import (
    chunk_kimi_delta_attention,
    recurrent_kimi_delta_attention,
)
from transformers.models.qwen3_next.modeling_qwen3_next import (
    torch_chunk_gated_delta_rule,
    torch_recurrent_gated_delta_rule,
)

from precast.kernels.delta_rule import chunked
from precast.kernels.delta_rule.delta_rule import delta_rule, stateful_delta_rule

each_form = pytest.mark.parametrize(
    "rule", [stateful_delta_rule, chunked.stateful_delta_rule], ids=["reference", "implementation"]
)
SIZE = 8


@pytest.fixture
def draw() -> Draw:
    """Draws on the CPU: that other devices agree, `test_specs.py` tests."""
    return Draw(torch.float32, torch.device("cpu"))


def i32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def arguments(draw: Draw, tokens: int, keys: int, heads: int, *, rowwise: bool) -> dict[str, Any]:
    return {
        "q": draw.normal(1, tokens, keys, SIZE),
        "k": draw.normal(1, tokens, keys, SIZE),
        "v": draw.normal(1, tokens, heads, 5),
        "decay": -draw.uniform(*(1, tokens, heads, SIZE)[: 3 + rowwise], high=2.0),
        "beta": draw.uniform(1, tokens, heads),
    }


@each_form
def test_by_hand(rule: Callable[..., torch.Tensor]) -> None:
    # Size 1; the state of 8 halves, then moves by beta from what it holds to v.
    ones = torch.ones(1, 2, 1, 1)
    v, beta = torch.tensor([6.0, 1.5]).view(1, 2, 1, 1), torch.tensor([0.5, 1.0]).view(1, 2, 1)
    decay = torch.tensor([0.5, 1.0]).log().view(1, 2, 1)
    state = torch.tensor([7.0, 8.0]).view(2, 1, 1, 1)

    y = rule(ones, ones, v, decay, beta, state, i32(1), i32(0, 2), i32(5), scale=10.0, normalise=False)

    # 4 + (6 - 4) / 2, then v itself.
    torch.testing.assert_close(y.flatten(), torch.tensor([50.0, 15.0]))
    torch.testing.assert_close(state.flatten(), torch.tensor([7.0, 1.5]))


@each_form
@pytest.mark.parametrize("continued", [True, False])
@pytest.mark.parametrize(("keys", "rowwise"), [(2, False), (4, True)], ids=["gated", "kimi"])
@pytest.mark.parametrize("normalise", [True, False])
def test_equals_transformers(
    rule: Callable[..., torch.Tensor], draw: Draw, continued: bool, keys: int, rowwise: bool, normalise: bool
) -> None:
    given = arguments(draw, 93, keys, 4, rowwise=rowwise)
    if not normalise:
        given["k"] *= 0.2
    state = draw.normal(2, 4, SIZE, 5)
    before = state.clone() if continued else torch.zeros_like(state)
    metadata = {"slots": i32(1, 0), "cu_seqlens": i32(0, 3, 93), "kv_lens": i32(3 + continued, 90 + continued)}

    found = rule(**given, state=state, **metadata, scale=SIZE**-0.5, normalise=normalise)

    theirs = chunk_kimi_delta_attention if rowwise else torch_chunk_gated_delta_rule
    for rows, slot in ((slice(0, 3), 1), (slice(3, 93), 0)):
        q, k, v, decay, beta = (x[:, rows] for x in given.values())
        expected, last = theirs(
            q, k, v, g=decay, beta=beta, initial_state=before[slot, None], output_final_state=True,
            use_qk_l2norm_in_kernel=normalise,
        )  # fmt: skip
        torch.testing.assert_close(found[:, rows], expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(state[slot], last[0], rtol=1e-5, atol=1e-5)


@each_form
@pytest.mark.parametrize(("keys", "rowwise"), [(2, False), (4, True)], ids=["gated", "kimi"])
def test_a_step_equals_transformers(rule: Callable[..., torch.Tensor], draw: Draw, keys: int, rowwise: bool) -> None:
    given = arguments(draw, 3, keys, 4, rowwise=rowwise)
    state = draw.normal(4, 4, SIZE, 5)
    before = state[[3, 0, 2]].clone()
    metadata = {"slots": i32(3, 0, 2), "cu_seqlens": i32(0, 1, 2, 3), "kv_lens": i32(5, 9, 30)}

    found = rule(**given, state=state, **metadata, scale=SIZE**-0.5, normalise=True)
    q, k, v, decay, beta = (x.transpose(0, 1) for x in given.values())
    theirs = recurrent_kimi_delta_attention if rowwise else torch_recurrent_gated_delta_rule
    expected, last = theirs(
        q, k, v, g=decay, beta=beta, initial_state=before, output_final_state=True, use_qk_l2norm_in_kernel=True
    )

    torch.testing.assert_close(found[0], expected[:, 0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(state[[3, 0, 2]], last, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rowwise", [True, False])
def test_without_decay_is_a_decay_of_zero(draw: Draw, rowwise: bool) -> None:
    given = arguments(draw, 80, 4, 4, rowwise=rowwise)
    more = {"cu_seqlens": i32(0, 80), "scale": 1.0, "normalise": True}

    expected = delta_rule(**given | {"decay": torch.zeros_like(given["decay"])}, **more)

    for rule in (delta_rule, chunked.delta_rule):
        torch.testing.assert_close(rule(**given | {"decay": None}, **more), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rowwise", [True, False])
@pytest.mark.parametrize("steep", [-1e4, -float("inf")])
def test_steep_decays_neither_overflow_nor_blur_the_others(draw: Draw, rowwise: bool, steep: float) -> None:
    given = arguments(draw, 150, 4, 4, rowwise=rowwise)
    given["decay"] *= 0.01
    given["decay"][:, 3::20] = steep
    more = {"cu_seqlens": i32(0, 150), "scale": 1.0, "normalise": True}

    found = chunked.delta_rule(**given, **more)

    torch.testing.assert_close(found, delta_rule(**given, **more), rtol=1e-5, atol=1e-5)
