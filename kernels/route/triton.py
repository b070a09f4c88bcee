"""precast.route in Triton: one program a token, which holds the scores of all experts.

Experts are ranked by integers in the order of their scores, with what is no number above all, as sorting has it. The
best is found as often as experts are wanted, and of equal ones the first is taken.
"""

# To pyright a kernel that is called by another returns nothing.
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from precast.kernels.triton_chain import wait_for_previous

# Below every rank: of what was taken, and of what is no expert.
_TAKEN = tl.constexpr(-(2**63))
_INFINITE = tl.constexpr(0x7F800000)


@triton.jit
def _rank(x):  # type: ignore[no-untyped-def]
    """int64 numbers in the order of float32 ones, equal for equals; NaN is the largest."""
    x = tl.where(x == 0.0, 0.0, x)
    bits = x.to(tl.int32, bitcast=True)
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return tl.where(x == x, bits, 0x7FFFFFFF).to(tl.int64)


@triton.jit
def _ranked_by(x, index):  # type: ignore[no-untyped-def]
    """Numbers of which the largest is that of the largest x, of equal ones that of the least index."""
    return _rank(x) * 4294967296 + (4294967295 - index.to(tl.int64))


@triton.jit
def _index_of(ranked):  # type: ignore[no-untyped-def]
    """The index that `_ranked_by` was given."""
    return (4294967295 - (ranked & 4294967295)).to(tl.int32)


@triton.jit
def _score(logits, largest, total, SCORING: tl.constexpr):  # type: ignore[no-untyped-def]
    """The scores of logits. For softmax: `largest` of all of them, and the `total` of exp(logit - largest)."""
    if SCORING == "softmax":
        return tl.exp(logits - largest) / total
    elif SCORING == "sigmoid":
        return 1.0 / (1.0 + tl.exp(-logits))
    else:
        # log(1 + e) is e where the sum rounds to 1; elsewhere the quotient mends what the sum rounded.
        e = tl.exp(tl.minimum(logits, 20.0))
        total = 1.0 + e
        is_small = total == 1.0
        soft = tl.where(is_small, e, tl.log(total) * (e / tl.where(is_small, 1.0, total - 1.0)))
        return tl.sqrt(tl.where(logits > 20.0, logits, soft))


@triton.jit
def _within_groups(x, group, index, is_expert, TOP_GROUPS: tl.constexpr, SUMS_TWO: tl.constexpr):  # type: ignore[no-untyped-def]
    """`x` [groups, experts of a group] with minus infinity outside of the best groups."""
    ranked = tl.where(is_expert, _ranked_by(x, index), _TAKEN)
    first = tl.max(ranked, 1)
    score = tl.sum(tl.where(ranked == first[:, None], x, 0.0), 1)
    if SUMS_TWO:
        others = tl.where(ranked == first[:, None], _TAKEN, ranked)
        score += tl.sum(tl.where(others == tl.max(others, 1)[:, None], x, 0.0), 1)
    score = tl.where(first != _TAKEN, _ranked_by(score, group), _TAKEN)
    kept = tl.zeros_like(group)
    for _ in tl.static_range(TOP_GROUPS):
        best = tl.max(score, 0)
        kept = tl.where(score == best, 1, kept)
        score = tl.where(score == best, _TAKEN, score)
    return tl.where(kept[:, None] != 0, x, float("-inf"))


@triton.jit
def route_kernel(  # type: ignore[no-untyped-def]
    weights_ptr,
    ids_ptr,
    logits_ptr,
    bias_ptr,
    stride_t,
    stride_e,
    bias_stride,
    SCORING: tl.constexpr,
    TOP_K: tl.constexpr,
    BY_SCORES: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    SUMS_TWO: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    NORMALISES: tl.constexpr,
    EPSILON: tl.constexpr,
    FLOOR: tl.constexpr,
    SCALE: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """The experts of one token; `SIZE` of them in each of `NUM_GROUPS` groups."""
    wait_for_previous(PDL)
    token = tl.program_id(0).to(tl.int64)
    logits_ptr += token * stride_t
    group = tl.arange(0, BLOCK_G)
    place = tl.arange(0, BLOCK_E)
    index = group[:, None] * SIZE + place[None, :]
    is_expert = (group[:, None] < NUM_GROUPS) & (place[None, :] < SIZE)
    logits = tl.load(logits_ptr + index * stride_e, mask=is_expert, other=float("-inf")).to(tl.float32)
    largest, total = 0.0, 1.0
    values = logits
    if BY_SCORES:
        if SCORING == "softmax":
            largest = tl.max(tl.max(logits, 1), 0)
            total = tl.sum(tl.sum(tl.exp(logits - largest), 1), 0)
        values = _score(logits, largest, total, SCORING)
    if HAS_BIAS:
        values += tl.load(bias_ptr + index * bias_stride, mask=is_expert, other=0.0).to(tl.float32)
    if NUM_GROUPS > 1:
        values = _within_groups(values, group, index, is_expert, TOP_GROUPS, SUMS_TWO)

    ranked = tl.where(is_expert, _ranked_by(values, index), _TAKEN)
    j = tl.arange(0, BLOCK_K)
    ids = tl.zeros([BLOCK_K], tl.int32)
    for chosen in tl.static_range(TOP_K):
        best = tl.max(tl.max(ranked, 1), 0)
        ids = tl.where(j == chosen, _index_of(best), ids)
        ranked = tl.where(ranked == best, _TAKEN, ranked)

    logits = tl.load(logits_ptr + ids * stride_e, mask=j < TOP_K, other=float("-inf")).to(tl.float32)
    if not BY_SCORES and SCORING == "softmax":
        largest = tl.max(logits, 0)
        total = tl.sum(tl.exp(logits - largest), 0)
    weights = tl.where(j < TOP_K, _score(logits, largest, total, SCORING), 0.0)
    if NORMALISES:
        divisor = tl.sum(weights, 0) + EPSILON
        weights /= tl.where(divisor < FLOOR, FLOOR, divisor)
    weights *= SCALE
    tl.store(weights_ptr + token * TOP_K + j, weights.to(weights_ptr.dtype.element_ty), mask=j < TOP_K)
    tl.store(ids_ptr + token * TOP_K + j, ids.to(tl.int64), mask=j < TOP_K)
