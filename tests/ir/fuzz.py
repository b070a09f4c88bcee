"""Random corruptions of a bundle, one a seed, opened in a process whose memory and time are bounded.

A script, because the bounds hold for a whole process: `python fuzz.py DIRECTORY FIRST COUNT` prints how often each
outcome came, and the seeds of those that must not be: anything but an equal bundle or a BundleError.
"""

from __future__ import annotations

import json
import random
import resource
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import msgspec
from forge import Forgery

from examples import write_tiny
from precast.ir import encoding
from precast.ir.artifact import Bundle
from precast.ir.errors import BundleError

SECONDS, MEGABYTES = 1.0, 200
ODD: list[Any] = [None, True, 0, -1, 2**31, 2**63 - 1, -(2**63), 1e308, float("inf"), "", "T", "x" * 2000, [], {}]
INTERESTING = (0x00, 0x01, 0x7F, 0x80, 0x9F, 0xC0, 0xC1, 0xCF, 0xDD, 0xDF, 0xFF)


class Overtime(BaseException):
    """One case took more than `SECONDS` of processor time."""


# --- bytes -----------------------------------------------------------------------------------------------------


def corrupt(data: bytes, rng: random.Random) -> bytes:
    """The bytes with one to four random changes."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        start = rng.randrange(len(out) + 1)
        length = min(rng.choice((1, 1, 2, 8, 64)), len(out) - start)
        kind = rng.randrange(7)
        if kind == 0 and length:
            out[start] ^= 1 << rng.randrange(8)
        elif kind == 1 and length:
            out[start] = rng.choice(INTERESTING)
        elif kind == 2:
            del out[start:]
        elif kind == 3:
            del out[start : start + length]
        elif kind == 4:
            out[start:start] = out[start : start + length]
        elif kind == 5:
            out[start:start] = rng.randbytes(rng.choice((1, 4, 100)))
        else:
            out[start : start + length] = bytes(length)
    return bytes(out)


# --- values ----------------------------------------------------------------------------------------------------


def spots(value: Any) -> list[tuple[Any, Any]]:
    """All (container, key) pairs of a document."""
    found = []
    pending = [value]
    while pending:
        item = pending.pop()
        pairs = item.items() if isinstance(item, dict) else enumerate(item)
        for key, child in pairs:
            found.append((item, key))
            if isinstance(child, (dict, list)):
                pending.append(child)
    return found


def change_value(document: Any, rng: random.Random) -> None:
    """One to three values of a document removed, replaced by odd ones, or by other values of it."""
    for _ in range(rng.choice((1, 1, 2, 3))):
        places = spots(document)
        if not places:
            return
        container, key = rng.choice(places)
        kind = rng.randrange(4)
        if kind == 0:
            del container[key]
        elif kind == 1:
            container[key] = rng.choice(ODD)
        elif kind == 2:
            other, other_key = rng.choice(places)
            container[key] = msgspec.msgpack.decode(msgspec.msgpack.encode(other[other_key]))
        elif isinstance(container, list):
            container.insert(key, container[key])
        else:
            container[rng.choice(("k", "name", "x", str(key)))] = container[key]


# --- cases -----------------------------------------------------------------------------------------------------


def damage(source: Path, path: Path, rng: random.Random) -> None:
    """A copy of the bundle with something wrong in its files, digests left as they are."""
    shutil.copytree(source, path)
    files = sorted(file for file in path.rglob("*") if file.is_file())
    chosen, other = rng.choice(files), rng.choice(files)
    kind = rng.randrange(12)
    if kind == 0:
        chosen.unlink()
    elif kind == 1:
        chosen.rename(chosen.with_name(f"{rng.getrandbits(256):064x}"))
    elif kind == 2:
        (chosen.parent / rng.choice(("x", ".x", "0" * 64))).write_bytes(b"x")
    elif kind == 3:
        chosen.write_bytes(other.read_bytes())
    elif kind == 4:
        chosen.unlink()
        chosen.symlink_to(other)
    else:
        chosen.write_bytes(corrupt(chosen.read_bytes(), rng))


def reseal(_: Path, path: Path, rng: random.Random) -> None:
    """A bundle with one part corrupted before all digests were made, so that the decoders see it."""
    forgery = Forgery()
    kind = rng.randrange(9)
    if kind == 0:
        forgery.raw_graph = corrupt(forgery.raw_graph, rng)
    elif kind <= 3:
        forgery.edit_graph(lambda graph: change_value(graph, rng))
    elif kind == 4:
        forgery.constants = corrupt(forgery.constants, rng)
    elif kind == 5:
        forgery.provenance = corrupt(forgery.provenance, rng)
    elif kind == 6:
        forgery.edit(rng.choice(("manifest", "image", "attached")), lambda document: change_value(document, rng))
    elif kind == 7:
        forgery.edit(rng.choice(("manifest_bytes", "image_bytes")), lambda data: corrupt(data, rng))
    else:
        forgery.edit("graph_bytes", lambda data: corrupt(data, rng))
    forgery.write(path)


def outcome(path: Path, original: Bundle, *, sealed: bool) -> str:
    """What opening gives: a BundleError's code, `equal`, or `differs` for an intact bundle of other content."""
    try:
        bundle = Bundle.open(path)
    except BundleError as error:
        str(error)
        return error.code
    if bundle.digest == original.digest and bundle.graph == original.graph:
        return "equal"
    assert sealed, "a damaged bundle opens, and is another one"
    assert encoding.decode_graph(encoding.encode_graph(bundle.graph)) == bundle.graph
    return "differs"


def attempt(seed: int, directory: Path, original: Bundle) -> str:
    """Make the case of this seed and open it within the bounds."""
    rng = random.Random(seed)
    make: Callable[[Path, Path, random.Random], None] = reseal if seed % 2 else damage
    path = directory / "case"
    make(original.path, path, rng)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        return outcome(path, original, sealed=make is reseal)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        shutil.rmtree(path)


def main(directory: str, first: str, count: str) -> None:
    """Run `count` cases from seed `first` on and print the outcomes as JSON."""

    def stop(*_: object) -> None:
        raise Overtime

    signal.signal(signal.SIGPROF, stop)
    original = write_tiny(Path(directory) / "original")
    used = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEGABYTES * 2**20,) * 2)
    outcomes: Counter[str] = Counter()
    failures: list[str] = []
    for seed in range(int(first), int(first) + int(count)):
        try:
            outcomes[attempt(seed, Path(directory), original)] += 1
        # Whatever it is, it is what the test looks for.
        except (Exception, Overtime) as error:  # noqa: BLE001
            failures.append(f"seed {seed}: {type(error).__name__}: {error}"[:500])
    sys.stdout.write(json.dumps({"outcomes": outcomes, "failures": failures}))


if __name__ == "__main__":
    main(*sys.argv[1:])
