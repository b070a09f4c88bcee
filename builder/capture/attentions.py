"""Routes the attention of single models whose code can't be traced, for the table of `modules`."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from precast.builder.capture.routing import IMPLEMENTATION, current_trace
from precast.builder.capture.shifts import delayed
from precast.ir.errors import BuildError


def _refuse_beyond(limit: int, selected: str) -> None:
    """Refuse sequences of more than `limit` tokens: of these, not all blocks of keys are `selected`."""
    if current_trace().max_seq_len > limit:
        raise BuildError(
            "feature-unsupported",
            f"the model selects {selected} keys for each query, which are not all keys beyond {limit} tokens: precast "
            "has no attention to selected blocks",
            fix=f"build with max_seq_len of at most {limit}",
        )


# --- Qwen4-Exp ---------------------------------------------------------------------------------------------------


def _attention_to_selected_blocks(
    module: Any, hidden_states: torch.Tensor, position_embeddings: tuple[torch.Tensor, torch.Tensor],
    attention_mask: torch.Tensor, past_key_values: Any = None, **kwargs: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """An indexer, a loop over queries, selects whole blocks of keys; those after the last whole block are always seen.

    While no more blocks are whole than are selected, that is full attention; longer sequences are refused.
    """
    indexer = module.indexer
    limit = (indexer.block_topk + 1) * indexer.compress_ratio - 1
    _refuse_beyond(limit, f"{indexer.block_topk} blocks of {indexer.compress_ratio}")
    shape = (*hidden_states.shape[:-1], -1, module.head_dim)
    query, gate = module.q_proj(hidden_states).view(*shape[:-1], 2 * module.head_dim).chunk(2, dim=-1)
    query = module.q_norm(query).transpose(1, 2)
    key = module.k_norm(module.k_proj(hidden_states).view(shape)).transpose(1, 2)
    value = module.v_proj(hidden_states).view(shape).transpose(1, 2)
    query, key = sys.modules[type(module).__module__].apply_rotary_pos_emb(query, key, *position_embeddings)
    y, _ = ALL_ATTENTION_FUNCTIONS[IMPLEMENTATION](
        module, query, key, value, attention_mask, scaling=module.scaling, **kwargs
    )
    y = y.reshape(hidden_states.shape[0], hidden_states.shape[1], -1)
    return module.o_proj(y * torch.sigmoid(gate.reshape(y.shape))), None


# --- MiniMax M3 --------------------------------------------------------------------------------------------------


def _selected_blocks(
    module: Any, hidden_states: torch.Tensor, position_embeddings: tuple[torch.Tensor, torch.Tensor], *_: Any, **__: Any
) -> torch.Tensor | None:
    """The blocks of keys that an indexer selects for each query, `[1, T, heads, count]`. None: no sequence has more
    blocks than are selected, and attention is full."""
    if current_trace().max_seq_len <= module.topk_blocks * module.block_size:
        return None
    shape = (*hidden_states.shape[:-1], -1, module.head_dim)
    q = module.q_norm(module.q_proj(hidden_states).view(shape)).transpose(1, 2)
    k = module.k_norm(module.k_proj(hidden_states).view(shape)).transpose(1, 2)
    cos, sin = (table[..., : module.head_dim] for table in position_embeddings)
    q, k = sys.modules[type(module).__module__].apply_rotary_pos_emb(q, k, cos, sin)
    return torch.ops.precast.select_blocks(
        q.transpose(1, 2), k.transpose(1, 2).flatten(2), current_trace().cu_seqlens,
        count=module.topk_blocks, block_size=module.block_size, local=max(module.local_blocks, 0),
    )  # fmt: skip


# --- Inkling -----------------------------------------------------------------------------------------------------


def _bias_by_distance(module: Any, relative_states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    """A number for each query and distance, `[1, H, T, R]`; model code spreads it over all pairs of tokens."""
    return (relative_states @ module.proj).transpose(1, 2)


# --- Inkling 2 ---------------------------------------------------------------------------------------------------


def _dynamic_convolution(
    module: Any, hidden_states: torch.Tensor, dynamic_input: torch.Tensor, *_: Any, **__: Any
) -> torch.Tensor:
    """A convolution whose weights are, beside those of the channels, each token's own for the channels of a head."""
    taps, heads = module.conv_kernel_size, module.num_heads
    own = module.weight_proj(dynamic_input).float().view(1, -1, heads, 1, taps)
    static = module.static_weight.float()
    x = hidden_states.float()
    y = x
    for tap in range(taps):
        before = delayed(x, tap)
        dynamic = before.view(1, -1, heads, x.shape[2] // heads) * own[..., tap]
        y = y + before * static[tap] + dynamic.reshape(x.shape)
    return (y / math.sqrt(2 * taps + 1)).to(hidden_states.dtype)


def _attention_to_blocks_of_layers(
    module: Any, block_states: torch.Tensor, partial_block_states: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Each token attends to what layers made of it: there is no other token among the keys."""
    states = torch.cat([block_states, partial_block_states.unsqueeze(-2)], dim=-2).float()
    states = module.norm(states)
    queries = module.query.float().view(-1, states.shape[-1])
    weights = torch.softmax((states @ queries.T) * states.shape[-1] ** -0.5, dim=-2)  # [1, T, blocks, queries]
    return (weights.transpose(-1, -2) @ states).unbind(-2)


ATTENTIONS: dict[str, tuple[str, Callable[..., Any]]] = {
    # the module's class -> its method, and what is traced in its place
    "Qwen4ExpTextAttention": ("forward", _attention_to_selected_blocks),
    "MiniMaxM3VLIndexer": ("forward", _selected_blocks),
    "InklingRelativeLogits": ("forward", _bias_by_distance),
    "Inkling2RelativeLogits": ("forward", _bias_by_distance),
    "Inkling2DynamicShortConvolution": ("forward", _dynamic_convolution),
    "Inkling2BlockAttentionResidual": ("forward", _attention_to_blocks_of_layers),
}
