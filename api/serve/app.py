"""The routes: what is asked for, whether it may be, and who answers."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from precast import __version__
from precast.ir.errors import PrecastError, RequestError
from precast.loader.engine.params import SamplingParams
from precast.serve.answering import EventStream, Expected, whole
from precast.serve.link import Asked, Link
from precast.serve.meters import Meters, Watch
from precast.serve.prompts import Prompts
from precast.serve.replies import Reply, encoded, error
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

MOST_BODY_BYTES = 64 << 20
"""Of a request: far more than the text of a million tokens takes."""
_OPEN = ("/health", "/ready")
"""What needs no key: probes have none."""
R = TypeVar("R")


class Options(NamedTuple):
    """What whoever starts the server decides.

    `names` are those that requests may give the model; the first is the one that it is listed by. `most_open`: so many
    answers run and wait at once, others are turned away. After `stuck_seconds` without a word of an engine that has
    something to do, it is unhealthy. `keys`: one of them must come with a request; none: all may ask.
    """

    names: tuple[str, ...]
    most_open: int
    stuck_seconds: float
    keys: tuple[str, ...] = ()


class App:
    """The HTTP interface of an engine that is `link`ed: an ASGI application.

    `prompts` is set as soon as the bundle's tokenizer is read; `drains` when the server is to end.
    """

    def __init__(self, link: Link, options: Options) -> None:
        self.prompts: Prompts | None = None
        self.defaults: dict[str, Any] = {}
        self.drains = False
        self.num_open = 0
        self._link = link
        self._options = options
        self._meters = Meters(options.names[0])
        self._began = int(time.time())
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
                500: _broken,
            },
        )  # fmt: skip
        self._asgi = _Keys(starlette, options.keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request, counted by its route and its status."""
        if scope["type"] != "http":
            await self._asgi(scope, receive, send)
            return

        async def counted(message: Any) -> None:
            if message["type"] == "http.response.start":
                route = scope["path"] if scope["path"] in self._routes else "other"
                self._meters.requests.labels(route, str(message["status"])).inc()
            await send(message)

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
        return _json({"status": state, "phase": self._link.phase}, 200 if state == "ok" else 503)

    async def _ready(self, _: Request) -> Response:
        """Whether to send requests."""
        state = "draining" if self.drains else self._state()
        return _json({"status": state, "phase": self._link.phase}, 200 if state == "ok" else 503)

    async def _metrics(self, _: Request) -> Response:
        text = self._meters.text(await self._link.count())
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _version(self, _: Request) -> Response:
        return _json({"version": __version__})

    async def _models(self, _: Request) -> Response:
        return _json({"object": "list", "data": [self._model_object(name) for name in self._options.names]})

    async def _model(self, request: Request) -> Response:
        name = request.path_params["name"]
        self._check_model(name)
        return _json(self._model_object(name))

    def _model_object(self, name: str) -> dict[str, Any]:
        opened = self._link.opened
        found: dict[str, Any] = {"id": name, "object": "model", "created": self._began, "owned_by": "precast"}
        if opened is not None:
            found |= {"max_model_len": opened.model.max_seq_len, "root": opened.digest}
        return found

    def _check_model(self, name: str | None) -> None:
        if name is not None and name not in self._options.names:
            known = ", ".join(self._options.names)
            message = f"there is no model {name[:256]!r} here, but {known}"
            raise BadRequest(message, param="model", status=404, code="model_not_found")

    # --- answers -----------------------------------------------------------------------------------------------------

    async def _completions(self, request: Request) -> Response:
        body = await self._read(request, CompletionRequest)
        given = body.prompts()
        release = self._place(len(given) * (body.n or 1))
        try:
            prompts = self._opened_prompts()
            add = body.add_special_tokens is not False
            ids = await asyncio.to_thread(_ids_of, prompts, given, add)
            echoes = [""] * len(given)
            if body.echo:
                echoes = [each if isinstance(each, str) else prompts.tokenizer.decode(each) for each in given]
            return await self._answer(request, body, ids, echoes, release)
        except BaseException:
            release()
            raise

    async def _chat(self, request: Request) -> Response:
        body = await self._read(request, ChatRequest)
        messages = checked(body.messages)
        release = self._place(body.n or 1)
        try:
            variables = dict(body.chat_template_kwargs or {})
            if body.reasoning_effort is not None:
                variables.setdefault("reasoning_effort", body.reasoning_effort)
            begins = body.add_generation_prompt is not False
            prompts = self._opened_prompts()
            ids = await asyncio.to_thread(prompts.of_chat, messages, variables, add_generation_prompt=begins)
            return await self._answer(request, body, [ids], [""], release)
        except BaseException:
            release()
            raise

    async def _answer(
        self,
        request: Request,
        body: CompletionRequest | ChatRequest,
        prompts: Sequence[Sequence[int]],
        echoes: Sequence[str],
        release: Callable[[], object],
    ) -> Response:
        """The answers to these prompts, `n` to each."""
        assert self._link.opened is not None
        began, num_each = time.monotonic(), body.n or 1
        params = body.sampling(self.defaults, body.most_tokens())
        asked = [
            Asked(ids, _drawn_apart(params, i), body.priority or 0) for ids in prompts for i in range(num_each)
        ]  # fmt: skip
        answers = self._link.ask(asked)
        try:
            await answers.taken()
        except BaseException:
            answers.cancel()
            raise
        num_prompt_tokens = sum(map(len, prompts))
        self._meters.prompt_tokens.inc(num_prompt_tokens)
        reply = Reply(
            is_chat=isinstance(body, ChatRequest), model=body.model or self._options.names[0],
            fingerprint=self._link.opened.digest, has_ids=bool(body.return_token_ids),
            has_usage=body.stream_options is not None and bool(body.stream_options.include_usage),
        )  # fmt: skip
        watches = [Watch(self._meters, began) for _ in asked]
        all_echoes = [echo for echo in echoes for _ in range(num_each)]
        expected = Expected(answers, reply, watches, all_echoes, num_prompt_tokens, release)
        return EventStream(expected) if body.stream else await whole(expected, request.receive)

    def _place(self, count: int) -> Callable[[], None]:
        """Room for so many answers, until what is returned is called. Raises BadRequest where there is none."""
        state = "draining" if self.drains else self._state()
        if state not in ("ok", "stuck"):
            raise BadRequest(f"the server is {state}", status=503, code=state)
        most = self._options.most_open
        if count > min(MOST_ANSWERS, most):
            raise BadRequest(f"{count} answers to one request, expected at most {min(MOST_ANSWERS, most)}", param="n")
        if self.num_open + count > most:
            raise BadRequest(f"{self.num_open} answers run and wait, and no more may", status=503, code="queue-full")
        self.num_open += count
        left = [count]

        def release() -> None:
            self.num_open -= left[0]
            left[0] = 0

        return release

    def _opened_prompts(self) -> Prompts:
        assert self.prompts is not None
        return self.prompts

    # --- tokens ------------------------------------------------------------------------------------------------------

    async def _tokenize(self, request: Request) -> Response:
        body = await self._read(request, TokenizeRequest)
        prompts, opened = self._loaded_prompts()
        if (body.prompt is None) == (body.messages is None):
            raise BadRequest("give either prompt or messages", param="prompt")
        if body.messages is None:
            ids = await asyncio.to_thread(_ids_of, prompts, [body.prompt or ""], body.add_special_tokens)
            tokens = ids[0]
        else:
            tokens = await asyncio.to_thread(
                prompts.of_chat, checked(body.messages), body.chat_template_kwargs or {},
                add_generation_prompt=body.add_generation_prompt,
            )  # fmt: skip
        return _json({"count": len(tokens), "max_model_len": opened.model.max_seq_len, "tokens": tokens})

    async def _detokenize(self, request: Request) -> Response:
        body = await self._read(request, DetokenizeRequest)
        prompts, _ = self._loaded_prompts()
        return _json({"prompt": await asyncio.to_thread(prompts.tokenizer.decode, body.tokens)})

    def _loaded_prompts(self) -> tuple[Prompts, Any]:
        if self.prompts is None or self._link.opened is None:
            raise BadRequest("the server is loading", status=503, code="loading")
        return self.prompts, self._link.opened

    async def _read(self, request: Request, kind: type[R]) -> R:
        """The body, of a request for this model. Raises BadRequest."""
        said = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
        if said != "application/json":
            raise BadRequest(f"content-type is {said[:64]!r}, expected application/json", status=415)
        parts, size = [], 0
        async for part in request.stream():
            size += len(part)
            if size > MOST_BODY_BYTES:
                raise BadRequest(f"the body has more than {MOST_BODY_BYTES} bytes", status=413)
            parts.append(part)
        body = read_body(b"".join(parts), kind)
        self._check_model(getattr(body, "model", None))
        return body


class _Keys:
    """Lets in who brings a key, and everyone to the probes."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer 401."""
        if scope["type"] == "http" and self._digests and scope["path"] not in _OPEN and not self._has_key(scope):
            refusal = error("a key is missing, or is none of this server's", kind="invalid_request_error",
                            code="invalid_api_key")  # fmt: skip
            await _json(refusal, 401, {"WWW-Authenticate": "Bearer"})(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _has_key(self, scope: Scope) -> bool:
        """Compared by digest, in a time that says nothing of the keys."""
        said = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        scheme, _, key = said.partition(b" ")
        given = hashlib.sha256(key.strip()).digest()
        matches = [hmac.compare_digest(given, digest) for digest in self._digests]
        return scheme.lower() == b"bearer" and any(matches)


def _ids_of(prompts: Prompts, given: Sequence[str | list[int]], add_special_tokens: bool) -> list[list[int]]:
    """The token ids of prompts, text or ids."""
    return [
        prompts.tokenizer.encode(each, add_special_tokens=add_special_tokens) if isinstance(each, str) else each
        for each in given
    ]


def _drawn_apart(params: SamplingParams, i: int) -> SamplingParams:
    """The params of the `i`th answer to one prompt: with a seed, each has its own."""
    return params if params.seed is None or i == 0 else replace(params, seed=(params.seed + i) % 2**63)


async def _answer_to_error(_: Request, failed: Exception) -> Response:
    if isinstance(failed, RequestError):
        failed = refused(failed)
    if isinstance(failed, BadRequest):
        kind = "invalid_request_error" if failed.status < 500 else "server_error"
        found = error(failed.message, kind=kind, param=failed.param, code=failed.code)
        return _json(found, failed.status, {"Retry-After": "1"} if failed.status == 503 else None)
    assert isinstance(failed, PrecastError)
    return _json(error(failed.message, kind="server_error", code=failed.code), 500)


async def _no_route(request: Request, failed: Exception) -> Response:
    status = getattr(failed, "status_code", 404)
    message = f"there is no {request.method} {request.url.path[:256]} here"
    return _json(error(message, kind="invalid_request_error", code="not_found"), status)


async def _broken(_: Request, __: Exception) -> Response:
    """A fault of ours, which the log has."""
    return _json(error("the server has failed at this request", kind="server_error", code="internal_error"), 500)


def _json(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(encoded(value), status, headers, media_type="application/json")


def generation_defaults(files: dict[str, bytes]) -> dict[str, Any]:
    """How the model's `generation_config.json` says that answers are drawn; OpenAI's temperature of 1 where it says
    nothing. One that says not to draw at all means that it says nothing of drawing."""
    names = ("temperature", "top_p", "top_k", "min_p")
    try:
        config = msgspec.json.decode(files.get("generation_config.json", b"{}"), type=dict[str, Any])
    except (ValueError, RecursionError):
        config = {}
    found = {name: config[name] for name in names if config.get(name) is not None}
    try:
        SamplingParams(**found)
    except RequestError:
        found = {}
    return {"temperature": 1.0} | found
