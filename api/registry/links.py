"""From weights in a registry to the bundles that were made for them.

A link is a small manifest whose `subject` is the manifest of the weights, and whose annotations name a bundle. It lies
in the repository of the weights, so that tools which list what is attached to them show it; the bundle knows nothing of
it, and its digest doesn't depend on it. A link is a hint: who vouches for the bundle, its signatures say.
"""

from __future__ import annotations

import re

from precast.ir.bundle import attached, codec, oci
from precast.ir.bundle.oci import Descriptor
from precast.ir.errors import RegistryError, TrustError, shown
from precast.ir.weights.lock import Locked
from precast.registry import referrers
from precast.registry.attaching import attach
from precast.registry.client import Repository
from precast.registry.reference import SCHEME, Reference

LINK = "application/vnd.precast.link.v1"
DIGEST, REPOSITORY, TARGETS = (f"dev.precast.bundle.{name}" for name in ("digest", "repository", "targets"))
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_TARGET = re.compile(r"[a-z0-9_]{1,32}")


def link(weights: Repository, bundle: Reference, targets: tuple[str, ...] = ()) -> str:
    """Attach to the weights' manifest a link to the bundle, which its reference names by digest.

    `weights` may be written to, and names a tag or a digest. `targets` are those that the bundle has native layers for.
    Returns the digest of the link's manifest. Raises RegistryError.
    """
    assert bundle.digest is not None, "links name bundles by digest"
    subject = _weights(weights)
    annotations = {DIGEST: bundle.digest, REPOSITORY: f"{bundle.host}/{bundle.name}"}
    if targets:
        annotations[TARGETS] = " ".join(targets)
    empty = oci.describe(oci.EMPTY, oci.EMPTY_TYPE)
    image = oci.Image(LINK, empty, (empty,), oci.IMAGE_TYPE, 2, subject, annotations)
    manifest = codec.encode_json(image)
    made = attached.with_blobs(manifest, attached.decode(manifest), {empty.digest: oci.EMPTY})
    attach(weights, subject, made)
    return made.digest


def find(weights: Repository, target: str | None = None) -> list[Locked]:
    """The bundles that are linked from the weights, those with native layers for the target first.

    Those with native layers for other targets alone are left out. Raises RegistryError, and TrustError (`link-missing`)
    where nothing is left.
    """
    found, notes = referrers.find(weights, _weights(weights))
    linked = [_locked(each.document.annotations or {}) for each in found if each.document.type == LINK]
    return choose([each for each in linked if each is not None], target, str(weights.reference), notes)


def choose(linked: list[Locked], target: str | None, where: str, notes: list[str] | None = None) -> list[Locked]:
    """Those for the target, each once, the ones with native layers for it first. Raises TrustError (`link-missing`)."""
    wanted = {each.digest: each for each in linked if each.is_for(target)}
    if not wanted:
        others = sorted({name for each in linked for name in each.targets})
        found = f"bundles for {', '.join(others)} alone" if others else "no link to a bundle"
        message = "; ".join([f"expected one for {target or 'any target'}, found {found}", *(notes or [])])
        fix = "`precast link BUNDLE WEIGHTS` makes one"
        raise TrustError("link-missing", message, where=where, fix=fix)
    return sorted(wanted.values(), key=lambda each: (target not in each.targets, each.digest))


def _weights(weights: Repository) -> Descriptor:
    """The descriptor of the weights' manifest."""
    reference = weights.reference
    found = weights.manifest(reference.digest or reference.tag or "latest")
    if found.media_type != oci.IMAGE_TYPE:
        message = f"expected the manifest of weights, found {found.media_type}"
        raise RegistryError("registry-answer", message, where=str(reference), fix="name one manifest of the index")
    return Descriptor(oci.IMAGE_TYPE, found.digest, len(found.data))


def _locked(annotations: dict[str, str]) -> Locked | None:
    """What a link says, or None where it says what no link does: anybody may write one."""
    digest, targets = annotations.get(DIGEST, ""), tuple(annotations.get(TARGETS, "").split())
    try:
        place = Reference.parse(annotations.get(REPOSITORY, ""))
    except RegistryError:
        return None
    if not _DIGEST.fullmatch(digest) or not all(map(_TARGET.fullmatch, targets)) or place.tag or place.digest:
        return None
    return Locked(digest, f"{SCHEME}{shown(str(place.at(digest)))}", targets)
