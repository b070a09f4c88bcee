"""Caches of 8 bits: what is written is rounded and saturated, what it is made of stays as it was, all of it comes back.

The write ops run through their references and through what each device takes; expected values are computed apart from
them, by distance to the values that a float8 has.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from op_samples.attention import paged_sample
from op_samples.draw import Draw
from op_samples.latent_attention import paged_latent_sample
from op_samples.table import chosen

from precast.kernels import registry
from precast.kernels.attention.attention import attention
from precast.kernels.attention.paged import PAGED_ATTENTION
from precast.kernels.attention.write_kv import write_kv
from precast.kernels.latent_attention.paged import PAGED_LATENT_ATTENTION
from precast.kernels.latent_attention.write_latent import write_latent
from precast.kernels.storage import gathered, rounded

FLOAT8 = torch.float8_e4m3fn
LIMIT = 448.0
"""The largest finite value of float8_e4m3fn."""
INF, NAN = float("inf"), float("nan")
STEEP = [449.0, 464.0, 465.0, 480.0, 1e4, 6e4, INF]
"""What some conversions round to 448 and others make NaN."""

each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)


def all_values() -> torch.Tensor:
    """Each value that a float8 has but NaN, ascending, float32; a zero of each sign."""
    codes = torch.arange(256, dtype=torch.uint8).view(FLOAT8).float()
    return codes[codes.isfinite()].sort().values


def nearest(x: torch.Tensor) -> torch.Tensor:
    """What a float8 holds of each number: the nearest of its values, the one with an even code between two."""
    values = all_values().unique().double()  # one zero
    distance = (x.double()[..., None] - values).abs()
    is_odd = values.to(FLOAT8).view(torch.uint8) % 2 == 1
    # An odd code loses every tie, and nothing else: other distances of float32 numbers differ by more.
    return values[(distance * (1 + is_odd.double() * 1e-12)).argmin(-1)].float()


class Writers:
    """Both write ops for one device, as functions of rows `[T, 8]` that give the cache's rows."""

    def __init__(self, device: torch.device, which: str) -> None:
        self.device = device
        names = {"precast.write_kv": write_kv, "precast.write_latent": write_latent}
        self.ops: dict[str, Callable[..., None]] = {
            name: reference if which == "reference" else registry.resolve(name, 1, device)
            for name, reference in names.items()
        }

    def written(self, rows: torch.Tensor) -> list[torch.Tensor]:
        """The slots that hold the rows, in order, by each op; in the cache's type, on the CPU."""
        rows = rows.to(self.device)
        count = len(rows)
        slots = torch.arange(count, device=self.device).flip(0)
        caches = [torch.zeros(count, 1, *shape, device=self.device).to(FLOAT8) for shape in ((2, 4), (1, 8), (8,))]
        k, v = rows.view(1, count, 2, 4), rows.view(1, count, 1, 8)
        self.ops["precast.write_kv"](k=k, v=k, k_cache=caches[0], v_cache=caches[0].clone(), slot_mapping=slots)
        self.ops["precast.write_kv"](k=v, v=v, k_cache=caches[1].clone(), v_cache=caches[1], slot_mapping=slots)
        parts = {"latent": rows[None, :, :5], "k_rope": rows[None, :, 5:]}
        self.ops["precast.write_latent"](**parts, cache=caches[2], slot_mapping=slots)
        found = [cache.cpu().view(torch.uint8).view(count, 8).flip(0) for cache in caches]
        return [each.view(FLOAT8) for each in found]

    def scaled(self, rows: torch.Tensor, *scales: torch.Tensor) -> list[torch.Tensor]:
        """What keys and values are stored as, divided by these scales."""
        count = len(rows)
        new = rows.to(self.device).view(1, count, 2, 4)
        caches = [torch.zeros(count, 1, 2, 4, device=self.device).to(FLOAT8) for _ in "kv"]
        k_scale, v_scale = (scale.to(self.device) for scale in scales)
        self.ops["precast.write_kv"](
            k=new, v=new, k_cache=caches[0], v_cache=caches[1], slot_mapping=torch.arange(count, device=self.device),
            k_scale=k_scale, v_scale=v_scale,
        )  # fmt: skip
        return [cache.cpu().view(torch.uint8).view(count, 8).view(FLOAT8) for cache in caches]


@pytest.fixture(params=["reference", "fast"])
def writers(request: pytest.FixtureRequest, device: torch.device) -> Writers:
    return Writers(device, request.param)


# --- writing ---------------------------------------------------------------------------------------------------


@each_dtype
def test_every_value_of_a_float8_is_kept(writers: Writers, dtype: torch.dtype) -> None:
    values = all_values()
    rows = torch.cat((values, values[:2])).view(-1, 8).to(dtype)

    for found in writers.written(rows):
        assert torch.equal(found.view(torch.uint8), rows.float().to(FLOAT8).view(torch.uint8))


@each_dtype
def test_values_go_to_the_nearest(writers: Writers, dtype: torch.dtype) -> None:
    draw = Draw(torch.float32, torch.device("cpu"))
    exponents = draw.uniform(40, 8, low=-12.0, high=9.0)
    rows = (draw.normal(40, 8).sign() * exponents.exp2()).to(dtype)
    values = all_values()
    rows[:4] = ((values[1:] + values[:-1]) / 2)[64 : 64 + 32].view(4, 8).to(dtype)  # halfway between two

    for found in writers.written(rows):
        assert torch.equal(found.float(), nearest(rows))


@each_dtype
def test_what_is_too_large_saturates(writers: Writers, dtype: torch.dtype) -> None:
    rows = torch.tensor([[*STEEP, 447.9], [-x for x in (*STEEP, 447.9)]]).to(dtype)

    for found in writers.written(rows):
        assert found.float().tolist() == [[LIMIT] * 8, [-LIMIT] * 8]


@each_dtype
def test_a_scale_divides_before_anything_is_rounded(writers: Writers, dtype: torch.dtype) -> None:
    """In float32; what is too large then saturates."""
    draw = Draw(torch.float32, torch.device("cpu"))
    rows = draw.normal(60, 8, scale=30.0).to(dtype)
    rows[0] = torch.tensor([3000.0, -3000.0, 0.0, 134.4, 143.9, 144.0, 1e-4, -1e-3]).to(dtype)
    k_scale, v_scale = torch.tensor([0.3]), torch.tensor([7.1])

    for found, scale in zip(writers.scaled(rows, k_scale, v_scale), (k_scale, v_scale), strict=True):
        assert torch.equal(found.float(), nearest((rows.float() / scale).clamp(-LIMIT, LIMIT)))


def test_nan_stays_nan(writers: Writers) -> None:
    rows = torch.tensor([[NAN, 1.0, -NAN, 2.0, 0.0, NAN, -3.0, 4.0]])

    for found in writers.written(rows):
        assert torch.equal(found.float().isnan(), rows.isnan())
        assert found.float()[~rows.isnan()].tolist() == [1.0, 2.0, 0.0, -3.0, 4.0]


@each_dtype
def test_activations_stay_as_they_were(writers: Writers, dtype: torch.dtype) -> None:
    """Neither saturated nor rounded: the product that follows is one of these."""
    draw = Draw(dtype, writers.device)
    rows = draw.normal(6, 8, scale=300.0)
    before = rows.clone()

    writers.written(rows)

    assert torch.equal(rows, before)
    assert before.abs().max() > LIMIT


def test_attention_without_a_cache_is_that_of_the_activations(device: torch.device) -> None:
    """Keys and values that were written into a cache of 8 bits give what they gave before."""
    draw = Draw(torch.float32, device)
    q, k, v = (draw.normal(1, 9, 2, 16) for _ in "qkv")
    bounds = draw.of([0, 9], torch.int32)
    expected = attention(q, k, v, None, bounds, scale=0.25)
    cache = draw.normal(3, 3, 2, 16, dtype=FLOAT8)

    registry.resolve("precast.write_kv", 1, device)(
        k=k, v=v, k_cache=cache, v_cache=cache.clone(), slot_mapping=draw.permutation(9)
    )

    assert torch.equal(attention(q, k, v, None, bounds, scale=0.25), expected)


# --- reading ---------------------------------------------------------------------------------------------------


PAGES: dict[str, Any] = {"page_indices": [0], "page_indptr": [0, 1], "page_start": [0]}


@pytest.mark.parametrize("which", ["reference", "fast"])
def test_each_value_of_a_float8_is_read_exactly(device: torch.device, which: str) -> None:
    """A context of one key gives its value, whatever the score: all 254 finite ones, 127 in each of two heads."""
    values = all_values().view(2, 127)
    draw = Draw(torch.float32, device)
    spec = next(spec for spec in registry.specs() if spec.name == "precast.paged_attention")
    op = spec.reference if which == "reference" else chosen(spec, device)
    metadata = {name: draw.of(value, torch.int32) for name, value in PAGES.items()}
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        found = op(
            q=draw.normal(1, 1, 4, 16, dtype=dtype), k_cache=draw.normal(1, 1, 2, 16, dtype=FLOAT8),
            v_cache=draw.to(values, FLOAT8).view(1, 1, 2, 127), sinks=None, cu_seqlens=draw.of([0, 1], torch.int32),
            kv_lens=draw.of([1], torch.int32), **metadata, scale=0.25,
        )  # fmt: skip

        assert found.dtype == dtype
        assert torch.equal(found[0, 0].float().cpu(), values.repeat_interleave(2, 0))


MIXED = [(5, 5), (1, 33), (0, 4), (40, 101), (1, 1), (130, 517)]
DECODE = [(1, length) for length in (1, 16, 17, 64, 65, 1030)]


@each_dtype
@pytest.mark.parametrize("sequences", [MIXED, DECODE], ids=["mixed", "decode"])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "value", "page_size", "rule"),
    [
        (4, 1, 128, 128, 16, {}),
        (7, 1, 80, 72, 5, {"window": 65, "cut": True}),
        (6, 2, 24, 40, 1, {"soft_cap": 4.0, "padding": 5}),
        (2, 1, 256, 256, 32, {"chunk": 37}),
        (16, 2, 512, 512, 8, {}),
    ],
    ids=str,
)
def test_odd_sizes_over_pages_of_8_bits(
    device: torch.device,
    dtype: torch.dtype,
    sequences: list[tuple[int, int]],
    heads: int,
    kv_heads: int,
    size: int,
    value: int,
    page_size: int,
    rule: dict[str, Any],
    same: Callable[..., None],
) -> None:
    """What each device takes against the reference on the host."""
    sizes = {"heads": heads, "kv_heads": kv_heads, "size": size, "value": value, "page_size": page_size}
    at_home, sample = (
        paged_sample(Draw(dtype, place), sequences, **sizes, **rule, cache_dtype=FLOAT8)
        for place in (torch.device("cpu"), device)
    )

    found = chosen(PAGED_ATTENTION, device)(**sample)

    same(PAGED_ATTENTION, found.cpu(), PAGED_ATTENTION.reference(**at_home))


@each_dtype
@pytest.mark.parametrize("sequences", [MIXED, DECODE], ids=["mixed", "decode"])
@pytest.mark.parametrize("rule", [{}, {"window": 20, "cut": True}, {"page_size": 1, "padding": 3}], ids=str)
def test_odd_sizes_over_latents_of_8_bits(
    device: torch.device,
    dtype: torch.dtype,
    sequences: list[tuple[int, int]],
    rule: dict[str, Any],
    same: Callable[..., None],
) -> None:
    sizes = {"heads": 3, "nope": 40, "rope": 18, "latent": 50, "value": 37}
    at_home, sample = (
        paged_latent_sample(Draw(dtype, place), sequences, **sizes, **rule, cache_dtype=FLOAT8)
        for place in (torch.device("cpu"), device)
    )

    found = chosen(PAGED_LATENT_ATTENTION, device)(**sample)

    same(PAGED_LATENT_ATTENTION, found.cpu(), PAGED_LATENT_ATTENTION.reference(**at_home))


def test_gathered_pages_are_those_of_the_cache(device: torch.device) -> None:
    cache = Draw(torch.float32, device).normal(4, 3, 2, 5, dtype=FLOAT8)
    strided = cache.transpose(1, 2)[..., 1:4]
    pages = torch.tensor([[3, 0], [3, 1]], device=device)

    found = gathered(strided, pages)

    assert found.dtype == FLOAT8
    assert torch.equal(found.float(), strided.float()[pages])


# --- without a device ------------------------------------------------------------------------------------------


def test_other_types_are_rounded_as_torch_does() -> None:
    x = torch.tensor([1.0, 1 + 2**-9, 1e5, INF, NAN])

    assert rounded(x, torch.float32) is x
    torch.testing.assert_close(rounded(x, torch.float16), x.half(), rtol=0, atol=0, equal_nan=True)
    assert rounded(x, torch.float16)[2] == INF


def test_a_cached_value_is_not_rounded_twice() -> None:
    stored = all_values().to(FLOAT8)

    assert rounded(stored, FLOAT8) is stored
