"""These tests use modules of their room and of `ir`'s: in importlib mode pytest puts no test folder on the path."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "ir")]
