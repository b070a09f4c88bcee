"""What sequences leave for others: found by content, held once, given up oldest first and ends first."""

from __future__ import annotations

from array import array
from typing import Any

import msgspec
import pytest
from tiny import tiny_graph

from precast.ir.graph.schema import Const, Graph, Node
from precast.loader.cache.arena import Arena
from precast.loader.cache.prefixes import Prefixes
from precast.loader.cache.rotation import Rotations
from precast.loader.cache.tables import PageTables
from precast.loader.schedule.requests import Request

FULL = tiny_graph({"far": (None, 4, "a")}, ("far",))
WINDOW = tiny_graph({"near": (6, 4, "a"), "far": (None, 8, "b")}, ("near", "far"))
STATE = tiny_graph({"far": (None, 4, "a")}, ("far",), state=True)


def made(graph: Graph, slabs: int = 50, **options: Any) -> tuple[PageTables, Prefixes]:
    tables = PageTables(graph.caches, Arena(slabs))
    return tables, Prefixes(tables, **options)


def started(tables: PageTables, prefixes: Prefixes, *token_ids: int, number: int = 1) -> Request:
    """A request that runs, after what is known of it."""
    request = Request(number, array("q", token_ids), len(token_ids) + 9)
    prefixes.start(request, prefixes.match(request))
    return request


def compute(tables: PageTables, prefixes: Prefixes, request: Request, *ends: int) -> Request:
    """Compute its tokens in chunks that end at `ends`, then the rest."""
    for end in (*ends, len(request.token_ids)):
        tables.grow(request.table, end)
        prefixes.saved()
        prefixes.restored(request)
        request.num_computed = end
        prefixes.register(request)
        tables.evict(request.table, end)
    return request


def leave(tables: PageTables, prefixes: Prefixes, request: Request) -> None:
    prefixes.leave(request)
    tables.release(request.table)


def reused(tables: PageTables, prefixes: Prefixes, *token_ids: int) -> int:
    """How much of these tokens need not be computed; nothing is changed."""
    return prefixes.match(Request(9, array("q", token_ids), len(token_ids) + 1)).length


def in_use(tables: PageTables) -> int:
    return sum(pool.num_held for pool in tables.pools.values())


TEN = tuple(range(10))


def test_whole_spans_are_reused_and_one_token_is_always_computed() -> None:
    tables, prefixes = made(FULL)
    assert prefixes.span_tokens == 4
    leave(tables, prefixes, compute(tables, prefixes, started(tables, prefixes, *TEN)))

    assert prefixes.num_spans == 2
    assert reused(tables, prefixes, *TEN) == 8
    assert reused(tables, prefixes, *TEN[:9]) == 8
    assert reused(tables, prefixes, *TEN[:8]) == 4
    assert reused(tables, prefixes, *TEN[:5], 99, 99, 99, 99) == 4
    assert reused(tables, prefixes, 99, *TEN[1:]) == 0
    assert reused(tables, prefixes, *TEN[4:]) == 0  # the same tokens at other positions are others


def test_shared_pages_are_held_by_all_who_share_them() -> None:
    tables, prefixes = made(FULL)
    first = compute(tables, prefixes, started(tables, prefixes, *TEN))
    second = started(tables, prefixes, *TEN, 77, number=2)
    shared = first.table.pages["far"][:2]

    assert second.table.pages["far"] == shared
    assert (second.num_computed, second.num_reused) == (8, 8)
    assert [tables.pools["a"].holders(page) for page in shared] == [3, 3]  # two sequences, and what is known
    leave(tables, prefixes, first)
    leave(tables, prefixes, second)
    assert in_use(tables) == 2
    prefixes.clear()
    assert in_use(tables) == prefixes.num_spans == 0
    assert tables.arena.num_free == 50


def test_spans_in_use_are_not_dropped() -> None:
    tables, prefixes = made(FULL)
    running = compute(tables, prefixes, started(tables, prefixes, *TEN))
    assert not prefixes.drop_one()
    assert prefixes.reclaimable() == {"far": 0}
    leave(tables, prefixes, running)
    assert prefixes.reclaimable() == {"far": 2}
    assert [prefixes.drop_one() for _ in range(3)] == [True, True, False]
    assert prefixes.reclaimable() == {"far": 0}


def test_the_longest_unused_goes_first_and_the_end_before_the_beginning() -> None:
    tables, prefixes = made(FULL)
    for start in (0, 100, 200):
        leave(tables, prefixes, compute(tables, prefixes, started(tables, prefixes, *range(start, start + 10))))
    leave(tables, prefixes, started(tables, prefixes, *TEN))  # used again

    def known() -> list[int]:
        return [reused(tables, prefixes, *range(start, start + 10)) for start in (0, 100, 200)]

    found = [known()]
    while prefixes.drop_one():
        found.append(known())
    assert found == [[8, 8, 8], [8, 4, 8], [8, 0, 8], [8, 0, 4], [8, 0, 0], [4, 0, 0], [0, 0, 0]]


def test_a_window_needs_the_tail_only_and_only_where_it_is_there() -> None:
    tables, prefixes = made(WINDOW)
    assert prefixes.span_tokens == 8
    whole = tuple(range(30))
    leave(tables, prefixes, compute(tables, prefixes, started(tables, prefixes, *whole), 16))

    # After 24 tokens the next sees 19 .. 24: pages 4 and 5 of 4 tokens. After 16 it sees 11 .. 16: pages 2 and 3.
    assert tables.pools["b"].num_held == 3
    assert tables.pools["a"].num_held == 4
    assert reused(tables, prefixes, *whole) == 24
    assert reused(tables, prefixes, *whole[:24]) == 16
    assert reused(tables, prefixes, *whole[:16]) == 0  # nobody kept what the token at 8 sees
    going_on = started(tables, prefixes, *whole, 7, number=2)
    assert (going_on.table.first["near"], len(going_on.table.pages["near"])) == (4, 2)
    assert (going_on.table.first["far"], len(going_on.table.pages["far"])) == (0, 3)


def test_a_point_is_made_where_a_prompt_leaves_what_is_known() -> None:
    tables, prefixes = made(WINDOW)
    shared = tuple(range(9))
    found = []
    for last in (50, 60, 70):
        request = started(tables, prefixes, *shared, *[last] * 20)
        found.append(request.num_reused)
        leave(tables, prefixes, compute(tables, prefixes, request))
    assert found == [0, 0, 8]


@pytest.mark.parametrize("graph", [FULL, WINDOW, STATE])
def test_a_prompt_of_whole_spans_is_reused_when_it_comes_again(graph: Graph) -> None:
    tables, prefixes = made(graph)
    whole = tuple(range(4 * prefixes.span_tokens))
    ends = (3 * prefixes.span_tokens,) if prefixes.has_states else ()  # where the scheduler cuts it
    leave(tables, prefixes, compute(tables, prefixes, started(tables, prefixes, *whole), *ends))
    assert reused(tables, prefixes, *whole) == 3 * prefixes.span_tokens
    assert reused(tables, prefixes, *whole, 7) == 4 * prefixes.span_tokens


def test_a_point_stays_while_a_running_sequence_holds_its_pages() -> None:
    """To give it up would free nothing, and others may go on from there."""
    tables, prefixes = made(WINDOW)
    running = started(tables, prefixes, *range(9))
    tables.grow(running.table, 8)
    running.num_computed = 8
    prefixes.register(running)
    assert tables.pools["a"].num_held == 2

    assert not prefixes.drop_one()
    assert reused(tables, prefixes, *range(9)) == 8

    compute(tables, prefixes, running)  # position 9 sees 4 .. 9: the first page is the point's alone
    assert prefixes.drop_one()
    assert reused(tables, prefixes, *range(9)) == 0
    assert tables.pools["a"].num_held == 2
    assert not prefixes.drop_one()


def test_points_that_share_their_first_page_are_given_up_when_no_sequence_holds_it() -> None:
    tables, prefixes = made(tiny_graph({"near": (30, 4, "a"), "far": (None, 8, "b")}, ("near", "far")))
    running = compute(tables, prefixes, started(tables, prefixes, *range(35)), 8, 16, 24)
    # All points begin with page 0, which the sequence gave back: position 35 sees 6 .. 35.
    assert running.table.first["near"] == 1
    assert tables.pools["a"].num_held == 1 + len(running.table.pages["near"])

    while prefixes.drop_one():
        pass
    assert tables.pools["a"].num_held == len(running.table.pages["near"])


def test_clearing_gives_up_points_that_free_nothing() -> None:
    tables, prefixes = made(WINDOW)
    running = started(tables, prefixes, *range(9))
    tables.grow(running.table, 8)
    running.num_computed = 8
    prefixes.register(running)
    prefixes.clear()
    assert reused(tables, prefixes, *range(9)) == 0


def test_points_of_running_sequences_are_given_up_last() -> None:
    tables, prefixes = made(WINDOW)
    running = compute(tables, prefixes, started(tables, prefixes, *range(30)), 16)
    assert tables.pools["a"].num_held == 4 + 2  # those of two points, and its own
    leave(tables, prefixes, compute(tables, prefixes, started(tables, prefixes, *range(100, 110), number=2)))
    assert prefixes.drop_one()
    assert reused(tables, prefixes, *range(100, 110)) == 0
    assert reused(tables, prefixes, *range(30)) == 24
    assert prefixes.drop_one()  # the older of its points
    assert reused(tables, prefixes, *range(24)) == 0
    assert reused(tables, prefixes, *range(30)) == 24
    leave(tables, prefixes, running)
    prefixes.clear()
    assert in_use(tables) == 0


def test_a_point_that_was_used_is_given_up_later() -> None:
    tables, prefixes = made(WINDOW)
    running = [
        compute(tables, prefixes, started(tables, prefixes, *range(start, start + 30), number=start), 16)
        for start in (0, 100)
    ]
    leave(tables, prefixes, started(tables, prefixes, *range(30), number=2))
    assert [prefixes.drop_one() for _ in range(3)] == [True] * 3
    assert [reused(tables, prefixes, *request.token_ids) for request in running] == [24, 0]


def test_spans_computed_again_are_kept_as_long_as_those_behind_them() -> None:
    tables, prefixes = made(WINDOW)
    leave(tables, prefixes, compute(tables, prefixes, started(tables, prefixes, *range(30))))
    other = (*range(16), *range(70, 80))
    running = started(tables, prefixes, *other, number=2)
    assert running.num_reused == 0, "no point leads to the spans that both begin with"
    compute(tables, prefixes, running)
    while prefixes.drop_one():
        pass
    assert tables.pools["b"].num_held == len(running.table.pages["far"]), "no span is kept twice"

    leave(tables, prefixes, running)
    assert prefixes.num_spans == 3
    assert prefixes.reclaimable()["far"] == tables.pools["b"].num_held == 3


def test_known_spans_without_pages_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("precast.loader.cache.prefixes.MAX_SPANS", 3)
    tables, prefixes = made(tiny_graph({}, (), state=True))
    leave(tables, prefixes, compute(tables, prefixes, started(tables, prefixes, *range(5 * prefixes.span_tokens))))
    assert prefixes.num_spans == 3


def test_copies_of_states_are_counted_as_reclaimable_while_they_are_there() -> None:
    tables, prefixes = made(STATE)
    leave(tables, prefixes, compute(tables, prefixes, started(tables, prefixes, *TEN[:8])))
    assert prefixes.reclaimable() == {"far": 2, "state": 1}
    prefixes.drop_points()
    assert prefixes.reclaimable() == {"far": 2, "state": 0}


def test_states_are_copied_into_a_page_of_their_own_and_back() -> None:
    tables, prefixes = made(STATE)
    first = compute(tables, prefixes, started(tables, prefixes, *TEN[:8]))
    (save,) = prefixes.take_saves()
    assert (save.group, save.source) == ("state", first.table.pages["state"][0])
    assert save.target != save.source
    prefixes.saved()
    assert prefixes.take_saves() == []

    second = started(tables, prefixes, *TEN, 5, number=2)
    tables.grow(second.table, 9)
    (restore,) = prefixes.restores(second)
    assert (restore.source, restore.target) == (save.target, second.table.pages["state"][0])
    assert second.num_reused == 8
    # what it goes on from stays, even if it is given up meanwhile
    prefixes.clear()
    assert tables.pools["states"].holders(restore.source) == 1
    prefixes.restored(second)
    assert tables.pools["states"].holders(restore.source) == 0


def test_a_state_in_the_middle_of_a_span_is_not_kept() -> None:
    tables, prefixes = made(STATE)
    leave(tables, prefixes, compute(tables, prefixes, started(tables, prefixes, *TEN), 7))
    assert prefixes.num_spans == 2
    assert reused(tables, prefixes, *TEN) == 0


def test_a_dropped_copy_is_not_made() -> None:
    tables, prefixes = made(STATE)
    compute(tables, prefixes, started(tables, prefixes, *TEN[:8]))
    assert len(prefixes.take_saves()) == 1
    prefixes.drop_points()
    assert prefixes.take_saves() == []


def test_a_copy_that_a_sequence_goes_on_from_is_made_though_it_is_given_up() -> None:
    tables, prefixes = made(STATE)
    leave(tables, prefixes, compute(tables, prefixes, started(tables, prefixes, *TEN[:8])))
    going_on = started(tables, prefixes, *TEN, 5, number=2)  # before the copy is made
    prefixes.clear()
    (save,) = prefixes.take_saves()
    assert list(going_on.restores.values()) == [save.target]

    leave(tables, prefixes, going_on)
    prefixes.clear()
    assert prefixes.take_saves() == []
    assert in_use(tables) == 0


def test_copies_come_in_an_order_in_which_none_is_lost() -> None:
    tables, prefixes = made(STATE)
    running = [started(tables, prefixes, first, *TEN[:4], number=first) for first in (1, 2, 3)]
    holds: dict[int, int] = {}
    for request in running:
        tables.grow(request.table, 4)
        request.num_computed = 4
        holds[request.table.pages["state"][0]] = request.id
    for request in running:  # each gives up its page, and the next one's copy goes there
        prefixes.register(request)
        leave(tables, prefixes, request)
    copies = prefixes.take_saves()
    assert {copy.source for copy in copies} & {copy.target for copy in copies}
    for copy in copies:
        holds[copy.target] = holds[copy.source]
    for request in running:
        found = started(tables, prefixes, *request.token_ids, number=9)
        assert [holds[page] for page in found.restores.values()] == [request.id]


def test_one_that_does_not_share_takes_nothing_and_leaves_nothing() -> None:
    tables, prefixes = made(FULL)
    leave(tables, prefixes, compute(tables, prefixes, started(tables, prefixes, *TEN)))
    alone = Request(2, array("q", [*TEN, 10, 11, 12, 13]), 20)
    alone.reuses_prefixes = False
    prefixes.start(alone, prefixes.match(alone))

    assert alone.num_reused == 0
    leave(tables, prefixes, compute(tables, prefixes, alone))
    assert prefixes.num_spans == 2


@pytest.mark.parametrize(
    ("kind", "short", "long", "other"),
    [("longrope", (9, 16), (17, 40), (16, 17)), ("dynamic", (9, 16), (17, 17), (17, 18))],
)
def test_sequences_that_are_rotated_differently_share_nothing(
    kind: str, short: tuple[int, int], long: tuple[int, int], other: tuple[int, int]
) -> None:
    args: dict[str, Any] = {"kind": Const(kind), "original_length": Const(16)}
    graph = msgspec.structs.replace(FULL, main=(Node("precast.rope_frequencies", args, ()), *FULL.main))
    tables, prefixes = made(graph, kind_of=Rotations(graph).kind_of)
    tokens = tuple(range(45))

    def reuse(before: int, after: int) -> int:
        leave(tables, prefixes, compute(tables, prefixes, started(tables, prefixes, *tokens[:before])))
        found = reused(tables, prefixes, *tokens[:after])
        prefixes.clear()
        return found

    assert reuse(*short) == 8
    assert reuse(*long) == 16
    assert reuse(*other) == 0


# --- asking changes nothing; what is wrong is withdrawn ----------------------------------------------------------


@pytest.mark.parametrize("graph", [FULL, WINDOW, STATE])
def test_a_match_holds_nothing(graph: Graph) -> None:
    tables, prefixes = made(graph)
    leave(tables, prefixes, compute(tables, prefixes, started(tables, prefixes, *range(16))))
    before = in_use(tables), prefixes.reclaimable(), tables.usage()

    match = prefixes.match(Request(2, array("q", range(20)), 30))

    assert match.length > 0
    assert (in_use(tables), prefixes.reclaimable(), tables.usage()) == before
    prefixes.clear()
    assert in_use(tables) == 0


def test_what_a_match_needs_is_given_up_last() -> None:
    tables, prefixes = made(WINDOW)
    for start in (0, 100):
        leave(tables, prefixes, compute(tables, prefixes, started(tables, prefixes, *range(start, start + 24))))
    match = prefixes.match(Request(2, array("q", range(24)), 30))
    assert prefixes.reclaimable(match)["far"] == prefixes.reclaimable()["far"] - 2

    prefixes.touch(match)
    while prefixes.drop_one(match):
        pass

    assert [reused(tables, prefixes, *range(start, start + 24)) for start in (0, 100)] == [16, 0]
    assert [span for span in match.spans if span.point is not None] == match.spans[-1:]


def test_what_is_withdrawn_is_found_no_more_and_neither_is_what_continues_it() -> None:
    tables, prefixes = made(FULL)
    wrong = compute(tables, prefixes, started(tables, prefixes, *range(8)))
    sharing = compute(tables, prefixes, started(tables, prefixes, *range(14), number=2))
    leave(tables, prefixes, compute(tables, prefixes, started(tables, prefixes, *range(12), 50, 51, 52, 53, number=3)))
    leave(tables, prefixes, compute(tables, prefixes, started(tables, prefixes, *range(60, 70), number=4)))
    assert reused(tables, prefixes, *range(13)) == 12

    prefixes.withdraw(wrong)
    leave(tables, prefixes, wrong)

    assert reused(tables, prefixes, *range(13)) == 0
    assert reused(tables, prefixes, *range(60, 70)) == 8
    # One that shares what was withdrawn goes on, and leaves nothing: its pages are given back with it.
    sharing.token_ids.extend(range(14, 20))
    sharing.num_pending += 6
    compute(tables, prefixes, sharing)
    leave(tables, prefixes, sharing)
    assert prefixes.num_spans == in_use(tables) == 2
    leave(tables, prefixes, compute(tables, prefixes, started(tables, prefixes, *range(9), number=5)))
    assert reused(tables, prefixes, *range(20)) == 8, "computed anew, without what once followed it"
    prefixes.clear()
    assert in_use(tables) == 0


@pytest.mark.parametrize("graph", [FULL, WINDOW, STATE])
def test_what_others_computed_stays_when_one_that_goes_on_from_it_fails(graph: Graph) -> None:
    tables, prefixes = made(graph)
    first = compute(tables, prefixes, started(tables, prefixes, *range(16)))
    prefixes.prove(first)
    wrong = compute(tables, prefixes, started(tables, prefixes, *range(30), number=2))
    assert wrong.num_reused == 16
    leave(tables, prefixes, first)

    prefixes.withdraw(wrong)
    leave(tables, prefixes, wrong)

    assert reused(tables, prefixes, *range(30)) == 16
    prefixes.clear()
    assert in_use(tables) == 0


def test_what_an_answer_computed_is_proven_by_its_tokens() -> None:
    tables, prefixes = made(FULL)
    first = compute(tables, prefixes, started(tables, prefixes, *range(6)))
    prefixes.prove(first)
    first.token_ids.extend(range(6, 20))
    leave(tables, prefixes, compute(tables, prefixes, first))
    wrong = compute(tables, prefixes, started(tables, prefixes, *range(25), number=2))

    prefixes.withdraw(wrong)
    leave(tables, prefixes, wrong)

    assert reused(tables, prefixes, *range(25)) == 20


@pytest.mark.parametrize("graph", [FULL, WINDOW, STATE])
def test_what_no_token_was_drawn_from_falls_with_the_first_that_fails_on_it(graph: Graph) -> None:
    """A chunk of a prompt is known before anybody sees whether it made NaN."""
    tables, prefixes = made(graph)
    cancelled = compute(tables, prefixes, started(tables, prefixes, *range(16)))
    leave(tables, prefixes, cancelled)
    wrong = compute(tables, prefixes, started(tables, prefixes, *range(30), number=2))
    assert wrong.num_reused == 16

    prefixes.withdraw(wrong)
    leave(tables, prefixes, wrong)

    assert reused(tables, prefixes, *range(30)) == 0
    assert prefixes.num_spans == in_use(tables) == 0


def test_a_point_of_one_that_fails_does_not_survive_on_the_span_of_another() -> None:
    tables, prefixes = made(STATE)
    first = compute(tables, prefixes, started(tables, prefixes, *range(10)))  # no state is kept at 8: no chunk ended
    prefixes.prove(first)
    wrong = compute(tables, prefixes, started(tables, prefixes, *range(10), 50, number=2), 8)
    assert reused(tables, prefixes, *range(10)) == 8

    prefixes.withdraw(wrong)
    leave(tables, prefixes, wrong)

    assert reused(tables, prefixes, *range(10)) == 0
    assert prefixes.num_spans == 2
    assert prefixes.take_saves() == []


def test_a_point_that_no_token_was_drawn_from_falls_with_the_first_that_fails_on_it() -> None:
    tables, prefixes = made(STATE)
    first = compute(tables, prefixes, started(tables, prefixes, *range(10)))
    prefixes.prove(first)
    cancelled = compute(tables, prefixes, started(tables, prefixes, *range(10), 50, number=2), 8)
    leave(tables, prefixes, cancelled)
    wrong = started(tables, prefixes, *range(10), 60, number=3)
    assert wrong.num_reused == 8

    prefixes.withdraw(wrong)
    leave(tables, prefixes, wrong)

    assert reused(tables, prefixes, *range(10)) == 0
    assert prefixes.num_spans == 2


def test_a_span_that_was_computed_again_is_proven_by_its_new_pages_alone() -> None:
    tables, prefixes = made(WINDOW)
    first = compute(tables, prefixes, started(tables, prefixes, *range(30)))
    prefixes.prove(first)
    leave(tables, prefixes, first)
    cancelled = compute(tables, prefixes, started(tables, prefixes, *range(16), *range(70, 80), number=2))
    assert cancelled.num_reused == 0, "no point leads to the spans that both begin with"
    leave(tables, prefixes, cancelled)
    wrong = started(tables, prefixes, *range(16), *range(90, 99), number=3)
    assert wrong.num_reused == 16

    prefixes.withdraw(wrong)
    leave(tables, prefixes, wrong)

    assert prefixes.num_spans == in_use(tables) == 0
