"""What a step of a small graph moves and multiplies, by hand."""

from __future__ import annotations

import pytest
from graph_text import parse_graph
from support import step_floors

GRAPH = """
    symbols { T: 1.. B: 1.. R: 1.. S: 0.. }
    inputs { %ids: int64[1, T] %rows: int64[R] %chosen: int64[T, 2] %w: bfloat16[T, 2] }
    params {
      %table: bfloat16[100, 8] = read("table", [100, 8])
      %dense: bfloat16[8, 8] = read("dense", [8, 8])
      %up: bfloat16[4, 16, 8] = read("up", [4, 16, 8])
      %down: bfloat16[4, 8, 8] = read("down", [4, 8, 8])
    }
    block layer {
      inputs { %x: bfloat16[1, T, 8] %chosen: int64[T, 2] %w: bfloat16[T, 2] }
      params { %dense: bfloat16[8, 8] %up: bfloat16[4, 16, 8] %down: bfloat16[4, 8, 8] }
      %a = aten.linear.default(input=%x, weight=%dense)
      %b = aten.reshape.default(self=%a, shape=[T, 8])
      %c = precast.experts(x=%b, expert_ids=%chosen, expert_weights=%w, up=%up, down=%down, up_bias=none,
        down_bias=none, activation="silu", gated=true)
      %d = aten.reshape.default(self=%c, shape=[1, T, 8])
      return %d
    }
    main {
      %x = precast.embedding(ids=%ids, weight=%table)
      %y = call layer(x=%x, chosen=%chosen, w=%w, dense=%dense, up=%up, down=%down)
      %h = precast.gather_rows(x=%y, rows=%rows)
      %logits = aten.linear.default(input=%h, weight=%table)
      return logits=%logits
    }
"""
OTHER = """
    block other {
      inputs { %chosen: bfloat16[1, T, 8] }
      params { %dense: bfloat16[8, 8] }
      %a = aten.linear.default(input=%chosen, weight=%dense)
      return %a
    }
    main {
      %x = precast.embedding(ids=%ids, weight=%table)
      %z = call other(chosen=%x, dense=%dense)
      %y = call layer(x=%z,"""
"""A block that names something else as the layer names the experts' ids."""
DENSE, EXPERT = 2 * 8 * 8, 2 * (16 * 8 + 8 * 8)


def test_weights_are_read_once_and_of_experts_those_that_are_chosen() -> None:
    """The head reads the whole table, of which the embedding reads some rows."""
    found = step_floors.floor(parse_graph(GRAPH), tokens=5, sequences=3, length=9, experts=[3])

    assert found.weight_bytes == 2 * 100 * 8 + DENSE + 3 * EXPERT


def test_a_token_chooses_as_many_experts_as_its_layer_says() -> None:
    begin, end = GRAPH.index("\n    main {"), GRAPH.index(" chosen=%chosen, w=%w")
    graph = parse_graph(GRAPH[:begin] + OTHER + GRAPH[end:])

    assert step_floors.bytes_of_one_token(graph, 9) == 2 * 100 * 8 + DENSE + 2 * EXPERT


def test_products_are_counted_by_rows() -> None:
    few, many = (
        step_floors.floor(parse_graph(GRAPH), tokens=tokens, sequences=1, length=9, experts=[3]).flops
        for tokens in (5, 6)
    )

    assert many - few == pytest.approx(2 * (8 * 8 + 2 * (16 * 8 + 8 * 8)), abs=100)
    assert few > 2 * 8 * 100


def test_a_floor_is_the_larger_of_both_times() -> None:
    floor = step_floors.Floor(weight_bytes=3000, cache_bytes=1000, flops=500.0)

    assert floor.milliseconds(read=1000.0, product=1000.0) == 4000.0
    assert floor.milliseconds(read=1e9, product=100.0) == 5000.0
