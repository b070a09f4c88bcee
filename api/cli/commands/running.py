"""`precast run`: answers to prompts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from precast.cli.options import ALLOW_CONFIG_MISMATCH, AS_JSON, BUNDLE, CHECKPOINT, CHOICES, TIMEOUT, TRUST, together
from precast.cli.verbs import Verb

if TYPE_CHECKING:
    from precast.cli.answers import Asked
    from precast.loader.engine.engine import Engine
    from precast.loader.world.processes import Processes


def _timeouts(_: click.Context, __: click.Parameter, given: tuple[str, ...]) -> dict[str, float]:
    """`PHASE=SECONDS` as a mapping; what the loader says of names and ranges, it says."""
    found = {}
    for text in given:
        name, equals, seconds = text.partition("=")
        try:
            found[name] = float(seconds)
        except ValueError:
            equals = ""
        if not equals:
            raise click.BadParameter(f"{text!r} is no PHASE=SECONDS such as join=30", param_hint="--timeout")
    return found


PROMPTS = together(
    click.option("--prompt", "prompts", multiple=True, metavar="TEXT", help="Text to go on from; may be repeated."),
    click.option("--token-ids", multiple=True, metavar="IDS", help="Token ids in place of text: 1,15,27."),
    click.option(
        "--no-special-tokens", "add_special_tokens", is_flag=True, flag_value=False, default=True,
        help="Put no special token around --prompt, as for the text of a chat template that has them.",
    ),
)  # fmt: skip
RANKS = together(
    click.option(
        "--tp", type=int, metavar="N",
        help="Ranks that share each layer, each a process with its own GPU. Default: 1, or what a launcher has "
        "started.",
    ),
    click.option(
        "--ep", type=int, default=1, metavar="M", help="Groups of ranks that experts are split over; divides --tp."
    ),
    click.option("--pp", type=int, default=1, metavar="P", help="Stages that have the layers, each of --tp ranks."),
    click.option(
        "--dp", type=int, default=1, metavar="N", help="As many as --tp: each rank has sequences of its own, or 1."
    ),
    click.option(
        "--world-port", type=int, metavar="PORT", help="Rank 0 listens there for the others. Default: a free one."
    ),
    click.option(
        "--timeout", "timeouts", multiple=True, metavar="PHASE=SECONDS", callback=_timeouts,
        help="How long ranks wait for one another to join, agree, load, capture, step or end; may be repeated.",
    ),
)  # fmt: skip
SAMPLING = together(
    click.option("--max-tokens", type=int, default=64, show_default=True, help="The longest answer."),
    click.option("--temperature", type=float, default=0.0, show_default=True, help="0 takes the likeliest token."),
    click.option(
        "--top-k", type=int, metavar="K", help="Draw from the K likeliest tokens, with a temperature above 0."
    ),
    click.option(
        "--top-p", type=float, metavar="P", default=1.0,
        help="Draw from the likeliest that reach P together, with a temperature above 0.",
    ),
    click.option(
        "--min-p", type=float, metavar="P", default=0.0,
        help="Draw from those P times as likely as the likeliest, with a temperature above 0.",
    ),
    click.option("--seed", type=int, help="Equal seeds give equal answers."),
    click.option("--stop", multiple=True, metavar="TEXT", help="Text that ends the answer; may be repeated."),
    click.option("--ignore-eos", is_flag=True, help="Go on after an end-of-sequence token."),
)  # fmt: skip
SAMPLED = ("max_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "stop", "ignore_eos")
"""What these give of SamplingParams."""
LIMITS = together(
    click.option("--max-num-seqs", type=int, default=256, show_default=True, help="Sequences that run at once."),
    click.option("--max-num-tokens", type=int, default=8192, show_default=True, help="Tokens that one step computes."),
    click.option(
        "--max-prefill-tokens", type=int, metavar="N",
        help="Prompt tokens that a step computes beside sequences that decode. Default: by the time that steps take.",
    ),
    click.option(
        "--cache-bytes", type=int,
        help="Memory for keys, values and states, in whole slabs. Default: from what is free.",
    ),
)  # fmt: skip
KERNELS = together(
    CHOICES,
    click.option(
        "--allow-native", "native", multiple=True, metavar="DIGEST",
        help="Use the native layer with this digest, or those of the bundle with it: code that others compiled.",
    ),
    click.option(
        "--backend", type=click.Choice(["driver", "torch"]),
        help="The CUDA driver alone, without torch, or torch. Default: the driver where it runs the model.",
    ),
)  # fmt: skip

_PROMPTS = ("prompts", "token_ids")
_ORDER = "precast.prompts"
"""The entry of a context's `meta` with the names of these options, as often as they were given and in that order."""


class _Run(Verb):
    """A verb that keeps the order of its prompts: click keeps that of each option's values alone."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """As click does it; what is wrong with the arguments is said here already."""
        _, _, given = self.make_parser(ctx).parse_args(list(args))
        ctx.meta[_ORDER] = [option.name for option in given if option.name in _PROMPTS]
        return super().parse_args(ctx, args)


@click.command(cls=_Run)
@BUNDLE
@click.option("--weights", required=True, help=CHECKPOINT)
@TIMEOUT
@PROMPTS
@click.option("--device", help="cpu, cuda, cuda:1. Default: the GPU if there is one.")
@RANKS
@SAMPLING
@LIMITS
@ALLOW_CONFIG_MISMATCH
@KERNELS
@TRUST
@click.option(
    "--timeline", "timeline_to", is_flag=False, flag_value="-", metavar="[FILE]",
    help="Show on standard error how long each phase took, or write it to FILE: a page (.html), or .json.",
)  # fmt: skip
@AS_JSON
def run(
    bundle: Path | str, prompts: tuple[str, ...], token_ids: tuple[str, ...], add_special_tokens: bool,
    timeline_to: str | None, as_json: bool, **options: Any,
) -> None:  # fmt: skip
    """Load BUNDLE with --weights and generate. One prompt's answer is printed as it comes."""
    of_each: dict[str, Iterator[str | list[int]]] = {"prompts": iter(prompts), "token_ids": map(_token_ids, token_ids)}
    all_prompts = [next(of_each[name]) for name in click.get_current_context().meta[_ORDER]]
    if not all_prompts:
        raise click.UsageError("give --prompt TEXT or --token-ids IDS at least once")
    from precast.cli.stopping import ends_at_once
    from precast.cli.timeline_file import check_file, write_timeline
    from precast.loader.world.start import launched

    check_file(timeline_to)
    is_alone = options["tp"] in (None, 1) and options["pp"] == 1 and launched() is None
    click.get_current_context().with_resource(ends_at_once(alone=is_alone))
    if is_alone:
        from precast.loader.driver.context import begin_early

        begin_early(options["device"])  # while the bundle is opened and the prompts are looked at
    from precast.cli import answers
    from precast.cli.progress import LOAD_PHASES, AnnouncedTimeline, stages

    with stages(LOAD_PHASES, "loading") as progress:
        timeline = AnnouncedTimeline(progress)
        from precast.loader.engine.params import SamplingParams

        params = SamplingParams(**{name: options.pop(name) for name in SAMPLED})
        asked = answers.Asked(all_prompts, params, add_special_tokens)
        engine = _loaded(bundle, asked, timeline=timeline, **options)

    def keep_timeline() -> None:
        if timeline_to == "-":
            click.echo(timeline.text(), err=True)
        elif timeline_to is not None:
            name = bundle.name if isinstance(bundle, Path) else bundle
            write_timeline(Path(timeline_to), timeline, f"Load of {name}", engine.stats.to_dict())

    with engine:
        if as_json:
            answers.print_as_json(engine, asked, timeline, keep_timeline)
            return
        if len(all_prompts) == 1:
            answers.print_as_it_comes(engine, asked)
        else:
            answers.print_each(engine, asked)
        keep_timeline()


def _loaded(bundle: Path | str, asked: Asked, *, trust: Path | None, **options: Any) -> Engine:
    """`precast.load` with the keywords that it shares with `run`, once the prompts are known to be right."""
    from precast.ir.artifact import Bundle
    from precast.ir.trust.loading import repository_of, rules_of
    from precast.loader.engine.prompts import check_prompts
    from precast.loader.engine.tokenizer import Tokenizer

    opened = Bundle.open(bundle)  # what is wrong with a prompt is said before torch is imported
    rules = rules_of(opened, trust, repository_of(bundle))
    tokenizer = Tokenizer.from_files(opened.files("tokenizer"))
    prompts, params, add_special_tokens = asked
    check_prompts(prompts, params, opened.manifest.model, lambda: tokenizer, add_special_tokens=add_special_tokens)
    from precast.loader.load import load

    engine = load(opened, trust=rules, processes=_early_ranks(options["tp"], options["pp"], options["dp"]), **options)
    engine.tokenizer = tokenizer
    return engine


def _early_ranks(tp: int | None, pp: int, dp: int) -> Processes | None:
    """Processes for the ranks that `load` will start, which import torch while this one does."""
    from precast.loader.placement import check_world
    from precast.loader.world.processes import Processes
    from precast.loader.world.start import launched

    tp = 1 if tp is None else tp
    if tp * pp == 1 or launched() is not None:
        return None
    check_world(tp, 1, pp=pp, dp=dp)
    return Processes(tp * pp)


def _token_ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        message = f"{text!r} is no list of numbers separated by commas, such as 1,15,27"
        raise click.BadParameter(message, param_hint="--token-ids") from error
