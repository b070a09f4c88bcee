"""docs/models.md keeps its word: each model type that it calls green is covered again, and is green.

The sweep is these tests: with a worker for each core they run side by side. Types that have variants of their own in
`families.py` are compared in `test_families.py`, and not here again.
"""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import families
import pytest
from model_sweep import COMPLETIONS, cover, is_causal, model_types, resolve, sweep
from models_page import green_types, page
from transformers import AutoConfig

from precast.builder.source.shrink import random_model, shrink

WITH_VARIANTS = {model_type for model_type, _ in families.VARIANTS.values()}
PAGE = (Path(__file__).parents[2] / "docs" / "models.md").read_text(encoding="utf-8")


@pytest.mark.filterwarnings("ignore")  # of 189 models' own code
@pytest.mark.parametrize("model_type", sorted(set(green_types(PAGE)) - WITH_VARIANTS))
def test_green_stays_green(model_type: str) -> None:
    row = cover(model_type)

    assert row.status == "green", row.reason
    assert (row.builds, row.logits, row.tokens) == (True, True, True)


def test_types_with_variants_are_green() -> None:
    assert set(green_types(PAGE)) >= WITH_VARIANTS


@pytest.mark.parametrize("model_type", model_types())
def test_every_type_has_a_row(model_type: str) -> None:
    assert f"| `{model_type}` |" in PAGE


def test_completions_are_of_known_types() -> None:
    assert set(COMPLETIONS) <= set(model_types())


def test_sweep_gives_rows_in_the_order_given_and_the_page_sorts_them() -> None:
    rows = sweep(("bert", "bart"), workers=2)

    assert [(row.model_type, row.status) for row in rows] == [("bert", "out of scope"), ("bart", "out of scope")]
    assert page(rows) == page(rows[::-1])
    assert green_types(page(rows)) == ()


def test_type_whose_process_dies_is_red(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("model_sweep.cover", lambda model_type: os._exit(3))

    (row,) = sweep(("llama",))

    assert (row.status, row.reason) == ("red", "the process ended with code 3")


def test_type_that_takes_too_long_is_red(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("model_sweep.cover", lambda model_type: signal.pause())
    monkeypatch.setattr("model_sweep.SECONDS", 0.1)

    (row,) = sweep(("llama",))

    assert row.status == "red"
    assert row.reason.startswith("took more than")


def test_error_of_a_models_code_is_the_rows_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(model_type: str) -> None:
        raise IndexError("no such layer")

    monkeypatch.setattr("model_sweep.cover", fail)

    (row,) = sweep(("llama",))

    assert (row.status, row.reason) == ("red", "IndexError: no such layer")


@pytest.mark.parametrize(("model_type", "expected"), [("qwen3", True), ("bert", False)])
def test_encoders_are_not_causal(model_type: str, expected: bool) -> None:
    assert is_causal(random_model(shrink(AutoConfig.for_model(model_type)))) == expected


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("model_type", "expected"),
    [
        ("llama", "yes"), ("granitemoe", "yes"), ("deepseek_v3", "yes"), ("falcon_h1", "yes"), ("mamba", "yes"),
        ("qwen3_next", "yes"), ("glm", "yes"), ("mpt", "yes"), ("codegen", "yes"),
        ("gptj", "aten.gather.default of float32"),
    ],
)  # fmt: skip
def test_a_type_of_each_kind_is_served_without_torch_as_the_page_says(model_type: str, expected: str) -> None:
    assert resolve(model_type).without_torch == expected
    assert re.search(rf"^\| `{model_type}` .*\| {re.escape(expected)} \|  \|$", PAGE, re.MULTILINE)
