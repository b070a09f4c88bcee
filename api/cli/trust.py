"""What `precast sign`, `attest` and `verify` do with keys, authorities and policies. No torch."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import msgspec

from precast.cli.show import Report
from precast.ir.artifact import Bundle, attach
from precast.ir.bundle.attached import Attached
from precast.ir.errors import BundleError, TrustError, shown
from precast.ir.trust import certificates, keys, signatures, statements
from precast.ir.trust.loading import FIX
from precast.ir.trust.policy import Decision, Policy
from precast.ir.trust.signatures import Trusted

PREDICATES: Mapping[str, str] = {"provenance": statements.PROVENANCE, "sbom": statements.CYCLONEDX}
PASSPHRASES = ("PRECAST_PASSPHRASE", "COSIGN_PASSWORD")
"""Variables that may hold the passphrase of a private key: ours, and cosign's."""


def signed(path: Path | str, key: Path, certificate: Path | None, name: str, plain_http: bool) -> Report:
    """Sign the bundle at the path or address; what was attached."""
    from precast.sign import signing

    private = _private_key(key)
    pem = None if certificate is None else signing.read_certificate(certificate)
    bundle = Bundle.open(path)
    made = signing.sign(bundle, private, certificate=pem, name=name)
    _attach(path, bundle, [made], private.public, plain_http)
    fields = {"digest": bundle.digest, "attached": made.digest, "key": private.public.fingerprint}
    return Report(fields, f"{bundle.digest}\nsigned by key {private.public.fingerprint}: {made.digest}")


def attested(
    path: Path | str, key: Path, certificate: Path | None, name: str, types: Sequence[str], builder_id: str,
    run_id: str, plain_http: bool,
) -> Report:  # fmt: skip
    """Attach signed statements of these types about the bundle at the path or address; what was attached."""
    from precast.sign import predicates, signing

    private = _private_key(key)
    pem = None if certificate is None else signing.read_certificate(certificate)
    bundle = Bundle.open(path)
    made = {}
    for type in types or tuple(PREDICATES):
        if type == "provenance":
            predicate = predicates.provenance(bundle, builder_id=builder_id, invocation_id=run_id)
        else:
            predicate = predicates.bill_of_materials(bundle)
        made[type] = signing.attest(bundle, private, PREDICATES[type], predicate, certificate=pem, name=name)
    _attach(path, bundle, list(made.values()), private.public, plain_http)
    lines = [f"{type} signed by key {private.public.fingerprint}: {each.digest}" for type, each in made.items()]
    attached = {type: each.digest for type, each in made.items()}
    fields = {"digest": bundle.digest, "attached": attached, "key": private.public.fingerprint}
    return Report(fields, "\n".join([bundle.digest, *lines]))


def trusted(key_files: Sequence[Path], ca_files: Sequence[Path], identities: Sequence[str]) -> list[Trusted]:
    """The keys and authorities in these files. Raises click's UsageError for identities without an authority."""
    if identities and not ca_files:
        raise click.UsageError("--identity goes with --ca")
    found: list[Trusted] = []
    for file in (*key_files, *ca_files):
        try:
            pem = keys.read_pem(file)
            is_key = file in key_files
            found.append(keys.public_key(pem) if is_key else certificates.authority(pem, tuple(identities)))
        except TrustError as error:
            raise error.inside(str(file)) if error.where is None else error from None
    return found


def vouched(bundle: Bundle, who: Sequence[Trusted], types: Sequence[str]) -> Report:
    """That the bundle is signed by one of these; with types of attestations, that it has these instead.

    Raises BundleError: `signature-missing`, `signature-invalid`.
    """
    found = signatures.attached_to(bundle.attached)
    fields: dict[str, Any] = {}
    lines = []
    if not types:
        good = signatures.require(found, bundle.digest, who)
        fields["signatures"] = [{"signer": each.signer, "attached": each.attached} for each in good]
        lines += [f"signature: good, by {each.signer}" for each in good]
    for type in types:
        predicate_type = PREDICATES.get(type, type)
        for each in signatures.require(found, bundle.digest, who, predicate_type):
            claim = {"type": predicate_type, "signer": each.signer, "attached": each.attached}
            fields.setdefault("attestations", []).append(claim | {"predicate": each.statement.predicate})
            lines.append(f"attestation {shown(predicate_type)}: good, by {each.signer}")
    return Report(fields, "\n".join(lines))


def decided(bundle: Bundle, trust: Path | None, repository: str | None) -> Report:
    """What the policy says of each kind of the bundle's layers: that in the file, or this machine's.

    Raises BundleError (`untrusted`) where the file keeps a layer out, or either one portable layers. Native layers that
    this machine's policy keeps out are left unused by a load, and only told.
    """
    policy = Policy.of_this_machine() if trust is None else Policy.read(trust)
    found = signatures.attached_to(bundle.attached)
    decisions = {"portable": policy.admits("portable", bundle.digest, found, repository=repository)}
    for target in bundle.native:
        layer = bundle.native_digest(target)
        decisions[target] = policy.admits("native", bundle.digest, found, layer=layer, repository=repository)
    refused = {name: decision for name, decision in decisions.items() if not decision.admitted}
    if "portable" in refused or (refused and trust is not None):
        message = "; ".join(f"{_layers(name)}: {_word(decision)}" for name, decision in refused.items())
        raise BundleError("untrusted", message, where=str(bundle.path), fix=FIX)
    fields = {"trust": {name: msgspec.to_builtins(decision) for name, decision in decisions.items()}}
    return Report(fields, "\n".join(f"{_layers(name)}: {_word(decision)}" for name, decision in decisions.items()))


def _layers(name: str) -> str:
    return "portable layers" if name == "portable" else f"native layer {name}"


def refresh(path: Path | str, plain_http: bool) -> None:
    """Ask the registry of an address what is attached by now: the store has what it was when the bundle was pulled."""
    if isinstance(path, str):
        from precast.registry.pull import pull

        pull(path, refresh=True, plain_http=plain_http)


def _attach(path: Path | str, bundle: Bundle, made: list[Attached], key: keys.PublicKey, plain_http: bool) -> None:
    """Attach to the bundle's directory, in place of what the key said before; or in its registry, beside that."""
    if isinstance(path, Path):
        from precast.sign.signing import repeated

        attach(path, *made, replacing=[digest for each in made for digest in repeated(bundle.attached, each, key)])
        return
    from precast.registry import attaching
    from precast.registry.client import Repository
    from precast.registry.reference import Reference

    repository = Repository(Reference.parse(path), writes=True, plain_http=plain_http)
    for each in made:
        attaching.attach(repository, bundle.descriptor, each)


def _word(decision: Decision) -> str:
    return f"{'let in' if decision.admitted else 'kept out'}: {shown(decision.why)}"


def _private_key(path: Path) -> Any:
    """The private key in a file; its passphrase comes from a variable, or is asked for on a terminal."""
    from precast.sign.private_keys import is_encrypted, read_private_key

    passphrase = next((os.environ[name] for name in PASSPHRASES if name in os.environ), None)
    if passphrase is None and sys.stdin.isatty() and is_encrypted(keys.read_pem(path)):
        passphrase = click.prompt(f"passphrase of {path}", hide_input=True, default="", show_default=False, err=True)
    return read_private_key(path, passphrase)
