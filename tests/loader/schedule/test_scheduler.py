"""Which tokens a step computes: the budget holds, first come is first served, pages flow to those who need them."""

from __future__ import annotations

from array import array
from collections import Counter
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import tiny_graph

from precast.ir.errors import RequestError
from precast.ir.graph.schema import CachePlan, Pool
from precast.loader.cache.arena import Arena
from precast.loader.cache.prefixes import Prefixes
from precast.loader.cache.tables import PageTables
from precast.loader.run.batch import BatchInputs
from precast.loader.schedule.requests import Chunk, Request, Step
from precast.loader.schedule.scheduler import RETRY_STEPS, Scheduler

GRAPH = tiny_graph()
PLAN = GRAPH.caches
"""Window 6 over pages of 4 tokens (`near`, a page a slab), and full attention over pages of 8 (`far`, two a slab)."""


def tables(slabs: int = 60) -> PageTables:
    return PageTables(PLAN, Arena(slabs))


def scheduler(slabs: int = 60, seqs: int = 8, tokens: int = 16) -> Scheduler:
    return Scheduler(tables(slabs), max_num_seqs=seqs, max_num_tokens=tokens)


def request(number: int, prompt: int, answer: int, priority: int = 0, first: int = 0) -> Request:
    """`prompt` tokens, of which the first is `first`: requests of unequal ones share nothing."""
    return Request(number, array("q", [first, *range(1, prompt)]), prompt + answer, priority)


def run(queue: Scheduler) -> list[tuple[int, int, bool]]:
    """One step: (request, tokens, samples) of what it computes; each sampled token is 7."""
    step = queue.schedule()
    found = [(each.id, 1, True) for each in step.decodes]
    found += [(chunk.request.id, chunk.length, chunk.samples) for chunk in step.chunks]
    finish(queue, step)
    return found


def finish(queue: Scheduler, step: Step, token_id: int = 7) -> list[Request]:
    """Complete a step, and remove the requests whose answers have reached their limit."""
    sampled = step.sampled
    queue.complete(step, [token_id] * len(sampled))
    ended = [each for each in sampled if len(each.token_ids) == each.max_length]
    for each in ended:
        queue.remove(each)
    return ended


def in_use(tables: PageTables) -> int:
    return sum(usage.pages_in_use for usage in tables.usage().values())


def test_a_prompt_is_cut_to_the_budget_and_samples_with_its_last_chunk() -> None:
    queue = scheduler(tokens=7)
    queue.submit(request(1, prompt=17, answer=3))
    assert [run(queue) for _ in range(5)] == [
        [(1, 7, False)],
        [(1, 7, False)],
        [(1, 3, True)],
        [(1, 1, True)],
        [(1, 1, True)],
    ]
    assert queue.schedule() == Step([], [])


def test_decodes_come_first_and_prompts_take_what_is_left() -> None:
    queue = scheduler(tokens=6)
    queue.submit(request(1, prompt=4, answer=9))
    assert run(queue) == [(1, 4, True)]
    queue.submit(request(2, prompt=8, answer=9))
    queue.submit(request(3, prompt=2, answer=9))
    assert run(queue) == [(1, 1, True), (2, 5, False)]
    assert run(queue) == [(1, 1, True), (2, 3, True), (3, 2, True)]
    assert run(queue) == [(1, 1, True), (2, 1, True), (3, 1, True)]


def test_prompts_have_a_budget_of_their_own_beside_those_that_decode() -> None:
    queue = Scheduler(tables(), max_num_seqs=8, max_num_tokens=16, most_beside=lambda count: 2 + count)
    queue.submit(request(1, prompt=10, answer=3))
    queue.submit(request(2, prompt=12, answer=9))
    assert run(queue) == [(1, 10, True), (2, 6, False)], "nobody decodes yet"
    queue.submit(request(3, prompt=8, answer=1))
    assert run(queue) == [(1, 1, True), (2, 3, False)]
    assert run(queue) == [(1, 1, True), (2, 3, True)]
    assert run(queue) == [(2, 1, True), (3, 3, False)]
    queue.remove(queue.decoding.requests[0])
    assert run(queue) == [(3, 5, True)], "nobody decodes any more"


def test_what_is_left_of_the_budget_of_prompts_goes_to_the_next_one() -> None:
    queue = Scheduler(tables(), max_num_seqs=8, max_num_tokens=16, most_beside=lambda _: 5)
    queue.submit(request(1, prompt=1, answer=9))
    run(queue)
    for number in (2, 3, 4):
        queue.submit(request(number, prompt=3, answer=1, first=number))
    assert run(queue) == [(1, 1, True), (2, 3, True), (3, 2, False)]
    assert run(queue) == [(1, 1, True), (3, 1, True), (4, 3, True)]


@pytest.mark.parametrize("limit", [{"seqs": 1}, {"tokens": 1}, {}], ids=str)
def test_a_step_without_a_budget_of_prompts_decodes_and_admits_nobody(limit: dict[str, int]) -> None:
    """Not even one of a higher priority, for which another would have to give up its place."""
    found = iter((0, 3))
    options = {"max_num_seqs": limit.get("seqs", 8), "max_num_tokens": limit.get("tokens", 16)}
    queue = Scheduler(tables(), **options, most_beside=lambda _: next(found))
    queue.submit(request(1, prompt=1, answer=9))
    run(queue)
    queue.submit(request(2, prompt=1, answer=2, priority=1, first=5))
    assert run(queue) == [(1, 1, True)]
    assert (queue.num_waiting, queue.num_preemptions) == (1, 0)
    assert (2, 1, True) in run(queue)


def test_no_more_sequences_run_than_allowed() -> None:
    queue = scheduler(seqs=2)
    for number in (1, 2, 3):
        queue.submit(request(number, prompt=2, answer=2))
    assert run(queue) == [(1, 2, True), (2, 2, True)]
    assert (queue.num_running, queue.num_waiting) == (2, 1)
    assert run(queue) == [(1, 1, True), (2, 1, True)]
    assert run(queue) == [(3, 2, True)]


def test_no_more_sequences_run_than_a_step_has_tokens() -> None:
    queue = scheduler(seqs=8, tokens=2)
    for number in (1, 2, 3):
        queue.submit(request(number, prompt=1, answer=3))
    assert [run(queue) for _ in range(4)] == [
        [(1, 1, True), (2, 1, True)],
        [(1, 1, True), (2, 1, True)],
        [(1, 1, True), (2, 1, True)],
        [(3, 1, True)],
    ]


# --- who comes first -------------------------------------------------------------------------------------------


def test_the_first_that_waits_is_not_overtaken() -> None:
    queue = scheduler(slabs=10)
    queue.submit(request(1, prompt=16, answer=5))  # two pages of 8 and four of 4: five slabs
    queue.submit(request(2, prompt=24, answer=5))  # eight more
    queue.submit(request(3, prompt=1, answer=2))  # would fit
    assert run(queue) == [(1, 16, True)]
    assert (queue.num_running, queue.num_waiting) == (1, 2)
    assert run(queue) == [(1, 1, True)]
    assert queue.num_waiting == 2


def test_a_higher_priority_goes_first_and_within_it_the_first() -> None:
    queue = scheduler(seqs=1)
    for number, priority in ((1, 0), (2, -3), (3, 5), (4, 0), (5, 5)):
        queue.submit(request(number, prompt=2, answer=1, priority=priority))
    assert [run(queue) for _ in range(5)] == [[(number, 2, True)] for number in (3, 5, 1, 4, 2)]


def test_prompts_of_a_higher_priority_are_computed_first() -> None:
    queue = scheduler(tokens=6)
    queue.submit(request(1, prompt=20, answer=1))
    assert run(queue) == [(1, 6, False)]
    queue.submit(request(2, prompt=3, answer=4, priority=1))
    queue.submit(request(3, prompt=1, answer=1))  # nobody of its own priority is overtaken
    assert [run(queue) for _ in range(5)] == [
        [(2, 3, True), (1, 3, False)],
        [(2, 1, True), (1, 5, False)],
        [(2, 1, True), (1, 5, False)],
        [(2, 1, True), (1, 1, True), (3, 1, True)],
        [],
    ]


def ended(queue: Scheduler, steps: int) -> list[int]:
    """The requests that end within so many steps, in order."""
    found = []
    for _ in range(steps):
        found += [each.id for each in finish(queue, queue.schedule())]
    return found


@pytest.mark.parametrize("reuses", [False, True])
def test_a_higher_priority_takes_the_pages_of_a_lower_one(reuses: bool) -> None:
    memory = tables(25)
    queue = Scheduler(memory, max_num_seqs=8, max_num_tokens=16, prefixes=Prefixes(memory) if reuses else None)
    low = request(1, prompt=30, answer=270)
    queue.submit(low)
    while len(low.token_ids) < 254:
        run(queue)
    assert memory.arena.num_free <= 6
    queue.submit(request(2, prompt=120, answer=5, priority=9, first=3))

    assert run(queue) == [(2, 16, False)]
    assert (queue.num_preemptions, any(low.table.pages.values())) == (1, False)
    assert ended(queue, 100) == [2, 1]
    assert (queue.num_preemptions, len(low.token_ids)) == (1, 300)


@pytest.mark.parametrize("limit", [{"seqs": 2}, {"tokens": 2}], ids=str)
def test_a_higher_priority_takes_the_place_of_the_last_of_a_lower_one(limit: dict[str, int]) -> None:
    queue = scheduler(**limit)
    for number in (1, 2):
        queue.submit(request(number, prompt=1, answer=40))
    run(queue)
    for number, priority in ((3, 1), (4, 1), (5, 1), (6, 0)):
        queue.submit(request(number, prompt=1, answer=3, priority=priority))

    if "tokens" in limit:  # one place is freed a step, where each has one token
        assert {number for number, _, _ in run(queue)} == {1, 3}
    assert {number for number, _, _ in run(queue)} == {3, 4}, "and 5 doesn't take the place of one of its priority"
    assert queue.num_preemptions == 2
    assert ended(queue, 100) == [3, 4, 5, 1, 2, 6]
    assert queue.num_preemptions == 2


def test_one_that_runs_alone_gives_way_to_a_higher_priority_only() -> None:
    queue = scheduler()
    alone = request(1, prompt=4, answer=20)
    alone.run_alone()
    queue.submit(alone)
    run(queue)
    queue.submit(request(2, prompt=4, answer=3))
    assert run(queue) == [(1, 1, True)]
    queue.submit(request(3, prompt=4, answer=3, priority=1))
    assert {number for number, _, _ in run(queue)} == {3}
    assert ended(queue, 100) == [3, 1, 2]
    assert queue.num_preemptions == 1


def test_one_that_is_to_run_alone_takes_all_places_of_a_lower_priority_or_none() -> None:
    queue = scheduler()
    for number, priority in ((1, 0), (2, 1)):
        queue.submit(request(number, prompt=4, answer=3 if priority else 20, priority=priority))
    run(queue)
    alone = request(3, prompt=4, answer=3, priority=1)
    alone.run_alone()
    queue.submit(alone)
    assert {number for number, _, _ in run(queue)} == {1, 2}
    run(queue)
    assert [run(queue), queue.num_preemptions] == [[(3, 4, True)], 1]


def test_nobody_is_preempted_in_vain() -> None:
    memory = tables(20)
    queue = Scheduler(memory, max_num_seqs=8, max_num_tokens=64)
    queue.submit(request(1, prompt=60, answer=60, priority=1))
    run(queue)
    queue.submit(request(2, prompt=4, answer=30))
    run(queue)
    # With all that the lower one has there is no room beside the first.
    queue.submit(request(3, prompt=64, answer=2, priority=1))
    for _ in range(RETRY_STEPS + 2):
        assert {number for number, _, _ in run(queue)} == {1, 2}
    assert queue.num_preemptions == 0


def test_the_next_is_looked_at_when_the_blocking_first_is_cancelled() -> None:
    queue = scheduler(slabs=20)
    queue.submit(request(1, prompt=60, answer=40))
    for _ in range(8):
        run(queue)
    first = request(2, prompt=90, answer=5, first=5)
    queue.submit(first)
    queue.submit(request(3, prompt=2, answer=2, first=6))
    assert run(queue) == [(1, 1, True)]
    queue.remove(first)
    assert run(queue) == [(1, 1, True), (3, 2, True)]


def test_a_look_is_put_off_by_steps_not_by_looks() -> None:
    """Who waits is looked at before each prompt of a lower priority; that doesn't count as a step each."""
    memory = PageTables(tiny_graph(state=True).caches, Arena(40))
    queue = Scheduler(memory, max_num_seqs=8, max_num_tokens=100, prefixes=Prefixes(memory))
    queue.submit(request(1, prompt=80, answer=40, priority=2))
    assert run(queue) + run(queue) == [(1, 72, False), (1, 8, True)], "who sends the same computes a token at least"
    for number in (2, 3):
        queue.submit(request(number, prompt=12, answer=2, first=number))
    assert run(queue) == [(1, 1, True), (2, 8, False), (3, 8, False)], "prompts are cut at whole blocks"
    queue.submit(request(4, prompt=200, answer=2, priority=1))
    assert run(queue) == [(1, 1, True), (2, 4, True), (3, 4, True)]
    assert queue._steps_to_wait == RETRY_STEPS


# --- pages -----------------------------------------------------------------------------------------------------


def test_nothing_is_reserved_for_answers() -> None:
    memory = tables(30)
    queue = Scheduler(memory, max_num_seqs=8, max_num_tokens=32)
    for number in range(1, 6):
        queue.submit(request(number, prompt=4, answer=60))  # 15 + 4 slabs each in the end
    assert len(run(queue)) == 5
    assert memory.usage()["small"].pages_in_use == memory.usage()["large"].pages_in_use == 5


def test_pages_behind_the_window_are_given_back_between_chunks_and_in_decode() -> None:
    memory = tables()
    queue = Scheduler(memory, max_num_seqs=8, max_num_tokens=8)
    queue.submit(request(1, prompt=40, answer=30))
    most = 0
    while queue.num_running or queue.num_waiting:
        step = queue.schedule()
        most = max(most, memory.usage()["small"].pages_in_use)
        finish(queue, step)
    assert most == 4  # window 6 and a chunk of 8: 13 tokens on up to four pages of 4
    assert memory.usage()["small"].pages_evicted == 15  # of 69 tokens the last six can be seen
    assert in_use(memory) == 0


def test_the_youngest_of_the_lowest_priority_gives_up_its_pages() -> None:
    memory = tables(12)
    queue = Scheduler(memory, max_num_seqs=8, max_num_tokens=16)
    requests = [request(1, 4, 24), request(2, 4, 24, priority=1), request(3, 4, 24)]
    for each in requests:
        queue.submit(each)
    assert len(run(queue)) == 3
    first = None
    for _ in range(60):
        before = {each.id for each in queue.decoding.requests}
        run(queue)
        gone = before - {each.id for each in queue.decoding.requests}
        if queue.num_preemptions and first is None:
            first = gone
    assert first == {3}
    assert queue.num_preemptions > 0
    assert queue.num_running == queue.num_waiting == in_use(memory) == 0
    assert [len(each.token_ids) for each in requests] == [28, 28, 28]


def test_the_preempted_wait_at_the_head_and_are_computed_again_as_they_were() -> None:
    queue = Scheduler(tables(9), max_num_seqs=2, max_num_tokens=16)
    queue.submit(request(1, prompt=6, answer=20))
    queue.submit(request(2, prompt=6, answer=20))
    queue.submit(request(3, prompt=1, answer=1))
    spans = []
    for _ in range(80):
        step = queue.schedule()
        spans += [(chunk.request.id, chunk.start, chunk.end, chunk.request.prefill_length) for chunk in step.chunks]
        finish(queue, step)
    assert spans[:2] == [(1, 0, 6, 6), (2, 0, 6, 6)]
    number, start, end, prefill_length = spans[2]
    assert (number, start, prefill_length) == (2, 0, 6)  # before 3, with its answer so far, of the same rotation
    assert end > 6
    assert spans[-1][0] == 3


def test_a_chunk_is_cut_to_the_pages_that_are_left() -> None:
    memory = tables(9)
    queue = Scheduler(memory, max_num_seqs=2, max_num_tokens=8)
    queue.submit(request(1, prompt=24, answer=2))
    assert run(queue) == [(1, 8, False)]
    others = memory.pools["small"].allocate(5)  # one slab is left, and 8 tokens need two
    assert run(queue) == [(1, 4, False)]
    memory.pools["small"].free(others)
    assert [run(queue) for _ in range(3)] == [[(1, 8, False)], [(1, 4, True)], [(1, 1, True)]]


def test_a_request_is_admitted_when_all_its_tokens_have_room() -> None:
    memory = tables(20)
    queue = Scheduler(memory, max_num_seqs=2, max_num_tokens=32)
    queue.submit(request(1, prompt=4, answer=3 * RETRY_STEPS))
    assert run(queue) == [(1, 4, True)]
    others = memory.pools["small"].allocate(12)
    queue.submit(request(2, prompt=24, answer=2))
    assert run(queue) == [(1, 1, True)]
    memory.pools["small"].free(others)
    steps = [run(queue) for _ in range(RETRY_STEPS)]  # it is looked at again after so many
    assert steps[:-1] == [[(1, 1, True)]] * (RETRY_STEPS - 1)
    assert steps[-1] == [(1, 1, True), (2, 24, True)]


def test_large_pages_are_not_set_aside_for_each_that_runs() -> None:
    """The others are left 32 tokens each to grow: of four, one page of 128."""
    far = PLAN.groups[1]
    group = msgspec.structs.replace(far, spec=msgspec.structs.replace(far.spec, page_size=128), slots=())
    plan = CachePlan((Pool(far.pool, "F"),), (group,), slab_bytes=1 << 20)
    queue = Scheduler(PageTables(plan, Arena(5)), max_num_seqs=8, max_num_tokens=1000)
    for number in range(5):
        queue.submit(request(number, prompt=100, answer=20))
    run(queue)

    assert queue.num_running == 4


def test_one_of_a_higher_priority_need_not_wait_for_another_look() -> None:
    memory = tables(20)
    queue = Scheduler(memory, max_num_seqs=3, max_num_tokens=32)
    queue.submit(request(1, prompt=4, answer=3 * RETRY_STEPS))
    run(queue)
    others = memory.pools["small"].allocate(12)
    queue.submit(request(2, prompt=24, answer=2))
    assert run(queue) == [(1, 1, True)]  # there is no room, and it waits to be looked at again
    queue.submit(request(3, prompt=4, answer=2, priority=1))
    assert run(queue) == [(1, 1, True), (3, 4, True)]
    memory.pools["small"].free(others)


def test_those_cancelled_while_they_wait_do_not_pile_up() -> None:
    queue = scheduler(seqs=1)
    queue.submit(request(1, prompt=4, answer=9))
    run(queue)
    for number in range(2, 1000):
        waiting = request(number, prompt=4, answer=9)
        queue.submit(waiting)
        queue.remove(waiting)
    assert queue.num_waiting == 0
    queue.submit(request(1000, prompt=4, answer=1))
    assert [run(queue) for _ in range(9)][-1] == [(1000, 4, True)]


def test_pages_on_too_many_slabs_are_computed_anew_alone() -> None:
    memory = tables(5)  # for 27 tokens: three pages of `near`, a slab each, and four of `far` on two slabs
    queue = Scheduler(memory, max_num_seqs=4, max_num_tokens=4, prefixes=Prefixes(memory))
    queue.check(1, 28)
    queue.submit(request(1, prompt=1, answer=27))
    queue.submit(request(2, prompt=1, answer=3, first=1))
    run(queue)
    large, held = memory.pools["large"], []
    running = queue.decoding.requests[0]
    while not queue.num_preemptions or queue.num_running > 1:
        if len(set(running.table.pages["far"])) > len(held) and large.num_room:
            held.append(large.allocate(1)[0])  # the other half of its slab, as another sequence would
        run(queue)
    assert running.runs_alone
    large.free(held)
    queue.submit(request(3, prompt=1, answer=1, first=2))
    found = []
    while queue.num_running or queue.num_waiting:
        found.append({number for number, _, _ in run(queue)})
    assert len(running.token_ids) == 28
    assert found[-2:] == [{1}, {3}]
    assert all(len(numbers) == 1 for numbers in found), "it runs alone"


def test_the_last_token_needs_no_place() -> None:
    queue = scheduler(slabs=3, tokens=8)  # two pages of 4 and one of 8
    queue.check(5, 9)
    queue.submit(request(1, prompt=5, answer=4))
    assert run(queue) == [(1, 5, True)]


def test_a_request_that_never_fits_is_refused_with_the_arithmetic() -> None:
    with pytest.raises(RequestError) as error:
        scheduler(slabs=3).check(5, 10)
    assert error.value.code == "prompt-too-large-for-cache"
    assert error.value.message == (
        "a prompt of 5 tokens and an answer of up to 5 are 9 tokens to cache (the last is never cached): group near: "
        "3 pages of 4 tokens, 1 a slab; group far: 2 pages of 8 tokens, 2 a slab: 4 slabs of 1024 bytes needed, 3 there"
    )
    scheduler(slabs=4).check(5, 10)


@pytest.mark.parametrize("reuses", [False, True])
def test_what_fits_in_small_chunks_is_let_through_and_runs(reuses: bool) -> None:
    memory = tables(17)  # in one chunk of 220 tokens the window alone would take 55 slabs
    queue = Scheduler(memory, max_num_seqs=4, max_num_tokens=8192, prefixes=Prefixes(memory) if reuses else None)
    with pytest.raises(RequestError):
        queue.check(220, 226)
    queue.check(220, 225)
    queue.submit(request(1, prompt=220, answer=5))
    assert ended(queue, 300) == [1]


def test_one_that_runs_alone_takes_no_slabs_that_it_needs_later() -> None:
    """Of pages that a large chunk drew those that stay lie on more slabs than pages of small chunks would."""
    graph = tiny_graph({"near": (6, 2, "a"), "nearer": (3, 1, "b")}, ("near", "near", "near", "nearer"))
    queue = Scheduler(PageTables(graph.caches, Arena(5)), max_num_seqs=2, max_num_tokens=64)
    alone = request(1, prompt=115, answer=23)
    alone.run_alone()
    queue.check(115, 138)
    queue.submit(alone)
    assert ended(queue, 300) == [1]


def test_prefixes_are_not_given_up_in_vain() -> None:
    memory = tables(20)
    prefixes = Prefixes(memory)
    queue = Scheduler(memory, max_num_seqs=4, max_num_tokens=64, prefixes=prefixes)
    queue.submit(request(1, prompt=17, answer=1, first=1))
    assert ended(queue, 1) == [1]
    queue.submit(request(2, prompt=48, answer=60))
    run(queue)
    known = prefixes.num_spans
    queue.submit(request(3, prompt=64, answer=2, first=2))
    run(queue)
    assert (queue.num_running, prefixes.num_spans) == (1, known)


def test_what_a_failed_step_may_have_changed_is_not_reused() -> None:
    memory = PageTables(tiny_graph(state=True).caches, Arena(60))
    prefixes = Prefixes(memory)
    queue = Scheduler(memory, max_num_seqs=4, max_num_tokens=64, prefixes=prefixes)
    failing = request(1, prompt=16, answer=9)
    queue.submit(failing)
    run(queue)
    assert len(prefixes.take_saves()) == 1
    queue.abandon(queue.schedule())
    assert prefixes.take_saves() == []
    assert prefixes.match(request(2, prompt=17, answer=1)).length == 0
    step = queue.schedule()
    assert ([scheduled.length for scheduled in step.chunks], step.restores) == ([8], [])


def test_what_is_computed_anew_for_its_length_is_known_as_such() -> None:
    memory = PageTables(tiny_graph({"far": (None, 4, "a")}, ("far",)).caches, Arena(60))
    prefixes = Prefixes(memory, kind_of=lambda length: length >= 7)
    queue = Scheduler(memory, max_num_seqs=4, max_num_tokens=64, restart_length=7, prefixes=prefixes)
    queue.submit(request(1, prompt=5, answer=5))
    assert ended(queue, 10) == [1]
    prompt = array("q", [0, 1, 2, 3, 4, 7, 7, 7, 7, 7])
    assert prefixes.match(Request(2, prompt, 20)).length == 8
    assert prefixes.match(Request(3, prompt[:6], 20)).length == 4
    # Both are known, and they lie on pages of their own.
    assert in_use(memory) == prefixes.num_spans == 3


@pytest.mark.parametrize("chunk", [64, 512, 8192])
@pytest.mark.parametrize("reuses", [False, True])
def test_a_long_context_holds_a_window_a_chunk_and_a_page(chunk: int, reuses: bool) -> None:
    length, window, size = 32_768, 1024, 16
    plan = tiny_graph({"near": (window, size, "small"), "far": (None, 64, "large")}, ("near", "far")).caches
    memory = PageTables(plan, Arena(12_000))
    prefixes = Prefixes(memory) if reuses else None
    queue = Scheduler(memory, max_num_seqs=2, max_num_tokens=chunk, prefixes=prefixes)
    asked = [request(number, prompt=length - 200, answer=200, first=number) for number in (1, 2)]
    for each in asked:
        queue.submit(each)
    while queue.num_running or queue.num_waiting:
        step = queue.schedule()
        lengths = {scheduled.request.id: scheduled.length for scheduled in step.chunks}
        for each in asked:
            if any(each.table.pages.values()):
                computed = lengths.get(each.id, 1)
                assert len(each.table.pages["near"]) <= window // size + -(-computed // size) + 1
        if not reuses:
            assert memory.usage()["small"].pages_in_use <= 2 * (window // size + 2) + chunk // size
        finish(queue, step)
    assert [len(each.token_ids) for each in asked] == [length, length]
    assert memory.usage()["small"].pages_evicted == 2 * ((length - 1 - window) // size)


def test_memory_flows_between_pools() -> None:
    memory = tables(20)  # of which a split in halves would leave each pool ten
    queue = Scheduler(memory, max_num_seqs=12, max_num_tokens=16)

    def most_slabs() -> dict[str, int]:
        most = dict.fromkeys(memory.pools, 0)
        while queue.num_running or queue.num_waiting:
            step = queue.schedule()
            most = {name: max(most[name], pool.num_slabs) for name, pool in memory.pools.items()}
            finish(queue, step)
        return most

    queue.submit(request(1, prompt=190, answer=10))
    one_long = most_slabs()
    for number in range(2, 14):
        queue.submit(request(number, prompt=8, answer=9, first=number))
    many_short = most_slabs()
    assert one_long["large"] == 13
    assert many_short["small"] > 10
    assert memory.arena.num_free == 20


@pytest.mark.parametrize("steps", [0, 1, 2, 5])
@pytest.mark.parametrize("reuses", [False, True])
def test_a_removed_request_is_gone_at_once(steps: int, reuses: bool) -> None:
    memory = tables()
    prefixes = Prefixes(memory) if reuses else None
    queue = Scheduler(memory, max_num_seqs=8, max_num_tokens=4, prefixes=prefixes)
    removed = request(1, prompt=12, answer=4)
    queue.submit(removed)
    for _ in range(steps):
        run(queue)
    queue.remove(removed)
    assert (queue.schedule(), queue.num_running, queue.num_waiting) == (Step([], []), 0, 0)
    if prefixes is not None:
        prefixes.clear()
    assert in_use(memory) == 0


def test_more_sequences_than_states_wait() -> None:
    graph = tiny_graph(state=True)
    memory = PageTables(graph.caches, Arena(9))
    queue = Scheduler(memory, max_num_seqs=8, max_num_tokens=64)
    for number in range(1, 9):
        queue.submit(request(number, prompt=3, answer=4))
    most = 0
    for _ in range(200):
        run(queue)
        most = max(most, queue.num_running)
    assert 1 < most < 8
    assert queue.num_running == queue.num_waiting == in_use(memory) == 0


# --- any order -------------------------------------------------------------------------------------------------

requests = st.tuples(st.integers(1, 30), st.integers(1, 10), st.integers(-1, 1), st.integers(0, 2))
actions = st.one_of(
    requests, st.just("step"), st.just("step"), st.integers(1, 12).map(lambda number: ("remove", number))
)


budgets = st.lists(st.integers(0, 6), max_size=3).filter(lambda found: any(found) or not found)
"""Of prompts, in turns; none: as many as the step has."""


@settings(max_examples=200)
@given(
    st.lists(actions, max_size=60), st.integers(1, 6), st.integers(1, 12), st.integers(4, 40), st.booleans(), budgets
)
def test_invariants(script: list[Any], seqs: int, tokens: int, slabs: int, reuses: bool, budgets: list[int]) -> None:
    memory, inputs = tables(slabs), BatchInputs(GRAPH)
    prefixes = Prefixes(memory) if reuses else None
    given: list[int] = []

    def beside(count: int) -> int:
        assert count == len(queue.decoding) > 0
        given.append(budgets[len(given) % len(budgets)])
        return given[-1]

    queue = Scheduler(
        memory, max_num_seqs=seqs, max_num_tokens=tokens, prefixes=prefixes, most_beside=beside if budgets else None
    )
    alive: dict[int, Request] = {}
    submitted = 0

    def step() -> None:
        preemptions, asked = queue.num_preemptions, len(given)
        decoding = set(map(id, queue.decoding.requests))
        planned = queue.schedule()
        assert bool(planned.num_tokens) == bool(alive), "there is work, and the step does none"
        assert planned.num_tokens <= tokens
        most = given[-1] if len(given) > asked else tokens
        assert not planned.decodes or sum(chunk.length for chunk in planned.chunks) <= most
        computed = [*planned.decodes, *(chunk.request for chunk in planned.chunks)]
        assert len({each.id for each in computed}) == len(computed)
        if preemptions == queue.num_preemptions:
            assert decoding == set(map(id, planned.decodes)), "a sequence that decodes misses a step"
        best = min(alive.values(), key=lambda each: each.rank, default=None)
        running = [each for each in alive.values() if any(each.table.pages.values())]
        assert len(running) == queue.num_running <= seqs
        if most and best is not None and any(best.table.pages.values()):
            assert best in computed, "the first of all stands still"
        for group in ("near", "far"):
            owners = Counter(page for each in running for page in each.table.pages[group])
            for page, count in owners.items():
                assert memory.pool_of[group].holders(page) >= count
                assert reuses or count == 1, f"a page of group {group} has two owners"
        ends = {chunk.request.id: chunk.end for chunk in planned.chunks}
        for each in running:
            end = ends.get(each.id, each.num_computed + (each.is_decoding))
            for group, size in (("near", 4), ("far", 8)):
                held = len(each.table.pages[group]) + each.table.first[group]
                assert held == -(-end // size)
        # The arrays that decode keeps up are those that are made from the tables.
        decodes = [Chunk(each, 1) for each in planned.decodes]
        kept, made = inputs.arrays(planned.chunks, queue.decoding), inputs.arrays([*decodes, *planned.chunks])
        assert {name: v.tolist() for name, v in kept.items()} == {name: v.tolist() for name, v in made.items()}
        assert {name: v.dtype for name, v in kept.items()} == {name: v.dtype for name, v in made.items()}
        for ended in finish(queue, planned):
            del alive[ended.id]

    for action in script:
        if action == "step":
            step()
        elif action[0] == "remove":
            if (gone := alive.pop(action[1], None)) is not None:
                queue.remove(gone)
        else:
            prompt, answer, priority, first = action
            made = request(submitted + 1, prompt, answer, priority, first)
            try:
                queue.check(made.prompt_length, made.max_length)
            except RequestError:
                continue
            submitted += 1
            alive[submitted] = made
            queue.submit(made)
    for _ in range(3000):
        if alive:
            step()
    assert not alive
    if prefixes is not None:
        prefixes.clear()
    assert in_use(memory) == 0
    assert memory.arena.num_free == slabs


def test_a_sequence_that_reaches_the_restart_length_is_computed_anew() -> None:
    queue = Scheduler(tables(), max_num_seqs=8, max_num_tokens=4, restart_length=7)
    growing = request(1, prompt=5, answer=5)
    queue.submit(growing)
    spans = []
    for _ in range(7):
        step = queue.schedule()
        for each in step.decodes:
            spans.append((each.num_computed, each.num_computed + 1, each.prefill_length))
        spans += [(chunk.start, chunk.end, chunk.request.prefill_length) for chunk in step.chunks]
        finish(queue, step)
    # prompt in two chunks, one token that decodes; then all seven tokens in two chunks, and decoding goes on
    assert spans == [(0, 4, 5), (4, 5, 5), (5, 6, 5), (0, 4, 7), (4, 7, 7), (7, 8, 7), (8, 9, 7)]
