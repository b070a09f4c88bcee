"""The rms norms, with sums and in a row, and layer_norm: by hand, and against the models that they are taken from."""

from __future__ import annotations

import pytest
import torch
from transformers.models.cohere2.modeling_cohere2 import Cohere2LayerNorm
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from precast.kernels.layer_norm.layer_norm import layer_norm
from precast.kernels.rms_norm.norm_residual_norm import norm_residual_norm
from precast.kernels.rms_norm.residual_rms_norm import residual_rms_norm
from precast.kernels.rms_norm.rms_norm import rms_norm

each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)


def with_random_weight(norm: torch.nn.Module, dtype: torch.dtype) -> tuple[torch.nn.Module, torch.Tensor]:
    weight = torch.randn(norm.weight.shape).to(dtype)
    norm.weight.data = weight
    return norm, weight


def test_rms_norm_by_hand() -> None:
    x = torch.tensor([[[3.0, 4.0]]])  # mean of squares 12.5
    found = rms_norm(x, torch.tensor([2.0, -1.0]), eps=0.0, offset=1.0, cast_before_scale=False)

    torch.testing.assert_close(found, torch.tensor([[[3 * 3.0, 0 * 4.0]]]) / 12.5**0.5)


def test_rms_norm_adds_eps_under_the_root() -> None:
    found = rms_norm(torch.zeros(1, 1, 2), None, eps=1e-6, cast_before_scale=False)
    small = rms_norm(torch.full((1, 1, 2), 1e-3), None, eps=3e-6, cast_before_scale=False)

    assert found.tolist() == [[[0.0, 0.0]]]
    torch.testing.assert_close(small, torch.full((1, 1, 2), 0.5))


@each_dtype
def test_rms_norm_is_llamas(dtype: torch.dtype) -> None:
    norm, weight = with_random_weight(LlamaRMSNorm(33, eps=1e-5), dtype)
    x = torch.randn(1, 7, 33).to(dtype)

    assert torch.equal(rms_norm(x, weight, eps=1e-5, cast_before_scale=True), norm(x))


@each_dtype
@pytest.mark.parametrize("model", [GemmaRMSNorm, Gemma3RMSNorm])
def test_rms_norm_with_offset_is_gemmas(model: type[torch.nn.Module], dtype: torch.dtype) -> None:
    norm, weight = with_random_weight(model(33, eps=1e-6), dtype)
    x = torch.randn(1, 7, 33).to(dtype)

    assert torch.equal(rms_norm(x, weight, eps=1e-6, offset=1.0, cast_before_scale=False), norm(x))


def test_order_of_rounding_is_the_arguments() -> None:
    x, weight = torch.randn(1, 9, 64).bfloat16(), torch.randn(64).bfloat16()
    before = rms_norm(x, weight, eps=1e-6, cast_before_scale=True)
    after = rms_norm(x, weight, eps=1e-6, cast_before_scale=False)
    exact = rms_norm(x.double(), weight.double(), eps=1e-6, cast_before_scale=False)

    # a sum near the middle of two bfloat16 numbers may fall to either, as the machine adds it up
    assert int((after != exact.bfloat16()).sum()) <= 2
    assert int((before != exact.bfloat16()).sum()) > 20


@each_dtype
def test_residual_rms_norm_is_sum_then_norm(dtype: torch.dtype) -> None:
    x, residual, weight = torch.randn(1, 5, 16).to(dtype), torch.randn(1, 5, 16).to(dtype), torch.randn(16).to(dtype)
    y, total = residual_rms_norm(x, residual, weight, eps=1e-5, offset=1.0, cast_before_scale=False)

    assert torch.equal(total, x + residual)
    assert torch.equal(y, rms_norm(x + residual, weight, eps=1e-5, offset=1.0, cast_before_scale=False))


def test_norm_residual_norm_by_hand() -> None:
    x, residual = torch.tensor([[3.0, 4.0]]), torch.tensor([[1.0, 1.0]])
    inner_weight, weight = torch.tensor([12.5**0.5, 0.0]), torch.tensor([1.0, 3.0])
    y, total = norm_residual_norm(x, residual, inner_weight, weight, eps=0.0, cast_before_scale=True)

    torch.testing.assert_close(total, torch.tensor([[4.0, 1.0]]))
    torch.testing.assert_close(y, torch.tensor([[4.0, 3.0]]) / 8.5**0.5)


@each_dtype
def test_norm_residual_norm_is_gemmas(dtype: torch.dtype) -> None:
    """After attention, and before the feed-forward layer."""
    after, inner_weight = with_random_weight(Gemma3RMSNorm(33, eps=1e-6), dtype)
    before, weight = with_random_weight(Gemma3RMSNorm(33, eps=1e-6), dtype)
    x, residual = torch.randn(1, 7, 33).to(dtype), torch.randn(1, 7, 33).to(dtype)
    rule = {"eps": 1e-6, "offset": 1.0, "cast_before_scale": False}
    y, total = norm_residual_norm(x, residual, inner_weight, weight, **rule)

    assert torch.equal(total, residual + after(x))
    assert torch.equal(y, before(residual + after(x)))


@pytest.mark.parametrize(("has_weight", "has_bias"), [(True, True), (True, False), (False, False)])
def test_layer_norm_is_torchs(has_weight: bool, has_bias: bool) -> None:
    x = torch.randn(1, 7, 33) * 5 + 3
    weight = torch.randn(33) if has_weight else None
    bias = torch.randn(33) if has_bias else None
    expected = torch.nn.functional.layer_norm(x, (33,), weight, bias, eps=1e-5)

    torch.testing.assert_close(layer_norm(x, weight, bias, eps=1e-5), expected)


@each_dtype
def test_layer_norm_is_coheres(dtype: torch.dtype) -> None:
    norm, weight = with_random_weight(Cohere2LayerNorm(33, eps=1e-5), dtype)
    x = torch.randn(1, 7, 33).to(dtype)

    assert torch.equal(layer_norm(x, weight, None, eps=1e-5), norm(x))
