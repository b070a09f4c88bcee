"""The engine as the process that speaks HTTP sees it: its process, what it says, and who waits for which answer."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import NamedTuple

import msgspec

from precast.ir.errors import PrecastError, TargetError
from precast.loader.engine.params import SamplingParams
from precast.loader.world.processes import ended
from precast.serve.messages import (
    LENGTH,
    Ask,
    Cancel,
    Count,
    Counted,
    End,
    Failed,
    FromEngine,
    Load,
    Message,
    News,
    Opened,
    Phase,
    Ready,
    Refused,
    Taken,
    Told,
    framed,
)

ENGINE = (sys.executable, "-P", "-m", "precast.serve.engine_process")
"""The engine's program; it gets the number of its socket."""
END_SECONDS = 10.0
"""For which the engine's process may take to close its engine, before it is killed."""
MOST_UNREAD = 256
"""News of an answer that are kept one by one."""
COUNT_SECONDS = 5.0
"""For which counters are waited for: they come between two steps."""


class Question(NamedTuple):
    """A prompt's token ids, how its answer is drawn, and its priority."""

    prompt: Sequence[int]
    params: SamplingParams
    priority: int = 0


class Link:
    """The engine's process. All of it is used in one event loop.

    `phase` is what the load does now, or `serving`. `opened` and `ready` are there as soon as the engine has said so;
    `failed` is why it will never answer again.
    """

    def __init__(self, program: Sequence[str] = ENGINE) -> None:
        self.phase = "start"
        self.opened: Opened | None = None
        self.ready: Ready | None = None
        self.failed: PrecastError | None = None
        self.changed = asyncio.Condition()
        self._program = program
        self._process: subprocess.Popen[bytes] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._numbers = itertools.count()
        self._answers: dict[int, Answers] = {}
        self._owed: set[int] = set()  # requests of which the engine hasn't said that they have ended
        self._count: asyncio.Future[Counted | None] | None = None
        self._heard = time.monotonic()
        self._ends = False

    async def run(self, load: Load) -> None:
        """Start the process, and listen to it until it ends."""
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [*self._program, str(theirs.fileno())], stdin=subprocess.DEVNULL, stdout=2,
                pass_fds=[theirs.fileno()], process_group=0,
            )  # fmt: skip
        reader, self._writer = await asyncio.open_unix_connection(sock=ours)
        self._send(load)
        decoder: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
                await self._hear(decoder.decode(await reader.readexactly(length)))
        code = await asyncio.to_thread(self._process.wait)
        if not self._ends:
            lost = TargetError("engine-failed", f"the engine's process {ended(code)}", fix="what it printed says more")
            await self._lose(self.failed or lost)

    async def close(self, *, at_once: bool = False) -> None:
        """End the process: when it has closed the engine, or after `END_SECONDS`, or `at_once`."""
        self._ends = True
        if self._process is None or self._writer is None:
            return
        if self.ready is not None and self.failed is None and not at_once:
            self._send(End())
            with contextlib.suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(self._process.wait, END_SECONDS)
        self._process.kill()
        await asyncio.to_thread(self._process.wait)
        self._writer.close()

    # --- requests --------------------------------------------------------------------------------------------------

    @property
    def silent_seconds(self) -> float:
        """For how long nothing was heard of the engine while it had something to do: who hung up doesn't matter."""
        return time.monotonic() - self._heard if self._owed else 0.0

    def ask(self, questions: Sequence[Question], on_end: Callable[[], object]) -> Answers:
        """Send questions, whose answers belong together. `on_end` is called when the engine has ended all of them.

        Raises what the engine has failed with.
        """
        if self.failed is not None:
            raise self.failed
        if not self._owed:
            self._heard = time.monotonic()
        answers = Answers(self, list(itertools.islice(self._numbers, len(questions))), on_end)
        for number, (prompt, params, priority) in zip(answers.numbers, questions, strict=True):
            self._answers[number] = answers
            self._owed.add(number)
            self._send(Ask(number, list(prompt), msgspec.to_builtins(params), priority))
        return answers

    def cancel(self, number: int) -> None:
        """Nobody waits for this answer any more."""
        answers = self._answers.pop(number, None)
        if answers is not None:
            self._send(Cancel(number))
            answers.ended()

    def cut_off(self) -> None:
        """Tell all who wait that nothing more comes, as the server ends."""
        error = TargetError("draining", "the server ended before the answer did")
        for answers in set(self._answers.values()):
            answers.hear(error)

    async def count(self) -> Counted | None:
        """The engine's counters; None where it doesn't give them, or not in time."""
        if self.ready is None or self.failed is not None:
            return None
        if self._count is None:  # else one is on its way, and is for all who ask meanwhile
            self._count = asyncio.get_running_loop().create_future()
            self._send(Count())
        count = self._count
        await asyncio.wait((count,), timeout=COUNT_SECONDS)
        return count.result() if count.done() else None

    # --- messages --------------------------------------------------------------------------------------------------

    def _send(self, message: Message) -> None:
        assert self._writer is not None
        if not self._writer.is_closing():
            self._writer.write(framed(message))

    async def _hear(self, message: FromEngine) -> None:
        self._heard = time.monotonic()
        match message:
            case News(told):
                for each in told:
                    self._hand_out(each)
            case Taken(number):
                if number in self._answers:
                    self._answers[number].hear(message)
            case Refused(number):
                self._owed.discard(number)
                if number in self._answers:
                    self._answers.pop(number).hear(message)
            case Counted():
                self._end_count(message)
            case Phase(name):
                self.phase = name
            case Opened():
                await self._change(opened=message)
            case Ready():
                await self._change(ready=message, phase="serving")
            case Failed():
                await self._lose(message.error())

    def _hand_out(self, told: Told) -> None:
        has_ended = told.finish_reason is not None
        if has_ended:
            self._owed.discard(told.number)
        answers = self._answers.get(told.number)
        if answers is not None:  # else its client has gone
            answers.hear(told)
            if has_ended:
                del self._answers[told.number]
                answers.ended()

    async def _lose(self, error: PrecastError) -> None:
        """The engine answers no more: tell all who wait."""
        await self._change(failed=error)
        for answers in set(self._answers.values()):
            answers.hear(error)
        self._answers.clear()
        self._end_count(None)

    def _end_count(self, counted: Counted | None) -> None:
        if self._count is not None:
            self._count.set_result(counted)
            self._count = None

    async def _change(self, **news: object) -> None:
        async with self.changed:
            for name, value in news.items():
                setattr(self, name, value)
            self.changed.notify_all()


class Answers:
    """Answers that belong together, as they grow. `numbers` are those of their requests, in order.

    News that are not read yet are kept as one for each answer, so that a client who reads slowly costs few bytes, and
    gets more at a time.
    """

    def __init__(self, link: Link, numbers: list[int], on_end: Callable[[], object]) -> None:
        self.numbers = numbers
        self._on_end = on_end
        self._num_left = len(numbers)
        self._link = link
        self._index_of = {number: index for index, number in enumerate(numbers)}
        self._num_taken = 0
        self._news: dict[int, list[Told]] = {}
        self._error: PrecastError | None = None
        self._woken = asyncio.Event()

    def hear(self, message: Taken | Refused | Told | PrecastError) -> None:
        """What the engine says of one of them, or why it says nothing more."""
        if isinstance(message, Taken):
            self._num_taken += 1
        elif isinstance(message, Told):
            news = self._news.setdefault(self._index_of[message.number], [])
            news.append(message)
            if len(news) > MOST_UNREAD:
                news[:] = [_as_one(news)]
        else:
            self._error = message.error() if isinstance(message, Refused) else message
        self._woken.set()

    async def taken(self) -> None:
        """Wait until all requests are queued. Raises RequestError where one can't be answered, and TargetError where
        the engine is lost."""
        while self._num_taken < len(self.numbers):
            await self._woken.wait()
            self._woken.clear()
            if self._error is not None:
                raise self._error
        self._woken.set()  # for news that came meanwhile

    async def events(self) -> AsyncIterator[tuple[int, Told]]:
        """The news of all, with which of them each is about, until all have ended. Raises TargetError where the engine
        is lost."""
        num_left = len(self.numbers)
        while num_left:
            await self._woken.wait()
            self._woken.clear()
            found, self._news = self._news, {}
            for index, news in found.items():
                told = news[0] if len(news) == 1 else _as_one(news)
                num_left -= told.finish_reason is not None
                yield index, told
            if num_left and self._error is not None:
                raise self._error

    def ended(self) -> None:
        """One of them has ended, or is cancelled."""
        self._num_left -= 1
        if not self._num_left:
            self._on_end()

    def cancel(self) -> None:
        """End those that have not ended."""
        for number in self.numbers:
            self._link.cancel(number)


def _as_one(news: Sequence[Told]) -> Told:
    """News of one answer as one."""
    last, ids = news[-1], tuple(id for told in news for id in told.token_ids)
    return Told(last.number, ids, "".join(told.text for told in news), last.finish_reason, last.error)
