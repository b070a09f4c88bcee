"""A build in a process of its own, for tests that kill it, stop it, or take its disk away.

`python writer.py VERB PATH [ARGUMENT]`. Two bundles are written in turn, which differ in their sequence limit only:
`SHORT` and `LONG`.
"""

from __future__ import annotations

import os
import random
import resource
import select
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
sys.path.insert(0, str(Path(__file__).parent))

import msgspec
from forks import child

from examples import tiny_manifest, write_tiny
from precast.ir.artifact import Bundle
from precast.ir.errors import PrecastError

SHORT, LONG = 64, 128
# What Python announces before it happens, of the things that change a directory; `ctypes.dlsym`: the exchange.
STEPS = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree", "ctypes.dlsym")


def write(path: Path, limit: int = SHORT) -> Bundle:
    """Write the bundle with this sequence limit."""
    manifest = tiny_manifest()
    model = msgspec.structs.replace(manifest.model, max_seq_len=limit)
    return write_tiny(path, manifest_without_blobs=msgspec.structs.replace(manifest, model=model))


def forever(path: Path) -> None:
    """Write the two bundles in turn, without end."""
    while True:
        write(path, SHORT)
        write(path, LONG)


def kill_at_moments(path: Path, kills: int) -> None:
    """Kill writers at random moments; what is at `path` opens after each."""
    rng = random.Random(kills)
    limits = set()
    started = time.monotonic()
    write(path)
    longest = 4 * (time.monotonic() - started)
    for _ in range(kills):
        pid = child(lambda: forever(path))
        select.select([], [], [], rng.uniform(0, longest))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        limits.add(Bundle.open(path).manifest.model.max_seq_len)
    write(path, SHORT)
    sys.stdout.write(f"{limits <= {SHORT, LONG}} {sorted(os.listdir(path.parent))}")


def changes_a_directory(event: str, arguments: tuple[Any, ...]) -> bool:
    """Whether an audit event is a step of writing."""
    return event in STEPS or (event == "open" and bool(arguments[2] & (os.O_WRONLY | os.O_RDWR)))


def opens(event: str, _: tuple[Any, ...]) -> bool:
    """Whether an audit event is the opening of a file."""
    return event == "open"


def at_step(
    wanted: int, act: Callable[[], None], counts: Callable[[str, tuple[Any, ...]], bool] = changes_a_directory
) -> None:
    """Have `act` called before the `wanted`-th step of this process from now on."""
    seen = 0

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal seen
        if counts(event, arguments):
            seen += 1
            if seen == wanted:
                act()

    sys.addaudithook(hook)


def kill_at_step(path: Path, wanted: int) -> None:
    """Write the long bundle and be killed before the `wanted`-th step."""
    at_step(wanted, lambda: os.kill(os.getpid(), signal.SIGKILL))
    write(path, LONG)


def kill_at_steps(path: Path, first: str) -> None:
    """Kill writers before each step; `path` leads to the old bundle (`first` "none": to nothing) or to the new."""
    states: list[str] = []
    for wanted in range(1, 1000):
        if first == "none":
            for leftover in path.parent.iterdir():
                leftover.rename(path.parent.with_name(f"aside-{wanted}-{leftover.name}"))
        elif states[-1:] != [str(SHORT)]:
            write(path, SHORT)
        pid = child(lambda wanted=wanted: kill_at_step(path, wanted))
        _, status = os.waitpid(pid, 0)
        states.append(str(Bundle.open(path).manifest.model.max_seq_len) if path.exists() else "none")
        if not os.WIFSIGNALED(status):
            assert status == 0
            break
    write(path, SHORT)
    kinds = list(dict.fromkeys(states))
    sys.stdout.write(f"{len(states) > 20} {kinds} {sorted(os.listdir(path.parent))}")


def replace(path: Path) -> None:
    """Put the bundle `other` in the place of the one at `path`, and remove that."""
    path.rename(path.with_name("aside"))
    path.with_name("other").rename(path)
    shutil.rmtree(path.with_name("aside"))


def read_at_step(path: Path, wanted: int) -> None:
    """Read a bundle that is replaced before the `wanted`-th file is opened; exit with its sequence limit."""
    at_step(wanted, lambda: replace(path), opens)
    os._exit(Bundle.open(path).manifest.model.max_seq_len)


def read_at_steps(path: Path) -> None:
    """Read bundles that are replaced before each file that is opened; the old or the new one comes out whole."""
    found: list[int] = []
    for wanted in range(1, 100):
        write(path, SHORT)
        write(path.with_name("other"), LONG)
        pid = child(lambda wanted=wanted: read_at_step(path, wanted))
        found.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        if path.with_name("other").exists():
            break
    sys.stdout.write(f"{len(found) > 10} {list(dict.fromkeys(found))}")


def stop_in_the_middle(path: Path) -> None:
    """Write, stopping once half-way until somebody continues this process."""
    at_step(6, lambda: os.kill(os.getpid(), signal.SIGSTOP))
    write(path, LONG)


def limited(path: Path, max_bytes: int) -> None:
    """Write with files of at most `max_bytes` bytes."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (max_bytes, max_bytes))
    write(path, LONG)


def main(verb: str, path: str, argument: str = "") -> int:
    """Do what the verb says; a PrecastError is printed by its code."""
    target = Path(path)
    verbs: dict[str, Callable[[], object]] = {
        "write": lambda: sys.stdout.write(write(target).digest),
        "repeat": lambda: [write(target, (SHORT, LONG)[i % 2]) for i in range(int(argument))],
        "moments": lambda: kill_at_moments(target, int(argument)),
        "steps": lambda: kill_at_steps(target, argument),
        "read": lambda: read_at_steps(target),
        "stop": lambda: stop_in_the_middle(target),
        "limited": lambda: limited(target, int(argument)),
    }
    try:
        verbs[verb]()
    except PrecastError as error:
        sys.stdout.write(f"{error.code} {sorted(os.listdir(target.parent))}")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
