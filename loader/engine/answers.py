"""One answer as it grows: its tokens, its text, and when it ends."""

from __future__ import annotations

from collections import deque
from collections.abc import Container

from precast.loader.engine.results import Event, FinishReason, Output
from precast.loader.engine.sampling import SampledRow, SamplingParams
from precast.loader.engine.tokenizer import AnswerText
from precast.loader.schedule.requests import Request


class Answer:
    """A request, what was asked for it, and where its events go.

    `gives_text` False: the text is made once, at the end. `arrived` is when the request came, by `perf_counter`.
    """

    __slots__ = ("arrived", "events", "gives_text", "params", "request", "seed", "text")

    def __init__(
        self, request: Request, params: SamplingParams, *, seed: int, text: AnswerText | None, arrived: float
    ) -> None:
        self.request = request
        self.params = params
        self.seed = seed
        self.text = text
        self.arrived = arrived
        self.events: deque[Event] = deque()
        self.gives_text = True

    def row(self) -> SampledRow:
        """How its next token is drawn."""
        return SampledRow(self.params, self.seed, self.request.num_generated)

    def take(self, token_id: int, eos_token_ids: Container[int]) -> Event:
        """The event of the token that the request has just got; it has a reason if the token ends the answer."""
        reason: FinishReason | None = None
        if token_id in eos_token_ids and not self.params.ignore_eos:
            reason = "stop"
        elif len(self.request.token_ids) >= self.request.max_length:
            reason = "length"
        text = ""
        if self.text is not None:
            if reason != "stop":
                self.text.push(token_id)
            if reason or self.gives_text:
                text = self.text.read(final=reason is not None)
            if self.text.stopped:
                reason = "stop"
        return Event(self.request.id, (token_id,), text, reason)

    def cancelled(self) -> Event:
        """The last event of an answer that is not to go on, with the text that was held back."""
        text = "" if self.text is None else self.text.read(final=True)
        return Event(self.request.id, (), text, "cancelled")

    def output(self, text: str, reason: FinishReason) -> Output:
        """The whole answer; `text` and `reason` are those of its events."""
        ids, prompt_length = self.request.token_ids, self.request.prompt_length
        return Output(list(ids[:prompt_length]), list(ids[prompt_length:]), text, reason)
