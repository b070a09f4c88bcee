"""Keeps in few bits what a checkpoint stores so: weights of linear layers and of experts, tables of embeddings."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec

from precast.builder.graph.rounding import NONE, Rounding, Roundings, rounding_of
from precast.builder.passes.graph_pass import LoweredPass
from precast.builder.shard.pipelines import pipelines
from precast.builder.weights.at_load import exact, of_columns
from precast.builder.weights.kept import Kept, Misfit, Stored, is_quantised, kept, stored
from precast.ir.graph.infer import references
from precast.ir.graph.schema import (
    Arg,
    Block,
    Call,
    Cast,
    Const,
    Dtype,
    DtypeArg,
    Expr,
    Graph,
    Items,
    Node,
    Param,
    Read,
    Recipe,
    Ref,
    Reshape,
    ShardRow,
    TensorType,
    Tie,
    Value,
)
from precast.ir.graph.stored_parts import arg_name
from precast.ir.graph.symbols import free_symbols
from precast.ir.ops import table
from precast.ir.ops.checks import WORLD
from precast.ir.ops.op import OpDef
from precast.ir.ops.rows_tokens import TABLE_FORMATS
from precast.ir.weights import recipes

Found = tuple[Kept, Stored, Rounding]
"""A kept weight, its params, and how the input is rounded that it is multiplied with."""
Place = tuple[str, str]
"""A block, empty for `main`, and the name of a weight there."""

_TABLES = {
    "precast.embedding": "precast.quantised_embedding",
    "precast.sharded_embedding": "precast.quantised_sharded_embedding",
}
"""The ops that look up rows, and their forms for stored weights. They take ids, which nothing rounds."""
_MULTIPLIED = {"aten.linear.default": ("weight",), "precast.experts": ("up", "down")}
_WEIGHTS = {**_MULTIPLIED, **dict.fromkeys(_TABLES, ("weight",))}
"""The ops that have a form for stored weights, and which of their arguments those are."""
_PRODUCTS = {
    **_MULTIPLIED,
    "aten.addmm.default": ("mat1", "mat2"),
    "aten.matmul.default": ("self", "other"),
    "precast.grouped_linear": ("weight",),
    "precast.paged_latent_attention": ("weight",),
    "precast.paged_sparse_latent_attention": ("weight",),
}
"""All ops that multiply with matrices of weights, and which of their arguments those may be."""
_FORMS = {
    "aten.linear.default": "precast.quantised_linear",
    "precast.experts": "precast.quantised_experts",
    **_TABLES,
}
"""Those forms."""
_ROUNDINGS = {"aten.linear.default": "activation", "precast.experts": "rounding"}
"""What the forms call the argument that says how inputs are rounded."""


class Dequantised(NamedTuple):
    """A param whose values are stored in few bits, and why they are dequantised while it is read."""

    param: str
    reason: str


class Unrounded(NamedTuple):
    """A param in few bits, and why the input that it is multiplied with stays as it is, where it was to be rounded."""

    param: str
    reason: str


def keep_quantised(
    graph: Graph,
    left: list[Dequantised | Unrounded] | None = None,
    scales: Dtype = "float32",
    roundings: Roundings = MappingProxyType({}),
    wide: Mapping[str, str] = MappingProxyType({}),
) -> Graph:
    """linear(x, w) -> quantised_linear(x, values, scales, ...), and experts and embeddings likewise, where the recipe
    of w says that a checkpoint stores it in few bits; the stored tensors become params of their own.

    What a rank reads of them is exact, or the weight stays as it is, and `left` gets the reason. A weight that was to
    be quantised while it is read, and can't be kept so, is read as it is stored. `scales`: the type of scales that
    formats with groups of inputs are published with. `roundings`: of the inputs of layers; where they are left out,
    `left` gets the reason, too. `wide`: why weights were not chosen to be quantised while they are read, by their
    tensors; `left` gets those that are multiplied with.
    """
    weights = _Weights(graph, scales, roundings)
    if left is not None:
        left += [*weights.left(), *weights.unrounded(), *_not_chosen(graph, wide)]
    made = weights.rewritten() if weights.kept else graph
    params = tuple(msgspec.structs.replace(param, recipe=exact(param.recipe)) for param in made.params)
    return made if params == made.params else msgspec.structs.replace(made, params=params)


KEEP_QUANTISED = LoweredPass("keep_quantised", 1, keep_quantised)


class _Weights:
    """The quantised weights of a graph: which are kept, as what, and why others are not."""

    def __init__(self, graph: Graph, scales: Dtype, roundings: Roundings) -> None:
        self._graph = graph
        self._scales: Dtype = scales
        self._roundings = roundings
        self._params = {param.name: param for param in graph.params if is_quantised(param.recipe)}
        self._bound = _bound(graph, self._params)
        self._tied = {param.recipe.param for param in graph.params if isinstance(param.recipe, Tie)}
        self._tables = _tables(graph, self._bound) - self._tied
        self._reasons: dict[str, str] = {}
        self.kept: dict[str, Found] = {}
        self._keep()
        while self._drop():
            pass
        self._agree()

    def left(self) -> Iterator[Dequantised]:
        """The weights that are dequantised."""
        for name in self._params:
            if name not in self.kept:
                yield Dequantised(name, self._reasons[name])

    def unrounded(self) -> Iterator[Unrounded]:
        """The weights whose inputs would be rounded, if this graph could say it."""
        for name, param in self._params.items():
            wanted = self._rounding(param)
            if wanted == NONE or (name not in self.kept and exact(param.recipe) != param.recipe):
                continue  # nothing is rounded for what is read as it is stored
            if name not in self.kept:
                yield Unrounded(name, "the weight is dequantised")
            elif self.kept[name][2].reason:
                yield Unrounded(name, self.kept[name][2].reason)

    def _keep(self) -> None:
        """What recipes say, weight by weight."""
        for name, param in self._params.items():
            try:
                if name in self._tied:
                    raise Misfit("another param is tied to it")
                found = _kept(param.recipe, param.type.dtype)
                parts = stored(found, name, self._scales)
                rounding = self._rounding(param)
                rounding = rounding if _is_matrix(found) else _of_experts(rounding)
                if rounding.scale is not None:
                    parts.params["input_scale"] = _input_scale(name, rounding.scale)
                self.kept[name] = found, parts, rounding
            except Misfit as error:
                self._reasons[name] = str(error)

    def _rounding(self, param: Param) -> Rounding:
        """How the input is to be rounded that a weight is multiplied with; a table is multiplied with none."""
        return NONE if param.name in self._tables else rounding_of(param.recipe, self._roundings)

    def _drop(self) -> bool:
        """Leave out what can't be kept because of where it is taken, or of others; whether anything was."""
        found: dict[str, str] = {}
        for place, names in self._bound.items():
            reason = self._unfit(place, names)
            if reason:
                found |= {name: reason for name in names if name in self.kept}
        for name, reason in found.items():
            del self.kept[name]
            self._reasons.setdefault(name, reason)
        return bool(found)

    def _unfit(self, place: Place, names: Collection[str]) -> str:
        """Why the weights that one place of the graph takes can't be kept there; empty: they can."""
        if any(name not in self.kept for name in names):
            return "the layers that share its block store it in other ways"
        node, arg = _taker(self._graph, place)
        if node is None or arg not in _WEIGHTS.get(node.op, ()):
            return f"{node.op if node else 'more than one op'} takes it"
        if len({_form(*self.kept[name]) for name in names}) > 1:
            return "the layers that share its block store it in other ways"
        formats = {self.kept[name][0].format for name in names}
        if node.op in _TABLES and not formats <= set(TABLE_FORMATS):
            return f"{_FORMS[node.op]} takes {', '.join(TABLE_FORMATS)}, and not {', '.join(sorted(formats))}"
        known = {each.name for each in _definition(_FORMS[node.op]).args}
        taken = {_arg_name(node, arg, part) for part in self.kept[next(iter(names))][1].params}
        if unknown := taken - known:
            return f"{_FORMS[node.op]} has no {', '.join(sorted(unknown))}"
        ways = set()
        for other in _WEIGHTS[node.op]:
            given = node.args[other]
            for each in self._bound.get((place[0], given.name), ()) if isinstance(given, Ref) else ():
                ways.add((self.kept[each][0].format, self.kept[each][0].zero_offset) if each in self.kept else None)
            if not isinstance(given, Ref) or (place[0], given.name) not in self._bound:
                ways.add(None)
        return "" if len(ways) == 1 else f"{node.op} takes weights of different formats"

    def _agree(self) -> None:
        """An op that takes several weights rounds the rows for all of them in one way, or for none."""
        weights: dict[tuple[str, int], tuple[Node, list[str]]] = {}
        for place, names in self._bound.items():
            node, _ = _taker(self._graph, place)
            if node is not None and len(_WEIGHTS.get(node.op, ())) > 1:
                weights.setdefault((place[0], id(node)), (node, []))[1].extend(n for n in names if n in self.kept)
        for node, names in weights.values():
            if len({self.kept[name][2].kind for name in names}) > 1:
                reason = f"{_FORMS[node.op]} rounds the rows for both of its weights in one way"
                for name in names:
                    whole, parts, _ = self.kept[name]
                    self.kept[name] = whole, parts, Rounding(reason=reason)

    def rewritten(self) -> Graph:
        """The graph with the stored parts of what is kept."""
        graph = self._graph
        made = msgspec.structs.replace(
            graph,
            params=tuple(each for param in graph.params for each in self._parts(param)),
            blocks=tuple(map(self._block, graph.blocks)),
            main=tuple(
                each
                for step in graph.main
                for each in ((self._call(step),) if isinstance(step, Call) else self._nodes("", step))
            ),
        )
        rows = tuple(map(self._row, graph.shards.rows))
        stages = pipelines(made) if graph.shards.pipelines else ()
        return msgspec.structs.replace(made, shards=msgspec.structs.replace(graph.shards, rows=rows, pipelines=stages))

    def _parts(self, param: Param) -> Iterable[Param]:
        return self.kept[param.name][1].params.values() if param.name in self.kept else (param,)

    def _at(self, function: str, name: str) -> Found | None:
        """What is kept in place of a weight of a function."""
        names = self._bound.get((function, name), ())
        return next((self.kept[each] for each in names if each in self.kept), None)

    def _types(self, function: str, name: str) -> dict[str, TensorType]:
        """The types of the parts of a weight that a function takes, by their names there; none, if it isn't kept."""
        found = self._at(function, name)
        if found is None:
            return {}
        return {_part_name(name, part): param.type for part, param in found[1].params.items()}

    def _block(self, block: Block) -> Block:
        params: list[Value] = []
        for value in block.params:
            types = self._types(block.name, value.name)
            params += [Value(name, kind) for name, kind in types.items()] or [value]
        nodes = tuple(made for node in block.nodes for made in self._nodes(block.name, node))
        return msgspec.structs.replace(block, params=tuple(params), nodes=nodes)

    def _call(self, call: Call) -> Call:
        args: dict[str, str] = {}
        for formal, actual in call.args.items():
            found = self._at(call.block, formal)
            names = ["of"] if found is None else found[1].params
            args |= {_part_name(formal, part): _part_name(actual, part) for part in names}
        return msgspec.structs.replace(call, args=args)

    def _nodes(self, function: str, node: Node) -> tuple[Node, ...]:
        """The node with what is kept in its weights' place, after one that bounds its input, where that is wanted."""
        given: dict[str, tuple[str, *Found]] = {}
        for arg in _WEIGHTS.get(node.op, ()):
            value = node.args[arg]
            found = self._at(function, value.name) if isinstance(value, Ref) else None
            if isinstance(value, Ref) and found is not None:
                given[arg] = value.name, *found
        if not given:
            return (node,)
        args: dict[str, Arg] = dict(node.args)
        bounds: list[Node] = []
        for arg, (name, whole, parts, rounding) in given.items():
            args |= {_arg_name(node, arg, part): Ref(_part_name(name, part)) for part in parts.params}
            if parts.block is not None:
                args[_arg_name(node, arg, "block")] = Items(tuple(map(Const, parts.block)))
            args["format"] = Const(whole.format)
            if node.op in _TABLES:
                args["dtype"] = DtypeArg(node.outputs[0].type.dtype)
            if whole.zero_offset:
                args["zero_offset"] = Const(whole.zero_offset)
            if rounding.activation != "none":
                args[_ROUNDINGS[node.op]] = Const(rounding.activation)
            if rounding.bound is not None:
                bounds.append(_bounded(node, whole.shape[-1], rounding.bound))
                args["input"] = Ref(bounds[-1].outputs[0].name)
        op = _FORMS[node.op]
        left_out = {each.name: Const(None) for each in _definition(op).args if not each.has_default}
        return *bounds, Node(op, left_out | args, node.outputs)

    def _row(self, row: ShardRow) -> ShardRow:
        """With the parts of its weights: all of them, or, of weights that are split, those that are split, too; of a
        vocabulary those that count its tokens, not words of several."""
        params: list[str] = []
        for name in row.params:
            found, types = self._at(row.block, name), self._types(row.block, name)
            split = [each for each, kind in types.items() if row.mode == "replicated" or _is_split(kind)]
            if row.mode == "vocab" and found is not None:
                split = [each for each in split if found[0].shape[0] in types[each].shape]
            params += split or [name]
        return msgspec.structs.replace(row, params=tuple(params))


def _kept(recipe: Recipe, dtype: Dtype) -> Kept:
    """The parts of a weight [.., outputs, inputs]. Of one that gets a scale for each output while it is read, outputs
    are rows of what is stored, or columns. Raises Misfit."""
    found, turned = kept(recipe, dtype), of_columns(recipe)
    if turned == recipe or not _is_each_input(found):
        return found
    found = kept(turned, dtype)
    if _is_each_input(found):
        raise Misfit("its outputs are neither the rows nor the columns of what is stored")
    return found


def _is_each_input(whole: Kept) -> bool:
    """Whether each input has a scale of its own."""
    return whole.parts["scales"].steps[-1] == 1


def _not_chosen(graph: Graph, wide: Mapping[str, str]) -> Iterator[Dequantised]:
    """The matrices of weights that products take, and that nothing was to quantise."""
    if not wide:
        return
    params = {
        param.name: param
        for param in graph.params
        if len(param.type.shape) > 1 and not is_quantised(param.recipe) and not isinstance(param.recipe, Tie)
    }
    multiplied = {each.name: _multiplied(each.nodes, [value.name for value in each.params]) for each in graph.blocks}
    multiplied[""] = _multiplied([step for step in graph.main if isinstance(step, Node)], params)
    bound = _bound(graph, params)
    taken = {name for (function, place), names in bound.items() if place in multiplied[function] for name in names}
    for name, param in params.items():
        if name in taken:
            found = {reason: None for read in recipes.each_leaf(param.recipe) if (reason := wide.get(read.tensor))}
            yield Dequantised(name, "; ".join(found) or "it is of no layer that is known")


def _multiplied(nodes: Iterable[Node], weights: Iterable[str]) -> set[str]:
    """Those of the weights that products take, as they are or changed by ops that take nothing else."""
    origin = {name: name for name in weights}
    found = set()
    for node in nodes:
        for arg in _PRODUCTS.get(node.op, ()):
            given = node.args.get(arg)
            if isinstance(given, Ref) and given.name in origin:
                found.add(origin[given.name])
        taken = set(references(node.args))
        if node.op not in _PRODUCTS and len(taken) == 1 and taken <= origin.keys():
            origin |= {value.name: origin[next(iter(taken))] for value in node.outputs}
    return found


def _definition(op: str) -> OpDef:
    found = table.lookup(op)
    assert found is not None, f"{op} is in the table"
    return found


def _arg_name(node: Node, arg: str, part: str) -> str:
    """What the form for stored weights calls a part of the argument."""
    return arg_name(_FORMS[node.op], arg, part)


def _part_name(weight: str, part: str) -> str:
    return weight if part == "of" else f"{weight}.{part}"


def _is_split(kind: TensorType) -> bool:
    return any(free_symbols(size) & WORLD for size in kind.shape)


def _form(whole: Kept, parts: Stored, rounding: Rounding) -> tuple[object, ...]:
    """What the node and the types say of a kept weight."""
    types = tuple((name, param.type) for name, param in parts.params.items())
    return whole.format, whole.zero_offset, parts.block, types, rounding.kind


def _is_matrix(whole: Kept) -> bool:
    """Whether it is of a linear layer, not of experts."""
    return len(whole.shape) == 2


def _of_experts(wanted: Rounding) -> Rounding:
    """What `precast.quantised_experts` can do of it: scales that are made of a row."""
    if wanted.scale is not None:
        return Rounding(reason="experts whose inputs have a scale in the checkpoint take them as they are")
    if wanted.bound is not None:
        return Rounding(reason="experts whose inputs are bounded before they are rounded take them as they are")
    return wanted


def _input_scale(weight: str, stored: Read) -> Param:
    """The one scale by which a linear layer's input is divided."""
    recipe = Cast(stored if stored.shape == (1,) else Reshape(stored, (1,)), "float32")
    return Param(_part_name(weight, "input_scale"), TensorType("float32", (1,)), recipe)


def _bounded(node: Node, inputs: Expr, bound: float) -> Node:
    """The input of a linear layer, with magnitudes of at most `bound`."""
    (result,) = node.outputs
    kind = TensorType(result.type.dtype, (*result.type.shape[:-1], inputs))
    args: dict[str, Arg] = {"self": node.args["input"], "min": Const(-bound), "max": Const(bound)}
    return Node("aten.clamp.default", args, (Value(f"{result.name}_input", kind),))


def _bound(graph: Graph, params: Mapping[str, Param]) -> dict[Place, list[str]]:
    """The params that are quantised in some call, and all that calls bind there, by where functions take them."""
    found: dict[Place, list[str]] = {("", name): [name] for name in params}
    for step in graph.main:
        if isinstance(step, Call):
            for formal, actual in step.args.items():
                found.setdefault((step.block, formal), []).append(actual)
    in_main = {name for step in graph.main if isinstance(step, Node) for name in references(step.args)}
    return {
        place: list(dict.fromkeys(names))
        for place, names in found.items()
        if not params.keys().isdisjoint(names) and (place[0] or place[1] in in_main)
    }


def _tables(graph: Graph, bound: Mapping[Place, Collection[str]]) -> set[str]:
    """The params that embeddings take, and nothing else does."""
    takers: dict[str, set[str]] = {}
    for place, names in bound.items():
        node, _ = _taker(graph, place)
        for name in names:
            takers.setdefault(name, set()).add("" if node is None else node.op)
    return {name for name, ops in takers.items() if ops <= _TABLES.keys()}


def _taker(graph: Graph, place: Place) -> tuple[Node | None, str]:
    """The only node that takes a value, and as which argument; None: there are several."""
    function, name = place
    steps: Sequence[Any] = next((block.nodes for block in graph.blocks if block.name == function), graph.main)
    nodes = [step for step in steps if isinstance(step, Node) and name in references(step.args)]
    args = [arg for node in nodes for arg, given in node.args.items() if given == Ref(name)]
    alone = len(nodes) == 1 and len(args) == 1
    return (nodes[0], args[0]) if alone else (nodes[0] if len(nodes) == 1 else None, "")
