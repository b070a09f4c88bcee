"""A decoder of a family that transformers doesn't have and precast's code doesn't know, made of known parts.

Its layers take turns: gated attention with norms of queries and keys, partial rotary and a window in some layers; a
state-space mixer of its own layout through transformers' marked functions; and behind each a mixture of experts with a
sigmoid router, a correction bias and a gated shared expert.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.integrations import use_experts_implementation
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.modeling_outputs import CausalLMOutput
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import eager_attention_forward
from transformers.models.mamba2.modeling_mamba2 import causal_conv1d_fn, mamba2_chunk_scan

# the names that transformers allows in `layer_types`
FULL, WINDOW, SCAN = "full_attention", "sliding_attention", "linear_attention"


class PatchworkConfig(PreTrainedConfig):
    """`layer_types`: `FULL`, `WINDOW` or `SCAN` for each layer."""

    model_type = "precast_patchwork"

    def __init__(self, layer_types: Any = (WINDOW, SCAN, FULL, SCAN), **kwargs: Any) -> None:
        self.layer_types = list(layer_types)
        self.vocab_size, self.hidden_size, self.num_hidden_layers = 131, 48, len(self.layer_types)
        self.num_attention_heads, self.num_key_value_heads, self.head_dim = 6, 2, 20
        self.num_rotary, self.sliding_window, self.max_position_embeddings = 8, 9, 256
        self.scan_heads, self.scan_head_dim, self.scan_groups, self.scan_states = 5, 12, 1, 7
        self.num_experts, self.num_experts_per_tok, self.moe_intermediate_size = 6, 2, 28
        super().__init__(**kwargs)


class PatchworkNorm(nn.Module):
    """A root-mean-square norm whose weight is an offset from one."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-5)
        return (y * (1.0 + self.weight.float())).to(x.dtype)


class PatchworkRotary(nn.Module):
    """Cosines and sines of the first `num_rotary` elements of a head."""

    def __init__(self, config: PatchworkConfig) -> None:
        super().__init__()
        self.size = config.num_rotary
        self.inv_freq = nn.Buffer(self.frequencies(), persistent=False)

    def frequencies(self) -> torch.Tensor:
        return 1.0 / (1000.0 ** (torch.arange(0, self.size, 2, dtype=torch.float32) / self.size))

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        angles = position_ids[..., None].float() * self.inv_freq
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """`x` [1, H, T, D]: its first elements are turned, the others stay."""
    turned, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    first, second = turned.chunk(2, dim=-1)
    turned = turned * cos.unsqueeze(1) + torch.cat((-second, first), dim=-1) * sin.unsqueeze(1)
    return torch.cat((turned, rest), dim=-1)


class PatchworkAttention(nn.Module):
    """Grouped queries; the result is gated by a sigmoid of the layer's input."""

    def __init__(self, config: PatchworkConfig, layer_idx: int) -> None:
        super().__init__()
        self.config, self.layer_idx, self.head_dim = config, layer_idx, config.head_dim
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        queries, keys = (heads * config.head_dim for heads in (config.num_attention_heads, config.num_key_value_heads))
        self.query_and_gate = nn.Linear(config.hidden_size, 2 * queries, bias=False)
        self.key = nn.Linear(config.hidden_size, keys, bias=True)
        self.value = nn.Linear(config.hidden_size, keys, bias=False)
        self.out = nn.Linear(queries, config.hidden_size, bias=False)
        self.query_norm, self.key_norm = PatchworkNorm(config.head_dim), PatchworkNorm(config.head_dim)

    def forward(self, x: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor], mask: torch.Tensor) -> torch.Tensor:
        shape = (*x.shape[:-1], -1, self.head_dim)
        query, gate = self.query_and_gate(x).chunk(2, dim=-1)
        query = rotate(self.query_norm(query.view(shape)).transpose(1, 2), *rotary)
        key = rotate(self.key_norm(self.key(x).view(shape)).transpose(1, 2), *rotary)
        value = self.value(x).view(shape).transpose(1, 2)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        y, _ = attend(self, query, key, value, mask, scaling=0.3, dropout=0.0)
        return self.out(y.reshape(*x.shape[:-1], -1) * torch.sigmoid(gate))


class PatchworkScan(nn.Module):
    """A state-space mixer: the convolution goes over the values alone, and the gate is applied before the last norm."""

    def __init__(self, config: PatchworkConfig) -> None:
        super().__init__()
        self.heads, self.head_dim = config.scan_heads, config.scan_head_dim
        self.groups, self.states = config.scan_groups, config.scan_states
        self.inner = self.heads * self.head_dim
        self.values = nn.Linear(config.hidden_size, 2 * self.inner, bias=False)
        self.selection = nn.Linear(config.hidden_size, 2 * self.groups * self.states + self.heads, bias=False)
        self.conv = nn.Conv1d(self.inner, self.inner, 3, groups=self.inner, padding=2)
        self.decay, self.skip = nn.Parameter(torch.zeros(self.heads)), nn.Parameter(torch.zeros(self.heads))
        self.step_bias = nn.Parameter(torch.zeros(self.heads))
        self.norm = PatchworkNorm(self.inner)
        self.out = nn.Linear(self.inner, config.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        values, gate = self.values(x).chunk(2, dim=-1)
        size = self.groups * self.states
        b, c, step = self.selection(x).split([size, size, self.heads], dim=-1)
        conv = causal_conv1d_fn(values.transpose(1, 2), self.conv.weight.squeeze(1), self.conv.bias, activation="silu")
        y = mamba2_chunk_scan(
            conv.transpose(1, 2).view(*x.shape[:2], self.heads, self.head_dim), step, -torch.exp(self.decay.float()),
            b.view(*x.shape[:2], self.groups, self.states), c.view(*x.shape[:2], self.groups, self.states),
            chunk_size=8, D=self.skip, z=None, dt_bias=self.step_bias, dt_softplus=True,
        )  # fmt: skip
        return self.out(self.norm(y.reshape(*x.shape[:2], -1) * F.silu(gate)))


@use_experts_implementation
class PatchworkExperts(nn.Module):
    """All experts' weights, stacked."""

    def __init__(self, config: PatchworkConfig) -> None:
        super().__init__()
        self.num_experts = config.num_experts
        hidden, inner = config.hidden_size, config.moe_intermediate_size
        self.gate_up_proj = nn.Parameter(torch.zeros(config.num_experts, 2 * inner, hidden))
        self.down_proj = nn.Parameter(torch.zeros(config.num_experts, hidden, inner))
        self.act_fn = nn.GELU(approximate="tanh")

    def forward(self, x: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        total = torch.zeros_like(x)
        for expert in range(self.num_experts):
            tokens, places = torch.where(top_k_index == expert)
            gate, up = F.linear(x[tokens], self.gate_up_proj[expert]).chunk(2, dim=-1)
            y = F.linear(self.act_fn(gate) * up, self.down_proj[expert]) * top_k_weights[tokens, places, None]
            total.index_add_(0, tokens, y.to(total.dtype))
        return total


class PatchworkMixture(nn.Module):
    """Experts chosen by corrected sigmoid scores, beside one that all tokens share."""

    def __init__(self, config: PatchworkConfig) -> None:
        super().__init__()
        self.top_k = config.num_experts_per_tok
        self.router = nn.Linear(config.hidden_size, config.num_experts, bias=False)
        self.correction = nn.Buffer(torch.zeros(config.num_experts))
        self.experts = PatchworkExperts(config)
        self.shared_up = nn.Linear(config.hidden_size, config.moe_intermediate_size, bias=False)
        self.shared_down = nn.Linear(config.moe_intermediate_size, config.hidden_size, bias=False)
        self.shared_gate = nn.Linear(config.hidden_size, 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        scores = torch.sigmoid(self.router(rows).float())
        _, chosen = torch.topk(scores + self.correction, self.top_k, dim=-1)
        weights = scores.gather(1, chosen)
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        routed = self.experts(rows, chosen, weights.to(rows.dtype))
        shared = self.shared_down(F.relu(self.shared_up(rows)).square()) * torch.sigmoid(self.shared_gate(rows))
        return (routed + shared).view_as(x)


class PatchworkLayer(nn.Module):
    """A mixer of tokens, and a mixture of experts behind it."""

    def __init__(self, config: PatchworkConfig, layer_idx: int) -> None:
        super().__init__()
        self.kind = config.layer_types[layer_idx]
        self.mixer_norm, self.mixture_norm = PatchworkNorm(config.hidden_size), PatchworkNorm(config.hidden_size)
        self.mixer = PatchworkScan(config) if self.kind == SCAN else PatchworkAttention(config, layer_idx)
        self.mixture = PatchworkMixture(config)

    def forward(self, x: torch.Tensor, rotary: Any, masks: dict[str, torch.Tensor]) -> torch.Tensor:
        y = self.mixer_norm(x)
        x = x + (self.mixer(y) if self.kind == SCAN else self.mixer(y, rotary, masks[self.kind]))
        return x + self.mixture(self.mixture_norm(x))


class PatchworkForCausalLM(PreTrainedModel):
    """Embedding, layers, norm, head."""

    config_class = PatchworkConfig
    _supports_attention_backend = True
    _supports_sdpa = True

    def __init__(self, config: PatchworkConfig) -> None:
        super().__init__(config)
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.rotary = PatchworkRotary(config)
        self.layers = nn.ModuleList(PatchworkLayer(config, index) for index in range(config.num_hidden_layers))
        self.norm = PatchworkNorm(config.hidden_size)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, PatchworkRotary):
            module.inv_freq.copy_(module.frequencies())

    def forward(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor | None = None, **kwargs: Any
    ) -> CausalLMOutput:
        x = self.embed(input_ids)
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1])[None]
        given = {
            "config": self.config, "inputs_embeds": x, "attention_mask": None, "past_key_values": None,
            "position_ids": position_ids,
        }  # fmt: skip
        masks = {FULL: create_causal_mask(**given), WINDOW: create_sliding_window_causal_mask(**given)}
        rotary = self.rotary(x, position_ids)
        for layer in self.layers:
            x = layer(x, rotary, masks)
        return CausalLMOutput(logits=self.head(self.norm(x)))


def register() -> None:
    """Makes the family known to transformers' auto classes, as a user's own code would."""
    AutoConfig.register(PatchworkConfig.model_type, PatchworkConfig, exist_ok=True)
    AutoModelForCausalLM.register(PatchworkConfig, PatchworkForCausalLM, exist_ok=True)
