"""precast.sample@2 in Triton, without sorting. It reads nothing back, and launches the same whatever rows ask for.

Each row is divided among several programs, so that few rows keep a GPU busy. What a row asks for is read on the device:

1. `scan_kernel` finds the largest logit of each part, and says whether it has a NaN or anything finite;
2. `prepare_kernel` puts them together. Rows that are greedy or broken have their token now, and the rest returns at
   once for them. Others learn their candidates: what min_p passes, and for those with top_k or top_p a bound below
   which nothing can pass. For top_k it is the k-th largest of the maxima of 2,048 groups of tokens: as many tokens at
   least are that large. For top_p: tokens that are so unlikely that all of them together couldn't reach 1 - top_p;
3. `weigh_kernel` and `select_kernel`, for rows with top_k or top_p (see `triton_search`);
4. `draw_kernel` adds noise to the candidates that are sure to pass, and lists those that must be looked into;
5. `finish_kernel` looks into them, and takes the best of all.

The sets are those of the definition: each x, weight, sum and comparison is computed in its roundings, sums of weights
as integers. What adds up atomically are integers too, so that every run gives the same tokens. exp, log and log1p are
the ones that PyTorch calls on a GPU; on other hardware their last bit may differ, and a token whose weight decides by
that bit alone.
"""

# To pyright a kernel that is called by another returns nothing.
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from precast.kernels.calls import implements
from precast.kernels.sampling import limits
from precast.kernels.sampling.sample import Parameters
from precast.kernels.sampling.sample import sample_2 as reference
from precast.kernels.sampling.triton_numbers import (
    INFINITE,
    bin_of,
    gumbel,
    keys,
    log,
    magnitude,
    may_reach,
    scaled,
    top_of,
    uniform,
)
from precast.kernels.sampling.triton_search import (
    DONE,
    FIRST,
    FLOOR,
    KIND,
    KTH,
    LAST,
    LIMITS,
    LISTED,
    LOWER,
    OPEN,
    PLAN,
    SCALE,
    SEARCHED,
    SUMS,
    TOP,
    best_of,
    finish_kernel,
    select_kernel,
    top_k_of,
    top_p_of,
    weigh_kernel,
)

BLOCK = 2048
"""Logits of a tile: what a program holds at a time."""
_PROGRAMS = 1024
"""How many programs are wanted at once: eight of 256 threads on each multiprocessor of an H200 are 1,056."""

# The least x of which the weight isn't 0 is -28.42.
_WEIGHTLESS = tl.constexpr(-28.5)
_LARGEST = tl.constexpr(3.4028234663852886e38)
# Bits of a magnitude below which the bound of top_k isn't searched: an x of 16 is known to 1/32.
_PRECISION = tl.constexpr(1 << 14)


@triton.jit
def scan_kernel(  # type: ignore[no-untyped-def]
    logits_ptr,
    temperature_ptr,
    top_k_ptr,
    largest_ptr,
    index_ptr,
    least_ptr,
    broken_ptr,
    maxima_ptr,
    size,
    chunk,
    stride_r,
    stride_v,
    IS_GREEDY: tl.constexpr,
    SPLITS: tl.constexpr,
    OWN_GROUPS: tl.constexpr,
    LISTED_MOST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Of a part of a row: the largest logit and its first index, the least finite one (infinite: none), and NaNs."""
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    logits_ptr += row * stride_r
    end = tl.minimum(split * chunk + chunk, size)
    lane = tl.arange(0, BLOCK)
    largest = tl.full([BLOCK], float("-inf"), tl.float32)
    least = tl.full([BLOCK], float("inf"), tl.float32)
    first = lane * 0
    is_nan = lane < 0
    for start in range(split * chunk, end, BLOCK):
        index = start + lane
        logits = tl.load(logits_ptr + index.to(tl.int64) * stride_v, mask=index < size, other=float("-inf"))
        logits = logits.to(tl.float32)
        is_nan = is_nan | (logits != logits)
        first = tl.where(logits > largest, index, first)
        largest = tl.where(logits > largest, logits, largest)
        least = tl.where((logits < least) & (logits > float("-inf")), logits, least)
    place = row * SPLITS + split
    best, best_index = best_of(largest, first, size)
    tl.store(largest_ptr + place, best)
    tl.store(index_ptr + place, best_index)
    tl.store(least_ptr + place, tl.min(least, 0))
    tl.store(broken_ptr + place, tl.max(is_nan.to(tl.int32), 0))
    if not IS_GREEDY:
        is_drawn = tl.load(temperature_ptr + row) > 0.0
        if is_drawn & (top_k_of(tl.load(top_k_ptr + row), size) > 0):
            maxima = tl.max(tl.reshape(largest, [OWN_GROUPS, BLOCK // OWN_GROUPS]), 1)
            groups = split * OWN_GROUPS + tl.arange(0, OWN_GROUPS)
            tl.store(maxima_ptr + row * LISTED_MOST + groups, maxima)


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
def _bound_of_top_p(top_p, size):  # type: ignore[no-untyped-def]
    """An x below which top_p keeps nothing, whatever the logits: all tokens below it come to less than 1 - top_p.

    The likeliest token has the weight 2^40; each may be rounded up by half of 1. The margin of 2 % is far more than
    what this formula and the comparison round.
    """
    share = 0.98 * (1.0 - top_p) / (size * 1.0) - 2.0**-41
    return tl.where(share > 0.0, log(tl.where(share > 0.0, share, 1.0)), float("-inf"))


@triton.jit(do_not_specialize=["num_splits"])
def prepare_kernel(  # type: ignore[no-untyped-def]
    out_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    largest_ptr,
    index_ptr,
    least_ptr,
    broken_ptr,
    maxima_ptr,
    plan_ptr,
    limits_ptr,
    counts_ptr,
    weights_ptr,
    size,
    num_splits,
    IS_GREEDY: tl.constexpr,
    SPLITS: tl.constexpr,
    BINS: tl.constexpr,
    GROUPS: tl.constexpr,
    LISTED_MOST: tl.constexpr,
):
    """The token of a greedy or broken row; of others what they are, and which of their tokens are candidates."""
    row = tl.program_id(0).to(tl.int64)
    splits = tl.arange(0, SPLITS)
    place, is_part = row * SPLITS + splits, splits < num_splits
    largest = tl.load(largest_ptr + place, mask=is_part, other=float("-inf"))
    largest, token = best_of(largest, tl.load(index_ptr + place), size)
    least = tl.min(tl.load(least_ptr + place, mask=is_part, other=float("inf")), 0)
    is_nan = tl.max(tl.load(broken_ptr + place, mask=is_part, other=0), 0) > 0
    is_broken = is_nan | (least == float("inf"))
    tl.store(out_ptr + row, tl.where(is_broken, -1, token).to(tl.int64))
    if not IS_GREEDY:
        plan_ptr += row * PLAN
        temperature = tl.load(temperature_ptr + row)
        if is_broken | (temperature <= 0.0):
            tl.store(plan_ptr + KIND, DONE)
            return
        top = top_of(largest)
        top_k = top_k_of(tl.load(top_k_ptr + row), size)
        min_p = tl.load(min_p_ptr + row)
        top_p = top_p_of(tl.load(top_p_ptr + row), min_p)
        least = tl.maximum(scaled(least, top, temperature), -_LARGEST)
        floor = tl.where(min_p > 0.0, log(tl.where(min_p > 0.0, tl.minimum(min_p, 1.0), 1.0)), float("-inf"))
        lower = tl.maximum(floor, _WEIGHTLESS)
        kind = tl.where((top_k > 0) | (top_p < 1.0), SEARCHED, OPEN)
        if kind == SEARCHED:
            floor = tl.maximum(floor, least)
            if top_k > 0:
                maxima = tl.load(maxima_ptr + row * LISTED_MOST + tl.arange(0, GROUPS))
                floor = tl.maximum(floor, _bound_of_top_k(maxima, top_k, top, temperature))
                lower = floor
            else:
                floor = tl.maximum(floor, _bound_of_top_p(top_p, size))
                lower = tl.minimum(floor, lower)
            bins = row * BINS + tl.arange(0, BINS)
            tl.store(counts_ptr + bins, tl.zeros([BINS], tl.int32))
            tl.store(weights_ptr + bins, tl.zeros([BINS], tl.int64))
        scale = tl.where(floor < 0.0, tl.minimum(BINS / tl.maximum(-floor, 1e-30), 1e30), 0.0)
        tl.store(plan_ptr + KIND, kind)
        # All bins pass, unless `select_kernel` says otherwise.
        tl.store(plan_ptr + FIRST, BINS)
        tl.store(plan_ptr + LAST, -1)
        tl.store(plan_ptr + KTH, BINS)
        tl.store(plan_ptr + LISTED, 0)
        limits_ptr += row * LIMITS
        tl.store(limits_ptr + TOP, top)
        tl.store(limits_ptr + FLOOR, floor)
        tl.store(limits_ptr + LOWER, lower)
        tl.store(limits_ptr + SCALE, scale)


@triton.jit
def draw_kernel(  # type: ignore[no-untyped-def]
    out_ptr,
    logits_ptr,
    temperature_ptr,
    seeds_ptr,
    steps_ptr,
    plan_ptr,
    limits_ptr,
    tokens_ptr,
    scores_ptr,
    drawn_ptr,
    size,
    chunk,
    stride_r,
    stride_v,
    SPLITS: tl.constexpr,
    BINS: tl.constexpr,
    LISTED_MOST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Of a part of a row: the best score of the candidates that are sure to pass; it lists those that may.

    Only tiles in which a score may reach that of the likeliest token, which always passes and has x = 0, get noise.
    """
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    plan_ptr += row * PLAN
    kind = tl.load(plan_ptr + KIND)
    if kind == DONE:
        return
    limits_ptr += row * LIMITS
    top, floor, scale = tl.load(limits_ptr + TOP), tl.load(limits_ptr + FLOOR), tl.load(limits_ptr + SCALE)
    sure, last, kth = tl.load(plan_ptr + FIRST), tl.load(plan_ptr + LAST), tl.load(plan_ptr + KTH)
    temperature = tl.load(temperature_ptr + row)
    one, two = keys(tl.load(seeds_ptr + row), tl.load(steps_ptr + row))
    reached = gumbel(uniform(one, two, tl.load(out_ptr + row)))
    logits_ptr += row * stride_r
    end = tl.minimum(split * chunk + chunk, size)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    token = tl.arange(0, BLOCK)
    for start in range(split * chunk, end, BLOCK):
        index = start + tl.arange(0, BLOCK)
        logits = tl.load(logits_ptr + index.to(tl.int64) * stride_v, mask=index < size, other=float("-inf"))
        x = scaled(logits, top, temperature)
        place = bin_of(x, floor, scale, BINS)
        random = uniform(one, two, index)
        may_win = (place >= 0) & (place < sure) & may_reach(random, x, reached)
        if tl.max(may_win.to(tl.int32), 0) > 0:
            score = tl.where(may_win, x + gumbel(random), float("-inf"))
            token = tl.where(score > best, index, token)
            best = tl.maximum(score, best)
        if kind == SEARCHED:
            is_listed = (place >= 0) & (((place >= sure) & (place <= last)) | (place == kth))
            count = tl.sum(is_listed.to(tl.int32), 0)
            if count > 0:
                begin = tl.atomic_add(plan_ptr + LISTED, count, sem="relaxed")
                entry = begin + tl.cumsum(is_listed.to(tl.int32), 0) - 1
                tl.store(tokens_ptr + row * LISTED_MOST + entry, index, mask=is_listed & (entry < LISTED_MOST))
    score, drawn = best_of(best, token, size)
    tl.store(scores_ptr + row * SPLITS + split, score)
    tl.store(drawn_ptr + row * SPLITS + split, drawn)


class Workspace(NamedTuple):
    """What a call holds: see `triton_search` for `plan`, `limits` and `sums`; the others are [R, n] by bin or split.

    `maxima` and `tokens` are one list: the first is read before the second is written.
    """

    weights: torch.Tensor
    rests: torch.Tensor
    sums: torch.Tensor
    counts: torch.Tensor
    tokens: torch.Tensor
    maxima: torch.Tensor
    place: torch.Tensor
    broken: torch.Tensor
    drawn: torch.Tensor
    plan: torch.Tensor
    largest: torch.Tensor
    least: torch.Tensor
    scores: torch.Tensor
    limits: torch.Tensor


def _workspace(rows: int, device: torch.device) -> Workspace:
    """One piece of memory, divided: `limits.row_bytes` for each row, int64 first."""
    memory = torch.empty(rows * limits.row_bytes(), dtype=torch.uint8, device=device)
    splits, bins = limits.MAX_SPLITS, limits.BINS
    numbers = max(limits.GROUPS, limits.CAPACITY)
    sizes = [8 * bins, 8 * splits, 8 * SUMS.value, 4 * bins, 4 * numbers, *[4 * splits] * 3, 4 * PLAN.value]
    sizes += [*[4 * splits] * 3, 4 * LIMITS.value]
    parts = memory.split([rows * size for size in sizes])
    wide = [part.view(torch.int64) for part in parts[:3]]
    whole = [part.view(torch.int32) for part in parts[3:9]]
    real = [part.view(torch.float32) for part in parts[9:]]
    counts, tokens, *others = whole
    return Workspace._make([*wide, counts, tokens, tokens.view(torch.float32), *others, *real])


def num_splits(rows: int, size: int) -> int:
    """Programs for each row, a power of two: enough for the whole GPU, of one tile at least."""
    tiles = max(1, -(-size // BLOCK))
    enough = 1 << max(0, (_PROGRAMS // max(rows, 1)).bit_length() - 1)
    return min(limits.MAX_SPLITS, enough, 1 << (tiles - 1).bit_length())


@implements("sample", version=2)
def sample_2(logits: torch.Tensor, parameters: Parameters) -> torch.Tensor:
    """`precast.sample@2`, see `precast.kernels.sampling.sample`."""
    # No record says so, but an engine asks for the op without a node, whatever its dtype; and Triton 3.6 fails to
    # compile for a vocabulary of one token.
    if logits.dtype == torch.float64 or logits.shape[1] == 1:
        return reference(logits, *parameters)
    return _drawn(logits, parameters)


def greedy(logits: torch.Tensor) -> torch.Tensor:
    """What `sample_2` gives for temperature 0, [R] int64, in two launches; `logits` [R, V], not float64."""
    return _drawn(logits, None)


def _drawn(logits: torch.Tensor, parameters: Parameters | None) -> torch.Tensor:
    rows = logits.shape[0]
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows > 0:
        # Triton launches on the current device, whatever device the tensors are on.
        with torch.cuda.device_of(logits):
            _launch(out, logits, parameters)
    return out


def _launch(out: torch.Tensor, logits: torch.Tensor, parameters: Parameters | None) -> None:
    rows, size = logits.shape
    held = _workspace(rows, logits.device)
    splits = num_splits(rows, size)
    chunk = -(-size // (splits * BLOCK)) * BLOCK
    part = (size, chunk, *logits.stride())
    given = Parameters(*(x.contiguous() for x in parameters)) if parameters is not None else Parameters(*[out] * 6)
    temperature, top_k, top_p, min_p, seeds, steps = given
    wanted = (temperature, top_k, top_p, min_p)
    found = (held.largest, held.place, held.least, held.broken, held.maxima)
    places = {"SPLITS": limits.MAX_SPLITS, "LISTED_MOST": max(limits.GROUPS, limits.CAPACITY)}
    bins = {"SPLITS": limits.MAX_SPLITS, "BINS": limits.BINS}
    is_greedy = {"IS_GREEDY": parameters is None, "num_warps": 8}
    scan: Any = scan_kernel[rows, splits]
    prepare: Any = prepare_kernel[rows,]
    scan(
        logits, temperature, top_k, *found, *part, **places, **is_greedy, OWN_GROUPS=limits.GROUPS // splits,
        BLOCK=BLOCK,
    )  # fmt: skip
    prepare(
        out, *wanted, *found, held.plan, held.limits, held.counts, held.weights, size, splits, **places, **is_greedy,
        BINS=limits.BINS, GROUPS=limits.GROUPS,
    )  # fmt: skip
    if parameters is None:
        return
    weigh: Any = weigh_kernel[rows, splits]
    select: Any = select_kernel[rows,]
    draw: Any = draw_kernel[rows, splits]
    finish: Any = finish_kernel[rows,]
    weigh(
        logits, *wanted, held.plan, held.limits, held.counts, held.weights, held.rests, *part, **bins, BLOCK=BLOCK,
        num_warps=8,
    )  # fmt: skip
    select(
        top_k, top_p, min_p, held.plan, held.counts, held.weights, held.rests, held.sums, size, splits, **bins,
        num_warps=8,
    )  # fmt: skip
    draw(
        out, logits, temperature, seeds, steps, held.plan, held.limits, held.tokens, held.scores, held.drawn, *part,
        **places, BINS=limits.BINS, BLOCK=BLOCK, num_warps=8,
    )  # fmt: skip
    finish(
        out, logits, *wanted, seeds, steps, held.plan, held.limits, held.tokens, held.sums, held.scores, held.drawn,
        size, splits, *logits.stride(), **places, BINS=limits.BINS, CAPACITY=limits.CAPACITY, BLOCK=BLOCK, num_warps=8,
    )  # fmt: skip
