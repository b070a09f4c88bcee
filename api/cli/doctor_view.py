"""`precast doctor`: the checks as text, and what they mean for the exit code."""

from __future__ import annotations

from pathlib import Path

import msgspec

from precast.bench.doctor import Check, examine
from precast.cli.progress import stages
from precast.cli.show import Report

LACKS = 4
"""The exit code where something is missing."""
_PARTS = ("packages", "memory", "gpu", "torch", "disk", "caches")


def view(device: str | None, weights: Path | None) -> tuple[Report, int]:
    """The report, and the exit code: 0, or 4 where the machine lacks what is needed."""
    with stages(_PARTS, "looking at") as say:
        checks = examine(device, weights, say)
    lacks = any(check.status == "missing" for check in checks)
    fields = {"fine": not lacks, "checks": msgspec.to_builtins(checks)}
    return Report(fields, text(checks)), LACKS if lacks else 0


def text(checks: list[Check]) -> str:
    """A line for each check, and below it what is wrong and what to do."""
    width = max(len(check.name) for check in checks)
    lines = []
    for check in checks:
        lines.append(f"{check.status:<7}  {check.name:<{width}}  {check.found}")
        indent = " " * (width + 11)
        if check.why:
            lines.append(f"{indent}why: {check.why}")
        if check.fix:
            lines.append(f"{indent}fix: {check.fix}")
    return "\n".join(lines)
