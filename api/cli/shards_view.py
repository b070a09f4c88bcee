"""What `precast inspect --shards` shows: over how many ranks a bundle can be split, and how each kind of layer is."""

from __future__ import annotations

import math
from collections.abc import Iterable

from precast.cli.show import Report, table
from precast.ir.artifact import Bundle
from precast.ir.graph import symbols
from precast.ir.graph.schema import Call, Graph, Param, ShardRow, Tie
from precast.ir.ops.checks import WORLD


def shards(bundle: Bundle) -> Report:
    """The worlds, a row for each kind of layer and way in which it is split, and how much every rank has all of."""
    graph = bundle.graph
    plan = graph.shards
    whole, total = _elements(_whole(graph)), _elements(graph.params, _one_rank())
    fields = {
        "worlds": [{"tp": world.tp, "ep": list(world.ep)} for world in plan.worlds],
        "shards": [_fields(row, graph) for row in plan.rows],
        "replicated_share": round(whole / total, 4) if total else 1.0,
    }
    if not plan.worlds:
        return Report(fields, "one rank: the bundle has no plan for several")
    worlds = [("ranks (tp)", "parts of the experts (ep)")]
    worlds += [(str(world.tp), ", ".join(map(str, world.ep))) for world in plan.worlds]
    share = f"{100 * whole / total:.2f} % of the parameters are on every rank" if total else "no parameters"
    return Report(fields, f"{table(worlds)}\n\n{table(_rows(graph))}\n\n{share}")


def _rows(graph: Graph) -> list[tuple[str, ...]]:
    """One line for layers of one kind that are split alike, and for each reason of what is not."""
    calls = _calls(graph)
    lines: dict[tuple[str, ...], list[int]] = {}
    for row in sorted(graph.shards.rows, key=lambda row: row.mode == "replicated"):
        units = str(row.units) if row.units else "-"
        collective = f"{row.collective} over {row.group}" if row.collective else "-"
        counts = lines.setdefault((row.kind, row.mode, units, collective, row.reason or "-"), [0, 0])
        counts[0] += calls.get(row.block, 0)
        counts[1] += len(row.params) * calls.get(row.block, 0)
    titles = ("kind", "how", "units", "collective", "layers", "params", "reason")
    shown = [(kind, mode, units, collective, str(layers), str(params), reason)
             for (kind, mode, units, collective, reason), (layers, params) in lines.items()]  # fmt: skip
    return [titles, *shown]


def _calls(graph: Graph) -> dict[str, int]:
    """How often each block runs; `main`, without a name, once."""
    counts = {"": 1}
    for step in graph.main:
        if isinstance(step, Call):
            counts[step.block] = counts.get(step.block, 0) + 1
    return counts


def _fields(row: ShardRow, graph: Graph) -> dict[str, object]:
    named = {name: getattr(row, name) for name in row.__struct_fields__}
    return named | {"params": list(row.params), "nodes": list(row.nodes), "layers": _calls(graph).get(row.block, 0)}


def _whole(graph: Graph) -> list[Param]:
    """The params that each rank has all of."""
    return [param for param in graph.params if not any(symbols.free_symbols(size) & WORLD for size in param.type.shape)]


def _one_rank() -> dict[str, int]:
    return {"tp": 1, "rank": 0, "ep": 1}


def _elements(params: Iterable[Param], world: dict[str, int] | None = None) -> int:
    own = (param.type.shape for param in params if not isinstance(param.recipe, Tie))
    return sum(math.prod(symbols.evaluate(size, world or {}) for size in shape) for shape in own)
