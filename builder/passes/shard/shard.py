"""The pass that splits a model over the ranks of a world; `layers` says what can be split, `solve` how far it reaches.

What comes out is one graph for every rank of every world that divides its layers: its sizes, the starts of its recipes'
slices and the offsets of its ids are expressions over `tp`, `ep` and `rank`. In a world of one rank it is the graph
that went in, but for nodes that change nothing there, which a load leaves out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal, NamedTuple, TypeVar

import msgspec

from precast.builder.passes.graph_pass import LoweredPass
from precast.builder.shard import layouts
from precast.builder.shard.layers import Layer, layers, only_for_selection
from precast.builder.shard.layouts import Misfit, Units
from precast.builder.shard.overrides import CODE, Overrides, apart, check_expected, is_whole, named
from precast.builder.shard.pipelines import pipelines
from precast.builder.shard.recipes import split
from precast.builder.shard.rewrite import GROUP, Rewritten, all_units, check, rewritten
from precast.builder.shard.rules import Sums, relations
from precast.builder.shard.solve import Function, KeptWhole, Name, System
from precast.ir.errors import BuildError, RecipeError
from precast.ir.graph.infer import references
from precast.ir.graph.schema import (
    Block,
    Call,
    Graph,
    Group,
    Node,
    PagedSpec,
    Param,
    ShardPlan,
    ShardRow,
    Slot,
    StateGroup,
    Symbol,
    TensorType,
    Value,
    World,
)
from precast.ir.memory import caches

G = TypeVar("G", Group, StateGroup)
Mode = Literal["column", "row", "vocab", "expert", "replicated"]

MOST_RANKS = 64
"""Of a world that the plan names."""


class Outcome(NamedTuple):
    """What became of a layer: the reason why it is replicated, or the values that are split with it."""

    layer: Layer
    reason: str
    touched: frozenset[Name]


def shard(graph: Graph, overrides: Overrides = (), *, in_blocks: bool = True) -> Graph:
    """The graph split over `tp` ranks, its experts into `ep` parts, and the plan that says so; see the module. The plan
    also has the ways to divide the layers over stages.

    `in_blocks`: channels whose weights a checkpoint stores in few bits are split where one of their blocks ends.
    `overrides`: what the user says of it. Raises BuildError (shard-plan-invalid) where that can't be.
    """
    wanted = named(graph, overrides)
    whole = {name: entry.pattern for name, entry in wanted.items() if is_whole(entry)}
    made = _split(System(apart(graph, wanted), whole, in_blocks=in_blocks))
    check_expected(made, wanted)
    plan = msgspec.structs.replace(made.shards, overrides=overrides, pipelines=pipelines(made))
    return msgspec.structs.replace(made, shards=plan)


def _split(system: System) -> Graph:
    graph = system.graph
    outcomes = list(_split_layers(system))
    units = all_units(system.pieces.values())
    worlds = _worlds(units)
    if len(worlds) < 2:
        return msgspec.structs.replace(graph, shards=ShardPlan(worlds, tuple(_rows(system, outcomes, {}))))
    functions = {name: rewritten(system, function) for name, function in system.functions.items()}
    ranks = tuple(world.tp for world in worlds)
    return msgspec.structs.replace(
        graph,
        symbols=_symbols(graph, worlds),
        params=tuple(_param(system, param, ranks) for param in graph.params),
        blocks=tuple(_block(system, block, functions[block.name]) for block in graph.blocks),
        main=functions[""].steps,
        outputs={name: functions[""].returned[value] for name, value in graph.outputs.items()},
        caches=_caches(system),
        shards=ShardPlan(worlds, tuple(_rows(system, outcomes, functions))),
    )


SHARD = LoweredPass("shard", 1, shard, "shard")


# --- which layers ----------------------------------------------------------------------------------------------------


def _split_layers(system: System) -> Iterator[Outcome]:
    for layer in layers(system):
        if system.dims((layer.function, layer.value)):
            if layer.kind == "head":
                yield Outcome(layer, "", frozenset())  # its weights are the embedding's, which has them in its row
            continue  # its caches are those of a layer that is split, and it with them
        reason = ""
        for attempt, through_norms in zip(layer.attempts, layer.through_norms, strict=False):
            before = dict(system.pieces)
            try:
                if odd := _odd(piece.units for _, piece in attempt):
                    raise Misfit(odd)
                touched = system.follow(attempt, through_norms=through_norms)
                check(system, touched)
                _check_memory(system, touched)
            except Misfit as error:
                system.pieces = before
                reason = reason or str(error)
                if isinstance(error, KeptWhole):
                    _check_whole(system, layer, error)
                continue
            yield Outcome(layer, "", frozenset(touched))
            break
        else:
            yield Outcome(layer, reason, frozenset())


def _check_whole(system: System, layer: Layer, error: KeptWhole) -> None:
    """Raise BuildError for a layer that would be whole because another one of a spec with it is to be."""
    if any(function == layer.function for function, _ in system.whole):
        return
    calls = [step for step in system.graph.main if isinstance(step, Call) and step.block == layer.function]
    names = sorted(actual for call in calls for formal, actual in call.args.items()
                   if system.kind((layer.function, formal)) == "param")  # fmt: skip
    raise BuildError(
        CODE,
        f'"{error.entry}" says replicate of layers whose caches are one group with those of others: {layer.kind} '
        f"layers with params such as {names[0] if names else layer.value} would be whole, too",
        fix="replicate all layers that share the group (`precast inspect --cache`), or none",
    )


def _odd(units: Iterator[Units]) -> str:
    """Why even two ranks can't share these: a single layer would rule out all worlds that machines have."""
    found = list(units)
    if any(each.by == "vocab" or each.count % 2 == 0 for each in found):
        return ""
    counts = " and ".join(str(each.count) for each in found)
    return f"{counts} can't be divided by 2"


def _check_memory(system: System, touched: list[Name]) -> None:
    """Params and caches can be split so."""
    recipes = {param.name: param.recipe for param in system.graph.params}
    for name in touched:
        kind = system.kind(name)
        if name[0] == "" and kind == "param":
            try:
                split(recipes[name[1]], system.dims(name))
            except RecipeError as error:
                raise Misfit(f"the recipe of {name[1]} can't be cut: {error}") from error
        if name[0] == "" and kind == "cache" and 0 in system.dims(name):
            raise Misfit("pages would be split")


def _worlds(units: set[Units]) -> tuple[World, ...]:
    """The numbers of ranks that all layers can be split over."""
    found = []
    for tp in range(1, MOST_RANKS + 1):
        if tp > 1 and not any(each.by != "vocab" for each in units):
            break
        if all(_divides(tp, each) for each in units if each.by in ("tp", "vocab")):
            most = tp if any(each.by == "ep" for each in units) else 1
            fitting = (ep for ep in range(1, most + 1) if tp % ep == 0)
            parts = tuple(ep for ep in fitting if all(_divides_experts(tp, ep, each) for each in units))
            found += [World(tp, parts)] if parts else []
    return tuple(found)


def _divides(tp: int, units: Units) -> bool:
    if units.by == "vocab":
        return tp == 1 or (tp - 1) * -(-units.count // tp) < units.count
    return units.finest % tp == 0 and (units.count % tp == 0 or tp % units.count == 0)


def _divides_experts(tp: int, ep: int, units: Units) -> bool:
    ranks = {"ep": ep, "within": tp // ep}.get(units.by, 1)
    return units.count % ranks == 0


# --- the graph -------------------------------------------------------------------------------------------------------


def _symbols(graph: Graph, worlds: tuple[World, ...]) -> tuple[Symbol, ...]:
    most = max(world.tp for world in worlds)
    parts = max(max(world.ep) for world in worlds)
    added = (Symbol("ep", 1, parts), Symbol("rank", 0, most - 1), Symbol("tp", 1, most))
    return tuple(sorted((*graph.symbols, *added), key=lambda symbol: symbol.name))


def _local(system: System, name: Name) -> TensorType:
    kind = system.type_of(name)
    if system.is_constant(name):
        return kind
    return TensorType(kind.dtype, layouts.local_shape(kind.shape, system.dims(name)))


def _param(system: System, param: Param, ranks: tuple[int, ...]) -> Param:
    dims = system.dims(("", param.name))
    if not dims or system.is_constant(("", param.name)):
        return param
    return Param(param.name, _local(system, ("", param.name)), split(param.recipe, dims, ranks))


def _block(system: System, block: Block, made: Rewritten) -> Block:
    def local(values: tuple[Value, ...]) -> tuple[Value, ...]:
        return tuple(Value(value.name, _local(system, (block.name, value.name))) for value in values)

    return msgspec.structs.replace(
        block,
        params=local(block.params),
        caches=local(block.caches),
        nodes=made.steps,
        outputs=tuple(made.returned[name] for name in block.outputs),
    )


def _caches(system: System) -> caches.CachePlan:
    plan = system.graph.caches
    pages = {pool.name: pool.pages for pool in plan.pools}
    return msgspec.structs.replace(
        plan,
        groups=tuple(_group(system, group, pages[group.pool]) for group in plan.groups),
        states=tuple(_group(system, group, pages[group.pool]) for group in plan.states),
    )


def _group(system: System, group: G, pages: str) -> G:
    first = group.slots[0].tensors[0]
    sizes = _local(system, ("", first.name)).shape
    spec = group.spec
    if isinstance(spec, PagedSpec):
        spec = msgspec.structs.replace(spec, num_kv_heads=sizes[2])
    elif not isinstance(group, Group):
        spec = msgspec.structs.replace(spec, shape=sizes[1:])
    types = caches.slot_types(spec, pages)
    slots = tuple(
        Slot(slot.name, tuple(Value(value.name, kind) for value, kind in zip(slot.tensors, types, strict=True)))
        for slot in group.slots
    )
    return msgspec.structs.replace(group, spec=spec, slots=slots)


# --- the plan --------------------------------------------------------------------------------------------------------


def _rows(system: System, outcomes: list[Outcome], functions: Mapping[str, Rewritten]) -> Iterator[ShardRow]:
    """A row for each way in which a layer's params are split, then what is replicated, by function."""
    for outcome in outcomes:
        if not outcome.reason:
            yield from _split_rows(system, outcome, functions)
    for outcome in outcomes:
        if outcome.reason and outcome.layer.kind != "feed-forward":
            layer = outcome.layer
            yield ShardRow(layer.kind, layer.function, "replicated", nodes=(layer.value,), reason=outcome.reason)
    for function in system.functions.values():
        yield from _replicated_rows(system, function, outcomes)


def _split_rows(system: System, outcome: Outcome, functions: Mapping[str, Rewritten]) -> Iterator[ShardRow]:
    kind = outcome.layer.kind
    if kind == "head":
        (tokens,) = (pieces[0].size for pieces in system.dims(("", outcome.layer.value)).values())
        assert isinstance(tokens, int), "of a known vocabulary"
        weights = tuple(name for scope, name in sorted(outcome.touched) if scope == "" and _is_param(system, name))
        yield ShardRow(kind, "", "vocab", weights, (outcome.layer.value,), tokens, "all_gather", GROUP)
        return
    for name, function in system.functions.items():
        modes: dict[Mode, list[str]] = {}
        for value, given in function.given.items():
            is_its = given == "param" and (name, value) in outcome.touched and (name, value) in system.users
            if is_its and (mode := _mode(system, function, value)):
                modes.setdefault(mode, []).append(value)
        products = functions[name].products if name in functions else ()
        for mode, params in modes.items():
            counts = {
                piece.units.finest for value in params for pieces in system.dims((name, value)).values()
                for piece in pieces if piece.units.by != "within"
            }  # fmt: skip
            nodes = tuple(each for each in products if mode != "column" and _takes(function, each, params))
            row = ShardRow(kind, name, mode, tuple(params), nodes, max(counts, default=0))
            yield msgspec.structs.replace(row, collective="all_reduce", group=GROUP) if nodes else row


def _is_param(system: System, name: str) -> bool:
    return system.kind(("", name)) == "param" and ("", name) in system.users


def _takes(function: Function, value: str, params: list[str]) -> bool:
    return any(
        value in [made.name for made in step.outputs] and not set(params).isdisjoint(references(step.args))
        for step in function.steps
        if isinstance(step, Node)
    )


def _mode(system: System, function: Function, value: str) -> Mode | None:
    """How a param of the function is split, by its units and by what takes it; None: only calls do."""
    takers = [function.steps[index] for _, index in system.users[function.name, value]]
    nodes = [step for step in takers if isinstance(step, Node)]
    dims = system.dims((function.name, value))
    splits = {units.by for units in all_units(dims.values())}
    if not nodes or not dims:
        return None
    if "vocab" in splits:
        return "vocab"
    if splits & {"ep", "within"}:
        return "expert"
    sums = {
        place for node in nodes for relation in relations(node, function.types)
        if isinstance(relation, Sums) for place in relation.places
    }  # fmt: skip
    return "row" if any((value, dim) in sums for dim in dims) else "column"


def _replicated_rows(system: System, function: Function, outcomes: list[Outcome]) -> Iterator[ShardRow]:
    """The matrices that all ranks have, by reason."""
    reasons = {(each.layer.function, each.layer.value): each.reason for each in outcomes if each.reason}
    found: dict[str, list[str]] = {}
    selecting = only_for_selection(function)
    for value, kind in function.given.items():
        name = (function.name, value)
        if kind != "param" or len(system.type_of(name).shape) < 2 or system.dims(name):
            continue
        takers = [function.steps[index] for _, index in system.users.get(name, ())]
        made = [(function.name, each.name) for step in takers if isinstance(step, Node) for each in step.outputs]
        if made:
            failed = next((reasons[each] for each in made if each in reasons), "")
            reason = f"it projects what every rank has whole ({failed})" if failed else "no layer that is split has it"
            if selecting.issuperset(each for _, each in made):
                reason = "it selects keys for all heads of a query, and every rank needs them all"
            if name in system.whole:
                reason = str(KeptWhole(system.whole[name]))
            found.setdefault(reason, []).append(value)
    for reason, params in found.items():
        yield ShardRow("other", function.name, "replicated", tuple(params), reason=reason)
