"""An HTTP server of files in memory, on this machine, with ranges, and with all that goes wrong with servers.

`FileServer.behave` answers each request; the functions below are good and bad ways to. It is also a minimal S3 and
Google store: both ask for `/bucket/key` by ranges.
"""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit


class Request(BaseHTTPRequestHandler):
    """One request. `server.files` has the contents by path."""

    protocol_version = "HTTP/1.1"
    server: FileServer

    def do_GET(self) -> None:
        self.server.requests.append((self.file, self.headers.get("Range", "")))
        self.server.headers.append(dict(self.headers))
        try:
            self.server.behave(self)
        except (BrokenPipeError, ConnectionResetError):  # who asked has gone
            self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:
        pass

    @property
    def file(self) -> str:
        return unquote(urlsplit(self.path).path).lstrip("/")

    def answer(self, status: int, content: bytes = b"", **headers: str) -> None:
        """A whole answer; names of headers have `_` for `-`, and a given Content_Length is what is said."""
        self.send_response(status)
        for name, value in ({"Content_Length": str(len(content))} | headers).items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(content)

    def range(self) -> tuple[int, int, bytes]:
        """First byte and end of what is asked for, and the whole content."""
        content = self.server.files[self.file]
        found = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers["Range"])
        assert found is not None
        return int(found[1]), min(int(found[2]) + 1, len(content)), content


class FileServer(ThreadingHTTPServer):
    """Serves `files` (path to content) by `behave`, and keeps what was asked for: (path, Range) and all headers."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, files: dict[str, bytes], behave: Callable[[Request], None] | None = None) -> None:
        super().__init__(("127.0.0.1", 0), Request)
        self.files = files
        self.behave = behave or ranged
        self.requests: list[tuple[str, str]] = []
        self.headers: list[dict[str, str]] = []
        self.released = threading.Event()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request: object, client_address: object) -> None:
        """Silence: clients that go away are part of the tests."""


@contextmanager
def serving(files: dict[str, bytes], behave: Callable[[Request], None] | None = None) -> Iterator[FileServer]:
    """A server that runs in threads of its own until the end of the body."""
    with FileServer(files, behave) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.released.set()
            server.shutdown()
            thread.join()


DATE = "Mon, 02 Nov 2026 10:00:00 GMT"
"""When all files were last modified."""


def tag_of(content: bytes) -> str:
    """The ETag of a content."""
    return f'"{hashlib.sha256(content).hexdigest()[:16]}"'


def ranged(request: Request) -> None:
    """As a good server: ranges, tags, and 404 for what it doesn't have."""
    if request.file not in request.server.files:
        request.answer(404)
        return
    start, _, content = request.range()
    tag = tag_of(content)
    if request.headers.get("If-Match", tag) != tag:
        request.answer(412)
    elif request.headers.get("If-Range", tag) != tag:
        request.answer(200, content, ETag=tag, Last_Modified=DATE)
    elif start >= len(content):
        request.answer(416, Content_Range=f"bytes */{len(content)}")
    else:
        partial(request)


def partial(request: Request, **headers: str) -> None:
    """The range that is asked for, with other headers than it should have, if any are given."""
    start, end, content = request.range()
    right = {
        "Content_Range": f"bytes {start}-{end - 1}/{len(content)}",
        "ETag": tag_of(content),
        "Last_Modified": DATE,
    }
    request.answer(206, content[start:end], **(right | headers))


def without_ranges(request: Request) -> None:
    """As Python's own server: the whole file, whatever is asked for."""
    content = request.server.files.get(request.file)
    request.answer(404) if content is None else request.answer(200, content)


def silent(request: Request) -> None:
    """Takes the request, and says nothing more until the test is over."""
    request.server.released.wait()
    request.close_connection = True


def drop_after(count: int, request: Request) -> None:
    """So many bytes of the range, and then the end of the connection."""
    begin(count, request)
    request.close_connection = True


def fall_silent_after(count: int, request: Request) -> None:
    """So many bytes of the range, and nothing more."""
    begin(count, request)
    silent(request)


def begin(count: int, request: Request) -> None:
    """The first bytes of a right answer."""
    start, end, content = request.range()
    request.send_response(206)
    request.send_header("Content-Range", f"bytes {start}-{end - 1}/{len(content)}")
    request.send_header("Content-Length", str(end - start))
    request.send_header("ETag", tag_of(content))
    request.send_header("Last-Modified", DATE)
    request.end_headers()
    request.wfile.write(content[start : min(end, start + count)])
    request.wfile.flush()
