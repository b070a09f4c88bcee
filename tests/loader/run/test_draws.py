"""How tokens are drawn, as the arrays that the device gets."""

from __future__ import annotations

from array import array

from tiny import tiny_graph

from precast.loader.cache.arena import Arena
from precast.loader.cache.tables import PageTables
from precast.loader.run.batch import Arrays
from precast.loader.run.draws import DTYPES, draw_arrays, draw_padding
from precast.loader.schedule.decoding import DecodeBatch
from precast.loader.schedule.requests import GREEDY, Chunk, Draw, Request

TABLES = PageTables(tiny_graph().caches, Arena(20))
SEEDED = GREEDY._replace(seed=5)
DRAWN = Draw(0.5, 7, 0.25, 0.125, 2**63 - 1)
OTHER = Draw(1.5, 0, 1.0, 0.0, 3)


def request(draw: Draw, num_generated: int) -> Request:
    """One that has so many tokens of its answer, the last of which is to be computed."""
    made = Request(0, array("q", [1, 2]), 30, draw=draw)
    made.token_ids.extend([3] * num_generated)
    made.num_pending = 1
    made.table = TABLES.new_table()
    return made


def batch(*requests: Request) -> DecodeBatch:
    rows = DecodeBatch(TABLES.plan, 8)
    for each in requests:
        rows.add(each)
    return rows


def lists(arrays: Arrays) -> dict[str, list[float]]:
    assert {name: values.dtype for name, values in arrays.items()} == DTYPES
    return {name: values.tolist() for name, values in arrays.items()}


def test_arrays_have_a_row_for_each_answer() -> None:
    rows = batch(request(SEEDED, 1), request(DRAWN, 4))

    assert lists(draw_arrays(rows)) == {
        "temperature": [0.0, 0.5],
        "top_k": [0, 7],
        "top_p": [1.0, 0.25],
        "min_p": [0.0, 0.125],
        "seeds": [5, 2**63 - 1],
        "steps": [1, 4],
    }


def test_answers_that_begin_come_after_those_that_decode() -> None:
    chunks = [Chunk(request(DRAWN, 0), 1), Chunk(request(DRAWN, 0), 1, "none"), Chunk(request(OTHER, 2), 1)]

    assert lists(draw_arrays(batch(request(SEEDED, 6)), chunks)) == {
        "temperature": [0.0, 0.5, 1.5],
        "top_k": [0, 7, 0],
        "top_p": [1.0, 0.25, 1.0],
        "min_p": [0.0, 0.125, 0.0],
        "seeds": [5, 2**63 - 1, 3],
        "steps": [6, 0, 2],
    }


def test_rows_go_on_as_the_batch_does() -> None:
    """A step counts one token more for each; where one leaves, the last one takes its row."""
    first, second, third = request(SEEDED, 1), request(DRAWN, 4), request(OTHER, 7)
    rows = batch(first, second, third)

    rows.advance()
    assert draw_arrays(rows)["steps"].tolist() == [2, 5, 8]
    rows.remove(first)

    assert lists(draw_arrays(rows)) == {
        "temperature": [1.5, 0.5],
        "top_k": [0, 7],
        "top_p": [1.0, 0.25],
        "min_p": [0.0, 0.125],
        "seeds": [3, 2**63 - 1],
        "steps": [8, 5],
    }


def test_rows_without_an_answer_are_greedy() -> None:
    padding = draw_padding(3)

    assert {name: length for name, (length, _) in padding.items()} == dict.fromkeys(DTYPES, 3)
    assert [fill for _, fill in padding.values()] == [*GREEDY, 0]
