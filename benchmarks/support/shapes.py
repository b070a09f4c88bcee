"""Configs of well-known shapes: what `config.json` holds, without weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_LLAMA_3_1: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}

SHAPES: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": {
        **_LLAMA_3_1,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "llama-3.1-405b": {
        **_LLAMA_3_1,
        "hidden_size": 16384,
        "intermediate_size": 53248,
        "num_hidden_layers": 126,
        "num_attention_heads": 128,
        "num_key_value_heads": 8,
    },
}

_NEMOTRON_56B = "M-M-M-M*-" + "M-M-M-M-M*-" * 9 + "M-M-M-M-M-"
"""54 scans, 54 feed-forward layers and 10 attentions, as in the published model; their order is approximate."""

_NEMOTRON_8B = "M-M-M-M*-" + "M-M-M-M-M*-" * 3 + "M-M-M-M-M-"

_YARN: dict[str, Any] = {"rope_type": "yarn", "beta_fast": 32, "beta_slow": 1}

_GEMMA_3: dict[str, Any] = {
    "model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"], "torch_dtype": "bfloat16",
    "vocab_size": 262208, "sliding_window": 1024, "sliding_window_pattern": 6, "max_position_embeddings": 131072,
    "rope_theta": 1000000.0, "rope_local_base_freq": 10000.0, "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    "rms_norm_eps": 1e-6, "hidden_activation": "gelu_pytorch_tanh", "bos_token_id": 2, "eos_token_id": 1,
}  # fmt: skip

SHAPES |= {
    "qwen3-235b-a22b": {
        "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "torch_dtype": "bfloat16",
        "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 94,
        "num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 128, "max_position_embeddings": 40960,
        "rope_theta": 1000000.0, "rms_norm_eps": 1e-6, "num_experts": 128, "num_experts_per_tok": 8,
        "moe_intermediate_size": 1536, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
        "tie_word_embeddings": False, "use_sliding_window": False, "bos_token_id": 151643, "eos_token_id": 151645,
    },
    "qwen3-30b-a3b-half": {
        "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "torch_dtype": "bfloat16",
        "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 24,
        "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "max_position_embeddings": 40960,
        "rope_theta": 1000000.0, "rms_norm_eps": 1e-6, "num_experts": 128, "num_experts_per_tok": 8,
        "moe_intermediate_size": 768, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
        "tie_word_embeddings": False, "use_sliding_window": False, "bos_token_id": 151643, "eos_token_id": 151645,
    },
    "deepseek-v3": {
        "model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"], "torch_dtype": "bfloat16",
        "vocab_size": 129280, "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048,
        "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128, "q_lora_rank": 1536,
        "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4,
        "first_k_dense_replace": 3, "norm_topk_prob": True, "routed_scaling_factor": 2.5,
        "max_position_embeddings": 163840, "rope_theta": 10000.0, "rms_norm_eps": 1e-6,
        "rope_scaling": {
            **_YARN, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096,
        },
        "quantization_config": {
            "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
        },
        "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 1,
    },
    "qwen3-next-80b-a3b": {
        "model_type": "qwen3_next", "architectures": ["Qwen3NextForCausalLM"], "torch_dtype": "bfloat16",
        "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 5120, "num_hidden_layers": 48,
        "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256, "partial_rotary_factor": 0.25,
        "full_attention_interval": 4, "linear_num_value_heads": 32, "linear_num_key_heads": 16,
        "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
        "num_experts": 512, "num_experts_per_tok": 10, "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512, "norm_topk_prob": True, "decoder_sparse_step": 1,
        "mlp_only_layers": [], "max_position_embeddings": 262144, "rope_theta": 10000000.0, "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False, "bos_token_id": 151643, "eos_token_id": 151645,
    },
    "nemotron-h-56b": {
        "model_type": "nemotron_h", "architectures": ["NemotronHForCausalLM"], "torch_dtype": "bfloat16",
        "vocab_size": 131072, "hidden_size": 8192, "intermediate_size": 32768,
        "num_hidden_layers": len(_NEMOTRON_56B), "hybrid_override_pattern": _NEMOTRON_56B,
        "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128, "mamba_num_heads": 256,
        "mamba_head_dim": 64, "ssm_state_size": 256, "n_groups": 8, "conv_kernel": 4, "chunk_size": 256,
        "mlp_hidden_act": "relu2", "max_position_embeddings": 8192, "bos_token_id": 1, "eos_token_id": 2,
        "tie_word_embeddings": False,
    },
    "gemma-4-26b-a4b": {
        "model_type": "gemma4_text", "architectures": ["Gemma4ForCausalLM"], "torch_dtype": "bfloat16",
        "vocab_size": 262144, "hidden_size": 2816, "intermediate_size": 2112, "num_hidden_layers": 30,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 256, "global_head_dim": 512,
        "num_global_key_value_heads": 2, "attention_k_eq_v": True, "sliding_window": 1024,
        "enable_moe_block": True, "num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704,
        "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0, "max_position_embeddings": 262144,
        "final_logit_softcapping": 30.0, "bos_token_id": 2, "eos_token_id": 1,
    },
    "gemma-3-12b": {
        **_GEMMA_3, "hidden_size": 3840, "intermediate_size": 15360, "num_hidden_layers": 48,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 256, "query_pre_attn_scalar": 256,
    },
    "gemma-3-27b": {
        **_GEMMA_3, "hidden_size": 5376, "intermediate_size": 21504, "num_hidden_layers": 62,
        "num_attention_heads": 32, "num_key_value_heads": 16, "head_dim": 128, "query_pre_attn_scalar": 168,
    },
    "gpt-oss-120b": {
        "model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"], "torch_dtype": "bfloat16",
        "vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 36,
        "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "num_local_experts": 128,
        "num_experts_per_tok": 4, "sliding_window": 128, "max_position_embeddings": 131072, "rope_theta": 150000.0,
        "rope_scaling": {**_YARN, "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False},
        "quantization_config": {
            "quant_method": "mxfp4",
            "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens",
                                       "lm_head"],
        },
        "tie_word_embeddings": False, "eos_token_id": 200002,
    },
    "glm-4.7-flash": {
        "model_type": "glm4_moe_lite", "architectures": ["Glm4MoeLiteForCausalLM"], "torch_dtype": "bfloat16",
        "vocab_size": 154880, "hidden_size": 2048, "intermediate_size": 10240, "moe_intermediate_size": 1536,
        "num_hidden_layers": 47, "num_attention_heads": 20, "num_key_value_heads": 20, "q_lora_rank": 768,
        "kv_lora_rank": 512, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256,
        "n_routed_experts": 64, "n_shared_experts": 1, "num_experts_per_tok": 4, "n_group": 1, "topk_group": 1,
        "first_k_dense_replace": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.8,
        "max_position_embeddings": 202752, "rope_theta": 1000000.0, "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False, "eos_token_id": 154820,
    },
}  # fmt: skip


SHAPES |= {
    # Layers of larger models, of every kind that they have, as many as one GPU holds in bfloat16.
    "qwen3-next-80b-6-layers": {**SHAPES["qwen3-next-80b-a3b"], "num_hidden_layers": 6},
    "deepseek-v3-4-layers": {
        key: value
        for key, value in (SHAPES["deepseek-v3"] | {"num_hidden_layers": 4}).items()
        if key != "quantization_config"
    },
    "nemotron-h-8b": {
        **SHAPES["nemotron-h-56b"], "hidden_size": 4096, "intermediate_size": 21504,
        "num_hidden_layers": len(_NEMOTRON_8B), "hybrid_override_pattern": _NEMOTRON_8B,
        "num_attention_heads": 32, "num_key_value_heads": 8, "mamba_num_heads": 128, "ssm_state_size": 128,
        "chunk_size": 128,
    },
    "gpt-oss-20b": {
        key: value
        for key, value in (SHAPES["gpt-oss-120b"] | {"num_hidden_layers": 24, "num_local_experts": 32}).items()
        if key != "quantization_config"
    },
}  # fmt: skip


_COMPRESSED: dict[str, Any] = {"quant_method": "compressed-tensors", "ignore": ["lm_head"], "kv_cache_scheme": None}

SHAPES |= {
    # Of these the publishers' own spellings.
    "llama-3.1-8b-fp8": {
        **SHAPES["llama-3.1-8b"],
        "quantization_config": {
            **_COMPRESSED, "format": "float-quantized", "config_groups": {"group_0": {
                "targets": ["Linear"],
                "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False},
                "input_activations": {"num_bits": 8, "type": "float", "strategy": "token", "symmetric": True,
                                      "dynamic": True},
            }},
        },
    },
    "llama-3.1-8b-fp8-blocks": {
        **SHAPES["llama-3.1-8b"],
        "quantization_config": {
            "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
        },
    },
    "llama-3.1-8b-int4": {
        **SHAPES["llama-3.1-8b"],
        "quantization_config": {
            **_COMPRESSED, "format": "pack-quantized", "config_groups": {"group_0": {
                "targets": ["Linear"], "input_activations": None,
                "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": True,
                            "dynamic": False},
            }},
        },
    },
    "llama-3.1-8b-nvfp4": {
        **SHAPES["llama-3.1-8b"],
        "quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]},
    },
    "llama-3.1-8b-gptq": {
        **SHAPES["llama-3.1-8b"],
        "quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True},
    },
    "llama-3.1-8b-awq": {
        **SHAPES["llama-3.1-8b"], "torch_dtype": "float16",
        "quantization_config": {
            "quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True,
        },
    },
    "gpt-oss-20b-mxfp4": {**SHAPES["gpt-oss-120b"], "num_hidden_layers": 24, "num_local_experts": 32},
}  # fmt: skip


def write_config(shape: str, folder: Path) -> Path:
    """A model directory that holds the shape's `config.json` and nothing else."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(SHAPES[shape], indent=2))
    return folder
