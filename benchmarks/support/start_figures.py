"""The figures of docs/start.md and its picture: when what happens in both starts, by timelines that were measured.

The picture is an SVG of rows with bars, as `precast run --timeline page.html` has them. It follows the reader's light
or dark setting, and is a function of the result alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple
from xml.sax.saxutils import escape

Figures = Mapping[str, Any]

NAMES = {
    "llama-3.1-8b": "Llama-3.1-8B", "qwen3-30b-a3b-half": "half of Qwen3-30B-A3B", "gemma-3-12b": "Gemma-3-12B",
    "llama-3.1-8b-fp8": "Llama-3.1-8B in FP8", "llama-3.1-8b-int4": "Llama-3.1-8B in INT4",
    "gpt-oss-20b-mxfp4": "GPT-OSS-20B in MXFP4",
}  # fmt: skip
HEADS = ("", "the floor", "without torch", "times the floor", "torch's floor", "with torch", "times its floor",
         "weights", "of the pinned rate", "after the last byte", "of the host's memory")  # fmt: skip
STARTS = {"floor": "the floor: the driver alone", "driver": "without torch", "torch floor": "torch, one after another",
          "torch": "with torch"}  # fmt: skip
_ROW, _LEFT, _WIDTH, _RIGHT = 20, 190, 620, 130
_STYLE = """
text { font: 12px system-ui, sans-serif; fill: #1a1d21; } .soft { fill: #5b6470; } .head { font-weight: 600; }
.bar { fill: #2563c9; } .line { stroke: #d9dee5; } .end { stroke: #b45309; stroke-width: 2; }
@media (prefers-color-scheme: dark) { text { fill: #e8eaed; } .soft { fill: #a4adb8; } .bar { fill: #7aaeff; }
  .line { stroke: #343a42; } .end { stroke: #f0b264; } }
"""


class Bar(NamedTuple):
    """What ran from when to when, in seconds since the process was started."""

    name: str
    start: float
    seconds: float


def rows(found: Figures) -> Iterator[tuple[str, ...]]:
    """The table's rows, one a shape that was measured."""
    for shape, one in found.items():
        if "median" not in one.get("driver", {}):
            continue
        driver, torch = one["driver"], one.get("torch", {})
        yield (
            f"{NAMES.get(shape, shape)}, {weights_of(driver)['bytes'] / 1e9:.1f} GB",
            _seconds(one.get("floor", {})), _seconds(driver), _times(driver),
            _seconds(one.get("torch floor", {})), _seconds(torch), _times(torch),
            f"{weights_of(driver)['bytes'] / weights_of(driver)['seconds'] / 1e9:.1f} GB/s",
            "-" if "share_of_pinned_rate" not in driver else f"{driver['share_of_pinned_rate']:.0%}",
            f"{1000 * driver['after_last_byte_s']:.0f} ms",
            f"{driver['host_bytes']['VmHWM'] / 2**20:,.0f} MiB",
        )  # fmt: skip


def words(found: Figures) -> str:
    """What else was measured, of the first shape."""
    one = next(iter(found.values()))
    lines = []
    for name, said in (
        ("driver, without warm-up", "without the warm-up step"),
        ("driver, long turns", "with Python's own turns of 5 ms while weights stream"),
    ):
        if "median" in one.get(name, {}):
            after = f"{1000 * one[name]['after_last_byte_s']:.0f} ms after the last byte"
            lines.append(f"- {said}: {_seconds(one[name])}, {after}")
    if "times_the_floor" in one.get("driver, at once", {}):
        count, ratio = len(one["driver, at once"]["seconds"]), one["driver, at once"]["times_the_floor"]
        lines.append(f"- {count} processes at once, until the last one's first token: {ratio:.2f} times {count} floors")
    if "seconds" in one.get("driver", {}):
        lines.append(f"- one after another: {', '.join(f'{each:.2f}' for each in one['driver']['seconds'])} s")
    captured = one.get("driver, captured", {}).get("captured")
    if captured:
        lines.append(
            f"- captured after the first token: {captured['graphs']} sizes in {captured['seconds']:.2f} s, "
            f"{captured['compilations']} kernels compiled"
        )
    killed = one.get("killed")
    if killed:
        lines.append(
            f"- ended by SIGINT or SIGTERM at {len(killed['codes'])} random moments: gone after "
            f"{max(killed['seconds']):.2f} s at most, {max(0, killed['bytes_left_behind'])} bytes left on the GPU"
        )
    return "\n".join(lines) + "\n"


def weights_of(start: Figures) -> Figures:
    """The phase of the weights."""
    return next(phase for phase in start["timeline"]["phases"] if phase["name"] == "weights")


def bars(start: Figures) -> list[Bar]:
    """The phases of a start, or of a floor, in the order in which they began."""
    if "timeline" not in start:
        names = [name for name in ("import", "context", "read") if start.get(name, 0.0) > 0.001]
        began = start["median"] - sum(start[name] for name in names)
        found = [Bar("interpreter", 0.0, began)]
        for name in names:
            found.append(Bar(name, found[-1].start + found[-1].seconds, start[name]))
        return found
    began = start["median"] - start["first_token_s"]
    phases = [each for each in start["timeline"]["phases"] if each["seconds"] is not None]
    found = [Bar(each["name"], began + each["start"], each["seconds"]) for each in phases]
    first = min(each.start for each in found)
    return [Bar("interpreter, imports", 0.0, first), *sorted(found, key=lambda each: each.start)]


def picture(found: Figures) -> str:
    """The SVG of the first shape's starts, all to one scale."""
    shape, one = next(iter(found.items()))
    starts = {words: one[name] for name, words in STARTS.items() if "median" in one.get(name, {})}
    total = max(start["median"] for start in starts.values())
    made: list[str] = []
    y = 28
    for title, start in starts.items():
        made.append(f'<text class="head" x="0" y="{y}">{escape(title)}</text>')
        made.append(f'<text class="soft" x="{_LEFT}" y="{y}">first token after {start["median"]:.2f} s</text>')
        top = y + 6
        for bar in bars(start):
            y += _ROW
            left, width = _LEFT + _WIDTH * bar.start / total, max(2.0, _WIDTH * bar.seconds / total)
            made.append(f'<text x="12" y="{y}">{escape(bar.name)}</text>')
            made.append(f'<rect class="bar" x="{left:.1f}" y="{y - 11}" width="{width:.1f}" height="13" rx="2"/>')
            made.append(f'<text class="soft" x="{left + width + 5:.1f}" y="{y}">{bar.seconds:.2f} s</text>')
        end = _LEFT + _WIDTH * start["median"] / total
        made.append(f'<line class="end" x1="{end:.1f}" x2="{end:.1f}" y1="{top}" y2="{y + 5}"/>')
        y += 2 * _ROW
    ticks = []
    step = next(each for each in (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50) if total / each <= 10)
    for index in range(int(total / step) + 1):
        x = _LEFT + _WIDTH * index * step / total
        ticks.append(f'<line class="line" x1="{x:.1f}" x2="{x:.1f}" y1="14" y2="{y - _ROW}"/>')
        ticks.append(f'<text class="soft" x="{x:.1f}" y="10" text-anchor="middle">{index * step:g} s</text>')
    width, title = _LEFT + _WIDTH + _RIGHT, f"Starts of {NAMES.get(shape, shape)}, from the process to the first token"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {y}" width="{width}" height="{y}" role="img">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n" + "\n".join([*ticks, *made]) + "\n</svg>\n"
    )


def _seconds(start: Figures) -> str:
    return "-" if "median" not in start else f"{start['median']:.2f} s"


def _times(start: Figures) -> str:
    return "-" if "times_the_floor" not in start else f"{start['times_the_floor']:.2f}"
