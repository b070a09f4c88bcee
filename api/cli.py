"""The command line: `precast VERB ...`.

Verbs that only look at a bundle import no torch. Every error of Precast's own becomes one message on standard
error and the exit code of its kind: 1 the user's input, 2 usage, 3 a bundle refused, 4 the environment.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, NoReturn

import click

from precast import __version__
from precast.ir.errors import BundleError, PrecastError, RequestError, TargetError

BUNDLE = click.argument("bundle", type=click.Path(path_type=Path))
AS_JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")
WEIGHTS = click.option(
    "--weights", type=click.Path(path_type=Path), help="Checkpoint directory with safetensors files."
)  # fmt: skip


class _Group(click.Group):
    """Turns Precast's errors into messages and exit codes."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except PrecastError as error:
            _fail(error, as_json="--json" in sys.argv)


def _fail(error: PrecastError, *, as_json: bool) -> NoReturn:
    if as_json:
        fields = {"code": error.code, "message": error.message, "where": error.where, "fix": error.fix}
        click.echo(json.dumps({"error": fields}))
    else:
        click.echo(f"error: {error}", err=True)
    kinds: tuple[tuple[type[PrecastError], int], ...] = ((BundleError, 3), (TargetError, 4))
    raise SystemExit(next((code for kind, code in kinds if isinstance(error, kind)), 1))


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="precast")
def main() -> None:
    """Cast a language model once, offline, into a bundle; set it up on the target in seconds."""


@main.command()
@click.argument("source")
@click.option("-o", "--out", required=True, type=click.Path(path_type=Path), help="The bundle's directory.")
@click.option("--dtype", default="auto", show_default=True, help="float32, bfloat16, float16, or the config's (auto).")
@click.option("--max-seq-len", type=int, help="Longest sequence served, in tokens. Default: the config's limit.")
@click.option("--page-size", type=int, default=16, show_default=True, help="Tokens per page of the caches.")
@click.option("--snapshots", type=click.Path(path_type=Path), help="Directory of snapshots that speed up rebuilds.")
@click.option("--dump", type=click.Path(path_type=Path), help="Directory that gets the graph after each pass.")
@AS_JSON
def build(
    source: str, out: Path, dtype: str, max_seq_len: int | None, page_size: int, snapshots: Path | None,
    dump: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """Build the bundle of SOURCE: a model directory, a config.json, or a hub id. Needs no GPU and no weights."""
    from precast import build as build_bundle
    from precast.progress import stages

    with stages(("config", "export", "passes", "caches", "lower", "pack"), "building") as progress:
        bundle = build_bundle(
            source, out, dtype=dtype, max_seq_len=max_seq_len, page_size=page_size, snapshots=snapshots, dump=dump,
            progress=progress,
        )  # fmt: skip
    from precast.show import summary

    _report(summary(bundle), as_json)


@main.command()
@BUNDLE
@click.option("--graph", "part", flag_value="graph", help="The graph as text.")
@click.option("--passes", "part", flag_value="passes", help="The passes as they ran.")
@click.option("--weights", "part", flag_value="weights", help="Each param and how it is made.")
@click.option("--cache", "part", flag_value="cache", help="Cache groups, pools, and what sequences cost.")
@AS_JSON
def inspect(bundle: Path, part: str | None, as_json: bool) -> None:
    """Show what is in BUNDLE: a summary, or one part of it."""
    from precast import show
    from precast.ir.bundle import Bundle

    opened = Bundle.open(bundle)
    views = {None: show.summary, "graph": show.graph, "passes": show.passes, "weights": show.weights, "cache": show.cache}
    _report(views[part](opened), as_json)


@main.command()
@BUNDLE
@WEIGHTS
@AS_JSON
def verify(bundle: Path, weights: Path | None, as_json: bool) -> None:
    """Check BUNDLE byte by byte, its graph rule by rule, and with --weights each recipe against a checkpoint."""
    from precast.ir.bundle import Bundle
    from precast.show import Report

    opened = Bundle.open(bundle)
    fields: dict[str, Any] = {"digest": opened.digest, "ops": len(opened.manifest.ops)}
    lines = [f"{bundle}: {opened.digest}", "bundle: whole, canonical, and valid by every rule"]
    if weights is not None:
        from precast.ir.checkpoint import CheckpointFiles
        from precast.ir.recipes import check

        files = CheckpointFiles.open(weights)
        check(opened.graph, opened.manifest.checkpoint, files)
        fields["params"] = len(opened.graph.params)
        fields["tensors"] = len(files.tensors)
        lines.append(f"weights: all {len(opened.graph.params)} params can be made from {weights}")
    _report(Report(fields, "\n".join(lines)), as_json)


@main.command()
@click.argument("first", type=click.Path(path_type=Path))
@click.argument("second", type=click.Path(path_type=Path))
@AS_JSON
def diff(first: Path, second: Path, as_json: bool) -> None:
    """Show what differs between two bundles. Exits with 1 if anything does."""
    from precast.ir.bundle import Bundle
    from precast.show import difference

    report = difference(Bundle.open(first), Bundle.open(second))
    _report(report, as_json)
    raise SystemExit(0 if report.fields["equal"] else 1)


@main.command()
@BUNDLE
@AS_JSON
def digest(bundle: Path, as_json: bool) -> None:
    """Print BUNDLE's digest: equal digests are equal bundles, whenever and wherever they were built."""
    from precast.ir.bundle import Bundle
    from precast.show import Report

    opened = Bundle.open(bundle)
    _report(Report({"digest": opened.digest}, opened.digest), as_json)


@main.command()
@BUNDLE
@click.option("--weights", required=True, type=click.Path(path_type=Path), help="Checkpoint directory.")
@click.option("--prompt", "prompts", multiple=True, help="Text to go on from; may be given several times.")
@click.option("--token-ids", multiple=True, metavar="IDS", help="Token ids in place of text: 1,15,27.")
@click.option("--device", help="cpu, cuda, cuda:1. Default: the GPU if there is one.")
@click.option("--max-tokens", type=int, default=64, show_default=True)
@click.option("--temperature", type=float, default=0.0, show_default=True, help="0 takes the likeliest token.")
@click.option("--top-k", type=int)
@click.option("--top-p", type=float, default=1.0, show_default=True)
@click.option("--min-p", type=float, default=0.0, show_default=True)
@click.option("--seed", type=int)
@click.option("--stop", multiple=True, help="Text that ends the answer; may be given several times.")
@click.option("--ignore-eos", is_flag=True)
@click.option("--max-num-seqs", type=int, default=256, show_default=True)
@click.option("--max-num-tokens", type=int, default=8192, show_default=True)
@click.option("--timeline", is_flag=True, help="Show how long each phase of the start took.")
@AS_JSON
def run(
    bundle: Path, weights: Path, prompts: tuple[str, ...], token_ids: tuple[str, ...], device: str | None,
    max_num_seqs: int, max_num_tokens: int, timeline: bool, as_json: bool, **sampling: Any,
) -> None:  # fmt: skip
    """Load BUNDLE with --weights and generate. One prompt is streamed as it comes."""
    all_prompts: list[str | list[int]] = [*prompts, *(_token_ids(text) for text in token_ids)]
    if not all_prompts:
        raise click.UsageError("give --prompt TEXT or --token-ids IDS at least once")
    import precast

    params = precast.SamplingParams(**sampling)
    with precast.load(
        bundle, weights=weights, device=device, max_num_seqs=max_num_seqs, max_num_tokens=max_num_tokens
    ) as engine:
        if as_json:
            outputs = engine.generate(all_prompts, params)
            fields = [
                {"token_ids": list(out.token_ids), "text": out.text, "finish_reason": out.finish_reason} for out in outputs
            ]
            click.echo(json.dumps({"outputs": fields, "timeline": engine.timeline.to_dict()}))
            return
        if len(all_prompts) == 1:
            _stream(engine, all_prompts[0], params)
        else:
            for prompt, output in zip(all_prompts, engine.generate(all_prompts, params), strict=True):
                click.echo(f"{prompt!r} -> {output.text if output.text else list(output.token_ids)!r}")
        if timeline:
            click.echo(engine.timeline.text(), err=True)


def _stream(engine: Any, prompt: str | list[int], params: Any) -> None:
    has_text = engine.tokenizer is not None
    for event in engine.stream(prompt, params):
        click.echo(event.text if has_text else f"{event.token_id} ", nl=False)
    click.echo()


def _token_ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise RequestError(
            "prompt-invalid", f"--token-ids is {text!r}, expected numbers separated by commas", fix="--token-ids 1,15,27"
        ) from error


def _report(report: Any, as_json: bool) -> None:
    click.echo(json.dumps(report.fields) if as_json else report.text)
