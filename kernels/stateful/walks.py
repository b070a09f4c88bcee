"""Walks over packed sequences for ops with a state: which tokens, which slot, and whether the sequence begins here.

Tokens `cu_seqlens[b] .. cu_seqlens[b + 1]` are this step's tokens of sequence b, the last of them at absolute position
`kv_lens[b] - 1`. The sequence begins here if these are all its tokens, and then its state is zero, whatever lies in its
slot; else it continues from `state[slots[b]]`. Afterwards that slot holds the state after its last token. A slot of -1
is a padding sequence's: it reads zeros and writes nothing. Sequences without tokens, and slots that nobody names, stay
as they are. Tokens past `cu_seqlens[B]` are padding, and give zeros.

What an op computes stands in the op's own module, as a recurrence over one sequence (`one_by_one`) or over several of
like length, padded to the longest with zeros (`together`); `token_by_token` and `by_length` make one of a single step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from precast.kernels.stateful.limits import MAX_TOGETHER

Tokens = Sequence[torch.Tensor]
Recurrence = Callable[..., tuple[torch.Tensor, Any]]
"""(tokens of each argument..., state before) -> (results, state after)."""
Walk = Callable[[Recurrence, Tokens, torch.Tensor, "Slots"], torch.Tensor]
"""`one_by_one` or `together`."""


class Slots(NamedTuple):
    """The states of a call: `state` [P, ...], `slots` [B], `cu_seqlens` [B + 1], `kv_lens` [B]; metadata is int32."""

    state: torch.Tensor
    slots: torch.Tensor
    cu_seqlens: torch.Tensor
    kv_lens: torch.Tensor


class _Sequence(NamedTuple):
    """One sequence that has tokens."""

    first: int
    end: int
    slot: int
    continues: bool


def computed_in(x: torch.Tensor) -> torch.dtype:
    """The type that an op computes in when its result is of `x`'s: float32, or float64 for float64."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def fresh(cu_seqlens: torch.Tensor, shape: Sequence[int], like: torch.Tensor) -> Slots:
    """A new state of `shape` for each sequence, all of which begin here; in the type that `like` is computed in."""
    count = cu_seqlens.shape[0] - 1
    state = like.new_zeros((count, *shape), dtype=computed_in(like))
    slots = torch.arange(count, dtype=torch.int32, device=cu_seqlens.device)
    return Slots(state, slots, cu_seqlens, cu_seqlens.diff())


def one_by_one(recurrence: Recurrence, tokens: Tokens, out: torch.Tensor, held: Slots) -> torch.Tensor:
    """Fill `out` [1, T, ...] and the states: `recurrence` over each sequence, computed in float32.

    `tokens` [1, T, ...] each.
    """
    for sequence in _sequences(held):
        rows = slice(sequence.first, sequence.end)
        state = _initial([sequence], held.state, out)[0]
        own = (x[0, rows].to(computed_in(out)) for x in tokens)
        y, state = recurrence(*own, state)
        out[0, rows] = y.to(out.dtype)
        if sequence.slot >= 0:
            held.state[sequence.slot] = state.to(held.state.dtype)
    return out


def together(recurrence: Recurrence, tokens: Tokens, out: torch.Tensor, held: Slots) -> torch.Tensor:
    """As `one_by_one`, with `recurrence` over several sequences at once: tokens [n, L, ...], states [n, ...].

    A sequence shorter than L has zeros after its last token, and must come out with the state after that token. As
    many are computed at once as `MAX_TOGETHER` allows. The metadata is read on the host, once; on a GPU that is a wait.
    """
    classes: dict[int, list[_Sequence]] = {}
    for sequence in _sequences(held):
        # Lengths of one class differ by less than a factor of two: that bounds what padding costs.
        classes.setdefault((sequence.end - sequence.first).bit_length(), []).append(sequence)
    for group in classes.values():
        step = max(1, MAX_TOGETHER // max(sequence.end - sequence.first for sequence in group))
        for first in range(0, len(group), step):
            _compute(recurrence, tokens, out, held.state, group[first : first + step])
    return out


def token_by_token(step: Recurrence) -> Recurrence:
    """A recurrence over one sequence, of `step`, which takes one token of each argument."""

    def sequence(*given: Any) -> tuple[torch.Tensor, Any]:
        *tokens, state = given
        rows = []
        for own in zip(*tokens, strict=True):
            y, state = step(*own, state)
            rows.append(y)
        return torch.stack(rows), state

    return sequence


def by_length(step: Recurrence, scan: Recurrence) -> Recurrence:
    """A recurrence over several sequences: `scan`, or `step` for sequences of one token, without their dimension L."""

    def sequences(*given: torch.Tensor) -> tuple[torch.Tensor, Any]:
        if given[0].shape[1] > 1:
            return scan(*given)
        *tokens, state = given
        y, state = step(*(x[:, 0] for x in tokens), state)
        return y[:, None], state

    return sequences


def _compute(
    recurrence: Recurrence, tokens: Tokens, out: torch.Tensor, state: torch.Tensor, group: list[_Sequence]
) -> None:
    """The recurrence over these sequences; what it makes is gone before the next ones are computed."""
    initial = _initial(group, state, out)
    own = (_gathered(x[0], group).to(computed_in(out)) for x in tokens)
    y, final = recurrence(*own, initial)
    _scatter(y, out[0], group)
    _store(final, state, group)


def _sequences(held: Slots) -> list[_Sequence]:
    count = held.slots.shape[0]
    read = torch.cat((held.cu_seqlens, held.slots, held.kv_lens)).tolist()
    bounds, slots, lengths = read[: count + 1], read[count + 1 : 2 * count + 1], read[2 * count + 1 :]
    spans = zip(pairwise(bounds), slots, lengths, strict=True)
    return [
        _Sequence(first, end, slot, slot >= 0 and length != end - first)
        for (first, end), slot, length in spans
        if end > first
    ]


def _initial(group: list[_Sequence], state: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """The states [n, ...] that the sequences begin with. What lies in a slot that isn't continued is never read."""
    going = [i for i, sequence in enumerate(group) if sequence.continues]
    slots = _index([group[i].slot for i in going], state)
    if len(going) == len(group):
        return state[slots].to(computed_in(out))
    initial = out.new_zeros((len(group), *state.shape[1:]), dtype=computed_in(out))
    if going:
        initial[_index(going, state)] = state[slots].to(initial.dtype)
    return initial


def _store(found: torch.Tensor, state: torch.Tensor, group: list[_Sequence]) -> None:
    kept = [i for i, sequence in enumerate(group) if sequence.slot >= 0]
    if len(kept) < len(group):
        found = found[_index(kept, state)]
    state[_index([group[i].slot for i in kept], state)] = found.to(state.dtype)


def _gathered(x: torch.Tensor, group: list[_Sequence]) -> torch.Tensor:
    """The sequences' rows of `x` [T, ...] as [n, L, ...]."""
    lengths = [sequence.end - sequence.first for sequence in group]
    longest = max(lengths)
    if len(group) == 1:
        return x[None, group[0].first : group[0].end]
    if longest == 1:
        return x[_index([sequence.first for sequence in group], x)][:, None]
    padded = x.new_zeros((len(group), longest, *x.shape[1:]))
    for row, sequence in zip(padded, group, strict=True):
        row[: sequence.end - sequence.first] = x[sequence.first : sequence.end]
    return padded


def _scatter(y: torch.Tensor, out: torch.Tensor, group: list[_Sequence]) -> None:
    if y.shape[1] == 1:
        out[_index([sequence.first for sequence in group], out)] = y[:, 0].to(out.dtype)
        return
    for row, sequence in zip(y, group, strict=True):
        out[sequence.first : sequence.end] = row[: sequence.end - sequence.first].to(out.dtype)


def _index(values: list[int], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64, device=like.device)
