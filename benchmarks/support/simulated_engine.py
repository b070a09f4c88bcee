"""An engine whose steps are scheduled, and take as long as a formula says: no model, no tensors, no waiting.

It has what `mixed_load` uses of an engine. Its clock is its own, and moves only as steps are computed or waited for. It
launches one step ahead, as engines do.
"""

from __future__ import annotations

from array import array
from collections import deque
from typing import NamedTuple

from precast.ir.graph.schema import CachePlan
from precast.ir.memory import caches
from precast.loader.cache.arena import Arena
from precast.loader.cache.tables import PageTables
from precast.loader.engine.params import SamplingParams
from precast.loader.engine.results import EngineStats, Event
from precast.loader.schedule.prefill_budget import PrefillBudget
from precast.loader.schedule.requests import Request, Step
from precast.loader.schedule.scheduler import Scheduler
from support.mixed_load import Load


class StepTime(NamedTuple):
    """Seconds of a step: like those of the Llama-3.1-8B shape in bfloat16 on an H200 (`results/gpu_steps.json`).

    `weights` are read by every step. A token takes `token` seconds of products; a small step takes longer than the
    longer one of both, hence the `bend`. A token that is looked at takes `read` seconds for a sequence that decodes,
    and `attend` for each token of a prompt. A step op by op takes `launches` at least.
    """

    weights: float = 6.8e-3
    token: float = 35e-6
    bend: float = 1.5
    read: float = 131072 / 3.5e12
    attend: float = 4 * 32 * 4096 / 250e12
    launches: float = 32e-3

    def seconds(self, step: Step, num_computed: int, *, is_captured: bool) -> float:
        """Of a step that computes so many tokens, padding included."""
        products = (self.weights**self.bend + (self.token * num_computed) ** self.bend) ** (1 / self.bend)
        seen = sum(len(request.token_ids) for request in step.decodes)
        pairs = sum(chunk.length * (chunk.start + chunk.length / 2) for chunk in step.chunks)
        busy = products + self.read * seen + self.attend * pairs
        return busy if is_captured else max(busy, self.launches)


class _Flight(NamedTuple):
    step: Step
    seconds: float
    num_computed: int
    arrives: float
    sampled: list[Request]


class SimulatedEngine:
    """Requests in, events out. All answers go on to their `max_tokens`."""

    def __init__(
        self,
        plan: CachePlan,
        sizes: tuple[int, ...],
        load: Load,
        *,
        step_time: StepTime | None = None,
        max_prefill_tokens: int | None = None,
        host_seconds: float = 1e-3,
    ) -> None:
        """With the limits of `load`. `sizes` are captured; none: all steps run op by op."""
        plan, max_num_seqs, max_num_tokens = caches.with_slabs(plan), load.max_num_seqs, load.max_num_tokens
        tables = PageTables(plan, Arena(caches.slabs_for(plan, max_num_seqs, 2048, max_num_tokens)))
        self.budget = PrefillBudget(max_num_tokens, sizes)
        self._max_prefill_tokens = max_prefill_tokens
        self._scheduler = Scheduler(
            tables, max_num_seqs=max_num_seqs, max_num_tokens=max_num_tokens, most_beside=self._most
        )
        self._sizes = sorted(sizes)
        self._step_time, self._host_seconds = step_time or StepTime(), host_seconds
        self._now = self._free = 0.0  # of the host, and when the device has done all that was launched
        self._flights: deque[_Flight] = deque()
        self._events: list[Event] = []
        self._alive: dict[int, Request] = {}
        self._counts = dict.fromkeys(("steps", "captured_steps", "eager_steps", "tokens_padded", "tokens_prefilled",
                                      "tokens_decoded"), 0)  # fmt: skip
        self._num_requests = 0

    # --- the clock -----------------------------------------------------------------------------------------------

    def now(self) -> float:
        """Seconds since it was made."""
        return self._now

    def wait(self, seconds: float) -> None:
        """Let so much time go by."""
        self._now += seconds

    # --- the engine ----------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """As an engine's."""
        return bool(self._alive)

    @property
    def stats(self) -> EngineStats:
        """As an engine's, as far as the simulation goes."""
        return EngineStats(prefill_budget=self._most(max(len(self._scheduler.decoding), 1)), **self._counts)

    def submit(self, prompt: list[int], params: SamplingParams) -> int:
        """As an engine's."""
        assert params.max_tokens is not None
        self._num_requests += 1
        request = Request(self._num_requests, array("q", prompt), len(prompt) + params.max_tokens)
        self._alive[request.id] = request
        self._scheduler.submit(request)
        return request.id

    def cancel(self, request_id: int) -> bool:
        """As an engine's, but without an event."""
        request = self._alive.pop(request_id, None)
        if request is not None:
            self._scheduler.remove(request)
        return request is not None

    def step(self) -> list[Event]:
        """As an engine's."""
        step = self._scheduler.schedule_ahead()
        if step is None or not step.num_tokens:
            while self._flights:
                self._land()
            step = self._scheduler.schedule() if step is None else step
        if step.num_tokens:
            self._launch(step)
            if len(self._flights) > 1:
                self._land()
        news, self._events = self._events, []
        return news

    def forget_prefixes(self) -> None:
        """Nothing is kept."""

    def _most(self, num_decodes: int) -> int:
        return self._max_prefill_tokens or self.budget.beside(num_decodes)

    def _launch(self, step: Step) -> None:
        computed = next((size for size in self._sizes if size >= step.num_tokens), None)
        is_captured, computed = computed is not None, computed or step.num_tokens
        seconds = self._step_time.seconds(step, computed, is_captured=is_captured)
        self._now += self._host_seconds
        self._free = max(self._now, self._free) + seconds
        self._flights.append(_Flight(step, seconds, computed, self._free, step.sampled))
        self._scheduler.launched(step)
        found = {
            "steps": 1, "captured_steps": int(is_captured), "eager_steps": int(not is_captured),
            "tokens_padded": computed - step.num_tokens, "tokens_decoded": len(step.decodes),
            "tokens_prefilled": step.num_tokens - len(step.decodes),
        }  # fmt: skip
        self._counts = {name: count + found[name] for name, count in self._counts.items()}

    def _land(self) -> None:
        flight = self._flights.popleft()
        self._now = max(self._now, flight.arrives)
        if flight.step.decodes:
            self.budget.measured(flight.num_computed, flight.seconds, has_prompts=bool(flight.step.chunks))
        self._scheduler.arrived(flight.step, [7] * len(flight.sampled))
        for request in flight.sampled:
            if request.id not in self._alive:
                continue
            is_last = request.num_known == request.max_length
            self._events.append(Event(request.id, (7,), "", "length" if is_last else None))
            if is_last:
                self._scheduler.remove(request)
                del self._alive[request.id]
