"""The arena tensor and its views: every layer's part of every page has bytes of its own."""

from __future__ import annotations

import math

import pytest
import torch
from graph_text import parse_graph
from tiny import HEAD, KV_HEADS, tiny_graph

from precast.ir.graph.schema import CachePlan
from precast.ir.memory import caches
from precast.loader.cache.memory import CacheMemory
from precast.loader.torch_device import CpuDevice

CPU = CpuDevice()
MIXED = parse_graph(
    """
    slabs(bytes=6144)
    pool kv(pages=P, pages_per_slab=3)
    pool states(pages=S, pages_per_slab=8)
    pool latents(pages=L, pages_per_slab=1)
    group full(pool=kv, spec=paged(num_kv_heads=3, head_size=5, value_size=7, dtype=float16, page_size=8, window=none),
      page_indices=%a, page_indptr=%b, page_start=%c, slot_mapping=%d) {
      slot l0(%l0.k: float16[P, 8, 3, 5], %l0.v: float16[P, 8, 3, 7])
      slot l1(%l1.k: float16[P, 8, 3, 5], %l1.v: float16[P, 8, 3, 7])
    }
    group latent(pool=latents, spec=latent(latent_size=30, rope_size=2, dtype=bfloat16, page_size=64, window=none),
      page_indices=%e, page_indptr=%f, page_start=%g, slot_mapping=%h) {
      slot l2(%l2.latent: bfloat16[L, 64, 32])
    }
    group state(pool=states, spec=state(shape=[3, 11], dtype=float32), slot_ids=%s) {
      slot l3(%l3.state: float32[S, 3, 11])
      slot l4(%l4.state: float32[S, 3, 11])
    }
    main { return }
    """
).caches


def test_tensors_have_the_types_of_the_plan() -> None:
    memory = CacheMemory(tiny_graph().caches, 3, CPU)

    near, far = (torch.float32, (3, 4, KV_HEADS, HEAD)), (torch.float32, (6, 8, KV_HEADS, HEAD))
    assert memory.num_pages == {"small": 3, "large": 6}
    assert {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in memory.tensors.items()} == {
        f"layers.{i}.cache.{part}": far if i == 1 else near for i in (0, 2, 1) for part in "kv"
    }


def test_pages_stand_where_the_arithmetic_says() -> None:
    memory = CacheMemory(MIXED, 4, CPU)

    assert (memory.num_slabs, len(memory.arena)) == (4, 4 * 6144)
    assert memory.num_pages == {"kv": 12, "states": 32, "latents": 4}
    base = memory.arena.data_ptr()
    for group in caches.groups(MIXED):
        stride = caches.page_stride(MIXED, group.pool)
        for name, offset in caches.page_layout(group).items():
            tensor = memory.tensors[name]
            assert tensor.data_ptr() == base + offset
            assert tensor.stride(0) * tensor.itemsize == stride
            assert tensor[0].is_contiguous()
            assert tensor.shape[0] * stride == len(memory.arena)


def test_no_byte_belongs_to_two_tensors_of_a_slab() -> None:
    # slab 0 is of one pool, slab 1 of another, slab 2 of the third
    memory = CacheMemory(MIXED, 3, CPU)
    memory.arena.zero_()
    expected = 0
    for slab, group in enumerate(caches.groups(MIXED)):
        per_slab = memory.num_pages[group.pool] // 3
        for name in caches.page_layout(group):
            pages = memory.tensors[name][slab * per_slab : (slab + 1) * per_slab]
            bits = pages.view(torch.uint8)
            assert not bits.any(), f"{name} has bytes of another tensor"
            bits.fill_(1)
            expected += bits.numel()
    assert int(memory.arena.sum()) == expected


def test_a_page_is_copied_with_all_its_layers() -> None:
    memory = CacheMemory(MIXED, 2, CPU)
    memory.arena.zero_()
    for i, name in enumerate(("l3.state", "l4.state")):
        memory.tensors[name][5] = torch.arange(33.0).view(3, 11) + 100 * i

    memory.copy_page("state", 5, 9)
    memory.copy_page("state", 5, 2)

    for i, name in enumerate(("l3.state", "l4.state")):
        expected = torch.arange(33.0).view(3, 11) + 100 * i
        kept = [page for page in range(16) if bool(memory.tensors[name][page].any())]
        assert kept == [2, 5, 9]
        assert all(torch.equal(memory.tensors[name][page], expected) for page in kept)


def test_a_plan_of_one_pool_for_two_groups() -> None:
    # a bundle of before slabs: both groups' tensors have the pages of the pool, as its one symbol says
    graph = tiny_graph({"near": (6, 4, "main"), "far": (None, 4, "main")})
    memory = CacheMemory(graph.caches, 5, CPU)

    assert {tensor.shape[0] for tensor in memory.tensors.values()} == {5}
    assert memory.plan.slab_bytes == 2 * 2 * 256
    memory.arena.fill_(0xFF)
    memory.tensors["layers.1.cache.k"][3] = 1.0
    assert bool(memory.tensors["layers.0.cache.k"][:3].isnan().all())


def test_bits_of_freed_memory_may_be_anything() -> None:
    memory = CacheMemory(MIXED, 1, CPU)
    memory.arena.fill_(0xFF)

    assert all(bool(tensor.isnan().all()) for tensor in memory.tensors.values())


@pytest.mark.parametrize("plan", [CachePlan(), MIXED])
def test_memory_of_no_slabs(plan: CachePlan) -> None:
    memory = CacheMemory(plan, 0, CPU)

    assert math.prod(memory.arena.shape) == 0
    assert all(tensor.shape[0] == 0 for tensor in memory.tensors.values())
