"""Whom this machine trusts, as data: `trust.json` (docs/trust.md).

Without any policy, portable layers, which are data, are taken from anyone, and native layers, which are code, from
nobody. A rule lets in what a key, a certificate authority or a digest vouches for; every answer names the rule.
"""

from __future__ import annotations

import datetime
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from precast.ir import limits
from precast.ir.bundle import codec
from precast.ir.errors import BundleError, TrustError, shown, some
from precast.ir.patterns import matches
from precast.ir.trust import certificates, keys, signatures
from precast.ir.trust.signatures import Found, Trusted

Kind = Literal["portable", "native"]
SYSTEM = Path("/etc/precast/trust.json")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


class Rule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One rule of a policy: who or what vouches (exactly one of `key`, `ca`, `digests`), for what, and from where.

    `scope` is the layers that it may let in: `native`, `portable`, or `any`. `digests` are those of bundles, or of
    single native layers. `key` and `ca` are PEM, or the name of a file beside the policy. `identities` are patterns of
    the names of a CA's signers. `repositories` are patterns of where the bundle came from; with any, a bundle of
    unknown origin is not let in by this rule. `*` in a pattern stands for any run of characters.
    """

    name: str
    scope: Literal["portable", "native", "any"]
    key: str = ""
    ca: str = ""
    digests: tuple[str, ...] = ()
    identities: tuple[str, ...] = ()
    repositories: tuple[str, ...] = ()


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A `trust.json`. `portable`: whether portable layers need a rule too."""

    version: int
    rules: tuple[Rule, ...] = ()
    portable: Literal["anyone", "vouched"] = "anyone"


class Decision(msgspec.Struct, frozen=True):
    """Whether a layer is let in, by which rule (None: by default), and why, as a message says it."""

    admitted: bool
    rule: str | None
    why: str


class _Sourced(msgspec.Struct, frozen=True):
    """A rule, the file that it is from, and the PEM that it names."""

    rule: Rule
    source: str
    pem: bytes


class Policy(msgspec.Struct, frozen=True):
    """The rules in force. `Policy()` is the default: portable layers from anyone, native layers from nobody."""

    rules: tuple[_Sourced, ...] = ()
    portable: Literal["anyone", "vouched"] = "anyone"

    @property
    def content(self) -> bytes:
        """What it says, as bytes: equal for equal rules, whichever files they are from."""
        return msgspec.json.encode([self.portable, [(each.rule, each.pem) for each in self.rules]])

    @staticmethod
    def read(path: Path) -> Policy:
        """The policy in this file alone. Raises TrustError (`trust-invalid`, `key-invalid`)."""
        found = _decode(path)
        problems = list(_problems(found))
        if problems:
            count = "1 mistake" if len(problems) == 1 else f"{len(problems)} mistakes"
            message = f"{count}: {'; '.join(some(problems))}"
            raise TrustError("trust-invalid", message, where=str(path), fix="docs/trust.md says what a rule holds")
        return Policy(tuple(_Sourced(rule, str(path), _pem(rule, path)) for rule in found.rules), found.portable)

    @staticmethod
    def of_this_machine(environment: Mapping[str, str] = os.environ, system: Path = SYSTEM) -> Policy:
        """The user's policy and the system's together: the rules of both, and the stricter word on portable layers.

        The user's is `precast/trust.json` in `XDG_CONFIG_HOME` or `~/.config`. A file that isn't there says nothing.
        Raises TrustError for one that can't be read.
        """
        places = [*_user_places(environment), system]
        found = [Policy.read(path) for path in places if _is_there(path)]
        is_strict = any(policy.portable == "vouched" for policy in found)
        rules = tuple(rule for policy in found for rule in policy.rules)
        return Policy(rules, "vouched" if is_strict else "anyone")

    def admits(
        self,
        kind: Kind,
        digest: str,
        found: Sequence[Found] = (),
        *,
        layer: str | None = None,
        repository: str | None = None,
        now: datetime.datetime | None = None,
    ) -> Decision:
        """Whether layers of this kind are let in, of the bundle with this digest.

        `layer` is the digest of the one layer that is meant: a rule's `digests` may name it in place of the bundle's.
        `found` are the statements attached to it, `repository` is where it came from, if that is known; `now`,
        for certificates, is the clock by default. Raises TrustError (`key-invalid`) and TargetError
        (`dependency-missing`) where a rule's key can't be used.
        """
        if kind == "portable" and self.portable == "anyone":
            return Decision(True, None, "portable layers are data, and taken from anyone")
        refused = []
        for each in self.rules:
            good, why = _ask(each, kind, (digest, layer), found, repository, now)
            name = f"rule {each.rule.name!r} of {each.source}"
            if good:
                return Decision(True, each.rule.name, f"{name}: {why}")
            refused.append(f"{name}: {why}")
        if not refused:
            return Decision(False, None, f"{kind} layers are taken from nobody unless a rule says so; there is none")
        return Decision(False, None, "; ".join(some(refused)))


def _ask(
    sourced: _Sourced,
    kind: Kind,
    digests: tuple[str, str | None],
    found: Sequence[Found],
    repository: str | None,
    now: datetime.datetime | None,
) -> tuple[bool, str]:
    """Whether the rule lets the layers in, and why. `digests`: the bundle's, and the layer's."""
    rule = sourced.rule
    if rule.scope not in (kind, "any"):
        return False, f"it is about {rule.scope} layers"
    if rule.repositories and repository is None:
        return False, f"it is about bundles from {', '.join(rule.repositories)}, and where this one is from isn't said"
    if rule.repositories and not any(matches(pattern, repository or "") for pattern in rule.repositories):
        return False, f"it is about bundles from {', '.join(rule.repositories)}, not from {shown(repository or '')}"
    if rule.digests:
        named = [each for each in digests if each in rule.digests]
        return bool(named), f"it names {named[0]}" if named else f"{digests[0]} is none of its digests"
    good, wrong = signatures.verified(found, digests[0], [_trusted(sourced)], now=now)
    if good:
        return True, f"signed by {good[0].signer}"
    return False, "; ".join(some(wrong)) or "the bundle is not signed"


def _trusted(sourced: _Sourced) -> Trusted:
    try:
        if sourced.rule.key:
            return keys.public_key(sourced.pem)
        return certificates.authority(sourced.pem, sourced.rule.identities)
    except TrustError as error:
        raise error.inside(f"{sourced.source}: rule {sourced.rule.name!r}") from None


# --- reading ---------------------------------------------------------------------------------------------------


def _user_places(environment: Mapping[str, str]) -> list[Path]:
    base = environment.get("XDG_CONFIG_HOME", "")
    if os.path.isabs(base):  # the XDG specification: others are to be ignored
        return [Path(base) / "precast" / "trust.json"]
    home = environment.get("HOME", "")
    return [Path(home) / ".config" / "precast" / "trust.json"] if os.path.isabs(home) else []


def _is_there(path: Path) -> bool:
    """Whether there is a policy. Where that can't be known, as in a folder that we may not enter, there is one."""
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True
    return True


def _decode(path: Path) -> _File:
    try:
        data = keys.read_pem(path)
        return codec.decode_foreign_json(data, _File, "trust policy", limits.MAX_TRUST_BYTES)
    except TrustError as error:
        fix = "check the path, and whether this user may read it"
        raise TrustError("trust-invalid", error.message, where=str(path), fix=fix) from None
    except BundleError as error:
        fix = "docs/trust.md says what a policy holds"
        raise TrustError("trust-invalid", error.message, where=str(path), fix=fix) from None


def _problems(found: _File) -> Iterator[str]:
    if found.version != 1:
        yield f"expected version 1, found {found.version}"
    if len(found.rules) > limits.MAX_RULES:
        yield f"{len(found.rules)} rules; at most {limits.MAX_RULES} are allowed"
        return
    names = [rule.name for rule in found.rules]
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield f"two rules are named {name!r}"
    for rule in found.rules:
        yield from (f"rule {rule.name!r}: {problem}" for problem in _problems_of(rule))


def _problems_of(rule: Rule) -> Iterator[str]:
    if not rule.name:
        yield "expected a name"
    given = [name for name in ("key", "ca", "digests") if getattr(rule, name)]
    if len(given) != 1:
        yield f"expected one of key, ca and digests, found {' and '.join(given) or 'none'}"
    if rule.identities and not rule.ca:
        yield "identities are those of a ca's signers, and there is no ca"
    yield from (f"expected a digest, found {each!r}" for each in rule.digests if not _DIGEST.fullmatch(each))


def _pem(rule: Rule, path: Path) -> bytes:
    """The PEM of a rule: its text, or the content of the file that it names."""
    text = rule.key or rule.ca
    if not text:
        return b""
    if text.startswith(keys.PEM.decode()):
        return text.encode()
    try:
        return keys.read_pem(path.parent / text)
    except ValueError:  # a null byte in the name
        raise TrustError("key-invalid", f"no file name: {text!r}", where=f"{path}: rule {rule.name!r}") from None
    except TrustError as error:
        raise error.inside(f"{path}: rule {rule.name!r}") from None
