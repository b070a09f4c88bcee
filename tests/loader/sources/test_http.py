"""Files of HTTP servers on this machine: good ones, bad ones, and ones that change their minds."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial as bind

import pytest
from file_server import (
    DATE,
    FileServer,
    Request,
    drop_after,
    fall_silent_after,
    partial,
    ranged,
    serving,
    silent,
    tag_of,
    without_ranges,
)

from precast.ir.errors import WeightsError
from precast.ir.weights.sources import Source
from precast.loader.sources.open import folder_of
from precast.loader.sources.remote import HEAD_BYTES, RemoteFolder, Waits

CONTENT = bytes(range(251)) * 5_000
NAME = "ckpt/model.safetensors"
AT_ONCE = Waits(timeout=60.0, pauses=(0.0, 0.0))


def folder(server: FileServer, *, address: str | None = None, waits: Waits = AT_ONCE) -> RemoteFolder:
    """The folder `ckpt` of the server."""
    found = folder_of(address or f"{server.address}/ckpt", waits)
    assert isinstance(found, RemoteFolder)
    return found


def read(source: Source, start: int, *lengths: int) -> list[bytes]:
    """Pieces of these lengths, from `start` on."""
    pieces = [bytearray(length) for length in lengths]
    assert source.read_into(start, [memoryview(piece) for piece in pieces]) == sum(lengths)
    return list(map(bytes, pieces))


def refused(
    behave: Callable[[Request], None], *, start: int = 600_000, waits: Waits = AT_ONCE, content: bytes = CONTENT
) -> WeightsError:
    """The error of a read of 1,000 bytes beyond the head from a server that was good when the file was opened."""
    with serving({NAME: content}) as server:
        source = folder(server).open("model.safetensors")
        server.behave = behave
        reading = folder(server, waits=waits).open("model.safetensors", source.stamp)
        with pytest.raises(WeightsError) as caught:
            read(reading, start, 1000)
    return caught.value


def once(bad: Callable[[Request], None]) -> Callable[[Request], None]:
    """Bad once, then good."""
    turns = iter([bad])
    return lambda request: next(turns, ranged)(request)


# --- what is read ------------------------------------------------------------------------------------------------


def test_ranges_fill_their_pieces() -> None:
    with serving({NAME: CONTENT}) as server, folder(server).open("model.safetensors") as source:
        found = read(source, 700_001, 3, 100_000, 1)
        small = read(source, 10, 7)

    assert source.size == len(CONTENT)
    assert b"".join(found) == CONTENT[700_001:800_005]
    assert small == [CONTENT[10:17]]
    # The first bytes came when the file was opened.
    assert server.requests == [(NAME, f"bytes=0-{HEAD_BYTES - 1}"), (NAME, "bytes=700001-800004")]


def test_what_begins_in_the_head_goes_on_behind_it() -> None:
    with serving({NAME: CONTENT}) as server, folder(server).open("model.safetensors") as source:
        found = read(source, HEAD_BYTES - 5, 10, 3)

    assert b"".join(found) == CONTENT[HEAD_BYTES - 5 : HEAD_BYTES + 8]
    assert server.requests[1] == (NAME, f"bytes={HEAD_BYTES}-{HEAD_BYTES + 7}")


def test_a_file_is_there_or_not() -> None:
    with serving({"ckpt/a b.json": b"{}"}) as server:
        there = folder(server)

        assert there.has("a b.json")
        assert not there.has("none")
        assert read(there.open("a b.json"), 0, 2) == [b"{}"]
        assert [name for name, _ in server.requests] == ["ckpt/a b.json", "ckpt/none"]
        with pytest.raises(WeightsError) as caught:
            there.open("none")

    assert (caught.value.code, caught.value.where) == ("checkpoint-missing", f"{server.address}/ckpt/none")


def test_a_known_stamp_saves_a_question() -> None:
    with serving({NAME: CONTENT}) as server:
        stamp = folder(server).open("model.safetensors").stamp
        server.requests.clear()
        source = folder(server).open("model.safetensors", stamp)

        assert server.requests == []
        assert read(source, 1, 2) == [CONTENT[1:3]]
        assert server.headers[-1]["If-Range"] == tag_of(CONTENT)


def test_one_file_may_be_named() -> None:
    with serving({}) as server:
        named = folder(server, address=f"{server.address}/a/my%20model.safetensors?sig=s3cret")

    assert (named.only, named.name) == ("my model.safetensors", f"{server.address}/a")


def test_small_files_of_a_server_without_ranges() -> None:
    with serving({"ckpt/config.json": b'{"a": 1}'}, without_ranges) as server:
        assert read(folder(server).open("config.json"), 0, 8) == [b'{"a": 1}']


def test_answers_in_chunks() -> None:
    def chunked(request: Request) -> None:
        start, end, content = request.range()
        request.send_response(206)
        request.send_header("Content-Range", f"bytes {start}-{end - 1}/{len(content)}")
        request.send_header("Transfer-Encoding", "chunked")
        request.end_headers()
        half = (start + end) // 2
        for part in (content[start:half], content[half:end], b""):
            request.wfile.write(b"%x\r\n%s\r\n" % (len(part), part))

    with serving({NAME: CONTENT}, chunked) as server, folder(server).open("model.safetensors") as source:
        assert read(source, 700_000, 5000, 5) == [CONTENT[700_000:705_000], CONTENT[705_000:705_005]]
        assert read(source, 800_000, 5) == [CONTENT[800_000:800_005]]


# --- what another attempt mends ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "bad",
    [
        lambda request: request.answer(500),
        lambda request: request.answer(503, Retry_After="0"),
        lambda request: request.answer(429),
        lambda request: setattr(request, "close_connection", True),
        bind(drop_after, 0),
        bind(drop_after, 333),
    ],
    ids=["500", "503", "429", "no answer", "cut before", "cut within"],
)
def test_a_failure_that_passes(bad: Callable[[Request], None]) -> None:
    with serving({NAME: CONTENT}) as server, folder(server).open("model.safetensors") as source:
        server.behave = once(bad)

        assert b"".join(read(source, 600_000, 100, 900)) == CONTENT[600_000:601_000]


def test_what_has_arrived_is_not_asked_for_again() -> None:
    with serving({NAME: CONTENT}) as server, folder(server).open("model.safetensors") as source:
        server.behave = once(bind(drop_after, 333))
        read(source, 600_000, 100, 900)

    assert [asked for _, asked in server.requests[1:]] == ["bytes=600000-600999", "bytes=600333-600999"]


def test_attempts_end() -> None:
    error = refused(bind(drop_after, 10))

    assert error.code == "checkpoint-unreachable"
    assert error.message == (
        "bytes 600000 to 600999: 30 of 1000 came in 3 attempts, and the last ended: "
        "the answer ends after 10 of 980 bytes"
    )
    assert "weights_timeout" in str(error.fix)


def test_a_server_that_is_gone() -> None:
    with serving({}) as server:
        gone = folder(server)
    with pytest.raises(WeightsError, match="Connection refused") as caught:
        gone.has("config.json")

    assert (caught.value.code, caught.value.where) == ("checkpoint-unreachable", f"{server.address}/ckpt/config.json")


def test_a_server_that_says_nothing() -> None:
    error = refused(silent, waits=Waits(timeout=0.05, pauses=(0.0,)))

    assert "0 of 1000 came in 2 attempts, and the last ended: nothing came for 0.05 s" in error.message


def test_a_server_that_falls_silent() -> None:
    error = refused(bind(fall_silent_after, 7), waits=Waits(timeout=0.2, pauses=()))

    assert "0 of 1000 came in 1 attempts, and the last ended: nothing came for 0.2 s" in error.message


def test_stopping_ends_what_waits() -> None:
    with serving({NAME: CONTENT}) as server:
        source = folder(server).open("model.safetensors")
        reading = folder(server, waits=Waits(timeout=3600.0, pauses=(3600.0,) * 3))
        server.behave = lambda request: (reading.stop(), silent(request))[0]

        with pytest.raises(WeightsError, match="the read was stopped"):
            read(reading.open("model.safetensors", source.stamp), 600_000, 1)


# --- what no attempt mends ---------------------------------------------------------------------------------------


def other(**headers: str) -> Callable[[Request], None]:
    """The right range under wrong headers."""
    return lambda request: partial(request, **headers)


def answering(status: int) -> Callable[[Request], None]:
    """An answer without content."""
    return lambda request: request.answer(status)


DENIED, GONE, BROKEN = "checkpoint-denied", "checkpoint-changed", "checkpoint-unreachable"
SIZE = len(CONTENT)
BAD = [
    ("403", answering(403), DENIED, "answers 403 Forbidden when asked for bytes 600000 to 600999"),
    ("401", answering(401), DENIED, "answers 401"),
    ("404", answering(404), GONE, "answers 404"),
    ("416", answering(416), GONE, "answers 416"),
    ("418", answering(418), BROKEN, "answers 418"),
    ("no ranges", lambda request: request.answer(200, CONTENT, ETag=tag_of(CONTENT), Last_Modified=DATE), BROKEN,
     "answers with the whole file when asked for bytes 600000 to 600999: it has no ranges"),
    ("other range", other(Content_Range=f"bytes 0-999/{SIZE}"), BROKEN,
     f"answers with bytes 0 to 999 of {SIZE} when asked for bytes 600000 to 600999"),
    ("short range", other(Content_Range=f"bytes 600000-600998/{SIZE}"), BROKEN, "bytes 600000 to 600998"),
    ("no size", other(Content_Range="bytes 600000-600999/*"), BROKEN, "Content-Range"),
    ("long answer", other(Content_Length="1001"), BROKEN, "says that its answer has 1001 bytes, expected 1000"),
    ("short answer", other(Content_Length="999"), BROKEN, "says that its answer has 999 bytes, expected 1000"),
    ("packed", other(Content_Encoding="gzip"), BROKEN, "encoding gzip"),
    ("other tag", other(ETag='"other"'), GONE, "changed while it was read"),
    ("other time", other(Last_Modified="Mon, 02 Nov 2026 10:00:01 GMT"), GONE, "changed while it was read"),
    ("other size", other(Content_Range=f"bytes 600000-600999/{SIZE + 1}"), GONE,
     f"it had {SIZE} bytes, and has {SIZE + 1} now"),
]  # fmt: skip


@pytest.mark.parametrize(("behave", "code", "message"), [row[1:] for row in BAD], ids=[row[0] for row in BAD])
def test_refused_at_once(behave: Callable[[Request], None], code: str, message: str) -> None:
    asked: list[str] = []

    def counted(request: Request) -> None:
        asked.append(request.file)
        behave(request)

    error = refused(counted)

    assert (error.code, len(asked)) == (code, 1)
    assert message in error.message
    assert str(error.where).endswith("/ckpt/model.safetensors")
    assert error.fix


def test_a_file_that_changes_while_it_is_read() -> None:
    with serving({NAME: CONTENT}) as server, folder(server).open("model.safetensors") as source:
        read(source, 600_000, 10)
        server.files[NAME] = CONTENT[::-1]  # of the same size: only the tag tells
        with pytest.raises(WeightsError) as caught:
            read(source, 600_010, 10)

    assert caught.value.code == "checkpoint-changed"


def test_a_file_without_ranges_is_refused_when_it_is_opened() -> None:
    with serving({NAME: CONTENT}, without_ranges) as server:
        there = folder(server)
        with pytest.raises(WeightsError, match="has no ranges") as caught:
            there.open("model.safetensors")

    assert "nginx" in str(caught.value.fix)


def test_bytes_beyond_the_end_are_not_asked_for() -> None:
    with serving({NAME: CONTENT}) as server, folder(server).open("model.safetensors") as source:
        with pytest.raises(WeightsError, match=f"ends at byte {len(CONTENT)}"):
            read(source, len(CONTENT) - 1, 2)
        assert len(server.requests) == 1


# --- redirects ---------------------------------------------------------------------------------------------------


def moved(location: str) -> Callable[[Request], None]:
    """Redirects all but the place that it redirects to."""
    return lambda request: (
        ranged(request) if request.path == location else request.answer(302, b"moved", Location=location)
    )


def test_redirects_within_the_server_are_followed() -> None:
    with serving({"there": CONTENT}, moved("/there")) as server:
        assert read(folder(server).open("model.safetensors"), 0, 3) == [CONTENT[:3]]


@pytest.mark.parametrize(
    "location",
    ["http://localhost:{port}/x?token=s3cret", "https://127.0.0.1:{port}/x", "http://127.0.0.1:1/x", "//else.where/x", "ftp://[x"],
    ids=["host", "scheme", "port", "no scheme", "none"],
)  # fmt: skip
def test_redirects_to_other_servers_are_not(location: str) -> None:
    with serving({NAME: CONTENT}) as server:
        server.behave = moved(location.format(port=server.server_port))
        with pytest.raises(WeightsError, match="another server") as caught:
            folder(server).open("model.safetensors")

    assert caught.value.code == "checkpoint-unreachable"
    assert "s3cret" not in str(caught.value)
    assert len(server.requests) == 1


def test_redirects_in_a_circle_end() -> None:
    with serving({}, lambda request: request.answer(301, Location="/round")) as server:
        there = folder(server)
        with pytest.raises(WeightsError, match="5 times"):
            there.open("model.safetensors")


# --- credentials -------------------------------------------------------------------------------------------------


def test_credentials_are_sent_and_never_shown() -> None:
    with serving({}, lambda request: request.answer(403)) as server:
        secret = f"http://us%40er:pass%2Fword@127.0.0.1:{server.server_port}/ckpt/?sig=s3cret"
        with pytest.raises(WeightsError) as caught:
            folder(server, address=secret).open("model.safetensors")

    assert server.headers[0]["Authorization"] == "Basic dXNAZXI6cGFzcy93b3Jk"
    assert caught.value.where == f"{server.address}/ckpt/model.safetensors"
    assert not any(word in str(caught.value) for word in ("s3cret", "pass/word", "dXNA", "us@er"))


def test_the_query_goes_with_every_file() -> None:
    asked: list[str] = []

    def recording(request: Request) -> None:
        asked.append(request.path)
        ranged(request)

    with serving({"ckpt/a": b"1"}, recording) as server:
        folder(server, address=f"{server.address}/ckpt/?sig=1%2B2").has("a")

    assert asked == ["/ckpt/a?sig=1%2B2"]


def test_a_proxy_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def as_proxy(request: Request) -> None:
        asked.append(request.path)
        request.answer(206, b"x", Content_Range="bytes 0-0/1")

    with serving({}, as_proxy) as server:
        monkeypatch.setenv("http_proxy", server.address)
        monkeypatch.setenv("no_proxy", "other.host")
        found = read(folder(server, address="http://no.such.host/a").open("b"), 0, 1)

    assert (found, asked) == ([b"x"], ["http://no.such.host:80/a/b"])
