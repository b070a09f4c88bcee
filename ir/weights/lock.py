"""`precast.lock`: beside a checkpoint, which bundles were made for it.

The file names the checkpoint by the SHA-256 of its `config.json`, byte by byte, and bundles by their digests. It is a
note, not a proof: whoever wrote the checkpoint's directory could write it. What a load compares is the config itself.
"""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path

import msgspec

from precast.ir import limits
from precast.ir.bundle import codec
from precast.ir.errors import BundleError, TrustError, shown
from precast.ir.files import read_file

NAME = "precast.lock"
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
# What is printed, and may be passed on to a command, is one word.
_REFERENCE = re.compile(r"(oci://[!-~]+)?")
_TARGET = re.compile(r"[a-z0-9_]{1,32}")


class Locked(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A bundle for the checkpoint: its digest, where it is (`oci://...`, if that is known), and the targets that it has
    native layers for; without any it is for all."""

    digest: str
    reference: str = ""
    targets: tuple[str, ...] = ()

    def is_for(self, target: str | None) -> bool:
        """Whether the bundle has kernels for the target, or none at all and so compiles them there."""
        return target is None or not self.targets or target in self.targets


class Lock(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The file: the digest of `config.json`, and the bundles."""

    version: int
    config: str
    bundles: tuple[Locked, ...]


def read(checkpoint: Path) -> Lock:
    """The lock beside a checkpoint, if it is this checkpoint's.

    Raises TrustError: `lock-invalid`, or `lock-mismatch` where `config.json` is not the one that it was written for.
    """
    path = checkpoint / NAME
    try:
        data = read_file(path, limits.MAX_TRUST_BYTES)
    except FileNotFoundError:
        fix = "`precast link BUNDLE DIR` writes one"
        raise TrustError("lock-invalid", f"expected a {NAME}, found none", where=str(checkpoint), fix=fix) from None
    except OSError as error:
        raise TrustError("lock-invalid", f"can't be read: {error.strerror}", where=str(path)) from None
    try:
        found = codec.decode_foreign_json(data, Lock, NAME, limits.MAX_TRUST_BYTES)
    except BundleError as error:
        raise TrustError("lock-invalid", error.message, where=str(path)) from None
    if found.version != 1 or not all(map(_is_sound, found.bundles)):
        message = "expected version 1, and of each bundle a digest, an address with oci:// if any, and targets"
        raise TrustError("lock-invalid", message, where=str(path))
    config = config_digest(checkpoint)
    if config != found.config:
        written_for = shown(found.config, 100)
        message = f"it was written for a config.json with digest {written_for}, and the one here has {config}"
        fix = "the config was changed: build a bundle from it, and link that"
        raise TrustError("lock-mismatch", message, where=str(path), fix=fix)
    return found


def add(checkpoint: Path, locked: Locked) -> Lock:
    """Write the bundle into the lock beside a checkpoint, in place of an entry of the same digest.

    A lock of another `config.json` is written anew. Raises TrustError (`lock-invalid`) and OSError.
    """
    kept: tuple[Locked, ...] = ()
    if (checkpoint / NAME).exists():
        try:
            kept = tuple(each for each in read(checkpoint).bundles if each.digest != locked.digest)
        except TrustError as error:
            if error.code != "lock-mismatch":
                raise
    bundles = tuple(sorted((*kept, locked), key=lambda each: each.digest))
    lock = Lock(1, config_digest(checkpoint), bundles)
    unfinished = checkpoint / f".{NAME}.{os.getpid()}"
    unfinished.unlink(missing_ok=True)
    try:
        with unfinished.open("xb") as file:  # never what somebody else has put there
            file.write(msgspec.json.format(msgspec.json.encode(lock), indent=2) + b"\n")
        unfinished.replace(checkpoint / NAME)
    finally:
        unfinished.unlink(missing_ok=True)
    return lock


def _is_sound(found: Locked) -> bool:
    """Whether it says what a lock may: anybody may have written it."""
    return all(
        (_DIGEST.fullmatch(found.digest), _REFERENCE.fullmatch(found.reference), *map(_TARGET.fullmatch, found.targets))
    )


def config_digest(checkpoint: Path) -> str:
    """The SHA-256 of the checkpoint's `config.json`, as `sha256:` and hexadecimal digits.

    Raises TrustError (`lock-invalid`).
    """
    path = checkpoint / "config.json"
    try:
        data = read_file(path, limits.MAX_CONFIG_BYTES)
    except OSError as error:
        message = f"expected the checkpoint's config.json: {error.strerror}"
        raise TrustError("lock-invalid", message, where=str(path), fix="name a checkpoint's directory") from None
    if len(data) > limits.MAX_CONFIG_BYTES:
        raise TrustError("lock-invalid", f"more than {limits.MAX_CONFIG_BYTES} bytes", where=str(path))
    return f"sha256:{hashlib.sha256(data).hexdigest()}"
