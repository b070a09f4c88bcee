"""A rank as a process that rank 0 has started: `python -m precast.loader.world.child`, its `Job` on standard input."""

from __future__ import annotations

import os
import signal
import sys

import msgspec

from precast.ir.errors import PrecastError
from precast.loader.world.channel import connect
from precast.loader.world.follower import Follower
from precast.loader.world.processes import Job
from precast.loader.world.start import LOOPBACK, Meeting, World
from precast.loader.world.timeouts import Timeouts


def main() -> int:
    """Run the rank until rank 0 ends it; the process's exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 hears it, and ends all
    from precast.loader.load import follow  # torch with it, while rank 0 does other things

    raw = sys.stdin.buffer.read()
    if not raw:  # rank 0 has ended before it had anything to do
        return 1
    job = msgspec.json.decode(raw, type=Job)
    timeouts = Timeouts(**job.timeouts)
    try:
        channel = connect(LOOPBACK, job.port, bytes.fromhex(job.secret), job.rank, seconds=timeouts.join)
        world = World(Follower(job.rank, job.num_ranks, channel, timeouts), Meeting(file=job.store))
        follow(world, ep=job.ep, device=job.device, local_rank=job.rank, **job.options)
    except PrecastError as error:  # rank 0 has been told, and says it
        return error.exit_code
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # threads of torch may wait for ranks that have ended
