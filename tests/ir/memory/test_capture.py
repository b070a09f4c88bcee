"""Which sizes are planned: how they are spaced, in which order, and up to where."""

from __future__ import annotations

import itertools

import pytest
from graph_text import parse_graph

from precast.ir.graph.schema import CapturePlan, Graph
from precast.ir.memory.capture import (
    LEAST_TOKENS,
    MOST_TOKENS,
    NODE_SECONDS,
    WORK_PER_SECOND,
    capture_plan,
    cut,
    in_order,
    spaced,
    step_cost,
)


def products(width: int, layers: int) -> Graph:
    """A graph of layers with two nodes, one a product of `[T, 4096]` by `[4096, width]`; and one node beside them."""
    calls = "\n".join(f"%y{n} = call layer(x=%z, w=%w)" for n in range(layers))
    return parse_graph(f"""
        symbols {{ T: 1..1048576 }}
        inputs {{ %x: bfloat16[1, T, 4096] }}
        params {{ %w: bfloat16[{width}, 4096] = read("w", [{width}, 4096], bfloat16) }}
        block layer {{
            inputs {{ %x: bfloat16[1, T, 4096] }}
            params {{ %w: bfloat16[{width}, 4096] }}
            %n = aten.neg.default(self=%x)
            %y = aten.linear.default(input=%n, weight=%w)
            return %y
        }}
        main {{
            %z = aten.neg.default(self=%x)
            {calls}
            return y=%y0
        }}
    """)


def test_small_sizes_are_powers_of_two_and_large_ones_lie_four_to_a_doubling() -> None:
    assert spaced(1) == (1, 2, 4)
    assert spaced(64) == (1, 2, 4, 8, 12, 16, 24, 32, 40, 48, 56, 64)
    assert spaced(200)[-6:] == (96, 112, 128, 160, 192, 224)
    assert (len(spaced(LEAST_TOKENS)), len(spaced(MOST_TOKENS))) == (20, 28)


def test_a_size_is_twice_the_one_below_at_most_and_from_32_tokens_on_a_quarter_more() -> None:
    sizes = spaced(MOST_TOKENS)

    assert all(after <= 2 * before for before, after in itertools.pairwise(sizes))
    assert all(after <= 5 * before / 4 for before, after in itertools.pairwise(sizes) if before >= 32)


def test_powers_of_two_come_first() -> None:
    assert in_order(64) == (1, 2, 4, 8, 16, 32, 64, 12, 24, 40, 48, 56)


@pytest.mark.parametrize(("hidden_from", "most"), [(10, LEAST_TOKENS), (600, 640), (10 * MOST_TOKENS, MOST_TOKENS)])
def test_sizes_end_where_the_work_hides_the_launches(hidden_from: int, most: int) -> None:
    width = round(3 * NODE_SECONDS * WORK_PER_SECOND / (2 * 4096 * hidden_from))

    graph = products(width, 1)

    assert step_cost(graph).hidden_from == pytest.approx(hidden_from, rel=0.01)
    assert capture_plan(graph) == CapturePlan(in_order(most))


def test_a_step_costs_its_nodes_over_all_calls() -> None:
    cost = step_cost(products(3000, 5))

    assert cost.nodes == 11
    assert cost.work_per_token == pytest.approx(5 * 2 * 4096 * 3000, rel=0.01)
    assert cost.launch_seconds == pytest.approx(11 * NODE_SECONDS)
    assert cost.hidden_from == pytest.approx(11 * NODE_SECONDS * WORK_PER_SECOND / cost.work_per_token)


@pytest.mark.parametrize(
    ("most", "expected"),
    [(64, (1, 4, 16, 64, 8)), (100, (1, 4, 16, 64, 8)), (16, (1, 4, 16, 8)), (7, (1, 4, 7)), (1, (1,))],
)
def test_a_plan_is_cut_to_what_steps_can_fill(most: int, expected: tuple[int, ...]) -> None:
    assert cut(CapturePlan((1, 4, 16, 64, 8)), most) == expected


def test_a_plan_without_sizes_stays_so() -> None:
    assert cut(CapturePlan(), 8) == ()
