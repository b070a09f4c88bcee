"""Keys, certificate authorities and signed statements, made for a test."""

from __future__ import annotations

import base64
import datetime
import json
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from precast.ir.trust import keys, statements
from precast.ir.trust.keys import PublicKey

Key = ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey

NOW = datetime.datetime(2026, 11, 23, 12, tzinfo=datetime.UTC)
DAY = datetime.timedelta(days=1)
DIGEST = "sha256:" + "ab" * 32
OTHER = "sha256:" + "cd" * 32


def p256() -> ec.EllipticCurvePrivateKey:
    """A new key of ECDSA P-256."""
    return ec.generate_private_key(ec.SECP256R1())


def ed() -> ed25519.Ed25519PrivateKey:
    """A new Ed25519 key."""
    return ed25519.Ed25519PrivateKey.generate()


def public(key: Key) -> PublicKey:
    """The public half, as verifiers have it."""
    return keys.of(key.public_key())


def public_pem(key: Any) -> bytes:
    """The public half in PEM."""
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    pem: bytes = key.public_key().public_bytes(serialization.Encoding.PEM, form)
    return pem


def private_pem(key: Any, passphrase: bytes | None = None) -> bytes:
    """The private key in PEM, of PKCS #8, encrypted with the passphrase if there is one."""
    how = serialization.BestAvailableEncryption(passphrase) if passphrase else serialization.NoEncryption()
    pem: bytes = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, how)
    return pem


def signature(key: Key, data: bytes) -> bytes:
    """The key's signature of the data, by the algorithm that it is for."""
    return key.sign(data, ec.ECDSA(hashes.SHA256())) if isinstance(key, ec.EllipticCurvePrivateKey) else key.sign(data)


def claim(digest: str = DIGEST, predicate_type: str = statements.SIGNATURE, **changed: Any) -> bytes:
    """A statement's JSON, written here and not by what is tested; `changed` fields replace or join the others."""
    fields = {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [{"digest": {"sha256": digest.removeprefix("sha256:")}}],
        "predicateType": predicate_type,
        "predicate": {},
    }
    return json.dumps(fields | changed).encode()


def envelope(key: Key, payload: bytes, certificate: x509.Certificate | None = None) -> dict[str, Any]:
    """The sigstore bundle of the payload, as a dictionary that a test may change."""
    kind = b"application/vnd.in-toto+json"
    signed = b"DSSEv1 28 application/vnd.in-toto+json " + str(len(payload)).encode() + b" " + payload
    material: dict[str, Any] = {"publicKey": {"hint": "x"}}
    if certificate is not None:
        raw = certificate.public_bytes(serialization.Encoding.DER)
        material = {"certificate": {"rawBytes": base64.b64encode(raw).decode()}}
    return {
        "mediaType": "application/vnd.dev.sigstore.bundle.v0.3+json",
        "verificationMaterial": material,
        "dsseEnvelope": {
            "payload": base64.b64encode(payload).decode(),
            "payloadType": kind.decode(),
            "signatures": [{"sig": base64.b64encode(signature(key, signed)).decode()}],
        },
    }


def document(key: Key, payload: bytes | None = None, certificate: x509.Certificate | None = None) -> bytes:
    """The sigstore bundle of a signed statement, by default a signature of `DIGEST`."""
    return json.dumps(envelope(key, claim() if payload is None else payload, certificate)).encode()


def certificate(
    name: str,
    key: Key,
    issuer: x509.Certificate | None = None,
    issuer_key: Key | None = None,
    *,
    ca: bool = False,
    path_length: int | None = None,
    usage: Any = ExtendedKeyUsageOID.CODE_SIGNING,
    signs: bool = True,
    issues: bool = True,
    start: datetime.datetime = NOW - DAY,
    end: datetime.datetime = NOW + DAY,
    logged_in_at: str = "",
) -> x509.Certificate:
    """A certificate, self-signed without an issuer. `name` is its subject, and its address or URI if it is no CA's.

    `logged_in_at`: the service that Fulcio writes into the certificates of who signs without a key of their own.
    """
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:64])])
    by = issuer_key or key
    made = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer.subject if issuer else subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(start)
        .not_valid_after(end)
        .add_extension(x509.BasicConstraints(ca, path_length), critical=True)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(by.public_key()), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(
            x509.KeyUsage(signs and not ca, False, False, False, False, ca and issues, ca, False, False), critical=True
        )
    )
    if not ca:
        made = made.add_extension(x509.SubjectAlternativeName([_name(name)]), critical=False)
        if usage is not None:
            made = made.add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
    if logged_in_at:
        for number in ("1", "8"):
            text = logged_in_at.encode() if number == "1" else bytes([12, len(logged_in_at)]) + logged_in_at.encode()
            oid = x509.ObjectIdentifier(f"1.3.6.1.4.1.57264.1.{number}")
            made = made.add_extension(x509.UnrecognizedExtension(oid, text), critical=False)
    return made.sign(by, None if isinstance(by, ed25519.Ed25519PrivateKey) else hashes.SHA256())


def _name(name: str) -> x509.GeneralName:
    return x509.UniformResourceIdentifier(name) if "://" in name else x509.RFC822Name(name)


def certificates_pem(*certificates: x509.Certificate) -> bytes:
    """Certificates in one PEM text."""
    return b"".join(each.public_bytes(serialization.Encoding.PEM) for each in certificates)
