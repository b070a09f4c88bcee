"""The verifier's rules about worlds of several ranks: which there are, what the plan names, and that sums are whole.

What ranks hold parts of shows in its sizes, which have symbols of the world; so a sum over such a dimension is a part
of a sum, whatever the plan says. A graph that is bound to a rank has none of these symbols: these rules pass over it.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping

from precast.ir import limits
from precast.ir.graph import partial_sums, stages, symbols
from precast.ir.graph.infer import references
from precast.ir.graph.schema import Expr, Node, Ref
from precast.ir.ops.checks import WORLD
from precast.ir.verify.facts import Facts, Fault, Rule, Scope, duplicates


def _worlds(facts: Facts) -> Iterator[Fault]:
    worlds = facts.graph.shards.worlds
    ranges = {symbol.name: symbol for symbol in facts.graph.symbols if symbol.name in WORLD}
    if not worlds:
        return
    if (count := sum(len(world.ep) or 1 for world in worlds)) > limits.MAX_WORLDS:
        yield "shards", f"{count} worlds; at most {limits.MAX_WORLDS} are allowed"
        return
    if worlds[0].tp != 1 or worlds[0].ep != (1,):
        yield "shards", "expected the world of one rank first"
    yield from duplicates("world", (str(world.tp) for world in worlds))
    for world in worlds:
        if world.tp < 1 or not world.ep or any(ep < 1 or world.tp % ep for ep in world.ep):
            found = ", ".join(map(str, world.ep)) or "none"
            yield f"world {world.tp}", f"expected parts of the experts that divide the ranks, found {found}"
            continue
        sizes = {"tp": world.tp, "rank": world.tp - 1, "ep": max(world.ep)}
        for name, size in sizes.items():
            known = ranges.get(name)
            if known is None and world.tp > 1:
                yield f"world {world.tp}", f"the symbol {name} is not declared"
            elif known is not None and (size < known.min or (known.max is not None and size > known.max)):
                yield f"world {world.tp}", f"{name} is {size}, outside of the symbol's range"


def _sizes(facts: Facts) -> Iterator[Fault]:
    """A part without elements, or of less, is none: those worlds don't divide what is split."""
    worlds = facts.graph.shards.worlds
    bad = any(world.tp < 1 or not world.ep or min(world.ep) < 1 for world in worlds)
    if bad or sum(len(world.ep) for world in worlds) > limits.MAX_WORLDS:
        return  # another rule says so
    split = {
        size: where
        for kind, where in facts.types.items()
        for size in kind.shape
        if not isinstance(size, int) and symbols.free_symbols(size) & WORLD
    }
    for world in worlds:
        for size, where in split.items():
            for ep in world.ep:
                if not _is_positive(size, {"tp": world.tp, "ep": ep}, (0, world.tp - 1)):
                    yield where, f"{symbols.text(size)} is no size where tp is {world.tp} and ep is {ep}"
                    bad = True
    if not bad:
        yield from _vocabulary(facts)


def _vocabulary(facts: Facts) -> Iterator[Fault]:
    """The ranks' rows are all tokens', and the last rank, whose rows may be filled up, has a token's, too."""
    params = {param.name: param.type for param in facts.graph.params}
    worlds = [(world.tp, {"tp": world.tp, "ep": world.ep[0], "rank": 0}) for world in facts.graph.shards.worlds]
    fitting: dict[Expr, tuple[int, int]] = {}  # by size: more tokens than that, and at most so many
    for row in facts.graph.shards.rows:
        for name in row.params if row.mode == "vocab" else ():
            for size in params[name].shape if name in params else ():
                if isinstance(size, int) or not symbols.free_symbols(size) <= WORLD:
                    continue
                if size not in fitting:
                    rows = [(tp, symbols.evaluate(size, world)) for tp, world in worlds]
                    fitting[size] = max((tp - 1) * each for tp, each in rows), min(tp * each for tp, each in rows)
                above, most = fitting[size]
                if not above < row.units <= most:
                    found = f"{row.units} tokens, expected more than {above} and at most {most}, so that"
                    yield f"param %{name}", f"{found} in each world each token is on a rank and each rank has one"


def _is_positive(size: Expr, world: Mapping[str, int], ranks: Collection[int]) -> bool:
    others = dict.fromkeys(symbols.free_symbols(size), 1)
    try:
        return all(symbols.evaluate(size, others | {**world, "rank": rank}) > 0 for rank in ranks)
    except (ZeroDivisionError, OverflowError):
        return False


def _rows(facts: Facts) -> Iterator[Fault]:
    for index, row in enumerate(facts.graph.shards.rows):
        where = f"shards, row {index}"
        scope = facts.blocks.get(row.block) if row.block else facts.main
        if scope is None:
            yield where, f"there is no block {row.block}"
            continue
        yield from ((where, f"%{name} is no param") for name in row.params if scope.kinds.get(name) != "param")
        made = {value.name for step in scope.steps for value in step.outputs}
        yield from ((where, f"%{name} is nothing that {scope.where} makes") for name in row.nodes if name not in made)
        if (row.mode == "replicated") != bool(row.reason):
            yield where, "expected a reason for what is replicated, and for nothing else"
        if row.units < 0 or bool(row.collective) != bool(row.group):
            yield where, "expected units from 0 on, and a group where there is a collective"


def _pipelines(facts: Facts) -> Iterator[Fault]:
    plan = facts.graph.shards
    if len(plan.pipelines) >= limits.MAX_STAGES or any(len(each.layers) > limits.MAX_STAGES for each in plan.pipelines):
        yield "shards", f"expected at most {limits.MAX_STAGES} stages"
        return
    if len(plan.overrides) > limits.MAX_OVERRIDES:
        yield "shards", f"{len(plan.overrides)} overrides; at most {limits.MAX_OVERRIDES} are allowed"
    yield from duplicates("pipeline", (str(len(each.layers)) for each in plan.pipelines))
    count = stages.num_layers(facts.graph)
    spans = stages.slot_spans(facts.graph)
    for each in plan.pipelines:
        where = f"pipeline {len(each.layers)}"
        if len(each.layers) < 2 or min(each.layers) < 1 or sum(each.layers) != count:
            yield where, f"expected two stages or more, each of a call or more, and {count} calls in all"
            continue
        cuts = list(itertools.accumulate(each.layers))[:-1]
        parted = [name for name, (first, last) in spans.items() if any(first < cut <= last for cut in cuts)]
        yield from ((where, f"the slot {name} would be in two stages") for name in parted)


# --- sums --------------------------------------------------------------------------------------------------------


def _sums(facts: Facts) -> Iterator[Fault]:
    if not any(symbol.name == "tp" for symbol in facts.graph.symbols):
        return
    for scope in facts.scopes:
        yield from _sums_of(scope)


def _sums_of(scope: Scope) -> Iterator[Fault]:
    partial: dict[str, str] = {}
    taken: set[str] = set()
    for index, step in enumerate(scope.steps):
        where = scope.at(index)
        names = list(references(step.args) if isinstance(step, Node) else step.args.values())
        taken.update(names)
        inside = [name for name in names if name in partial]
        if isinstance(step, Node) and step.op in _MAKE_SUMS:
            given = step.args["x"]
            if isinstance(given, Ref) and (others := [name for name in inside if name != given.name]):
                yield where, f"takes %{others[0]}, a part of a sum, before it is summed"
            elif not inside:
                yield where, f"%{names[0] if names else ''} is no part of a sum: the ranks would add what they all have"
            continue
        made = isinstance(step, Node) and partial_sums.makes_parts(step, scope.types)
        if inside and (made or not isinstance(step, Node)):
            yield where, f"takes %{inside[0]}, a part of a sum, before it is summed"
        elif isinstance(step, Node) and (made or inside):
            kept = [step.outputs[0].name] if made else partial_sums.kept(step, partial)
            if not kept:
                yield where, f"takes %{inside[0]}, a part of a sum, before it is summed"
            partial.update(dict.fromkeys(kept, where))
    for name, where in partial.items():
        if name in scope.returned or name not in taken:
            yield where, f"%{name}, a part of a sum, is never summed"


_MAKE_SUMS = ("precast.all_reduce", "precast.all_reduce_residual_rms_norm")
"""Ops that add up what ranks have of their argument `x`."""


SHARD_RULES = (
    Rule("IR060", "worlds are few, the one of one rank first, within the ranges of their symbols", _worlds),
    Rule(
        "IR061", "every world divides what is split: no rank's part is empty, and each token has its row on one", _sizes
    ),
    Rule("IR062", "rows of the plan name what is there, and give a reason for what is replicated", _rows),
    Rule("IR063", "sums that ranks have parts of are made once, before anything else is computed of them", _sums),
    Rule("IR064", "stages have a call or more each, all calls together, and no cache in common", _pipelines),
)
"""They take for granted that all others hold."""
