"""This machine, and what is fast on it: `precast doctor`, `bench`, `seal`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from precast.cli.options import AS_JSON, BUNDLE, FOLDER, PATH, device_name
from precast.cli.verbs import Verb, Verbs, print_report


@click.command(cls=Verb)
@click.option(
    "--device", callback=device_name,
    help="cpu, or a GPU that must be there: cuda, cuda:1. Default: the GPU if there is one.",
)  # fmt: skip
@click.option(
    "--weights", type=PATH, help="A checkpoint here, whose disk is measured. Default: that of temporary files."
)
@AS_JSON
def doctor(device: str | None, weights: Path | None, as_json: bool) -> None:
    """Say what this machine allows, what would be slow and why, and what to do. Needs no GPU, and no torch."""
    from precast.cli.doctor_view import view

    report, exit_code = view(device, weights)
    print_report(report, as_json)
    click.get_current_context().exit(exit_code)


@click.group(cls=Verbs)
def bench() -> None:
    """Measure this machine, and keep what was measured."""


@bench.command("kernels")
@BUNDLE
@click.option("-o", "--out", type=PATH, help="The table's file.")
@AS_JSON
def bench_kernels(bundle: Path, out: Path | None, as_json: bool) -> None:
    """Time each implementation of BUNDLE's ops on this machine's GPU; `--choices` takes the table of the fastest."""
    from precast.cli.kernels_bench import bench as measured

    print_report(measured(bundle, out), as_json)


@bench.command("startup")
@BUNDLE
@click.option("--weights", required=True, type=PATH, help="Checkpoint directory with safetensors files, or one file.")
@click.option(
    "--device", callback=device_name, help="cpu, cuda, cuda:1. Default: the GPU if there is one."
)  # fmt: skip
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
    print_report(measured(bundle, weights, out, **options), as_json)


@click.command(cls=Verb)
@click.argument("bundle", type=FOLDER)
@click.option("--choices", type=PATH, metavar="FILE", help="A table that was measured before. Default: measure now.")
@AS_JSON
def seal(bundle: Path, choices: Path | None, as_json: bool) -> None:
    """Attach to BUNDLE which kernels are the fastest on this machine's GPU. Its digest stays what it is."""
    from precast.cli.seal_view import seal as sealed

    print_report(sealed(bundle, choices), as_json)
