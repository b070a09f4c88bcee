"""The largest of a row's scores, in Triton: their places are found without a sort.

Scores are integers of the order of `precast.kernels.sparse_attention.triton_select.in_order`. The places of few of them
are noted, the largest among them (`bound_of`, `note`). Among what is noted the COUNT largest are found by halving
(`write_noted`), and where too many were noted, since many are equal, among all (`write_in_passes`). What is selected
says nothing of how it was found: of equal scores it is the first ones.
"""

# To pyright, Triton's constants don't decide which branch is there, and some functions never return.
# pyright: reportPossiblyUnboundVariable=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

LEAST = tl.constexpr(-(1 << 31))
"""Below all scores."""
_MOST = tl.constexpr((1 << 31) - 1)


@triton.jit
def _between(low, high):  # type: ignore[no-untyped-def]
    """The middle of two integers, rounded up."""
    return (low | high) - ((low ^ high) >> 1)


@triton.jit
def _reached_by(values, wanted, MORE: tl.constexpr):  # type: ignore[no-untyped-def]
    """An integer that at least `wanted` of the values reach, and at most MORE others, but for values that are equal.

    As many values as are wanted are above LEAST.
    """
    high = tl.max(values, 0)
    low = tl.min(tl.where(values == LEAST, high, values), 0)
    while low < high:
        middle = _between(low, high)
        reached = tl.sum((values >= middle).to(tl.int32), 0)
        is_enough = reached >= wanted
        low = tl.where(is_enough, middle, low)
        high = tl.where(is_enough, tl.where(reached <= wanted + MORE, middle, high), middle - 1)
    return low


@triton.jit
def bound_of(scores_ptr, num_scores, COUNT: tl.constexpr, GROUPS: tl.constexpr):  # type: ignore[no-untyped-def]
    """A score that COUNT scores or maxima of scores reach at least, and few more where they lie as it falls out.

    At least COUNT of the maxima of GROUPS groups reach it. A group has every GROUPS-th score, so that neighbours, which
    may all be large, are in several. LEAST if there are fewer groups than that.
    """
    bound = num_scores * 0 + LEAST
    if COUNT <= GROUPS:
        group = tl.arange(0, GROUPS)
        maxima = tl.full([GROUPS], LEAST, tl.int32)
        for first in range(0, num_scores, GROUPS):
            maxima = tl.maximum(
                maxima, tl.load(scores_ptr + first + group, mask=first + group < num_scores, other=LEAST)
            )
        bound = _reached_by(maxima, num_scores * 0 + COUNT, COUNT // 8)
    return bound


@triton.jit
def note(  # type: ignore[no-untyped-def]
    keys_ptr, noted_ptr, scores_ptr, low, high, bound, room, BLOCK: tl.constexpr
):
    """Notes the places from `low` to `high` whose scores reach the bound, in ascending order, in `keys`, and the scores
    in `noted`, which have room for so many; how many there are."""
    lane = tl.arange(0, BLOCK)
    count = low * 0
    for first in range(low, high, BLOCK):
        key = first + lane
        scores = tl.load(scores_ptr + key, mask=key < high, other=LEAST)
        is_noted = (scores >= bound) & (key < high)
        place = count + tl.cumsum(is_noted.to(tl.int32), 0) - 1
        tl.store(keys_ptr + place, key, mask=is_noted & (place < room))
        tl.store(noted_ptr + place, scores, mask=is_noted & (place < room))
        count += tl.sum(is_noted.to(tl.int32), 0)
    return count


@triton.jit
def write_noted(  # type: ignore[no-untyped-def]
    out_ptr, keys_ptr, noted_ptr, place, exists, first_key, COUNT: tl.constexpr
):
    """Writes the numbers of the COUNT largest of what is noted at these places, in their order."""
    key = tl.load(keys_ptr + place, mask=exists, other=0)
    scores = tl.load(noted_ptr + place, mask=exists, other=LEAST)
    least = _reached_by(scores, first_key * 0 + COUNT, 0)
    kept = exists & (scores >= least)
    if tl.sum(kept.to(tl.int32), 0) > COUNT:
        is_equal = exists & (scores == least)
        equals = COUNT - tl.sum((scores > least).to(tl.int32), 0)
        kept = (scores > least) | (is_equal & (tl.cumsum(is_equal.to(tl.int32), 0) <= equals))
    row = tl.cumsum(kept.to(tl.int32), 0) - 1
    tl.store(out_ptr + row, first_key + key, mask=kept & (row < COUNT))


@triton.jit
def _least_in_passes(scores_ptr, num_scores, bound, wanted, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """The least score of the `wanted` largest, which reach the bound, and how many scores are larger. A score below it
    if these are all that are wanted."""
    lane = tl.arange(0, BLOCK)
    low = bound
    high = bound * 0 + _MOST
    above = wanted * 0
    # First, whether the bound is what is equal.
    middle = tl.where(low < high, low + 1, high)
    while low < high:
        counts = tl.zeros([BLOCK], tl.int32)
        for first in range(0, num_scores, BLOCK):
            scores = tl.load(scores_ptr + first + lane, mask=first + lane < num_scores, other=LEAST)
            counts += (scores >= middle).to(tl.int32)
        reached = tl.sum(counts, 0)
        low = tl.where(reached == wanted, middle - 1, tl.where(reached > wanted, middle, low))
        high = tl.where(reached > wanted, high, middle - 1)
        above = tl.where(reached > wanted, above, reached)
        middle = _between(low, high)
    return low, above


@triton.jit
def write_in_passes(  # type: ignore[no-untyped-def]
    out_ptr, scores_ptr, num_scores, bound, first_key, COUNT: tl.constexpr, BLOCK: tl.constexpr
):
    """Writes the numbers of the COUNT largest of scores, of which that many reach the bound, in ascending order."""
    least, above = _least_in_passes(scores_ptr, num_scores, bound, num_scores * 0 + COUNT, BLOCK)
    lane = tl.arange(0, BLOCK)
    equals = COUNT - above
    written = num_scores * 0
    for first in range(0, num_scores, BLOCK):
        exists = first + lane < num_scores
        scores = tl.load(scores_ptr + first + lane, mask=exists, other=0)
        is_equal = exists & (scores == least)
        rank = tl.cumsum(is_equal.to(tl.int32), 0)
        kept = (exists & (scores > least)) | (is_equal & (rank <= equals))
        place = written + tl.cumsum(kept.to(tl.int32), 0) - 1
        tl.store(out_ptr + place, first_key + first + lane, mask=kept & (place < COUNT))
        written += tl.sum(kept.to(tl.int32), 0)
        equals -= tl.sum(is_equal.to(tl.int32), 0)


@triton.jit
def write_all(out_ptr, num_keys, first_key, COUNT: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Writes the numbers of all keys, no more than COUNT, then -1."""
    for first in range(0, COUNT, BLOCK):
        place = first + tl.arange(0, BLOCK)
        tl.store(out_ptr + place, tl.where(place < num_keys, first_key + place, -1), mask=place < COUNT)
