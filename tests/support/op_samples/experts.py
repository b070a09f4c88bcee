"""Samples of routers, experts and their products."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from op_samples.draw import Draw, Sample
from precast.ir.ops.rows_experts import CHOICES, EXPERT_ACTIVATIONS, GROUP_SCORES, SCORINGS


def _sample(draw: Draw, tokens: int, top_k: int, *, gated: bool, bias: bool = False, size: int = 9) -> Sample:
    num, inner = 5, 6 if size == 9 else 24
    rows = inner * (2 if gated else 1)
    return {
        "x": draw.normal(tokens, size),
        "expert_ids": draw.integers(0, num, tokens, top_k),
        "expert_weights": draw.uniform(tokens, top_k),
        "up": draw.normal(num, rows, size, scale=0.2),
        "down": draw.normal(num, size, inner, scale=0.2),
        "up_bias": draw.normal(num, rows) if bias else None,
        "down_bias": draw.normal(num, size) if bias else None,
        "gated": gated,
    }


def experts(draw: Draw) -> Iterator[Sample]:
    for kind in EXPERT_ACTIVATIONS:
        yield {**_sample(draw, 11, 3, gated=True), "activation": kind}
        yield {**_sample(draw, 3, 2, gated=False, bias=True), "activation": kind}
    clamped = {"activation": "silu", "alpha": 1.702, "limit": 0.7, "offset": 1.0}
    yield {**_sample(draw, 17, 2, gated=True, bias=True, size=16), **clamped}
    sample = {**_sample(draw, 20, 4, gated=True, size=16), "activation": "silu"}
    yield {**sample, "expert_weights": draw.uniform(20, 4, dtype=torch.float32)}
    yield {**sample, "expert_ids": draw.integers(-1, 7, 20, 4)}  # some are no expert's
    yield {**sample, "x": draw.normal(40, 16)[::2], "up": draw.normal(5, 16, 48, scale=0.2).transpose(1, 2)}
    for tokens in (1, 0):
        yield {**_sample(draw, tokens, 1, gated=True), "activation": "gelu"}


def grouped_linear(draw: Draw) -> Iterator[Sample]:
    weight, bias = draw.normal(5, 7, 9, scale=0.3), draw.normal(5, 7)
    for count in (13, 1, 0):
        yield {
            "x": draw.normal(count, 9), "weight": weight, "bias": bias if count == 13 else None,
            "expert_ids": draw.integers(0, 5, count),
        }  # fmt: skip
    # sizes that a grouped product of whole vectors takes, and ids that are no expert's
    yield {
        "x": draw.normal(40, 32), "weight": draw.normal(3, 48, 32, scale=0.2), "bias": draw.normal(3, 48),
        "expert_ids": draw.integers(-1, 5, 40),
    }  # fmt: skip
    yield {
        "x": draw.normal(12, 32)[::2], "weight": draw.normal(4, 32, 16, scale=0.2).transpose(1, 2), "bias": None,
        "expert_ids": draw.integers(1, 3, 12)[::2],
    }  # fmt: skip


def route(draw: Draw) -> Iterator[Sample]:
    for scoring in SCORINGS:
        for choice in CHOICES:
            yield {
                "logits": draw.normal(5, 7, scale=2.0), "bias": None, "scoring": scoring, "top_k": 3, "choice": choice,
                "normalise": choice == "scores", "dtype": draw.dtype,
            }  # fmt: skip
    for group_score in GROUP_SCORES:
        yield {
            "logits": draw.normal(9, 15), "bias": draw.normal(15, dtype=torch.float32), "scoring": "sigmoid",
            "top_k": 4, "num_groups": 5, "top_groups": 2, "group_score": group_score, "normalise": True,
            "epsilon": 1e-20, "scale": 2.5, "dtype": torch.float32,
        }  # fmt: skip
    plain = {"scoring": "sigmoid", "normalise": True, "dtype": draw.dtype}
    # scores that vanish: the floor keeps their quotients finite
    yield {"logits": draw.normal(3, 4, scale=0.1) - 90, "bias": None, "top_k": 2, "floor": 1e-12, **plain}
    yield {"logits": draw.to(torch.zeros(3, 8), draw.dtype), "bias": None, "top_k": 5, **plain}
    yield {"logits": draw.normal(6, 4)[::2, 1:], "bias": draw.normal(6, scale=3.0)[::2], "top_k": 3, **plain}
    yield {"logits": draw.normal(1, 1), "bias": None, "top_k": 1, **plain}
    yield {"logits": draw.normal(0, 4), "bias": None, "top_k": 2, **plain}


SAMPLES = {
    ("precast.experts", 1): experts,
    ("precast.grouped_linear", 1): grouped_linear,
    ("precast.route", 1): route,
}
