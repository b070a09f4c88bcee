"""From a request that is understood to its answer: whole, or as a stream of events. Who hangs up cancels it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from precast.ir.errors import TargetError
from precast.serve.link import Answers
from precast.serve.meters import Watch
from precast.serve.places import Place
from precast.serve.replies import DONE, Part, Reply, Usage, error, streamed

PING_SECONDS = 15.0
"""A stream that has nothing to say for so long sends a comment, so that nobody on the way takes it for dead."""
UNREAD_SECONDS = 60.0
"""For which a client may not read; it is taken for gone then."""
T = TypeVar("T")


class Expected(NamedTuple):
    """A request's answers that are to come.

    `echoes` are put in front of them; `num_prompt_tokens` is of all prompts.
    """

    answers: Answers
    reply: Reply
    watches: Sequence[Watch]
    echoes: Sequence[str]
    num_prompt_tokens: int
    place: Place

    def usage(self) -> Usage:
        """The tokens so far."""
        return Usage(self.num_prompt_tokens, sum(watch.num_tokens for watch in self.watches))


async def whole(expected: Expected, receive: Receive) -> Response:
    """All answers, once they have ended. Raises TargetError where one ends with an error."""
    try:
        parts = await _unless_gone(_collected(expected), receive)
    finally:
        expected.answers.cancel()
        expected.place.leave()
    if parts is None:
        return Response(status_code=499)  # nobody reads it
    return Response(expected.reply.whole(parts, expected.usage()), media_type="application/json")


class EventStream(Response):
    """The answers as server-sent events, as they grow. `on_failure` is called with why they end with an error."""

    media_type = "text/event-stream"

    def __init__(self, expected: Expected, on_failure: Callable[[str], object]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._expected = expected
        self._on_failure = on_failure
        self._last_sent = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send them, until they have ended, or the client is gone or doesn't read."""
        self._last_sent = asyncio.get_running_loop().time()
        pings = asyncio.ensure_future(self._ping(send))
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            if await _unless_gone(self._stream(send), receive):
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        except OSError:  # the client is gone: a timeout is one, too
            pass
        finally:
            pings.cancel()
            self._expected.answers.cancel()
            self._expected.place.leave()

    async def _stream(self, send: Send) -> bool:
        expected, reply = self._expected, self._expected.reply
        for index, echo in enumerate(expected.echoes):
            if chunk := reply.first(index, echo):
                await self._body(send, chunk)
        try:
            async for index, part in _parts(expected):
                if chunk := reply.more(index, part, expected.usage()):
                    await self._body(send, chunk)
        except TargetError as failed:
            if failed.code != "draining":
                self._on_failure(f"{failed.code}: {failed.message}")
            await self._body(send, streamed(error(failed.message, kind="server_error", code=failed.code)))
        else:
            if reply.has_usage:
                await self._body(send, reply.usage(expected.usage()))
        await self._body(send, DONE)
        return True

    async def _body(self, send: Send, chunk: bytes) -> None:
        """Send a chunk. Raises TimeoutError where nobody reads."""
        self._last_sent = asyncio.get_running_loop().time()
        async with asyncio.timeout(UNREAD_SECONDS):
            await send({"type": "http.response.body", "body": chunk, "more_body": True})

    async def _ping(self, send: Send) -> None:
        loop = asyncio.get_running_loop()
        with suppress(OSError):  # which ends the stream as well
            while True:
                silent = loop.time() - self._last_sent
                if silent >= PING_SECONDS:
                    await self._body(send, b": waiting\n\n")
                await asyncio.sleep(max(PING_SECONDS - silent, 0.0) or PING_SECONDS)


async def _collected(expected: Expected) -> list[Part]:
    texts = [[echo] for echo in expected.echoes]
    ids: list[list[int]] = [[] for _ in texts]
    reasons: list[str | None] = [None] * len(texts)
    async for index, (text, token_ids, reason) in _parts(expected):
        texts[index].append(text)
        ids[index] += token_ids
        reasons[index] = reason
    return [Part("".join(parts), all_ids, why) for parts, all_ids, why in zip(texts, ids, reasons, strict=True)]


async def _parts(expected: Expected) -> AsyncIterator[tuple[int, Part]]:
    """What comes of each answer, and which one it is. Raises TargetError where one ends with an error."""
    async for index, told in expected.answers.events():
        watch = expected.watches[index]
        watch.tokens(len(told.token_ids))
        if told.error is not None:
            raise TargetError(told.error.code, told.error.message)
        if told.finish_reason is not None:
            watch.ended()
        yield index, Part(told.text, told.token_ids, told.finish_reason)


async def _unless_gone(work: Coroutine[Any, Any, T], receive: Receive) -> T | None:
    """What the work gives; None where the client is gone first, and the work cancelled."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.wait((task, gone))


async def _gone(receive: Receive) -> None:
    """Until the client has hung up."""
    message: Message = {"type": ""}
    while message["type"] != "http.disconnect":
        message = await receive()
