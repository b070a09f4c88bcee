"""Who asks: the `Authorization` header of requests to one repository, from credentials and token services.

A registry says by a 401 what it wants: a name and a password (Basic), or a token of a service that it names (Bearer).
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Mapping, Sequence
from urllib.parse import urlencode, urlsplit

import msgspec

from precast.ir.errors import RegistryError, shown
from precast.registry import credentials
from precast.registry.credentials import Credentials
from precast.registry.reference import Reference
from precast.registry.transport import Transport, place

MAX_TOKEN_BYTES = 1 << 18
_MAX_CHALLENGE = 8192
_TOKEN = re.compile(r"[\x21-\x7e]+")
# One word, or one `name=value`, of a WWW-Authenticate header.
_ITEM = re.compile(r'[\s,]*(?:([A-Za-z0-9_]+)\s*=\s*(?:"([^"]*)"|([^\s,"]*))|([A-Za-z0-9_-]+))')


class _Token(msgspec.Struct):
    token: str = ""
    access_token: str = ""


class Authorization:
    """The header for requests to one repository, shared by threads; made when the registry first asks for it."""

    def __init__(
        self,
        transport: Transport,
        reference: Reference,
        scopes: Sequence[str],
        find: Callable[[str, str], Credentials | None] = credentials.find,
    ) -> None:
        self._transport = transport
        self._reference = reference
        self._scopes = tuple(scopes)
        self._find = find
        self._lock = threading.Lock()
        self._header: str | None = None

    def header(self) -> str | None:
        """What is to be sent with the next request; None as long as the registry hasn't asked."""
        return self._header

    def renew(self, challenges: Sequence[str], refused: str | None) -> None:
        """Make the header that the registry asks for, after it refused the one that was sent.

        Raises RegistryError: `registry-denied` where there are no credentials or these are refused,
        `registry-answer`, `credentials-invalid`, or Temporary.
        """
        with self._lock:
            if self._header != refused:
                return  # another thread has a new one
            wanted = challenges_of(", ".join(challenges)[:_MAX_CHALLENGE])
            found = self._find(self._reference.host, self._reference.name)
            if (bearer := wanted.get("bearer")) is not None:
                header = "Bearer " + self._token(bearer, found)
            elif "basic" in wanted:
                if found is None or not found.user:
                    raise self._denied("the registry wants a name and a password, and there are none for it")
                header = found.basic()
            else:
                raise self._denied("the registry wants credentials, and does not say which")
            if header == refused:
                raise self._denied("the registry refuses the credentials")
            self._header = header

    def _token(self, challenge: Mapping[str, str], found: Credentials | None) -> str:
        # What the registry names as its service may be anywhere, on a host of its own as a rule.
        realm = self._transport.target(self._transport.origin, challenge.get("realm", ""))
        scopes = list(dict.fromkeys((*self._scopes, *challenge.get("scope", "").split(" "))))
        fields = [("service", challenge.get("service", "")), *(("scope", scope) for scope in scopes if scope)]
        if found is not None and not found.user:
            form = [("grant_type", "refresh_token"), ("refresh_token", found.secret), ("client_id", "precast")]
            body = urlencode([*form, fields[0], ("scope", " ".join(scopes).strip())])
            headers = {"Content-Type": "application/x-www-form-urlencoded"}
            return self._ask("POST", realm, headers, body)
        headers = {} if found is None else {"Authorization": found.basic()}
        query = urlencode(fields)
        return self._ask("GET", realm + ("&" if urlsplit(realm).query else "?") + query, headers, None)

    def _ask(self, method: str, url: str, headers: Mapping[str, str], body: str | None) -> str:
        # No redirect is followed: it would take a password elsewhere.
        response = self._transport.retrying(
            lambda: self._transport.send(method, url, headers=headers, body=body, follow=False)
        )
        if response.status in (400, 401, 403):
            response.close()
            raise self._denied(f"the service that gives tokens answers {response.status}", place(url))
        if response.status != 200:
            raise self._transport.failure(response, url)
        data = self._transport.read(response, MAX_TOKEN_BYTES)
        try:
            answer = msgspec.json.decode(data, type=_Token)
        except (msgspec.DecodeError, ValueError, RecursionError):
            answer = _Token()
        token = answer.token or answer.access_token
        if not _TOKEN.fullmatch(token):
            message = "expected a token in JSON from the service that gives them, found something else"
            raise RegistryError("registry-answer", message, where=place(url))
        return token

    def _denied(self, message: str, where: str | None = None) -> RegistryError:
        host = self._reference.host
        fix = f"log in: `docker login {host}` or `podman login {host}`; with rights to {shown(self._reference.name)}"
        return RegistryError("registry-denied", message, where=where or f"{host}/{self._reference.name}", fix=fix)


def challenges_of(header: str) -> dict[str, dict[str, str]]:
    """What a `WWW-Authenticate` header asks for: scheme in lower case to its parameters."""
    found: dict[str, dict[str, str]] = {}
    current: dict[str, str] = {}
    position = 0
    while (match := _ITEM.match(header, position)) is not None:
        position = match.end()
        name, quoted, plain, scheme = match.groups()
        if scheme is not None:
            current = found.setdefault(scheme.lower(), {})
        else:
            current.setdefault(name.lower(), quoted if quoted is not None else plain)
    return found
