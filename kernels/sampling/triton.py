"""precast.sample@2 in Triton, without sorting. It reads nothing back, and launches the same whatever rows ask for.

Each row is divided among several programs, so that few rows keep a GPU busy. What a row asks for is read on the device:

1. `scan_kernel` finds the largest logit of each part, and says whether it has a NaN or anything finite;
2. `prepare_kernel` puts them together. Rows that are greedy or broken have their token now, and all others return at
   once for them. For top_k it finds an x that at least so many tokens have, the k-th largest of the maxima of many
   groups of tokens;
3. `pass_kernel` goes over the row. With top_k it lists the few tokens that have that x at least. Without, it finds the
   token with the best score x + noise, and the sum of all weights if there is a top_p. That token is the one wanted if
   it is among those that top_p keeps: if the weights of the tokens before it, larger ones and equals of a lower index,
   come to less than top_p of the sum. If not, all that top_p keeps are before it. So the next pass sums the weights
   before that token, and finds the best score among those. Each pass makes the set smaller; few rows need a third one;
4. `finish_kernel` has the token, or sorts what is listed of a row and draws from that, or goes on by itself with the
   row.

The sets are those of the definition: each x, weight, sum and comparison is computed in its roundings, sums of weights
as integers. What adds up atomically is only how many tokens are listed, and their order tells nothing. exp, log and
log1p are the ones that PyTorch calls on a GPU; on other hardware their last bit may differ, and a token whose weight
decides by that bit alone.
"""

# To pyright a kernel that is called by another returns nothing.
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from precast.kernels.sampling import limits
from precast.kernels.sampling.triton_numbers import (
    INFINITE,
    gumbel,
    keys,
    log,
    logit_of,
    magnitude,
    scaled,
    top_of,
    uniform,
    weight,
)
from precast.kernels.triton_chain import wait_for_previous

_DONE, _OPEN, _SHARED, _LISTED = (tl.constexpr(kind) for kind in range(4))
"""A row's kind: its token is known; it draws from all candidates; it has top_p alone; its candidates are listed."""

_KIND, _COUNT, _TOP_K, _ONE, _TWO = (tl.constexpr(place) for place in range(5))
_PLAN = tl.constexpr(limits.PLAN)
"""A row's `plan` of int32: its kind, how many tokens are candidates of a row that lists them, top_k, and the two words
of its noise."""

_TOP, _TEMPERATURE, _FLOOR, _SHARE, _REACHED = (tl.constexpr(place) for place in range(5))
_LIMITS = tl.constexpr(limits.LIMITS)
"""A row's `limits` of float32: its largest logit, the temperature, the least x of a candidate, the share that top_p
keeps, and a score that one of them has."""

# The least x of which the weight isn't 0 is -28.42.
_WEIGHTLESS = tl.constexpr(-28.5)
# Noise is at most 22.88.
_NOISE = tl.constexpr(23.0)
# Far more than what a bound of a score is rounded by.
_MARGIN = tl.constexpr(0.01)
# Bits of a magnitude below which the bound of top_k isn't searched: an x of 16 is known to 1/8.
_PRECISION = tl.constexpr(1 << 16)
_NOTHING = tl.constexpr(float("-inf"))
# Of what is listed, the magnitude of its x above its index: in ascending order the largest x come first, then the
# least indices.
_INDEX = tl.constexpr((1 << 32) - 1)
_LAST = tl.constexpr((1 << 63) - 1)


@triton.jit
def _best_of(scores, index, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The largest of `scores`, and the least index of those that are as large; SIZE if all are minus infinity."""
    best = tl.max(scores, 0)
    return best, tl.min(tl.where((scores == best) & (scores > _NOTHING), index, SIZE), 0)


@triton.jit
def _better(best, token, score, other):  # type: ignore[no-untyped-def]
    """The better of two scores and its token, the first of equals."""
    is_better = (score > best) | ((score == best) & (other < token))
    return tl.where(is_better, score, best), tl.where(is_better, other, token)


@triton.jit
def _part(FIRST: tl.constexpr, LAST: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """The tokens of this program, whole tiles of those from FIRST on: the first of them, and the first that isn't."""
    chunk = tl.cdiv(tl.cdiv(LAST - FIRST, BLOCK), tl.num_programs(1)) * BLOCK
    begin = FIRST + tl.program_id(1) * chunk
    return begin, tl.minimum(begin + chunk, LAST)


@triton.jit
def _logits(logits_ptr, stride_v, index, end):  # type: ignore[no-untyped-def]
    """Logits of a row; minus infinity for an index from `end` on."""
    return tl.load(logits_ptr + index.to(tl.int64) * stride_v, mask=index < end, other=_NOTHING)


@triton.jit
def scan_kernel(  # type: ignore[no-untyped-def]
    logits_ptr,
    stride_r,
    stride_v,
    tops_ptr,
    least_ptr,
    places_ptr,
    maxima_ptr,
    first_split,
    SIZE: tl.constexpr,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
    SPLITS: tl.constexpr,
    OWN_GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Of a part of a row: the largest logit and its first index, the maxima of groups, and the least magnitude.

    That is infinite if nothing is finite, and noted as -1 if there is a NaN. `logits_ptr` has the tokens from FIRST
    to LAST; the programs, of all that there are of the row, begin with number `first_split`.
    """
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride_r - FIRST * stride_v
    begin, end = _part(FIRST, LAST, BLOCK)
    lane = tl.arange(0, BLOCK)
    top = tl.full([BLOCK], float("-inf"), tl.float32)
    least = tl.full([BLOCK], float("inf"), tl.float32)
    place = lane * 0
    following = _logits(logits_ptr, stride_v, begin + lane, end)
    for start in range(begin, end, BLOCK):
        logits = following.to(tl.float32)
        following = _logits(logits_ptr, stride_v, start + BLOCK + lane, end)
        least = tl.minimum(least, tl.abs(logits), propagate_nan=tl.PropagateNan.ALL)
        place = tl.where(logits > top, start + lane, place)
        top = tl.where(logits > top, logits, top)
    own = row * SPLITS + first_split + tl.program_id(1)
    largest, token = _best_of(top, place, SIZE)
    tl.store(tops_ptr + own, largest)
    tl.store(places_ptr + own, token)
    tl.store(least_ptr + own, tl.min(tl.where(least != least, -1.0, least), 0))
    maxima = tl.max(tl.reshape(top, [OWN_GROUPS, BLOCK // OWN_GROUPS]), 1)
    tl.store(maxima_ptr + own * OWN_GROUPS + tl.arange(0, OWN_GROUPS), maxima)


@triton.jit
def _bound_of_top_k(maxima, top_k, top, temperature):  # type: ignore[no-untyped-def]
    """An x that at least `top_k` tokens of a row reach; minus infinity if not so many groups have a finite maximum."""
    sizes = magnitude(scaled(maxima, top, temperature))
    low = top_k * 0 - 1
    high = top_k * 0 + INFINITE
    while high - low > _PRECISION:
        middle = low + (high - low) // 2
        is_reached = tl.sum((sizes <= middle).to(tl.int32), 0) >= top_k
        high = tl.where(is_reached, middle, high)
        low = tl.where(is_reached, low, middle)
    return -high.to(tl.float32, bitcast=True)


@triton.jit
def prepare_kernel(  # type: ignore[no-untyped-def]
    out_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    seeds_ptr,
    steps_ptr,
    temperature_stride,
    top_k_stride,
    top_p_stride,
    min_p_stride,
    seeds_stride,
    steps_stride,
    tops_ptr,
    least_ptr,
    places_ptr,
    maxima_ptr,
    plan_ptr,
    limits_ptr,
    num_splits,
    SIZE: tl.constexpr,
    SPLITS: tl.constexpr,
    OWN_GROUPS: tl.constexpr,
    GROUPS: tl.constexpr,
    PDL: tl.constexpr,
):
    """The token of a greedy or broken row; of others what they are, and which of their tokens are candidates."""
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    splits = tl.arange(0, SPLITS)
    is_part = splits < num_splits
    tops = tl.load(tops_ptr + row * SPLITS + splits, mask=is_part, other=_NOTHING)
    places = tl.load(places_ptr + row * SPLITS + splits, mask=is_part, other=0)
    least = tl.min(tl.load(least_ptr + row * SPLITS + splits, mask=is_part, other=float("inf")), 0)
    largest, token = _best_of(tops, places, SIZE)
    is_broken = (least < 0.0) | (least == float("inf"))
    tl.store(out_ptr + row, tl.where(is_broken, -1, token).to(tl.int64))
    plan_ptr += row * _PLAN
    limits_ptr += row * _LIMITS
    temperature = tl.load(temperature_ptr + row * temperature_stride)
    is_drawn = (temperature > 0.0) & (not is_broken)
    tl.store(plan_ptr + _KIND, _DONE)
    if is_drawn:
        top = top_of(largest)
        top_k = tl.load(top_k_ptr + row * top_k_stride)
        min_p = tl.load(min_p_ptr + row * min_p_stride)
        # top_p within 0..1; 0, which keeps the first token alone, where min_p lets none pass.
        share = tl.minimum(tl.maximum(tl.load(top_p_ptr + row * top_p_stride), 0.0), 1.0)
        share = tl.where(min_p > 1.0, 0.0, share)
        floor = tl.where(min_p > 0.0, log(tl.where(min_p > 0.0, tl.minimum(min_p, 1.0), 1.0)), _NOTHING)
        kind = tl.where(share < 1.0, _SHARED, _OPEN)
        if (top_k > 0) & (top_k < SIZE):
            kind = top_k * 0 + _LISTED
            # Where the programs have more groups than GROUPS, several of them are one.
            several: tl.constexpr = SPLITS * OWN_GROUPS // GROUPS
            group = tl.arange(0, GROUPS)[:, None] + tl.arange(0, several)[None, :] * GROUPS
            is_group = group < num_splits * OWN_GROUPS
            maxima = tl.load(maxima_ptr + row * SPLITS * OWN_GROUPS + group, mask=is_group, other=_NOTHING)
            floor = tl.maximum(floor, _bound_of_top_k(tl.max(maxima, 1), top_k, top, temperature))
        x = scaled(tops, top, temperature)
        one, two = keys(tl.load(seeds_ptr + row * seeds_stride), tl.load(steps_ptr + row * steps_stride))
        is_candidate = (x >= floor) & (x > _NOTHING)
        scores = tl.where(is_candidate, x + gumbel(uniform(one, two, places)), _NOTHING)
        tl.store(limits_ptr + _TOP, top)
        tl.store(limits_ptr + _TEMPERATURE, temperature)
        tl.store(limits_ptr + _FLOOR, floor)
        tl.store(limits_ptr + _SHARE, share)
        tl.store(limits_ptr + _REACHED, tl.max(scores, 0))
        tl.store(plan_ptr + _KIND, kind)
        tl.store(plan_ptr + _COUNT, 0)
        tl.store(plan_ptr + _TOP_K, top_k)
        tl.store(plan_ptr + _ONE, one.to(tl.int32, bitcast=True))
        tl.store(plan_ptr + _TWO, two.to(tl.int32, bitcast=True))


@triton.jit
def _line(logits_ptr, stride_v, limits_ptr, plan_ptr):  # type: ignore[no-untyped-def]
    """What tells x and noise of a row's tokens."""
    top, temperature = tl.load(limits_ptr + _TOP), tl.load(limits_ptr + _TEMPERATURE)
    one, two = tl.load(plan_ptr + _ONE), tl.load(plan_ptr + _TWO)
    return logits_ptr, stride_v, top, temperature, one.to(tl.uint32, bitcast=True), two.to(tl.uint32, bitcast=True)


@triton.jit
def _is_kept(before, total, share):  # type: ignore[no-untyped-def]
    """Whether top_p keeps a token that comes after tokens of weight `before`, of `total`. The first always passes."""
    return (before == 0) | (before.to(tl.float64) < share.to(tl.float64) * total.to(tl.float64))


@triton.jit
def _is_before(x, index, floor, cut, end):  # type: ignore[no-untyped-def]
    """Whether tokens are candidates, and larger than `cut`, or its equals of an index below `end`."""
    return (x >= floor) & ((x > cut) | ((x == cut) & (index < end))) & (x > _NOTHING)


@triton.jit
def _x_of(line, token):  # type: ignore[no-untyped-def]
    """x of one token."""
    logits_ptr, stride_v, top, temperature, _, _ = line
    return scaled(tl.load(logits_ptr + token.to(tl.int64) * stride_v), top, temperature)


@triton.jit
def _hopes(logits, index, line):  # type: ignore[no-untyped-def]
    """Bounds of the scores of tokens, a little rounded: -log(1 - u) is at least u."""
    near = (logits - line[2]) * tl.minimum(1.0 / line[3], 1e38)
    return near - 0.6931471805599453 * tl.log2(uniform(line[4], line[5], index))


@triton.jit
def _improved(best, token, hopes, index, line, floor, cut, end, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The best score and its token, of those so far and of a tile's tokens that `_is_before` names.

    Only tokens whose `hopes`, bounds of scores, reach the best so far are looked at, one by one: there are few.
    """
    hope = tl.max(hopes, 0)
    while (hope >= best - _MARGIN) & (hope > _NOTHING):
        other = tl.min(tl.where(hopes == hope, index, SIZE), 0)
        x = _x_of(line, other)
        score = x + gumbel(uniform(line[4], line[5], other))
        best, token = _better(best, token, tl.where(_is_before(x, other, floor, cut, end), score, _NOTHING), other)
        hopes = tl.where(index == other, _NOTHING, hopes)
        hope = tl.max(hopes, 0)
    return best, token


@triton.jit
def _found(sums_ptr, scores_ptr, drawn_ptr, row, share, num_splits, NUM, PASSES, SIZE, SPLITS):  # type: ignore[no-untyped-def]
    """What the first NUM passes tell: whether the row's token is found, the token or the last one tried, and the sum.

    A pass that a row did not need left its numbers as they were: what was found stays.
    """
    splits = tl.arange(0, SPLITS)
    is_part = splits < num_splits
    place = row * PASSES * SPLITS + splits
    total = tl.sum(tl.load(sums_ptr + place, mask=is_part, other=0), 0)
    scores = tl.load(scores_ptr + place, mask=is_part, other=_NOTHING)
    _, token = _best_of(scores, tl.load(drawn_ptr + place, mask=is_part, other=SIZE), SIZE)
    is_found = share >= 1.0
    for i in tl.static_range(1, NUM):
        before = tl.sum(tl.load(sums_ptr + place + i * SPLITS, mask=is_part, other=0), 0)
        is_found = is_found | _is_kept(before, total, share)
        scores = tl.load(scores_ptr + place + i * SPLITS, mask=is_part, other=_NOTHING)
        _, other = _best_of(scores, tl.load(drawn_ptr + place + i * SPLITS, mask=is_part, other=SIZE), SIZE)
        token = tl.where(is_found, token, other)
    return is_found, token, total


@triton.jit
def pass_kernel(  # type: ignore[no-untyped-def]
    logits_ptr,
    stride_r,
    stride_v,
    sums_ptr,
    scores_ptr,
    drawn_ptr,
    plan_ptr,
    limits_ptr,
    keys_ptr,
    num_splits,
    first_split,
    SIZE: tl.constexpr,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
    SPLITS: tl.constexpr,
    CAPACITY: tl.constexpr,
    KEYS: tl.constexpr,
    PASSES: tl.constexpr,
    PASS: tl.constexpr,
    BLOCK: tl.constexpr,
    SERVES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Of a part of a row: the best score, and the sum of weights; of the first pass of some rows a list instead.

    `SERVES` 0: all rows; 1: those without top_p alone, whose lists begin at CAPACITY; 2: those with top_p alone.
    `logits_ptr` has the tokens from FIRST to LAST, as in `scan_kernel`.
    """
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    plan_ptr += row * _PLAN
    limits_ptr += row * _LIMITS
    kind = tl.load(plan_ptr + _KIND)
    if (kind == _DONE) | (((PASS > 0) | (SERVES == 2)) & (kind != _SHARED)) | ((SERVES == 1) & (kind == _SHARED)):
        return
    if SERVES == 1:
        keys_ptr += CAPACITY
    logits_ptr += row * stride_r - FIRST * stride_v
    line = _line(logits_ptr, stride_v, limits_ptr, plan_ptr)
    top, temperature, floor = line[2], line[3], tl.load(limits_ptr + _FLOOR)
    cut, end_of_cut, best = tl.minimum(top, _NOTHING), kind * 0, tl.load(limits_ptr + _REACHED)
    if PASS > 0:
        share = tl.load(limits_ptr + _SHARE)
        is_found, tried, _ = _found(sums_ptr, scores_ptr, drawn_ptr, row, share, num_splits, PASS, PASSES, SIZE, SPLITS)
        if is_found:
            return
        cut, end_of_cut, best = _x_of(line, tried), tried, tl.minimum(top, _NOTHING)
    lowest = logit_of(tl.maximum(floor, cut), top, temperature)
    weighed = logit_of(tl.maximum(tl.maximum(floor, cut), _WEIGHTLESS), top, temperature)
    token = kind * 0 + SIZE
    total = tl.zeros([BLOCK], tl.int64)
    begin, end = _part(FIRST, LAST, BLOCK)
    following = _logits(logits_ptr, stride_v, begin + tl.arange(0, BLOCK), end)
    for start in range(begin, end, BLOCK):
        index = start + tl.arange(0, BLOCK)
        logits = following.to(tl.float32)
        following = _logits(logits_ptr, stride_v, index + BLOCK, end)
        most = tl.max(logits, 0)
        if kind == _LISTED:
            if most >= lowest:
                x = scaled(logits, top, temperature)
                is_listed = _is_before(x, index, floor, cut, end_of_cut)
                count = tl.sum(is_listed.to(tl.int32), 0)
                earlier = tl.atomic_add(plan_ptr + _COUNT, count, sem="relaxed")
                entry = earlier + tl.cumsum(is_listed.to(tl.int32), 0) - 1
                listed = (magnitude(x).to(tl.int64) << 32) | index
                tl.store(keys_ptr + row * KEYS + entry, listed, mask=is_listed & (entry < CAPACITY))
        else:
            may_win = logits >= lowest
            if (kind == _SHARED) & (most >= weighed):
                x = scaled(logits, top, temperature)
                may_win = _is_before(x, index, floor, cut, end_of_cut)
                total += tl.where(may_win, weight(x), 0)
            if most >= tl.maximum(lowest, logit_of(tl.minimum(best - _NOISE, 0.0), top, temperature)):
                hopes = tl.where(may_win, _hopes(logits, index, line), _NOTHING)
                best, token = _improved(best, token, hopes, index, line, floor, cut, end_of_cut, SIZE)
    if kind != _LISTED:
        own = (row * PASSES + PASS) * SPLITS + first_split + tl.program_id(1)
        tl.store(sums_ptr + own, tl.sum(total, 0))
        tl.store(scores_ptr + own, best)
        tl.store(drawn_ptr + own, token)


@triton.jit
def _drawn_of(keys_ptr, count, line, top_k, share, SIZE: tl.constexpr, NUM: tl.constexpr):  # type: ignore[no-untyped-def]
    """The token drawn from a list of `count` candidates, at most NUM: sorted as the definition sorts the whole row."""
    entry = tl.arange(0, NUM)
    ordered = tl.sort(tl.load(keys_ptr + entry, mask=entry < count, other=_LAST))
    sizes = (ordered >> 32).to(tl.int32)
    last = tl.max(tl.where(entry < tl.minimum(top_k, count), sizes, 0), 0)
    is_kept = (entry < count) & (sizes <= last)
    x = tl.where(is_kept, -sizes.to(tl.float32, bitcast=True), _NOTHING)
    weights = tl.where(is_kept, weight(x), 0)
    before = tl.cumsum(weights, 0) - weights
    is_kept = is_kept & tl.where(share >= 1.0, is_kept, _is_kept(before, tl.sum(weights, 0), share))
    index = (ordered & _INDEX).to(tl.int32)
    scores = tl.where(is_kept, x + gumbel(uniform(line[4], line[5], index)), _NOTHING)
    _, token = _best_of(scores, index, SIZE)
    return token


@triton.jit
def _kth(line, top_k, count, floor, SIZE: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """The least x of those that top_k keeps of `count` candidates, or less if as many pass; `floor` if all do."""
    low, high = count * 0 - 1, magnitude(floor)
    while (count > top_k) & (high - low > 1):
        middle = low + (high - low) // 2
        counts = tl.zeros([BLOCK], tl.int32)
        for start in range(0, SIZE, BLOCK):
            logits = _logits(line[0], line[1], start + tl.arange(0, BLOCK), SIZE).to(tl.float32)
            counts += (magnitude(scaled(logits, line[2], line[3])) <= middle).to(tl.int32)
        reached = tl.sum(counts, 0)
        count = tl.where(reached >= top_k, reached, count)
        high = tl.where(reached >= top_k, middle, high)
        low = tl.where(reached >= top_k, low, middle)
    return -high.to(tl.float32, bitcast=True)


@triton.jit
def _passed(line, floor, cut, end, SIZE: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """What all programs find in a pass, of one: the sum of weights, and the token with the best score."""
    total = tl.zeros([BLOCK], tl.int64)
    best, token = tl.minimum(cut, _NOTHING), end * 0 + SIZE
    for start in range(0, SIZE, BLOCK):
        index = start + tl.arange(0, BLOCK)
        logits = _logits(line[0], line[1], index, SIZE).to(tl.float32)
        x = scaled(logits, line[2], line[3])
        is_in = _is_before(x, index, floor, cut, end)
        if tl.max(is_in.to(tl.int32), 0) > 0:
            total += tl.where(is_in, weight(x), 0)
            hopes = tl.where(is_in, _hopes(logits, index, line), _NOTHING)
            best, token = _improved(best, token, hopes, index, line, floor, cut, end, SIZE)
    return tl.sum(total, 0), token


@triton.jit
def finish_kernel(  # type: ignore[no-untyped-def]
    out_ptr,
    logits_ptr,
    stride_r,
    stride_v,
    sums_ptr,
    scores_ptr,
    drawn_ptr,
    plan_ptr,
    limits_ptr,
    keys_ptr,
    num_splits,
    SIZE: tl.constexpr,
    SPLITS: tl.constexpr,
    SHORT: tl.constexpr,
    CAPACITY: tl.constexpr,
    KEYS: tl.constexpr,
    PASSES: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """The token of a row: as the passes found it, or by further passes over its list, or over the row."""
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    plan_ptr += row * _PLAN
    limits_ptr += row * _LIMITS
    kind = tl.load(plan_ptr + _KIND)
    if kind == _DONE:
        return
    share, floor = tl.load(limits_ptr + _SHARE), tl.load(limits_ptr + _FLOOR)
    top_k, count = tl.load(plan_ptr + _TOP_K), tl.load(plan_ptr + _COUNT)
    line = _line(logits_ptr + row * stride_r, stride_v, limits_ptr, plan_ptr)
    keys_ptr += row * KEYS
    if (kind == _LISTED) & (count <= SHORT):
        token = _drawn_of(keys_ptr, count, line, top_k, share, SIZE, SHORT)
    elif (kind == _LISTED) & (count <= CAPACITY):
        token = _drawn_of(keys_ptr, count, line, top_k, share, SIZE, CAPACITY)
    else:
        is_found, token, total = _found(
            sums_ptr, scores_ptr, drawn_ptr, row, share, num_splits, PASSES, PASSES, SIZE, SPLITS
        )  # fmt: skip
        if kind == _LISTED:
            floor = _kth(line, top_k, count, floor, SIZE, BLOCK)
            total, token = _passed(line, floor, tl.minimum(floor, _NOTHING), count * 0, SIZE, BLOCK)
            is_found = share >= 1.0
        while not is_found:
            before, other = _passed(line, floor, _x_of(line, token), token, SIZE, BLOCK)
            is_found = _is_kept(before, total, share)
            token = tl.where(is_found, token, other)
    tl.store(out_ptr + row, token.to(tl.int64))
