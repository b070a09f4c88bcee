"""Routes embeddings of n-grams, whose code keeps its own token history, for the table of `modules`: Qwen4-Exp's."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

import torch

from precast.builder.capture.routing import current_trace
from precast.builder.capture.shifts import ids_before
from precast.ir.errors import BuildError

ops = torch.ops.precast


def _rows_of_ngrams(module: Any, input_ids: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    """The rows of n-grams that end at each token: hashes of it and the tokens before it, up to the last that ends a
    text, which stands before a sequence's first token too."""
    scope, end = sys.modules[type(module).__module__], module.eos_token_id
    if end is None:
        message = "the config has embeddings of n-grams (ple_layer_ids) and no eos_token_id, before which n-grams end"
        raise BuildError("config-invalid", message, fix="add eos_token_id to the config")
    before = _tokens_before(input_ids - end, module.context_len)
    tokens = [input_ids, *((each + end).to(torch.int64) for each in before)]
    factors = scope._build_layer_multipliers(
        module.unigram_vocab_size, module.ngram_size, module.ple_layer_index, module.seed
    )
    sizes, firsts = (
        torch.tensor(numbers).view(-1, module.heads_per_ngram)
        for numbers in (module.head_vocab_sizes, module.head_offsets)
    )
    mixed = tokens[0] * factors[0]
    found = []
    for place in range(1, module.ngram_size):
        mixed = torch.bitwise_xor(mixed, tokens[place] * factors[place])
        found.append(torch.remainder(mixed[..., None], sizes[place - 1]) + firsts[place - 1])
    rows = torch.cat(found, dim=-1).clamp(0, module.total_vocab_size - 1)  # they are; now a graph says so
    return module.ngram_embedding(rows.flatten(1)).view(1, input_ids.shape[1], -1)


def _tokens_before(ids: torch.Tensor, count: int) -> list[torch.Tensor]:
    """Of ids [1, T] that are 0 where a text ends, those of the tokens before each, as far as the text goes; then 0."""
    found = ids_before(ids, count)
    kept = [found[0]]
    for each in found[1:]:
        kept.append(torch.where(kept[-1] == 0, torch.zeros_like(each), each))
    return kept


def _embedding_of_a_layer(
    module: Any, hidden_states: torch.Tensor, input_ids: torch.Tensor, *_: Any, **__: Any
) -> torch.Tensor:
    """What n-grams say, as far as it fits each stream, and a convolution of it whose taps are some tokens apart."""
    streams = module.hc_count, module.hidden_size
    embeddings = module.ple_embedding(input_ids, None)
    key = module.norm_key(module.key_proj(embeddings)).unflatten(-1, streams)
    query = module.norm_query(hidden_states).unflatten(-1, streams)
    fit = (key * query).sum(dim=-1, keepdim=True) / math.sqrt(module.hidden_size)
    sign = (fit > 0).to(fit.dtype) - (fit < 0).to(fit.dtype)
    gate = torch.sigmoid(fit.abs().clamp_min(1e-6).sqrt() * sign)
    value = (gate * module.value_proj(embeddings).unsqueeze(-2)).flatten(-2)
    conv = module.conv1d
    apart, weight = conv.dilation[0], conv.weight.transpose(1, 2)  # [C, K, 1]
    taps = torch.cat([weight, torch.zeros_like(weight).expand(-1, -1, apart - 1)], dim=-1).flatten(1)
    taps = taps[:, : taps.shape[1] - apart + 1]
    x = module.norm_conv(value)
    return value + ops.causal_conv(x, taps, None, current_trace().cu_seqlens, activation="silu")


NGRAMS: dict[str, tuple[str, Callable[..., Any]]] = {
    # the module's class -> its method, and what is traced in its place
    "Qwen4ExpTextNGramEmbedding": ("forward", _rows_of_ngrams),
    "Qwen4ExpTextPLELayer": ("forward", _embedding_of_a_layer),
}
