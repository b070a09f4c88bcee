"""A load's timeline as one page of HTML: a table of its phases, in which a bar shows when each ran.

The page needs no network and no script: it can be kept, sent, and opened years later. It is a table first, so what
reads pages aloud reads the numbers; colours follow the reader's light or dark setting.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from precast.loader.timeline import amount

TICKS = 5
"""Marks of time, at most, between the page's start and its end."""

_STYLE = """
:root { color-scheme: light dark; --ink: #1a1d21; --soft: #5b6470; --line: #d9dee5; --page: #ffffff;
  --bar: #2563c9; --open: #b45309; --row: #f2f5f9; }
@media (prefers-color-scheme: dark) { :root { --ink: #e8eaed; --soft: #a4adb8; --line: #343a42; --page: #15181c;
  --bar: #7aaeff; --open: #f0b264; --row: #1e2329; } }
body { font: 15px/1.45 system-ui, sans-serif; color: var(--ink); background: var(--page); margin: 2rem; }
h1 { font-size: 1.3rem; margin: 0 0 .2rem; } h2 { font-size: 1.05rem; margin: 2rem 0 .4rem; }
p { color: var(--soft); margin: 0 0 1.2rem; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .35rem .7rem .35rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
thead th { color: var(--soft); font-weight: 500; white-space: nowrap; }
tbody th { font-weight: 600; white-space: nowrap; }
td.number, th.number { text-align: right; white-space: nowrap; }
tbody tr:hover, tbody tr:focus-within { background: var(--row); }
th.time, td.time { width: 45%; padding-right: 2.5rem; }
.track { position: relative; height: 1.35em; }
.bar { position: absolute; top: .2em; bottom: .2em; min-width: 3px; border-radius: 3px; background: var(--bar); }
.bar.unfinished { background: repeating-linear-gradient(45deg, var(--open) 0 6px, transparent 6px 10px);
  outline: 1px solid var(--open); }
.tick { position: absolute; border-left: 1px solid var(--line); padding-left: .25em; height: 1.35em; }
.notes { color: var(--soft); }
.wide { overflow-x: auto; }
"""


def page(title: str, timeline: Mapping[str, Any], stats: Mapping[str, Any] | None = None) -> str:
    """The page of a timeline as `Timeline.to_dict` gives it; `stats`: what the engine counted since, if it is shown."""
    phases = timeline["phases"]
    total = timeline["total_seconds"]
    first = min((phase["start"] for phase in phases), default=0.0)
    rows = "\n".join(_row(phase, first, total) for phase in phases)
    counted = "" if stats is None else _counted(stats)
    body = f"""<p>{_summary(phases, total)}</p>
<div class="wide" role="region" aria-label="Phases" tabindex="0">
<table id="phases">
<caption hidden>Phases of the load, in the order in which they began</caption>
<thead><tr><th scope="col">phase</th><th scope="col" class="number">began</th><th scope="col" class="number">took</th>
<th scope="col" class="number">bytes</th><th scope="col" class="number">rate</th>
<th scope="col" class="time"><div class="track" aria-label="time">{_ticks(total)}</div></th>
<th scope="col">counted</th></tr></thead>
<tbody>
{rows}
</tbody>
</table>
</div>
{counted}"""
    return document(title, body)


def document(title: str, body: str) -> str:
    """A whole page around `body`, which is HTML; `title` is text."""
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<style>{_STYLE}</style>
</head>
<body>
<h1>{escape(title)}</h1>
{body}</body>
</html>
"""


def _summary(phases: Sequence[Mapping[str, Any]], total: float) -> str:
    if not phases:
        return "No phases."
    done = [phase for phase in phases if phase["seconds"] is not None]
    text = f"{total:.3f} s from the first phase's start to the last one's end."
    if overlapping := max(0.0, sum(phase["seconds"] for phase in done) - total):
        text += f" Phases that ran at the same time saved at least {overlapping:.3f} s."
    if open_ := [escape(phase["name"]) for phase in phases if phase["seconds"] is None]:
        text += f" Ended with an error: {', '.join(open_)}."
    return text


def _row(phase: Mapping[str, Any], first: float, total: float) -> str:
    seconds = phase["seconds"]
    start = phase["start"] - first
    left, width = (100 * each / (total or 1.0) for each in (start, seconds or 0.0))
    took = "unfinished" if seconds is None else f"{seconds:.3f} s"
    size = "" if phase["bytes"] is None else amount(phase["bytes"])
    rate = f"{amount(phase['bytes'] / seconds)}/s" if phase["bytes"] is not None and seconds else ""
    name = escape(phase["name"])
    notes = ", ".join(f"{escape(key)} {number:,}" for key, number in sorted(phase["counters"].items()))
    words = f"{name}: began after {start:.3f} s, took {took}"
    kind = "bar unfinished" if seconds is None else "bar"
    bar = f'<div class="{kind}" style="left:{min(left, 99.5):.3f}%;width:{width:.3f}%" title="{words}"></div>'
    return (
        f'<tr><th scope="row">{name}</th><td class="number">{start:.3f} s</td><td class="number">{took}</td>'
        f'<td class="number">{size}</td><td class="number">{rate}</td>'
        f'<td class="time"><div class="track" role="img" aria-label="{words}">{bar}</div></td>'
        f'<td class="notes">{notes}</td></tr>'
    )


def _ticks(total: float) -> str:
    """Marks at round seconds."""
    step = next((each for each in _steps() if total / each <= TICKS), None)
    if step is None or total <= 0:
        return ""
    places = (index * step for index in range(int(total / step + 1e-9) + 1))
    return "".join(f'<span class="tick" style="left:{100 * at / total:.3f}%">{at:g} s</span>' for at in places)


def _steps() -> list[float]:
    return [float(f"{digit}e{power}") for power in range(-4, 5) for digit in (1, 2, 5)]


def _counted(stats: Mapping[str, Any]) -> str:
    """The numbers that the engine counted, but for those that are 0."""
    numbers = {key: value for key, value in stats.items() if isinstance(value, (int, float)) and value}
    rows = "\n".join(
        f'<tr><th scope="row">{escape(key.replace("_", " "))}</th><td class="number">{value:,}</td></tr>'
        for key, value in numbers.items()
    )
    return f"""<h2>Counted by the engine</h2>
<table id="stats" style="width:auto">
<thead><tr><th scope="col">what</th><th scope="col" class="number">how many</th></tr></thead>
<tbody>
{rows}
</tbody>
</table>
"""
