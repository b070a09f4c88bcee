"""One answer as it grows: its tokens, its text, and when it ends."""

from __future__ import annotations

from collections import deque
from collections.abc import Container

from precast.ir.errors import RequestError
from precast.loader.engine.params import SamplingParams
from precast.loader.engine.results import Event, Failure, FinishReason, Output
from precast.loader.engine.tokenizer import AnswerText
from precast.loader.schedule.requests import NO_TOKEN, Draw, Request

NOT_FINITE = Failure(
    "logits-not-finite",
    "the model gave logits that are NaN or all infinite for this request: its weights are damaged (download or copy "
    "the checkpoint again), or its dtype is too narrow for them (build in bfloat16 or float32)",
)


class Answer:
    """A request, what was asked for it, and where its events go.

    `gives_text` False: the text is made once, at the end. `arrived` is when the request came, by `perf_counter`.
    """

    def __init__(self, request: Request, params: SamplingParams, *, text: AnswerText | None, arrived: float) -> None:
        self.request = request
        self.params = params
        self.text = text
        self.arrived = arrived
        self.events: deque[Event] = deque()
        self.gives_text = True

    def take(self, token_id: int, eos_token_ids: Container[int]) -> Event:
        """The event of the token that the request has just got; it has a reason if the token ends the answer.

        `NO_TOKEN` ends it with an error, and so does a tokenizer that fails.
        """
        if token_id == NO_TOKEN:
            return self._event("error", error=NOT_FINITE)
        request = self.request
        reason: FinishReason | None = None
        if token_id in eos_token_ids and not self.params.ignore_eos:
            reason = "stop"
        elif len(request.token_ids) - request.num_unknown >= request.max_length:
            reason = "length"
        if self.text is None:
            return Event(request.id, (token_id,), "", reason)
        if reason != "stop":
            self.text.push(token_id)
        return self._event(reason, token_id)

    def cancelled(self) -> Event:
        """The last event of an answer that is not to go on, with the text that was held back."""
        return self._event("cancelled")

    def output(self, text: str, last: Event) -> Output:
        """The whole answer, from the text of all its events and the last one."""
        assert last.finish_reason is not None
        ids, prompt_length = self.request.token_ids[: self.request.num_known], self.request.prompt_length
        return Output(list(ids[:prompt_length]), list(ids[prompt_length:]), text, last.finish_reason, last.error)

    def _event(self, reason: FinishReason | None, *token_ids: int, error: Failure | None = None) -> Event:
        """An event with the text that can be given out: if it has a reason, all that is left."""
        text = ""
        if self.text is not None and (reason or self.gives_text):
            try:
                text = self.text.read(final=reason is not None)
            except RequestError as failed:
                text, reason = self.text.held, "error"
                error = error or Failure(failed.code, f"{failed.where}: {failed.message}")
            if self.text.stopped and reason in (None, "length"):
                reason = "stop"
        return Event(self.request.id, token_ids, text, reason, error)


def draw_of(params: SamplingParams, seed: int) -> Draw:
    """How the tokens of an answer with this seed are drawn."""
    return Draw(params.temperature, params.top_k or 0, params.top_p or 1.0, params.min_p or 0.0, seed)
