"""The command line: `precast VERB ...`, and the order in which its help lists the verbs."""

from __future__ import annotations

import click

from precast import __version__
from precast.cli.commands.building import build
from precast.cli.commands.looking import diff, digest, inspect
from precast.cli.commands.measuring import bench, doctor, seal
from precast.cli.commands.running import run
from precast.cli.commands.serving import serve
from precast.cli.commands.sharing import find, link, pull, push, store
from precast.cli.commands.trusting import attest, sign, verify
from precast.cli.verbs import Verbs

COMMANDS = (
    *(build, inspect, diff, digest),
    *(verify, sign, attest),
    *(push, pull, link, find, store),
    *(doctor, bench, seal),
    *(run, serve),
)
"""In the order of a bundle's life."""


@click.group(
    cls=Verbs, commands=COMMANDS,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)  # fmt: skip
@click.version_option(__version__, prog_name="precast")
def main() -> None:
    """Cast a language model once, offline, into a bundle; set it up on the target in seconds.

    Exit codes: 0 fine, 1 the input can't be used, 2 usage, as a wrong option, 3 the bundle is refused, 4 the machine
    lacks something, 130 interrupted, 143 ended by SIGTERM.
    """
