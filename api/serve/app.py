"""The routes: what is asked for, whether it may be, and who answers."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from precast import __version__
from precast.ir.errors import PrecastError, RequestError, TargetError
from precast.loader.engine.params import SamplingParams
from precast.serve.answering import EventStream, Expected, whole
from precast.serve.keys import Keys
from precast.serve.link import Link, Question
from precast.serve.messages import Opened
from precast.serve.meters import Meters, Watch
from precast.serve.places import Place, Places
from precast.serve.prompts import Prompts
from precast.serve.replies import Reply, error, json_response
from precast.serve.requests import (
    MOST_ANSWERS,
    BadRequest,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
    checked,
    read_body,
    refused,
)
from precast.serve.threads import Threads

MOST_BODY_BYTES = 16 << 20
"""Of a request: more than the text, or the ids, of a million tokens take."""
MOST_READ_BYTES = 256 << 20
"""Of all requests that are being read."""
TEXT_THREADS = 4
"""That render templates and encode texts."""
FAILED = "precast.failed"
"""In a request's scope: what notes in the log why it has failed."""
R = TypeVar("R")
_LOG = logging.getLogger("precast.serve")


class Options(NamedTuple):
    """What whoever starts the server decides.

    `names` are those that requests may give the model; the first is the one that it is listed by. The engine has at
    most `most_open` answers to run and to keep waiting; others are turned away. After `stuck_seconds` without a word,
    an engine that has something to do is unhealthy. A request must bring one of the `keys`; empty: no key is needed.
    """

    names: tuple[str, ...]
    most_open: int
    stuck_seconds: float
    keys: tuple[str, ...] = ()


class App:
    """The HTTP interface of an engine that is `link`ed: an ASGI application.

    `prompts` is set as soon as the bundle's tokenizer is read, `defaults` says how answers are drawn where requests
    don't, and `drains` is set when the server is to end.
    """

    def __init__(self, link: Link, options: Options) -> None:
        self.prompts: Prompts | None = None
        self.defaults: dict[str, Any] = {}
        self.drains = False
        self.places = Places(options.most_open)
        self._link = link
        self._options = options
        self._meters = Meters(options.names[0])
        self._began = int(time.time())
        self._threads = Threads(TEXT_THREADS)
        self._num_read_bytes = 0
        routes = [
            Route("/health", self._health), Route("/ready", self._ready),
            Route("/metrics", self._metrics), Route("/version", self._version),
            Route("/v1/models", self._models), Route("/v1/models/{name:path}", self._model),
            Route("/v1/completions", self._completions, methods=["POST"]),
            Route("/v1/chat/completions", self._chat, methods=["POST"]),
            Route("/tokenize", self._tokenize, methods=["POST"]),
            Route("/detokenize", self._detokenize, methods=["POST"]),
        ]  # fmt: skip
        self._routes = {route.path for route in routes}
        starlette = Starlette(
            routes=routes,
            exception_handlers={
                BadRequest: _answer_to_error, PrecastError: _answer_to_error, 404: _no_route, 405: _no_route,
                500: _broken, ClientDisconnect: _gone,
            },
        )  # fmt: skip
        starlette.router.redirect_slashes = False
        self._asgi = Keys(starlette, options.keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request: with a name that its log has, and counted by its route and its status."""
        given = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"")
        is_fit = 0 < len(given) <= 128 and given.isascii() and given.decode().isprintable()
        name = given if is_fit else uuid.uuid4().hex.encode()

        route = scope["path"] if scope["path"] in self._routes else "other"

        def failed(why: str) -> None:
            _LOG.error("request %s: %s %s failed: %s", name.decode(), scope["method"], route, why)

        async def counted(message: Any) -> None:
            if message["type"] == "http.response.start":
                self._meters.requests.labels(route, str(message["status"])).inc()
                message = {**message, "headers": [*message["headers"], (b"x-request-id", name)]}
            await send(message)

        scope[FAILED] = failed
        await self._asgi(scope, receive, counted)

    # --- how it is ---------------------------------------------------------------------------------------------------

    def _state(self) -> str:
        """In a word: `ok`, or why it doesn't answer."""
        if self._link.failed is not None:
            return "failed"
        if self._link.ready is None or self.prompts is None:
            return "loading"
        return "stuck" if self._link.silent_seconds > self._options.stuck_seconds else "ok"

    async def _health(self, _: Request) -> Response:
        """Whether the process is worth keeping: not before it is loaded, and while it ends as well."""
        state = self._state()
        return json_response({"status": state, "phase": self._link.phase}, 200 if state == "ok" else 503)

    async def _ready(self, _: Request) -> Response:
        """Whether to send requests."""
        state = "draining" if self.drains else self._state()
        return json_response({"status": state, "phase": self._link.phase}, 200 if state == "ok" else 503)

    async def _metrics(self, _: Request) -> Response:
        text = self._meters.text(await self._link.count())
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _version(self, _: Request) -> Response:
        return json_response({"version": __version__})

    async def _models(self, request: Request) -> Response:
        _, opened = self._loaded()
        data = [self._model_object(name, opened) for name in self._options.names]
        return json_response({"object": "list", "data": data})

    async def _model(self, request: Request) -> Response:
        _, opened = self._loaded()
        name = request.path_params["name"]
        self._check_model(name)
        return json_response(self._model_object(name, opened))

    def _model_object(self, name: str, opened: Opened) -> dict[str, Any]:
        found = {"id": name, "object": "model", "created": self._began, "owned_by": "precast"}
        return {**found, "max_model_len": opened.model.max_seq_len, "root": opened.digest}

    def _check_model(self, name: str | None) -> None:
        if name is not None and name not in self._options.names:
            known = ", ".join(self._options.names)
            message = f"there is no model {name[:256]!r} here, but {known}"
            raise BadRequest(message, param="model", status=404, code="model_not_found")

    # --- answers -----------------------------------------------------------------------------------------------------

    async def _completions(self, request: Request) -> Response:
        began = time.monotonic()
        body = await self._read(request, CompletionRequest)
        prompts, _ = self._loaded()
        given = body.prompts()

        def understood() -> tuple[list[Sequence[int]], list[str]]:
            add = body.add_special_tokens is not False
            ids: list[Sequence[int]] = [prompts.of_text(each, add_special_tokens=add) for each in given]
            if not body.echo:
                return ids, [""] * len(ids)
            return ids, [each if isinstance(each, str) else _text_of(prompts, each) for each in given]

        return await self._answer(request, body, began, len(given), understood)

    async def _chat(self, request: Request) -> Response:
        began = time.monotonic()
        body = await self._read(request, ChatRequest)
        prompts, _ = self._loaded()

        def understood() -> tuple[list[Sequence[int]], list[str]]:
            variables = dict(body.chat_template_kwargs or {})
            if body.reasoning_effort is not None:
                variables.setdefault("reasoning_effort", body.reasoning_effort)
            begins = body.add_generation_prompt is not False
            return [prompts.of_chat(checked(body.messages), variables, add_generation_prompt=begins)], [""]

        return await self._answer(request, body, began, 1, understood)

    async def _answer(
        self,
        request: Request,
        body: CompletionRequest | ChatRequest,
        began: float,
        num_prompts: int,
        understood: Callable[[], tuple[list[Sequence[int]], list[str]]],
    ) -> Response:
        """The answers to so many prompts, `n` to each. `understood` makes their token ids, and what is put in front of
        their answers; it takes a while."""
        num_each = body.n or 1
        place = self._place(num_prompts * num_each)
        answers = None
        try:
            prompts, echoes = await self._threads.call(understood)
            params = body.sampling(self.defaults, body.most_tokens())
            questions = [
                Question(ids, _drawn_apart(params, i), body.priority or 0) for ids in prompts for i in range(num_each)
            ]  # fmt: skip
            answers = self._link.ask(questions, on_end=place.free)
            await answers.taken()
        except BaseException:
            if answers is not None:
                answers.cancel()
            place.leave()
            raise
        num_prompt_tokens = sum(map(len, prompts))
        self._meters.prompt_tokens.inc(num_prompt_tokens)
        watches = [Watch(self._meters, began) for _ in questions]
        all_echoes = [echo for echo in echoes for _ in range(num_each)]
        expected = Expected(answers, self._reply(body), watches, all_echoes, num_prompt_tokens, place)
        if not body.stream:
            return await whole(expected, request.receive)
        return EventStream(expected, request.scope[FAILED])

    def _reply(self, body: CompletionRequest | ChatRequest) -> Reply:
        _, opened = self._loaded()
        stream = body.stream_options
        counts_on = stream is not None and bool(stream.continuous_usage_stats)
        return Reply(
            is_chat=isinstance(body, ChatRequest), model=body.model or self._options.names[0],
            fingerprint=opened.digest, has_ids=bool(body.return_token_ids),
            has_usage=stream is not None and bool(stream.include_usage or counts_on), counts_on=counts_on,
        )  # fmt: skip

    def _place(self, count: int) -> Place:
        """Room for so many answers. Raises BadRequest where there is none."""
        self._check_state()
        most = min(MOST_ANSWERS, self.places.most)
        if count > most:
            raise BadRequest(f"{count} answers to one request, expected at most {most}", param="n")
        self._check_room(count)
        return self.places.take(count)

    def _check_state(self) -> None:
        """Raise BadRequest where nothing is answered now, whatever it is."""
        state = "draining" if self.drains else self._state()
        if state not in ("ok", "stuck"):
            raise BadRequest(f"the server is {state}", status=503, code=state)
        self._check_room(1)

    def _check_room(self, count: int) -> None:
        if self.places.num_open + count > self.places.most:
            message = f"{self.places.num_open} answers run and wait, and no more may"
            raise BadRequest(message, status=503, code="queue-full")

    # --- tokens ------------------------------------------------------------------------------------------------------

    async def _tokenize(self, request: Request) -> Response:
        body = await self._read(request, TokenizeRequest)
        prompts, opened = self._loaded()
        if (body.prompt is None) == (body.messages is None):
            raise BadRequest("give either prompt or messages", param="prompt")

        def understood() -> Sequence[int]:
            if body.messages is None:
                return prompts.of_text(body.prompt or "", add_special_tokens=body.add_special_tokens)
            variables, begins = body.chat_template_kwargs or {}, body.add_generation_prompt
            return prompts.of_chat(checked(body.messages), variables, add_generation_prompt=begins)

        tokens = await self._with_place(understood)
        found = {"count": len(tokens), "max_model_len": opened.model.max_seq_len, "tokens": list(tokens)}
        return json_response(found)

    async def _detokenize(self, request: Request) -> Response:
        body = await self._read(request, DetokenizeRequest)
        prompts, opened = self._loaded()
        most = opened.model.vocab_size - 1
        if wrong := next((each for each in body.tokens if not 0 <= each <= most), None):
            raise BadRequest(f"{wrong} is no token, expected 0 to {most}", param="tokens")
        return json_response({"prompt": await self._with_place(lambda: _text_of(prompts, body.tokens))})

    # --- what they share ---------------------------------------------------------------------------------------------

    async def _read(self, request: Request, kind: type[R]) -> R:
        """The body, of a request for this model. Raises BadRequest."""
        self._check_state()
        said = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
        if said != "application/json":
            raise BadRequest(f"content-type is {said[:64]!r}, expected application/json", status=415)
        parts, size = [], 0
        try:
            async for part in request.stream():
                size += len(part)
                self._num_read_bytes += len(part)
                if size > MOST_BODY_BYTES:
                    raise BadRequest(f"the body has more than {MOST_BODY_BYTES} bytes", status=413)
                if self._num_read_bytes > MOST_READ_BYTES:
                    raise BadRequest("the server reads too many requests at once", status=503, code="queue-full")
                parts.append(part)
            body = read_body(b"".join(parts), kind)
        finally:
            self._num_read_bytes -= size
        self._check_model(getattr(body, "model", None))
        return body

    def _loaded(self) -> tuple[Prompts, Opened]:
        if self.prompts is None or self._link.opened is None:
            raise BadRequest("the server is loading", status=503, code="loading")
        return self.prompts, self._link.opened

    async def _with_place(self, call: Callable[[], R]) -> R:
        place = self._place(1)
        try:
            return await self._threads.call(call)
        finally:
            place.leave()


def _text_of(prompts: Prompts, ids: Sequence[int]) -> str:
    if prompts.tokenizer is None:
        raise RequestError("tokenizer-missing", "this bundle has no tokenizer, and its tokens have no text")
    return prompts.tokenizer.decode(ids)


def _drawn_apart(params: SamplingParams, i: int) -> SamplingParams:
    """The params of the `i`th answer to one prompt: with a seed, each has its own."""
    return params if params.seed is None or i == 0 else replace(params, seed=(params.seed + i) % 2**63)


async def _answer_to_error(request: Request, failed: Exception) -> Response:
    if isinstance(failed, RequestError):
        failed = refused(failed, is_chat=request.url.path.endswith("/chat/completions"))
    if isinstance(failed, TargetError) and failed.code == "draining":
        failed = BadRequest(failed.message, status=503, code=failed.code)
    if isinstance(failed, BadRequest):
        kind = "invalid_request_error" if failed.status < 500 else "server_error"
        found = error(failed.message, kind=kind, param=failed.param, code=failed.code)
        return json_response(found, failed.status, {"Retry-After": "1"} if failed.status == 503 else None)
    assert isinstance(failed, PrecastError)
    request.scope[FAILED](f"{failed.code}: {failed.message}")
    return json_response(error(failed.message, kind="server_error", code=failed.code), 500)


async def _no_route(request: Request, failed: Exception) -> Response:
    message = f"there is no {request.method} {request.url.path[:256]} here"
    refusal = error(message, kind="invalid_request_error", code="not_found")
    return json_response(refusal, getattr(failed, "status_code", 404), getattr(failed, "headers", None))


async def _gone(_: Request, __: Exception) -> Response:
    """Who hung up while the body was read; nobody sees it."""
    return Response(status_code=499)


async def _broken(request: Request, failed: Exception) -> Response:
    """A fault of ours, which the log has."""
    request.scope[FAILED](type(failed).__name__)
    refusal = error("the server has failed at this request", kind="server_error", code="internal_error")
    return json_response(refusal, 500)
