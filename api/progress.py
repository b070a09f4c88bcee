"""Progress of what takes longer than a second, on a terminal; silence elsewhere."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence


@contextlib.contextmanager
def stages(names: Sequence[str], title: str) -> Iterator[Callable[[str], None] | None]:
    """A bar over named stages: yields the function to call as each begins, or None where nobody looks."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn(f"{title} {{task.description}}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(names[0], total=len(names))
        yield lambda name: bar.update(task, description=name, completed=names.index(name))
