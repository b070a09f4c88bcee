"""Where values lie: what is alive together never shares memory, and what isn't does."""

from __future__ import annotations

import pytest
from graph_text import parse_graph

from precast.ir.graph.schema import Graph
from precast.ir.memory import addresses
from precast.ir.memory.addresses import Addresses, Placed

ROW = 512
"""Bytes of a token's 128 float32."""
NONE = frozenset[str]()


def planned(text: str, placed: Placed, tokens: int = 1) -> tuple[Graph, Addresses]:
    """A graph over T and x `[T, 128]`, and its addresses for steps of so many tokens."""
    graph = parse_graph(f"symbols {{ T: 1.. N: 0.. }} inputs {{ %x: float32[T, 128] }} {text}")
    return graph, addresses.plan(graph, placed, {"T": tokens})


def test_values_that_are_not_alive_together_share_memory() -> None:
    chain = " ".join(f"%v{i + 1} = aten.neg.default(self=%v{i})" for i in range(8))
    text = f"main {{ %v0 = aten.exp.default(self=%x) {chain} %y = aten.neg.default(self=%v8) return y=%y }}"

    _, found = planned(text, {"": frozenset(f"v{i}" for i in range(9))}, tokens=3)

    assert found.num_bytes == 2 * 3 * ROW
    assert all(found.main[f"v{i}"] != found.main[f"v{i + 1}"] for i in range(8))


def test_what_the_graph_returns_has_no_address() -> None:
    text = "main { %a = aten.exp.default(self=%x) %b = aten.reshape.default(self=%a, shape=[T, 2, 64]) return y=%b }"

    _, found = planned(text, {"": frozenset({"a"})})

    assert found == Addresses({"T": 1}, 0, {}, {}, {})


def test_a_view_keeps_the_memory_that_it_looks_into() -> None:
    text = """
    main {
      %a = aten.exp.default(self=%x)
      %v = aten.transpose.int(self=%a, dim0=0, dim1=1)
      %b = aten.exp.default(self=%x)
      %c = aten.neg.default(self=%b)
      %y = aten.matmul.default(self=%c, other=%v)
      return y=%y
    }
    """
    _, found = planned(text, {"": frozenset("abc")})

    assert len({found.main[name] for name in "abc"}) == 3


def test_memory_of_other_kinds_keeps_nothing() -> None:
    """What brings its own memory copies: its argument is dead after it."""
    text = """
    main {
      %a = aten.exp.default(self=%x)
      %own = aten.relu.default(self=%a)
      %b = aten.exp.default(self=%x)
      %y = aten.add.Tensor(self=%b, other=%own)
      return y=%y
    }
    """
    _, found = planned(text, {"": frozenset("ab")})

    assert found.main["a"] == found.main["b"]


def test_sizes_that_are_not_known_have_no_address() -> None:
    text = "main { %a = aten.exp.default(self=%p) %y = aten.neg.default(self=%a) return y=%y }"
    graph = parse_graph(f"symbols {{ T: 1.. N: 0.. }} inputs {{ %x: float32[T]  %p: float32[N] }} {text}")

    assert addresses.plan(graph, {"": frozenset("a")}, {"T": 4}).main == {}


LAYERS = """
block layer {
  inputs { %h: float32[T, 128] }
  %a = aten.exp.default(self=%h)
  %b = aten.neg.default(self=%a)
  %s = aten.add.Tensor(self=%h, other=%b)
  return %s
}
block views {
  inputs { %h: float32[T, 128] }
  %a = aten.neg.default(self=%h)
  %v = aten.reshape.default(self=%a, shape=[T, 128])
  return %v, %h, %a
}
main {
  %m = aten.exp.default(self=%x)
  %n = call layer(h=%m)
  %o = call layer(h=%n)
  %p, %q, %r = call views(h=%o)
  %s = aten.add.Tensor(self=%p, other=%r)
  %y = aten.add.Tensor(self=%s, other=%q)
  return y=%y
}
"""


def test_calls_share_the_memory_of_their_values_and_return_into_their_caller_s() -> None:
    placed = {"": frozenset("ms"), "layer": frozenset("abs"), "views": frozenset("a")}

    _, found = planned(LAYERS, placed)

    assert found.blocks["layer"].keys() == {"a", "b"}
    assert found.returned == {"layer": {"s": 0}, "views": {"a": 0}}
    assert found.main.keys() == {"m", "n", "o", "p", "s"}
    assert found.num_bytes == 4 * ROW  # two values of a layer, where s lies later; what goes into a call and comes out
    assert all(found.main[one] != found.main[other] for one, other in ("mn", "no", "op", "ps"))
    inside = {*found.blocks["layer"].values()}
    assert inside.isdisjoint(found.main[name] for name in "mno")


def test_what_a_block_passes_on_keeps_the_memory_of_its_argument() -> None:
    placed = {"": frozenset("ms"), "layer": frozenset("abs"), "views": frozenset("a")}
    graph, _ = planned(LAYERS, placed)

    spans = addresses.spans_of(graph, placed, {block.name: addresses.spans_of(block, placed) for block in graph.blocks})

    assert [(each.name, each.first, each.last) for each in spans.storages] == [
        ("m", 0, 1), ("n", 1, 2), ("o", 2, 5), ("p", 3, 4), ("s", 4, 5),
    ]  # fmt: skip


@pytest.mark.parametrize("tokens", [1, 7])
def test_places_are_aligned(tokens: int) -> None:
    text = """
    main {
      %a = aten.gt.Scalar(self=%x, other=0.0)
      %b = aten.exp.default(self=%x)
      %y = aten.where.self(condition=%a, self=%b, other=%x)
      return y=%y
    }
    """
    _, found = planned(text, {"": frozenset("ab")}, tokens)

    assert all(offset % addresses.ALIGNMENT == 0 for offset in found.main.values())
    assert found.num_bytes % addresses.ALIGNMENT == 0
