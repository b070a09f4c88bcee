"""What `make models` runs: it writes `docs/models.md`, or prints the rows of the model types that it is given."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import click
import transformers
from model_sweep import MAX_RANKS, Look, Row, model_types, sweep

from precast.builder.versions import OLDEST
from precast.check.agreement import CHUNK, NUM_TOKENS, PROMPTS, TOLERANCE
from precast.check.shards import TOLERANCE as SPLIT_TOLERANCE
from precast.ir.ops.flops import TOKENS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "models.md"

_GREEN = re.compile(r"^\| `(?P<model_type>[^`]+)` \| \S+ \| green \|", re.MULTILINE)
_ROW = re.compile(r"^\| `(?P<model_type>[^`]+)` \| \S+ \| (?P<status>[^|]+) \|.*$", re.MULTILINE)
_COLUMNS = re.compile(
    r"^(?P<before>\| `(?P<model_type>[^`]+)` (?:\|[^|]*){6}\|)"
    r"(?P<ranks>[^|]*\|[^|]*\|)(?P<torch>[^|]*\|)(?P<after>.*)$",
    re.MULTILINE,
)
"""A row, with the two columns that are about ranks and the one about torch."""

_TEXT = """\
# Models

Written by `make models`; don't edit it. transformers {version} has {total} model types for causal language modelling:
**{green} green**, {red} not, {outside} out of scope (encoders, encoder-decoders, draft models).

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

**without torch**: whether a GPU serves the shrunk model in bfloat16 [without torch](without_torch.md), or in float32,
if it is built in that alone; else the first op that only torch computes.

A green row that turns red fails `tests/e2e/test_models.py`. To cover one type again: `make models ONLY=llama`, or,
to write its row into this page as well, `make models ONLY="--write llama"`; to fill the columns about ranks again:
`make models ONLY=--shards`, and the one about torch: `make models ONLY=--without-torch`. To try a config of your own:
`precast build --check`.

{oldest}{rows}
"""
_OLDEST = re.compile(r"^<!-- begin: the oldest transformers -->\n.*?^<!-- end -->\n\n", re.MULTILINE | re.DOTALL)
_TEXT_OLDEST = """\
<!-- begin: the oldest transformers -->
The table is of transformers {newest}. With {oldest}, the oldest that is supported, {num_green} of the {num_all} green
types were built and compared in the same way, and are green; those that aren't:

{exceptions}
<!-- end -->

"""
_HEADS = (
    "model type", "architecture", "status", "builds", "logits", "tokens", "precast ops", "ranks", "whole on each",
    "without torch", "why not",
)  # fmt: skip


def line(row: Row) -> str:
    """A row for a terminal."""
    share = "" if row.share is None else f"{100 * row.share:.1f} %"
    ranks = row.ranks and f"ranks {row.ranks}" + (f"; whole on each: {row.whole}" if row.whole else "")
    torch = row.without_torch and f"without torch: {row.without_torch}"
    return f"{row.model_type:26}{row.status:14}{share:9}{ranks or torch or row.reason}".rstrip()


def page(rows: Sequence[Row], oldest: str = "") -> str:
    """The page of these rows, with what `oldest_of` gave. Equal rows give equal pages: no times, no paths."""
    return _page({row.model_type: _cells(row) for row in rows}, oldest)


def with_rows(text: str, rows: Sequence[Row]) -> str:
    """The page `text` with these rows in the place of its own of the same types, or added to them."""
    own = {each["model_type"]: each[0] for each in _ROW.finditer(text)}
    return _page(own | {row.model_type: _cells(row) for row in rows}, oldest_of(text))


def oldest_of(text: str) -> str:
    """What a page says of the oldest transformers; empty where it says nothing."""
    found = _OLDEST.search(text)
    return found[0] if found else ""


def with_oldest(text: str, version: str, rows: Sequence[Row]) -> str:
    """The page `text`, saying which of its green types are green with transformers `version`, too: `rows` are those of
    the types that it has."""
    known, green = {row.model_type: row for row in rows}, green_types(text)
    newest = re.search(r"transformers (\S+) has", text)
    unknown = [name for name in green if name not in known]
    red = [known[name] for name in green if name in known and known[name].status != "green"]
    listed = [f"- it has no {_in_words(unknown)}"] if unknown else []
    listed += [f"- `{row.model_type}`: {_plain(row.reason)}" for row in red]
    said = _TEXT_OLDEST.format(
        newest=newest[1] if newest else "", oldest=version, num_green=len(green) - len(unknown) - len(red),
        num_all=len(green), exceptions="\n".join(listed) or "- none",
    )  # fmt: skip
    return _OLDEST.sub("", text).replace(f"| {_HEADS[0]} |", f"{said}| {_HEADS[0]} |", 1)


def _in_words(names: Sequence[str]) -> str:
    quoted = [f"`{name}`" for name in names]
    return " and ".join(filter(None, (", ".join(quoted[:-1]), quoted[-1])))


def _page(lines: dict[str, str], oldest: str) -> str:
    """The page of these rows of the table, by model type."""
    counts = Counter(each["status"] for each in _ROW.finditer("\n".join(lines.values())))
    return _TEXT.format(
        version=transformers.__version__, total=len(lines), green=_are(counts["green"]), red=_are(counts["red"]),
        outside=_are(counts["out of scope"]), prompts=len(PROMPTS), tolerance=TOLERANCE, chunk=CHUNK,
        num_tokens=NUM_TOKENS, tokens=TOKENS, ranks=MAX_RANKS, split=SPLIT_TOLERANCE, oldest=oldest,
        rows="\n".join([
            f"| {' | '.join(_HEADS)} |", f"|{'---|' * len(_HEADS)}",
            *(text for _, text in sorted(lines.items())),
        ]),
    )  # fmt: skip


def _are(count: int) -> str:
    return f"{count} is" if count == 1 else f"{count} are"


def green_types(text: str) -> tuple[str, ...]:
    """The model types that a page says are green, in its order."""
    return tuple(match["model_type"] for match in _GREEN.finditer(text))


def _cells(row: Row) -> str:
    outside = row.status == "out of scope"
    found = ["" if outside else "yes" if value else "no" for value in (row.builds, row.logits, row.tokens)]
    share = "" if row.share is None else f"{100 * row.share:.1f} %"
    reason = _plain(row.reason)
    looks = [row.ranks, row.whole, row.without_torch]
    cells = [f"`{row.model_type}`", row.architecture, row.status, *found, share, *looks, reason]
    return f"| {' | '.join(cells)} |"


def _plain(reason: str) -> str:
    """As a cell of the table."""
    return reason.replace("|", "\\|").replace("<", "&lt;").replace("`", "'")


def with_columns(text: str, rows: Sequence[Row], look: Look) -> str:
    """The page with what these rows say of ranks (`split`), or of torch (`resolve`)."""
    known = {row.model_type: row for row in rows}

    def filled(match: re.Match[str]) -> str:
        row = known.get(match["model_type"])
        if row is None:
            return match[0]
        ranks, torch = match["ranks"], match["torch"]
        if look == "split":
            ranks = f" {row.ranks or row.reason} | {row.whole} |"
        else:
            torch = f" {_plain(row.without_torch or row.reason)} |"
        return f"{match['before']}{ranks}{torch}{match['after']}"

    return _COLUMNS.sub(filled, text)


@click.command()
@click.argument("only", nargs=-1, metavar="[TYPE]...")
@click.option("--workers", type=click.IntRange(1), default=1, show_default=True, help="Model types covered at once.")
@click.option("--write", is_flag=True, help="Put the rows of these types into docs/models.md, and leave the others.")
@click.option("--shards", is_flag=True, help="Only split what is green over ranks, and fill those columns.")
@click.option("--without-torch", is_flag=True, help="Only say what is served without torch, and fill that column.")
@click.option("--oldest", is_flag=True, help="Cover what is green with the oldest transformers, and say that.")
def main(only: tuple[str, ...], workers: int, write: bool, shards: bool, without_torch: bool, oldest: bool) -> None:
    """Cover these model types, or cover all and write docs/models.md; each row is printed as soon as it is known."""
    if oldest:
        _cover_with_oldest(workers)
        return
    unknown = sorted({*only} - {*model_types()})
    if unknown:
        types = ", ".join(unknown)
        raise click.UsageError(f"transformers {transformers.__version__} has no causal language model of type {types}")
    if not shards and not without_torch:
        rows = sweep(only or model_types(), workers=workers, done=_show)
        if not only:
            before = PAGE.read_text(encoding="utf-8") if PAGE.exists() else ""
            PAGE.write_text(page(rows, oldest_of(before)), encoding="utf-8")
        elif write:
            PAGE.write_text(with_rows(PAGE.read_text(encoding="utf-8"), rows), encoding="utf-8")
        if not any(row.status == "green" for row in rows):
            return
        only = tuple(row.model_type for row in rows if row.status == "green") if only else ()
    if shards or not without_torch:
        _look(only, workers, "split", write=write or not only)
    if without_torch or not shards:
        _look(only, workers, "resolve", write=write or not only)


def _cover_with_oldest(workers: int) -> None:
    """Cover the page's green types with the transformers that is installed, which must be the oldest."""
    wanted = ".".join(map(str, OLDEST))
    if not transformers.__version__.startswith(f"{wanted}."):
        raise click.UsageError(f"transformers {transformers.__version__} is installed, expected {wanted}")
    text = PAGE.read_text(encoding="utf-8")
    rows = sweep([name for name in green_types(text) if name in model_types()], workers=workers, done=_show)
    PAGE.write_text(with_oldest(text, transformers.__version__, rows), encoding="utf-8")


def _look(only: Sequence[str], workers: int, look: Look, *, write: bool) -> None:
    """Ask this of these types, or of those that the page calls green; `write` fills its columns as they are known."""

    def done(row: Row) -> None:
        _show(row)
        if write:
            PAGE.write_text(with_columns(PAGE.read_text(encoding="utf-8"), [row], look), encoding="utf-8")

    wanted = only or green_types(PAGE.read_text(encoding="utf-8"))
    sweep(wanted, workers=workers, done=done, look=look)


def _show(row: Row) -> None:
    click.echo(line(row))


if __name__ == "__main__":
    main()
