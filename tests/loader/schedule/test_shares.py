"""Requests of several ranks with sequences of their own: which rank each goes to, and shares of one size."""

from __future__ import annotations

from array import array

from tiny import tiny_graph

from precast.loader.cache.arena import Arena
from precast.loader.cache.prefixes import Prefixes
from precast.loader.cache.tables import PageTables
from precast.loader.schedule.requests import NO_TOKEN, Request, Sizes, Step
from precast.loader.schedule.scheduler import Scheduler
from precast.loader.schedule.shares import Share, Shares, usage_of

PLAN = tiny_graph().caches
"""Window 6 over pages of 4 tokens (`near`, a page a slab), and full attention over pages of 8 (`far`, two a slab)."""


def shares_of(slabs: int = 60, *, seqs: int = 8, tokens: int = 16, count: int = 2) -> list[Share]:
    made = []
    for _ in range(count):
        tables = PageTables(PLAN, Arena(slabs))
        prefixes = Prefixes(tables)
        scheduler = Scheduler(tables, max_num_seqs=seqs, max_num_tokens=tokens, prefixes=prefixes)
        made.append(Share(tables, prefixes, scheduler))
    return made


def request(number: int, prompt: int, answer: int = 9, priority: int = 0, first: int = 0) -> Request:
    return Request(number, array("q", [first or number, *range(1, prompt)]), prompt + answer, priority)


def ids(step: Step) -> list[list[int]]:
    """The requests of each rank's share."""
    return [[each.id for each in share.requests] for share in step.shares]


def run(queue: Shares) -> list[list[int]]:
    step = queue.schedule()
    queue.launched(step)
    queue.arrived(step, [7] * len(step.sampled))
    return ids(step)


def test_requests_go_to_the_rank_with_most_free_slabs_and_stay_there() -> None:
    queue = Shares(shares_of(), 8)
    for number, prompt in enumerate((13, 3, 3, 9, 2), 1):
        queue.submit(request(number, prompt))

    assert run(queue) == [[1, 5], [2, 3, 4]]
    assert run(queue) == [[1, 5], [2, 3, 4]]
    assert (queue.num_running, queue.num_waiting) == (5, 0)


def test_all_shares_are_as_large_as_the_largest() -> None:
    queue = Shares(shares_of(), 8)
    for number, prompt in enumerate((13, 3, 3), 1):
        queue.submit(request(number, prompt))

    step = queue.schedule()

    assert ids(step) == [[1], [2, 3]]
    assert {share.sizes for share in step.shares} == {Sizes(13, 2, 2)}
    assert (step.num_tokens, [each.id for each in step.sampled]) == (19, [1, 2, 3])


def test_a_rank_without_sequences_takes_part() -> None:
    queue = Shares(shares_of(), 8)
    queue.submit(request(1, 5))

    step = queue.schedule()

    assert ids(step) == [[1], []]
    assert step.shares[1].sizes == Sizes(5, 1, 1)


def test_nothing_to_do_has_no_tokens() -> None:
    assert Shares(shares_of(), 8).schedule().num_tokens == 0


def test_drawn_tokens_go_to_the_rank_whose_they_are() -> None:
    queue, first, second = Shares(shares_of(), 8), request(1, 5), request(2, 3)
    queue.submit(first)
    queue.submit(second)
    for drawn in ([20, 30], [21, 31]):
        step = queue.schedule()
        queue.launched(step)
        queue.arrived(step, drawn)

    assert (list(first.token_ids[5:]), list(second.token_ids[3:])) == ([20, 21], [30, 31])


def test_a_known_prefix_counts_as_room() -> None:
    """The third request begins with all of the second one's tokens, whose rank has as many free slabs without it."""
    shares = shares_of()
    queue = Shares(shares, 8)
    queue.submit(request(1, 17, first=5))
    queue.submit(request(2, 17, first=6))
    assert run(queue) == [[1], [2]]
    run(queue)
    assert run(queue) == [[1], [2]]

    queue.submit(request(3, 30, first=6))

    assert run(queue) == [[1], [2, 3]]
    assert queue.num_tokens_reused == 16


def test_what_is_only_kept_for_reuse_counts_as_free() -> None:
    queue, long = Shares(shares_of(tokens=100), 8), request(1, 97)
    queue.submit(long)
    queue.submit(request(2, 9))
    assert run(queue) == [[1], [2]]
    queue.remove(long)

    queue.submit(request(3, 9))

    assert run(queue) == [[3], [2]]


def test_who_finds_no_room_waits_for_whichever_rank_has_some_first() -> None:
    shares = shares_of(8, seqs=1)
    queue = Shares(shares, 1)
    requests = [request(number, 5) for number in (1, 2, 3, 4, 5)]
    for each in requests:
        queue.submit(each)
    assert run(queue) == [[1], [2]]
    assert queue.num_waiting == 3

    queue.remove(requests[1])
    queue.remove(requests[4])

    assert queue.num_waiting == 2
    assert run(queue)[0] == [1]
    assert run(queue)[1] in ([3], [4])


def test_a_higher_priority_takes_the_place_of_a_lower_one() -> None:
    queue = Shares(shares_of(seqs=1), 1)
    for number in (1, 2, 3):
        queue.submit(request(number, 5))
    run(queue)

    queue.submit(request(4, 5, priority=1))

    assert [4] in run(queue)
    assert queue.num_preemptions == 1


def test_one_rank_that_has_to_wait_for_what_is_in_flight_makes_all_wait() -> None:
    """The second rank gets short of pages; what the first one has scheduled by then it schedules again."""
    queue = Shares(shares_of(9), 8)
    for number, prompt in enumerate((9, 5, 5), 1):
        queue.submit(request(number, prompt, 50))
    step, following = queue.schedule(), None
    for _ in range(20):
        queue.launched(step)
        following = queue.schedule_ahead()
        queue.arrived(step, [7] * len(step.sampled))
        if following is None:
            break
        step = following
    assert (following, queue.num_preemptions) == (None, 0)

    step = queue.schedule()

    assert queue.num_preemptions == 1
    assert ids(step) == [[1], [2]]
    assert {share.sizes for share in step.shares} == {Sizes(1, 1, 1)}


def test_steps_that_will_not_arrive_are_computed_anew() -> None:
    queue = Shares(shares_of(), 8)
    queue.submit(request(1, 5))
    queue.submit(request(2, 3))
    step = queue.schedule()
    queue.launched(step)

    queue.rollback([step])

    assert (queue.num_running, queue.num_waiting) == (0, 2)
    assert run(queue) == [[1], [2]]


def test_a_request_without_finite_logits_is_forgotten() -> None:
    shares = shares_of()
    queue = Shares(shares, 8)
    queue.submit(request(1, 5))
    step = queue.schedule()
    queue.launched(step)
    queue.arrived(step, [NO_TOKEN])

    assert (queue.num_running, queue.num_waiting) == (0, 0)
    assert not queue._share_of


def test_usage_is_that_of_all_ranks() -> None:
    shares = shares_of(10)
    queue = Shares(shares, 8)
    queue.submit(request(1, 5))
    queue.submit(request(2, 3))
    run(queue)

    found, each = usage_of(shares), [share.tables.usage() for share in shares]

    assert found["large"].pages_in_use == sum(usage["large"].pages_in_use for usage in each) == 2
    assert found["large"].pages == sum(usage["large"].pages for usage in each)
