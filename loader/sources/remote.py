"""Folders on a server: what all kinds share. Ranges are read in several attempts with pauses, and any of it can be
stopped; how one attempt is made is the kind's (`Server`).
"""

from __future__ import annotations

from collections.abc import Sequence
from threading import Event
from typing import NamedTuple, Protocol, Self

from precast.ir.errors import WeightsError
from precast.ir.weights.sources import Stamp, changed

HEAD_BYTES = 256 << 10
"""What is read of a file at first: its size and stamp come with it, and few headers are longer."""
MAX_HEADS = 256
"""Files whose first bytes are kept between the question whether they are there and their reading."""
READERS = 16
"""Requests that run at once: one connection seldom brings more than 100 MB/s, and a load wants a whole network card."""
LONGEST_PAUSE = 30.0
"""Seconds: a server that asks for a longer pause gets this one."""


class Waits(NamedTuple):
    """How long is waited for a server, in seconds.

    `timeout`: for a connection, for an answer, and for its next bytes. `pauses`: before each further attempt at a
    range; there are so many.
    """

    timeout: float = 30.0
    pauses: tuple[float, ...] = (0.0, 0.2, 0.8, 3.2)


class Transient(Exception):
    """What another attempt may mend, in words. `pause`: the seconds that the server asks for."""

    def __init__(self, message: str, pause: float = 0.0) -> None:
        super().__init__(message)
        self.pause = pause


class Missing(Exception):
    """The server has no such file."""


class Sink:
    """Memory that is filled from the front; a further attempt goes on where the last one ended."""

    def __init__(self, memory: Sequence[memoryview]) -> None:
        self._rest = [piece for piece in reversed(memory) if len(piece)]
        self.filled = 0
        self.left = sum(map(len, self._rest))

    def first(self) -> memoryview:
        """The first piece that is not full, as far as it is empty; `left` is not 0."""
        return self._rest[-1]

    def advance(self, count: int) -> None:
        """So many bytes of `first()` are filled."""
        self.filled += count
        self.left -= count
        rest = self._rest.pop()[count:]
        if len(rest):
            self._rest.append(rest)

    def put(self, chunk: memoryview) -> None:
        """Fill in these bytes; no more than `left`."""
        while len(chunk):
            piece = self.first()
            count = min(len(piece), len(chunk))
            piece[:count] = chunk[:count]
            self.advance(count)
            chunk = chunk[count:]


class Server(Protocol):
    """A kind of server. `name` is its folder's address as messages show it, without credentials."""

    name: str

    def fetch(self, file: str, start: int, sink: Sink, stamp: Stamp | None) -> Stamp:
        """One attempt to fill `sink` from byte `start` on; the stamp of the file, which must be `stamp` if that is
        known. Where the file ends, so does what is filled.

        Raises Transient, Missing, and WeightsError for what no further attempt would mend.
        """
        ...

    def stop(self) -> None:
        """End what is under way."""


class RemoteFolder:
    """The files of a server's folder."""

    readers: int | None = READERS

    def __init__(self, server: Server, only: str | None, waits: Waits) -> None:
        self.name = server.name
        self.only = only
        self._server = server
        self._waits = waits
        self._stopped = Event()
        self._found: dict[str, RemoteFile] = {}

    def has(self, file: str) -> bool:
        """As `precast.ir.weights.sources.Folder` says."""
        try:
            found = self._opened(file)
        except Missing:
            return False
        if len(self._found) < MAX_HEADS:
            self._found[file] = found
        return True

    def open(self, file: str, stamp: Stamp | None = None) -> RemoteFile:
        """As `precast.ir.weights.sources.Folder` says. With a stamp the server is not asked before the first read."""
        if stamp is not None:
            return RemoteFile(self, file, stamp, b"")
        try:
            return self._found.pop(file, None) or self._opened(file)
        except Missing:
            message = "expected a file, and the server has none of this name"
            raise WeightsError("checkpoint-missing", message, where=self.where(file)) from None

    def names(self) -> list[str] | None:
        """None: servers are asked for files by their names."""
        return None

    def stop(self) -> None:
        """As `precast.ir.weights.sources.Folder` says."""
        self._stopped.set()
        self._server.stop()

    def where(self, file: str) -> str:
        """How messages call a file."""
        return f"{self.name}/{file}"

    def read(self, file: str, start: int, sink: Sink, stamp: Stamp | None) -> Stamp:
        """Fill `sink` from byte `start` on, in as many attempts as it takes and `Waits` allows; the file's stamp."""
        before, end = sink.filled, start + sink.left
        pauses = iter(self._waits.pauses)
        while True:
            if self._stopped.is_set():
                raise WeightsError("checkpoint-read", "the read was stopped", where=self.where(file))
            try:
                return self._server.fetch(file, start + sink.filled - before, sink, stamp)
            except Transient as error:
                pause = next(pauses, None)
                if pause is None:
                    raise self._failed(file, start, end, sink.filled - before, error) from None
                self._stopped.wait(max(pause, min(error.pause, LONGEST_PAUSE)))

    def _opened(self, file: str) -> RemoteFile:
        head = bytearray(HEAD_BYTES)
        sink = Sink([memoryview(head)])
        stamp = self.read(file, 0, sink, None)
        return RemoteFile(self, file, stamp, bytes(memoryview(head)[: sink.filled]))

    def _failed(self, file: str, start: int, end: int, filled: int, error: Transient) -> WeightsError:
        attempts = 1 + len(self._waits.pauses)
        message = (
            f"bytes {start} to {end - 1}: {filled} of {end - start} came in {attempts} attempts, and the last ended: "
            f"{error}"
        )
        fix = "check the server and the network between, and load again; a longer weights_timeout waits longer for each"
        return WeightsError("checkpoint-unreachable", message, where=self.where(file), fix=fix)


class RemoteFile:
    """A file on a server; its first bytes may be here already."""

    def __init__(self, folder: RemoteFolder, file: str, stamp: Stamp, head: bytes) -> None:
        self.name = folder.where(file)
        self.size = int(stamp[0] or 0)
        self.stamp = stamp
        self._folder = folder
        self._file = file
        self._head = head

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def read_into(self, start: int, memory: Sequence[memoryview]) -> int:
        """As `precast.ir.weights.sources.Source` says."""
        sink = Sink(memory)
        wanted = sink.left
        if start < len(self._head):
            sink.put(memoryview(self._head)[start : start + wanted])
        if sink.left:
            if start + wanted > self.size:
                raise self._ended()
            self._folder.read(self._file, start + sink.filled, sink, self.stamp)
        return wanted

    def check(self) -> None:
        """Nothing: each answer came with its stamp."""

    def close(self) -> None:
        """Forget the first bytes."""
        self._head = b""

    def _ended(self) -> WeightsError:
        message = f"the file ends at byte {self.size}; its header says that tensors lie beyond"
        return WeightsError(
            "checkpoint-read", message, where=self.name, fix="the file is incomplete: upload it to the server again"
        )


def check_stamp(where: str, opened: Stamp | None, found: Stamp) -> None:
    """Raise WeightsError (`checkpoint-changed`) for an answer with another stamp than the file had when opened."""
    if opened is not None and opened != found:
        raise changed(where, opened, found)
