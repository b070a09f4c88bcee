"""Loads that are ended from outside: at any moment, and where they wait for a server that never answers."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from file_server import Request, ranged, serving, silent
from process_ends import LONG, ends, members
from recitation import MODEL

from precast.cli.stopping import ends_at_once

CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}
MOMENTS = 16


@contextmanager
def loading(bundle: Path, weights: str | Path, folder: Path, *more: str) -> Iterator[subprocess.Popen[bytes]]:
    """A load in a process, and a session, of its own; its temporary files go to `folder`."""
    folder.mkdir()
    command = [sys.executable, "-m", "precast", "run", bundle, "--weights", weights, "--token-ids", "1", *more]
    environment = os.environ | {"TMPDIR": str(folder), "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [*map(str, command), "--device", "cpu", "--max-tokens", "1"], env=environment, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def listens(process: subprocess.Popen[bytes]) -> bool:
    """Wait until the process has its own answer to SIGTERM; whether it lived to have one."""
    while process.poll() is None:
        caught = Path(f"/proc/{process.pid}/status").read_text().partition("SigCgt:")[2].split()
        if caught and int(caught[0], 16) >> (signal.SIGTERM - 1) & 1:
            return True
        passed(process, 0.005)
    return False


def passed(process: subprocess.Popen[bytes], seconds: float) -> None:
    """Let this time pass, or the process end."""
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return


def shell_code(process: subprocess.Popen[bytes]) -> int:
    """The exit code as a shell gives it: a process that a signal ends after its last line has one as well."""
    code = process.wait(LONG)
    return code if code >= 0 else 128 - code


def said(process: subprocess.Popen[bytes]) -> str:
    """What a process that has ended wrote to stderr."""
    assert process.stderr is not None
    return process.stderr.read().decode()


def left_behind(process: subprocess.Popen[bytes], folder: Path) -> list[str]:
    """Temporary files, shared memory and processes that are there after the end."""
    found = [str(file) for file in folder.rglob("*")]
    found += [name for name in os.listdir("/dev/shm") if str(process.pid) in name.split("_")]
    return found + [f"process {member}" for member in members(process.pid) if not ends(member)]


needs_proc = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="there is no /proc")


@needs_proc
@pytest.mark.slow
def test_a_load_ends_at_any_moment(bundle: Path, tmp_path: Path) -> None:
    moments = random.Random(0)
    ended = []

    for index in range(MOMENTS):
        number = (signal.SIGINT, signal.SIGTERM)[index % 2]
        with loading(bundle, MODEL, tmp_path / str(index)) as process:
            assert listens(process)
            passed(process, moments.uniform(0.0, 1.5))
            was_running = process.poll() is None
            process.send_signal(number)
            code = shell_code(process)
            if was_running and code:  # one that was about to end may have ended by itself
                ended.append(code == CODES[number])
            assert code in (0, CODES[number]), said(process)
            assert left_behind(process, tmp_path / str(index)) == []

    assert ended
    assert all(ended)


@needs_proc
@pytest.mark.parametrize("number", CODES, ids=lambda number: number.name)
@pytest.mark.parametrize("waits_for", ["config.json", "model.safetensors", "tensors"])
def test_a_load_ends_while_it_waits_for_a_server(
    waits_for: str, number: signal.Signals, bundle: Path, tmp_path: Path
) -> None:
    """The server is silent from a file, or from the first range of tensors, on; it would be waited for for an hour."""
    files = {f"m/{file.name}": file.read_bytes() for file in MODEL.iterdir()}

    def hangs(process: list[subprocess.Popen[bytes]]) -> Callable[[Request], None]:
        def answer(request: Request) -> None:
            beyond_the_head = not request.headers["Range"].startswith("bytes=0-")
            if beyond_the_head if waits_for == "tensors" else request.file == f"m/{waits_for}":
                process[0].send_signal(number)
                silent(request)
            else:
                ranged(request)

        return answer

    started: list[subprocess.Popen[bytes]] = []
    with serving(files, hangs(started)) as server:
        more = ("--weights-timeout", "3600")
        with loading(bundle, f"{server.address}/m", tmp_path / "tmp", *more) as process:
            started.append(process)
            assert shell_code(process) == CODES[number]
            assert left_behind(process, tmp_path / "tmp") == []


WAITS = """
import os, signal, sys, threading
from precast.cli.stopping import ends_at_once
reads, writes = os.pipe()
with ends_at_once():
    # A signal that another thread takes wakes the main one from no wait: as if it had come just before it.
    threading.Timer(0.2, signal.raise_signal, [int(sys.argv[1])]).start()
    os.read(reads, 1)
"""


@pytest.mark.parametrize(("number", "word"), [(signal.SIGINT, "interrupted"), (signal.SIGTERM, "terminated")])
def test_a_signal_just_before_a_wait_ends_it(number: signal.Signals, word: str) -> None:
    ran = subprocess.run([sys.executable, "-c", WAITS, str(int(number))], capture_output=True, text=True, timeout=LONG)

    assert (ran.returncode, ran.stdout, ran.stderr) == (CODES[number], "", f"\n{word}\n")


IMPORTS = """
import codecs, os, signal, sys
from precast.cli.stopping import ends_at_once
def hears(event, found):
    if event == "open" and "ascii" in os.path.basename(str(found[0])):
        signal.raise_signal(int(sys.argv[1]))
with ends_at_once():
    sys.addaudithook(hears)
    codecs.lookup("ascii")
"""


@pytest.mark.parametrize(("number", "word"), [(signal.SIGINT, "interrupted"), (signal.SIGTERM, "terminated")])
def test_a_signal_while_a_codec_is_imported_ends_it(number: signal.Signals, word: str) -> None:
    """What is half imported fails whoever uses it: to end must not take a codec."""
    command = [sys.executable, "-c", IMPORTS, str(int(number))]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=LONG)

    assert (ran.returncode, ran.stdout, ran.stderr) == (CODES[number], "", f"\n{word}\n")


STARTS = """
import signal, subprocess, sys
from precast.cli.stopping import ends_at_once
with ends_at_once():
    subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    signal.raise_signal(signal.SIGTERM)
"""


@needs_proc
def test_a_process_that_was_started_ends_as_well() -> None:
    """It holds the pipe of stdout open for as long as it lives."""
    ran = subprocess.run([sys.executable, "-c", STARTS], capture_output=True, timeout=LONG)

    assert ran.returncode == CODES[signal.SIGTERM]


def test_handlers_are_what_they_were_afterwards() -> None:
    before = [signal.getsignal(number) for number in CODES]
    descriptor = signal.set_wakeup_fd(-1)

    with ends_at_once():
        assert all(signal.getsignal(number) not in before for number in CODES)

    assert [signal.getsignal(number) for number in CODES] == before
    assert signal.set_wakeup_fd(descriptor) == -1
    assert "precast-signals" not in {thread.name for thread in threading.enumerate()}


def test_signals_that_are_ignored_stay_ignored() -> None:
    """As under nohup, or in the background of a shell without jobs."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with ends_at_once():
            assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
