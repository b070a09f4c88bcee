"""Which statements count: the claim, the digest, the signer, and the algorithm that the key is for."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest
import signers
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from signers import DIGEST, NOW, OTHER, claim, document, public

from precast.ir.errors import BundleError, TrustError
from precast.ir.trust import keys, signatures, statements
from precast.ir.trust.signatures import Found

KEY, ED, STRANGER = signers.p256(), signers.ed(), signers.p256()
HERE = Path(__file__).parent


def read(*documents: bytes) -> list[Found]:
    return [signatures.read(f"sha256:{i:064x}", data) for i, data in enumerate(documents)]


def refusal(*documents: bytes, key: signers.Key = KEY, digest: str = DIGEST) -> BundleError:
    with pytest.raises(BundleError) as caught:
        signatures.require(read(*documents), digest, [public(key)])
    return caught.value


@pytest.mark.parametrize("key", [KEY, ED], ids=["p256", "ed25519"])
def test_a_good_signature_counts(key: signers.Key) -> None:
    (good,) = signatures.require(read(document(key)), DIGEST, [public(STRANGER), public(key)])

    assert good.signer == f"key {public(key).fingerprint}"
    assert good.attached == f"sha256:{0:064x}"


def test_another_key_is_refused() -> None:
    error = refusal(document(STRANGER))

    assert error.code == "signature-invalid"
    assert "signed by a key, and not by one that is trusted here" in error.message


def test_a_signature_of_another_digest_is_refused() -> None:
    error = refusal(document(KEY, claim(OTHER)))

    assert error.code == "signature-invalid"
    assert f"about {OTHER}, not about {DIGEST}" in error.message


def test_an_attestation_is_no_signature() -> None:
    error = refusal(document(KEY, claim(predicate_type=statements.PROVENANCE)))

    assert error.code == "signature-invalid"
    assert f"its predicate type is {statements.PROVENANCE}" in error.message


def test_a_signature_is_no_attestation_and_one_type_not_another() -> None:
    found = read(document(KEY), document(KEY, claim(predicate_type=statements.CYCLONEDX)))

    with pytest.raises(BundleError, match=r"2 attached statements.*no|none of 2") as caught:
        signatures.require(found, DIGEST, [public(KEY)], statements.PROVENANCE)
    assert caught.value.code == "signature-invalid"
    (good,) = signatures.require(found, DIGEST, [public(KEY)], statements.CYCLONEDX)
    assert good.attached == found[1].attached


def test_a_signature_in_an_old_statement_is_refused() -> None:
    # cosign writes attestations in it, never signatures.
    payload = claim(_type="https://in-toto.io/Statement/v0.1")

    assert "Statement/v0.1" in refusal(document(KEY, payload)).message


def test_one_good_signature_is_enough_whatever_else_is_attached() -> None:
    good, wrong = signatures.verified(
        read(b"{", document(STRANGER), document(KEY, claim(OTHER)), document(KEY)), DIGEST, [public(KEY)]
    )

    assert [each.attached for each in good] == [f"sha256:{3:064x}"]
    assert len(wrong) == 3


def test_nothing_attached() -> None:
    assert refusal().code == "signature-missing"


def test_all_reasons_are_said() -> None:
    message = refusal(b"[]", document(STRANGER), document(KEY, claim(OTHER))).message

    assert message.count("sha256:0000000") == 3


def test_one_changed_bit_anywhere_in_the_payload_is_refused() -> None:
    payload = claim()
    bundle = signers.envelope(KEY, payload)
    bundle["dsseEnvelope"]["payload"] = base64.b64encode(payload + b" ").decode()

    assert refusal(json.dumps(bundle).encode()).code == "signature-invalid"


def test_a_signature_of_the_bare_payload_is_refused() -> None:
    # Without the type in front, a signature made for another format could be passed off as one for this.
    bundle = signers.envelope(KEY, claim())
    bundle["dsseEnvelope"]["signatures"][0]["sig"] = base64.b64encode(signers.signature(KEY, claim())).decode()

    assert refusal(json.dumps(bundle).encode()).code == "signature-invalid"


def test_the_key_and_nothing_in_the_document_says_the_algorithm() -> None:
    data = statements.encoding(claim())
    weak = KEY.sign(data, ec.ECDSA(hashes.SHA1()))
    longer = KEY.sign(data, ec.ECDSA(hashes.SHA384()))
    raw = bytes(64)  # r and s without DER, as JSON Web Signatures have them

    for signature in (weak, longer, raw, b"", signers.signature(ED, data)):
        assert not public(KEY).verifies(signature, data)
    for signature in (signers.signature(KEY, data), b"", bytes(64)):
        assert not public(ED).verifies(signature, data)


def test_a_certificate_beside_the_signature_makes_nobody_a_signer() -> None:
    own = signers.certificate("ci@acme.example", STRANGER)

    assert refusal(document(STRANGER, certificate=own)).code == "signature-invalid"


def test_a_key_counts_also_where_a_certificate_is_beside_it() -> None:
    own = signers.certificate("ci@acme.example", KEY)

    assert signatures.require(read(document(KEY, certificate=own)), DIGEST, [public(KEY)], now=NOW)


@pytest.mark.parametrize(
    ("pem", "found"),
    [
        (signers.private_pem(KEY), "'private key'"),
        (signers.certificates_pem(signers.certificate("x@y", KEY)), "'certificate'"),
        (signers.public_pem(KEY) * 2, "'public key', 'public key'"),
        (b"hello", "no PEM"),
        (b"-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----\n", "can't be read"),
        (signers.public_pem(ec.generate_private_key(ec.SECP384R1())), "secp384r1"),
        (signers.public_pem(rsa.generate_private_key(65537, 2048)), "RSA"),
    ],
    ids=["private", "certificate", "two", "none", "damaged", "p384", "rsa"],
)
def test_other_keys_are_refused(pem: bytes, found: str) -> None:
    with pytest.raises(TrustError) as caught:
        keys.public_key(pem)

    assert caught.value.code == "key-invalid"
    assert found in caught.value.message
