"""What `precast inspect --shards` shows: over how many ranks a bundle can be split, and how each kind of layer is."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from typing import Literal

import msgspec

from precast.cli.show import Report, table
from precast.ir.artifact import Bundle
from precast.ir.graph import all_tokens, data_parallel, stages, symbols
from precast.ir.graph.schema import Call, Graph, Param, ShardPlan, ShardRow, Tie
from precast.ir.ops.checks import WORLD


def shards(bundle: Bundle) -> Report:
    """The worlds, a row for each kind of layer and way in which it is split, and how much every rank has all of."""
    graph = bundle.graph
    plan = graph.shards
    whole, total = _elements(_whole(graph)), _elements(graph.params, _one_rank())
    fields = {
        "worlds": [{"tp": world.tp, "ep": list(world.ep)} for world in plan.worlds],
        "pipelines": [{"pp": len(each.layers), "layers": list(each.layers)} for each in plan.pipelines],
        "overrides": {each.pattern: each.choice for each in plan.overrides},
        "shards": [_fields(row, graph) for row in plan.rows],
        "replicated_share": round(whole / total, 4) if total else 1.0,
    }
    compared = _compared(bundle)
    if compared is not None:
        fields["tp_plan"] = msgspec.to_builtins(compared)
    own = _own_sequences(graph)
    if own is not None:
        fields["dp"] = msgspec.to_builtins(own)
    if not plan.worlds:
        text = "one rank: the bundle has no plan for several"
        return Report(fields, text)
    worlds = [("ranks (tp)", "parts of the experts (ep)")]
    worlds += [(str(world.tp), ", ".join(map(str, world.ep))) for world in plan.worlds]
    share = f"{100 * whole / total:.2f} % of the parameters are on every rank" if total else "no parameters"
    parts = [
        table(worlds),
        table(_rows(graph)),
        share,
        *([] if own is None else [_own_text(own)]),
        *_pipelines(graph),
        *_overrides(plan),
        *([] if compared is None else [_compared_text(compared)]),
    ]
    return Report(fields, "\n\n".join(parts))


# --- sequences of their own ------------------------------------------------------------------------------------------


class _Seen(msgspec.Struct, frozen=True):
    """Which tokens layers of a kind see: `own`, and their weights are whole, or those of `all` ranks."""

    kind: str
    tokens: Literal["own", "all"]
    layers: int


class _OwnSequences(msgspec.Struct, frozen=True):
    """What `dp` does to a plan; `refused`: why it can't be."""

    refused: str | None
    shards: tuple[_Seen, ...] = ()
    replicated_share: float = 1.0


def _own_sequences(graph: Graph) -> _OwnSequences | None:
    """None where there are no several ranks."""
    tp = next((world.tp for world in graph.shards.worlds if world.tp > 1), None)
    if tp is None:
        return None
    why = data_parallel.unfit(graph, tp)
    if why is not None:
        return _OwnSequences(why)
    found = {name: all_tokens.all_tokens(function) for name, function in all_tokens.functions(graph).items()}
    steps = {block.name: block.nodes for block in graph.blocks} | {"": graph.main}
    taken = {
        name: {each for index in of.steps for each in stages.read_by(steps[name][index])} for name, of in found.items()
    }
    made = {
        name: {value.name for index in of.steps for value in steps[name][index].outputs} for name, of in found.items()
    }
    calls = _calls(graph)
    layers: dict[tuple[str, Literal["own", "all"]], set[str]] = {}
    for row in graph.shards.rows:
        if row.kind != "other":
            sees_all = not taken[row.block].isdisjoint(row.params) or not made[row.block].isdisjoint(row.nodes)
            layers.setdefault((row.kind, "all" if sees_all else "own"), set()).add(row.block)
    shown = tuple(_Seen(kind, tokens, sum(calls.get(block, 0) for block in blocks))
                  for (kind, tokens), blocks in layers.items())  # fmt: skip
    split = all_tokens.params_with_all_tokens(graph, found, AssertionError)
    kept = {param.name for param in _whole(graph)}
    whole = [param for param in graph.params if param.name not in split or param.name in kept]
    total = _elements(graph.params, _one_rank())
    return _OwnSequences(None, shown, round(_elements(whole, _one_rank()) / total, 4) if total else 1.0)


def _own_text(found: _OwnSequences) -> str:
    if found.refused is not None:
        return f"no sequences of their own (dp): {found.refused}"
    titles = ("with sequences of their own (dp)", "tokens", "layers")
    words = {"own": "own", "all": "of all ranks"}
    rows = [(each.kind, words[each.tokens], str(each.layers)) for each in found.shards]
    return f"{table([titles, *rows])}\n\n{100 * found.replicated_share:.2f} % of the parameters are on every rank then"


# --- beside the plan of transformers ---------------------------------------------------------------------------------


class _Difference(msgspec.Struct, frozen=True):
    entry: str
    theirs: str
    ours: str
    params: int
    reason: str


class _Comparison(msgspec.Struct, frozen=True):
    """What the build says of its plan beside that of transformers."""

    entries: int
    same: int
    differences: tuple[_Difference, ...]


def _compared(bundle: Bundle) -> _Comparison | None:
    """What the bundle's provenance says, if it has it. Anybody may have written that record."""
    try:
        return msgspec.convert(bundle.provenance.get("tp_plan"), _Comparison)
    except msgspec.ValidationError:
        return None


def _compared_text(found: _Comparison) -> str:
    head = f"transformers' own plan: {found.same} of the {found.entries} entries for params of this graph say the same"
    if not found.differences:
        return head
    titles = ("entry or params", "theirs", "ours", "params", "our reason")
    rows = [(each.entry, each.theirs or "-", each.ours, str(each.params), each.reason) for each in found.differences]
    return f"{head}; what differs:\n\n{table([titles, *rows])}"


def _pipelines(graph: Graph) -> list[str]:
    """Which layers each stage has, counted from 0, and what share of the parameters the largest."""
    sizes = {param.name: _elements([param], _one_rank()) for param in graph.params}
    ties = {param.name: param.recipe.param for param in graph.params if isinstance(param.recipe, Tie)}
    rows = [("stages (pp)", "layers of each", "parameters of the largest")]
    for pipeline in graph.shards.pipelines:
        ends = itertools.accumulate(pipeline.layers)
        layers = [f"{end - count}-{end - 1}" if count > 1 else str(end - 1)
                  for count, end in zip(pipeline.layers, ends, strict=True)]  # fmt: skip
        held = [
            {ties.get(name, name) for step in graph.main[start:end] for name in stages.read_by(step) if name in sizes}
            for start, end in stages.bounds_of(graph, pipeline.layers)
        ]
        largest = max(sum(sizes[name] for name in each) for each in held) / max(sum(sizes.values()), 1)
        rows.append((str(len(layers)), ", ".join(layers), f"{100 * largest:.1f} %"))
    return [table(rows)] if len(rows) > 1 else []


def _overrides(plan: ShardPlan) -> list[str]:
    """What the user's plan file says."""
    titles = ("the plan file's entry", "choice")
    return [table([titles, *((each.pattern, each.choice) for each in plan.overrides)])] if plan.overrides else []


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
