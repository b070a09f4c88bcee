"""Routes the attention of single models whose code can't be traced, for the table of `modules`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from precast.builder.capture.routing import IMPLEMENTATION, current_trace
from precast.ir.errors import BuildError

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
    if current_trace().max_seq_len > limit:
        raise BuildError(
            "feature-unsupported",
            f"the model selects {indexer.block_topk} blocks of {indexer.compress_ratio} keys for each query, which are "
            f"not all keys beyond {limit} tokens: precast has no attention to selected blocks",
            fix=f"build with max_seq_len of at most {limit}",
        )
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


ATTENTIONS: dict[str, tuple[str, Callable[..., Any]]] = {
    # the module's class -> its method, and what is traced in its place
    "Qwen4ExpTextAttention": ("forward", _attention_to_selected_blocks),
}
