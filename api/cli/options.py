"""Arguments and options that several verbs share."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click


class BundlePath(click.Path):
    """A path, or an address such as `oci://ghcr.io/org/name@sha256:...`, which stays text."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The path, or the address as it is."""
        is_address = isinstance(value, str) and "://" in value
        return value if is_address else super().convert(value, param, ctx)


class Seconds(click.FloatRange):
    """A number in a range; NaN is in none."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """As click says."""
        found = super().convert(value, param, ctx)
        return self.fail(f"{value} is not a number.", param, ctx) if found != found else found


class Name(click.ParamType):
    """A text that isn't empty."""

    name = "text"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """As click says."""
        return value or self.fail("it is empty.", param, ctx)


class BundleFolder(click.Path):
    """A bundle's directory, of verbs that take no address."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The path. Raises click's BadParameter for an address, which as a path would lead nowhere."""
        if isinstance(value, str) and "://" in value:
            fix = "`precast pull HOST/NAME -o DIR` fetches it into one"
            self.fail(f"expected a bundle's directory, found the address {value}; {fix}", param, ctx)
        return super().convert(value, param, ctx)


# What can't be read is an error of Precast's own, with a code, not one of usage.
PATH = click.Path(path_type=Path, readable=False)
DIRECTORY = click.Path(path_type=Path, file_okay=False)
CHECKPOINT = "Checkpoint: a directory with safetensors files, one file, or the address of either (https, s3, gs)."
TIMEOUT = click.option(
    "--weights-timeout", type=float, default=30.0, show_default=True,
    help="Seconds to wait for a server of weights, for an answer and for each next part of it.",
)  # fmt: skip
ALLOW_CONFIG_MISMATCH = click.option(
    "--allow-config-mismatch", is_flag=True, help="Go on if the checkpoint's config says other numbers than the bundle."
)
BUNDLE = click.argument("bundle", type=BundlePath(path_type=Path, readable=False))
FOLDER = BundleFolder(path_type=Path, readable=False)
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


def device_name(_: click.Context, __: click.Parameter, given: str | None) -> str | None:
    """A device as it is named, of commands that look for it before torch could."""
    if given is not None and not re.fullmatch(r"cpu|cuda(:[0-9]{1,4})?", given):
        raise click.BadParameter(
            f"{given!r} is none of cpu, cuda, or a certain GPU such as cuda:1", param_hint="--device"
        )
    return given


def together(*options: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """One decorator for several options, which help lists in this order."""

    def decorated(command: Any) -> Any:
        for option in reversed(options):
            command = option(command)
        return command

    return decorated
