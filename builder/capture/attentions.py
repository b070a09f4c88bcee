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

ops = torch.ops.precast


# --- Qwen4-Exp ---------------------------------------------------------------------------------------------------


def _attention_to_selected_blocks(
    module: Any, hidden_states: torch.Tensor, position_embeddings: tuple[torch.Tensor, torch.Tensor],
    attention_mask: torch.Tensor, past_key_values: Any = None, **kwargs: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """An indexer, a loop over queries, selects whole blocks of keys; those after the last are always seen."""
    shape = (*hidden_states.shape[:-1], -1, module.head_dim)
    query, gate = module.q_proj(hidden_states).view(*shape[:-1], 2 * module.head_dim).chunk(2, dim=-1)
    query = module.q_norm(query).transpose(1, 2)
    key = module.k_norm(module.k_proj(hidden_states).view(shape)).transpose(1, 2)
    value = module.v_proj(hidden_states).view(shape).transpose(1, 2)
    query, key = sys.modules[type(module).__module__].apply_rotary_pos_emb(query, key, *position_embeddings)
    y, _ = ALL_ATTENTION_FUNCTIONS[IMPLEMENTATION](
        module, query, key, value, attention_mask, scaling=module.scaling,
        block_indices=_selected_whole_blocks(module.indexer, hidden_states, *position_embeddings), **kwargs,
    )  # fmt: skip
    y = y.reshape(hidden_states.shape[0], hidden_states.shape[1], -1)
    return module.o_proj(y * torch.sigmoid(gate.reshape(y.shape))), None


def _selected_whole_blocks(
    indexer: Any, hidden_states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> torch.Tensor | None:
    """The numbers of the blocks that each query selects [1, T, 1, count], by the means of their keys. None: no sequence
    has more whole blocks than are selected, and attention is full."""
    trace, size, rate = current_trace(), indexer.index_head_dim, indexer.compress_ratio
    if trace.max_seq_len // rate <= indexer.block_topk:
        return None
    if indexer.block_topk < 1:
        message = (
            f"indexer_budget is {indexer.token_budget}, expected at least a block of {rate} (indexer_compress_ratio)"
        )
        raise BuildError(
            "config-invalid", message, fix="correct indexer_budget or indexer_compress_ratio in the config"
        )
    rotate = sys.modules[type(indexer).__module__].apply_rotary_pos_emb
    q, k = indexer.index_qk_proj(hidden_states).split([indexer.index_n_heads * size, size], dim=-1)
    q = indexer.q_layernorm(q.reshape(1, hidden_states.shape[1], -1, size))
    q = rotate(q, cos=cos, sin=sin, unsqueeze_dim=2)
    mean, cos, sin = _means_of_blocks(k, cos, sin, rate)
    means = rotate(indexer.k_layernorm(mean)[:, :, None], cos=cos, sin=sin, unsqueeze_dim=2)[:, :, 0]
    weights = torch.ones_like(q[..., 0], dtype=torch.float32)
    selected = ops.select_entries(
        q, means, weights, trace.cu_seqlens, scale=size**-0.5, rate=rate, count=indexer.block_topk
    )
    return selected[:, :, None]


def _means_of_blocks(
    k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, rate: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The mean of a block's keys [1, T, D], at its last token, with what turns the first token.

    One convolution has both: its taps are the mean's for keys, and for `cos` and `sin` that of the first token.
    """
    if rate == 1:
        return k, cos, sin
    half, dtype = cos.shape[-1] // 2, k.dtype  # the other half is the same again
    x = torch.cat([k, cos[..., :half], sin[..., :half]], dim=-1).float()
    taps = torch.cat([torch.full((k.shape[-1], rate), 1 / rate), torch.eye(1, rate).expand(2 * half, rate)])
    x = ops.causal_conv(x, taps, None, current_trace().cu_seqlens, activation="none").to(dtype)
    mean, cos, sin = x.split([k.shape[-1], half, half], dim=-1)
    return mean, torch.cat([cos, cos], dim=-1), torch.cat([sin, sin], dim=-1)


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
    return ops.select_blocks(
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


# --- DeepSeek-V4 -------------------------------------------------------------------------------------------------


def _attention_over_entries(
    module: Any, hidden_states: torch.Tensor, position_embeddings: dict[str, tuple[torch.Tensor, torch.Tensor]],
    position_ids: torch.Tensor, *_: Any, **__: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """One key for all heads, which is its own value, over a window; and in most layers over entries besides, which
    blocks of tokens are compressed to. Both share a softmax and the sinks.

    Model code keeps entries as they come, and a mask says which of them each query sees.
    """
    rotate = sys.modules[type(module).__module__].apply_rotary_pos_emb
    trace, shape = current_trace(), (1, hidden_states.shape[1], -1, module.head_dim)
    cos, sin = position_embeddings[module.rope_layer_type]
    residual = module.q_a_norm(module.q_a_proj(hidden_states))
    q = rotate(module.q_b_norm(module.q_b_proj(residual).view(shape)), cos, sin, unsqueeze_dim=2)
    kv = rotate(module.kv_norm(module.kv_proj(hidden_states)).view(shape), cos, sin, unsqueeze_dim=2)
    window = module.sliding_window if module.sliding_window < trace.max_seq_len else None
    found = [ops.entry_attention(q, kv[:, :, 0], None, trace.cu_seqlens, scale=module.scaling, rate=1, window=window)]
    compressor = module.compressor
    if compressor is not None and compressor.compress_rate <= trace.max_seq_len:
        entries = _compressed(compressor, hidden_states, position_ids)
        selected = _selected_entries(compressor, hidden_states, residual, position_ids, cos, sin)
        found.append(
            ops.entry_attention(
                q, entries, selected, trace.cu_seqlens, scale=module.scaling, rate=compressor.compress_rate
            )
        )
    y = rotate(_joined(found, module.sinks).to(q.dtype), cos, -sin, unsqueeze_dim=2)
    y = module.o_a_proj(y.reshape(*hidden_states.shape[:-1], module.config.o_groups, -1))
    return module.o_b_proj(y.flatten(2)), None


def _hyper_connection(module: Any, streams: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Weights by which streams are mixed, made of the streams of a token; model code writes each iteration out."""
    count = module.hc_mult
    flat = module.input_norm(streams.flatten(2).float())
    weights = torch.nn.functional.linear(flat, module.fn.float()).split([count, count, count * count], dim=-1)
    pre, post, comb = (
        weight * scale + base
        for weight, scale, base in zip(
            weights, module.scale.unbind(0), module.base.split([count, count, count * count]), strict=True
        )
    )
    comb = torch.softmax(comb.unflatten(-1, (count, count)), dim=-1) + module.hc_eps
    comb = ops.sinkhorn(comb.flatten(-2), size=count, iterations=module.hc_sinkhorn_iters, eps=module.hc_eps)
    collapsed = ((torch.sigmoid(pre) + module.hc_eps).unsqueeze(-1) * streams).sum(dim=2)
    return 2 * torch.sigmoid(post), comb.unflatten(-1, (count, count)), collapsed.to(streams.dtype)


def _compressed(module: Any, hidden_states: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
    """A compressor's entries [1, T, D], each at the last token of its block, turned as at the first one. What stands at
    other tokens is never read."""
    rotate = sys.modules[type(module).__module__].apply_rotary_pos_emb
    kv, gate, bias = module.kv_proj(hidden_states), module.gate_proj(hidden_states), module.position_bias
    size, rate = module.head_dim, module.compress_rate
    if kv.shape[-1] != size:
        bias = torch.cat((bias[:, :size], bias[:, size:]))
    entries = module.kv_norm(ops.compress(kv, gate, bias, current_trace().cu_seqlens))
    cos, sin = module.rotary_emb(entries, position_ids=position_ids - (rate - 1), layer_type=module.rope_layer_type)
    return rotate(entries[:, :, None], cos, sin, unsqueeze_dim=2)[:, :, 0]


def _selected_entries(
    compressor: Any, hidden_states: torch.Tensor, residual: torch.Tensor, position_ids: torch.Tensor,
    cos: torch.Tensor, sin: torch.Tensor,
) -> torch.Tensor | None:  # fmt: skip
    """The entries that each query selects [1, T, M], by entries of their own; None for all, also where no sequence has
    more of them than are selected."""
    indexer = getattr(compressor, "indexer", None)
    trace, rate = current_trace(), compressor.compress_rate
    if indexer is None or trace.max_seq_len // rate <= indexer.index_topk:
        return None
    rotate, scorer = sys.modules[type(indexer).__module__].apply_rotary_pos_emb, indexer.scorer
    q = indexer.q_b_proj(residual).view(1, hidden_states.shape[1], -1, indexer.head_dim)
    return ops.select_entries(
        rotate(q, cos, sin, unsqueeze_dim=2), _compressed(indexer, hidden_states, position_ids),
        scorer.weights_proj(hidden_states).float() * scorer.weights_scaling, trace.cu_seqlens,
        scale=scorer.softmax_scale, rate=rate, count=indexer.index_topk,
    )  # fmt: skip


def _joined(found: list[tuple[torch.Tensor, torch.Tensor]], sinks: torch.Tensor) -> torch.Tensor:
    """What attention finds among all entries and a sink: its share of each part's, exp(lse) of all that weigh.

    exp(a) / (exp(a) + exp(b) + exp(s)) = sigmoid(a - s - softplus(b - s)), which takes -inf for parts without entries.
    """
    sinks = sinks.float()
    if len(found) == 1:
        y, lse = found[0]
        return y * torch.sigmoid(lse - sinks)[..., None]
    (y, lse), (other, weight) = ((y, lse - sinks) for y, lse in found)
    share, rest = (torch.sigmoid(a - torch.nn.functional.softplus(b)) for a, b in ((lse, weight), (weight, lse)))
    return y * share[..., None] + other * rest[..., None]


ATTENTIONS: dict[str, tuple[str, Callable[..., Any]]] = {
    # the module's class -> its method, and what is traced in its place
    "Qwen4ExpTextAttention": ("forward", _attention_to_selected_blocks),
    "DeepseekV4Attention": ("forward", _attention_over_entries),
    "DeepseekV4HyperConnection": ("forward", _hyper_connection),
    "MiniMaxM3VLIndexer": ("forward", _selected_blocks),
    "InklingRelativeLogits": ("forward", _bias_by_distance),
    "Inkling2RelativeLogits": ("forward", _bias_by_distance),
    "Inkling2DynamicShortConvolution": ("forward", _dynamic_convolution),
    "Inkling2BlockAttentionResidual": ("forward", _attention_to_blocks_of_layers),
}
