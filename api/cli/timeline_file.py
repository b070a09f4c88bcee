"""Files of a timeline, and of other reports that can be a page: which names they have, and how they are written."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from precast.ir.errors import PrecastError

if TYPE_CHECKING:
    from precast.loader.timeline import Timeline

KINDS = (".html", ".json")


def check_file(name: str | None, option: str = "--timeline") -> None:
    """Refuse a name that says no kind of file, before work that would be in vain. `-` is standard error.

    Raises UsageError, and PrecastError (`write-failed`) where the folder isn't there.
    """
    if name is None or name == "-":
        return
    path = Path(name)
    if path.suffix not in KINDS:
        message = f"{name!r} is the name of no file that ends in {' or '.join(KINDS)}"
        rest = "; without a file, --timeline stands last" if option == "--timeline" else ""
        raise click.BadParameter(f"{message}{rest}", param_hint=option)
    if not path.parent.is_dir():
        raise PrecastError("write-failed", "the folder isn't there", where=str(path.parent))


def write_timeline(path: Path, timeline: Timeline, title: str, stats: Mapping[str, Any]) -> None:
    """Write the timeline as its file's name says. Raises PrecastError (`write-failed`)."""
    if path.suffix == ".html":
        from precast.cli.timeline_page import page

        content = page(title, timeline.to_dict(), stats)
    else:
        content = timeline.to_json() + "\n"
    write(path, content)


def write(path: Path, content: str) -> None:
    """Write a report to its file. Raises PrecastError (`write-failed`)."""
    try:
        path.write_text(content, encoding="utf-8")
    except OSError as error:
        raise PrecastError("write-failed", f"can't be written: {error.strerror}", where=str(path)) from None
