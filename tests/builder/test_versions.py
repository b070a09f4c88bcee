"""Versions of transformers: the range is pyproject's, and what lies outside of it is named before it is imported."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from precast.builder.versions import BELOW, OLDEST, check_transformers
from precast.ir.errors import TargetError

ROOT = Path(__file__).parents[2]


def installed(version: str, folder: Path) -> Path:
    """A folder in which a transformers of this version is said to be installed."""
    (folder / f"transformers-{version}.dist-info").mkdir()
    (folder / f"transformers-{version}.dist-info" / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: transformers\nVersion: {version}\n", encoding="utf-8"
    )
    return folder


@pytest.mark.parametrize(
    ("version", "fits"),
    [("4.57.6", False), ("5.16.1", False), ("5.17.0", True), ("5.17.0.dev0", True), ("5.23.0", True), ("5.100.0", True),
     ("6.0.0", False), ("nightly", False)],
)  # fmt: skip
def test_a_version_outside_of_the_range_is_refused(
    version: str, fits: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(installed(version, tmp_path))
    message = ""

    try:
        check_transformers()
    except TargetError as error:
        message = f"{error.code} {error}"

    assert (message == "") == fits
    said = f"transformers {version} is installed, expected 5.17 or newer, below 6.0"
    assert fits or (message.startswith("dependency-unsupported ") and said in message)


def test_the_range_is_that_of_pyproject() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

    wanted = [each for each in project["optional-dependencies"]["build"] if each.startswith("transformers")]

    assert wanted == [f"transformers>={OLDEST[0]}.{OLDEST[1]},<{BELOW[0]}"]


@pytest.mark.parametrize(
    "needs_it",
    [
        "precast.build",
        "from precast.builder.build import build",
        "from precast.check.check import compare",
    ],
)
def test_it_is_said_before_transformers_is_imported(needs_it: str, tmp_path: Path) -> None:
    code = f"""
import sys
sys.path.insert(0, {str(installed("4.57.6", tmp_path))!r})
import precast
try:
    {needs_it}
except precast.TargetError as error:
    print(error.code, "transformers" in sys.modules)
"""

    ran = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)

    assert ran.stdout.split() == ["dependency-unsupported", "False"]


def test_the_command_line_says_it_where_it_compares_with_transformers(tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-m", "precast", "build", "model", "-o", tmp_path / "b", "--check"]
    env = os.environ | {"PYTHONPATH": str(installed("4.57.6", tmp_path))}

    ran = subprocess.run(command, capture_output=True, text=True, env=env, check=False)

    assert ran.returncode == 4
    assert "transformers 4.57.6 is installed, expected 5.17 or newer" in ran.stderr
