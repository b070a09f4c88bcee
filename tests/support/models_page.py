"""What `make models` runs: it writes `docs/models.md`, or prints the rows of the model types that it is given."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import click
import transformers
from model_sweep import MAX_RANKS, Row, model_types, sweep

from precast.check.agreement import CHUNK, NUM_TOKENS, PROMPTS, TOLERANCE
from precast.check.shards import TOLERANCE as SPLIT_TOLERANCE
from precast.ir.ops.flops import TOKENS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "models.md"

_GREEN = re.compile(r"^\| `(?P<model_type>[^`]+)` \| \S+ \| green \|", re.MULTILINE)
_RANKS = re.compile(
    r"^(?P<before>\| `(?P<model_type>[^`]+)` (?:\|[^|]*){6}\|)[^|]*\|[^|]*\|(?P<after>.*)$", re.MULTILINE
)
"""A row; between `before` and `after` stand the two columns that are about ranks."""

_TEXT = """\
# Models

Written by `make models`; don't edit it. transformers {version} has {total} model types for causal language modelling:
**{green} are green**, {red} are not, {outside} are out of scope (encoders, encoder-decoders, draft models).

Each type is made from its default config (completed where that alone makes no model), shrunk to a few layers of all its
kinds, with random weights, and goes the whole line in float32 on the CPU: `save_pretrained`, `precast build`,
`precast.load`. Green means:

- **builds**: the config becomes a bundle.
- **logits**: {prompts} prompts of unequal length give transformers' logits within {tolerance:.0e} (relative), packed
  into one batch, and in chunks of {chunk} tokens.
- **tokens**: {num_tokens} greedy tokens of each are transformers', while the prompts arrive one after another and share
  steps of at most {chunk} tokens.

**precast ops** is the share of the floating-point work for a prompt of {tokens} tokens that the `precast` ops and
linear layers do; what remains runs as plain torch ops. It is that of the shrunk model: a large one's is higher.

**ranks** are the numbers of ranks, up to {ranks}, that the shrunk model can be split over, and into how many parts its
experts; in all of these worlds the ranks, run together on a CPU, give the unsharded logits within {split:.0e}
([sharding.md](sharding.md#the-proof)). A large model has more heads, and can be split further. **whole on each** are
the kinds of layers that every rank has whole; `precast inspect --shards` says why.

A green row that turns red fails `tests/e2e/test_models.py`. To cover one type again: `make models ONLY=llama`; to
fill the columns about ranks again: `make models ONLY=--shards`. To try a config of your own: `precast build --check`.

| model type | architecture | status | builds | logits | tokens | precast ops | ranks | whole on each | why not |
|---|---|---|---|---|---|---|---|---|---|
{rows}
"""


def line(row: Row) -> str:
    """A row for a terminal."""
    share = "" if row.share is None else f"{100 * row.share:.1f} %"
    ranks = row.ranks and f"ranks {row.ranks}" + (f"; whole on each: {row.whole}" if row.whole else "")
    return f"{row.model_type:26}{row.status:14}{share:9}{ranks or row.reason}".rstrip()


def page(rows: Sequence[Row]) -> str:
    """The page of these rows. Equal rows give equal pages: no times, no paths."""
    counts = Counter(row.status for row in rows)
    return _TEXT.format(
        version=transformers.__version__, total=len(rows), green=counts["green"], red=counts["red"],
        outside=counts["out of scope"], prompts=len(PROMPTS), tolerance=TOLERANCE, chunk=CHUNK, num_tokens=NUM_TOKENS,
        tokens=TOKENS, ranks=MAX_RANKS, split=SPLIT_TOLERANCE,
        rows="\n".join(map(_cells, sorted(rows, key=lambda row: row.model_type))),
    )  # fmt: skip


def green_types(text: str) -> tuple[str, ...]:
    """The model types that a page says are green, in its order."""
    return tuple(match["model_type"] for match in _GREEN.finditer(text))


def _cells(row: Row) -> str:
    outside = row.status == "out of scope"
    found = ["" if outside else "yes" if value else "no" for value in (row.builds, row.logits, row.tokens)]
    share = "" if row.share is None else f"{100 * row.share:.1f} %"
    reason = _plain(row.reason)
    cells = [f"`{row.model_type}`", row.architecture, row.status, *found, share, row.ranks, row.whole, reason]
    return f"| {' | '.join(cells)} |"


def _plain(reason: str) -> str:
    """As a cell of the table."""
    return reason.replace("|", "\\|").replace("<", "&lt;").replace("`", "'")


def with_ranks(text: str, rows: Sequence[Row]) -> str:
    """The page with what these rows say of ranks."""
    known = {row.model_type: row for row in rows}

    def filled(match: re.Match[str]) -> str:
        row = known.get(match["model_type"])
        return (
            match[0] if row is None else f"{match['before']} {row.ranks or row.reason} | {row.whole} |{match['after']}"
        )

    return _RANKS.sub(filled, text)


@click.command()
@click.argument("only", nargs=-1, metavar="[TYPE]...")
@click.option("--workers", type=click.IntRange(1), default=1, show_default=True, help="Model types covered at once.")
@click.option("--shards", is_flag=True, help="Only split what is green over ranks, and fill those columns.")
def main(only: tuple[str, ...], workers: int, shards: bool) -> None:
    """Cover these model types, or cover all and write docs/models.md; each row is printed as soon as it is known."""
    unknown = sorted({*only} - {*model_types()})
    if unknown:
        types = ", ".join(unknown)
        raise click.UsageError(f"transformers {transformers.__version__} has no causal language model of type {types}")
    if not shards:
        rows = sweep(only or model_types(), workers=workers, done=_show)
        if not only:
            PAGE.write_text(page(rows), encoding="utf-8")
        if not any(row.status == "green" for row in rows):
            return
        only = tuple(row.model_type for row in rows if row.status == "green") if only else ()
    _split(only, workers)


def _split(only: Sequence[str], workers: int) -> None:
    """Split these types over ranks; or those that the page calls green, and fill its columns as they are known."""

    def done(row: Row) -> None:
        _show(row)
        if not only:
            PAGE.write_text(with_ranks(PAGE.read_text(encoding="utf-8"), [row]), encoding="utf-8")

    wanted = only or green_types(PAGE.read_text(encoding="utf-8"))
    sweep(wanted, workers=workers, done=done, splits=True)


def _show(row: Row) -> None:
    click.echo(line(row))


if __name__ == "__main__":
    main()
