"""Models are built many times here: with weights that are stored in many ways, and for many machines."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module", autouse=True)
def _traced_once(traced_once: None) -> None:
    """What is compared is what builds and loads make of a trace; `tests/builder` has the tests of the trace."""
