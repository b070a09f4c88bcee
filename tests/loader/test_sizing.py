"""How large the cache's arena may be: arithmetic, and what is refused."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch
from tiny import tiny_graph

from precast.ir.errors import RequestError, TargetError
from precast.ir.graph import symbols
from precast.ir.graph.schema import Expr, Graph, Symbol
from precast.ir.memory import caches
from precast.kernels import step_memory
from precast.kernels.registry import target_of
from precast.kernels.use import Target
from precast.loader.run.draws import DTYPES
from precast.loader.run.places import places_bytes
from precast.loader.sizing import (
    CUDA_FRACTION,
    CUDA_RESERVE,
    GRAPH_NODE_BYTES,
    ArenaSize,
    EngineLimits,
    Values,
    addresses_of,
    capacities,
    check_limits,
    size_arena,
    step_bytes,
    values_of,
)
from precast.loader.torch_device import CpuDevice, CudaDevice

GRAPH = msgspec.structs.replace(tiny_graph(), caches=caches.with_slabs(tiny_graph().caches))
CPU, CUDA = CpuDevice(), CudaDevice(0)
SLAB = 1024  # one page of pool small, two of pool large
SLABS_OF_64 = 64 // 4 + 64 // 8 // 2  # for a sequence of 64 tokens


def sized(*, device: CpuDevice | CudaDevice = CPU, free: int = 2**34, **options: Any) -> ArenaSize:
    defaults = {"max_num_seqs": 256, "max_num_tokens": 8192, "max_seq_len": 64}
    return size_arena(GRAPH, EngineLimits(**{**defaults, **options}), device, free=free)


def peak(device: CpuDevice) -> Expr:
    """Of a step's activations."""
    return step_memory.step_peak(GRAPH, target_of(torch.device(device.name)))


@pytest.mark.parametrize(
    ("options", "slabs"),
    [
        ({}, 16 * SLABS_OF_64),
        ({"max_num_seqs": 3}, 3 * SLABS_OF_64),
        ({"max_seq_len": 2048}, 16 * 32 * SLABS_OF_64),
        ({"max_seq_len": 4096}, 16 * 32 * SLABS_OF_64),
        # one of the longest: all of the full layer, and of the window's layers what one step and the window hold
        ({"max_seq_len": 200_000}, 200_000 // 8 // 2 + (6 - 1 + 8192) // 4 + 1),
        ({"free": 2 * 40 * SLAB}, 40),  # half of the memory
        ({"cache_bytes": 5 * SLAB + 1}, 5),
        ({"cache_bytes": 2**25, "max_num_seqs": 2}, 2**25 // SLAB),  # for prefixes, if not for sequences
    ],
)
def test_slabs_of_an_arena_on_a_cpu(options: Any, slabs: int) -> None:
    size = sized(**options)
    assert (size.num_slabs, size.num_bytes) == (slabs, slabs * SLAB)
    counters = size.counters()
    assert (counters["slabs"], counters["slab_bytes"], counters["bytes_for_cache"]) == (slabs, SLAB, size.num_bytes)


@pytest.mark.parametrize("spare", [0, 10**6, 10**9])
def test_slabs_of_an_arena_on_a_gpu_are_arithmetic(spare: int) -> None:
    options = {"max_num_seqs": 64, "max_num_tokens": 8192, "max_seq_len": 10**6}
    addresses = addresses_of(GRAPH, EngineLimits(**options), CUDA)
    target = target_of(torch.device(CUDA.name))
    others = step_bytes(GRAPH, EngineLimits(**options), step_memory.step_peak(GRAPH, target, addresses))

    def needed(slabs: int) -> int:
        return addresses.num_bytes + others(slabs)

    free = CUDA_RESERVE + needed(0) + spare + 10**7
    size = sized(device=CUDA, free=free, **options)
    found = size.num_slabs

    def inputs(slabs: int) -> int:
        return places_bytes(capacities(GRAPH, EngineLimits(**options), slabs))

    def left_for(slabs: int) -> float:
        return (free - CUDA_RESERVE - needed(slabs) - inputs(slabs)) * CUDA_FRACTION

    assert found * SLAB <= left_for(found)
    assert (found + 1) * SLAB > left_for(found + 1)
    assert size.counters()["bytes_for_activations"] == needed(found)
    assert size.counters()["bytes_for_inputs"] == inputs(found) > inputs(0)
    assert size.counters()["bytes_free"] == free


def test_a_gpu_keeps_what_its_sequences_cannot_fill() -> None:
    assert sized(device=CUDA, free=2**34, max_num_seqs=5).num_slabs == 5 * SLABS_OF_64


@pytest.mark.parametrize(
    "options",
    [
        {"cache_bytes": 2 * SLAB - 1},
        {"cache_bytes": 1},
        {"free": 3 * SLAB},
        {"free": 100},
        {"device": CUDA, "free": CUDA_RESERVE + 2**20},
        {"device": CUDA, "max_num_tokens": 10**9},
        {"device": CUDA, "free": 100},
        {"device": CUDA, "cache_bytes": 1},
    ],
)
def test_a_cache_without_room_for_the_shortest_sequence(options: Any) -> None:
    numbers = r"the cache has \d slabs of 1024 bytes, and the shortest sequence needs 2.* 512 bytes in pool large"
    with pytest.raises(
        RequestError, match=numbers + r".* activations take up to \d+, its inputs \d+, and \d+ are set aside"
    ) as error:
        sized(**options)
    assert error.value.code == "cache-too-small"
    assert "give cache_bytes of at least 2048" in str(error.value)


def test_shared_pages_stand_in_the_list_of_each_that_shares_them() -> None:
    needed = step_bytes(GRAPH, EngineLimits(30, 256, 640), peak(CPU))

    # 30 sequences of 600 tokens that begin with the same 592: 74 pages that all have, and one of each one's own
    lists = {group.name: 30 * 75 if group.name == "far" else 30 * 3 for group in GRAPH.caches.groups}
    longest = step_memory.step_sizes(GRAPH, max_num_tokens=30, max_num_seqs=30, max_seq_len=600, num_pages=lists)
    assert needed(74 + 30) >= symbols.evaluate(step_memory.step_peak(GRAPH, Target("cpu")), longest)
    assert needed(1) < needed(20) < needed(40) == needed(4000)  # 80 pages of a slab's two are 640 tokens


def test_a_step_of_as_many_sequences_as_tokens_may_be_one_prompt() -> None:
    limits = [EngineLimits(count, 256, 10**6) for count in (1, 256)]
    prompt, several = (step_bytes(GRAPH, each, peak(CPU))(10**6) for each in limits)

    assert several >= prompt


def test_no_sequence_is_longer_than_its_pool() -> None:
    limits = [EngineLimits(30, 256, length) for length in (40 * 2 * 8, 10**6)]
    pool, model = (step_bytes(GRAPH, each, peak(CPU))(40) for each in limits)

    assert model == pool


@pytest.mark.parametrize("options", [{}, {"device": CUDA}, {"device": CUDA, "cache_bytes": 2**34 - 2**20}])
def test_more_cache_than_memory(options: Any) -> None:
    with pytest.raises(
        TargetError, match=r"cache_bytes is \d+, and \d+ bytes are free on .* after the weights"
    ) as error:
        sized(**{"cache_bytes": 2**34 + 1, **options})
    assert error.value.code == "device-memory"


def test_what_no_memory_makes_good_is_known_without_any() -> None:
    check_limits(GRAPH, EngineLimits(1, 1, 64, 2 * SLAB))
    with pytest.raises(RequestError, match="the cache has 1 slabs of 1024 bytes") as error:
        check_limits(GRAPH, EngineLimits(1, 1, 64, 2 * SLAB - 1))
    assert error.value.code == "cache-too-small"


def wide(graph: Graph, vocabulary: int = 200_000) -> Graph:
    """The graph with more tokens to choose from."""
    *others, last = graph.main
    logits = last.outputs[0]
    kind = msgspec.structs.replace(logits.type, shape=(*logits.type.shape[:2], vocabulary))
    made = msgspec.structs.replace(last, outputs=(msgspec.structs.replace(logits, type=kind),))
    return msgspec.structs.replace(graph, main=(*others, made))


def test_captured_steps_have_activations_and_graphs_of_their_own() -> None:
    """They draw in their own way: without the copy of logits that a greedy step makes op by op."""
    limits, graph = EngineLimits(64, 8192, 10**6), wide(GRAPH)
    none, some = (size_arena(graph, limits, CUDA, free=2**31, captured_sizes=sizes) for sizes in ((), (1, 64, 8)))

    target, addresses = target_of(torch.device(CUDA.name)), addresses_of(graph, limits, CUDA)
    peak, captured = (step_memory.step_peak(graph, target, addresses, captured=each) for each in (False, True))
    activations, eager = (
        step_bytes(graph, limits._replace(max_num_tokens=64), each)(some.num_slabs) for each in (captured, peak)
    )
    assert activations < eager
    nodes = 4 + 3 * 14  # of main, and of the block that it calls once a layer
    assert none.graphs == 0
    assert some.graphs == activations + 3 * nodes * GRAPH_NODE_BYTES
    assert some.num_slabs < none.num_slabs
    assert some.counters()["bytes_for_graphs"] == some.graphs


def test_what_values_take_may_be_worked_out_before_the_cache_is_known() -> None:
    limits = EngineLimits(64, 8192, 10**6)
    values = values_of(GRAPH, limits._replace(cache_bytes=5 * SLAB), CUDA)
    before, now = (
        size_arena(GRAPH, limits, CUDA, free=2**31, captured_sizes=(1, 8), planned=each) for each in (values, None)
    )
    assert before == now


def test_where_all_has_its_memory_nothing_else_is_set_apart_for_steps() -> None:
    limits = EngineLimits(8, 64, 64)
    addresses = addresses_of(GRAPH, limits, CUDA)

    planned = size_arena(GRAPH, limits, CUDA, free=2**31, captured_sizes=(8, 64), planned=Values(addresses))
    counted = size_arena(GRAPH, limits, CUDA, free=2**31, captured_sizes=(8, 64))

    assert planned.activations == addresses.num_bytes < counted.activations
    assert 0 < planned.graphs < counted.graphs
    assert (planned.inputs, planned.reserve) == (counted.inputs, counted.reserve)


def test_of_ranks_with_sequences_of_their_own_each_draws_the_rows_of_all() -> None:
    alone, shared = (capacities(GRAPH, EngineLimits(30, 256, 640, dp=dp), 100) for dp in (1, 4))

    assert {name: length // alone[name][1] for name, (_, length) in shared.items()} == {
        name: 4 if name in DTYPES else 1 for name in alone
    }


def test_a_step_of_all_ranks_has_no_more_tokens_than_the_graph_takes() -> None:
    graph = msgspec.structs.replace(GRAPH, symbols=tuple(
        Symbol("T", 1, 512) if symbol.name == "T" else symbol for symbol in GRAPH.symbols
    ))  # fmt: skip
    check_limits(graph, EngineLimits(8, 256, 64, dp=2))

    with pytest.raises(RequestError, match=r"max_num_tokens is 257 of each of 2 ranks, and a step .* at most 512"):
        check_limits(graph, EngineLimits(8, 257, 64, dp=2))
