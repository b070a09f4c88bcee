"""Readers of what strangers attach to a bundle, and of policies and locks, as functions of bytes."""

from __future__ import annotations

import base64
import datetime
from pathlib import Path

from precast.ir.errors import BundleError
from precast.ir.trust import certificates, keys, signatures, statements
from precast.ir.trust.certificates import NotTrusted
from precast.ir.trust.policy import Policy
from precast.ir.weights import lock

SIGNED = Path(__file__).parents[1] / "api" / "sign" / "cosign"
DIGEST = "sha256:dda6f56c2a79d846ea0891f2699ab8653915b7a8cf43b2f596a6754b049b4349"
NOW = datetime.datetime(2026, 11, 23, tzinfo=datetime.UTC)
# A root, and a signer below it, until 2126.
ROOT = base64.b64decode(
    "MIIBhTCCASugAwIBAgIUUp5S/d6wVxNd6B8UOnjlvVOYtrcwCgYIKoZIzj0EAwIwDzENMAsGA1UEAwwEcm9vdDAgFw0yNjAxMDEwMDAwMDBaGA"
    "8yMTI2MDEwMTAwMDAwMFowDzENMAsGA1UEAwwEcm9vdDBZMBMGByqGSM49AgEGCCqGSM49AwEHA0IABCmfyswlk0sqtRDf6H8yQ59SNbQad6Fe"
    "zVn7bAqjVe8zIO4iSOFnqc5Zt+MDIwsSi7vjbpGovT/B5fvaWIhg6majYzBhMA8GA1UdEwEB/wQFMAMBAf8wHwYDVR0jBBgwFoAUxSQr8DDwY/"
    "sO9NwMwER6GAzjn+0wHQYDVR0OBBYEFMUkK/Aw8GP7DvTcDMBEehgM45/tMA4GA1UdDwEB/wQEAwIBBjAKBggqhkjOPQQDAgNIADBFAiEA1h34"
    "v8u+6aALlnfzRNUE5XyDQHvbuMlnnBmKnEfLjpwCIGB2vVgtsM64ZnYV3AIt6fiqb8icgFVnNWHWvYbU6fWJ"
)
LEAF = base64.b64decode(
    "MIIBwTCCAWagAwIBAgIUFCPMZ+dTTpJQYWQazTT62gn2eRYwCgYIKoZIzj0EAwIwDzENMAsGA1UEAwwEcm9vdDAgFw0yNjAxMDEwMDAwMDBaGA"
    "8yMTI2MDEwMTAwMDAwMFowGjEYMBYGA1UEAwwPY2lAYWNtZS5leGFtcGxlMFkwEwYHKoZIzj0CAQYIKoZIzj0DAQcDQgAEY0yTNihLY1hzT9tX"
    "1bnG+OAhWOP9kGPaZFBDLWXgpqYlO0qNo3SUUxHfJuVgPCQpnWR1x0KVsgmcA2OnKourCaOBkjCBjzAMBgNVHRMBAf8EAjAAMB8GA1UdIwQYMB"
    "aAFMUkK/Aw8GP7DvTcDMBEehgM45/tMB0GA1UdDgQWBBSBahKW2EVTYzdZnLiRzxrCTkVUVTAOBgNVHQ8BAf8EBAMCB4AwGgYDVR0RBBMwEYEP"
    "Y2lAYWNtZS5leGFtcGxlMBMGA1UdJQQMMAoGCCsGAQUFBwMDMAoGCCqGSM49BAMCA0kAMEYCIQCcUzJFXxu/SO20utuB7/SgWJcaNj6J9tzM7e"
    "/dNj5IvwIhAMxnXZo83Pn8CVEptIvtn07AyROSd8ZfM0uUPGg0RlLg"
)


def pem(der: bytes) -> bytes:
    """A certificate in PEM."""
    text = base64.b64encode(der).decode()
    return f"-----BEGIN CERTIFICATE-----\n{text}\n-----END CERTIFICATE-----\n".encode()


def read_statement(data: bytes, _: Path) -> None:
    """A sigstore bundle, its signature looked at for a key and an authority."""
    statements.unwrap(data)
    who = [keys.public_key((SIGNED / "cosign.pub").read_bytes()), certificates.authority(pem(ROOT))]
    for predicate_type in (statements.SIGNATURE, statements.PROVENANCE):
        signatures.verified([signatures.read("sha256:0", data)], DIGEST, who, predicate_type, NOW)


def read_certificate(data: bytes, _: Path) -> None:
    """A signer's certificate."""
    try:
        certificates.signer(certificates.authority(pem(ROOT)), (data,), NOW)
    except NotTrusted as error:
        raise BundleError("signature-invalid", str(error)) from None


def read_key(data: bytes, _: Path) -> None:
    """A public key in PEM."""
    keys.public_key(data)


def read_authority(data: bytes, _: Path) -> None:
    """An authority's certificates in PEM."""
    certificates.authority(data)


def read_policy(data: bytes, folder: Path) -> None:
    """A trust policy, asked about a bundle."""
    (folder / "trust.json").write_bytes(data)
    found = [signatures.read("sha256:0", (SIGNED / "signature.json").read_bytes())]
    for kind in ("portable", "native"):
        Policy.read(folder / "trust.json").admits(kind, DIGEST, found, repository="ghcr.io/acme/llama", now=NOW)


def read_lock(data: bytes, folder: Path) -> None:
    """A lock beside a checkpoint."""
    (folder / "config.json").write_bytes(b"{}")
    (folder / lock.NAME).write_bytes(data)
    lock.read(folder)
