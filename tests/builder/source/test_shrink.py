"""Shrunk configs: small, of the same structure, and accepted by transformers; what they are made of stays as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig

from precast.builder.source.shrink import VOCABULARY, random_model, shrink
from precast.builder.source.shrink_layers import cut_layers
from precast.ir.errors import BuildError


def small(model_type: str, **entries: Any) -> Any:
    return shrink(AutoConfig.for_model(model_type, **entries))


def test_dense_model_is_small_and_keeps_its_flags() -> None:
    found = small(
        "llama", hidden_size=4096, num_attention_heads=32, num_key_value_heads=8, attention_bias=True,
        tie_word_embeddings=True, rms_norm_eps=3e-5,
    )  # fmt: skip

    assert (found.num_hidden_layers, found.hidden_size, found.vocab_size) == (3, 64, VOCABULARY)
    assert (found.num_attention_heads, found.num_key_value_heads, found.head_dim) == (4, 2, 16)
    assert found.attention_bias
    assert found.tie_word_embeddings
    assert found.rms_norm_eps == 3e-5


@pytest.mark.parametrize(("kv_heads", "expected"), [(32, 4), (8, 2), (1, 1)])
def test_ratio_of_heads_stays(kv_heads: int, expected: int) -> None:
    assert small("llama", num_attention_heads=32, num_key_value_heads=kv_heads).num_key_value_heads == expected


def test_layers_and_heads_grow_no_more_and_prompts_always_fit() -> None:
    found = small(
        "llama", num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, vocab_size=40,
        max_position_embeddings=16,
    )  # fmt: skip

    assert (found.num_hidden_layers, found.num_attention_heads) == (2, 2)
    assert (found.vocab_size, found.max_position_embeddings) == (VOCABULARY, 64)


def test_window_and_no_window() -> None:
    assert small("mistral", sliding_window=4096).sliding_window == 9
    assert small("mistral", sliding_window=None).sliding_window is None


def test_each_kind_of_layer_stays_twice_in_order() -> None:
    found = small("gemma3_text", num_hidden_layers=12)

    assert found.layer_types == ["sliding_attention", "sliding_attention", "full_attention", "full_attention"]


def test_experts_groups_and_dense_layers() -> None:
    found = small("deepseek_v3")

    assert (found.num_hidden_layers, found.first_k_dense_replace) == (4, 2)
    assert (found.n_routed_experts, found.n_group, found.topk_group, found.num_experts_per_tok) == (8, 4, 2, 3)
    assert found.qk_head_dim == found.qk_nope_head_dim + found.qk_rope_head_dim
    assert found.v_head_dim == found.qk_nope_head_dim  # as 128 and 128 are


def test_states_make_up_the_expanded_hidden_size() -> None:
    found = small("mamba2")

    assert found.num_heads * found.head_dim == found.expand * found.hidden_size


def test_layers_that_share_caches_keep_one_to_share_with() -> None:
    found = small("gemma3n_text")

    own = found.layer_types[: -found.num_kv_shared_layers]
    assert set(found.layer_types[-found.num_kv_shared_layers :]) <= set(own)
    assert set(found.activation_sparsity_pattern) == {0.95, 0.0}


def test_exceptions_of_layers_move_with_them() -> None:
    found = small("gemma4_text")

    full = [layer for layer, kind in enumerate(found.layer_types) if kind == "full_attention"]
    sizes = {layer: found.per_layer_config[layer].head_dim for layer in range(found.num_hidden_layers)}
    assert full
    assert {sizes[layer] for layer in full} == {2 * found.per_layer_config[0].head_dim}


def test_parts_for_other_input_are_small_and_fit_the_text() -> None:
    found = small("gemma3")

    assert found.text_config.hidden_size == 64
    assert found.vision_config.num_hidden_layers <= 3
    assert sum(p.numel() for p in random_model(found).parameters()) < 2_000_000


def test_long_rope_has_a_factor_for_each_frequency() -> None:
    rope = {
        "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 4096,
        "short_factor": [1.0] * 48, "long_factor": [float(i + 1) for i in range(48)],
    }  # fmt: skip
    found = small(
        "phi3", hidden_size=3072, num_attention_heads=32, max_position_embeddings=131072, rope_parameters=rope,
        original_max_position_embeddings=4096,
    )  # fmt: skip

    half = found.hidden_size // found.num_attention_heads // 2
    assert len(found.rope_parameters["short_factor"]) == half
    assert found.rope_parameters["long_factor"] == sorted(found.rope_parameters["long_factor"])
    assert found.max_position_embeddings > found.original_max_position_embeddings


def test_special_tokens_are_in_the_vocabulary_and_none_is_in_the_prompts() -> None:
    found = small("qwen2", bos_token_id=151643, eos_token_id=[151645, 151643], pad_token_id=151643)

    assert (found.pad_token_id, found.bos_token_id, found.eos_token_id) == (0, 1, [2])


def test_equal_configs_give_equal_results_and_the_callers_stays() -> None:
    config = AutoConfig.for_model("qwen3_next")
    before = config.to_dict()

    assert shrink(config).to_dict() == shrink(config).to_dict()
    assert config.to_dict() == before


def test_quantisation_and_code_of_the_repository_are_left_out() -> None:
    config = AutoConfig.for_model("llama", quantization_config={"quant_method": "fp8"}, auto_map={"AutoConfig": "x"})

    found = shrink(config).to_dict()

    assert "quantization_config" not in found
    assert "auto_map" not in found


def test_random_model_is_the_same_each_time_and_leaves_the_generator_alone() -> None:
    config = small("llama")
    state = torch.get_rng_state()

    first, second = random_model(config), random_model(config)

    assert torch.equal(torch.get_rng_state(), state)
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)
        assert not bool(((a == 0) | (a == 1)).all())


def test_buffers_of_the_checkpoint_are_random_and_computed_ones_are_not() -> None:
    config = small("deepseek_v3")
    model, other = random_model(config), random_model(config, seed=1)

    corrections = [buffer for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias")]
    assert corrections
    for correction in corrections:
        assert correction.unique().numel() == config.n_routed_experts
    torch.testing.assert_close(model.model.rotary_emb.inv_freq, other.model.rotary_emb.inv_freq, rtol=0, atol=0)


def test_config_that_no_sizes_help_is_refused_with_the_reason() -> None:
    config = AutoConfig.for_model("llama", hidden_act="no_such_activation")

    with pytest.raises(BuildError, match=r"no small llama model could be made.*no_such_activation") as error:
        shrink(config)

    assert error.value.code == "config-invalid"


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        ({"num_hidden_layers": 9}, {"num_hidden_layers": 3}),
        ({"num_hidden_layers": 2}, {"num_hidden_layers": 2}),
        (
            {"num_hidden_layers": 6, "layer_types": ["a", "a", "b", "a", "a", "b"]},
            {"num_hidden_layers": 4, "layer_types": ["a", "a", "b", "b"]},
        ),
        (
            {"num_hidden_layers": 4, "layer_types": ["a", "b", "c", "d"]},
            {"num_hidden_layers": 4, "layer_types": ["a", "b", "c", "d"]},
        ),
        (
            {"num_hidden_layers": 8, "first_k_dense_replace": 1},
            {"num_hidden_layers": 3, "first_k_dense_replace": 1},
        ),
        ({"n_layer": 8, "max_window_layers": 8}, {"n_layer": 3, "max_window_layers": 3}),
        ({"num_hidden_layers": 8, "num_kv_shared_layers": 5}, {"num_hidden_layers": 4, "num_kv_shared_layers": 2}),
        (
            {"num_hidden_layers": 8, "moe_layers": [1, 3, 5, 7]},
            {"num_hidden_layers": 4, "moe_layers": [1, 3]},
        ),
        (
            {"num_hidden_layers": 32, "attn_layer_period": 8, "attn_layer_offset": 4},
            {"num_hidden_layers": 4, "attn_layer_period": 4, "attn_layer_offset": 2},
        ),
        (
            {"num_hidden_layers": 26, "block_types": ["r", "r", "a", "a"]},
            {"num_hidden_layers": 4, "block_types": ["r", "r", "a", "a"]},
        ),
        (
            {"num_layers": 24, "attention_types": [[["g", "l"], 12]], "attention_layers": ["g", "l"] * 12},
            {"num_layers": 4, "attention_types": [[["g", "l", "g", "l"], 1]], "attention_layers": ["g", "l"] * 2},
        ),
        ({"num_hidden_layers": 4, "moe_layer_end_index": -1}, {"num_hidden_layers": 3, "moe_layer_end_index": 2}),
    ],
)  # fmt: skip
def test_layers(entries: dict[str, Any], expected: dict[str, Any]) -> None:
    cut_layers(entries)

    assert entries == expected
