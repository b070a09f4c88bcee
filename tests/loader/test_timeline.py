"""Phases by a clock of our own."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from precast.loader.timeline import BAR_WIDTH, Timeline


def clock(*readings: float) -> Iterator[float]:
    """Readings, one after the other."""
    return iter(readings)


def loaded() -> Timeline:
    """Imports before the load, then a bundle and weights that overlap."""
    timeline = Timeline(clock=clock(100.0, 100.0, 101.0, 100.5, 102.0).__next__)
    timeline.add("import", start=98.0, seconds=2.0)
    with timeline.phase("bundle") as phase:
        phase.counters = {"blobs": 3}
    with timeline.phase("weights") as phase:
        phase.bytes = 3_000_000_000
    return timeline


def test_phases_count_from_the_origin() -> None:
    phases = loaded().phases

    assert [(phase.name, phase.start, phase.seconds) for phase in phases] == [
        ("import", -2.0, 2.0),
        ("bundle", 0.0, 1.0),
        ("weights", 0.5, 1.5),
    ]


def test_the_total_goes_from_the_first_start_to_the_last_end() -> None:
    assert loaded().total_seconds() == 4.0
    assert Timeline().total_seconds() == 0.0


def test_phases_do_not_share_counters() -> None:
    timeline = loaded()

    assert timeline.phases[1].counters == {"blobs": 3}
    assert timeline.phases[2].counters == {}


def test_json_has_every_phase() -> None:
    content = json.loads(loaded().to_json())

    assert content == loaded().to_dict()
    assert content["total_seconds"] == 4.0
    assert content["phases"][2] == {
        "name": "weights",
        "start": 0.5,
        "seconds": 1.5,
        "bytes": 3_000_000_000,
        "counters": {},
    }


def test_a_phase_that_fails_stays_unfinished() -> None:
    timeline = Timeline(clock=clock(0.0, 1.0).__next__)

    with pytest.raises(ValueError, match="broken"), timeline.phase("weights"):
        raise ValueError("broken")

    assert timeline.phases[0].seconds is None
    assert "unfinished" in timeline.text()
    assert json.loads(timeline.to_json())["phases"][0]["seconds"] is None


def test_the_picture_shows_when_how_long_how_much_and_what() -> None:
    first, second, third = loaded().text().splitlines()

    assert first == f"import    -2.000 s    2.000 s |{'#' * 16}{' ' * 16}|"
    assert second == f"bundle     0.000 s    1.000 s |{' ' * 16}{'#' * 8}{' ' * 8}| blobs=3"
    assert third == f"weights    0.500 s    1.500 s |{' ' * 20}{'#' * 12}| 3.00 GB  2.00 GB/s"


def test_a_picture_without_phases_says_so() -> None:
    assert Timeline().text() == "no phases"


def test_every_bar_is_seen_and_fits() -> None:
    timeline = Timeline(clock=clock(0.0).__next__)
    timeline.add("long", start=0.0, seconds=1.0)
    timeline.add("last", start=1.0, seconds=0.0, num_bytes=999)

    bars = [line.split("|")[1] for line in timeline.text().splitlines()]

    assert all(len(bar) == BAR_WIDTH and "#" in bar for bar in bars)
    assert timeline.text().endswith("| 999 B")
