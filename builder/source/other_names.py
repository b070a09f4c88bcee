"""Model types that transformers doesn't know by name, or knows as another publication's, though it has the model: which
one it is, and the evidence.

A publisher who keeps another's architecture often gives its type a name of their own, and points to code that comes
with the checkpoint. None of that code is run to find out: a row of `OTHER_NAMES` was written after comparing the
published config, entry by entry, with what transformers' class reads and computes. A config that says anything else
than the row is not taken for that model.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from transformers import CONFIG_MAPPING

_ANYWHERE = frozenset({
    "architectures", "bos_token_id", "dtype", "eos_token_id", "model_type", "pad_token_id", "quantization_config",
    "rope_scaling", "rope_theta", "tie_word_embeddings", "torch_dtype", "transformers_version", "use_cache",
})  # fmt: skip
"""Entries that every config of transformers may have."""
_NOT_DECODING = frozenset({
    "auto_map", "aux_loss_alpha", "ep_size", "num_mtp_modules", "num_nextn_predict_layers", "pretraining_tp", "seq_aux",
})  # fmt: skip
"""Entries about training, drafts, and how others run the model."""


class OtherName(NamedTuple):
    """A published model type: transformers' own for it, the architecture that its configs name, the entries that
    transformers' class takes under no name of its fields, and the `values` of entries that it doesn't read, because its
    code does what they say. `beside` are patterns of tensors of its checkpoints that belong to other parts than the
    decoder, which nothing reads."""

    model_type: str
    architecture: str
    taken: frozenset[str]
    values: Mapping[str, Any]
    beside: tuple[str, ...] = ()


_BLOCKS_OF_M3 = {
    "sparse_attention_freq": [0] * 3 + [1] * 57, "sparse_block_size": 128,
    "sparse_disable_index_value": [0] * 3 + [1] * 57, "sparse_index_dim": 128, "sparse_init_block": 0,
    "sparse_local_block": 1, "sparse_num_index_heads": 4, "sparse_score_type": "max", "sparse_topk_blocks": 16,
    "use_sparse_attention": True,
}  # fmt: skip
_PICTURES_OF_LLAVA = frozenset({
    "freeze_mm_mlp_adapter", "freeze_mm_vision_resampler", "image_aspect_ratio", "mm_hidden_size", "mm_projector_type",
    "mm_resampler_type", "mm_use_im_patch_token", "mm_use_im_start_end", "mm_vision_select_feature",
    "mm_vision_select_layer", "mm_vision_tower", "tune_mm_mlp_adapter", "tune_mm_vision_resampler",
    "unfreeze_mm_vision_tower", "use_mm_proj",
})  # fmt: skip
OTHER_NAMES: Mapping[str, OtherName] = MappingProxyType({
    # moonshotai/Kimi-K2-*: DeepSeek-V3's code, of which only the model_type was renamed. Sigmoid scores, a bias for
    # the choice (noaux_tc), experts in every layer after the first ones: so do DeepseekV3TopkRouter and its layers. The
    # publisher's own modeling_deepseek.py, run with Kimi-K2's config of a tiny size (YaRN included), random weights and
    # 92 tokens, gives the logits that a bundle gives, to 1e-6 of their norm in float32.
    "kimi_k2": OtherName(
        "deepseek_v3", "DeepseekV3ForCausalLM", frozenset(),
        {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1},
    ),
    # MiniMaxAI/MiniMax-M3, the decoder alone: transformers has it as the text part of MiniMax-M3-VL. Norms times 1 + w,
    # each head of queries and keys normalised, half of it rotated, sigmoid scores with a bias, one shared expert, the
    # clamped gate of gpt-oss, and blocks of keys scored by the best one are what MiniMaxM3VL's modules do.
    "minimax_m3": OtherName(
        "minimax_m3_vl_text", "MiniMaxM3ForCausalLM", frozenset({"moe_layer_freq"}),
        {
            "attention_output_gate": False, "first_k_dense_replace": 3, "hidden_act": "swigluoai",
            "moe_intermediate_size": 3072, "n_shared_experts": 1, "partial_rotary_factor": 0.5,
            "qk_norm_type": "per_head", "scoring_func": "sigmoid", "sparse_attention_config": _BLOCKS_OF_M3,
            "use_gemma_norm": True, "use_qk_norm": True, "use_routing_bias": True,
        },
    ),
    # liuhaotian/llava-v1.5-*: its LlavaLlamaForCausalLM inherits from LlamaForCausalLM, keeps Llama's entries at the
    # top level and Llama's names of tensors, and only replaces embeddings of tokens by those of pictures. transformers'
    # own llava is another publication, whose configs have a text_config and another architecture.
    "llava": OtherName(
        "llama", "LlavaLlamaForCausalLM", frozenset({"_name_or_path", "max_length"}) | _PICTURES_OF_LLAVA, {},
        beside=("model.image_newline", "model.mm_projector.*", "model.vision_tower.*"),
    ),
})  # fmt: skip


def known_as(entries: Mapping[str, Any]) -> OtherName | None:
    """What transformers has that a config's `entries` are one of, under another name; None: none is known."""
    other = OTHER_NAMES.get(entries["model_type"])
    return None if other is None or differences(entries) else other


def differences(entries: Mapping[str, Any]) -> tuple[str, ...]:
    """The entries of a config, of a type in `OTHER_NAMES`, that say something else than its row, or what nobody has
    compared; none for a type that isn't there."""
    other = OTHER_NAMES.get(entries["model_type"])
    if other is None:
        return ()
    fields = set(CONFIG_MAPPING[other.model_type].__dataclass_fields__)
    known = (fields | other.taken | _ANYWHERE | _NOT_DECODING) - other.values.keys()
    expected = {**other.values, "architectures": [other.architecture]}
    unlike = (name for name, value in entries.items() if name in expected and value != expected[name])
    return tuple(sorted({*unlike, *(entries.keys() - known - expected.keys())}))


_REPUBLISHED: Mapping[str, str] = MappingProxyType(
    {
        "ChatGLMModel": "GLM-4 is published for transformers, too: use that, such as THUDM/glm-4-9b-hf",
        "LlavaLlamaForCausalLM": "LLaVA is published for transformers, too: use that, such as llava-hf/llava-1.5-7b-hf",
    }
)
"""By an architecture that transformers doesn't have: another publication of the same weights, under its names."""


def republished(architectures: Any) -> str | None:
    """What to use in the place of a checkpoint of these architectures, as a config names them; None: not known."""
    named = architectures if isinstance(architectures, (list, tuple)) else ()
    return next((_REPUBLISHED[each] for each in named if each in _REPUBLISHED), None)
