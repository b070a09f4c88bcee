"""The comparison itself: it takes what transformers gives, and nothing else."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import families
import pytest
import torch
from reference import hf_greedy

import precast
from precast.check.agreement import (
    PROMPTS,
    agreement,
    hf_logits,
    is_greedy,
    relative_error,
    run_packed,
)
from precast.ir.artifact import Bundle


@pytest.fixture(scope="module")
def model() -> Any:
    return families.make_model("qwen3")


@pytest.fixture(scope="module")
def checkpoint(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("agreement") / "checkpoint"
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def bundle(checkpoint: Path) -> Bundle:
    return precast.build(checkpoint, checkpoint.parent / "bundle", dtype="float32")


def test_bundle_agrees_with_its_model(bundle: Bundle, checkpoint: Path, model: Any) -> None:
    found = agreement(bundle, checkpoint, model)

    assert found.logits_equal
    assert found.tokens_equal


def test_bundle_does_not_agree_with_another_model(bundle: Bundle, checkpoint: Path) -> None:
    found = agreement(bundle, checkpoint, families.make_model("qwen3", seed=1))

    assert found.logits_error > 0.1
    assert not found.tokens_equal


def test_packed_logits_are_those_of_each_prompt(bundle: Bundle, checkpoint: Path, model: Any) -> None:
    for found, expected in zip(run_packed(bundle, checkpoint, PROMPTS), hf_logits(model, PROMPTS), strict=True):
        assert relative_error(found, expected) < 1e-4


def test_greedy_tokens_are_known_without_generating(model: Any) -> None:
    answer = hf_greedy(model, PROMPTS[0], 6)
    other = [*answer[:-1], answer[-1] + 1]

    assert is_greedy(model, PROMPTS[0], answer)
    assert not is_greedy(model, PROMPTS[0], other)
    assert not is_greedy(model, PROMPTS[0], [])


def test_what_is_not_finite_never_agrees() -> None:
    assert relative_error(torch.tensor([1.0, math.nan]), torch.tensor([1.0, 2.0])) == math.inf
    assert relative_error(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0])) == 0.0
