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

# What can't be read is an error of Precast's own, with a code, not one of usage.
PATH = click.Path(path_type=Path, readable=False)
DIRECTORY = click.Path(path_type=Path, file_okay=False)
CHECKPOINT = "Checkpoint: a directory with safetensors files, one file, or the address of either (https, s3, gs)."
TIMEOUT = click.option(
    "--weights-timeout", type=float, default=30.0, show_default=True,
    help="Seconds to wait for a server of weights, for an answer and for each next part of it.",
)  # fmt: skip
BUNDLE = click.argument("bundle", type=PATH)
CHOICES = click.option(
    "--choices", type=PATH, metavar="FILE",
    help="Measured choices of kernels, of `precast bench kernels`. Default: those that come with Precast for the GPU.",
)  # fmt: skip
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
@click.option("--snapshots", type=DIRECTORY, help="Directory of snapshots that speed up rebuilds.")
@click.option("--snapshot-after", metavar="STAGE", help="The stage that is kept.  [default: shard]")
@click.option(
    "--disable-pass", "disabled_passes", multiple=True, metavar="NAME", help="Leave out this pass; may be repeated."
)
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
def build(source: str, out: Path, as_json: bool, **options: Any) -> None:
    """Build the bundle of SOURCE: a model directory, a config.json, or a hub id. Needs no GPU and no weights."""
    from precast.cli.progress import BUILD_STAGES, stages
    from precast.cli.show import summary
    from precast.ir.artifact import check_output

    check_output(out)  # before torch is imported; the build checks it again
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
@AS_JSON
def verify(
    bundle: Path, weights: str | None, weights_timeout: float, shards: int | None, ep: int | None, as_json: bool
) -> None:
    """Check BUNDLE byte by byte, its graph rule by rule, and with --weights config and recipes against a checkpoint.

    With --shards, N ranks compute the logits of a few tokens with random weights, in float32, and are compared with one
    rank: all layers of a small model, one of each kind of a large one.
    """
    if ep is not None and shards is None:
        raise click.UsageError("--ep goes with --shards")
    from precast.cli.show import Report
    from precast.ir.artifact import Bundle

    opened = Bundle.open(bundle)
    fields: dict[str, Any] = {"digest": opened.digest}
    lines = [opened.digest, "bundle: whole, canonical, and valid by every rule"]
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
    if shards is not None:
        from precast.cli.shards_proof import proof_of

        found = proof_of(opened, shards, ep or 1)
        fields |= found.fields
        lines.append(found.text)
        is_split = found.fields["shards"]["holds"]
    _report(Report(fields, "\n".join(lines)), as_json)
    if not is_split:
        click.get_current_context().exit(3)


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
def bench_startup(bundle: Path, weights: Path, out: Path | None, as_json: bool, **options: Any) -> None:
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
    "--timeline", "timeline_to", is_flag=False, flag_value="-", metavar="[FILE]",
    help="Show on standard error how long each phase took, or write it to FILE: a page (.html), or .json.",
)  # fmt: skip
@AS_JSON
def run(
    bundle: Path, prompts: tuple[str, ...], token_ids: tuple[str, ...], add_special_tokens: bool,
    timeline_to: str | None, as_json: bool, weights: str, weights_timeout: float, device: str | None, tp: int | None,
    ep: int, world_port: int | None, timeouts: dict[str, float], max_num_seqs: int, max_num_tokens: int,
    max_prefill_tokens: int | None, cache_bytes: int | None, allow_config_mismatch: bool, choices: Path | None,
    **sampling: Any,
) -> None:  # fmt: skip
    """Load BUNDLE with --weights and generate. One prompt's answer is printed as it comes."""
    all_prompts: list[str | list[int]] = [*prompts, *(_token_ids(text) for text in token_ids)]
    if not all_prompts:
        raise click.UsageError("give --prompt TEXT or --token-ids IDS at least once")
    from precast.cli.stopping import ends_at_once
    from precast.cli.timeline_file import check_file, write_timeline
    from precast.loader.world.start import launched

    check_file(timeline_to)
    click.get_current_context().with_resource(ends_at_once(alone=tp in (None, 1) and launched() is None))
    from precast.cli.progress import LOAD_PHASES, AnnouncedTimeline, stages

    with stages(LOAD_PHASES, "loading") as progress:
        timeline = AnnouncedTimeline(progress)
        with timeline.phase("import"):
            from precast.ir.artifact import Bundle
            from precast.loader.engine.params import SamplingParams
            from precast.loader.engine.prompts import check_prompts
            from precast.loader.engine.tokenizer import Tokenizer

            params = SamplingParams(**sampling)
            opened = Bundle.open(bundle)  # what is wrong with a prompt is said before torch is imported
            tokenizer = Tokenizer.from_files(opened.files("tokenizer"))
            check_prompts(
                all_prompts, params, opened.manifest.model, lambda: tokenizer, add_special_tokens=add_special_tokens
            )
            processes = _early_ranks(tp)
            from precast.loader.load import load
        engine = load(
            opened, weights=weights, weights_timeout=weights_timeout, device=device, tp=tp, ep=ep,
            max_num_seqs=max_num_seqs, max_num_tokens=max_num_tokens, max_prefill_tokens=max_prefill_tokens,
            cache_bytes=cache_bytes, allow_config_mismatch=allow_config_mismatch, choices=choices,
            world_port=world_port, timeouts=timeouts,
            processes=processes, timeline=timeline,
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
            write_timeline(Path(timeline_to), timeline, f"Load of {bundle.name}", engine.stats.to_dict())


def _early_ranks(tp: int | None) -> Processes | None:
    """Processes for the ranks that `load` will start, which import torch while this one does."""
    from precast.loader.placement import check_world
    from precast.loader.world.processes import Processes
    from precast.loader.world.start import launched

    if tp is None or tp == 1 or launched() is not None:
        return None
    check_world(tp, 1)
    return Processes(tp)


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
