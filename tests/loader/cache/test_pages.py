"""Slabs and pages: given out once, shared by count, given back once, moved between pools."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from precast.loader.cache.arena import Arena
from precast.loader.cache.pages import PagePool


def test_a_slab_has_one_owner_at_a_time() -> None:
    arena = Arena(2)
    first, second = arena.draw(1), arena.draw(1)

    assert {*first, *second} == {0, 1}
    assert (arena.draw(1), arena.num_free) == ([], 0)
    arena.give_back(first[0])
    assert arena.num_free == 1
    assert arena.draw(1) == first


def test_a_slab_is_not_given_back_twice() -> None:
    arena = Arena(2)
    [slab] = arena.draw(1)
    arena.give_back(slab)

    with pytest.raises(AssertionError, match=f"slab {slab} is given back, and is not drawn"):
        arena.give_back(slab)
    with pytest.raises(AssertionError, match="slab 1 is given back"):
        arena.give_back(1)


def test_an_empty_arena_gives_nothing() -> None:
    pool = PagePool(Arena(0), 4)

    assert pool.num_available == 0
    with pytest.raises(AssertionError, match="1 pages wanted, 0 available"):
        pool.allocate(1)[0]


def test_pages_are_those_of_the_slab() -> None:
    arena = Arena(3)
    arena.draw(1)  # another pool's
    pool = PagePool(arena, 4)

    assert list(pool.allocate(4)) == [4, 5, 6, 7]
    assert pool.allocate(1)[0] == 8
    assert (pool.num_slabs, pool.num_held, pool.num_room, pool.num_available) == (2, 5, 3, 3)


def test_more_pages_than_there_are_take_none() -> None:
    pool = PagePool(Arena(2), 3)
    pool.allocate(2)

    with pytest.raises(AssertionError, match="5 pages wanted, 4 available"):
        pool.allocate(5)
    assert (pool.num_held, pool.arena.num_free) == (2, 1)
    pool.allocate(4)
    assert pool.num_available == 0


def test_a_slab_flows_to_the_pool_that_needs_it() -> None:
    arena = Arena(2)
    few, many = PagePool(arena, 1), PagePool(arena, 8)
    taken = few.allocate(2)
    assert many.num_available == 0

    few.free((taken[0],))
    assert (few.num_available, many.num_available) == (1, 8)
    pages = many.allocate(8)
    assert (few.num_available, arena.num_free) == (0, 0)

    for page in list(pages)[:7]:
        many.free((page,))
    assert few.num_available == 0, "a slab goes back when all its pages are free, not before"
    many.free((pages[7],))
    assert few.num_available == 1


def test_a_shared_page_is_free_when_the_last_holder_lets_go() -> None:
    pool = PagePool(Arena(1), 2)
    page = pool.allocate(1)[0]
    pool.retain((page,))
    assert (pool.holders(page), pool.num_held) == (2, 1)

    pool.free((page,))
    assert (pool.holders(page), pool.num_held, pool.num_slabs) == (1, 1, 1)
    pool.free((page,))
    assert (pool.holders(page), pool.num_held, pool.num_slabs) == (0, 0, 0)


def test_a_page_is_not_freed_twice() -> None:
    pool = PagePool(Arena(1), 2)
    page, _ = pool.allocate(2)
    pool.free((page,))

    with pytest.raises(AssertionError, match=f"page {page} is freed, and is not in use"):
        pool.free((page,))


def test_a_free_page_is_not_shared() -> None:
    with pytest.raises(AssertionError, match="page 3 is shared, and nobody holds it"):
        PagePool(Arena(1), 4).retain((3,))


def test_a_page_has_more_holders_than_a_step_has_sequences() -> None:
    """As many sequences as a step may have, and the known blocks and points."""
    pool = PagePool(Arena(1), 1)
    page = pool.allocate(1)[0]
    for _ in range(1 << 17):
        pool.retain((page,))

    assert pool.holders(page) == 1 + (1 << 17)
    pool.free([page] * (1 << 17))
    assert (pool.holders(page), pool.num_held) == (1, 1)


def test_pages_come_from_the_fullest_slab() -> None:
    pool = PagePool(Arena(3), 4)
    first, second, third = (pool.allocate(4) for _ in range(3))
    pool.free(first[:3])
    pool.free((second[1],))
    pool.free(third[2:])

    assert [pool.allocate(1)[0] for _ in range(4)] == [second[1], third[3], third[2], first[2]]


def test_many_slabs_are_drawn_as_one_after_the_other() -> None:
    arena = Arena(5)
    assert arena.draw(3) == [0, 1, 2]
    for slab in (1, 0):
        arena.give_back(slab)

    assert arena.draw(0) == []
    assert arena.draw(9) == [0, 1, 3, 4]
    assert arena.draw(1) == []
    assert arena.num_free == 0


def test_spare_slabs_are_for_pages_that_fill_them() -> None:
    pool = PagePool(Arena(5), 4)
    held = pool.allocate(4)
    pool.free(held[1:])

    taken = pool.allocate(10, spare=1)

    # 4 pages of a slab of their own, the 3 free ones, and 3 of another slab.
    assert pool.num_slabs == 3
    assert len({page // 4 for page in taken[:4]}) == 1
    pool.free(taken)
    assert pool.allocate(9, spare=0)[-3:] != taken[-3:]
    assert pool.num_slabs == 3


def test_of_pages_taken_together_those_of_the_fullest_slab_come_last() -> None:
    """Behind a window the first ones are given back, and with them whole slabs."""
    pool = PagePool(Arena(3), 4)
    held = pool.allocate(4)
    pool.free(held[:2])

    taken = pool.allocate(9)

    assert set(taken[-2:]) == set(held[:2])
    pool.free(taken[:-2])
    assert pool.num_slabs == 1


@given(st.integers(1, 5), st.integers(1, 4), st.lists(st.tuples(st.integers(0, 1), st.integers(0, 9)), max_size=60))
def test_pools_never_give_out_the_same_bytes(small: int, num_slabs: int, actions: list[tuple[int, int]]) -> None:
    arena = Arena(num_slabs)
    pools = (PagePool(arena, small), PagePool(arena, 3))
    held: list[list[int]] = [[], []]
    for which, count in actions:
        pool, mine = pools[which], held[which]
        if count and count <= pool.num_available:
            mine += pool.allocate(count)
        elif mine:
            pool.free((mine.pop(count * 7 % len(mine)),))
        slabs = [{page // pool.pages_per_slab for page in pages} for pool, pages in zip(pools, held, strict=True)]
        assert not slabs[0] & slabs[1]
        assert [pool.num_slabs for pool in pools] == [len(owned) for owned in slabs]
        assert sum(map(len, slabs)) == num_slabs - arena.num_free
        for pool, pages in zip(pools, held, strict=True):
            assert len(pages) == len(set(pages)) == pool.num_held
            assert pool.num_room == pool.num_slabs * pool.pages_per_slab - len(pages)
