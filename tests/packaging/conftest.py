"""The repository as the packaging tests see it: the files that a commit would hold, and the packages they make up."""

from __future__ import annotations

import subprocess
import tomllib
from pathlib import Path, PurePosixPath

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def root() -> Path:
    """The top of the repository."""
    return ROOT


@pytest.fixture(scope="session")
def tree() -> list[PurePosixPath]:
    """Every file that is tracked, or untracked and not ignored, and exists; paths from the top of the repository."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    return sorted({PurePosixPath(name) for name in listed.split("\0") if name and (ROOT / name).is_file()})


@pytest.fixture(scope="session")
def package_dirs() -> dict[str, str]:
    """Import name of each listed package -> its folder, from pyproject.toml."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        return dict(tomllib.load(file)["tool"]["setuptools"]["package-dir"])
