"""Planning memory: what it holds is counted, and arithmetic without a result is an error of the graph."""

from __future__ import annotations

import pytest
from support import hostile

from precast.ir import limits
from precast.ir.errors import BundleError
from precast.ir.graph.schema import Apply
from precast.ir.memory import liveness


def test_sizes_of_what_is_alive_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = hostile.alive(20)
    (run, _) = liveness.runs(graph, lambda node, operands: 0)
    held = sum(len(moment.held) for moment in run.moments)
    assert held == 20 * 20
    monkeypatch.setattr(limits, "MAX_HELD", held)
    liveness.runs(graph, lambda node, operands: 0)

    monkeypatch.setattr(limits, "MAX_HELD", held - 1)

    with pytest.raises(BundleError, match=f"values of more than {held - 1} different sizes") as caught:
        liveness.runs(graph, lambda node, operands: 0)
    assert caught.value.code == "limit-exceeded"


def test_a_division_by_zero_is_an_error_of_the_graph() -> None:
    size = Apply("floordiv", (10, Apply("add", ("T", -1))))
    graph = hostile.graph(given=[hostile.value("i", size)], main=[hostile.relu("i", "y", size)])

    with pytest.raises(BundleError, match="can't be computed") as caught, liveness.computed():
        liveness.runs(graph, lambda node, operands: 0)

    assert caught.value.code == "graph-invalid"
