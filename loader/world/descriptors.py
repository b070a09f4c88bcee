"""Open file descriptors from each rank of a host to all others: memory of a GPU is given away as one.

They pass through Unix sockets in a folder that nobody else may look into. Whoever connects there shows a number that
the receiver has told the other ranks by their channel.
"""

from __future__ import annotations

import os
import secrets
import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from precast.ir.errors import TargetError

Exchange = Callable[[str, bytes], Sequence[bytes]]
"""Gives, under a name, what all ranks have to say, in their order: waits for them."""

NUMBER_BYTES = 16
_SAID = struct.Struct(f"=I{NUMBER_BYTES}s")


def exchanged(
    folder: Path, rank: int, descriptor: int, exchange: Exchange, name: str, *, seconds: float
) -> dict[int, int]:
    """The descriptors that the other ranks give under this name, by rank: whoever gets them closes them. This one's
    stays open. All ranks call it, with the same folder.

    Raises TargetError (rank-late) where one of them hasn't given its own after so many seconds, or is gone.
    """
    number = secrets.token_bytes(NUMBER_BYTES)
    with _listening(folder, f"{name}-{rank}") as listener:
        numbers = exchange(f"{name}/listens", number)
        ranks = [other for other in range(len(numbers)) if other != rank]
        for other in ranks:
            _give(folder, f"{name}-{other}", _SAID.pack(rank, numbers[other]), descriptor, (rank, other, seconds))
        return _taken(listener, ranks, number, rank, seconds)


@contextmanager
def _listening(folder: Path, name: str) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener, _inside(folder) as place:
        listener.bind(f"{place}/{name}")
        try:
            listener.listen(1024)
            yield listener
        finally:
            with suppress(OSError):
                os.unlink(f"{place}/{name}")


@contextmanager
def _inside(folder: Path) -> Iterator[str]:
    """A name of the folder that is short, as names of sockets have to be."""
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{opened}"
    finally:
        os.close(opened)


def _give(folder: Path, name: str, said: bytes, descriptor: int, told: tuple[int, int, float]) -> None:
    """Give a descriptor to who listens under a name; it need not have accepted yet."""
    rank, other, seconds = told
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection, _inside(folder) as place:
        connection.settimeout(seconds)
        try:
            connection.connect(f"{place}/{name}")
            socket.send_fds(connection, [said], [descriptor])
        except OSError as error:
            message = f"rank {rank} can't give its memory to rank {other}: {error}"
            raise TargetError("rank-late", message, fix="see what that process does") from None


def _taken(listener: socket.socket, ranks: Sequence[int], number: bytes, rank: int, seconds: float) -> dict[int, int]:
    found: dict[int, int] = {}
    deadline = time.monotonic() + seconds
    try:
        while missing := [other for other in ranks if other not in found]:
            left = deadline - time.monotonic()
            late = f"rank {rank} waited {seconds:g} s for the memory of rank {', '.join(map(str, missing))}"
            if left <= 0:
                raise TargetError("rank-late", late, fix="see what these processes do")
            listener.settimeout(left)
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                raise TargetError("rank-late", late, fix="see what these processes do") from None
            with closing(connection):
                connection.settimeout(min(left, 5.0))
                other, given = _heard(connection, number)
            if other is not None and given is not None:
                if other in missing:
                    found[other] = given
                else:
                    os.close(given)
    except BaseException:
        for each in found.values():
            os.close(each)
        raise
    return found


def _heard(connection: socket.socket, number: bytes) -> tuple[int | None, int | None]:
    """Who gives a descriptor, and which; None for who doesn't know the number, or says nothing."""
    try:
        said, descriptors, _, _ = socket.recv_fds(connection, _SAID.size, 1, socket.MSG_CMSG_CLOEXEC)
    except OSError:
        return None, None
    if len(said) == _SAID.size and len(descriptors) == 1:
        other, shown = _SAID.unpack(said)
        if secrets.compare_digest(shown, number):
            return other, descriptors[0]
    for each in descriptors:
        os.close(each)
    return None, None
