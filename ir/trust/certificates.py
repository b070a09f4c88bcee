"""Certificate authorities: whether a signer's certificate leads to one, and is valid now.

The path is built and checked by `cryptography.x509.verification` (RFC 5280: signatures, dates, basic constraints, path
lengths, name constraints). Here is only what it is asked: a leaf for code signing, no more than `MAX_CERTIFICATES`
certificates, and the clocks of two machines, which differ.
"""

from __future__ import annotations

import datetime
import re
from typing import Any, NamedTuple

import msgspec

from precast.ir import limits
from precast.ir.errors import TrustError, is_failure, shown
from precast.ir.patterns import matches
from precast.ir.trust import keys
from precast.ir.trust.keys import PublicKey

_LOGGED_IN = ("1.3.6.1.4.1.57264.1.1", "1.3.6.1.4.1.57264.1.8")
"""The extensions by which Fulcio says at which service somebody logged in to get the certificate
(github.com/sigstore/fulcio, docs/oid-info.md)."""
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:")
CLOCK_SKEW = datetime.timedelta(minutes=5)
"""How far the clock of who issued a certificate may be ahead of ours. An expired certificate has no such grace."""


class NotTrusted(Exception):
    """Why a certificate doesn't count; whoever asked says where."""


class Authority(msgspec.Struct, frozen=True, eq=False):
    """Certificates that are trusted to name signers.

    `roots` are where a path must end, `intermediates` may stand in it. `identities` are patterns of the signers' names
    (e-mail addresses, URIs, DNS names of the certificate), of which one must match, as `_fits` says; empty: any name,
    but none of those who get a certificate by logging in somewhere, as by cosign's keyless signatures: that anybody
    can.
    """

    roots: tuple[Any, ...]
    intermediates: tuple[Any, ...]
    identities: tuple[str, ...] = ()


def authority(pem: bytes, identities: tuple[str, ...] = ()) -> Authority:
    """The authority in a PEM file: self-signed certificates are roots, all others intermediates.

    A file without a self-signed certificate has its last one as the root. Raises TrustError (`key-invalid`), and
    TargetError (`dependency-missing`).
    """
    found = _load(pem)
    roots = tuple(each for each in found if each.subject == each.issuer) or (found[-1],)
    return Authority(roots, tuple(each for each in found if each not in roots), identities)


def signer(
    trusted: Authority, certificates: tuple[bytes, ...], now: datetime.datetime | None = None
) -> tuple[PublicKey, str]:
    """The key that the first of these DER certificates names, and whose it is, if the authority vouches for it now.

    `now` is aware of its time zone; default: the clock. Raises NotTrusted.
    """
    try:
        return _signer(trusted, certificates, now or datetime.datetime.now(datetime.UTC))
    except NotTrusted:
        raise
    except TrustError as error:
        raise NotTrusted(f"the certificate's key: {error.message}") from None
    except BaseException as error:
        if not is_failure(error):  # of the library, whose errors for odd certificates have no class in common
            raise
        raise NotTrusted(f"the certificate can't be read: {shown(str(error))}") from None


def _signer(trusted: Authority, certificates: tuple[bytes, ...], now: datetime.datetime) -> tuple[PublicKey, str]:
    from cryptography import x509

    leaf, *others = [x509.load_der_x509_certificate(data) for data in certificates]
    names = _names(leaf)
    key = keys.of(leaf.public_key())
    who = " ".join(shown(name.text) for name in names) or shown(leaf.subject.rfc4514_string())
    _check_dates(leaf, who, now)
    _check_path(trusted, leaf, others, who, max(now, leaf.not_valid_before_utc))
    if not trusted.identities and (service := _logged_in_at(leaf)) is not None:
        message = f"the certificate is of {who}, who logged in at {shown(service)}, as anybody may"
        raise NotTrusted(f"{message}; it counts where identities are named")
    if trusted.identities and not any(_fits(each, name) for each in trusted.identities for name in names):
        raise NotTrusted(f"the certificate is of {who}, which is none of {', '.join(trusted.identities)}")
    return key, who


def _load(pem: bytes) -> list[Any]:
    keys.serialization()
    from cryptography import x509

    count = pem.count(keys.PEM)
    if not 1 <= count <= limits.MAX_CERTIFICATES or pem.count(b"-----BEGIN CERTIFICATE-----") != count:
        message = f"expected 1 to {limits.MAX_CERTIFICATES} certificates in PEM and nothing else"
        raise TrustError("key-invalid", message)
    try:
        return x509.load_pem_x509_certificates(pem)
    except BaseException as error:
        if not is_failure(error):
            raise
        raise TrustError("key-invalid", f"a certificate can't be read: {shown(str(error))}") from None


def _check_dates(leaf: Any, who: str, now: datetime.datetime) -> None:
    """The path's check looks at dates too; this one says which they are."""
    start, end = leaf.not_valid_before_utc, leaf.not_valid_after_utc
    if not start - CLOCK_SKEW <= now <= end:
        raise NotTrusted(
            f"the certificate of {who} is valid from {start:%FT%TZ} to {end:%FT%TZ}, and it is {now:%FT%TZ}"
        )


def _check_path(trusted: Authority, leaf: Any, others: list[Any], who: str, moment: datetime.datetime) -> None:
    from cryptography import x509
    from cryptography.x509 import verification

    agnostic = verification.Criticality.AGNOSTIC
    ours = verification.ExtensionPolicy.permit_all().require_present(x509.BasicConstraints, agnostic, None)
    theirs = (
        verification.ExtensionPolicy.permit_all()
        .require_present(x509.ExtendedKeyUsage, agnostic, _for_code)
        .may_be_present(x509.KeyUsage, agnostic, _may_sign)
    )
    verifier = (
        verification.PolicyBuilder()
        .store(verification.Store(list(trusted.roots)))
        .time(moment)
        .max_chain_depth(limits.MAX_CERTIFICATES)
        .extension_policies(ca_policy=ours.may_be_present(x509.KeyUsage, agnostic, _may_issue), ee_policy=theirs)
        .build_client_verifier()
    )
    try:
        verifier.verify(leaf, [*others, *trusted.intermediates])
    except verification.VerificationError as error:
        raise NotTrusted(f"the certificate of {who} doesn't lead to the authority: {shown(str(error))}") from None


def _for_code(policy: object, certificate: object, usage: Any) -> None:
    from cryptography.x509.oid import ExtendedKeyUsageOID

    if ExtendedKeyUsageOID.CODE_SIGNING not in usage:
        raise ValueError("it is not for code signing")


def _may_sign(policy: object, certificate: object, usage: Any) -> None:
    if usage is not None and not usage.digital_signature:
        raise ValueError("its key is not for signatures")


def _may_issue(policy: object, certificate: object, usage: Any) -> None:
    if usage is not None and not usage.key_cert_sign:
        raise ValueError("the issuer's key is not for certificates")


def _logged_in_at(leaf: Any) -> str | None:
    """The service where the certificate's holder logged in to get it, by its own words; None if it says nothing."""
    for extension in leaf.extensions:
        if extension.oid.dotted_string in _LOGGED_IN:
            value: bytes = extension.value.value
            return "".join(chr(byte) for byte in value if 0x20 <= byte < 0x7F) or "a service"
    return None


class _Name(NamedTuple):
    """A name of a certificate's holder: an e-mail address or a DNS name, or a URI."""

    text: str
    is_uri: bool


def _fits(pattern: str, name: _Name) -> bool:
    """Whether the pattern describes the name. One that begins with a scheme is about URIs, any other but `*` about
    addresses: a URI may hold anything, such as a branch that somebody named to end like an address."""
    return pattern == "*" or (name.is_uri == bool(_SCHEME.match(pattern)) and matches(pattern, name.text))


def _names(leaf: Any) -> list[_Name]:
    """The names of the certificate's holder: its e-mail addresses, URIs and DNS names."""
    from cryptography import x509

    try:
        names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
    kinds = (x509.RFC822Name, x509.UniformResourceIdentifier, x509.DNSName)
    return [
        _Name(name, kind is x509.UniformResourceIdentifier)
        for kind in kinds
        for name in names.get_values_for_type(kind)
    ]
