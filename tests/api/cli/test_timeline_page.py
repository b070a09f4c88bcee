"""The timeline's page: what is in it, and that a browser shows it, light and dark, without a network."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from recitation import MODEL, OPENING, Command

from precast.cli.timeline_page import page

BROWSER = os.environ.get("PRECAST_TEST_BROWSER", "")
LONG = 300.0
"""Seconds after which a browser is given up."""
VOID = {"meta"}


def phase(
    name: str, start: float, seconds: float | None, num_bytes: int | None = None, **counters: int
) -> dict[str, Any]:
    return {"name": name, "start": start, "seconds": seconds, "bytes": num_bytes, "counters": counters}


LOADED = {
    "total_seconds": 4.0,
    "phases": [
        phase("import", -2.0, 2.0),
        phase("bundle", 0.0, 1.0, blobs=3),
        phase("weights", 0.5, 1.5, 3_000_000_000, bytes_read=3_000_000_000),
        phase("<b>&", 2.0, None),
    ],
}


class Page(HTMLParser):
    """The cells of each table by its id, the bars, and whether every element is closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tables: dict[str, list[list[str]]] = {}
        self.bars: list[tuple[float, float, bool]] = []
        self.outside: list[str] = []
        self._rows: list[list[str]] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        if tag not in VOID:
            self.open.append(tag)
        if tag == "table":
            self._rows = self.tables[found["id"]] = []
        elif tag == "tr":
            self._rows.append([])
        elif tag in ("td", "th"):
            self._rows[-1].append("")
        if "bar" in found.get("class", "").split():
            left, width = (float(re.findall(rf"{name}:([\d.]+)%", found["style"])[0]) for name in ("left", "width"))
            self.bars.append((left, width, "unfinished" in found["class"]))
        self.outside += [found[name] for name in ("src", "href") if name in found]
        if tag in ("script", "link", "iframe", "img"):
            self.outside.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._rows and self._rows[-1] and {"td", "th"} & set(self.open):
            self._rows[-1][-1] += data


def test_phases_are_rows_of_numbers() -> None:
    found = Page(page("A load", LOADED))

    assert found.open == []
    assert [row[:5] + row[6:] for row in found.tables["phases"][1:]] == [
        ["import", "0.000 s", "2.000 s", "", "", ""],
        ["bundle", "2.000 s", "1.000 s", "", "", "blobs 3"],
        ["weights", "2.500 s", "1.500 s", "3.00 GB", "2.00 GB/s", "bytes_read 3,000,000,000"],
        ["<b>&", "4.000 s", "unfinished", "", "", ""],
    ]


def test_bars_stand_where_phases_ran() -> None:
    found = Page(page("A load", LOADED))

    assert found.bars == [(0.0, 50.0, False), (50.0, 25.0, False), (62.5, 37.5, False), (99.5, 0.0, True)]
    assert found.tables["phases"][0][5] == "0 s1 s2 s3 s4 s"


def test_what_overlaps_and_what_failed_is_said() -> None:
    text = page("A load", LOADED)

    assert "4.000 s from the first phase's start to the last one's end." in text
    assert "Phases that ran at the same time saved at least 0.500 s." in text
    assert "Ended with an error: &lt;b&gt;&amp;." in text


def test_nothing_is_fetched() -> None:
    found = page("A load", LOADED)

    assert Page(found).outside == []
    assert "default-src 'none'" in found
    assert not re.search(r"https?:|url\(|@import", found)


def test_an_empty_timeline() -> None:
    found = Page(page("<title>", {"total_seconds": 0.0, "phases": []}, {"steps": 0, "tokens_drawn": 12_345}))

    assert len(found.tables["phases"]) == 1
    assert found.tables["stats"][1:] == [["tokens drawn", "12,345"]]


@pytest.mark.parametrize(
    ("total", "marks"), [(0.0034, "0 s0.001 s0.002 s0.003 s"), (4.9, "0 s1 s2 s3 s4 s"), (61.0, "0 s20 s40 s60 s")]
)
def test_marks_are_round(total: float, marks: str) -> None:
    found = Page(page("A load", {"total_seconds": total, "phases": [phase("import", 0.0, total)]}))

    assert found.tables["phases"][0][5] == marks


def test_run_writes_it(bundle: Path, tmp_path: Path, command: Command) -> None:
    run = ("run", bundle, "--weights", MODEL, "--device", "cpu", "--prompt", OPENING, "--stop", "\n", "--timeline")

    results = [command(*run, tmp_path / name) for name in ("t.html", "t.json")]

    assert [(result.exit_code, result.stderr) for result in results] == [(0, "")] * 2
    found = Page((tmp_path / "t.html").read_text(encoding="utf-8"))
    names = [row[0] for row in found.tables["phases"][1:]]
    assert names == ["import", "context", "bundle", "weights", "pools", "first token"]
    assert [each["name"] for each in json.loads((tmp_path / "t.json").read_text())["phases"]] == names
    assert "stats" in found.tables


@pytest.mark.parametrize(
    ("name", "exit_code", "message"),
    [("t.png", 2, "ends in .html or .json"), ("nowhere/t.html", 1, "the folder isn't there")],
)
def test_files_that_can_not_be_written(
    name: str, exit_code: int, message: str, bundle: Path, tmp_path: Path, command: Command
) -> None:
    result = command("run", bundle, "--weights", tmp_path, "--prompt", "a", "--timeline", tmp_path / name)

    assert result.exit_code == exit_code
    assert message in " ".join(result.stderr.split())


def test_a_file_that_can_not_be_written_is_the_only_answer(bundle: Path, tmp_path: Path, command: Command) -> None:
    (tmp_path / "t.json").mkdir()

    run = ("run", bundle, "--weights", MODEL, "--device", "cpu", "--prompt", OPENING, "--max-tokens", "1", "--json")
    result = command(*run, "--timeline", tmp_path / "t.json")

    assert (result.exit_code, json.loads(result.stdout)["error"]["code"]) == (1, "write-failed")


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_a_browser_shows_it(dark: bool, tmp_path: Path) -> None:
    """In the browser that is named, if one is; the tests above parse the page alone."""
    browser = shutil.which(BROWSER)
    if browser is None:
        pytest.skip("PRECAST_TEST_BROWSER names no browser; the page was parsed and not shown")
    (tmp_path / "t.html").write_text(page("A load", LOADED), encoding="utf-8")
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=1000,400"]
    options += [f"--user-data-dir={tmp_path / 'profile'}", f"--screenshot={tmp_path / 'shot.png'}"]
    options += ["--blink-settings=preferredColorScheme=0"] if dark else []

    said = tmp_path / "said"  # what it starts may outlive it, and would keep a pipe open
    with said.open("wb") as file:
        command = [browser, *options, (tmp_path / "t.html").as_uri()]
        code = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, timeout=LONG).returncode

    assert code == 0, said.read_text(errors="replace")
    pixels = _colours(tmp_path / "shot.png")
    background, bar, hatched = ("15181c", "7aaeff", "f0b264") if dark else ("ffffff", "2563c9", "b45309")
    assert max(pixels, key=pixels.__getitem__) == background
    assert pixels.get(bar, 0) > 1000
    assert hatched in pixels


def _colours(path: Path) -> dict[str, int]:
    """How many pixels of a screenshot have each colour."""
    data = path.read_bytes()
    width, height, depth, kind = (int.from_bytes(data[16:20]), int.from_bytes(data[20:24]), data[24], data[25])
    assert (depth, kind in (2, 6)) == (8, True)
    return _counted(_unfiltered(_inflated(data), width * (4 if kind == 6 else 3), height, 4 if kind == 6 else 3))


def _inflated(data: bytes) -> bytes:
    import zlib

    packed, at = b"", 8
    while at < len(data):
        length = int.from_bytes(data[at : at + 4])
        if data[at + 4 : at + 8] == b"IDAT":
            packed += data[at + 8 : at + 8 + length]
        at += 12 + length
    return zlib.decompress(packed)


def _unfiltered(raw: bytes, row_bytes: int, height: int, step: int) -> list[tuple[int, ...]]:
    """Pixels, after PNG's filters of rows are undone."""
    above = bytearray(row_bytes)
    pixels = []
    for y in range(height):
        start = y * (row_bytes + 1)
        kind, row = raw[start], bytearray(raw[start + 1 : start + 1 + row_bytes])
        for x in range(row_bytes):
            left, corner = (row[x - step], above[x - step]) if x >= step else (0, 0)
            nearest = min((left, above[x], corner), key=lambda each: abs(left + above[x] - corner - each))
            row[x] = (row[x] + (0, left, above[x], (left + above[x]) // 2, nearest)[kind]) & 255
        pixels += [tuple(row[x : x + 3]) for x in range(0, row_bytes, step)]
        above = row
    return pixels


def _counted(pixels: list[tuple[int, ...]]) -> dict[str, int]:
    found: dict[str, int] = {}
    for pixel in pixels:
        name = bytes(pixel).hex()
        found[name] = found.get(name, 0) + 1
    return found
