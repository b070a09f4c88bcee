"""Variants of the families whose layers have experts: routers of all kinds, dense layers among them.

See `families.VARIANTS`. Experts are few, and more than one is chosen, so that a wrong choice shows in the logits.
"""

from __future__ import annotations

from typing import Any

_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4, "q_lora_rank": 20, "kv_lora_rank": 24, "qk_nope_head_dim": 10, "qk_rope_head_dim": 6,
    "v_head_dim": 14,
}  # fmt: skip
_YARN: dict[str, Any] = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64, "mscale": 0.8,
    "mscale_all_dim": 0.6,
}  # fmt: skip
_DYNAMIC: dict[str, Any] = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
_QWEN: dict[str, Any] = {"moe_intermediate_size": 20, "num_experts": 6, "num_experts_per_tok": 2}
_ROUTED: dict[str, Any] = {
    "moe_intermediate_size": 20, "n_routed_experts": 8, "num_experts_per_tok": 3, "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}  # fmt: skip
_LLAMA4: dict[str, Any] = {"head_dim": 12, "intermediate_size_mlp": 88, "num_hidden_layers": 4}
_GRANITE: dict[str, Any] = {
    "num_local_experts": 5, "num_experts_per_tok": 2, "embedding_multiplier": 3.0, "residual_multiplier": 0.4,
    "attention_multiplier": 0.2, "logits_scaling": 2.0,
}  # fmt: skip
_DBRX: dict[str, Any] = {
    "d_model": 48, "n_heads": 4, "n_layers": 2, "max_seq_len": 256,
    "attn_config": {"kv_n_heads": 2, "clip_qkv": 0.5, "rope_theta": 10000.0},
}  # fmt: skip
_DBRX_EXPERTS: dict[str, Any] = {"hidden_size": 48, "ffn_hidden_size": 28, "moe_num_experts": 5, "moe_top_k": 2}

_BLOCKS: dict[str, Any] = {
    "head_dim": 16, "rotary_dim": 8, "num_local_experts": 6, "num_experts_per_tok": 2, "dense_intermediate_size": 80,
    "shared_intermediate_size": 28, "index_n_heads": 2, "index_head_dim": 20, "index_block_size": 3,
    "index_topk_blocks": 3, "index_local_blocks": 1,
}  # fmt: skip
_TWO_SPARSE: dict[str, Any] = {
    "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
    "mlp_layer_types": ["dense", "sparse", "sparse"],
}  # fmt: skip

# Fewer keys than the prompts have; so many heads that hardly a key has nothing but zeros, and equal scores.
_INDEX: dict[str, Any] = {"index_n_heads": 9, "index_head_dim": 14, "index_topk": 5}

_ENTRIES: dict[str, Any] = {
    "head_dim": 32, "partial_rotary_factor": 0.25, "q_lora_rank": 32, "moe_intermediate_size": 32,
    "n_routed_experts": 6, "num_experts_per_tok": 2, "hidden_size": 64, "num_key_value_heads": 1, "o_groups": 2,
    "o_lora_rank": 16, "index_n_heads": 16, "index_head_dim": 16, "index_topk": 3, "sliding_window": 7,
    "hc_mult": 2, "hc_sinkhorn_iters": 4, "num_hidden_layers": 3, "mlp_layer_types": ["hash_moe", "moe", "moe"],
    "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
    "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
}  # fmt: skip

EXPERTS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("mixtral", {"num_local_experts": 5}),
    "mixtral-window-tied": (
        "mixtral",
        {"num_local_experts": 4, "num_experts_per_tok": 3, "sliding_window": 8, "head_dim": 20,
         "tie_word_embeddings": True},
    ),
    "qwen2_moe": ("qwen2_moe", {**_QWEN, "shared_expert_intermediate_size": 28}),
    "qwen2_moe-window-dense-layer": (
        "qwen2_moe",
        {**_QWEN, "shared_expert_intermediate_size": 12, "norm_topk_prob": True, "mlp_only_layers": [1],
         "qkv_bias": False, "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1,
         "tie_word_embeddings": True},
    ),
    "qwen3_moe": ("qwen3_moe", {**_QWEN, "head_dim": 16, "norm_topk_prob": True}),
    "qwen3_moe-every-other": (
        "qwen3_moe",
        {**_QWEN, "num_hidden_layers": 4, "decoder_sparse_step": 2, "attention_bias": True,
         "tie_word_embeddings": True},
    ),
    "qwen3_moe-dense-first-window": (
        "qwen3_moe",
        {**_QWEN, "mlp_only_layers": [0], "norm_topk_prob": True, "use_sliding_window": True, "sliding_window": 8,
         "num_key_value_heads": 1},
    ),
    "phimoe": ("phimoe", {"num_local_experts": 6, "router_jitter_noise": 0.1}),
    "phimoe-bias-window": (
        "phimoe",
        {"num_local_experts": 4, "attention_bias": True, "lm_head_bias": True, "sliding_window": 10},
    ),
    "phimoe-longrope": (
        "phimoe",
        {
            "num_local_experts": 4, "original_max_position_embeddings": 16,
            "rope_parameters": {
                "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 16,
                "short_mscale": 1.1, "long_mscale": 1.3,
                "short_factor": [1.0 + 0.1 * i for i in range(6)], "long_factor": [1.5 + 0.7 * i for i in range(6)],
            },
        },
    ),
    "phimoe-yarn": (
        "phimoe",
        {
            "num_local_experts": 4,
            "rope_parameters": {
                **_YARN, "original_max_position_embeddings": 16, "short_mscale": 1.1, "long_mscale": 1.3,
            },
        },
    ),
    "gpt_oss": ("gpt_oss", {"num_local_experts": 6, "num_experts_per_tok": 3, "head_dim": 16, "sliding_window": 8}),
    "gpt_oss-one-kv-head-no-bias": (
        "gpt_oss",
        {
            "num_local_experts": 4, "num_experts_per_tok": 1, "head_dim": 12, "num_key_value_heads": 1,
            "attention_bias": False, "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
            "sliding_window": 5, "swiglu_limit": 0.6, "swiglu_alpha": 1.3, "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "deepseek_v2": (
        "deepseek_v2",
        {**_LATENT, **_ROUTED, "head_dim": 6, "n_group": 4, "topk_group": 2, "topk_method": "group_limited_greedy",
         "routed_scaling_factor": 1.7, "n_shared_experts": 2},
    ),
    "deepseek_v2-greedy-tied": (
        "deepseek_v2",
        {**_LATENT, **_ROUTED, "head_dim": 6, "topk_method": "greedy", "q_lora_rank": None, "attention_bias": True,
         "mlp_bias": True, "first_k_dense_replace": 0, "tie_word_embeddings": True, "rope_parameters": _YARN},
    ),
    "deepseek_v2-dynamic-rope": (
        "deepseek_v2",
        {**_LATENT, **_ROUTED, "head_dim": 6, "num_hidden_layers": 2, "max_position_embeddings": 24,
         "rope_parameters": _DYNAMIC},
    ),
    "deepseek_v3": ("deepseek_v3", {**_LATENT, **_ROUTED, "n_group": 4, "topk_group": 2}),
    "deepseek_v3-one-group-tied": (
        "deepseek_v3",
        {**_LATENT, **_ROUTED, "n_group": 1, "topk_group": 1, "norm_topk_prob": False, "routed_scaling_factor": 1.0,
         "n_shared_experts": 2, "first_k_dense_replace": 2, "q_lora_rank": None, "rope_interleave": False,
         "attention_bias": True, "tie_word_embeddings": True, "rope_parameters": _YARN},
    ),
    "deepseek_v3-dynamic-rope": (
        "deepseek_v3",
        {**_LATENT, **_ROUTED, "n_group": 2, "topk_group": 2, "num_experts_per_tok": 1,
         "num_hidden_layers": 2, "max_position_embeddings": 24, "rope_parameters": _DYNAMIC},
    ),
    "glm4_moe": ("glm4_moe", {**_ROUTED, "head_dim": 16, "n_group": 2, "topk_group": 1, "use_qk_norm": True}),
    "glm4_moe-bias-tied": (
        "glm4_moe",
        {**_ROUTED, "first_k_dense_replace": 2, "n_shared_experts": 2, "norm_topk_prob": False,
         "routed_scaling_factor": 2.2, "attention_bias": True, "tie_word_embeddings": True,
         "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0}},
    ),
    "glm4_moe_lite": ("glm4_moe_lite", {**_LATENT, **_ROUTED, "n_group": 2, "topk_group": 1}),
    "deepseek_v32": (
        "deepseek_v32", {**_LATENT, **_ROUTED, **_INDEX, "n_group": 2, "topk_group": 1, "rope_parameters": _YARN},
    ),
    "deepseek_v32-dense-one": ("deepseek_v32", {**_LATENT, **_INDEX, "index_topk": 1, "first_k_dense_replace": 3}),
    "deepseek_v4": ("deepseek_v4", _ENTRIES),
    "deepseek_v4-more-groups": ("deepseek_v4", {**_ENTRIES, "num_attention_heads": 8, "o_groups": 4}),
    "glm_moe_dsa": (
        "glm_moe_dsa",
        {**_LATENT, **_ROUTED, **_INDEX, "num_hidden_layers": 5,
         "indexer_types": ["full", "shared", "full", "shared", "shared"]},
    ),
    "glm4_moe_lite-sparse-first-tied": (
        "glm4_moe_lite",
        {**_LATENT, **_ROUTED, "mlp_layer_types": ["sparse", "dense", "sparse"], "q_lora_rank": None,
         "rope_interleave": False, "attention_bias": True, "norm_topk_prob": False, "tie_word_embeddings": True},
    ),
    "olmoe": ("olmoe", {"num_experts": 6, "num_experts_per_tok": 3, "norm_topk_prob": True}),
    "olmoe-clip-bias-tied": (
        "olmoe",
        {"num_experts": 5, "num_experts_per_tok": 2, "clip_qkv": 0.5, "attention_bias": True,
         "tie_word_embeddings": True},
    ),
    "granitemoe": ("granitemoe", _GRANITE),
    "granitemoe-bias-tied": ("granitemoe", {**_GRANITE, "attention_bias": True, "tie_word_embeddings": True}),
    "granitemoeshared": ("granitemoeshared", {**_GRANITE, "shared_intermediate_size": 28}),
    "granitemoeshared-none-shared": (
        "granitemoeshared", {**_GRANITE, "num_key_value_heads": 1, "tie_word_embeddings": True},
    ),
    "minimax_m2": ("minimax_m2", {"num_local_experts": 6, "num_experts_per_tok": 3, "head_dim": 16, "rotary_dim": 8}),
    "minimax_m3": ("minimax_m3_vl_text", {**_BLOCKS, "num_hidden_layers": 3, **_TWO_SPARSE}),
    "minimax_m3-blocks-of-one-key": (
        "minimax_m3_vl_text",
        {**_BLOCKS, "num_hidden_layers": 2, "layer_types": ["minimax_m3_sparse"] * 2, "mlp_layer_types": ["dense"] * 2,
         "index_n_heads": 4, "index_head_dim": 14, "index_block_size": 1, "index_topk_blocks": 5,
         "index_local_blocks": 2},
    ),
    "minimax_m2-tied": (
        "minimax_m2",
        {"num_local_experts": 4, "num_experts_per_tok": 1, "head_dim": 12, "num_key_value_heads": 4,
         "tie_word_embeddings": True},
    ),
    "llama4": (
        "llama4_text",
        {**_LLAMA4, "num_local_experts": 5, "attention_chunk_size": 6, "no_rope_layers": [1, 0, 1, 0], "floor_scale": 3,
         "attn_scale": 0.4},
    ),
    "llama4-interleaved": (
        "llama4_text",
        {**_LLAMA4, "num_local_experts": 4, "num_experts_per_tok": 2, "interleave_moe_layer_step": 2,
         "use_qk_norm": False, "attn_temperature_tuning": False, "attention_chunk_size": 9, "attention_bias": True,
         "tie_word_embeddings": True},
    ),
    "llama4-moe-layers": (
        "llama4_text",
        {**_LLAMA4, "num_local_experts": 6, "num_experts_per_tok": 3, "moe_layers": [0, 3], "use_qk_norm": False,
         "no_rope_layers": [0, 0, 1, 1], "attention_chunk_size": 1000, "floor_scale": 5, "num_key_value_heads": 1},
    ),
    "llama4-no-rope": (
        "llama4_text",
        {**_LLAMA4, "num_hidden_layers": 2, "num_local_experts": 3, "no_rope_layers": [0, 0], "floor_scale": 1},
    ),
    "dbrx": ("dbrx", {**_DBRX, "ffn_config": _DBRX_EXPERTS}),
    "dbrx-weights-of-norm-3": (
        "dbrx", {**_DBRX, "ffn_config": {**_DBRX_EXPERTS, "moe_top_k": 3, "moe_normalize_expert_weights": 3.0}},
    ),
    "longcat_flash": (
        "longcat_flash",
        {**_LATENT, "head_dim": 6, "num_hidden_layers": 4, "ffn_hidden_size": 80, "expert_ffn_hidden_size": 20,
         "n_routed_experts": 5, "zero_expert_num": 3, "moe_topk": 3, "attention_bias": True},
    ),
    "longcat_flash-yarn-tied": (
        "longcat_flash",
        {**_LATENT, "head_dim": 6, "num_hidden_layers": 2, "ffn_hidden_size": 80, "expert_ffn_hidden_size": 20,
         "n_routed_experts": 4, "zero_expert_num": 0, "moe_topk": 2, "tie_word_embeddings": True,
         "rope_parameters": _YARN},
    ),
    "jetmoe": (
        "jetmoe",
        {"kv_channels": 12, "num_local_experts": 5, "num_experts_per_tok": 3, "num_attention_heads": 6,
         "tie_word_embeddings": False},
    ),
    "gemma4-experts": (
        "gemma4_text",
        {
            "head_dim": 12, "global_head_dim": 20, "num_global_key_value_heads": 1, "attention_k_eq_v": True,
            "hidden_size_per_layer_input": 0, "enable_moe_block": True, "num_experts": 6, "top_k_experts": 2,
            "moe_intermediate_size": 20, "sliding_window": 8, "final_logit_softcapping": 20.0,
            "layer_types": ["sliding_attention", "full_attention", "full_attention"],
        },
    ),
    "gemma4-experts-per-layer-inputs": (
        "gemma4_text",
        {
            "head_dim": 16, "global_head_dim": 16, "hidden_size_per_layer_input": 10, "vocab_size_per_layer_input": 131,
            "enable_moe_block": True, "num_experts": 4, "top_k_experts": 3, "moe_intermediate_size": 12,
            "sliding_window": 9, "num_hidden_layers": 4, "num_kv_shared_layers": 2, "tie_word_embeddings": False,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        },
    ),
}  # fmt: skip
