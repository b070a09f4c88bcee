"""Page tables: what a sequence needs and gives back as it grows, in groups of every kind, and what fits."""

from __future__ import annotations

import pytest
from graph_text import parse_graph
from hypothesis import given
from hypothesis import strategies as st

from precast.ir.graph.schema import CachePlan, Pool
from precast.ir.memory import caches
from precast.loader.cache.arena import Arena
from precast.loader.cache.tables import PageTables, PoolUsage, SequenceTable

PAGED = "paged(num_kv_heads=2, head_size=16, value_size=16, dtype=float16"  # 64 bytes a token and tensor
MIXED = parse_graph(
    f"""
    slabs(bytes=4096)
    pool near(pages=N, pages_per_slab=4)
    pool far(pages=F, pages_per_slab=1)
    pool chunks(pages=C, pages_per_slab=8)
    pool states(pages=S, pages_per_slab=2)
    group near(pool=near, spec={PAGED}, page_size=4, window=6),
      page_indices=%a1, page_indptr=%b1, page_start=%c1, slot_mapping=%d1) {{
      slot l0(%l0.k: float16[N, 4, 2, 16], %l0.v: float16[N, 4, 2, 16])
      slot l1(%l1.k: float16[N, 4, 2, 16], %l1.v: float16[N, 4, 2, 16])
    }}
    group far(pool=far, spec={PAGED}, page_size=16, window=none),
      page_indices=%a2, page_indptr=%b2, page_start=%c2, slot_mapping=%d2) {{
      slot l2(%l2.k: float16[F, 16, 2, 16], %l2.v: float16[F, 16, 2, 16])
      slot l3(%l3.k: float16[F, 16, 2, 16], %l3.v: float16[F, 16, 2, 16])
    }}
    group chunks(pool=chunks, spec={PAGED}, page_size=2, window=none, chunk=8),
      page_indices=%a3, page_indptr=%b3, page_start=%c3, slot_mapping=%d3) {{
      slot l4(%l4.k: float16[C, 2, 2, 16], %l4.v: float16[C, 2, 2, 16])
    }}
    group state(pool=states, spec=state(shape=[5], dtype=float32), slot_ids=%s) {{
      slot l5(%l5.state: float32[S, 5])
    }}
    main {{ return }}
    """
).caches
NEAR, FAR, CHUNKS = MIXED.groups
STATES_ALONE = CachePlan(MIXED.pools[3:], (), MIXED.states, slab_bytes=4096)
WINDOWS_ALONE = CachePlan(MIXED.pools[:1], (NEAR,), slab_bytes=4096)


def tables_of(num_slabs: int, plan: CachePlan = MIXED) -> PageTables:
    return PageTables(plan, Arena(num_slabs))


def held(table: SequenceTable) -> dict[str, tuple[int, int]]:
    """By group: pages evicted, pages held."""
    return {name: (table.first[name], len(pages)) for name, pages in table.pages.items()}


def advance(tables: PageTables, table: SequenceTable, length: int, step: int = 1) -> None:
    """Grow to `length`, up to `step` tokens at a time, giving back what the next token can't see."""
    for start in range(0, length, step):
        tables.evict(table, start)
        target = min(start + step, length)
        assert tables.can_take(tables.missing(table, target))
        tables.grow(table, target)


# --- one sequence ------------------------------------------------------------------------------------------------


def test_pages_that_stay_get_slabs_of_their_own_while_free_ones_abound() -> None:
    plan = CachePlan((Pool("far", "F", pages_per_slab=4),), (FAR,), slab_bytes=4 * 4096)
    tables = tables_of(12, plan)
    short, long, late = (tables.new_table() for _ in range(3))
    tables.grow(short, 16)
    tables.grow(long, 9 * 16)
    tables.grow(late, 8 * 16)

    by_slab = [sorted(page // 4 for page in table.pages["far"]) for table in (short, long, late)]
    assert [len(set(slabs) & set(by_slab[0])) for slabs in by_slab] == [1, 1, 0]
    assert [len(set(slabs)) for slabs in by_slab] == [1, 3, 2]
    # Without the two long ones the pool is back at one slab.
    tables.release(long)
    tables.release(late)
    assert tables.arena.num_slabs - tables.arena.num_free == 1


@pytest.mark.parametrize(
    ("length", "near", "far", "chunks"), [(1, 1, 1, 1), (4, 1, 1, 2), (5, 2, 1, 3), (16, 4, 1, 8), (17, 5, 2, 9)]
)
def test_pages_by_group(length: int, near: int, far: int, chunks: int) -> None:
    tables = tables_of(20)
    table = tables.new_table()
    expected = {"near": near, "far": far, "chunks": chunks, "state": 1}

    assert tables.missing(table, length) == expected
    tables.grow(table, length)
    assert {name: len(pages) for name, pages in table.pages.items()} == expected
    assert tables.missing(table, length) == {}
    tables.release(table)
    assert tables.arena.num_free == 20
    assert held(table) == dict.fromkeys(expected, (0, 0))


def test_growth_within_the_pages_takes_none() -> None:
    tables = tables_of(20)
    table = tables.new_table()
    tables.grow(table, 1)
    before = {name: list(pages) for name, pages in table.pages.items()}

    tables.grow(table, 2)  # the smallest page has two tokens
    assert {name: list(pages) for name, pages in table.pages.items()} == before
    tables.grow(table, 3)
    assert list(table.pages["chunks"])[:1] == before["chunks"]
    assert len(table.pages["chunks"]) == 2


def test_pages_behind_the_window_are_given_back() -> None:
    tables = tables_of(20)
    table = tables.new_table()
    tables.grow(table, 20)
    pages = list(table.pages["near"])

    tables.evict(table, 8)  # sees 3 and on
    assert held(table)["near"] == (0, 5)
    tables.evict(table, 9)  # sees 4 and on
    assert held(table)["near"] == (1, 4)
    tables.evict(table, 20)  # sees 15 and on
    assert (held(table)["near"], list(table.pages["near"])) == ((3, 2), pages[3:])
    assert held(table)["chunks"] == (8, 2)  # sees 16 and on
    assert held(table)["far"] == (0, 2)
    assert held(table)["state"] == (0, 1)
    found = tables.usage()
    assert {name: pool.pages_evicted for name, pool in found.items()} == {"near": 3, "far": 0, "chunks": 8, "states": 0}


def test_a_page_is_given_back_when_no_later_token_sees_it() -> None:
    tables = tables_of(20)
    table = tables.new_table()
    tables.grow(table, 20)

    def seen() -> tuple[tuple[int, int], tuple[int, int]]:
        return held(table)["chunks"], held(table)["near"]

    tables.evict(table, 7)
    assert seen() == ((0, 10), (0, 5))
    tables.evict(table, 8)  # the first chunk ends there
    assert seen() == ((4, 6), (0, 5))
    tables.evict(table, 9)  # the window leaves its first page
    tables.evict(table, 12)
    assert seen() == ((4, 6), (1, 4))
    tables.evict(table, 13)
    assert seen() == ((4, 6), (2, 3))


@pytest.mark.parametrize("step", [1, 3, 50])
def test_a_long_sequence_holds_a_window_a_step_and_one_page(step: int) -> None:
    tables = tables_of(40, WINDOWS_ALONE)
    table, most = tables.new_table(), 0
    for length in range(step, 1000, step):
        tables.evict(table, length - step)
        tables.grow(table, length)
        most = max(most, len(table.pages["near"]))

    assert most <= caches.peak_pages(NEAR, 1000, step) <= (6 + step + 3) // 4 + 1
    assert tables.usage()["near"].pages_in_use == len(table.pages["near"])


@pytest.mark.parametrize("plan", [STATES_ALONE, WINDOWS_ALONE, CachePlan((MIXED.pools[1],), (FAR,), (), 4096)])
def test_plans_of_one_kind(plan: CachePlan) -> None:
    tables = tables_of(8, plan)
    table = tables.new_table()
    advance(tables, table, 40, 7)
    (name,) = table.pages

    assert len(table.pages[name]) == {"state": 1, "near": 3, "far": 3}[name]
    tables.release(table)
    assert tables.arena.num_free == 8


def test_states_alone_never_need_another_page() -> None:
    tables = tables_of(1, STATES_ALONE)
    table = tables.new_table()
    tables.grow(table, 1)

    assert tables.missing(table, 10**9) == {}
    assert tables.can_take(tables.missing(table, 10**9))


def test_states_alone_need_one_all_the_same() -> None:
    tables = tables_of(1, STATES_ALONE)  # two states
    for _ in range(2):
        tables.grow(tables.new_table(), 1)

    third = tables.new_table()
    assert tables.missing(third, 1) == {"state": 1}
    assert not tables.can_take(tables.missing(third, 1)), "no group with pages lacks one, and still it doesn't fit"


def test_without_caches_there_is_nothing_to_hold() -> None:
    tables = tables_of(0, CachePlan())
    table = tables.new_table()

    assert tables.can_hold(10**9, 1)
    tables.grow(table, 5)
    tables.evict(table, 4)
    tables.release(table)
    assert tables.usage() == {}


# --- what fits ---------------------------------------------------------------------------------------------------


def test_free_slabs_are_counted_once_for_all_pools() -> None:
    # each of four pools could have the one free slab, and no two of them
    tables = tables_of(4)
    first = tables.new_table()
    tables.grow(first, 1)
    assert tables.arena.num_free == 0

    second = tables.new_table()
    assert [tables.can_take({name: 1}) for name in ("near", "far", "chunks", "state")] == [True, False, True, True]
    assert not tables.can_take(tables.missing(second, 1))
    tables.release(first)
    assert tables.can_take({"near": 8, "far": 2})
    assert not tables.can_take({"near": 9, "far": 2})
    assert tables.can_take({})


def test_pages_that_do_not_fit_are_not_taken() -> None:
    tables = tables_of(5)
    table = tables.new_table()
    tables.grow(table, 1)

    assert tables.can_take(tables.missing(table, 16))
    assert not tables.can_take(tables.missing(table, 17))
    before = held(table)
    with pytest.raises(AssertionError, match=r"pages .* wanted, 1 slabs are free"):
        tables.grow(table, 17)
    assert (held(table), tables.arena.num_free) == (before, 1)


@pytest.mark.parametrize(
    ("num_slabs", "length", "step", "fits"),
    [
        # 3 pages of the window in one slab, 4 of the chunks, one state: the rest is for the full layers
        (4, 16, 1, True),
        (4, 17, 1, False),
        (5, 32, 1, True),
        # a long step holds more at once: 7 pages of the window, 14 of the chunks, two slabs each
        (6, 32, 20, False),
        (7, 32, 20, True),
        (3, 1, 1, False),
    ],
)
def test_what_the_empty_cache_can_hold(num_slabs: int, length: int, step: int, fits: bool) -> None:
    tables = tables_of(num_slabs)

    assert tables.can_hold(length, step) is fits
    if fits:
        advance(tables, tables.new_table(), length, step)


def test_the_arithmetic_of_a_message() -> None:
    tables = tables_of(3)
    tables.grow(tables.new_table(), 0)

    assert tables.arithmetic(20) == (
        "group near: 3 pages of 4 tokens, 4 a slab; group far: 2 pages of 16 tokens, 1 a slab; "
        "group chunks: 5 pages of 2 tokens, 8 a slab; group state: a state, 2 a slab: "
        "5 slabs of 4096 bytes needed, 3 there"
    )


@given(st.integers(1, 70), st.integers(1, 30))
def test_what_the_empty_cache_can_hold_it_holds(length: int, step: int) -> None:
    needed = caches.slabs_for(MIXED, 1, length, step)
    tables = tables_of(needed)

    assert tables.can_hold(length, step)
    assert not tables_of(needed - 1).can_hold(length, step)
    advance(tables, tables.new_table(), length, step)


# --- many sequences ----------------------------------------------------------------------------------------------


def test_pages_are_shared_until_the_last_sequence_ends() -> None:
    tables = tables_of(20)
    first, second = tables.new_table(), tables.new_table()
    tables.grow(first, 32)
    tables.evict(first, 32)  # the window sees 27 and on: page 6; the chunk begins anew

    shared = {"far": list(first.pages["far"]), "near": list(first.pages["near"])}
    second.first.update({"near": 6, "chunks": 16})
    for name, pages in shared.items():
        second.pages[name].extend(pages)
    tables.hold(second)
    assert tables.missing(second, 33) == {"near": 1, "far": 1, "chunks": 1, "state": 1}

    tables.grow(second, 33)
    tables.release(first)
    assert [tables.pool_of["far"].holders(page) for page in shared["far"]] == [1, 1]
    assert list(second.pages["far"])[:2] == shared["far"]
    tables.release(second)
    assert tables.arena.num_free == 20


def test_pages_that_nobody_holds_are_not_shared() -> None:
    tables = tables_of(20)
    table = tables.new_table()
    table.pages["far"].append(3)

    with pytest.raises(AssertionError, match="page 3 is shared, and nobody holds it"):
        tables.hold(table)


def test_usage_of_pools() -> None:
    tables = tables_of(7)
    table = tables.new_table()
    tables.grow(table, 17)

    # pages of 1024, 4096, 256 and 20 bytes; slabs hold 4, 1, 8 and 2 of them
    assert tables.usage() == {
        "near": PoolUsage(8, 5, 3, 0, 2 * 4096 - 5 * 1024),
        "far": PoolUsage(2, 2, 0, 0, 0),
        "chunks": PoolUsage(16, 9, 7, 0, 2 * 4096 - 9 * 256),
        "states": PoolUsage(2, 1, 1, 0, 4096 - 20),
    }


def test_groups_of_one_pool_are_counted_together() -> None:
    # a bundle of before: no slabs, and one pool for two groups
    plan = parse_graph(OLD).caches
    tables = tables_of(9, plan)
    table = tables.new_table()
    assert {group.pool for group in plan.groups} == {"main"}
    assert tables.can_take({"near": 4, "far": 5})
    assert not tables.can_take({"near": 5, "far": 5}), "both groups' pages count"

    tables.grow(table, 8)
    assert not set(table.pages["near"]) & set(table.pages["far"]), "they share the memory, so not the pages"
    tables.evict(table, 8)
    found = tables.usage()["main"]
    assert (found.pages, found.pages_in_use, found.pages_evicted) == (9, 3, 1)


OLD = f"""
pool main(pages=P)
group near(pool=main, spec={PAGED}, page_size=4, window=3),
  page_indices=%a1, page_indptr=%b1, page_start=%c1, slot_mapping=%d1) {{
  slot l0(%l0.k: float16[P, 4, 2, 16], %l0.v: float16[P, 4, 2, 16])
  slot l1(%l1.k: float16[P, 4, 2, 16], %l1.v: float16[P, 4, 2, 16])
}}
group far(pool=main, spec={PAGED}, page_size=4, window=none),
  page_indices=%a2, page_indptr=%b2, page_start=%c2, slot_mapping=%d2) {{
  slot l2(%l2.k: float16[P, 4, 2, 16], %l2.v: float16[P, 4, 2, 16])
}}
main {{ return }}
"""
