"""The engine: requests in, events out. It owns a runner, the scheduler of its requests, and what they have answered.

A step is: schedule, launch, collect, hand out events. The next step is scheduled and launched before the tokens of the
one before are collected; where what is scheduled depends on these, they are waited for first. A step that can't be
launched leaves every request as it was; if a launched one fails, its requests are computed anew.
"""

from __future__ import annotations

import random
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple, Self

from precast.ir.errors import RequestError, shown_value
from precast.ir.manifest import ModelInfo
from precast.loader.cache.arena import Arena
from precast.loader.cache.prefixes import Prefixes
from precast.loader.cache.rotation import Rotations
from precast.loader.cache.tables import PageTables
from precast.loader.engine.answers import NOT_FINITE, Answer, draw_of
from precast.loader.engine.metrics import prometheus_text
from precast.loader.engine.owner import Owner, Stream, one_thread
from precast.loader.engine.params import MAX_INT64, SamplingParams, params_of
from precast.loader.engine.prompt_logits import prompt_logits
from precast.loader.engine.prompts import (
    Prompt,
    check_params,
    check_priority,
    check_progress,
    check_prompt,
    prompts_of,
    token_ids_of,
)
from precast.loader.engine.results import EngineStats, Event, Output
from precast.loader.engine.tokenizer import AnswerText, Tokenizer
from precast.loader.engine.values import as_integer
from precast.loader.run.steps import StepRunner, Ticket
from precast.loader.schedule.prefill_budget import PrefillBudget
from precast.loader.schedule.requests import Request, Step
from precast.loader.schedule.scheduler import Scheduler
from precast.loader.schedule.shares import Share, Shares, usage_of
from precast.loader.timeline import Timeline

if TYPE_CHECKING:
    import torch


class _Flight(NamedTuple):
    """A step that was launched, and its ticket."""

    step: Step
    ticket: Ticket


_COUNTERS = {"cancelled": "requests_cancelled", "error": "requests_failed"}
"""Of the reasons for which an answer ends; the others count as finished."""


class Engine:
    """A loaded model that answers prompts, many at a time.

    One thread at a time may be in any of its methods; another one gets RequestError (`engine-busy`), and changes
    nothing. A server runs `step` in one thread and hands requests and events over queues. Requests of `submit`,
    `stream` and `generate` share the steps: while one of them waits for its tokens, the others' advance too, and their
    events are kept until they are fetched.

    `timeline` tells what the load spent its time on, up to the first token.
    """

    def __init__(
        self,
        runner: StepRunner,
        model: ModelInfo,
        *,
        tokenizer_files: Mapping[str, bytes],
        timeline: Timeline,
        reuses_prefixes: bool = True,
        runs_ahead: bool = True,
        max_prefill_tokens: int | None = None,
    ) -> None:
        """`runner` is the engine's own from here on. Users call `precast.load`, which tells of `max_prefill_tokens`.

        What the runner has to capture is captured between steps, once a token was drawn. `runs_ahead` False: each step
        is collected before the next is launched.
        """
        self.timeline = timeline
        self._runner = runner
        self._model = model
        self._tokenizer_files = tokenizer_files
        self._max_prefill_tokens = max_prefill_tokens
        self._budget = PrefillBudget(runner.limits.max_num_tokens, runner.captures.sizes)
        rotations = Rotations(runner.graph)
        self._shares = [self._new_share(rotations, reuses_prefixes) for _ in range(runner.limits.dp)]
        self._tables, self._prefixes, scheduler = self._shares[0]
        self._scheduler: Scheduler | Shares = scheduler
        if len(self._shares) > 1:
            self._scheduler = Shares(self._shares, runner.limits.max_num_seqs)
        self._owner = Owner()
        self._answers: dict[int, Answer] = {}
        self._events: deque[Event] = deque()  # of the requests of `submit`, until `step` returns them
        self._num_requests = 0
        self._seeds = random.Random()  # seeded by the operating system
        self._counts: Counter[str] = Counter()
        self._why_eager: Counter[str] = Counter()
        self._has_sampled = False
        self._flights: deque[_Flight] = deque()  # launched, and not collected yet
        self._runs_ahead = runs_ahead

    def _new_share(self, rotations: Rotations, reuses_prefixes: bool) -> Share:
        """The pages and the scheduler of one rank's sequences."""
        runner = self._runner
        tables = PageTables(runner.graph.caches, Arena(runner.num_slabs))
        prefixes = Prefixes(tables, kind_of=rotations.kind_of, reuses=reuses_prefixes)
        scheduler = Scheduler(
            tables,
            max_num_seqs=runner.limits.max_num_seqs,
            max_num_tokens=runner.limits.max_num_tokens,
            restart_length=rotations.restart_length,
            prefixes=prefixes,
            most_beside=self._most_beside,
        )
        return Share(tables, prefixes, scheduler)

    # --- whole answers -----------------------------------------------------------------------------------------

    @one_thread
    def generate(
        self,
        prompts: str | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int = 0,
        add_special_tokens: bool = True,
        progress: Callable[[int, int], object] | None = None,
    ) -> list[Output]:
        """The answers to all prompts, in their order. `params`: for all of them, or one for each; None: the defaults.

        `priority` is theirs beside other requests, and `add_special_tokens` what is put around text, as in `submit`.
        `progress` is called as answers end: with how many have, and how many there will be.

        Raises RequestError, before any prompt is started, if one of them or its params can't be served.
        """
        check_progress(progress)
        listed = prompts_of(prompts)
        answers = [
            self._prepare(prompt, each, f"prompt {i}", priority=priority, add_special_tokens=add_special_tokens)
            for i, (prompt, each) in enumerate(zip(listed, params_of(params, len(listed)), strict=True))
        ]
        texts: dict[int, list[str]] = {answer.request.id: [] for answer in answers}
        last: dict[int, Event] = {}
        events: deque[Event] = deque()
        try:
            for answer in answers:
                answer.gives_text = bool(answer.params.stop)
                self._queue(answer, events)
            while (done := len(last)) < len(answers):
                if not events:  # what `progress` calls may have computed steps
                    self._advance()
                while events:
                    event = events.popleft()
                    texts[event.request_id].append(event.text)
                    if event.finish_reason is not None:
                        last[event.request_id] = event
                if progress is not None and len(last) > done:
                    progress(len(last), len(answers))
        finally:
            for answer in answers:
                self.cancel(answer.request.id)
        return [answer.output("".join(texts[answer.request.id]), last[answer.request.id]) for answer in answers]

    @one_thread
    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        add_special_tokens: bool = True,
    ) -> Stream[Event]:
        """The answer token by token. It starts when the first event is asked for; closing the iterator cancels it.

        The options are those of `submit`. Raises RequestError at once if the prompt can't be served.
        """
        answer = self._prepare(prompt, params, priority=priority, add_special_tokens=add_special_tokens)

        def events() -> Generator[Event]:
            queue: deque[Event] = deque()
            self._queue(answer, queue)
            try:
                while answer.request.id in self._answers or queue:
                    while queue:
                        yield queue.popleft()
                    if answer.request.id in self._answers:
                        self._advance()
            finally:
                self._owner.later(lambda: self.cancel(answer.request.id))

        return Stream(events(), self._owner)

    @one_thread
    def logits(self, prompt: Prompt, *, add_special_tokens: bool = True) -> torch.Tensor:
        """The logits that follow each token of the prompt: `[T, V]` float32, on the engine's device.

        The result takes `4 * T * V` bytes of the device's memory, for which `precast.load` sets nothing aside. It is
        computed in steps of at most `max_num_seqs` tokens, since no step gives more rows of logits. Pages are taken for
        the time of the call. Raises RequestError if the prompt is longer than the model's limit or needs more pages
        than running requests leave, and torch.OutOfMemoryError if the result doesn't fit.
        """
        self._runner.opened()
        if not self._runner.gives_logits:
            message = "this engine runs without torch, and logits are given as its tensors"
            raise RequestError("engine-option-invalid", message, fix="load the bundle with backend='torch'")
        self._land()
        ids = token_ids_of(prompt, self._model, lambda: self.tokenizer, add_special_tokens=add_special_tokens)
        return prompt_logits(ids, self._runner, *self._shares[0])

    # --- requests of a server ----------------------------------------------------------------------------------

    @one_thread
    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        add_special_tokens: bool = True,
    ) -> int:
        """Queue a request and return its id, which its events carry. Raises RequestError if it can't be served.

        Requests of a higher `priority` are computed before others; running ones of a lower priority give up their
        places and pages for them, and are computed again later. A prompt that is text is encoded as
        `Tokenizer.encode` does it, with these `add_special_tokens`.
        """
        answer = self._prepare(prompt, params, priority=priority, add_special_tokens=add_special_tokens)
        self._queue(answer, self._events)
        return answer.request.id

    @one_thread
    def step(self) -> list[Event]:
        """Launch one step, and return the news of the submitted requests since the last call, cancellations too.

        The tokens are those of the step before: the next call brings this one's. Without work it captures a step if
        any is left to capture, and else returns at once.
        """
        self._runner.opened()
        if self._scheduler.num_waiting or self._scheduler.num_running or self._flights:
            self._advance()
        else:
            self._capture_meanwhile()
        news = list(self._events)
        self._events.clear()
        return news

    @one_thread
    def cancel(self, request_id: int) -> bool:
        """End a request and free its pages now; its last event, "cancelled", is the next that its reader gets.

        False for a request that has ended or never was.
        """
        number = as_integer(request_id)
        if number is None:
            message = f"request_id is {shown_value(request_id)}, expected the integer that `submit` returned"
            raise RequestError("engine-option-invalid", message)
        answer = self._answers.get(number)
        if answer is None:
            return False
        self._end(answer, answer.cancelled())
        return True

    @property
    @one_thread
    def has_work(self) -> bool:
        """Whether a submitted request waits, runs, or has news that `step` hasn't returned."""
        return bool(self._events) or any(answer.events is self._events for answer in self._answers.values())

    # --- state -------------------------------------------------------------------------------------------------

    @property
    @one_thread
    def stats(self) -> EngineStats:
        """A snapshot of the engine's counters."""
        return EngineStats(
            requests_waiting=self._scheduler.num_waiting,
            requests_running=self._scheduler.num_running,
            preemptions=self._scheduler.num_preemptions,
            prefill_budget=self._most_beside(max(self._scheduler.most_decoding, 1)),
            tokens_reused=self._scheduler.num_tokens_reused,
            prefix_spans=sum(share.prefixes.num_spans for share in self._shares),
            slabs=sum(share.tables.arena.num_slabs for share in self._shares),
            slabs_free=sum(share.tables.arena.num_free for share in self._shares),
            pools=usage_of(self._shares),
            eager_reasons=dict(self._why_eager),
            graphs=self._runner.captures.num_captured,
            graphs_pending=self._runner.captures.num_pending,
            capture_seconds=self._runner.captures.seconds,
            compilations=self._runner.native.compilations,
            **self._counts,
        )

    @one_thread
    def wait_until_captured(self) -> None:
        """Capture now what is left to capture, of steps as CUDA graphs; requests wait meanwhile."""
        self._runner.opened()
        self._runner.capture_all()

    @one_thread
    def metrics(self) -> str:
        """The counters of `stats` in Prometheus' text format."""
        return prometheus_text(self.stats)

    @one_thread
    def forget_prefixes(self) -> None:
        """Give up what ended requests left for reuse."""
        for share in self._shares:
            share.prefixes.clear()

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        """The bundle's tokenizer, read when it is first wanted; None if the bundle has none."""
        return Tokenizer.from_files(self._tokenizer_files)

    @one_thread
    def close(self) -> None:
        """Drop all requests, the weights and the caches. The engine can't be used any more; closing again is fine."""
        try:
            for request_id in list(self._answers):
                self.cancel(request_id)
            self._land()
            self._events.clear()
            self.forget_prefixes()
        finally:
            self._runner.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # --- one request -------------------------------------------------------------------------------------------

    def _prepare(
        self,
        prompt: object,
        params: SamplingParams | None,
        where: str | None = None,
        *,
        priority: int,
        add_special_tokens: bool,
    ) -> Answer:
        """A request that is checked and not yet queued."""
        self._runner.opened()
        arrived = time.perf_counter()
        try:
            params = check_params(params)
            priority = check_priority(priority)
            ids = check_prompt(
                prompt, params, self._model, lambda: self.tokenizer, add_special_tokens=add_special_tokens
            )
            max_length = params.max_length(len(ids), self._model.max_seq_len)
            self._scheduler.check(len(ids), max_length)
            text = None if self.tokenizer is None else AnswerText(self.tokenizer, ids, params.stop or ())
        except RequestError as error:
            raise error.inside(where) if where else error from None
        seed = self._seeds.randint(0, MAX_INT64) if params.seed is None else params.seed
        self._num_requests += 1
        request = Request(self._num_requests, ids, max_length, priority, draw=draw_of(params, seed))
        return Answer(request, params, text=text, arrived=arrived)

    def _queue(self, answer: Answer, events: deque[Event]) -> None:
        """Let the request run; its events go to `events`."""
        self._runner.opened()
        answer.events = events
        self._answers[answer.request.id] = answer
        self._scheduler.submit(answer.request)

    def _end(self, answer: Answer, last: Event) -> None:
        if last.error is not NOT_FINITE:  # one with such logits was removed when its step was completed
            self._scheduler.remove(answer.request)
        del self._answers[answer.request.id]
        self._counts[_COUNTERS.get(last.finish_reason or "", "requests_finished")] += 1
        answer.events.append(last)

    # --- one step ----------------------------------------------------------------------------------------------

    def _advance(self) -> None:
        """Launch a step over whatever waits and runs, and hand out what the step before it has drawn.

        A size is captured afterwards, but not before the first token is handed out.
        """
        has_sampled = self._has_sampled
        step = self._scheduler.schedule_ahead()
        if step is None or not step.num_tokens:
            self._land()
            if step is not None or not (self._scheduler.num_waiting or self._scheduler.num_running):
                return
            step = self._scheduler.schedule()
            assert step.num_tokens, "requests wait, nothing runs, and the first of them can't be admitted"
        try:
            ticket = self._runner.launch(step, self._scheduler.decoding, is_timed=self._is_timed(step))
        except BaseException:
            try:
                self._land()
            finally:
                self._scheduler.abandon(step)
            raise
        self._scheduler.launched(step)
        self._count(step, ticket)
        self._flights.append(_Flight(step, ticket))
        if len(self._flights) > 1 or not self._runs_ahead:
            self._land_first()
        if has_sampled:
            self._capture_meanwhile()

    def _most_beside(self, num_decodes: int) -> int:
        """The most prompt tokens of a step in which so many sequences decode.

        While sizes are still to be captured, all that the step has: each is followed by a pause in any case, and what
        runs op by op now is replayed later.
        """
        most = self._runner.limits.max_num_tokens
        if self._max_prefill_tokens is not None:
            return min(self._max_prefill_tokens, most)
        return most if self._runner.captures.num_pending else self._budget.beside(num_decodes)

    def _capture_meanwhile(self) -> None:
        """Capture a size, if any is left to. A capture that fails is said once, and serving goes on op by op."""
        if not self._runner.captures.num_pending:
            return
        try:
            self._runner.capture_next()
        except RuntimeError as error:
            self._runner.captures.stop("capture failed", error)

    def _count(self, step: Step, ticket: Ticket) -> None:
        counts, num_decoded = self._counts, len(step.decodes)
        counts["steps"] += 1
        counts["tokens_sampled"] += ticket.num_rows
        counts["tokens_padded"] += ticket.padding
        counts["tokens_decoded"] += num_decoded
        counts["tokens_prefilled"] += step.num_tokens - num_decoded
        if ticket.ran in ("captured", "piecewise"):
            counts[f"{ticket.ran}_steps"] += 1
        else:
            counts["eager_steps"] += 1
            self._why_eager[ticket.ran] += 1

    def _land(self) -> None:
        """Wait for all that is in flight."""
        while self._flights:
            self._land_first()

    def _land_first(self) -> None:
        """Wait for the first step that is in flight, and hand out its tokens."""
        flight = self._flights[0]
        try:
            drawn = self._runner.collect(flight.ticket)
        except BaseException:
            steps = [each.step for each in self._flights]
            self._flights.clear()
            self._scheduler.rollback(steps)
            raise
        self._flights.popleft()
        self._measure(flight)
        self._scheduler.arrived(flight.step, drawn)
        self._hand_out(flight.step.sampled, drawn)

    def _is_timed(self, step: Step) -> bool:
        """Whether the budget wants to know how long the step takes. Steps between captures tell nothing."""
        if not step.decodes or self._max_prefill_tokens is not None or self._runner.captures.num_pending:
            return False
        return self._budget.is_wanted(has_prompts=bool(step.chunks))

    def _measure(self, flight: _Flight) -> None:
        """Tell the budget how long a step took, which was collected."""
        step, ticket = flight.step, flight.ticket
        if ticket.began is not None:
            num_tokens = (step.num_tokens + ticket.padding) // len(self._shares)
            self._budget.measured(num_tokens, self._runner.seconds(ticket), has_prompts=bool(step.chunks))

    def _hand_out(self, requests: Sequence[Request], token_ids: Sequence[int]) -> None:
        """Append the events of the tokens that these requests have got, and end the answers that they end."""
        eos_token_ids = self._model.eos_token_ids
        for request, token_id in zip(requests, token_ids, strict=True):
            answer = self._answers.get(request.id)
            if answer is None:  # it has ended meanwhile: what it drew is too much
                continue
            if not self._has_sampled:
                self._has_sampled = True
                self.timeline.add("first token", start=answer.arrived, seconds=time.perf_counter() - answer.arrived)
            event = answer.take(token_id, eos_token_ids)
            if event.finish_reason is None:
                answer.events.append(event)
            else:
                self._end(answer, event)
