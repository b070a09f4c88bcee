"""Experts of a feed-forward layer: the formula by hand, transformers' own modules, and rows that are no expert's."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from transformers import GptOssConfig, MixtralConfig, NemotronHConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts

from precast.kernels.experts import experts as reference
from precast.kernels.experts import grouped
from precast.kernels.experts import grouped_linear as linear_reference

EXPERTS = [reference.experts, grouped.experts]
LINEARS = [linear_reference.grouped_linear, grouped.grouped_linear]
each_experts = pytest.mark.parametrize("experts", EXPERTS, ids=["reference", "grouped"])
each_linear = pytest.mark.parametrize("linear", LINEARS, ids=["reference", "grouped"])

IDS = torch.tensor([[0, 3], [3, 1], [1, 0], [0, 1], [3, 0]])  # nobody goes to expert 2
WEIGHTS = torch.tensor([[0.5, 0.25], [1.0, 0.0], [0.3, 0.7], [2.0, -1.0], [0.1, 0.2]])


def randomised(module: Any) -> Any:
    """The module with random params, its experts dispatched to its own loop."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.4)
    module.config._experts_implementation = "eager"
    return module


# --- by hand -----------------------------------------------------------------------------------------------------


@each_linear
def test_each_row_meets_the_weight_of_its_expert(linear: Any) -> None:
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    weight = torch.tensor([[[1.0, 0.0]], [[0.0, 10.0]]])
    bias = torch.tensor([[0.5], [-1.0]])

    assert linear(x, weight, bias, torch.tensor([1, 0, 1])).tolist() == [[19.0], [3.5], [59.0]]


@each_linear
def test_a_row_of_no_expert_gives_zeros(linear: Any) -> None:
    x = torch.full((3, 2), float("nan"))
    x[1] = 1.0
    found = linear(x, torch.ones(2, 4, 2), torch.ones(2, 4), torch.tensor([-1, 1, 2]))

    assert found.tolist() == [[0.0] * 4, [3.0] * 4, [0.0] * 4]


@each_experts
def test_the_weighted_sum_of_two_experts(experts: Any) -> None:
    up = torch.tensor([[[1.0], [2.0]], [[2.0], [1.0]]])  # gate and value of each expert
    down = torch.tensor([[[1.0]], [[10.0]]])
    found = experts(
        torch.tensor([[3.0]]), torch.tensor([[1, 0]]), torch.tensor([[0.5, 2.0]]), up, down, None, None,
        activation="relu", gated=True,
    )  # fmt: skip

    assert found.tolist() == [[0.5 * 10 * (6 * 3) + 2 * (3 * 6)]]


@each_experts
def test_clamps_alpha_and_offset(experts: Any) -> None:
    up = torch.tensor([[[8.0], [-9.0]]])
    found = experts(
        torch.ones(1, 1), torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1), up, torch.ones(1, 1, 1), None, None,
        activation="silu", gated=True, alpha=0.5, limit=2.0, offset=1.0,
    )  # fmt: skip

    assert found.item() == pytest.approx((-2 + 1) * 2 / (1 + math.exp(-0.5 * 2)))


@each_experts
def test_an_id_of_no_expert_adds_nothing(experts: Any) -> None:
    found = experts(
        torch.ones(2, 1), torch.tensor([[0, 1], [-1, 7]]), torch.tensor([[2.0, float("nan")], [float("nan"), 1.0]]),
        torch.ones(1, 1, 1), torch.ones(1, 1, 1), None, torch.ones(1, 1), activation="relu", gated=False,
    )  # fmt: skip

    assert found.tolist() == [[4.0], [0.0]]


@each_experts
def test_experts_that_nobody_goes_to_are_not_read(experts: Any) -> None:
    up, down = torch.randn(4, 6, 5), torch.randn(4, 5, 3)
    up[2], down[2] = float("nan"), float("nan")

    found = experts(torch.randn(5, 5), IDS, WEIGHTS, up, down, None, None, activation="silu", gated=True)

    assert bool(torch.isfinite(found).all())


@pytest.mark.parametrize("gated", [True, False])
def test_an_unknown_activation_is_refused(gated: bool) -> None:
    with pytest.raises(ValueError, match=r"activation: expected one of silu, gelu, .* found 'swish'"):
        reference.activate(torch.ones(1, 2), reference.Between("swish", gated))


# --- transformers ------------------------------------------------------------------------------------------------


@each_experts
def test_mixtral(experts: Any) -> None:
    module = randomised(MixtralExperts(MixtralConfig(hidden_size=12, intermediate_size=7, num_local_experts=4)))
    x = torch.randn(5, 12)

    found = experts(x, IDS, WEIGHTS, module.gate_up_proj, module.down_proj, None, None, activation="silu", gated=True)

    torch.testing.assert_close(found, module(x, IDS, WEIGHTS), rtol=1e-5, atol=1e-5)


@each_experts
def test_gpt_oss_in_our_layout(experts: Any) -> None:
    module = randomised(GptOssExperts(GptOssConfig(hidden_size=12, intermediate_size=7, num_local_experts=4)))
    x = torch.randn(5, 12) * 4
    up, up_bias = module.gate_up_proj.transpose(1, 2), module.gate_up_proj_bias

    found = experts(
        x, IDS, WEIGHTS, torch.cat([up[:, ::2], up[:, 1::2]], dim=1), module.down_proj.transpose(1, 2),
        torch.cat([up_bias[:, ::2], up_bias[:, 1::2]], dim=1), module.down_proj_bias,
        activation="silu", gated=True, alpha=module.alpha, limit=module.limit, offset=1.0,
    )  # fmt: skip

    torch.testing.assert_close(found, module(x, IDS, WEIGHTS), rtol=1e-5, atol=1e-5)


@each_experts
def test_nemotron_h_has_no_gate(experts: Any) -> None:
    config = NemotronHConfig(hidden_size=12, moe_intermediate_size=7, n_routed_experts=4)
    module = randomised(NemotronHExperts(config))
    x = torch.randn(5, 12)

    found = experts(x, IDS, WEIGHTS, module.up_proj, module.down_proj, None, None, activation="relu2", gated=False)

    torch.testing.assert_close(found, module(x, IDS, WEIGHTS), rtol=1e-5, atol=1e-5)
