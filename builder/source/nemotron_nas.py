"""Llama-Nemotron models (`nemotron-nas`), which transformers doesn't have: a Llama whose layers differ.

A search left out the attention of some layers, or the feed-forward part, and gave the others sizes of their own.
`block_configs` of the config says so for each layer, and the checkpoint's names are a Llama's. The code that comes with
the published checkpoints (DeciLMForCausalLM) is not run: what its configs say is made of transformers' own Llama, and
whatever else they could say (linear layers in the place of others, windows, sinks, sparse attention) is refused.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from huggingface_hub.dataclasses import strict
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS  # noqa: F401 - as in Llama's file, whose attention it is
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, LlamaRMSNorm

MODEL_TYPE = "nemotron-nas"
ROUNDED_TO = 256
"""Feed-forward sizes are rounded up to a multiple of this."""


@strict
class NemotronNasConfig(LlamaConfig):
    """A Llama's config, with `block_configs`: for each layer, its attention (`n_heads_in_group` query heads share a key
    head) and its feed-forward part (`ffn_mult`, of which two thirds are how often the hidden size goes into it)."""

    model_type = MODEL_TYPE
    intermediate_size: int | None = None  # type: ignore[assignment]
    block_configs: list[dict[str, Any]] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        blocks = self.block_configs or []
        if len(blocks) != self.num_hidden_layers:
            message = f"block_configs has {len(blocks)} layers, expected num_hidden_layers, {self.num_hidden_layers}"
            raise ValueError(message)
        for index, block in enumerate(blocks):
            for part, known in (("attention", "n_heads_in_group"), ("ffn", "ffn_mult")):
                entries = block.get(part) or {}
                others = [name for name, value in entries.items() if value and name not in (known, "no_op")]
                if others:
                    raise ValueError(f"block_configs[{index}].{part} has {', '.join(others)}, expected none")
                if not entries.get("no_op") and not entries.get(known):
                    raise ValueError(f"block_configs[{index}].{part} has no {known}")

    def of_layer(self, index: int) -> LlamaConfig:
        """What the layer of this number is made of."""
        config, block = copy.copy(self), self.block_configs[index]  # type: ignore[index]
        group, times = block["attention"].get("n_heads_in_group") or 1, block["ffn"].get("ffn_mult") or 0.0
        config.num_key_value_heads = max(1, self.num_attention_heads // group)
        size = int(2 * times * self.hidden_size / 3)
        config.intermediate_size = -(-size // ROUNDED_TO) * ROUNDED_TO
        return config


class _Layer(torch.nn.Module):
    """A Llama's layer, or what was left of it."""

    def __init__(self, config: NemotronNasConfig, index: int) -> None:
        super().__init__()
        own, block = config.of_layer(index), config.block_configs[index]  # type: ignore[index]
        attends, feeds = (not block[part].get("no_op") for part in ("attention", "ffn"))
        self.self_attn = LlamaAttention(own, index) if attends else None
        self.mlp = LlamaMLP(own) if feeds else None
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps) if attends else None
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps) if feeds else None

    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        if self.self_attn is not None and self.input_layernorm is not None:
            found, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **kwargs)
            hidden_states = hidden_states + found
        if self.mlp is not None and self.post_attention_layernorm is not None:
            hidden_states = hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))
        return hidden_states


class DeciLMForCausalLM(LlamaForCausalLM):
    """The decoder, under the name of the architecture that its configs say."""

    config_class = NemotronNasConfig

    def __init__(self, config: NemotronNasConfig) -> None:
        plain = copy.copy(config)  # layers that are thrown away at once: of any size
        plain.intermediate_size = ROUNDED_TO
        super().__init__(plain)
        self.config = self.model.config = config
        self.model.layers = torch.nn.ModuleList(_Layer(config, index) for index in range(config.num_hidden_layers))
        self.post_init()


def register() -> None:
    """Lets transformers' factories make it; a second time, nothing happens."""
    AutoConfig.register(MODEL_TYPE, NemotronNasConfig, exist_ok=True)
    AutoModelForCausalLM.register(NemotronNasConfig, DeciLMForCausalLM, exist_ok=True)
