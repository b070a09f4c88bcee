"""`precast link` and `precast find`: from weights to the bundles that were made for them. No torch."""

from __future__ import annotations

from pathlib import Path

import msgspec

from precast.cli.show import Report
from precast.ir.artifact import Bundle
from precast.ir.errors import BuildError, RegistryError
from precast.ir.weights import lock
from precast.ir.weights.lock import Locked
from precast.registry import links
from precast.registry.reference import SCHEME, Reference


def linked(bundle: Path | str, weights: Path | str, plain_http: bool) -> Report:
    """Link the weights to the bundle: an attached manifest in a registry, or a `precast.lock` beside a checkpoint."""
    opened = Bundle.open(bundle)
    named = None
    if isinstance(bundle, str):
        address = Reference.parse(bundle)
        named = Reference(address.host, address.name, None, opened.digest)
    targets = tuple(sorted(opened.native))
    if isinstance(weights, str):
        if named is None:
            message = "expected the bundle's address in a registry, found a directory"
            fix = "push it, and name it by oci://HOST/NAME@DIGEST"
            raise RegistryError("reference-invalid", message, where=str(bundle), fix=fix)
        digest = links.link(_repository(weights, plain_http, writes=True), named, targets)
        return Report({"digest": opened.digest, "link": digest}, f"{weights}: {digest} links {opened.digest}")
    entry = Locked(opened.digest, "" if named is None else f"{SCHEME}{named}", targets)
    try:
        lock.add(weights, entry)
    except OSError as error:
        raise BuildError("write-failed", f"{error.strerror}", where=str(weights / lock.NAME)) from None
    fields = {"digest": opened.digest, "lock": str(weights / lock.NAME)}
    return Report(fields, f"{weights / lock.NAME}: links {opened.digest}")


def found(weights: Path | str, target: str | None, plain_http: bool) -> Report:
    """The bundles for the weights, those with native layers for the target first."""
    if isinstance(weights, str):
        bundles = links.find(_repository(weights, plain_http), target)
    else:
        bundles = links.choose(list(lock.read(weights).bundles), target, str(weights))
    lines = [" ".join([each.reference or each.digest, *each.targets]) for each in bundles]
    return Report({"bundles": [msgspec.to_builtins(each) for each in bundles]}, "\n".join(lines))


def _repository(address: str, plain_http: bool, *, writes: bool = False) -> links.Repository:
    return links.Repository(Reference.parse(address), writes=writes, plain_http=plain_http)
