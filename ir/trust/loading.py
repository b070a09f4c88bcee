"""The trust policy as a load asks it: whether a bundle may be used at all, and which rules its native layers have."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from precast.ir.artifact import Bundle
from precast.ir.bundle.trust import Admitted, AnyOf, MadeHere, Refusal, Trust, folder_of_layers
from precast.ir.errors import BundleError
from precast.ir.trust import signatures
from precast.ir.trust.policy import Policy

FIX = "sign it with a key that a rule names, or add a rule: docs/trust.md"


class OfPolicy:
    """A policy's rules for the native layers of one bundle, which came from `repository`, if that is known."""

    def __init__(self, policy: Policy, bundle: Bundle, repository: str | None = None) -> None:
        self._policy = policy
        self._found = signatures.attached_to(bundle.attached)
        self._repository = repository

    def admits(self, manifest_digest: str, layer_digest: str) -> Admitted | Refusal:
        """See `precast.ir.bundle.trust.Trust`. Raises TrustError and TargetError, as `Policy.admits` does."""
        decision = self._policy.admits(
            "native", manifest_digest, self._found, layer=layer_digest, repository=self._repository
        )
        return Admitted(f"let in by {decision.why}") if decision.admitted else Refusal(decision.why)


def rules_of(
    bundle: Bundle, trust: Trust | str | os.PathLike[str] | None = None, repository: str | None = None
) -> Trust:
    """What lets the bundle's native layers in: `trust`, or what was compiled here and the policy in that file.

    None: this machine's policy, the user's and the system's. Raises BundleError (`untrusted`) where a policy keeps the
    portable layers out, TrustError for one that can't be read, and TargetError (`dependency-missing`).
    """
    if trust is not None and not isinstance(trust, (str, os.PathLike)):
        return trust
    policy = Policy.of_this_machine() if trust is None else Policy.read(Path(trust))
    decision = policy.admits("portable", bundle.digest, signatures.attached_to(bundle.attached), repository=repository)
    if not decision.admitted:
        message = f"portable layers are kept out: {decision.why}"
        raise BundleError("untrusted", message, where=str(bundle.path), fix=FIX)
    made_here = MadeHere(folder_of_layers())
    return AnyOf([made_here, OfPolicy(policy, bundle, repository)]) if policy.rules else made_here


def rules_text(trust: Trust | str | os.PathLike[str] | None, allowed: Sequence[str] = ()) -> str:
    """The rules for native layers in words, equal for equal rules: the digest of the policy and of what is `allowed`,
    or the name of the caller's own. Raises TrustError for a policy that can't be read."""
    digests = hashlib.sha256(msgspec.json.encode(sorted(allowed)))
    if trust is not None and not isinstance(trust, (str, os.PathLike)):
        return f"rules of its own, {type(trust).__qualname__}, beside {digests.hexdigest()[:16]}"
    policy = Policy.of_this_machine() if trust is None else Policy.read(Path(trust))
    digests.update(policy.content)
    return f"policy {digests.hexdigest()[:16]}"


def repository_of(address: object) -> str | None:
    """The repository, `HOST/NAME`, that an address `oci://HOST/NAME[:TAG][@DIGEST]` names; None for anything else."""
    if not isinstance(address, str) or not address.startswith("oci://"):
        return None
    host, _, rest = address.removeprefix("oci://").partition("/")
    return f"{host}/{rest.partition('@')[0].partition(':')[0]}"
