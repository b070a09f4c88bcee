"""Pushes and pulls in processes of their own, for tests that kill them or have two at once.

`python transfers.py VERB HOST BUNDLE PLACE [COUNT]`: PLACE is a directory for the store and for what is written out.
"""

from __future__ import annotations

import os
import random
import select
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "support"))

from forks import child

from precast.ir.artifact import Bundle
from precast.ir.errors import PrecastError
from precast.registry.pull import pull
from precast.registry.push import push
from precast.registry.store import Store


def killed(action: Callable[[], object], seconds: float) -> bool:
    """Run `action` in a fork and kill it after `seconds`; whether it was done before."""
    pid = child(action)
    select.select([], [], [], seconds)
    os.kill(pid, signal.SIGKILL)
    return not os.WIFSIGNALED(os.waitpid(pid, 0)[1])


class Moments:
    """Random moments at which to kill, of which about half come before the end, however fast the machine is just now:
    they come sooner after an action that was done, and later after one that was killed.
    """

    def __init__(self, seed: int, longest: float) -> None:
        self._rng, self._longest = random.Random(seed), longest

    def kill(self, action: Callable[[], object]) -> bool:
        """Run `action` and kill it at such a moment; whether it was done before."""
        was_done = killed(action, self._rng.uniform(0, self._longest))
        self._longest *= 2 / 3 if was_done else 3 / 2
        return was_done


def timed(action: Callable[[], object]) -> float:
    """Seconds that `action` takes in a fork, which is what is killed."""
    started = time.monotonic()
    assert os.waitpid(child(action), 0)[1] == 0
    return time.monotonic() - started


def kill_pulls(host: str, bundle: Path, place: Path, count: int) -> None:
    """Kill pulls into a store, and what writes out of it; whatever opens is whole, and a later pull ends well."""
    digest = push(bundle, f"{host}/org/tiny:v1").digest
    store, out = Store(place / "store"), place / "out.bundle"
    states = set()

    def action() -> None:
        pull(f"{host}/org/tiny:v1", out, store=store)

    moments = Moments(count, 1.2 * timed(action))
    for index in range(count):
        if index % 2 == 0:
            shutil.rmtree(out, ignore_errors=True)
            store.collect(unused_days=0)
        moments.kill(action)
        listed = [stored.digest for stored in store.listing()]
        assert listed in ([], [digest]), listed
        assert store.verify().problems == (), store.verify()
        assert not out.exists() or Bundle.open(out).digest == digest
        states.add((bool(listed), out.exists()))
    action()
    assert store.open(digest).digest == Bundle.open(out).digest == digest
    left = store.collect()
    sys.stdout.write(f"{len(states)} {sorted(os.listdir(place))} {left.bundles}")


def kill_at_step(wanted: int, action: Callable[[], object]) -> None:
    """Run `action`, and be killed before the `wanted`-th file or directory that is made, renamed or removed."""
    left = [wanted]

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        writes = event == "open" and bool(arguments[2] & (os.O_WRONLY | os.O_RDWR))
        if writes or event in ("os.mkdir", "os.rename", "os.remove"):
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    action()


def kill_pull_steps(host: str, bundle: Path, place: Path, count: int) -> None:
    """Kill a pull into an empty store before each step; a bundle that is listed is whole."""
    digest = push(bundle, f"{host}/org/tiny:v1").digest
    found = []
    for wanted in range(1, 1000):
        store = Store(place / f"store{wanted}")
        pid = child(
            lambda wanted=wanted, store=store: kill_at_step(wanted, lambda: pull(f"{host}/org/tiny:v1", store=store))
        )
        _, status = os.waitpid(pid, 0)
        listed = [stored.digest for stored in store.listing()]
        assert listed in ([], [digest]), listed
        assert store.verify().problems == (), (wanted, store.verify())
        shutil.rmtree(store.path, ignore_errors=True)
        found.append(bool(listed))
        if not os.WIFSIGNALED(status):
            assert status == 0
            break
    sys.stdout.write(f"{len(found) > 20} {found[-1]}")


def kill_pushes(host: str, bundle: Path, place: Path, count: int) -> None:
    """Kill pushes; a tag that is there leads to a whole bundle, and a later push ends well."""
    moments = Moments(count, 1.2 * timed(lambda: push(bundle, f"{host}/org/first:v1")))
    tags = 0
    for index in range(count):
        name = f"{host}/org/name{index}:v1"
        moments.kill(lambda name=name: push(bundle, name))
        try:
            pull(name, store=Store(place / f"store{index}"))
            tags += 1
        except PrecastError as error:
            if error.code != "registry-missing":
                raise
            push(bundle, name)
            pull(name, store=Store(place / f"store{index}"))
        shutil.rmtree(place / f"store{index}")
    sys.stdout.write(f"{tags < count}")


def interrupted_push(host: str, bundle: Path, place: Path, count: int) -> None:
    """Push by the command line, in this process."""
    from precast.cli.main import main

    main(["push", str(bundle), f"{host}/org/interrupted:v1"])


def interrupted(host: str, bundle: Path, place: Path, count: int) -> None:
    """Pull by the command line, in this process."""
    from precast.cli.main import main

    os.environ["PRECAST_STORE"] = str(place / "store")
    main(["pull", f"{host}/org/tiny:v1", "-o", str(place / "out.bundle")])


def together(host: str, bundle: Path, place: Path, count: int) -> None:
    """Pull the same bundle into one store by `count` processes at once."""
    reference = f"{host}/org/tiny:v1"
    pids = [
        child(lambda index=index: pull(reference, place / f"out{index}", store=Store(place / "store")))
        for index in range(count)
    ]
    codes = [os.waitpid(pid, 0)[1] for pid in pids]
    opened = {Bundle.open(place / f"out{index}").digest for index in range(count)}
    sys.stdout.write(f"{codes} {len(opened)} {Store(place / 'store').verify().problems}")


if __name__ == "__main__":
    verb, host, bundle, place, *more = sys.argv[1:]
    verbs = {
        "pulls": kill_pulls,
        "steps": kill_pull_steps,
        "pushes": kill_pushes,
        "interrupted": interrupted,
        "interrupted-push": interrupted_push,
        "together": together,
    }
    verbs[verb](host, Path(bundle), Path(place), int(more[0]) if more else 0)
