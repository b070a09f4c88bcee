"""Routes the attention of single models whose code can't be traced, for the table of `modules`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from precast.builder.capture.routing import IMPLEMENTATION, current_trace
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


def _all_blocks(module: Any, *_: Any, **__: Any) -> None:
    """An indexer selects blocks of keys for each query: all of them while there are no more than it selects, and so
    nothing need be computed for it; longer sequences are refused."""
    limit = module.topk_blocks * module.block_size
    _refuse_beyond(limit, f"{module.topk_blocks} blocks of {module.block_size}")


ATTENTIONS: dict[str, tuple[str, Callable[..., Any]]] = {
    # the module's class -> its method, and what is traced in its place
    "Qwen4ExpTextAttention": ("forward", _attention_to_selected_blocks),
    "MiniMaxM3VLIndexer": ("forward", _all_blocks),
}
