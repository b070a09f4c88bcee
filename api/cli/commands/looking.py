"""What is in bundles, and what differs: `precast inspect`, `diff`, `digest`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from precast.cli.options import AS_JSON, BUNDLE, CHOICES, FOLDER
from precast.cli.verbs import Verb, print_report

if TYPE_CHECKING:
    from precast.cli.show import Report
    from precast.ir.artifact import Bundle


@click.command(cls=Verb)
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
def inspect(bundle: Path | str, target: str | None, choices: Path | None, as_json: bool, **parts: bool) -> None:
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
    address = bundle if isinstance(bundle, str) else None
    reports = [view(opened) for name, view in views.items() if parts[name]]
    print_report(show.together(reports or [show.summary(opened, address)]), as_json)


@click.command(cls=Verb)
@click.argument("first", type=FOLDER)
@click.argument("second", type=FOLDER)
@AS_JSON
def diff(first: Path, second: Path, as_json: bool) -> None:
    """Show what differs between the bundles FIRST and SECOND. Exits with 1 if anything does."""
    from precast.cli.compare import difference
    from precast.ir.artifact import Bundle

    report = difference(Bundle.open(first), Bundle.open(second))
    print_report(report, as_json)
    click.get_current_context().exit(0 if report.fields["equal"] else 1)


@click.command(cls=Verb)
@BUNDLE
@AS_JSON
def digest(bundle: Path, as_json: bool) -> None:
    """Print BUNDLE's digest: equal digests are equal bundles, whenever and wherever they were built."""
    from precast.cli.show import Report
    from precast.ir.artifact import Bundle

    opened = Bundle.open(bundle)
    print_report(Report({"digest": opened.digest}, opened.digest), as_json)
