"""Private keys: read from PEM, plain or encrypted, in PKCS #8 or in cosign's own format.

cosign's format (github.com/sigstore/cosign, pkg/cosign/keys.go, and github.com/secure-systems-lab/go-securesystemslib,
encrypted): a PKCS #8 key under NaCl's secretbox, whose key scrypt makes from the passphrase.
"""

from __future__ import annotations

import base64
import binascii
from pathlib import Path
from typing import Any, Literal

import msgspec

from precast.ir import limits
from precast.ir.bundle import codec
from precast.ir.errors import BundleError, TrustError
from precast.ir.trust import keys
from precast.ir.trust.keys import PublicKey

_COSIGN = ("ENCRYPTED SIGSTORE PRIVATE KEY", "ENCRYPTED COSIGN PRIVATE KEY")
_PKCS8 = ("PRIVATE KEY", "ENCRYPTED PRIVATE KEY")
_SCRYPT_COSTS = (1 << 15, 1 << 16)
"""The costs that cosign has used; another one could take any memory. Both with r = 8: 32 and 64 MiB."""
_SECRETBOX_OVERHEAD = 16


class _Strict(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A part of cosign's format."""


class _Params(_Strict, frozen=True):
    N: int
    r: Literal[8]
    p: Literal[1]


class _Kdf(_Strict, frozen=True):
    name: Literal["scrypt"]
    params: _Params
    salt: str


class _Cipher(_Strict, frozen=True):
    name: Literal["nacl/secretbox"]
    nonce: str


class _Encrypted(_Strict, frozen=True):
    kdf: _Kdf
    cipher: _Cipher
    ciphertext: str


class PrivateKey(msgspec.Struct, frozen=True, eq=False):
    """A key that signs. `public` is the key that verifies what it signed."""

    public: PublicKey
    key: Any

    def sign(self, data: bytes) -> bytes:
        """The signature of the data: ECDSA with SHA-256 in DER, or Ed25519, as the key is."""
        from cryptography.hazmat.primitives import hashes
        from cryptography.hazmat.primitives.asymmetric import ec

        if isinstance(self.key, ec.EllipticCurvePrivateKey):
            return self.key.sign(data, ec.ECDSA(hashes.SHA256()))
        signature: bytes = self.key.sign(data)
        return signature


def read_private_key(path: Path, passphrase: str | None = None) -> PrivateKey:
    """The one private key in a PEM file. The passphrase of a key that isn't encrypted is not looked at.

    Raises TrustError: `key-invalid`, or `key-passphrase` where it is missing or wrong; TargetError
    (`dependency-missing`) where cryptography, or for cosign's format PyNaCl, is not installed.
    """
    try:
        return private_key(keys.read_pem(path), passphrase)
    except TrustError as error:
        raise error.inside(str(path)) if error.where != str(path) else error from None


def is_encrypted(pem: bytes) -> bool:
    """Whether a key in PEM wants a passphrase."""
    return b"-----BEGIN ENCRYPTED " in pem


def private_key(pem: bytes, passphrase: str | None = None) -> PrivateKey:
    """The private key in a PEM text; see `read_private_key`."""
    secret = None if passphrase is None else passphrase.encode()
    heading = _heading(pem)
    if is_encrypted(pem) and secret is None:
        fix = "set PRECAST_PASSPHRASE or COSIGN_PASSWORD"
        raise TrustError("key-passphrase", "the key is encrypted, and there is no passphrase", fix=fix)
    if heading in _COSIGN:
        return _of(keys.serialization().load_der_private_key, _decrypted(_body(pem, heading), secret or b""), None)
    return _of(keys.serialization().load_pem_private_key, pem, secret if is_encrypted(pem) else None)


def _of(load: Any, data: bytes, secret: bytes | None) -> PrivateKey:
    from cryptography.exceptions import UnsupportedAlgorithm

    try:
        key = load(data, secret)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        if secret is not None:
            raise TrustError("key-passphrase", "the passphrase is wrong, or the key is damaged") from None
        raise TrustError("key-invalid", f"the private key can't be read: {error}") from None
    return PrivateKey(keys.of(key.public_key()), key)


def _heading(pem: bytes) -> str:
    known = [name for name in (*_COSIGN, *_PKCS8) if f"-----BEGIN {name}-----".encode() in pem]
    if pem.count(keys.PEM) != 1 or len(known) != 1:
        message = f"expected one private key in PEM, of PKCS #8 or of cosign, found {keys.headings(pem)}"
        fix = "`openssl pkcs8 -topk8 -in KEY` turns a key of another PEM format into PKCS #8"
        if b"-----BEGIN PUBLIC KEY-----" in pem:
            fix = "sign with the private key that belongs to this public one"
        raise TrustError("key-invalid", message, fix=fix)
    return known[0]


def _body(pem: bytes, heading: str) -> bytes:
    begin, end = (f"-----{word} {heading}-----".encode() for word in ("BEGIN", "END"))
    _, _, rest = pem.partition(begin)
    text, found, _ = rest.partition(end)
    try:
        if not found:
            raise binascii.Error("its end is missing")
        return base64.b64decode(b"".join(text.split()), validate=True)
    except binascii.Error as error:
        raise TrustError("key-invalid", f"the private key is no PEM: {error}") from None


def _decrypted(data: bytes, secret: bytes) -> bytes:
    """The PKCS #8 key in DER inside cosign's format."""
    try:
        box = codec.decode_foreign_json(data, _Encrypted, "private key", limits.MAX_TRUST_BYTES)
        salt, nonce, ciphertext = (
            base64.b64decode(text, validate=True) for text in (box.kdf.salt, box.cipher.nonce, box.ciphertext)
        )
    except (BundleError, ValueError) as error:
        message = error.message if isinstance(error, BundleError) else str(error)
        raise TrustError("key-invalid", f"not a key as cosign writes it: {message}") from None
    if box.kdf.params.N not in _SCRYPT_COSTS or len(nonce) != 24 or len(ciphertext) < _SECRETBOX_OVERHEAD:
        raise TrustError("key-invalid", "not a key as cosign writes it: a cost, a nonce or a length that it never uses")
    keys.serialization()
    from cryptography.hazmat.primitives.kdf.scrypt import Scrypt

    try:
        from nacl.exceptions import CryptoError
        from nacl.secret import SecretBox
    except ModuleNotFoundError as error:
        raise keys.needs("pynacl") from error
    key = Scrypt(salt=salt, length=SecretBox.KEY_SIZE, n=box.kdf.params.N, r=8, p=1).derive(secret)
    try:
        return SecretBox(key).decrypt(ciphertext, nonce)
    except CryptoError:
        raise TrustError("key-passphrase", "the passphrase is wrong, or the key is damaged") from None
