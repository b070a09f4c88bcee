"""Sparse attention: which keys are selected, by hand and as transformers does, and attention to these alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from op_samples.draw import Draw
from op_samples.sparse_attention import paged_select_sample, paged_sparse_sample
from transformers.models.deepseek_v32 import modeling_deepseek_v32 as v32
from transformers.models.deepseek_v32.configuration_deepseek_v32 import DeepseekV32Config

from precast.kernels.attention.attend import probabilities
from precast.kernels.latent_attention.expand import expand, sizes_of
from precast.kernels.latent_attention.latent_attention import latent_attention
from precast.kernels.latent_attention.paged import paged_latent_attention
from precast.kernels.sparse_attention import attend_selected as attending
from precast.kernels.sparse_attention import select as selecting
from precast.kernels.sparse_attention.paged_select_keys import paged_select_keys
from precast.kernels.sparse_attention.paged_sparse_latent_attention import paged_sparse_latent_attention
from precast.kernels.sparse_attention.select_keys import select_keys
from precast.kernels.sparse_attention.sparse_latent_attention import sparse_latent_attention
from precast.kernels.sparse_attention.write_index_keys import write_index_keys

CPU = torch.device("cpu")
HEADS, NOPE, ROPE, LATENT, VALUE = 3, 10, 6, 20, 14
SIZES = {"heads": HEADS, "nope": NOPE, "rope": ROPE, "latent": LATENT, "value": VALUE}


def bounds(*lengths: int) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def of_last(keys: list[float], count: int, *, weight: float = 1.0) -> list[int]:
    """What the last token of a sequence selects whose keys these numbers are, by one head whose query is 1."""
    tokens = len(keys)
    found = select_keys(
        torch.ones(1, tokens, 1, 1), torch.tensor(keys).view(1, tokens, 1), torch.full((1, tokens, 1), weight),
        bounds(tokens), scale=1.0, count=count,
    )  # fmt: skip
    selected: list[int] = found[0, -1].tolist()
    return selected


# --- the selection -----------------------------------------------------------------------------------------------


def test_the_largest_scores_in_the_order_of_positions() -> None:
    assert of_last([3.0, 9.0, 1.0, 7.0, 5.0], 3) == [1, 3, 4]


def test_fewer_keys_than_are_selected() -> None:
    assert of_last([3.0, 9.0], 4) == [0, 1, -1, -1]


def test_of_equal_scores_the_first_keys() -> None:
    assert of_last([2.0, 5.0, 2.0, 2.0, 5.0], 3) == [0, 1, 4]
    assert of_last([0.0] * 40, 3) == [0, 1, 2]


def test_below_zero_a_head_says_nothing() -> None:
    """Products of -4 and -9 are 0, as is that of 0; with a weight below 0 they are -0, and above the others."""
    assert of_last([-4.0, 2.0, -9.0, 0.0], 2) == [0, 1]
    assert of_last([2.0, -4.0, 0.0, -9.0, 1.0], 3, weight=-1.0) == [1, 2, 3]


def test_nan_is_above_all() -> None:
    assert of_last([3.0, 9.0, float("nan"), 7.0], 2) == [1, 2]


def test_two_heads_by_hand() -> None:
    """Heads (1, 0) and (0, 1), weights 1 and -2, scale 0.5: key (6, 1) scores 3 - 1, (8, 9) 4 - 9, (-6, -8) 0."""
    keys = torch.tensor([[[6.0, 1.0], [8.0, 9.0], [-6.0, -8.0]]])
    q, weights = torch.eye(2).expand(1, 3, 2, 2), torch.tensor([1.0, -2.0]).expand(1, 3, 2)

    found = select_keys(q, keys, weights, bounds(3), scale=0.5, count=2)

    assert found.tolist() == [[[0, -1], [0, 1], [0, 2]]]


def test_positions_count_from_a_sequences_first_token() -> None:
    keys = torch.tensor([5.0, 1.0, 4.0, 9.0, 3.0, 8.0]).view(1, 6, 1)

    found = select_keys(torch.ones(1, 6, 1, 1), keys, torch.ones(1, 6, 1), bounds(2, 3), scale=1.0, count=2)

    assert found[0].tolist() == [[0, -1], [0, 1], [0, -1], [0, 1], [0, 1], [-1, -1]]


@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_pages_select_what_the_whole_selects(page_size: int) -> None:
    sequences = [(31, 31), (1, 1), (9, 9)]
    paged = paged_select_sample(Draw(torch.float32, CPU), sequences, heads=4, size=6, count=5, page_size=page_size)
    starts = paged["page_indptr"].tolist()
    k = torch.cat(
        [
            paged["cache"][paged["page_indices"][first:end].long()].flatten(0, 1)[:length]
            for first, end, (_, length) in zip(starts, starts[1:], sequences, strict=False)
        ]
    )

    whole = select_keys(
        paged["q"], k[None], paged["weights"], paged["cu_seqlens"], scale=paged["scale"], count=paged["count"]
    )

    assert torch.equal(paged_select_keys(**paged), whole)


def test_some_queries_at_a_time_select_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    sample = paged_select_sample(Draw(torch.float32, CPU), [(14, 40), (1, 9)], heads=4, size=6, count=5, whole=True)
    together = paged_select_keys(**sample)

    monkeypatch.setattr(selecting, "MAX_SCORES", 3 * 4 * 40)

    assert torch.equal(paged_select_keys(**sample), together)


def test_the_selection_is_deepseeks() -> None:
    config = DeepseekV32Config(
        hidden_size=24, num_attention_heads=2, num_key_value_heads=2, q_lora_rank=10, qk_rope_head_dim=4,
        index_n_heads=8, index_head_dim=12, index_topk=6, max_position_embeddings=64,
    )  # fmt: skip
    torch.manual_seed(0)
    indexer = v32.DeepseekV32Indexer(config, 0).requires_grad_(False)
    tables = v32.DeepseekV32RotaryEmbedding(config)(torch.zeros(1), torch.arange(30)[None])
    hidden, q_resid, causal = torch.randn(1, 30, 24), torch.randn(1, 30, 10), torch.ones(1, 30, 30).tril().bool()
    chosen = indexer(hidden, q_resid, tables, causal, None)

    q, k = indexer.wq_b(q_resid).view(1, 30, 8, 12), indexer.k_norm(indexer.wk(hidden))[:, :, None]
    q_rope, k_rope = v32.apply_rotary_pos_emb(q[..., :4], k[..., :4], *tables, unsqueeze_dim=2)
    q, k = torch.cat((q_rope, q[..., 4:]), -1), torch.cat((k_rope, k[..., 4:]), -1)[:, :, 0]
    weights = indexer.weights_proj(hidden) * 8**-0.5
    found = select_keys(q, k, weights, bounds(30), scale=12**-0.5, count=6)

    for position in range(30):
        kept = sorted(place for place in chosen[0, position].tolist() if place <= position)
        assert found[0, position].tolist() == kept + [-1] * (6 - len(kept))


# --- attention to what is selected ---------------------------------------------------------------------------------


def test_of_all_keys_it_is_latent_attention() -> None:
    sample = paged_sparse_sample(Draw(torch.float32, CPU), [(5, 20), (1, 9), (3, 3)], count=20, **SIZES)
    positions = torch.arange(20, dtype=torch.int32)
    whole = {name: value for name, value in sample.items() if name not in ("selected", "sinks")}

    found = paged_sparse_latent_attention(**sample | {"selected": positions.expand(1, 9, 20)})

    torch.testing.assert_close(found, paged_latent_attention(**whole), rtol=1e-5, atol=1e-5)


def packed(tokens: int) -> dict[str, Any]:
    torch.manual_seed(1)
    return {
        "q": torch.randn(1, tokens, HEADS, NOPE + ROPE), "latent": torch.randn(1, tokens, LATENT),
        "k_rope": torch.randn(1, tokens, ROPE), "weight": torch.randn(HEADS * (NOPE + VALUE), LATENT) * LATENT**-0.5,
        "cu_seqlens": bounds(tokens), "scale": 0.3, "value_size": VALUE,
    }  # fmt: skip


@pytest.mark.parametrize("with_sinks", [False, True])
def test_attention_to_keys_and_values_that_are_written_out(with_sinks: bool) -> None:
    call, sinks = packed(9), torch.tensor([0.5, -2.0, 3.0]) if with_sinks else None
    selected = torch.tensor([[0, 2, 5], [1, 7, -1]], dtype=torch.int32)
    every = torch.full((1, 9, 3), -1, dtype=torch.int32)
    every[0, 5], every[0, 8] = selected

    found = sparse_latent_attention(**call, selected=every, sinks=sinks)

    sizes = sizes_of(call["q"], call["weight"], ROPE, VALUE)
    keys, values = expand(call["latent"][0], call["k_rope"][0], call["weight"], sizes)
    for token, kept in ((5, [0, 2, 5]), (8, [1, 7])):
        scores = torch.einsum("hd,lhd->hl", call["q"][0, token], keys[kept]) * 0.3
        expected = torch.einsum("hl,lhd->hd", probabilities(scores, sinks), values[kept])
        torch.testing.assert_close(found[0, token], expected, rtol=1e-5, atol=1e-5)
    assert not found[0, [0, 1, 2, 3, 4, 6, 7]].any()


def test_what_is_no_key_of_the_query_is_passed_over() -> None:
    """Later positions, negative ones, and those past the sequence."""
    call = packed(6)
    selected = torch.tensor([[[0, 3, 4, 2**31 - 1, -(2**31), 1]]] * 6, dtype=torch.int32).view(1, 6, 6)

    found = sparse_latent_attention(**call, selected=selected, sinks=None)

    for token in range(6):
        kept = [place for place in (0, 3, 4, 1) if place <= token]
        alone = torch.tensor(kept + [-1] * (6 - len(kept)), dtype=torch.int32).expand(1, 6, 6)
        expected = sparse_latent_attention(**call, selected=alone, sinks=None)
        torch.testing.assert_close(found[0, token], expected[0, token])


def test_a_key_that_is_there_twice_counts_twice() -> None:
    call = packed(2)
    once, twice = (torch.tensor([row] * 2, dtype=torch.int32)[None] for row in ([0, 1, -1], [0, 1, 1]))
    two = latent_attention(**{name: value[:, [0, 1, 1]] if name in ("latent", "k_rope") else value
                              for name, value in call.items()} | {"q": call["q"][:, [0, 1, 1]],
                                                                  "cu_seqlens": bounds(3)})  # fmt: skip

    found = sparse_latent_attention(**call, selected=twice, sinks=None)

    torch.testing.assert_close(found[0, 1], two[0, 2], rtol=1e-5, atol=1e-5)
    assert not torch.allclose(found[0, 1], sparse_latent_attention(**call, selected=once, sinks=None)[0, 1])


def test_some_queries_at_a_time_attend_to_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    sample = paged_sparse_sample(Draw(torch.float32, CPU), [(14, 40), (1, 9)], count=7, **SIZES)
    together = paged_sparse_latent_attention(**sample)

    monkeypatch.setattr(attending, "MAX_LATENTS", 3 * 7 * (LATENT + ROPE))

    torch.testing.assert_close(paged_sparse_latent_attention(**sample), together, rtol=1e-6, atol=1e-6)


def test_a_weight_that_does_not_fit_is_refused() -> None:
    call = packed(4) | {"value_size": VALUE + 1}
    with pytest.raises(ValueError, match=r"weight: expected 3 \* \(10 \+ 15\) rows"):
        sparse_latent_attention(**call, selected=torch.zeros(1, 4, 2, dtype=torch.int32), sinks=None)


# --- the keys ----------------------------------------------------------------------------------------------------


def test_write_index_keys_by_hand() -> None:
    cache = torch.zeros(2, 2, 2)

    write_index_keys(torch.tensor([[[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]]), cache, torch.tensor([3, -1, 0]))

    assert cache.tolist() == [[[5.0, 6.0], [0.0, 0.0]], [[0.0, 0.0], [1.0, 2.0]]]
