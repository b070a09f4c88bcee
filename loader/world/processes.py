"""The processes of ranks 1 and up on rank 0's host, from their start to their end. Imports no torch.

They import torch as soon as they run, and then read what they are to do: a command line starts them before it imports
torch itself.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import msgspec

from precast.ir.errors import TargetError

FIX = "what it printed says more"


class Job(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What rank 0 tells a process that it has started, over its standard input; others can't read that.

    `secret` is that of the run, in hexadecimal, `store` a file at which collectives meet. `options` are those of
    `precast.loader.load.follow`.
    """

    rank: int
    num_ranks: int
    ep: int
    port: int
    secret: str
    store: str
    timeouts: dict[str, float]
    device: str | None
    options: dict[str, Any]


class Processes:
    """Processes for ranks `1 .. num_ranks - 1`, which wait for their jobs."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        try:
            for rank in range(1, num_ranks):
                self._processes[rank] = _started(num_ranks)
        except BaseException:
            self.kill()
            raise

    def __getitem__(self, rank: int) -> int:
        """The rank's process id."""
        return self._processes[rank].pid

    def give(self, job: Job) -> None:
        """Tell a process what to do."""
        pipe = self._processes[job.rank].stdin
        assert pipe is not None
        with suppress(BrokenPipeError):  # that it has ended is found by `check`
            pipe.write(msgspec.json.encode(job))
        with suppress(BrokenPipeError):
            pipe.close()

    def check(self) -> None:
        """Raise TargetError (rank-lost) for a process that has ended."""
        for rank, process in self._processes.items():
            if process.poll() is not None:
                how = f"rank {rank} (process {process.pid}) {ended(process.returncode)} before it had joined the others"
                raise TargetError("rank-lost", how, fix=FIX)

    def end_of(self, rank: int, seconds: float) -> str:
        """How the rank's process has ended, in words, or "" if it isn't one of these or hasn't ended in so long."""
        process = self._processes.get(rank)
        if process is None:
            return ""
        with suppress(subprocess.TimeoutExpired):
            return f"(process {process.pid}) {ended(process.wait(seconds))}"
        return ""

    def reap(self, seconds: float) -> None:
        """Wait until all have ended, which were told to; kill those that haven't after so many seconds."""
        deadline = time.monotonic() + seconds
        for process in self._processes.values():
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(deadline - time.monotonic(), 0.1))
        self.kill()

    def kill(self) -> None:
        """End all at once."""
        for process in self._processes.values():
            if process.stdin is not None:
                with suppress(OSError):
                    process.stdin.close()
            process.kill()
            process.wait()


def _started(num_ranks: int) -> subprocess.Popen[bytes]:
    """A process that waits for its job. What it prints goes to standard error: standard output is for answers.

    It is in a process group of its own: Ctrl-C reaches rank 0, which ends the others.
    """
    environment = dict(os.environ)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    environment.setdefault("OMP_NUM_THREADS", str(max(1, cores // num_ranks)))
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "precast.loader.world.child"],
        stdin=subprocess.PIPE, stdout=_standard_error(), env=environment, process_group=0,
    )  # fmt: skip


def _standard_error() -> int:
    """Standard error's descriptor; where that is closed, one that leads nowhere."""
    try:
        os.fstat(2)
    except OSError:
        return subprocess.DEVNULL
    return 2


def ended(code: int) -> str:
    """How a process has ended, in words, by its return code."""
    if code >= 0:
        return f"ended with code {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"


def jobs(num_ranks: int, options: Mapping[str, Any], **same: Any) -> list[Job]:
    """A job for each rank but the first; all but their ranks are the same."""
    return [Job(rank=rank, num_ranks=num_ranks, options=dict(options), **same) for rank in range(1, num_ranks)]
