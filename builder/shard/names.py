"""What a param of the graph goes by: its own name, and the names of the checkpoint tensors that it is made of."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from precast.ir.graph.schema import Call, Graph, Param, Read, Recipe, ShardRow, Tie
from precast.ir.weights import recipes


def names_of(graph: Graph) -> dict[str, frozenset[str]]:
    """All names of each param, by its own. A joint projection also goes by those of the projections in it."""
    by_name = {param.name: param for param in graph.params}
    return {param.name: frozenset((param.name, *_tensors(param.recipe, by_name))) for param in graph.params}


def _tensors(recipe: Recipe, params: Mapping[str, Param]) -> Iterator[str]:
    """The names that a recipe reads, those of many experts once, as they are written."""
    if isinstance(recipe, Read):
        yield recipe.tensor
    elif isinstance(recipe, Tie):
        yield from (recipe.param, *_tensors(params[recipe.param].recipe, params))
    else:
        for part in recipes.parts(recipe):
            yield from _tensors(part, params)


def pattern_of(text: str, *, anywhere: bool = False) -> re.Pattern[str]:
    """Matches names that are `text`, or that begin with it and a dot; `*` is any run of characters without dots.

    `anywhere`: the name may have other parts, each with a dot behind it, before.
    """
    begin = r"(?:.*\.)?" if anywhere else ""
    return re.compile(begin + r"[^.]*".join(map(re.escape, text.split("*"))) + r"(?:\..*)?")


def rows_of(graph: Graph) -> dict[str, ShardRow]:
    """The row of the shard plan that each param of the graph stands in. Params without a row are whole on all ranks."""
    rows: dict[tuple[str, str], ShardRow] = {}
    for row in graph.shards.rows:
        rows |= {(row.block, name): row for name in row.params}
    found = {name: row for (block, name), row in rows.items() if not block}
    for step in graph.main:
        if isinstance(step, Call):
            found |= {actual: rows[step.block, formal] for formal, actual in step.args.items()
                      if (step.block, formal) in rows}  # fmt: skip
    return found
