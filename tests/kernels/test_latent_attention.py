"""latent attention: against attention over keys and values that are written out, and by each of its two ways."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from op_samples.draw import Draw
from op_samples.latent_attention import paged_latent_sample
from transformers.models.deepseek_v3.configuration_deepseek_v3 import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

from precast.kernels.attention.attend import Pages
from precast.kernels.attention.attention import attention
from precast.kernels.latent_attention import batched
from precast.kernels.latent_attention import latent_attention as reference
from precast.kernels.latent_attention.expand import LatentScoring, Sizes
from precast.kernels.latent_attention.paged import paged_latent_attention as paged_reference
from precast.kernels.latent_attention.write_latent import write_latent

CPU = torch.device("cpu")
HEADS, NOPE, ROPE, LATENT, VALUE = 3, 10, 6, 20, 14
SIZES = {"heads": HEADS, "nope": NOPE, "rope": ROPE, "latent": LATENT, "value": VALUE}
each_packed = pytest.mark.parametrize(
    "latent_attention", [reference.latent_attention, batched.latent_attention], ids=["reference", "batched"]
)
each_paged = pytest.mark.parametrize(
    "paged", [paged_reference, batched.paged_latent_attention], ids=["reference", "batched"]
)


def bounds(*lengths: int) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def packed(tokens: int) -> tuple[torch.Tensor, ...]:
    """Queries, latents, rope parts and the weight."""
    return (
        torch.randn(1, tokens, HEADS, NOPE + ROPE),
        torch.randn(1, tokens, LATENT),
        torch.randn(1, tokens, ROPE),
        torch.randn(HEADS * (NOPE + VALUE), LATENT) * LATENT**-0.5,
    )


def written_out(latent: torch.Tensor, k_rope: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The keys and values, head by head."""
    keys, values = [], []
    for head in weight.split(NOPE + VALUE):
        keys.append(torch.cat((latent @ head[:NOPE].T, k_rope), -1))
        values.append(latent @ head[NOPE:].T)
    return torch.stack(keys, 2), torch.stack(values, 2)


# --- packed ----------------------------------------------------------------------------------------------------


@each_packed
@pytest.mark.parametrize("window", [None, 3])
def test_attention_over_keys_and_values_that_are_written_out(
    latent_attention: Callable[..., torch.Tensor], window: int | None
) -> None:
    q, latent, k_rope, weight = packed(15)
    cu_seqlens = bounds(5, 0, 1, 8)  # and a token of padding
    k, v = written_out(latent, k_rope, weight)

    found = latent_attention(q, latent, k_rope, weight, cu_seqlens, scale=0.3, value_size=VALUE, window=window)

    close(found, attention(q, k, v, None, cu_seqlens, scale=0.3, window=window))
    assert not found[:, 14:].any()


@each_packed
def test_a_head_by_hand(latent_attention: Callable[..., torch.Tensor]) -> None:
    """Key (2, 7), value 3 and key (4, 7), value 6: scores 2 * 1 + 7 * 0, 4 * 1 + 7 * 0, halved."""
    q = torch.tensor([[[[0.0, 0.0]], [[1.0, 0.0]]]])
    latent, k_rope = torch.tensor([[[1.0], [2.0]]]), torch.tensor([[[7.0], [7.0]]])
    weight = torch.tensor([[2.0], [3.0]])

    found = latent_attention(q, latent, k_rope, weight, bounds(2), scale=0.5, value_size=1)

    first, second = torch.softmax(torch.tensor([1.0, 2.0]), 0)
    close(found.flatten(), torch.stack((torch.tensor(3.0), first * 3 + second * 6)))


def test_the_keys_and_values_are_deepseeks() -> None:
    config = DeepseekV3Config(
        hidden_size=8, num_attention_heads=HEADS, num_key_value_heads=HEADS, q_lora_rank=None, kv_lora_rank=LATENT,
        qk_nope_head_dim=NOPE, qk_rope_head_dim=ROPE, v_head_dim=VALUE,
    )  # fmt: skip
    module = DeepseekV3Attention(config, 0).requires_grad_(False)
    q, latent, k_rope, _ = packed(7)
    k, v = module.expand_kv(latent[:, None], k_rope[:, None])
    expected = attention(q, k.transpose(1, 2), v.transpose(1, 2), None, bounds(7), scale=0.2)

    found = reference.latent_attention(
        q, latent, k_rope, module.kv_b_proj.weight, bounds(7), scale=0.2, value_size=VALUE
    )

    close(found, expected)


@each_packed
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"window": 0}, "window: expected None"),
        ({"value_size": VALUE + 1}, r"weight: expected 3 \* \(10 \+ 15\) rows"),
        ({"k_rope": torch.zeros(1, 4, NOPE + ROPE + 1)}, "weight: expected"),
    ],
    ids=["window", "value size", "rope size"],
)
def test_refusals(latent_attention: Callable[..., torch.Tensor], changes: dict[str, Any], message: str) -> None:
    names = ("q", "latent", "k_rope", "weight")
    call = dict(zip(names, packed(4), strict=True)) | {"cu_seqlens": bounds(4), "scale": 1.0, "value_size": VALUE}

    with pytest.raises(ValueError, match=message):
        latent_attention(**call | changes)


# --- paged -----------------------------------------------------------------------------------------------------


@each_paged
def test_slots_without_a_key_and_other_pages_are_not_read(paged: Callable[..., torch.Tensor]) -> None:
    """The sample's are NaN, and behind its page lists stands a page that isn't there."""
    sample = paged_latent_sample(Draw(torch.float32, CPU), [(1, 9), (40, 53), (0, 3), (2, 2)], **SIZES, padding=2)

    found = paged(**sample)

    assert found.isfinite().all()
    assert found[:, :43].any(-1).all()
    assert not found[:, 43:].any()


@each_paged
def test_a_window_is_below_the_pages_start(paged: Callable[..., torch.Tensor]) -> None:
    """Cut page lists give what whole ones do."""
    sequences = [(40, 60), (1, 30), (1, 3)]
    whole = paged_latent_sample(Draw(torch.float32, CPU), sequences, **SIZES)
    window = {"window": 5}
    first = [max(length - queries - 4, 0) // 4 for queries, length in sequences]
    indptr, cut, ends = whole["page_indptr"].tolist(), [], [0]
    for b, skipped in enumerate(first):
        cut.append(whole["page_indices"][indptr[b] + skipped : indptr[b + 1]])
        ends.append(ends[-1] + len(cut[-1]))
    changes = {
        "page_indices": torch.cat(cut),
        "page_indptr": torch.tensor(ends, dtype=torch.int32),
        "page_start": torch.tensor(first, dtype=torch.int32) * 4,
    }

    close(paged(**whole | changes | window), paged(**whole | window))


@pytest.mark.parametrize("sequences", [[(1, 9)], [(5, 9), (1, 1)], [(60, 60)], [(40, 75), (1, 30), (0, 4), (33, 33)]])
def test_absorbed_and_expanded_are_one_computation(sequences: list[tuple[int, int]]) -> None:
    sample = paged_latent_sample(Draw(torch.float64, CPU), sequences, **SIZES, page_size=3)
    tensors = [sample[name] for name in ("q", "cache", "weight")]
    names = ("cu_seqlens", "kv_lens", "page_indices", "page_indptr", "page_start")
    pages = Pages(*(sample[name] for name in names))
    pages = pages._replace(page_indices=pages.page_indices[:-1])
    sizes = Sizes(HEADS, NOPE, ROPE, LATENT, VALUE)
    expected = paged_reference(**sample)

    for way in (batched._absorbed, batched._expanded):
        close(way(*tensors, pages, sizes, LatentScoring(sample["scale"])), expected)


def test_expanding_few_heads_at_a_time_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    sample = paged_latent_sample(Draw(torch.float32, CPU), [(90, 90), (70, 81)], **SIZES)
    expected = paged_reference(**sample)
    monkeypatch.setattr(batched, "MAX_EXPANDED", 2 * 172 * (NOPE + ROPE + VALUE))  # two of three heads

    close(batched.paged_latent_attention(**sample), expected)


@pytest.mark.parametrize(("queries", "is_absorbed"), [(0, True), (1, True), (170, True), (171, False), (4096, False)])
def test_which_way_deepseek_v3_takes(queries: int, is_absorbed: bool) -> None:
    """512 * 256 products a key are worth 768 a query and key from 170.7 queries on."""
    sizes = Sizes(heads=128, nope=128, rope=64, latent=512, value=128)

    assert batched._is_cheaper_absorbed(queries, sizes) is is_absorbed


def test_absorbing_is_always_cheaper_for_a_small_latent() -> None:
    assert batched._is_cheaper_absorbed(10**6, Sizes(heads=8, nope=128, rope=64, latent=128, value=128))


# --- with the cache --------------------------------------------------------------------------------------------


class Cache(SimpleNamespace):
    """Pages of two sequences, whose latents arrive in chunks."""

    def __init__(self, lengths: tuple[int, int], page_size: int) -> None:
        counts = [-(-length // page_size) for length in lengths]
        pages = torch.randperm(sum(counts))
        super().__init__(
            page_size=page_size,
            tensor=torch.full((sum(counts), page_size, LATENT + ROPE), float("nan")),
            lists=[pages[: counts[0]], pages[counts[0] :]],
        )

    def slots(self, sequence: int, first: int, end: int) -> torch.Tensor:
        positions = torch.arange(first, end)
        return self.lists[sequence][positions // self.page_size] * self.page_size + positions % self.page_size

    def metadata(self, spans: list[tuple[int, int]]) -> dict[str, torch.Tensor]:
        """A step that computes positions `first .. end` of each sequence."""
        return {
            "cu_seqlens": bounds(*(end - first for first, end in spans)),
            "kv_lens": torch.tensor([end for _, end in spans], dtype=torch.int32),
            "page_indices": torch.cat(self.lists).int(),
            "page_indptr": bounds(*map(len, self.lists)),
            "page_start": torch.zeros(2, dtype=torch.int32),
        }


@given(st.lists(st.integers(1, 40), min_size=1, max_size=6), st.integers(1, 7), st.integers(1, 5))
def test_chunks_give_what_the_whole_gives(chunks: list[int], page_size: int, other: int) -> None:
    """One sequence in chunks of any sizes; beside it another one, a token at a time."""
    lengths = (sum(chunks), len(chunks))
    total = sum(lengths)
    q, latent, k_rope, weight = packed(total)
    expected = reference.latent_attention(
        q, latent, k_rope, weight, bounds(*lengths), scale=0.25, value_size=VALUE, window=30 * other
    )
    cache, done, found = Cache(lengths, page_size), 0, torch.empty_like(expected)
    for step, size in enumerate(chunks):
        spans = [(done, done + size), (step, step + 1)]
        rows = torch.cat((torch.arange(done, done + size), torch.tensor([lengths[0] + step])))
        slots = torch.cat([cache.slots(b, *span) for b, span in enumerate(spans)])
        write_latent(latent[:, rows], k_rope[:, rows], cache.tensor, slots)
        found[:, rows] = batched.paged_latent_attention(
            q[:, rows], cache.tensor, weight, **cache.metadata(spans), scale=0.25, value_size=VALUE, window=30 * other
        )
        done += size

    close(found, expected)


def test_write_latent_by_hand() -> None:
    latent, k_rope = torch.tensor([[[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]]), torch.tensor([[[7.0], [8.0], [9.0]]])
    cache = torch.zeros(2, 2, 3)

    write_latent(latent, k_rope, cache, torch.tensor([3, -1, 0]))

    assert cache.tolist() == [[[5, 6, 9], [0, 0, 0]], [[0, 0, 0], [1, 2, 7]]]


def test_write_latent_writes_no_padding() -> None:
    cache = torch.randn(2, 2, 5)
    before = cache.clone()

    write_latent(torch.randn(1, 2, 4), torch.randn(1, 2, 1), cache, torch.tensor([-1, -1]))

    assert torch.equal(cache, before)
