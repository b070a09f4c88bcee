"""What walks over sequences in Triton share: `precast.kernels.stateful.walks` says what a walk does.

A kernel launches programs for every sequence that the metadata have room for. Each program reads on the device what its
sequence is, keeps its part of the state in registers in float32, and goes through the sequence's tokens of this step
one after the other: the same launch serves sequences of any lengths. A sequence without tokens is done at once.
"""

from __future__ import annotations

import triton
import triton.language as tl

_TOGETHER = tl.constexpr(128)
"""Sequences that a program looks at together."""


@triton.jit
def tokens_of(cu_seqlens_ptr, slots_ptr, kv_lens_ptr, seq):  # type: ignore[no-untyped-def]
    """A sequence's first token of this step, how many it has, its slot, and whether it continues from what lies there.

    Of a sequence without tokens only their number means anything. Without slots all sequences begin here, and have -1.
    """
    first = tl.load(cu_seqlens_ptr + seq)
    num_tokens = tl.load(cu_seqlens_ptr + seq + 1) - first
    if slots_ptr is None:
        return first.to(tl.int64), num_tokens, tl.full((), -1, tl.int64), num_tokens < 0
    else:
        slot = tl.load(slots_ptr + seq)
        continues = (slot >= 0) & (tl.load(kv_lens_ptr + seq) != num_tokens)
        return first.to(tl.int64), num_tokens, slot.to(tl.int64), continues


@triton.jit
def longer(cu_seqlens_ptr, num_seqs, rank, MOST: tl.constexpr):  # type: ignore[no-untyped-def]
    """The sequence of this rank among those of more than MOST tokens; -1 if there are fewer."""
    found = -1
    seen = 0
    for first in range(0, num_seqs, _TOGETHER):
        seq = first + tl.arange(0, _TOGETHER)
        begins = tl.load(cu_seqlens_ptr + seq, mask=seq < num_seqs, other=0)
        ends = tl.load(cu_seqlens_ptr + seq + 1, mask=seq < num_seqs, other=0)
        is_longer = (ends - begins > MOST).to(tl.int32)
        own = seen + tl.cumsum(is_longer, 0) - 1
        found = tl.maximum(found, tl.max(tl.where((is_longer == 1) & (own == rank), seq, -1), 0))
        seen += tl.sum(is_longer, 0)
    return found


@triton.jit
def chunk_of_longer(cu_seqlens_ptr, num_seqs, place, MOST: tl.constexpr, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def]
    """The sequence of more than MOST tokens that has this place, and which of its chunks that is.

    The places of the r-th such sequence begin at `first token // CHUNK + r`: there are enough up to those of the next
    one. A place that is left over is a chunk that begins at its end or later; -1: before them all.
    """
    found = -1
    begins_at = 0
    seen = 0
    for first in range(0, num_seqs, _TOGETHER):
        seq = first + tl.arange(0, _TOGETHER)
        begins = tl.load(cu_seqlens_ptr + seq, mask=seq < num_seqs, other=0)
        ends = tl.load(cu_seqlens_ptr + seq + 1, mask=seq < num_seqs, other=0)
        is_longer = (ends - begins > MOST).to(tl.int32)
        own = begins // CHUNK + seen + tl.cumsum(is_longer, 0) - 1
        is_before = (is_longer == 1) & (own <= place)
        found = tl.maximum(found, tl.max(tl.where(is_before, seq, -1), 0))
        begins_at = tl.maximum(begins_at, tl.max(tl.where(is_before, own, 0), 0))
        seen += tl.sum(is_longer, 0)
    return found, place - begins_at


@triton.jit
def load_ahead(x_ptrs, stride_t, token, mask, AHEAD: tl.constexpr):  # type: ignore[no-untyped-def]
    """What lies at `x_ptrs` for AHEAD tokens from `token` on, as a tuple, in the type that it has.

    Nothing is computed with it yet, so that no program waits.
    """
    found = ()
    for i in tl.static_range(AHEAD):  # pyright: ignore[reportGeneralTypeIssues]
        found += (tl.load(x_ptrs + (token + i) * stride_t, mask=mask, other=0.0),)  # type: ignore[assignment]
    return found


@triton.jit
def clear_padding(out_ptr, stride_t, column, mask, cu_seqlens_ptr, num_seqs, num_tokens, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Zeros for the tokens past the last sequence, ROWS at a time, in the columns [N] that a program has."""
    row = tl.arange(0, ROWS)[:, None]
    for token in range(tl.load(cu_seqlens_ptr + num_seqs), num_tokens, ROWS):
        ptrs = out_ptr + (token + row).to(tl.int64) * stride_t + column[None, :]
        zeros = tl.zeros((ROWS, column.shape[0]), out_ptr.dtype.element_ty)
        tl.store(ptrs, zeros, mask=(token + row < num_tokens) & mask[None, :])
