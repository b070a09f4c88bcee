"""How a world begins: rank 0 starts the others on its host, or a launcher such as `torchrun` has started all.

Imports no torch but where a launcher's rendezvous is used: started processes import it while rank 0 does.
"""

# torch names what torch.distributed has in C++ there, and doesn't list it.
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from precast.ir.errors import RequestError, TargetError
from precast.loader.world.channel import accept_ranks, connect, listen, new_secret
from precast.loader.world.follower import Follower
from precast.loader.world.lead import Lead
from precast.loader.world.processes import Processes, jobs
from precast.loader.world.timeouts import Timeouts

if TYPE_CHECKING:
    from torch.distributed import Store

LOOPBACK = "127.0.0.1"
LEAD_KEY = "precast/lead"
"""Under which rank 0 leaves at a launcher's rendezvous where it listens."""


class Launched(NamedTuple):
    """What a launcher says to each process it has started: its rank of all, and of those on its host."""

    rank: int
    num_ranks: int
    local_rank: int
    num_local: int


def launched(environment: Mapping[str, str] = os.environ) -> Launched | None:
    """What a launcher says; None where there was none, or it has started one process.

    Raises RequestError for variables that make no sense.
    """
    if "RANK" not in environment or "WORLD_SIZE" not in environment:
        return None
    numbers = {}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        default = {"LOCAL_RANK": environment["RANK"], "LOCAL_WORLD_SIZE": environment["WORLD_SIZE"]}.get(name)
        text = environment.get(name, default)
        if text is None or not text.isdecimal():
            raise RequestError(
                "engine-option-invalid",
                f"the environment says {name}={text!r}, expected a number",
                fix="start it by torchrun, or unset RANK and WORLD_SIZE",
            )
        numbers[name] = int(text)
    found = Launched(numbers["RANK"], numbers["WORLD_SIZE"], numbers["LOCAL_RANK"], numbers["LOCAL_WORLD_SIZE"])
    if found.rank >= found.num_ranks:
        raise RequestError(
            "engine-option-invalid", f"the environment says RANK={found.rank} of {found.num_ranks} ranks"
        )
    return found if found.num_ranks > 1 else None


class World(NamedTuple):
    """This rank's side of the world, and where the ranks' collectives meet."""

    side: Lead | Follower
    meeting: Meeting


class Meeting(NamedTuple):
    """A file that all ranks of a host share, or the store of a launcher's rendezvous."""

    file: str = ""
    launcher: Store | None = None

    def store(self, num_ranks: int) -> Store:
        """The store at which the ranks' collectives meet."""
        from torch import distributed

        if self.launcher is not None:
            return distributed.PrefixStore("precast/collectives", self.launcher)
        return distributed.FileStore(self.file, num_ranks)


def start_ranks(
    processes: Processes,
    ep: int,
    timeouts: Timeouts,
    port: int | None,
    device: str | None,
    options: Mapping[str, Any],
) -> World:
    """Give these processes their ranks, and wait until they have joined. `options` are those of `load.follow`.

    Raises what `listen` and `accept_ranks` raise, and TargetError (rank-lost) for a process that ends before.
    """
    secret, num_ranks = new_secret(), processes.num_ranks
    folder = tempfile.mkdtemp(prefix="precast-")  # nobody else may look into it
    store = str(Path(folder) / "store")
    try:
        with closing(listen(LOOPBACK, port)) as listener:
            for job in jobs(
                num_ranks, options, ep=ep, port=listener.getsockname()[1], secret=secret.hex(), store=store,
                timeouts=timeouts._asdict(), device=device,
            ):  # fmt: skip
                processes.give(job)
            channels = accept_ranks(listener, secret, range(1, num_ranks), seconds=timeouts.join, check=processes.check)
    except BaseException:
        processes.kill()
        shutil.rmtree(folder, ignore_errors=True)
        raise
    lead = Lead(channels, timeouts, processes)
    lead.at_close(lambda: shutil.rmtree(folder, ignore_errors=True))
    return World(lead, Meeting(file=store))


def join_ranks(found: Launched, timeouts: Timeouts, port: int | None) -> World:
    """Join the ranks that a launcher has started, by its rendezvous.

    Raises what `listen`, `accept_ranks` and `connect` raise, and TargetError (rank-missing) where the rendezvous fails.
    """
    store = _rendezvous(timeouts)
    if found.rank:
        host, at, secret = _where_lead_is(store, found, timeouts)
        channel = connect(host, at, secret, found.rank, seconds=timeouts.join)
        return World(Follower(found.rank, found.num_ranks, channel, timeouts), Meeting(launcher=store))
    host = LOOPBACK if found.num_local == found.num_ranks else os.environ.get("MASTER_ADDR", LOOPBACK)
    secret = new_secret()
    with closing(_listen_at(host, port)) as listener:
        store.set(LEAD_KEY, msgspec.json.encode([host, listener.getsockname()[1], secret.hex()]).decode())
        channels = accept_ranks(listener, secret, range(1, found.num_ranks), seconds=timeouts.join)
        store.delete_key(LEAD_KEY)  # the next world of these processes is another one
    return World(Lead(channels, timeouts, None), Meeting(launcher=store))


def _listen_at(host: str, port: int | None) -> socket.socket:
    """A listener at this name of the host; at all of its addresses where the name leads here by none of its own."""
    try:
        return listen(host, port)
    except (RequestError, socket.gaierror):
        if host == LOOPBACK or port is not None:
            raise
        return listen("0.0.0.0", port)


def _rendezvous(timeouts: Timeouts) -> Store:
    """The store that all processes of a launcher know, as its variables say."""
    from datetime import timedelta

    from torch import distributed

    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        found = f"the environment says RANK and WORLD_SIZE, and no {' and no '.join(missing)}"
        raise RequestError("engine-option-invalid", found, fix="start it by torchrun, or unset RANK and WORLD_SIZE")
    try:
        store, _, _ = next(distributed.rendezvous("env://", timeout=timedelta(seconds=timeouts.join)))
    except (RuntimeError, ValueError, OSError) as error:
        first_line = next(iter(str(error).splitlines()), "")
        where = f"{os.environ['MASTER_ADDR']}, port {os.environ['MASTER_PORT']}"
        if "EADDRINUSE" in str(error) or "address already in use" in str(error).lower():
            raise RequestError(
                "port-taken",
                f"the rendezvous can't listen at {where}: the port is taken",
                fix="give another MASTER_PORT",
            ) from None
        raise TargetError("rank-missing", f"the rendezvous at {where} failed: {first_line}") from None
    found_store: Store = store
    return found_store


def _where_lead_is(store: Store, found: Launched, timeouts: Timeouts) -> tuple[str, int, bytes]:
    from datetime import timedelta

    try:
        store.wait([LEAD_KEY], timedelta(seconds=timeouts.join))
        host, port, secret = msgspec.json.decode(store.get(LEAD_KEY), type=tuple[str, int, str])
    except (RuntimeError, msgspec.DecodeError) as error:
        message = f"rank {found.rank} waited {timeouts.join:g} s for rank 0 at the rendezvous"
        raise TargetError("rank-missing", message, fix="start rank 0 with precast too") from error
    return host, port, bytes.fromhex(secret)
