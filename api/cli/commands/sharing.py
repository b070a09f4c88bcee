"""Registries, the local store, and which bundle weights have: `precast push`, `pull`, `link`, `find`, `store`."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import click

from precast.cli.options import AS_JSON, BUNDLE, FOLDER, PATH, PLAIN_HTTP, REFERENCE, BundlePath
from precast.cli.verbs import Verb, Verbs, print_report


@click.command(cls=Verb)
@click.argument("bundle", type=FOLDER)
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
    print_report(registry_view.pushed(found), as_json)


@click.command(cls=Verb)
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
    print_report(registry_view.pulled(found), as_json)


@click.command(cls=Verb)
@BUNDLE
@click.argument("weights", type=BundlePath(path_type=Path, readable=False))
@PLAIN_HTTP
@AS_JSON
def link(bundle: Path | str, weights: Path | str, plain_http: bool, as_json: bool) -> None:
    """Note with WEIGHTS that BUNDLE was made for them: in their registry (oci://...), or beside a checkpoint."""
    from precast.cli.links import linked

    print_report(linked(bundle, weights, plain_http), as_json)


@click.command(cls=Verb)
@click.argument("weights", type=BundlePath(path_type=Path, readable=False))
@click.option("--target", metavar="NAME", help="Only bundles that run there, such as sm_90.")
@PLAIN_HTTP
@AS_JSON
def find(weights: Path | str, target: str | None, plain_http: bool, as_json: bool) -> None:
    """Print the bundles that were made for WEIGHTS: a repository (oci://...), or a checkpoint with a precast.lock."""
    from precast.cli.links import found

    print_report(found(weights, target, plain_http), as_json)


@click.group(cls=Verbs)
def store() -> None:
    """The local store of bundles that were pulled: in $PRECAST_STORE, or below the user's cache directory."""


@store.command("ls")
@AS_JSON
def store_ls(as_json: bool) -> None:
    """List the bundles of the store, the one that was used last first."""
    from precast.cli import registry_view
    from precast.registry.store import Store

    found = Store()
    print_report(registry_view.listing(found.path, found.listing()), as_json)


@store.command("gc")
@click.option(
    "--unused-days", type=click.FloatRange(min=0), metavar="N",
    help="Also remove bundles that were not used for N days; 0: all.",
)  # fmt: skip
@AS_JSON
def store_gc(unused_days: float | None, as_json: bool) -> None:
    """Remove blobs that no bundle of the store has, and what broken pulls left. Waits for pulls to end."""
    if unused_days is not None and math.isnan(unused_days):
        raise click.BadParameter("nan is no number of days", param_hint="--unused-days")
    from precast.cli import registry_view
    from precast.registry.store import Store

    print_report(registry_view.removed(Store().collect(unused_days)), as_json)


@store.command("verify")
@AS_JSON
def store_verify(as_json: bool) -> None:
    """Read every blob of the store, and open every bundle. Exits with 3 if anything is damaged."""
    from precast.cli import registry_view
    from precast.registry.store import Store

    found = Store().verify()
    print_report(registry_view.verified(found), as_json)
    click.get_current_context().exit(3 if found.problems else 0)
