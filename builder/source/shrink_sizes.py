"""Small sizes for a shrunk config: what each field is for is read off its name, never off the model's type.

Sizes that were equal stay equal, products that made up another size still do, ratios (query to key heads, expansion)
stay, and what is none, zero or one stays that: the structure is the large model's.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import Any

HIDDEN = ("hidden_size", "n_embd", "d_model", "emb_dim", "embedding_dim")
HEADS = (
    "num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads", "decoder_attention_heads",
    "num_decoder_attention_heads",
)  # fmt: skip
"""Of the text's attention; the first that a config has is what head sizes are checked against."""

_MORE_HEADS = (
    "encoder_attention_heads", "num_encoder_attention_heads", "swa_num_attention_heads", "linear_num_heads",
    "linear_num_value_heads", "mamba_n_heads", "mamba_num_heads", "n_mamba_heads", "index_n_heads",
    "indexer_n_heads", "num_query_groups", "conf_num_attention_heads",
)  # fmt: skip
_GROUPS = {
    # heads that others are divided among
    "num_key_value_heads": HEADS, "num_kv_heads": HEADS, "kv_n_heads": HEADS, "num_global_key_value_heads": HEADS,
    "swa_num_key_value_heads": ("swa_num_attention_heads",), "linear_num_key_heads": ("linear_num_value_heads",),
    "mamba_n_groups": ("mamba_n_heads",), "mamba_ngroups": ("n_mamba_heads",),
    "n_groups": ("mamba_num_heads", "num_heads"), "indexer_kv_heads": ("indexer_n_heads",), "o_groups": HEADS,
}  # fmt: skip
_HEAD_SIZES = {
    # the size of a head -> the numbers of heads that it may make up a whole with
    "head_dim": HEADS, "kv_channels": HEADS, "attention_head_dim": HEADS, "dim_head": HEADS, "d_head": HEADS,
    "attention_head_size": HEADS, "d_kv": HEADS, "global_head_dim": HEADS, "v_head_dim": HEADS,
    "qk_nope_head_dim": HEADS, "swa_head_dim": ("swa_num_attention_heads",), "linear_head_dim": ("linear_num_heads",),
    "swa_v_head_dim": ("swa_num_attention_heads",),
    "linear_key_head_dim": ("linear_num_key_heads",), "linear_value_head_dim": ("linear_num_value_heads",),
    "mamba_d_head": ("mamba_n_heads",), "mamba_head_dim": ("mamba_num_heads",), "mamba_headdim": ("n_mamba_heads",),
    "index_head_dim": ("index_n_heads",), "indexer_head_dim": ("indexer_n_heads",),
}  # fmt: skip
_EXPANSIONS = ("mamba_expand", "expand")
_ROTARY_SIZES = ("qk_rope_head_dim", "rotary_dim")
_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
_CHOSEN = (
    "num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k", "top_k_experts",
)  # fmt: skip
_EXPERT_GROUPS = {"n_group": "topk_group", "num_expert_group": "topk_group"}

_CAPPED = {
    # counts and lengths that are no size of a weight that matters, and the most of them that stays
    "original_max_position_embeddings": 64, "keep_window_size": 256, "index_topk": 8, "zero_expert_num": 4,
    "split_ngram_parts": 4, "rel_extent": 10,
    **dict.fromkeys(("sliding_window", "attention_window_size", "local_attention_window_len"), 9),
    **dict.fromkeys(("window_size", "sliding_window_size", "local_attention", "attention_chunk_size"), 10),
    **dict.fromkeys(("index_block_size", "index_topk_blocks"), 4),
    **dict.fromkeys(("chunk_size", "mamba_chunk_size", "lsh_attn_chunk_length", "local_attn_chunk_length"), 16),
    **dict.fromkeys(("state_size", "ssm_state_size", "mamba_d_state"), 8),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"), 2),
    **dict.fromkeys(("floor_scale", "log_scaling_n_floor"), 6),
}  # fmt: skip
_LENGTHS = (
    "max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "context_length", "model_max_length",
    "max_target_positions", "max_source_positions",
)  # fmt: skip
_SHORTEST, _LONGEST = 64, 256
"""Tokens: what is compared must fit, and tables by position stay small."""

_LONGEST_BLOCK = 8
"""Tokens of an entry of compressed attention: short prompts then have several."""

_NOT_SIZES = (
    "kernel", "conv", "patch", "image", "position", "token", "eps", "layers", "window", "chunk", "max_", "tile",
    "crop", "resolution", "sampling", "seconds", "merge", "block_size", "group_size", "per_", "vocab",
)  # fmt: skip
_SIZE_WORDS = (
    "size", "dim", "rank", "width", "channels", "inner", "ffn", "d_ff", "dff", "embd", "features", "d_ssm", "lru",
    "intermediate", "centroids", "feat",
)  # fmt: skip
_MULTIPLES = ("block_multiple_of", "ffn_round_up_to_multiple_of", "make_ngram_vocab_size_divisible_by")
SPECIAL_TOKENS = 121
"""The first id of tokens that stand for images, sounds and the like; text has those below."""


@dataclasses.dataclass(frozen=True)
class Known:
    """Sizes that the parts of a config met so far had, and what they became: they are the same in other parts."""

    hidden: dict[int, int] = dataclasses.field(default_factory=dict)
    heads: dict[int, int] = dataclasses.field(default_factory=dict)

    def get(self, size: int) -> int | None:
        """What this size became, if a part had it."""
        return self.hidden.get(size) or self.heads.get(size)


def shrink_sizes(entries: dict[str, Any], vocab: int, scale: int, known: Known) -> None:
    """Rewrites a config's entries, in place, to small ones.

    `scale` multiplies the sizes of heads and hence the hidden size. `known` is of the config's other parts: a vision
    tower's output and the text's hidden size stay equal.
    """
    old = dict(entries)
    _heads(entries, old)
    hidden, old_hidden = None, _first(old, HIDDEN)
    if old_hidden is not None:
        known.hidden[old_hidden] = hidden = _hidden(old_hidden, 16 * scale * (_first(entries, HEADS) or 4), known)
    _change(entries, old, HIDDEN, lambda size: known.get(size) or _scaled(size, old_hidden, hidden))
    _head_sizes(entries, old, scale, known)
    # With few heads many keys' scores are sums of zeros alone: of equal ones models leave open which are selected.
    _change(entries, old, ("index_n_heads",), lambda heads: min(heads, 16))
    _experts(entries, old)
    if isinstance(old.get("compress_rates"), dict):
        entries["compress_rates"] = {kind: min(rate, _LONGEST_BLOCK) for kind, rate in old["compress_rates"].items()}
    _rest(entries, old, known)
    _vocabulary(entries, old, vocab)
    for key in ("rope_parameters", "rope_scaling"):
        if isinstance(old.get(key), dict):
            entries[key] = _rope(old[key], entries)


def _hidden(old: int, default: int, known: Known) -> int:
    """A small hidden size: what it is elsewhere, or a small multiple of that if it was one."""
    if old in known.hidden:
        return known.hidden[old]
    for other, new in known.hidden.items():
        if old % other == 0 and old // other <= 4:
            return new * (old // other)
    return default


def _first(entries: dict[str, Any], names: tuple[str, ...]) -> int | None:
    return next((entries[name] for name in names if _is_size(entries.get(name))), None)


def _is_size(value: Any) -> bool:
    return type(value) is int and value > 1


def _change(entries: dict[str, Any], old: dict[str, Any], names: Iterable[str], small: Callable[[int], int]) -> None:
    """Makes the sizes of these names small."""
    for name in names:
        if _is_size(old.get(name)):
            entries[name] = small(old[name])


def _scaled(value: int, old_hidden: int | None, hidden: int | None) -> int:
    """`value` in the ratio of the hidden sizes, in eights."""
    if not old_hidden or not hidden:
        return min(value, 32)
    return min(value, max(8, round(value * hidden / old_hidden / 8) * 8))


def _heads(entries: dict[str, Any], old: dict[str, Any]) -> None:
    _change(entries, old, (*HEADS, *_MORE_HEADS), lambda heads: min(heads, 4))
    for name, wholes in _GROUPS.items():
        whole, old_whole = _first(entries, wholes), _first(old, wholes)
        if _is_size(old.get(name)):
            entries[name] = whole if whole and old[name] == old_whole else min(2, whole or 2)
    per_layer = old.get("num_attention_heads_per_layer")
    if isinstance(per_layer, (list, tuple)) and per_layer:
        most = max(per_layer)
        entries["num_attention_heads_per_layer"] = [4 if heads == most else 2 for heads in per_layer]


def _head_sizes(entries: dict[str, Any], old: dict[str, Any], scale: int, known: Known) -> None:
    """Where heads made up the hidden size, or a small multiple or part of it, they still do; others are an eighth."""
    hidden, old_hidden = _first(entries, HIDDEN), _first(old, HIDDEN)
    expansion = next((entries[name] for name in _EXPANSIONS if name in entries), None)
    for name, counts in _HEAD_SIZES.items():
        if not _is_size(old.get(name)):
            continue
        heads, old_heads = _first(entries, counts), _first(old, counts)
        size = max(8, old[name] // 8 // 2 * 2) * scale
        if heads and old_heads and hidden and old_hidden:
            for factor in (1, 2, 0.5, *([expansion] if expansion else [])):
                if old_heads * old[name] == factor * old_hidden:
                    size = int(hidden * factor) // heads
                    break
        entries[name] = size
    _keep_equal(entries, old)
    for name in _ROTARY_SIZES:
        if _is_size(old.get(name)):
            entries[name] = _rotary_size(entries, old, name, scale)
    nope, rope, both = (entries.get(name) for name in ("qk_nope_head_dim", "qk_rope_head_dim", "qk_head_dim"))
    if _is_size(both) and _is_size(nope) and _is_size(rope):
        entries["qk_head_dim"] = nope + rope  # type: ignore[operator]
    if _is_size(old.get("head_dim")) and old.get("head_dim") == old.get("qk_rope_head_dim"):
        entries["head_dim"] = entries["qk_rope_head_dim"]
    whole = old.get("mamba_d_ssm")
    if _is_size(whole) and whole == (old.get("mamba_n_heads") or 0) * (old.get("mamba_d_head") or 0):
        entries["mamba_d_ssm"] = entries["mamba_n_heads"] * entries["mamba_d_head"]
    for name in _HEAD_SIZES:
        if _is_size(old.get(name)):
            known.heads.setdefault(old[name], entries[name])


def _keep_equal(entries: dict[str, Any], old: dict[str, Any]) -> None:
    """Sizes of one head's parts that were equal stay equal; an indexer's follow the attention's."""
    for first, second in (
        ("head_dim", "swa_head_dim"), ("head_dim", "indexer_head_dim"), ("qk_nope_head_dim", "v_head_dim"),
        ("v_head_dim", "swa_v_head_dim"),
    ):  # fmt: skip
        if _is_size(old.get(first)) and old.get(first) == old.get(second):
            entries[second] = entries[first]


def _rotary_size(entries: dict[str, Any], old: dict[str, Any], name: str, scale: int) -> int:
    """An even size in the ratio to the head's that it had."""
    hidden, heads = _first(entries, HIDDEN), _first(entries, HEADS)
    old_hidden, old_heads = _first(old, HIDDEN), _first(old, HEADS)
    if name == "qk_rope_head_dim" or not (hidden and heads and old_hidden and old_heads):
        return min(old[name], 8 * scale)
    size = entries.get("head_dim") or hidden // heads
    old_size = old.get("head_dim") or old_hidden // old_heads
    return max(2, round(old[name] * size / old_size / 2) * 2)


def _experts(entries: dict[str, Any], old: dict[str, Any]) -> None:
    """Eight experts in at most four groups; as many are chosen as the groups that are chosen hold, at most three."""
    most = 3
    for name in _EXPERTS:
        if _is_size(old.get(name)):
            entries[name] = min(old[name], 8)
            most = min(most, entries[name] - (old[name] > 1))
    for name, chosen in _EXPERT_GROUPS.items():
        if _is_size(old.get(name)):
            _change(entries, old, (name,), lambda groups: min(groups, 4))
            _change(entries, old, (chosen,), lambda groups: min(groups, 2))
    _change(entries, old, _CHOSEN, lambda chosen: min(chosen, most))


def _rest(entries: dict[str, Any], old: dict[str, Any], known: Known) -> None:
    """Caps, and every other size in the ratio of the hidden sizes."""
    hidden, old_hidden = _first(entries, HIDDEN), _first(old, HIDDEN)
    done = {*HIDDEN, *HEADS, *_MORE_HEADS, *_GROUPS, *_HEAD_SIZES, *_ROTARY_SIZES, *_EXPERTS, *_CHOSEN}
    done |= {*_EXPERT_GROUPS, *_EXPERT_GROUPS.values(), *_CAPPED, *_LENGTHS, "qk_head_dim", "mamba_d_ssm"}
    for name, cap in _CAPPED.items():
        _change(entries, old, (name,), lambda count, cap=cap: min(count, cap))  # type: ignore[misc]
    _change(entries, old, _LENGTHS, lambda length: min(max(length, _SHORTEST), _LONGEST))
    _change(entries, old, _MULTIPLES, lambda size: min(size, 8))
    for name, value in old.items():
        if name in done or not any(word in name for word in _SIZE_WORDS) or any(word in name for word in _NOT_SIZES):
            continue
        if _is_size(value) and value > 8:
            same = known.get(value) if value > 64 else None
            entries[name] = same or _scaled(value, old_hidden, hidden)
        elif isinstance(value, (list, tuple)) and value and all(_is_size(item) and item > 8 for item in value):
            entries[name] = type(value)(_scaled(item, old_hidden, hidden) for item in value)


def _vocabulary(entries: dict[str, Any], old: dict[str, Any], vocab: int) -> None:
    """A vocabulary of `vocab`; padding, begin and end are its first ids, tokens for other input its last."""
    for name, value in old.items():
        if "vocab" in name and _is_size(value):
            entries[name] = vocab if value == old.get("vocab_size") else min(value, vocab)
    begins = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    special = SPECIAL_TOKENS
    for name in sorted(old):
        value = old[name]
        if not (name.endswith(("token_id", "token_index", "_token_ids")) or name == "suppress_tokens") or value is None:
            continue
        if isinstance(value, (list, tuple)):
            entries[name] = [begins[name]] if name in begins else None
        elif type(value) is int and name in begins:
            entries[name] = begins[name]
        elif type(value) is int and value >= 0:
            entries[name], special = min(special, vocab - 1), special + 1


def _rope(rope: dict[str, Any], entries: dict[str, Any]) -> dict[str, Any]:
    """The parameters with lists by frequency cut to the small head's, and lengths capped."""
    found = dict(rope)
    for name, value in rope.items():
        if isinstance(value, dict):
            found[name] = _rope(value, entries)
        elif name == "original_max_position_embeddings" and _is_size(value):
            found[name] = min(value, 64)
        elif name in ("short_factor", "long_factor"):
            count = _frequencies(rope, entries)
            found[name] = [value[i * len(value) // count] for i in range(count)]
        elif name == "mrope_section":
            count = _frequencies(rope, entries)
            rest = [max(1, item * count // sum(value)) for item in value[1:]]
            found[name] = [count - sum(rest), *rest]
    return found


def _frequencies(rope: dict[str, Any], entries: dict[str, Any]) -> int:
    """How many frequencies the small rotary embedding has."""
    hidden, heads = _first(entries, HIDDEN) or 64, _first(entries, HEADS) or 4
    size = entries.get("qk_rope_head_dim") or entries.get("head_dim") or hidden // heads
    factor = rope.get("partial_rotary_factor") or entries.get("partial_rotary_factor") or 1.0
    return max(1, math.floor(size * factor) // 2)
