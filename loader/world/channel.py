"""Connections between rank 0 and its followers, open to nobody else.

Who connects proves, before anything it says is read, that it knows the secret of this run: rank 0 sends random bytes,
the follower answers with their HMAC under the secret, and so the other way round. Neither sends the secret. Whoever
doesn't know it is turned away, and holds nobody up. What follows is neither encrypted nor signed: between hosts, use a
network that strangers can't write to.

    rank 0 -> follower     nonce[32]
    follower -> rank 0     magic[4] rank[4] nonce[32] hmac[32]
    rank 0 -> follower     hmac[32]
    then both ways         length[4] kind[1] body[length]
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress

from precast.ir.errors import RequestError, TargetError
from precast.loader.world.messages import MAX_MESSAGE_BYTES, Message, decode, encode

MAGIC = b"PCW1"
"""Names this protocol and its version."""
NONCE_BYTES = 32
SECRET_BYTES = 32
MESSAGE, ORDER = 0, 1
"""Kinds of a frame: one of `precast.loader.world.messages`, or of `precast.loader.world.orders`."""
STRANGER_SECONDS = 5.0
"""For which a connection may keep silent before it proves who it is."""
DEAD_AFTER_SECONDS = 10
"""A host that doesn't acknowledge what was sent to it is taken for dead after so many seconds."""

_HELLO = struct.Struct(f">4sI{NONCE_BYTES}s32s")
_FRAME = struct.Struct(">IB")


def new_secret() -> bytes:
    """A secret for one run."""
    return secrets.token_bytes(SECRET_BYTES)


class Channel:
    """One connection between rank 0 and a follower. Many threads may send, one receives."""

    def __init__(self, connection: socket.socket, *, max_order_bytes: int = 0) -> None:
        self._socket = connection
        self._sending = threading.Lock()
        self.max_order_bytes = max_order_bytes
        connection.settimeout(None)
        _watch_for_dead_host(connection)

    def send(self, message: Message) -> None:
        """Send a message. Raises OSError where the other side is gone."""
        self._send(MESSAGE, [encode(message)])

    def send_order(self, parts: Iterable[bytes | memoryview]) -> None:
        """Send an order, which is these parts together. Raises OSError where the other side is gone."""
        self._send(ORDER, list(parts))

    def receive(self) -> Message | bytes:
        """The next message, or the next order as bytes. Raises EOFError at the end, TargetError for what is neither."""
        try:
            length, kind = _FRAME.unpack(_exactly(self._socket, _FRAME.size))
            most = {MESSAGE: MAX_MESSAGE_BYTES, ORDER: self.max_order_bytes}.get(kind)
            if most is None or length > most:
                found = f"a rank sent a frame of kind {kind} with {length} bytes"
                raise TargetError("ranks-differ", found, fix="run the same release of precast on all ranks")
            body = _exactly(self._socket, length)
        except OSError as error:
            raise EOFError(str(error)) from None
        return decode(body) if kind == MESSAGE else body

    def end_sending(self) -> None:
        """Whoever receives on the other side gets EOFError; this side may still receive."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def wait_for_end(self, seconds: float) -> None:
        """Wait until the other side has ended the connection, so many seconds at most; what it says is left unread."""
        with suppress(OSError):
            self._socket.settimeout(seconds)
            while self._socket.recv(4096):
                pass

    def close(self) -> None:
        """End the connection; whoever receives gets EOFError."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _send(self, kind: int, parts: list[bytes | memoryview]) -> None:
        length = sum(len(part) for part in parts)
        with self._sending:
            self._socket.sendall(b"".join([_FRAME.pack(length, kind), *parts]))


def listen(host: str, port: int | None) -> socket.socket:
    """A socket that listens on this port of `host`; None: on one that is free.

    Raises RequestError (port-taken) where it can't.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(host, port or 0, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # ports of worlds that have ended are free
        listener.bind(address)
        listener.listen(128)
    except OSError as error:
        listener.close()
        raise RequestError(
            "port-taken", f"rank 0 can't listen on port {port or 'any'} of {host}: {error.strerror}",
            fix="give another world_port, or none: then a free one is taken",
        ) from None  # fmt: skip
    return listener


def accept_ranks(
    listener: socket.socket,
    secret: bytes,
    ranks: Iterable[int],
    *,
    seconds: float,
    check: Callable[[], None] = lambda: None,
) -> dict[int, Channel]:
    """The channels of these ranks, once all have connected. `check` is called now and then, and may raise.

    Raises TargetError (rank-missing) after `seconds`, with the ranks that haven't come, and RequestError for a rank
    that came twice or is none of these.
    """
    wanted, found = set(ranks), dict[int, Channel]()
    deadline = time.monotonic() + seconds
    try:
        with _Callers(listener, secret) as callers:
            while wanted - found.keys():
                check()
                if time.monotonic() > deadline:
                    raise _missing(sorted(wanted - found.keys()), seconds, callers.num_refused)
                odd = ""
                for rank, connection in callers.next(min(0.1, seconds)):
                    if rank in found or rank not in wanted:
                        connection.close()
                        odd = f"rank {rank} {'came twice' if rank in found else f'is none of {sorted(wanted)}'}"
                    else:
                        found[rank] = Channel(connection)
                if odd:
                    raise RequestError("engine-option-invalid", odd, fix="give each process a rank of its own")
    except BaseException:
        for channel in found.values():
            channel.close()
        raise
    return found


def connect(host: str, port: int, secret: bytes, rank: int, *, seconds: float) -> Channel:
    """A follower's channel to rank 0. Raises TargetError (rank-missing) where nobody answers who knows the secret."""
    try:
        connection = socket.create_connection((host, port), timeout=seconds)
    except OSError as error:
        raise TargetError("rank-missing", f"rank {rank} found no rank 0 at {host}, port {port}: {error}") from None
    try:
        theirs, mine = _exactly(connection, NONCE_BYTES), secrets.token_bytes(NONCE_BYTES)
        connection.sendall(_HELLO.pack(MAGIC, rank, mine, _proof(secret, b"follower", rank, theirs, mine)))
        answer = _exactly(connection, 32)
    except (EOFError, OSError):
        connection.close()
        found = f"rank {rank} was turned away at {host}, port {port}"
        raise TargetError("rank-missing", found, fix="rank 0 of another run listens there: end it first") from None
    if not hmac.compare_digest(answer, _proof(secret, b"lead", rank, mine, theirs)):
        connection.close()
        raise TargetError("rank-missing", f"who listens at {host}, port {port} is not rank 0 of this run")
    return Channel(connection)


class _Callers:
    """Connections that have yet to prove who they are. None of them is waited for."""

    def __init__(self, listener: socket.socket, secret: bytes) -> None:
        self._listener = listener
        self._secret = secret
        self._selector = selectors.DefaultSelector()
        self.num_refused = 0

    def __enter__(self) -> _Callers:
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)
        return self

    def __exit__(self, *_: object) -> None:
        for key in list(self._selector.get_map().values()):
            if key.data is not None:
                key.fileobj.close()  # type: ignore[union-attr]
        self._selector.close()

    def next(self, seconds: float) -> list[tuple[int, socket.socket]]:
        """Those that have proved it meanwhile, by rank. It waits for news, `seconds` at most."""
        known = []
        for key, _ in self._selector.select(seconds):
            if key.data is None:
                self._greet()
            else:
                known += self._hear(key.fileobj, key.data)  # type: ignore[arg-type]
        for key in list(self._selector.get_map().values()):
            if key.data is not None and time.monotonic() > key.data.deadline:
                self._refuse(key.fileobj)  # type: ignore[arg-type]
        return known

    def _greet(self) -> None:
        with suppress(OSError):
            connection, _ = self._listener.accept()
            connection.setblocking(False)
            nonce = secrets.token_bytes(NONCE_BYTES)
            self._selector.register(connection, selectors.EVENT_READ, _Caller(nonce))
            connection.send(nonce)  # it fits the empty buffer of a new connection

    def _hear(self, connection: socket.socket, caller: _Caller) -> list[tuple[int, socket.socket]]:
        try:
            heard = connection.recv(_HELLO.size - len(caller.heard))
        except OSError:
            heard = b""
        caller.heard += heard
        if heard and len(caller.heard) < _HELLO.size:
            return []
        if not heard:
            self._refuse(connection)
            return []
        magic, rank, theirs, proof = _HELLO.unpack(caller.heard)
        expected = _proof(self._secret, b"follower", rank, caller.nonce, theirs)
        if not hmac.compare_digest(proof, expected) or magic != MAGIC:
            self._refuse(connection)
            return []
        self._selector.unregister(connection)
        with suppress(OSError):  # if it is gone, that is found as soon as it is heard
            connection.send(_proof(self._secret, b"lead", rank, theirs, caller.nonce))
        return [(rank, connection)]

    def _refuse(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        connection.close()
        self.num_refused += 1


class _Caller:
    """What was sent to a connection, what was heard from it, and until when it may speak."""

    def __init__(self, nonce: bytes) -> None:
        self.nonce = nonce
        self.heard = bytearray()
        self.deadline = time.monotonic() + STRANGER_SECONDS


def _proof(secret: bytes, role: bytes, rank: int, theirs: bytes, mine: bytes) -> bytes:
    """That whoever plays `role` knows the secret, for these two nonces."""
    return hmac.digest(secret, b"precast %s %d " % (role, rank) + theirs + mine, hashlib.sha256)


def _missing(ranks: list[int], seconds: float, num_refused: int) -> TargetError:
    strangers = f"; {num_refused} connections that don't know this run were refused" if num_refused else ""
    names = ", ".join(map(str, ranks))
    return TargetError(
        "rank-missing",
        f"after {seconds:g} s of waiting, {'rank' if len(ranks) == 1 else 'ranks'} {names} had not come{strangers}",
        fix="start as many processes as tp says, or allow more time with the timeout join",
    )


def _exactly(connection: socket.socket, length: int) -> bytes:
    """So many bytes. Raises EOFError where the connection ends before."""
    read, view = 0, memoryview(bytearray(length))
    while read < length:
        count = connection.recv_into(view[read:])
        if not count:
            raise EOFError("the connection was closed")
        read += count
    return bytes(view)


def _watch_for_dead_host(connection: socket.socket) -> None:
    """Let the system end a connection whose other host is gone; a process that ends closes its own."""
    with suppress(OSError):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (("TCP_KEEPIDLE", 2), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 4),
                            ("TCP_USER_TIMEOUT", 1000 * DEAD_AFTER_SECONDS)):  # fmt: skip
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
