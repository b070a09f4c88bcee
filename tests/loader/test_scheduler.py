"""Which tokens a step computes: the budget holds, first come is first served, pages are never shared."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny import tiny_graph

from precast.ir.errors import RequestError
from precast.loader.pools import PageTables
from precast.loader.scheduler import Request, ScheduledChunk, Scheduler

PLAN = tiny_graph().caches


def scheduler(small: int = 40, large: int = 20, seqs: int = 8, tokens: int = 16) -> Scheduler:
    return Scheduler(PageTables(PLAN, {"small": small, "large": large}), max_num_seqs=seqs, max_num_tokens=tokens)


def request(number: int, prompt: int, answer: int) -> Request:
    return Request(number, array("q", range(prompt)), prompt + answer)


def run(queue: Scheduler) -> list[tuple[int, int, bool]]:
    """One step: (request, tokens, samples) of its chunks; each sampled token is 7, and answers end at their limit."""
    plan = queue.schedule()
    for scheduled in plan:
        finish(queue, scheduled)
    return [(scheduled.request.id, scheduled.length, scheduled.samples) for scheduled in plan]


def finish(queue: Scheduler, scheduled: ScheduledChunk) -> None:
    queue.complete(scheduled, 7 if scheduled.samples else None)
    if len(scheduled.request.token_ids) == scheduled.request.max_length:
        queue.remove(scheduled.request)


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
    assert queue.schedule() == []


def test_decodes_come_first_and_prompts_take_what_is_left() -> None:
    queue = scheduler(tokens=6)
    queue.submit(request(1, prompt=4, answer=9))
    assert run(queue) == [(1, 4, True)]
    queue.submit(request(2, prompt=8, answer=9))
    queue.submit(request(3, prompt=2, answer=9))
    assert run(queue) == [(1, 1, True), (2, 5, False)]
    assert run(queue) == [(1, 1, True), (2, 3, True), (3, 2, True)]
    assert run(queue) == [(1, 1, True), (2, 1, True), (3, 1, True)]


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


def test_the_first_that_waits_is_not_overtaken() -> None:
    queue = scheduler(small=10, large=5)  # 40 tokens
    queue.submit(request(1, prompt=10, answer=15))  # 24 to cache: 6 small pages, 3 large ones
    queue.submit(request(2, prompt=10, answer=15))  # doesn't fit beside it
    queue.submit(request(3, prompt=1, answer=2))  # would
    assert run(queue) == [(1, 10, True)]
    assert (queue.num_running, queue.num_waiting) == (1, 2)


def test_the_last_token_needs_no_place() -> None:
    queue = scheduler(small=2, large=1)  # 8 tokens
    queue.check(5, 9)
    queue.submit(request(1, prompt=5, answer=4))
    assert run(queue) == [(1, 5, True)]


def test_a_request_that_never_fits_is_refused_with_the_arithmetic() -> None:
    with pytest.raises(RequestError) as error:
        scheduler(small=2, large=20).check(5, 10)
    assert error.value.code == "prompt-too-large-for-cache"
    assert error.value.message == (
        "a prompt of 5 tokens and an answer of up to 5 are 9 tokens to cache (the last is never cached): "
        "group near: 3 pages of 4 tokens needed, 2 free of 2; group far: 2 pages of 8 tokens needed, 20 free of 20"
    )


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_a_removed_request_is_gone_at_once(steps: int) -> None:
    tables = PageTables(PLAN, {"small": 40, "large": 20})
    queue = Scheduler(tables, max_num_seqs=8, max_num_tokens=4)
    removed = request(1, prompt=6, answer=4)
    queue.submit(removed)
    for _ in range(steps):
        run(queue)
    queue.remove(removed)
    assert (queue.schedule(), queue.num_running, queue.num_waiting) == ([], 0, 0)
    assert all(usage.pages_in_use == 0 for usage in tables.usage().values())


requests = st.tuples(st.integers(1, 30), st.integers(1, 10))
actions = st.one_of(
    requests, st.just("step"), st.just("step"), st.integers(1, 12).map(lambda number: ("remove", number))
)


@given(st.lists(actions, max_size=60), st.integers(1, 6), st.integers(1, 12), st.integers(12, 30))
def test_invariants(script: list[object], seqs: int, tokens: int, pages: int) -> None:
    tables = PageTables(PLAN, {"small": pages, "large": pages})
    queue = Scheduler(tables, max_num_seqs=seqs, max_num_tokens=tokens)
    alive: dict[int, Request] = {}
    admitted: list[int] = []
    submitted = 0

    def step() -> None:
        plan = queue.schedule()
        assert bool(plan) == bool(alive), "there is work, and the step does none"
        assert sum(scheduled.length for scheduled in plan) <= tokens
        assert len({scheduled.request.id for scheduled in plan}) == len(plan)
        decoding = {r.id for r in alive.values() if r.pages is not None and r.num_pending == 1}
        assert decoding <= {scheduled.request.id for scheduled in plan}, "a sequence that decodes misses a step"
        admitted.extend(s.request.id for s in plan if s.request.id not in admitted)
        running = [r for r in alive.values() if r.pages is not None]
        assert len(running) == queue.num_running <= seqs
        for group in ("near", "far"):
            owned = [page for r in running for page in r.pages[group]]  # type: ignore[index]
            assert len(owned) == len(set(owned)), f"a page of group {group} has two owners"
        for scheduled in plan:
            pages_held = scheduled.chunk().pages
            end = scheduled.request.num_cached + scheduled.length
            assert len(pages_held["near"]) * 4 >= end
            assert len(pages_held["far"]) * 8 >= end
            finish(queue, scheduled)
            if scheduled.request.pages is None:
                del alive[scheduled.request.id]

    for action in script:
        if action == "step":
            step()
        elif action[0] == "remove":  # type: ignore[index]
            if (gone := alive.pop(action[1], None)) is not None:  # type: ignore[index]
                queue.remove(gone)
        else:
            submitted += 1
            alive[submitted] = request(submitted, *action)  # type: ignore[misc]
            queue.check(alive[submitted].prompt_length, alive[submitted].max_length)
            queue.submit(alive[submitted])
    while alive:
        step()
    assert admitted == sorted(admitted), "a request was overtaken"
    assert all(usage.pages_in_use == 0 for usage in tables.usage().values())


def test_a_sequence_that_reaches_the_restart_length_is_computed_anew() -> None:
    queue = Scheduler(PageTables(PLAN, {"small": 40, "large": 20}), max_num_seqs=8, max_num_tokens=4, restart_length=7)
    growing = request(1, prompt=5, answer=5)
    queue.submit(growing)
    spans = []
    for _ in range(7):
        for scheduled in queue.schedule():
            chunk = scheduled.chunk()
            spans.append((chunk.start, chunk.end, chunk.prefill_length))
            queue.complete(scheduled, 9 if scheduled.samples else None)
    # prompt in two chunks, one token that decodes; then all seven tokens in two chunks, and decoding goes on
    assert spans == [(0, 4, 5), (4, 5, 5), (5, 6, 5), (0, 4, 7), (4, 7, 7), (7, 8, 7), (8, 9, 7)]
