"""The versions of transformers that the builder knows. Nothing here imports it: a version that it doesn't know is named
before its modules are missed."""

from __future__ import annotations

import importlib.metadata
import re

from precast.ir.errors import TargetError

OLDEST = (5, 17)
"""Of the range that pyproject.toml says: each model type of docs/models.md was tried with it, and with the newest."""
BELOW = (6, 0)


def check_transformers() -> None:
    """Refuse an installed transformers of another range; without any, importing it says so.

    Raises TargetError (`dependency-unsupported`).
    """
    try:
        found = importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError:
        return
    numbers = re.match(r"(\d+)\.(\d+)", found)
    if numbers is None or not OLDEST <= (int(numbers[1]), int(numbers[2])) < BELOW:
        oldest, below = (".".join(map(str, version)) for version in (OLDEST, BELOW))
        raise TargetError(
            "dependency-unsupported",
            f"transformers {found} is installed, expected {oldest} or newer, below {below}",
            fix="pip install 'precast[build]'",
        )
