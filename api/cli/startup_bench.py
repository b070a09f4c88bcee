"""`precast bench startup`: what was measured, as text, as fields, and as a page."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from precast.bench import startup
from precast.cli.progress import counted
from precast.cli.show import Report, table
from precast.cli.timeline_file import write
from precast.cli.timeline_page import document
from precast.ir import limits
from precast.ir.artifact import Bundle
from precast.ir.errors import PrecastError
from precast.loader.timeline import amount

CACHES = {"warm": ("warm",), "cold": ("cold",), "both": ("warm", "cold")}


def bench(
    bundle: Path | str, weights: Path, out: Path | None, *, device: str | None, runs: int, cache: str,
    versus: Sequence[str], until: str | None, timeout: float,
) -> Report:  # fmt: skip
    """Measure starts, write them to `out` if it is given, and report. Raises PrecastError."""
    if runs < 1:
        raise PrecastError("option-invalid", f"runs is {runs}, expected at least 1")
    if not 0 < timeout <= limits.MAX_SECONDS:
        raise PrecastError(
            "option-invalid", f"timeout is {timeout}, expected seconds above 0 and at most {limits.MAX_SECONDS}"
        )
    Bundle.open(bundle)
    where = startup.device_of(device)
    files = startup.tensor_files(weights)
    each = startup.participants(bundle, weights, files, where, versus, until)
    total = len(each) * sum(runs + (name == "warm") for name in CACHES[cache])
    with counted(total, "starts") as count:
        found = startup.measure(each, files, device=where, runs=runs, caches=CACHES[cache], timeout=timeout, say=count)
    fields = startup.fields(found)
    if out is not None:
        write(out, page(fields) if out.suffix == ".html" else json.dumps(fields, indent=2) + "\n")
    return Report(fields, text(found))


def text(found: startup.Report) -> str:
    """A row for each participant and state of the page cache, and one for each of its phases."""
    rows: list[tuple[str, ...]] = [("page cache", "what", "seconds", "floor x", "lowest", "highest", "phases")]
    for each in found.results:
        phases = ", ".join(f"{name} {seconds:.2f}" for name, seconds in each.phases.items())
        times = (each.seconds, each.times_the_floor, min(each.times), max(each.times))
        rows.append((each.cache, each.name, *(f"{value:.2f}" for value in times), phases))
    head = (
        f"{found.device}; checkpoint {amount(found.checkpoint_bytes)}; medians of {found.runs}, from a new process to "
    )
    return "\n".join([head + "its first output", "", table(rows), *(f"note: {note}" for note in found.notes)])


def page(fields: dict[str, Any]) -> str:
    """One page with a bar for each participant, of its phases."""
    longest = max(each["seconds"] for each in fields["results"])
    rows = "\n".join(_row(each, longest) for each in fields["results"])
    notes = "".join(f"<p>{escape(note)}</p>\n" for note in fields["notes"])
    size = amount(fields["checkpoint_bytes"])
    summary = f"Device {escape(fields['device'])}, checkpoint of {size}, medians of {fields['runs']} runs."
    body = f"""<p>From a new process to its first output. {summary}</p>
{notes}<table id="startup">
<caption hidden>Seconds of each start, by the state of the page cache</caption>
<thead><tr><th scope="col">page cache</th><th scope="col">what</th><th scope="col" class="number">seconds</th>
<th scope="col" class="number">times the floor</th><th scope="col" class="time">time</th>
<th scope="col">phases</th></tr></thead>
<tbody>
{rows}
</tbody>
</table>
"""
    return document("Startup", body)


def _row(each: dict[str, Any], longest: float) -> str:
    name, seconds = escape(each["name"]), each["seconds"]
    words = f"{name}, {each['cache']}: {seconds:.3f} s"
    bar = f'<div class="bar" style="left:0%;width:{100 * seconds / longest:.3f}%" title="{words}"></div>'
    phases = ", ".join(f"{escape(phase)} {took:.2f} s" for phase, took in each["phases"].items())
    return (
        f'<tr><td>{each["cache"]}</td><th scope="row">{name}</th><td class="number">{seconds:.3f} s</td>'
        f'<td class="number">{each["times_the_floor"]:.2f}</td>'
        f'<td class="time"><div class="track" role="img" aria-label="{words}">{bar}</div></td>'
        f'<td class="notes">{phases}</td></tr>'
    )
