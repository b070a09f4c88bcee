"""What the engine gives back: events while an answer grows, outputs when it has ended, and counters."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from precast.loader.cache.tables import PoolUsage

FinishReason = Literal["stop", "length", "cancelled", "error"]


class Failure(msgspec.Struct, frozen=True):
    """Why a request ended with an error: a code as those of `precast.ir.errors`, and a message."""

    code: str
    message: str


class Event(msgspec.Struct, frozen=True, gc=False):
    """News of one request: the tokens that a step added, and the text that can be given out now.

    `text` is empty while a character is unfinished or the text may become a stop string; joined, the texts of all
    events are the answer's text. `finish_reason` is set on the last event only: "stop" (an end-of-sequence token or a
    stop string), "length" (`max_tokens` or the model's sequence limit), "cancelled", "error". With "error" comes the
    `error` that ended this request; others go on.
    """

    request_id: int
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason | None = None
    error: Failure | None = None


class Output(msgspec.Struct, frozen=True, omit_defaults=True):
    """A whole answer.

    `token_ids` holds every generated token, a final end-of-sequence token included. `text` leaves special tokens out
    and ends before the stop string; without a tokenizer in the bundle it is empty. `error` says why the answer ended,
    where `finish_reason` is "error": the tokens are those before it.
    """

    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str
    finish_reason: FinishReason
    error: Failure | None = None


class EngineStats(msgspec.Struct, frozen=True):
    """Counters since the engine was loaded, and what it holds now.

    `tokens_prefilled` and `tokens_decoded` are computed tokens: of prompts, and of answers as they are fed back; what
    is computed again after a preemption counts as prefilled. `tokens_reused` were not computed when a request began or
    was resumed, since pages and states that were kept hold them. `prefix_spans` are known for reuse.

    `captured_steps` were replayed as one graph each, `piecewise_steps` as several with calls between them that read the
    host, and `eager_steps` ran op by op, for `eager_reasons`. `tokens_padded` were computed since a graph has a fixed
    size. `graphs` sizes are captured, which took `capture_seconds`, and `graphs_pending` are still to be.

    `compilations` are kernels that no native layer had, compiled as they were first launched; libraries count none.

    `prefill_budget` is how many tokens of prompts a step takes at most, beside as many sequences as decode now.

    `pools` share `slabs` of memory.
    """

    steps: int = 0
    captured_steps: int = 0
    piecewise_steps: int = 0
    eager_steps: int = 0
    eager_reasons: dict[str, int] = {}
    tokens_padded: int = 0
    graphs: int = 0
    graphs_pending: int = 0
    capture_seconds: float = 0.0
    compilations: int = 0
    prefill_budget: int = 0
    tokens_prefilled: int = 0
    tokens_decoded: int = 0
    tokens_sampled: int = 0
    requests_waiting: int = 0
    requests_running: int = 0
    requests_finished: int = 0
    requests_cancelled: int = 0
    requests_failed: int = 0
    preemptions: int = 0
    tokens_reused: int = 0
    prefix_spans: int = 0
    slabs: int = 0
    slabs_free: int = 0
    pools: dict[str, PoolUsage] = {}

    def to_dict(self) -> dict[str, Any]:
        """The same as plain dictionaries and integers."""
        found: dict[str, Any] = msgspec.to_builtins(self)
        return found
