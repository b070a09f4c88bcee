"""`precast build`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from precast.cli.options import AS_JSON, DIRECTORY, PATH, together
from precast.cli.verbs import Verb, print_report
from precast.ir.errors import BuildError, TargetError

if TYPE_CHECKING:
    from precast.ir.artifact import Bundle


MODEL = together(
    click.option(
        "--dtype", default="auto", show_default=True, help="float32, bfloat16, float16, or the config's (auto)."
    ),
    click.option("--max-seq-len", type=int, help="Longest sequence served, in tokens. Default: the config's limit."),
    click.option(
        "--page-size", type=int, help="Tokens per page of the caches. Default: chosen for each group of layers."
    ),
    click.option(
        "--kv-dtype", default="auto", show_default=True,
        help="Of cached keys and values: fp8_e4m3, the model's (model), or what the config says (auto).",
    ),
    click.option(
        "--dequantise", is_flag=True, help="Read quantised weights as numbers of the model's dtype, all of them."
    ),
    click.option(
        "--activations", default="published", show_default=True,
        help="Inputs of layers in 8 bits or less: rounded as the config or --quantise says (published), or not (none).",
    ),
    click.option(
        "--quantise", metavar="FORMAT",
        help="Bring weights to 8 bits while they are read: in blocks (fp8), or by channels, inputs too (fp8-channel).",
    ),
    click.option(
        "--shard-plan", type=PATH, help="JSON file that says of params, by patterns of names, how they are split."
    ),
)  # fmt: skip
PIPELINE = together(
    click.option("--snapshots", type=DIRECTORY, help="Directory of snapshots that speed up rebuilds."),
    click.option("--snapshot-after", metavar="STAGE", help="The stage that is kept.  [default: shard]"),
    click.option(
        "--disable-pass", "disabled_passes", multiple=True, metavar="NAME", help="Leave out this pass; may be repeated."
    ),
    click.option(
        "--target", "targets", multiple=True, metavar="SM",
        help="Compile the kernels for GPUs of this compute capability (sm_90) into the bundle; may be repeated.",
    ),
    click.option(
        "--world", "worlds", multiple=True, metavar="RANKS",
        help="With --target: compile the kernels of ranks, as tp=2 or tp=4,ep=2; may be repeated.  [default: tp=1]",
    ),
    click.option(
        "--choices", "tables", type=PATH, multiple=True, metavar="FILE",
        help="With --target: measured choices that the bundle may be loaded with; may be repeated.",
    ),
    click.option("--dump", type=DIRECTORY, help="Directory that gets the graph after each pass."),
)  # fmt: skip
CODE = together(
    click.option(
        "--allow-remote-code", is_flag=True,
        help="Run the code that comes with a model which transformers does not have. It runs here, in the builder, "
        "with your rights; none of it enters the bundle.",
    ),
    click.option(
        "--model-type", metavar="TYPE",
        help="Build the config as that of a model of this type, which transformers has; its own code then doesn't run.",
    ),
)  # fmt: skip


@click.command(cls=Verb)
@click.argument("source")
@click.option("-o", "--out", required=True, type=PATH, help="The bundle's directory.")
@MODEL
@PIPELINE
@CODE
@click.option("--check", is_flag=True, help="Compare the model, made tiny, with transformers; pack only if equal.")
@AS_JSON
def build(source: str, out: Path, tables: tuple[Path, ...], as_json: bool, **options: Any) -> None:
    """Build the bundle of SOURCE: a model directory, a config.json, or a hub id. Needs no GPU and no weights."""
    if tables and not options["targets"]:
        raise click.UsageError("--choices goes with --target")
    if options["worlds"] and not options["targets"]:
        raise click.UsageError("--world goes with --target")
    from precast.builder.named import NAMED, check_named
    from precast.builder.native.layer import target_named, worlds_named
    from precast.cli.progress import BUILD_STAGES, stages
    from precast.cli.show import summary
    from precast.ir.artifact import check_output

    # Before torch is imported; the build checks all of it again.
    check_named(**{name: options[name] for name in NAMED})
    for name in options["targets"]:
        target_named(name)
    worlds_named(options["worlds"])
    check_output(out)
    if tables:
        from precast.kernels.measured import read_table

        options["choices"] = [read_table(path) for path in tables]
    with stages(BUILD_STAGES, "building") as progress:
        bundle = _build(source, out, progress=progress, **options)
    print_report(summary(bundle), as_json)


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
