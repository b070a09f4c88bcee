"""Signed statements as manifests to be attached to a bundle, in the form in which cosign writes and finds them."""

from __future__ import annotations

import datetime
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from precast.ir.artifact import Bundle
from precast.ir.bundle import attached
from precast.ir.bundle.attached import Attached
from precast.ir.errors import TrustError
from precast.ir.trust import keys, signatures, statements
from precast.ir.trust.keys import PublicKey
from precast.ir.trust.statements import Signed
from precast.sign.private_keys import PrivateKey


def sign(
    bundle: Bundle,
    key: PrivateKey,
    *,
    certificate: bytes | None = None,
    name: str = "",
    now: datetime.datetime | None = None,
) -> Attached:
    """A signature of the bundle's digest, to be attached to it (`precast.ir.artifact.attach`). The digest stays.

    `certificate` (PEM) names the key to whoever trusts the authority that issued it. `name` says what the bundle is
    called, such as its repository. `now` is written beside the signature, by default the clock.

    Raises TrustError (`key-invalid`) for a certificate of another key.
    """
    payload = statements.statement(bundle.digest, statements.SIGNATURE, {}, name)
    return _made(bundle, payload, statements.SIGNATURE, key, certificate, now)


def attest(
    bundle: Bundle,
    key: PrivateKey,
    predicate_type: str,
    predicate: dict[str, Any],
    *,
    certificate: bytes | None = None,
    name: str = "",
    now: datetime.datetime | None = None,
) -> Attached:
    """A statement about the bundle, `predicate` of type `predicate_type`; all else as for `sign`."""
    assert predicate_type != statements.SIGNATURE, "a signature is made by `sign`"
    payload = statements.statement(bundle.digest, predicate_type, predicate, name)
    return _made(bundle, payload, predicate_type, key, certificate, now)


def repeated(attached: Iterable[Attached], made: Attached, key: PublicKey) -> list[str]:
    """The digests of those of `attached` that `made`, which `key` signed, says anew.

    They are of the same predicate type about the same subject, signed by the same key with the same certificate or
    none, and in the form in which they are written here: one with a log's entry or a time stamp says more, and stays.
    """
    (new,) = signatures.attached_to([made])
    assert new.signed is not None
    return [
        extra.digest
        for extra in attached
        if len(extra.layers) == 1 and _is_repeated(extra.layers[0].data, new.signed, key)
    ]


def _is_repeated(data: bytes, new: Signed, key: PublicKey) -> bool:
    old = signatures.read("", data).signed
    if old is None or old.certificates != new.certificates:
        return False
    claims = [(each.statement.predicate_type, each.statement.subject) for each in (old, new)]
    certificate = old.certificates[0] if old.certificates else None
    return (
        claims[0] == claims[1]
        and data == statements.wrap(old.payload, old.signature, hint=key.hint, certificate=certificate)
        and key.verifies(old.signature, statements.encoding(old.payload))
    )


def read_certificate(path: Path) -> bytes:
    """The signer's certificate in PEM. Raises TrustError (`key-invalid`) for none, or a chain of them."""
    pem = keys.read_pem(path)
    if pem.count(keys.PEM) != 1 or b"-----BEGIN CERTIFICATE-----" not in pem:
        message = f"expected the signer's certificate in PEM, found {keys.headings(pem)}"
        fix = "give the certificates between it and the root to those who verify (--ca): cosign takes no others here"
        raise TrustError("key-invalid", message, where=str(path), fix=fix)
    return pem


def _made(
    bundle: Bundle,
    payload: bytes,
    predicate_type: str,
    key: PrivateKey,
    certificate: bytes | None,
    now: datetime.datetime | None,
) -> Attached:
    der = None if certificate is None else _certificate_of(key, certificate)
    signature = key.sign(statements.encoding(payload))
    document = statements.wrap(payload, signature, hint=key.public.hint, certificate=der)
    annotations = {
        "dev.sigstore.bundle.content": "dsse-envelope",
        "dev.sigstore.bundle.predicateType": predicate_type,
        "org.opencontainers.image.created": f"{now or datetime.datetime.now(datetime.UTC):%FT%TZ}",
    }
    layers = [(statements.BUNDLE_TYPE, document)]
    return attached.compose(bundle.descriptor, statements.BUNDLE_TYPE, layers, annotations)


def _certificate_of(key: PrivateKey, pem: bytes) -> bytes:
    """The certificate in DER, if it is the key's."""
    encoding = keys.serialization().Encoding
    from cryptography import x509

    try:
        found = x509.load_pem_x509_certificate(pem)
        public = keys.of(found.public_key())
    except ValueError as error:
        raise TrustError("key-invalid", f"the certificate can't be read: {error}") from None
    if public.der != key.public.der:
        message = f"the certificate is of the key {public.fingerprint}, and the private key is {key.public.fingerprint}"
        raise TrustError("key-invalid", message, fix="name the certificate that was issued for this key")
    der: bytes = found.public_bytes(encoding.DER)
    return der
