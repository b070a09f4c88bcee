"""`precast verify --shards`: ranks against one rank, with random weights."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from recitation import Command

from precast.check import shards
from precast.ir.artifact import Bundle
from precast.ir.graph.schema import Call


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on, every model is a large one."""
    monkeypatch.setattr(shards, "MOST_NUMBERS", 0)


def test_all_layers_of_a_small_model(bundle: Path, command: Command) -> None:
    said = command("verify", bundle, "--shards", "2", "--json")

    found = json.loads(said.stdout)["shards"]
    assert (said.exit_code, found["tp"], found["ep"], found["holds"]) == (0, 2, 1, True)
    assert found["error"] < 1e-5
    assert found["layers"] == found["all_layers"]
    assert len(found["rank_bytes"]) == 2
    assert found["model_bytes"] / 2 <= found["rank_bytes"][0] < found["model_bytes"]


@pytest.mark.usefixtures("large")
def test_one_layer_of_each_kind_of_a_large_model_in_half_precision(other_bundle: Path, command: Command) -> None:
    said = command("verify", other_bundle, "--shards", "2")

    calls = [step for step in Bundle.open(other_bundle).graph.main if isinstance(step, Call)]
    kinds = len({step.block for step in calls})
    assert kinds < len(calls)
    assert said.exit_code == 0
    expected = rf"2 ranks give the logits of one .* {kinds} of {len(calls)} layers, one of each kind"
    assert re.search(expected, said.stdout)


@pytest.mark.usefixtures("large")
def test_of_a_large_model_stages_have_a_layer_each(other_bundle: Path, command: Command) -> None:
    said = command("verify", other_bundle, "--shards", "2", "--pp", "2")

    assert said.exit_code == 0
    assert re.search(r"2 stages of 2 ranks give the logits of one .* up to 2 of each kind|all layers", said.stdout)


def test_stages_alone(bundle: Path, command: Command) -> None:
    said = command("verify", bundle, "--pp", "2", "--json")

    found = json.loads(said.stdout)["shards"]
    assert (said.exit_code, found["tp"], found["pp"], found["holds"]) == (0, 1, 2, True)
    assert len(found["rank_bytes"]) == 2


def test_more_stages_than_layers(bundle: Path, command: Command) -> None:
    said = command("verify", bundle, "--pp", "99")

    assert said.exit_code == 2
    assert re.search(r"--pp 99, and the graph calls \d+ layers or parts of them|pp is 99, and the graph", said.stderr)


def test_worlds_that_the_bundle_excludes_are_named(bundle: Path, command: Command) -> None:
    said = command("verify", bundle, "--shards", "3")

    assert said.exit_code == 2
    assert re.search("3, and the bundle can be split over 1, 2", said.stderr)


def test_each_rank_with_sequences_of_its_own(bundle: Path, command: Command) -> None:
    said = command("verify", bundle, "--shards", "2", "--dp", "2", "--json")

    found = json.loads(said.stdout)["shards"]
    assert (said.exit_code, found["tp"], found["dp"], found["holds"]) == (0, 2, 2, True)
    alike = json.loads(command("verify", bundle, "--shards", "2", "--json").stdout)["shards"]
    assert found["rank_bytes"][0] > alike["rank_bytes"][0], "attention is whole on each rank"


@pytest.mark.parametrize(
    ("options", "found"),
    [
        (["--shards", "4", "--dp", "2"], "dp is 2, and tp is 4: either each of the ranks .* give 4, or 1"),
        (["--shards", "2", "--dp", "2", "--pp", "2"], "dp is 2, and pp is 2: stages share all sequences"),
        (["--dp", "2"], "--dp goes with --shards"),
    ],
)
def test_numbers_of_ranks_that_cannot_have_sequences_of_their_own(
    options: list[str], found: str, bundle: Path, command: Command
) -> None:
    said = command("verify", bundle, *options)

    assert said.exit_code == 2
    assert re.search(found, said.stderr)


@pytest.mark.usefixtures("large")
def test_what_does_not_fit_into_memory_is_refused_with_its_sizes(
    bundle: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("precast.loader.torch_device.CpuDevice.free_bytes", lambda self: 5 << 20)

    said = command("verify", bundle, "--shards", "2")

    assert said.exit_code == 4
    assert "takes 1.0 GiB of memory, and 0.0 GiB are free" in said.stderr


def test_ep_alone_is_an_error_of_usage(bundle: Path, command: Command) -> None:
    said = command("verify", bundle, "--ep", "2")

    assert said.exit_code == 2
    assert "--ep goes with --shards" in said.stderr
