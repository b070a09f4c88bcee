"""What `push`, `pull` and `store` report, as text and as fields."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from precast.cli.show import Report, table

if TYPE_CHECKING:
    from precast.registry.pull import Pulled
    from precast.registry.push import Pushed
    from precast.registry.store import Removed, Stored, Verified


def pushed(found: Pushed) -> Report:
    """The reference by digest first: it is what is deployed."""
    blobs = f"{found.uploaded} uploaded ({found.uploaded_bytes:,} bytes), {found.present} were there"
    rows = [("blobs", blobs + (f", {found.mounted} mounted" if found.mounted else ""))]
    rows += [("attached", f"{len(found.attached)} manifests")] if found.attached else []
    rows += [("tag", found.tag)] if found.tag else []
    return Report(msgspec.to_builtins(found), f"{found.reference}\n{table(rows)}")


def pulled(found: Pulled) -> Report:
    """The reference by digest first, then what came and what was passed over."""
    rows = [("bytes", f"{found.fetched_bytes:,} fetched, {found.shared_bytes:,} were in the store")]
    rows += [("attached", type) for type in found.attached.values()]
    rows += [("written to", found.path)] if found.path else []
    rows += [("note", note) for note in found.notes]
    return Report(msgspec.to_builtins(found), f"{found.reference}\n{table(rows)}")


def listing(path: Path, found: Sequence[Stored]) -> Report:
    """A line a bundle."""
    fields = {"path": str(path), "bundles": [msgspec.to_builtins(stored) for stored in found]}
    lines = [f"{_day(x.used)}  {x.bytes:>14,}  {x.own_bytes:>14,}  {x.digest}  {x.reference}" for x in found]
    head = f"{'used':<10}  {'bytes':>14}  {'its own':>14}  digest"
    return Report(fields, "\n".join([str(path), *([head, *lines] if lines else ["empty"])]))


def removed(found: Removed) -> Report:
    """What is gone."""
    text = f"removed {len(found.bundles)} bundles, {found.blobs} blobs, {found.bytes:,} bytes"
    return Report(msgspec.to_builtins(found), text)


def verified(found: Verified) -> Report:
    """What was read, or what is wrong with it."""
    read = f"{found.bundles} bundles, {found.blobs} blobs, {found.bytes:,} bytes read"
    fix = ["fix: pull these bundles again, or remove them: precast store gc --unused-days 0"] if found.problems else []
    return Report(msgspec.to_builtins(found), "\n".join([*found.problems, *fix, read]))


def _day(seconds: float) -> str:
    return time.strftime("%Y-%m-%d", time.gmtime(seconds))
