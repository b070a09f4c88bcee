"""Steps as a CUDA graph has them: always so many tokens and sequences, of which a step uses some.

What is not used is as bad as it may be: padding tokens are NaN, unused sequences have lengths that mean nothing, and so
have states that must not be read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from op_samples.draw import Draw, Sample
from op_samples.latent_attention import paged_latent_sample
from op_samples.sequences import spoiled
from op_samples.sparse_attention import chosen_keys, paged_select_sample

TOKENS, SEQUENCES, PAGES = 14, 6, 90
STEPS: Mapping[str, Sequence[tuple[int, int, int]]] = {
    # (tokens, context with them, slot) of the sequences in use
    "mixed": ((5, 5, 3), (1, 9, 0), (0, 4, 5), (4, 20, 6), (2, 2, -1)),
    "decode": ((1, 7, 1), (1, 1, 2), (1, 30, 4), (1, 12, 3)),
    "full": ((2, 8, 0), (3, 3, 1), (1, 2, 2), (1, 1, 3), (6, 40, 4), (1, 5, 5)),
    "nothing": (),
}


def stateful_step(name: str, draw: Draw, step: str, **sizes: int) -> Sample:
    """A call of `precast.stateful_<name>` for a step of STEPS."""
    sequences = STEPS[step]
    made = _TOKENS[name](draw, **sizes)
    end = sum(tokens for tokens, _, _ in sequences)
    for x in made.values():
        if isinstance(x, torch.Tensor) and x.dim() > 2 and x.shape[:2] == (1, TOKENS):
            spoiled(x, end)
    kept = draw.dtype if name == "causal_conv" else torch.float32
    state = draw.normal(SEQUENCES + 2, *made.pop("state_shape"), dtype=kept)
    if name == "wkv":
        state[:, 1] = state[:, 1].abs() + 0.5  # a sum of positive numbers
    going = [slot for tokens, context, slot in sequences if slot >= 0 and 0 < tokens < context]
    state[[slot for slot in range(len(state)) if slot not in going]] = float("nan")
    unused = SEQUENCES - len(sequences)
    held = {"state": state, "slots": draw.of([slot for *_, slot in sequences] + [-1] * unused, torch.int32)}
    return made | held | _lengths(draw, sequences)


def sparse_steps(draw: Draw, step: str, **more: Any) -> tuple[Sample, Sample]:
    """Calls of `precast.paged_select_keys` and `precast.paged_sparse_latent_attention` for a step of STEPS."""
    sequences = [(tokens, context) for tokens, context, _ in STEPS[step]]
    attended = latent_step(draw, step, **({"heads": 3, "nope": 12, "rope": 8, "latent": 16, "value": 14} | more))
    first = {name: attended.pop(name) for name in ("q", "cache", "weight")}
    padding = TOKENS - sum(tokens for tokens, _ in sequences)
    selected = paged_select_sample(draw, sequences, heads=5, size=12, count=4, padding=padding)
    metadata = {name: x for name, x in attended.items() if name in selected and name != "scale"}
    # The pages are those of the latents; what stands in their places was written for these, too.
    cache = torch.where(first["cache"][..., :12].isnan(), float("nan"), draw.normal(*first["cache"].shape[:2], 12))
    given = {"selected": chosen_keys(draw, sequences, 4, padding), "sinks": draw.normal(first["q"].shape[2])}
    return selected | metadata | {"cache": cache}, {**first, **given, **attended}


def latent_step(draw: Draw, step: str, **more: Any) -> Sample:
    """A call of `precast.paged_latent_attention` for a step of STEPS, with PAGES entries of page lists."""
    sequences = [(tokens, context) for tokens, context, _ in STEPS[step]]
    end = sum(tokens for tokens, _ in sequences)
    made = paged_latent_sample(draw, sequences, padding=TOKENS - end, **more)
    unused = SEQUENCES - len(sequences)
    listed = made["page_indices"]
    # Entries that no list has name a page that isn't there.
    spare = listed[-1:].expand(PAGES - len(listed))
    own = {
        "page_indices": torch.cat((listed, spare)),
        "page_indptr": torch.cat((made["page_indptr"], made["page_indptr"][-1:].expand(unused))),
        "page_start": torch.cat((made["page_start"], draw.of([9, -3, 1 << 30, 0, 1, 2][:unused], torch.int32))),
    }
    return made | own | _lengths(draw, STEPS[step])


def _lengths(draw: Draw, sequences: Sequence[tuple[int, int, int]]) -> Sample:
    ends = [sum(tokens for tokens, *_ in sequences[:i]) for i in range(len(sequences) + 1)]
    unused = SEQUENCES - len(sequences)
    lengths = [context for _, context, _ in sequences] + [-12345, 0, 1 << 30, 7, -1, 1][:unused]
    return {
        "cu_seqlens": draw.of(ends + ends[-1:] * unused, torch.int32),
        "kv_lens": draw.of(lengths, torch.int32),
    }


def _causal_conv(draw: Draw, *, channels: int, taps: int) -> Sample:
    return {
        "x": draw.normal(1, TOKENS, 3 * channels)[..., channels : 2 * channels],
        "weight": draw.normal(channels, taps),
        "bias": draw.normal(channels),
        "state_shape": (channels, taps - 1),
        "activation": "silu",
    }


def _state_space_scan(draw: Draw, *, heads: int = 4, groups: int = 2, size: int, width: int) -> Sample:
    return {
        "x": draw.normal(1, TOKENS, heads, size),
        "dt": draw.normal(1, TOKENS, heads),
        "a": -draw.uniform(heads, low=0.1, high=2.0, dtype=torch.float32),
        "b": draw.normal(1, TOKENS, groups, width),
        "c": draw.normal(1, TOKENS, groups, width, scale=width**-0.5),
        "d": draw.normal(heads),
        "dt_bias": draw.normal(heads),
        "state_shape": (heads, size, width),
        "softplus": True,
        "dt_min": 0.0,
        "dt_max": 0.9,
    }


def _selective_scan(draw: Draw, *, channels: int, width: int) -> Sample:
    fused = draw.normal(1, TOKENS, channels + 2 * width, scale=0.5)
    return {
        "x": draw.normal(1, TOKENS, channels),
        "dt": fused[..., :channels],
        "a": -draw.uniform(channels, width, low=0.1, high=2.0, dtype=torch.float32),
        "b": fused[..., channels : channels + width],
        "c": fused[..., channels + width :],
        "d": draw.normal(channels),
        "dt_bias": draw.normal(channels),
        "state_shape": (channels, width),
        "softplus": True,
    }


def _linear_attention(draw: Draw, *, heads: int = 3, size: int, value: int, rowwise: bool = False) -> Sample:
    shape = (1, TOKENS, heads, size) if rowwise else (heads,)
    return {
        "q": draw.normal(1, TOKENS, heads, size),
        "k": draw.normal(1, TOKENS, heads, size),
        "v": draw.normal(1, TOKENS, heads, value),
        "decay": -draw.uniform(*shape, high=0.5, dtype=torch.float32),
        "state_shape": (heads, size, value),
        "scale": size**-0.5,
    }


def _delta_rule(draw: Draw, *, keys: int = 2, heads: int = 4, size: int, value: int, rowwise: bool = False) -> Sample:
    shape = (1, TOKENS, heads, size)[: 4 if rowwise else 3]
    return {
        "q": draw.normal(1, TOKENS, keys, size),
        "k": draw.normal(1, TOKENS, keys, size),
        "v": draw.normal(1, TOKENS, heads, value),
        "decay": -draw.uniform(*shape, high=0.5, dtype=torch.float32),
        "beta": draw.uniform(1, TOKENS, heads),
        "state_shape": (heads, size, value),
        "scale": size**-0.5,
        "normalise": True,
    }


def _wkv(draw: Draw, *, channels: int) -> Sample:
    return {
        "k": draw.normal(1, TOKENS, channels, scale=20.0),
        "v": draw.normal(1, TOKENS, channels),
        "decay": -draw.uniform(channels, dtype=torch.float32),
        "first": draw.normal(channels),
        "state_shape": (3, channels),
    }


def _linear_recurrence(draw: Draw, *, channels: int, kind: str = "sum") -> Sample:
    fused = draw.uniform(1, TOKENS, 2 * channels)
    return {"x": fused[..., :channels], "factor": fused[..., channels:], "state_shape": (channels,), "kind": kind}


_TOKENS: Mapping[str, Callable[..., Sample]] = {
    "causal_conv": _causal_conv,
    "state_space_scan": _state_space_scan,
    "selective_scan": _selective_scan,
    "linear_attention": _linear_attention,
    "delta_rule": _delta_rule,
    "wkv": _wkv,
    "linear_recurrence": _linear_recurrence,
}
