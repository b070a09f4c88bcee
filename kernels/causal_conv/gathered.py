"""Causal convolution without a loop over sequences: each tap is one gather over all tokens.

The states of the sequences and the tokens are one table of rows; where a tap reaches back before a sequence's first
token, it reads the state's row. Nothing is read back to the host.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from precast.ir.ops.rows_states import CONV_ACTIVATIONS
from precast.kernels.calls import implements
from precast.kernels.stateful.walks import Slots, computed_in


@implements("causal_conv")
def causal_conv(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, cu_seqlens: torch.Tensor, activation: str
) -> torch.Tensor:
    """`precast.causal_conv`, see `precast.kernels.causal_conv.causal_conv`."""
    count = cu_seqlens.shape[0] - 1
    before = x.new_zeros((count, x.shape[2], weight.shape[1] - 1))
    return _convolved(_table(before, x), x, weight, bias, cu_seqlens, activation)


@implements("stateful_causal_conv")
def stateful_causal_conv(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, held: Slots, activation: str
) -> torch.Tensor:
    """`precast.stateful_causal_conv`, see `precast.kernels.causal_conv.causal_conv`."""
    state, slots, cu_seqlens, kv_lens = held
    before = state[slots.clamp(min=0)] if len(state) else state.new_zeros((len(slots), *state.shape[1:]))
    continues = (slots >= 0) & (kv_lens != cu_seqlens.diff())
    table = _table(torch.where(continues[:, None, None], before, 0), x)
    y = _convolved(table, x, weight, bias, cu_seqlens, activation)
    _store(table, state, slots, cu_seqlens)
    return y


def _table(before: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The rows of `before` [B, C, K - 1], sequence by sequence, then those of `x` [1, T, C]."""
    return torch.cat((before.transpose(1, 2).flatten(0, 1), x[0]))


def _rows(sequence: torch.Tensor, position: torch.Tensor, starts: torch.Tensor, width: int) -> torch.Tensor:
    """Row of the table of the token at `position` of `sequence`, counted from this step's first."""
    count = starts.shape[0] - 1
    token = count * width + starts[sequence] + position
    return torch.where(position >= 0, token, sequence * width + width + position)


def _convolved(
    table: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    cu_seqlens: torch.Tensor,
    activation: str,
) -> torch.Tensor:
    if activation not in CONV_ACTIVATIONS:
        raise ValueError(f"activation: expected one of {', '.join(CONV_ACTIVATIONS)}, found {activation!r}")
    width = weight.shape[1] - 1
    count, tokens = cu_seqlens.shape[0] - 1, x.shape[1]
    if count == 0 or tokens == 0:
        return torch.zeros_like(x, memory_format=torch.contiguous_format)
    t = torch.arange(tokens, device=x.device)
    starts = cu_seqlens.long()
    sequence = (torch.searchsorted(starts, t, right=True) - 1).clamp(max=count - 1)
    position = t - starts[sequence]
    taps = weight.to(computed_in(x)).T
    y = taps[width] * x[0]
    for back in range(1, width + 1):
        y += taps[width - back] * table[_rows(sequence, position - back, starts, width)]
    if bias is not None:
        y += bias
    y = functional.silu(y) if activation == "silu" else y
    return torch.where((t < starts[count])[:, None], y, 0).to(x.dtype)[None]


def _store(table: torch.Tensor, state: torch.Tensor, slots: torch.Tensor, cu_seqlens: torch.Tensor) -> None:
    """The last rows of each sequence into its slot. A sequence that writes nothing repeats what another one writes."""
    width = state.shape[2]
    if state.numel() == 0 or len(slots) == 0:
        return
    starts = cu_seqlens.long()
    lengths = starts.diff()
    kept = (slots >= 0) & (lengths > 0)
    sequence = torch.where(kept, torch.arange(len(slots), device=slots.device), kept.long().argmax())
    position = lengths[sequence, None] - width + torch.arange(width, device=slots.device)
    rows = table[_rows(sequence[:, None], position, starts, width)].transpose(1, 2)
    index = slots[sequence].clamp(min=0)
    # If no sequence writes, one slot gets what it holds.
    state[index] = torch.where(kept.any(), rows.to(state.dtype), state[index])
