"""The walk of `precast.kernels.stateful.walks` in Triton, for steps that a CUDA graph replays.

A kernel launches programs for every sequence that the metadata have room for. Each program reads on the device what its
sequence is, keeps its part of the state in registers in float32, and goes through the sequence's tokens of this step
one after the other: the same launch serves sequences of any lengths. A sequence without tokens is done at once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl


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


def zeros(out: torch.Tensor | None, like: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """`out`, or a new tensor of `like`'s dtype: zeros, for padding, whose tokens belong to no program."""
    return like.new_zeros(shape) if out is None else out.zero_()
