"""Latent attention and the write of latents in Triton against their references.

`test_triton.py` runs this file twice, in processes of its own: in Triton's interpreter, which reads TRITON_INTERPRET
when a kernel is defined, and on a GPU, as it is compiled. The interpreter rounds to float8 wrongly, and so is asked to
write what a float8 holds and what saturates.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton.language as tl
from captured_steps import STEPS, TOKENS, latent_step
from op_samples.draw import Draw, Sample
from op_samples.latent_attention import paged_latent_attention as samples
from op_samples.latent_attention import paged_latent_sample
from op_samples.latent_attention import write_latent as write_samples
from strided import with_strided_caches

from precast.kernels.attention import triton_context, triton_split
from precast.kernels.choices import records_of
from precast.kernels.latent_attention import launches
from precast.kernels.latent_attention import triton as latent_attention
from precast.kernels.latent_attention.paged import PAGED_LATENT_ATTENTION
from precast.kernels.latent_attention.write_latent import WRITE_LATENT
from precast.kernels.launch import as_function
from precast.kernels.storage import rounded

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if IS_INTERPRETED else "cuda")
# The interpreter holds bfloat16 as integers, and multiplies them as such.
HALVES = [torch.float16] if IS_INTERPRETED else [torch.float16, torch.bfloat16]
FLOAT8 = torch.float8_e4m3fn
TINY: dict[str, Any] = {"heads": 3, "nope": 12, "rope": 8, "latent": 16, "value": 14}
DEEPSEEK: dict[str, Any] = {"nope": 128, "rope": 64, "latent": 512, "value": 128, "page_size": 16}
PAGED = {
    record.name: as_function(record)
    for record in records_of("precast.paged_latent_attention", 1)
    if record.kind == "triton"
}
"""Of steps of few tokens, of small steps, and of all others; here each takes any."""
(WRITE,) = (as_function(record) for record in records_of("precast.write_latent", 1) if record.kind == "triton")
each_paged = pytest.mark.parametrize("attend", PAGED.values(), ids=PAGED)
Attend = Callable[..., torch.Tensor]
Same = Callable[..., None]


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs with several tiles, sequences of several parts, and more sequences than are looked at together."""
    monkeypatch.setattr(launches, "PROGRAMS", 3)
    monkeypatch.setattr(launches, "PARTS", (3, 3, 3, 1))
    monkeypatch.setattr(launches, "LEAST_KEYS", (16, 16, 16, 16))
    monkeypatch.setattr(launches, "JOINED", 64)
    if IS_INTERPRETED:  # compiled kernels have read it already
        for kernels in (triton_context, triton_split, latent_attention):
            monkeypatch.setattr(kernels, "SEQUENCES", tl.constexpr(4))


def agrees(attend: Attend, sample: Sample, same: Same) -> None:
    at_home = {name: x.cpu() if isinstance(x, torch.Tensor) else x for name, x in sample.items()}

    same(PAGED_LATENT_ATTENTION, attend(**sample).cpu(), PAGED_LATENT_ATTENTION.reference(**at_home))


def takes(name: str, sample: Sample) -> bool:
    """Whether a record of small steps has room for the sample's tokens."""
    return name == "triton.paged_latent_attention" or sample["q"].shape[1] <= (16 if name.endswith("few") else 64)


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
@pytest.mark.parametrize("name", PAGED)
def test_samples(name: str, dtype: torch.dtype, same: Same) -> None:
    drawn = list(samples(Draw(dtype, DEVICE)))
    # What a sample is about is the same in all types.
    for sample in drawn[::2] if IS_INTERPRETED and dtype != torch.float32 else drawn:
        if takes(name, sample):
            agrees(PAGED[name], with_strided_caches(sample)[0] if dtype == torch.float32 else sample, same)


@each_paged
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("more", [{}, {"window": 5, "cut": True, "page_size": 3}, {"cache_dtype": FLOAT8}], ids=str)
def test_steps_of_one_shape(attend: Attend, step: str, more: dict[str, Any], same: Same) -> None:
    agrees(attend, latent_step(Draw(torch.float32, DEVICE), step, **(TINY | more)), same)


@pytest.mark.parametrize("window", [None, 7, 25])
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
def test_parts_of_prompts_after_what_is_cached(dtype: torch.dtype, window: int | None, same: Same) -> None:
    """Several tiles, of sequences that go on and of one that begins."""
    sequences = [(37, 71), (1, 40), (33, 33), (0, 9), (5, 60), (1, 1)]
    more = {} if window is None else {"window": window, "cut": True}
    sample = paged_latent_sample(Draw(dtype, DEVICE), sequences, **TINY, page_size=5, padding=3, **more)

    agrees(PAGED["triton.paged_latent_attention"], sample, same)


def test_a_prompt_in_parts_is_the_prompt_at_once(same: Same) -> None:
    draw, attend = Draw(torch.float32, DEVICE), PAGED["triton.paged_latent_attention"]
    whole = paged_latent_sample(draw, [(77, 77)], **TINY, page_size=4)
    expected = attend(**whole)

    for first, end in ((0, 20), (20, 21), (21, 77)):
        lengths = {"cu_seqlens": draw.of([0, end - first], torch.int32), "kv_lens": draw.of([end], torch.int32)}
        found = attend(**whole | lengths | {"q": whole["q"][:, first:end]})
        same(PAGED_LATENT_ATTENTION, found, expected[:, first:end])


@pytest.mark.parametrize(
    ("dtype", "cache_dtype"),
    [(torch.float32, None), (torch.float16, FLOAT8)] if IS_INTERPRETED
    else list(itertools.product([torch.float32, *HALVES], [None, FLOAT8])), ids=str,
)  # fmt: skip
@pytest.mark.parametrize("heads", [16] if IS_INTERPRETED else [1, 16, 20, 128])
@each_paged
def test_sizes_of_deepseek(
    attend: Attend, heads: int, dtype: torch.dtype, cache_dtype: torch.dtype | None, same: Same
) -> None:
    sequences = [(1, 40), (2, 35), (1, 1), (3, 3)]
    if not IS_INTERPRETED and attend is PAGED["triton.paged_latent_attention"]:
        sequences += [(1, 1000), (70, 300), (200, 200)]
    draw = Draw(dtype, DEVICE)

    agrees(attend, paged_latent_sample(draw, sequences, heads=heads, cache_dtype=cache_dtype, **DEEPSEEK), same)


@each_paged
def test_many_heads(attend: Attend, same: Same) -> None:
    """Several programs for the heads of one query."""
    heads = 70 if IS_INTERPRETED else 150  # 64 to a program
    sizes: dict[str, Any] = {"heads": heads, "nope": 2, "rope": 2, "latent": 16, "value": 1, "page_size": 3}

    agrees(attend, paged_latent_sample(Draw(torch.float16, DEVICE), [(1, 9), (2, 5), (1, 1)], **sizes), same)


@each_paged
def test_pages_of_one_token(attend: Attend, same: Same) -> None:
    agrees(attend, latent_step(Draw(torch.float32, DEVICE), "mixed", **(TINY | {"heads": 19, "page_size": 1})), same)


@each_paged
def test_a_query_that_is_a_view(attend: Attend, same: Same) -> None:
    sample = latent_step(Draw(torch.float32, DEVICE), "mixed", **TINY)
    spread = torch.stack((sample["q"], torch.full_like(sample["q"], float("nan"))), dim=-1)[..., 0]

    assert spread.stride(-1) == 2
    agrees(attend, sample | {"q": spread}, same)


@each_paged
def test_results_are_written_into_what_is_given(attend: Attend, same: Same) -> None:
    sample = latent_step(Draw(torch.float32, DEVICE), "mixed", **TINY)
    expected = PAGED_LATENT_ATTENTION.reference(**sample)
    out = torch.full_like(expected, float("nan"))

    assert attend(**sample, out=out) is out
    same(PAGED_LATENT_ATTENTION, out, expected)
    assert not out[:, TOKENS - 2 :].any()


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
def test_latents_are_written(dtype: torch.dtype) -> None:
    count = 0
    for sample in write_samples(Draw(dtype, DEVICE)):
        stored = sample["cache"].dtype
        if IS_INTERPRETED and stored == torch.bfloat16:
            continue  # the interpreter cuts where devices round
        if IS_INTERPRETED and stored == FLOAT8:
            parts = {name: sample[name] for name in ("latent", "k_rope")}
            sample |= {name: torch.where(x.abs() > 448, x, rounded(x, FLOAT8).to(dtype)) for name, x in parts.items()}
        count += 1
        for given in (sample, with_strided_caches(sample)[0]):
            expected = given | {"cache": given["cache"].clone()}
            WRITE_LATENT.reference(**expected)
            WRITE(**given)

            assert torch.equal(given["cache"].float(), expected["cache"].float())
    assert count > 5
