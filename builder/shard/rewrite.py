"""A graph in which each rank computes its part: sizes as expressions of the world, and the collectives in between."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from precast.builder.shard import layouts
from precast.builder.shard.layouts import EXPERT_RANKS, Misfit, Pieces, Units
from precast.builder.shard.rules import Every, Gathers, Relation, Same, Sums, Through, relations
from precast.builder.shard.solve import Function, Name, System
from precast.ir.graph import symbols
from precast.ir.graph.infer import apply_shape_rule, references
from precast.ir.graph.schema import Arg, Call, Const, Dim, Expr, Items, Node, Ref, TensorType, Value
from precast.ir.ops import table
from precast.ir.ops.op import ShapeError
from precast.ir.ops.rows_fused import FUNCTIONS

GROUP = "tp"
"""The ranks that share a layer."""


class Local(NamedTuple):
    """A node on one rank: what stands for it, in order. `is_partial`: its results are to be summed over all ranks."""

    nodes: tuple[Node, ...]
    is_partial: bool


def check(system: System, touched: Iterable[Name]) -> None:
    """Raise Misfit unless all that takes or makes these values can be computed by each rank."""
    seen: set[tuple[str, int]] = set()
    for name in touched:
        function = system.functions[name[0]]
        for scope, index in system.users.get(name, ()):
            step = function.steps[index]
            if (scope, index) in seen:
                continue
            seen.add((scope, index))
            if isinstance(step, Node):
                local(system, function, step)
            else:
                _check_call(system, step)
        if name[1] in function.returned and system.dims(name) and not _is_gathered(system, name):
            raise Misfit("its result would leave the layer in parts")


def _check_call(system: System, call: Call) -> None:
    given = system.functions[call.block].given
    for formal, actual in call.args.items():
        if given[formal] == "input" and system.dims(("", actual)):
            raise Misfit("what it would split is passed to a layer")
    if any(system.dims(("", value.name)) for value in call.outputs):
        raise Misfit("what it would split comes from a layer, where all ranks have it")


def _is_gathered(system: System, name: Name) -> bool:
    """Whether the value is an output of the graph whose last dimension can be put together at the end."""
    rank = len(system.type_of(name).shape)
    return name[0] == "" and set(system.dims(name)) == {rank - 1}


# --- one node --------------------------------------------------------------------------------------------------------


def local(system: System, function: Function, node: Node) -> Local:
    """The node as one rank computes it. Raises Misfit, with a reason, where it can't."""
    names = [value.name for value in node.outputs] + list(references(node.args))
    split = {name: dims for name in names if (dims := system.dims((function.name, name)))}
    if not split:
        return Local((node,), False)
    return _Localised(system, function, node, split).made()


class _Localised:
    """One node whose arguments or results are split."""

    def __init__(self, system: System, function: Function, node: Node, split: Mapping[str, dict[int, Pieces]]) -> None:
        self.system = system
        self.function = function
        self.node = node
        self.split = split
        self.relations = list(relations(node, function.types))
        self.args = dict(node.args)
        self.before: list[Node] = []
        self.after: list[Node] = []
        self.types: dict[str, TensorType] = {}
        for name in references(node.args):
            self.types[name] = self._local_type(name)

    def made(self) -> Local:
        """What stands for the node."""
        if self.node.op == "precast.embedding":
            return self._embedding()
        self._check_whole()
        self._slice_constants()
        partial = self._sums()
        if self.node.op == "precast.experts":
            partial = self._choose_experts()
        self._rewrite_sizes()
        gathered = [each for each in self.relations if isinstance(each, Gathers) and each.given[0] in self.split
                    and each.given[1] in self.split[each.given[0]]]  # fmt: skip
        if gathered:
            return Local(self._gathered(gathered[0]), False)
        node = self._typed(self.node.op, self.args, [value.name for value in self.node.outputs])
        for value in node.outputs:
            wanted = self._local_type(value.name)
            same = len(wanted.shape) == len(value.type.shape) and all(
                symbols.equal(a, b) for a, b in zip(wanted.shape, value.type.shape, strict=True)
            )
            if not same:
                raise Misfit(f"{self.node.op} mixes parts that different ranks have")
        return Local((*self.before, node), partial)

    def _local_type(self, name: str) -> TensorType:
        full = self.function.types[name]
        if self.system.is_constant((self.function.name, name)):
            return full
        return TensorType(full.dtype, layouts.local_shape(full.shape, self.split.get(name, {})))

    def _typed(self, op: str, args: dict[str, Arg], names: Sequence[str]) -> Node:
        """A node with the types that its op's shape rule gives, which are then known."""
        definition = table.lookup(op, 1)
        assert definition is not None, f"{op} is in the table"
        try:
            types = apply_shape_rule(definition, args, self.types)
        except ShapeError as error:
            raise Misfit(f"{op} does not take a part: {error}") from error
        outputs = tuple(Value(name, kind) for name, kind in zip(names, types, strict=True))
        self.types |= {value.name: value.type for value in outputs}
        return Node(op, args, outputs)

    def _insert(self, op: str, args: dict[str, Arg], name: str) -> str:
        """A node before this one; its name."""
        self.before.append(self._typed(op, args, [name]))
        return name

    def _check_whole(self) -> None:
        """Dimensions that no rule of the op names are whole, and those that belong together are split alike."""
        known = {place for relation in self.relations for place in _places(relation, self.function.types)}
        for name, dims in self.split.items():
            for dim in dims:
                if (name, dim) not in known:
                    raise Misfit(f"{self.node.op} needs all of what would be split")
        for relation in self.relations:
            if isinstance(relation, Gathers) and self._pieces(relation.made) and not self._pieces(relation.given):
                raise Misfit(f"{self.node.op} makes all of it at once")
            if isinstance(relation, Same):
                size = self.function.types[relation.part[0]].shape[relation.part[1]]
                if layouts.cut(self._pieces(relation.whole), relation.start, size) != self._pieces(relation.part):
                    raise Misfit(f"{self.node.op} combines what is split with what is not")

    def _pieces(self, place: tuple[str, int]) -> Pieces:
        return self.split.get(place[0], {}).get(place[1], ())

    def _sums(self) -> bool:
        """Whether ranks sum parts of the result; a bias is then added by the first."""
        found = [each for each in self.relations if isinstance(each, Sums) and any(map(self._pieces, each.places))]
        for relation in found:
            pieces = {self._pieces(place) for place in relation.places}
            size = self.function.types[relation.places[0][0]].shape[relation.places[0][1]]
            if len(pieces) != 1 or not layouts.covers(size, next(iter(pieces))):
                raise Misfit(f"{self.node.op} sums over what is split in part")
            if any(value.name in self.split for value in self.node.outputs):
                raise Misfit(f"{self.node.op} would sum, and make parts of the result")
            _expect_once(pieces.pop())
            self._mask(
                "bias" if "bias" in self.args else "self" if self.node.op == "aten.addmm.default" else "", "rank"
            )
        return bool(found)

    def _mask(self, arg: str, rank: Expr) -> None:
        """Only the first of the ranks that add up adds this."""
        given = self.args.get(arg)
        if isinstance(given, Ref):
            first = symbols.add(1, symbols.mul(-1, symbols.minimum(1, rank)))
            name = self._insert("aten.mul.Tensor", {"self": given, "other": Dim(first)}, f"{self._result}_{arg}")
            self.args[arg] = Ref(name)

    @property
    def _result(self) -> str:
        return self.node.outputs[0].name

    def _choose_experts(self) -> bool:
        """Ids count from this rank's first expert on; an id that is no expert's adds nothing."""
        down, ids = self.args["down"], self.args["expert_ids"]
        assert isinstance(down, Ref), "it fits the signature"
        pieces, inside = self._pieces((down.name, 0)), self._pieces((down.name, 2))
        if pieces:
            first = symbols.mul(pieces[0].units.start, pieces[0].inner)
            name = self._insert("aten.sub.Tensor", {"self": ids, "other": Dim(first)}, f"{self._result}_ids")
            self.args["expert_ids"] = Ref(name)
        if inside:
            self._mask("down_bias", symbols.Apply("mod", ("rank", EXPERT_RANKS)))
        if not pieces and not inside:
            raise Misfit("its experts are whole")
        return True

    def _slice_constants(self) -> None:
        """Constants are whole on each rank, which takes its part of them."""
        for arg, given in self.node.args.items():
            if not isinstance(given, Ref) or not self.system.is_constant((self.function.name, given.name)):
                continue
            for dim, pieces in self.split.get(given.name, {}).items():
                name = f"{self._result}_{arg}_{dim}"
                self.args[arg] = Ref(self._slice(self.args[arg], dim, pieces, name))

    def _slice(self, source: Arg, dim: int, pieces: Pieces, name: str) -> str:
        """This rank's part of a value that it has all of."""
        if len(pieces) != 1:
            raise Misfit("a value that all ranks have would be cut into several pieces")
        (piece,) = pieces
        start = symbols.add(piece.start, symbols.mul(piece.units.start, piece.inner))
        bounds = {"start": _integer(start), "end": _integer(symbols.add(start, piece.local))}
        return self._insert("aten.slice.Tensor", {"self": source, "dim": Const(dim), **bounds}, name)

    def _gathered(self, relation: Gathers) -> tuple[Node, ...]:
        """The op between an exchange of all parts and a cut to this rank's."""
        name, dim = relation.given
        pieces = self._pieces(relation.given)
        if len(pieces) != 1 or pieces[0].start != 0 or pieces[0].outer != 1 or pieces[0].units.by != "tp":
            raise Misfit(f"{self.node.op} needs all of what would be split in several pieces")
        if pieces[0].units.count != pieces[0].units.finest:
            raise Misfit(f"{self.node.op} needs all of what several ranks would hold at once")
        if self._pieces(relation.made) != pieces:
            raise Misfit(f"{self.node.op} needs all of what would be split")
        (arg,) = (arg for arg, given in self.node.args.items() if given == Ref(name))
        size = self.function.types[name].shape[dim]
        self.args[arg] = Ref(self._gather(Ref(name), dim, size, self._result))
        full = f"{self._result}_whole"
        self.before.append(self._typed(self.node.op, self.args, [full]))
        self._slice(Ref(full), relation.made[1], pieces, self._result)
        return tuple(self.before)

    def _gather(self, source: Arg, dim: int, size: Expr, name: str) -> str:
        gathered = self._insert("precast.all_gather", _gather_args(source, dim), f"{name}_gathered")
        ends = {"dim": Const(dim), "start": Const(0), "end": _integer(size)}
        return self._insert("aten.slice.Tensor", {"self": Ref(gathered), **ends}, f"{name}_given")

    def _rewrite_sizes(self) -> None:
        result = self.node.outputs[0].name if self.node.outputs else ""
        if self.node.op in ("aten.reshape.default", "aten.expand.default"):
            sizes = self._local_type(result).shape
            arg = "shape" if self.node.op == "aten.reshape.default" else "size"
            self.args[arg] = Items(tuple(map(_integer, sizes)))
        if self.node.op == "aten.slice.Tensor":
            source, dim = self.args["self"], self.args["dim"]
            assert isinstance(source, Ref), "it fits the signature"
            assert isinstance(dim, Const), "a slice with a rule has a known dimension"
            assert isinstance(dim.value, int), "it fits the signature"
            axis = dim.value % len(self.function.types[source.name].shape)
            pieces = self._pieces((source.name, axis))
            if pieces:
                strided = self.args.get("step", Const(1)) != Const(1)
                for bound in ("end",) if strided else ("start", "end"):
                    given = self.args[bound]
                    if not isinstance(given, Const) or type(given.value) is not int:
                        raise Misfit("a slice of what would be split has no known bounds")
                    self.args[bound] = _integer(layouts.local_place(given.value, pieces))

    def _embedding(self) -> Local:
        """Rows of this rank's part of the table, and zeros for those of others."""
        weight = self.args["weight"]
        assert isinstance(weight, Ref), "it fits the signature"
        pieces = self._pieces((weight.name, 0))
        if set(self.split) != {weight.name} or len(self.split[weight.name]) != 1 or len(pieces) != 1:
            raise Misfit("what it makes would be split")
        first = symbols.mul(pieces[0].units.start, pieces[0].inner)
        args = self.args | {"start": Dim(first)}
        return Local((self._typed("precast.sharded_embedding", args, [self._result]),), True)


def _places(relation: Relation, types: Mapping[str, TensorType]) -> Iterable[tuple[str, int]]:
    if isinstance(relation, Through):
        return [(name, dim) for name in relation for dim in range(len(types[name].shape))]
    if isinstance(relation, (Same, Every)):
        return [relation.whole, relation.part]
    return relation.places if isinstance(relation, Sums) else list(relation)


def _expect_once(pieces: Pieces) -> None:
    """No rank may add what another adds, too."""
    if any(piece.units.count != piece.units.finest for piece in pieces):
        raise Misfit("what is held by several ranks would be summed more than once")


def _gather_args(source: Arg, dim: int) -> dict[str, Arg]:
    return {"x": source, "dim": Const(dim), "group": Const(GROUP), "size": Dim("tp")}


def _integer(expr: Expr) -> Const | Dim:
    return Const(expr) if isinstance(expr, int) else Dim(expr)


# --- a function ------------------------------------------------------------------------------------------------------


class Rewritten(NamedTuple):
    """A function on one rank: its steps; what it returns, by the names of before; results that are parts of sums."""

    steps: tuple[Node | Call, ...]
    returned: dict[str, str]
    products: tuple[str, ...]


def rewritten(system: System, function: Function) -> Rewritten:
    """The function's steps on one rank, with its sums, and whole what it returns."""
    steps: list[Node | Call] = []
    products: list[str] = []
    for step in function.steps:
        if isinstance(step, Call):
            steps.append(step)
            continue
        made = local(system, function, step)
        steps += made.nodes
        if made.is_partial:
            products.append(step.outputs[0].name)
    summed = _Sums(steps, function.returned, products)
    steps = summed.steps()
    returned = {name: summed.names.get(name, name) for name in function.returned}
    for name in dict.fromkeys(function.returned):
        if system.dims((function.name, name)):
            steps += _whole_output(system, function, name)
            returned[name] = f"{name}_whole"
    return Rewritten(tuple(steps), returned, tuple(products))


def _whole_output(system: System, function: Function, name: str) -> list[Node]:
    """The last nodes of the graph: all ranks' parts of an output, without what was added to make them equal."""
    full = function.types[name]
    dim = len(full.shape) - 1
    shape = layouts.local_shape(full.shape, system.dims((function.name, name)))
    longer = TensorType(full.dtype, (*shape[:dim], symbols.mul(shape[dim], "tp")))
    gathered = Value(f"{name}_gathered", longer)
    ends = {"dim": Const(dim), "start": Const(0), "end": _integer(full.shape[dim])}
    return [
        Node("precast.all_gather", _gather_args(Ref(name), dim), (gathered,)),
        Node("aten.slice.Tensor", {"self": Ref(gathered.name), **ends}, (Value(f"{name}_whole", full),)),
    ]


_ADDITIVE = frozenset(("aten.add.Tensor", "aten.sub.Tensor"))
_VIEWS = frozenset(("aten.reshape.default", "aten.unsqueeze.default", "aten.squeeze.dim", "aten.transpose.int"))


class _Sums:
    """Where results of row-parallel products are summed over ranks: as late as it can be said once for several.

    What is added or only looked at otherwise may be summed afterwards, if nothing that could be fused with it stands
    behind: on one rank the graph is to be what it is without sums.
    """

    def __init__(self, steps: Sequence[Node | Call], returned: Sequence[str], products: Sequence[str]) -> None:
        self._steps = steps
        self._users: dict[str, list[int]] = {}
        for index, step in enumerate(steps):
            for name in set(references(step.args) if isinstance(step, Node) else step.args.values()):
                self._users.setdefault(name, []).append(index)
        self._returned = set(returned)
        partial = set(products)
        self._grow(partial)
        self.names = {name: f"{name}_sum" for name in self._ends(partial, set(products))}

    def _grow(self, partial: set[str]) -> None:
        """All that could be partial: results of ops that change nothing in a sum over ranks."""
        for step in self._steps:
            if isinstance(step, Node) and self._preserves(step, partial):
                partial.add(step.outputs[0].name)

    def _preserves(self, node: Node, partial: set[str]) -> bool:
        names = list(references(node.args))
        inside = [name for name in names if name in partial]
        if not inside or any(name in self._returned or len(self._users[name]) > 1 for name in inside):
            return False
        if node.op in _VIEWS:
            return True
        if node.op in _ADDITIVE:
            return len(inside) == 2 and len(names) == 2
        return node.op == "aten.mul.Tensor" and len(inside) == 1

    def _ends(self, partial: set[str], products: set[str]) -> set[str]:
        """Where to sum. A chain that ends in front of what may be fused with it is summed at its products."""
        ends: set[str] = set()
        for product in products:
            ends |= self._end_of(product, partial, products)
        return ends

    def _end_of(self, name: str, partial: set[str], products: set[str]) -> set[str]:
        following = self._following(name, partial)
        last = name
        while following is not None:
            last, following = following, self._following(following, partial)
        if last == name:
            return {name}
        sources = self._sources(last, partial, products)
        fusible = any(self._is_fusible(index) for index in self._users.get(last, ()))
        return sources if fusible else {last}

    def _following(self, name: str, partial: set[str]) -> str | None:
        users = self._users.get(name, [])
        if len(users) != 1 or name in self._returned:
            return None
        step = self._steps[users[0]]
        made = step.outputs[0].name if step.outputs else ""
        return made if isinstance(step, Node) and made in partial else None

    def _sources(self, name: str, partial: set[str], products: set[str]) -> set[str]:
        if name in products:
            return {name}
        (step,) = (each for each in self._steps if isinstance(each, Node) and name in [v.name for v in each.outputs])
        found: set[str] = set()
        for each in references(step.args):
            if each in partial:
                found |= self._sources(each, partial, products)
        return found

    def _is_fusible(self, index: int) -> bool:
        step = self._steps[index]
        return isinstance(step, Node) and step.op in FUNCTIONS

    def steps(self) -> list[Node | Call]:
        """The steps with the sums, which others take in place of their parts."""
        made: list[Node | Call] = []
        for step in self._steps:
            made.append(_renamed(step, self.names))
            for value in step.outputs:
                if value.name in self.names:
                    total = Value(self.names[value.name], value.type)
                    made.append(Node("precast.all_reduce", {"x": Ref(value.name), "group": Const(GROUP)}, (total,)))
        return made


def _renamed(step: Node | Call, names: Mapping[str, str]) -> Node | Call:
    if isinstance(step, Call):
        return msgspec.structs.replace(step, args={key: names.get(name, name) for key, name in step.args.items()})
    return msgspec.structs.replace(step, args={key: _arg(arg, names) for key, arg in step.args.items()})


def _arg(arg: Arg, names: Mapping[str, str]) -> Arg:
    if isinstance(arg, Ref):
        return Ref(names.get(arg.name, arg.name))
    if isinstance(arg, Items):
        return Items(tuple(_arg(item, names) for item in arg.items))  # type: ignore[misc]
    return arg


def all_units(pieces: Iterable[Pieces]) -> set[Units]:
    """The units of all these."""
    return {piece.units for each in pieces for piece in each}
