"""Routes what single modules compute to our ops, by the name of the module's class.

Some models write a recurrence as a Python loop over tokens or blocks, or build an attention's mask from the tokens'
values. Such code can't be traced for any number of tokens, and says nothing of sequences: no mark names what it
computes, and there is no graph in which to find it. So this table says it, class by class: which method is replaced
while the model is traced, and by what. Each entry was compared with the code that it stands for; a class of another
name is traced as it is.

Arguments that steer caching are taken and not looked at: every sequence begins without a state.
`tests/builder/capture/test_modules.py` compares each entry's results with those of transformers.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn.functional as F

from precast.builder.capture.attentions import ATTENTIONS
from precast.builder.capture.byte_patches import BYTE_PATCHES
from precast.builder.capture.mixtures import MIXTURES
from precast.builder.capture.ngrams import NGRAMS
from precast.builder.capture.routing import EXTRA_ELEMENTS, current_trace
from precast.builder.capture.shifts import delayed
from precast.builder.replaced import replaced
from precast.ir.errors import BuildError

ops = torch.ops.precast


def routed_modules(model: torch.nn.Module) -> AbstractContextManager[None]:
    """Puts our functions in the place of the methods that the table names, in the classes of the model's modules."""
    kinds = {type(module) for module in model.modules()}
    known = [kind for kind in kinds if kind.__name__ in _ROUTES and kind.__module__.startswith("transformers.")]
    return replaced(*((kind, *_ROUTES[kind.__name__]) for kind in known))


# --- MiniMax -----------------------------------------------------------------------------------------------------


def _lightning_attention(module: Any, hidden_states: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, None]:
    """Linear attention with one decay for each head; its loop goes over blocks of tokens."""
    tokens = hidden_states.shape[1]
    heads, size = module.num_attention_heads, module.head_dim
    qkv = module.act_fn(module.qkv_proj(hidden_states)).reshape(1, tokens, heads, 3 * size)
    query, key, value = torch.split(qkv, size, dim=3)
    decay = -module.slope_rate.reshape(heads)
    y = ops.linear_attention(query, key, value, decay, current_trace().cu_seqlens, scale=1.0)
    y = module.norm(y.reshape(1, tokens, heads * size))
    return module.out_proj(F.sigmoid(module.output_gate(hidden_states)) * y), None


# --- Recurrent Gemma ---------------------------------------------------------------------------------------------


def _real_gated_recurrence(
    module: Any, hidden_states: torch.Tensor, recurrent_gate: torch.Tensor, *_: Any, **__: Any
) -> tuple[torch.Tensor, None]:
    """The loop over tokens of the RG-LRU; `reset` is where a sequence begins."""
    return ops.linear_recurrence(hidden_states, recurrent_gate, current_trace().cu_seqlens), None


# --- ZAYA --------------------------------------------------------------------------------------------------------


def _compressed_convolutional_attention(
    module: Any, hidden_states: torch.Tensor, *_: Any, **__: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries and keys go through two convolutions, one after the other; half of each value is the token before's.

    The second convolution mixes the channels of a head: a product for each tap. What it sees before a sequence's first
    token is what the first one makes of zeros, its bias.
    """
    tokens = hidden_states.shape[1]
    heads, size, groups = module.num_attention_heads, module.head_dim, module.num_key_value_groups
    query, key = module.q_proj(hidden_states), module.k_proj(hidden_states)
    direct = query.view(1, tokens, heads, size)
    copies = key.view(1, tokens, -1, 1, size).expand(1, tokens, -1, groups, size).reshape(1, tokens, heads, size)
    direct = (direct + copies) * 0.5
    mean = direct.view(1, tokens, -1, groups, size).mean(dim=-2)
    mixed = _two_convolutions(module, torch.cat([query, key], dim=-1)).view(1, tokens, -1, size)
    before = delayed(F.linear(hidden_states, module.v_proj_delayed.weight), 1)
    if module.v_proj_delayed.bias is not None:
        before = before + module.v_proj_delayed.bias
    value = torch.cat([module.v_proj_current(hidden_states), before], dim=-1).view(1, tokens, -1, size)
    return mixed[:, :, :heads] + direct, mixed[:, :, heads:] + mean, value


def _two_convolutions(module: Any, x: torch.Tensor) -> torch.Tensor:
    """`x` [1, T, C] -> [1, T, C]."""
    first, second = module.conv_qk_depthwise, module.conv_qk_grouped
    x = ops.causal_conv(x, first.weight.squeeze(1), None, current_trace().cu_seqlens, activation="none")
    taps, groups = second.kernel_size[0], second.groups
    weight = second.weight.view(groups, -1, second.weight.shape[1], taps)
    y = second.bias
    for tap in range(taps):
        own = (delayed(x, taps - 1 - tap) + first.bias).reshape(x.shape[1], groups, 1, -1)
        y = y + torch.matmul(own, weight[..., tap].transpose(1, 2)).reshape(x.shape)
    return y


# --- Doge --------------------------------------------------------------------------------------------------------


def _dynamic_mask_attention(
    module: Any, hidden_states: torch.Tensor, position_embeddings: tuple[torch.Tensor, torch.Tensor],
    attention_mask: torch.Tensor | None = None, **_: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """Each key has a bias of its own, made from its value: one more element of queries and keys.

    Beyond `keep_window_size` tokens, only as many keys of the highest biases are seen; that is refused.
    """
    trace = current_trace()
    if trace.max_seq_len > module.keep_window_size:
        raise BuildError(
            "feature-unsupported",
            f"the model chooses keys by their bias beyond {module.keep_window_size} tokens",
            fix=f"build with max_seq_len of at most {module.keep_window_size}",
        )
    file = sys.modules[type(module).__module__]
    shape = (*hidden_states.shape[:-1], -1, module.head_dim)
    query = module.q_norm(module.q_proj(hidden_states).view(shape)).transpose(1, 2)
    key = module.k_norm(module.k_proj(hidden_states).view(shape)).transpose(1, 2)
    query, key = file.apply_rotary_pos_emb(query, key, *position_embeddings)
    flat = module.v_proj(hidden_states)
    bias = torch.exp(module.A * F.softplus(module.dt_proj(flat)))  # [1, T, K]
    query, key = (x.transpose(1, 2) for x in (query, key))
    ones = torch.full_like(query[..., :EXTRA_ELEMENTS], 1 / module.scaling)
    zeros = torch.zeros_like(key[..., : EXTRA_ELEMENTS - 1])
    y = ops.attention(
        torch.cat([query, ones], dim=-1), torch.cat([key, bias[..., None], zeros], dim=-1), flat.view(shape), None,
        trace.cu_seqlens, scale=module.scaling, window=None, soft_cap=None,
    )  # fmt: skip
    return module.o_proj(y.reshape(*hidden_states.shape[:-1], -1)), None


# --- RWKV --------------------------------------------------------------------------------------------------------


def _rwkv_attention(module: Any, hidden: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, None]:
    """Its loop goes over tokens."""
    before = delayed(hidden, 1)
    receptance, key, value = (
        project(hidden * mix + before * (1 - mix))
        for project, mix in (
            (module.receptance, module.time_mix_receptance),
            (module.key, module.time_mix_key),
            (module.value, module.time_mix_value),
        )
    )
    decay = -torch.exp(module.time_decay.float())
    y = torch.sigmoid(receptance) * ops.wkv(key, value, decay, module.time_first, current_trace().cu_seqlens)
    return module.output(_rescaled(module, y)), None


def _rwkv_feed_forward(module: Any, hidden: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, None]:
    before = delayed(hidden, 1)
    key = hidden * module.time_mix_key + before * (1 - module.time_mix_key)
    receptance = hidden * module.time_mix_receptance + before * (1 - module.time_mix_receptance)
    key = torch.square(torch.relu(module.key(key)))
    return torch.sigmoid(module.receptance(receptance)) * module.value(_rescaled(module, key)), None


def _rescaled(module: Any, x: torch.Tensor) -> torch.Tensor:
    """`x`, divided by what its weight would be divided by."""
    every = module.config.rescale_every
    halvings = module.layer_id // every if every > 0 else 0
    return x / 2**halvings if halvings else x


def _rwkv_rescale(module: Any) -> None:
    """Model code divides weights, in place, before its first step; see `_rescaled`."""
    module.layers_are_rescaled = True


# --- xLSTM -------------------------------------------------------------------------------------------------------


def _exponential_memory(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, igate: torch.Tensor,
    fgate: torch.Tensor, *_: Any, **__: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """Linear attention whose keys are gated by exponentials, over the same with values of 1.

    Model code takes the largest exponent so far, 0 before the first token, out of both, and adds `eps` to what it
    divides by. Gates that are capped allow to leave both as they are; then `eps` is multiplied with that exponential.
    """
    cap = module.config.gate_soft_cap
    if cap is None or not 0 < cap <= _LARGEST_GATE:
        expected = f"expected a number up to {_LARGEST_GATE}"
        raise BuildError("feature-unsupported", f"the config's gate_soft_cap is {cap!r}, {expected}")
    q, k, v = (x.transpose(1, 2).float() for x in (query, key, value))
    gain, decay = igate.transpose(1, 2).float().exp(), -F.softplus(-fgate.transpose(1, 2).float())
    cu_seqlens, size = current_trace().cu_seqlens, q.shape[-1] ** -0.5
    v = torch.cat([v, torch.ones_like(v[..., :1])], dim=-1)
    y = ops.linear_attention(q, k * gain[..., None], v, decay, cu_seqlens, scale=float(size))
    kept = decay.exp()
    is_first = 1 - delayed(torch.ones_like(gain), 1)
    top = ops.linear_recurrence(torch.maximum(gain, kept * is_first), kept, cu_seqlens, kind="max")
    lower = y[..., -1:].abs().clamp(min=1.0) + module.config.eps * top[..., None]
    return (y[..., :-1] / lower).to(value.dtype).transpose(1, 2), None


_LARGEST_GATE = 30.0
"""Exponentials of it, and sums of them, are far from the largest float32."""


_ROUTES: dict[str, tuple[str, Callable[..., Any]]] = {
    # the module's class -> its method, and what is traced in its place
    "MiniMaxLightningAttention": ("forward", _lightning_attention),
    "RecurrentGemmaRglru": ("_rnn_scan", _real_gated_recurrence),
    "ZayaCCAProjection": ("forward", _compressed_convolutional_attention),
    "DogeAttention": ("forward", _dynamic_mask_attention),
    "RwkvModel": ("_rescale_layers", _rwkv_rescale),
    "RwkvSelfAttention": ("forward", _rwkv_attention),
    "RwkvFeedForward": ("forward", _rwkv_feed_forward),
    "xLSTMBackend": ("forward", _exponential_memory),
    **ATTENTIONS,
    **BYTE_PATCHES,
    **MIXTURES,
    **NGRAMS,
}
