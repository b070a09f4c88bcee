"""The simulation of `benchmarks/bench_caches.py`: what it counts, its baselines, and the claim on two geometries."""

from __future__ import annotations

import itertools
from array import array

import pytest
from bench_caches import OURS, SPLIT, UNIFORM, system
from support import cache_baselines, workloads
from support.cache_simulation import Server, needed_bytes, sample, simulate
from support.long_sequences import CACHE_BYTES, uniform_at_start

from precast.builder.passes.plan.plan_pages import choose_page_sizes, with_small_slabs
from precast.ir.graph.schema import CachePlan, Group, PagedInputs, PagedSpec, Pool, Slot, StateGroup, StateSpec, Value
from precast.ir.memory import caches
from precast.loader.schedule.requests import Request

Layers = tuple[int, PagedSpec | StateSpec]
GB = 10**9


def kv(heads: int, size: int, window: int | None = None) -> PagedSpec:
    return PagedSpec(heads, size, size, "bfloat16", 16, window)


GEMMA_3_12B = ((40, kv(8, 256, 1024)), (8, kv(8, 256)))
GEMMA_3_27B = ((52, kv(16, 128, 1024)), (10, kv(16, 128)))
GEMMA_4_26B = ((25, kv(8, 256, 1024)), (5, kv(2, 512)))
GPT_OSS = ((18, kv(8, 64, 128)), (18, kv(8, 64)))
QWEN3_NEXT = (
    (12, kv(2, 256)),
    (36, StateSpec("conv", (8192, 3), "bfloat16")),
    (36, StateSpec("state", (32, 128, 128), "float32")),
)


def plan_of(*layers: Layers) -> CachePlan:
    """The plan that the builder makes of so many layers of each geometry."""
    groups: list[Group] = []
    states: list[StateGroup] = []
    for i, (count, spec) in enumerate(layers):
        types = caches.slot_types(spec, f"P_{i}")
        slots = tuple(
            Slot(f"{i}.{layer}", tuple(Value(f"{i}.{layer}.{k}", kind) for k, kind in enumerate(types)))
            for layer in range(count)
        )
        if isinstance(spec, StateSpec):
            states.append(StateGroup(f"g{i}", f"p{i}", spec, f"ids_{i}", slots))
        else:
            groups.append(Group(f"g{i}", f"p{i}", spec, PagedInputs(*(f"{name}_{i}" for name in "abcd")), slots))
    pools = tuple(Pool(f"p{i}", f"P_{i}") for i in range(len(layers)))
    return with_small_slabs(choose_page_sizes(CachePlan(pools, tuple(groups), tuple(states))))


# --- the claim ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("layers", "cache_gb"), [(GEMMA_3_27B, 70), (QWEN3_NEXT, 40)])
def test_in_steady_state_97_percent_of_what_is_allocated_is_useful(layers: tuple[Layers, ...], cache_gb: int) -> None:
    tested = system(OURS, plan_of(*layers), cache_gb * GB, 8192)
    assert tested is not None

    found = simulate(tested, workloads.CHAT.requests(8192, shares=False))

    assert found["useful, % of allocated"] >= 97


@pytest.mark.parametrize("layers", [GEMMA_3_27B, QWEN3_NEXT])
@pytest.mark.parametrize("reuses", [False, True])
def test_every_request_ends_and_all_memory_comes_back(layers: tuple[Layers, ...], reuses: bool) -> None:
    tested = system(OURS, plan_of(*layers), 4 * GB, 4096)
    assert tested is not None
    server = Server(tested, itertools.islice(workloads.MIXED.requests(4096, shares=reuses), 60), reuses=reuses)
    most = 0
    while server.num_finished < 60:
        server.complete(server.schedule())
        most = max(most, server.scheduler.num_running)

    assert not server.requests
    assert most < 50, "there is room for all, so this shows nothing"
    if server.prefixes is not None:
        assert server.prefixes.num_spans
        server.prefixes.clear()
    assert tested.tables.arena.num_free == tested.tables.arena.num_slabs


# --- what is counted ---------------------------------------------------------------------------------------------


def test_needed_are_the_tokens_that_a_query_sees_and_the_states() -> None:
    plan = plan_of((2, kv(1, 64, 8)), (1, kv(1, 64)), (3, StateSpec("state", (64,), "float32")))
    token, state = 2 * 64 * 2, 64 * 4
    # Position 20 sees 13 .. 20 through the window; a chunk of 10 .. 14 sees 3 .. 14.
    assert needed_bytes(plan, [(20, 21)]) == 2 * 8 * token + 21 * token + 3 * state
    assert needed_bytes(plan, [(10, 15)]) == 2 * 12 * token + 15 * token + 3 * state
    assert needed_bytes(plan, [(20, 21), (10, 15)]) == (2 * 20 + 36) * token + 6 * state


def test_a_shared_token_is_needed_once() -> None:
    plan = plan_of((4, kv(1, 64)))
    tested = system(OURS, plan, GB, 4096)
    assert tested is not None
    size, token = plan.groups[0].spec.page_size, caches.token_bytes(plan.groups[0])
    prompt = array("q", range(100))
    server = Server(tested, iter([Request(0, prompt, 200)]), reuses=True)
    server.complete(server.schedule())
    server.requests[1] = Request(1, prompt + prompt, 300)
    server.scheduler.submit(server.requests[1])

    found = sample(server, server.schedule(), reuses=True)

    assert server.scheduler.num_tokens_reused == 100 // size * size
    assert found.needed == (101 + 200 - 100 // size * size) * token
    assert found.reusable == 0


def test_pages_that_only_prefixes_hold_are_reusable_and_not_needed() -> None:
    plan = plan_of((4, kv(1, 64)))
    tested = system(OURS, plan, GB, 4096)
    assert tested is not None
    requests = (Request(i, array("q", range(i * 1000, i * 1000 + 100)), 101 + 50 * i) for i in range(2))
    server = Server(tested, requests, reuses=True)
    server.complete(server.schedule())
    assert server.num_finished == 1

    found = sample(server, server.schedule(), reuses=True)

    size, token = plan.groups[0].spec.page_size, caches.token_bytes(plan.groups[0])
    assert found.reusable == 100 // size * size * token
    assert found.needed == 101 * token


# --- baselines ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layers", "groups", "tokens", "block"),
    [
        # 10 layers a group: 6 groups of windows, the last with 8 layers of padding
        (GEMMA_3_27B, 7, {16}, 10 * 16 * 8192),
        # the full layers' tokens are half as large: twice as many of them in a block
        (GEMMA_4_26B, 6, {16, 32}, 5 * 16 * 8192),
        (GPT_OSS, 2, {16}, 18 * 16 * 2048),
        # a layer's states, 2,146,304 bytes, are 1,048 tokens of 2,048 bytes: blocks of 1,056
        (QWEN3_NEXT, 1, {1056}, 12 * 1056 * 2048),
    ],
)
def test_uniform_blocks(layers: tuple[Layers, ...], groups: int, tokens: set[int], block: int) -> None:
    plan = cache_baselines.uniform_plan(plan_of(*layers))

    assert len(plan.groups) == groups
    assert {group.spec.page_size for group in plan.groups} == tokens
    assert plan.slab_bytes == block
    assert {pool.pages_per_slab for pool in plan.pools} == {1}


def test_states_of_uniform_blocks_are_in_groups_of_as_many_layers_as_attention_has() -> None:
    assert len(cache_baselines.uniform_plan(plan_of(*QWEN3_NEXT)).states) == 3


def test_the_uniform_model_gives_what_vllm_reports_at_start() -> None:
    """14.0 sequences of 32,768 tokens, for vLLM 0.25.1 on an H200 with 16,384 tokens a step."""
    plan = cache_baselines.uniform_plan(plan_of(*GEMMA_3_12B))
    assert uniform_at_start(plan, CACHE_BYTES, 16_384) == 14.0


def test_one_table_has_no_window_and_no_states() -> None:
    plan = cache_baselines.one_table_plan(plan_of(*GEMMA_4_26B))
    assert plan is not None
    assert [group.spec.window for group in plan.groups] == [None]
    assert plan.slab_bytes == 16 * (25 * 8192 + 5 * 4096)
    assert cache_baselines.one_table_plan(plan_of(*QWEN3_NEXT)) is None


def test_a_static_split_runs_dry_in_one_pool_beside_an_empty_one() -> None:
    plan = plan_of(*GEMMA_3_27B)
    split = cache_baselines.split_tables(plan, 8 * GB, [500], 1024)
    window, full = (split.num_pages[group.pool] for group in plan.groups)
    used = sum(split.num_pages[name] * size for name, size in caches.pool_page_bytes(plan).items())

    assert 0.99 * 8 * GB < used <= 8 * GB
    assert split.can_take({"g0": window, "g1": full})
    assert not split.can_take({"g1": full + 1})


@pytest.mark.parametrize("name", [UNIFORM, SPLIT])
def test_baselines_serve_every_request(name: str) -> None:
    tested = system(name, plan_of(*QWEN3_NEXT), 4 * GB, 8192)
    assert tested is not None
    server = Server(tested, itertools.islice(workloads.MIXED.requests(8192, shares=False), 20))
    while server.num_finished < 20:
        server.complete(server.schedule())

    assert not server.requests
    assert tested.allocated == 0


def test_workloads_are_the_same_for_all_systems() -> None:
    for workload in workloads.WORKLOADS:
        first, second = (list(itertools.islice(workload.requests(8192, shares=True), 50)) for _ in range(2))
        assert [request.token_ids for request in first] == [request.token_ids for request in second]
        assert all(request.max_length <= 8192 for request in first)
        with_ids = [len(request.token_ids) for request in first]
        assert with_ids == [len(r.token_ids) for r in itertools.islice(workload.requests(8192, shares=False), 50)]
