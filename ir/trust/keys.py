"""Public keys: read from PEM, compared with signatures. The key alone says which algorithm a signature is of.

Two kinds are taken, those that cosign and everything around it know: ECDSA over P-256 with SHA-256 (signatures in DER),
and Ed25519. `cryptography` does all of it, and is imported when the first key is read.
"""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from precast.ir import limits
from precast.ir.errors import TargetError, TrustError
from precast.ir.files import read_file

if TYPE_CHECKING:
    from types import ModuleType

PEM = b"-----BEGIN "


class PublicKey(msgspec.Struct, frozen=True, eq=False):
    """A key that signatures are verified with. `der` is its SubjectPublicKeyInfo, `key` cryptography's object."""

    der: bytes
    key: Any

    @property
    def fingerprint(self) -> str:
        """The key's name in messages: `sha256:` and the SHA-256 of its DER in hexadecimal."""
        return f"sha256:{hashlib.sha256(self.der).hexdigest()}"

    @property
    def hint(self) -> str:
        """The key's name in a sigstore bundle: the same hash in base64."""
        return base64.b64encode(hashlib.sha256(self.der).digest()).decode()

    def verifies(self, signature: bytes, data: bytes) -> bool:
        """Whether the signature is this key's over the data, by the one algorithm that the key is for."""
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives import hashes
        from cryptography.hazmat.primitives.asymmetric import ec

        try:
            if isinstance(self.key, ec.EllipticCurvePublicKey):
                self.key.verify(signature, data, ec.ECDSA(hashes.SHA256()))
            else:
                self.key.verify(signature, data)
        except InvalidSignature:
            return False
        return True


def read_pem(path: Path) -> bytes:
    """The content of a file of keys or certificates. Raises TrustError (`key-invalid`)."""
    try:
        data = read_file(path, limits.MAX_TRUST_BYTES)
    except OSError as error:
        raise TrustError("key-invalid", f"can't be read: {error.strerror}", where=str(path)) from None
    if len(data) > limits.MAX_TRUST_BYTES:
        raise TrustError("key-invalid", f"more than {limits.MAX_TRUST_BYTES} bytes", where=str(path))
    return data


def public_key(pem: bytes) -> PublicKey:
    """The one public key in a PEM text.

    Raises TrustError (`key-invalid`), and TargetError (`dependency-missing`) where cryptography is not installed.
    """
    if pem.count(PEM) != 1 or b"-----BEGIN PUBLIC KEY-----" not in pem:
        fix = "`openssl pkey -in KEY -pubout`, or `cosign public-key --key KEY`, writes one"
        raise TrustError("key-invalid", f"expected one public key in PEM, found {headings(pem)}", fix=fix)
    primitives = serialization()
    from cryptography.exceptions import UnsupportedAlgorithm

    try:
        key = primitives.load_pem_public_key(pem)
    except (ValueError, UnsupportedAlgorithm) as error:
        raise TrustError("key-invalid", f"the public key can't be read: {error}") from None
    return of(key)


def of(key: Any) -> PublicKey:
    """A public key of cryptography's. Raises TrustError (`key-invalid`) for one of another kind."""
    primitives = serialization()
    from cryptography.hazmat.primitives.asymmetric import ec, ed25519

    is_p256 = isinstance(key, ec.EllipticCurvePublicKey) and isinstance(key.curve, ec.SECP256R1)
    if not is_p256 and not isinstance(key, ed25519.Ed25519PublicKey):
        kind = f"a curve {key.curve.name}" if isinstance(key, ec.EllipticCurvePublicKey) else f"a {type(key).__name__}"
        raise TrustError("key-invalid", f"expected a key of ECDSA P-256 or Ed25519, found {kind}")
    form = primitives.PublicFormat.SubjectPublicKeyInfo
    return PublicKey(key.public_bytes(primitives.Encoding.DER, form), key)


def serialization() -> ModuleType:
    """cryptography's module that reads and writes keys. Raises TargetError (`dependency-missing`)."""
    try:
        from cryptography.hazmat.primitives import serialization as module
    except ModuleNotFoundError as error:
        raise needs("cryptography") from error
    return module


def needs(package: str) -> TargetError:
    """The error for a package of the extra `sign` that is not installed."""
    message = f"signing and verifying need the package {package}, which is not installed"
    return TargetError("dependency-missing", message, fix="pip install 'precast[sign]'")


def headings(pem: bytes) -> str:
    """What a file holds instead, by the headings of its PEM blocks."""
    lines = [line.strip() for line in pem.splitlines() if line.startswith(PEM)]
    names = [line.removeprefix(PEM).removesuffix(b"-----").decode(errors="replace").lower() for line in lines]
    return ", ".join(f"'{name[:50]}'" for name in names[:5]) or "no PEM"
