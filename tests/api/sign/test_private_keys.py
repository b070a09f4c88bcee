"""Private keys: the forms that are read, and what is said of others."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
import signers
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa

from precast.ir.errors import TrustError
from precast.ir.trust import keys
from precast.sign.private_keys import private_key, read_private_key

COSIGN = Path(__file__).parent / "cosign"
HEADING = "ENCRYPTED SIGSTORE PRIVATE KEY"


def code_of(pem: bytes, passphrase: str | None = None) -> str:
    with pytest.raises(TrustError) as caught:
        private_key(pem, passphrase)
    return caught.value.code


def box() -> dict[str, Any]:
    """cosign's key, taken apart."""
    lines = (COSIGN / "cosign.key").read_text().splitlines()
    found: dict[str, Any] = json.loads(base64.b64decode("".join(lines[1:-1])))
    return found


def pem_of(found: dict[str, Any]) -> bytes:
    text = base64.b64encode(json.dumps(found).encode()).decode()
    return f"-----BEGIN {HEADING}-----\n{text}\n-----END {HEADING}-----\n".encode()


@pytest.mark.parametrize("key", [signers.p256(), signers.ed()], ids=["p256", "ed25519"])
@pytest.mark.parametrize("passphrase", [None, "pass \u00fc"])
def test_a_pkcs8_key_signs(key: signers.Key, passphrase: str | None) -> None:
    read = private_key(signers.private_pem(key, passphrase and passphrase.encode()), passphrase)

    assert read.public.der == signers.public(key).der
    assert signers.public(key).verifies(read.sign(b"data"), b"data")
    assert not signers.public(key).verifies(read.sign(b"data"), b"date")


def test_a_key_that_cosign_made() -> None:
    read = read_private_key(COSIGN / "cosign.key", "secret")

    assert read.public.der == keys.public_key((COSIGN / "cosign.pub").read_bytes()).der


@pytest.mark.parametrize(
    "pem",
    [signers.private_pem(signers.p256(), b"right"), (COSIGN / "cosign.key").read_bytes()],
    ids=["pkcs8", "cosign"],
)
def test_a_passphrase_that_is_wrong_or_missing(pem: bytes) -> None:
    assert [code_of(pem, given) for given in (None, "", "wrong")] == ["key-passphrase"] * 3


def test_a_passphrase_that_is_not_needed() -> None:
    key = signers.p256()

    assert private_key(signers.private_pem(key), "unused").public.der == signers.public(key).der


def change_cost(found: dict[str, Any]) -> None:
    found["kdf"]["params"]["N"] = 1 << 24


def change_kdf(found: dict[str, Any]) -> None:
    found["kdf"]["name"] = "pbkdf2"


def cut_nonce(found: dict[str, Any]) -> None:
    found["cipher"]["nonce"] = "AAAA"


def cut_text(found: dict[str, Any]) -> None:
    found["ciphertext"] = "AAAA"


def add_field(found: dict[str, Any]) -> None:
    found["surprise"] = 1


@pytest.mark.parametrize("change", [change_cost, change_kdf, cut_nonce, cut_text, add_field])
def test_what_cosign_never_writes_is_refused_before_it_costs_anything(change: Any) -> None:
    found = box()
    change(found)

    assert code_of(pem_of(found), "secret") == "key-invalid"


def test_a_ciphertext_that_was_changed() -> None:
    found = box()
    data = bytearray(base64.b64decode(found["ciphertext"]))
    data[-1] ^= 1
    found["ciphertext"] = base64.b64encode(data).decode()

    assert code_of(pem_of(found), "secret") == "key-passphrase"


def traditional(key: Any) -> bytes:
    form = serialization.PrivateFormat.TraditionalOpenSSL
    pem: bytes = key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())
    return pem


@pytest.mark.parametrize(
    "pem",
    [
        b"",
        b"hello",
        signers.public_pem(signers.p256()),
        signers.private_pem(signers.p256()) * 2,
        traditional(signers.p256()),
        signers.private_pem(rsa.generate_private_key(65537, 2048)),
        signers.private_pem(ec.generate_private_key(ec.SECP521R1())),
        b"-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n",
        b"-----BEGIN PRIVATE KEY-----\n",
        f"-----BEGIN {HEADING}-----\n".encode(),
        f"-----BEGIN {HEADING}-----\n?\n-----END {HEADING}-----\n".encode(),
    ],
    ids=["empty", "text", "public", "two", "sec1", "rsa", "p521", "damaged", "cut", "cosign cut", "cosign damaged"],
)
def test_other_files_are_refused(pem: bytes) -> None:
    assert code_of(pem, "x") == "key-invalid"


def test_a_public_key_signs_nothing() -> None:
    with pytest.raises(TrustError) as caught:
        private_key(signers.public_pem(signers.p256()))

    assert caught.value.fix == "sign with the private key that belongs to this public one"


def test_an_error_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "k.pem").write_bytes(b"hello")

    for file in (tmp_path / "k.pem", tmp_path / "none.pem"):
        with pytest.raises(TrustError) as caught:
            read_private_key(file)
        assert caught.value.where == str(file)
