"""Packed sequences for samples: lengths that mix all cases, states in slots, and NaN in all that must not be read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from op_samples.draw import Draw, Sample

MIXED = ((5, 5), (1, 9), (3, 20), (0, 6), (7, 7), (1, 1), (0, 0))
DECODE = ((1, 7), (1, 1), (1, 30), (1, 12))
LONG = ((70, 70), (129, 200), (40, 41), (1, 3))


def sequence_samples() -> Iterator[tuple[tuple[tuple[int, int], ...], int, tuple[int, ...]]]:
    """(sequences as (tokens, context with them), padding tokens, sequences whose slot is -1), for one call each."""
    yield MIXED, 3, ()
    yield MIXED, 0, (1, 4)
    yield DECODE, 2, (3,)
    yield DECODE, 0, ()
    yield LONG, 1, ()
    yield ((1, 5),), 0, ()
    yield ((2, 2), (1, 4)), 1, (0, 1)
    yield (), 3, ()
    yield (), 0, ()


def bounds_of(sequences: Sequence[tuple[int, int]]) -> list[int]:
    """`cu_seqlens` of (tokens, context) pairs."""
    return [sum(tokens for tokens, _ in sequences[:i]) for i in range(len(sequences) + 1)]


def state_sample(
    draw: Draw,
    sequences: Sequence[tuple[int, int]],
    nameless: Sequence[int],
    shape: Sequence[int],
    dtype: torch.dtype,
) -> Sample:
    """State and metadata for `sequences`, in slots in random order; those in `nameless` have slot -1.

    Slots that must not be read are NaN: those of sequences that begin here or have no tokens, and one without a name.
    """
    slots = draw.permutation(len(sequences) + 1).tolist()
    state = draw.normal(len(sequences) + 1, *shape, dtype=dtype)
    for b, (tokens, context) in enumerate(sequences):
        if tokens in (0, context) or b in nameless:
            state[slots[b]] = float("nan")
    state[slots[-1]] = float("nan")
    named = [-1 if b in nameless else slots[b] for b in range(len(sequences))]
    return {
        "state": state,
        "slots": draw.of(named, torch.int32),
        "cu_seqlens": draw.of(bounds_of(sequences), torch.int32),
        "kv_lens": draw.of([context for _, context in sequences], torch.int32),
    }


def without_states(sample: Sample) -> Sample:
    """The cache-free form's arguments of a stateful form's call."""
    return {name: value for name, value in sample.items() if name not in ("state", "slots", "kv_lens")}


def spoiled(x: torch.Tensor, tokens: int) -> torch.Tensor:
    """`x` [1, T, ...] with NaN in the padding tokens, those from `tokens` on."""
    x[:, tokens:] = float("nan")
    return x
