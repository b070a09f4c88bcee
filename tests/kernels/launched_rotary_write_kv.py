"""Norm, rotation and write of the cache in one launch against the reference: in Triton's interpreter and on GPUs.

`test_triton.py` runs this file in a process of its own. The interpreter cuts what it converts to bfloat16 where devices
round, and rounds to float8 wrongly: there no bfloat16 is tried, and a float8 is given what it holds.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from op_samples.attention import rotary_write_kv as samples
from op_samples.draw import Draw, Sample
from strided import with_strided_caches

from precast.kernels.choices import records_of
from precast.kernels.launch import as_function
from precast.kernels.rotary_write_kv.rotary_write_kv import ROTARY_WRITE_KV, rotary_write_kv
from precast.kernels.storage import rounded

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if IS_INTERPRETED else "cuda")
DTYPES = [torch.float32, torch.float16] + ([] if IS_INTERPRETED else [torch.bfloat16])
FLOAT8 = torch.float8_e4m3fn
CACHES = ("k_cache", "v_cache")

(RECORD,) = (record for record in records_of("precast.rotary_write_kv", 1) if record.kind == "triton")
launched = as_function(RECORD)
Same = Callable[..., None]
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def checked(given: Sample, same: Same) -> None:
    """The sample's caches are written."""
    at_home = {name: x.cpu().clone() if isinstance(x, torch.Tensor) else x for name, x in given.items()}
    expected = rotary_write_kv(**at_home)
    found = launched(**given)

    same(ROTARY_WRITE_KV, found.cpu(), expected)
    for name in CACHES:
        if at_home[name].dtype == FLOAT8:
            assert torch.equal(given[name].cpu().view(torch.uint8), at_home[name].view(torch.uint8))
        else:
            same(ROTARY_WRITE_KV, given[name].cpu(), at_home[name])


def fair_samples(dtype: torch.dtype) -> Iterator[Sample]:
    for sample in samples(Draw(dtype, DEVICE)):
        stored = sample["k_cache"].dtype
        if IS_INTERPRETED and stored == torch.bfloat16:
            continue
        if IS_INTERPRETED and stored == FLOAT8:
            # By a power of two what a float8 holds is divided exactly.
            scales = {name: torch.tensor([0.25]) for name in ("k_scale", "v_scale") if name in sample}
            sample |= scales
            sample |= {name: rounded(sample[name], FLOAT8).to(dtype) * (0.25 if scales else 1.0) for name in "kv"}
        yield sample


@each_dtype
def test_samples(dtype: torch.dtype, same: Same) -> None:
    count = 0
    for sample in fair_samples(dtype):
        checked(sample, same)
        count += 1
    assert count > 10


@each_dtype
def test_pages_far_apart(dtype: torch.dtype, same: Same) -> None:
    for sample in fair_samples(dtype):
        spread, between = with_strided_caches(sample)
        checked(spread, same)

        assert all(bool((gap == 0xFF).all()) for gap in between)


def model_step(draw: Draw, tokens: int, heads: tuple[int, int], size: int, pairs: int, **more: Any) -> Sample:
    """A step of a model whose queries, keys and values are one product; every seventh token is padding."""
    num_heads, kv_heads = heads
    fused = draw.normal(1, tokens, (num_heads + 2 * kv_heads) * size)
    split = fused.split([count * size for count in (num_heads, kv_heads, kv_heads)], dim=2)
    parts = [part.unflatten(2, (-1, size)) for part in split]
    angle = draw.uniform(1, tokens, pairs, high=6.3, dtype=torch.float32)
    slots = draw.permutation(tokens + 5)[:tokens]
    slots[6::7] = -1
    caches = {name: draw.normal(-(-(tokens + 5) // 4), 4, kv_heads, size) for name in CACHES}
    return {
        **dict(zip("qkv", parts, strict=True)), "cos": angle.cos().to(draw.dtype), "sin": angle.sin().to(draw.dtype),
        "q_weight": None, "k_weight": None, **caches, "slot_mapping": slots, "interleaved": False, **more,
    }  # fmt: skip


@each_dtype
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "pairs"])
@pytest.mark.parametrize(
    "norm",
    [{}, {"eps": 1e-6, "cast_before_scale": True}, {"eps": 1e-6, "offset": 1.0}],
    ids=["no norm", "Qwen's", "Gemma's"],
)
@pytest.mark.parametrize(
    ("tokens", "heads", "size", "pairs"),
    [(1, (32, 8), 128, 64), (3, (7, 1), 96, 24), (17, (4, 4), 72, 36), (2, (8, 4), 256, 128), (9, (5, 5), 10, 2)],
)
def test_steps_of_models(
    tokens: int, heads: tuple[int, int], size: int, pairs: int, norm: dict[str, Any], interleaved: bool,
    dtype: torch.dtype, same: Same,
) -> None:  # fmt: skip
    draw = Draw(dtype, DEVICE)
    if norm:
        norm = {"q_weight": draw.uniform(size), "k_weight": draw.uniform(size), **norm}
    checked(model_step(draw, tokens, heads, size, pairs, interleaved=interleaved, **norm), same)


def test_slots_outside_of_the_cache_are_not_written() -> None:
    draw = Draw(torch.float32, DEVICE)
    memory = draw.normal(3, 4, 2, 16)
    before = memory.clone()
    # A cache of one page in the middle of other memory; slot 4 is the first behind it.
    step = model_step(draw, 3, (2, 2), 16, 8, k_cache=memory[1:2], v_cache=memory[1:2].clone())
    launched(**step | {"slot_mapping": draw.of([4, -2, 1], torch.int64)})

    assert torch.equal(memory[[0, 2]], before[[0, 2]])
    assert torch.equal(memory[1, [0, 2, 3]], before[1, [0, 2, 3]])
    assert not torch.equal(memory[1, 1], before[1, 1])


def test_what_8_bits_hold_is_saturated() -> None:
    large = torch.tensor([449.0, -464.0, 1e4, float("inf"), -1e4, float("-inf"), 448.0, 2.0**-9], device=DEVICE)
    step = model_step(Draw(torch.float32, DEVICE), 1, (1, 1), 8, 0)
    caches = {name: torch.zeros(1, 4, 1, 8, device=DEVICE).to(FLOAT8) for name in CACHES}
    x = large.view(1, 1, 1, 8)
    launched(**step | {"q": x, "k": x, "v": x, **caches, "slot_mapping": torch.tensor([2], device=DEVICE)})

    expected = [448, -448, 448, 448, -448, -448, 448, 2.0**-9]
    for cache in caches.values():
        assert cache[0, 2, 0].float().tolist() == expected
        assert not cache.view(torch.uint8)[0, [0, 1, 3]].any()
