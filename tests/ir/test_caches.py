"""What a cache plan comes to: its slots, tensors and bytes, for every kind of cache."""

from __future__ import annotations

import pytest

from precast.ir import caches
from precast.ir.schema import Apply, Group, LatentSpec, PagedSpec, StateGroup, StateSpec, TensorType
from precast.ir.text import parse_graph

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
        (StateSpec("conv", (6, 3), "bfloat16"), (TensorType("bfloat16", ("N", 6, 3)),)),
        (StateSpec("state", (), "float32"), (TensorType("float32", ("N",)),)),
    ],
)
def test_the_tensors_of_a_slot(spec: PagedSpec | LatentSpec | StateSpec, types: tuple[TensorType, ...]) -> None:
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
