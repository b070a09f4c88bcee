"""What is signed, and how it is wrapped: in-toto statements in DSSE envelopes in sigstore bundles.

The formats are those of cosign 3, so that either side verifies what the other signed:
in-toto Statement v1 (github.com/in-toto/attestation, spec/v1/statement.md), DSSE 1.0
(github.com/secure-systems-lab/dsse) and the sigstore bundle 0.3 (github.com/sigstore/protobuf-specs,
protos/sigstore_bundle.proto). Nothing here knows a key.

Reading is strict: a field that the formats don't have, a second spelling of base64, and a key that stands twice are
refused, since what one reader passes over may be what another one obeys.
"""

from __future__ import annotations

import base64
import binascii
from typing import Any

import msgspec

from precast.ir import limits
from precast.ir.bundle import codec
from precast.ir.errors import BundleError, shown

STATEMENT_V1 = "https://in-toto.io/Statement/v1"
STATEMENT_TYPES = (STATEMENT_V1, "https://in-toto.io/Statement/v0.1")
"""The versions of a statement that are read: cosign 3 writes signatures in the first, attestations in the second."""

SIGNATURE = "https://sigstore.dev/cosign/sign/v1"
"""The predicate type of a signature. A statement of any other type says something else, and is no signature."""
PROVENANCE = "https://slsa.dev/provenance/v1"
CYCLONEDX = "https://cyclonedx.org/bom"

PAYLOAD_TYPE = "application/vnd.in-toto+json"
BUNDLE_TYPE = "application/vnd.dev.sigstore.bundle.v0.3+json"


class _Foreign(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, rename="camel"):
    """A document that other tools write: camel-case fields, and no others than these."""


class Subject(_Foreign, frozen=True):
    """What a statement is about: digests by algorithm, and what else in-toto allows, which is not looked at."""

    digest: dict[str, str]
    name: str = ""
    uri: str = ""
    content: str = ""
    download_location: str = ""
    media_type: str = ""
    annotations: dict[str, Any] = {}


class Statement(_Foreign, frozen=True):
    """A claim, its predicate, about one or more subjects."""

    type: str = msgspec.field(name="_type")
    subject: tuple[Subject, ...]
    predicate_type: str
    predicate: dict[str, Any]


class _Signature(_Foreign, frozen=True):
    sig: str
    keyid: str = ""


class _Envelope(_Foreign, frozen=True):
    payload: str
    payload_type: str
    signatures: tuple[_Signature, ...]


class _PublicKey(_Foreign, frozen=True):
    hint: str = ""


class _Certificate(_Foreign, frozen=True):
    raw_bytes: str


class _Chain(_Foreign, frozen=True):
    certificates: tuple[_Certificate, ...]


class _Material(_Foreign, frozen=True):
    """What the signature can be verified with; log entries and time stamps are not looked at."""

    public_key: _PublicKey | None = None
    certificate: _Certificate | None = None
    x509_certificate_chain: _Chain | None = msgspec.field(default=None, name="x509CertificateChain")
    tlog_entries: tuple[dict[str, Any], ...] = ()
    timestamp_verification_data: dict[str, Any] | None = None


class _Bundle(_Foreign, frozen=True):
    media_type: str
    verification_material: _Material
    dsse_envelope: _Envelope | None = None
    message_signature: dict[str, Any] | None = None


class Signed(msgspec.Struct, frozen=True):
    """A statement as it was found, not verified yet.

    `signature` is over `encoding(payload)`. `certificates` are DER, the signer's first; empty where a key signed.
    """

    statement: Statement
    payload: bytes
    signature: bytes
    certificates: tuple[bytes, ...]


def statement(digest: str, predicate_type: str, predicate: dict[str, Any], name: str = "") -> bytes:
    """The statement of this predicate about the digest (`sha256:` and hexadecimal digits), as it is signed.

    `name`, if any, says what the subject is called, such as its repository; verifiers compare the digest alone.
    """
    subject = Subject({"sha256": digest.removeprefix("sha256:")}, name)
    return codec.encode_json(Statement(STATEMENT_V1, (subject,), predicate_type, predicate))


def encoding(payload: bytes, payload_type: str = PAYLOAD_TYPE) -> bytes:
    """The bytes that are signed, DSSE's pre-authentication encoding: type and payload, each after its length."""
    kind = payload_type.encode()
    return b"DSSEv1 %d %b %d %b" % (len(kind), kind, len(payload), payload)


def wrap(payload: bytes, signature: bytes, *, hint: str = "", certificate: bytes | None = None) -> bytes:
    """The sigstore bundle of a signed statement. `hint` names the key, or `certificate` (DER) has it."""
    if certificate is None:
        material = _Material(public_key=_PublicKey(hint))
    else:
        material = _Material(certificate=_Certificate(_to_base64(certificate)))
    envelope = _Envelope(_to_base64(payload), PAYLOAD_TYPE, (_Signature(_to_base64(signature)),))
    return codec.encode_json(_Bundle(BUNDLE_TYPE, material, envelope))


def unwrap(data: bytes) -> Signed:
    """The signed statement in a sigstore bundle. Nothing is verified.

    Raises BundleError (`statement-invalid`, `json-*` or `limit-exceeded`) for whatever is not exactly one
    statement under exactly one signature.
    """
    bundle = codec.decode_foreign_json(data, _Bundle, "sigstore bundle", limits.MAX_STATEMENT_BYTES)
    _expect("sigstore bundle: mediaType", bundle.media_type, BUNDLE_TYPE)
    envelope = bundle.dsse_envelope
    if envelope is None or bundle.message_signature is not None:
        raise _invalid("sigstore bundle: expected a DSSE envelope alone, found a bare signature or none")
    _expect("envelope: payloadType", envelope.payload_type, PAYLOAD_TYPE)
    if len(envelope.signatures) != 1:
        raise _invalid(f"envelope: expected one signature, found {len(envelope.signatures)}")
    payload = _from_base64(envelope.payload, "envelope: payload")
    signature = _from_base64(envelope.signatures[0].sig, "envelope: signature")
    return Signed(_decode_statement(payload), payload, signature, _certificates(bundle.verification_material))


def is_about(found: Statement, digest: str) -> bool:
    """Whether one of the statement's subjects is the digest (`sha256:` and hexadecimal digits)."""
    return any(subject.digest.get("sha256") == digest.removeprefix("sha256:") for subject in found.subject)


def _decode_statement(payload: bytes) -> Statement:
    found = codec.decode_foreign_json(payload, Statement, "statement", limits.MAX_STATEMENT_BYTES)
    if found.type not in STATEMENT_TYPES:
        raise _invalid(f"statement: expected _type {STATEMENT_V1}, found {shown(found.type)}")
    if not 1 <= len(found.subject) <= limits.MAX_SUBJECTS:
        raise _invalid(f"statement: expected 1 to {limits.MAX_SUBJECTS} subjects, found {len(found.subject)}")
    return found


def _certificates(material: _Material) -> tuple[bytes, ...]:
    given = (material.public_key, material.certificate, material.x509_certificate_chain)
    if sum(item is not None for item in given) != 1:
        raise _invalid("verification material: expected one of publicKey, certificate, x509CertificateChain")
    chain: tuple[_Certificate, ...] = () if material.certificate is None else (material.certificate,)
    if material.x509_certificate_chain is not None:
        chain = material.x509_certificate_chain.certificates
        if not 1 <= len(chain) <= limits.MAX_CERTIFICATES:
            raise _invalid(f"verification material: expected 1 to {limits.MAX_CERTIFICATES} certificates")
    return tuple(_from_base64(each.raw_bytes, "verification material: certificate") for each in chain)


def _expect(what: str, found: str, expected: str) -> None:
    if found != expected:
        raise _invalid(f"{what}: expected {expected}, found {shown(found)}")


def _invalid(message: str) -> BundleError:
    return BundleError("statement-invalid", message)


def _to_base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _from_base64(text: str, what: str) -> bytes:
    """What the text encodes in standard base64 with padding. No other spelling of the same bytes is taken."""
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:  # ValueError: letters that are not ASCII
        raise _invalid(f"{what}: no standard base64: {error}") from None
    if _to_base64(data) != text:
        raise _invalid(f"{what}: expected standard base64 with padding, and no bits after the last byte")
    return data
