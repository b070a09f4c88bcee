"""HTTP to one registry: bounded tries, redirects that carry no credentials elsewhere, bounded answers.

An answer that is worth another try raises `Temporary`; `Transport.retrying` tries again, so often and for so long as
the constants say, whatever the registry asks for.
"""

from __future__ import annotations

import ipaddress
import random
import re
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar
from urllib.parse import SplitResult, urljoin, urlsplit

from precast.ir.errors import PrecastError, RegistryError, TargetError, shown
from precast.registry.reference import is_local

T = TypeVar("T")
Response = Any  # urllib3.BaseHTTPResponse, which is imported when the first request is made

TRIES = 5
WAITS = (0.5, 1.0, 2.0, 4.0)
"""Seconds before each further try: at most these, at least half of them, so that replicas don't come all at once."""
MAX_RETRY_AFTER = 60.0
"""Seconds that a registry may ask to wait; what asks for more is an error at once."""
CONNECT_SECONDS, READ_SECONDS = 10.0, 60.0
MAX_REDIRECTS = 5
MAX_ERROR_BYTES = 1 << 16
BLOCK_BYTES = 1 << 19
"""What is read or sent at a time; each worker holds two or three of them."""

_TEMPORARY = frozenset((408, 425, 429, 500, 502, 503, 504))
_REDIRECTS = frozenset((301, 302, 303, 307, 308))
_NUMBER = re.compile("[0-9]+")  # as text, `isdigit` would take powers too
_ERROR_TEXT = re.compile(rb'"(?:code|message)"\s*:\s*"((?:[^"\\]|\\.){1,400})"')


class Temporary(Exception):
    """A failure that another try may not have; `after` is how many seconds the registry asks to wait."""

    def __init__(self, error: RegistryError, after: float | None = None) -> None:
        super().__init__(str(error))
        self.error = error
        self.after = after


class Stopped(Exception):
    """Another thread of the same transfer failed, or the user interrupted it."""


class Transport:
    """Connections to one registry, shared by threads. `stop` ends what is being waited for or transferred."""

    def __init__(
        self,
        server: str,
        *,
        plain_http: bool = False,
        pause: Callable[[float], object] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        _check_installed()
        self.is_local = is_local(server)
        self.is_plain = plain_http or self.is_local
        self.origin = f"{'http' if self.is_plain else 'https'}://{server}"
        self.stop = threading.Event()
        self.clock = clock
        self._pause = pause or self.stop.wait
        self._pools: dict[str, Any] = {}
        self._lock = threading.Lock()

    # --- tries ---------------------------------------------------------------------------------------------------

    def retrying(self, action: Callable[[], T], progress: Callable[[], int] = lambda: 0) -> T:
        """What `action` returns, tried again while it raises Temporary. Bytes that arrived begin the count anew.

        Raises the error that the last Temporary holds, RegistryError `registry-busy`, or Stopped.
        """
        tries, before = 0, progress()
        while True:
            self.check_stopped()
            try:
                return action()
            except Temporary as failure:
                now = progress()
                tries, before = (1 if now > before else tries + 1), now
                if tries >= TRIES:
                    raise failure.error from None
                self._wait(WAITS[tries - 1], failure)

    def check_stopped(self) -> None:
        """Raise Stopped where the transfer is to end."""
        if self.stop.is_set():
            raise Stopped

    def _wait(self, bound: float, failure: Temporary) -> None:
        seconds = bound * random.uniform(0.5, 1.0)
        if failure.after is not None:
            if failure.after > MAX_RETRY_AFTER:
                message = f"the registry asks to come back in {failure.after:.0f} seconds"
                raise RegistryError("registry-busy", message, where=failure.error.where) from None
            seconds = max(seconds, failure.after)
        self._pause(seconds)

    # --- requests ------------------------------------------------------------------------------------------------

    def send(
        self,
        method: str,
        url: str,
        *,
        headers: Mapping[str, str] | None = None,
        authorization: str | None = None,
        body: Any = None,
        follow: bool = True,
    ) -> Response:
        """The answer to one try, its body unread. `url` is whole, or a path on the registry.

        `authorization` goes to the registry alone, never to another host that it redirects to. Redirects of GET and
        HEAD are followed if `follow`.

        Raises Temporary, or RegistryError: `registry-unreachable` (a certificate), `registry-answer` (a redirect that
        is not followed).
        """
        url = urljoin(self.origin, url)
        for _ in range(MAX_REDIRECTS + 1):
            self.check_stopped()
            sent = {"Accept-Encoding": "identity", "User-Agent": "precast", **(headers or {})}
            if authorization is not None and self.is_own(url):
                sent["Authorization"] = authorization
            response = self._once(method, url, sent, body)
            if response.status in _TEMPORARY:
                raise Temporary(self._failure(response, url), _retry_after(response.headers))
            if response.status not in _REDIRECTS or not follow or method not in ("GET", "HEAD"):
                return response
            response.close()
            url = self.target(url, response.headers.get("Location", ""))
        message = f"more than {MAX_REDIRECTS} redirects"
        raise RegistryError("registry-answer", message, where=place(url))

    def is_own(self, url: str) -> bool:
        """Whether the URL is on the registry itself: same scheme, host and port."""
        return _origin(urlsplit(url)) == _origin(urlsplit(self.origin))

    def target(self, base: str, location: str) -> str:
        """Where `location`, in an answer from `base`, leads to.

        Raises RegistryError (`registry-answer`) for what no registry sends anyone to: another scheme, a downgrade to
        plain HTTP, a user's name in it, this machine's or its network's own addresses.
        """
        base = urljoin(self.origin, base)
        try:
            url = urljoin(base, location)
            parts = urlsplit(url)
            host, _ = parts.hostname or "", parts.port
        except ValueError:
            raise RegistryError("registry-answer", "an address that is none", where=place(base)) from None
        schemes = ("https", "http") if self.is_plain else ("https",)
        if not location or parts.scheme not in schemes or not host or parts.username is not None:
            found = shown(parts.scheme + "://" + host) if location else "none"
            message = f"expected an address of {' or '.join(schemes)} to go on at, found {found}"
            raise RegistryError("registry-answer", message, where=place(base))
        if not self.is_own(url) and (reason := self._forbidden(host)):
            message = f"the registry leads to {shown(host)}, {reason}; this is never followed"
            raise RegistryError("registry-answer", message, where=place(base))
        return url

    def _forbidden(self, host: str) -> str | None:
        """Why a registry has no business to send anyone to this host."""
        for address in _addresses(host):
            if address.is_link_local or address.is_unspecified or address.is_multicast:
                return "an address of the local network alone"
            if address.is_loopback and not self.is_local:
                return "this machine"
        return None

    def read(self, response: Response, limit: int) -> bytes:
        """The answer's body, of at most `limit` bytes.

        Raises Temporary where it breaks off, and RegistryError (`registry-answer`) where it is longer.
        """
        try:
            said = length_of(response)
            if said is not None and said > limit:
                raise self._too_long(response, limit)
            data: bytes = response.read(limit + 1, decode_content=False)
            if len(data) > limit:
                raise self._too_long(response, limit)
            if said is None:
                response.read(1, decode_content=False)  # none is left: this ends a connection that ends with the body
            elif len(data) != said:
                raise Temporary(self.broken(response.geturl() or self.origin, "the answer broke off"))
            return data
        except http_errors() as error:
            raise Temporary(self.broken(response.geturl() or self.origin, reason_of(error))) from None
        finally:
            response.release_conn()

    def discard(self, response: Response) -> None:
        """Be done with an answer whose body nobody wants: a short one leaves its connection to the next request."""
        try:
            rest = response.read(MAX_ERROR_BYTES, decode_content=False)
            response.close() if len(rest) == MAX_ERROR_BYTES else response.release_conn()
        except http_errors():
            response.close()

    def failure(self, response: Response, url: str) -> RegistryError:
        """The error that an unexpected status is; the body is read as far as it explains it."""
        return self._failure(response, urljoin(self.origin, url))

    def broken(self, url: str, reason: str) -> RegistryError:
        """The error of a connection that can't be made or breaks."""
        return RegistryError("registry-unreachable", reason, where=place(urljoin(self.origin, url)))

    def close(self) -> None:
        """Close all connections, and end what other threads wait for."""
        self.stop.set()
        for pool in self._pools.values():
            pool.clear()

    def _once(self, method: str, url: str, headers: Mapping[str, str], body: Any) -> Response:
        import urllib3

        timeout = urllib3.Timeout(connect=CONNECT_SECONDS, read=READ_SECONDS)
        try:
            return self._pool(url).urlopen(
                method, url, body=body, headers=dict(headers), timeout=timeout, retries=False, redirect=False,
                preload_content=False, decode_content=False,
            )  # fmt: skip
        except urllib3.exceptions.SSLError as error:
            fix = "name a file of trusted certificates in SSL_CERT_FILE, if the registry has one of its own"
            message = f"no connection by TLS: {shown(str(error))}"
            raise RegistryError("registry-unreachable", message, where=place(url), fix=fix) from None
        except http_errors() as error:
            raise Temporary(self.broken(url, reason_of(error))) from None

    def _pool(self, url: str) -> Any:
        """The connections for this URL: straight ones, or by the proxy that the environment names."""
        with self._lock:
            proxy = "" if self.is_local else _proxy(urlsplit(url))
            if proxy not in self._pools:
                self._pools[proxy] = _new_pool(proxy)
            return self._pools[proxy]

    def _too_long(self, response: Response, limit: int) -> RegistryError:
        response.close()
        message = f"expected an answer of at most {limit} bytes, found a longer one"
        return RegistryError("registry-answer", message, where=place(response.geturl() or self.origin))

    def _failure(self, response: Response, url: str) -> RegistryError:
        try:
            data = response.read(MAX_ERROR_BYTES, decode_content=False)
        except http_errors():
            data = b""
        response.close()
        code, fix = _code_of(response.status), None
        said = b": ".join(_ERROR_TEXT.findall(data)[:2]).decode(errors="replace")
        if not said and "html" in response.headers.get("Content-Type", ""):
            said, fix = "a page of HTML", "check the address: this is a web server's page, not a registry's answer"
        if response.status in (401, 403):
            fix = "log in with `docker login` or `podman login`, or ask for the right"
        message = f"the registry answers {response.status}" + (f", {shown(said)}" if said else "")
        return RegistryError(code, message, where=place(url), fix=fix)


def place(url: str) -> str:
    """A URL as a message names it: without the query and the user's name, where secrets are."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def _code_of(status: int) -> str:
    if status in (401, 403):
        return "registry-denied"
    if status == 404:
        return "registry-missing"
    if status in _TEMPORARY:
        return "registry-busy"
    return "registry-refused" if 400 <= status < 500 else "registry-answer"


def _origin(parts: SplitResult) -> tuple[str, str, int]:
    default = 443 if parts.scheme == "https" else 80
    return parts.scheme, parts.hostname or "", parts.port or default


def _addresses(host: str) -> Iterable[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    try:
        found = {str(ipaddress.ip_address(host))}
    except ValueError:
        try:
            found = {str(entry[4][0]).partition("%")[0] for entry in socket.getaddrinfo(host, None)}
        except (OSError, UnicodeError):  # the request itself will say so
            return []
    addresses = [ipaddress.ip_address(address) for address in found]
    return [getattr(address, "ipv4_mapped", None) or address for address in addresses]


def _retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds that the registry asks to wait, also where it names a date."""
    from email.utils import mktime_tz, parsedate_tz

    text = headers.get("Retry-After", "").strip()
    if _NUMBER.fullmatch(text):
        return float(text[:9])
    try:
        date = parsedate_tz(text) if text else None
        return None if date is None else max(0.0, mktime_tz(date) - time.time())
    except (ValueError, OverflowError):  # a year that no calendar has
        return None


def length_of(response: Response) -> int | None:
    """How long the answer's body is by its own word; None where it doesn't say, or says no number."""
    text = response.headers.get("Content-Length", "")
    return int(text[:20]) if _NUMBER.fullmatch(text) else None


def reason_of(error: BaseException) -> str:
    """What went wrong with a connection, in words."""
    import urllib3.exceptions as kinds

    if isinstance(error, kinds.NameResolutionError):
        return "the host's name is not known"
    if isinstance(error, kinds.NewConnectionError):  # before timeouts, of which urllib3 makes it a kind
        return f"no connection: {shown(str(error).rpartition('] ')[2])}"
    if isinstance(error, kinds.ConnectTimeoutError):
        return f"no connection within {CONNECT_SECONDS:.0f} seconds"
    if isinstance(error, (kinds.ReadTimeoutError, TimeoutError)):
        return f"nothing arrived for {READ_SECONDS:.0f} seconds"
    if isinstance(error, kinds.ProxyError):
        return "no connection to the proxy that the environment names"
    return "the connection broke"


def http_errors() -> tuple[type[Exception], ...]:
    """What a connection that fails or breaks raises."""
    import http.client

    import urllib3

    return (urllib3.exceptions.HTTPError, http.client.HTTPException, OSError)


def _proxy(parts: SplitResult) -> str:
    from urllib.request import getproxies, proxy_bypass

    found = getproxies()
    host = parts.hostname or ""
    if not found or proxy_bypass(host):
        return ""
    return found.get(parts.scheme, found.get("all", ""))


def _check_installed() -> None:
    try:
        import urllib3  # noqa: F401 - to know at once
    except ModuleNotFoundError as error:
        message = "registries need urllib3, which is not installed"
        raise TargetError("dependency-missing", message, fix="pip install 'precast[registry]'") from error


def _new_pool(proxy: str) -> Any:
    import urllib3

    options: dict[str, Any] = {"num_pools": 8, "maxsize": 16, "block": False, "blocksize": BLOCK_BYTES}
    try:
        return urllib3.ProxyManager(proxy, **options) if proxy else urllib3.PoolManager(**options)
    except urllib3.exceptions.HTTPError:
        message = "the environment names a proxy that is no address"
        raise PrecastError("registry-unreachable", message, fix="check HTTPS_PROXY and HTTP_PROXY") from None
