"""write_kv: what is written, what is not, and that nothing waits for the device."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from op_samples.draw import Draw
from op_samples.table import samples_of
from torch._subclasses import FakeTensorMode

from precast.kernels import registry
from precast.kernels.attention.write_kv import WRITE_KV, write_kv


def loop(k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slots: list[int]) -> None:
    page_size = k_cache.shape[1]
    for t, slot in enumerate(slots):
        if slot >= 0:
            k_cache[slot // page_size, slot % page_size] = k[0, t].to(k_cache.dtype)
            v_cache[slot // page_size, slot % page_size] = v[0, t].to(v_cache.dtype)


@pytest.fixture
def write(device: torch.device) -> Callable[..., None]:
    """The implementation for each device."""
    return registry.resolve("precast.write_kv", 1, device)


@given(
    pages=st.integers(1, 4),
    page_size=st.integers(1, 5),
    data=st.data(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float8_e4m3fn]),
)
def test_any_mapping_is_the_loop(pages: int, page_size: int, data: st.DataObject, dtype: torch.dtype) -> None:
    slot = st.one_of(st.just(-1), st.integers(0, pages * page_size - 1))
    slots = data.draw(st.lists(slot, max_size=12, unique_by=lambda s: s if s >= 0 else object()))
    draw = Draw(torch.float32, torch.device("cpu"))
    k, v = draw.normal(1, len(slots), 2, 6), draw.normal(1, len(slots), 2, 3)
    caches = draw.normal(pages, page_size, 2, 6, dtype=dtype), draw.normal(pages, page_size, 2, 3, dtype=dtype)
    expected = tuple(cache.clone() for cache in caches)
    loop(k, v, *expected, slots)
    write_kv(k, v, *caches, torch.tensor(slots, dtype=torch.int64))

    for found, wanted in zip(caches, expected, strict=True):
        assert torch.equal(found.float(), wanted.float())


@pytest.mark.parametrize("slots", [[-1, 5, -1], [-1, 0], [0, -1], [-1, -1]])
def test_padding_leaves_slot_0_alone(
    slots: list[int], write: Callable[..., None], draw: Draw, device: torch.device
) -> None:
    k_cache, v_cache = draw.normal(2, 4, 1, 8), draw.normal(2, 4, 1, 8)
    # A value that a sum or a product with a mask would spread.
    k_cache[0, 0] = float("nan")
    k, v = draw.normal(1, len(slots), 1, 8), draw.normal(1, len(slots), 1, 8)
    k[:, [t for t, slot in enumerate(slots) if slot < 0]] = float("inf")
    expected = k_cache.clone(), v_cache.clone()
    loop(k, v, *expected, slots)
    write(k=k, v=v, k_cache=k_cache, v_cache=v_cache, slot_mapping=draw.of(slots, torch.int64))

    torch.testing.assert_close((k_cache, v_cache), expected, rtol=0, atol=0, equal_nan=True)


def test_strided_caches_and_values(write: Callable[..., None], draw: Draw) -> None:
    # Both caches in one tensor, heads before slots; keys and values as slices of the fused product.
    fused, both = draw.normal(1, 3, 4, 8), draw.normal(2, 5, 2, 4, 8)
    k_cache, v_cache = both[0].transpose(1, 2), both[1].transpose(1, 2)
    slots = [17, -1, 2]
    expected = k_cache.clone(), v_cache.clone()
    loop(fused[:, :, :2], fused[:, :, 2:], *expected, slots)
    write(
        k=fused[:, :, :2], v=fused[:, :, 2:], k_cache=k_cache, v_cache=v_cache, slot_mapping=draw.of(slots, torch.int64)
    )

    assert torch.equal(both[0].transpose(1, 2), expected[0])
    assert torch.equal(both[1].transpose(1, 2), expected[1])


def test_new_values_keep_their_type_when_the_cache_has_another(write: Callable[..., None], draw: Draw) -> None:
    k, v = draw.normal(1, 2, 1, 8), draw.normal(1, 2, 1, 8)
    before = k.clone(), v.clone()
    k_cache, v_cache = (draw.normal(1, 2, 1, 8, dtype=torch.bfloat16) for _ in "kv")
    write(k=k, v=v, k_cache=k_cache, v_cache=v_cache, slot_mapping=draw.of([1, 0], torch.int64))

    assert torch.equal(k, before[0])
    assert torch.equal(v, before[1])
    assert torch.equal(k_cache[0], before[0][0].flip(0).bfloat16())


def test_reference_reads_nothing_back() -> None:
    # A fake tensor has no values: looking at one, or making a shape of them, raises.
    with FakeTensorMode(allow_non_fake_inputs=False):
        k, cache = torch.empty(1, 5, 2, 8), torch.empty(3, 4, 2, 8)
        write_kv(k, k, cache, cache.clone(), torch.empty(5, dtype=torch.int64))


@pytest.mark.gpu
def test_reference_does_not_wait_for_the_device(no_waiting: Callable[[], AbstractContextManager[None]]) -> None:
    for sample in samples_of(WRITE_KV, Draw(torch.bfloat16, torch.device("cuda"))):
        with no_waiting():
            write_kv(**sample)
