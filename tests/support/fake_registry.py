"""A registry in this process, by the OCI distribution protocol, with what real ones lack or do badly, as switches.

    with FakeRegistry(referrers_api=True) as registry:
        push(bundle, f"{registry.host}/org/name:tag")
        registry.misbehave("GET", r"/blobs/", status(503), times=2)

`registry.log` has each request as (method, path, headers); `registry.blobs` and `registry.manifests` what is stored.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import re
import socket
import threading
import uuid
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple
from urllib.parse import parse_qs, urlsplit

INDEX = "application/vnd.oci.image.index.v1+json"
NAME = r"/v2/(?P<name>[a-z0-9._/-]+)"


class Seen(NamedTuple):
    """A request."""

    method: str
    path: str
    headers: dict[str, str]


Trick = Callable[["Handler"], bool]
"""Something done in place of the answer; False: the answer follows all the same."""


def digest_of(data: bytes) -> str:
    return "sha256:" + hashlib.sha256(data).hexdigest()


class FakeRegistry:
    """A registry on a port of 127.0.0.1. `user` and `password` ask for Basic; with `tokens` for a token of its own."""

    def __init__(
        self,
        *,
        referrers_api: bool = False,
        user: str = "",
        password: str = "",
        tokens: bool = False,
        etags: bool = True,
    ) -> None:
        self.blobs: dict[tuple[str, str], bytes] = {}
        self.unfinished: dict[str, bytes] = {}
        self.manifests: dict[tuple[str, str], tuple[bytes, str]] = {}
        self.log: list[Seen] = []
        self.referrers_api, self.user, self.password, self.tokens, self.etags = (
            referrers_api, user, password, tokens, etags,
        )  # fmt: skip
        self.valid_tokens: set[str] = set()
        self.lock = threading.Lock()
        self._tricks: list[list[Any]] = []
        self._server = _Server(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._server.registry = self  # type: ignore[attr-defined]
        self.port = self._server.server_address[1]
        self.host = f"127.0.0.1:{self.port}"

    def __enter__(self) -> FakeRegistry:
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def misbehave(self, method: str, path: str, trick: Trick, times: int = 1 << 30) -> None:
        """Have `trick` done for the next `times` requests of this method whose path and query have `path` in them."""
        self._tricks.append([method, re.compile(path), trick, times])

    def behave(self) -> None:
        """Forget all tricks."""
        self._tricks.clear()

    def trick_for(self, method: str, path: str) -> Trick | None:
        with self.lock:
            for entry in self._tricks:
                if entry[0] == method and entry[1].search(path) and entry[3] > 0:
                    entry[3] -= 1
                    return entry[2]  # type: ignore[no-any-return]
        return None

    def count(self, method: str, path: str = "") -> int:
        """How many requests of this method had `path` in them."""
        return sum(seen.method == method and re.search(path, seen.path) is not None for seen in self.log)

    def put_manifest(self, name: str, reference: str, data: bytes, media_type: str) -> str:
        """Store a manifest as if it had been pushed; its digest."""
        self.manifests[name, digest_of(data)] = (data, media_type)
        self.manifests[name, reference] = (data, media_type)
        return digest_of(data)

    def referrers_of(self, name: str, digest: str) -> list[dict[str, Any]]:
        found = {}
        for (stored, _), (data, media_type) in list(self.manifests.items()):
            document = json.loads(data) if stored == name and data[:1] == b"{" else {}
            if (document.get("subject") or {}).get("digest") == digest:
                found[digest_of(data)] = {
                    "mediaType": media_type, "digest": digest_of(data), "size": len(data),
                    "artifactType": document.get("artifactType", ""),
                }  # fmt: skip
        return [found[each] for each in sorted(found)]


class _Server(ThreadingHTTPServer):
    request_queue_size = 64

    def handle_error(self, *_: object) -> None:
        """Clients that are killed or hang up are what these tests are about."""


class Handler(BaseHTTPRequestHandler):
    """One request. Answers by the protocol, unless a trick is asked for."""

    protocol_version = "HTTP/1.1"
    timeout = 30
    disable_nagle_algorithm = True
    wbufsize = 1 << 16

    @property
    def registry(self) -> FakeRegistry:
        return self.server.registry  # type: ignore[attr-defined, no-any-return]

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self._serve()

    do_HEAD = do_POST = do_PUT = do_PATCH = do_GET

    def _serve(self) -> None:
        with self.registry.lock:
            self.registry.log.append(Seen(self.command, self.path, dict(self.headers)))
        if (trick := self.registry.trick_for(self.command, self.path)) is not None and trick(self):
            return
        if self.path.startswith("/token"):
            return self._token()
        if not self._allowed():
            return None
        for pattern, answer in (
            (NAME + r"/referrers/(?P<digest>[^/]+)", self._referrers),
            (NAME + r"/manifests/(?P<reference>[^/]+)", self._manifest),
            (NAME + r"/blobs/uploads/(?P<session>[^/]*)", self._upload),
            (NAME + r"/blobs/(?P<digest>[^/]+)", self._blob),
        ):
            if match := re.fullmatch(pattern, urlsplit(self.path).path):
                return answer(**match.groupdict())
        return self.answer(200 if self.path == "/v2/" else 404, b"{}")

    # --- answers -------------------------------------------------------------------------------------------------

    def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        """An answer with a body, whole; its headers' names have `_` for `-`."""
        self.drain()
        self.send_response(status)
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        for name, value in ({"Content-Length": str(len(body)), "Content-Type": "application/json"} | given).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def drain(self) -> bytes:
        """The request's body."""
        if not hasattr(self, "_body"):
            self._body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = self._body
        return body

    def handle_one_request(self) -> None:
        if hasattr(self, "_body"):
            del self._body
        super().handle_one_request()

    def _allowed(self) -> bool:
        registry, given = self.registry, self.headers.get("Authorization", "")
        basic = "Basic " + base64.b64encode(f"{registry.user}:{registry.password}".encode()).decode()
        if registry.tokens:
            if given.startswith("Bearer ") and given[7:] in registry.valid_tokens:
                return True
            asked = f'Bearer realm="http://{registry.host}/token",service="fake",scope="repository:x:pull"'
        elif not registry.user or given == basic:
            return True
        else:
            asked = 'Basic realm="fake"'
        self.answer(401, b'{"errors":[{"code":"UNAUTHORIZED","message":"log in"}]}', WWW_Authenticate=asked)
        return False

    def _token(self) -> None:
        registry = self.registry
        basic = "Basic " + base64.b64encode(f"{registry.user}:{registry.password}".encode()).decode()
        form = parse_qs(self.drain().decode())
        refreshed = form.get("refresh_token") == [registry.password] and not registry.user
        if not refreshed and registry.user and self.headers.get("Authorization") != basic:
            return self.answer(401, b"{}")
        token = f"token-{registry.count('GET', '/token')}-{registry.count('POST', '/token')}"
        registry.valid_tokens.add(token)
        return self.answer(200, json.dumps({"token": token, "expires_in": 60}).encode())

    def _manifest(self, name: str, reference: str) -> None:
        registry = self.registry
        if self.command == "PUT":
            return self._put_manifest(name, reference)
        found = registry.manifests.get((name, reference))
        if found is None:
            return self.answer(404, b'{"errors":[{"code":"MANIFEST_UNKNOWN"}]}')
        data, media_type = found
        headers = {"Content_Type": media_type, "Docker_Content_Digest": digest_of(data)}
        return self.answer(200, data, **headers, **({"ETag": f'"{digest_of(data)}"'} if registry.etags else {}))

    def _put_manifest(self, name: str, reference: str) -> None:
        registry, data = self.registry, self.drain()
        document = json.loads(data)
        named = [*([document["config"]] if "config" in document else []), *document.get("layers", [])]
        if any((name, part["digest"]) not in registry.blobs for part in named):
            return self.answer(400, b'{"errors":[{"code":"MANIFEST_BLOB_UNKNOWN"}]}')
        if reference.startswith("sha256:") and reference != digest_of(data):
            return self.answer(400, b'{"errors":[{"code":"DIGEST_INVALID"}]}')
        with registry.lock:
            current = registry.manifests.get((name, reference))
            wanted = self.headers.get("If-Match")
            if registry.etags and wanted and (current is None or f'"{digest_of(current[0])}"' != wanted):
                return self.answer(412, b"{}")
            registry.put_manifest(name, reference, data, self.headers["Content-Type"])
        subject = (document.get("subject") or {}).get("digest")
        headers = {"OCI_Subject": subject} if registry.referrers_api and subject else {}
        return self.answer(201, b"", Docker_Content_Digest=digest_of(data), **headers)

    def _referrers(self, name: str, digest: str) -> None:
        if not self.registry.referrers_api:
            return self.answer(404, b"404 page not found")
        index = {"schemaVersion": 2, "mediaType": INDEX, "manifests": self.registry.referrers_of(name, digest)}
        return self.answer(200, json.dumps(index).encode(), Content_Type=INDEX)

    def _blob(self, name: str, digest: str) -> None:
        data = self.registry.blobs.get((name, digest))
        if data is None:
            return self.answer(404, b'{"errors":[{"code":"BLOB_UNKNOWN"}]}')
        match = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        if match is None:
            return self.answer(200, data, Content_Type="application/octet-stream")
        start = int(match[1])
        if start >= len(data):
            return self.answer(416)
        given = f"bytes {start}-{len(data) - 1}/{len(data)}"
        return self.answer(206, data[start:], Content_Type="application/octet-stream", Content_Range=given)

    def _upload(self, name: str, session: str) -> None:
        registry, query = self.registry, parse_qs(urlsplit(self.path).query)
        if self.command == "POST":
            mount, source = query.get("mount", [""])[0], query.get("from", [""])[0]
            if (source, mount) in registry.blobs:
                registry.blobs[name, mount] = registry.blobs[source, mount]
                return self.answer(201, b"", Location=f"/v2/{name}/blobs/{mount}")
            return self.answer(202, b"", Location=f"/v2/{name}/blobs/uploads/{uuid.uuid4()}?state=x")
        data, digest = registry.unfinished.pop(session, b"") + self.drain(), query.get("digest", [""])[0]
        if self.command == "PATCH":  # cosign's way: all of it here, and an empty PUT afterwards
            registry.unfinished[session] = data
            return self.answer(202, b"", Location=self.path, Range=f"0-{len(data) - 1}")
        if digest_of(data) != digest:
            return self.answer(400, b'{"errors":[{"code":"DIGEST_INVALID"}]}')
        registry.blobs[name, digest] = data
        return self.answer(201, b"", Location=f"/v2/{name}/blobs/{digest}")


# --- tricks ------------------------------------------------------------------------------------------------------


def status(code: int, body: bytes = b"{}", **headers: str) -> Trick:
    """This status in place of the answer."""

    def trick(handler: Handler) -> bool:
        handler.answer(code, body, **headers)
        return True

    return trick


def hang_up(handler: Handler) -> bool:
    """No answer at all."""
    handler.close_connection = True
    with contextlib.suppress(OSError):
        handler.connection.shutdown(socket.SHUT_RDWR)
    return True


def cut_after(size: int, data: Callable[[], bytes]) -> Trick:
    """The first `size` bytes of the content that was asked for, then no more."""

    def trick(handler: Handler) -> bool:
        start = int((re.fullmatch(r"bytes=(\d+)-", handler.headers.get("Range", "")) or ["", "0"])[1])
        rest = data()[start:]
        handler.send_response(206 if start else 200)
        handler.send_header("Content-Length", str(len(rest)))
        if start:
            handler.send_header("Content-Range", f"bytes {start}-{len(data()) - 1}/{len(data())}")
        handler.end_headers()
        handler.wfile.write(rest[:size])
        handler.wfile.flush()
        return hang_up(handler)

    return trick
