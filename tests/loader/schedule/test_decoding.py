"""The sequences that decode, as arrays: who has all its tokens, and who needs a page, step by step."""

from __future__ import annotations

from array import array

from tiny import tiny_graph

from precast.loader.cache.arena import Arena
from precast.loader.cache.tables import PageTables
from precast.loader.schedule.decoding import DecodeBatch
from precast.loader.schedule.requests import Request

TABLES = PageTables(tiny_graph().caches, Arena(40))


def request(number: int, length: int, max_length: int) -> Request:
    """One of `length` tokens, the last of which is to be computed, with pages for those before it."""
    made = Request(number, array("q", [1] * length), max_length)
    made.table = TABLES.new_table()
    TABLES.grow(made.table, length - 1)
    made.num_pending = 1
    return made


def batch(*requests: Request) -> DecodeBatch:
    rows = DecodeBatch(TABLES.plan, 8)
    for each in requests:
        rows.add(each)
    return rows


def step(rows: DecodeBatch) -> list[int]:
    """Compute the next tokens, with places for them; who has all its tokens then leaves."""
    rows.evict(TABLES)
    rows.grow(TABLES, rows.short())
    assert rows.short() == {}
    rows.advance()
    full = rows.full()
    for each in full:
        rows.remove(each)
    return [each.id for each in full]


def test_each_leaves_when_its_pending_token_is_its_last() -> None:
    """That one is drawn, and never computed."""
    rows = batch(request(0, 30, 38), request(1, 5, 10))
    assert step(rows) == []

    for number, length, max_length in ((2, 2, 4), (3, 7, 11)):
        rows.add(request(number, length, max_length))
    assert [step(rows) for _ in range(4)] == [[], [2], [], [1, 3]]
    assert [step(rows) for _ in range(4)] == [[], [], [0], []]


def test_pages_are_needed_where_the_last_one_ends_and_after_one_with_more_room_has_left() -> None:
    """Of 4 tokens a page near, of 8 far: places for the tokens at 6 and at 12, then for those after them."""
    roomy, full = request(0, 7, 30), request(1, 13, 30)
    rows = batch(roomy, full)
    found = []
    for _ in range(4):
        rows.evict(TABLES)
        short = rows.short()
        found.append({name: indices.tolist() for name, indices in short.items()})
        rows.grow(TABLES, short)
        rows.advance()
        if len(found) == 2:
            rows.remove(roomy)

    assert found == [{"near": [1]}, {}, {}, {}]
    rows.advance()
    assert {name: indices.tolist() for name, indices in rows.short().items()} == {"near": [0], "far": [0]}


def test_all_pages_of_a_chunk_of_attention_are_given_back_where_it_ends() -> None:
    """Chunks of 8 tokens on pages of 4: the token at 8 sees none of those before it, the one at 7 all of its chunk."""
    tables = PageTables(tiny_graph({"chunks": (8, 4, "pool")}, ["chunks"]).caches, Arena(40))
    rows = DecodeBatch(tables.plan, 8)
    for number, length in ((0, 7), (1, 3)):
        made = Request(number, array("q", [1] * length), 30)
        made.table = tables.new_table()
        tables.grow(made.table, length - 1)
        made.num_pending = 1
        rows.add(made)

    first = []
    for _ in range(4):
        rows.evict(tables)
        rows.grow(tables, rows.short())
        first.append([each.table.first["chunks"] for each in rows.requests])
        rows.advance()

    assert first == [[0, 0], [0, 0], [2, 0], [2, 0]]  # at 6, 7, 8, 9, and at 2, 3, 4, 5
