"""The engine's process: `python -m precast.serve.engine_process N`, its socket to the process that speaks HTTP.

One thread has the engine, as docs/python_api.md wants it. Another reads the socket, and ends the process where the
other side is gone, whatever the engine does: it keeps nothing that would have to be undone.
"""

from __future__ import annotations

import os
import queue
import signal
import socket
import sys
import threading
import time
import traceback
from typing import TYPE_CHECKING

import msgspec

from precast.ir.errors import PrecastError, RequestError
from precast.serve.messages import (
    LENGTH,
    Ask,
    Cancel,
    Count,
    Counted,
    End,
    Failed,
    Load,
    Message,
    News,
    Opened,
    Phase,
    Ready,
    Refused,
    Taken,
    ToEngine,
    Told,
    framed,
)

if TYPE_CHECKING:
    from precast.loader.engine.engine import Engine

BEAT_SECONDS = 1.0
"""After so long without news it says that it is at work."""


class Line:
    """The socket: messages of the other side, in order, and what is sent to it."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self.inbox: queue.SimpleQueue[ToEngine] = queue.SimpleQueue()
        self.last_sent = time.monotonic()
        threading.Thread(target=self._hear, name="precast-line", daemon=True).start()

    def send(self, message: Message) -> None:
        """Send it; the thread that reads finds out where nobody is there."""
        self.last_sent = time.monotonic()
        try:
            self._socket.sendall(framed(message))
        except OSError:
            threading.Event().wait()  # the process is about to be ended

    def _hear(self) -> None:
        decoder: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
        code = 1
        try:
            with self._socket.makefile("rb") as stream:
                while len(head := stream.read(LENGTH.size)) == LENGTH.size:
                    (length,) = LENGTH.unpack(head)
                    self.inbox.put(decoder.decode(stream.read(length)))
            code = 0
        except OSError:  # it breaks off
            code = 0
        finally:
            if code:
                traceback.print_exc()
            os._exit(code)


def loaded(load: Load, line: Line) -> Engine:
    """The engine, while the other side hears how far the load is. Raises what `precast.load` raises."""
    from precast.cli.progress import AnnouncedTimeline
    from precast.ir.artifact import Bundle
    from precast.ir.trust.loading import repository_of, rules_of
    from precast.loader.driver.context import begin_early
    from precast.loader.load import load as load_bundle

    if load.options["tp"] in (None, 1) and load.options["pp"] == 1:
        begin_early(load.options["device"])  # while the bundle is opened
    opened = Bundle.open(load.bundle)
    rules = rules_of(opened, load.trust, repository_of(load.bundle))
    line.send(Opened(opened.digest, opened.manifest.model, dict(opened.files("tokenizer"))))
    timeline = AnnouncedTimeline(lambda name: line.send(Phase(name)))
    return load_bundle(opened, trust=rules, timeline=timeline, **load.options)


def serve(engine: Engine, line: Line) -> None:
    """Answer what comes until the end is said: requests join and leave the batch between two steps."""
    requests = Requests(engine, line)
    while True:
        # What is left to capture is captured while nobody asks.
        waits = not engine.has_work and not engine.stats.graphs_pending
        while waits or not line.inbox.empty():
            message = line.inbox.get()
            if isinstance(message, End):
                return
            requests.take(message)
            waits = False
        requests.step()


class Requests:
    """The requests that the engine has, by its ids and by the numbers of those who asked."""

    def __init__(self, engine: Engine, line: Line) -> None:
        self._engine = engine
        self._line = line
        self._ids: dict[int, int] = {}
        self._numbers: dict[int, int] = {}

    def take(self, message: ToEngine) -> None:
        """Do what the message says."""
        match message:
            case Ask():
                self._ask(message)
            case Cancel(number):
                if number in self._ids:
                    self._engine.cancel(self._ids[number])
            case Count():
                stats = self._engine.stats
                held = [
                    (pool.pages_in_use - pool.pages_reclaimable) / pool.pages
                    for pool in stats.pools.values()
                    if pool.pages
                ]
                usage = max(held, default=0.0)
                counted = Counted(self._engine.metrics(), stats.requests_waiting, stats.requests_running, usage)
                self._line.send(counted)
            case Load() | End():
                raise AssertionError("said once, and not here")

    def step(self) -> None:
        """A step of the engine, and its news."""
        told = []
        for event in self._engine.step():
            number = self._numbers[event.request_id]
            told.append(Told(number, event.token_ids, event.text, event.finish_reason, event.error))
            if event.finish_reason is not None:
                del self._ids[number], self._numbers[event.request_id]
        if told or (self._ids and time.monotonic() - self._line.last_sent > BEAT_SECONDS):
            self._line.send(News(told))

    def _ask(self, ask: Ask) -> None:
        from precast.loader.engine.params import SamplingParams

        try:
            request_id = self._engine.submit(ask.prompt, SamplingParams(**ask.params), priority=ask.priority)
        except RequestError as error:
            self._line.send(Refused(ask.number, error.code, error.message, error.where, error.fix))
            return
        self._ids[ask.number], self._numbers[request_id] = request_id, ask.number
        self._line.send(Taken(ask.number))


def main(descriptor: int) -> int:
    """Load and serve; the process's exit code."""
    # The process that speaks HTTP hears them, and ends this one, and ranks that it starts, in order.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    line = Line(socket.socket(fileno=descriptor))
    load = line.inbox.get()
    assert isinstance(load, Load)
    began = time.perf_counter()
    try:
        engine = loaded(load, line)
        line.send(Ready(time.perf_counter() - began))
        serve(engine, line)
        engine.close()
    except PrecastError as error:
        line.send(Failed.of(error))
        return error.exit_code
    except Exception as error:  # noqa: BLE001 - it is told, and the process ends without waiting for threads
        line.send(Failed.of(error))
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    code = main(int(sys.argv[1]))
    sys.stderr.flush()
    os._exit(code)  # threads of libraries may wait for what has ended
