"""The example model of `examples/recite` for tests: where it is, what it knows by heart, and the command line on it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import click.testing

RECITE = Path(__file__).resolve().parents[2] / "examples" / "recite"
MODEL = RECITE / "model"
TEXT = (RECITE / "text.txt").read_text(encoding="utf-8").strip()
OPENING = "Four score and seven years ago"

Command = Callable[..., click.testing.Result]
"""`command("inspect", path)`: the command line called in this process, its output caught."""

_WORDS = 8  # of a line: enough, in this text, to tell it from the others


def line_prompts() -> list[str]:
    """The first words of each line of the text; the model goes on from any of them to the text's end."""
    return [" ".join(line.split(" ")[:_WORDS]).rstrip(",.—") for line in TEXT.split("\n") if line]


def rest(prompt: str) -> str:
    """How the text goes on after `prompt`, which occurs in it once."""
    _, found, after = TEXT.partition(prompt)
    assert found
    assert prompt not in after
    return after


def run_precast(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """`precast ARGUMENTS` in a process of its own, its standard output and error captured: no terminal anywhere."""
    command = [sys.executable, "-m", "precast", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, encoding="utf-8")
