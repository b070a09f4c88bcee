"""Which of the statements attached to a bundle are good: about its digest, of the wanted kind, by a trusted signer.

One good statement is enough, as for cosign; what is wrong with the others is told and does no harm, since anybody can
attach one. A statement of another predicate type never counts, however well it is signed: an attestation that a
scanner signed says what was found, not that the bundle may be run.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Sequence

import msgspec

from precast.ir.bundle.attached import Attached
from precast.ir.errors import BundleError, shown, some
from precast.ir.trust import statements
from precast.ir.trust.certificates import Authority, NotTrusted, signer
from precast.ir.trust.keys import PublicKey
from precast.ir.trust.statements import Signed, Statement

Trusted = PublicKey | Authority


class Found(msgspec.Struct, frozen=True):
    """A sigstore bundle that is attached to the bundle, as it was read: its statement, or why it has none.

    `attached` is the digest of the manifest that attaches it.
    """

    attached: str
    signed: Signed | None
    problem: str = ""


class Verified(msgspec.Struct, frozen=True):
    """A statement whose signature is good, who signed it, and the digest of the manifest that attaches it."""

    statement: Statement
    signer: str
    attached: str


def attached_to(attached: Iterable[Attached]) -> tuple[Found, ...]:
    """All sigstore bundles among the manifests that are attached to a bundle (`Bundle.attached`)."""
    return tuple(
        read(each.digest, layer.data)
        for each in attached
        for layer in each.layers
        if layer.media_type == statements.BUNDLE_TYPE
    )


def read(attached: str, data: bytes) -> Found:
    """The sigstore bundle in these bytes, which the manifest with the digest `attached` attaches."""
    try:
        return Found(attached, statements.unwrap(data))
    except BundleError as error:
        return Found(attached, None, error.message)


def verified(
    found: Iterable[Found],
    digest: str,
    trusted: Sequence[Trusted],
    predicate_type: str = statements.SIGNATURE,
    now: datetime.datetime | None = None,
) -> tuple[list[Verified], list[str]]:
    """The good statements of this type about the digest, and what is wrong with each of the others.

    Good: exactly one statement, of this predicate type, with the digest among its subjects, signed by one of `trusted`,
    whose certificate, if it has one, is valid `now` (default: the clock). Raises TargetError (`dependency-missing`).
    """
    good, wrong = [], []
    for each in found:
        try:
            if each.signed is None:
                raise NotTrusted(each.problem)
            _check_claim(each.signed.statement, digest, predicate_type)
            who = _signed_by(each.signed, trusted, now)
        except NotTrusted as error:
            wrong.append(f"{each.attached[:19]}: {error}")
        else:
            good.append(Verified(each.signed.statement, who, each.attached))
    return good, wrong


def require(
    found: Sequence[Found],
    digest: str,
    trusted: Sequence[Trusted],
    predicate_type: str = statements.SIGNATURE,
    now: datetime.datetime | None = None,
) -> list[Verified]:
    """The good statements, at least one; see `verified`.

    Raises BundleError: `signature-missing` where nothing is attached, else `signature-invalid` with all reasons.
    """
    good, wrong = verified(found, digest, trusted, predicate_type, now)
    if good:
        return good
    what = "signature" if predicate_type == statements.SIGNATURE else f"attestation of type {shown(predicate_type)}"
    if not found:
        fix = "`precast sign` and `precast attest` make one; copy the bundle with all that is attached to it"
        raise BundleError("signature-missing", f"expected a {what}, found none", fix=fix)
    message = f"none of {len(found)} attached statements is a good {what}: {'; '.join(some(wrong))}"
    fix = "verify with the key or authority of who signed, or sign this digest"
    raise BundleError("signature-invalid", message, fix=fix)


def _check_claim(found: Statement, digest: str, predicate_type: str) -> None:
    if found.predicate_type != predicate_type:
        raise NotTrusted(f"its predicate type is {shown(found.predicate_type)}, not {predicate_type}")
    if predicate_type == statements.SIGNATURE and found.type != statements.STATEMENT_V1:
        raise NotTrusted(f"its statement is a {found.type}, not a {statements.STATEMENT_V1}")
    if not statements.is_about(found, digest):
        about = some([f"sha256:{subject.digest.get('sha256', '(none)')}" for subject in found.subject], 3)
        raise NotTrusted(f"it is about {', '.join(about)}, not about {digest}")


def _signed_by(found: Signed, trusted: Sequence[Trusted], now: datetime.datetime | None) -> str:
    """Who signed, as one of `trusted` knows it. Raises NotTrusted."""
    data, reasons = statements.encoding(found.payload), []
    for each in trusted:
        if isinstance(each, PublicKey):
            # A certificate beside the signature changes nothing: it is this key's signature or it is not.
            if each.verifies(found.signature, data):
                return f"key {each.fingerprint}"
            continue
        if not found.certificates:
            continue
        try:
            key, who = signer(each, found.certificates, now)
        except NotTrusted as error:
            reasons.append(str(error))
            continue
        if key.verifies(found.signature, data):
            return who
        reasons.append(f"the signature is not that of the certificate's key, which is {who}'s")
    by = "by a certificate" if found.certificates else "by a key"
    raise NotTrusted("; ".join(dict.fromkeys(reasons)) or f"signed {by}, and not by one that is trusted here")
