"""route@1: which experts each token goes to, and how much each of them counts.

    s[t, e] = score(logits[t, e])                        softmax over e, sigmoid, or sqrt(softplus)
    ids[t]  = the top_k experts by s[t, e] + bias[e]     bias decides the choice and nothing else
    w[t, j] = s[t, ids[t, j]]
    w[t, j] = w[t, j] / max(sum_j w[t, j] + epsilon, floor)    if `normalise`
    weights = w * scale

With `choice="logits"` the experts are chosen by `logits + bias`, and the scores are those of the chosen ones: a softmax
goes over them alone. With groups, only experts of the `top_groups` best groups are chosen; a group's score is the sum
of its two best experts (`top2`) or its best one (`max`), bias included. Experts stand in order of choice, and of equal
ones the first is the better. Computed in float32 (float64 for float64 logits), rounded once to `dtype`.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from precast.ir.ops.rows_experts import CHOICES, GROUP_SCORES, SCORINGS
from precast.kernels.dtypes import FLOAT, widened
from precast.kernels.spec import ELEMENTWISE, OpSpec


def route(
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    scoring: str,
    top_k: int,
    choice: str = "scores",
    num_groups: int = 1,
    top_groups: int = 1,
    group_score: str = "top2",
    normalise: bool,
    epsilon: float = 0.0,
    floor: float = 0.0,
    scale: float = 1.0,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The experts of `logits` [T, E]: weights [T, top_k] of `dtype` and ids [T, top_k] int64; `bias` [E].

    Raises ValueError for a scoring, choice or group score that the module's docstring doesn't name.
    """
    for name, value, allowed in (
        ("scoring", scoring, SCORINGS), ("choice", choice, CHOICES), ("group_score", group_score, GROUP_SCORES),
    ):  # fmt: skip
        if value not in allowed:
            raise ValueError(f"{name}: expected one of {', '.join(allowed)}, found {value!r}")
    by_scores = choice == "scores"
    values = _score(widened(logits), scoring) if by_scores else widened(logits)
    ranked = values if bias is None else values + bias
    if num_groups > 1:
        ranked = _within_groups(ranked, num_groups, top_groups, group_score)
    ids = _best(ranked, top_k)
    weights = values.gather(1, ids)
    if not by_scores:
        weights = _score(weights, scoring)
    if normalise:
        weights = weights / (weights.sum(dim=1, keepdim=True) + epsilon).clamp(min=floor)
    return (weights * scale).to(dtype).contiguous(), ids.contiguous()


def _score(logits: torch.Tensor, scoring: str) -> torch.Tensor:
    if scoring == "softmax":
        return logits.softmax(dim=1)
    return logits.sigmoid() if scoring == "sigmoid" else functional.softplus(logits).sqrt()


def _best(values: torch.Tensor, count: int) -> torch.Tensor:
    """The indices of the largest values of each row, largest first. `topk` leaves open which of equal ones it takes."""
    return values.sort(dim=1, descending=True, stable=True).indices[:, :count]


def _within_groups(ranked: torch.Tensor, num_groups: int, top_groups: int, group_score: str) -> torch.Tensor:
    """`ranked` [T, E] with minus infinity outside of each row's best groups."""
    grouped = ranked.reshape(ranked.shape[0], num_groups, ranked.shape[1] // num_groups)
    scores = grouped.topk(2, dim=2).values.sum(dim=2) if group_score == "top2" else grouped.amax(dim=2)
    kept = torch.zeros_like(scores, dtype=torch.bool).scatter(1, _best(scores, top_groups), True)
    return grouped.masked_fill(~kept[:, :, None], float("-inf")).reshape(ranked.shape)


ROUTE = OpSpec(
    name="precast.route",
    axes={"logits": "T E", "bias": "E"},
    results={"weights": "T K", "ids": "T K"},
    dtypes={"logits": FLOAT, "bias": FLOAT},
    reference=route,
    tolerances=ELEMENTWISE,
)
