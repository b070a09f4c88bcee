"""Which tokens of a row pass top_k and top_p, in Triton, without sorting the row.

The candidates of a row are counted and weighed in bins of x (`weigh_kernel`). Of most bins that tells whether all of
their tokens pass, or none (`select_kernel`). What is left are the bin of the k-th largest, and the few in which top_p
may end. Their tokens, once listed, are decided by themselves (`finish_kernel`): bisection finds the k-th largest x, the
last x that top_p keeps, and the last index at it, with exact counts and sums of weights. Where they are more than a
program can hold, which takes thousands of equals, it reads the row again for each step of the bisection.
"""

# To pyright a kernel that is called by another returns nothing.
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from precast.kernels.sampling.triton_numbers import INFINITE, bin_of, gumbel, keys, magnitude, scaled, uniform, weight

DONE, OPEN, SEARCHED = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
"""A row's kind: its token is known; it draws from all candidates; it draws from those that pass top_k and top_p."""

KIND, FIRST, LAST, KTH, ABOVE, LISTED = (tl.constexpr(place) for place in range(6))
PLAN = tl.constexpr(6)
"""A row's `plan` of int32: its kind, the first bin of which not all tokens pass, the last of which any may, the bin of
the k-th largest (BINS: none), the candidates in the bins above that, and how many tokens are listed."""

ABOVE_KTH, ABOVE_FIRST, TOTAL = (tl.constexpr(place) for place in range(3))
SUMS = tl.constexpr(4)
"""A row's `sums` of weights, int64: in the bins above KTH, in those above FIRST, of all that top_p counts."""

TOP, FLOOR, LOWER, SCALE = (tl.constexpr(place) for place in range(4))
LIMITS = tl.constexpr(4)
"""A row's `limits` of float32: its largest logit, the least x of a candidate, the least that top_p counts, and how many
bins there are in a unit of x."""


@triton.jit
def top_k_of(top_k, size):  # type: ignore[no-untyped-def]
    """top_k; 0 where it is off or keeps all tokens."""
    return tl.where((top_k > 0) & (top_k < size), top_k, 0)


@triton.jit
def top_p_of(top_p, min_p):  # type: ignore[no-untyped-def]
    """top_p in 0..1; 0, which keeps the first token alone, where min_p lets none pass."""
    return tl.where(min_p > 1.0, 0.0, tl.minimum(tl.maximum(top_p, 0.0), 1.0))


@triton.jit
def _passes(before, total, top_p):  # type: ignore[no-untyped-def]
    """Whether top_p keeps a token that comes after tokens of weight `before`, of `total`. The first always passes."""
    return (before == 0) | (before.to(tl.float64) < top_p.to(tl.float64) * total.to(tl.float64))


@triton.jit
def weigh_kernel(  # type: ignore[no-untyped-def]
    logits_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    plan_ptr,
    limits_ptr,
    counts_ptr,
    weights_ptr,
    rests_ptr,
    size,
    chunk,
    stride_r,
    stride_v,
    SPLITS: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Adds a part of a row to its bins; `rests` get the weight of what is no candidate and yet counts for top_p."""
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if tl.load(plan_ptr + row * PLAN + KIND) != SEARCHED:
        return
    limits_ptr += row * LIMITS
    top, floor = tl.load(limits_ptr + TOP), tl.load(limits_ptr + FLOOR)
    lower, scale = tl.load(limits_ptr + LOWER), tl.load(limits_ptr + SCALE)
    temperature = tl.load(temperature_ptr + row)
    is_counted = top_k_of(tl.load(top_k_ptr + row), size) > 0
    is_weighed = top_p_of(tl.load(top_p_ptr + row), tl.load(min_p_ptr + row)) < 1.0
    logits_ptr += row * stride_r
    end = tl.minimum(split * chunk + chunk, size)
    rest = tl.zeros([BLOCK], tl.int64)
    for start in range(split * chunk, end, BLOCK):
        index = start + tl.arange(0, BLOCK)
        logits = tl.load(logits_ptr + index.to(tl.int64) * stride_v, mask=index < size, other=float("-inf"))
        x = scaled(logits, top, temperature)
        if tl.max((x >= lower).to(tl.int32), 0) > 0:
            place = bin_of(x, floor, scale, BINS)
            is_candidate = place >= 0
            if is_counted:
                tl.atomic_add(counts_ptr + row * BINS + place, 1, mask=is_candidate, sem="relaxed")
            if is_weighed:
                weights = weight(x)
                tl.atomic_add(weights_ptr + row * BINS + place, weights, mask=is_candidate, sem="relaxed")
                rest += tl.where((x >= lower) & (place < 0), weights, 0)
    tl.store(rests_ptr + row * SPLITS + split, tl.sum(rest, 0))


@triton.jit(do_not_specialize=["num_splits"])
def select_kernel(  # type: ignore[no-untyped-def]
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    plan_ptr,
    counts_ptr,
    weights_ptr,
    rests_ptr,
    sums_ptr,
    size,
    num_splits,
    SPLITS: tl.constexpr,
    BINS: tl.constexpr,
):
    """Finds the bins of a row that must be looked into.

    What top_p's share is taken of is not known before the k-th largest is, but lies between two sums of bins.
    """
    row = tl.program_id(0).to(tl.int64)
    plan_ptr += row * PLAN
    sums_ptr += row * SUMS
    if tl.load(plan_ptr + KIND) != SEARCHED:
        return
    top_k = top_k_of(tl.load(top_k_ptr + row), size)
    top_p = top_p_of(tl.load(top_p_ptr + row), tl.load(min_p_ptr + row))
    bins = tl.arange(0, BINS)
    counts = tl.load(counts_ptr + row * BINS + bins)
    weights = tl.load(weights_ptr + row * BINS + bins)
    splits = tl.arange(0, SPLITS)
    rest = tl.sum(tl.load(rests_ptr + row * SPLITS + splits, mask=splits < num_splits, other=0), 0)

    num_short = tl.sum((tl.cumsum(counts, 0) < top_k).to(tl.int32), 0)
    kth = tl.where(top_k > 0, num_short, BINS)
    above_kth = tl.sum(tl.where(bins < kth, weights, 0), 0)
    through_kth = tl.sum(tl.where(bins <= kth, weights, 0), 0)
    total = tl.sum(weights, 0) + rest
    least, most = tl.where(kth < BINS, above_kth, total), tl.where(kth < BINS, through_kth, total)
    through = tl.cumsum(weights, 0)
    num_sure = tl.sum((through.to(tl.float64) < top_p.to(tl.float64) * least.to(tl.float64)).to(tl.int32), 0)
    num_possible = tl.sum(_passes(through - weights, most, top_p).to(tl.int32), 0)
    first = tl.where(top_p < 1.0, tl.minimum(num_sure, kth), kth)
    last = tl.where(top_p < 1.0, tl.minimum(num_possible - 1, kth), kth)

    tl.store(plan_ptr + FIRST, first)
    tl.store(plan_ptr + LAST, last)
    tl.store(plan_ptr + KTH, kth)
    tl.store(plan_ptr + ABOVE, tl.sum(tl.where(bins < kth, counts, 0), 0))
    tl.store(sums_ptr + ABOVE_KTH, above_kth)
    tl.store(sums_ptr + ABOVE_FIRST, tl.sum(tl.where(bins < first, weights, 0), 0))
    tl.store(sums_ptr + TOTAL, total)


@triton.jit
def _edges(first, last, floor, scale):  # type: ignore[no-untyped-def]
    """Magnitudes of x between which the bins first..last lie, a little more than they are."""
    wide = tl.where(scale > 0.0, 1.0 / scale, 0.0)
    low = magnitude(first.to(tl.float32) * wide * 0.9999)
    high = magnitude((last + 1).to(tl.float32) * wide * 1.0001)
    return low, tl.minimum(high, magnitude(floor))


@triton.jit
def _tile(line, index, mask, BINS: tl.constexpr):  # type: ignore[no-untyped-def]
    """x and bin of tokens of a row."""
    logits_ptr, stride_v, _, top, temperature, floor, scale = line
    logits = tl.load(logits_ptr + index.to(tl.int64) * stride_v, mask=mask, other=float("-inf"))
    x = scaled(logits, top, temperature)
    return x, bin_of(x, floor, scale, BINS)


@triton.jit
def _is_before(x, place, index, first, last, cut, end):  # type: ignore[no-untyped-def]
    """Of the bins first..last, which come before the token `end` of those with the magnitude `cut`."""
    size = magnitude(x)
    return (place >= first) & (place <= last) & ((size < cut) | ((size == cut) & (index < end)))


@triton.jit
def _before(line, held, first, last, cut, end, STREAMED: tl.constexpr, BINS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """How many tokens `_is_before` names, int32, and their weight."""
    index, x, place, weights = held
    if STREAMED:
        size = line[2]
        count = tl.zeros([BLOCK], tl.int32)
        total = tl.zeros([BLOCK], tl.int64)
        for start in range(0, size, BLOCK):
            index = start + tl.arange(0, BLOCK)
            x, place = _tile(line, index, index < size, BINS)
            is_before = _is_before(x, place, index, first, last, cut, end)
            count += is_before.to(tl.int32)
            total += tl.where(is_before, weight(x), 0)
        return tl.sum(count, 0), tl.sum(total, 0)
    else:
        is_before = _is_before(x, place, index, first, last, cut, end)
        return tl.sum(is_before.to(tl.int32), 0), tl.sum(tl.where(is_before, weights, 0), 0)


@triton.jit
def _kth(line, held, kth, rank, STREAMED: tl.constexpr, BINS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """The magnitude of the `rank`-th largest x of a bin."""
    low, high = _edges(kth, kth, line[5], line[6])
    high += 1
    while high - low > 1:
        middle = low + (high - low) // 2
        before = _before(line, held, kth, kth, middle, 0, STREAMED, BINS, BLOCK)
        is_reached = before[0] < rank
        low = tl.where(is_reached, middle, low)
        high = tl.where(is_reached, high, middle)
    return low


@triton.jit
def _end_of_top_p(  # type: ignore[no-untyped-def]
    line, held, first, last, cut, above, total, top_p, STREAMED: tl.constexpr, BINS: tl.constexpr, BLOCK: tl.constexpr
):
    """The magnitude of the last x that top_p keeps, at most `cut`, and the index up to which it keeps that x."""
    low, high = _edges(first, last, line[5], line[6])
    high = tl.minimum(high, cut) + 1
    while high - low > 1:
        middle = low + (high - low) // 2
        before = _before(line, held, first, last, middle, 0, STREAMED, BINS, BLOCK)
        is_kept = _passes(above + before[1], total, top_p)
        low = tl.where(is_kept, middle, low)
        high = tl.where(is_kept, high, middle)
    size = line[2]
    before = _before(line, held, first, last, low, 0, STREAMED, BINS, BLOCK)
    through = _before(line, held, first, last, low + 1, 0, STREAMED, BINS, BLOCK)
    index = tl.where(through[0] - before[0] > 1, 0, size - 1)
    end = tl.zeros_like(index) + size
    while end - index > 1:
        middle = index + (end - index) // 2
        before = _before(line, held, first, last, low, middle, STREAMED, BINS, BLOCK)
        is_kept = _passes(above + before[1], total, top_p)
        index = tl.where(is_kept, middle, index)
        end = tl.where(is_kept, end, middle)
    return low, index


@triton.jit
def best_of(scores, index, size):  # type: ignore[no-untyped-def]
    """The largest of `scores`, and the least index of those that are as large; `size` if all are minus infinity."""
    best = tl.max(scores, 0)
    return best, tl.min(tl.where((scores == best) & (scores > float("-inf")), index, size), 0)


@triton.jit
def _decided(  # type: ignore[no-untyped-def]
    line,
    words,
    tokens_ptr,
    num_listed,
    plan_ptr,
    sums_ptr,
    top_k,
    top_p,
    STREAMED: tl.constexpr,
    BINS: tl.constexpr,
    CAPACITY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The best score of the tokens of a row that must be looked into, and its token."""
    first, last, kth = tl.load(plan_ptr + FIRST), tl.load(plan_ptr + LAST), tl.load(plan_ptr + KTH)
    size = line[2]
    listed = tl.arange(0, CAPACITY)
    is_listed = listed < num_listed
    index = tl.load(tokens_ptr + listed, mask=is_listed, other=0)
    x, place = _tile(line, index, is_listed, BINS)
    held = (index, x, place, weight(x))

    cut = first * 0 + INFINITE
    total = tl.load(sums_ptr + TOTAL)
    if kth < BINS:
        cut = _kth(line, held, kth, top_k - tl.load(plan_ptr + ABOVE), STREAMED, BINS, BLOCK)
        through = _before(line, held, kth, kth, cut + 1, 0, STREAMED, BINS, BLOCK)
        total = tl.load(sums_ptr + ABOVE_KTH) + through[1]
    end = first * 0 + size
    if top_p < 1.0:
        above = tl.load(sums_ptr + ABOVE_FIRST)
        cut, end = _end_of_top_p(line, held, first, last, cut, above, total, top_p, STREAMED, BINS, BLOCK)

    if STREAMED:
        scores = tl.full([BLOCK], float("-inf"), tl.float32)
        best_index = tl.full([BLOCK], 0, tl.int32)
        for start in range(0, size, BLOCK):
            index = start + tl.arange(0, BLOCK)
            x, place = _tile(line, index, index < size, BINS)
            is_kept = _is_before(x, place, index, first, last, cut, end + 1)
            score = tl.where(is_kept, x + gumbel(uniform(words[0], words[1], index)), float("-inf"))
            best_index = tl.where(score > scores, index, best_index)
            scores = tl.maximum(score, scores)
        return best_of(scores, best_index, size)
    else:
        is_kept = _is_before(x, place, index, first, last, cut, end + 1)
        scores = tl.where(is_kept, x + gumbel(uniform(words[0], words[1], index)), float("-inf"))
        return best_of(scores, index, size)


@triton.jit(do_not_specialize=["num_splits"])
def finish_kernel(  # type: ignore[no-untyped-def]
    out_ptr,
    logits_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    seeds_ptr,
    steps_ptr,
    plan_ptr,
    limits_ptr,
    tokens_ptr,
    sums_ptr,
    scores_ptr,
    drawn_ptr,
    size,
    num_splits,
    stride_r,
    stride_v,
    SPLITS: tl.constexpr,
    BINS: tl.constexpr,
    LISTED_MOST: tl.constexpr,
    CAPACITY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The token of a row: the best of what its parts have drawn, and of the listed tokens that pass."""
    row = tl.program_id(0).to(tl.int64)
    plan_ptr += row * PLAN
    kind = tl.load(plan_ptr + KIND)
    if kind == DONE:
        return
    splits = tl.arange(0, SPLITS)
    scores = tl.load(scores_ptr + row * SPLITS + splits, mask=splits < num_splits, other=float("-inf"))
    best, token = best_of(scores, tl.load(drawn_ptr + row * SPLITS + splits), size)
    num_listed = tl.load(plan_ptr + LISTED)
    if num_listed > 0:
        limits_ptr += row * LIMITS
        line = (
            logits_ptr + row * stride_r, stride_v, size, tl.load(limits_ptr + TOP), tl.load(temperature_ptr + row),
            tl.load(limits_ptr + FLOOR), tl.load(limits_ptr + SCALE),
        )  # fmt: skip
        words = keys(tl.load(seeds_ptr + row), tl.load(steps_ptr + row))
        top_k = top_k_of(tl.load(top_k_ptr + row), size)
        top_p = top_p_of(tl.load(top_p_ptr + row), tl.load(min_p_ptr + row))
        tokens_ptr += row * LISTED_MOST
        sums_ptr += row * SUMS
        if num_listed <= CAPACITY:
            score, other = _decided(
                line, words, tokens_ptr, num_listed, plan_ptr, sums_ptr, top_k, top_p, False, BINS, CAPACITY, BLOCK
            )
        else:
            score, other = _decided(
                line, words, tokens_ptr, 0, plan_ptr, sums_ptr, top_k, top_p, True, BINS, CAPACITY, BLOCK
            )
        is_better = (score > best) | ((score == best) & (other < token))
        token = tl.where(is_better, other, token)
    tl.store(out_ptr + row, token.to(tl.int64))
