"""Statements, envelopes and sigstore bundles: what is written, and what is refused where it is read."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from typing import Any

import pytest
import signers
from signers import DIGEST, OTHER, claim, envelope

from precast.ir import limits
from precast.ir.errors import BundleError
from precast.ir.trust import statements

KEY = signers.p256()


def changed(change: Callable[[dict[str, Any]], object], payload: bytes | None = None) -> bytes:
    bundle = envelope(KEY, payload or claim())
    change(bundle)
    return json.dumps(bundle).encode()


def refusal(data: bytes) -> BundleError:
    with pytest.raises(BundleError) as caught:
        statements.unwrap(data)
    return caught.value


def test_the_encoding_is_that_of_dsse() -> None:
    # The example of DSSE's protocol.md; lengths are those of the UTF-8 bytes.
    example = statements.encoding(b"hello world", "http://example.com/HelloWorld")

    assert example == b"DSSEv1 29 http://example.com/HelloWorld 11 hello world"
    assert statements.encoding("\u00e9".encode(), "\u00fc") == b"DSSEv1 2 \xc3\xbc 2 \xc3\xa9"
    assert statements.encoding(b"") == b"DSSEv1 28 application/vnd.in-toto+json 0 "


def test_a_statement_is_written_as_cosign_writes_it() -> None:
    written = json.loads(statements.statement(DIGEST, statements.SIGNATURE, {}))

    assert written == {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [{"digest": {"sha256": "ab" * 32}}],
        "predicateType": "https://sigstore.dev/cosign/sign/v1",
        "predicate": {},
    }


def test_a_name_joins_the_subject() -> None:
    written = json.loads(statements.statement(DIGEST, statements.SIGNATURE, {}, "ghcr.io/acme/llama"))

    assert written["subject"] == [{"digest": {"sha256": "ab" * 32}, "name": "ghcr.io/acme/llama"}]


def test_what_is_wrapped_is_unwrapped() -> None:
    payload = statements.statement(DIGEST, statements.PROVENANCE, {"a": [1, {"b": None}]})

    by_key = statements.unwrap(statements.wrap(payload, b"\0\xff", hint="aGk="))
    by_certificate = statements.unwrap(statements.wrap(payload, b"s", certificate=b"der"))

    assert (by_key.payload, by_key.signature, by_key.certificates) == (payload, b"\0\xff", ())
    assert by_key.statement.predicate == {"a": [1, {"b": None}]}
    assert by_certificate.certificates == (b"der",)


def test_any_of_the_subjects_counts_and_only_by_its_sha256() -> None:
    both = [{"digest": {"sha256": "cd" * 32}}, {"name": "x", "digest": {"sha512": "00", "sha256": "ab" * 32}}]
    found = statements.unwrap(signers.document(KEY, claim(subject=both))).statement
    other = statements.unwrap(signers.document(KEY, claim(subject=[{"digest": {"sha512": "ab" * 32}}]))).statement

    assert statements.is_about(found, DIGEST)
    assert statements.is_about(found, OTHER)
    assert not statements.is_about(other, DIGEST)
    assert not statements.is_about(other, "sha256:None")


def test_log_entries_and_time_stamps_are_passed_over() -> None:
    def add(bundle: dict[str, Any]) -> None:
        bundle["verificationMaterial"] |= {"tlogEntries": [{"logIndex": "1"}], "timestampVerificationData": {}}

    assert statements.is_about(statements.unwrap(changed(add)).statement, DIGEST)


ENVELOPES: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "another version": (lambda b: b.update(mediaType="application/vnd.dev.sigstore.bundle.v0.2+json"), "mediaType"),
    "no envelope": (lambda b: b.pop("dsseEnvelope"), "DSSE envelope"),
    "a bare signature too": (lambda b: b.update(messageSignature={"signature": "AA=="}), "DSSE envelope"),
    "another payload type": (lambda b: b["dsseEnvelope"].update(payloadType="text/plain"), "payloadType"),
    "no signature": (lambda b: b["dsseEnvelope"].update(signatures=[]), "one signature, found 0"),
    "two signatures": (lambda b: b["dsseEnvelope"].update(signatures=b["dsseEnvelope"]["signatures"] * 2), "found 2"),
    "no material": (lambda b: b.update(verificationMaterial={}), "expected one of publicKey"),
    "key and certificate": (
        lambda b: b["verificationMaterial"].update(certificate={"rawBytes": "AA=="}), "expected one of publicKey"
    ),
    "no certificate in a chain": (
        lambda b: b.update(verificationMaterial={"x509CertificateChain": {"certificates": []}}), "certificates"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ENVELOPES)
def test_a_bundle_is_refused(name: str) -> None:
    change, message = ENVELOPES[name]
    error = refusal(changed(change))

    assert error.code == "statement-invalid"
    assert message in error.message


@pytest.mark.parametrize(
    "place",
    [
        lambda b: b,
        lambda b: b["verificationMaterial"],
        lambda b: b["verificationMaterial"]["publicKey"],
        lambda b: b["dsseEnvelope"],
        lambda b: b["dsseEnvelope"]["signatures"][0],
    ],
)
def test_an_unknown_field_of_a_bundle_is_refused(place: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    error = refusal(changed(lambda bundle: place(bundle).update(surprise=1)))

    assert (error.code, "surprise" in error.message) == ("json-invalid", True)


def nested(depth: int) -> dict[str, Any]:
    return {"a": nested(depth - 1)} if depth else {}


CLAIMS: dict[str, tuple[bytes, str]] = {
    "an unknown field": (claim(surprise=1), "json-invalid"),
    "an unknown field of a subject": (claim(subject=[{"digest": {}, "surprise": 1}]), "json-invalid"),
    "another version": (claim(_type="https://in-toto.io/Statement/v2"), "statement-invalid"),
    "no subject": (claim(subject=[]), "statement-invalid"),
    "too many subjects": (claim(subject=[{"digest": {}}] * (limits.MAX_SUBJECTS + 1)), "statement-invalid"),
    "a key twice": (claim()[:-1] + b', "predicate": {}}', "json-duplicate-key"),
    "a digest that is no text": (claim(subject=[{"digest": {"sha256": 1}}]), "json-invalid"),
    "no JSON": (b"\xff", "json-invalid"),
    "nested too deep": (claim(predicate=nested(40)), "limit-exceeded"),
}  # fmt: skip


@pytest.mark.parametrize("name", CLAIMS)
def test_a_statement_is_refused(name: str) -> None:
    payload, code = CLAIMS[name]

    assert refusal(signers.document(KEY, payload)).code == code


def test_a_huge_bundle_is_refused_before_it_is_decoded() -> None:
    payload = claim(predicate={"a": "x" * limits.MAX_STATEMENT_BYTES})

    assert refusal(signers.document(KEY, payload)).code == "limit-exceeded"


@pytest.mark.parametrize(
    "spelled",
    [
        lambda text: text.rstrip("="),  # without padding
        lambda text: text.replace("+", "-").replace("/", "_"),  # the alphabet for URLs
        lambda text: text[:8] + "\n" + text[8:],
        lambda text: text + " ",
        lambda text: text + "====",
        lambda text: text[:-3] + chr(ord(text[-3]) + 1) + "==",  # bits after the last byte
        lambda text: text[:-1] + "\u00e9",
    ],
)
def test_base64_has_one_spelling(spelled: Callable[[str], str]) -> None:
    text = base64.b64encode(b"\xfb\xff\xfe" * 22 + b"\x00").decode()
    assert ("+" in text, "/" in text, text.endswith("A==")) == (True, True, True)

    def change(bundle: dict[str, Any]) -> None:
        bundle["dsseEnvelope"]["signatures"][0]["sig"] = spelled(text)

    assert refusal(changed(change)).code == "statement-invalid"
