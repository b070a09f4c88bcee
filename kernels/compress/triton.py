"""The compression of blocks in Triton over packed sequences, with the update of their states: one launch.

Entries of a sequence's first tokens, which see what its slot holds, are computed by programs that also write the slot;
no other program touches it. All others see tokens of this step alone, whatever sequence they are of.
"""

# To pyright a kernel that is called by another returns nothing.
# pyright: reportGeneralTypeIssues=false, reportPossiblyUnboundVariable=false

from __future__ import annotations

import triton
import triton.language as tl

from precast.kernels.stateful.triton import tokens_of
from precast.kernels.triton_chain import wait_for_previous

# Sequences whose bounds are compared with tokens together.
_TOGETHER = tl.constexpr(64)


@triton.jit
def _rows(  # type: ignore[no-untyped-def]
    x_ptr, held_ptr, source, channel, mask, continues, x_stride_t, x_stride_c, held_stride_w, held_stride_c,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """What stands at the tokens `source` [W, 1] of a sequence, counted from its first of this step. Before that it is
    what the slot holds, WIDTH tokens, if the sequence continues from it; else zeros."""
    x = tl.load(x_ptr + source * x_stride_t + channel * x_stride_c, mask=mask & (source >= 0), other=0.0)
    if held_ptr is not None:
        place = held_ptr + (WIDTH + source) * held_stride_w + channel * held_stride_c
        held = tl.load(place, mask=mask & (source < 0) & continues, other=0.0)
        x = tl.where(source < 0, held, x.to(held.dtype))
    return x


@triton.jit
def _entry(scores, kv):  # type: ignore[no-untyped-def]
    """sum_j p[j, d] * kv[j, d], p = softmax_j(scores[j, d]): [D], of one score at least that isn't -inf."""
    shares = tl.exp(scores - tl.max(scores, 0)[None, :])
    return tl.sum(shares * kv, 0) / tl.sum(shares, 0)


@triton.jit
def _places_of(t, cu_seqlens_ptr, kv_lens_ptr, num_sequences):  # type: ignore[no-untyped-def]
    """Of tokens `t` [T]: how many of their sequence are before them in this step, and their positions; -1 for padding,
    both."""
    sequence = tl.zeros_like(t)
    for start in range(0, num_sequences, _TOGETHER):
        each = start + tl.arange(0, _TOGETHER)
        end = tl.load(cu_seqlens_ptr + each + 1, mask=each < num_sequences, other=0)
        sequence += tl.sum(((each < num_sequences)[None, :] & (end[None, :] <= t[:, None])).to(tl.int32), 1)
    is_real = sequence < num_sequences
    place = t - tl.load(cu_seqlens_ptr + sequence, mask=is_real, other=0)
    position = place
    if kv_lens_ptr is not None:
        after = tl.load(cu_seqlens_ptr + sequence + 1, mask=is_real, other=0) - t
        position = tl.load(kv_lens_ptr + sequence, mask=is_real, other=0) - after
    return tl.where(is_real, place, -1), tl.where(is_real, position, -1)


@triton.jit(do_not_specialize=["num_sequences", "num_tokens"])
def compress_kernel(  # type: ignore[no-untyped-def]
    y_ptr,
    kv_ptr,
    gate_ptr,
    bias_ptr,
    state_ptr,
    slots_ptr,
    cu_seqlens_ptr,
    kv_lens_ptr,
    num_sequences,
    num_tokens,
    kv_stride_t,
    kv_stride_c,
    gate_stride_t,
    gate_stride_c,
    bias_stride_w,
    bias_stride_d,
    state_stride_p,
    state_stride_x,
    state_stride_w,
    state_stride_c,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    RATE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    """BLOCK_D elements of the entries of a sequence's first WIDTH tokens, with its state, or of those of BLOCK_T tokens
    that are none of these.

    The first `num_sequences` programs are those of sequences, the others those of tokens: they also write zeros where
    no block ends, and after the last sequence. Blocks overlap if WIDTH is twice RATE. `state_ptr` with `slots_ptr` and
    `kv_lens_ptr` may be None.
    """
    wait_for_previous(PDL)
    d = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    j = tl.arange(0, BLOCK_W)[:, None]
    mask = (j < WIDTH) & (d < SIZE)[None, :]
    # Of the block before the other series of channels is read.
    channel = d[None, :] + tl.where((WIDTH > RATE) & (j >= RATE), SIZE, 0)
    bias = tl.load(bias_ptr + j * bias_stride_w + d[None, :] * bias_stride_d, mask=mask, other=0.0).to(tl.float32)
    program = tl.program_id(1)
    if program >= num_sequences:
        begin = (program - num_sequences) * BLOCK_T
        lane = tl.arange(0, BLOCK_T)
        place, position = _places_of(begin + lane, cu_seqlens_ptr, kv_lens_ptr, num_sequences)
        is_end = (place >= 0) & ((position + 1) % RATE == 0)
        is_between = (begin + lane < num_tokens) & (is_end == 0)
        target = y_ptr + (begin + lane).to(tl.int64)[:, None] * SIZE + d[None, :]
        zeros = tl.zeros([BLOCK_T, BLOCK_D], y_ptr.dtype.element_ty)
        tl.store(target, zeros, mask=is_between[:, None] & (d < SIZE)[None, :])
        for i in range(0, BLOCK_T):
            if tl.sum(((lane == i) & is_end & (place >= WIDTH)).to(tl.int32), 0) > 0:
                token = begin.to(tl.int64) + i
                rows = token - WIDTH + 1 + j
                kv = tl.load(kv_ptr + rows * kv_stride_t + channel * kv_stride_c, mask=mask, other=0.0)
                gate = tl.load(gate_ptr + rows * gate_stride_t + channel * gate_stride_c, mask=mask, other=0.0)
                scores = tl.where(j < WIDTH, gate.to(tl.float32) + bias, float("-inf"))
                y = _entry(scores, kv.to(tl.float32))
                tl.store(y_ptr + token * SIZE + d, y.to(y_ptr.dtype.element_ty), mask=d < SIZE)
        return

    first, count, slot, continues = tokens_of(cu_seqlens_ptr, slots_ptr, kv_lens_ptr, program)
    if count <= 0:
        return
    before = 0
    if kv_lens_ptr is not None:
        before = tl.load(kv_lens_ptr + program) - count
    kv_ptr += first * kv_stride_t
    gate_ptr += first * gate_stride_t
    if state_ptr is not None:
        state_ptr += slot * state_stride_p
        held_gate_ptr = state_ptr + state_stride_x
    else:
        held_gate_ptr = state_ptr
    for t in range(RATE - 1 - before % RATE, tl.minimum(count, WIDTH), RATE):
        source = t - WIDTH + 1 + j
        kv = _rows(kv_ptr, state_ptr, source, channel, mask, continues,
                   kv_stride_t, kv_stride_c, state_stride_w, state_stride_c, WIDTH)  # fmt: skip
        gate = _rows(gate_ptr, held_gate_ptr, source, channel, mask, continues,
                     gate_stride_t, gate_stride_c, state_stride_w, state_stride_c, WIDTH)  # fmt: skip
        # A sequence's first block has none before it.
        is_seen = (j < WIDTH) & ((WIDTH == RATE) | (j >= RATE) | (before + t >= RATE))
        scores = tl.where(is_seen, gate.to(tl.float32) + bias, float("-inf"))
        y = _entry(scores, kv.to(tl.float32))
        tl.store(y_ptr + (first + t) * SIZE + d, y.to(y_ptr.dtype.element_ty), mask=d < SIZE)
    if state_ptr is not None:
        source = count - WIDTH + j
        for series in tl.static_range(0, WIDTH // RATE):
            own = d[None, :] + series * SIZE
            kv = _rows(kv_ptr, state_ptr, source, own, mask, continues,
                       kv_stride_t, kv_stride_c, state_stride_w, state_stride_c, WIDTH)  # fmt: skip
            gate = _rows(gate_ptr, held_gate_ptr, source, own, mask, continues,
                         gate_stride_t, gate_stride_c, state_stride_w, state_stride_c, WIDTH)  # fmt: skip
            # All threads have read what is written now.
            tl.debug_barrier()
            place = j * state_stride_w + own * state_stride_c
            tl.store(state_ptr + place, kv, mask=mask & (slot >= 0))
            tl.store(held_gate_ptr + place, gate, mask=mask & (slot >= 0))
