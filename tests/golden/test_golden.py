"""Bundles of every format version that was ever released still open, and still say the same.

The folders beside this file are frozen: a bundle in them is never made anew. What changes a reader so that it can't
read one of them needs an upgrade function (`docs/versioning.md`), not a new bundle.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import precast
from precast.ir.artifact import Bundle
from precast.ir.graph.text import format_graph

HERE = Path(__file__).parent
VERSIONS = sorted(path.name for path in HERE.glob("v*"))
CHECKPOINT = HERE.parents[1] / "examples" / "recite" / "model"


def test_there_are_golden_bundles() -> None:
    assert "v1.0" in VERSIONS


@pytest.mark.parametrize("version", VERSIONS)
def test_it_opens_and_says_what_it_said(version: str) -> None:
    expected = json.loads((HERE / version / "expected.json").read_text())
    bundle = Bundle.open(HERE / version / "recite.bundle")

    assert ".".join(map(str, bundle.manifest.format)) == version.removeprefix("v")
    assert bundle.digest == expected["digest"]
    assert format_graph(bundle.graph) == (HERE / version / "graph.txt").read_text()


@pytest.mark.parametrize("version", VERSIONS)
def test_it_loads_and_gives_the_tokens_that_it_gave(version: str) -> None:
    expected = json.loads((HERE / version / "expected.json").read_text())
    params = precast.SamplingParams(max_tokens=len(expected["tokens"]))
    with precast.load(HERE / version / "recite.bundle", weights=CHECKPOINT, device="cpu") as engine:
        (output,) = engine.generate([expected["prompt"]], params)
    assert list(output.token_ids) == expected["tokens"]


@pytest.mark.parametrize("version", VERSIONS)
def test_its_steps_are_captured_as_it_says_or_else_as_the_loader_plans(version: str) -> None:
    expected = json.loads((HERE / version / "expected.json").read_text())
    bundle = Bundle.open(HERE / version / "recite.bundle")
    assert bundle.graph.capture.sizes == tuple(expected.get("captured_sizes", ()))

    params = precast.SamplingParams(max_tokens=len(expected["tokens"]))
    with precast.load(bundle, weights=CHECKPOINT, device="cpu", capture="before", max_num_tokens=4) as engine:
        (output,) = engine.generate([expected["prompt"]], params)
        assert (engine.stats.graphs, engine.stats.eager_steps) == (3, 0)

    assert list(output.token_ids) == expected["tokens"]
