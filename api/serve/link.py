"""The engine as the process that speaks HTTP sees it: its process, what it says, and who waits for which answer."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
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
COUNT_SECONDS = 5.0
"""For which counters are waited for: they come between two steps."""


class Asked(NamedTuple):
    """A prompt's token ids, how its answer is drawn, and its priority."""

    prompt: Sequence[int]
    params: SamplingParams
    priority: int = 0


class Link:
    """The engine's process. All of it is used in one event loop.

    `phase` is what the load does now. `opened` and `ready` are there as soon as the engine has said so; `failed` is why
    it will never answer again.
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
        self._counts: list[asyncio.Future[Counted]] = []
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
    def num_open(self) -> int:
        """Requests that have not ended."""
        return len(self._answers)

    @property
    def silent_seconds(self) -> float:
        """For how long nothing was heard of the engine while it had something to do."""
        return time.monotonic() - self._heard if self._answers else 0.0

    def ask(self, requests: Sequence[Asked]) -> Answers:
        """Send requests, whose answers belong together."""
        if not self._answers:
            self._heard = time.monotonic()
        answers = Answers(self, list(itertools.islice(self._numbers, len(requests))))
        for number, (prompt, params, priority) in zip(answers.numbers, requests, strict=True):
            self._answers[number] = answers
            self._send(Ask(number, list(prompt), msgspec.to_builtins(params), priority))
        return answers

    def cancel(self, number: int) -> None:
        """Nobody waits for this answer any more."""
        if self._answers.pop(number, None) is not None:
            self._send(Cancel(number))

    async def count(self) -> Counted | None:
        """The engine's counters; None where it doesn't give them, or not in time."""
        if self.ready is None or self.failed is not None:
            return None
        future: asyncio.Future[Counted] = asyncio.get_running_loop().create_future()
        self._counts.append(future)
        self._send(Count())
        with contextlib.suppress(asyncio.TimeoutError, asyncio.CancelledError):
            return await asyncio.wait_for(future, COUNT_SECONDS)
        return None

    # --- messages --------------------------------------------------------------------------------------------------

    def _send(self, message: Message) -> None:
        assert self._writer is not None
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
                if number in self._answers:
                    self._answers.pop(number).hear(message)
            case Counted():
                future = self._counts.pop(0)
                if not future.done():  # else it came too late
                    future.set_result(message)
            case Phase(name):
                self.phase = name
            case Opened():
                await self._change(opened=message)
            case Ready():
                await self._change(ready=message)
            case Failed():
                await self._lose(message.error())

    def _hand_out(self, told: Told) -> None:
        answers = self._answers.get(told.number)
        if answers is not None:  # else its client has gone
            if told.finish_reason is not None:
                del self._answers[told.number]
            answers.hear(told)

    async def _lose(self, error: PrecastError) -> None:
        """The engine answers no more: tell all who wait."""
        await self._change(failed=error)
        for answers in set(self._answers.values()):
            answers.hear(error)
        self._answers.clear()
        for future in self._counts:
            future.cancel()

    async def _change(self, **news: object) -> None:
        async with self.changed:
            for name, value in news.items():
                setattr(self, name, value)
            self.changed.notify_all()


class Answers:
    """Answers that belong together, as they grow. `numbers` are those of their requests, in order."""

    def __init__(self, link: Link, numbers: list[int]) -> None:
        self.numbers = numbers
        self._link = link
        self._heard: asyncio.Queue[Taken | Refused | Told | PrecastError] = asyncio.Queue()
        self._early: list[Told] = []

    def hear(self, message: Taken | Refused | Told | PrecastError) -> None:
        """What the engine says of one of them, or why it says nothing more."""
        self._heard.put_nowait(message)

    async def taken(self) -> None:
        """Wait until all requests are queued. Raises RequestError where one can't be answered, and cancels the others;
        TargetError where the engine is lost."""
        num_taken = 0
        while num_taken < len(self.numbers):
            message = await self._heard.get()
            if isinstance(message, Taken):
                num_taken += 1
            elif isinstance(message, Told):
                self._early.append(message)
            else:
                self.cancel()
                raise message.error() if isinstance(message, Refused) else message

    async def events(self) -> AsyncIterator[tuple[int, Told]]:
        """The news of all, with which of them each is about, until all have ended. Raises TargetError where the engine
        is lost."""
        index_of = {number: index for index, number in enumerate(self.numbers)}
        num_left = len(self.numbers)
        while num_left:
            message = self._early.pop(0) if self._early else await self._heard.get()
            if isinstance(message, PrecastError):
                raise message
            assert isinstance(message, Told), "what was taken isn't refused"
            num_left -= message.finish_reason is not None
            yield index_of[message.number], message

    def cancel(self) -> None:
        """End those that have not ended."""
        for number in self.numbers:
            self._link.cancel(number)
