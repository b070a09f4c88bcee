"""One server that most tests ask; those that end it, or need other options, start their own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from served import Served, served


@pytest.fixture(scope="session")
def server(bundle: Path) -> Iterator[Served]:
    """A server of the example model, called `recite`. It has four places: one that is lost is missed soon."""
    with served(bundle, "--model-name", "recite", "--max-num-seqs", "4", "--max-queued", "0") as found:
        yield found
