"""What a cache plan comes to: its slots, tensors and bytes, for every kind of cache."""

from __future__ import annotations

import math

import msgspec
import pytest
from graph_text import parse_graph
from hypothesis import given
from hypothesis import strategies as st

from precast.ir.graph.schema import (
    Apply,
    CachePlan,
    EntrySpec,
    Group,
    IndexSpec,
    LatentSpec,
    PagedSpec,
    Pool,
    Slot,
    StateGroup,
    StateSpec,
    TensorType,
    Value,
)
from precast.ir.memory import caches

PLAN = parse_graph(
    """
    pool p(pages=P)
    pool q(pages=Q)
    pool r(pages=R)
    group state(pool=q, spec=state(shape=[3, 5], dtype=float32), slot_ids=%s) {
      slot layers.0.state(%layers.0.state: float32[Q, 3, 5])
      slot layers.1.state(%layers.1.state: float32[Q, 3, 5])
    }
    group full(pool=p, spec=paged(num_kv_heads=2, head_size=4, value_size=6, dtype=float16, page_size=8, window=none),
      page_indices=%a, page_indptr=%b, page_start=%c, slot_mapping=%d) {
      slot layers.2(%layers.2.k: float16[P, 8, 2, 4], %layers.2.v: float16[P, 8, 2, 6])
    }
    group latent(pool=r, spec=latent(latent_size=16, rope_size=4, dtype=bfloat16, page_size=4, window=9),
      page_indices=%e, page_indptr=%f, page_start=%g, slot_mapping=%h) {
      slot layers.3(%layers.3.latent: bfloat16[R, 4, 20])
    }
    main { return }
    """
).caches
FULL, LATENT = PLAN.groups
(STATE,) = PLAN.states


def test_groups_with_pages_come_first() -> None:
    assert caches.groups(PLAN) == (FULL, LATENT, STATE)


def test_slots_and_tensors_in_the_order_of_their_groups() -> None:
    assert [(group.name, slot.name) for group, slot in caches.slots(PLAN)] == [
        ("full", "layers.2"), ("latent", "layers.3"), ("state", "layers.0.state"), ("state", "layers.1.state"),
    ]  # fmt: skip
    assert [tensor.name for tensor in caches.tensors(PLAN)] == [
        "layers.2.k", "layers.2.v", "layers.3.latent", "layers.0.state", "layers.1.state",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("group", "names"), [(FULL, ("a", "b", "c", "d")), (LATENT, ("e", "f", "g", "h")), (STATE, ("s",))]
)
def test_the_metadata_of_a_group(group: Group | StateGroup, names: tuple[str, ...]) -> None:
    assert caches.input_names(group) == names


@pytest.mark.parametrize(
    ("spec", "types"),
    [
        (
            PagedSpec(Apply("floordiv", (8, "tp")), 4, 6, "float16", 16),
            (
                TensorType("float16", ("N", 16, Apply("floordiv", (8, "tp")), 4)),
                TensorType("float16", ("N", 16, Apply("floordiv", (8, "tp")), 6)),
            ),
        ),
        (LatentSpec(16, 4, "bfloat16", 8), (TensorType("bfloat16", ("N", 8, 20)),)),
        (IndexSpec(12, "float8_e4m3fn", 8), (TensorType("float8_e4m3fn", ("N", 8, 12)),)),
        (EntrySpec(12, "bfloat16", 8, 1, 5), (TensorType("bfloat16", ("N", 8, 12)),)),
        (EntrySpec(12, "bfloat16", 24, 4), (TensorType("bfloat16", ("N", 6, 12)),)),
        (StateSpec("conv", (6, 3), "bfloat16"), (TensorType("bfloat16", ("N", 6, 3)),)),
        (StateSpec("state", (), "float32"), (TensorType("float32", ("N",)),)),
    ],
)
def test_the_tensors_of_a_slot(
    spec: PagedSpec | LatentSpec | IndexSpec | EntrySpec | StateSpec, types: tuple[TensorType, ...]
) -> None:
    assert caches.slot_types(spec, "N") == types


def test_bytes_of_a_token_and_of_a_sequence() -> None:
    token = 2 * (4 + 6) * 2  # heads, key and value, two bytes each
    states = 2 * 3 * 5 * 4  # layers, elements, four bytes each

    assert [caches.token_bytes(group) for group in (FULL, LATENT, STATE)] == [token, 20 * 2, 0]
    assert [caches.state_bytes(group) for group in (FULL, LATENT, STATE)] == [0, 0, states]
    assert [caches.sequence_bytes(FULL, length) for length in (0, 1, 8, 9)] == [0, 8 * token, 8 * token, 16 * token]
    assert [caches.sequence_bytes(STATE, length) for length in (0, 1, 10**6)] == [states] * 3


def test_heads_that_are_shared_out_count_whole() -> None:
    spec = PagedSpec(Apply("floordiv", (8, "tp")), 4, 4, "float32", 2)
    slots = FULL.slots

    assert caches.token_bytes(Group("g", "p", spec, FULL.inputs, slots)) == 8 * (4 + 4) * 4


@pytest.mark.parametrize(
    ("window", "chunk", "first"),
    [
        (None, None, [0, 0, 0, 0, 0]),
        (1, None, [0, 1, 5, 6, 20]),
        (6, None, [0, 0, 0, 1, 15]),
        (None, 6, [0, 0, 0, 6, 18]),
        (None, 1, [0, 1, 5, 6, 20]),
    ],
)
def test_the_first_token_that_a_position_sees(window: int | None, chunk: int | None, first: list[int]) -> None:
    spec = PagedSpec(2, 4, 4, "float16", 8, window, chunk)

    assert [caches.first_visible(spec, position) for position in (0, 1, 5, 6, 20)] == first


def test_the_first_token_whose_entry_a_position_sees() -> None:
    window, blocks = EntrySpec(8, "float32", 4, 1, 5), EntrySpec(8, "float32", 8, 4)

    assert [caches.first_visible(window, position) for position in (0, 4, 5, 9)] == [0, 0, 1, 5]
    assert [caches.first_visible(blocks, position) for position in (0, 4, 100)] == [0, 0, 0]


@pytest.mark.parametrize(("page_size", "rate", "whole"), [(8, 1, 8), (8, 4, 8), (8, 3, 9), (16, 128, 128)])
def test_pages_hold_whole_blocks(page_size: int, rate: int, whole: int) -> None:
    assert caches.whole_blocks(page_size, rate) == whole


def test_the_first_latent_that_a_position_sees() -> None:
    assert [caches.first_visible(LATENT.spec, position) for position in (0, 8, 9)] == [0, 0, 1]


@pytest.mark.parametrize(
    ("window", "chunk", "tokens"),
    [
        (None, None, {0: 0, 1: 1, 9: 9}),
        (4, None, {0: 0, 3: 3, 4: 4, 9: 4}),  # its own key is one of them
        (None, 4, {0: 0, 3: 3, 4: 1, 6: 3, 9: 2}),
    ],
)
def test_what_the_next_token_sees(window: int | None, chunk: int | None, tokens: dict[int, int]) -> None:
    group = Group("g", "p", PagedSpec(2, 4, 6, "float16", 8, window, chunk), FULL.inputs, FULL.slots)

    assert {length: caches.visible_bytes(group, length) // 40 for length in tokens} == tokens


def test_the_next_token_sees_its_whole_state() -> None:
    assert [caches.visible_bytes(STATE, length) for length in (0, 7)] == [120, 120]


# --- pages that a sequence holds ---------------------------------------------------------------------------------


def group_of(page_size: int, window: int | None = None, chunk: int | None = None) -> Group:
    return Group("g", "p", PagedSpec(2, 4, 6, "float16", page_size, window, chunk), FULL.inputs, FULL.slots)


reaches = st.one_of(
    st.just((None, None)),
    st.tuples(st.integers(1, 20), st.none()),
    st.tuples(st.none(), st.integers(1, 20)),
)


@given(st.integers(1, 9), reaches, st.integers(1, 60), st.integers(1, 12))
def test_a_growing_sequence_never_holds_more_than_the_peak(
    page_size: int, reach: tuple[int | None, int | None], length: int, step: int
) -> None:
    group = group_of(page_size, *reach)
    held = [
        math.ceil(min(start + step, length) / page_size) - caches.first_visible(group.spec, start) // page_size
        for start in range(length)
    ]

    assert max(held) <= caches.peak_pages(group, length, step)
    if reach[0] is not None and length > 50:  # long enough for the worst alignment, or one page from it
        assert caches.peak_pages(group, length, step) <= max(held) + 1


@pytest.mark.parametrize(
    ("window", "step", "pages"),
    [(None, 7, 2048), (1024, 1, 65), (1024, 8192, 577), (1, 1, 1), (1, 2, 2)],
)
def test_a_window_holds_its_tokens_a_step_and_one_page(window: int | None, step: int, pages: int) -> None:
    assert caches.peak_pages(group_of(16, window), 32768, step) == pages
    assert window is None or pages <= math.ceil((window + step) / 16) + 1


def test_a_state_is_one_page() -> None:
    assert [caches.peak_pages(STATE, length, 9) for length in (0, 1, 10**6)] == [1, 1, 1]
    assert [caches.kept_pages(STATE, length) for length in (0, 1, 10**6)] == [1, 1, 1]


@pytest.mark.parametrize(
    ("window", "chunk", "kept"),
    [
        (None, None, {0: 0, 1: 1, 8: 1, 9: 2, 100: 13}),
        (4, None, {0: 0, 8: 1, 10: 2, 11: 1, 100: 1}),  # the next token sees three of these
        (None, 16, {16: 0, 17: 1, 31: 2, 32: 0}),  # a chunk begins
    ],
)
def test_pages_that_a_sequence_keeps(window: int | None, chunk: int | None, kept: dict[int, int]) -> None:
    group = group_of(8, window, chunk)

    assert {length: caches.kept_pages(group, length) for length in kept} == kept
    assert caches.sequence_bytes(group, 100) == caches.kept_pages(group, 100) * 8 * 40


# --- slabs -------------------------------------------------------------------------------------------------------


def test_tensors_of_a_page_begin_at_multiples_of_256_bytes() -> None:
    # 128 and 192 bytes; 160 bytes; twice 60 bytes
    assert caches.page_layout(FULL) == {"layers.2.k": 0, "layers.2.v": 256}
    assert caches.page_layout(STATE) == {"layers.0.state": 0, "layers.1.state": 256}
    assert [caches.page_bytes(group) for group in caches.groups(PLAN)] == [512, 256, 512]
    assert [caches.filled_bytes(group) for group in caches.groups(PLAN)] == [320, 160, 120]


def test_a_plan_without_slabs_gets_some_and_keeps_those_it_has() -> None:
    plan = caches.with_slabs(PLAN)

    assert (plan.slab_bytes, [pool.pages_per_slab for pool in plan.pools]) == (512, [1, 1, 2])
    assert [caches.page_stride(plan, pool.name) for pool in plan.pools] == [512, 512, 256]
    assert caches.with_slabs(plan) is plan
    assert caches.with_slabs(CachePlan()) == CachePlan()


def test_groups_that_share_a_pool_have_pages_of_one_stride() -> None:
    small = msgspec.structs.replace(LATENT, pool="p")
    plan = CachePlan((Pool("p", "P"),), (FULL, small))

    assert caches.pool_page_bytes(plan) == {"p": 512}
    assert caches.with_slabs(plan).slab_bytes == 512


def sized(name: str, layers: int, elements: int) -> StateGroup:
    """A group of states of `layers * elements * 4` bytes."""
    kind = TensorType("float32", ("P", elements))
    slots = tuple(Slot(f"{name}.{i}", (Value(f"{name}.{i}.state", kind),)) for i in range(layers))
    return StateGroup(name, name, StateSpec("state", (elements,), "float32"), "ids", slots)


def tokens(name: str, layers: int, page_size: int, heads: int = 16) -> Group:
    spec = PagedSpec(heads, 128, 128, "bfloat16", page_size)
    keys = caches.slot_types(spec, "P")
    slots = tuple(
        Slot(f"{name}.{i}", (Value(f"{name}.{i}.k", keys[0]), Value(f"{name}.{i}.v", keys[1]))) for i in range(layers)
    )
    return Group(name, name, spec, FULL.inputs, slots)


@pytest.mark.parametrize(
    ("groups", "slab_bytes", "per_slab"),
    [
        ((tokens("full", 32, 16),), 32 * 16 * 8192, {"full": 1}),
        # 52 to 10 layers: five pages of one are 26 of the other
        ((tokens("w", 52, 16), tokens("full", 10, 16)), 5 * 52 * 16 * 8192, {"w": 5, "full": 26}),
        # states of 72 MiB and of 1.7 MiB, 2 MiB apart, which is little beside the former; pages of 0.75 MiB
        (
            (tokens("full", 12, 64, heads=2), sized("state", 36, 32 * 128 * 128), sized("conv", 36, 12288)),
            72 * 2**20,
            {"full": 96, "state": 1, "conv": 36},
        ),
        # a state larger than a GiB is a slab
        ((sized("state", 3, 2**27), sized("conv", 3, 2**20)), 3 * 2**29, {"state": 1, "conv": 128}),
    ],
)
def test_slabs_of_known_geometries(
    groups: tuple[Group | StateGroup, ...], slab_bytes: int, per_slab: dict[str, int]
) -> None:
    assert caches.choose_slabs(groups) == (slab_bytes, per_slab)


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 70), st.integers(1, 3_000_000)), min_size=1, max_size=5))
def test_slabs_hold_whole_pages_and_little_else(drawn: list[tuple[bool, int, int]]) -> None:
    groups = [
        tokens(f"g{i}", layers, 8 * (elements % 8 + 1), elements % 16 + 1)
        if paged
        else sized(f"g{i}", layers, elements)
        for i, (paged, layers, elements) in enumerate(drawn)
    ]
    slab_bytes, per_slab = caches.choose_slabs(groups)
    largest = max(map(caches.page_bytes, groups))

    assert slab_bytes <= max(caches.MAX_SLAB_BYTES, largest * 1.02)
    padding, strides, states = [], 0, 0
    for group in groups:
        stride, rest = divmod(slab_bytes, per_slab[group.pool])
        assert (rest, stride % 256) == (0, 0)
        assert stride >= caches.page_bytes(group)
        if isinstance(group, StateGroup):
            strides, states = strides + stride, states + caches.page_bytes(group)
        else:
            padding.append(1 - caches.page_bytes(group) / stride)
    padding.append(1 - states / strides if strides else 0)
    assert max(padding) <= 0.05 or largest > caches.MAX_SLAB_BYTES // 8  # 1 % is met by nine in ten of three sizes


def test_slabs_for_sequences() -> None:
    plan = caches.with_slabs(PLAN)

    # 9 tokens: 2 pages of 8, and 3 of 4 in the latents' window; a state each; 1, 2 and 1 pages a slab
    assert caches.slabs_for(plan, 1, 9, 9) == 2 + 2 + 1
    assert caches.slabs_for(plan, 3, 9, 9) == 6 + 5 + 3


def test_the_example_of_the_docs() -> None:
    """docs/caches.md: three layers with a window of 10 tokens, one without; a sequence of 21 tokens."""
    groups = []
    for name, window, layers in (("full", None, [3]), ("window10", 10, [0, 1, 2])):
        spec = PagedSpec(1, 16, 16, "bfloat16", 8, window)
        types = caches.slot_types(spec, f"P_{name}")
        slots = tuple(
            Slot(str(i), tuple(Value(f"{part}{i}", kind) for part, kind in zip("kv", types, strict=True)))
            for i in layers
        )
        groups.append(Group(name, name, spec, FULL.inputs, slots))
    pools = tuple(Pool(group.name, f"P_{group.name}") for group in groups)

    plan = caches.with_slabs(CachePlan(pools, tuple(groups)))
    full, window = plan.groups

    assert plan.slab_bytes == 1536
    assert [pool.pages_per_slab for pool in plan.pools] == [3, 1]
    assert [caches.page_stride(plan, group.pool) for group in plan.groups] == [512, 1536]
    assert caches.page_layout(window) == {"k0": 0, "v0": 256, "k1": 512, "v1": 768, "k2": 1024, "v2": 1280}
    assert [caches.kept_pages(group, 21) for group in plan.groups] == [3, 2]
    assert caches.first_visible(window.spec, 21) == 12
    assert [caches.first_visible(window.spec, position) // 8 for position in (16, 17)] == [0, 1]
    assert caches.first_visible(full.spec, 21) == 0
