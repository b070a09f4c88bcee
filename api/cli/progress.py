"""Progress of what takes longer than a second: a bar on a terminal, silence elsewhere."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from precast.loader.timeline import Phase, Timeline

if TYPE_CHECKING:
    from rich.progress import Progress, ProgressColumn

Say = Callable[[str], None]
Count = Callable[[int, int], None]

BUILD_STAGES = ("import", "config", "check", "export", "passes", "caches", "lower", "kernels", "pack")
LOAD_PHASES = ("import", "context", "bundle", "imports", "weights", "launches", "pools", "warm-up", "captured")


@contextlib.contextmanager
def stages(names: Sequence[str], title: str) -> Iterator[Say | None]:
    """A bar over named stages on standard error: yields what to call as each begins, or None where nobody looks."""
    if not sys.stderr.isatty():
        yield None
        return
    with _bar(f"{title} {{task.description}}") as bar:
        task = bar.add_task(names[0], total=len(names))
        yield lambda name: bar.update(task, description=name, completed=names.index(name))


@contextlib.contextmanager
def counted(total: int, title: str) -> Iterator[Count | None]:
    """A bar over `total` things on standard error: yields what to call with how many are done, and how many there are;
    None where nobody looks, and for one thing alone."""
    if total < 2 or not sys.stderr.isatty():
        yield None
        return
    with _bar(f"{title} {{task.completed}} of {{task.total}}") as bar:
        task = bar.add_task(title, total=total)
        yield lambda done, total: bar.update(task, completed=done, total=total)


@contextlib.contextmanager
def transferred(title: str) -> Iterator[Count | None]:
    """A bar over bytes on standard error: yields what to call with how many are done, and how many there are; threads
    may call it. None where nobody looks."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.progress import DownloadColumn, TransferSpeedColumn

    with _bar(title, DownloadColumn(), TransferSpeedColumn()) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _bar(text: str, *more: ProgressColumn) -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn(text), BarColumn(), *more, TimeElapsedColumn())
    return Progress(*columns, console=Console(stderr=True), transient=True)


class AnnouncedTimeline(Timeline):
    """A timeline that says each phase's name as it begins, if anybody listens."""

    def __init__(self, say: Say | None) -> None:
        super().__init__()
        self._say = say

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[Phase]:
        """Record the body as a phase, after saying so."""
        if self._say is not None:
            self._say(name)
        with super().phase(name) as phase:
            yield phase
