"""Every integer by which an op addresses memory, made wrong: the verifier refuses it, in `main`, in what a call hands
to a block, and in the block itself.

The graph of an op has nothing but the op: its metadata are a step's inputs, its indices are clamped to 0.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

import pytest
from op_calls import OURS, Args, f32, t

from precast.ir.graph.schema import (
    Arg,
    Block,
    CachePlan,
    Call,
    Const,
    Dim,
    Dtype,
    DtypeArg,
    EntrySpec,
    Graph,
    Group,
    IndexSpec,
    Items,
    LatentSpec,
    Node,
    PagedInputs,
    PagedSpec,
    Pool,
    Ref,
    Slot,
    StateGroup,
    StateSpec,
    Symbol,
    TensorType,
    Value,
)
from precast.ir.memory import caches
from precast.ir.memory.step_inputs import STEP_INPUTS, group_inputs
from precast.ir.ops import table as ops
from precast.ir.ops.op import OpDef, ShapeError
from precast.ir.verify.verifier import verify

TORCH = [
    ("aten.gather.default", {"self": f32("T", 9), "dim": -1, "index": t("int64", "T", 2)}),
    ("aten.scatter.src", {"self": f32("T", 9), "dim": 1, "index": t("int64", "T", 2), "src": f32("T", 2)}),
    ("aten.scatter.value", {"self": f32("T", 9), "dim": 1, "index": t("int64", "T", 2), "value": 1.0}),
    ("aten.one_hot.default", {"self": t("int64", "T"), "num_classes": 9}),
]
CALLS: dict[str, Args] = dict(TORCH) | {f"precast.{op}": args for op, args, _ in reversed(OURS)}
RULES = {"input": "IR051", "group": "IR047", "index": "IR052"}
FILLED = {"float": 1.0, "bool": True, "int": 1, "Tensor?": None}
NO_INTEGERS: tuple[Dtype, ...] = ("float32", "bfloat16", "bool")
DECLARED = tuple(Symbol(name, 1) for name in ("T", "B", "R", "N", "P", "tp"))


class Poisoned(NamedTuple):
    op: OpDef
    arg: str
    rule: str | None


def operands() -> Iterator[Poisoned]:
    for name, version in ops.names():
        op = ops.lookup(name, version)
        assert op is not None
        for arg, word in op.integers.items():
            yield Poisoned(op, arg, RULES.get(word.kind))


def group_of(op: OpDef, args: Args) -> CachePlan:
    """The plan that has the op's caches as its one slot."""
    held = [(arg.name, args[arg.name]) for arg in op.args if arg.name == "state" or arg.name.endswith("cache")]
    if not held:
        return CachePlan()
    first, slots = held[0][1], (Slot("slot", tuple(Value(name, kind) for name, kind in held)),)
    pools, names = (Pool("pool", "P"),), PagedInputs("page_indices", "page_indptr", "page_start", "slot_mapping")
    if held[0][0] == "state":
        kind = "conv" if "conv" in op.name or "compress" in op.name else "state"
        states = StateGroup("group", "pool", StateSpec(kind, first.shape[1:], first.dtype), "slots", slots)
        return CachePlan(pools, states=(states,))
    size = first.shape[1]
    assert isinstance(size, int)
    spec: EntrySpec | IndexSpec | LatentSpec | PagedSpec
    if op.name in ("precast.write_index_keys", "precast.paged_select_keys", "precast.paged_select_blocks"):
        spec = IndexSpec(first.shape[2], first.dtype, size)  # type: ignore[arg-type]
    elif "rate" in args:
        rate = args["rate"]
        spec = EntrySpec(first.shape[2], first.dtype, size * rate, rate, args.get("window"))  # type: ignore[arg-type]
    elif len(held) == 1:
        latent = args["latent"].shape[2] if "latent" in args else args["weight"].shape[1]
        spec = LatentSpec(latent, first.shape[2] - latent, first.dtype, size)
    else:
        spec = PagedSpec(first.shape[2], first.shape[3], held[1][1].shape[3], first.dtype, size)  # type: ignore[arg-type]
    return CachePlan(pools, (Group("group", "pool", spec, names, slots),))


Place = Literal["main", "call", "block"]


def graph_of(op: OpDef, poison: str = "", *, place: Place = "main") -> Graph:
    """The op's graph, where the argument `poison` is what it should be, and 1,000,000 more.

    `place`: the op and what makes it wrong stand in `main`; the op alone in a block; both of them there.
    """
    given = {arg.name: FILLED.get(arg.kind) for arg in op.args if not arg.has_default} | CALLS[op.name]
    plan, nodes, inputs, args = group_of(op, given), list[Node](), dict(STEP_INPUTS), dict[str, Arg]()
    for group in caches.groups(plan):
        inputs |= {
            name: TensorType(dtype, ("N" if size is None else size,))
            for name, (dtype, size) in group_inputs(group).items()
        }
    cached = {value.name: value.type for value in caches.tensors(plan)}
    for arg in op.args:
        kind, word = given.get(arg.name, arg.default), op.integers.get(arg.name)
        if isinstance(kind, TensorType):
            name = word.of if word and word.kind == "input" else arg.name
            if word and word.kind == "index":
                name, source = "index", Ref("any_integer")
                inputs["any_integer"] = kind
                limits: dict[str, Arg] = {"min": Const(0), "max": Const(0)}
                nodes.append(Node("aten.clamp.default", {"self": source, **limits}, (Value("index", kind),)))
            elif name not in cached:
                inputs.setdefault(name, kind)
            if arg.name == poison:
                more: dict[str, Arg] = {"self": Ref(name), "other": Const(10**6)}
                nodes.append(Node("aten.add.Tensor", more, (Value("wrong", kind),)))
                name = "wrong"
            args[arg.name] = Ref(name)
        elif arg.kind == "Dtype" and kind is not None:
            args[arg.name] = DtypeArg(kind)
        elif isinstance(kind, tuple):
            args[arg.name] = Items(tuple(map(Const, kind)))
        elif arg.name in given:
            args[arg.name] = Dim(kind) if isinstance(kind, str) and arg.kind == "int" else Const(kind)
    results = op.shape_rule({arg.name: given.get(arg.name, arg.default) for arg in op.args})
    outputs = tuple(Value(f"out{number}", kind) for number, kind in enumerate(results))
    node = Node(op.name, args, outputs, op.version)
    types = inputs | cached | {value.name: value.type for step in nodes for value in step.outputs}
    values = tuple(Value(name, kind) for name, kind in inputs.items())
    outside = 0 if place == "block" else len(nodes)
    steps = [*nodes, node]
    if place == "main":
        return Graph(DECLARED, values, (), (), (), tuple(steps), {"out": "input_ids"}, plan)
    block, call = called(steps[outside:], types, cached)
    return Graph(DECLARED, values, (), (), (block,), (*steps[:outside], call), {"out": "input_ids"}, plan)


def called(steps: Sequence[Node], types: Mapping[str, TensorType], cached: Container[str]) -> tuple[Block, Call]:
    """A block of these steps, which has names of its own for what it takes, and the call of it."""
    made = {value.name for step in steps for value in step.outputs}
    taken = [arg.name for step in steps for arg in step.args.values() if isinstance(arg, Ref) and arg.name not in made]
    formals = {name: Value(f"its_{name}", types[name]) for name in dict.fromkeys(taken)}

    def inside(arg: Arg) -> Arg:
        return Ref(formals[arg.name].name) if isinstance(arg, Ref) and arg.name in formals else arg

    nodes = [Node(step.op, {key: inside(arg) for key, arg in step.args.items()}, step.outputs, step.version)
             for step in steps]  # fmt: skip
    outputs = steps[-1].outputs
    inputs = tuple(value for name, value in formals.items() if name not in cached)
    held = tuple(value for name, value in formals.items() if name in cached)
    block = Block("block", inputs, (), held, tuple(nodes), tuple(value.name for value in outputs))
    return block, Call("block", {value.name: name for name, value in formals.items()}, outputs)


@pytest.mark.parametrize("place", ["main", "call", "block"])
@pytest.mark.parametrize("case", list(operands()), ids=lambda case: f"{case.op.name}@{case.op.version}-{case.arg}")
def test_a_wrong_integer_is_refused_where_it_addresses_memory(case: Poisoned, place: Place) -> None:
    assert verify(graph_of(case.op, place=place)) == ()
    found = {
        (violation.rule, case.arg in violation.message)
        for violation in verify(graph_of(case.op, case.arg, place=place))
    }
    assert found == (set() if case.rule is None else {(case.rule, True)})


def accepts(op: OpDef, args: Args, name: str, dtype: Dtype) -> bool:
    given = {arg.name: arg.default if arg.has_default else FILLED.get(arg.kind) for arg in op.args} | args
    try:
        op.shape_rule(given | {name: TensorType(dtype, given[name].shape)})
    except ShapeError:
        return False
    return True


@pytest.mark.parametrize("name", CALLS)
def test_an_op_says_what_each_tensor_of_integers_is_for(name: str) -> None:
    """What takes integers and nothing else is in the row's `integers`, and nothing besides."""
    op, args = ops.lookup(name), CALLS[name]
    assert op is not None
    tensors = [arg.name for arg in op.args if isinstance(args.get(arg.name), TensorType)]
    whole = [
        arg
        for arg in tensors
        if args[arg].dtype in ("int32", "int64") and not any(accepts(op, args, arg, dtype) for dtype in NO_INTEGERS)
    ]
    assert sorted(whole) == sorted(op.integers)


def test_every_op_of_ours_is_asked() -> None:
    assert {name for name, _ in ops.names() if name.startswith("precast.")} <= CALLS.keys()
