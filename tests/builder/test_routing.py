"""Attention that is routed to our op: which keys a mask lets a query see, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import AttentionInterface, masking_utils
from transformers.masking_utils import (
    bidirectional_mask_function,
    causal_mask_function,
    chunked_causal_mask_function,
    sliding_window_causal_mask_function,
)  # fmt: skip

from precast.builder.routing import (
    IMPLEMENTATION,
    CausalMask,
    Trace,
    current_trace,
    find_window,
    routed_attention,
    tracing,
)  # fmt: skip
from precast.ir.errors import BuildError
from precast.kernels.registry import register

# --- masks -------------------------------------------------------------------------------------------------------


def test_full_attention_has_no_window() -> None:
    assert find_window(causal_mask_function, 300) is None


@pytest.mark.parametrize("window", [1, 2, 63, 64, 65, 299])
def test_a_sliding_window_is_found(window: int) -> None:
    assert find_window(sliding_window_causal_mask_function(window), 300) == window


@pytest.mark.parametrize("window", [300, 301, 4096])
def test_a_window_as_long_as_the_longest_sequence_is_full_attention(window: int) -> None:
    assert find_window(sliding_window_causal_mask_function(window), 300) is None


def test_one_position() -> None:
    assert find_window(causal_mask_function, 1) is None


def _window_of_both_sides(batch: Any, head: Any, query: Any, key: Any) -> Any:
    return (query - key).abs() < 8


def _prefix(batch: Any, head: Any, query: Any, key: Any) -> Any:
    return (key <= query) | (key < 4)


@pytest.mark.parametrize("rule", [bidirectional_mask_function, _window_of_both_sides, _prefix])
def test_a_rule_that_sees_later_keys_is_refused(rule: Callable[..., Any]) -> None:
    with pytest.raises(BuildError, match="sees tokens that come later, expected a decoder") as error:
        find_window(rule, 300)

    assert error.value.code == "model-unsupported"


def _every_other(batch: Any, head: Any, query: Any, key: Any) -> Any:
    return (key <= query) & ((query - key) % 2 == 0)


def _nothing(batch: Any, head: Any, query: Any, key: Any) -> Any:
    return torch.zeros_like(query + key, dtype=torch.bool)


def _window_that_grows(batch: Any, head: Any, query: Any, key: Any) -> Any:
    return (key <= query) & (query - key < torch.where(query < 200, 8, 16))


def _other_keys_at_the_end(batch: Any, head: Any, query: Any, key: Any) -> Any:
    return torch.where(query == 299, (key >= 100) & (key < 200), (key <= query) & (query - key < 100))


def _sinks(batch: Any, head: Any, query: Any, key: Any) -> Any:
    return (key <= query) & ((query - key < 16) | (key < 2))


@pytest.mark.parametrize(
    "rule",
    [
        pytest.param(chunked_causal_mask_function(64, torch.zeros(1)), id="chunks"),
        pytest.param(chunked_causal_mask_function(100, torch.zeros(1)), id="chunks that fill the limit"),
        pytest.param(chunked_causal_mask_function(290, torch.zeros(1)), id="a chunk and a bit"),
        pytest.param(_every_other, id="every other key"),
        pytest.param(_nothing, id="no key"),
        pytest.param(_window_that_grows, id="a window that grows"),
        pytest.param(_other_keys_at_the_end, id="other keys at the end"),
        pytest.param(_sinks, id="a window and the first keys"),
    ],
)
def test_another_causal_rule_is_refused(rule: Callable[..., Any]) -> None:
    with pytest.raises(BuildError, match="neither causal nor a causal sliding window") as error:
        find_window(rule, 300)

    assert error.value.code == "feature-unsupported"


# --- the routed functions ----------------------------------------------------------------------------------------


def attention(mask: Any, **kwargs: Any) -> torch.Tensor:
    """What the routed attention gives for 3 tokens, 2 heads and 1 key/value head."""
    register()
    query, key = torch.ones(1, 2, 3, 4), torch.ones(1, 1, 3, 4)
    lengths = torch.tensor([0, 3], dtype=torch.int32)
    with routed_attention(), tracing(Trace(lengths, torch.ones(1, 3, dtype=torch.int64), 16)):
        out, weights = AttentionInterface._global_mapping[IMPLEMENTATION](
            torch.nn.Linear(1, 1), query, key, key, mask, **kwargs
        )
    assert weights is None
    return out


def test_heads_stand_behind_the_tokens() -> None:
    assert attention(CausalMask(None)).shape == (1, 3, 2, 4)


@pytest.mark.parametrize("mask", [None, torch.ones(1, 1, 3, 3)])
def test_a_mask_that_a_model_makes_itself_is_refused(mask: Any) -> None:
    with pytest.raises(BuildError, match=rf"Linear passes a mask of type {type(mask).__name__}") as error:
        attention(mask)

    assert error.value.code == "feature-unsupported"


def test_an_unknown_argument_is_refused() -> None:
    with pytest.raises(BuildError, match="Linear passes attention_bias, head_mask to its attention") as error:
        attention(CausalMask(None), head_mask=torch.ones(2), attention_bias=torch.ones(2), dropout=0.0)

    assert error.value.code == "feature-unsupported"


def test_an_argument_that_is_none_says_nothing() -> None:
    assert attention(CausalMask(None), head_mask=None, position_ids=torch.arange(3)).shape == (1, 3, 2, 4)


def test_a_padding_mask_is_refused() -> None:
    with routed_attention(), pytest.raises(BuildError, match="a padding mask") as error:
        masking_utils.ALL_MASK_ATTENTION_FUNCTIONS[IMPLEMENTATION](
            mask_function=causal_mask_function, attention_mask=torch.ones(1, 3)
        )

    assert error.value.code == "feature-unsupported"


def test_there_is_no_trace_outside_of_one() -> None:
    with pytest.raises(LookupError):
        current_trace()


def test_transformers_is_left_as_it_was() -> None:
    before = masking_utils.find_packed_sequence_indices

    def fail() -> None:
        with routed_attention():
            assert masking_utils.find_packed_sequence_indices is not before
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()

    assert masking_utils.find_packed_sequence_indices is before
