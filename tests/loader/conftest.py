"""The tests of this room share modules of their own: in importlib mode pytest puts no test folder on the path."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="module", autouse=True)
def _traced_once(request: pytest.FixtureRequest) -> None:
    """Loads begin where a build has ended. Files that don't build don't import the builder."""
    if "precast.builder.capture.capture" in sys.modules:
        request.getfixturevalue("traced_once")
