"""Attention to selected blocks: which blocks are selected, by hand and as transformers does, and attention to them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from op_samples.block_sparse_attention import paged_block_sparse_sample, paged_blocks_sample
from op_samples.draw import Draw
from transformers.models.minimax_m3_vl import modeling_minimax_m3_vl as m3
from transformers.models.minimax_m3_vl.configuration_minimax_m3_vl import MiniMaxM3VLTextConfig

from precast.kernels.attention.paged import paged_attention
from precast.kernels.block_sparse_attention import attend_blocks as attending
from precast.kernels.block_sparse_attention import select as selecting
from precast.kernels.block_sparse_attention.block_sparse_attention import block_sparse_attention
from precast.kernels.block_sparse_attention.paged_block_sparse_attention import paged_block_sparse_attention
from precast.kernels.block_sparse_attention.paged_select_blocks import paged_select_blocks
from precast.kernels.block_sparse_attention.select_blocks import select_blocks

CPU = torch.device("cpu")
SHAPE = {"heads": 6, "kv_heads": 3, "groups": 3, "size": 10}


def bounds(*lengths: int) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def of_last(keys: list[float], count: int, *, block_size: int = 2, local: int = 0) -> list[int]:
    """What the last token of a sequence selects whose keys these numbers are, by one head whose query is 1."""
    tokens = len(keys)
    found = select_blocks(
        torch.ones(1, tokens, 1, 1), torch.tensor(keys).view(1, tokens, 1), bounds(tokens),
        count=count, block_size=block_size, local=local,
    )  # fmt: skip
    selected: list[int] = found[0, -1, 0].tolist()
    return selected


# --- the selection -----------------------------------------------------------------------------------------------


def test_the_blocks_of_the_best_keys_in_ascending_order() -> None:
    assert of_last([3.0, 0.0, 1.0, 1.0, 0.0, 9.0, 2.0, 2.0], 2) == [0, 2]


def test_a_block_may_be_larger_than_a_sequence() -> None:
    assert of_last([3.0, 9.0, 1.0], 2, block_size=2**30) == [0, -1]


def test_scores_below_zero_are_scores() -> None:
    assert of_last([-3.0, -8.0, -9.0, -7.0, -2.0, -9.0], 2) == [0, 2]


def test_fewer_blocks_than_are_selected() -> None:
    assert of_last([3.0, 9.0, 1.0], 4) == [0, 1, -1, -1]


def test_of_equal_scores_the_first_blocks() -> None:
    assert of_last([2.0, 0.0, 5.0, 0.0, 2.0, 0.0, 2.0, 0.0, 0.0, 5.0], 3) == [0, 1, 4]
    assert of_last([0.0, -0.0] * 40, 3, block_size=1) == [0, 1, 2]


def test_the_last_blocks_are_always_selected() -> None:
    keys = [5.0, 0.0, 4.0, 0.0, 3.0, 0.0, 2.0, 0.0, 1.0]
    assert of_last(keys, 3, local=0) == [0, 1, 2]
    assert of_last(keys, 3, local=1) == [0, 1, 4]
    assert of_last(keys, 3, local=2) == [0, 3, 4]
    assert of_last(keys[:3], 3, local=2) == [0, 1, -1]


def test_nan_is_above_all() -> None:
    assert of_last([3.0, 0.0, 9.0, 0.0, float("nan"), 0.0, 7.0, 0.0], 2) == [1, 2]


def test_what_is_no_key_of_the_query_is_not_scored() -> None:
    """The first token of a block doesn't see its second, which has the largest score of all."""
    keys = torch.tensor([5.0, 0.0, 1.0, 0.0, 2.0, 99.0]).view(1, 6, 1)

    found = select_blocks(torch.ones(1, 6, 1, 1), keys, bounds(6), count=1, block_size=2, local=0)

    assert found.flatten().tolist() == [0, 0, 0, 0, 0, 2]


def test_heads_select_for_themselves() -> None:
    """Heads (1, 0) and (0, 1) over keys (6, 1), (8, 9), (-6, 10)."""
    keys = torch.tensor([[[6.0, 1.0], [8.0, 9.0], [-6.0, 10.0]]])

    found = select_blocks(torch.eye(2).expand(1, 3, 2, 2), keys, bounds(3), count=1, block_size=1, local=0)

    assert found.tolist() == [[[[0], [0]], [[1], [1]], [[1], [2]]]]


def test_blocks_count_from_a_sequences_first_token() -> None:
    keys = torch.tensor([5.0, 1.0, 4.0, 9.0, 3.0, 8.0, 7.0]).view(1, 7, 1)

    found = select_blocks(torch.ones(1, 7, 1, 1), keys, bounds(1, 5), count=2, block_size=2, local=1)

    assert found[0, :, 0].tolist() == [[0, -1], [0, -1], [0, -1], [0, 1], [0, 1], [1, 2], [-1, -1]]


@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_pages_select_what_the_whole_selects(page_size: int) -> None:
    sequences = [(31, 31), (1, 1), (9, 9)]
    sample = paged_blocks_sample(
        Draw(torch.float32, CPU), sequences, heads=4, size=6, count=3, block_size=4, page_size=page_size
    )
    starts = sample["page_indptr"].tolist()
    k = torch.cat(
        [
            sample["cache"][sample["page_indices"][first:end].long()].flatten(0, 1)[:length]
            for first, end, (_, length) in zip(starts, starts[1:], sequences, strict=False)
        ]
    )

    whole = select_blocks(sample["q"], k[None], sample["cu_seqlens"], count=3, block_size=4, local=1)

    assert torch.equal(paged_select_blocks(**sample), whole)


def test_a_page_list_may_begin_within_a_block() -> None:
    """Of blocks of 7 keys the second begins at 7; keys from 10 on are held, and only their blocks can be selected."""
    draw = Draw(torch.float32, CPU)
    sample = paged_blocks_sample(
        draw, [(1, 40)], heads=2, size=6, count=3, block_size=7, page_size=2, window=30, cut=True
    )
    assert sample["page_start"].tolist() == [10]
    held = sample["cache"][sample["page_indices"][:-1].long()].flatten(0, 1)
    scores = torch.cat((torch.full((10, 2), float("-inf")), held @ sample["q"][0, 0].T))

    found = paged_select_blocks(**sample | {"local": 0})

    best = torch.stack([part.amax(0) for part in scores.split(7)]).topk(3, dim=0).indices
    assert found[0, 0].tolist() == best.T.sort().values.tolist()


def test_some_queries_at_a_time_select_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    sample = paged_blocks_sample(
        Draw(torch.float32, CPU), [(14, 40), (1, 9)], heads=4, size=6, count=3, block_size=4, whole=True
    )
    together = paged_select_blocks(**sample)

    monkeypatch.setattr(selecting, "MAX_SCORES", 3 * 4 * 40)

    assert torch.equal(paged_select_blocks(**sample), together)


def indexer(local: int) -> tuple[MiniMaxM3VLTextConfig, Any]:
    config = MiniMaxM3VLTextConfig(
        hidden_size=24, num_attention_heads=6, num_key_value_heads=3, head_dim=10, rotary_dim=4, index_n_heads=3,
        index_head_dim=12, index_topk_blocks=3, index_block_size=4, index_local_blocks=local, num_hidden_layers=1,
        layer_types=["minimax_m3_sparse"], max_position_embeddings=64,
    )  # fmt: skip
    torch.manual_seed(0)
    return config, m3.MiniMaxM3VLIndexer(config, 0).requires_grad_(False)


@pytest.mark.parametrize("local", [0, 1, 2])
def test_selection_and_attention_are_those_of_minimax(local: int) -> None:
    config, module = indexer(local)
    at = torch.arange(30)[None]
    tables = tuple(table[..., :4] for table in m3.MiniMaxM3VLRotaryEmbedding(config)(torch.zeros(1), at))
    hidden = torch.randn(1, 30, 24)
    chosen = module(hidden, tables, None, at)
    attention = torch.nn.Module()
    attention.num_key_value_groups, attention.training = 2, False  # type: ignore[assignment]
    q, k, v = torch.randn(1, 6, 30, 10), torch.randn(1, 3, 30, 10), torch.randn(1, 3, 30, 10)
    mask = module.build_block_mask(chosen, None, 30, torch.float32, CPU, at)
    expected, _ = m3.eager_attention_forward(attention, q, k, v, mask, scaling=0.3)

    index_q = module.q_norm(module.q_proj(hidden).view(1, 30, 3, 12))
    index_k = module.k_norm(module.k_proj(hidden).view(1, 30, 1, 12))
    index_q, index_k = m3.apply_rotary_pos_emb(index_q, index_k, *tables, unsqueeze_dim=2)
    selected = select_blocks(index_q, index_k[:, :, 0], bounds(30), count=3, block_size=4, local=local)
    packed = (x.transpose(1, 2) for x in (q, k, v))
    found = block_sparse_attention(*packed, selected, bounds(30), scale=0.3, block_size=4)

    order = chosen.masked_fill(chosen < 0, 99).sort(-1).values
    assert torch.equal(selected[0].transpose(0, 1), order.masked_fill(order == 99, -1)[0].int())
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


# --- attention to what is selected ---------------------------------------------------------------------------------


def test_of_all_blocks_it_is_attention() -> None:
    sample = paged_block_sparse_sample(
        Draw(torch.float32, CPU), [(5, 20), (1, 9), (3, 3)], count=5, block_size=4, **SHAPE
    )
    every = torch.arange(5, dtype=torch.int32).expand(1, 9, 3, 5)
    whole = {name: x for name, x in sample.items() if name not in ("selected", "block_size", "tail")} | {"sinks": None}

    found = paged_block_sparse_attention(**sample | {"selected": every})

    torch.testing.assert_close(found, paged_attention(**whole), rtol=1e-5, atol=1e-5)


def test_heads_see_what_is_selected_for_their_group_alone() -> None:
    """Six heads, of which pairs share keys, and three share a selection: the fourth's key head is the third's."""
    torch.manual_seed(1)
    q, k, v = torch.randn(1, 9, 6, 10), torch.randn(1, 9, 3, 10), torch.randn(1, 9, 3, 7)
    selected = torch.full((1, 9, 2, 2), -1, dtype=torch.int32)
    selected[0, 8] = torch.tensor([[0, 2], [1, -1]])
    seen = ([0, 1, 2, 6, 7, 8], [3, 4, 5])

    found = block_sparse_attention(q, k, v, selected, bounds(9), scale=0.3, block_size=3)

    for head in range(6):
        kept = seen[head // 3]
        shares = (k[0, kept, head // 2] @ q[0, 8, head] * 0.3).softmax(0)
        torch.testing.assert_close(found[0, 8, head], shares @ v[0, kept, head // 2], rtol=1e-5, atol=1e-5)
    assert not found[0, :8].any()


def test_with_a_tail_a_query_sees_what_follows_its_last_whole_block() -> None:
    """The second token ends a block, and its own block is not selected: it sees the first block's keys alone where
    that one is selected, here none."""
    torch.manual_seed(1)
    q, k, v = torch.randn(1, 6, 2, 4), torch.randn(1, 6, 1, 4), torch.randn(1, 6, 1, 4)
    selected = torch.tensor([[-1], [-1], [-1], [0], [1], [0]], dtype=torch.int32).view(1, 6, 1, 1)
    seen = [[0], [], [2], [0, 1], [2, 3, 4], [0, 1]]

    found = block_sparse_attention(q, k, v, selected, bounds(6), scale=0.5, block_size=2, tail=True)

    for token, kept in enumerate(seen):
        shares = (q[0, token] @ k[0, kept, 0].T * 0.5).softmax(-1)
        torch.testing.assert_close(found[0, token], shares @ v[0, kept, 0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("tail", [False, True])
def test_keys_that_a_page_list_has_no_pages_for_are_none(tail: bool) -> None:
    """The query is at position 29, and of 30 keys the first 15 are there: it is taken for one at position 14."""
    sample = paged_block_sparse_sample(
        Draw(torch.float32, CPU), [(1, 30)], count=4, block_size=4, page_size=3, **SHAPE, tail=tail
    )
    short = {"page_indices": sample["page_indices"][:5], "page_indptr": torch.tensor([0, 5], dtype=torch.int32)}
    selected = torch.tensor([0, 7, 1, 2], dtype=torch.int32).expand(1, 1, 3, 4)
    there = short | {"kv_lens": torch.tensor([15], dtype=torch.int32)}

    found, expected = (
        paged_block_sparse_attention(**sample | pages | {"selected": selected}) for pages in (short, there)
    )

    assert torch.equal(found, expected)
    assert found.any()


def test_a_tail_that_is_selected_too_is_seen_once() -> None:
    torch.manual_seed(1)
    q, k, v = torch.randn(1, 5, 2, 4), torch.randn(1, 5, 1, 4), torch.randn(1, 5, 1, 4)
    selected = torch.tensor([0, 2], dtype=torch.int32).expand(1, 5, 1, 2)

    found = block_sparse_attention(q, k, v, selected, bounds(5), scale=0.5, block_size=2, tail=True)

    expected = block_sparse_attention(q, k, v, selected, bounds(5), scale=0.5, block_size=2)
    assert torch.equal(found[0, 4], expected[0, 4])


def test_what_is_no_block_of_the_query_is_passed_over() -> None:
    """Later blocks, negative ones, those past the sequence; and those that aren't larger than all before."""
    torch.manual_seed(1)
    q, k, v = torch.randn(1, 6, 2, 4), torch.randn(1, 6, 1, 4), torch.randn(1, 6, 1, 4)
    selected = torch.tensor([0, 2**31 - 1, 2, 3, -(2**31), 1, 2], dtype=torch.int32).expand(1, 6, 1, 7)
    alone = torch.tensor([0, 2], dtype=torch.int32).expand(1, 6, 1, 2)

    found = block_sparse_attention(q, k, v, selected, bounds(6), scale=0.5, block_size=2)

    expected = block_sparse_attention(q, k, v, alone, bounds(6), scale=0.5, block_size=2)
    assert torch.equal(found[0, 4:], expected[0, 4:])  # of the others block 1 is larger than what came before


def test_scales_are_those_of_keys_and_values() -> None:
    sample = paged_block_sparse_sample(
        Draw(torch.float32, CPU), [(5, 20), (1, 9)], count=2, block_size=4, **SHAPE, cache_dtype=torch.float8_e4m3fn
    )
    scales = {"k_scale": torch.tensor([0.7]), "v_scale": torch.tensor([1.7])}
    plain = {name: sample[name].float() * scale for name, scale in zip(("k_cache", "v_cache"), (0.7, 1.7), strict=True)}

    found = paged_block_sparse_attention(**sample | scales)

    torch.testing.assert_close(found, paged_block_sparse_attention(**sample | plain), rtol=1e-5, atol=1e-5)


def test_some_queries_at_a_time_attend_to_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    sample = paged_block_sparse_sample(Draw(torch.float32, CPU), [(14, 40), (1, 9)], count=3, block_size=4, **SHAPE)
    together = paged_block_sparse_attention(**sample)

    monkeypatch.setattr(attending, "MAX_SCORES", 3 * 6 * 40)

    torch.testing.assert_close(paged_block_sparse_attention(**sample), together, rtol=1e-6, atol=1e-6)
