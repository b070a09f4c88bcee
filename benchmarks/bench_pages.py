"""Claim: taking and giving back a page costs less than a microsecond, amortised over the batches of real steps.

While about 100,000 pages are held, sequences end and others take their place, in random order. `decode`: one page for
each of 64 sequences, and 64 sequences' first pages given back, as windows move. `chunk`: the pages of 2,048 tokens.
`sequence`: whole sequences of 10 to 500 pages. The baseline in the same run is the least that an allocator could do: a
Python list of free pages, which knows neither slabs nor holders, and can give nothing to another pool.
"""

from __future__ import annotations

import functools
import random
import time
from array import array
from collections.abc import Callable, Sequence

from support import harness

from precast.loader.cache.arena import Arena
from precast.loader.cache.pages import PagePool

NUM_PAGES = 120_000
HELD = 100_000
ROUNDS = 2_000
PAGES_PER_SLAB = (1, 5, 48, 344)
RUNS = 5

Allocate = Callable[[int], Sequence[int]]
Free = Callable[[Sequence[int]], None]


class FreeList:
    """The baseline."""

    def __init__(self, num_pages: int) -> None:
        self._free = list(range(num_pages))

    def allocate(self, count: int) -> array[int]:
        pages = array("i", self._free[-count:])
        del self._free[-count:]
        return pages

    def free(self, pages: Sequence[int]) -> None:
        self._free.extend(pages)


def nanoseconds(pool: PagePool | FreeList, sizes: Callable[[random.Random], int]) -> float:
    """Of taking a page and giving it back, with batches of `sizes`."""
    draw = random.Random(0)
    held: list[array[int]] = []
    while sum(len(pages) for pages in held) < HELD:
        held += [pool.allocate(sizes(draw)) for _ in range(100)]
    draw.shuffle(held)
    counts = [sizes(draw) for _ in range(ROUNDS)]
    places = [draw.randrange(len(held)) for _ in range(ROUNDS)]
    num_pages = 0
    started = time.thread_time()
    for place, count in zip(places, counts, strict=True):
        pool.free(held[place])
        held[place] = pool.allocate(count)
        num_pages += count
    return (time.thread_time() - started) / num_pages * 1e9


def moved_windows(pool: PagePool | FreeList) -> float:
    """Nanoseconds of a page where 256 sequences move through their windows: 64 take one and give back one a round."""
    draw = random.Random(0)
    held = [pool.allocate(HELD // 256) for _ in range(256)]
    batches = [draw.sample(range(256), 64) for _ in range(ROUNDS)]
    started = time.thread_time()
    for batch in batches:
        pool.free([held[i].pop(0) for i in batch])
        for i, page in zip(batch, pool.allocate(64), strict=True):
            held[i].append(page)
    return (time.thread_time() - started) / (64 * ROUNDS) * 1e9


def measure(make: Callable[[], PagePool | FreeList]) -> dict[str, float]:
    """Medians of several runs, each with a pool of its own."""
    cases: dict[str, Callable[[PagePool | FreeList], float]] = {
        "decode": moved_windows,
        "chunk": lambda pool: nanoseconds(pool, lambda _: 128),
        "sequence": lambda pool: nanoseconds(pool, lambda draw: draw.randint(10, 500)),
    }
    return {name: round(sorted(case(make()) for _ in range(RUNS))[RUNS // 2], 1) for name, case in cases.items()}


def pool_of(pages_per_slab: int) -> PagePool:
    return PagePool(Arena(NUM_PAGES // pages_per_slab), pages_per_slab)


def main() -> None:
    figures = {f"{count} pages a slab": measure(functools.partial(pool_of, count)) for count in PAGES_PER_SLAB}
    figures["baseline: a list of free pages"] = measure(lambda: FreeList(NUM_PAGES))
    harness.write(harness.RESULTS / "pages.json", "nanoseconds to take a page and give it back", figures)


if __name__ == "__main__":
    main()
