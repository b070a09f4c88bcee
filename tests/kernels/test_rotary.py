"""rope_frequencies, rotary_tables and rotary: by hand, and against transformers."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import LlamaConfig, Phi3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.cohere2 import modeling_cohere2
from transformers.models.gpt_neox import modeling_gpt_neox
from transformers.models.llama import modeling_llama
from transformers.models.phi3 import modeling_phi3

from precast.kernels.rotary.rope_frequencies import rope_frequencies
from precast.kernels.rotary.rotary import rotary
from precast.kernels.rotary.rotary_tables import rotary_tables

CPU = torch.device("cpu")
POSITIONS = torch.tensor([[0, 1, 2, 5, 0, 1000]])


def llama(rope: dict[str, object], **more: object) -> LlamaConfig:
    return LlamaConfig(hidden_size=64, num_attention_heads=4, rope_parameters={"rope_theta": 1e4, **rope}, **more)


def test_quarter_turn_of_halves_and_of_pairs() -> None:
    x = torch.tensor([1.0, 2.0, 3.0, 4.0, 9.0]).view(1, 1, 1, 5)
    zero, one = torch.zeros(1, 1, 2), torch.ones(1, 1, 2)

    assert rotary(x, zero, one, interleaved=False).flatten().tolist() == [-3.0, -4.0, 1.0, 2.0, 9.0]
    assert rotary(x, zero, one, interleaved=True).flatten().tolist() == [-2.0, 1.0, -4.0, 3.0, 9.0]


def test_halves_are_llamas() -> None:
    q, k = torch.randn(1, 6, 4, 16), torch.randn(1, 6, 2, 16)
    hf_cos, hf_sin = modeling_llama.LlamaRotaryEmbedding(llama({"rope_type": "default"}))(q, POSITIONS)
    inv_freq = 1.0 / 1e4 ** (torch.arange(0, 16, 2) / 16)
    cos, sin = rotary_tables(POSITIONS, inv_freq, scale=1.0, dtype=torch.float32)
    expected = modeling_llama.apply_rotary_pos_emb(q, k, hf_cos, hf_sin, unsqueeze_dim=2)

    torch.testing.assert_close(torch.cat((cos, cos), -1), hf_cos, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(torch.cat((sin, sin), -1), hf_sin, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(rotary(q, cos, sin, interleaved=False), expected[0], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(rotary(k, cos, sin, interleaved=False), expected[1], rtol=1e-6, atol=1e-6)


def test_interleaved_pairs_are_coheres() -> None:
    q = torch.randn(1, 6, 4, 16)
    cos, sin = rotary_tables(POSITIONS, torch.rand(8), scale=1.0, dtype=torch.float32)
    repeated = (cos.repeat_interleave(2, -1), sin.repeat_interleave(2, -1))
    expected, _ = modeling_cohere2.apply_rotary_pos_emb(q, q, *repeated, unsqueeze_dim=2)

    torch.testing.assert_close(rotary(q, cos, sin, interleaved=True), expected, rtol=1e-6, atol=1e-6)


def test_rest_of_the_head_passes_through_as_in_gpt_neox() -> None:
    q = torch.randn(1, 6, 4, 16)
    cos, sin = rotary_tables(POSITIONS, torch.rand(2), scale=1.0, dtype=torch.float32)
    doubled = (torch.cat((cos, cos), -1), torch.cat((sin, sin), -1))
    expected, _ = modeling_gpt_neox.apply_rotary_pos_emb(q, q, *doubled, unsqueeze_dim=2)
    found = rotary(q, cos, sin, interleaved=False)

    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(found[..., 4:], q[..., 4:])


def test_half_precision_is_rounded_once() -> None:
    q = torch.randn(1, 6, 4, 16).bfloat16()
    cos, sin = rotary_tables(POSITIONS, torch.rand(8), scale=1.0, dtype=torch.bfloat16)
    exact = rotary(q.double(), cos.double(), sin.double(), interleaved=False)

    # twice would be wrong in about a quarter of the numbers; a middle of two may fall to either
    assert int((rotary(q, cos, sin, interleaved=False) != exact.bfloat16()).sum()) <= 2


def test_tables_are_made_in_float32_and_scaled_before_rounding() -> None:
    cos, sin = rotary_tables(torch.tensor([[4097]]), torch.tensor([0.1]), scale=1.5, dtype=torch.bfloat16)
    angle = torch.tensor(4097.0) * torch.tensor(0.1)

    assert cos.flatten().tolist() == [(angle.cos() * 1.5).bfloat16().item()]
    assert sin.flatten().tolist() == [(angle.sin() * 1.5).bfloat16().item()]
    assert not math.isclose(cos.item(), (torch.tensor(4097.0).bfloat16() * 0.1).cos().item() * 1.5, rel_tol=0.1)


def test_tables_from_frequencies_of_each_token() -> None:
    each = torch.rand(1, 6, 3)
    cos, sin = rotary_tables(POSITIONS, each, scale=2.0, dtype=torch.float32)

    for t in range(6):
        one_cos, one_sin = rotary_tables(POSITIONS[:, t : t + 1], each[0, t], scale=2.0, dtype=torch.float32)
        torch.testing.assert_close(cos[:, t : t + 1], one_cos, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(sin[:, t : t + 1], one_sin, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("factor", [1.0, 2.5, 8.0])
def test_dynamic_is_transformers(factor: float) -> None:
    config = llama({"rope_type": "dynamic", "factor": factor}, max_position_embeddings=64)
    initialise = ROPE_INIT_FUNCTIONS["dynamic"]
    short, _ = initialise(config, CPU)
    lengths = [1, 63, 64, 65, 100, 1000, 131072]
    found = rope_frequencies(
        torch.tensor([lengths]), short, None, kind="dynamic", original_length=64, factor=factor, base=1e4
    )

    for t, length in enumerate(lengths):
        expected, _ = initialise(config, CPU, seq_len=torch.tensor(length))
        torch.testing.assert_close(found[0, t], expected, rtol=2e-6, atol=0)
    assert torch.equal(found[0, :3], short.expand(3, -1))


def test_dynamic_model_grows_and_falls_back_as_transformers() -> None:
    config = llama({"rope_type": "dynamic", "factor": 4.0}, max_position_embeddings=64)
    for length in (40, 80, 200, 30):
        module = modeling_llama.LlamaRotaryEmbedding(config)
        positions = torch.arange(length)[None]
        expected, _ = module(torch.zeros(1, 1), positions)
        inv_freq = rope_frequencies(
            torch.full((1, length), length),
            module.original_inv_freq,
            None,
            kind="dynamic",
            original_length=64,
            factor=4.0,
            base=1e4,
        )
        cos, _ = rotary_tables(positions, inv_freq, scale=1.0, dtype=torch.float32)

        torch.testing.assert_close(torch.cat((cos, cos), -1), expected, rtol=1e-5, atol=1e-4)


def test_longrope_is_transformers() -> None:
    factors = {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.5, 2.0, 4.0, 8.0]}
    config = Phi3Config(
        hidden_size=32,
        num_attention_heads=4,
        max_position_embeddings=256,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "original_max_position_embeddings": 64,
            **factors,
        },
        original_max_position_embeddings=64,
        pad_token_id=0,
    )
    short, scale = ROPE_INIT_FUNCTIONS["longrope"](config, CPU)
    long, _ = ROPE_INIT_FUNCTIONS["longrope"](config, CPU, seq_len=65)
    for length in (64, 65):
        positions = torch.arange(length)[None]
        expected, _ = modeling_phi3.Phi3RotaryEmbedding(config)(torch.zeros(1, 1), positions)
        inv_freq = rope_frequencies(
            torch.full((1, length), length), short, long, kind="longrope", original_length=64, factor=4.0, base=1e4
        )
        cos, _ = rotary_tables(positions, inv_freq, scale=scale, dtype=torch.float32)

        torch.testing.assert_close(torch.cat((cos, cos), -1), expected, rtol=1e-6, atol=1e-6)


def test_tokens_of_short_and_long_sequences_share_a_step() -> None:
    short, long = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])
    found = rope_frequencies(
        torch.tensor([[64, 65, 1]]), short, long, kind="longrope", original_length=64, factor=1.0, base=1e4
    )

    assert found.tolist() == [[[1.0, 2.0], [3.0, 4.0], [1.0, 2.0]]]


@pytest.mark.parametrize(
    ("kind", "long", "pairs", "message"),
    [
        ("yarn", None, 4, "kind: expected longrope or dynamic, found 'yarn'"),
        ("longrope", None, 4, "longrope takes two sets"),
        ("dynamic", None, 1, "dynamic takes two frequencies or more, found 1"),
    ],
)
def test_wrong_frequencies_are_refused(kind: str, long: None, pairs: int, message: str) -> None:
    lengths = torch.tensor([[100]])
    with pytest.raises(ValueError, match=message):
        rope_frequencies(lengths, torch.ones(pairs), long, kind=kind, original_length=64, factor=2.0, base=1e4)
