"""Progress: a bar on a terminal, silence elsewhere, standard output untouched either way."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from collections.abc import Callable

import pytest

from precast.cli.progress import AnnouncedTimeline, stages

TWO_STAGES = """
from precast.cli.progress import stages
with stages(("first", "second"), "working") as say:
    for name in ("first", "second"):
        if say:
            say(name)
print("done")
"""


def test_terminal_shows_the_stages() -> None:
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-c", TWO_STAGES], stdout=subprocess.PIPE, stderr=theirs, env={**os.environ, "TERM": "xterm"}
    ) as process:
        os.close(theirs)
        shown = b"".join(iter(lambda: read(ours), b"")).decode()
        assert process.stdout is not None
        printed = process.stdout.read()
    os.close(ours)

    assert process.returncode == 0
    assert "working second" in shown
    assert printed == b"done\n"


def read(terminal: int) -> bytes:
    """What the other side wrote; nothing when it is closed, which Linux tells with an error."""
    try:
        return os.read(terminal, 4096)
    except OSError:
        return b""


def test_no_terminal_shows_nothing() -> None:
    ran = subprocess.run([sys.executable, "-c", TWO_STAGES], capture_output=True, text=True)

    assert (ran.stdout, ran.stderr) == ("done\n", "")


def test_no_terminal_gets_nothing_to_call(capfd: pytest.CaptureFixture[str]) -> None:
    with stages(("only",), "working") as say:
        assert say is None


@pytest.mark.parametrize("listens", [True, False])
def test_timeline_announces_its_phases(listens: bool) -> None:
    said: list[str] = []
    say: Callable[[str], None] | None = said.append if listens else None
    timeline = AnnouncedTimeline(say)

    with timeline.phase("import") as phase:
        assert said == (["import"] if listens else [])
        phase.bytes = 7

    assert [(phase.name, phase.bytes) for phase in timeline.phases] == [("import", 7)]
    assert phase.seconds is not None
