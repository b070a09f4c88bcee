"""`precast serve`: OpenAI's HTTP interface."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import click

from precast.cli.commands.running import KERNELS, LIMITS, RANKS
from precast.cli.options import (
    ALLOW_CONFIG_MISMATCH,
    AS_JSON,
    BUNDLE,
    CHECKPOINT,
    TIMEOUT,
    TRUST,
    Name,
    Seconds,
    together,
)
from precast.cli.verbs import Verb, echo
from precast.ir.errors import RequestError, TargetError

KEY_VARIABLE = "PRECAST_API_KEY"
PLACE = together(
    click.option("--host", default="127.0.0.1", show_default=True, help="Where to listen; 0.0.0.0 in a container."),
    click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="0: a free one."),
    click.option(
        "--model-name", "names", multiple=True, metavar="NAME", type=Name(),
        help="What requests call the model; may be repeated. Default: the bundle's name.",
    ),
    click.option(
        "--api-key-file", type=click.Path(path_type=Path, readable=False), metavar="FILE",
        help=f"Keys, one a line, of which a request must bring one. Default: that in {KEY_VARIABLE}, if it is set.",
    ),
)  # fmt: skip
QUEUE = together(
    click.option(
        "--max-queued", type=click.IntRange(min=0), default=1024, show_default=True,
        help="Answers that wait beside those that run; more are turned away with 503.",
    ),
    click.option(
        "--shutdown-timeout", type=Seconds(min=0), default=20.0, show_default=True, metavar="SECONDS",
        help="After SIGTERM, how long answers may take to end.",
    ),
    click.option(
        "--stuck-after", type=Seconds(min=1), default=300.0, show_default=True, metavar="SECONDS",
        help="How long a busy engine may be silent, before /health says 503.",
    ),
)  # fmt: skip


@click.command(cls=Verb)
@BUNDLE
@click.option("--weights", required=True, help=CHECKPOINT)
@TIMEOUT
@PLACE
@QUEUE
@click.option("--device", help="cpu, cuda, cuda:1. Default: the GPU if there is one.")
@RANKS
@LIMITS
@ALLOW_CONFIG_MISMATCH
@KERNELS
@TRUST
@AS_JSON
def serve(
    bundle: Path | str, names: tuple[str, ...], host: str, port: int, api_key_file: Path | None, max_queued: int,
    shutdown_timeout: float, stuck_after: float, trust: Path | None, as_json: bool, **load: Any,
) -> None:  # fmt: skip
    """Load BUNDLE with --weights and answer OpenAI's requests over HTTP.

    SIGTERM and Ctrl-C let the answers that run end; a second signal ends at once. With --json, each thing that happens
    is a line: {"event": "listening", "value": "http://127.0.0.1:8000"}, then "ready", "draining" and "cutting".
    """
    from precast.loader.world.start import launched

    if launched() is not None:
        message = "a launcher has started several processes"
        raise RequestError(
            "engine-option-invalid", message, fix="start one `precast serve --tp N`: it starts its ranks"
        )
    keys = _keys(api_key_file)
    try:
        from precast.serve import http_process
        from precast.serve.app import Options
        from precast.serve.messages import Load
    except ModuleNotFoundError as error:
        message = f"the server needs {error.name}, which is not installed"
        raise TargetError("dependency-missing", message, fix="pip install 'precast[serve]'") from error

    def say(event: str, value: str) -> None:
        if as_json:
            echo(json.dumps({"event": event, "value": value}))
        else:
            click.echo(_SAID[event].format(value=value, name=options.names[0]), err=True)

    most_open = load["max_num_seqs"] * load["dp"] + max_queued
    options = Options(names or (_name_of(bundle),), most_open, stuck_after, keys)
    load["choices"] = None if load["choices"] is None else str(load["choices"])
    wanted = Load(str(bundle), None if trust is None else str(trust), load)
    http_process.serve(wanted, options, host=host, port=port, shutdown_seconds=shutdown_timeout, say=say)


_SAID = {
    "listening": "listening at {value}, loading",
    "ready": "serving {name}: loaded in {value} s",
    "draining": "ending: answers that run: {value}; a second signal ends at once",
    "cutting": "ending: requests whose answers are cut off: {value}",
}


def _name_of(bundle: Path | str) -> str:
    """What the bundle is called: the last part of its path or of its repository."""
    if isinstance(bundle, Path):
        return bundle.resolve().name.removesuffix(".bundle")
    return bundle.partition("://")[2].partition("@")[0].rpartition("/")[2].partition(":")[0]


def _keys(file: Path | None) -> tuple[str, ...]:
    """The keys in the file, or in the environment. Raises RequestError for a file that has none."""
    if file is None:
        if KEY_VARIABLE not in os.environ:
            return ()
        key = os.environ[KEY_VARIABLE].strip()
        if not key:
            raise RequestError("engine-option-invalid", f"the environment's {KEY_VARIABLE} has no key")
        return (key,)
    try:
        lines = file.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        said = error.strerror if isinstance(error, OSError) else "it is no text"
        raise RequestError("engine-option-invalid", f"--api-key-file can't be read: {said}", where=str(file)) from None
    keys = tuple(line.strip() for line in lines if line.strip())
    if not keys:
        raise RequestError("engine-option-invalid", "--api-key-file has no key", where=str(file))
    return keys
