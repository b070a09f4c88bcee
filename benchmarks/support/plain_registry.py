"""The baseline of `bench_registry.py`: the same bytes to and from a registry by plain sockets, nothing checked.

Requests are put together by hand, over as many connections as Precast has; nothing is asked that need not be, no digest
is computed, no answer looked at but for its status and the place that an upload goes to.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

CONNECTIONS = 4
BLOCK_BYTES = 1 << 19


class Blob(NamedTuple):
    """A blob to be moved: its digest, and the file that has it or gets it."""

    digest: str
    file: Path


class _Connection:
    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._rest = b""

    def head(self, *sent: bytes) -> tuple[int, bytes]:
        """The status and the headers of the answer."""
        for piece in sent:
            self.socket.sendall(piece)
        while b"\r\n\r\n" not in self._rest:
            self._rest += self.socket.recv(BLOCK_BYTES)
        head, _, self._rest = self._rest.partition(b"\r\n\r\n")
        return int(head[9:12]), head

    def body(self, size: int, file: Path | None = None) -> None:
        """Take the answer's body, into a file if there is one."""
        pieces, self._rest = [self._rest[:size]], self._rest[size:]
        left = size - len(pieces[0])
        with file.open("wb") if file else open("/dev/null", "wb") as target:
            target.write(pieces[0])
            while left:
                data = self.socket.recv(min(left, BLOCK_BYTES))
                target.write(data)
                left -= len(data)


def _length(head: bytes) -> int:
    match = re.search(rb"\r\nContent-Length: (\d+)", head, re.IGNORECASE)
    return int(match[1]) if match else 0


def _shares(blobs: Sequence[Blob]) -> list[list[Blob]]:
    shares: list[list[Blob]] = [[] for _ in range(CONNECTIONS)]
    for blob in sorted(blobs, key=lambda blob: -blob.file.stat().st_size if blob.file.exists() else 0):
        min(shares, key=lambda share: sum(x.file.stat().st_size for x in share if x.file.exists()) + len(share)).append(
            blob
        )  # fmt: skip
    return [share for share in shares if share]


def push(port: int, name: str, blobs: Sequence[Blob], manifests: Sequence[tuple[str, bytes]]) -> None:
    """Blobs by POST and PUT, then manifests of one type under their names."""
    with ThreadPoolExecutor(CONNECTIONS) as pool:
        list(pool.map(lambda share: _push_share(port, name, share), _shares(blobs)))
    connection = _Connection(port)
    for reference, data in manifests:
        head = (
            f"PUT /v2/{name}/manifests/{reference} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n"
            "Content-Type: application/vnd.oci.image.manifest.v1+json\r\n\r\n"
        )
        assert connection.head(head.encode(), data)[0] == 201
    connection.socket.close()


def _push_share(port: int, name: str, blobs: Sequence[Blob]) -> None:
    connection = _Connection(port)
    post = f"POST /v2/{name}/blobs/uploads/ HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n".encode()
    for blob in blobs:
        status, answer = connection.head(post)
        location = re.search(rb"\r\nLocation: https?://[^/]*([^\r]*)", answer)
        assert status == 202
        assert location is not None
        data = blob.file.read_bytes()
        head = (
            f"PUT {location[1].decode()}&digest={blob.digest} HTTP/1.1\r\nHost: localhost\r\n"
            f"Content-Length: {len(data)}\r\nContent-Type: application/octet-stream\r\n\r\n"
        )
        assert connection.head(head.encode(), data)[0] == 201
    connection.socket.close()


def pull(port: int, name: str, digest: str, blobs: Sequence[Blob]) -> None:
    """The manifest, which is not looked at, and the blobs into their files."""
    connection = _Connection(port)
    accept = "Accept: application/vnd.oci.image.manifest.v1+json"
    get = f"GET /v2/{name}/manifests/{digest} HTTP/1.1\r\nHost: localhost\r\n{accept}\r\n\r\n"
    status, head = connection.head(get.encode())
    assert status == 200
    connection.body(_length(head))
    connection.socket.close()
    with ThreadPoolExecutor(CONNECTIONS) as pool:
        list(
            pool.map(lambda share: _pull_share(port, name, share), [blobs[i::CONNECTIONS] for i in range(CONNECTIONS)])
        )


def _pull_share(port: int, name: str, blobs: Sequence[Blob]) -> None:
    connection = _Connection(port)
    for blob in blobs:
        get = f"GET /v2/{name}/blobs/{blob.digest} HTTP/1.1\r\nHost: localhost\r\n\r\n"
        status, head = connection.head(get.encode())
        assert status == 200
        connection.body(_length(head), blob.file)
    connection.socket.close()
