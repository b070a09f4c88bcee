"""Requests to tokens: the engine that owns a loaded model, its caches and its requests.

A step is: schedule, fill the staging buffer, one copy to the device, run the program, sample on the device, one copy
back, hand out events. Nothing of a request changes before the step's results are on the host, so a step that fails
leaves every request as it was.
"""

from __future__ import annotations

import random
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import cached_property
from types import TracebackType
from typing import Self

import torch

from precast.ir.errors import BundleError, RequestError
from precast.ir.graph.schema import Graph
from precast.ir.manifest import ModelInfo
from precast.ir.memory import caches
from precast.kernels import registry
from precast.loader.cache.arena import Arena
from precast.loader.cache.memory import CacheMemory
from precast.loader.cache.prefixes import Prefixes
from precast.loader.cache.restarts import Rotations, restart_length
from precast.loader.cache.tables import PageTables
from precast.loader.engine.answers import Answer
from precast.loader.engine.metrics import prometheus_text
from precast.loader.engine.prompts import Prompt, prompts_of, token_ids_of
from precast.loader.engine.results import EngineStats, Event, FinishReason, Output
from precast.loader.engine.sampling import MAX_INT64, SamplingParams, params_of, sampling_arrays, sampling_bytes
from precast.loader.engine.tokenizer import AnswerText, Tokenizer
from precast.loader.run.batch import ALIGNMENT, BatchInputs, Chunk, Staging
from precast.loader.schedule.requests import PageCopy, Request, Step
from precast.loader.schedule.scheduler import Scheduler
from precast.loader.timeline import Timeline

Program = Callable[..., dict[str, torch.Tensor]]


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """While open, `device` is the one that kernels are launched on."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


class Engine:
    """A loaded model that answers prompts, many at a time.

    Not thread-safe: one thread at a time may call any of its methods. A server runs `step` in one thread and hands
    requests and events over queues. Requests of `submit`, `stream` and `generate` share the steps: while one of them
    waits for its tokens, the others' advance too, and their events are kept until they are fetched.

    `timeline` tells what the load spent its time on, up to the first token.
    """

    def __init__(
        self,
        program: Program,
        graph: Graph,
        model: ModelInfo,
        *,
        device: torch.device,
        memory: CacheMemory,
        max_num_seqs: int,
        max_num_tokens: int,
        tokenizer_files: Mapping[str, bytes],
        timeline: Timeline,
        reuses_prefixes: bool = True,
    ) -> None:
        """`program` is the restored graph, bound to its tensors and those of `memory`. Users call `precast.load`.

        Raises BundleError for a graph that has no cache, no logits, or inputs that this release doesn't feed.
        """
        if not caches.groups(graph.caches) or "logits" not in graph.outputs:
            raise BundleError("graph-invalid", "the graph has no cache or no output logits: the engine can't decode")
        self.timeline = timeline
        self._program: Program | None = program
        self._model = model
        self._device = device
        self._max_num_logits = min(max_num_seqs, max_num_tokens)  # rows of a step, for which memory is set aside
        self._tokenizer_files = tokenizer_files
        self._memory: CacheMemory | None = memory
        self._tables = PageTables(memory.plan, Arena(memory.num_slabs))
        self._prefixes = Prefixes(self._tables, kind_of=Rotations(graph).kind_of) if reuses_prefixes else None
        self._scheduler = Scheduler(
            self._tables,
            max_num_seqs=max_num_seqs,
            max_num_tokens=max_num_tokens,
            restart_length=restart_length(graph),
            prefixes=self._prefixes,
        )
        self._inputs = BatchInputs(graph)
        self._sample = registry.resolve("precast.sample", 1, device)
        num_bytes = sampling_bytes(max_num_seqs, ALIGNMENT) + self._inputs.max_bytes(
            max_num_seqs=max_num_seqs, max_num_tokens=max_num_tokens, num_pages=memory.num_pages
        )
        self._staging = Staging(num_bytes, device)
        self._answers: dict[int, Answer] = {}
        self._events: deque[Event] = deque()  # of the requests of `submit`, until `step` returns them
        self._num_requests = 0
        self._seeds = random.Random()  # seeded by the operating system
        self._counts: Counter[str] = Counter()
        self._has_sampled = False

    # --- whole answers -----------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: str | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int = 0,
    ) -> list[Output]:
        """The answers to all prompts, in their order. `params`: for all of them, or one for each; None: the defaults.

        `priority` is theirs beside other requests, as in `submit`.

        Raises RequestError, before any prompt is started, if one of them or its params can't be served.
        """
        listed = prompts_of(prompts)
        answers = [
            self._prepare(prompt, each, f"prompt {i}", priority)
            for i, (prompt, each) in enumerate(zip(listed, params_of(params, len(listed)), strict=True))
        ]
        texts: dict[int, str] = dict.fromkeys((answer.request.id for answer in answers), "")
        reasons: dict[int, FinishReason] = {}
        events: deque[Event] = deque()
        try:
            for answer in answers:
                answer.gives_text = bool(answer.params.stop)
                self._queue(answer, events)
            while len(reasons) < len(answers):
                self._advance()
                while events:
                    event = events.popleft()
                    texts[event.request_id] += event.text
                    if event.finish_reason is not None:
                        reasons[event.request_id] = event.finish_reason
        finally:
            for answer in answers:
                self.cancel(answer.request.id)
        return [answer.output(texts[answer.request.id], reasons[answer.request.id]) for answer in answers]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None, *, priority: int = 0) -> Iterator[Event]:
        """The answer token by token. It starts when the first event is asked for; closing the iterator cancels it.

        Raises RequestError at once if the prompt can't be served.
        """
        answer = self._prepare(prompt, params, priority=priority)

        def events() -> Iterator[Event]:
            queue: deque[Event] = deque()
            self._queue(answer, queue)
            try:
                while answer.request.id in self._answers or queue:
                    while queue:
                        yield queue.popleft()
                    if answer.request.id in self._answers:
                        self._advance()
            finally:
                self.cancel(answer.request.id)

        return events()

    def logits(self, prompt: Prompt) -> torch.Tensor:
        """The logits that follow each token of the prompt: `[T, V]` float32, on the engine's device.

        The result takes `4 * T * V` bytes of the device's memory, for which `precast.load` sets nothing aside. It is
        computed in steps of at most `max_num_seqs` tokens, since no step gives more rows of logits. Pages are taken for
        the time of the call. Raises RequestError if the prompt is longer than the model's limit or needs more pages
        than running requests leave, and torch.OutOfMemoryError if the result doesn't fit.
        """
        program = self._open_program()
        ids = token_ids_of(prompt, tokenizer=lambda: self.tokenizer, vocab_size=self._model.vocab_size)
        if len(ids) > self._model.max_seq_len:
            raise self._too_long(len(ids), "")
        found = f"the prompt's {len(ids)} tokens don't fit the cache: {self._tables.arithmetic(len(ids))}"
        if not self._tables.can_hold(len(ids), 1):
            raise RequestError("prompt-too-large-for-cache", found, fix="load with more cache_bytes")
        table, start = self._tables.new_table(), 0
        step = self._tables.step_for(len(ids), self._max_num_logits)
        result = torch.empty(0, device=self._device)
        try:
            while start < len(ids):
                part = ids[start : start + step]
                while not self._scheduler.make_room(table, start + len(part)):
                    if len(part) == 1:
                        found += f", {self._tables.arena.num_free} free"
                        raise RequestError("cache-too-small", found, fix="let the running requests end first")
                    part = part[: len(part) // 2]
                arrays = self._inputs.arrays([Chunk(part, start, len(ids), table, "all")])
                with on_device(self._device):
                    self._save_states()
                    outputs = program(**self._inputs.shaped(self._staging.to_device(arrays)))
                rows = outputs["logits"][0]
                if start == 0:
                    result = torch.empty(len(ids), rows.shape[-1], dtype=torch.float32, device=self._device)
                result[start : start + len(rows)] = rows
                start += len(part)
                self._tables.evict(table, start)
        finally:
            self._tables.release(table)
        return result

    # --- requests of a server ----------------------------------------------------------------------------------

    def submit(self, prompt: Prompt, params: SamplingParams | None = None, *, priority: int = 0) -> int:
        """Queue a request and return its id, which its events carry. Raises RequestError if it can't be served.

        Requests of a higher `priority` are computed before others; running ones of a lower priority give up their
        places and pages for them, and are computed again later.
        """
        answer = self._prepare(prompt, params, priority=priority)
        self._queue(answer, self._events)
        return answer.request.id

    def step(self) -> list[Event]:
        """Compute one step, and return the news of the submitted requests since the last call, cancellations too.

        Without work it returns at once.
        """
        self._open_program()
        if self._scheduler.num_waiting or self._scheduler.num_running:
            self._advance()
        news = list(self._events)
        self._events.clear()
        return news

    def cancel(self, request_id: int) -> bool:
        """End a request and free its pages now; its last event, "cancelled", is the next that its reader gets.

        False for a request that has ended or never was.
        """
        answer = self._answers.get(request_id)
        if answer is None:
            return False
        self._end(answer, answer.cancelled())
        return True

    @property
    def has_work(self) -> bool:
        """Whether a submitted request waits, runs, or has news that `step` hasn't returned."""
        return bool(self._events) or any(answer.events is self._events for answer in self._answers.values())

    # --- state -------------------------------------------------------------------------------------------------

    @property
    def stats(self) -> EngineStats:
        """A snapshot of the engine's counters."""
        return EngineStats(
            requests_waiting=self._scheduler.num_waiting,
            requests_running=self._scheduler.num_running,
            preemptions=self._scheduler.num_preemptions,
            tokens_reused=self._scheduler.num_tokens_reused,
            prefix_blocks=0 if self._prefixes is None else self._prefixes.num_blocks,
            slabs=self._tables.arena.num_slabs,
            slabs_free=self._tables.arena.num_free,
            pools=self._tables.usage(None if self._prefixes is None else self._prefixes.reclaimable()),
            **self._counts,
        )

    def metrics(self) -> str:
        """The counters of `stats` in Prometheus' text format."""
        return prometheus_text(self.stats)

    def forget_prefixes(self) -> None:
        """Give up what ended requests left for reuse."""
        if self._prefixes is not None:
            self._prefixes.clear()

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        """The bundle's tokenizer, read when it is first wanted; None if the bundle has none."""
        return Tokenizer.from_files(self._tokenizer_files)

    def close(self) -> None:
        """Drop all requests, the weights and the caches. The engine can't be used any more; closing again is fine."""
        try:
            for request_id in list(self._answers):
                self.cancel(request_id)
            self._events.clear()
            self.forget_prefixes()
        finally:
            self._program = self._memory = None
            if self._device.type == "cuda":
                torch.cuda.empty_cache()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    # --- one request -------------------------------------------------------------------------------------------

    def _prepare(
        self, prompt: object, params: SamplingParams | None, where: str | None = None, priority: int = 0
    ) -> Answer:
        """A request that is checked and not yet queued."""
        self._open_program()
        arrived = time.perf_counter()
        params = SamplingParams() if params is None else params
        try:
            if not isinstance(params, SamplingParams):
                raise RequestError("sampling-invalid", f"params is a {type(params).__name__}, expected SamplingParams")
            if not isinstance(priority, int) or isinstance(priority, bool):
                raise RequestError("engine-option-invalid", f"priority is {priority!r}, expected an integer")
            ids = token_ids_of(prompt, tokenizer=lambda: self.tokenizer, vocab_size=self._model.vocab_size)
            if len(ids) >= self._model.max_seq_len:
                raise self._too_long(len(ids), " and at least one token of answer")
            if params.stop and self.tokenizer is None:
                raise RequestError("tokenizer-missing", "stop strings are given, and the bundle has no tokenizer")
            max_length = min(len(ids) + params.max_tokens, self._model.max_seq_len)
            self._scheduler.check(len(ids), max_length)
        except RequestError as error:
            raise error.inside(where) if where else error from None
        text = None if self.tokenizer is None else AnswerText(self.tokenizer, ids, params.stop)
        seed = self._seeds.randint(0, MAX_INT64) if params.seed is None else params.seed
        self._num_requests += 1
        request = Request(self._num_requests, ids, max_length, priority)
        return Answer(request, params, seed=seed, text=text, arrived=arrived)

    def _too_long(self, length: int, extra: str) -> RequestError:
        limit = self._model.max_seq_len
        return RequestError(
            "prompt-too-long",
            f"the prompt has {length} tokens; it{extra} must fit max_seq_len, {limit}",
            fix="shorten the prompt, or build the bundle with a larger max_seq_len if the model allows it",
        )

    def _queue(self, answer: Answer, events: deque[Event]) -> None:
        """Let the request run; its events go to `events`."""
        self._open_program()
        answer.events = events
        self._answers[answer.request.id] = answer
        self._scheduler.submit(answer.request)

    def _end(self, answer: Answer, last: Event) -> None:
        self._scheduler.remove(answer.request)
        del self._answers[answer.request.id]
        self._counts["requests_cancelled" if last.finish_reason == "cancelled" else "requests_finished"] += 1
        answer.events.append(last)

    # --- one step ----------------------------------------------------------------------------------------------

    def _open_program(self) -> Program:
        if self._program is None:
            raise RequestError("engine-closed", "the engine is closed", fix="load the bundle again")
        return self._program

    def _advance(self) -> None:
        """One step over whatever waits and runs; there is something."""
        step = self._scheduler.schedule()
        assert step.num_tokens, "requests wait, nothing runs, and the first of them can't be admitted"
        sampled = step.sampled
        with ExitStack() as on_error:
            on_error.callback(self._scheduler.abandon, step)
            drawn = self._compute(step, sampled)
            on_error.pop_all()
        self._count(step, len(sampled))
        self._scheduler.complete(step, drawn)
        for request, token_id in zip(sampled, drawn, strict=True):
            self._hand_out(self._answers[request.id], token_id)

    def _compute(self, step: Step, sampled: Sequence[Request]) -> list[int]:
        """Run the program over the step; the drawn token of each request that samples, in their order."""
        program = self._open_program()
        arrays = self._inputs.arrays([scheduled.chunk() for scheduled in step.chunks], self._scheduler.rows)
        answers = [self._answers[request.id] for request in sampled]
        is_hot = any(answer.params.temperature > 0 for answer in answers)
        sampling = sampling_arrays([answer.row() for answer in answers]) if is_hot else {}
        with on_device(self._device), torch.inference_mode():
            self._copy_pages(step.saves)
            self._copy_pages(step.restores)
            tensors = self._staging.to_device({**arrays, **sampling})
            logits = program(**self._inputs.shaped(tensors))["logits"][0]
            if not answers:
                return []
            if sampling:
                drawn = self._sample(logits=logits, **{name: tensors[name] for name in sampling})
            else:  # all rows are greedy: what `precast.sample` is by definition, without its sort
                drawn = logits.argmax(-1)
            token_ids: list[int] = drawn.tolist()
            return token_ids

    def _copy_pages(self, copies: Iterable[PageCopy]) -> None:
        assert self._memory is not None
        for copy in copies:
            self._memory.copy_page(copy.group, copy.source, copy.target)

    def _save_states(self) -> None:
        """Make the copies of states that the next step would begin with, before others write to their pages."""
        if self._prefixes is not None:
            self._copy_pages(self._prefixes.take_saves())
            self._prefixes.saved()

    def _hand_out(self, answer: Answer, token_id: int) -> None:
        """Append the event of a drawn token, and end the answer if the token ends it."""
        if not self._has_sampled:
            self._has_sampled = True
            self.timeline.add("first token", start=answer.arrived, seconds=time.perf_counter() - answer.arrived)
        event = answer.take(token_id, self._model.eos_token_ids)
        if event.finish_reason is None:
            answer.events.append(event)
        else:
            self._end(answer, event)

    def _count(self, step: Step, num_sampled: int) -> None:
        decoded = len(step.decodes)
        self._counts["steps"] += 1
        self._counts["eager_steps"] += 1
        self._counts["tokens_decoded"] += decoded
        self._counts["tokens_prefilled"] += step.num_tokens - decoded
        self._counts["tokens_sampled"] += num_sampled
