"""Files of an HTTP server, read by ranges straight into memory, over connections that are kept.

Python's own client: it puts bytes where they belong without a copy, its connections can be cut from another thread, and
redirects to other servers are ours to refuse (a client that follows them tells a stranger what is read, and takes
weights from it).
"""

from __future__ import annotations

import base64
import re
import ssl
import weakref
from collections import deque
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from socket import SHUT_RDWR
from typing import NamedTuple
from urllib.parse import quote, unquote, urljoin, urlsplit
from urllib.request import getproxies, proxy_bypass

from precast.ir.errors import WeightsError, shown
from precast.ir.weights.sources import Stamp
from precast.loader.sources.remote import Missing, Sink, Transient, check_stamp

MAX_REDIRECTS = 5
CHUNK_BYTES = 1 << 20
"""What is read at once; so much an attempt that breaks off may have read in vain."""
_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)")
_MOVED = (301, 302, 303, 307, 308)
_AGAIN = (408, 425, 429, 500, 502, 503, 504)
"""What servers answer when a later attempt may do."""


class _Origin(NamedTuple):
    """Where a request goes: no answer may send it elsewhere."""

    scheme: str
    host: str
    port: int


class HttpServer:
    """A folder's address: `https://host/path`, with `user:password@` before the host, and a query, if need be.

    The query is sent with every file. Neither is in a message.
    """

    def __init__(self, address: str, timeout: float) -> None:
        """Raises WeightsError (`checkpoint-address`)."""
        try:
            parts = urlsplit(address)
            default = 443 if parts.scheme == "https" else 80
            self._origin = _Origin(parts.scheme, parts.hostname or "", parts.port or default)
        except ValueError as error:
            raise _no_address(str(error)) from None
        if not self._origin.host or not parts.netloc.isascii():
            raise _no_address("it names no server")
        self._path = parts.path.rstrip("/")
        self._query = f"?{parts.query}" if parts.query else ""
        self._headers = {"Accept-Encoding": "identity", "User-Agent": "precast"}
        if parts.username is not None:
            secret = f"{unquote(parts.username)}:{unquote(parts.password or '')}".encode()
            self._headers["Authorization"] = f"Basic {base64.b64encode(secret).decode()}"
        self.name = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{self._path}"
        self._timeout = timeout
        self._idle: deque[HTTPConnection] = deque()
        self._open: set[HTTPConnection] = set()
        self._stopped = False
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        weakref.finalize(self, _close_all, self._idle)

    def fetch(self, file: str, start: int, sink: Sink, stamp: Stamp | None) -> Stamp:
        """As `precast.loader.sources.remote.Server` says."""
        where = f"{self.name}/{file}"
        connection = self._connection()
        self._open.add(connection)
        try:
            with self._answer(connection, where, file, start, sink.left, stamp) as response:
                found, length = _checked(response, where, start, sink.left, stamp)
                _take(response, sink, length)
        except (OSError, HTTPException, ValueError, AttributeError) as error:
            # The latter two are what a connection raises that `stop` has cut.
            connection.close()
            if isinstance(error, ssl.SSLCertVerificationError):
                message = f"the server's certificate is not trusted: {shown(error.verify_message)}"
                fix = "check the address; SSL_CERT_FILE names the certificates that are trusted"
                raise WeightsError("checkpoint-unreachable", message, where=where, fix=fix) from None
            raise Transient(_reason(error, self._timeout)) from None
        except BaseException:
            connection.close()
            raise
        finally:
            self._open.discard(connection)
        self._idle.append(connection)
        return found

    def stop(self) -> None:
        """Cut all connections: who reads from one gets an error. One that is being made ends when it is."""
        self._stopped = True
        for connection in tuple(self._open):
            sock = connection.sock
            if sock is not None:
                try:
                    sock.shutdown(SHUT_RDWR)
                except OSError:  # it was not connected
                    continue

    def _connection(self) -> HTTPConnection:
        """One that is free, or a new one, by way of the proxy that the environment names, if it does."""
        try:
            return self._idle.pop()
        except IndexError:
            pass
        scheme, host, port = self._origin
        proxy = None if proxy_bypass(host) else getproxies().get(scheme)
        via = urlsplit(proxy if proxy and "//" in proxy else f"//{proxy}") if proxy else None
        at, at_port = (host, port) if via is None else (via.hostname or "", via.port or 80)
        if self._tls is None:
            return HTTPConnection(at, at_port, timeout=self._timeout)
        connection = HTTPSConnection(at, at_port, timeout=self._timeout, context=self._tls)
        if via is not None:
            secret = base64.b64encode(f"{unquote(via.username or '')}:{unquote(via.password or '')}".encode()).decode()
            connection.set_tunnel(host, port, {"Proxy-Authorization": f"Basic {secret}"} if via.username else {})
        return connection

    def _answer(
        self, connection: HTTPConnection, where: str, file: str, start: int, length: int, stamp: Stamp | None
    ) -> HTTPResponse:
        """The answer to the request for a range, after redirects within the server."""
        headers = self._headers | {"Range": f"bytes={start}-{start + length - 1}"}
        strong = stamp is not None and isinstance(stamp[1], str) and not stamp[1].startswith("W/")
        if strong and stamp is not None:
            headers["If-Range"] = str(stamp[1])
        scheme, host, port = self._origin
        url = f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}{self._path}/{quote(file)}{self._query}"
        for _ in range(MAX_REDIRECTS + 1):
            parts = urlsplit(url)
            target = f"{parts.path or '/'}{'?' + parts.query if parts.query else ''}"
            through_proxy = self._tls is None and (connection.host, connection.port) != (host, port)
            if connection.sock is None:
                connection.connect()
            if self._stopped:  # looked at when there is a socket: from here on `stop` can cut it
                raise Transient("the read was stopped")
            connection.request("GET", url if through_proxy else target, headers=headers)
            response = connection.getresponse()
            if response.status not in _MOVED:
                return response
            url = self._redirected(url, response.headers.get("Location", ""), where)
            with response:
                response.read(HEAD_OF_PAGE)
                if not response.isclosed():
                    connection.close()
        message = f"redirects from one address to another, {MAX_REDIRECTS} times and on"
        raise WeightsError("checkpoint-unreachable", message, where=where)

    def _redirected(self, url: str, location: str, where: str) -> str:
        """The address that an answer redirects to. Raises WeightsError if it is another server's."""
        try:
            target = urljoin(url, location)
            parts = urlsplit(target)
            default = 443 if parts.scheme == "https" else 80
            origin = _Origin(parts.scheme, parts.hostname or "", parts.port or default)
        except ValueError:
            target, origin = "", _Origin("?", "?", 0)
        if origin == self._origin:
            return target
        to = f"{shown(origin.scheme, 20)}://{shown(origin.host, 100)}"
        message = f"redirects to {to}, another server than the one that was named, and that is not followed"
        fix = "pass the address where the files themselves are, if that is who should be trusted"
        raise WeightsError("checkpoint-unreachable", message, where=where, fix=fix)


def _close_all(connections: deque[HTTPConnection]) -> None:
    while connections:
        connections.pop().close()


HEAD_OF_PAGE = 64 << 10
"""What is read of a page that comes with a redirect, so that its connection can be used again."""


def http_address(address: str) -> tuple[str, str | None]:
    """The folder's address, and the one file of it that is meant if the address is that of a safetensors file.

    Raises WeightsError (`checkpoint-address`).
    """
    try:
        parts = urlsplit(address)
    except ValueError as error:
        raise _no_address(str(error)) from None
    folder, _, last = parts.path.rpartition("/")
    if not last.endswith(".safetensors"):
        return address, None
    return parts._replace(path=folder).geturl(), unquote(last)


def _checked(response: HTTPResponse, where: str, start: int, length: int, stamp: Stamp | None) -> tuple[Stamp, int]:
    """The file's stamp by an answer's head, and how many bytes follow; raises what `Server.fetch` raises."""
    asked = f"bytes {start} to {start + length - 1}"
    if response.status not in (200, 206):
        raise _refusal(response, where, asked, stamp)
    encoding = response.headers.get("Content-Encoding", "identity")
    if encoding != "identity":
        raise _wrong(where, f"answers in the encoding {shown(encoding, 40)}, which was not asked for")
    tags = response.headers.get("ETag"), response.headers.get("Last-Modified")
    if response.status == 200:
        size = response.length
        if size is not None:
            check_stamp(where, stamp, (size, *tags))
        if size is None or start or size > length:
            fix = "serve the checkpoint by a server that has ranges (nginx, caddy, an object store), or download it"
            message = f"answers with the whole file when asked for {asked}: it has no ranges"
            raise WeightsError("checkpoint-unreachable", message, where=where, fix=fix)
        return (size, *tags), size
    named = _RANGE.fullmatch(response.headers.get("Content-Range", ""))
    if named is None:
        raise _wrong(where, f"answers {asked} without saying of how many (Content-Range)")
    first, last, size = map(int, named.groups())
    check_stamp(where, stamp, (size, *tags))
    expected = min(start + length, size)
    if (first, last + 1) != (start, expected):
        raise _wrong(where, f"answers with bytes {first} to {last} of {size} when asked for {asked}")
    if response.length not in (None, expected - start):
        raise _wrong(where, f"says that its answer has {response.length} bytes, expected {expected - start} ({asked})")
    return (size, *tags), expected - start


def _refusal(response: HTTPResponse, where: str, asked: str, stamp: Stamp | None) -> Exception:
    """What to raise for an answer that is no content."""
    status = f"{response.status} {shown(response.reason, 40)}".strip()
    if response.status == 404 and stamp is None:
        return Missing()
    if response.status == 416 and stamp is None:
        return _wrong(where, f"answers {status} when asked for {asked}: the file is empty")
    if response.status in (404, 410, 412, 416):
        message = f"answers {status} when asked for {asked}: the file is gone, or another one than it was"
        return WeightsError("checkpoint-changed", message, where=where, fix="load again")
    if response.status in (401, 403, 407):
        fix = "put credentials into the address (https://user:password@host/..., or a signed query)"
        return WeightsError("checkpoint-denied", f"answers {status} when asked for {asked}", where=where, fix=fix)
    if response.status in _AGAIN:
        pause = response.headers.get("Retry-After", "")
        return Transient(f"the server answers {status}", float(pause) if re.fullmatch(r"\d{1,6}", pause) else 0.0)
    return _wrong(where, f"answers {status} when asked for {asked}")


def _take(response: HTTPResponse, sink: Sink, length: int) -> None:
    """Read so many bytes of the answer into place."""
    left = length
    while left:
        count = response.readinto(sink.first()[: min(left, CHUNK_BYTES)])
        if not count:
            raise Transient(f"the answer ends after {length - left} of {length} bytes")
        sink.advance(count)
        left -= count
    response.read()  # the end of a chunked answer; else nothing


def _reason(error: Exception, timeout: float) -> str:
    if isinstance(error, TimeoutError):
        return f"nothing came for {timeout:g} s"
    if isinstance(error, OSError) and error.strerror:
        return shown(error.strerror, 200)
    return shown(f"{type(error).__name__}: {error}", 200)


def _wrong(where: str, message: str) -> WeightsError:
    fix = "the server, or a proxy before it, does not keep to HTTP: use another, or download the checkpoint"
    return WeightsError("checkpoint-unreachable", message, where=where, fix=fix)


def _no_address(why: str) -> WeightsError:
    return WeightsError(
        "checkpoint-address", f"the address is none: {why}", fix="pass an address such as https://host/path/of/folder"
    )
