"""Attention over entries and how they are made: by hand, and as transformers' DeepSeek-V4 computes it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from op_samples.draw import Draw
from op_samples.entries import paged_entry_sample
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as v4
from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config

from precast.kernels.compress.compress import compress, stateful_compress
from precast.kernels.entries import attend as attending
from precast.kernels.entries.entry_attention import entry_attention
from precast.kernels.entries.paged_entry_attention import paged_entry_attention
from precast.kernels.entries.paged_select_entries import paged_select_entries
from precast.kernels.entries.select_entries import select_entries
from precast.kernels.entries.write_entries import write_entries

CPU = torch.device("cpu")
NONE = float("-inf")


def bounds(*lengths: int) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def numbers(*values: float) -> torch.Tensor:
    """One number for each token, [1, T, 1]."""
    return torch.tensor(values)[None, :, None]


# --- the entries of blocks ---------------------------------------------------------------------------------------


def test_a_block_s_tokens_weigh_what_gate_and_bias_say() -> None:
    kv, gate = numbers(5.0, 9.0, 2.0, 4.0, 8.0, 7.0), numbers(1.0, 1.0, 1.0, 2.0, 1.0, 5.0).log()
    bias = torch.tensor([[1.0], [3.0]]).log()

    y = compress(kv, gate, bias, bounds(2, 3, 1))

    expected = [0.0, (5 + 3 * 9) / 4, 0.0, (2 + 2 * 3 * 4) / 7, 0.0, 0.0]
    assert torch.allclose(y[0, :, 0], torch.tensor(expected))


def test_with_overlap_the_block_before_counts_by_its_own_series() -> None:
    """Two channels: a token's number for the block after its own, and for its own. Only the number is weighed."""
    kv = torch.tensor([[1.0, 10.0], [2.0, 20.0], [3.0, 30.0], [4.0, 40.0]])[None]
    bias = torch.tensor([[1.0], [2.0], [3.0], [4.0]]).log()

    y = compress(kv, torch.zeros_like(kv), bias, bounds(4))

    first, second = (3 * 10 + 4 * 20) / 7, (1 * 1 + 2 * 2 + 3 * 30 + 4 * 40) / 10
    assert torch.allclose(y[0, :, 0], torch.tensor([0.0, first, 0.0, second]))


@pytest.mark.parametrize(("rate", "series"), [(3, 1), (4, 1), (2, 2), (4, 2)])
def test_entries_are_the_same_however_a_sequence_is_cut(rate: int, series: int) -> None:
    draw, tokens, size = Draw(torch.bfloat16, CPU), 23, 6
    kv, gate = draw.normal(1, tokens, size * series), draw.normal(1, tokens, size * series)
    bias = draw.normal(rate * series, size, dtype=torch.float32)
    whole = compress(kv, gate, bias, bounds(tokens))

    state = torch.full((3, 2, rate * series, size * series), float("nan"), dtype=torch.bfloat16)
    parts, at = [], 0
    for length in (1, 5, 1, 9, 7):
        rows = slice(at, at := at + length)
        told = (torch.tensor([1], dtype=torch.int32), bounds(length), torch.tensor([at], dtype=torch.int32))
        parts.append(stateful_compress(kv[:, rows], gate[:, rows], bias, state, *told))

    assert torch.equal(torch.cat(parts, dim=1), whole)
    assert state[[0, 2]].isnan().all()


@pytest.mark.parametrize("kind", ["heavily_compressed_attention", "compressed_sparse_attention"])
def test_entries_are_those_of_transformers(kind: str) -> None:
    config, draw, tokens = small_config(), Draw(torch.float32, CPU), 27
    module: Any = v4.COMPRESSOR_CLASSES[kind](config)
    for param in module.parameters():
        param.data = draw.normal(*param.shape)
    hidden, positions = draw.normal(1, tokens, config.hidden_size), torch.arange(tokens)[None]
    with torch.no_grad():
        expected = module(hidden, draw.normal(1, tokens, config.q_lora_rank), positions, None, 0)[0][0, 0]
        kv, gate, bias = module.kv_proj(hidden), module.gate_proj(hidden), module.position_bias
        if kv.shape[-1] != config.head_dim:
            bias = torch.cat((bias[:, : config.head_dim], bias[:, config.head_dim :]))
        found = module.kv_norm(compress(kv, gate, bias, bounds(tokens)))
        rate = module.compress_rate
        angles = module.rotary_emb(found, position_ids=positions - (rate - 1), layer_type="compress")
        found = v4.apply_rotary_pos_emb(found[:, None], *angles)[0, 0]

    assert len(expected) == tokens // rate
    assert torch.allclose(found[rate - 1 :: rate], expected, atol=1e-5)


def small_config() -> DeepseekV4Config:
    return DeepseekV4Config(
        hidden_size=20, head_dim=16, num_attention_heads=3, q_lora_rank=12, index_n_heads=9, index_head_dim=8,
        index_topk=3, partial_rotary_factor=0.25, num_hidden_layers=1, layer_types=["compressed_sparse_attention"],
        mlp_layer_types=["moe"],
        compress_rates={"compressed_sparse_attention": 4, "heavily_compressed_attention": 6},
    )  # fmt: skip


# --- attention ---------------------------------------------------------------------------------------------------


def test_queries_see_whole_blocks() -> None:
    """With queries of 0 all that is seen weighs the same; but for blocks' last tokens nothing is read."""
    nan = float("nan")
    entries = numbers(nan, 4.0, nan, 8.0, nan, nan, 6.0, nan)

    y, lse = entry_attention(torch.zeros(1, 8, 1, 1), entries, None, bounds(5, 3), scale=1.0, rate=2)

    assert y[0, :, 0, 0].tolist() == [0.0, 4.0, 4.0, 6.0, 6.0, 0.0, 6.0, 6.0]
    assert torch.equal(lse[0, :, 0].exp().round(), torch.tensor([0.0, 1.0, 1.0, 2.0, 2.0, 0.0, 1.0, 1.0]))
    assert lse[0, 0, 0] == NONE


def test_a_window_of_tokens() -> None:
    entries = numbers(1.0, 2.0, 4.0, 8.0)

    y, lse = entry_attention(torch.zeros(1, 4, 1, 1), entries, None, bounds(4), scale=1.0, rate=1, window=2)

    assert y[0, :, 0, 0].tolist() == [1.0, 1.5, 3.0, 6.0]
    assert torch.allclose(lse[0, :, 0].exp(), torch.tensor([1.0, 2.0, 2.0, 2.0]))


def test_entries_that_are_named() -> None:
    """What isn't there or can't be seen yet is passed over; what is named twice counts twice."""
    entries = numbers(0.0, 3.0, 0.0, 9.0, 0.0, 6.0)
    selected = torch.tensor([[0, 0, 0], [0, -1, -1], [1, 0, 2], [0, 1, 1], [-7, -1, 5], [2, 9, 1]]).int()[None]

    y, lse = entry_attention(torch.zeros(1, 6, 1, 1), entries, selected, bounds(6), scale=1.0, rate=2)

    assert y[0, :, 0, 0].tolist() == [0.0, 3.0, 3.0, 7.0, 0.0, 7.5]
    assert lse[0, :, 0].exp().round().tolist() == [0.0, 1.0, 1.0, 3.0, 0.0, 2.0]


def test_parts_join_to_attention_over_all() -> None:
    """By their `lse`: as one softmax over entries of two rates."""
    draw = Draw(torch.float64, CPU)
    q, entries = draw.normal(1, 9, 2, 4), draw.normal(1, 9, 4)
    (y, lse), (other, weight) = (
        entry_attention(q, entries, None, bounds(9), scale=0.5, rate=rate, window=window)
        for rate, window in ((1, 3), (4, None))
    )
    both = torch.logaddexp(lse, weight)
    joined = y * (lse - both).exp()[..., None] + other * (weight - both).exp()[..., None]

    for token in range(9):
        seen = torch.cat((entries[0, max(token - 2, 0) : token + 1], entries[0, 3 : token + 1 : 4]))
        shares = (q[0, token] @ seen.T * 0.5).softmax(dim=-1)
        assert torch.allclose(joined[0, token], shares @ seen)


@pytest.mark.parametrize("count", [None, 4])
def test_some_queries_at_a_time(count: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    sample = paged_entry_sample(Draw(torch.float32, CPU), [(9, 30), (4, 4)], rate=2, heads=3, size=8, count=count)
    together = paged_entry_attention(**sample)

    monkeypatch.setattr(attending, "MAX_SCORES", 1)
    monkeypatch.setattr(attending, "MAX_ENTRIES", 1)
    for found, expected in zip(paged_entry_attention(**sample), together, strict=True):
        assert torch.allclose(found, expected)


@pytest.mark.parametrize("count", [None, 4])
def test_pages_hold_what_blocks_leave(count: int | None) -> None:
    """A sequence of 29 tokens, written and attended to in steps, as packed."""
    draw, rate, size = Draw(torch.float32, CPU), 3, 8
    q, entries = draw.normal(1, 29, 2, size), draw.normal(1, 29, size)
    weights = draw.normal(1, 29, 2)
    selected = None
    if count is not None:
        selected = select_entries(q, entries, weights, bounds(29), scale=0.5, rate=rate, count=count)
    whole = entry_attention(q, entries, selected, bounds(29), scale=0.5, rate=rate)

    cache, table = torch.full((7, 2, size), float("nan")), torch.tensor([4, 1, 6, 0, 3]).int()
    for first, end in ((0, 1), (1, 11), (11, 12), (12, 29)):
        at, rows = torch.arange(first, end), slice(first, end)
        write_entries(entries[:, rows], cache, table[at // 6].long() * 6 + at % 6, rate=rate)
        pages = {
            "cu_seqlens": bounds(end - first), "kv_lens": torch.tensor([end]).int(),
            "page_indices": table[: -(-end // 6)], "page_indptr": bounds(-(-end // 6)),
            "page_start": torch.zeros(1).int(),
        }  # fmt: skip
        named = None
        if selected is not None:
            named = paged_select_entries(
                q=q[:, rows], cache=cache, weights=weights[:, rows], **pages, scale=0.5, rate=rate, count=count
            )
            assert torch.equal(named, selected[:, rows])
        found = paged_entry_attention(q=q[:, rows], cache=cache, selected=named, **pages, scale=0.5, rate=rate)
        for mine, expected in zip(found, whole, strict=True):
            assert torch.allclose(mine, expected[:, rows], atol=1e-6)


# --- the selection -----------------------------------------------------------------------------------------------


def test_entries_are_selected_as_by_transformers() -> None:
    config, draw, tokens = small_config(), Draw(torch.float32, CPU), 31
    indexer: Any = v4.DeepseekV4Indexer(config)
    for param in indexer.parameters():
        param.data = draw.normal(*param.shape)
    hidden, residual = draw.normal(1, tokens, config.hidden_size), draw.normal(1, tokens, config.q_lora_rank)
    given: dict[str, torch.Tensor] = {}
    indexer.scorer.register_forward_pre_hook(lambda _, args: given.update(q=args[0], entries=args[1]))
    with torch.no_grad():
        expected = indexer(hidden, residual, torch.arange(tokens)[None], None, 0)[0]
        weights = indexer.scorer.weights_proj(hidden) * indexer.scorer.weights_scaling
    entries = torch.zeros(1, tokens, config.index_head_dim)
    entries[:, 3::4] = given["entries"]

    found = select_entries(
        given["q"], entries, weights, bounds(tokens), scale=indexer.scorer.softmax_scale, rate=4, count=3
    )

    assert found[0].sort(dim=-1).values.tolist() == expected.sort(dim=-1).values.tolist()


# --- writes ------------------------------------------------------------------------------------------------------


def test_the_last_token_of_a_block_is_written() -> None:
    cache = torch.zeros(2, 2, 1)

    write_entries(numbers(1.0, 2.0, 3.0, 4.0, 5.0), cache, torch.tensor([6, 7, -1, 9, 2]), rate=3)

    assert cache[:, :, 0].tolist() == [[5.0, 0.0], [0.0, 0.0]]

    write_entries(numbers(1.0, 2.0, 3.0, 4.0, 5.0), cache, torch.tensor([6, 7, 8, 9, 11]), rate=3)

    assert cache[:, :, 0].tolist() == [[5.0, 0.0], [3.0, 5.0]]
