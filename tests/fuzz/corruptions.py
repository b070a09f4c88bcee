"""Random corruptions of a whole bundle, one a seed: of its files, and of its parts before the digests were made."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

from forge import Forgery
from mutate import change_value, corrupt

from examples import write_tiny
from precast.ir import encoding
from precast.ir.artifact import Bundle
from precast.ir.errors import BundleError


def write_original(path: Path) -> Bundle:
    """The bundle that is corrupted."""
    return write_tiny(path)


def attempt(seed: int, original: Bundle) -> str:
    """What opening the case of this seed gives: a BundleError's code, `equal`, or `differs` for a valid other bundle.

    The case is written beside the original, and removed.
    """
    rng = random.Random(seed)
    make: Callable[[Path, Path, random.Random], None] = reseal if seed % 2 else damage
    path = original.path.with_name("case")
    try:
        make(original.path, path, rng)
        return _outcome(path, original, sealed=make is reseal)
    finally:
        shutil.rmtree(path)


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


def _outcome(path: Path, original: Bundle, *, sealed: bool) -> str:
    try:
        bundle = Bundle.open_whole(path)
    except BundleError as error:
        str(error)
        return error.code
    if bundle.digest == original.digest and bundle.graph == original.graph:
        return "equal"
    assert sealed, "a damaged bundle opens, and is another one"
    assert encoding.decode_graph(encoding.encode_graph(bundle.graph)) == bundle.graph
    return "differs"
