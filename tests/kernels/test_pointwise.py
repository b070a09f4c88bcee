"""embedding, gated_activation and gather_rows."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional
from transformers.models.gemma.modeling_gemma import GemmaTextScaledWordEmbedding

from precast.kernels.embedding.embedding import embedding
from precast.kernels.gated_activation.gated_activation import gated_activation
from precast.kernels.gather_rows.gather_rows import gather_rows

each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)


@each_dtype
def test_embedding_is_gemmas(dtype: torch.dtype) -> None:
    scale = 3072**0.5
    module = GemmaTextScaledWordEmbedding(11, 33, padding_idx=0, embed_scale=scale).to(dtype)
    ids = torch.tensor([[3, 1, 10, 0, 3]])

    assert torch.equal(embedding(ids, module.weight.data, scale=scale), module(ids))


def test_scale_is_rounded_to_the_weights_dtype_first() -> None:
    weight = torch.tensor([[1.0, 3.0]]).bfloat16()
    found = embedding(torch.tensor([[0]]), weight, scale=55.42)  # 55.5 in bfloat16; 3 * 55.42 would give 166

    assert found.flatten().tolist() == [55.5, torch.tensor(166.5).bfloat16().item()]


@pytest.mark.parametrize("token", [-1, 11])
def test_token_outside_of_the_vocabulary_is_an_error(token: int) -> None:
    with pytest.raises(IndexError):
        embedding(torch.tensor([[token]]), torch.randn(11, 4))


@each_dtype
@pytest.mark.parametrize("kind", ["silu", "gelu", "gelu_tanh"])
def test_gate_comes_first(kind: str, dtype: torch.dtype) -> None:
    gate, value = (torch.randn(1, 5, 7) * 3).to(dtype), torch.randn(1, 5, 7).to(dtype)
    activations = {
        "silu": functional.silu,
        "gelu": functional.gelu,
        "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    }
    found = gated_activation(torch.cat((gate, value), -1), kind=kind)

    # Not bit by bit: where 1 + erf cancels, torch's result depends on the layout of its argument.
    torch.testing.assert_close(found, (activations[kind](gate.float()) * value.float()).to(dtype))


def test_activations_by_hand() -> None:
    x = torch.tensor([2.0, 10.0])

    torch.testing.assert_close(gated_activation(x, kind="silu").item(), 10 * 1.7615942, rtol=1e-6, atol=0.0)
    torch.testing.assert_close(gated_activation(x, kind="gelu").item(), 10 * 1.9544997, rtol=1e-6, atol=0.0)
    torch.testing.assert_close(gated_activation(x, kind="gelu_tanh").item(), 10 * 1.9545977, rtol=1e-6, atol=0.0)


def test_unknown_activation_is_refused() -> None:
    with pytest.raises(ValueError, match="kind: expected one of silu, gelu, gelu_tanh, found 'relu'"):
        gated_activation(torch.randn(1, 4), kind="relu")


def test_rows_come_in_their_order_and_may_repeat() -> None:
    x = torch.arange(12.0).view(1, 4, 3)
    found = gather_rows(x, torch.tensor([3, 0, 3]))

    assert found.tolist() == [[[9.0, 10.0, 11.0], [0.0, 1.0, 2.0], [9.0, 10.0, 11.0]]]
