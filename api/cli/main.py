"""The command line: `precast VERB ...`.

Verbs that only look at a bundle import no torch. Every error of Precast's own becomes one message on standard error,
with --json one object on standard output as well, and the exit code of its kind: 1 the user's input, 2 usage (the value
of an option, above all), 3 a bundle refused, 4 the environment. Ctrl-C ends with 130.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from precast import __version__
from precast.cli.spelling import as_typed
from precast.ir.errors import BuildError, PrecastError, RequestError, TargetError, printable

if TYPE_CHECKING:
    from collections.abc import Callable

    from precast.cli.show import Report
    from precast.ir.artifact import Bundle
    from precast.loader.engine.engine import Engine
    from precast.loader.engine.params import SamplingParams
    from precast.loader.engine.results import Event, Output
    from precast.loader.world.processes import Processes


class BundlePath(click.Path):
    """A path, or an address such as `oci://ghcr.io/org/name@sha256:...`, which stays text."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The path, or the address as it is."""
        is_address = isinstance(value, str) and "://" in value
        return value if is_address else super().convert(value, param, ctx)


# What can't be read is an error of Precast's own, with a code, not one of usage.
PATH = click.Path(path_type=Path, readable=False)
DIRECTORY = click.Path(path_type=Path, file_okay=False)
CHECKPOINT = "Checkpoint: a directory with safetensors files, one file, or the address of either (https, s3, gs)."
TIMEOUT = click.option(
    "--weights-timeout", type=float, default=30.0, show_default=True,
    help="Seconds to wait for a server of weights, for an answer and for each next part of it.",
)  # fmt: skip
BUNDLE = click.argument("bundle", type=BundlePath(path_type=Path, readable=False))
CHOICES = click.option(
    "--choices", type=PATH, metavar="FILE",
    help="Measured choices of kernels, of `precast bench kernels`. Default: those that come with Precast for the GPU.",
)  # fmt: skip
KEY = click.option("--key", required=True, type=PATH, help="The private key: PKCS #8 in PEM, or cosign's.")
CERTIFICATE = click.option(
    "--certificate", type=PATH, help="The key's certificate, in PEM, for those who trust its CA."
)
TRUST = click.option(
    "--trust", type=PATH, metavar="FILE", help="The trust policy. Default: the user's and the system's."
)
NAME = click.option("--name", default="", metavar="TEXT", help="What the statement calls the bundle.")
REFERENCE = click.argument("reference", metavar="HOST/NAME[:TAG][@DIGEST]")
PLAIN_HTTP = click.option(
    "--plain-http", is_flag=True, help="Speak HTTP without TLS, which otherwise only this machine's own registry gets."
)
AS_JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")


def _timeouts(_: click.Context, __: click.Parameter, given: tuple[str, ...]) -> dict[str, float]:
    """`PHASE=SECONDS` as a mapping; what the loader says of names and ranges, it says."""
    found = {}
    for text in given:
        name, equals, seconds = text.partition("=")
        try:
            found[name] = float(seconds)
        except ValueError:
            equals = ""
        if not equals:
            raise click.BadParameter(f"{text!r} is no PHASE=SECONDS such as join=30", param_hint="--timeout")
    return found


class _Verb(click.Command):
    """A command that turns Precast's errors into messages and exit codes."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except PrecastError as error:
            options = ctx.command.params
            error.message = as_typed(error.message, options)
            error.fix = None if error.fix is None else as_typed(error.fix, options)
            if ctx.params["as_json"]:
                fields = {"code": error.code, "message": error.message, "where": error.where, "fix": error.fix}
                click.echo(json.dumps({"error": fields}))
            click.echo(printable(f"error: {error}"), err=True)
            is_usage = error.code == "cache-too-small" and ctx.params.get("cache_bytes") is not None
            ctx.exit(2 if is_usage else error.exit_code)
        except KeyboardInterrupt:
            click.echo("\ninterrupted", err=True)  # after the terminal's ^C
            ctx.exit(130)


class _Verbs(click.Group):
    command_class = _Verb


@click.group(cls=_Verbs, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="precast")
def main() -> None:
    """Cast a language model once, offline, into a bundle; set it up on the target in seconds.

    Exit codes: 0 fine, 1 the input can't be used, 2 usage, as a wrong option, 3 the bundle is refused, 4 the machine
    lacks something, 130 interrupted, 143 ended by SIGTERM.
    """


@main.command()
@click.argument("source")
@click.option("-o", "--out", required=True, type=PATH, help="The bundle's directory.")
@click.option("--dtype", default="auto", show_default=True, help="float32, bfloat16, float16, or the config's (auto).")
@click.option("--max-seq-len", type=int, help="Longest sequence served, in tokens. Default: the config's limit.")
@click.option("--page-size", type=int, help="Tokens per page of the caches. Default: chosen for each group of layers.")
@click.option(
    "--kv-dtype", default="auto", show_default=True, help="Of cached keys and values: fp8_e4m3, or the model's (auto)."
)
@click.option(
    "--shard-plan", type=PATH, help="JSON file that says of params, by patterns of names, how they are split."
)
@click.option("--snapshots", type=DIRECTORY, help="Directory of snapshots that speed up rebuilds.")
@click.option("--snapshot-after", metavar="STAGE", help="The stage that is kept.  [default: shard]")
@click.option(
    "--disable-pass", "disabled_passes", multiple=True, metavar="NAME", help="Leave out this pass; may be repeated."
)
@click.option(
    "--target", "targets", multiple=True, metavar="SM",
    help="Compile the kernels for GPUs of this compute capability (sm_90) into the bundle; may be repeated.",
)  # fmt: skip
@click.option(
    "--choices", "tables", type=PATH, multiple=True, metavar="FILE",
    help="With --target: measured choices that the bundle may be loaded with; may be repeated.",
)  # fmt: skip
@click.option("--dump", type=DIRECTORY, help="Directory that gets the graph after each pass.")
@click.option(
    "--allow-remote-code",
    is_flag=True,
    help="Run the code that comes with a model which transformers does not have. It runs here, in the builder, with "
    "your rights; none of it enters the bundle.",
)
@click.option(
    "--model-type",
    metavar="TYPE",
    help="Build the config as that of a model of this type, which transformers has; its own code then doesn't run.",
)
@click.option("--check", is_flag=True, help="Compare the model, made tiny, with transformers; pack only if equal.")
@AS_JSON
def build(source: str, out: Path, tables: tuple[Path, ...], as_json: bool, **options: Any) -> None:
    """Build the bundle of SOURCE: a model directory, a config.json, or a hub id. Needs no GPU and no weights."""
    if tables and not options["targets"]:
        raise click.UsageError("--choices goes with --target")
    from precast.cli.progress import BUILD_STAGES, stages
    from precast.cli.show import summary
    from precast.ir.artifact import check_output

    check_output(out)  # before torch is imported; the build checks it again
    if tables:
        from precast.kernels.measured import read_table

        options["choices"] = [read_table(path) for path in tables]
    with stages(BUILD_STAGES, "building") as progress:
        bundle = _build(source, out, progress=progress, **options)
    _report(summary(bundle), as_json)


@main.command()
@BUNDLE
@click.option("--graph", is_flag=True, help="The graph as text.")
@click.option("--passes", is_flag=True, help="The passes as they ran.")
@click.option("--weights", is_flag=True, help="Each param and how it is made, and the config that was built from.")
@click.option("--cache", is_flag=True, help="Cache groups, pools, and what sequences cost.")
@click.option("--kernels", is_flag=True, help="What computes each op on a target, and why.")
@click.option("--capture", is_flag=True, help="Which steps are captured as CUDA graphs, and where a target cuts them.")
@click.option("--shards", is_flag=True, help="Over how many ranks the model can be split, and how each layer is.")
@click.option("--target", help="Of --kernels and --capture: cpu, or a GPU's compute capability.  [default: sm_90]")
@CHOICES
@AS_JSON
def inspect(bundle: Path, target: str | None, choices: Path | None, as_json: bool, **parts: bool) -> None:
    """Show what is in BUNDLE: a summary, or the parts of it that are asked for."""
    from precast.cli import capture_view, kernels_view, shards_view, show, targets
    from precast.ir.artifact import Bundle
    from precast.kernels.use import Target

    for name, value in (("target", target), ("choices", choices)):
        if value is not None and not (parts["kernels"] or parts["capture"]):
            raise click.UsageError(f"--{name} goes with --kernels or --capture")
    try:
        wanted = Target.parse(target or "sm_90")
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--target") from error
    where = targets.with_table(wanted, choices)
    kernels, capture = (module.view(where) for module in (kernels_view, capture_view))
    opened = Bundle.open(bundle)
    views: dict[str, Callable[[Bundle], Report]] = {
        "graph": show.graph, "passes": show.passes, "weights": show.weights, "cache": show.cache, "kernels": kernels,
        "capture": capture, "shards": shards_view.shards,
    }  # fmt: skip
    reports = [view(opened) for name, view in views.items() if parts[name]]
    _report(show.together(reports or [show.summary(opened)]), as_json)


@main.command()
@BUNDLE
@click.option("--weights", help=CHECKPOINT)
@TIMEOUT
@click.option("--shards", type=int, metavar="N", help="Run N ranks on this CPU, and compare them with one.")
@click.option("--ep", type=int, metavar="M", help="Of --shards: the parts into which experts are split.  [default: 1]")
@click.option(
    "--pp", type=int, metavar="P", help="Divide the layers over P stages, of --shards ranks each.  [default: 1]"
)
@click.option(
    "--key", "keys", type=PATH, multiple=True, help="A public key that must have signed; several: any of them."
)
@click.option("--ca", "cas", type=PATH, multiple=True, help="Certificates of an authority, one of whose signers must.")
@click.option("--identity", "identities", multiple=True, metavar="PATTERN", help="Of --ca: the signer's name, with *.")
@click.option(
    "--attestation", "attestations", multiple=True, metavar="TYPE",
    help="Look for this in place of a signature: provenance, sbom, or a predicate type's URI.",
)  # fmt: skip
@TRUST
@click.option(
    "--repository", metavar="NAME", help="Where the bundle came from, for rules that ask. Default: as in its address."
)
@PLAIN_HTTP
@AS_JSON
def verify(
    bundle: Path | str, weights: str | None, weights_timeout: float, shards: int | None, ep: int | None,
    pp: int | None, keys: tuple[Path, ...], cas: tuple[Path, ...], identities: tuple[str, ...],
    attestations: tuple[str, ...], trust: Path | None, repository: str | None, plain_http: bool, as_json: bool,
) -> None:  # fmt: skip
    """Check BUNDLE byte by byte, its graph rule by rule, who signed it, and --weights, config and recipes.

    With --shards or --pp, all ranks compute the logits of a few tokens with random weights, in float32, and are
    compared with one rank: all layers of a small model, one of each kind of a large one.
    """
    if ep is not None and shards is None:
        raise click.UsageError("--ep goes with --shards")
    from precast.cli import trust as trusting
    from precast.cli.show import Report
    from precast.ir.artifact import Bundle
    from precast.ir.trust.loading import repository_of

    who = trusting.trusted(keys, cas, identities)
    if attestations and not who:
        raise click.UsageError("--attestation goes with --key or --ca")
    trusting.refresh(bundle, plain_http)
    opened = Bundle.open(bundle)
    reports = [trusting.decided(opened, trust, repository or repository_of(bundle))]
    if who:
        reports.insert(0, trusting.vouched(opened, who, attestations))
    fields: dict[str, Any] = {"digest": opened.digest}
    lines = [opened.digest, "bundle: whole, canonical, and valid by every rule"]
    for report in reports:
        fields |= report.fields
        lines.append(report.text)
    if weights is not None:
        from precast.ir.weights import config_facts, recipes
        from precast.ir.weights.checkpoint import CheckpointFiles
        from precast.loader.sources.open import folder_of
        from precast.loader.sources.remote import Waits

        folder = folder_of(weights, Waits(weights_timeout))
        files = CheckpointFiles.open(folder)
        config_facts.check(opened.manifest.config, folder)
        recipes.check(opened.graph, opened.manifest.checkpoint, files, most=None)
        fields |= {"params": len(opened.graph.params), "tensors": len(files.tensors)}
        lines.append(f"weights: all {len(opened.graph.params)} params can be made from {folder.name}")
    is_split = True
    if shards is not None or pp is not None:
        from precast.cli.shards_proof import proof_of

        found = proof_of(opened, 1 if shards is None else shards, ep or 1, 1 if pp is None else pp)
        fields |= found.fields
        lines.append(found.text)
        is_split = found.fields["shards"]["holds"]
    _report(Report(fields, "\n".join(lines)), as_json)
    if not is_split:
        click.get_current_context().exit(3)


@main.command()
@BUNDLE
@KEY
@CERTIFICATE
@NAME
@PLAIN_HTTP
@AS_JSON
def sign(bundle: Path | str, key: Path, certificate: Path | None, name: str, plain_http: bool, as_json: bool) -> None:
    """Sign BUNDLE's digest, in the form that cosign verifies, and attach the signature. The digest stays."""
    from precast.cli.trust import signed

    _report(signed(bundle, key, certificate, name, plain_http), as_json)


@main.command()
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

    _report(attested(bundle, key, certificate, name, types, builder_id, run_id, plain_http), as_json)


@main.command()
@click.argument("first", type=PATH)
@click.argument("second", type=PATH)
@AS_JSON
def diff(first: Path, second: Path, as_json: bool) -> None:
    """Show what differs between the bundles FIRST and SECOND. Exits with 1 if anything does."""
    from precast.cli.compare import difference
    from precast.ir.artifact import Bundle

    report = difference(Bundle.open(first), Bundle.open(second))
    _report(report, as_json)
    click.get_current_context().exit(0 if report.fields["equal"] else 1)


@main.command()
@BUNDLE
@click.option("--choices", type=PATH, metavar="FILE", help="A table that was measured before. Default: measure now.")
@AS_JSON
def seal(bundle: Path, choices: Path | None, as_json: bool) -> None:
    """Attach to BUNDLE which kernels are the fastest on this machine's GPU. Its digest stays what it is."""
    from precast.cli.seal_view import seal as sealed

    _report(sealed(bundle, choices), as_json)


@main.group(cls=_Verbs)
def bench() -> None:
    """Measure this machine, and keep what was measured."""


@bench.command("kernels")
@BUNDLE
@click.option("-o", "--out", type=PATH, help="The table's file.")
@AS_JSON
def bench_kernels(bundle: Path, out: Path | None, as_json: bool) -> None:
    """Time each implementation of BUNDLE's ops on this machine's GPU; `--choices` takes the table of the fastest."""
    from precast.cli.kernels_bench import bench as measured

    _report(measured(bundle, out), as_json)


@bench.command("startup")
@BUNDLE
@click.option("--weights", required=True, type=PATH, help="Checkpoint directory with safetensors files, or one file.")
@click.option("--device", help="cpu, cuda, cuda:1. Default: the GPU if there is one.")
@click.option("--runs", type=int, default=5, show_default=True, help="Starts of each, in turn.")
@click.option(
    "--cache", type=click.Choice(["warm", "cold", "both"]), default="both", show_default=True,
    help="Whether the checkpoint and installed packages are in the page cache.",
)  # fmt: skip
@click.option("--vs", "versus", multiple=True, metavar="COMMAND", help="Another server's command; may be repeated.")
@click.option("--until", metavar="REGEX", help="The line that ends the time of --vs.  [default: the first output]")
@click.option("--timeout", type=float, default=600.0, show_default=True, help="Seconds that a start may take.")
@click.option("-o", "--out", type=PATH, help="File for the report: a page (.html), or .json.")
@AS_JSON
def bench_startup(bundle: Path | str, weights: Path, out: Path | None, as_json: bool, **options: Any) -> None:
    """Time starts of BUNDLE from a new process to its first token, beside a floor, torch alone, and other servers."""
    from precast.cli.startup_bench import bench as measured
    from precast.cli.timeline_file import check_file

    check_file(None if out is None else str(out), "--out")
    _report(measured(bundle, weights, out, **options), as_json)


@main.command()
@click.option("--device", help="cpu, or a GPU that must be there: cuda, cuda:1. Default: the GPU if there is one.")
@click.option(
    "--weights", type=PATH, help="A checkpoint here, whose disk is measured. Default: that of temporary files."
)
@AS_JSON
def doctor(device: str | None, weights: Path | None, as_json: bool) -> None:
    """Say what this machine allows, what would be slow and why, and what to do. Needs no GPU, and no torch."""
    from precast.cli.doctor_view import view

    report, exit_code = view(device, weights)
    _report(report, as_json)
    click.get_current_context().exit(exit_code)


@main.command()
@BUNDLE
@AS_JSON
def digest(bundle: Path, as_json: bool) -> None:
    """Print BUNDLE's digest: equal digests are equal bundles, whenever and wherever they were built."""
    from precast.cli.show import Report
    from precast.ir.artifact import Bundle

    opened = Bundle.open(bundle)
    _report(Report({"digest": opened.digest}, opened.digest), as_json)


@main.command()
@click.argument("bundle", type=PATH)
@REFERENCE
@click.option("--image", "as_image", is_flag=True, help="Push an image with one layer, for runtimes that mount images.")
@click.option(
    "--mount-from", multiple=True, metavar="NAME",
    help="A repository of the same registry that has some of the blobs; may be repeated.",
)  # fmt: skip
@PLAIN_HTTP
@AS_JSON
def push(bundle: Path, reference: str, as_json: bool, **options: Any) -> None:
    """Push BUNDLE and what is attached to it to a registry, with the digest that it has."""
    from precast.cli import registry_view
    from precast.cli.progress import transferred
    from precast.registry.push import push as pushed

    with transferred("pushing") as progress:
        found = pushed(bundle, reference, progress=progress, **options)
    _report(registry_view.pushed(found), as_json)


@main.command()
@REFERENCE
@click.option("-o", "--out", type=PATH, help="The bundle's directory. Without it the bundle is in the store alone.")
@click.option("--refresh", is_flag=True, help="Ask what is attached by now, also of a bundle that the store has.")
@PLAIN_HTTP
@AS_JSON
def pull(reference: str, out: Path | None, as_json: bool, **options: Any) -> None:
    """Pull a bundle and what is attached to it from a registry."""
    from precast.cli import registry_view
    from precast.cli.progress import transferred
    from precast.registry.pull import pull as pulled

    with transferred("pulling") as progress:
        found = pulled(reference, out, progress=progress, **options)
    _report(registry_view.pulled(found), as_json)


@main.command()
@BUNDLE
@click.argument("weights", type=BundlePath(path_type=Path, readable=False))
@PLAIN_HTTP
@AS_JSON
def link(bundle: Path | str, weights: Path | str, plain_http: bool, as_json: bool) -> None:
    """Note with WEIGHTS that BUNDLE was made for them: in their registry (oci://...), or beside a checkpoint."""
    from precast.cli.links import linked

    _report(linked(bundle, weights, plain_http), as_json)


@main.command()
@click.argument("weights", type=BundlePath(path_type=Path, readable=False))
@click.option("--target", metavar="NAME", help="Only bundles that run there, such as sm_90.")
@PLAIN_HTTP
@AS_JSON
def find(weights: Path | str, target: str | None, plain_http: bool, as_json: bool) -> None:
    """Print the bundles that were made for WEIGHTS: a repository (oci://...), or a checkpoint with a precast.lock."""
    from precast.cli.links import found

    _report(found(weights, target, plain_http), as_json)


@main.group(cls=_Verbs)
def store() -> None:
    """The local store of bundles that were pulled: in $PRECAST_STORE, or below the user's cache directory."""


@store.command("ls")
@AS_JSON
def store_ls(as_json: bool) -> None:
    """List the bundles of the store, the one that was used last first."""
    from precast.cli import registry_view
    from precast.registry.store import Store

    found = Store()
    _report(registry_view.listing(found.path, found.listing()), as_json)


@store.command("gc")
@click.option(
    "--unused-days", type=click.FloatRange(min=0), metavar="N",
    help="Also remove bundles that were not used for N days; 0: all.",
)  # fmt: skip
@AS_JSON
def store_gc(unused_days: float | None, as_json: bool) -> None:
    """Remove blobs that no bundle of the store has, and what broken pulls left. Waits for pulls to end."""
    from precast.cli import registry_view
    from precast.registry.store import Store

    _report(registry_view.removed(Store().collect(unused_days)), as_json)


@store.command("verify")
@AS_JSON
def store_verify(as_json: bool) -> None:
    """Read every blob of the store, and open every bundle. Exits with 3 if anything is damaged."""
    from precast.cli import registry_view
    from precast.registry.store import Store

    found = Store().verify()
    _report(registry_view.verified(found), as_json)
    click.get_current_context().exit(3 if found.problems else 0)


@main.command()
@BUNDLE
@click.option("--weights", required=True, help=CHECKPOINT)
@TIMEOUT
@click.option("--prompt", "prompts", multiple=True, metavar="TEXT", help="Text to go on from; may be repeated.")
@click.option("--token-ids", multiple=True, metavar="IDS", help="Token ids in place of text: 1,15,27.")
@click.option(
    "--no-special-tokens", "add_special_tokens", is_flag=True, flag_value=False, default=True,
    help="Put no special token around --prompt, as for the text of a chat template that has them.",
)  # fmt: skip
@click.option("--device", help="cpu, cuda, cuda:1. Default: the GPU if there is one.")
@click.option(
    "--tp", type=int, metavar="N",
    help="Ranks that share each layer, each a process with its own GPU. Default: 1, or what a launcher has started.",
)  # fmt: skip
@click.option(
    "--ep", type=int, default=1, metavar="M", help="Groups of ranks that experts are split over; divides --tp."
)
@click.option("--pp", type=int, default=1, metavar="P", help="Stages that have the layers, each of --tp ranks.")
@click.option(
    "--world-port", type=int, metavar="PORT", help="Rank 0 listens there for the others. Default: a free one."
)
@click.option(
    "--timeout", "timeouts", multiple=True, metavar="PHASE=SECONDS", callback=_timeouts,
    help="How long ranks wait for one another to join, agree, load, capture, step or end; may be repeated.",
)  # fmt: skip
@click.option("--max-tokens", type=int, default=64, show_default=True, help="The longest answer.")
@click.option("--temperature", type=float, default=0.0, show_default=True, help="0 takes the likeliest token.")
@click.option("--top-k", type=int, metavar="K", help="Draw from the K likeliest tokens, with a temperature above 0.")
@click.option(
    "--top-p", type=float, metavar="P", default=1.0,
    help="Draw from the likeliest that reach P together, with a temperature above 0.",
)  # fmt: skip
@click.option(
    "--min-p", type=float, metavar="P", default=0.0,
    help="Draw from those P times as likely as the likeliest, with a temperature above 0.",
)  # fmt: skip
@click.option("--seed", type=int, help="Equal seeds give equal answers.")
@click.option("--stop", multiple=True, metavar="TEXT", help="Text that ends the answer; may be repeated.")
@click.option("--ignore-eos", is_flag=True, help="Go on after an end-of-sequence token.")
@click.option("--max-num-seqs", type=int, default=256, show_default=True, help="Sequences that run at once.")
@click.option("--max-num-tokens", type=int, default=8192, show_default=True, help="Tokens that one step computes.")
@click.option(
    "--max-prefill-tokens", type=int, metavar="N",
    help="Prompt tokens that a step computes beside sequences that decode. Default: by the time that steps take.",
)  # fmt: skip
@click.option(
    "--cache-bytes", type=int, help="Memory for keys, values and states, in whole slabs. Default: from what is free."
)
@click.option(
    "--allow-config-mismatch", is_flag=True, help="Go on if the checkpoint's config says other numbers than the bundle."
)
@CHOICES
@click.option(
    "--allow-native", "native", multiple=True, metavar="DIGEST",
    help="Use the native layer with this digest, or those of the bundle with it: code that others compiled.",
)  # fmt: skip
@click.option(
    "--backend", type=click.Choice(["driver", "torch"]),
    help="The CUDA driver alone, without torch, or torch. Default: the driver where it runs the model.",
)  # fmt: skip
@TRUST
@click.option(
    "--timeline", "timeline_to", is_flag=False, flag_value="-", metavar="[FILE]",
    help="Show on standard error how long each phase took, or write it to FILE: a page (.html), or .json.",
)  # fmt: skip
@AS_JSON
def run(
    bundle: Path | str, prompts: tuple[str, ...], token_ids: tuple[str, ...], add_special_tokens: bool,
    timeline_to: str | None, as_json: bool, weights: str, weights_timeout: float, device: str | None, tp: int | None,
    ep: int, pp: int, world_port: int | None, timeouts: dict[str, float], max_num_seqs: int, max_num_tokens: int,
    max_prefill_tokens: int | None, cache_bytes: int | None, allow_config_mismatch: bool, choices: Path | None,
    native: tuple[str, ...], backend: Any, trust: Path | None, **sampling: Any,
) -> None:  # fmt: skip
    """Load BUNDLE with --weights and generate. One prompt's answer is printed as it comes."""
    all_prompts: list[str | list[int]] = [*prompts, *(_token_ids(text) for text in token_ids)]
    if not all_prompts:
        raise click.UsageError("give --prompt TEXT or --token-ids IDS at least once")
    from precast.cli.stopping import ends_at_once
    from precast.cli.timeline_file import check_file, write_timeline
    from precast.loader.world.start import launched

    check_file(timeline_to)
    click.get_current_context().with_resource(ends_at_once(alone=tp in (None, 1) and pp == 1 and launched() is None))
    from precast.cli.progress import LOAD_PHASES, AnnouncedTimeline, stages

    with stages(LOAD_PHASES, "loading") as progress:
        timeline = AnnouncedTimeline(progress)
        from precast.ir.artifact import Bundle
        from precast.ir.trust.loading import repository_of, rules_of
        from precast.loader.driver.context import begin_early

        if tp in (None, 1) and pp == 1 and launched() is None:
            begin_early(device)  # while the bundle is opened and the prompts are looked at
        from precast.loader.engine.params import SamplingParams
        from precast.loader.engine.prompts import check_prompts
        from precast.loader.engine.tokenizer import Tokenizer

        params = SamplingParams(**sampling)
        opened = Bundle.open(bundle)  # what is wrong with a prompt is said before torch is imported
        rules = rules_of(opened, trust, repository_of(bundle))
        tokenizer = Tokenizer.from_files(opened.files("tokenizer"))
        check_prompts(
            all_prompts, params, opened.manifest.model, lambda: tokenizer, add_special_tokens=add_special_tokens
        )
        from precast.loader.load import load

        processes = _early_ranks(tp, pp)
        engine = load(
            opened, weights=weights, weights_timeout=weights_timeout, device=device, tp=tp, ep=ep, pp=pp,
            max_num_seqs=max_num_seqs, max_num_tokens=max_num_tokens, max_prefill_tokens=max_prefill_tokens,
            cache_bytes=cache_bytes, allow_config_mismatch=allow_config_mismatch, choices=choices, native=native,
            backend=backend, trust=rules, world_port=world_port, timeouts=timeouts, processes=processes,
            timeline=timeline,
        )  # fmt: skip
        engine.tokenizer = tokenizer
    with engine:
        if as_json:
            outputs = _outputs(engine, all_prompts, params, add_special_tokens)
            answers = [msgspec.to_builtins(output) for output in outputs]
            found = {"outputs": answers, "stats": engine.stats.to_dict(), "timeline": json.loads(timeline.to_json())}
            _echo(json.dumps(found))
            if any(output.error is not None for output in outputs):  # which the object says
                click.get_current_context().exit(1)
        elif len(all_prompts) == 1:
            _stream(engine, all_prompts[0], params, add_special_tokens)
        else:
            outputs = _outputs(engine, all_prompts, params, add_special_tokens)
            for prompt, output in zip(all_prompts, outputs, strict=True):
                answer = output.text if engine.tokenizer is not None else output.token_ids
                _echo(f"{prompt!r} -> {answer!r}")
            for i, output in enumerate(outputs):
                _check_finished(output, f"prompt {i}")
        if timeline_to == "-":
            click.echo(timeline.text(), err=True)
        elif timeline_to is not None:
            name = bundle.name if isinstance(bundle, Path) else bundle
            write_timeline(Path(timeline_to), timeline, f"Load of {name}", engine.stats.to_dict())


def _early_ranks(tp: int | None, pp: int) -> Processes | None:
    """Processes for the ranks that `load` will start, which import torch while this one does."""
    from precast.loader.placement import check_world
    from precast.loader.world.processes import Processes
    from precast.loader.world.start import launched

    tp = 1 if tp is None else tp
    if tp * pp == 1 or launched() is not None:
        return None
    check_world(tp, 1, pp=pp)
    return Processes(tp * pp)


def _build(source: str, out: Path, *, check: bool, **options: Any) -> Bundle:
    """`precast.build`, with other errors that it raises turned into Precast's own."""
    try:
        from precast import build as build_bundle

        if check:
            from precast.check.check import compare

            options["check"] = compare
        return build_bundle(source, out, **options)
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        raise TargetError("dependency-missing", str(error)) from error
    except OSError as error:  # of files that builds have for a while; what they read and leave has errors of its own
        raise BuildError("write-failed", str(error)) from error


def _outputs(
    engine: Engine, prompts: list[str | list[int]], params: SamplingParams, add_special_tokens: bool
) -> list[Output]:
    """All answers, with a bar while they grow."""
    from precast.cli.progress import counted

    with counted(len(prompts), "answers") as progress:
        return engine.generate(prompts, params, add_special_tokens=add_special_tokens, progress=progress)


def _stream(engine: Engine, prompt: str | list[int], params: SamplingParams, add_special_tokens: bool) -> None:
    """Print the answer's text as it grows, or its token ids where the bundle has no tokenizer."""
    has_text, space = engine.tokenizer is not None, ""
    for event in engine.stream(prompt, params, add_special_tokens=add_special_tokens):
        if has_text:
            _echo(event.text, nl=False)
        elif event.token_ids:
            _echo(space + " ".join(map(str, event.token_ids)), nl=False)
            space = " "
        _check_finished(event)
    _echo("")


def _check_finished(found: Event | Output, where: str | None = None) -> None:
    if found.error is not None:
        raise RequestError(found.error.code, found.error.message, where=where)


def _token_ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        message = f"{text!r} is no list of numbers separated by commas, such as 1,15,27"
        raise click.BadParameter(message, param_hint="--token-ids") from error


def _report(report: Report, as_json: bool) -> None:
    _echo(json.dumps(report.fields) if as_json else printable(report.text))


def _echo(text: str, *, nl: bool = True) -> None:
    """Print to standard output. Raises PrecastError (`write-failed`) when that takes no more, as a full disk."""
    try:
        click.echo(text, nl=nl)
    except BrokenPipeError:  # the reader has seen enough: click ends the program in silence
        raise
    except OSError as error:
        # What was not written stays in the buffer, and at the exit would fail once more, with a traceback.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
        message = f"the answer can't be written: {error.strerror}"
        raise PrecastError("write-failed", message, where="standard output") from error
