"""Registries that lie, stall, ask for too much or lead elsewhere: an error with a code, and no secret goes astray."""

from __future__ import annotations

import base64
import gzip
import itertools
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_registry import FakeRegistry, hang_up, status

from precast.ir import limits
from precast.ir.artifact import Bundle
from precast.ir.bundle import oci
from precast.ir.errors import BundleError, PrecastError, RegistryError
from precast.registry import tokens
from precast.registry.client import MAX_MANIFEST_BYTES, Repository
from precast.registry.credentials import Credentials
from precast.registry.pull import pull
from precast.registry.push import push
from precast.registry.reference import Reference
from precast.registry.store import Store
from precast.registry.transport import MAX_RETRY_AFTER, TRIES, WAITS, Temporary, Transport

Client = Callable[..., Repository]
JSON = {"Content_Type": oci.IMAGE_TYPE}
PASSWORD = "hunter2-secret"


@pytest.fixture
def reference(registry: FakeRegistry, tiny: Bundle) -> str:
    """The tiny bundle, pushed."""
    push(tiny.path, f"{registry.host}/org/tiny:v1")
    registry.log.clear()
    return f"{registry.host}/org/tiny:v1"


def refused(reference: str, client: Client, store: Store) -> PrecastError:
    """The error of a pull; nothing that opens is left of it."""
    with pytest.raises(PrecastError) as caught:
        pull(reference, store=store, repository=client(writes=False))
    assert store.listing() == []
    assert store.verify().problems == ()
    return caught.value


# --- tries -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [408, 429, 500, 502, 503, 504])
def test_temporary_answers_are_tried_again(
    code: int, reference: str, registry: FakeRegistry, client: Client, store: Store, waits: list[float]
) -> None:
    registry.misbehave("HEAD", "manifests", status(code), times=TRIES - 1)

    pull(reference, store=store, repository=client())

    assert len(waits) == TRIES - 1
    assert all(bound / 2 <= wait <= bound for wait, bound in zip(waits, WAITS, strict=True))


@pytest.mark.parametrize(
    ("code", "expected"), [(429, "registry-busy"), (503, "registry-busy"), (404, "registry-missing")]
)
def test_tries_end(
    code: int, expected: str, reference: str, registry: FakeRegistry, client: Client, store: Store, waits: list[float]
) -> None:
    registry.misbehave("HEAD", "manifests", status(code))

    error = refused(reference, client, store)

    assert error.code == expected
    assert registry.count("HEAD") == (1 if code == 404 else TRIES)
    assert sum(waits) <= sum(WAITS)


def test_retry_after_is_honoured(
    reference: str, registry: FakeRegistry, client: Client, store: Store, waits: list[float]
) -> None:
    registry.misbehave("GET", "manifests", status(429, Retry_After="7"), times=1)
    from email.utils import formatdate

    def later(handler: Any) -> bool:
        return status(429, Retry_After=formatdate(time.time() + 30, usegmt=True))(handler)

    registry.misbehave("GET", "blobs", later, times=1)

    pull(reference, store=store, repository=client())

    assert waits[0] == 7.0
    assert 20 <= waits[1] <= 30


@pytest.mark.parametrize("said", ["\xb2", "Mon, 01 Jan 99999 00:00:00 GMT", "-7", "7.5", ""])
def test_retry_after_that_says_nothing_is_passed_over(
    said: str, reference: str, registry: FakeRegistry, client: Client, store: Store, waits: list[float]
) -> None:
    registry.misbehave("GET", "manifests", status(503, Retry_After=said), times=1)

    pull(reference, store=store, repository=client())

    assert len(waits) == 1
    assert waits[0] <= WAITS[0]


def test_length_that_is_no_number(reference: str, registry: FakeRegistry, client: Client, store: Store) -> None:
    def squared(handler: Any) -> bool:
        handler.send_response(200)
        handler.send_header("Content-Type", oci.IMAGE_TYPE)
        handler.send_header("Content-Length", "\xb2")
        handler.send_header("Connection", "close")
        handler.end_headers()
        handler.wfile.write(b"{}")
        handler.close_connection = True
        return True

    registry.misbehave("GET", "manifests/sha256:", squared)

    assert refused(reference, client, store).code == "blob-digest"


def test_retry_after_an_hour_is_an_error_at_once(
    reference: str, registry: FakeRegistry, client: Client, store: Store, waits: list[float]
) -> None:
    registry.misbehave("HEAD", "manifests", status(429, Retry_After=str(int(MAX_RETRY_AFTER) + 3540)))

    error = refused(reference, client, store)

    assert error.code == "registry-busy"
    assert "3600 seconds" in error.message
    assert waits == []


def test_nothing_listens(client: Client, store: Store, waits: list[float]) -> None:
    with FakeRegistry() as gone:
        host = gone.host
    transport = Transport(host, pause=waits.append)
    wanted = Reference.parse(f"{host}/org/tiny:v1")

    with pytest.raises(RegistryError, match="refused") as caught:
        pull(wanted, store=store, repository=Repository(wanted, transport=transport))

    assert caught.value.code == "registry-unreachable"
    assert len(waits) == TRIES - 1


def test_hang_ups_end(reference: str, registry: FakeRegistry, client: Client, store: Store) -> None:
    registry.misbehave("HEAD", "manifests", hang_up)

    assert refused(reference, client, store).code == "registry-unreachable"


def test_body_that_trickles_is_given_up(reference: str, registry: FakeRegistry, tiny: Bundle, store: Store) -> None:
    """By the clock that the transport is given: each look at it is 40 seconds later."""
    now = [0.0]

    def clock() -> float:
        now[0] += 40.0
        return now[0]

    def trickle(handler: Any) -> bool:
        handler.send_response(200)
        handler.send_header("Content-Length", "1000")
        handler.end_headers()
        for _ in range(1000):
            handler.wfile.write(b"x")
            handler.wfile.flush()
        return True

    registry.misbehave("GET", "blobs", trickle)
    transport = Transport(registry.host, pause=lambda seconds: None, clock=clock)
    source = Repository(Reference.parse(reference), transport=transport)
    part = oci.Descriptor("x", "sha256:" + "0" * 64, 100_000)

    with store.writing(), pytest.raises(PrecastError), (store.path / "file").open("w+b") as file:
        source.fetch(part.digest, part.size, file)

    assert registry.count("GET", "blobs") <= TRIES + 2


# --- lies ------------------------------------------------------------------------------------------------------


def test_manifest_with_another_digest(reference: str, registry: FakeRegistry, client: Client, store: Store) -> None:
    registry.misbehave("GET", "manifests/sha256:", status(200, b'{"schemaVersion":2}', **JSON))

    error = refused(reference, client, store)

    assert (error.code, error.exit_code) == ("blob-digest", 3)


def test_manifest_whose_header_lies(
    reference: str, registry: FakeRegistry, client: Client, store: Store, tiny: Bundle
) -> None:
    data = (tiny.path / oci.blob_path(tiny.digest)).read_bytes()
    lie = status(200, data, **JSON, Docker_Content_Digest="sha256:" + "0" * 64)
    registry.misbehave("GET", "manifests/sha256:", lie)

    assert refused(reference, client, store).code == "blob-digest"


@pytest.mark.parametrize("says_so", [True, False])
def test_manifest_of_100_megabytes_is_not_read(
    says_so: bool, reference: str, registry: FakeRegistry, client: Client, store: Store
) -> None:
    sent = [0]

    def flood(handler: Any) -> bool:
        handler.send_response(200)
        handler.send_header("Content-Type", oci.IMAGE_TYPE)
        handler.send_header(*(("Content-Length", "100000000") if says_so else ("Connection", "close")))
        handler.end_headers()
        handler.wfile.flush()
        handler.close_connection = True
        try:
            for _ in range(1600):
                sent[0] += handler.connection.send(bytes(62_500))
        except OSError:
            pass
        return True

    registry.misbehave("GET", "manifests/sha256:", flood)

    error = refused(reference, client, store)

    assert error.code == "registry-answer"
    assert sent[0] < 50_000_000


def test_page_of_html(reference: str, registry: FakeRegistry, client: Client, store: Store) -> None:
    registry.misbehave("GET", "manifests/sha256:", status(200, b"<html>Log in</html>", Content_Type="text/html"))

    assert refused(reference, client, store).code == "registry-answer"


def test_page_of_html_as_an_error(reference: str, registry: FakeRegistry, client: Client, store: Store) -> None:
    registry.misbehave("GET", "manifests/sha256:", status(418, b"<html>tea</html>", Content_Type="text/html"))

    error = refused(reference, client, store)

    assert error.code == "registry-refused"
    assert "page of HTML" in str(error)


def test_blob_with_another_content(
    reference: str, registry: FakeRegistry, client: Client, store: Store, tiny: Bundle
) -> None:
    layer = tiny.layers[0]
    registry.blobs["org/tiny", layer.digest] = b"x" * layer.size

    error = refused(reference, client, store)

    assert (error.code, error.exit_code) == ("blob-digest", 3)
    assert layer.digest in str(error)


@pytest.mark.parametrize("change", [b"", b"x", b"x" * 100_000])
def test_blob_of_another_size(
    change: bytes, reference: str, registry: FakeRegistry, client: Client, store: Store, tiny: Bundle
) -> None:
    registry.blobs["org/tiny", tiny.layers[0].digest] = change

    assert refused(reference, client, store).code == "blob-size"


def test_blob_that_is_packed_on_the_way(
    reference: str, registry: FakeRegistry, client: Client, store: Store, tiny: Bundle
) -> None:
    """Nothing was asked to be packed; what comes is taken as it is, and is something else."""
    layer = tiny.layers[1]
    registry.misbehave("GET", layer.digest, status(200, gzip.compress(tiny.content(layer)), Content_Encoding="gzip"))

    assert refused(reference, client, store).code in ("blob-size", "blob-digest")


def test_blob_that_is_not_there(
    reference: str, registry: FakeRegistry, client: Client, store: Store, tiny: Bundle
) -> None:
    del registry.blobs["org/tiny", tiny.layers[0].digest]

    assert refused(reference, client, store).code == "registry-missing"


def test_blob_of_another_size_at_the_push(registry: FakeRegistry, client: Client, tiny: Bundle) -> None:
    registry.misbehave("HEAD", "blobs", status(200, Content_Length="1"))

    with pytest.raises(RegistryError) as caught:
        push(tiny.path, f"{registry.host}/org/tiny:v1", repository=client())

    assert caught.value.code == "registry-answer"


def forged(registry: FakeRegistry, tiny: Bundle, change: Callable[[dict[str, Any]], object]) -> str:
    """The tag of the tiny bundle's image manifest, changed."""
    document = json.loads((tiny.path / oci.blob_path(tiny.digest)).read_bytes())
    change(document)
    data = json.dumps(document, sort_keys=True, separators=(",", ":")).encode()
    registry.put_manifest("org/tiny", "forged", data, oci.IMAGE_TYPE)
    return f"{registry.host}/org/tiny:forged"


FORGED: list[tuple[str, Callable[[dict[str, Any]], object], str]] = [
    ("another artifact", lambda x: x.update(artifactType="application/x"), "artifact-type"),
    ("no artifact type", lambda x: x.pop("artifactType"), "json-invalid"),
    ("layers listed twice", lambda x: x["layers"].append(x["layers"][-1]), "image-invalid"),
    ("layer of an unknown type", lambda x: x["layers"][0].update(mediaType="application/x"), "media-type"),
    ("10 TB", lambda x: x["layers"][0].update(size=10 << 40), "limit-exceeded"),
    ("negative size", lambda x: x["layers"][0].update(size=-1), "blob-size"),
    ("digest with a path", lambda x: x["layers"][0].update(digest="sha256:../../../etc/passwd"), "digest-invalid"),
    ("too many layers", lambda x: x["layers"].extend(x["layers"] * 200), "limit-exceeded"),
    ("urls", lambda x: x["layers"][0].update(urls=["http://169.254.169.254/"]), "json-invalid"),
    ("a subject", lambda x: x.update(schemaVersion=1), "image-invalid"),
]


@pytest.mark.parametrize(("change", "code"), [row[1:] for row in FORGED], ids=[row[0] for row in FORGED])
def test_forged_manifest_is_refused_before_a_blob_is_fetched(
    change: Callable[[dict[str, Any]], object], code: str, reference: str, registry: FakeRegistry, client: Client,
    store: Store, tiny: Bundle,
) -> None:  # fmt: skip
    error = refused(forged(registry, tiny, change), lambda **options: client("org/tiny:forged", **options), store)

    assert error.code == code
    assert registry.count("GET", "blobs") == 0


def test_index_of_images(reference: str, registry: FakeRegistry, client: Client, store: Store) -> None:
    registry.put_manifest("org/tiny", "v1", b'{"manifests":[],"schemaVersion":2}', oci.INDEX_TYPE)

    assert refused(reference, client, store).code == "artifact-type"


def test_error_text_of_a_registry_forges_no_output(
    reference: str, registry: FakeRegistry, client: Client, store: Store
) -> None:
    body = b'{"errors":[{"code":"X","message":"\x1b[2J' + b"y" * 9000 + b'"}]}'
    registry.misbehave("HEAD", "manifests", status(200))
    registry.misbehave("GET", "manifests", status(400, body))

    error = refused(reference, client, store)

    assert str(error).isprintable() or "\x1b" not in str(error)
    assert len(str(error)) < 2000


# --- what is attached ------------------------------------------------------------------------------------------


def attach_there(
    registry: FakeRegistry, tiny: Bundle, change: Callable[[dict[str, Any]], object], content: bytes = b"{}"
) -> str:
    """Attach a manifest at the registry, changed; its digest."""
    subject = {"mediaType": oci.IMAGE_TYPE, "digest": tiny.digest, "size": tiny.descriptor.size}
    document: dict[str, Any] = {
        "schemaVersion": 2, "mediaType": oci.IMAGE_TYPE, "artifactType": "application/x", "subject": subject,
        "config": {"mediaType": oci.EMPTY_TYPE, "digest": oci.digest_of(b"{}"), "size": 2}, "layers": [],
    }  # fmt: skip
    change(document)
    data = json.dumps(document).encode()
    digest = registry.put_manifest("org/tiny", oci.digest_of(data), data, oci.IMAGE_TYPE)
    tag = "sha256-" + tiny.digest[7:]
    index = json.loads(registry.manifests["org/tiny", tag][0])
    index["manifests"].append({"mediaType": oci.IMAGE_TYPE, "digest": digest, "size": len(data)})
    registry.put_manifest("org/tiny", tag, json.dumps(index).encode(), oci.INDEX_TYPE)
    return digest


def big(document: dict[str, Any]) -> None:
    document["layers"] = [{"mediaType": "x", "digest": "sha256:" + "0" * 64, "size": limits.MAX_ATTACHED_BYTES + 1}]


@pytest.mark.parametrize(
    "entry",
    [
        {"digest": "sha256:../../../../etc/passwd", "size": 2, "mediaType": oci.IMAGE_TYPE},
        {"digest": "sha256:" + "0" * 64, "size": -1, "mediaType": oci.IMAGE_TYPE},
        {"digest": "sha256:" + "0" * 64, "size": 10 << 40, "mediaType": oci.IMAGE_TYPE},
        {"digest": "sha256:" + "0" * 64, "size": 2, "mediaType": "text/html"},
    ],
    ids=["a path", "a negative size", "10 TB", "another type"],
)
def test_list_that_points_outside_is_asked_for_nothing(
    entry: dict[str, Any], reference: str, registry: FakeRegistry, store: Store, tiny: Bundle
) -> None:
    tag = "sha256-" + tiny.digest[7:]
    index = json.loads(registry.manifests["org/tiny", tag][0])
    index["manifests"].append(entry)
    registry.put_manifest("org/tiny", tag, json.dumps(index).encode(), oci.INDEX_TYPE)

    found = pull(reference, store=store)

    assert len(found.attached) == 2
    assert len(found.notes) == 1
    assert registry.count("GET", entry["digest"]) == 0


PASSED_OVER: list[tuple[str, Callable[[dict[str, Any]], object]]] = [
    ("attached to another", lambda x: x["subject"].update(digest="sha256:" + "0" * 64)),
    ("attached to nothing", lambda x: x.pop("subject")),
    ("too large", big),
    ("an index", lambda x: x.update(mediaType=oci.INDEX_TYPE)),
    ("no JSON of a manifest", lambda x: x.pop("config")),
    ("a second provenance record", lambda x: x.update(artifactType=oci.PROVENANCE)),
]  # fmt: skip


@pytest.mark.parametrize("change", [row[1] for row in PASSED_OVER], ids=[row[0] for row in PASSED_OVER])
def test_attached_manifest_that_no_layout_holds_is_passed_over(
    change: Callable[[dict[str, Any]], object], reference: str, registry: FakeRegistry, store: Store, tiny: Bundle,
    tmp_path: Path,
) -> None:  # fmt: skip
    attach_there(registry, tiny, change)

    found = pull(reference, tmp_path / "out.bundle", store=store)

    assert len(found.attached) == 2
    assert len(found.notes) == 1
    assert "passed over sha256:" in found.notes[0]
    assert Bundle.open(tmp_path / "out.bundle").digest == tiny.digest


def test_attached_manifest_that_is_listed_and_gone_is_passed_over(
    reference: str, registry: FakeRegistry, store: Store, tiny: Bundle
) -> None:
    del registry.manifests["org/tiny", attach_there(registry, tiny, lambda x: None)]

    assert len(pull(reference, store=store).notes) == 1


def test_attached_by_another_tool_comes_along(
    reference: str, registry: FakeRegistry, store: Store, tiny: Bundle
) -> None:
    digest = attach_there(registry, tiny, lambda x: x.update(unknown=[1, 2]))

    assert pull(reference, store=store).attached[digest] == "application/x"


def test_list_that_points_to_another_host_is_refused(
    reference: str, registry: FakeRegistry, client: Client, store: Store
) -> None:
    page = status(200, b'{"manifests":[]}', Link='<http://example.com/v2/x>; rel="next"', Content_Type=oci.INDEX_TYPE)
    registry.misbehave("GET", "referrers", page)

    assert refused(reference, client, store).code == "registry-answer"


def test_list_without_end_ends(
    reference: str, registry: FakeRegistry, client: Client, store: Store, tiny: Bundle
) -> None:
    link = f'<{"/v2/org/tiny/referrers/" + tiny.digest}>; rel="next"'
    registry.misbehave("GET", "referrers", status(200, b'{"manifests":[]}', Link=link, Content_Type=oci.INDEX_TYPE))

    pull(reference, store=store, repository=client())

    assert registry.count("GET", "referrers") <= 20


# --- redirects -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "location",
    [
        "file:///etc/passwd", "ftp://example.com/x", "http://169.254.169.254/latest/meta-data/", "http://[fe80::1]/x",
        "http://0.0.0.0/x", "http://user:pw@localhost/x", "//", "", "http://[", "gopher://x", "http://2852039166/x",
        "http://[::ffff:169.254.169.254]/x", "http://[::ffff:a9fe:a9fe]/x",
    ],
)  # fmt: skip
def test_redirects_that_are_never_followed(
    location: str, reference: str, registry: FakeRegistry, client: Client, store: Store
) -> None:
    registry.misbehave("GET", "blobs", status(307, Location=location))

    assert refused(reference, client, store).code == "registry-answer"


@pytest.mark.parametrize("location", ["file:///etc/passwd", "http://169.254.169.254/latest/", "http://[fe80::1]/x", ""])
def test_uploads_that_are_led_elsewhere_send_nothing(
    location: str, registry: FakeRegistry, client: Client, tiny: Bundle
) -> None:
    registry.misbehave("POST", "blobs/uploads", status(202, Location=location))

    with pytest.raises(RegistryError) as caught:
        push(tiny.path, f"{registry.host}/org/tiny:v1", repository=client())

    assert caught.value.code == "registry-answer"
    assert registry.count("PUT") == 0


def test_loop_of_redirects_ends(reference: str, registry: FakeRegistry, client: Client, store: Store) -> None:
    registry.misbehave("GET", "blobs", status(302, Location="/v2/org/tiny/blobs/again"))

    error = refused(reference, client, store)

    assert error.code == "registry-answer"
    assert "redirects" in error.message


def test_downgrade_to_plain_http_is_refused() -> None:
    transport = Transport("ghcr.io")

    for location in ("http://ghcr.io/x", "http://example.com/x"):
        with pytest.raises(RegistryError, match="https"):
            transport.target("https://ghcr.io/v2/", location)
    assert transport.target("https://ghcr.io/v2/", "/v2/x?y") == "https://ghcr.io/v2/x?y"


def test_registry_elsewhere_may_not_lead_to_this_machine() -> None:
    with pytest.raises(RegistryError, match="this machine"):
        Transport("ghcr.io").target("https://ghcr.io/v2/", "https://127.0.0.1/x")


@pytest.mark.parametrize(
    ("host", "plain_http", "expected"),
    [
        ("ghcr.io", False, "https"), ("ghcr.io", True, "http"), ("localhost:5000", False, "http"),
        ("10.0.0.1:5000", False, "https"), ("localhost.example.com", False, "https"),
    ],
)  # fmt: skip
def test_plain_http_for_this_machine_alone(host: str, plain_http: bool, expected: str) -> None:
    assert Transport(host, plain_http=plain_http).origin == f"{expected}://{host}"


def test_credentials_don_t_follow_a_redirect(tiny: Bundle, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeRegistry(user="me", password=PASSWORD) as registry, FakeRegistry() as elsewhere:
        reference = logged_in(registry, monkeypatch, "org/tiny:v1")
        push(tiny.path, reference)
        elsewhere.blobs |= registry.blobs

        def lead(handler: Any) -> bool:
            handler.answer(307, b"", Location=f"http://localhost:{elsewhere.port}{handler.path}")
            return True

        registry.misbehave("GET", "blobs", lead)
        pull(reference, store=store)

        assert elsewhere.count("GET", "blobs") > 0
        assert not any("Authorization" in seen.headers for seen in elsewhere.log)
        assert any("Authorization" in seen.headers for seen in registry.log)


def test_upload_goes_where_it_is_led_without_credentials(tiny: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeRegistry(user="me", password=PASSWORD) as registry, FakeRegistry() as elsewhere:
        reference = logged_in(registry, monkeypatch, "org/tiny:v1")

        def lead(handler: Any) -> bool:
            if handler.headers.get("Authorization") is None:
                return False
            handler.answer(202, b"", Location=f"http://localhost:{elsewhere.port}{handler.path}session?a=b")
            return True

        registry.misbehave("POST", "uploads", lead)
        elsewhere.blobs = registry.blobs
        push(tiny.path, reference)

        assert elsewhere.count("PUT", "a=b&digest=") == 8
        assert not any("Authorization" in seen.headers for seen in elsewhere.log)


# --- who asks --------------------------------------------------------------------------------------------------


def logged_in(registry: FakeRegistry, monkeypatch: pytest.MonkeyPatch, name: str, password: str = PASSWORD) -> str:
    """A reference to the registry, whose credentials are in docker's config."""
    import os

    auth = base64.b64encode(f"me:{password}".encode()).decode()
    folder = Path(os.environ["HOME"]) / ".docker"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"auths": {registry.host: {"auth": auth}}}))
    return f"{registry.host}/{name}"


@pytest.mark.parametrize("by_token", [False, True])
def test_credentials(by_token: bool, tiny: Bundle, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeRegistry(user="me", password=PASSWORD, tokens=by_token) as registry:
        reference = logged_in(registry, monkeypatch, "org/tiny:v1")

        push(tiny.path, reference)
        pull(reference, store=store)

        assert registry.count("GET", "/token") == (2 if by_token else 0)
        if by_token:
            asked = next(seen for seen in registry.log if seen.path.startswith("/token"))
            assert "scope=repository%3Aorg%2Ftiny%3Apull%2Cpush" in asked.path
            assert "service=fake" in asked.path


def test_anonymous_token(tiny: Bundle, store: Store) -> None:
    with FakeRegistry(tokens=True) as registry:
        push(tiny.path, f"{registry.host}/org/tiny:v1")

        assert pull(f"{registry.host}/org/tiny:v1", store=store).digest == tiny.digest


def test_identity_token_is_exchanged(tiny: Bundle, store: Store, client: Client) -> None:
    with FakeRegistry(password=PASSWORD, tokens=True) as registry:
        wanted = Reference.parse(f"{registry.host}/org/tiny:v1")
        source = Repository(wanted, writes=True, find=lambda host, name: Credentials("", PASSWORD))

        push(tiny.path, wanted, repository=source)

        assert registry.count("POST", "/token") == 1
        assert PASSWORD not in "".join(seen.path for seen in registry.log)


def test_token_that_runs_out_is_renewed(tiny: Bundle, store: Store) -> None:
    with FakeRegistry(tokens=True) as registry:

        def expire(handler: Any) -> bool:
            registry.valid_tokens.clear()
            registry.valid_tokens.add(f"other-{registry.count('PUT')}")
            return False

        registry.misbehave("PUT", "blobs/uploads", expire, times=1)
        registry.misbehave("GET", "manifests", expire, times=1)

        push(tiny.path, f"{registry.host}/org/tiny:v1")

        assert registry.count("GET", "/token") >= 2


def test_upload_that_is_refused_after_another_renewed_the_token(tiny: Bundle) -> None:
    """By a service that gives the same token for as long as it is valid: who asks for no reason gets no other."""
    with FakeRegistry(tokens=True) as registry:
        both_sent, renewed_came = threading.Event(), threading.Event()
        number = itertools.count(1)

        def refuse(handler: Any) -> bool:
            which = next(number)
            if which == 1:  # waits for the second, so that both are sent with the first token
                both_sent.wait(30)
                registry.valid_tokens.clear()
            elif which == 2:  # is refused when the first has a new token already
                both_sent.set()
                renewed_came.wait(30)
            elif handler.headers["Authorization"] != "Bearer token-1":
                renewed_came.set()
            return False

        def same_token(handler: Any) -> bool:
            registry.valid_tokens = registry.valid_tokens or {f"token-{registry.count('GET', '/token')}"}
            handler.answer(200, json.dumps({"token": next(iter(registry.valid_tokens))}).encode())
            return True

        registry.misbehave("PUT", "blobs/uploads", refuse)
        registry.misbehave("GET", "/token", same_token)

        push(tiny.path, f"{registry.host}/org/tiny:v1")

        assert registry.count("GET", "/token") == 2


@pytest.mark.parametrize("by_token", [False, True])
def test_wrong_password(by_token: bool, tiny: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeRegistry(user="me", password="other", tokens=by_token) as registry:
        reference = logged_in(registry, monkeypatch, "org/tiny:v1")

        with pytest.raises(RegistryError) as caught:
            push(tiny.path, reference)

        assert caught.value.code == "registry-denied"
        assert PASSWORD not in str(caught.value)
        assert base64.b64encode(f"me:{PASSWORD}".encode()).decode() not in str(caught.value)
        assert len(registry.log) < 20


def test_loop_of_401_ends(registry: FakeRegistry, client: Client, tiny: Bundle, store: Store) -> None:
    """A service that gives tokens, and a registry that takes none of them."""
    with FakeRegistry(tokens=True) as service:
        bearer = f'Bearer realm="http://{service.host}/token",service="x"'
        registry.misbehave("HEAD", "manifests", status(401, WWW_Authenticate=bearer))

        error = refused(f"{registry.host}/org/tiny:v1", client, store)

        assert error.code == "registry-denied"
        assert registry.count("HEAD") <= 3


def test_loop_of_401_at_uploads_ends(tiny: Bundle, waits: list[float]) -> None:
    """Tokens that are good for all but what is sent."""
    with FakeRegistry(tokens=True) as registry:
        bearer = f'Bearer realm="http://{registry.host}/token",service="x"'
        registry.misbehave("PUT", "blobs/uploads", status(401, WWW_Authenticate=bearer))
        wanted = Reference.parse(f"{registry.host}/org/tiny:v1")
        transport = Transport(registry.host, pause=waits.append)

        with pytest.raises(RegistryError) as caught:
            push(tiny.path, wanted, repository=Repository(wanted, transport=transport, writes=True))

        assert caught.value.code == "registry-denied"
        assert registry.count("PUT") <= 4 * TRIES
        assert registry.manifests == {}


@pytest.mark.parametrize(
    "challenge",
    [
        "", "Negotiate", "Bearer", 'Bearer realm=""', 'Bearer realm="file:///etc/passwd"',
        'Bearer realm="http://169.254.169.254/token"', "Basic realm=x", 'Bearer realm="x', ",,,=",
    ],
)  # fmt: skip
def test_odd_challenges(challenge: str, registry: FakeRegistry, client: Client, store: Store) -> None:
    registry.misbehave("HEAD", "manifests", status(401, WWW_Authenticate=challenge))

    assert refused(f"{registry.host}/org/tiny:v1", client, store).code in (
        "registry-denied",
        "registry-answer",
        "registry-missing",
    )


@pytest.mark.parametrize(
    "body",
    [
        b"", b"<html>", b"{}", b'{"token":""}', b'{"token":"a\\nb"}', b'{"token":5}', b"[" * 10_000,
        b'{"token":"' + b"a" * (1 << 18) + b'"}',
    ],
)  # fmt: skip
def test_odd_tokens(body: bytes, registry: FakeRegistry, client: Client, store: Store) -> None:
    registry.misbehave(
        "HEAD", "manifests", status(401, WWW_Authenticate=f'Bearer realm="http://{registry.host}/token"')
    )
    registry.misbehave("GET", "/token", status(200, body))

    assert refused(f"{registry.host}/org/tiny:v1", client, store).code == "registry-answer"


def test_token_service_that_leads_elsewhere_gets_no_password_there(
    tiny: Bundle, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FakeRegistry(user="me", password=PASSWORD, tokens=True) as registry, FakeRegistry() as elsewhere:
        reference = logged_in(registry, monkeypatch, "org/tiny:v1")
        registry.misbehave("GET", "/token", status(302, Location=f"http://localhost:{elsewhere.port}/token"))

        with pytest.raises(RegistryError):
            push(tiny.path, reference)

        assert elsewhere.log == []


def test_challenges_are_read() -> None:
    scope = "repository:a:pull,push repository:b:pull"
    header = f'Basic realm="a, b=c", Bearer realm="https://x/token",service=y,scope="{scope}"'

    assert tokens.challenges_of(header) == {
        "basic": {"realm": "a, b=c"},
        "bearer": {"realm": "https://x/token", "service": "y", "scope": scope},
    }


def test_hostile_challenge_takes_no_time() -> None:
    started = time.process_time()

    tokens.challenges_of("Bearer " + "a=b" * 20_000 + '"' * 20_000)

    assert time.process_time() - started < 5.0


def test_query_is_no_part_of_a_message(reference: str, registry: FakeRegistry, client: Client, store: Store) -> None:
    signed = f"http://localhost:{registry.port}/bucket?X-Signature={PASSWORD}"
    registry.misbehave("GET", "/bucket", status(403))
    registry.misbehave("GET", "blobs", status(307, Location=signed))

    error = refused(reference, client, store)

    assert error.code == "registry-denied"
    assert PASSWORD not in str(error)


def test_manifest_at_the_limit_is_read(client: Client, registry: FakeRegistry) -> None:
    data = b" " * MAX_MANIFEST_BYTES
    registry.put_manifest("org/tiny", "v1", data, oci.INDEX_TYPE)
    registry.put_manifest("org/tiny", "v2", data + b" ", oci.INDEX_TYPE)

    assert client().manifest("v1").data == data
    with pytest.raises(RegistryError):
        client().manifest("v2")


def test_room_is_looked_for_first(
    reference: str, registry: FakeRegistry, client: Client, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    import shutil

    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 10, 0))  # type: ignore[attr-defined]

    assert refused(reference, client, store).code == "disk-full"
    assert registry.count("GET", "blobs") == 0


def test_temporary_says_what_it_is() -> None:
    error = RegistryError("registry-busy", "later")

    assert Temporary(error, 3.0).error is error


def test_bundle_that_is_refused_is_not_written(
    registry: FakeRegistry, tiny: Bundle, store: Store, tmp_path: Path
) -> None:
    """All digests fit, and the graph is none: the registry is honest, the bundle is not."""
    push(tiny.path, f"{registry.host}/org/tiny:v1")
    registry.blobs["org/tiny", oci.digest_of(b"no graph")] = b"no graph"

    def change(document: dict[str, Any]) -> None:
        document["layers"][0].update(digest=oci.digest_of(b"no graph"), size=8)

    with pytest.raises(BundleError):
        pull(forged(registry, tiny, change), tmp_path / "out.bundle", store=store)

    assert not (tmp_path / "out.bundle").exists()


def test_proxy_of_the_environment(
    registry: FakeRegistry, tiny: Bundle, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.setenv(name, f"http://{registry.host}")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)

    push(tiny.path, "registry.example/org/tiny:v1", plain_http=True)
    found = pull("registry.example/org/tiny:v1", store=store, plain_http=True)

    assert found.digest == tiny.digest
    assert all(seen.path.startswith("http://registry.example/v2/") for seen in registry.log)
