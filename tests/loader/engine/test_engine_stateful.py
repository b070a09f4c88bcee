"""Any order of requests, forks, steps, captures, cancellations, preemptions, failures, over any geometry: right tokens,
no leak.

Each answer is compared with the model without a cache: the tiny model in plain torch, or the one that hashes, which is
exact. After each action every page is counted: it has as many holders as tables, known spans, points and pending
copies hold it.

The tests try forty scripts of a hundred actions, and ten thousand drawn at random. Run as a program the module goes on
for as many actions as it is told: `CONTRIBUTING.md`, "Long and slow checks", has the command.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import sys
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
from hashing import HashingProgram, Rope, reference_tokens, with_rope
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tiny import VOCAB, Groups, random_weights, reference_logits, tiny_graph, tiny_model
from tiny_engine import poison

from precast.ir.errors import RequestError
from precast.ir.graph.schema import Graph
from precast.ir.memory import caches
from precast.loader import sizing
from precast.loader.cache.memory import CacheMemory
from precast.loader.engine.engine import Engine
from precast.loader.engine.params import SamplingParams
from precast.loader.engine.results import Event
from precast.loader.program.instructions import HostCall
from precast.loader.program.restore import restore
from precast.loader.run.runner import Runner
from precast.loader.run.steps import Ticket
from precast.loader.schedule.requests import Request
from precast.loader.sizing import EngineLimits
from precast.loader.timeline import Timeline
from precast.loader.torch_device import CpuDevice

CPU = torch.device("cpu")
EXAMPLES, ACTIONS = 40, 100
MAX_LENGTH = 48
SIZES = (1, 5, 40)
"""Tokens of captured steps: few, so that most steps are padded."""
ROPES = (Rope("longrope", 20), Rope("dynamic", 14))
TIE = 1e-3
"""Logits nearer than this are equal: chunks are summed in another order than whole sequences."""

Geometry = tuple[Groups, tuple[str, ...], bool]
"""Groups, the group of each layer, whether there is a state."""

NAMED: tuple[Geometry, ...] = (
    ({"near": (6, 4, "small"), "far": (None, 8, "large")}, ("near", "far", "near"), False),
    ({"near": (5, 2, "a"), "middle": (9, 4, "b")}, ("near", "middle"), False),
    ({"far": (None, 4, "a")}, ("far", "far"), False),
    ({"near": (1, 4, "a"), "far": (None, 2, "b")}, ("far", "near"), False),
    ({"chunks": (8, 4, "a"), "far": (None, 8, "b")}, ("chunks", "far"), False),
    ({"near": (6, 4, "main"), "far": (None, 4, "main")}, ("near", "far"), False),
    ({"far": (None, 4, "a")}, ("far",), True),
    ({"near": (6, 4, "a"), "far": (None, 8, "b")}, ("near", "far"), True),
    ({}, (), True),
)
"""Geometries of known models, and of a bundle of before slabs, whose groups share a pool."""


def geometry_of(number: int) -> Geometry:
    """The named ones, and any number of others."""
    if number < len(NAMED):
        return NAMED[number]
    draw = random.Random(number)
    groups: Groups = {}
    for i in range(draw.randint(0, 3)):
        kind = draw.choice(("full", "window", "chunk"))
        reach = None if kind == "full" else draw.choice((1, 2, 3, 5, 6, 9, 16, 60))
        groups[f"{kind}{i}"] = (reach, draw.choice((1, 2, 4, 8)), f"pool{i}")
    layers = [*groups, *draw.choices(list(groups), k=draw.randint(0, 1))] if groups else []
    draw.shuffle(layers)
    return groups, tuple(layers), not groups or draw.random() < 0.4


@cache
def model_of(number: int) -> tuple[Graph, dict[str, torch.Tensor]]:
    groups, layers, state = geometry_of(number)
    return tiny_graph(groups, layers, state=state), random_weights(1, len(layers))


class FailsWhenTold:
    """A program that raises `fails`, after it has written, when it is told to; op by op, in a capture, in a replay."""

    def __init__(self, program: Any) -> None:
        self.program = program
        self.fails: BaseException | None = None

    @property
    def num_binds(self) -> int:
        """As `Program` has it."""
        return int(self.program.num_binds)

    def __call__(self, **inputs: torch.Tensor) -> Any:
        return self.told(self.program)(**inputs)

    def warm_up(self, outputs: dict[str, torch.Tensor], **inputs: torch.Tensor) -> Iterator[HostCall]:
        """As `Program` has it."""
        for call in self.program.warm_up(outputs, **inputs):
            yield call._replace(function=self.told(call.function))

    def cut(self, outputs: dict[str, torch.Tensor], **inputs: torch.Tensor) -> Iterator[HostCall]:
        """As `Program` has it."""
        for call in self.program.cut(outputs, **inputs):
            yield call._replace(function=self.told(call.function))

    def told(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, which raises `fails` once it is done."""

        def run(**arguments: torch.Tensor) -> Any:
            found = function(**arguments)
            if self.fails is not None:
                error, self.fails = self.fails, None
                raise error
            return found

        return run


class MemoryThatFails(CacheMemory):
    """Cache memory whose copies fail when they are told to."""

    fails = False

    def copy_page(self, group: str, source: int, target: int) -> None:
        if self.fails:
            raise torch.OutOfMemoryError("no memory")
        super().copy_page(group, source, target)


def lost(ticket: Ticket) -> list[int]:
    """In the place of `Runner.collect`."""
    raise ConnectionError


tokens = st.integers(0, 3) | st.integers(0, VOCAB - 1)
prompts = st.lists(tokens, min_size=1, max_size=30)
anyone = st.integers(0, 99)


class EngineMachine(RuleBasedStateMachine):
    """An engine with little memory, and what was asked of it."""

    @initialize(
        number=st.integers(0, 200),
        room=st.integers(60, 250),
        max_num_tokens=st.integers(1, 12) | st.just(64),
        max_num_seqs=st.sampled_from((6, 3, 1, 9)),
        reuses=st.integers(0, 9).map(bool),
        hashes=st.booleans(),
        rope=st.sampled_from((None, *ROPES)),
        runs_ahead=st.booleans(),
        max_prefill_tokens=st.none() | st.integers(1, 9),
        captures=st.integers(0, 2).map(lambda number: number == 2),
    )
    def load(
        self,
        number: int,
        room: int,
        max_num_tokens: int,
        max_num_seqs: int,
        reuses: bool,
        hashes: bool,
        rope: Rope | None,
        runs_ahead: bool,
        captures: bool,
        max_prefill_tokens: int | None,
    ) -> None:
        self.graph, self.weights = model_of(number)
        self.rope = rope if hashes else None
        if self.rope is not None:
            self.graph = with_rope(self.graph, self.rope)
        # `room` is in hundredths of what the longest sequence needs at one token a step.
        plan = caches.with_slabs(self.graph.caches)
        slabs = caches.slabs_for(plan, 1, MAX_LENGTH - 1, 1) * room // 100
        self.groups, self.layers, self.state = geometry_of(number)
        self.hashes = hashes
        self.memory = memory = MemoryThatFails(self.graph.caches, slabs, CpuDevice())
        memory.arena.fill_(0xFF)
        limits = EngineLimits(max_num_seqs, max_num_tokens, MAX_LENGTH)
        self.program = FailsWhenTold(self.made(memory, limits))
        self.max_num_seqs = max_num_seqs
        self.runs_ahead = runs_ahead
        sizes = [size for size in SIZES if size <= max_num_tokens] if captures else []
        runner = Runner(self.program, self.graph, memory, CpuDevice(), limits, captured_sizes=sizes)
        self.engine = Engine(
            runner, tiny_model(MAX_LENGTH), tokenizer_files={}, timeline=Timeline(), reuses_prefixes=reuses,
            runs_ahead=runs_ahead, max_prefill_tokens=max_prefill_tokens,
        )  # fmt: skip
        self.asked: dict[int, tuple[list[int], int]] = {}
        self.answers: dict[int, list[int]] = {}
        self.whole: list[list[int]] = []  # prompts with their answers, to fork from

    def made(self, memory: CacheMemory, limits: EngineLimits) -> Any:
        if self.hashes:
            return HashingProgram(memory.tensors, self.groups, self.layers, state=self.state, rope=self.rope)
        program = restore(self.graph, device=CPU)
        program.bind(self.weights)
        program.bind(memory.tensors)
        addresses = sizing.addresses_of(self.graph, limits, CpuDevice())
        program.place(addresses, torch.full((addresses.num_bytes,), 0xFF, dtype=torch.uint8))
        return program

    # --- actions -----------------------------------------------------------------------------------------------

    @rule(prompt=prompts, max_tokens=st.integers(1, 40), priority=st.integers(-1, 1))
    def add(self, prompt: list[int], max_tokens: int, priority: int) -> None:
        try:
            number = self.engine.submit(prompt, SamplingParams(max_tokens=max_tokens), priority=priority)
        except RequestError as error:
            if error.code != "prompt-too-large-for-cache":
                raise
            return
        self.asked[number] = (prompt, max_tokens)
        self.answers[number] = []

    @precondition(lambda self: self.whole or self.asked)
    @rule(which=anyone, cut=anyone, more=st.lists(tokens, max_size=6), max_tokens=st.integers(1, 12))
    def fork(self, which: int, cut: int, more: list[int], max_tokens: int) -> None:
        running = [[*self.asked[number][0], *self.answers[number]] for number in self.asked]
        sources = [*self.whole[-20:], *running]
        source = sources[which % len(sources)]
        prompt = [*source[: 1 + cut % len(source)], *more][: MAX_LENGTH - 1]
        self.add(prompt, max_tokens, 0)

    @rule(count=st.integers(1, 8))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.read(self.engine.step())

    @precondition(lambda self: self.asked)
    @rule(which=anyone)
    def cancel(self, which: int) -> None:
        running = sorted(self.engine._answers)  # of those asked, one may have news that nobody has read
        if not running:
            return
        number = running[which % len(running)]
        assert self.engine.cancel(number)
        self.every_page_has_its_holders()
        self.read(self.engine.step())
        assert number not in self.asked

    @precondition(lambda self: self.running())
    @rule(which=anyone)
    def preempt(self, which: int) -> None:
        self.engine._land()
        running = sorted(self.running(), key=lambda request: request.id)
        if not running:
            return
        self.engine._scheduler.preempt(running[which % len(running)])

    @precondition(lambda self: self.asked)
    @rule(error=st.sampled_from((torch.OutOfMemoryError, KeyboardInterrupt)))
    def fail(self, error: type[BaseException]) -> None:
        self.program.fails = error()
        try:
            self.read(self.engine.step())
        except error:
            return
        # It only waited for what is in flight.
        assert self.runs_ahead
        self.program.fails = None

    @precondition(lambda self: self.asked)
    @rule()
    def fail_early(self) -> None:
        """No copy of a state can be made; a step that makes none is computed."""
        self.memory.fails = True
        with contextlib.suppress(torch.OutOfMemoryError):
            self.read(self.engine.step())
        self.memory.fails = False

    @precondition(lambda self: self.running())
    @rule(count=st.integers(1, 3))
    def lose(self, count: int) -> None:
        """The device loses what is in flight: nothing of it has been written, and its tokens never arrive."""
        runner = self.engine._runner
        self.engine._land()
        before = self.memory.arena.clone()
        runner.collect = lost  # type: ignore[method-assign]
        try:
            for _ in range(count):
                self.read(self.engine.step())
            self.engine._land()
        except ConnectionError:
            self.memory.arena.copy_(before)
        finally:
            del runner.collect
        assert not self.engine._flights

    @precondition(lambda self: self.engine.stats.graphs_pending)
    @rule(error=st.sampled_from((None, KeyboardInterrupt, torch.OutOfMemoryError)))
    def capture(self, error: type[BaseException] | None) -> None:
        """All that is left to capture, but for an error; what was interrupted stays to be captured."""
        self.program.fails = None if error is None else error()
        pending, done = self.engine.stats.graphs_pending, self.engine.stats.graphs
        with contextlib.suppress(KeyboardInterrupt):
            self.engine.wait_until_captured()
        assert self.program.fails is None
        left = {None: (0, done + pending), KeyboardInterrupt: (pending, done), torch.OutOfMemoryError: (0, done)}
        assert (self.engine.stats.graphs_pending, self.engine.stats.graphs) == left[error]

    @rule(number=st.sampled_from((-1, 31, 1 << 30)))
    def poison(self, number: int) -> None:
        """What places hold beyond a step's own inputs, garbage lengths and page numbers, is never looked at."""
        _, _, places = self.engine._runner.opened()
        poison(places, number)

    @rule(prompt=prompts)
    def logits(self, prompt: list[int]) -> None:
        try:
            found = self.engine.logits(prompt)
        except RequestError as error:
            if error.code not in ("prompt-too-large-for-cache", "cache-too-small"):
                raise
            return
        if self.hashes:
            assert found.argmax(-1).tolist() == self.hashed(prompt, len(prompt))
        else:
            torch.testing.assert_close(found, self.expected(prompt), rtol=1e-3, atol=1e-3)

    @rule()
    def forget(self) -> None:
        self.engine.forget_prefixes()

    @rule()
    def give_up(self) -> None:
        """What is kept for reuse is given up until nothing is left of it but what running sequences hold."""
        prefixes = self.engine._prefixes
        while prefixes.drop_one():
            pass
        held: dict[str, set[int]] = {name: set() for name in self.engine._tables.pools}
        for request in self.running():
            for group in self.engine._tables.groups:
                held[group.pool].update(request.table.pages[group.name])
        assert {name: pool.num_held for name, pool in self.engine._tables.pools.items()} == {
            name: len(pages) for name, pages in held.items()
        }

    # --- what holds --------------------------------------------------------------------------------------------

    @invariant()
    def every_page_has_its_holders(self) -> None:
        engine = self.engine
        held: dict[str, Counter[int]] = {name: Counter() for name in engine._tables.pool_of}
        for request in self.running():
            for name, pages in request.table.pages.items():
                held[name].update(pages)
            for name, page in request.restores.items():
                held[name][page] += 1
        for span in engine._prefixes._known.values():
            for name, pages in span.pages.items():
                held[name].update(pages)
            if span.point is not None:
                for name, pages in span.point.pages.items():
                    held[name].update(pages)
                for name, page in span.point.states.items():
                    held[name][page] += 1
        in_pools: dict[str, Counter[int]] = {name: Counter() for name in engine._tables.pools}
        for group in engine._tables.groups:
            assert not held[group.name].keys() & in_pools[group.pool].keys(), "a page is two groups'"
            in_pools[group.pool].update(held[group.name])
        slabs: Counter[int] = Counter()
        for name, counted in in_pools.items():
            pool = engine._tables.pools[name]
            assert pool.num_held == len(counted)
            assert all(pool.holders(page) == count for page, count in counted.items())
            slabs.update({page // pool.pages_per_slab for page in counted})
        assert all(count == 1 for count in slabs.values()), "a slab is two pools'"
        assert engine.stats.slabs - engine.stats.slabs_free == len(slabs)

    @invariant()
    def what_can_be_given_up_is_counted(self) -> None:
        prefixes = self.engine._prefixes
        counted = dict.fromkeys(self.engine._tables.pool_of, 0)
        for span in prefixes._known.values():
            kept = [] if span.num_users else [span.pages]
            if span.point is not None:
                kept += [span.point.pages, {name: array("i", [page]) for name, page in span.point.states.items()}]
            for name, pages in ((name, pages) for held in kept for name, pages in held.items()):
                counted[name] += len(pages)
        assert prefixes.reclaimable() == counted
        for request in self.running():
            assert all(prefixes._known[span.digest] is span for span in request.spans)

    @invariant()
    def what_is_written_next_is_nobody_elses(self) -> None:
        pools = self.engine._tables.pool_of
        for request in self.running():
            for group in self.engine._tables.plan.groups:
                first = request.table.first[group.name]
                pages = request.table.pages[group.name][request.num_computed // group.spec.page_size - first :]
                assert all(pools[group.name].holders(page) == 1 for page in pages)
            for states in self.engine._tables.plan.states:
                assert all(pools[states.name].holders(page) == 1 for page in request.table.pages[states.name])

    @invariant()
    def what_is_unseen_is_given_back(self) -> None:
        for request in self.running():
            for group in self.engine._tables.plan.groups:
                # Rows give theirs back when the next step is scheduled.
                seen = caches.first_visible(group.spec, max(request.num_computed - 1, 0)) // group.spec.page_size
                assert request.table.first[group.name] >= seen

    @invariant()
    def no_more_run_than_may(self) -> None:
        scheduler = self.engine._scheduler
        assert scheduler.num_running <= self.max_num_seqs
        assert scheduler.num_running + scheduler.num_waiting == len(self.engine._answers)

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        for _ in range(6000):
            if not self.engine.has_work:
                break
            self.read(self.engine.step())
        assert not self.asked, "requests that never end"
        self.engine.forget_prefixes()
        stats = self.engine.stats
        assert stats.slabs_free == stats.slabs
        assert all(usage.pages_in_use == 0 for usage in stats.pools.values())

    # --- the model ---------------------------------------------------------------------------------------------

    def running(self) -> list[Request]:
        scheduler = self.engine._scheduler
        return [*scheduler.decoding.requests, *scheduler._chunked.values(), *scheduler._held.values()]

    def expected(self, token_ids: list[int]) -> torch.Tensor:
        return reference_logits(self.weights, token_ids, self.groups, self.layers, state=self.state)

    def hashed(self, token_ids: list[int], prompt_length: int) -> list[int]:
        return reference_tokens(
            token_ids, self.groups, self.layers, state=self.state, rope=self.rope, prompt_length=prompt_length
        )

    def read(self, events: list[Event]) -> None:
        for event in events:
            answer = self.answers[event.request_id]
            answer.extend(event.token_ids)
            if event.finish_reason is None:
                continue
            prompt, max_tokens = self.asked.pop(event.request_id)
            del self.answers[event.request_id]
            if event.finish_reason == "length":
                assert len(answer) == min(max_tokens, MAX_LENGTH - len(prompt))
            if answer:
                assert self.is_right(prompt, answer), "not the tokens of the model without a cache"
                self.whole.append([*prompt, *answer])

    def is_right(self, prompt: list[int], answer: list[int]) -> bool:
        token_ids = [*prompt, *answer[:-1]]
        if self.hashes:
            return self.hashed(token_ids, len(prompt))[len(prompt) - 1 :] == answer
        logits = self.expected(token_ids)[len(prompt) - 1 :]
        chosen = logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
        return bool((chosen >= logits.max(1).values - TIE).all())


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(
    max_examples=EXAMPLES,
    stateful_step_count=ACTIONS,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
)


# --- the long run ------------------------------------------------------------------------------------------------


WEIGHTS = {
    "add": 20, "fork": 15, "step": 50, "cancel": 3, "preempt": 3, "fail": 2, "fail_early": 2, "logits": 3, "forget": 1,
    "give_up": 1, "capture": 30, "poison": 2, "lose": 2,
}  # fmt: skip
"""How often the long run draws each action."""


def act(machine: EngineMachine, draw: random.Random, longest: int) -> str:
    """One action that can be done now, and what must hold after it. Its name. Prompts have `longest` tokens at most."""

    def some(count: int) -> list[int]:
        return [draw.randrange(4 if draw.random() < 0.5 else VOCAB) for _ in range(count)]

    can = {"fork": machine.whole or machine.asked, "cancel": machine.asked, "fail": machine.asked}
    can["fail_early"] = machine.asked
    can["preempt"] = can["lose"] = machine.running()
    can["capture"] = machine.engine.stats.graphs_pending
    names = [name for name in WEIGHTS if can.get(name, True)]
    (name,) = draw.choices(names, [WEIGHTS[name] for name in names])
    which = draw.randrange(100)
    values: dict[str, Any] = {
        "add": {
            "prompt": some(draw.randint(1, longest)),
            "max_tokens": draw.randint(1, MAX_LENGTH - longest),
            "priority": which % 3 - 1,
        },
        "fork": {"which": which, "cut": draw.randrange(longest), "more": some(which % 7), "max_tokens": 1 + which % 12},
        "step": {"count": draw.randint(1, 8)},
        "logits": {"prompt": some(draw.randint(1, 30))},
        "cancel": {"which": which},
        "lose": {"count": 1 + which % 3},
        "fail": {"error": (torch.OutOfMemoryError, KeyboardInterrupt)[which % 2]},
        "capture": {"error": (None, KeyboardInterrupt, torch.OutOfMemoryError)[which % 3]},
        "poison": {"number": (-1, 31, 1 << 30)[which % 3]},
        "preempt": {"which": which},
    }
    getattr(machine, name)(**values.get(name, {}))
    machine.every_page_has_its_holders()
    machine.what_can_be_given_up_is_counted()
    machine.what_is_written_next_is_nobody_elses()
    machine.what_is_unseen_is_given_back()
    machine.no_more_run_than_may()
    return name


def run(actions: int, seed: int, script: int = 300) -> Counter[str]:
    """So many actions, in scripts of `script`, each on an engine of its own. What happened, counted."""
    draw, happened = random.Random(seed), Counter[str]()
    for done in range(0, actions, script):
        machine = EngineMachine()
        options = {
            "number": draw.randrange(len(NAMED)) if draw.random() < 0.3 else draw.randrange(400),
            "room": draw.randint(70, 200),
            "max_num_tokens": draw.choice((64, 16, *range(1, 13))),
            "max_num_seqs": draw.choice((1, 3, 6, 6, 9)),
            "reuses": draw.random() < 0.9,
            "hashes": draw.random() < 0.9,
            "rope": draw.choice((None, None, *ROPES)),
            "runs_ahead": draw.random() < 0.7,
            "captures": draw.random() < 0.3,
            "max_prefill_tokens": draw.choice((None, None, 1, 3, 9)),
        }
        try:
            machine.load(**options)
            longest = draw.choice((4, 30))
            happened.update(act(machine, draw, longest) for _ in range(min(script, actions - done)))
            stats = machine.engine.stats
            machine.teardown()
        except BaseException as error:
            error.add_note(f"seed {seed}, after {done} actions, with {options}")
            raise
        happened.update(
            steps=stats.steps, replayed=stats.steps - stats.eager_steps, preemptions=stats.preemptions,
            tokens_reused=stats.tokens_reused,
            pages_evicted=sum(usage.pages_evicted for usage in stats.pools.values()),
        )  # fmt: skip
    return happened


def test_ten_thousand_actions_at_random() -> None:
    happened = run(10_000, seed=0)
    counted = ("replayed", "preemptions", "tokens_reused", "pages_evicted")
    assert all(happened[name] > 0 for name in (*WEIGHTS, *counted)), happened


def main() -> None:
    parser = argparse.ArgumentParser(description="Random actions on engines of any geometry, each answer checked.")
    parser.add_argument("--actions", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after so many, between scripts")
    options = parser.parse_args()
    torch.set_num_threads(1)
    started, happened, done, seed = time.perf_counter(), Counter[str](), 0, options.seed
    while done < options.actions and time.perf_counter() - started < options.seconds:
        count = min(30_000, options.actions - done)
        happened += run(count, seed)
        done, seed = done + count, seed + 1
        rate = done / (time.perf_counter() - started)
        sys.stdout.write(f"{done} actions, {rate:.0f} a second, none wrong: {dict(happened)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
