"""Who may ask: whoever brings a key, and everyone to the probes, which have none."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

from starlette.types import ASGIApp, Receive, Scope, Send

from precast.serve.replies import error, json_response

OPEN = ("/health", "/ready")
"""What needs no key."""


class Keys:
    """An ASGI application in front of another one. Without `keys` it lets all in."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer 401."""
        if not self._digests or scope["path"] in OPEN or self._has_key(scope):
            await self._app(scope, receive, send)
            return
        message = "a key is missing, or is none of this server's"
        refusal = error(message, kind="invalid_request_error", code="invalid_api_key")
        await json_response(refusal, 401, {"WWW-Authenticate": "Bearer"})(scope, receive, send)

    def _has_key(self, scope: Scope) -> bool:
        """Compared by digest, in a time that says nothing of the keys."""
        said = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        scheme, _, key = said.partition(b" ")
        given = hashlib.sha256(key.strip()).digest()
        matches = [hmac.compare_digest(given, digest) for digest in self._digests]
        return scheme.lower() == b"bearer" and any(matches)
