"""A shard plan beside the one that transformers has for the model: where they differ, by kind of param.

What transformers splits is written by hand, as patterns of names; ours follows from the graph. A difference is a
question, not an error: nothing here changes a plan.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec

from precast.builder.shard.names import names_of, pattern_of, rows_of
from precast.ir.graph.schema import Graph, ShardRow

REPLICATED = "replicated"

_SAME: Mapping[str, frozenset[str]] = {
    **dict.fromkeys(("colwise", "packed_colwise", "colwise_gather_output"), frozenset(("column", "vocab", "expert"))),
    **dict.fromkeys(("rowwise", "packed_rowwise", "rowwise_split_input"), frozenset(("row", "expert"))),
    "embedding_rowwise": frozenset(("vocab",)),
    "embedding_colwise": frozenset(("column",)),
    **dict.fromkeys(("replicate", "replicated_with_grad_allreduce", "mla_kv_a_proj"), frozenset((REPLICATED,))),
}
"""By a style of transformers, the modes of ours by which a rank holds the same part. Styles that aren't here say what a
module sends, and nothing of its params."""


class Difference(msgspec.Struct, frozen=True):
    """Params that go by one entry of transformers' plan (`theirs` empty: by none), and are split otherwise here.

    `ours` is a mode of the plan, `reason` why.
    """

    entry: str
    theirs: str
    ours: str
    params: int
    reason: str


class Comparison(msgspec.Struct, frozen=True):
    """How many entries of transformers' plan name params of the graph, how many of these are the same, and the rest."""

    entries: int
    same: int
    differences: tuple[Difference, ...]


def compared(graph: Graph, theirs: Mapping[str, str]) -> Comparison:
    """The graph's plan beside `theirs`: styles by patterns of names, relative to the decoder.

    Entries that name none of the graph's params, and those of styles that say nothing of params, are left out.
    """
    names, rows = names_of(graph), rows_of(graph)
    shapes = {param.name: param.type.shape for param in graph.params}
    found: dict[tuple[str, str, str, str], int] = {}
    covered: set[str] = set()
    entries = same = 0
    for entry, style in theirs.items():
        pattern = pattern_of(entry, anywhere=True)
        named = [name for name in names if any(map(pattern.fullmatch, names[name]))]
        covered |= set(named)
        # A module's bias is whole where its matrix is split by rows, here as there; norms have nothing else.
        matrices = [name for name in named if len(shapes[name]) > 1] or named
        if style not in _SAME or not named:
            continue
        other = [name for name in matrices if _mode(rows.get(name)) not in _SAME[style]]
        entries, same = entries + 1, same + (not other)
        for name in other:
            key = entry, style, _mode(rows.get(name)), _reason(rows.get(name))
            found[key] = found.get(key, 0) + 1
    for name in names:
        if name not in covered and _mode(rows.get(name)) != REPLICATED:
            key = _without_numbers(name), "", _mode(rows[name]), _reason(rows[name])
            found[key] = found.get(key, 0) + 1
    return Comparison(entries, same, tuple(Difference(*key[:3], count, key[3]) for key, count in found.items()))


def _mode(row: ShardRow | None) -> str:
    return REPLICATED if row is None else row.mode


def _reason(row: ShardRow | None) -> str:
    if row is None:
        return "no layer that is split has it"
    return row.reason or f"{row.kind}, by {row.units}"


def _without_numbers(name: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", name)
