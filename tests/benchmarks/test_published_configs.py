"""The results of `benchmarks/bench_published_configs.py`: published configs, each with what it must come to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import bench_published_configs
import pytest

ROOT = Path(__file__).resolve().parents[2]
EXPECTED: dict[str, dict[str, Any]] = json.loads((ROOT / "tests" / "configs" / "expected.json").read_text("utf-8"))
FIGURES: dict[str, Any] = json.loads(bench_published_configs.RESULTS.read_text("utf-8"))["figures"]
BUILDS: dict[str, dict[str, Any]] = FIGURES["builds"]


@pytest.mark.parametrize("name", sorted(BUILDS))
def test_the_whole_build_came_to_what_it_must(name: str) -> None:
    expected = EXPECTED[name]

    assert BUILDS[name]["outcome"] == expected.get("full_build", expected["outcome"])
    assert BUILDS[name]["as_expected"] is True


def test_counts_are_those_of_the_builds() -> None:
    assert FIGURES["configs"] == len(BUILDS)
    assert FIGURES["built"] == sum(each["outcome"] == "builds" for each in BUILDS.values())
    assert FIGURES["not_measured"] == sorted(EXPECTED.keys() - BUILDS.keys())
    assert FIGURES["not_as_expected"] == []


def test_whatever_is_refused_says_what_to_do() -> None:
    refused = {name: each for name, each in BUILDS.items() if each["outcome"] != "builds"}

    assert [name for name, each in refused.items() if not each["fix"]] == []
    assert FIGURES["refused_with_a_fix"] == len(refused)


def test_results_that_are_no_longer_expected_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {"same": {"outcome": "builds"}, "other": {"outcome": "remote-code"}, "gone": {"outcome": "builds"}}
    (tmp_path / "results.json").write_text(json.dumps({"figures": {"builds": rows}}), encoding="utf-8")
    monkeypatch.setattr(bench_published_configs, "RESULTS", tmp_path / "results.json")

    found = bench_published_configs._former({"same": {"outcome": "builds"}, "other": {"outcome": "builds"}})

    assert list(found) == ["same"]
