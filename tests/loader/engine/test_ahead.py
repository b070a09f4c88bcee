"""One step ahead: what happens to requests while a step of theirs is in flight."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny import random_weights, tiny_graph
from tiny_engine import WEIGHTS, FailsOnce, engine_on

from precast.ir.graph.schema import Graph
from precast.loader.engine.engine import Engine
from precast.loader.engine.params import SamplingParams
from precast.loader.engine.results import Event
from precast.loader.run.steps import Ticket
from precast.loader.torch_device import open_device

CPU = open_device("cpu")
PROMPT = [7, 7, 30, 2, 41]


def greedy(max_tokens: int, **more: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, **more)


def alone(prompt: list[int], max_tokens: int, **options: Any) -> list[int]:
    """The answer of an engine that waits for each step."""
    engine = engine_on(CPU, sizes=(), runs_ahead=False, **options)
    return engine.generate([prompt], greedy(max_tokens))[0].token_ids


def run_on(engine: Engine, events: dict[int, list[Event]]) -> None:
    """Step until all is done, with the events of each request put to those it has."""
    for _ in range(500):
        if not engine.has_work:
            return
        for event in engine.step():
            events.setdefault(event.request_id, []).append(event)
    raise AssertionError("requests that never end")


def rest(engine: Engine) -> dict[int, list[Event]]:
    found: dict[int, list[Event]] = {}
    run_on(engine, found)
    return found


def tokens_of(events: list[Event]) -> list[int]:
    return [token for event in events for token in event.token_ids]


def test_a_step_is_launched_before_the_last_ones_tokens_are_collected() -> None:
    engine = engine_on(CPU)
    engine.submit(PROMPT, greedy(4))
    per_call = []
    while engine.has_work:
        per_call.append(len(engine.step()))
    assert per_call == [0, 1, 1, 1, 1]
    assert engine.stats.steps == 4, "the last token is known to be the last: no step goes beyond it"


def test_a_token_drawn_past_an_end_is_discarded() -> None:
    """An end-of-sequence token is seen when the next step is under way: that one's token is nobody's."""
    whole = alone(PROMPT, 20)
    end = whole[1]
    assert end != whole[0]
    engine = engine_on(CPU, eos=(end,))
    (found,) = engine.generate([PROMPT], greedy(20))
    assert (found.token_ids, found.finish_reason) == (whole[:2], "stop")
    assert engine.stats.tokens_sampled == 3
    assert engine.stats.requests_running == 0


def test_what_arrives_after_an_end_is_in_no_answer() -> None:
    """The discarded token arrives while another request goes on, before the first one's answer is put together."""
    whole = alone(PROMPT, 20)
    engine = engine_on(CPU, eos=(whole[1],))
    found, other = engine.generate([PROMPT, [5]], [greedy(20), greedy(20, ignore_eos=True)])
    assert found.prompt_token_ids == PROMPT
    assert (found.token_ids, found.finish_reason) == (whole[:2], "stop")
    assert other.token_ids == alone([5], 20)


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_a_request_is_cancelled_while_its_step_is_in_flight(steps: int) -> None:
    engine = engine_on(CPU)
    gone, stays = engine.submit([5, 6, 7], greedy(30)), engine.submit(PROMPT, greedy(12))
    for _ in range(steps):
        engine.step()
    assert engine._flights
    assert engine.cancel(gone)
    later = engine.submit([9] * 13, greedy(12))  # it gets the pages that the step in flight still writes to
    events = rest(engine)
    assert events[gone][-1].finish_reason == "cancelled"
    assert tokens_of(events[stays])[-8:] == alone(PROMPT, 12)[-8:]
    assert tokens_of(events[later]) == alone([9] * 13, 12)


def test_a_prefix_is_reused_while_its_writer_is_in_flight() -> None:
    prompt = [(5 * i) % 47 for i in range(30)]
    engine = engine_on(CPU, reuses=True)
    engine.submit(prompt, greedy(3))
    engine.step()
    assert engine._flights
    second = engine.submit([*prompt, 3, 4], greedy(8))
    events = rest(engine)
    assert engine.stats.tokens_reused > 0
    assert tokens_of(events[second]) == alone([*prompt, 3, 4], 8)


class FailsToArrive:
    """Lets the n-th step that is collected fail, after the next one was launched."""

    def __init__(self, engine: Engine, call: int) -> None:
        self.collect, self.left = engine._runner.collect, call
        engine._runner.collect = self  # type: ignore[method-assign]

    def __call__(self, ticket: Ticket) -> list[int]:
        self.left -= 1
        if self.left == 0:
            raise RuntimeError("the device has lost a step")
        return self.collect(ticket)


@pytest.mark.parametrize("state", [False, True], ids=["pages", "states"])
@pytest.mark.parametrize("call", [1, 2, 5])
def test_a_step_that_fails_after_the_next_was_launched_rolls_back_both(call: int, *, state: bool) -> None:
    model: dict[str, Any] = {"graph": tiny_graph(state=state)}
    if state:
        model["weights"] = random_weights(1, 3)
    engine = engine_on(CPU, reuses=True, **model)
    FailsToArrive(engine, call)
    first, second = engine.submit(PROMPT, greedy(12)), engine.submit([5], greedy(12))
    events: dict[int, list[Event]] = {first: [], second: []}
    with pytest.raises(RuntimeError, match="lost a step"):
        run_on(engine, events)
    assert not engine._flights
    run_on(engine, events)
    assert tokens_of(events[first]) == alone(PROMPT, 12, **model)
    assert tokens_of(events[second]) == alone([5], 12, **model)


def test_a_request_of_the_later_step_alone_is_rolled_back_too() -> None:
    engine = engine_on(CPU)
    FailsToArrive(engine, 1)
    first = engine.submit(PROMPT, greedy(6))
    engine.step()
    second = engine.submit([5], greedy(6))
    with pytest.raises(RuntimeError, match="lost a step"):
        engine.step()
    events = rest(engine)
    assert tokens_of(events[first]) == alone(PROMPT, 6)
    assert tokens_of(events[second]) == alone([5], 6)


@pytest.mark.parametrize(
    "graph",
    [tiny_graph({"far": (None, 8, "large")}, ("far",) * 3), tiny_graph(), tiny_graph(state=True)],
    ids=["full", "windows", "states"],
)
def test_what_a_lost_step_was_to_write_is_not_reused(graph: Graph) -> None:
    """A prefix becomes known as its step is launched. If that fails, nothing may have been written."""
    model: dict[str, Any] = {"graph": graph, "weights": random_weights(1, 3)}
    prompt = [(5 * i) % 47 for i in range(30)]
    engine = engine_on(CPU, reuses=True, **model)
    _, memory, _ = engine._runner.opened()
    before = memory.arena.clone()
    FailsToArrive(engine, 1)
    first = engine.submit(prompt, greedy(6))
    engine.step()
    second = engine.submit([*prompt, 3, 4], greedy(6))
    with pytest.raises(RuntimeError, match="lost a step"):
        engine.step()
    memory.arena.copy_(before)
    events = rest(engine)
    assert tokens_of(events[first]) == alone(prompt, 6, **model)
    assert tokens_of(events[second]) == alone([*prompt, 3, 4], 6, **model)


@pytest.mark.parametrize("call", [1, 2, 5])
def test_a_step_that_cannot_be_launched_leaves_the_one_in_flight(call: int) -> None:
    engine = engine_on(CPU, sizes=(), wrap=lambda program: FailsOnce(program, call))
    number = engine.submit(PROMPT, greedy(12))
    events: dict[int, list[Event]] = {number: []}
    with pytest.raises(torch.OutOfMemoryError):
        run_on(engine, events)
    run_on(engine, events)
    assert tokens_of(events[number]) == alone(PROMPT, 12)


class NotFinite:
    """A program whose n-th call gives NaN in the first row."""

    def __init__(self, program: Any, call: int) -> None:
        self.program, self.left = program, call

    def __call__(self, **inputs: torch.Tensor) -> Any:
        found = self.program(**inputs)
        self.left -= 1
        if self.left == 0:
            found["logits"][0, 0] = float("nan")
        return found


def test_a_request_whose_logits_are_not_finite_ends_though_its_next_step_runs() -> None:
    engine = engine_on(CPU, sizes=(), reuses=True, wrap=lambda program: NotFinite(program, 4))
    broken, whole = engine.submit(PROMPT, greedy(12)), engine.submit([5], greedy(12))
    events = rest(engine)
    assert events[broken][-1].finish_reason == "error"
    assert tokens_of(events[broken]) == alone(PROMPT, 12)[:3]
    assert tokens_of(events[whole]) == alone([5], 12)
    assert engine.stats.requests_failed == 1


def test_nobody_is_preempted_before_what_is_in_flight_has_arrived() -> None:
    """Too few pages for two: who is preempted is computed again from tokens that are all known."""
    prompts = [[3] * 4, [11] * 4]
    engine = engine_on(CPU, sizes=(), slabs=12)
    outputs = engine.generate(prompts, greedy(50))
    assert engine.stats.preemptions > 0
    assert [output.token_ids for output in outputs] == [alone(prompt, 50) for prompt in prompts]


def test_logits_of_a_prompt_wait_for_what_is_in_flight() -> None:
    engine = engine_on(CPU)
    number = engine.submit(PROMPT, greedy(6))
    events = engine.step()
    assert engine._flights
    found = engine.logits([5, 9, 2])
    assert not engine._flights
    torch.testing.assert_close(found, engine_on(CPU, sizes=()).logits([5, 9, 2]))
    events += rest(engine)[number]
    assert tokens_of(events) == alone(PROMPT, 6)


def test_a_closed_engine_waits_for_what_is_in_flight() -> None:
    engine = engine_on(CPU, weights=WEIGHTS)
    engine.submit(PROMPT, greedy(6))
    engine.step()
    engine.close()
    assert not engine._flights
