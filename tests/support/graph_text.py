"""`parse_graph`: the text form of `precast.ir.graph.text`, read back, by recursive descent over `graph_lexer`'s words.

Tests write graphs in it; nothing in the product reads text. A node may leave out its version (1), and a result its
type: the op's shape rule gives it, or the block that is called, which must stand further up.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, get_args, get_type_hints

from graph_lexer import Cursor, Item, Word

from precast.ir.graph.infer import apply_shape_rule, misfits, references
from precast.ir.graph.schema import (
    Apply,
    Arg,
    Block,
    CachePlan,
    Call,
    CapturePlan,
    Cast,
    Concat,
    Const,
    Dequantise,
    Dim,
    Dtype,
    DtypeArg,
    Each,
    EntrySpec,
    Expr,
    ExprOp,
    Graph,
    Group,
    IndexSpec,
    Items,
    LatentSpec,
    Node,
    PagedInputs,
    PagedSpec,
    Param,
    Pipeline,
    Pool,
    Quantise,
    Read,
    ReadDtype,
    Recipe,
    Ref,
    Repack,
    Repeat,
    Reshape,
    Scale,
    ShardOverride,
    ShardPlan,
    ShardRow,
    Slice,
    Slot,
    Stack,
    StateGroup,
    StateSpec,
    Step,
    Steps,
    Symbol,
    TensorType,
    Tie,
    Transpose,
    Value,
    World,
)
from precast.ir.graph.text import RESERVED
from precast.ir.ops import table as ops
from precast.ir.ops.op import OpDef, ShapeError

_DTYPES: dict[str, Dtype] = {name: name for name in get_args(Dtype)}
_READ_DTYPES: dict[str, ReadDtype] = {name: name for name in get_args(ReadDtype)}
_FORMATS: tuple[str, ...] = get_args(get_type_hints(Dequantise)["format"])
_EXPR_OPS: dict[str, ExprOp] = {name: name for name in get_args(ExprOp)}

Typed = tuple[str, TensorType | None]


def parse_graph(text: str) -> Graph:
    """The graph that `text` writes down. Raises TextError; checks nothing else."""
    return _GraphParser(Cursor(text)).graph()


def parse_steps(text: str) -> Steps:
    """The steps of a fused op that `text` writes down, in their braces. Raises TextError; checks nothing else."""
    cursor = Cursor(text)
    steps = cursor.inside("{", lambda: _steps(cursor), "}")
    cursor.kind("end", "the end of the text")
    return steps


class _GraphParser:
    """The sections, each into its part of the graph."""

    def __init__(self, cursor: Cursor) -> None:
        self._in = cursor
        self._symbols: tuple[Symbol, ...] = ()
        self._inputs: tuple[Value, ...] = ()
        self._params: tuple[Param, ...] = ()
        self._constants: tuple[Value, ...] = ()
        self._slab_bytes = 0
        self._pools: list[Pool] = []
        self._groups: list[Group] = []
        self._states: list[StateGroup] = []
        self._cached: list[Value] = []
        self._sizes: tuple[int, ...] = ()
        self._worlds: list[World] = []
        self._rows: list[ShardRow] = []
        self._overrides: list[ShardOverride] = []
        self._pipelines: list[Pipeline] = []
        self._blocks: list[Block] = []
        self._main: tuple[Node | Call, ...] = ()
        self._outputs: dict[str, str] = {}

    def graph(self) -> Graph:
        sections = {
            "symbols": self._read_symbols,
            "inputs": self._read_inputs,
            "params": self._read_params,
            "constants": self._read_constants,
            "slabs": self._read_slabs,
            "pool": self._read_pool,
            "group": self._read_group,
            "capture": self._read_capture,
            "shards": self._read_shards,
            "block": self._read_block,
            "main": self._read_main,
        }
        seen = set()
        while self._in.now.kind != "end":
            word = self._in.expect(*sections)
            if word.text in seen and word.text not in ("pool", "group", "block"):
                word.refuse(f"a second section {word.text!r}")
            seen.add(word.text)
            sections[word.text]()
        if "main" not in seen:
            self._in.refuse("the section 'main'")
        return Graph(
            symbols=self._symbols,
            inputs=self._inputs,
            params=self._params,
            constants=self._constants,
            blocks=tuple(self._blocks),
            main=self._main,
            outputs=self._outputs,
            caches=CachePlan(tuple(self._pools), tuple(self._groups), tuple(self._states), self._slab_bytes),
            capture=CapturePlan(self._sizes),
            shards=ShardPlan(tuple(self._worlds), tuple(self._rows), tuple(self._overrides), tuple(self._pipelines)),
        )

    def _read_symbols(self) -> None:
        self._symbols = self._in.many(self._symbol)

    def _symbol(self) -> Symbol:
        name = self._in.name("a symbol or '}'")
        self._in.expect(":")
        low = self._in.int()
        self._in.expect("..")
        return Symbol(name, low, self._in.int() if self._in.now.kind == "int" else None)

    def _read_inputs(self) -> None:
        self._inputs = _values(self._in)

    def _read_constants(self) -> None:
        self._constants = _values(self._in)

    def _read_params(self) -> None:
        self._params = self._in.many(self._param)

    def _param(self) -> Param:
        value = _value(self._in)
        self._in.expect("=")
        return Param(value.name, value.type, _recipe(self._in))

    def _read_slabs(self) -> None:
        self._in.expect("(")
        self._in.key("bytes", first=True)
        self._slab_bytes = self._in.int()
        self._in.expect(")")

    def _read_pool(self) -> None:
        name = self._in.name()
        self._in.expect("(")
        self._in.key("pages", first=True)
        pages, per_slab = self._in.name("a symbol"), 1
        if self._in.at(","):
            self._in.key("pages_per_slab")
            per_slab = self._in.int()
        self._pools.append(Pool(name, pages, per_slab))
        self._in.expect(")")

    def _read_group(self) -> None:
        name = self._in.name()
        self._in.expect("(")
        self._in.key("pool", first=True)
        pool = self._in.name()
        self._in.key("spec")
        if self._in.at("state") or self._in.at("conv"):
            self._read_states(name, pool)
            return
        spec = _spec(self._in)
        inputs = []
        for field in ("page_indices", "page_indptr", "page_start", "slot_mapping"):
            self._in.key(field)
            inputs.append(self._in.ref())
        self._in.expect(")")
        self._groups.append(Group(name, pool, spec, PagedInputs(*inputs), self._in.many(self._slot)))

    def _read_states(self, name: str, pool: str) -> None:
        kind = self._in.expect("state", "conv").text
        spec = self._in.inside("(", lambda: _state(self._in, kind), ")")
        self._in.key("slot_ids")
        slot_ids = self._in.ref()
        self._in.expect(")")
        self._states.append(StateGroup(name, pool, spec, slot_ids, self._in.many(self._slot)))

    def _read_capture(self) -> None:
        self._in.expect("(")
        self._in.key("sizes", first=True)
        self._sizes = self._in.list("[", self._in.int, "]")
        self._in.expect(")")

    def _read_shards(self) -> None:
        self._in.many(self._of_shards)

    def _of_shards(self) -> None:
        kind = self._in.expect("world", "pipeline", "override", "row").text
        if kind == "pipeline":
            self._in.expect("(")
            self._in.key("layers", first=True)
            self._pipelines.append(Pipeline(self._in.list("[", self._in.int, "]")))
            self._in.expect(")")
            return
        if kind == "world":
            self._in.expect("(")
            self._in.key("tp", first=True)
            tp = self._in.int()
            self._in.key("ep")
            self._worlds.append(World(tp, self._in.list("[", self._in.int, "]")))
            self._in.expect(")")
            return
        fields = self._in.inside("(", lambda: _named(self._in, lambda: _arg(self._in), ")"), ")")
        made: type[ShardOverride | ShardRow] = ShardOverride if kind == "override" else ShardRow
        row = made(**{name: _plain_value(arg) for name, arg in fields.items()})
        self._overrides.append(row) if isinstance(row, ShardOverride) else self._rows.append(row)

    def _slot(self) -> Slot:
        self._in.expect("slot")
        slot = Slot(self._in.name(), self._in.list("(", lambda: _value(self._in), ")"))
        self._cached += slot.tensors
        return slot

    def _read_block(self) -> None:
        name = self._in.name()
        self._in.expect("{")
        inputs = _values(self._in) if self._in.takes("inputs") else ()
        params = _values(self._in) if self._in.takes("params") else ()
        caches = _values(self._in) if self._in.takes("caches") else ()
        steps = _Steps(self._in, {value.name: value.type for value in (*inputs, *params, *caches)})
        nodes = []
        while not self._in.takes("return"):
            nodes.append(steps.node())
        outputs = self._in.items(lambda: self._in.ref("a tensor (%name) or '}'"), "}")
        self._in.expect("}")
        self._blocks.append(Block(name, inputs, params, caches, tuple(nodes), outputs))

    def _read_main(self) -> None:
        types = {param.name: param.type for param in self._params}
        types.update((value.name, value.type) for value in (*self._inputs, *self._constants, *self._cached))
        steps = _Steps(self._in, types)
        self._in.expect("{")
        found: list[Node | Call] = []
        while not self._in.takes("return"):
            found.append(steps.step(self._blocks))
        self._outputs = _named(self._in, self._in.ref, "}")
        self._in.expect("}")
        self._main = tuple(found)


class _Steps:
    """The nodes and calls of `main` or of a block, with the types of what is in sight so far."""

    def __init__(self, cursor: Cursor, types: dict[str, TensorType]) -> None:
        self._in = cursor
        self._types = types

    def step(self, blocks: list[Block]) -> Node | Call:
        results = self._results()
        return self._call(results, blocks) if self._in.at("call") else self._node(results)

    def node(self) -> Node:
        return self._node(self._results())

    def _results(self) -> list[Typed]:
        results: list[Typed] = []
        while self._in.now.kind == "ref":
            name = self._in.ref()
            results.append((name, _type(self._in) if self._in.takes(":") else None))
            self._in.expect(",", "=")
        return results

    def _node(self, results: list[Typed]) -> Node:
        at = self._in.now
        op = self._in.name("a result, an op or 'return'")
        version = self._in.int() if self._in.takes("@") else 1
        args = self._in.inside("(", lambda: _named(self._in, lambda: _arg(self._in), ")"), ")")

        def infer_types() -> tuple[TensorType, ...]:
            definition = ops.lookup(op, version)
            if definition is None:
                at.refuse(f"a result has no type, and there is no op {op}@{version} to give it")
            try:
                return _inferred(definition, args, self._types)
            except ShapeError as error:
                at.refuse(f"a result has no type, and {op} does not give it: {error}")

        return Node(op, args, self._typed(results, at, infer_types), version)

    def _call(self, results: list[Typed], blocks: list[Block]) -> Call:
        self._in.take()
        at = self._in.now
        name = self._in.name("the name of a block")
        args = self._in.inside("(", lambda: _named(self._in, self._in.ref, ")"), ")")

        def infer_types() -> tuple[TensorType, ...]:
            block = next((block for block in blocks if block.name == name), None)
            if block is None:
                at.refuse(f"a result has no type, and there is no block {name!r} further up to give it")
            made = (value for node in block.nodes for value in node.outputs)
            types = {value.name: value.type for value in (*block.inputs, *block.params, *block.caches, *made)}
            return tuple(types[output] for output in block.outputs if output in types)

        return Call(name, args, self._typed(results, at, infer_types))

    def _typed(
        self, results: list[Typed], at: Word, infer_types: Callable[[], tuple[TensorType, ...]]
    ) -> tuple[Value, ...]:
        """The results as values; types that are left out are inferred, those that are given stay as they are."""
        types = tuple(type for _, type in results if type is not None)
        if len(types) < len(results):
            inferred = infer_types()
            if len(inferred) != len(results):
                at.refuse(f"a result has no type: expected {len(inferred)} results, found {len(results)}")
            types = tuple(given or found for (_, given), found in zip(results, inferred, strict=True))
        values = tuple(Value(name, type) for (name, _), type in zip(results, types, strict=True))
        self._types.update((value.name, value.type) for value in values)
        return values


def _values(cursor: Cursor) -> tuple[Value, ...]:
    return cursor.many(lambda: _value(cursor))


def _value(cursor: Cursor) -> Value:
    name = cursor.ref("a tensor (%name) or '}'")
    cursor.expect(":")
    return Value(name, _type(cursor))


def _type(cursor: Cursor) -> TensorType:
    return TensorType(_dtype(cursor), _shape(cursor))


def _dtype(cursor: Cursor) -> Dtype:
    return _DTYPES[cursor.expect(*_DTYPES).text]


def _shape(cursor: Cursor) -> tuple[Expr, ...]:
    return cursor.list("[", lambda: _expr(cursor), "]")


def _expr(cursor: Cursor) -> Expr:
    if cursor.now.kind == "int":
        return cursor.int()
    if cursor.at("("):
        return cursor.inside("(", lambda: _infix(cursor), ")")
    if cursor.at_call_of():
        op = _EXPR_OPS[cursor.expect(*_EXPR_OPS).text]
        return Apply(op, cursor.list("(", lambda: _expr(cursor), ")"))
    return cursor.name("a size")


def _infix(cursor: Cursor) -> Apply:
    """`a + b + ...` or `a * b * ...`"""
    args = [_expr(cursor)]
    sign = cursor.expect("+", "*").text
    args.append(_expr(cursor))
    while not cursor.at(")"):
        cursor.expect(sign, ")")
        args.append(_expr(cursor))
    return Apply("add" if sign == "+" else "mul", tuple(args))


def _named(cursor: Cursor, item: Callable[[], Item], closing: str) -> dict[str, Item]:
    """`name=item, ...`, up to the closing bracket or brace, which stays."""
    found: dict[str, Item] = {}

    def one() -> None:
        at = cursor.now
        name = cursor.name(f"a name or {closing!r}")
        if name in found:
            at.refuse(f"{name!r} is given twice")
        cursor.expect("=")
        found[name] = item()

    cursor.items(one, closing)
    return found


def _arg(cursor: Cursor) -> Arg:
    if cursor.at("{"):
        return cursor.inside("{", lambda: _steps(cursor), "}")
    if cursor.at("["):
        return Items(cursor.list("[", lambda: _item(cursor), "]"))
    if any(map(cursor.at, _DTYPES)):
        return DtypeArg(_dtype(cursor))
    return _item(cursor)


def _plain_value(arg: Arg) -> Any:
    """A literal, or the names in a list."""
    if isinstance(arg, Items):
        return tuple(item.name for item in arg.items if isinstance(item, Ref))
    assert isinstance(arg, Const), "a row has names, numbers and strings"
    return arg.value


def _steps(cursor: Cursor) -> Steps:
    """`%s0 = op@1(...), ..., return %s0`"""
    steps: list[Step] = []
    while not cursor.takes("return"):
        at = cursor.now
        if cursor.ref() != f"s{len(steps)}":
            at.refuse(f"expected %s{len(steps)} or 'return'")
        cursor.expect("=")
        op = cursor.name("an op")
        if cursor.takes("@") and cursor.int() != 1:
            at.refuse("a step is an op at version 1")
        steps.append(Step(op, cursor.inside("(", lambda: _named(cursor, lambda: _arg(cursor), ")"), ")")))  # type: ignore[arg-type]
        cursor.expect(",")
    return Steps(tuple(steps), cursor.items(cursor.ref, "}"))


def _item(cursor: Cursor) -> Ref | Const | Dim:
    word = cursor.now
    if word.kind == "ref":
        return Ref(cursor.ref())
    if word.kind == "string":
        return Const(cursor.take().value)
    if word.kind == "int":
        return Const(cursor.int())
    if word.kind == "float" or word.text in ("inf", "nan"):
        return Const(float(cursor.take().text))
    if word.text in ("none", "true", "false"):
        return Const({"none": None, "true": True, "false": False}[cursor.take().text])
    if cursor.at_call_of("dim"):
        cursor.take()
        return Dim(cursor.inside("(", lambda: _expr(cursor), ")"))
    if word.kind == "name" and word.text in RESERVED:
        cursor.refuse("a tensor, a literal or a size")
    return Dim(_expr(cursor))


def _spec(cursor: Cursor) -> PagedSpec | LatentSpec | IndexSpec | EntrySpec:
    kinds: dict[str, Callable[[], PagedSpec | LatentSpec | IndexSpec | EntrySpec]] = {
        "paged": lambda: _paged(cursor),
        "latent": lambda: _latent(cursor),
        "index": lambda: _index(cursor),
        "entries": lambda: _entries(cursor),
    }
    return cursor.inside("(", kinds[cursor.expect(*kinds, "state", "conv").text], ")")


def _state(cursor: Cursor, kind: str) -> StateSpec:
    cursor.key("shape", first=True)
    shape = _shape(cursor)
    cursor.key("dtype")
    return StateSpec(kind, shape, _dtype(cursor))  # type: ignore[arg-type]


def _paged(cursor: Cursor) -> PagedSpec:
    cursor.key("num_kv_heads", first=True)
    heads = _expr(cursor)
    cursor.key("head_size")
    head_size = cursor.int()
    cursor.key("value_size")
    value_size, pages = cursor.int(), _pages(cursor)
    chunk = None
    if cursor.at(","):
        cursor.key("chunk")
        chunk = cursor.int()
    return PagedSpec(heads, head_size, value_size, *pages, chunk)


def _latent(cursor: Cursor) -> LatentSpec:
    cursor.key("latent_size", first=True)
    latent_size = cursor.int()
    cursor.key("rope_size")
    return LatentSpec(latent_size, cursor.int(), *_pages(cursor))


def _index(cursor: Cursor) -> IndexSpec:
    cursor.key("key_size", first=True)
    key_size = cursor.int()
    cursor.key("dtype")
    dtype = _dtype(cursor)
    cursor.key("page_size")
    return IndexSpec(key_size, dtype, cursor.int())


def _entries(cursor: Cursor) -> EntrySpec:
    cursor.key("entry_size", first=True)
    entry_size = cursor.int()
    cursor.key("rate")
    rate = cursor.int()
    dtype, page_size, window = _pages(cursor)
    return EntrySpec(entry_size, dtype, page_size, rate, window)


def _pages(cursor: Cursor) -> tuple[Dtype, int, int | None]:
    cursor.key("dtype")
    dtype = _dtype(cursor)
    cursor.key("page_size")
    page_size = cursor.int()
    cursor.key("window")
    return dtype, page_size, None if cursor.takes("none") else cursor.int()


def _recipe(cursor: Cursor) -> Recipe:
    kinds: dict[str, Callable[[], Recipe]] = {
        "read": lambda: _read(cursor),
        "slice": lambda: _slice(cursor),
        "concat": lambda: Concat(_parts(cursor), _dim(cursor)),
        "stack": lambda: Stack(_parts(cursor), _dim(cursor)),
        "transpose": lambda: Transpose(_of(cursor), cursor.int(), _after_comma(cursor, cursor.int)),
        "reshape": lambda: Reshape(_of(cursor), _shape(cursor)),
        "cast": lambda: Cast(_of(cursor), _dtype(cursor)),
        "each": lambda: _each(cursor),
        "dequantise": lambda: _dequantise(cursor),
        "quantise": lambda: _quantise(cursor),
        "repeat": lambda: _repeat(cursor),
        "repack": lambda: _repack(cursor),
        "tie": lambda: Tie(cursor.ref()),
        "scale": lambda: _scale(cursor),
    }
    kind = cursor.expect(*kinds)
    return cursor.inside("(", kinds[kind.text], ")")


def _read(cursor: Cursor) -> Read:
    tensor = cursor.kind("string", "the name of a checkpoint tensor, in quotes").value
    shape = _after_comma(cursor, lambda: cursor.list("[", cursor.int, "]"))
    return Read(tensor, shape, _READ_DTYPES[cursor.expect(*_READ_DTYPES).text] if cursor.takes(",") else None)


def _slice(cursor: Cursor) -> Slice:
    of, dim = _of(cursor), _dim(cursor)
    cursor.key("start")
    start = _expr(cursor)
    cursor.key("length")
    return Slice(of, dim, start, _expr(cursor))


def _each(cursor: Cursor) -> Each:
    of, dim = _of(cursor), _dim(cursor)
    cursor.key("count")
    count = cursor.int()
    cursor.key("start")
    return Each(of, dim, count, cursor.int())


def _scale(cursor: Cursor) -> Scale:
    tensors = cursor.list("[", lambda: cursor.kind("string", "a name in quotes").value, "]")
    cursor.key("default")
    return Scale(tensors, float(cursor.kind("float", "a number").text))


def _quantise(cursor: Cursor) -> Quantise:
    part = cursor.expect("values", "scales").text
    cursor.expect(",")
    of = _recipe(cursor)
    cursor.key("block")
    return Quantise(of, part, cursor.inside("[", lambda: _pair(cursor), "]"))  # type: ignore[arg-type]


def _repeat(cursor: Cursor) -> Repeat:
    of, dim = _of(cursor), _dim(cursor)
    cursor.key("count")
    return Repeat(of, dim, _expr(cursor))


def _repack(cursor: Cursor) -> Repack:
    part = cursor.expect("values", "zeros", "groups").text
    cursor.expect(",")
    return Repack(_recipe(cursor), part)  # type: ignore[arg-type]


def _dequantise(cursor: Cursor) -> Dequantise:
    format = cursor.expect(*_FORMATS).text
    cursor.expect(",")
    of, scales = _of(cursor), _recipe(cursor)
    cursor.key("block")
    block = None if cursor.takes("none") else cursor.inside("[", lambda: _pair(cursor), "]")
    cursor.key("zeros")
    zeros = None if cursor.takes("none") else _recipe(cursor)
    cursor.key("groups")
    groups = None if cursor.takes("none") else _recipe(cursor)
    cursor.key("zero_offset")
    offset, others = cursor.int(), {}
    for name in ("global_scale", "biases"):
        if cursor.at(",") and cursor.then.text == name:
            cursor.key(name)
            others[name] = _recipe(cursor)
    return Dequantise(of, scales, format, block, zeros, groups, offset, **others)  # type: ignore[arg-type]


def _pair(cursor: Cursor) -> tuple[int, int]:
    return cursor.int(), _after_comma(cursor, cursor.int)


def _of(cursor: Cursor) -> Recipe:
    recipe = _recipe(cursor)
    cursor.expect(",")
    return recipe


def _parts(cursor: Cursor) -> tuple[Recipe, ...]:
    parts = cursor.list("[", lambda: _recipe(cursor), "]")
    cursor.expect(",")
    return parts


def _dim(cursor: Cursor) -> int:
    cursor.key("dim", first=True)
    return cursor.int()


def _after_comma(cursor: Cursor, item: Callable[[], Item]) -> Item:
    cursor.expect(",")
    return item()


def _inferred(op: OpDef, args: Mapping[str, Arg], types: Mapping[str, TensorType]) -> tuple[TensorType, ...]:
    """The types of the op's results; `types` has those of all names so far. Raises ShapeError with every fault."""
    faults = [*misfits(op, args), *(f"%{name} is not defined" for name in references(args) if name not in types)]
    if faults:
        raise ShapeError("; ".join(faults))
    return apply_shape_rule(op, args, types)
