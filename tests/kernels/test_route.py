"""The choice of experts: by hand, against transformers' routers, and where scores are equal or vanish."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DeepseekV2Config, DeepseekV3Config, GptOssConfig, MixtralConfig, Qwen3MoeConfig
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from precast.kernels.route.route import route

SIGMOID: dict[str, Any] = {"scoring": "sigmoid", "normalise": False, "dtype": torch.float32}


def logits_of(*scores: float) -> torch.Tensor:
    """One row of logits with these sigmoids."""
    return torch.logit(torch.tensor([scores], dtype=torch.float64)).float()


# --- by hand -----------------------------------------------------------------------------------------------------


def test_the_best_experts_in_order() -> None:
    weights, ids = route(logits_of(0.2, 0.9, 0.5, 0.4), None, top_k=3, **SIGMOID)

    assert ids.tolist() == [[1, 2, 3]]
    torch.testing.assert_close(weights, torch.tensor([[0.9, 0.5, 0.4]]))


def test_the_bias_decides_the_choice_and_nothing_else() -> None:
    bias = torch.tensor([0.75, 0.0, 0.0, 0.0])

    weights, ids = route(logits_of(0.2, 0.9, 0.5, 0.4), bias, top_k=2, **SIGMOID)

    assert ids.tolist() == [[0, 1]]
    torch.testing.assert_close(weights, torch.tensor([[0.2, 0.9]]))


def test_weights_are_normalised_then_scaled() -> None:
    weights, _ = route(logits_of(0.6, 0.2, 0.1), None, top_k=2, scale=3.0, **{**SIGMOID, "normalise": True})

    torch.testing.assert_close(weights, torch.tensor([[2.25, 0.75]]))


def test_a_softmax_over_all_or_over_the_chosen() -> None:
    logits = torch.tensor([[0.1, 0.6, 0.3]]).log()
    plain: dict[str, Any] = {"scoring": "softmax", "top_k": 2, "normalise": False, "dtype": torch.float32}

    over_all, _ = route(logits, None, **plain)
    over_chosen, _ = route(logits, None, choice="logits", **plain)

    torch.testing.assert_close(over_all, torch.tensor([[0.6, 0.3]]))
    torch.testing.assert_close(over_chosen, torch.tensor([[2 / 3, 1 / 3]]))


@pytest.mark.parametrize(("group_score", "expected"), [("top2", [[2, 3]]), ("max", [[1, 0]])])
def test_only_the_best_group_is_chosen_from(group_score: str, expected: list[list[int]]) -> None:
    logits = logits_of(0.1, 0.8, 0.7, 0.6)

    _, ids = route(logits, None, top_k=2, num_groups=2, top_groups=1, group_score=group_score, **SIGMOID)

    assert ids.tolist() == expected


def test_of_equal_scores_the_first_is_taken() -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 1.0, 2.0, 1.0]])

    assert route(logits, None, top_k=5, **SIGMOID)[1].tolist() == [[1, 2, 4, 0, 3]]


def test_scores_that_are_equal_differ_as_logits() -> None:
    logits = torch.tensor([[40.0, 50.0, 60.0]])  # the sigmoid of each is 1

    assert route(logits, None, top_k=1, **SIGMOID)[1].item() == 0
    assert route(logits, None, top_k=1, choice="logits", **SIGMOID)[1].item() == 2


@pytest.mark.parametrize("bound", ["epsilon", "floor"])
def test_scores_that_vanish_stay_finite(bound: str) -> None:
    given = {**SIGMOID, "normalise": True, bound: 1e-12}

    weights, _ = route(torch.full((1, 3), -200.0), None, top_k=2, **given)

    assert weights.tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize(
    "wrong",
    [{"scoring": "tanh"}, {"choice": "ids"}, {"group_score": "mean"}],
)
def test_an_unknown_kind_is_refused(wrong: dict[str, str]) -> None:
    ((name, value),) = wrong.items()
    with pytest.raises(ValueError, match=f"{name}: expected one of .*, found '{value}'"):
        route(torch.zeros(1, 4), None, top_k=1, **{**SIGMOID, **wrong})


# --- transformers ------------------------------------------------------------------------------------------------


def compare(router: Any, given: dict[str, Any], bias: torch.Tensor | None = None) -> None:
    """The router's weights and experts are those of `route` for its own logits; their order is left open."""
    with torch.no_grad():
        router.weight.normal_()
        logits, expected, expected_ids = router(torch.randn(50, router.weight.shape[1]))
    weights, ids = route(logits, bias, dtype=torch.float32, **given)

    def spread(ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return torch.full(logits.shape, -1.0).scatter(1, ids, weights)

    torch.testing.assert_close(spread(ids, weights), spread(expected_ids, expected), rtol=1e-5, atol=1e-6)


def test_mixtral() -> None:
    router = MixtralTopKRouter(MixtralConfig(hidden_size=9, num_local_experts=7, num_experts_per_tok=3))

    compare(router, {"scoring": "softmax", "top_k": 3, "normalise": True})


@pytest.mark.parametrize("normalise", [True, False])
def test_qwen3_moe(normalise: bool) -> None:
    config = Qwen3MoeConfig(hidden_size=9, num_experts=7, num_experts_per_tok=3, norm_topk_prob=normalise)

    compare(Qwen3MoeTopKRouter(config), {"scoring": "softmax", "top_k": 3, "normalise": normalise})


def test_gpt_oss() -> None:
    router = GptOssTopKRouter(GptOssConfig(hidden_size=9, num_local_experts=7, num_experts_per_tok=3))

    compare(router, {"scoring": "softmax", "top_k": 3, "choice": "logits", "normalise": False})


GROUPS = {"n_routed_experts": 12, "num_experts_per_tok": 5, "n_group": 4, "topk_group": 2, "hidden_size": 9}


def test_deepseek_v3() -> None:
    router = DeepseekV3TopkRouter(DeepseekV3Config(**GROUPS, routed_scaling_factor=2.5, norm_topk_prob=True))
    router.e_score_correction_bias.normal_()
    given = {"scoring": "sigmoid", "top_k": 5, "num_groups": 4, "top_groups": 2, "normalise": True, "scale": 2.5}

    compare(router, {**given, "epsilon": 1e-20}, router.e_score_correction_bias)


def test_deepseek_v2() -> None:
    method = {"topk_method": "group_limited_greedy", "routed_scaling_factor": 4.0}
    config = DeepseekV2Config(**GROUPS, **method, num_attention_heads=3)
    given = {"scoring": "softmax", "top_k": 5, "num_groups": 4, "top_groups": 2, "normalise": False, "scale": 4.0}

    compare(DeepseekV2TopkRouter(config), {**given, "group_score": "max"})
