"""How ranks of one host add up tensors of which sizes, as data: `benchmarks/bench_gpu_collectives.py` measures it.

No torch: a record of a choice, not what makes it.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

MAX_PEERS = 8
"""Ranks whose GPUs write each other's memory, at most."""
VECTOR_BYTES = 16
"""What a thread moves at a time."""
LAUNCH_BYTES = 16 << 20
"""Of more, so many go in one launch."""


class Way(NamedTuple):
    """How tensors of up to so many bytes are added up; None: of any size.

    The grid has `num_blocks` at most, and a thread sends so many vectors, a block so many rows, `ahead` of those that
    it waits for. "nccl" leaves it to NCCL.
    """

    kernel: Literal["one_shot", "two_shot", "nccl"]
    up_to: int | None
    num_blocks: int = 0
    ahead: int = 2


OF_TWO = (Way("one_shot", None, 264, 1),)
"""Between two ranks one shot moves no more than two: each sends half of what it has and half of the sums, or all."""
OF_MORE = (Way("one_shot", 512 << 10, 64), Way("two_shot", None, 128))


def ways_for(num_ranks: int) -> tuple[Way, ...]:
    """The first that takes a tensor's bytes adds it up; the last takes any."""
    return OF_TWO if num_ranks == 2 else OF_MORE


def way_of(ways: tuple[Way, ...], num_bytes: int) -> Way:
    """The way for tensors of so many bytes."""
    return next(way for way in ways if way.up_to is None or num_bytes <= way.up_to)


def half_bytes(ways: tuple[Way, ...], num_ranks: int) -> int:
    """Of a half of a rank's memory: slots for what one launch takes, of all ranks, and for two shots of the sums."""
    most = {"one_shot": 0, "two_shot": 0}
    for way in ways:
        if way.kernel != "nccl":
            most[way.kernel] = max(most[way.kernel], min(way.up_to or LAUNCH_BYTES, LAUNCH_BYTES))
    return max(num_ranks * most["one_shot"], 4 * most["two_shot"])
