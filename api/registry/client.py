"""One repository of a registry, by the OCI distribution protocol: manifests as bytes, blobs as streams.

Nothing is believed: what has a digest is held against it, and what was sent is asked for again. Manifests are never
decoded and encoded again, so that a digest stays what it is.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, BinaryIO, NamedTuple
from urllib.parse import quote, urlsplit

from precast.ir.bundle import oci
from precast.ir.errors import BundleError, RegistryError, shown
from precast.registry import credentials
from precast.registry.credentials import Credentials
from precast.registry.reference import Reference
from precast.registry.tokens import Authorization
from precast.registry.transport import (
    BLOCK_BYTES,
    Response,
    Temporary,
    Transport,
    http_errors,
    length_of,
    place,
    reason_of,
)

MAX_MANIFEST_BYTES = 4 << 20
"""A manifest or index: what registries take at most."""
MIN_BYTES_PER_SECOND, SLOW_SECONDS = 1024, 60.0
"""A download below this rate, measured from its start once it has taken so long, is given up and tried again."""

MANIFEST_TYPES = (oci.IMAGE_TYPE, oci.INDEX_TYPE)
_ACCEPTED = ", ".join(MANIFEST_TYPES)
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")

Count = Callable[[int], object]
"""Called with the bytes of each piece that was sent or has arrived; negative where a piece counts no more."""


class Found(NamedTuple):
    """A manifest as a registry gives it: its bytes, their digest, the media type and the ETag of the answer."""

    data: bytes
    digest: str
    media_type: str
    etag: str | None


class Repository:
    """Requests to one repository. Threads may share it.

    `writes` asks for the right to push; `mounted` are repositories of the same registry that blobs are taken from.
    """

    def __init__(
        self,
        reference: Reference,
        *,
        writes: bool = False,
        mounted: Sequence[str] = (),
        transport: Transport | None = None,
        plain_http: bool = False,
        find: Callable[[str, str], Credentials | None] = credentials.find,
    ) -> None:
        self.reference = reference
        self.transport = transport or Transport(reference.server, plain_http=plain_http)
        rights = "pull,push" if writes else "pull"
        scopes = [f"repository:{reference.name}:{rights}", *(f"repository:{name}:pull" for name in mounted)]
        self._authorization = Authorization(self.transport, reference, scopes, find)
        self._base = f"/v2/{reference.name}"

    # --- manifests -----------------------------------------------------------------------------------------------

    def resolve(self, name: str) -> str:
        """The digest of the manifest of a tag, by one HEAD (a GET where the registry's HEAD gives none).

        Raises RegistryError: `registry-missing` and others.
        """
        response = self._request("HEAD", f"/manifests/{name}", (200,), headers={"Accept": _ACCEPTED})
        digest = response.headers.get("Docker-Content-Digest", "")
        self.transport.discard(response)
        return digest if _DIGEST.fullmatch(digest) else self.manifest(name).digest

    def manifest(self, name: str, limit: int = MAX_MANIFEST_BYTES) -> Found:
        """The manifest of a tag or digest, of at most `limit` bytes; asked for by digest, it has that digest.

        Raises RegistryError (`registry-missing`, `registry-answer`) and BundleError (`blob-digest`).
        """
        url = f"/manifests/{name}"
        response = self._request("GET", url, (200,), headers={"Accept": _ACCEPTED})
        data = self.transport.read(response, limit)
        media_type = response.headers.get("Content-Type", "").partition(";")[0].strip()
        if media_type not in MANIFEST_TYPES:
            message = f"expected a manifest, found {shown(repr(media_type))}"
            raise RegistryError("registry-answer", message, where=self._place(url))
        digest = oci.digest_of(data)
        said = response.headers.get("Docker-Content-Digest") or digest
        for expected in (name if _DIGEST.fullmatch(name) else digest, said):
            if digest != expected:
                raise self._wrong_digest(url, shown(expected), digest)
        return Found(data, digest, media_type, response.headers.get("ETag"))

    def manifest_or_none(self, name: str) -> Found | None:
        """The manifest, or None where there is none."""
        try:
            return self.manifest(name)
        except RegistryError as error:
            if error.code == "registry-missing":
                return None
            raise

    def put_manifest(self, name: str, data: bytes, media_type: str, etag: str | None = None) -> Mapping[str, str]:
        """Store a manifest under a tag or its digest, these bytes exactly; the headers of the answer.

        With `etag` only over what has that ETag: raises RegistryError (`registry-changed`) otherwise, of registries
        that look at it.
        """
        headers = {"Content-Type": media_type, **({"If-Match": etag} if etag else {})}
        response = self._request("PUT", f"/manifests/{name}", (201, 200, 202, 412), headers=headers, body=data)
        self.transport.discard(response)
        if response.status == 412:
            message = "somebody else changed it meanwhile"
            raise RegistryError("registry-changed", message, where=self._place(f"/manifests/{name}"))
        return response.headers

    def referrers(self, digest: str, page: str | None = None) -> tuple[bytes | None, str | None]:
        """A page of the index of what is attached to a manifest, and the next page's address.

        None in place of the index where the registry has no such list. Raises RegistryError.
        """
        url = page or f"{self._base}/referrers/{digest}"
        response = self._request("GET", url, (200, 400, 403, 404, 405, 406, 501), headers={"Accept": oci.INDEX_TYPE})
        if response.status != 200 or "json" not in response.headers.get("Content-Type", ""):
            response.close()
            return None, None
        link = re.search(r'<([^>]*)>\s*;\s*rel="?next"?', response.headers.get("Link", "")[:8192])
        data = self.transport.read(response, MAX_MANIFEST_BYTES)
        following = None if link is None else self.transport.target(url, link[1])
        if following is not None and not self.transport.is_own(following):
            raise RegistryError("registry-answer", "the list goes on at another host", where=self._place(url))
        return data, following

    # --- blobs ---------------------------------------------------------------------------------------------------

    def has_blob(self, digest: str, size: int) -> bool:
        """Whether the repository has the blob.

        Raises RegistryError (`registry-answer`) where it has one of another size under the digest.
        """
        url = f"/blobs/{digest}"
        response = self._request("HEAD", url, (200, 404))
        self.transport.discard(response)
        said = length_of(response)
        if response.status == 200 and said is not None and said != size:
            message = f"expected {size} bytes under this digest, the registry says {said}"
            raise RegistryError("registry-answer", message, where=self._place(url))
        return bool(response.status == 200)

    def upload(self, digest: str, size: int, content: Callable[[], Any], mounted: Sequence[str] = ()) -> str:
        """Store a blob by one POST and one PUT; or mount it from one of these repositories, of the same registry.

        `content` opens it anew for each try: a binary file of `size` bytes, or an `Upload`. Returns "mounted" or
        "uploaded". Raises RegistryError, and BundleError (`blob-digest`) where the content is not what its digest says.
        """
        for name in mounted:
            query = f"?mount={digest}&from={quote(name, safe='')}"
            response = self._request("POST", f"/blobs/uploads/{query}", (201, 202, 400, 403, 404))
            self.transport.discard(response)
            if response.status == 201:
                return "mounted"
        self.transport.retrying(lambda: self._upload_once(digest, size, content))
        return "uploaded"

    def _upload_once(self, digest: str, size: int, content: Callable[[], Any]) -> None:
        response = self._request("POST", "/blobs/uploads/", (202,), headers={"Content-Length": "0"})
        self.transport.discard(response)
        posted = self._url("/blobs/uploads/")
        location = self.transport.target(posted, response.headers.get("Location", ""))
        url = location + ("&" if urlsplit(location).query else "?") + f"digest={quote(digest, safe='')}"
        headers = {"Content-Type": "application/octet-stream", "Content-Length": str(size)}
        with content() as stream:
            body = stream if size else b""
            # The body can't be sent twice: this is one try.
            sent = self._authorization.header()
            response = self.transport.send("PUT", url, headers=headers, authorization=sent, body=body)
            if isinstance(stream, Upload) and stream.is_wrong():
                response.close()
                raise self._wrong_digest(f"/blobs/{digest}", digest, stream.digest())
        if response.status == 401:  # the token ran out on the way
            challenges = _challenges(response)
            response.close()
            self._authorization.renew(challenges, sent)
            raise Temporary(RegistryError("registry-denied", "the registry refuses the upload", where=place(url)))
        if response.status not in (201, 200, 204):
            raise self.transport.failure(response, url)
        self.transport.discard(response)

    def fetch(self, digest: str, size: int, file: BinaryIO, count: Count = lambda size: None) -> None:
        """Write a blob into `file`, which is open for reading and writing; what it holds already is gone on from.

        Raises RegistryError, and BundleError (`blob-size`, `blob-digest`) where the registry gives something else.
        """
        download = _Download(self, digest, size, file, count)
        self.transport.retrying(download.attempt, lambda: download.length)

    # --- requests ------------------------------------------------------------------------------------------------

    def _request(
        self,
        method: str,
        path: str,
        expected: tuple[int, ...],
        *,
        headers: Mapping[str, str] | None = None,
        body: bytes | None = None,
    ) -> Response:
        """An answer of one of the statuses that are expected, after as many tries as there are."""
        response = self.transport.retrying(lambda: self._authorized(method, self._url(path), headers, body))
        if response.status not in expected:
            raise self.transport.failure(response, self._url(path))
        return response

    def _authorized(self, method: str, url: str, headers: Mapping[str, str] | None, body: bytes | None) -> Response:
        for last in (False, False, True):  # a token may run out while it is on its way
            sent = self._authorization.header()
            response = self.transport.send(method, url, headers=headers, authorization=sent, body=body)
            if response.status != 401 or last:
                break
            challenges = _challenges(response)
            response.close()
            self._authorization.renew(challenges, sent)
        return response

    def _url(self, path: str) -> str:
        """The address of what `path` names in this repository; what is whole already stays."""
        whole = path.startswith(("http://", "https://", self._base))
        return path if whole else self._base + path

    def _place(self, path: str) -> str:
        return place(self.transport.origin + self._url(path)) if "://" not in path else place(path)

    def _wrong_digest(self, path: str, expected: str, found: str) -> BundleError:
        fix = "the content was damaged or replaced: ask whoever pushed it, and compare the digest"
        message = f"expected {expected}, found {found}"
        return BundleError("blob-digest", message, where=self._place(path), fix=fix)


class Upload:
    """A blob on its way to a registry, as a file to read from: counted, and held against its digest as it goes."""

    def __init__(self, file: BinaryIO, digest: str, size: int, transport: Transport, count: Count) -> None:
        self._file = file
        self._expected = digest
        self._left = size
        self._hash = hashlib.sha256()
        self._transport = transport
        self._count = count
        self._sent = 0

    def __enter__(self) -> Upload:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is not None:
            self._count(-self._sent)
        self._file.close()

    def read(self, size: int = -1) -> bytes:
        """The next piece; of a file that has become longer no more than was said.

        Raises BundleError (`blob-size`) for one that has become shorter, and Stopped.
        """
        self._transport.check_stopped()
        data = self._file.read(min(self._left, size if size > 0 else BLOCK_BYTES))
        if self._left and not data:
            message = f"expected {self._left + self._sent} bytes, found {self._sent}"
            raise BundleError("blob-size", message, where=self._expected)
        self._left -= len(data)
        self._hash.update(data)
        self._sent += len(data)
        self._count(len(data))
        return data

    def digest(self) -> str:
        """Of what was sent so far."""
        return f"{oci.ALGORITHM}:{self._hash.hexdigest()}"

    def is_wrong(self) -> bool:
        """Whether all was sent, and was something else than the digest says."""
        return self._left == 0 and self.digest() != self._expected


class _Download:
    """A blob on its way into a file, over as many connections as it takes."""

    def __init__(self, repository: Repository, digest: str, size: int, file: BinaryIO, count: Count) -> None:
        self._repository = repository
        self._transport = repository.transport
        self._digest = digest
        self._size = size
        self._file = file
        self._count = count
        self._url = repository._url(f"/blobs/{digest}")
        self._hash = hashlib.sha256()
        self.length = 0
        self._resume()
        self._had_some = self.length > 0

    def attempt(self) -> None:
        """Ask for what is missing, write it, and check the whole."""
        if self.length < self._size or self._size == 0:
            self._receive()
        found = f"{oci.ALGORITHM}:{self._hash.hexdigest()}"
        if found == self._digest:
            return
        self._restart()
        if self._had_some:  # what an earlier try left may have been at fault
            self._had_some = False
            return self.attempt()
        raise self._repository._wrong_digest(self._url, self._digest, found)

    def _resume(self) -> None:
        """Take what the file holds for the beginning, unless it is too long to be."""
        self._file.seek(0)
        if os.fstat(self._file.fileno()).st_size > self._size:
            self._file.truncate(0)
        while data := self._file.read(BLOCK_BYTES):
            self._transport.check_stopped()
            self._hash.update(data)
            self.length += len(data)
        self._count(self.length)

    def _restart(self) -> None:
        self._count(-self.length)
        self._file.seek(0)
        self._file.truncate(0)
        self._hash, self.length = hashlib.sha256(), 0

    def _receive(self) -> None:
        headers = {"Range": f"bytes={self.length}-"} if self.length else {}
        response = self._repository._authorized("GET", self._url, headers, None)
        if response.status == 416:
            response.close()
            self._restart()
            response = self._repository._authorized("GET", self._url, {}, None)
        if response.status not in (200, 206):
            raise self._transport.failure(response, self._url)
        if self.length and not self._goes_on(response):
            self._restart()
            if response.status == 206:
                response.close()
                error = RegistryError("registry-answer", "another range than was asked for", where=place(self._url))
                raise Temporary(error)
        try:
            self._write(response)
        except BaseException:
            response.close()
            raise
        response.release_conn()

    def _goes_on(self, response: Response) -> bool:
        given = response.headers.get("Content-Range", "")
        return bool(response.status == 206 and given.startswith(f"bytes {self.length}-"))

    def _write(self, response: Response) -> None:
        started, before = self._transport.clock(), self.length
        while data := self._piece(response):
            if self.length + len(data) > self._size:
                self._restart()
                raise self._wrong_size("more")
            self._file.write(data)
            self._hash.update(data)
            self.length += len(data)
            self._count(len(data))
            seconds = self._transport.clock() - started
            if seconds > SLOW_SECONDS and (self.length - before) / seconds < MIN_BYTES_PER_SECOND:
                raise Temporary(self._transport.broken(self._url, "the content comes too slowly"))
        if self.length < self._size:
            if length_of(response) == self.length - before:
                found = self.length
                self._restart()
                raise self._wrong_size(str(found))
            raise Temporary(self._transport.broken(self._url, "the content broke off"))

    def _piece(self, response: Response) -> bytes:
        """The next bytes; an error of the connection alone is worth another try, one of the disk is not."""
        self._transport.check_stopped()
        try:
            return bytes(response.read(BLOCK_BYTES, decode_content=False))
        except http_errors() as error:
            raise Temporary(self._transport.broken(self._url, reason_of(error))) from None

    def _wrong_size(self, found: str) -> BundleError:
        message = f"expected {self._size} bytes, found {found}"
        fix = "what is at the registry is not what its manifest says: ask whoever pushed it"
        return BundleError("blob-size", message, where=self._repository._place(self._url), fix=fix)


def _challenges(response: Response) -> list[str]:
    return list(response.headers.getlist("WWW-Authenticate"))
