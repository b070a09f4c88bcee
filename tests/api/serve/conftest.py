"""One server that most tests ask; those that end it, or need other options, start their own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from served import Served, served


@pytest.fixture(scope="session")
def server(bundle: Path) -> Iterator[Served]:
    """A server of the example model, called `recite`."""
    with served(bundle, "--model-name", "recite") as found:
        yield found
