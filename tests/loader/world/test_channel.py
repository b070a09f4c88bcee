"""Who may join a world, and who is turned away."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from precast.ir.errors import RequestError, TargetError
from precast.loader.world.channel import Channel, accept_ranks, connect, listen, new_secret
from precast.loader.world.messages import End, Failed, Here, decode

SECRET = new_secret()
HOST = "127.0.0.1"
LONG = 60.0


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with listen(HOST, None) as made:
        yield made


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as made:
        yield made


def port_of(listener: socket.socket) -> int:
    port: int = listener.getsockname()[1]
    return port


def joining(pool: ThreadPoolExecutor, listener: socket.socket, rank: int, secret: bytes = SECRET) -> Future[Channel]:
    return pool.submit(connect, HOST, port_of(listener), secret, rank, seconds=LONG)


def test_ranks_join_in_any_order_and_talk(listener: socket.socket, pool: ThreadPoolExecutor) -> None:
    joined = {rank: joining(pool, listener, rank) for rank in (2, 1)}

    channels = accept_ranks(listener, SECRET, (1, 2), seconds=LONG)

    for rank, channel in channels.items():
        follower = joined[rank].result()
        channel.send(End())
        follower.send(Here("there", b"x" * rank))
        assert (follower.receive(), channel.receive()) == (End(), Here("there", b"x" * rank))
        follower.max_order_bytes = 5
        channel.send_order([b"ab", memoryview(b"cde")])
        assert follower.receive() == b"abcde"
        follower.close()
        with pytest.raises(EOFError):
            channel.receive()
        channel.close()


@pytest.mark.parametrize(
    "says",
    [b"", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"\0" * 72, b"PCW1" + b"\0\0\0\1" + b"\0" * 64, b"\xff" * 1000],
    ids=["nothing", "http", "zeros", "no proof", "much"],
)
def test_a_stranger_is_turned_away_and_holds_nobody_up(
    says: bytes, listener: socket.socket, pool: ThreadPoolExecutor
) -> None:
    with socket.create_connection((HOST, port_of(listener)), LONG) as stranger:
        stranger.sendall(says)
        if not says:
            stranger.shutdown(socket.SHUT_WR)
        joined = joining(pool, listener, 1)

        channels = accept_ranks(listener, SECRET, (1,), seconds=LONG)

        stranger.settimeout(LONG)
        try:
            while stranger.recv(4096):
                pass
        except ConnectionResetError:
            pass
    channels[1].close()
    joined.result().close()


def test_a_follower_of_another_run_is_turned_away(listener: socket.socket, pool: ThreadPoolExecutor) -> None:
    wrong, right = joining(pool, listener, 1, new_secret()), joining(pool, listener, 1)

    channels = accept_ranks(listener, SECRET, (1,), seconds=LONG)

    with pytest.raises(TargetError, match=r"rank 1 was turned away at 127\.0\.0\.1, port") as error:
        wrong.result()
    assert error.value.code == "rank-missing"
    channels[1].close()
    right.result().close()


def test_a_follower_follows_no_stranger(listener: socket.socket, pool: ThreadPoolExecutor) -> None:
    """Who listens in rank 0's place answers, and doesn't know the secret."""
    joined = joining(pool, listener, 1)
    connection, _ = listener.accept()
    with connection:
        connection.sendall(bytes(32))
        connection.recv(72, socket.MSG_WAITALL)
        connection.sendall(bytes(32))
        with pytest.raises(TargetError, match="is not rank 0 of this run"):
            joined.result()


@pytest.mark.parametrize(("ranks", "message"), [((1, 1), "rank 1 came twice"), ((3, 1), r"rank 3 is none of \[1, 2\]")])
def test_ranks_that_are_not_expected(
    ranks: tuple[int, ...], message: str, listener: socket.socket, pool: ThreadPoolExecutor
) -> None:
    joined = [joining(pool, listener, rank) for rank in ranks]
    with pytest.raises(RequestError, match=message):
        accept_ranks(listener, SECRET, (1, 2), seconds=LONG)
    listener.close()
    for each in joined:
        with pytest.raises((TargetError, EOFError)):
            hears_the_end(each)


def test_missing_ranks_are_named(
    listener: socket.socket, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time is over as soon as the one that comes is there."""
    checked: list[bool] = []
    joined = joining(pool, listener, 2)
    clock = SimpleNamespace(monotonic=lambda: 3600.0 if joined.done() else 0.0)
    monkeypatch.setattr("precast.loader.world.channel.time", clock)

    with pytest.raises(TargetError, match=r"after 60 s of waiting, ranks 1, 3 had not come") as error:
        accept_ranks(listener, SECRET, (1, 2, 3), seconds=60, check=lambda: checked.append(joined.done()))
    assert error.value.code == "rank-missing"
    assert checked[-1]
    with pytest.raises(EOFError):
        hears_the_end(joined)


def hears_the_end(joined: Future[Channel]) -> None:
    channel = joined.result()
    try:
        channel.receive()
    finally:
        channel.close()


def test_a_port_that_is_taken_is_named(listener: socket.socket) -> None:
    port = port_of(listener)
    with pytest.raises(
        RequestError, match=rf"can't listen on port {port} of 127\.0\.0\.1: Address already in use"
    ) as error:
        listen(HOST, port)
    assert error.value.code == "port-taken"


def test_nobody_listens(listener: socket.socket) -> None:
    port = port_of(listener)
    listener.close()
    with pytest.raises(TargetError, match=f"rank 1 found no rank 0 at {HOST}, port {port}"):
        connect(HOST, port, SECRET, 1, seconds=LONG)


@pytest.mark.parametrize("frame", [struct.pack(">IB", 1 << 31, 0), struct.pack(">IB", 5, 1), struct.pack(">IB", 0, 9)])
def test_frames_that_nobody_sends_are_refused(frame: bytes, listener: socket.socket, pool: ThreadPoolExecutor) -> None:
    joined = joining(pool, listener, 1)
    channels = accept_ranks(listener, SECRET, (1,), seconds=LONG)
    channels[1]._socket.sendall(frame)
    with pytest.raises(TargetError, match="a rank sent a frame of kind") as error:
        joined.result().receive()
    assert error.value.code == "ranks-differ"
    joined.result().close()
    channels[1].close()


@pytest.mark.parametrize(
    "raw", [b"", b"\xc1", b"\x81\xa4type\xa5other", b"\x82\xa4type\xa3end\xa1x\x01", b"\x91" * 2000]
)
def test_messages_that_are_none_are_refused(raw: bytes) -> None:
    with pytest.raises(TargetError, match="doesn't know") as error:
        decode(raw)
    assert error.value.code == "ranks-differ"


def test_a_failure_travels_with_its_rank() -> None:
    told = Failed.of(RequestError("cache-too-small", "two slabs", where="here", fix="more"), 3).error()
    assert (type(told), told.code, told.message, told.where, told.fix) == (
        RequestError, "cache-too-small", "two slabs", "rank 3: here", "more",
    )  # fmt: skip
    other = Failed.of(ZeroDivisionError("by zero\nmore"), 2).error()
    assert (other.code, other.message, other.where) == ("rank-failed", "ZeroDivisionError: by zero", "rank 2")
    hostile = Failed(1, "Path", "no-code", "text").error()
    assert (hostile.code, hostile.message) == ("rank-failed", "Path no-code: text")
