"""A graph on one of several ranks that have sequences of their own: attention data-parallel (`dp`).

Each rank computes attention, and whatever else has caches, whole and for its own tokens; experts, feed-forward layers,
the embedding and the head stay split, and compute with the tokens of all ranks (`all_tokens`). Where own tokens come to
these, an `all_gather` along the tokens puts them together; where a sum of theirs was added up over the ranks, a
`reduce_scatter` adds up and gives each rank its own. All ranks have equally many tokens, and rows of logits, in a step.

What the graph returns has the rows of all ranks, one rank's after another's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from precast.ir.graph import symbols
from precast.ir.graph.all_tokens import (
    SUM,
    AllTokens,
    Function,
    all_tokens,
    depends,
    functions,
    params_with_all_tokens,
)
from precast.ir.graph.alone import OF_PARTS, is_collective, of_the_whole, renamed
from precast.ir.graph.infer import references
from precast.ir.graph.schema import (
    Arg,
    Block,
    CachePlan,
    Call,
    Const,
    Dim,
    Expr,
    Graph,
    Node,
    Param,
    Ref,
    ShardPlan,
    TensorType,
    Tie,
    Value,
)
from precast.ir.graph.substitution import substituted
from precast.ir.memory.step_inputs import LOGIT_ROWS, TOKENS

ALONE: Mapping[str, Expr] = {"rank": 0, "tp": 1, "ep": 1}
"""The world of what sees own tokens: no other rank has a part of it."""
GROUP = "tp"
RESHAPE = "aten.reshape.default"


class DataParallelError(Exception):
    """The graph's ranks can't have sequences of their own, with the reason."""


def refusal(graph: Graph, dp: int, tp: int) -> str | None:
    """Why `dp` of `tp` ranks can't have sequences of their own; None: they can. `graph` is not bound to a world."""
    if dp == 1:
        return None
    if dp != tp:
        few = "give 1" if tp == 1 else f"give {tp}, or 1"
        return f"dp is {dp}, and tp is {tp}: either each of the ranks has sequences of its own, or none has; {few}"
    why = unfit(graph, tp)
    return None if why is None else f"dp is {dp}, and {why}; give 1"


def unfit(graph: Graph, tp: int) -> str | None:
    """What of a graph keeps its `tp` ranks, two or more, from having sequences of their own; None: nothing does."""
    if not any(all_tokens(function).steps for name, function in functions(graph).items() if name):
        return "nothing of this model's layers would stay split, as all of it hangs together with caches"
    try:
        data_parallel(graph, {"rank": 0, "tp": tp, "ep": 1})
    except DataParallelError as error:
        return f"this model's ranks can't have sequences of their own: {error}"
    return None


def data_parallel(graph: Graph, world: Mapping[str, int]) -> Graph:
    """The graph of the rank `world["rank"]` of `tp` and `ep`, for its own sequences. No shard plan is left.

    Raises DataParallelError where that can't be.
    """
    made = functions(graph)
    found = {name: all_tokens(function) for name, function in made.items()}
    num_ranks = world["tp"]
    shared: dict[str, Expr] = {**world, **{name: symbols.mul(name, num_ranks) for name in (TOKENS, LOGIT_ROWS)}}
    params = params_with_all_tokens(
        graph, found, lambda name: DataParallelError(f"{name} is needed both whole and in parts")
    )
    _check_ties(graph, params)
    rewritten = {name: _Rewritten(function, found[name], shared) for name, function in made.items()}
    return msgspec.structs.replace(
        graph,
        symbols=tuple(symbol for symbol in graph.symbols if symbol.name not in world),
        params=tuple(substituted(param, Param, shared if param.name in params else ALONE) for param in graph.params),
        blocks=tuple(_block(block, rewritten[block.name]) for block in graph.blocks),
        outputs={name: rewritten[""].of_all_ranks(value) for name, value in graph.outputs.items()},
        main=tuple(rewritten[""].steps),
        caches=substituted(graph.caches, CachePlan, ALONE),
        shards=ShardPlan(),
    )


def _check_ties(graph: Graph, shared: frozenset[str]) -> None:
    for param in graph.params:
        if isinstance(param.recipe, Tie) and depends(param.type):
            other = param.recipe.param
            if (param.name in shared) != (other in shared):
                raise DataParallelError(f"{param.name} is tied to {other}, and one of them would be whole")


def _block(block: Block, made: _Rewritten) -> Block:
    def bound(values: tuple[Value, ...]) -> tuple[Value, ...]:
        return tuple(substituted(value, Value, made.world_of(value.name)) for value in values)

    outputs = tuple(map(made.own, block.outputs))
    return msgspec.structs.replace(
        block, params=bound(block.params), caches=bound(block.caches), nodes=tuple(made.steps), outputs=outputs
    )


class _Rewritten:
    """The steps of one function on one rank. `steps` may grow as long as it is asked for names."""

    def __init__(self, function: Function, found: AllTokens, shared: Mapping[str, Expr]) -> None:
        """`shared`: what symbols are in steps that compute with all ranks' tokens."""
        self.steps: list[Any] = []
        self._function = function
        self._found = found
        self._shared = shared
        self._names: dict[str, str] = {}  # of what is left out, what it equals
        self._of_all: set[str] = set()  # results of steps with all ranks' tokens
        self._crossed: dict[tuple[str, bool], str] = {}
        self._views = {
            step.outputs[0].name: step for step in function.steps if isinstance(step, Node) and step.op == RESHAPE
        }
        self._given = {
            name for index in found.steps for step in (function.steps[index],) if isinstance(step, Node)
            for name in references(step.args)
        }  # fmt: skip
        for index, step in enumerate(function.steps):
            if isinstance(step, Call):
                args = {formal: self.own(actual) for formal, actual in step.args.items()}
                self.steps.append(msgspec.structs.replace(step, args=args))
            elif index in found.steps:
                self._add_shared(step)
            else:
                self._add_own(step)

    def world_of(self, param: str) -> Mapping[str, Expr]:
        """What symbols are in the type of a param or cache that the function is given."""
        return self._shared if param in self._given else ALONE

    def own(self, name: str) -> str:
        """The name of the rank's own tokens of a value."""
        name = self._names.get(name, name)
        if name not in self._of_all:
            return name
        if (name, False) not in self._crossed:
            self._crossed[name, False] = self._scattered(name) if name in self._found.parts else self._cut(name)
        return self._crossed[name, False]

    def of_all_ranks(self, name: str) -> str:
        """The name of all ranks' tokens of a value; of what doesn't vary with tokens, the value itself."""
        name = self._names.get(name, name)
        if name in self._of_all or name not in self._function.varying:
            return name
        if (name, True) not in self._crossed:
            self._crossed[name, True] = self._gathered(name)
        return self._crossed[name, True]

    def _gathered(self, name: str) -> str:
        """All ranks' tokens of a value; of one that only has another shape than another value, as that one's."""
        dim, view = self._token_dim(name), self._views.get(name)
        world = {**self._shared, **ALONE}
        made = self._value(f"{name}_of_all_ranks", self._function.types[name], world)
        if view is not None and self._token_dims(*references(view.args)):
            names = {source: self.of_all_ranks(source) for source in references(view.args)}
            node = self._bound(view, names, world)
            self.steps.append(msgspec.structs.replace(node, outputs=(made,)))
        else:
            args: dict[str, Arg] = {"x": Ref(name), "dim": Const(dim), "group": Const(GROUP), "size": self._size}
            self.steps.append(Node("precast.all_gather", args, (made,)))
        return made.name

    def _add_shared(self, node: Node) -> None:
        names = {name: self.of_all_ranks(name) for name in references(node.args)}
        if node.op == SUM:
            (name,) = names.values()
            self._crossed[node.outputs[0].name, False] = self._scattered(name, node.outputs[0].name)
            return
        self.steps.append(self._bound(node, names, self._shared))
        self._of_all.update(value.name for value in node.outputs)

    def _add_own(self, node: Node) -> None:
        names = {name: self.own(name) for name in references(node.args)}
        given = node.args.get("x")
        if is_collective(node) and node.op not in OF_PARTS and isinstance(given, Ref) and node.outputs:
            self._names[node.outputs[0].name] = names[given.name]  # nobody else has a part of it
        else:
            self.steps.append(of_the_whole(self._bound(node, names, ALONE)))

    def _bound(self, node: Node, names: Mapping[str, str], world: Mapping[str, Expr]) -> Node:
        args = {name: renamed(arg, names) for name, arg in node.args.items()}
        made: Node = substituted(msgspec.structs.replace(node, args=args), Node, world)
        return made

    def _scattered(self, name: str, made: str = "") -> str:
        """The sum over ranks of what steps with all tokens make: of the rank's own tokens."""
        kind, dim = self._function.types[name], self._token_dim(name)
        args: dict[str, Arg] = {"x": Ref(name), "dim": Const(dim), "group": Const(GROUP), "size": self._size}
        value = self._value(made or f"{name}_own", kind, ALONE)
        self.steps.append(Node("precast.reduce_scatter", args, (value,)))
        return value.name

    def _cut(self, name: str) -> str:
        """The rank's own tokens of what all ranks have of all tokens."""
        kind, dim = self._function.types[name], self._token_dim(name)
        if depends(kind):
            raise DataParallelError(f"%{name} is in parts, and own tokens of it are needed whole")
        rank, count = self._shared["rank"], kind.shape[dim]
        bounds = {"start": symbols.mul(rank, count), "end": symbols.mul(symbols.add(rank, 1), count)}
        args: dict[str, Arg] = {
            "self": Ref(name),
            "dim": Const(dim),
            **{key: _integer(size) for key, size in bounds.items()},
        }
        value = self._value(f"{name}_own", kind, ALONE)
        self.steps.append(Node("aten.slice.Tensor", args, (value,)))
        return value.name

    def _token_dim(self, name: str) -> int:
        """The dimension of a value that counts tokens, or rows of logits."""
        found = self._token_dims(name)
        if len(found) != 1:
            sizes = ", ".join(map(symbols.text, self._function.types[name].shape))
            raise DataParallelError(f"%{name} [{sizes}] would go from rank to rank, and none of its sizes is that of "
                                    "the tokens alone")  # fmt: skip
        return found[0]

    def _token_dims(self, name: str) -> list[int]:
        return [dim for dim, size in enumerate(self._function.types[name].shape) if size in (TOKENS, LOGIT_ROWS)]

    @property
    def _size(self) -> Const:
        size = self._shared["tp"]
        assert isinstance(size, int), "the world is known"
        return Const(size)

    @staticmethod
    def _value(name: str, kind: TensorType, world: Mapping[str, Expr]) -> Value:
        return Value(name, substituted(kind, TensorType, world))


def _integer(size: Expr) -> Const | Dim:
    return Const(size) if isinstance(size, int) else Dim(size)
