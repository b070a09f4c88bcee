"""How `precast run` prints answers: as one object, one as it comes, or each in a line."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import click
import msgspec

from precast.cli.progress import counted
from precast.cli.verbs import echo
from precast.ir.errors import RequestError

if TYPE_CHECKING:
    from precast.loader.engine.engine import Engine
    from precast.loader.engine.params import SamplingParams
    from precast.loader.engine.results import Event, Output
    from precast.loader.timeline import Timeline


class Asked(NamedTuple):
    """Prompts, text or token ids, and how their answers are drawn."""

    prompts: list[str | list[int]]
    params: SamplingParams
    add_special_tokens: bool


def print_as_json(engine: Engine, asked: Asked, timeline: Timeline, before: Callable[[], None]) -> None:
    """One object, with what the engine counted. Ends the command with 1 where an answer ended with an error.

    `before` it is printed is done what may fail: the error's object is then the only one.
    """
    outputs = _outputs(engine, asked)
    before()
    answers = [msgspec.to_builtins(output) for output in outputs]
    echo(json.dumps({"outputs": answers, "stats": engine.stats.to_dict(), "timeline": json.loads(timeline.to_json())}))
    if any(output.error is not None for output in outputs):  # which the object says
        click.get_current_context().exit(1)


def print_as_it_comes(engine: Engine, asked: Asked) -> None:
    """The answer to the only prompt: its text as it grows, or its token ids where the bundle has no tokenizer.

    Raises RequestError where it ends with an error.
    """
    (prompt,) = asked.prompts
    has_text, space = engine.tokenizer is not None, ""
    for event in engine.stream(prompt, asked.params, add_special_tokens=asked.add_special_tokens):
        if has_text:
            echo(event.text, nl=False)
        elif event.token_ids:
            echo(space + " ".join(map(str, event.token_ids)), nl=False)
            space = " "
        _check_finished(event)
    echo("")


def print_each(engine: Engine, asked: Asked) -> None:
    """A line a prompt. Raises RequestError where an answer ended with an error, once all are printed."""
    outputs = _outputs(engine, asked)
    for prompt, output in zip(asked.prompts, outputs, strict=True):
        answer = output.text if engine.tokenizer is not None else output.token_ids
        echo(f"{prompt!r} -> {answer!r}")
    for i, output in enumerate(outputs):
        _check_finished(output, f"prompt {i}")


def _outputs(engine: Engine, asked: Asked) -> list[Output]:
    """All answers, with a bar while they grow."""
    prompts, params, add_special_tokens = asked
    with counted(len(prompts), "answers") as progress:
        return engine.generate(prompts, params, add_special_tokens=add_special_tokens, progress=progress)


def _check_finished(found: Event | Output, where: str | None = None) -> None:
    if found.error is not None:
        raise RequestError(found.error.code, found.error.message, where=where)
