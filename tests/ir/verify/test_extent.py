"""What a graph may hold and expand to is counted before anything is computed from it."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import hostile

from examples import tiny_graph
from precast.ir import limits
from precast.ir.artifact import Bundle
from precast.ir.errors import BundleError
from precast.ir.graph.schema import (
    Apply,
    Block,
    CachePlan,
    Const,
    Dim,
    Each,
    Expr,
    Graph,
    Items,
    Node,
    Param,
    Pool,
    Read,
    Recipe,
    Ref,
    Slice,
    Slot,
    Stack,
    StateGroup,
    StateSpec,
    Symbol,
    Tie,
    Value,
)
from precast.ir.manifest import Checkpoint
from precast.ir.verify import extent


def refusal(graph: Graph) -> str:
    with pytest.raises(BundleError) as caught:
        extent.check(graph)
    assert caught.value.code == "limit-exceeded"
    return caught.value.message


@pytest.mark.parametrize(
    ("limit", "graph", "counted"),
    [
        ("MAX_SYMBOLS", hostile.symbols(8), "10 symbols"),
        ("MAX_PARAMS", hostile.params(10), "10 params"),
        ("MAX_STEPS", hostile.chain(8), "10 nodes and calls"),
        ("MAX_STEPS", hostile.calls(5, 3), "10 nodes and calls"),
        ("MAX_RUN_NODES", hostile.calls(3, 3), "11 nodes over all calls"),
        ("MAX_RUN_ARGUMENTS", hostile.joined_calls(2, 4), "19 arguments over all calls"),
        ("MAX_READS", hostile.each(5, 2), "10 tensors that recipes read"),
        ("MAX_READS", hostile.one_read(2, 5), "10 tensors that recipes read"),
        ("MAX_REPEATED_READS", hostile.one_read(2, 5), "9 reads of tensors that were read before"),
        ("MAX_EXPRESSION_NODES", hostile.nested(2), "9 operations and names in one expression"),
        ("MAX_EXPRESSIONS", hostile.nested(2), "9 operations and names in all different expressions"),
    ],
)
def test_counts(limit: str, graph: Graph, counted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    number = int(counted.split()[0])
    monkeypatch.setattr(limits, limit, number)
    extent.check(graph)

    monkeypatch.setattr(limits, limit, number - 1)

    assert refusal(graph) == f"graph: {counted}; at most {number - 1} are allowed"


def test_reads_are_counted_without_being_made() -> None:
    parts = tuple(Read("e.*", (1,)) for _ in range(1000))
    graph = hostile.graph(params=[hostile.param("p", (1,), Each(Stack(parts, 0), 0, 2**62))])

    assert refusal(graph).startswith(f"graph: {2**62 * 1000} tensors that recipes read")


def each(pattern: str, start: int, count: int) -> Each:
    return Each(Read(pattern, (1,)), 0, count, start)


@pytest.mark.parametrize(
    ("recipes", "repeated"),
    [
        ([Read("a", (1,)), Read("b", (1,)), Tie("p0")], 0),
        ([Read("a", (1,)), Stack((Read("a", (1,)), Read("b", (1,))), 0)], 1),
        ([each("e.*", 0, 4), each("f.*", 0, 4), each("e.*", 4, 2)], 0),
        ([each("e.*", 0, 4), each("e.*", 3, 4)], 1),
        ([each("e.*", 5, 4), each("e.*", 0, 10), each("e.*", 2, 3)], 7),
        ([each("e", 0, 4)], 3),
        ([each("e.*", 0, 4), Read("e.*", (1,))], 0),  # a star that no number replaces
        ([Each(Stack((Read("e.*", (1,)), Read("e.*", (1,)), Read("e", (1,))), 0), 0, 4)], 4 + 3),
    ],
)
def test_reads_of_what_was_read_before(recipes: list[Recipe], repeated: int, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = hostile.graph(params=[hostile.param(f"p{i}", (1,), recipe) for i, recipe in enumerate(recipes)])
    monkeypatch.setattr(limits, "MAX_REPEATED_READS", repeated)
    extent.check(graph)

    monkeypatch.setattr(limits, "MAX_REPEATED_READS", repeated - 1)

    assert refusal(graph).startswith(f"graph: {repeated} reads of tensors that were read before")


@pytest.mark.parametrize(
    ("shape", "counted"),
    [
        ((1,) * 65, "65 dimensions of one tensor; at most 64"),
        ((2**48 + 1,), f"{2**48 + 1} elements along one dimension; at most {2**48}"),
        ((-1,) * 21, "21 negative sizes; at most 20"),
    ],
)
def test_sizes(shape: tuple[int, ...], counted: str) -> None:
    assert refusal(hostile.graph(shape=shape)) == f"graph: {counted} are allowed"


def test_sizes_of_one_hash_are_refused() -> None:
    graph = hostile.one_hash(100)
    made = [value for step in graph.main for value in step.outputs if value.name.startswith("i")]
    assert len(made) == 100
    assert len({hash(value.type.shape) for value in made}) == 1

    assert "elements along one dimension" in refusal(graph)


def with_size(place: str, size: Expr) -> Graph:
    """A graph in which this size stands in one place."""
    made, plain = hostile.value("v", size), hostile.value("v", "T")
    inputs, params, constants, blocks, main, plan = [], [], [], [], [], CachePlan()
    if place == "an input":
        inputs = [made]
    elif place == "a constant":
        constants = [made]
    elif place == "a param":
        params = [Param("v", made.type, Read("v", (1,)))]
    elif place == "a cut of a recipe":
        params = [Param("v", plain.type, Slice(Read("v", (1,)), 0, 0, size))]
    elif place == "a result":
        main = [Node("aten.relu.default", {"self": Ref("x")}, (made,))]
    elif place == "an argument":
        main = [Node("aten.slice.Tensor", {"self": Ref("x"), "dim": Const(0), "end": Dim(size)}, (plain,))]
    elif place == "an argument's list":
        main = [Node("aten.expand.default", {"self": Ref("x"), "size": Items((Const(1), Dim(size)))}, (plain,))]
    elif place.startswith("a block's"):
        given = [(made,) if place.endswith(kind) else () for kind in ("input", "param", "cache")]
        node = Node("aten.relu.default", {"self": Ref("x")}, (made if place.endswith("result") else plain,))
        blocks = [Block("block", *given, (node,), ())]
    elif place == "a cache":
        plan = plan_of(StateSpec("state", (1,), "float32"), made)
    elif place == "a group":
        plan = plan_of(StateSpec("state", (size,), "float32"), plain)
    return Graph((Symbol("T"),), tuple(inputs), tuple(params), tuple(constants), tuple(blocks), tuple(main), {}, plan)


def plan_of(spec: StateSpec, tensor: Value) -> CachePlan:
    return CachePlan((Pool("p", "P"),), states=(StateGroup("g", "p", spec, "slots", (Slot("s", (tensor,)),)),))


TYPES = [
    "an input", "a constant", "a param", "a result", "a block's input", "a block's param", "a block's cache",
    "a block's result", "a cache",
]  # fmt: skip


@pytest.mark.parametrize("place", [*TYPES, "a cut of a recipe", "an argument", "an argument's list", "a group"])
def test_expressions_count_wherever_they_stand(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = with_size(place, Apply("add", ("T", 1)))
    monkeypatch.setattr(limits, "MAX_EXPRESSIONS", 3)
    extent.check(graph)

    monkeypatch.setattr(limits, "MAX_EXPRESSIONS", 2)

    assert refusal(graph) == "graph: 3 operations and names in all different expressions; at most 2 are allowed"


@pytest.mark.parametrize("place", TYPES)
def test_sizes_count_wherever_they_stand(place: str) -> None:
    extent.check(with_size(place, 2**48))

    assert "elements along one dimension" in refusal(with_size(place, 2**48 + 1))


def test_equal_expressions_count_once(monkeypatch: pytest.MonkeyPatch) -> None:
    size = Apply("add", ("T", 1))
    monkeypatch.setattr(limits, "MAX_EXPRESSIONS", 3)

    extent.check(hostile.graph(given=[hostile.value(f"i{i}", size) for i in range(100)]))


def test_an_honest_graph_has_room() -> None:
    for what, found, limit in extent.counts(tiny_graph(num_layers=126)):
        assert 4 * found <= limit, what


BOMBS = [
    "900,000 symbols", "each of 65,536 over 1,000 reads", "128 params of 8,192 reads of one tensor", "2^40 matrices",
    "10,000 calls of 5,000 nodes",
]  # fmt: skip


@pytest.mark.parametrize("name", BOMBS)
def test_bombs_do_not_open(name: str, tmp_path: Path) -> None:
    path = hostile.BUNDLES[name](tmp_path / "x.bundle")

    with pytest.raises(BundleError) as caught:
        Bundle.open(path)

    assert caught.value.code in ("limit-exceeded", "graph-invalid")
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("rules", "counted"),
    [
        (Checkpoint(optional_prefixes=("a.",) * 33, prefixes={f"{i}.": "" for i in range(33)}), "66 prefixes"),
        (Checkpoint(endings={f".{i}": "" for i in range(65)}), "65 endings"),
        (Checkpoint(ignored=("*",) * 4000, unused=("*",) * 1000), "5000 patterns"),
        (Checkpoint(groups_in_order={f"{i}": 1 for i in range(5000)}), "5000 patterns of groups"),
        (Checkpoint(zeros={f"{i}": 1 for i in range(5000)}), "5000 patterns of zeros"),
        (Checkpoint(tied={f"{i}": "w" for i in range(2000)}), "2000 tied"),
    ],
)
def test_rules_of_a_checkpoint_are_few(rules: Checkpoint, counted: str, tmp_path: Path) -> None:
    path = hostile.write(tmp_path / "x.bundle", hostile.params(1), rules)

    with pytest.raises(BundleError, match=f"manifest: {counted}") as caught:
        Bundle.open(path)

    assert caught.value.code == "limit-exceeded"


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        (Checkpoint(groups_in_order={"*": -1}), "groups of fewer than 0 inputs"),
        (Checkpoint(zeros={"*": -1}), "tensors of fewer than 0 elements"),
    ],
)
def test_sizes_of_a_checkpoint_are_not_below_0(rules: Checkpoint, message: str, tmp_path: Path) -> None:
    path = hostile.write(tmp_path / "x.bundle", hostile.params(1), rules)

    with pytest.raises(BundleError, match=message) as caught:
        Bundle.open(path)

    assert caught.value.code == "manifest-invalid"
