"""Progress: a bar on a terminal, silence elsewhere, standard output untouched either way."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from recitation import MODEL

from precast.cli.progress import AnnouncedTimeline, counted, stages

LONG = 300.0
"""Seconds after which a test gives up on a process."""
TWO_STAGES = """
from precast.cli.progress import stages
with stages(("first", "second"), "working") as say:
    for name in ("first", "second"):
        if say:
            say(name)
print("done")
"""


THREE_ANSWERS = """
from precast.cli.progress import counted
with counted(3, "answers") as tell:
    tell(2, 3)
print("done")
"""


def on_a_terminal(*command: str | Path) -> tuple[int, str, str]:
    """The command's exit code, its standard output, and what it shows on standard error, a terminal."""
    ours, theirs = pty.openpty()
    # A pipe for its standard output would be full while the terminal is read.
    with tempfile.TemporaryFile("w+", encoding="utf-8") as printed:
        process = subprocess.Popen(
            [sys.executable, *map(str, command)], stdin=subprocess.DEVNULL, stdout=printed, stderr=theirs,
            env={**os.environ, "TERM": "xterm"},
        )  # fmt: skip
        try:
            os.close(theirs)
            shown = b"".join(iter(lambda: read(ours), b"")).decode()
            code = process.wait(LONG)
        finally:
            process.kill()
            process.wait()
            os.close(ours)
        printed.seek(0)
        return code, printed.read(), shown


@pytest.mark.parametrize(("program", "bar"), [(TWO_STAGES, "working second"), (THREE_ANSWERS, "answers 2 of 3")])
def test_terminal_shows_the_bar(program: str, bar: str) -> None:
    code, printed, shown = on_a_terminal("-c", program)

    assert (code, printed) == (0, "done\n")
    assert bar in shown


@pytest.mark.parametrize("more", [(), ("--json",)], ids=["text", "json"])
def test_run_counts_its_answers(more: tuple[str, ...], bundle: Path) -> None:
    prompts = ("--token-ids", "1", "--token-ids", "1", "--max-tokens", "2", "--device", "cpu")

    code, printed, shown = on_a_terminal("-m", "precast", "run", bundle, "--weights", MODEL, *prompts, *more)

    assert code == 0
    assert "answers 2 of 2" in shown
    assert "answers" not in printed


def test_run_with_one_answer_has_no_bar_over_it(bundle: Path) -> None:
    prompt = ("--token-ids", "1", "--max-tokens", "2", "--device", "cpu")

    code, _, shown = on_a_terminal("-m", "precast", "run", bundle, "--weights", MODEL, *prompt)

    assert code == 0
    assert "answers" not in shown


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
    with stages(("only",), "working") as say, counted(3, "answers") as tell:
        assert (say, tell) == (None, None)


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
