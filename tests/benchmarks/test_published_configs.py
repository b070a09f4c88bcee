"""The results of `benchmarks/bench_published_configs.py`: all published configs, each with what it must come to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import bench_published_configs
import pytest

ROOT = Path(__file__).resolve().parents[2]
EXPECTED: dict[str, dict[str, Any]] = json.loads((ROOT / "tests" / "configs" / "expected.json").read_text("utf-8"))
FIGURES: dict[str, Any] = json.loads(bench_published_configs.RESULTS.read_text("utf-8"))["figures"]


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_the_whole_build_came_to_what_it_must(name: str) -> None:
    found, expected = FIGURES["builds"][name], EXPECTED[name]

    assert found["outcome"] == expected.get("full_build", expected["outcome"])
    assert found["as_expected"] is True


def test_counts_are_those_of_the_builds() -> None:
    builds = FIGURES["builds"]

    assert builds.keys() == EXPECTED.keys()
    assert FIGURES["configs"] == len(builds)
    assert FIGURES["built"] == sum(each["outcome"] == "builds" for each in builds.values())
    assert FIGURES["not_as_expected"] == []


def test_whatever_is_refused_says_what_to_do() -> None:
    refused = {name: each for name, each in FIGURES["builds"].items() if each["outcome"] != "builds"}

    assert [name for name, each in refused.items() if not each["fix"]] == []
    assert FIGURES["refused_with_a_fix"] == len(refused)
