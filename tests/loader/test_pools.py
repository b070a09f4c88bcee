"""Pages: given out once, given back once, sized by one formula."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny import HEAD, KV_HEADS, tiny_graph

from precast.ir.schema import CachePlan
from precast.ir.text import parse_graph
from precast.loader.pools import (
    PageAllocator,
    PageTables,
    PoolUsage,
    cache_bytes_for,
    cache_tensors,
    page_bytes,
    plan_pages,
)

PLAN = tiny_graph().caches
ONE_TOKEN = 2 * KV_HEADS * HEAD * 4  # bytes of a key and a value in one layer


@given(st.lists(st.integers(0, 5), max_size=40))
def test_a_page_has_one_owner_at_a_time(counts: list[int]) -> None:
    allocator = PageAllocator(12)
    held: list[list[int]] = []
    for count in counts:
        if count <= allocator.num_free:
            held.append(list(allocator.allocate(count)))
        elif held:
            allocator.free(held.pop(0))
        pages = [page for pages in held for page in pages]
        assert len(pages) == len(set(pages)) == 12 - allocator.num_free
        assert all(0 <= page < 12 for page in pages)


def test_a_page_is_not_freed_twice() -> None:
    allocator = PageAllocator(3)
    (page,) = allocator.allocate(1)
    allocator.free([page])
    with pytest.raises(AssertionError, match=f"page {page} is freed"):
        allocator.free([page])


def test_more_pages_than_free_are_not_given() -> None:
    allocator = PageAllocator(3)
    allocator.allocate(2)
    with pytest.raises(AssertionError, match="2 pages wanted, 1 are free"):
        allocator.allocate(2)


@pytest.mark.parametrize(("tokens", "near", "far"), [(1, 1, 1), (4, 1, 1), (5, 2, 1), (8, 2, 1), (9, 3, 2), (17, 5, 3)])
def test_pages_of_a_sequence_by_group(tokens: int, near: int, far: int) -> None:
    tables = PageTables(PLAN, {"small": 20, "large": 10})
    pages = tables.reserve(tokens)
    assert {name: len(taken) for name, taken in pages.items()} == {"near": near, "far": far}
    assert tables.usage() == {"small": PoolUsage(20, near), "large": PoolUsage(10, far)}
    tables.release(pages)
    assert tables.usage() == {"small": PoolUsage(20, 0), "large": PoolUsage(10, 0)}


@pytest.mark.parametrize(("small", "large", "fits"), [(3, 2, True), (2, 2, False), (3, 1, False)])
def test_tokens_must_fit_every_group(small: int, large: int, fits: bool) -> None:
    tables = PageTables(PLAN, {"small": small, "large": large})
    assert tables.can_hold(9) is fits
    assert tables.can_reserve(9) is fits


def test_what_fits_the_empty_cache_may_not_fit_now() -> None:
    tables = PageTables(PLAN, {"small": 4, "large": 4})
    tables.reserve(5)
    assert tables.can_hold(12)
    assert not tables.can_reserve(12)
    assert tables.arithmetic(12) == (
        "group near: 3 pages of 4 tokens needed, 2 free of 4; group far: 2 pages of 8 tokens needed, 3 free of 4"
    )


def test_groups_of_one_pool_have_free_lists_of_their_own() -> None:
    plan = tiny_graph({"near": (6, 4, "main"), "far": (None, 4, "main")}).caches
    tables = PageTables(plan, {"main": 2})
    pages = tables.reserve(8)  # two pages in each group, though the pool counts two
    assert sorted(pages["near"]) == sorted(pages["far"]) == [0, 1]
    assert tables.usage() == {"main": PoolUsage(4, 4)}


def test_bytes_of_a_page_count_all_slots_of_the_pool() -> None:
    # two layers of 4 tokens a page, one of 8
    assert page_bytes(PLAN) == {"small": 2 * 4 * ONE_TOKEN, "large": 8 * ONE_TOKEN}


@pytest.mark.parametrize(
    ("cache_bytes", "small", "large"),
    [
        (24 * ONE_TOKEN, 2, 1),  # 8 tokens in three layers
        (24 * ONE_TOKEN - 1, 0, 0),
        (5 * 24 * ONE_TOKEN + 7, 10, 5),
        (10**12, 24, 12),  # no more than 3 sequences of 30 tokens, 32 in whole pages, can fill
        (-5, 0, 0),
    ],
)
def test_pages_that_fit_into_bytes(cache_bytes: int, small: int, large: int) -> None:
    pages = plan_pages(PLAN, cache_bytes=cache_bytes, max_num_seqs=3, max_seq_len=30)
    assert pages == {"small": small, "large": large}


@given(st.integers(1, 5), st.integers(1, 70))
def test_bytes_for_sequences_hold_those_sequences(num_seqs: int, seq_len: int) -> None:
    num_bytes = cache_bytes_for(PLAN, num_seqs, seq_len)
    tables = PageTables(PLAN, plan_pages(PLAN, cache_bytes=num_bytes, max_num_seqs=9, max_seq_len=70))
    for _ in range(num_seqs):
        assert tables.can_reserve(seq_len)
        tables.reserve(seq_len)


# --- states ------------------------------------------------------------------------------------------------------

STATE = 2 * 3 * 4  # bytes of a sequence's states in two layers
CONV = 2 * 2 * 2
TOKEN = 2 * (4 + 6) * 2  # keys and values of two heads
STATEFUL = parse_graph(
    """
    pool states(pages=S)
    pool convs(pages=C)
    pool pages(pages=P)
    group state(pool=states, spec=state(shape=[3], dtype=float32), slot_ids=%s) {
      slot layers.0(%layers.0.state: float32[S, 3])
      slot layers.1(%layers.1.state: float32[S, 3])
    }
    group conv(pool=convs, spec=conv(shape=[2, 2], dtype=float16), slot_ids=%c) {
      slot layers.0.conv(%layers.0.conv: float16[C, 2, 2])
    }
    group full(
      pool=pages, spec=paged(num_kv_heads=2, head_size=4, value_size=6, dtype=float16, page_size=8, window=none),
      page_indices=%a, page_indptr=%b, page_start=%d, slot_mapping=%e) {
      slot layers.2(%layers.2.k: float16[P, 8, 2, 4], %layers.2.v: float16[P, 8, 2, 6])
    }
    main { return }
    """
).caches
STATES_ALONE = CachePlan(STATEFUL.pools[:2], (), STATEFUL.states)


@pytest.mark.parametrize("tokens", [1, 8, 9])
def test_a_sequence_has_one_state_of_each_group(tokens: int) -> None:
    tables = PageTables(STATEFUL, {"states": 2, "convs": 3, "pages": 9})
    taken = tables.reserve(tokens)

    assert {name: len(pages) for name, pages in taken.items()} == {"full": -(-tokens // 8), "state": 1, "conv": 1}
    assert tables.usage() == {
        "states": PoolUsage(2, 1), "convs": PoolUsage(3, 1), "pages": PoolUsage(9, -(-tokens // 8)),
    }  # fmt: skip
    tables.release(taken)
    assert sum(pool.pages_in_use for pool in tables.usage().values()) == 0


def test_without_a_free_state_there_is_no_room() -> None:
    tables = PageTables(STATEFUL, {"states": 1, "convs": 9, "pages": 9})
    tables.reserve(3)

    assert tables.can_hold(9)
    assert not tables.can_reserve(1)
    assert tables.arithmetic(9) == (
        "group full: 2 pages of 8 tokens needed, 8 free of 9; group state: 1 state needed, 0 free of 1; "
        "group conv: 1 state needed, 8 free of 9"
    )


def test_bytes_of_a_page_of_states() -> None:
    assert page_bytes(STATEFUL) == {"states": STATE, "convs": CONV, "pages": 8 * TOKEN}


@pytest.mark.parametrize(
    ("cache_bytes", "states", "pages"),
    [
        (-1, 0, 0),
        (STATE + CONV - 1, 0, 0),  # a state without a conv is no use
        (STATE + CONV, 1, 0),
        (STATE + CONV + 16 * TOKEN, 1, 2),  # one sequence of 16 tokens
        (STATE + CONV + 16 * TOKEN + 16 * TOKEN, 11, 3),  # of 640 more, half for states
        (10**9, 40, 80),  # 40 sequences of 16 tokens
        (40 * (STATE + CONV + 16 * TOKEN), 40, 80),
    ],
)
def test_states_and_pages_that_fit_into_bytes(cache_bytes: int, states: int, pages: int) -> None:
    found = plan_pages(STATEFUL, cache_bytes=cache_bytes, max_num_seqs=40, max_seq_len=16)

    assert found == {"states": states, "convs": states, "pages": pages}


@pytest.mark.parametrize(("cache_bytes", "states"), [(STATE + CONV - 1, 0), (5 * (STATE + CONV), 5), (10**9, 7)])
def test_states_alone_take_all_bytes(cache_bytes: int, states: int) -> None:
    found = plan_pages(STATES_ALONE, cache_bytes=cache_bytes, max_num_seqs=7, max_seq_len=16)

    assert found == {"states": states, "convs": states}
    assert cache_bytes_for(STATES_ALONE, 5, 10**6) == 5 * (STATE + CONV)


@given(st.integers(1, 5), st.integers(1, 70), st.integers(0, 5000))
def test_the_longest_sequence_fits_where_its_bytes_are(num_seqs: int, seq_len: int, more: int) -> None:
    for needed, sequences in ((1, 1), (num_seqs, num_seqs)):
        num_bytes = cache_bytes_for(STATEFUL, needed, seq_len) + more
        pages = plan_pages(STATEFUL, cache_bytes=num_bytes, max_num_seqs=num_seqs, max_seq_len=seq_len)
        sizes = page_bytes(STATEFUL)
        assert sum(sizes[name] * count for name, count in pages.items()) <= num_bytes
        tables = PageTables(STATEFUL, pages)
        for _ in range(sequences):
            assert tables.can_reserve(seq_len)
            tables.reserve(seq_len)


def test_tensors_of_states_have_a_row_for_each() -> None:
    tensors = cache_tensors(STATEFUL, {"states": 5, "convs": 4, "pages": 3}, device=torch.device("cpu"))

    assert {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items() if "2" not in name} == {
        "layers.0.state": (torch.float32, (5, 3)),
        "layers.1.state": (torch.float32, (5, 3)),
        "layers.0.conv": (torch.float16, (4, 2, 2)),
    }


# --- tensors -----------------------------------------------------------------------------------------------------


def test_cache_tensors_have_the_types_of_the_plan() -> None:
    tensors = cache_tensors(PLAN, {"small": 5, "large": 3}, device=torch.device("cpu"))
    shapes = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    near, far = (torch.float32, (5, 4, KV_HEADS, HEAD)), (torch.float32, (3, 8, KV_HEADS, HEAD))
    assert shapes == {
        f"layers.{i}.cache.{part}": far if i == 1 else near for i in (0, 2, 1) for part in "kv"
    }  # layer 1 is the full one
    sizes = page_bytes(PLAN)
    assert sum(tensor.nbytes for tensor in tensors.values()) == 5 * sizes["small"] + 3 * sizes["large"]
