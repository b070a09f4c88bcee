"""`make registry-demo` goes through: built, pushed, signed, attested, tagged, pulled, verified, recited."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

DEMO = Path(__file__).parents[2] / "examples" / "registry" / "demo.py"


@pytest.mark.slow
def test_registry_demo() -> None:
    done = subprocess.run([sys.executable, str(DEMO)], capture_output=True, text=True)

    assert done.returncode == 0, done.stdout + done.stderr
    assert "Recited to the letter" in done.stdout
