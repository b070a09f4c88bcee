"""Variants of the families whose layers keep states: state spaces, delta rules, linear attention, convolutions.

See `families.VARIANTS`. Prompts are longer than the chunks that transformers' own scans work in, and the layers of a
model are of several kinds.
"""

from __future__ import annotations

from typing import Any

_YARN: dict[str, Any] = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64,
}  # fmt: skip
_DELTA: dict[str, Any] = {
    "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 10,
    "linear_value_head_dim": 14, "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}  # fmt: skip
_EXPERTS: dict[str, Any] = {
    "moe_intermediate_size": 20, "shared_expert_intermediate_size": 28, "num_experts": 6, "num_experts_per_tok": 2,
}  # fmt: skip
_NEMOTRON: dict[str, Any] = {
    "num_hidden_layers": 4, "head_dim": 12, "ssm_state_size": 10, "mamba_num_heads": 6, "mamba_head_dim": 8,
    "n_groups": 2, "chunk_size": 8,
}  # fmt: skip
_NEMOTRON_EXPERTS: dict[str, Any] = {
    "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 20,
    "moe_shared_expert_intermediate_size": 28,
}  # fmt: skip
_GRANITE: dict[str, Any] = {
    "mamba_n_heads": 6, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 10, "mamba_chunk_size": 8,
    "embedding_multiplier": 3.0, "residual_multiplier": 0.6, "attention_multiplier": 0.2, "logits_scaling": 2.0,
    "shared_intermediate_size": 28, "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}  # fmt: skip
_FALCON: dict[str, Any] = {
    "mamba_d_ssm": 60, "mamba_n_heads": 6, "mamba_d_head": 10, "mamba_n_groups": 2, "mamba_d_state": 14,
    "mamba_chunk_size": 8,
}  # fmt: skip
_CONV: dict[str, Any] = {"layer_types": ["conv", "full_attention", "conv"], "block_multiple_of": 16}
_JAMBA: dict[str, Any] = {
    "mamba_d_state": 10, "mamba_dt_rank": 7, "attn_layer_period": 3, "attn_layer_offset": 1,
}  # fmt: skip
_MINIMAX: dict[str, Any] = {
    "num_local_experts": 4, "head_dim": 12, "linear_attn_alpha_factor": 1.3, "linear_attn_beta_factor": 0.9,
    "full_attn_alpha_factor": 0.8, "full_attn_beta_factor": 1.2, "mlp_alpha_factor": 1.1, "mlp_beta_factor": 0.7,
}  # fmt: skip

STATES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_next": ("qwen3_next", {**_DELTA, **_EXPERTS}),
    "qwen3_next-dense-layers-tied": (
        "qwen3_next",
        {**_DELTA, **_EXPERTS, "linear_num_value_heads": 2, "linear_conv_kernel_dim": 3, "mlp_only_layers": [1],
         "norm_topk_prob": False, "num_key_value_heads": 1, "attention_bias": True, "tie_word_embeddings": True},
    ),
    "qwen3_5": ("qwen3_5_text", _DELTA),
    "qwen3_5-one-kv-head-tied": (
        "qwen3_5_text",
        {**_DELTA, "linear_num_value_heads": 2, "num_key_value_heads": 1, "attention_bias": True,
         "tie_word_embeddings": True, "layer_types": ["full_attention", "linear_attention", "linear_attention"]},
    ),
    "qwen3_5-sections-of-positions": (
        "qwen3_5_text",
        {**_DELTA, "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"],
         "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5,
                             "mrope_section": [2, 1, 1], "mrope_interleaved": True}},
    ),
    "qwen3_5_moe": ("qwen3_5_moe_text", {**_DELTA, **_EXPERTS}),
    "qwen3_5_moe-tied": (
        "qwen3_5_moe_text",
        {**_DELTA, **_EXPERTS, "num_experts_per_tok": 3, "linear_num_value_heads": 6, "linear_conv_kernel_dim": 2,
         "tie_word_embeddings": True},
    ),
    "nemotron_h": ("nemotron_h", {**_NEMOTRON, "hybrid_override_pattern": "M-M*"}),
    "nemotron_h-bias": (
        "nemotron_h",
        {**_NEMOTRON, "hybrid_override_pattern": "*M-M", "n_groups": 1, "use_bias": True, "mlp_bias": True,
         "attention_bias": True, "use_conv_bias": False, "conv_kernel": 3, "sliding_window": 8,
         "num_key_value_heads": 1, "tie_word_embeddings": True},
    ),
    "nemotron_h-time-limits": (
        "nemotron_h", {**_NEMOTRON, "hybrid_override_pattern": "M*", "num_hidden_layers": 2, "time_step_min": 0.6},
    ),
    "nemotron_h-experts": (
        "nemotron_h",
        {**_NEMOTRON, **_NEMOTRON_EXPERTS, "hybrid_override_pattern": "MEM*E", "num_hidden_layers": 5,
         "num_nextn_predict_layers": 1},
    ),
    "nemotron_h-experts-latent": (
        "nemotron_h",
        {**_NEMOTRON, **_NEMOTRON_EXPERTS, "hybrid_override_pattern": "ME*-", "n_groups": 3, "moe_latent_size": 28,
         "n_group": 4, "topk_group": 2, "norm_topk_prob": False, "routed_scaling_factor": 2.5, "mlp_bias": True,
         "residual_in_fp32": True},
    ),
    "granitemoehybrid": (
        "granitemoehybrid",
        {**_GRANITE, "num_local_experts": 5, "num_experts_per_tok": 2, "tie_word_embeddings": True},
    ),
    "granitemoehybrid-dense-rope": (
        "granitemoehybrid",
        {**_GRANITE, "num_local_experts": 0, "position_embedding_type": "rope", "mamba_n_groups": 1,
         "mamba_conv_bias": False, "mamba_proj_bias": True, "mamba_d_conv": 3, "attention_bias": True},
    ),
    "granitemoehybrid-time-limits": (
        "granitemoehybrid",
        {**_GRANITE, "num_hidden_layers": 2, "layer_types": ["linear_attention"] * 2, "num_local_experts": 0,
         "time_step_limit": (0.5, 0.9)},
    ),
    "lfm2": ("lfm2", _CONV),
    "lfm2-bias-untied": (
        "lfm2",
        {**_CONV, "conv_bias": True, "conv_L_cache": 4, "block_auto_adjust_ff_dim": False, "rope_parameters": _YARN,
         "tie_word_embeddings": False, "layer_types": ["full_attention", "conv", "conv"]},
    ),
    "lfm2_moe": (
        "lfm2_moe",
        {**_CONV, "num_dense_layers": 1, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20,
         "routed_scaling_factor": 1.5},
    ),
    "lfm2_moe-no-expert-bias": (
        "lfm2_moe",
        {**_CONV, "num_dense_layers": 0, "num_experts": 4, "num_experts_per_tok": 3, "moe_intermediate_size": 28,
         "use_expert_bias": False, "norm_topk_prob": False, "conv_bias": True, "conv_L_cache": 2,
         "tie_word_embeddings": False, "layer_types": ["conv", "conv", "full_attention"]},
    ),
    "falcon_h1": (
        "falcon_h1",
        {**_FALCON, "num_hidden_layers": 2, "embedding_multiplier": 2.0, "lm_head_multiplier": 0.7,
         "key_multiplier": 1.4, "attention_in_multiplier": 0.9, "attention_out_multiplier": 1.2,
         "ssm_in_multiplier": 1.1, "ssm_out_multiplier": 1.3, "mlp_multipliers": [0.8, 1.2],
         "ssm_multipliers": [0.6, 1.5, 0.8, 2.0, 0.75]},
    ),
    "falcon_h1-norm-bias-tied": (
        "falcon_h1",
        {**_FALCON, "num_hidden_layers": 2, "mamba_rms_norm": True, "mamba_norm_before_gate": False,
         "mamba_conv_bias": False, "mamba_proj_bias": True, "projectors_bias": True, "attention_bias": True,
         "mlp_bias": True, "num_key_value_heads": 1, "tie_word_embeddings": True},
    ),
    "falcon_h1-norm-before-gate": (
        "falcon_h1",
        {**_FALCON, "num_hidden_layers": 2, "mamba_rms_norm": True, "mamba_n_groups": 1, "mamba_d_conv": 3},
    ),
    "falcon_h1-time-limits": ("falcon_h1", {**_FALCON, "num_hidden_layers": 2, "time_step_limit": (0.5, 0.9)}),
    "mamba2": (
        "mamba2", {"num_heads": 6, "head_dim": 16, "state_size": 10, "n_groups": 3, "chunk_size": 8},
    ),
    "mamba2-bias-tied": (
        "mamba2",
        {"num_heads": 4, "head_dim": 36, "expand": 3, "state_size": 14, "n_groups": 1, "chunk_size": 8,
         "use_bias": True, "use_conv_bias": False, "conv_kernel": 3, "residual_in_fp32": False,
         "tie_word_embeddings": True},
    ),
    "mamba2-time-limits": (
        "mamba2", {"num_heads": 6, "head_dim": 16, "state_size": 10, "n_groups": 2, "time_step_limit": (0.5, 0.9)},
    ),
    "mamba": ("mamba", {"state_size": 10, "time_step_rank": 7}),
    "mamba-bias-untied": (
        "mamba",
        {"state_size": 6, "time_step_rank": 3, "expand": 3, "use_bias": True, "use_conv_bias": False,
         "conv_kernel": 3, "residual_in_fp32": False, "tie_word_embeddings": False},
    ),
    "jamba": ("jamba", {**_JAMBA, "num_experts": 4}),
    "jamba-dense-bias-tied": (
        "jamba",
        {**_JAMBA, "num_experts": 1, "num_experts_per_tok": 1, "attn_layer_period": 2, "attn_layer_offset": 0,
         "num_key_value_heads": 1, "mamba_conv_bias": False, "mamba_proj_bias": True, "mamba_d_conv": 3,
         "tie_word_embeddings": True},
    ),
    "minimax": ("minimax", {**_MINIMAX, "block_size": 4, "sliding_window": 8}),
    "minimax-linear-first-tied": (
        "minimax",
        {**_MINIMAX, "block_size": 16, "num_experts_per_tok": 3, "num_key_value_heads": 1,
         "head_dim": 16, "layer_types": ["linear_attention", "linear_attention", "full_attention"],
         "tie_word_embeddings": True},
    ),
}  # fmt: skip
