"""The length at which a sequence is computed anew comes from the graph's rope frequencies."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from tiny import tiny_graph

from precast.ir.graph.schema import Const, Graph, Node
from precast.loader.cache.rotation import Rotations


def with_rope(kind: str | None) -> Graph:
    """A graph whose main begins with rope frequencies of this kind, for an original length of 16."""
    made = tiny_graph()
    if kind is None:
        return made
    args: dict[str, Any] = {"kind": Const(kind), "original_length": Const(16)}
    return msgspec.structs.replace(made, main=(Node("precast.rope_frequencies", args, ()), *made.main))


@pytest.mark.parametrize(("kind", "expected"), [(None, None), ("dynamic", None), ("longrope", 17)])
def test_restart_length(kind: str | None, expected: int | None) -> None:
    assert Rotations(with_rope(kind)).restart_length == expected
