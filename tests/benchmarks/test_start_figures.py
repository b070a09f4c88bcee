"""The picture and the table of both starts, from timelines of known seconds."""

from __future__ import annotations

from typing import Any
from xml.etree import ElementTree

import bench_gpu_start
import pytest
from support import start_figures
from support.start_figures import Bar

TIMELINE = {
    "phases": [
        {"name": "bundle", "start": 0.1, "seconds": 0.2, "bytes": None},
        {"name": "weights", "start": 0.3, "seconds": 0.4, "bytes": 20_000_000_000},
        {"name": "first token", "start": 0.75, "seconds": 0.05, "bytes": None},
    ]
}
SAID = {"timeline": TIMELINE, "first_token_s": 0.8, "host_bytes": {"VmHWM": 700 << 20}}


def measured() -> dict[str, Any]:
    runs = bench_gpu_start.Runs()
    for seconds in (0.95, 0.9, 1.4):
        runs.add("driver", bench_gpu_start.Start(seconds, SAID))
    floor = {"import": 0.0, "context": 0.2, "read": 0.5, "pinned_bytes_per_s": 55e9}
    runs.add("floor", bench_gpu_start.Start(0.76, floor))
    return {"llama-3.1-8b": bench_gpu_start.compared(runs.figures()), "gemma-3-12b": {"failed": "no room"}}


def test_a_start_beside_its_floor() -> None:
    driver = measured()["llama-3.1-8b"]["driver"]
    assert driver["median"] == 0.95
    assert (driver["times_the_floor"], driver["reached"]) == (1.25, True)
    assert (driver["share_of_pinned_rate"], driver["rate_reached"]) == (0.909, True)
    assert driver["after_last_byte_s"] == pytest.approx(0.1)


def test_the_row_of_a_shape() -> None:
    assert list(start_figures.rows(measured())) == [
        ("Llama-3.1-8B, 20.0 GB", "0.76 s", "0.95 s", "1.25", "-", "-", "-", "50.0 GB/s", "91%", "100 ms", "700 MiB")
    ]


def test_bars_begin_with_the_process() -> None:
    """It was 0.15 s old when its first line ran."""
    found = measured()["llama-3.1-8b"]
    bars = [Bar(bar.name, round(bar.start, 6), round(bar.seconds, 6)) for bar in start_figures.bars(found["driver"])]
    assert bars == [
        Bar("interpreter, imports", 0.0, 0.25), Bar("bundle", 0.25, 0.2), Bar("weights", 0.45, 0.4),
        Bar("first token", 0.9, 0.05),
    ]  # fmt: skip
    last = start_figures.bars(found["floor"])[-1]
    assert last.start + last.seconds == pytest.approx(0.76)


def test_the_picture_has_all_bars_to_one_scale() -> None:
    drawn = ElementTree.fromstring(start_figures.picture(measured()))
    bars = [each for each in drawn.iter() if each.tag.endswith("rect")]
    ends = [float(each.get("x1", "0")) for each in drawn.iter() if each.get("class") == "end"]
    assert len(bars) == 3 + 4
    assert ends[0] - start_figures._LEFT == pytest.approx((ends[1] - start_figures._LEFT) * 0.76 / 0.95, abs=0.1)
    assert all(float(each.get("x", "0")) + float(each.get("width", "0")) <= max(ends) + 2 for each in bars)


def test_what_failed_leaves_the_rest() -> None:
    runs = bench_gpu_start.Runs()
    runs.run("torch", "raise SystemExit('no torch here')")
    assert "no torch here" in runs.figures()["torch"]["failed"]
    assert list(start_figures.rows({"llama-3.1-8b": runs.figures()})) == []


def test_other_figures_are_said_where_they_are_there() -> None:
    found = measured()
    found["llama-3.1-8b"]["killed"] = {"codes": [130, 143], "seconds": [0.02, 0.05], "bytes_left_behind": 0}
    assert start_figures.words(found).splitlines() == [
        "- one after another: 0.95, 0.90, 1.40 s",
        "- ended by SIGINT or SIGTERM at 2 random moments: gone after 0.05 s at most, 0 bytes left on the GPU",
    ]


def test_nothing_is_lost_of_what_a_process_says_at_once() -> None:
    """Its first token and its figures may be in the pipe before anyone reads."""
    said = bench_gpu_start.started("import os; os.write(1, b'first\\n{\"token\": 7}\\n')").said
    assert said == {"token": 7}


def test_a_process_that_does_not_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_gpu_start, "LONG", 0.01)
    with pytest.raises(RuntimeError, match="no end after"):
        bench_gpu_start.started("import threading; threading.Event().wait()")
