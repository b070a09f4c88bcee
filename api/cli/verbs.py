"""What a verb is: a command whose errors are messages and exit codes, and which prints a report.

Every error of Precast's own becomes one message on standard error, with --json one object on standard output as well,
and the exit code of its kind: 1 the user's input, 2 usage (the value of an option, above all), 3 a bundle refused, 4
the environment. Ctrl-C ends with 130.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import click

from precast.cli.spelling import as_typed
from precast.ir.errors import PrecastError, printable

if TYPE_CHECKING:
    from precast.cli.show import Report


class _Helped(click.Command):
    """A command whose help and version end with a message where standard output takes no more."""

    def make_context(self, *args: Any, **more: Any) -> click.Context:
        """As click makes it; `--help` and `--version` print here."""
        try:
            return super().make_context(*args, **more)
        except BrokenPipeError:
            raise
        except OSError as error:
            found = _unwritten(error)
            click.echo(f"error: {found}", err=True)
            sys.exit(found.exit_code)


class Verb(_Helped):
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
                with suppress(PrecastError):  # the error itself is told below
                    echo(json.dumps({"error": fields}))
            click.echo(printable(f"error: {error}"), err=True)
            is_usage = error.code == "cache-too-small" and ctx.params.get("cache_bytes") is not None
            ctx.exit(2 if is_usage else error.exit_code)
        except KeyboardInterrupt:
            click.echo("\ninterrupted", err=True)  # after the terminal's ^C
            ctx.exit(130)


class Verbs(_Helped, click.Group):
    """A group of verbs. Its help lists them in the order in which they were added."""

    command_class = Verb

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Their names."""
        return list(self.commands)


def print_report(found: Report, as_json: bool) -> None:
    """Print a report: its text, or its fields as one JSON object."""
    echo(json.dumps(found.fields) if as_json else printable(found.text))


def echo(text: str, *, nl: bool = True) -> None:
    """Print to standard output. Raises PrecastError (`write-failed`) when that takes no more, as a full disk."""
    try:
        click.echo(text, nl=nl)
    except BrokenPipeError:  # the reader has seen enough: click ends the program in silence
        raise
    except OSError as error:
        raise _unwritten(error) from error


def _unwritten(error: OSError) -> PrecastError:
    """The error of a standard output that takes no more; from here on nothing is written to it."""
    # What was not written stays in the buffer, and at the exit would fail once more, with a traceback.
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
    return PrecastError("write-failed", f"the answer can't be written: {error.strerror}", where="standard output")
