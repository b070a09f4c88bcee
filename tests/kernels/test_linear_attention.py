"""Linear attention by hand, and against MiniMax's lightning attention."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from op_samples.draw import Draw
from transformers import MiniMaxConfig
from transformers.models.minimax.modeling_minimax import MiniMaxLightningAttention

from precast.kernels.linear_attention import chunked
from precast.kernels.linear_attention.linear_attention import linear_attention, stateful_linear_attention

each_form = pytest.mark.parametrize(
    "attend", [stateful_linear_attention, chunked.stateful_linear_attention], ids=["reference", "implementation"]
)
HEADS, SIZE = 3, 8


@pytest.fixture
def draw() -> Draw:
    """Draws on the CPU: that other devices agree, `test_specs.py` tests."""
    return Draw(torch.float32, torch.device("cpu"))


def i32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@each_form
@pytest.mark.parametrize("shape", [(1,), (1, 2, 1), (1, 2, 1, 1)], ids=str)
def test_by_hand(attend: Callable[..., torch.Tensor], shape: tuple[int, ...]) -> None:
    # Size 1: the state of 8 halves before each token adds k * v.
    ones, v = torch.ones(1, 2, 1, 1), torch.tensor([1.0, 2.0]).view(1, 2, 1, 1)
    state = torch.tensor([8.0, 6.0]).view(2, 1, 1, 1)

    y = attend(ones, 2 * ones, v, torch.full(shape, 0.5).log(), state, i32(0), i32(0, 2), i32(5), scale=10.0)

    torch.testing.assert_close(y.flatten(), torch.tensor([60.0, 70.0]))
    torch.testing.assert_close(state.flatten(), torch.tensor([7.0, 6.0]))


@each_form
def test_without_decay_everything_is_kept(attend: Callable[..., torch.Tensor], draw: Draw) -> None:
    q, k, v = draw.normal(1, 90, HEADS, SIZE), draw.normal(1, 90, HEADS, SIZE), draw.normal(1, 90, HEADS, 5)
    state = draw.normal(1, HEADS, SIZE, 5)
    before = state.clone()

    found = attend(q, k, v, None, state, i32(0), i32(0, 90), i32(91), scale=0.3)

    states = before + (k[0, ..., :, None] * v[0, ..., None, :]).cumsum(0)
    expected = 0.3 * torch.einsum("thd,thde->the", q[0], states)
    torch.testing.assert_close(found[0], expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(state[0], states[-1], rtol=1e-4, atol=1e-4)


def lightning() -> MiniMaxLightningAttention:
    """MiniMax's layer without the products around its attention: it takes each head's query, key, value as they are."""
    config = MiniMaxConfig(
        hidden_size=HEADS * SIZE, num_attention_heads=HEADS, head_dim=SIZE, num_hidden_layers=4, block_size=16,
        layer_types=["linear_attention"] * 4,
    )  # fmt: skip
    layer = MiniMaxLightningAttention(config, layer_idx=1)
    layer.qkv_proj = layer.act_fn = layer.norm = layer.out_proj = torch.nn.Identity()
    # The gate is a sigmoid, which is 1 here.
    layer.output_gate = torch.nn.Linear(3 * HEADS * SIZE, HEADS * SIZE)
    torch.nn.init.zeros_(layer.output_gate.weight)
    torch.nn.init.constant_(layer.output_gate.bias, 100.0)
    return layer


@each_form
def test_equals_minimax(attend: Callable[..., torch.Tensor], draw: Draw) -> None:
    layer = lightning()
    fused = draw.normal(1, 93, HEADS, 3 * SIZE, scale=0.5)
    q, k, v = fused.split(SIZE, -1)
    state = torch.full((2, HEADS, SIZE, SIZE), torch.nan)
    decay = -layer.slope_rate[:, 0, 0]

    found = attend(q, k, v, decay, state, i32(1, 0), i32(0, 3, 93), i32(3, 90), scale=1.0)

    for rows, slot in ((slice(0, 3), 1), (slice(3, 93), 0)):
        with torch.no_grad():
            expected, last = layer(fused[:, rows].flatten(2), (q, q), None)
        torch.testing.assert_close(found[:, rows].flatten(2), expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(state[slot], last[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rowwise", [True, False])
@pytest.mark.parametrize("steep", [-1e4, -float("inf")])
def test_steep_decays_neither_overflow_nor_blur_the_others(draw: Draw, rowwise: bool, steep: float) -> None:
    q, k, v = draw.normal(1, 150, HEADS, SIZE), draw.normal(1, 150, HEADS, SIZE), draw.normal(1, 150, HEADS, 5)
    decay = -draw.uniform(*(1, 150, HEADS, SIZE)[: 3 + rowwise], high=0.02)
    decay[:, 3::20] = steep

    found = chunked.linear_attention(q, k, v, decay, i32(0, 150), scale=1.0)

    expected = linear_attention(q, k, v, decay, i32(0, 150), scale=1.0)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
