"""Whether a native layer, which is code, may be loaded: which rule lets it in, or why none does.

A layer is let in if its digest, or that of the bundle's image manifest, is allowed by whoever loads it; if a key that
is trusted signed the manifest; or if it was compiled by this user on this machine, of which there is a record.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

_MACHINE = Path("/etc/machine-id")


class Admitted(NamedTuple):
    """The rule that lets a layer in, which completes "the native layer is used: it is ..."."""

    rule: str


class Refusal(NamedTuple):
    """Why a layer isn't let in, in a few words."""

    why: str


class Trust(Protocol):
    """A rule, or several of them."""

    def admits(self, manifest_digest: str, layer_digest: str) -> Admitted | Refusal:
        """Whether it lets in the layer of this digest, of the bundle with this image manifest."""
        ...


class Allowed:
    """Digests that whoever loads the bundle has allowed: of layers, or of bundles."""

    def __init__(self, digests: Collection[str]) -> None:
        self._digests = frozenset(digests)

    def admits(self, manifest_digest: str, layer_digest: str) -> Admitted | Refusal:
        """See `Trust`."""
        if layer_digest in self._digests:
            return Admitted("allowed by its digest")
        if manifest_digest in self._digests:
            return Admitted("allowed by the bundle's digest")
        return Refusal("its digest is not allowed")


class MadeHere:
    """Layers that this user compiled on this machine: a file for each, in a folder that nobody else may write to, or
    none of them counts."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def admits(self, manifest_digest: str, layer_digest: str) -> Admitted | Refusal:
        """See `Trust`."""
        file = self._file(layer_digest)
        try:
            is_ours = _is_ours(self._folder.stat()) and _is_ours(file.stat(follow_symlinks=False))
            if is_ours and file.read_text(encoding="utf-8") == _this_machine():
                return Admitted("compiled by this user on this machine")
        except (OSError, UnicodeDecodeError):
            pass  # no record, or none that is ours
        return Refusal("it was not compiled here")

    def record(self, layer_digest: str) -> None:
        """Note that this layer was compiled here. Raises OSError where the folder can't be written to."""
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        file = self._file(layer_digest)
        file.unlink(missing_ok=True)
        with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as stream:
            stream.write(_this_machine())

    def _file(self, digest: str) -> Path:
        return self._folder / digest.replace(":", "-")


class AnyOf:
    """Rules of which one is enough; the first that admits is named."""

    def __init__(self, rules: Sequence[Trust]) -> None:
        self._rules = rules

    def admits(self, manifest_digest: str, layer_digest: str) -> Admitted | Refusal:
        """See `Trust`."""
        found = [rule.admits(manifest_digest, layer_digest) for rule in self._rules]
        refusals = [each.why for each in found if isinstance(each, Refusal)]
        admitted = next((each for each in found if isinstance(each, Admitted)), None)
        return admitted or Refusal(" and ".join(refusals) or "nothing is trusted")


def folder_of_layers(environment: Mapping[str, str] = os.environ) -> Path:
    """Where this user's record of layers is kept: in the data directory of the XDG Base Directory Specification."""
    data = environment.get("XDG_DATA_HOME", "")
    root = Path(data) if os.path.isabs(data) else Path.home() / ".local" / "share"
    return root / "precast" / "native"


def _is_ours(status: os.stat_result) -> bool:
    """Whether a file or folder is this user's, and nobody else can write to it."""
    return status.st_uid == os.getuid() and not status.st_mode & 0o022


def _this_machine() -> str:
    """What tells this machine from others whose users have the same home directory."""
    try:
        return _MACHINE.read_text(encoding="utf-8").strip() + "\n"
    except OSError:
        return os.uname().nodename + "\n"
