"""The engine against the model in plain torch: however requests are batched, chunked or late, equal tokens."""

from __future__ import annotations

import gc
import json
import queue
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import VOCAB, Groups, random_weights, reference_answer, reference_logits, tiny_graph, tiny_model
from tiny_engine import FailsOnce
from tokenizers_by_hand import failing, letters, with_front

import precast
from precast.ir.errors import BundleError, RequestError
from precast.ir.graph.schema import Graph
from precast.loader.cache.memory import CacheMemory
from precast.loader.engine.engine import Engine
from precast.loader.engine.params import SamplingParams
from precast.loader.engine.results import Event, Output
from precast.loader.program.restore import restore
from precast.loader.run.runner import Runner
from precast.loader.sizing import EngineLimits
from precast.loader.timeline import Timeline
from precast.loader.torch_device import open_device

CPU = torch.device("cpu")
WEIGHTS = random_weights()
PROMPTS = [[5], list(range(3, 30)), [7, 8, 9, 10, 11, 12, 13, 14, 15], [40, 1, 40], [9] * 17]


@cache
def expected(prompt: tuple[int, ...], max_tokens: int) -> list[int]:
    return reference_answer(WEIGHTS, prompt, max_tokens)


def greedy(max_tokens: int, **more: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, **more)


def build(
    *,
    slabs: int = 75,
    seqs: int = 8,
    tokens: int = 64,
    max_seq_len: int = 64,
    eos: tuple[int, ...] = (),
    text: bool | bytes = False,
    graph: Graph | None = None,
    device: torch.device = CPU,
    wrap: Callable[[Any], Any] = lambda program: program,
    reuses: bool = True,
    weights: dict[str, torch.Tensor] = WEIGHTS,
    runs_ahead: bool = False,
) -> Engine:
    """An engine on the tiny model; its steps arrive as they are launched, unless it `runs_ahead`."""
    graph = tiny_graph() if graph is None else graph
    program = restore(graph, device=device)
    names = [*(param.name for param in graph.params), *(value.name for value in graph.constants)]
    program.bind({name: weights[name].to(device) for name in names})
    opened = open_device(device)
    memory = CacheMemory(graph.caches, slabs, opened)
    memory.arena.fill_(0xFF)  # NaN: whoever reads what no token wrote is found out
    program.bind(memory.tensors)
    runner = Runner(wrap(program), graph, memory, opened, EngineLimits(seqs, tokens, max_seq_len))
    files = {"tokenizer.json": letters(VOCAB) if text is True else text} if text else {}
    model = tiny_model(max_seq_len, eos)
    return Engine(
        runner, model, tokenizer_files=files, timeline=Timeline(), reuses_prefixes=reuses, runs_ahead=runs_ahead
    )


def pages_in_use(engine: Engine) -> int:
    return sum(usage.pages_in_use for usage in engine.stats.pools.values())


def is_idle(engine: Engine) -> bool:
    """Nothing to do, and no page held but those of known prefixes, which are given up."""
    engine.forget_prefixes()
    stats = engine.stats
    return not engine.has_work and pages_in_use(engine) == stats.requests_running == stats.requests_waiting == 0


def drained(engine: Engine) -> dict[int, list[Event]]:
    found: dict[int, list[Event]] = {}
    while engine.has_work:
        for event in engine.step():
            found.setdefault(event.request_id, []).append(event)
    return found


def tokens_of(events: list[Event]) -> list[int]:
    return [token for event in events for token in event.token_ids]


# --- the same tokens as the model in plain torch ---------------------------------------------------------------


@pytest.mark.parametrize("tokens", [1, 7, 64])
@pytest.mark.parametrize("prompt", PROMPTS, ids=len)
def test_logits(tokens: int, prompt: list[int]) -> None:
    engine = build(tokens=tokens)
    logits = engine.logits(prompt)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, reference_logits(WEIGHTS, prompt), rtol=1e-4, atol=1e-4)
    assert is_idle(engine)
    logits += 1  # an ordinary tensor: it can be changed


@pytest.mark.parametrize(("seqs", "tokens", "most"), [(3, 64, 3), (64, 7, 7)])
def test_no_step_gives_more_logits_than_memory_is_set_aside_for(seqs: int, tokens: int, most: int) -> None:
    rows: list[int] = []

    def noting(program: Any) -> Any:
        def run(**inputs: torch.Tensor) -> Any:
            rows.append(len(inputs["logit_rows"]))
            return program(**inputs)

        return run

    logits = build(seqs=seqs, tokens=tokens, wrap=noting).logits(PROMPTS[1])
    torch.testing.assert_close(logits, reference_logits(WEIGHTS, PROMPTS[1]), rtol=1e-4, atol=1e-4)
    assert max(rows) == most


def test_logits_of_what_fits_in_small_chunks() -> None:
    engine = build(slabs=5, seqs=64)  # for 32 tokens at once the window alone would take eight
    prompt = list(range(3, 35))
    torch.testing.assert_close(engine.logits(prompt), reference_logits(WEIGHTS, prompt), rtol=1e-4, atol=1e-4)
    assert is_idle(engine)


def test_logits_leave_the_states_that_others_go_on_from() -> None:
    """The state behind a prompt is copied before the next step; its page is free by then, and logits take it."""
    engine = build(graph=tiny_graph(state=True))
    prompt = list(range(3, 19))
    engine.generate([prompt], greedy(1))
    engine.logits([9] * 17)
    (output,) = engine.generate([[*prompt, 7]], greedy(12))
    assert engine.stats.tokens_reused == 16
    assert output.token_ids == reference_answer(WEIGHTS, [*prompt, 7], 12, state=True)


def test_pages_kept_for_reuse_are_told_apart() -> None:
    engine = build()
    engine.generate([PROMPTS[1]], greedy(7))
    for usage in engine.stats.pools.values():
        assert usage.pages_reclaimable == usage.pages_in_use > 0
    assert 'precast_pool_pages_reclaimable{pool="large"} 4\n' in engine.metrics()
    engine.submit([9] * 17, greedy(9))
    engine.step()
    assert all(0 < usage.pages_reclaimable < usage.pages_in_use for usage in engine.stats.pools.values())


@pytest.mark.parametrize("tokens", [2, 7, 64])
@pytest.mark.parametrize("seqs", [1, 3, 8])
def test_prompts_of_unequal_lengths(tokens: int, seqs: int) -> None:
    engine = build(tokens=tokens, seqs=seqs)
    outputs = engine.generate(PROMPTS, greedy(20))
    assert [output.token_ids for output in outputs] == [expected(tuple(prompt), 20) for prompt in PROMPTS]
    assert [output.prompt_token_ids for output in outputs] == PROMPTS
    assert {output.finish_reason for output in outputs} == {"length"}
    assert is_idle(engine)


@pytest.mark.gpu
def test_a_gpu_gives_the_same_tokens() -> None:
    for tokens in (2, 7, 64):
        engine = build(tokens=tokens, seqs=3, device=torch.device("cuda", 0))
        outputs = engine.generate(PROMPTS, greedy(20))
        assert [output.token_ids for output in outputs] == [expected(tuple(prompt), 20) for prompt in PROMPTS]
        logits = engine.logits(PROMPTS[1])
        torch.testing.assert_close(logits.cpu(), reference_logits(WEIGHTS, PROMPTS[1]), rtol=1e-4, atol=1e-4)
        hot_tokens = [output.token_ids for output in engine.generate(PROMPTS, hot(3))]
        assert hot_tokens == [output.token_ids for output in build().generate(PROMPTS, hot(3))]
        assert is_idle(engine)
        engine.close()


def test_pages_are_used_again() -> None:
    engine = build(slabs=15)  # room for one long prompt, or a few short ones
    for _ in range(3):
        outputs = engine.generate(PROMPTS, greedy(20))
        assert [output.token_ids for output in outputs] == [expected(tuple(prompt), 20) for prompt in PROMPTS]
    assert is_idle(engine)


def test_groups_that_share_a_pool() -> None:
    engine = build(graph=tiny_graph({"near": (6, 4, "main"), "far": (None, 4, "main")}), slabs=40, tokens=7)
    outputs = engine.generate(PROMPTS, greedy(20))
    assert [output.token_ids for output in outputs] == [expected(tuple(prompt), 20) for prompt in PROMPTS]


def test_requests_that_arrive_at_different_times() -> None:
    engine = build(tokens=7, seqs=3)
    found: dict[int, list[Event]] = {}
    ids = []
    for prompt in PROMPTS:
        ids.append(engine.submit(prompt, greedy(20)))
        for _ in range(3):
            for event in engine.step():
                found.setdefault(event.request_id, []).append(event)
    for request, events in drained(engine).items():
        found.setdefault(request, []).extend(events)
    assert [tokens_of(found[request]) for request in ids] == [expected(tuple(prompt), 20) for prompt in PROMPTS]
    assert all([event.finish_reason for event in found[request]] == [None] * 19 + ["length"] for request in ids)
    assert is_idle(engine)
    assert engine.step() == []


prompts = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=20)
actions = st.one_of(st.tuples(prompts, st.integers(1, 12)), st.just("step"), st.integers(1, 8))


@settings(max_examples=30)
@given(st.lists(actions, max_size=25), st.integers(1, 9), st.integers(1, 4), st.integers(10, 20))
def test_any_order_of_requests_steps_and_cancellations(script: list[Any], tokens: int, seqs: int, slabs: int) -> None:
    engine = build(tokens=tokens, seqs=seqs, slabs=slabs)
    asked: dict[int, tuple[list[int], int]] = {}
    found: dict[int, list[Event]] = {}
    for action in [*script, *["step"] * 400]:
        if action == "step":
            for event in engine.step():
                found.setdefault(event.request_id, []).append(event)
        elif isinstance(action, int):
            engine.cancel(action)
        else:
            asked[engine.submit(action[0], greedy(action[1]))] = action
    assert is_idle(engine)
    assert found.keys() == asked.keys()
    for request, (prompt, max_tokens) in asked.items():
        answer, last = tokens_of(found[request]), found[request][-1]
        whole = expected(tuple(prompt), max_tokens)
        assert answer == (whole if last.finish_reason == "length" else whole[: len(answer)])
        assert [event.finish_reason for event in found[request][:-1]] == [None] * (len(found[request]) - 1)


# --- pages that flow, and prefixes -------------------------------------------------------------------------------


@pytest.mark.parametrize("state", [False, True])
@pytest.mark.parametrize("reuses", [False, True])
def test_tokens_are_the_same_while_requests_are_preempted(state: bool, reuses: bool) -> None:
    graph = tiny_graph(state=state)
    engine = build(slabs=10 + state, tokens=7, graph=graph, reuses=reuses)
    prompts = [[5], [7, 8, 9], [40], [9] * 6, [5, 6]]
    outputs = engine.generate(prompts, greedy(40))
    answers = [reference_answer(WEIGHTS, prompt, 40, state=state) for prompt in prompts]
    assert [output.token_ids for output in outputs] == answers
    stats = engine.stats
    assert stats.preemptions > 0
    assert stats.pools["small"].pages_evicted > 0
    assert is_idle(engine)
    assert engine.stats.slabs_free == engine.stats.slabs


@pytest.mark.parametrize("state", [False, True])
def test_a_prompt_seen_before_is_computed_from_its_last_whole_block(state: bool) -> None:
    engine = build(graph=tiny_graph(state=state))
    prompt = list(range(3, 30))  # 27 tokens: three blocks of 8
    first, second = (engine.generate([prompt], greedy(7)) for _ in range(2))
    assert first == second
    assert engine.stats.tokens_reused == 24
    (other,) = engine.generate([[*prompt, *first[0].token_ids, 7, 7]], greedy(9))  # a conversation goes on
    # behind the answer: the last whole block of 33 computed tokens, whose state nobody kept
    assert engine.stats.tokens_reused == 24 + (24 if state else 32)
    whole = [*prompt, *first[0].token_ids, 7, 7]
    assert other.token_ids == reference_answer(WEIGHTS, whole, 9, state=state)
    assert is_idle(engine)


@pytest.mark.parametrize("state", [False, True])
def test_where_prompts_part_is_known_after_the_second(state: bool) -> None:
    engine = build(graph=tiny_graph(state=state), max_seq_len=128, slabs=200)
    shared = list(range(3, 21))  # two blocks of 8 and two tokens
    reused = []
    for last in (30, 31, 32, 33):
        before = engine.stats.tokens_reused
        prompt = [*shared, *[last] * 30]
        (output,) = engine.generate([prompt], greedy(5))
        assert output.token_ids == reference_answer(WEIGHTS, prompt, 5, state=state)
        reused.append(engine.stats.tokens_reused - before)
    # The window's pages and the state at the end of block 2 are kept when the second prompt leaves the first there.
    assert reused == [0, 0, 16, 16]


def test_the_order_of_groups_and_pools_changes_nothing() -> None:
    graph = tiny_graph()
    plan = graph.caches
    turned = msgspec.structs.replace(plan, pools=plan.pools[::-1], groups=plan.groups[::-1])
    found = []
    for each in (plan, turned):
        engine = build(graph=msgspec.structs.replace(graph, caches=each), slabs=12, tokens=7)
        outputs = engine.generate(PROMPTS, greedy(12))
        assert [output.token_ids for output in outputs] == [expected(tuple(prompt), 12) for prompt in PROMPTS]
        found.append(engine.stats)
    assert found[0] == found[1]
    assert list(found[0].pools) == list(found[1].pools)[::-1]


@pytest.mark.parametrize(("groups", "layers"), [({}, ()), ({"near": (6, 4, "a")}, ("near", "near"))])
def test_models_of_states_alone_and_of_windows_alone(groups: Groups, layers: tuple[str, ...]) -> None:
    state = not groups
    engine = build(graph=tiny_graph(groups, layers, state=state), max_seq_len=256, tokens=16, slabs=80)
    prompts = [[9, *range(3, 45)] * 2, [5], [9, *range(3, 45)] * 2]
    answers = [reference_answer(WEIGHTS, prompt, 9, groups, layers, state=state) for prompt in prompts]
    for _ in range(2):
        assert [output.token_ids for output in engine.generate(prompts, greedy(9))] == answers
    (pool,) = engine.stats.pools.values()
    assert engine.stats.tokens_reused >= 2 * (64 if state else 84)
    assert (pool.pages_evicted > 0) is not state
    assert f'precast_pool_pages_in_use{{pool="{"states" if state else "a"}"}} ' in engine.metrics()
    assert is_idle(engine)


def test_more_sequences_than_states_wait_for_one() -> None:
    engine = build(graph=tiny_graph({}, (), state=True), slabs=1, seqs=64)
    slots = engine.stats.pools["states"].pages
    prompts = [[5 + number] for number in range(slots + 5)]
    ids = [engine.submit(prompt, greedy(4)) for prompt in prompts]
    engine.step()
    assert (engine.stats.requests_running, engine.stats.requests_waiting) == (slots, 5)
    found = drained(engine)
    assert all(len(tokens_of(found[request])) >= 3 for request in ids)
    assert engine.stats.preemptions == 0
    assert is_idle(engine)


def test_a_higher_priority_is_answered_first() -> None:
    engine = build(seqs=1)
    low = engine.submit([5], greedy(2))
    high = engine.submit([7], greedy(2), priority=3)
    order = [event.request_id for _ in range(4) for event in engine.step()]
    assert order == [high, high, low, low]
    with pytest.raises(RequestError, match="priority is 'high', expected an integer"):
        engine.submit([5], priority="high")  # type: ignore[arg-type]


class Padded:
    """A program given more than the step: sequences of one token with slot -1 and no pages, and tokens behind them."""

    def __init__(self, program: Any) -> None:
        self.program = program

    def __call__(self, **inputs: torch.Tensor) -> Any:
        sequences, tokens = 3, 5
        last = int(inputs["cu_seqlens"][-1])
        steps = torch.arange(last + 1, last + sequences + 1)
        more = {"cu_seqlens": steps, "kv_lens": torch.ones(sequences), "slot_ids": torch.full((sequences,), -1)}
        for name, tensor in inputs.items():
            if name.startswith("page_indptr"):
                more[name] = tensor[-1:].expand(sequences)
            elif name.startswith("page_start"):
                more[name] = torch.zeros(sequences)
            elif name.startswith("slot_mapping"):
                more[name] = torch.full((sequences + tokens,), -1)
            elif name in ("input_ids", "positions"):
                more[name] = torch.full((1, sequences + tokens), 7)
        return self.program(**{
            name: torch.cat((tensor, more[name].to(tensor.dtype)), -1) if name in more else tensor
            for name, tensor in inputs.items()
        })  # fmt: skip


@pytest.mark.parametrize("state", [False, True])
@pytest.mark.parametrize("tokens", [7, 64])
def test_padding_has_no_page_and_changes_nothing(state: bool, tokens: int) -> None:
    engine = build(graph=tiny_graph(state=state), tokens=tokens, seqs=3, wrap=Padded)
    answers = [reference_answer(WEIGHTS, prompt, 20, state=state) for prompt in PROMPTS]
    for _ in range(2):
        assert [output.token_ids for output in engine.generate(PROMPTS, greedy(20))] == answers
    assert is_idle(engine)


# --- how answers end -------------------------------------------------------------------------------------------


def test_an_end_of_sequence_token_ends_the_answer_and_is_no_text() -> None:
    whole = expected((5,), 20)
    eos = whole[3]
    assert eos not in whole[:3]
    engine = build(eos=(0, eos), text=True)
    (output,) = engine.generate([[5]], greedy(20))
    assert (output.token_ids, output.finish_reason) == (whole[:4], "stop")
    assert output.text == engine.tokenizer.decode(whole[:3])  # type: ignore[union-attr]
    (output,) = engine.generate([[5]], greedy(20, ignore_eos=True))
    assert (output.token_ids, output.finish_reason) == (whole, "length")
    assert is_idle(engine)


@pytest.mark.parametrize("max_tokens", [50, None])
def test_an_answer_ends_at_the_models_limit(max_tokens: int | None) -> None:
    engine = build(max_seq_len=12)
    (output,) = engine.generate([[5] * 9], SamplingParams(max_tokens=max_tokens))
    assert (output.token_ids, output.finish_reason) == (expected((5,) * 9, 3), "length")


def test_a_stop_string_cuts_the_text_before_it() -> None:
    engine = build(text=True)
    (whole,) = engine.generate([[9] * 17], greedy(20))
    stop = whole.text[6:9]
    assert stop not in whole.text[:8]
    (output,) = engine.generate([[9] * 17], greedy(20, stop=("never", stop)))
    assert (output.text, output.finish_reason) == (whole.text[:6], "stop")
    assert output.token_ids == whole.token_ids[: len(output.token_ids)]
    assert is_idle(engine)
    events = list(engine.stream([9] * 17, greedy(20, stop=("never", stop))))
    assert "".join(event.text for event in events) == whole.text[:6]
    assert [event.token_ids for event in events] == [(token,) for token in output.token_ids]


def test_a_stop_string_that_never_comes_changes_nothing() -> None:
    engine = build(text=True)
    (whole,) = engine.generate([[5]], greedy(20))
    (output,) = engine.generate([[5]], greedy(20, stop=whole.text[-3:] + "?"))
    assert output == whole


# --- text, streams, cancellation -------------------------------------------------------------------------------


def test_a_text_prompt_is_its_token_ids() -> None:
    engine = build(text=True)
    (from_text,) = engine.generate("hello there", greedy(9))
    (from_ids,) = engine.generate([engine.tokenizer.encode("hello there")], greedy(9))  # type: ignore[union-attr]
    assert from_text == from_ids
    assert from_text.text == engine.tokenizer.decode(from_text.token_ids)  # type: ignore[union-attr]
    assert torch.equal(engine.logits("hello"), engine.logits(engine.tokenizer.encode("hello")))  # type: ignore[union-attr]


def asked_with(engine: Engine, text: str, **options: Any) -> list[list[int]]:
    """The prompt's ids as each way of asking takes them."""
    (output,) = engine.generate([text], greedy(1), **options)
    before = engine.stats.tokens_prefilled
    list(engine.stream(text, greedy(1), **options))
    engine.submit(text, greedy(1), **options)
    drained(engine)
    lengths = [len(engine.logits(text, **options)), (engine.stats.tokens_prefilled - before) // 2]
    return [output.prompt_token_ids, lengths]


@pytest.mark.parametrize(
    ("text", "options", "ids"),
    [
        ("ab", {}, [0, 3, 4]),
        ("<s>ab", {}, [0, 3, 4]),
        ("<s>ab", {"add_special_tokens": True}, [0, 3, 4]),
        ("<s><s>ab", {}, [0, 0, 3, 4]),
        ("ab", {"add_special_tokens": False}, [3, 4]),
        ("<s>ab", {"add_special_tokens": False}, [0, 3, 4]),
    ],
)
def test_special_tokens_are_put_around_text_once_or_not_at_all(text: str, options: Any, ids: list[int]) -> None:
    engine = build(text=with_front(letters(VOCAB), "<s>"), reuses=False)
    assert asked_with(engine, text, **options) == [ids, [len(ids)] * 2]


def test_whether_special_tokens_are_put_around_text_is_yes_or_no() -> None:
    engine = build(text=True)
    asks = (engine.generate, engine.stream, engine.submit, engine.logits)
    for ask in asks:
        with pytest.raises(RequestError, match="add_special_tokens is 'no', expected True or False") as error:
            ask("ab", add_special_tokens="no")  # type: ignore[operator]
        assert error.value.code == "engine-option-invalid"
    assert is_idle(engine)


def test_without_a_tokenizer_there_are_tokens_and_no_text() -> None:
    (output,) = build().generate([[5]], greedy(3))
    assert output == Output([5], expected((5,), 3), "", "length")


def test_a_stream_gives_an_event_a_token() -> None:
    engine = build(text=True)
    (whole,) = engine.generate([[5]], greedy(6))
    events = list(engine.stream([5], greedy(6)))
    assert [event.token_ids for event in events] == [(token,) for token in whole.token_ids]
    assert "".join(event.text for event in events) == whole.text
    assert [event.finish_reason for event in events] == [None] * 5 + ["length"]
    assert is_idle(engine)


def test_streams_can_be_read_in_turns() -> None:
    engine = build()
    streams = [engine.stream(prompt, greedy(12)) for prompt in PROMPTS]
    found: list[list[int]] = [[] for _ in PROMPTS]
    for _ in range(12):
        for answer, stream in zip(found, streams, strict=True):
            answer.extend(next(stream).token_ids)
    assert found == [expected(tuple(prompt), 12) for prompt in PROMPTS]
    assert [next(stream, None) for stream in streams] == [None] * len(PROMPTS)


def test_a_closed_stream_gives_back_its_pages() -> None:
    engine = build()
    stream: Any = engine.stream([5], greedy(12))
    next(stream)
    assert pages_in_use(engine) > 0
    stream.close()
    assert is_idle(engine)
    assert engine.stats.requests_cancelled == 1


def test_a_stream_that_nobody_reads_runs_nothing() -> None:
    engine = build()
    stream = engine.stream([5], greedy(12))
    assert is_idle(engine)
    del stream


def test_cancelled_requests_end_at_once() -> None:
    engine = build(seqs=1)
    running, waiting = engine.submit([5], greedy(12)), engine.submit([7], greedy(12))
    first = engine.step()
    assert engine.cancel(running)
    assert engine.cancel(waiting)
    assert pages_in_use(engine) == 0  # not even a block was whole
    assert engine.has_work
    assert [*first, *engine.step()] == [
        Event(running, (expected((5,), 1)[0],), ""),
        Event(running, (), "", "cancelled"),
        Event(waiting, (), "", "cancelled"),
    ]
    assert is_idle(engine)
    assert not engine.cancel(running)
    assert not engine.cancel(99)


def test_cancelling_gives_out_the_text_that_was_held_back() -> None:
    engine = build(text=True)
    (whole,) = engine.generate([[5]], greedy(3))
    request = engine.submit([5], greedy(12, stop=whole.text + "?"))
    held = [engine.step() for _ in range(3)]
    assert "".join(event.text for events in held for event in events) == ""
    engine.cancel(request)
    assert engine.step() == [Event(request, (), whole.text, "cancelled")]


def test_generate_keeps_the_events_of_submitted_requests() -> None:
    engine = build()
    request = engine.submit([5], greedy(4))
    engine.generate([[7]], greedy(9))
    (events,) = drained(engine).values()
    assert {event.request_id for event in events} == {request}
    assert tokens_of(events) == expected((5,), 4)


# --- sampling --------------------------------------------------------------------------------------------------


def hot(seed: int | None, max_tokens: int = 12) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=3.0, top_p=0.95, seed=seed)


def test_a_seed_gives_the_same_answer_in_any_batch() -> None:
    alone = [build().generate([prompt], hot(3))[0].token_ids for prompt in PROMPTS]
    together = build(tokens=7, seqs=3).generate(PROMPTS, hot(3))
    mixed = build().generate([*PROMPTS, [5]], [hot(3)] * len(PROMPTS) + [greedy(20)])
    assert [output.token_ids for output in together] == alone
    assert [output.token_ids for output in mixed] == [*alone, expected((5,), 20)]


def test_seeds_matter_and_are_drawn_for_each_request() -> None:
    engine = build()
    assert engine.generate([[5]], hot(3)) != engine.generate([[5]], hot(4))
    first, second = engine.generate([[5], [5]], hot(None, 20))
    assert first.token_ids != second.token_ids
    assert first.token_ids != build().generate([[5]], hot(None, 20))[0].token_ids


def test_filters_that_are_off_are_off_however_that_is_spelled() -> None:
    plain = SamplingParams(max_tokens=12, temperature=3.0, seed=3)
    vllm = SamplingParams(max_tokens=12, temperature=3.0, seed=3, top_k=-1, top_p=None, min_p=None, stop=None)
    (first,), (second,) = (build(text=True).generate([[5]], params) for params in (plain, vllm))
    assert first == second


def test_top_k_of_one_is_greedy() -> None:
    (output,) = build().generate([[5]], SamplingParams(max_tokens=12, temperature=3.0, top_k=1))
    assert output.token_ids == expected((5,), 12)


# --- bad input -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "code", "message"),
    [
        ([], "prompt-empty", "the prompt has no tokens"),
        ("", "prompt-empty", "the prompt has no tokens"),
        ((), "prompt-empty", "the prompt has no tokens"),
        (torch.tensor([], dtype=torch.int64), "prompt-empty", "the prompt has no tokens"),
        ([5] * 32, "prompt-too-long", "the prompt has 32 tokens; .* must fit max_seq_len, 32"),
        ([5, -1], "token-out-of-range", r"token 1 of the prompt is -1, expected 0 to 47 \(vocab_size 48\)"),
        ([48], "token-out-of-range", "token 0 of the prompt is 48"),
        ([2**70], "token-out-of-range", "token 0 of the prompt is 1180591620717411303424"),
        ([5, 10**5000], "token-out-of-range", "token 1 of the prompt is an integer of 16610 bits, no 64-bit id"),
        ([5, -(2**63)], "token-out-of-range", "token 1 of the prompt is -9223372036854775808, expected 0 to 47"),
        ([np.uint64(2**63)], "token-out-of-range", "token 0 of the prompt is 9223372036854775808, no 64-bit id"),
        (np.array([5, 48]), "token-out-of-range", "token 1 of the prompt is 48"),
        ([5, True], "prompt-invalid", r"token 1 of the prompt is True \(bool\), expected an integer"),
        ([5, np.True_], "prompt-invalid", r"token 1 of the prompt is np.True_ \(bool\), expected an integer"),
        (torch.tensor([True]), "prompt-invalid", r"token 0 of the prompt is True \(bool\)"),
        ([np.float32(5)], "prompt-invalid", r"token 0 of the prompt is np.float32\(5.0\) \(float32\)"),
        ([np.array(5.0)], "prompt-invalid", r"token 0 of the prompt is array\(5.\) \(ndarray\)"),
        ([[10**5000]], "prompt-invalid", r"token 0 of the prompt is a list \(list\)"),
        (np.array([]), "prompt-empty", "the prompt has no tokens"),
        (np.array(5), "prompt-invalid", "the prompt is a int, expected text or a list of token ids"),
        ([5.0], "prompt-invalid", r"token 0 of the prompt is 5.0 \(float\)"),
        (["5"], "prompt-invalid", r"token 0 of the prompt is '5' \(str\)"),
        ([[5]], "prompt-invalid", r"token 0 of the prompt is \[5\] \(list\)"),
        (torch.tensor([[5]]), "prompt-invalid", r"token 0 of the prompt is \[5\] \(list\)"),
        (torch.tensor(5), "prompt-invalid", "the prompt is a int, expected text or a list of token ids"),
        (torch.tensor([5.0]), "prompt-invalid", r"token 0 of the prompt is 5.0 \(float\)"),
        (None, "prompt-invalid", "the prompt is a NoneType"),
        (5, "prompt-invalid", "the prompt is a int"),
        (b"ab", "prompt-invalid", "the prompt is a bytes"),
        ({5: 6}, "prompt-invalid", "the prompt is a dict"),
        ({5, 6}, "prompt-invalid", "the prompt is a set"),
        (frozenset((5, 6)), "prompt-invalid", "the prompt is a frozenset"),
        ("a\ud800", "prompt-invalid", "a lone surrogate at character 1"),
    ],
)
def test_prompts_that_are_refused(prompt: Any, code: str, message: str) -> None:
    engine = build(text=True, max_seq_len=32)
    for serve in (engine.submit, engine.stream, lambda prompt: engine.generate([[5], prompt])):
        with pytest.raises(RequestError, match=message) as error:
            serve(prompt)  # type: ignore[operator]
        assert error.value.code == code
    assert error.value.where == "prompt 1"
    assert is_idle(engine)
    assert engine.stats.steps == 0, "a prompt was started before all were checked"
    if code != "prompt-too-long":
        with pytest.raises(RequestError, match=message):
            engine.logits(prompt)


def test_the_longest_prompts() -> None:
    engine = build(max_seq_len=32)
    assert len(engine.generate([[5] * 31], greedy(9))[0].token_ids) == 1
    assert engine.logits([5] * 32).shape == (32, VOCAB)
    with pytest.raises(RequestError, match="the prompt has 33 tokens; it must fit max_seq_len, 32") as error:
        engine.logits([5] * 33)
    assert error.value.code == "prompt-too-long"


@pytest.mark.parametrize("prompt", [range(10**12), range(10**30)], ids=["long", "longer"])
def test_prompts_are_read_as_far_as_the_models_limit(prompt: Any) -> None:
    engine = build(max_seq_len=32)
    for serve in (engine.submit, engine.logits):
        with pytest.raises(RequestError, match=r"the prompt has (1000000000000|more than 3[12]) tokens") as error:
            serve(prompt)
        assert error.value.code == "prompt-too-long"
    with pytest.raises(RequestError, match="the prompt has more than 31 tokens"):
        engine.submit(count())  # type: ignore[arg-type]


@pytest.mark.parametrize("rows", [torch.tensor([[5, 6], [7, 48]]), np.array([[5, 6], [7, 48]])], ids=["torch", "numpy"])
def test_a_row_with_a_token_out_of_range_is_named(rows: Any) -> None:
    with pytest.raises(RequestError, match=r"prompt 1: token 1 of the prompt is 48, expected 0 to 47") as error:
        build().generate(rows)
    assert error.value.code == "token-out-of-range"


@pytest.mark.parametrize("prompts", [torch.tensor([1, 2]), np.array([1, 2])], ids=["torch", "numpy"])
def test_one_row_is_no_list_of_prompts(prompts: Any) -> None:
    with pytest.raises(RequestError, match="prompts is a list of integers, expected a list of prompts"):
        build().generate(prompts)


@pytest.mark.parametrize("wrong", [True, 1.0, "1", None, [1], [10**5000]])
def test_request_ids_and_priorities_are_integers(wrong: Any) -> None:
    engine = build()
    request = engine.submit([5], greedy(3))
    asks: list[Callable[[], object]] = [lambda: engine.cancel(wrong), lambda: engine.submit([5], priority=wrong)]
    for name, ask in zip(("request_id", "priority"), asks, strict=True):
        with pytest.raises(RequestError, match=rf"{name} is .*, expected (an|the) integer") as error:
            ask()
        assert error.value.code == "engine-option-invalid"
    assert tokens_of(drained(engine)[request]) == expected((5,), 3)


def test_request_ids_and_priorities_may_be_of_other_libraries() -> None:
    engine = build(seqs=1)
    low, high = engine.submit([5], greedy(2)), engine.submit([7], greedy(2), priority=np.int64(3))  # type: ignore[arg-type]
    assert [event.request_id for event in engine.step()] == [high]
    assert engine.cancel(np.int32(low))  # type: ignore[arg-type]
    assert not engine.cancel(10**5000)


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([1, 15, 27], r"list of integers.*(?s:.*)pass a list that holds it: \[\[1, 15, 27\]\]"),
        (5, "prompts is a int"),
        (None, "prompts is a NoneType"),
        (b"ab", "prompts is a bytes"),
        ({"a": 1}, "prompts is a dict"),
        ({"a", "b"}, "prompts is a set"),
        (np.array("a"), "prompts is a ndarray"),
        ([np.array([[5, 6]])], "prompt 0: token 0 of the prompt is array.* expected an integer token id"),
    ],
)
def test_what_is_no_list_of_prompts_is_refused(prompts: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message) as error:
        build().generate(prompts)
    assert error.value.code == "prompt-invalid"


def test_integers_of_other_libraries_and_no_prompts_at_all() -> None:
    engine = build()
    answer = expected((5, 6), 3)
    for prompt in (torch.tensor([5, 6]), np.array([5, 6]), (np.int32(5), np.array(6)), (5, 6), range(5, 7)):
        assert engine.generate([prompt], greedy(3))[0].token_ids == answer  # type: ignore[list-item]
    assert engine.generate([]) == []


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"max_tokens": 3}, "params is a dict, expected SamplingParams"),
        ([greedy(3)], "1 params for 2 prompts"),
        ([greedy(3), 4], "prompt 1: params is a int, expected SamplingParams"),
        (3, "params is a int"),
    ],
)
def test_params_that_are_refused(params: Any, message: str) -> None:
    engine = build()
    with pytest.raises(RequestError, match=message) as error:
        engine.generate([[5], [6]], params)
    assert error.value.code == "sampling-invalid"
    assert engine.stats.steps == 0


def test_text_and_stop_strings_need_a_tokenizer() -> None:
    engine = build()
    asks: list[Callable[[], object]] = [
        lambda: engine.submit("hello"),
        lambda: engine.submit([5], greedy(3, stop="a")),
        lambda: engine.logits("hello"),
    ]
    for ask in asks:
        with pytest.raises(RequestError, match="the bundle has no tokenizer") as error:
            ask()
        assert error.value.code == "tokenizer-missing"


def test_what_never_fits_the_cache_is_refused_with_the_arithmetic() -> None:
    engine = build(slabs=5)
    assert len(engine.generate([[5] * 10], greedy(7))[0].token_ids) == 7  # 16 tokens to cache: 4 slabs and 1
    # The window of 6 lies on 3 pages at most.
    arithmetic = (
        r"group near: 3 pages of 4 tokens, 1 a slab; group far: 5 pages of 8 tokens, 2 a slab: "
        r"6 slabs of 1024 bytes needed, 5 there\n"
    )
    with pytest.raises(RequestError, match=f"33 tokens to cache .*: {arithmetic}") as error:
        engine.generate([[5] * 10], greedy(24))
    assert error.value.code == "prompt-too-large-for-cache"
    with pytest.raises(RequestError, match=f"the prompt's 33 tokens don't fit the cache: {arithmetic}") as error:
        engine.logits([5] * 33)
    assert error.value.code == "prompt-too-large-for-cache"


def test_logits_need_free_pages() -> None:
    engine = build(slabs=5)
    request = engine.submit([5] * 5, greedy(6))
    engine.step()
    with pytest.raises(RequestError, match="4 slabs of 1024 bytes needed, 5 there, 0 free") as error:
        engine.logits([5] * 9)
    assert (error.value.code, error.value.fix) == ("cache-too-small", "let the running requests end first")
    (events,) = drained(engine).values()
    assert events[-1] == Event(request, (expected((5,) * 5, 6)[-1],), "", "length")


def test_a_graph_without_logits_is_refused() -> None:
    graph = tiny_graph()
    fields = {name: getattr(graph, name) for name in graph.__struct_fields__}
    with pytest.raises(BundleError, match="the graph has no output logits"):
        runner_of(Graph(**{**fields, "outputs": {"hidden": "logits"}}))


@pytest.mark.parametrize("runs_ahead", [False, True], ids=["waits", "ahead"])
def test_a_model_that_looks_at_no_other_tokens_needs_no_cache(*, runs_ahead: bool) -> None:
    engine = build(graph=tiny_graph({}, ()), slabs=0, runs_ahead=runs_ahead)
    outputs = engine.generate(PROMPTS, greedy(9))
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        token_ids = [*prompt, *output.token_ids[:-1]]
        logits = reference_logits(WEIGHTS, token_ids, {}, ())
        assert output.token_ids == logits[len(prompt) - 1 :].argmax(-1).tolist()
    assert is_idle(engine)


def runner_of(graph: Graph) -> Runner:
    device = open_device(CPU)
    return Runner(lambda: {}, graph, CacheMemory(tiny_graph().caches, 2, device), device, EngineLimits(1, 1, 8))


# --- failures, the end, counters -------------------------------------------------------------------------------


@pytest.mark.parametrize("call", [1, 2, 6])
def test_a_failed_step_leaves_the_engine_as_it_was(call: int) -> None:
    engine = build(tokens=7, wrap=lambda program: FailsOnce(program, call))
    request = engine.submit([5], greedy(12))
    with pytest.raises(torch.OutOfMemoryError):
        engine.generate(PROMPTS, greedy(20))
    assert engine.stats.requests_cancelled == len(PROMPTS)
    (events,) = drained(engine).values()  # the submitted request goes on
    assert events[0].request_id == request
    assert tokens_of(events) == expected((5,), 12)
    assert is_idle(engine)


def test_an_engine_is_closed_though_ending_its_requests_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(request: object) -> None:
        raise RuntimeError("the scheduler is in a state that it should not be in")

    engine = build()
    engine.submit([5], greedy(9))
    monkeypatch.setattr(engine._scheduler, "remove", fail)
    with pytest.raises(RuntimeError, match="should not be in"):
        engine.close()
    with pytest.raises(RequestError, match="the engine is closed"):
        engine.step()


def test_logits_give_back_their_pages_when_the_program_fails() -> None:
    engine = build(wrap=lambda program: FailsOnce(program, 1))
    with pytest.raises(torch.OutOfMemoryError):
        engine.logits([5])
    assert is_idle(engine)


def test_a_closed_engine_serves_nothing() -> None:
    with build() as engine:
        request = engine.submit([5], greedy(9))
        stream = engine.stream([5])
        reading = engine.stream([7], greedy(9))
        next(reading)
    engine.close()
    assert request > 0
    assert is_idle(engine)
    assert list(reading)[-1].finish_reason == "cancelled"
    asks: list[Callable[[], object]] = [
        lambda: engine.generate([[5]]),
        lambda: engine.submit([5]),
        lambda: engine.stream([5]),
        lambda: engine.logits([5]),
        lambda: next(stream),
        engine.step,
    ]
    for ask in asks:
        with pytest.raises(RequestError, match="the engine is closed") as error:
            ask()
        assert error.value.code == "engine-closed"


def test_counters() -> None:
    engine = build(tokens=7, seqs=2)
    nothing = {
        "steps": 0, "captured_steps": 0, "piecewise_steps": 0, "eager_steps": 0, "eager_reasons": {},
        "tokens_padded": 0, "graphs": 0, "graphs_pending": 0, "capture_seconds": 0.0, "compilations": 0,
        "prefill_budget": 6,
        "tokens_prefilled": 0, "tokens_decoded": 0, "tokens_sampled": 0,
        "requests_waiting": 0, "requests_running": 0, "requests_finished": 0, "requests_cancelled": 0,
        "requests_failed": 0, "preemptions": 0, "tokens_reused": 0, "prefix_spans": 0, "slabs": 75, "slabs_free": 75,
    }  # fmt: skip

    def pools(small: tuple[int, int], large: tuple[int, int]) -> dict[str, dict[str, int]]:
        """What can be had beside the other pool's slabs, in use: a page of `small` fills a slab, two of `large` do.

        Half of a page of `small` is padding: its parts of 128 bytes are laid out at multiples of 256.
        """
        found = {}
        for name, (in_use, slabs), other, a_slab, page_bytes in (
            ("small", small, large, 1, 512), ("large", large, small, 2, 512)
        ):  # fmt: skip
            found[name] = {
                "pages": (75 - other[1]) * a_slab, "pages_in_use": in_use, "pages_free": slabs * a_slab - in_use,
                "pages_evicted": 0, "waste_bytes": slabs * 1024 - in_use * page_bytes, "pages_reclaimable": 0,
            }  # fmt: skip
        return found

    assert engine.stats.to_dict() == {**nothing, "pools": pools((0, 0), (0, 0))}
    for prompt in ([5] * 10, [6], [7]):
        engine.submit(prompt, greedy(3))
    engine.step()  # 7 tokens of the first prompt
    before = engine.stats
    engine.step()  # 3 of the first, and the second
    engine.step()  # both decode
    assert before.to_dict() == {
        **nothing, "steps": 1, "eager_steps": 1, "eager_reasons": {"capture is off": 1},
        "tokens_prefilled": 7, "requests_waiting": 2, "requests_running": 1,
        "slabs_free": 72, "pools": pools((2, 2), (1, 1)),
    }  # fmt: skip
    after = engine.stats.to_dict()
    found = after.pop("pools")
    assert after == {
        **nothing, "steps": 3, "eager_steps": 3, "eager_reasons": {"capture is off": 3},
        "tokens_prefilled": 11, "tokens_decoded": 2, "tokens_sampled": 4, "prefill_budget": 5,
        "requests_waiting": 1, "requests_running": 2, "prefix_spans": 1, "slabs_free": 69,
    }  # fmt: skip
    # The first has 11 tokens: its first page of 4 is behind the window, though a known block keeps it.
    assert (found["small"]["pages_in_use"], found["small"]["pages_evicted"]) == (4, 1)
    assert found["large"]["pages_in_use"] == 3
    drained(engine)
    assert engine.stats.requests_finished == 3
    json.dumps(engine.stats.to_dict())


def test_metrics() -> None:
    engine = build(tokens=7, seqs=2)
    engine.generate(PROMPTS, greedy(20))
    lines = engine.metrics().splitlines()
    values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    stats = engine.stats
    assert values["precast_steps_total"] == str(stats.steps)
    assert values['precast_pool_pages_evicted_total{pool="small"}'] == str(stats.pools["small"].pages_evicted)
    assert stats.pools["small"].pages_evicted > 0
    for line in lines:
        assert re.fullmatch(
            r"# (HELP \w+ \w.*\.|TYPE \w+ (counter|gauge))|\w+(\{(pool|reason)=\"[\w ]+\"\})? [\d.]+", line
        ), line
    # every number of the statistics is there
    numbers = [*stats.to_dict().keys() - {"pools", "eager_reasons"}, *stats.to_dict()["pools"]["small"]]
    assert len({line.split()[2] for line in lines if line.startswith("# TYPE")}) == len(numbers)


def test_the_timeline_ends_with_the_first_token() -> None:
    engine = build(tokens=7)
    assert engine.timeline.phases == []
    engine.generate(PROMPTS, greedy(3))
    assert [phase.name for phase in engine.timeline.phases] == ["first token"]
    assert engine.timeline.phases[0].seconds is not None


# --- progress --------------------------------------------------------------------------------------------------


def test_progress_is_told_as_answers_end() -> None:
    told: list[tuple[int, int]] = []
    params = [greedy(length) for length in (2, 5, 2, 9)]
    build().generate([[5], [6], [7], [8]], params, progress=lambda *numbers: told.append(numbers))
    assert told == [(2, 4), (3, 4), (4, 4)]


def test_progress_may_ask_the_engine() -> None:
    engine = build()
    inner: list[Output] = []

    def ask(done: int, total: int) -> None:
        if done == 1:  # which computes all that the others lack
            inner.extend(engine.generate([[7]], greedy(20)))

    outer = engine.generate([[5], [6], [8]], [greedy(2), greedy(9), greedy(9)], progress=ask)

    found = [output.token_ids for output in (*outer, *inner)]
    assert found == [expected((5,), 2), expected((6,), 9), expected((8,), 9), expected((7,), 20)]
    assert is_idle(engine)


def test_progress_may_end_it_all() -> None:
    engine = build()
    first, second = engine.generate([[5], [6]], [greedy(2), greedy(9)], progress=lambda *_: engine.close())
    assert (first.finish_reason, second.finish_reason) == ("length", "cancelled")
    assert second.token_ids == expected((6,), 2)

    def interrupted(done: int, total: int) -> None:
        raise KeyboardInterrupt

    engine = build()
    with pytest.raises(KeyboardInterrupt):
        engine.generate([[5], [6]], [greedy(3), greedy(30)], progress=interrupted)
    assert is_idle(engine)


def test_progress_is_a_function() -> None:
    with pytest.raises(RequestError, match="progress is True, expected a function of two numbers") as error:
        build().generate([[5]], progress=True)  # type: ignore[arg-type]
    assert error.value.code == "engine-option-invalid"


# --- a tokenizer that fails ------------------------------------------------------------------------------------


def with_failing(prompt: tuple[int, ...], place: int, **options: Any) -> tuple[Engine, list[int]]:
    """An engine whose tokenizer panics at the token at this place of the greedy answer to `prompt`; the answer."""
    answer = expected(prompt, 20)
    assert answer[place] not in answer[:place]
    return build(text=failing(VOCAB, answer[place]), **options), answer


def without(token: int, max_tokens: int) -> list[int]:
    """A prompt with this token neither in it nor in its greedy answer."""
    tokens = (prompt for prompt in range(3, VOCAB) if token not in (prompt, *expected((prompt,), max_tokens)))
    return [next(tokens)]


FAILS_AT = 3


@pytest.mark.parametrize("stop", [(), ("no such text",)])
def test_an_answer_that_cannot_be_decoded_ends_with_an_error_and_others_go_on(stop: tuple[str, ...]) -> None:
    engine, answer = with_failing((5,), FAILS_AT)
    good = without(answer[FAILS_AT], 20)
    params = greedy(20, stop=stop)

    before, bad, after = engine.generate([good, [5], good], params)

    assert before == after
    assert (before.token_ids, before.finish_reason) == (expected(tuple(good), 20), "length")
    assert len(before.text) == 20
    assert (bad.finish_reason, bad.error is not None) == ("error", True)
    assert bad.error is not None
    assert bad.error.code == "tokenizer-invalid"
    assert re.match(r"tokenizer\.json: the tokenizers library \S+ can't decode with it", bad.error.message)
    assert bad.token_ids == (answer[: FAILS_AT + 1] if stop else answer)
    stats = engine.stats
    assert (stats.requests_failed, stats.requests_finished, stats.requests_cancelled) == (1, 2, 0)
    assert is_idle(engine)


def test_a_stream_that_cannot_be_decoded_gives_what_it_can() -> None:
    engine, answer = with_failing((5,), FAILS_AT)
    request = engine.submit(without(answer[FAILS_AT], 20), greedy(20))

    events = list(engine.stream([5], greedy(20)))

    assert [event.token_ids for event in events] == [(token,) for token in answer[: FAILS_AT + 1]]
    assert [event.finish_reason for event in events] == [None] * FAILS_AT + ["error"]
    assert [len(event.text) for event in events] == [1] * FAILS_AT + [0]
    (events,) = drained(engine).values()
    assert (events[0].request_id, events[-1].finish_reason) == (request, "length")
    assert sum(len(event.text) for event in events) == 20


def test_text_that_was_held_back_comes_with_the_error() -> None:
    engine, answer = with_failing((5,), FAILS_AT)
    text = engine.tokenizer.decode(answer[:FAILS_AT])  # type: ignore[union-attr]
    *_, last = engine.stream([5], greedy(20, stop=f"{text}?"))
    assert (last.text, last.finish_reason) == (text, "error")


def test_what_cannot_be_decoded_is_cancelled_all_the_same() -> None:
    """The text of whole answers is made at their end, so that here the cancellation is the first to meet the token."""
    engine, answer = with_failing((5,), FAILS_AT)
    good = without(answer[FAILS_AT], 20)

    def interrupted(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.generate([[5], good, good], [greedy(20), greedy(20), greedy(FAILS_AT + 2)], progress=interrupted)
    assert (engine.stats.requests_failed, engine.stats.requests_cancelled) == (1, 1)
    assert is_idle(engine)


def test_prompts_that_the_tokenizer_fails_at_are_refused() -> None:
    engine, answer = with_failing((5,), FAILS_AT)
    for ask in (engine.submit, engine.stream, lambda prompt: engine.generate([[5], prompt])):
        with pytest.raises(RequestError, match="can't decode with it") as error:
            ask([7, answer[FAILS_AT]])  # type: ignore[operator]
        assert error.value.code == "tokenizer-invalid"
    assert error.value.where == "prompt 1: tokenizer.json"
    assert is_idle(engine)


def test_text_that_the_tokenizer_fails_at_is_refused() -> None:
    content = json.loads(letters(VOCAB))
    content["model"] = {"type": "WordLevel", "vocab": {"a": 5}, "unk_token": "none"}
    engine = build(text=json.dumps(content).encode())
    engine.generate(["a"], greedy(1))
    for ask in (engine.submit, engine.stream, engine.logits, lambda prompt: engine.generate(["a", prompt])):
        with pytest.raises(RequestError, match="can't encode with it") as error:
            ask("b")  # type: ignore[operator]
        assert error.value.code == "tokenizer-invalid"
    assert error.value.where == "prompt 1: tokenizer.json"


def test_the_loop_of_the_documentation_outlives_what_is_wrong_with_a_request() -> None:
    """A request is refused with a RequestError; a vocabulary that can't be read is the bundle's fault."""
    page = (Path(__file__).parents[3] / "docs" / "python_api.md").read_text(encoding="utf-8")
    (block,) = (code for code in re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL) if "def serve(" in code)
    names: dict[str, Any] = {"precast": precast}
    exec(block.partition("\ninbox:")[0], names)  # noqa: S102 - it is the repository's own
    engine = build(text=b'{"model": {"type": "BPE"}}')
    inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
    replies: queue.SimpleQueue[Any] = queue.SimpleQueue()
    for prompt in ([], "a", [5]):
        inbox.put(("submit", prompt, None, replies))
    inbox.put(("stop",))

    names["serve"](engine, inbox)

    assert [type(replies.get()) for _ in range(3)] == [RequestError, BundleError, BundleError]


# --- threads ---------------------------------------------------------------------------------------------------


class Waits:
    """A program that waits in its first call until it is told to go on."""

    def __init__(self, program: Any) -> None:
        self.program = program
        self.is_inside, self.may_go_on = threading.Event(), threading.Event()

    def __call__(self, **inputs: torch.Tensor) -> Any:
        if not self.is_inside.is_set():
            self.is_inside.set()
            self.may_go_on.wait()
        return self.program(**inputs)


@contextmanager
def a_thread_inside(engine: Engine, program: Waits, ask: Callable[[], Any]) -> Iterator[Future[Any]]:
    """For the time of the body another thread is inside `ask`, which computes a step; then it goes on to its end."""
    with ThreadPoolExecutor(1, thread_name_prefix="first") as pool:
        answer = pool.submit(ask)
        answer.add_done_callback(lambda _: program.is_inside.set())  # where it fails before it computes anything
        try:
            program.is_inside.wait()
            assert not answer.done(), answer.exception()
            yield answer
        finally:
            program.may_go_on.set()
            answer.exception()


def build_waiting(**options: Any) -> tuple[Engine, Waits]:
    programs: list[Waits] = []

    def wrap(program: Any) -> Waits:
        programs.append(Waits(program))
        return programs[0]

    return build(wrap=wrap, **options), programs[0]


def test_a_thread_that_comes_while_another_is_inside_is_refused_and_changes_nothing() -> None:
    engine, program = build_waiting(text=True)
    submitted = engine.submit([5], greedy(4))
    stream = engine.stream([7], greedy(3))
    asks: dict[str, Callable[[], object]] = {
        "generate": lambda: engine.generate([[9]], greedy(1)),
        "stream": lambda: engine.stream([9]),
        "next": lambda: next(stream),
        "close of a stream": stream.close,
        "logits": lambda: engine.logits([9]),
        "submit": lambda: engine.submit([9]),
        "step": engine.step,
        "cancel": lambda: engine.cancel(submitted),
        "has_work": lambda: engine.has_work,
        "stats": lambda: engine.stats,
        "metrics": engine.metrics,
        "forget_prefixes": engine.forget_prefixes,
        "close": engine.close,
    }

    with a_thread_inside(engine, program, lambda: engine.generate(PROMPTS, greedy(20))) as answer:
        for ask in asks.values():
            with pytest.raises(
                RequestError, match="'MainThread' called the engine while thread 'first_0' was"
            ) as error:
                ask()
            assert error.value.code == "engine-busy"
            assert "queues" in (error.value.fix or "")

    assert [output.token_ids for output in answer.result()] == [expected(tuple(prompt), 20) for prompt in PROMPTS]
    assert tokens_of(list(stream)) == expected((7,), 3)
    (events,) = drained(engine).values()
    assert events[0].request_id == submitted
    assert tokens_of(events) == expected((5,), 4)
    assert engine.stats.requests_finished == len(PROMPTS) + 2
    assert is_idle(engine)


def test_threads_may_come_one_after_another() -> None:
    engine = build()
    stream = engine.stream([7], greedy(6))
    found = [next(stream)]
    asks: list[Callable[[], object]] = [
        lambda: found.append(next(stream)),
        lambda: engine.submit([5], greedy(2)),
        lambda: found.extend(stream),
        lambda: engine.generate(PROMPTS, greedy(3)),
        engine.close,
    ]
    for ask in asks:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(ask).result()
    assert tokens_of(found) == expected((7,), 6)


def test_a_thread_whose_call_failed_is_no_longer_inside() -> None:
    engine = build(wrap=lambda program: FailsOnce(program, 1))
    with ThreadPoolExecutor(1) as pool:
        assert isinstance(pool.submit(engine.generate, [[5]], greedy(2)).exception(), torch.OutOfMemoryError)
    assert engine.generate([[5]], greedy(2))[0].token_ids == expected((5,), 2)


def test_threads_that_run_at_once_get_right_answers_or_are_refused() -> None:
    engine = build()
    begin = threading.Barrier(3)

    def asks() -> list[list[int] | str]:
        begin.wait()
        return [answered(engine, prompt) for prompt in PROMPTS * 3]

    with ThreadPoolExecutor(3) as pool:
        found = [each.result() for each in [pool.submit(asks) for _ in range(3)]]
    for answers in found:
        for prompt, answer in zip(PROMPTS * 3, answers, strict=True):
            assert answer in ("engine-busy", expected(tuple(prompt), 5))
    assert is_idle(engine)


def answered(engine: Engine, prompt: list[int]) -> list[int] | str:
    try:
        return engine.generate([prompt], greedy(5))[0].token_ids
    except RequestError as error:
        return error.code


def test_a_stream_that_is_dropped_while_a_thread_is_inside_is_cancelled_when_it_leaves() -> None:
    engine, program = build_waiting()
    program.is_inside.set()
    stream = engine.stream([5], greedy(50))
    next(stream)
    program.is_inside.clear()

    with a_thread_inside(engine, program, lambda: engine.generate([[7]], greedy(2))) as answer:
        del stream
        gc.collect()

    assert answer.result()[0].token_ids == expected((7,), 2)
    assert engine.stats.requests_cancelled == 1
    assert is_idle(engine)


def test_a_stream_that_is_collected_amid_a_step_is_cancelled_after_it() -> None:
    streams: list[Any] = []

    def dropping(program: Any) -> Any:
        def run(**inputs: torch.Tensor) -> Any:
            if len(streams) == 2:
                streams.clear()
            return program(**inputs)

        return run

    engine = build(wrap=dropping)
    streams.append(engine.stream([5], greedy(50)))
    next(streams[0])
    streams.append("collect it")

    (output,) = engine.generate([[7]], greedy(6))

    assert output.token_ids == expected((7,), 6)
    assert engine.stats.requests_cancelled == 1
    assert is_idle(engine)


# --- logits that are no numbers --------------------------------------------------------------------------------


def build_poisoned(token: int, **options: Any) -> Engine:
    """With weights that make NaN of a sequence from its first `token` on, in its caches too."""
    embed = WEIGHTS["embed"].clone()
    embed[token] = float("nan")
    return build(weights={**WEIGHTS, "embed": embed}, **options)


NOT_FINITE = "logits-not-finite"


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("state", [False, True])
def test_a_request_with_nan_logits_ends_with_an_error_and_others_go_on(state: bool, temperature: float) -> None:
    graph = tiny_graph(state=state)
    whole = build(graph=graph, tokens=7).generate([PROMPTS[1], PROMPTS[0]], greedy(9))
    known = {token for output in whole for token in (*output.prompt_token_ids, *output.token_ids)}
    damaged = next(token for token in range(VOCAB) if token not in known)
    engine = build_poisoned(damaged, graph=graph, tokens=7)
    params = [greedy(9), greedy(9, temperature=temperature, seed=1), greedy(9)]

    good, bad, other = engine.generate([PROMPTS[1], [5, 6, damaged, 8, 9, 10, 11, 12], PROMPTS[0]], params)

    assert (bad.token_ids, bad.finish_reason) == ([], "error")
    assert bad.error is not None
    assert bad.error.code == NOT_FINITE
    assert [good, other] == whole
    stats = engine.stats
    assert (stats.requests_failed, stats.requests_finished, stats.requests_cancelled) == (1, 2, 0)
    assert is_idle(engine)


def test_an_answer_that_meets_nan_keeps_the_tokens_before_it() -> None:
    prompt = PROMPTS[3]
    answer = expected(tuple(prompt), 9)
    last = next(i for i, token in enumerate(answer) if token not in (*prompt, *answer[:i]) and i > 1)
    engine = build_poisoned(answer[last], text=True)

    events = list(engine.stream(prompt, greedy(9)))
    (output,) = engine.generate([prompt], greedy(9))

    assert tokens_of(events) == output.token_ids == answer[: last + 1]
    assert [event.finish_reason for event in events] == [None] * (last + 1) + ["error"]
    assert events[-1].error == output.error
    assert events[-1].error is not None
    assert "NaN" in events[-1].error.message
    assert "".join(event.text for event in events) == output.text
    assert is_idle(engine)


@pytest.mark.parametrize("state", [False, True])
def test_nothing_of_a_request_with_nan_is_reused(state: bool) -> None:
    engine = build_poisoned(47, graph=tiny_graph(state=state), tokens=8)
    prefix = list(range(3, 19))
    engine.generate([[*prefix, 20]], greedy(1))
    assert engine.stats.prefix_spans == 2
    bad = [*prefix, 47, *range(20, 40)]

    (failed,) = engine.generate([bad], greedy(3))
    assert failed.finish_reason == "error"
    # Its chunks were known before its logits were: they are forgotten, and what it went on from stays.
    assert engine.stats.prefix_spans == 2

    before = engine.stats.tokens_reused
    (again,) = engine.generate([[*prefix, *bad[16:]]], greedy(2))
    assert again.finish_reason == "error"
    (good,) = engine.generate([[*prefix, 21]], greedy(2))
    assert good.finish_reason == "length"
    assert engine.stats.tokens_reused == before + 2 * 16
    assert is_idle(engine)


@pytest.mark.parametrize("state", [False, True])
def test_a_chunk_with_nan_of_a_cancelled_request_fails_one_request_at_most(state: bool) -> None:
    engine = build_poisoned(47, graph=tiny_graph(state=state), tokens=8)
    prefix = [3, 47, *range(4, 18)]
    cancelled = engine.submit([*prefix, *range(20, 40)], greedy(1))
    engine.step()
    engine.step()
    engine.cancel(cancelled)
    assert engine.stats.prefix_spans == 2  # two chunks, and no token was drawn

    (failed,) = engine.generate([[*prefix, 21]], greedy(2))

    assert failed.finish_reason == "error"
    assert engine.stats.tokens_reused == 16
    assert engine.stats.prefix_spans == pages_in_use(engine) == 0


def test_what_shares_a_prefix_with_a_request_with_nan_goes_on_and_leaves_what_it_computes() -> None:
    engine = build_poisoned(47, tokens=64, seqs=2)
    prefix = list(range(3, 19))
    engine.generate([[*prefix, 20]], greedy(1))
    sharing = engine.submit([*prefix, 21, 22], greedy(20))
    engine.step()
    failing = engine.submit([*prefix, 47, 23], greedy(20))

    found = drained(engine)

    assert found[failing][-1].finish_reason == "error"
    assert tokens_of(found[sharing]) == expected((*prefix, 21, 22), 20)[1:]
    assert engine.stats.prefix_spans == (16 + 2 + 19) // 8
    assert is_idle(engine)


@pytest.mark.parametrize(("value", "fails"), [("nan", True), ("inf", False), ("-inf", True)])
def test_rows_without_a_finite_logit_or_with_a_nan_fail(value: str, fails: bool) -> None:
    def spoiling(program: Any) -> Any:
        def run(**inputs: torch.Tensor) -> Any:
            outputs = program(**inputs)
            row = outputs["logits"][0, -1]
            row[0 if value != "-inf" else slice(None)] = float(value)
            return outputs

        return run

    for temperature in (0.0, 0.5):
        (output,) = build(wrap=spoiling).generate([[5]], greedy(2, temperature=temperature, seed=3))
        assert (output.finish_reason == "error") == fails
