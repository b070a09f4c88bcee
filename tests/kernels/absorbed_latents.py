"""paged_latent_attention in Triton against its reference. `test_triton.py` runs this file twice, in processes of its
own: in Triton's interpreter, which reads TRITON_INTERPRET when a kernel is defined, and on a GPU, as it is compiled.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from captured_steps import STEPS, TOKENS, latent_step
from op_samples.draw import Draw, Sample
from op_samples.latent_attention import paged_latent_attention as samples
from op_samples.latent_attention import paged_latent_sample
from strided import with_strided_caches

from precast.kernels.latent_attention.paged import PAGED_LATENT_ATTENTION
from precast.kernels.latent_attention.triton import blocks, paged_latent_attention

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if IS_INTERPRETED else "cuda")
# The interpreter holds bfloat16 as integers, and multiplies them as such.
HALVES = [torch.float16] if IS_INTERPRETED else [torch.float16, torch.bfloat16]
FLOAT8 = torch.float8_e4m3fn
TINY: dict[str, Any] = {"heads": 3, "nope": 12, "rope": 8, "latent": 16, "value": 14}
DEEPSEEK: dict[str, Any] = {"nope": 128, "rope": 64, "latent": 512, "value": 128, "page_size": 16}


def agrees(sample: Sample, same: Callable[..., None]) -> None:
    at_home = {name: x.cpu() if isinstance(x, torch.Tensor) else x for name, x in sample.items()}

    same(PAGED_LATENT_ATTENTION, paged_latent_attention(**sample).cpu(), PAGED_LATENT_ATTENTION.reference(**at_home))


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
def test_samples(dtype: torch.dtype, same: Callable[..., None]) -> None:
    for sample in samples(Draw(dtype, DEVICE)):
        agrees(with_strided_caches(sample)[0] if dtype == torch.float32 else sample, same)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize(
    "more",
    [{}, {"window": 5, "cut": True, "page_size": 3}, {"cache_dtype": FLOAT8}, {"heads": 19, "page_size": 1}],
    ids=str,
)
def test_steps_of_one_shape(step: str, more: dict[str, Any], same: Callable[..., None]) -> None:
    agrees(latent_step(Draw(torch.float32, DEVICE), step, **(TINY | more)), same)


@pytest.mark.parametrize("cache_dtype", [None, FLOAT8], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
@pytest.mark.parametrize("heads", [16] if IS_INTERPRETED else [1, 16, 20, 128])
def test_sizes_of_deepseek(
    heads: int, dtype: torch.dtype, cache_dtype: torch.dtype | None, same: Callable[..., None]
) -> None:
    sequences = [(1, 40), (3, 35), (1, 1)]
    if not IS_INTERPRETED:
        sequences += [(1, 1000), (70, 300)]

    agrees(paged_latent_sample(Draw(dtype, DEVICE), sequences, heads=heads, cache_dtype=cache_dtype, **DEEPSEEK), same)


def test_many_rows_a_program(same: Callable[..., None]) -> None:
    sizes = {"heads": 600, "nope": 2, "rope": 2, "latent": 16, "value": 1}

    assert blocks(TOKENS, 600, torch.float16, torch.float16, (9, 0)).m == 64
    agrees(latent_step(Draw(torch.float16, DEVICE), "decode", **sizes), same)


@pytest.mark.parametrize("heads", [1, 3, 16, 20, 71, 128])
def test_blocks_hold_whole_queries(heads: int) -> None:
    for tokens in (1, 8, 64, 1024):
        for dtype, cached in ((torch.float32, FLOAT8), (torch.float16, torch.float16), (torch.bfloat16, FLOAT8)):
            for capability in ((8, 9), (9, 0)):
                found = blocks(tokens, heads, dtype, cached, capability)

                assert found.q >= 1
                assert found.q * found.heads <= found.m
                assert found.heads == heads or found.q == 1


def test_a_query_that_is_a_view(same: Callable[..., None]) -> None:
    sample = latent_step(Draw(torch.float32, DEVICE), "mixed", **TINY)
    spread = torch.stack((sample["q"], torch.full_like(sample["q"], float("nan"))), dim=-1)[..., 0]

    assert spread.stride(-1) == 2
    agrees(sample | {"q": spread}, same)


def test_results_are_written_into_what_is_given(same: Callable[..., None]) -> None:
    sample = latent_step(Draw(torch.float32, DEVICE), "mixed", **TINY)
    expected = PAGED_LATENT_ATTENTION.reference(**sample)
    out = torch.full_like(expected, float("nan"))

    assert paged_latent_attention(**sample, out=out) is out
    same(PAGED_LATENT_ATTENTION, out, expected)
    assert not out[:, TOKENS - 2 :].any()
