"""attention over packed sequences, and its paged form: by other routes to the same result, and at the edges."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from op_samples.attention import paged_sample
from op_samples.draw import Draw
from torch.nn import functional
from transformers.masking_utils import chunked_causal_mask_function
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward as gemma2_attention
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward as gpt_oss_attention
from transformers.models.inkling.modeling_inkling import InklingRelativeLogits
from transformers.models.inkling.modeling_inkling import eager_attention_forward as inkling_attention

from precast.kernels import registry
from precast.kernels.attention import attention as reference
from precast.kernels.attention import batched
from precast.kernels.attention.attend import visible_keys
from precast.kernels.attention.paged import paged_attention as paged_reference
from precast.kernels.attention.write_kv import write_kv

CPU = torch.device("cpu")
each_packed = pytest.mark.parametrize(
    "attention", [reference.attention, batched.attention], ids=["reference", "batched"]
)
each_paged = pytest.mark.parametrize(
    "paged_attention", [paged_reference, batched.paged_attention], ids=["reference", "batched"]
)


def bounds(*lengths: int) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def qkv(tokens: int, heads: int, kv_heads: int, size: int, value: int | None = None) -> tuple[torch.Tensor, ...]:
    return (
        torch.randn(1, tokens, heads, size),
        torch.randn(1, tokens, kv_heads, size),
        torch.randn(1, tokens, kv_heads, value or size),
    )


# --- packed ----------------------------------------------------------------------------------------------------


@each_packed
@pytest.mark.parametrize("tokens", [1, 17, 300])
def test_one_sequence_is_causal_attention(attention: Callable[..., torch.Tensor], tokens: int) -> None:
    q, k, v = qkv(tokens, 6, 2, 24, 8)
    heads_first = (q.transpose(1, 2), *(x.transpose(1, 2).repeat_interleave(3, 1) for x in (k, v)))
    expected = functional.scaled_dot_product_attention(*heads_first, is_causal=True, scale=0.3).transpose(1, 2)

    close(attention(q, k, v, None, bounds(tokens), scale=0.3), expected)


@each_packed
def test_packed_sequences_do_not_see_each_other(attention: Callable[..., torch.Tensor]) -> None:
    q, k, v = qkv(14, 4, 2, 16)
    found = attention(q, k, v, None, bounds(5, 0, 1, 8), scale=0.25, window=3)

    for first, end in ((0, 5), (5, 6), (6, 14)):
        alone = (x[:, first:end] for x in (q, k, v))
        close(found[:, first:end], reference.attention(*alone, None, bounds(end - first), scale=0.25, window=3))


@each_packed
@pytest.mark.parametrize("window", [None, 4])
def test_sinks_are_gpt_oss(attention: Callable[..., torch.Tensor], window: int | None) -> None:
    q, k, v = qkv(9, 6, 2, 16)
    sinks = torch.randn(6) * 2
    position = torch.arange(9)
    mask = torch.zeros(9, 9).masked_fill(~visible_keys(position, position, window), float("-inf"))
    module = SimpleNamespace(num_key_value_groups=3, sinks=sinks, training=False)
    heads_first = (x.transpose(1, 2) for x in (q, k, v))
    expected, _ = gpt_oss_attention(module, *heads_first, mask, scaling=0.25)

    close(attention(q, k, v, sinks, bounds(9), scale=0.25, window=window), expected)


@each_packed
def test_soft_cap_is_gemma2s(attention: Callable[..., torch.Tensor]) -> None:
    q, k, v = qkv(9, 4, 2, 16)
    position = torch.arange(9)
    mask = torch.zeros(9, 9).masked_fill(~visible_keys(position, position, 4), float("-inf"))
    module = SimpleNamespace(num_key_value_groups=2, training=False)
    heads_first = ((10 * q).transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
    expected, _ = gemma2_attention(module, *heads_first, mask, scaling=0.25, softcap=5.0)

    close(attention(10 * q, k, v, None, bounds(9), scale=0.25, window=4, soft_cap=5.0), expected)


@each_packed
@pytest.mark.parametrize("heads", [4, 6])
def test_slopes_are_the_alibi_of_bloom(attention: Callable[..., torch.Tensor], heads: int) -> None:
    q, k, v = qkv(40, heads, 2, 16, 8)
    # transformers adds slope * j to each row, which differs from slope * (j - i) by what softmax doesn't see.
    alibi = build_alibi_tensor(torch.ones(1, 40), heads, torch.float32).view(1, heads, 1, 40)
    heads_first = (q.transpose(1, 2), *(x.transpose(1, 2).repeat_interleave(heads // 2, 1) for x in (k, v)))
    later = torch.ones(40, 40, dtype=torch.bool).triu(1)
    mask = alibi.expand(1, heads, 40, 40).masked_fill(later, float("-inf"))
    expected = functional.scaled_dot_product_attention(*heads_first, attn_mask=mask, scale=0.25).transpose(1, 2)

    close(attention(q, k, v, None, bounds(40), scale=0.25, slopes=alibi[0, :, 0, 1].contiguous()), expected)


@each_packed
def test_slopes_come_before_the_soft_cap_and_sinks_after_it(attention: Callable[..., torch.Tensor]) -> None:
    q, k, v = torch.zeros(1, 2, 1, 4), torch.zeros(1, 2, 1, 4), torch.tensor([1.0, 0.0]).view(1, 2, 1, 1)
    found = attention(q, k, v, torch.zeros(1), bounds(2), scale=1.0, soft_cap=2.0, slopes=torch.tensor([3.0]))
    # The second query's scores are -3 for the first key, which the cap makes 2 * tanh(-1.5), and 0 for its own.
    weights = torch.tensor([2 * math.tanh(-1.5), 0.0, 0.0]).exp()

    close(found.flatten(), torch.stack([torch.tensor(0.5), weights[0] / weights.sum()]))


@each_packed
@pytest.mark.parametrize("extent", [1, 4, 9, 30])
def test_a_bias_by_distance_is_inklings(attention: Callable[..., torch.Tensor], extent: int) -> None:
    q, k, v = qkv(9, 6, 2, 16)
    relative = InklingRelativeLogits(3, extent)
    torch.nn.init.normal_(relative.proj)
    states, position = torch.randn(1, 9, 6, 3), torch.arange(9)
    mask = torch.zeros(9, 9).masked_fill(~visible_keys(position, position, None), float("-inf"))
    module = SimpleNamespace(num_key_value_groups=3, training=False)
    heads_first = (x.transpose(1, 2) for x in (q, k, v))
    bias = relative(states, position, position)
    expected, _ = inkling_attention(module, *heads_first, mask, scaling=0.25, position_bias=bias)

    close(attention(q, k, v, None, bounds(9), scale=0.25, bias=states @ relative.proj), expected)


@each_packed
def test_each_sequence_has_the_bias_of_its_own_queries(attention: Callable[..., torch.Tensor]) -> None:
    q, k, v = qkv(14, 4, 2, 16)
    bias = torch.randn(1, 14, 4, 6)
    found = attention(q, k, v, None, bounds(5, 0, 1, 8), scale=0.25, window=7, bias=bias)

    for first, end in ((0, 5), (5, 6), (6, 14)):
        alone = (x[:, first:end] for x in (q, k, v))
        expected = reference.attention(*alone, None, bounds(end - first), scale=0.25, window=7, bias=bias[:, first:end])
        close(found[:, first:end], expected)


@each_packed
@pytest.mark.parametrize("chunk", [1, 5, 17, 128, 300])
def test_chunks_are_those_of_transformers(attention: Callable[..., torch.Tensor], chunk: int) -> None:
    q, k, v = qkv(300, 4, 2, 16, 8)
    rule = chunked_causal_mask_function(chunk, torch.zeros(1, dtype=torch.int64))
    at = torch.arange(300)
    heads_first = (q.transpose(1, 2), *(x.transpose(1, 2).repeat_interleave(2, 1) for x in (k, v)))
    mask = rule(0, 0, at[:, None], at)
    expected = functional.scaled_dot_product_attention(*heads_first, attn_mask=mask, scale=0.25).transpose(1, 2)

    close(attention(q, k, v, None, bounds(300), scale=0.25, chunk=chunk), expected)


@each_packed
def test_chunks_begin_anew_with_each_sequence(attention: Callable[..., torch.Tensor]) -> None:
    q, k, v = qkv(14, 4, 2, 16)
    slopes = torch.rand(4)
    found = attention(q, k, v, None, bounds(5, 9), scale=0.25, chunk=3, slopes=slopes)

    for first, end in ((0, 3), (3, 5), (5, 8), (8, 11), (11, 14)):
        alone = (x[:, first:end] for x in (q, k, v))
        expected = reference.attention(*alone, None, bounds(end - first), scale=0.25, slopes=slopes)
        close(found[:, first:end], expected)


@each_packed
def test_window_counts_the_query_itself(attention: Callable[..., torch.Tensor]) -> None:
    q, k, v = qkv(5, 2, 2, 8)

    close(attention(q, k, v, None, bounds(5), scale=1.0, window=1), v)
    close(attention(q, k, v, None, bounds(5), scale=1.0, window=5), attention(q, k, v, None, bounds(5), scale=1.0))


def test_visible_keys_by_hand() -> None:
    query, key = torch.tensor([3, 4]), torch.arange(6)

    assert visible_keys(query, key, None).int().tolist() == [[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 0]]
    assert visible_keys(query, key, 2).int().tolist() == [[0, 0, 1, 1, 0, 0], [0, 0, 0, 1, 1, 0]]
    assert visible_keys(query, key, None, 4).int().tolist() == [[1, 1, 1, 1, 0, 0], [0, 0, 0, 0, 1, 0]]
    assert visible_keys(query, key, None, 3).int().tolist() == [[0, 0, 0, 1, 0, 0], [0, 0, 0, 1, 1, 0]]


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ({"window": 0}, "window: expected None .* or at least 1, found 0"),
        ({"window": -1}, "window: expected None .* or at least 1, found -1"),
        ({"chunk": 0}, "chunk: expected None .* or at least 1, found 0"),
        ({"chunk": -4}, "chunk: expected None .* or at least 1, found -4"),
        ({"window": 4, "chunk": 8}, "expected a window or chunks, found window 4 and chunk 8"),
    ],
)
def test_rules_that_show_nothing_or_exclude_each_other_are_refused(rule: dict[str, int], message: str) -> None:
    sample = paged_sample(Draw(torch.float32, CPU), [(1, 3)], heads=2, kv_heads=1, size=8) | rule
    packed = (*qkv(3, 2, 1, 8), None, bounds(3))
    for name, args, kwargs in (
        ("precast.attention", packed, {"scale": 1.0, **rule}),
        ("precast.paged_attention", (), sample),
    ):
        with pytest.raises(ValueError, match=message):
            registry.resolve(name, 1, CPU)(*args, **kwargs)


@each_packed
@pytest.mark.parametrize("more", [{}, {"soft_cap": 3.0}, {"window": 2}, {"chunk": 2}, {"slopes": torch.ones(4)}])
def test_padding_gives_zeros_whatever_it_holds(attention: Callable[..., torch.Tensor], more: dict[str, Any]) -> None:
    q, k, v = qkv(9, 4, 2, 16)
    for x in (q, k, v):
        x[:, 6:] = float("nan")
    found = attention(q, k, v, None, bounds(2, 4), scale=0.25, **more)

    assert torch.equal(found[:, 6:], torch.zeros(1, 3, 4, 16))
    assert not found.isnan().any()


@each_packed
def test_sinks_at_the_extremes(attention: Callable[..., torch.Tensor]) -> None:
    q, k, v = qkv(6, 2, 1, 8)
    without = attention(q, k, v, None, bounds(6), scale=0.3)
    found = attention(q, k, v, torch.tensor([float("-inf"), 1e4]), bounds(6), scale=0.3)

    close(found[:, :, 0], without[:, :, 0])
    assert found[:, :, 1].abs().max() == 0


# --- paged -----------------------------------------------------------------------------------------------------


@each_paged
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"window": 7},
        {"soft_cap": 4.0},
        {"window": 3, "sinks": torch.tensor([1.0, -2.0])},
        {"slopes": torch.tensor([0.5, 2.0])},
        {"chunk": 7},
        {"chunk": 4, "slopes": torch.tensor([0.5, 2.0]), "sinks": torch.tensor([1.0, -2.0])},
        {"chunk": 12, "soft_cap": 4.0},
    ],
)
def test_chunks_through_the_cache_are_attention_at_once(
    paged_attention: Callable[..., torch.Tensor], more: dict[str, Any]
) -> None:
    more = {"sinks": None, **more}
    q, k, v = qkv(23, 2, 1, 16, 8)
    expected = reference.attention(q, k, v, cu_seqlens=bounds(23), scale=0.25, **more)
    k_cache, v_cache = torch.full((9, 4, 1, 16), float("nan")), torch.full((9, 4, 1, 8), float("nan"))
    pages = torch.tensor([7, 2, 5, 0, 8, 3])
    slots = (pages[:, None] * 4 + torch.arange(4)).flatten()
    found = []
    for first, end in ((0, 10), (10, 11), (11, 12), (12, 23)):
        part = slice(first, end)
        write_kv(k[:, part], v[:, part], k_cache, v_cache, slots[part])
        # The page table of this step, cut to the window or chunk of its first query.
        seen = max(first - more["window"] + 1, 0) if "window" in more else 0
        start = (first // more["chunk"] * more["chunk"] if "chunk" in more else seen) // 4
        table = pages[start : -(-end // 4)].int()
        metadata = {
            "cu_seqlens": bounds(end - first),
            "kv_lens": torch.tensor([end], dtype=torch.int32),
            "page_indices": table,
            "page_indptr": bounds(len(table)),
            "page_start": torch.tensor([start * 4], dtype=torch.int32),
        }
        found.append(paged_attention(q[:, part], k_cache, v_cache, **metadata, scale=0.25, **more))

    close(torch.cat(found, 1), expected)


@each_paged
def test_nothing_to_see_gives_zeros(paged_attention: Callable[..., torch.Tensor]) -> None:
    sample = paged_sample(Draw(torch.float32, CPU), [(1, 5), (3, 3)], heads=2, kv_heads=1, size=8)
    for more in (
        {},
        {"sinks": torch.ones(2)},
        {"soft_cap": 1.0},
        {"window": 2},
        {"slopes": torch.ones(2)},
        {"chunk": 2},
    ):
        # No keys at all; and one key, which two of three queries stand before.
        found = paged_attention(**(sample | {"kv_lens": torch.tensor([0, 1], dtype=torch.int32)} | more))

        assert torch.equal(found[:, :3], torch.zeros(1, 3, 2, 8))
        assert found[:, 3].abs().min() > 0


# Both rules show the queries at 13 and 14 nothing of the first two pages; the chunk ends in the middle of a page.
@each_paged
@pytest.mark.parametrize("rule", [{"window": 5}, {"chunk": 9}], ids=str)
def test_pages_may_be_cut_or_not(paged_attention: Callable[..., torch.Tensor], rule: dict[str, int]) -> None:
    q = torch.randn(1, 2, 4, 16)
    cache = torch.randn(2, 5, 4, 2, 16)
    whole = {"page_indices": torch.tensor([4, 1, 3, 0], dtype=torch.int32), "page_indptr": bounds(4), "page_start": 0}
    cut = {"page_indices": torch.tensor([3, 0], dtype=torch.int32), "page_indptr": bounds(2), "page_start": 8}
    found = [
        paged_attention(
            q,
            *cache,
            None,
            bounds(2),
            torch.tensor([15], dtype=torch.int32),
            lists["page_indices"],
            lists["page_indptr"],
            torch.tensor([lists["page_start"]], dtype=torch.int32),
            scale=0.25,
            **rule,
        )
        for lists in (whole, cut)
    ]

    close(found[0], found[1])


def test_tiles_of_queries_join_without_a_seam() -> None:
    draw = Draw(torch.float32, CPU)
    rules = [{"window": window} for window in (None, 1, 40, 128, 129, 500)]
    rules += [{"chunk": chunk} for chunk in (1, 40, 128, 130, 300, 500)]
    for rule in rules:
        sample = paged_sample(draw, [(300, 420), (129, 129)], heads=2, kv_heads=1, size=8, cut=True, **rule)

        close(batched.paged_attention(**sample), paged_reference(**sample))


@given(data=st.data())
def test_batched_is_the_reference_on_any_batch(data: st.DataObject) -> None:
    kv_lens = data.draw(st.lists(st.integers(1, 40), max_size=6))
    sequences = [(data.draw(st.one_of(st.just(1), st.integers(0, length))), length) for length in kv_lens]
    kv_heads, group = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    reach = data.draw(st.integers(1, 50))
    draw = Draw(torch.float32, CPU, seed=data.draw(st.integers(0, 100)))
    sample = paged_sample(
        draw,
        sequences,
        heads=kv_heads * group,
        kv_heads=kv_heads,
        size=8,
        value=data.draw(st.sampled_from([4, 8])),
        page_size=data.draw(st.integers(1, 9)),
        padding=data.draw(st.integers(0, 2)),
        cut=data.draw(st.booleans()),
        **data.draw(st.sampled_from([{}, {"window": reach}, {"chunk": reach}])),
        slopes=data.draw(st.sampled_from([None, draw.uniform(kv_heads * group)])),
        soft_cap=data.draw(st.sampled_from([None, 2.0])),
        sinks=data.draw(st.sampled_from([None, draw.normal(kv_heads * group)])),
    )

    close(batched.paged_attention(**sample), paged_reference(**sample))


@pytest.mark.parametrize("slopes", [None, torch.tensor([0.01, 0.1, 0.3, 0.5])], ids=["plain", "slopes"])
def test_half_precision_stays_near_the_float32_result(slopes: torch.Tensor | None) -> None:
    sample = paged_sample(Draw(torch.float32, CPU), [(1, 200), (60, 90)], heads=4, kv_heads=2, size=64, slopes=slopes)
    expected = paged_reference(**sample)
    for dtype, atol in ((torch.bfloat16, 2e-2), (torch.float16, 3e-3)):
        half = sample | {name: sample[name].to(dtype) for name in ("q", "k_cache", "v_cache")}
        for function in (paged_reference, batched.paged_attention):
            torch.testing.assert_close(function(**half).float(), expected, rtol=0, atol=atol)


@each_paged
def test_scales_are_those_of_keys_and_values(paged_attention: Callable[..., torch.Tensor]) -> None:
    """As if the cache held what its values stand for, with all that comes between scores and weights."""
    draw = Draw(torch.float32, CPU)
    k_scale, v_scale = torch.tensor([0.3]), torch.tensor([1.7])
    more = {"sinks": draw.normal(6), "slopes": draw.uniform(6), "soft_cap": 3.0, "window": 7, "padding": 2}
    for extras in ({}, more):
        sample = paged_sample(
            draw, [(5, 9), (1, 20), (1, 3)], heads=6, kv_heads=2, size=16, page_size=4,
            cache_dtype=torch.float8_e4m3fn, **extras,
        )  # fmt: skip
        plain = sample | {
            "k_cache": sample["k_cache"].float() * k_scale,
            "v_cache": sample["v_cache"].float() * v_scale,
        }

        close(paged_attention(**sample, k_scale=k_scale, v_scale=v_scale), paged_reference(**plain))
