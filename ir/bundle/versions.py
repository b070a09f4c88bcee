"""Versions of the format: which are read, and how structs of an old one become those of today.

A *minor* version adds what older readers refuse and changes nothing of what was: every file of (1, 0) decodes under
the structs of (1, 3), to the same meaning. A *major* version changes or removes; its structs stay as code, frozen, with
two pure functions that turn its graph and its manifest into those of the next (`docs/versioning.md`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import msgspec

from precast.ir.errors import BundleError


class Era(msgspec.Struct, frozen=True):
    """One major version: its last minor version, its structs, and the way to the next, which the newest lacks."""

    minor: int
    graph: type
    manifest: type
    next_graph: Callable[[Any], Any] | None = None
    next_manifest: Callable[[Any], Any] | None = None


def era(format: tuple[int, int], eras: Mapping[int, Era]) -> Era:
    """The structs that a bundle of this format is decoded with.

    Raises BundleError: `format-newer` or `format-unknown`.
    """
    major, minor = format
    newest = max(eras)
    found = eras.get(major)
    if major > newest or (found is not None and minor > found.minor):
        known = f"{newest}.{eras[newest].minor}"
        message = f"the bundle has format {major}.{minor}; this Precast reads formats up to {known}"
        raise BundleError("format-newer", message, fix="upgrade Precast, or build the bundle with this version")
    if found is None or minor < 0:
        known = ", ".join(f"{major}.0 to {major}.{eras[major].minor}" for major in sorted(eras))
        message = f"the bundle has format {major}.{minor}; this Precast reads formats {known}"
        raise BundleError("format-unknown", message, fix="build the bundle again")
    return found


def upgrade(value: Any, part: Literal["graph", "manifest"], format: tuple[int, int], eras: Mapping[int, Era]) -> Any:
    """The graph or the manifest, decoded as one of this format, as one of the newest.

    A manifest's `format` stays what the bundle says.
    """
    major = format[0]
    while (step := getattr(eras[major], f"next_{part}")) is not None:
        value, major = step(value), major + 1
    return value
