"""Linear attention and state space scans in Triton, over packed sequences of any lengths.

For each head, with the query q, key k and value v of a token and the state S [D, E], both ops are

    S = exp(decay) * S + k (step * v)^T        y = scale * q S + skip * v

where a state space scan has decay = a * step, and linear attention has steps of 1 and no skip. Two kernels share a
step: `walk_kernel` goes through sequences of few tokens one by one, bound by the bytes of their states, and
`chunks_kernel` through the others in chunks, by products of matrices. Each program has all rows of a head's state and
some of its columns, which don't depend on each other, in float32.
"""

# To pyright a kernel that is called by another returns nothing.
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from precast.kernels.stateful.triton import chunk_of_longer, longer, tokens_of
from precast.kernels.triton_chain import wait_for_previous

# The exponential of a decay below this is 0 in float32.
_GONE = tl.constexpr(-110.0)
# Padding tokens that a program clears together.
_TOGETHER = tl.constexpr(128)


@triton.jit
def step_size(dt, low, high, SOFTPLUS: tl.constexpr):  # type: ignore[no-untyped-def]
    """`dt` in float32, made positive by softplus if wanted, within `low..high`; what is no number stays that."""
    if SOFTPLUS:
        # log(1 + e) is e where the sum rounds to 1; elsewhere the quotient mends what the sum rounded.
        e = tl.exp(tl.minimum(dt, 20.0))
        total = 1.0 + e
        is_small = total == 1.0
        soft = tl.where(is_small, e, tl.log(total) * (e / tl.where(is_small, 1.0, total - 1.0)))
        dt = tl.where(dt <= 20.0, soft, dt)
    return tl.where(dt < low, low, tl.where(dt > high, high, dt))


@triton.jit
def _dot(a, b, EXACT: tl.constexpr, PRECISION: tl.constexpr):  # type: ignore[no-untyped-def]
    """a b in float32, of factors in float32 or as they were loaded.

    EXACT: what was loaded is bfloat16, and the other is taken as the sum of two such numbers, which has 16 bits.
    """
    if not EXACT:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision=PRECISION)
    elif a.dtype == tl.float32:
        high = a.to(tl.bfloat16)
        return tl.dot(high, b, tl.dot((a - high.to(tl.float32)).to(tl.bfloat16), b))
    elif b.dtype == tl.float32:
        high = b.to(tl.bfloat16)
        return tl.dot(a, high, tl.dot(a, (b - high.to(tl.float32)).to(tl.bfloat16)))
    else:
        return tl.dot(a, b)


@triton.jit(do_not_specialize=["num_sequences", "num_tokens"])
def walk_kernel(  # type: ignore[no-untyped-def]
    y_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    decay_ptr,
    dt_ptr,
    dt_bias_ptr,
    skip_ptr,
    state_ptr,
    slots_ptr,
    cu_seqlens_ptr,
    kv_lens_ptr,
    num_sequences,
    num_tokens,
    scale,
    dt_min,
    dt_max,
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
    dt_stride_t,
    dt_stride_h,
    dt_bias_stride,
    skip_stride,
    state_stride_p,
    state_stride_h,
    state_stride_d,
    state_stride_e,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BY_ROW: tl.constexpr,
    SOFTPLUS: tl.constexpr,
    WALKED: tl.constexpr,
    PDL: tl.constexpr,
):
    """BLOCK_E columns of one head's state through the tokens of a sequence that has 1 to WALKED of them.

    The last programs write zeros for the tokens after the last sequence. `decay_ptr`, `dt_ptr` with `dt_bias_ptr`,
    `skip_ptr`, and `state_ptr` with `slots_ptr` and `kv_lens_ptr` may be None. A decay has a number for each row of the
    state if it is BY_ROW. GROUP heads have one query and key.
    """
    wait_for_previous(PDL)
    head = tl.program_id(1)
    e = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    e_mask = e < VALUE_SIZE
    y_ptr += head * VALUE_SIZE
    sequence = tl.program_id(2)
    if sequence == num_sequences:
        for start in range(tl.load(cu_seqlens_ptr + num_sequences), num_tokens, _TOGETHER):
            token = start + tl.arange(0, _TOGETHER)
            target = y_ptr + token[:, None].to(tl.int64) * (HEADS * VALUE_SIZE) + e[None, :]
            zeros = tl.zeros((_TOGETHER, BLOCK_E), y_ptr.dtype.element_ty)
            tl.store(target, zeros, mask=(token < num_tokens)[:, None] & e_mask[None, :])
        return
    first, count, slot, continues = tokens_of(cu_seqlens_ptr, slots_ptr, kv_lens_ptr, sequence)
    if (count <= 0) | (count > WALKED):
        return

    d = tl.arange(0, BLOCK_D)
    d_mask = d < SIZE
    state_mask = d_mask[:, None] & e_mask[None, :]
    state_offsets = head * state_stride_h + d[:, None] * state_stride_d + e[None, :] * state_stride_e
    state = tl.zeros((BLOCK_D, BLOCK_E), tl.float32)
    if state_ptr is not None:
        state_ptr += slot * state_stride_p
        state = tl.load(state_ptr + state_offsets, mask=state_mask & continues, other=0.0)

    q_ptr += head // GROUP * q_stride_h + d * q_stride_d
    k_ptr += head // GROUP * k_stride_h + d * k_stride_d
    v_ptr += head * v_stride_h + e * v_stride_e
    if decay_ptr is not None:
        decay_ptr += head * decay_stride_h
    bias = 0.0
    if dt_bias_ptr is not None:
        bias = tl.load(dt_bias_ptr + head * dt_bias_stride).to(tl.float32)
    if skip_ptr is not None:
        skip = tl.load(skip_ptr + head * skip_stride).to(tl.float32)

    for token in range(first, first + count):
        q = tl.load(q_ptr + token * q_stride_t, mask=d_mask, other=0.0).to(tl.float32)
        k = tl.load(k_ptr + token * k_stride_t, mask=d_mask, other=0.0).to(tl.float32)
        v = tl.load(v_ptr + token * v_stride_t, mask=e_mask, other=0.0).to(tl.float32)
        written = v
        if BY_ROW:
            decay = tl.load(decay_ptr + token * decay_stride_t + d * decay_stride_d, mask=d_mask, other=0.0)
            state *= tl.exp(decay.to(tl.float32))[:, None]
        elif decay_ptr is not None:
            decay = tl.load(decay_ptr + token * decay_stride_t).to(tl.float32)
            if dt_ptr is not None:
                dt = tl.load(dt_ptr + token * dt_stride_t + head * dt_stride_h).to(tl.float32)
                step = step_size(dt + bias, dt_min, dt_max, SOFTPLUS)
                decay *= step
                written = step * v
            state *= tl.exp(decay)
        state += k[:, None] * written[None, :]
        y = scale * tl.sum(q[:, None] * state, 0)
        if skip_ptr is not None:
            y += skip * v
        tl.store(y_ptr + token * (HEADS * VALUE_SIZE) + e, y.to(y_ptr.dtype.element_ty), mask=e_mask)

    if state_ptr is not None:
        tl.store(state_ptr + state_offsets, state, mask=state_mask & (slot >= 0))


@triton.jit(do_not_specialize=["num_sequences"])
def chunks_kernel(  # type: ignore[no-untyped-def]
    y_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    decay_ptr,
    dt_ptr,
    dt_bias_ptr,
    skip_ptr,
    state_ptr,
    slots_ptr,
    cu_seqlens_ptr,
    kv_lens_ptr,
    passed_ptr,
    gone_ptr,
    num_sequences,
    scale,
    dt_min,
    dt_max,
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
    dt_stride_t,
    dt_stride_h,
    dt_bias_stride,
    skip_stride,
    state_stride_p,
    state_stride_h,
    state_stride_d,
    state_stride_e,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    CHUNK: tl.constexpr,
    SEGMENT: tl.constexpr,
    IS_FIRST: tl.constexpr,
    SOFTPLUS: tl.constexpr,
    WALKED: tl.constexpr,
    EXACT: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """BLOCK_E columns of one head's state through a sequence of more than WALKED tokens, or a segment, CHUNK by CHUNK.

    In a chunk, with g[i] the sum of its decays up to token i and S the state before it:

        y[i] = scale * (exp(g[i]) * q[i] S + sum over j <= i of (q[i] k[j]) exp(g[i] - g[j]) step[j] v[j])
        S    = exp(g[last]) * S + sum over j of k[j] (exp(g[last] - g[j]) step[j] v[j])^T

    SEGMENT is 0, or the tokens of a segment, a multiple of CHUNK. If it IS_FIRST, only the state after each segment but
    a sequence's last is computed, from zero, into `passed_ptr`, and the sum of its decays into `gone_ptr`. Else states
    before segments are there (`pass_kernel`). Other arguments as those of `walk_kernel`. `EXACT`, `PRECISION`: `_dot`.
    """
    wait_for_previous(PDL)
    segment = 0
    if SEGMENT > 0:
        sequence, segment = chunk_of_longer(cu_seqlens_ptr, num_sequences, tl.program_id(2), WALKED, SEGMENT)
    else:
        sequence = longer(cu_seqlens_ptr, num_sequences, tl.program_id(2), WALKED)
    if sequence < 0:
        return
    first, count, slot, continues = tokens_of(cu_seqlens_ptr, slots_ptr, kv_lens_ptr, sequence)
    begin, end = 0, count
    if SEGMENT > 0:
        begin, end = segment * SEGMENT, tl.minimum(count, (segment + 1) * SEGMENT)
        if (begin >= count) | (IS_FIRST & (end >= count)):
            return
    is_whole = count <= SEGMENT if SEGMENT > 0 else True

    head = tl.program_id(1)
    i = tl.arange(0, CHUNK)
    d = tl.arange(0, BLOCK_D)
    e = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    d_mask, e_mask = d < SIZE, e < VALUE_SIZE
    state_mask = d_mask[:, None] & e_mask[None, :]
    state_offsets = head * state_stride_h + d[:, None] * state_stride_d + e[None, :] * state_stride_e
    state = tl.zeros((BLOCK_D, BLOCK_E), tl.float32)
    if state_ptr is not None:
        state_ptr += slot * state_stride_p
    if state_ptr is not None and not IS_FIRST:
        state = tl.load(state_ptr + state_offsets, mask=state_mask & continues & is_whole, other=0.0)
    if SEGMENT > 0:
        place = (2 * first // SEGMENT + segment) * HEADS + head
        passed_ptr += place * (SIZE * VALUE_SIZE)
        passed_offsets = d[:, None] * VALUE_SIZE + e[None, :]
        if not IS_FIRST:
            state += tl.load(passed_ptr + passed_offsets, mask=state_mask & (count > SEGMENT), other=0.0)
    gone = 0.0

    y_ptr += first * (HEADS * VALUE_SIZE) + head * VALUE_SIZE
    q_ptr += first * q_stride_t + head // GROUP * q_stride_h
    k_ptr += first * k_stride_t + head // GROUP * k_stride_h
    v_ptr += first * v_stride_t + head * v_stride_h
    bias = 0.0
    if decay_ptr is not None:
        decay_ptr += first * decay_stride_t + head * decay_stride_h
    if dt_ptr is not None:
        dt_ptr += first * dt_stride_t + head * dt_stride_h
    if dt_bias_ptr is not None:
        bias = tl.load(dt_bias_ptr + head * dt_bias_stride).to(tl.float32)
    if skip_ptr is not None:
        skip = tl.load(skip_ptr + head * skip_stride).to(tl.float32)

    for start in range(begin, end, CHUNK):
        token = (start + i).to(tl.int64)
        inside = token < end
        k_mask = inside[:, None] & d_mask[None, :]
        v_mask = inside[:, None] & e_mask[None, :]
        k = tl.load(k_ptr + token[:, None] * k_stride_t + d[None, :] * k_stride_d, mask=k_mask, other=0.0)
        v = tl.load(v_ptr + token[:, None] * v_stride_t + e[None, :] * v_stride_e, mask=v_mask, other=0.0)

        decay = tl.zeros((CHUNK,), tl.float32)
        weight = tl.full((CHUNK,), 1.0, tl.float32)
        if decay_ptr is not None:
            decay = tl.load(decay_ptr + token * decay_stride_t, mask=inside, other=0.0).to(tl.float32)
        if dt_ptr is not None:
            dt = tl.load(dt_ptr + token * dt_stride_t, mask=inside, other=0.0).to(tl.float32)
            weight = step_size(dt + bias, dt_min, dt_max, SOFTPLUS)
            decay = tl.where(inside, decay * weight, 0.0)
        decay = tl.where(decay < _GONE, _GONE, decay)
        # Sums of multiples of 1/1024 are exact, and those of what is left are small: so are the errors of differences,
        # however steep the decays before are.
        coarse = tl.floor(decay * 1024.0) / 1024.0
        fine = tl.cumsum(decay - coarse, 0)
        coarse = tl.cumsum(coarse, 0)
        last = i == CHUNK - 1
        coarse_last, fine_last = tl.sum(tl.where(last, coarse, 0.0), 0), tl.sum(tl.where(last, fine, 0.0), 0)
        leaving = tl.exp((coarse_last - coarse) + (fine_last - fine)) * weight
        added = _dot(tl.trans(k), v.to(tl.float32) * leaving[:, None], EXACT, PRECISION)
        if IS_FIRST:
            gone += coarse_last + fine_last
        else:
            q = tl.load(q_ptr + token[:, None] * q_stride_t + d[None, :] * q_stride_d, mask=k_mask, other=0.0)
            between = (coarse[:, None] - coarse[None, :]) + (fine[:, None] - fine[None, :])
            is_before = i[:, None] >= i[None, :]
            factor = tl.where(is_before, tl.exp(tl.where(is_before, between, 0.0)) * weight[None, :], 0.0)
            scores = _dot(q, tl.trans(k), EXACT, PRECISION) * factor
            arriving = tl.exp(coarse + fine)[:, None]
            y = _dot(q, state, EXACT, PRECISION) * arriving + _dot(scores, v, EXACT, PRECISION)
            y *= scale
            if skip_ptr is not None:
                y += skip * v.to(tl.float32)
            target = y_ptr + token[:, None] * (HEADS * VALUE_SIZE) + e[None, :]
            tl.store(target, y.to(y_ptr.dtype.element_ty), mask=v_mask)
        state = state * tl.exp(coarse_last + fine_last) + added

    if IS_FIRST:
        tl.store(passed_ptr + passed_offsets, state, mask=state_mask)
        tl.store(gone_ptr + place, gone)
    elif state_ptr is not None:
        tl.store(state_ptr + state_offsets, state, mask=state_mask & (slot >= 0) & (end == count))


@triton.jit(do_not_specialize=["num_sequences"])
def pass_kernel(  # type: ignore[no-untyped-def]
    state_ptr,
    slots_ptr,
    cu_seqlens_ptr,
    kv_lens_ptr,
    passed_ptr,
    gone_ptr,
    num_sequences,
    state_stride_p,
    state_stride_h,
    state_stride_d,
    state_stride_e,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    SEGMENT: tl.constexpr,
    PDL: tl.constexpr,
):
    """BLOCK numbers of one head's state, from segment to segment of a sequence of more than SEGMENT tokens.

    `passed_ptr` has the state after each segment but the last, from zero, and gets the state before each. `gone_ptr`
    has the sums of their decays.
    """
    wait_for_previous(PDL)
    sequence = longer(cu_seqlens_ptr, num_sequences, tl.program_id(2), SEGMENT)
    if sequence < 0:
        return
    first, count, slot, continues = tokens_of(cu_seqlens_ptr, slots_ptr, kv_lens_ptr, sequence)
    head = tl.program_id(1)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < SIZE * VALUE_SIZE
    state = tl.zeros((BLOCK,), tl.float32)
    if state_ptr is not None:
        offsets = head * state_stride_h + i // VALUE_SIZE * state_stride_d + i % VALUE_SIZE * state_stride_e
        state = tl.load(state_ptr + slot * state_stride_p + offsets, mask=mask & continues, other=0.0)
    place = 2 * first // SEGMENT * HEADS + head
    last = (count - 1) // SEGMENT
    for segment in range(0, last + 1):
        source = passed_ptr + (place + segment * HEADS) * (SIZE * VALUE_SIZE) + i
        added = tl.load(source, mask=mask & (segment < last), other=0.0)
        factor = tl.exp(tl.load(gone_ptr + place + segment * HEADS, mask=segment < last, other=0.0))
        tl.store(source, state, mask=mask)
        state = state * factor + added
