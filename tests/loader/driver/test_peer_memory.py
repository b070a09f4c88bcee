"""Memory of each other, over a driver whose memory is the host's: two processes write it, or neither can."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fake_driver import environment

RANK = """
import ctypes, json, os, sys
from contextlib import closing
from pathlib import Path
from precast.kernels.collectives.launches import Among
from precast.loader.driver.device import DriverDevice
from precast.loader.driver.peer_memory import Meeting, PeerMemory, PeersUnfitError
from precast.loader.world.agree import Said
from precast.loader.world.channel import accept_ranks, connect, listen
from precast.loader.world.follower import Follower
from precast.loader.world.lead import Lead
from precast.loader.world.timeouts import Timeouts

rank, folder, more = int(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3])
os.environ.update(more)
secret, timeouts = b"x" * 32, Timeouts(join=60, agree=60, load=60, end=20)
if rank == 0:
    with closing(listen("127.0.0.1", None)) as listener:
        print(listener.getsockname()[1], flush=True)
        side = Lead(accept_ranks(listener, secret, [1], seconds=60), timeouts)
else:
    side = Follower(1, 2, connect("127.0.0.1", int(sys.stdin.readline()), secret, 1, seconds=60), timeouts)

def exchange(name, said):
    return [each.value for each in side.gather(name, Said(said))]

def words(address, count):
    return (ctypes.c_uint32 * count).from_address(address)

device = DriverDevice(rank)
open_before = len(os.listdir("/proc/self/fd"))
try:
    memory = PeerMemory(5000, device, Meeting(Among(rank, 2), folder, exchange), "sums", 0x80000000)
    found = {"first": [sorted({*words(at, 1250)}) for at in memory.addresses]}
    exchange("looked", b"")
    words(memory.addresses[1 - rank], 2)[1] = 100 + rank
    exchange("written", b"")
    found["written"] = words(memory.addresses[rank], 2)[1]
    found["names"] = {name: buffer.shape[0] for name, buffer in memory.by_name.items()}
    found["places"] = [buffer.pointer for buffer in memory.by_name.values()] == memory.addresses
    memory.leave()
    exchange("left", b"")
    memory.close()
    memory.close()
except PeersUnfitError as error:
    found = {"unfit": str(error)}
found["opened"] = len(os.listdir("/proc/self/fd")) - open_before
print(json.dumps(found), flush=True)
exchange("end", b"")
"""


def two_ranks(folder: Path, *alone: bool) -> list[dict[str, Any]]:
    """What two processes say; the driver of those that are `alone` opens nobody's memory."""
    place = folder / "sockets"
    place.mkdir()
    more = [json.dumps({"FAKE_CUDA_ALONE": "1"} if is_alone else {}) for is_alone in alone]
    processes = [
        subprocess.Popen(
            [sys.executable, "-P", "-c", RANK, str(rank), str(place), given], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, text=True, env=environment(folder),
        )
        for rank, given in enumerate(more)
    ]  # fmt: skip
    first, second = processes
    try:
        assert first.stdout is not None
        port = first.stdout.readline()
        said = [second.communicate(port, timeout=120)[0], first.communicate(timeout=120)[0]]
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    return [json.loads(each) for each in reversed(said)]


def test_ranks_write_each_other_s_memory(tmp_path: Path) -> None:
    for rank, found in enumerate(two_ranks(tmp_path, False, False)):
        assert found == {
            "first": [[0x80000000], [0x80000000]], "written": 100 + (1 - rank),
            "names": {"peer.0": 2 << 20, "peer.1": 2 << 20}, "places": True, "opened": 0,
        }  # fmt: skip


@pytest.mark.parametrize("alone", [(False, True), (True, True)], ids=["one", "both"])
def test_what_one_can_not_open_nobody_has(tmp_path: Path, alone: tuple[bool, bool]) -> None:
    said = [f"rank {rank} can't write the memory of rank {1 - rank}: "
            "the CUDA driver refuses cuMemImportFromShareableHandle: CUDA_ERROR_NOT_PERMITTED"
            for rank, is_alone in enumerate(alone) if is_alone]  # fmt: skip

    for found in two_ranks(tmp_path, *alone):
        assert found == {"unfit": "; ".join(said), "opened": 0}
