"""Graphs on one rank: without collectives."""

from __future__ import annotations

from graph_text import parse_graph

from precast.ir.graph.alone import without_collectives
from precast.ir.graph.text import format_graph
from precast.ir.verify import verifier

TEXT = """
symbols {{ T: 1.. }}
inputs {{ %x: float32[1, T, 4] }}
params {{ %w: float32[4, 4] = cast(read("w", [4, 4]), float32) }}
block layer {{
  inputs {{ %h: float32[1, T, 4] }}
  params {{ %w: float32[4, 4] }}
  %part = aten.linear.default(input=%h, weight=%w)
  {in_block}
}}
main {{
  %first = call layer(h=%x, w=%w)
  {in_main}
}}
"""


def test_what_reads_a_collective_reads_its_argument() -> None:
    graph = parse_graph(
        TEXT.format(
            in_block='%sum = precast.all_reduce(x=%part, group="tp")  return %sum',
            in_main="""
  %all = precast.all_gather(x=%first, dim=-1, group="tp", size=1)
  %own = precast.reduce_scatter(x=%all, dim=-1, group="tp", size=1)
  %second = call layer(h=%own, w=%w)
  %both = aten.cat.default(tensors=[%own, %second], dim=-1)
  return y=%both, z=%all""",
        )
    )

    found = without_collectives(graph)

    expected = TEXT.format(
        in_block="return %part",
        in_main="""
  %second = call layer(h=%first, w=%w)
  %both = aten.cat.default(tensors=[%first, %second], dim=-1)
  return y=%both, z=%first""",
    )
    verifier.check(found)
    assert format_graph(found) == format_graph(parse_graph(expected))
