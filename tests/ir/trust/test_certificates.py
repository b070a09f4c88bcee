"""Authorities: which certificates lead to them, when, and for whom."""

from __future__ import annotations

import base64
import datetime
import json

import pytest
import signers
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID
from signers import DAY, DIGEST, NOW, certificate, certificates_pem, document

from precast.ir.errors import BundleError, TrustError
from precast.ir.trust import certificates, signatures
from precast.ir.trust.certificates import CLOCK_SKEW, Authority, NotTrusted

ROOT_KEY, BETWEEN_KEY, KEY = signers.p256(), signers.p256(), signers.p256()
ROOT = certificate("root", ROOT_KEY, ca=True, path_length=1)
BETWEEN = certificate("between", BETWEEN_KEY, ROOT, ROOT_KEY, ca=True, path_length=0)
LEAF = certificate("ci@acme.example", KEY, BETWEEN, BETWEEN_KEY)
MINUTE = datetime.timedelta(minutes=1)


def der(*chain: object) -> tuple[bytes, ...]:
    return tuple(each.public_bytes(serialization.Encoding.DER) for each in chain)  # type: ignore[attr-defined]


def authority(*chain: object, identities: tuple[str, ...] = ()) -> Authority:
    return certificates.authority(certificates_pem(*chain), identities)  # type: ignore[arg-type]


def refusal(trusted: Authority, *chain: object, now: datetime.datetime = NOW) -> str:
    with pytest.raises(NotTrusted) as caught:
        certificates.signer(trusted, der(*chain), now)
    return str(caught.value)


def test_a_signer_below_an_authority_between() -> None:
    key, who = certificates.signer(authority(ROOT, BETWEEN), der(LEAF), NOW)

    assert (key.der, who) == (signers.public(KEY).der, "ci@acme.example")


def test_the_chain_may_come_with_the_signature() -> None:
    assert certificates.signer(authority(ROOT), der(LEAF, BETWEEN), NOW)[1] == "ci@acme.example"


def test_an_authority_without_its_root_is_trusted_itself() -> None:
    assert certificates.signer(authority(BETWEEN), der(LEAF), NOW)[1] == "ci@acme.example"


def test_of_several_without_a_root_the_last_is_it() -> None:
    other = certificate("other", signers.p256(), ROOT, ROOT_KEY, ca=True)

    assert certificates.signer(authority(other, BETWEEN), der(LEAF), NOW)
    assert "doesn't lead to the authority" in refusal(authority(BETWEEN, other), LEAF)


def test_an_issuer_whose_key_is_not_for_certificates() -> None:
    between = certificate("between", BETWEEN_KEY, ROOT, ROOT_KEY, ca=True, issues=False)

    assert "doesn't lead to the authority" in refusal(authority(ROOT, between), LEAF)


def test_an_ed25519_signer() -> None:
    leaf = certificate("ed@acme.example", signers.ed(), ROOT, ROOT_KEY)

    assert certificates.signer(authority(ROOT), der(leaf), NOW)[1] == "ed@acme.example"


def test_a_missing_link() -> None:
    assert "doesn't lead to the authority" in refusal(authority(ROOT), LEAF)


def test_another_root_of_the_same_name() -> None:
    forged = certificate("root", signers.p256(), ca=True)

    assert "doesn't lead to the authority" in refusal(authority(forged, BETWEEN), LEAF)


def test_an_issuer_that_did_not_sign_it() -> None:
    forged = certificate("ci@acme.example", KEY, BETWEEN, signers.p256())

    assert "doesn't lead to the authority" in refusal(authority(ROOT, BETWEEN), forged)


def test_a_signer_is_no_authority() -> None:
    below = certificate("eve@acme.example", signers.p256(), LEAF, KEY)

    assert "doesn't lead to the authority" in refusal(authority(ROOT, BETWEEN), below, LEAF)


def test_a_path_longer_than_the_authority_allows() -> None:
    key = signers.p256()
    deeper = certificate("deeper", key, BETWEEN, BETWEEN_KEY, ca=True)
    leaf = certificate("eve@acme.example", signers.p256(), deeper, key)

    assert "path length" in refusal(authority(ROOT, BETWEEN), leaf, deeper)


@pytest.mark.parametrize("usage", [ExtendedKeyUsageOID.SERVER_AUTH, None])
def test_a_certificate_for_another_purpose(usage: object) -> None:
    leaf = certificate("www@acme.example", KEY, ROOT, ROOT_KEY, usage=usage)

    assert "doesn't lead to the authority" in refusal(authority(ROOT), leaf)


def test_a_key_that_is_not_for_signatures() -> None:
    leaf = certificate("ci@acme.example", KEY, ROOT, ROOT_KEY, signs=False)

    assert "not for signatures" in refusal(authority(ROOT), leaf)


def test_an_expired_certificate_has_no_grace() -> None:
    message = refusal(authority(ROOT, BETWEEN), LEAF, now=NOW + DAY + MINUTE / 60)

    assert "valid from 2026-11-22T12:00:00Z to 2026-11-24T12:00:00Z, and it is 2026-11-24T12:00:01Z" in message
    assert certificates.signer(authority(ROOT, BETWEEN), der(LEAF), NOW + DAY)


def test_an_expired_authority() -> None:
    short = certificate("between", BETWEEN_KEY, ROOT, ROOT_KEY, ca=True, end=NOW - MINUTE)

    assert "doesn't lead to the authority" in refusal(authority(ROOT, short), LEAF)


def test_a_clock_that_is_behind_the_issuers() -> None:
    fresh = certificate("ci@acme.example", KEY, ROOT, ROOT_KEY, start=NOW)

    assert certificates.signer(authority(ROOT), der(fresh), NOW - CLOCK_SKEW)
    assert "valid from" in refusal(authority(ROOT), fresh, now=NOW - CLOCK_SKEW - MINUTE / 60)


def test_identities_are_patterns_of_the_signers_name() -> None:
    right = authority(ROOT, BETWEEN, identities=("*@other.example", "*@acme.example"))
    wrong = authority(ROOT, BETWEEN, identities=("*@other.example",))

    assert certificates.signer(right, der(LEAF), NOW)
    assert refusal(wrong, LEAF) == "the certificate is of ci@acme.example, which is none of *@other.example"


BRANCH = "https://github.com/evil/x/.github/workflows/w.yml@refs/heads/a@acme.example"


@pytest.mark.parametrize(
    ("pattern", "name", "matches"),
    [
        ("*@acme.example", BRANCH, False),
        ("*acme.example", BRANCH, False),
        ("https://github.com/evil/*", BRANCH, True),
        ("https://*@acme.example", BRANCH, True),
        ("*", BRANCH, True),
        ("*", "ci@acme.example", True),
        ("https:*", "https:x@evil.example", False),
    ],
)
def test_patterns_of_addresses_match_no_uri_and_the_reverse(pattern: str, name: str, matches: bool) -> None:
    leaf = certificate(name, KEY, BETWEEN, BETWEEN_KEY)
    trusted = authority(ROOT, BETWEEN, identities=(pattern,))

    if matches:
        assert certificates.signer(trusted, der(leaf), NOW)[1] == name
    else:
        assert f"which is none of {pattern}" in refusal(trusted, leaf)


def test_a_certificate_of_a_version_that_there_is_not() -> None:
    odd = der(LEAF)[0].replace(bytes.fromhex("a003020102"), bytes.fromhex("a003020106"), 1)

    with pytest.raises(NotTrusted, match="can't be read"):
        certificates.signer(authority(ROOT, BETWEEN), (odd,), NOW)


def test_a_certificate_whose_key_is_of_another_kind() -> None:
    leaf = certificate("ci@acme.example", ec.generate_private_key(ec.SECP384R1()), BETWEEN, BETWEEN_KEY)

    assert "secp384r1" in refusal(authority(ROOT, BETWEEN), leaf)


def test_a_certificate_that_is_none() -> None:
    with pytest.raises(NotTrusted, match="can't be read"):
        certificates.signer(authority(ROOT), (b"\x30\x03\x02\x01\x00",), NOW)


@pytest.mark.parametrize("pem", [b"", b"hello", signers.public_pem(KEY), certificates_pem(*[ROOT] * 9)])
def test_a_file_that_is_no_authority(pem: bytes) -> None:
    with pytest.raises(TrustError) as caught:
        certificates.authority(pem)
    assert caught.value.code == "key-invalid"


def require(data: bytes, trusted: Authority) -> list[signatures.Verified]:
    return signatures.require([signatures.read("sha256:0", data)], DIGEST, [trusted], now=NOW)


def test_a_signature_by_certificate() -> None:
    (good,) = require(document(KEY, certificate=LEAF), authority(ROOT, BETWEEN))

    assert good.signer == "ci@acme.example"


def test_a_certificate_of_another_key() -> None:
    with pytest.raises(BundleError, match=r"not that of the certificate's key, which is ci@acme\.example's"):
        require(document(signers.p256(), certificate=LEAF), authority(ROOT, BETWEEN))


def test_a_signature_without_its_certificate() -> None:
    with pytest.raises(BundleError, match="signed by a key"):
        require(document(KEY), authority(ROOT, BETWEEN))


def test_a_chain_in_the_document() -> None:
    bundle = signers.envelope(KEY, signers.claim(), LEAF)
    chain = [{"rawBytes": base64.b64encode(data).decode()} for data in der(LEAF, BETWEEN)]
    bundle["verificationMaterial"] = {"x509CertificateChain": {"certificates": chain}}

    assert require(json.dumps(bundle).encode(), authority(ROOT))
