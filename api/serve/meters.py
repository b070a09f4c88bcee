"""What the HTTP side counts, for Prometheus; the engine's own counters come from its process.

No label has a value that a client chooses.
"""

from __future__ import annotations

import time

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from precast.serve.messages import Counted

_SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100)
_TOKEN_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1)
_ALIASES = {
    # what routers and autoscalers read of vLLM: a field of `Counted`
    "vllm:num_requests_waiting": "waiting",
    "vllm:num_requests_running": "running",
    "vllm:kv_cache_usage_perc": "cache_usage",
}


class Meters:
    """The counters of one server."""

    def __init__(self, model: str) -> None:
        """`model`: the name that fleets know it by, a label of what they read."""
        self._model = model.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
        self._registry = CollectorRegistry()
        self.requests = Counter(
            "precast_http_requests", "Requests by what they were for, and how they were answered.", ("route", "status"),
            registry=self._registry,
        )  # fmt: skip
        self.prompt_tokens = Counter("precast_prompt_tokens", "Tokens of prompts.", registry=self._registry)
        self.answer_tokens = Counter("precast_answer_tokens", "Tokens of answers.", registry=self._registry)
        self.first_token = Histogram(
            "precast_time_to_first_token_seconds", "From a request to the first token of an answer.",
            buckets=_SECONDS, registry=self._registry,
        )  # fmt: skip
        self.each_token = Histogram(
            "precast_time_per_output_token_seconds", "Between two tokens of an answer, by its mean.",
            buckets=_TOKEN_SECONDS, registry=self._registry,
        )  # fmt: skip
        self.whole = Histogram(
            "precast_request_seconds", "From a request to the end of its answer.", buckets=_SECONDS,
            registry=self._registry,
        )  # fmt: skip

    def text(self, counted: Counted | None) -> str:
        """All of it in Prometheus' text format; without the engine's counters where there are none."""
        own = generate_latest(self._registry).decode()
        if counted is None:
            return own
        aliases = [
            f'# TYPE {name} gauge\n{name}{{model_name="{self._model}"}} {getattr(counted, field)}\n'
            for name, field in _ALIASES.items()
        ]
        return own + counted.text + "".join(aliases)


class Watch:
    """The clock of one answer."""

    def __init__(self, meters: Meters, began: float) -> None:
        """`began`: when its request came, by `time.monotonic`."""
        self._meters = meters
        self._began = began
        self._first = 0.0
        self.num_tokens = 0

    def tokens(self, count: int) -> None:
        """More tokens have come."""
        if count and not self.num_tokens:
            self._first = time.monotonic()
            self._meters.first_token.observe(self._first - self._began)
        self._meters.answer_tokens.inc(count)
        self.num_tokens += count

    def ended(self) -> None:
        """The answer has ended by itself."""
        now = time.monotonic()
        self._meters.whole.observe(now - self._began)
        if self.num_tokens > 1:
            self._meters.each_token.observe((now - self._first) / (self.num_tokens - 1))
