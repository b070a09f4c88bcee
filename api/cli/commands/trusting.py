"""What holds of a bundle, and who vouches for it: `precast verify`, `sign`, `attest`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from precast.cli.options import (
    ALLOW_CONFIG_MISMATCH,
    AS_JSON,
    BUNDLE,
    CERTIFICATE,
    CHECKPOINT,
    KEY,
    NAME,
    PATH,
    PLAIN_HTTP,
    TIMEOUT,
    TRUST,
    together,
)  # fmt: skip
from precast.cli.verbs import Verb, print_report

if TYPE_CHECKING:
    from precast.cli.show import Report
    from precast.ir.artifact import Bundle

SIGNERS = together(
    click.option(
        "--key", "keys", type=PATH, multiple=True, help="A public key that must have signed; several: any of them."
    ),
    click.option(
        "--ca", "cas", type=PATH, multiple=True, help="Certificates of an authority, one of whose signers must."
    ),
    click.option(
        "--identity", "identities", multiple=True, metavar="PATTERN", help="Of --ca: the signer's name, with *."
    ),
    click.option(
        "--attestation", "attestations", multiple=True, metavar="TYPE",
        help="Look for this in place of a signature: provenance, sbom, or a predicate type's URI.",
    ),
)  # fmt: skip


@click.command(cls=Verb)
@BUNDLE
@click.option("--weights", help=CHECKPOINT)
@TIMEOUT
@ALLOW_CONFIG_MISMATCH
@click.option("--shards", type=int, metavar="N", help="Run N ranks on this CPU, and compare them with one.")
@click.option("--ep", type=int, metavar="M", help="Of --shards: the parts into which experts are split.  [default: 1]")
@click.option(
    "--pp", type=int, metavar="P", help="Divide the layers over P stages, of --shards ranks each.  [default: 1]"
)
@click.option(
    "--dp", type=int, metavar="N", help="Of --shards: N gives each of N ranks sequences of its own.  [default: 1]"
)
@SIGNERS
@TRUST
@click.option(
    "--repository", metavar="NAME", help="Where the bundle came from, for rules that ask. Default: as in its address."
)
@PLAIN_HTTP
@AS_JSON
def verify(
    bundle: Path | str, weights: str | None, weights_timeout: float, allow_config_mismatch: bool, shards: int | None,
    ep: int | None, pp: int | None, dp: int | None, keys: tuple[Path, ...], cas: tuple[Path, ...],
    identities: tuple[str, ...], attestations: tuple[str, ...], trust: Path | None, repository: str | None,
    plain_http: bool, as_json: bool,
) -> None:  # fmt: skip
    """Check BUNDLE byte by byte, its graph rule by rule, who signed it, and --weights, config and recipes.

    With --shards or --pp, all ranks compute the logits of a few tokens with random weights, in float32, and are
    compared with one rank: all layers of a small model, one of each kind of a large one.
    """
    if allow_config_mismatch and weights is None:
        raise click.UsageError("--allow-config-mismatch goes with --weights")
    if ep is not None and shards is None:
        raise click.UsageError("--ep goes with --shards")
    if dp is not None and shards is None:
        raise click.UsageError("--dp goes with --shards")
    from precast.cli import trust as trusting
    from precast.cli.show import Report
    from precast.ir.artifact import Bundle
    from precast.ir.trust.loading import repository_of

    who = trusting.trusted(keys, cas, identities)
    if attestations and not who:
        raise click.UsageError("--attestation goes with --key or --ca")
    trusting.refresh(bundle, plain_http)
    opened = Bundle.open_whole(bundle)
    whole = Report({"digest": opened.digest}, f"{opened.digest}\nbundle: whole, canonical, and valid by every rule")
    decided = trusting.decided(opened, trust, repository or repository_of(bundle))
    reports = [whole, *([trusting.vouched(opened, who, attestations)] if who else []), decided]
    if weights is not None:
        reports.append(_weights(opened, weights, weights_timeout, allow_config_mismatch))
    if shards is not None or pp is not None:
        from precast.cli.shards_proof import proof_of

        tp, stages, shares = (1 if each is None else each for each in (shards, pp, dp))
        reports.append(proof_of(opened, tp, ep or 1, stages, shares))
    fields = {name: value for each in reports for name, value in each.fields.items()}
    print_report(Report(fields, "\n".join(each.text for each in reports)), as_json)
    if "shards" in fields and not fields["shards"]["holds"]:
        click.get_current_context().exit(3)


def _weights(bundle: Bundle, weights: str, timeout: float, allow_config_mismatch: bool) -> Report:
    """Whether all params can be made from a checkpoint. Raises WeightsError with all that stands against it."""
    from precast.cli.show import Report
    from precast.ir.weights import config_facts, fit
    from precast.ir.weights.checkpoint import CheckpointFiles
    from precast.loader.sources.open import folder_of
    from precast.loader.sources.remote import Waits

    folder = folder_of(weights, Waits(timeout))
    files = CheckpointFiles.open(folder)
    if not allow_config_mismatch:
        config_facts.check(bundle.manifest.config, folder)
    fit.check(bundle.graph, bundle.manifest.checkpoint, files, most=None)
    num_params = len(bundle.graph.params)
    fields = {"params": num_params, "tensors": len(files.tensors)}
    found = f"all {num_params} params can be made from {folder.name}, by names, dtypes and shapes; no values were read"
    return Report(fields, f"weights: {found}")


@click.command(cls=Verb)
@BUNDLE
@KEY
@CERTIFICATE
@NAME
@PLAIN_HTTP
@AS_JSON
def sign(bundle: Path | str, key: Path, certificate: Path | None, name: str, plain_http: bool, as_json: bool) -> None:
    """Sign BUNDLE's digest, in the form that cosign verifies, and attach the signature. The digest stays."""
    from precast.cli.trust import signed

    print_report(signed(bundle, key, certificate, name, plain_http), as_json)


@click.command(cls=Verb)
@BUNDLE
@KEY
@CERTIFICATE
@NAME
@click.option("--type", "types", multiple=True, type=click.Choice(("provenance", "sbom")), help="Default: one of each.")
@click.option(
    "--builder-id", default="https://precast.dev/builder/local", metavar="URI", show_default=True,
    help="Of the provenance: what ran the build, as a CI workflow.",
)  # fmt: skip
@click.option("--run-id", default="", metavar="TEXT", help="Of the provenance: which of the builder's runs it was.")
@PLAIN_HTTP
@AS_JSON
def attest(
    bundle: Path | str, key: Path, certificate: Path | None, name: str, types: tuple[str, ...], builder_id: str,
    run_id: str, plain_http: bool, as_json: bool,
) -> None:  # fmt: skip
    """Attach signed statements of how BUNDLE was built (SLSA provenance) and of what (CycloneDX)."""
    from precast.cli.trust import attested

    print_report(attested(bundle, key, certificate, name, types, builder_id, run_id, plain_http), as_json)
