"""`precast serve` in a process of its own, and plain HTTP to it."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.client import HTTPMessage
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from process_ends import LONG, children
from recitation import MODEL


class Answer(NamedTuple):
    """What came back of a request."""

    status: int
    headers: HTTPMessage
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> Any:
        return self.json["error"]

    @property
    def chunks(self) -> list[Any]:
        """The objects of a stream, which has ended as one does."""
        *events, done, nothing = self.body.decode().split("\n\n")
        assert (done, nothing) == ("data: [DONE]", "")
        return [json.loads(event.removeprefix("data: ")) for event in events if event != ": waiting"]


class Served:
    """A server that was started: its address, and its process."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.address = self.said("listening")
        place = urlsplit(self.address)
        self._place = (place.hostname or "", place.port or 0)

    def said(self, event: str) -> str:
        """Wait until it says this, and return what it says of it."""
        assert self.process.stdout is not None
        found = json.loads(self.process.stdout.readline() or "{}")
        assert found.get("event") == event, (found, self.process.stderr and self.process.stderr.read())
        return found["value"]

    def connect(self) -> http.client.HTTPConnection:
        """A connection of its own."""
        return http.client.HTTPConnection(*self._place, timeout=LONG)

    def ask(self, path: str, body: Any = None, *, method: str = "", **headers: str) -> Answer:
        """One request, by GET or with a body by POST; names of headers have `_` for `-`."""
        connection = self.connect()
        try:
            send_request(connection, path, body, method=method, **headers)
            response = connection.getresponse()
            return Answer(response.status, response.headers, response.read())
        finally:
            connection.close()

    def glance(self, path: str, body: Any) -> int | None:
        """The status of a request that is given up after a moment; None where there was none by then."""
        connection = http.client.HTTPConnection(*self._place, timeout=0.2)
        try:
            send_request(connection, path, body)
            return connection.getresponse().status
        except TimeoutError:
            return None
        finally:
            connection.close()

    def until(self, is_so: Callable[[], bool]) -> None:
        """Wait until something is so that the server will come to by itself."""
        deadline = time.monotonic() + LONG
        while not is_so():
            assert time.monotonic() < deadline
            os.sched_yield()

    def metric(self, name: str) -> float:
        """A counter's value."""
        lines = self.ask("/metrics").body.decode().splitlines()
        return float(next(line for line in lines if line.startswith(f"{name} ")).rpartition(" ")[2])

    @property
    def engine_process(self) -> int:
        """The engine's process id."""
        found = children(self.process.pid)
        return next(pid for pid in found if b"engine_process" in Path(f"/proc/{pid}/cmdline").read_bytes())

    def faults(self) -> list[str]:
        """What it has told of errors, once it has ended; libraries may have said other things."""
        assert self.process.stderr is not None
        words = ("Traceback", "ERROR", "error")
        return [line for line in self.process.stderr.read().splitlines() if any(word in line for word in words)]

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Send it a signal, and wait for its exit code."""
        self.process.send_signal(number)
        return self.process.wait(LONG)


def send_request(
    connection: http.client.HTTPConnection, path: str, body: Any = None, *, method: str = "", **headers: str
) -> None:
    """Send a request, and don't wait for its answer. A body that isn't bytes is sent as JSON."""
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    named = {"Content_Type": "application/json"} | headers if data is not None else headers
    named = {name.replace("_", "-"): value for name, value in named.items()}
    connection.request(method or ("GET" if data is None else "POST"), path, data, named)


@contextmanager
def served(
    bundle: Path, *arguments: str | Path, weights: str | Path = MODEL, waits: bool = True, **environment: str
) -> Iterator[Served]:
    """A server of this bundle on a free port; ready, if the test `waits`. It is killed at the end, if it still runs."""
    command = [sys.executable, "-m", "precast", "serve", bundle, "--weights", weights, "--device", "cpu", "--port", "0"]
    process = subprocess.Popen(
        [*map(str, command), "--json", *map(str, arguments)], env=os.environ | environment, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        server = Served(process)
        if waits:
            server.said("ready")
        yield server
    finally:
        process.kill()
        process.communicate()
