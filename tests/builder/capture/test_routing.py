"""Attention that is routed to our op: which keys a mask lets a query see, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from fx_text import read_graph
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AttentionInterface, LlamaConfig, masking_utils
from transformers.masking_utils import (
    bidirectional_mask_function,
    causal_mask_function,
    chunked_causal_mask_function,
    sliding_window_causal_mask_function,
)  # fmt: skip

from precast.builder.capture.reach import Reach, find_reach
from precast.builder.capture.routing import (
    IMPLEMENTATION,
    Trace,
    current_trace,
    routed_attention,
    tracing,
)  # fmt: skip
from precast.ir.errors import BuildError
from precast.kernels.attention.attention import attention as precast_attention
from precast.kernels.registry import register

# --- masks -------------------------------------------------------------------------------------------------------


def test_full_attention_has_no_window() -> None:
    assert find_reach(causal_mask_function, 300) == Reach()


@pytest.mark.parametrize("window", [1, 2, 63, 64, 65, 299])
def test_a_sliding_window_is_found(window: int) -> None:
    assert find_reach(sliding_window_causal_mask_function(window), 300) == Reach(window=window)


@pytest.mark.parametrize("window", [300, 301, 4096])
def test_a_window_as_long_as_the_longest_sequence_is_full_attention(window: int) -> None:
    assert find_reach(sliding_window_causal_mask_function(window), 300) == Reach()


# Chunks that fill the limit, that leave one key, all but one, and that are far longer than the grid of small positions.
@pytest.mark.parametrize("chunk", [2, 7, 63, 64, 65, 100, 150, 151, 290, 299])
def test_chunks_are_found(chunk: int) -> None:
    rule = chunked_causal_mask_function(chunk, torch.zeros(1, dtype=torch.int64))

    assert find_reach(rule, 300) == Reach(chunk=chunk)


@pytest.mark.parametrize("chunk", [300, 301, 8192])
def test_a_chunk_as_long_as_the_longest_sequence_is_full_attention(chunk: int) -> None:
    assert find_reach(chunked_causal_mask_function(chunk, torch.zeros(1, dtype=torch.int64)), 300) == Reach()


def test_chunks_of_one_are_a_window_of_one() -> None:
    rule = chunked_causal_mask_function(1, torch.zeros(1, dtype=torch.int64))

    assert find_reach(rule, 300) == Reach(window=1)


def test_one_position() -> None:
    assert find_reach(causal_mask_function, 1) == Reach()


def _window_of_both_sides(batch: Any, head: Any, query: Any, key: Any) -> Any:
    return (query - key).abs() < 8


def _far_prefix(batch: Any, head: Any, query: Any, key: Any) -> Any:
    return ((key <= query) & (key > query - 200)) | (key == 202)


def _prefix(batch: Any, head: Any, query: Any, key: Any) -> Any:
    return (key <= query) | (key < 4)


@pytest.mark.parametrize("rule", [bidirectional_mask_function, _window_of_both_sides, _prefix, _far_prefix])
def test_a_rule_that_sees_later_keys_is_refused(rule: Callable[..., Any]) -> None:
    with pytest.raises(BuildError, match="sees tokens that come later, expected a decoder") as error:
        find_reach(rule, 300)

    assert error.value.code == "model-unsupported"


def _every_other(batch: Any, head: Any, query: Any, key: Any) -> Any:
    return (key <= query) & ((query - key) % 2 == 0)


def _nothing(batch: Any, head: Any, query: Any, key: Any) -> Any:
    return torch.zeros_like(query + key, dtype=torch.bool)


def _window_that_grows(batch: Any, head: Any, query: Any, key: Any) -> Any:
    return (key <= query) & (query - key < torch.where(query < 200, 8, 16))


def _other_keys_at_the_end(batch: Any, head: Any, query: Any, key: Any) -> Any:
    return torch.where(query == 299, (key >= 100) & (key < 200), (key <= query) & (query - key < 100))


def _chunks_of_two_lengths(batch: Any, head: Any, query: Any, key: Any) -> Any:
    return (key <= query) & ((query >= 100) == (key >= 100)) & ((query >= 190) == (key >= 190))


def _chunks_and_the_key_before(batch: Any, head: Any, query: Any, key: Any) -> Any:
    return (key <= query) & ((query // 100 == key // 100) | (key == query // 100 * 100 - 2))


def _chunks_without_their_first_key(batch: Any, head: Any, query: Any, key: Any) -> Any:
    return (key <= query) & (query // 100 == key // 100) & ((key % 100 > 0) | (query - key < 3))


def _sinks(batch: Any, head: Any, query: Any, key: Any) -> Any:
    return (key <= query) & ((query - key < 16) | (key < 2))


@pytest.mark.parametrize(
    "rule",
    [
        pytest.param(chunked_causal_mask_function(64, torch.ones(1, dtype=torch.int64)), id="chunks behind padding"),
        pytest.param(_chunks_of_two_lengths, id="chunks of two lengths"),
        pytest.param(_chunks_and_the_key_before, id="chunks and the key before them"),
        pytest.param(_chunks_without_their_first_key, id="chunks that forget their first key"),
        pytest.param(_every_other, id="every other key"),
        pytest.param(_nothing, id="no key"),
        pytest.param(_window_that_grows, id="a window that grows"),
        pytest.param(_other_keys_at_the_end, id="other keys at the end"),
        pytest.param(_sinks, id="a window and the first keys"),
    ],
)
def test_another_causal_rule_is_refused(rule: Callable[..., Any]) -> None:
    with pytest.raises(BuildError, match="neither causal nor a causal sliding window") as error:
        find_reach(rule, 300)

    assert error.value.code == "feature-unsupported"


# --- the routed functions ----------------------------------------------------------------------------------------


LENGTHS = torch.tensor([0, 5, 12], dtype=torch.int32)
QUERY = torch.randn(1, 2, 12, 4, generator=torch.Generator().manual_seed(1))
KEY = torch.randn(1, 1, 12, 4, generator=torch.Generator().manual_seed(2))


def new_trace() -> Trace:
    return Trace(LENGTHS, torch.ones(1, 12, dtype=torch.int64), 16)


def made_mask(rule: Callable[..., Any] = causal_mask_function, **kwargs: Any) -> torch.Tensor:
    """The mask that transformers is given, in a trace."""
    mask: torch.Tensor = masking_utils.ALL_MASK_ATTENTION_FUNCTIONS[IMPLEMENTATION](
        mask_function=rule, q_length=12, **kwargs
    )
    return mask


def attention(make_mask: Callable[[], Any] = made_mask, **kwargs: Any) -> torch.Tensor:
    """What the routed attention gives for sequences of 5 and 7 tokens, with 2 heads and 1 key/value head."""
    register()
    with routed_attention(), tracing(new_trace()):
        out, weights = AttentionInterface._global_mapping[IMPLEMENTATION](
            torch.nn.Linear(1, 1), QUERY, KEY, KEY, make_mask(), **kwargs
        )
    assert weights is None
    return out


def chunks_of_3() -> Callable[..., Any]:
    return chunked_causal_mask_function(3, torch.zeros(1, dtype=torch.int64))


def test_heads_stand_behind_the_tokens() -> None:
    assert attention().shape == (1, 12, 2, 4)


RULES = [
    pytest.param(causal_mask_function, Reach(), id="full"),
    pytest.param(sliding_window_causal_mask_function(4), Reach(window=4), id="window"),
    pytest.param(chunks_of_3(), Reach(chunk=3), id="chunks"),
]


@pytest.mark.parametrize(("rule", "reach"), RULES)
def test_a_layers_rule_is_that_of_its_attention(rule: Callable[..., Any], reach: Reach) -> None:
    q, k = QUERY.transpose(1, 2), KEY.transpose(1, 2)
    expected = precast_attention(q, k, k, None, LENGTHS, scale=0.5, soft_cap=3.0, **reach._asdict())

    assert torch.equal(attention(lambda: made_mask(rule), softcap=3.0), expected)


@pytest.mark.parametrize(("rule", "reach"), RULES)
def test_the_mask_shows_each_query_keys_of_its_own_sequence(rule: Callable[..., Any], reach: Reach) -> None:
    with routed_attention(), tracing(new_trace()) as trace:
        mask = made_mask(rule, dtype=torch.float16)
    expected = torch.zeros(12, 12, dtype=torch.bool)
    for first, end in ((0, 5), (5, 12)):
        at = torch.arange(end - first)
        expected[first:end, first:end] = rule(0, 0, at[:, None], at)

    assert [(made is mask, found) for made, found in trace.masks] == [(True, reach)]
    assert (mask.dtype, mask.shape) == (torch.float16, (1, 1, 12, 12))
    assert torch.equal(mask[0, 0] == 0, expected)
    assert mask[0, 0][~expected].unique().tolist() == [torch.finfo(torch.float16).min]


@pytest.mark.parametrize(
    ("mask", "said"), [(None, "no mask"), (torch.zeros(1, 1, 12, 12), "a mask of its own")], ids=["none", "own"]
)
def test_a_mask_that_a_model_makes_itself_is_refused(mask: Any, said: str) -> None:
    with pytest.raises(BuildError, match=f"Linear passes {said} to its attention") as error:
        attention(lambda: mask)

    assert error.value.code == "feature-unsupported"


def test_an_unknown_argument_is_refused() -> None:
    with pytest.raises(BuildError, match="Linear passes attention_bias, head_mask to its attention") as error:
        attention(head_mask=torch.ones(2), attention_bias=torch.ones(2), dropout=0.0)

    assert error.value.code == "feature-unsupported"


@pytest.mark.parametrize("name", ["position_bias", "sinks"])
def test_a_bias_or_sinks_of_an_unknown_module_are_refused(name: str) -> None:
    with pytest.raises(BuildError, match=f"Linear passes {name} to its attention"):
        attention(**{name: torch.ones(1, 2, 12, 12)})


def inkling_attention(**kwargs: Any) -> torch.Tensor:
    """As `attention`, of a module whose bias and sinks are known."""
    register()
    module = type("Inkling2FullAttention", (torch.nn.Module,), {})()
    with routed_attention(), tracing(new_trace()):
        out, _ = AttentionInterface._global_mapping[IMPLEMENTATION](module, QUERY, KEY, KEY, made_mask(), **kwargs)
    return out


def test_a_bias_by_distance_is_that_of_the_op() -> None:
    bias = torch.randn(1, 2, 12, 3)
    q, k = QUERY.transpose(1, 2), KEY.transpose(1, 2)
    expected = precast_attention(q, k, k, None, LENGTHS, scale=0.3, bias=bias.transpose(1, 2))

    assert torch.equal(inkling_attention(position_bias=bias, scaling=0.3), expected)


@pytest.mark.parametrize("size", [1.0, 50.0])
def test_each_query_has_a_sink_of_its_own(size: float) -> None:
    sinks = size * torch.randn(1, 2, 12, 1)
    q, k = QUERY.transpose(1, 2), KEY.transpose(1, 2)
    # a query alone, with a sink for each of its heads
    each = [precast_attention(q, k, k, sinks[0, :, query, 0], LENGTHS, scale=0.3)[:, query] for query in range(12)]

    torch.testing.assert_close(inkling_attention(sinks=sinks, scaling=0.3), torch.stack(each, 1), atol=1e-5, rtol=1e-4)


def test_an_argument_that_is_none_says_nothing() -> None:
    assert torch.equal(attention(head_mask=None, position_ids=torch.arange(3)), attention())


def test_a_padding_mask_is_kept_to_be_looked_at() -> None:
    padding = torch.ones(1, 12)
    with routed_attention(), tracing(new_trace()) as trace:
        made_mask(attention_mask=padding)

    assert [found is padding for found in trace.paddings] == [True]


def test_blocks_of_other_input_are_kept_to_be_looked_at() -> None:
    """Text has the number -1; with none of another, the mask is that of text."""
    config = LlamaConfig(attn_implementation=IMPLEMENTATION)
    blocks = torch.tensor([[-1, -1, 0, 0, -1]])
    with routed_attention(), tracing(new_trace()) as trace:
        masking_utils.create_causal_mask(config, torch.zeros(1, 5, 4), None, None, block_sequence_ids=blocks)

    assert [found.tolist() for found in trace.paddings] == [[[True, True, False, False, True]]]
    assert [reach for _, reach in trace.masks] == [Reach()]


def test_chunks_are_found_in_a_trace_whose_tensors_have_no_numbers() -> None:
    config = LlamaConfig(attention_chunk_size=3, attn_implementation=IMPLEMENTATION)
    with routed_attention(), FakeTensorMode(allow_non_fake_inputs=True), tracing(new_trace()) as trace:
        masking_utils.create_chunked_causal_mask(config, torch.zeros(1, 12, 4), None, None)

    assert [reach for _, reach in trace.masks] == [Reach(chunk=3)]


def test_chunks_in_attention_that_is_written_out_are_refused() -> None:
    config = LlamaConfig(attn_implementation="eager")
    with (
        routed_attention(),
        tracing(new_trace()),
        pytest.raises(BuildError, match="writes out attention over chunks") as error,
    ):
        made_mask(chunks_of_3(), config=config)

    assert error.value.code == "feature-unsupported"


@pytest.mark.parametrize("count", [16, 17, 2048])
def test_a_selection_of_all_keys_is_full_attention(count: int) -> None:
    found = attention(indices=torch.zeros(1, 12, count, dtype=torch.int64))

    assert torch.equal(found, attention())


@pytest.mark.parametrize("sinks", [None, torch.tensor([0.5, -1.0])], ids=["plain", "sinks"])
def test_a_selection_of_fewer_keys_hides_the_others(sinks: torch.Tensor | None) -> None:
    """Of all visible keys it is full attention; of the first of a sequence alone, that key's value."""
    every = torch.arange(12).expand(1, 12, 12)
    first = torch.tensor([0] * 5 + [5] * 7).view(1, 12, 1)

    torch.testing.assert_close(attention(indices=every, s_aux=sinks), attention(s_aux=sinks))
    if sinks is None:
        expected = KEY[0, 0, first[0, :, 0], None].expand(12, 2, 4)
        torch.testing.assert_close(attention(indices=first)[0], expected)


@pytest.mark.parametrize(
    ("mask_function", "more", "message"),
    [
        (causal_mask_function, {"softcap": 3.0}, "gives a soft cap to attention over selected keys"),
        (sliding_window_causal_mask_function(4), {}, "gives a window to attention over selected keys"),
        (chunks_of_3(), {"softcap": 3.0}, "gives a soft cap and chunks to attention over selected keys"),
    ],
    ids=["cap", "window", "chunks"],
)
def test_a_selection_of_what_is_not_plain_is_refused(
    mask_function: Callable[..., Any], more: dict[str, Any], message: str
) -> None:
    with pytest.raises(BuildError, match=message) as error:
        attention(lambda: made_mask(mask_function), indices=torch.zeros(1, 12, 15, dtype=torch.int64), **more)

    assert error.value.code == "feature-unsupported"
    assert error.value.fix == "build with max_seq_len of at most 15"


@pytest.mark.parametrize(("limit", "is_sparse"), [(15, True), (16, False), (None, False)])
def test_a_selection_among_tokens_has_the_models_limit(limit: int | None, is_sparse: bool) -> None:
    """As many keys as there are tokens, but no more than the limit."""
    (tokens,) = (node.meta["val"].shape[0] for node in read_graph("x: input(float32, T)").graph.nodes)
    count = tokens if limit is None else torch.sym_min(tokens, limit)
    with FakeTensorMode(shape_env=tokens.node.shape_env):
        indices = torch.empty(1, tokens, count)

    if is_sparse:
        with pytest.raises(BuildError, match="expected none") as error:
            attention(indices=indices, softcap=3.0)
        assert error.value.fix == "build with max_seq_len of at most 15"
    else:
        assert attention(indices=indices).shape == (1, 12, 2, 4)


def test_a_refused_mask_that_no_layer_uses_says_nothing() -> None:
    def made_masks() -> torch.Tensor:
        made_mask(bidirectional_mask_function)
        return made_mask()

    assert torch.equal(attention(made_masks), attention())


def test_a_refused_mask_that_a_layer_uses_is_refused_there() -> None:
    with pytest.raises(BuildError, match="sees tokens that come later"):
        attention(lambda: made_mask(bidirectional_mask_function))


def test_a_refused_mask_is_no_mask_that_could_be_matched() -> None:
    """Written-out attention with it stays in the graph: a window of -1 is none that an op takes."""
    with routed_attention(), tracing(new_trace()) as trace:
        mask = made_mask(bidirectional_mask_function)

    ((kept, error),) = trace.masks
    assert kept is mask
    assert isinstance(error, BuildError)
    assert bool((mask[0, 0] == torch.finfo(torch.float32).min).all())


def test_there_is_no_trace_outside_of_one() -> None:
    with pytest.raises(LookupError):
        current_trace()


def test_transformers_is_left_as_it_was() -> None:
    before = masking_utils.find_packed_sequence_indices
    chunked, blocks = masking_utils.chunked_causal_mask_function, masking_utils.blockwise_overlay

    def fail() -> None:
        with routed_attention():
            assert masking_utils.find_packed_sequence_indices is not before
            assert masking_utils.chunked_causal_mask_function is not chunked
            assert masking_utils.blockwise_overlay is not blocks
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()

    assert masking_utils.find_packed_sequence_indices is before
    assert masking_utils.chunked_causal_mask_function is chunked
    assert masking_utils.blockwise_overlay is blocks
