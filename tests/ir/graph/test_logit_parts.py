"""Graphs of one of several ranks, without the exchange of logits."""

from __future__ import annotations

import pytest
from graph_text import parse_graph

from precast.ir.graph.logit_parts import in_parts
from precast.ir.graph.text import format_graph
from precast.ir.verify import verifier

TEXT = """
symbols {{ R: 1.. }}
inputs {{ %x: float32[1, R, 4] }}
params {{ %w: float32[4, 4] = cast(read("w", [4, 4]), float32) }}
main {{
  %own = aten.linear.default(input=%x, weight=%w)
  {end}
}}
"""
GATHERED = '%all = precast.all_gather(x=%own, dim=2, group="tp", size=2)'
CUT = "%cut = aten.slice.Tensor(self=%all, dim=2, start=0, end=7)"


@pytest.mark.parametrize(
    ("end", "size"), [(f"{GATHERED} return logits=%all", 8), (f"{GATHERED} {CUT} return logits=%cut, x=%x", 7)]
)
def test_the_exchange_and_the_cut_after_it_are_left_out(end: str, size: int) -> None:
    found = in_parts(parse_graph(TEXT.format(end=end)))

    assert found is not None
    assert (found.columns, found.size) == (4, size)
    verifier.check(found.graph)
    others = ", x=%x" if "x=%x" in end else ""
    assert format_graph(found.graph) == format_graph(parse_graph(TEXT.format(end=f"return logits=%own{others}")))


@pytest.mark.parametrize(
    "end",
    [
        "return logits=%own",
        f"{GATHERED} return logits=%all, y=%all",
        f"{GATHERED} %more = aten.add.Tensor(self=%all, other=%all) return logits=%more",
        GATHERED.replace("dim=2", "dim=1") + " return logits=%all",
    ],
)
def test_other_graphs_stay(end: str) -> None:
    assert in_parts(parse_graph(TEXT.format(end=end))) is None
