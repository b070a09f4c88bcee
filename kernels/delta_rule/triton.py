"""The delta rule in Triton, over packed sequences; nothing is read back to the host.

`walk_kernel` goes through a sequence token by token, with its part of the state in registers. Long sequences are cut
into chunks of tokens instead. What the tokens of a chunk write depends on what earlier ones of it wrote: with A the
decayed products of keys below the diagonal, times beta, the differences d solve

    (I + A) d = beta * (v - arriving * k S)        S is the state before the chunk

`prepare_kernel` inverts I + A, which doesn't depend on the state, for all chunks at once. `pass_kernel` goes from chunk
to chunk with some columns of the state in registers, in float32:

    d = inverse (beta * (v - arriving * k S))      y = scale * (arriving * q S + decayed (q k^T) d)
    S = whole * S + (leaving * k)^T d

Queries and keys are multiplied as they lie in memory; what normalises them are factors of rows. All decays are
exponentials of sums of logarithms that are added up, not subtracted from each other: steep ones don't blur the others.
Products of bfloat16 with what is float32 take that as two numbers in bfloat16, its upper and its lower part: rounded to
one, what a chunk writes would be off by more than the result's own rounding.
"""

# To pyright, Triton's constants don't decide which branch is there.
# pyright: reportPossiblyUnboundVariable=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from precast.kernels.stateful.triton import chunk_of_longer, clear_padding, longer, tokens_of
from precast.kernels.triton_chain import wait_for_previous

PADDING = tl.constexpr(16)
"""Tokens of padding that a program fills with zeros at a time."""
BLOCK = tl.constexpr(16)
"""Rows of the triangular matrices that are inverted row by row."""


@triton.jit
def _norm(x, EPSILON: tl.constexpr):  # type: ignore[no-untyped-def]
    """What normalises `x` [D] or the rows of `x` [C, D], float32."""
    return tl.rsqrt(tl.sum(x * x, -1) + EPSILON)


@triton.jit
def _token(  # type: ignore[no-untyped-def]
    q_ptrs,
    k_ptrs,
    v_ptrs,
    decay_ptrs,
    beta_ptr,
    token,
    q_stride_t,
    k_stride_t,
    v_stride_t,
    decay_stride_t,
    beta_stride_t,
    q_mask,
    v_mask,
    decay_mask,
    is_there,
):
    """A token's query and key [D], value [E], decay [D or 1] and beta, in float32; zeros if it isn't there."""
    q = tl.load(q_ptrs + token * q_stride_t, mask=q_mask & is_there, other=0.0).to(tl.float32)
    k = tl.load(k_ptrs + token * k_stride_t, mask=q_mask & is_there, other=0.0).to(tl.float32)
    v = tl.load(v_ptrs + token * v_stride_t, mask=v_mask & is_there, other=0.0).to(tl.float32)
    beta = tl.load(beta_ptr + token * beta_stride_t, mask=is_there, other=0.0).to(tl.float32)
    decay = tl.where(decay_mask, 0.0, 0.0)
    if decay_ptrs is not None:
        decay = tl.load(decay_ptrs + token * decay_stride_t, mask=decay_mask & is_there, other=0.0).to(tl.float32)
    return q, k, v, decay, beta


@triton.jit
def walk_kernel(  # type: ignore[no-untyped-def]
    out_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    decay_ptr,
    beta_ptr,
    state_ptr,
    slots_ptr,
    cu_seqlens_ptr,
    kv_lens_ptr,
    num_seqs,
    all_tokens,
    q_stride_t,
    q_stride_h,
    q_stride_d,
    k_stride_t,
    k_stride_h,
    k_stride_d,
    v_stride_t,
    v_stride_h,
    v_stride_e,
    decay_stride_t,
    decay_stride_h,
    decay_stride_d,
    beta_stride_t,
    beta_stride_h,
    state_stride_p,
    state_stride_h,
    state_stride_d,
    state_stride_e,
    SCALE: tl.constexpr,
    EPSILON: tl.constexpr,
    BY_ROW: tl.constexpr,
    MOST: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    PDL: tl.constexpr,
):
    """BLOCK_E columns of one head's state, for one sequence of up to MOST tokens; 0: of any number.

    A decay has a number for each row of the state if it is BY_ROW, else one for the head. Without an EPSILON (0)
    nothing is normalised. Sequence `num_seqs` is padding, whose results are zeros.
    """
    wait_for_previous(PDL)
    head = tl.program_id(1).to(tl.int64)
    seq = tl.program_id(2)
    d = tl.arange(0, BLOCK_D)
    e = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    d_mask, e_mask = d < SIZE, e < VALUE_SIZE
    out_ptr += head * VALUE_SIZE
    if seq == num_seqs:
        clear_padding(out_ptr, HEADS * VALUE_SIZE, e, e_mask, cu_seqlens_ptr, num_seqs, all_tokens, PADDING)
        return
    first, num_tokens, slot, continues = tokens_of(cu_seqlens_ptr, slots_ptr, kv_lens_ptr, seq)
    if num_tokens <= 0:
        return
    if MOST > 0 and num_tokens > MOST:
        return

    state = tl.zeros((BLOCK_D, BLOCK_E), tl.float32)
    state_mask = d_mask[:, None] & e_mask[None, :]
    if state_ptr is not None:
        state_ptr += slot * state_stride_p + head * state_stride_h
        state_offsets = d[:, None] * state_stride_d + e[None, :] * state_stride_e
        state = tl.load(state_ptr + state_offsets, mask=state_mask & continues, other=0.0)

    q_ptrs = q_ptr + head // GROUP * q_stride_h + d * q_stride_d
    k_ptrs = k_ptr + head // GROUP * k_stride_h + d * k_stride_d
    v_ptrs = v_ptr + head * v_stride_h + e * v_stride_e
    beta_ptr += head * beta_stride_h
    row = d if BY_ROW else tl.arange(0, 1)
    row_mask = row < SIZE
    if decay_ptr is not None:
        decay_ptr += head * decay_stride_h + row * decay_stride_d
    q, k, v, decay, beta = _token(
        q_ptrs, k_ptrs, v_ptrs, decay_ptr, beta_ptr, first, q_stride_t, k_stride_t, v_stride_t, decay_stride_t,
        beta_stride_t, d_mask, e_mask, row_mask, num_tokens > 0,
    )  # fmt: skip
    for i in range(num_tokens):
        # The next token is on its way while this one is computed.
        next_q, next_k, next_v, next_decay, next_beta = _token(
            q_ptrs, k_ptrs, v_ptrs, decay_ptr, beta_ptr, first + i + 1, q_stride_t, k_stride_t, v_stride_t,
            decay_stride_t, beta_stride_t, d_mask, e_mask, row_mask, i + 1 < num_tokens,
        )  # fmt: skip
        if EPSILON > 0:
            q *= _norm(q, EPSILON)
            k *= _norm(k, EPSILON)
        state *= tl.exp(decay)[:, None]
        written = beta * (v - tl.sum(k[:, None] * state, 0))
        state += k[:, None] * written[None, :]
        y = tl.sum((q * SCALE)[:, None] * state, 0)
        tl.store(out_ptr + (first + i) * HEADS * VALUE_SIZE + e, y.to(out_ptr.dtype.element_ty), mask=e_mask)
        q, k, v, decay, beta = next_q, next_k, next_v, next_decay, next_beta

    if state_ptr is not None:
        tl.store(state_ptr + state_offsets, state, mask=state_mask & (slot >= 0))


@triton.jit
def _merged(inverse, system, SIZE: tl.constexpr, PAIRS: tl.constexpr):  # type: ignore[no-untyped-def]
    """From the inverses [2 PAIRS, SIZE, SIZE] of diagonal blocks of I + `system` those of blocks twice as large.

    That of ((a, 0), (b, c)) is ((a', 0), (- c' b a', c')).
    """
    C: tl.constexpr = 2 * SIZE * PAIRS
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    is_lower = (i // (2 * SIZE) == j // (2 * SIZE)) & (i // SIZE % 2 == 1) & (j // SIZE % 2 == 0)
    # Of the columns of each row, those of the one block are kept; of the rows, every second block.
    lower = tl.sum(tl.reshape(tl.where(is_lower, system, 0.0), (C, C // SIZE, SIZE)), 1)
    lower = tl.sum(tl.reshape(lower, (PAIRS, 2, SIZE, SIZE)), 1)
    upper_left, lower_right = tl.split(tl.permute(tl.reshape(inverse, (PAIRS, 2, SIZE, SIZE)), (0, 2, 3, 1)))
    if PAIRS == 1:
        a, c = tl.reshape(upper_left, (SIZE, SIZE)), tl.reshape(lower_right, (SIZE, SIZE))
        between = tl.dot(tl.reshape(lower, (SIZE, SIZE)), a, input_precision="ieee")
        between = tl.reshape(tl.dot(c, between, input_precision="ieee"), (1, SIZE, SIZE))
    else:
        between = tl.dot(lower, upper_left, input_precision="ieee")
        between = tl.dot(lower_right, between, input_precision="ieee")
    top = tl.permute(tl.join(upper_left, tl.zeros_like(upper_left)), (0, 1, 3, 2))
    bottom = tl.permute(tl.join(-between, lower_right), (0, 1, 3, 2))
    both = tl.join(tl.reshape(top, (PAIRS, SIZE, 2 * SIZE)), tl.reshape(bottom, (PAIRS, SIZE, 2 * SIZE)))
    return tl.reshape(tl.permute(both, (0, 3, 1, 2)), (PAIRS, 2 * SIZE, 2 * SIZE))


@triton.jit
def inverse_of(system, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def]
    """The inverse of I + `system` [CHUNK, CHUNK] float32, which is zero from the diagonal on. In float32.

    Forward substitution in blocks of 16 rows, side by side; then products join blocks in pairs.
    """
    BLOCKS: tl.constexpr = CHUNK // BLOCK
    i, j = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    own = tl.where(i // BLOCK == j // BLOCK, system, 0.0)
    own = tl.reshape(tl.sum(tl.reshape(own, (CHUNK, BLOCKS, BLOCK)), 1), (BLOCKS, BLOCK, BLOCK))
    row = tl.arange(0, BLOCK)[None, :, None]
    column = tl.arange(0, BLOCK)[None, None, :]
    inverse = tl.where(row == column, 1.0, 0.0) + tl.zeros_like(own)
    for r in range(1, BLOCK):
        factors = tl.sum(tl.where(row == r, own, 0.0), 1)
        found = tl.sum(factors[:, :, None] * inverse, 1)
        inverse -= tl.where(row == r, found[:, None, :], 0.0)
    if BLOCKS >= 2:
        inverse = _merged(inverse, system, BLOCK, BLOCKS // 2)
    if BLOCKS >= 4:
        inverse = _merged(inverse, system, 2 * BLOCK, BLOCKS // 4)
    return tl.reshape(inverse, (CHUNK, CHUNK))


@triton.jit
def _rounded(x, PRECISION: tl.constexpr):  # type: ignore[no-untyped-def]
    """`x` in float32, rounded to the nearest number of TF32 if that is the PRECISION: tensor cores cut off instead."""
    if PRECISION == "tf32":
        x = ((x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
    return x


@triton.jit
def prepare_kernel(  # type: ignore[no-untyped-def]
    inverse_ptr,
    scores_ptr,
    factors_ptr,
    q_ptr,
    k_ptr,
    decay_ptr,
    beta_ptr,
    cu_seqlens_ptr,
    num_seqs,
    all_tokens,
    q_stride_t,
    q_stride_h,
    q_stride_d,
    k_stride_t,
    k_stride_h,
    k_stride_d,
    decay_stride_t,
    decay_stride_h,
    beta_stride_t,
    beta_stride_h,
    SCALE: tl.constexpr,
    EPSILON: tl.constexpr,
    MOST: tl.constexpr,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
    AS_GIVEN: tl.constexpr,
    PDL: tl.constexpr,
):
    """What a chunk's tokens do to each other, of one head: nothing of it depends on the state.

    Queries and keys are multiplied AS_GIVEN, or in float32: float16 has too small a range for what they meet.

    Only sequences of more than MOST tokens have chunks. Written are `inverse` [H, T, CHUNK], the inverse times beta,
    and `scores` [H, T, CHUNK], the decayed products of queries with keys; and as `factors` [4, H, T] what k S, q S, the
    differences, and, at a chunk's last token, the state are multiplied by.
    """
    wait_for_previous(PDL)
    head = tl.program_id(1).to(tl.int64)
    heads = tl.num_programs(1).to(tl.int64)
    seq, chunk = chunk_of_longer(cu_seqlens_ptr, num_seqs, tl.program_id(0), MOST, CHUNK)
    if seq < 0:
        return
    first = tl.load(cu_seqlens_ptr + seq) + chunk * CHUNK
    end = tl.load(cu_seqlens_ptr + seq + 1)
    if first >= end:
        return

    t = first + tl.arange(0, CHUNK)
    d = tl.arange(0, BLOCK_D)[None, :]
    mask = t < end
    tile_mask = mask[:, None] & (d < SIZE)
    token = t.to(tl.int64)
    dot_type = q_ptr.dtype.element_ty if AS_GIVEN else tl.float32
    keys = k_ptr + head // GROUP * k_stride_h + token[:, None] * k_stride_t + d * k_stride_d
    queries = q_ptr + head // GROUP * q_stride_h + token[:, None] * q_stride_t + d * q_stride_d
    k = tl.load(keys, mask=tile_mask, other=0.0).to(dot_type)
    q = tl.load(queries, mask=tile_mask, other=0.0).to(dot_type)
    beta = tl.load(beta_ptr + head * beta_stride_h + token * beta_stride_t, mask=mask, other=0.0).to(tl.float32)
    decay = tl.zeros((CHUNK,), tl.float32)
    if decay_ptr is not None:
        decay = tl.load(decay_ptr + head * decay_stride_h + token * decay_stride_t, mask=mask, other=0.0)
        decay = decay.to(tl.float32)
    of_q = tl.full((CHUNK,), SCALE, tl.float32)
    of_k = tl.full((CHUNK,), 1.0, tl.float32)
    if EPSILON > 0:
        of_q *= _norm(q.to(tl.float32), EPSILON)
        of_k *= _norm(k.to(tl.float32), EPSILON)

    i, j = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    # The sums of the decays after token j, up to token i.
    between = tl.cumsum(tl.where(i > j, decay[:, None], 0.0), 0)
    arriving = tl.exp(tl.cumsum(decay, 0))
    leaving = tl.exp(tl.sum(tl.where(i == CHUNK - 1, between, 0.0), 0))
    faded = tl.exp(between) * of_k[None, :]
    plane = heads * all_tokens
    factors_ptr += head * all_tokens + token
    tl.store(factors_ptr, arriving * of_k, mask=mask)
    tl.store(factors_ptr + plane, arriving * of_q, mask=mask)
    tl.store(factors_ptr + 2 * plane, leaving * of_k, mask=mask)
    tl.store(factors_ptr + 3 * plane, arriving, mask=mask)

    # What is stored before the inverse is in no registers beside it.
    tile = (head * all_tokens + token[:, None]) * CHUNK + j
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * faded * of_q[:, None]
    scores = tl.where(i >= j, scores, 0.0)
    tl.store(scores_ptr + tile, _rounded(scores, PRECISION), mask=mask[:, None])
    system = tl.dot(k, tl.trans(k), input_precision=PRECISION) * faded * (beta * of_k)[:, None]
    inverse = inverse_of(tl.where(i > j, system, 0.0), CHUNK) * beta[None, :]
    tl.store(inverse_ptr + tile, _rounded(inverse, PRECISION), mask=mask[:, None])


@triton.jit
def _product(x, y, acc, PRECISION: tl.constexpr, SPLIT: tl.constexpr):  # type: ignore[no-untyped-def]
    """x y + acc, for `y` in float32 and `x` of any type."""
    upper = y.to(x.dtype)
    acc = tl.dot(x, upper, acc=acc, input_precision=PRECISION)
    if SPLIT:
        acc = tl.dot(x, (y - upper.to(tl.float32)).to(x.dtype), acc=acc, input_precision=PRECISION)
    return acc


@triton.jit
def pass_kernel(  # type: ignore[no-untyped-def]
    out_ptr,
    inverse_ptr,
    scores_ptr,
    factors_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    state_ptr,
    slots_ptr,
    cu_seqlens_ptr,
    kv_lens_ptr,
    num_seqs,
    all_tokens,
    q_stride_t,
    q_stride_h,
    q_stride_d,
    k_stride_t,
    k_stride_h,
    k_stride_d,
    v_stride_t,
    v_stride_h,
    v_stride_e,
    state_stride_p,
    state_stride_h,
    state_stride_d,
    state_stride_e,
    MOST: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
    AS_GIVEN: tl.constexpr,
    SPLIT: tl.constexpr,
    PDL: tl.constexpr,
):
    """BLOCK_E columns of one head's state, for one sequence of more than MOST tokens, chunk after chunk."""
    wait_for_previous(PDL)
    head = tl.program_id(1).to(tl.int64)
    seq = longer(cu_seqlens_ptr, num_seqs, tl.program_id(2), MOST)
    if seq < 0:
        return
    first, num_tokens, slot, continues = tokens_of(cu_seqlens_ptr, slots_ptr, kv_lens_ptr, seq)

    dot_type = q_ptr.dtype.element_ty if AS_GIVEN else tl.float32
    # Longer keys leave no registers to round in.
    ROUNDED: tl.constexpr = PRECISION if BLOCK_D <= 128 else "ieee"
    zeros = tl.zeros((CHUNK, BLOCK_E), tl.float32)
    d = tl.arange(0, BLOCK_D)
    e = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    j = tl.arange(0, CHUNK)
    d_mask, e_mask = d < SIZE, e < VALUE_SIZE
    state = tl.zeros((BLOCK_D, BLOCK_E), tl.float32)
    state_mask = d_mask[:, None] & e_mask[None, :]
    if state_ptr is not None:
        state_ptr += slot * state_stride_p + head * state_stride_h
        state_offsets = d[:, None] * state_stride_d + e[None, :] * state_stride_e
        state = tl.load(state_ptr + state_offsets, mask=state_mask & continues, other=0.0)

    plane = tl.num_programs(1).to(tl.int64) * all_tokens
    inverse_ptr += head * all_tokens * CHUNK
    scores_ptr += head * all_tokens * CHUNK
    factors_ptr += head * all_tokens
    q_ptr += head // GROUP * q_stride_h
    k_ptr += head // GROUP * k_stride_h
    v_ptr += head * v_stride_h
    out_ptr += head * VALUE_SIZE
    for chunk in range(0, num_tokens, CHUNK):
        t = first + chunk + j
        mask = chunk + j < num_tokens
        tile_mask = mask[:, None] & d_mask[None, :]
        v_mask = mask[:, None] & e_mask[None, :]
        k = tl.load(k_ptr + t[:, None] * k_stride_t + d[None, :] * k_stride_d, mask=tile_mask, other=0.0).to(dot_type)
        v = tl.load(v_ptr + t[:, None] * v_stride_t + e[None, :] * v_stride_e, mask=v_mask, other=0.0).to(tl.float32)
        inverse = tl.load(inverse_ptr + t[:, None] * CHUNK + j[None, :], mask=mask[:, None], other=0.0)
        of_keys = tl.load(factors_ptr + t, mask=mask, other=0.0)
        of_queries = tl.load(factors_ptr + plane + t, mask=mask, other=0.0)
        of_written = tl.load(factors_ptr + 2 * plane + t, mask=mask, other=0.0)
        whole = tl.load(factors_ptr + 3 * plane + first + tl.minimum(chunk + CHUNK, num_tokens) - 1)

        held = _product(k, state, zeros, PRECISION, SPLIT) * of_keys[:, None]
        written = tl.dot(inverse, _rounded(v - held, ROUNDED), input_precision=PRECISION)
        q = tl.load(q_ptr + t[:, None] * q_stride_t + d[None, :] * q_stride_d, mask=tile_mask, other=0.0).to(dot_type)
        scores = tl.load(scores_ptr + t[:, None] * CHUNK + j[None, :], mask=mask[:, None], other=0.0)
        y = _product(q, state, zeros, PRECISION, SPLIT) * of_queries[:, None]
        y = tl.dot(scores, _rounded(written, ROUNDED), acc=y, input_precision=PRECISION)
        tl.store(out_ptr + t[:, None] * HEADS * VALUE_SIZE + e[None, :], y.to(out_ptr.dtype.element_ty), mask=v_mask)
        state = _product(tl.trans(k), written * of_written[:, None], state * whole, PRECISION, SPLIT)

    if state_ptr is not None:
        tl.store(state_ptr + state_offsets, state, mask=state_mask & (slot >= 0))
