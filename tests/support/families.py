"""Tiny random models of the supported families, for tests that compare with transformers.

Each variant is small enough to trace and run in a second, and odd enough (unequal sizes, grouped queries, windows
shorter than the prompts) that a mix-up of dimensions can't go unnoticed.
"""

from __future__ import annotations

from typing import Any

from families_experts import EXPERTS
from families_states import STATES

_BASE: dict[str, Any] = {
    "vocab_size": 131, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip

_ROPES: dict[str, dict[str, Any]] = {
    "proportional": {"rope_type": "proportional", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
    "yarn": {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64,
        "attention_factor": 1.1,
    },
    "llama3": {
        "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}  # fmt: skip

_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4, "q_lora_rank": 20, "kv_lora_rank": 24, "qk_nope_head_dim": 10, "qk_rope_head_dim": 6,
    "v_head_dim": 14,
}  # fmt: skip

_GEMMA3N: dict[str, Any] = {
    "head_dim": 16, "sliding_window": 8, "num_hidden_layers": 4, "vocab_size_per_layer_input": 131,
    "hidden_size_per_layer_input": 10, "laurel_rank": 6, "altup_num_inputs": 3,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
}  # fmt: skip

DENSE: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"head_dim": 12}),
    "llama-tied-bias": ("llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    **{f"llama-rope-{kind}": ("llama", {"rope_parameters": rope}) for kind, rope in _ROPES.items()},
    "llama-rope-dynamic-long": ("llama", {"rope_parameters": _ROPES["dynamic"], "max_position_embeddings": 24}),
    "mistral": ("mistral", {"sliding_window": None, "head_dim": 16}),
    "mistral-window": ("mistral", {"sliding_window": 9}),
    "qwen2": ("qwen2", {}),
    "qwen2-window-tied": (
        "qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1, "tie_word_embeddings": True},
    ),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "qwen3-longrope": (
        "qwen3",
        {
            "head_dim": 12, "num_hidden_layers": 2, "rope_parameters": {
                "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 16, "factor": 2.0,
                "short_factor": [1.0 + 0.1 * i for i in range(6)], "long_factor": [1.5 + 0.7 * i for i in range(6)],
            },
        },
    ),
    "qwen3-bias-tied": ("qwen3", {"head_dim": 20, "attention_bias": True, "tie_word_embeddings": True}),
    "gemma": ("gemma", {"head_dim": 16}),
    "gemma-mqa": ("gemma", {"head_dim": 16, "num_key_value_heads": 1, "hidden_activation": "gelu_pytorch_tanh"}),
    "gemma2": ("gemma2", {"head_dim": 16, "sliding_window": 10, "query_pre_attn_scalar": 24}),
    "gemma2-no-cap": (
        "gemma2",
        {"head_dim": 12, "sliding_window": 7, "attn_logit_softcapping": None, "final_logit_softcapping": None},
    ),
    "gemma3": ("gemma3_text", {"head_dim": 16, "sliding_window": 8, "num_hidden_layers": 7}),
    "gemma3-no-window": (
        "gemma3_text", {"head_dim": 16, "layer_types": ["full_attention"] * 3, "attention_bias": True},
    ),
    "phi3": ("phi3", {}),
    "phi3-partial-window": ("phi3", {"partial_rotary_factor": 0.5, "sliding_window": 11}),
    "phi3-longrope": (
        "phi3",
        {
            "original_max_position_embeddings": 16,
            "rope_parameters": {
                "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 16,
                "short_factor": [1.0 + 0.1 * i for i in range(6)], "long_factor": [1.5 + 0.7 * i for i in range(6)],
            },
        },
    ),
    "olmo2": ("olmo2", {}),
    "olmo2-bias-tied": ("olmo2", {"attention_bias": True, "tie_word_embeddings": True}),
    "smollm3": ("smollm3", {"num_hidden_layers": 4, "no_rope_layers": [1, 1, 0, 1]}),
    "smollm3-window": (
        "smollm3",
        {"use_sliding_window": True, "sliding_window": 9, "no_rope_layers": [1, 0, 1], "max_window_layers": 1},
    ),
    "cohere2": ("cohere2", {"sliding_window": 9, "num_hidden_layers": 5, "head_dim": 16}),
    "cohere2-untied": ("cohere2", {"sliding_window": 12, "tie_word_embeddings": False, "attention_bias": True}),
    "granite": (
        "granite",
        {
            "embedding_multiplier": 12.0, "residual_multiplier": 0.22, "attention_multiplier": 0.0156,
            "logits_scaling": 8.0,
        },
    ),
    "granite-tied": ("granite", {"tie_word_embeddings": True, "attention_bias": True, "embedding_multiplier": 1.7}),
    "starcoder2": ("starcoder2", {"sliding_window": None}),
    "starcoder2-window": ("starcoder2", {"sliding_window": 10, "use_bias": False, "tie_word_embeddings": True}),
    "gpt2": ("gpt2", {"n_embd": 48, "n_layer": 3, "n_head": 4, "n_positions": 256}),
    "gpt2-inverse-layer": (
        "gpt2",
        {"n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 128, "scale_attn_by_inverse_layer_idx": True,
         "tie_word_embeddings": False},
    ),
    "gpt_neox": ("gpt_neox", {"rotary_pct": 0.25, "head_dim": None}),
    "gpt_neox-sequential": ("gpt_neox", {"use_parallel_residual": False, "attention_bias": False, "rotary_pct": 1.0}),
    "deepseek_v2-dense": ("deepseek_v2", {**_LATENT, "head_dim": 6, "first_k_dense_replace": 3}),
    "deepseek_v2-dense-yarn": (
        "deepseek_v2",
        {**_LATENT, "head_dim": 6, "first_k_dense_replace": 3, "q_lora_rank": None, "rope_parameters": _ROPES["yarn"]},
    ),
    # so few elements a head that chunks of a prompt expand the latents
    "deepseek_v3-dense": (
        "deepseek_v3",
        {**_LATENT, "kv_lora_rank": 16, "qk_nope_head_dim": 4, "v_head_dim": 3, "first_k_dense_replace": 3},
    ),
    "deepseek_v3-dense-halves": (
        "deepseek_v3",
        {
            **_LATENT, "first_k_dense_replace": 3, "rope_interleave": False, "q_lora_rank": None,
            "attention_bias": True, "rope_parameters": {**_ROPES["yarn"], "mscale": 1.0, "mscale_all_dim": 0.8},
        },
    ),
    "minicpm3": ("minicpm3", _LATENT),
    "youtu": ("youtu", _LATENT),
    "gemma3n": (
        "gemma3n_text",
        {**_GEMMA3N, "num_kv_shared_layers": 2, "activation_sparsity_pattern": [0.95, 0.0, 0.5, 0.0]},
    ),
    "gemma3n-own-caches-untied": (
        "gemma3n_text",
        {
            **_GEMMA3N, "num_kv_shared_layers": 0, "activation_sparsity_pattern": [0.0, 0.9, 0.0, 0.0],
            "altup_active_idx": 1, "altup_correct_scale": False, "altup_coef_clip": 0.4, "altup_num_inputs": 2,
            "attention_bias": True, "num_key_value_heads": 1, "tie_word_embeddings": False,
            "final_logit_softcapping": 5.0,
            "rope_parameters": {
                "full_attention": _ROPES["yarn"],
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
    ),
    "gemma4": (
        "gemma4_text",
        {
            "head_dim": 12, "global_head_dim": 20, "hidden_size_per_layer_input": 10, "sliding_window": 8,
            "vocab_size_per_layer_input": 131, "num_hidden_layers": 4, "num_kv_shared_layers": 2,
            "use_double_wide_mlp": True, "final_logit_softcapping": 20.0,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        },
    ),
    "gemma4-three-share": (
        "gemma4_text",
        {
            "head_dim": 12, "global_head_dim": 20, "hidden_size_per_layer_input": 6, "sliding_window": 5,
            "vocab_size_per_layer_input": 131,
            "num_hidden_layers": 5, "num_kv_shared_layers": 3, "num_key_value_heads": 1,
            "layer_types": ["sliding_attention", "full_attention", *["sliding_attention"] * 2, "full_attention"],
        },
    ),
    "gemma4-values-are-keys": (
        "gemma4_text",
        {
            "head_dim": 16, "global_head_dim": 32, "num_global_key_value_heads": 1, "attention_k_eq_v": True,
            "hidden_size_per_layer_input": 0, "sliding_window": 9, "attention_bias": True,
            "tie_word_embeddings": False,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        },
    ),
    "phi": ("phi", {}),
    "phi-norms-tied": (
        "phi",
        {"qk_layernorm": True, "num_key_value_heads": 4, "tie_word_embeddings": True, "hidden_act": "gelu",
         "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0}},
    ),
    "glm": ("glm", {"head_dim": 16}),
    "glm-no-bias-tied": (
        "glm", {"head_dim": 12, "attention_bias": False, "num_key_value_heads": 1, "tie_word_embeddings": True},
    ),
    "glm4": ("glm4", {"head_dim": 16}),
    "glm4-no-bias-tied": (
        "glm4",
        {"head_dim": 12, "attention_bias": False, "num_key_value_heads": 4, "tie_word_embeddings": True,
         "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0}},
    ),
    "olmo": ("olmo", {}),
    "olmo-clip-bias-tied": ("olmo", {"clip_qkv": 0.5, "attention_bias": True, "tie_word_embeddings": True}),
    "olmo3": ("olmo3", {"sliding_window": 8}),
    "olmo3-yarn-bias-tied": (
        "olmo3",
        {"sliding_window": 5, "attention_bias": True, "tie_word_embeddings": True, "num_key_value_heads": 1,
         "layer_types": ["full_attention", "sliding_attention", "full_attention"],
         "rope_parameters": {"full_attention": _ROPES["yarn"],
                             "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}}},
    ),
    "cohere": ("cohere", {"logit_scale": 0.3}),
    "cohere-norms-bias-untied": (
        "cohere", {"use_qk_norm": True, "attention_bias": True, "tie_word_embeddings": False, "logit_scale": 1.0},
    ),
}  # fmt: skip

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {**DENSE, **EXPERTS, **STATES}
"""By name: the model type, and what differs from the base."""

REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3-sees-later-tokens": ("gemma3_text", {"use_bidirectional_attention": True, "sliding_window": 8}),
    "gemma4-sees-later-tokens": ("gemma4_text", {"use_bidirectional_attention": "all", "sliding_window": 8}),
    "gemma3-dynamic-rope": (
        "gemma3_text",
        {"layer_types": ["sliding_attention", "full_attention", "full_attention"], "sliding_window": 8,
         "rope_parameters": {"full_attention": _ROPES["dynamic"],
                             "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}}},
    ),
}  # fmt: skip
"""Variants that can't be built."""

LENGTH_CHANGES_RESULTS = frozenset(
    name for name in VARIANTS if any(rope in name for rope in ("dynamic", "longrope", "phimoe-yarn"))
)
"""Models whose rotations depend on how long a sequence is: one pass over prompt and answer doesn't say what each step
of the answer gave."""

CACHE_CHANGES_RESULTS = frozenset({"qwen3-longrope"})
"""Of those, what transformers generates without a cache and not with one, which keeps keys of short frequencies beside
long ones (but for the Phi models)."""


def _first_of_each_type(table: dict[str, tuple[str, dict[str, Any]]]) -> list[str]:
    firsts = {model_type: name for name, (model_type, _) in reversed(table.items())}
    return [name for name in table if name in firsts.values()]


PASS_BY_PASS = (
    *DENSE,
    *(name for table in (EXPERTS, STATES) for name in _first_of_each_type(table)),
    "nemotron_h-experts",
)
"""Variants to compare after each pass: what the passes meet differs by type; the rest shows in the whole line."""

# types whose configs don't name their sizes as the others do
_BASES: dict[str, dict[str, Any]] = {
    "gpt2": {"vocab_size": 131, "bos_token_id": 1, "eos_token_id": 2},
    **{
        name: {key: _BASE[key] for key in _BASE if key not in ("intermediate_size", "num_attention_heads")}
        for name in ("mamba", "mamba2")
    },
}  # fmt: skip


def make_config(variant: str) -> Any:
    """The transformers config of a variant."""
    from transformers import AutoConfig

    model_type, changes = (VARIANTS | REFUSED)[variant]
    entries = {**_BASES.get(model_type, _BASE), **changes}
    return AutoConfig.for_model(
        model_type, **{key: value for key, value in entries.items() if key != "head_dim" or value}
    )


def make_model(variant: str, seed: int = 0) -> Any:
    """A float32 model of the variant with random weights, none of them zero or one where that would hide a mistake."""
    from precast.builder.source.shrink import random_model

    return random_model(make_config(variant), seed)
