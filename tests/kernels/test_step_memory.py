"""What is alive, op by op, in small graphs that can be counted by hand: rows of 128 float32, 512 bytes a token."""

from __future__ import annotations

import pytest

from precast.ir.graph import symbols
from precast.ir.graph.schema import Arg, Block, Call, Const, Graph, Items, Node, Ref, Symbol, TensorType, Value
from precast.kernels import step_memory
from precast.kernels.sampling.limits import MAX_SORTED, row_bytes
from precast.kernels.use import GPU, LONGEST, Target

ROW = 512


def value(name: str, *shape: int | str, dtype: str = "float32") -> Value:
    return Value(name, TensorType(dtype, shape))  # type: ignore[arg-type]


def node(op: str, *outputs: Value, **args: Arg) -> Node:
    return Node(op, args, outputs)


def exp(source: str, made: str) -> Node:
    return node("aten.exp.default", value(made, "T", 128), self=Ref(source))


def add(one: str, other: str, made: str) -> Node:
    return node("aten.add.Tensor", value(made, "T", 128), self=Ref(one), other=Ref(other))


def graph(*main: Node | Call, blocks: tuple[Block, ...] = (), **outputs: str) -> Graph:
    """Takes x `[T, 128]`, which is no activation."""
    return Graph((Symbol("T", 1), Symbol("R", 1)), (value("x", "T", 128),), (), (), blocks, main, outputs)


def block(*nodes: Node, outputs: tuple[str, ...]) -> Block:
    return Block("inner", (value("i", "T", 128),), (), (), nodes, outputs)


def rows(found: Graph, tokens: int = 10) -> float:
    """The peak for so many tokens, in rows of one token."""
    return symbols.evaluate(step_memory.peak(found, GPU), {"T": tokens, "R": tokens, LONGEST: tokens}) / ROW


def test_a_value_lives_until_its_last_use() -> None:
    chain = graph(exp("x", "a"), exp("a", "b"), exp("b", "c"), out="c")
    kept = graph(exp("x", "a"), exp("a", "b"), add("a", "b", "c"), out="c")

    assert rows(chain) == 20  # an op holds its argument and its result
    assert rows(kept) == 30


def test_inputs_are_no_activations_and_outputs_live_to_the_end() -> None:
    assert rows(graph(exp("x", "a"), out="a")) == 10
    assert rows(graph(exp("x", "a"), exp("x", "b"), exp("b", "c"), first="a", out="c")) == 30


def test_results_that_nobody_reads_count_while_they_are_made() -> None:
    assert rows(graph(exp("x", "a"), exp("x", "b"), out="b")) == 10


def view(source: str, made: str, *shape: int | str) -> Node:
    items = tuple(Const(size) if isinstance(size, int) else Const(-1) for size in shape)
    return node("aten.reshape.default", value(made, *shape), self=Ref(source), shape=Items(items))


def test_a_view_keeps_the_memory_that_it_looks_into() -> None:
    tail = node("aten.slice.Tensor", value("s", "T", 32), self=Ref("a"), dim=Const(1), start=Const(96), end=Const(128))
    used = node("aten.exp.default", value("e", "T", 32), self=Ref("s"))

    assert rows(graph(exp("x", "a"), tail, exp("x", "b"), used, out="e")) == 10 + 10
    assert rows(graph(exp("x", "a"), view("a", "v", "T", 2, 64), out="v")) == 10


def test_a_reshape_that_cannot_be_a_view_is_a_copy() -> None:
    turned = node("aten.transpose.int", value("t", 128, "T"), self=Ref("a"), dim0=Const(0), dim1=Const(1))
    flat = symbols.mul("T", 128)
    copied = Node("aten.reshape.default", {"self": Ref("t"), "shape": Items((Const(-1),))}, (
        Value("f", TensorType("float32", (flat,))),
    ))  # fmt: skip

    assert rows(graph(exp("x", "a"), turned, copied, out="f")) == 20


def test_a_call_holds_what_its_block_holds_while_it_runs() -> None:
    inner = block(exp("i", "p"), exp("p", "q"), add("p", "q", "r"), outputs=("r",))
    call = Call("inner", {"i": "a"}, (value("b", "T", 128),))

    # p, q and r; a dies in the block at its first op, as nobody else reads it
    assert rows(graph(exp("x", "a"), call, blocks=(inner,), out="b")) == 30
    # with a alive behind the call
    assert rows(graph(exp("x", "a"), call, add("a", "b", "c"), blocks=(inner,), out="c")) == 40


def test_workspace_counts_while_its_op_runs() -> None:
    turned = node("aten.transpose.int", value("t", 128, "T"), self=Ref("x"), dim0=Const(0), dim1=Const(1))
    linear = node("aten.linear.default", value("y", 128, 1), input=Ref("t"), weight=Ref("w"))
    given = graph(turned, linear, out="y")
    weighted = Graph(given.symbols, (*given.inputs, value("w", 1, "T")), (), (), (), given.main, given.outputs)

    assert rows(weighted, 100) == 100 + 1  # the input once more, in row-major order, and 128 numbers


def test_blocks_of_the_allocator_are_whole() -> None:
    few = node("aten.exp.default", value("a", "T", 3), self=Ref("x"))
    peak = symbols.evaluate(step_memory.peak(graph(few, out="a"), GPU), {"T": 100, "R": 1})

    assert 100 * 3 * 4 <= peak <= 100 * 3 * 4 + 512


def test_moments_name_their_calls_and_what_is_alive_before() -> None:
    inner = block(exp("i", "p"), exp("p", "q"), outputs=("q",))
    found = graph(exp("x", "a"), Call("inner", {"i": "a"}, (value("b", "T", 128),)), blocks=(inner,), out="b")

    (first, second, third), kept = step_memory.runs(found, GPU)[0]

    assert (first.path, first.held, [size for size, _ in first.made]) == ("", frozenset(), [symbols.mul(ROW, "T")])
    assert second.path == third.path == "inner that makes b"
    assert second.held == frozenset({(symbols.mul(ROW, "T"), 1)})
    assert kept == second.held
    largest = step_memory.largest_moments(found, GPU, {"T": 3}, 1)
    assert [size for size, _ in largest] == [2 * 3 * ROW]


def test_a_step_holds_the_logits_while_tokens_are_drawn_from_them() -> None:
    made = node("precast.gather_rows", value("l", 1, "R", 1000), x=Ref("x"), rows=Ref("x"))
    sizes = {"T": 5, "R": 4, LONGEST: 5}
    drawn = symbols.evaluate(step_memory.step_peak(graph(made, logits="l"), GPU), sizes)

    assert drawn > symbols.evaluate(step_memory.peak(graph(made, logits="l"), GPU), sizes)
    assert drawn == symbols.evaluate(step_memory.step_peak(graph(made, logits="l", more="l"), GPU), sizes)
    assert step_memory.step_peak(graph(made, out="l"), GPU) == step_memory.peak(graph(made, out="l"), GPU)


VOCABULARY = 128_256


@pytest.mark.parametrize("rows", [1, 7, 256])
def test_drawing_counts_what_draws(rows: int) -> None:
    """In Triton a few lists a row, whatever the vocabulary; op by op a greedy step's copy of logits, some at a time."""
    logits = TensorType("bfloat16", (rows, VOCABULARY))
    searched = rows * row_bytes()
    copied = 2 * min(rows, max(1, MAX_SORTED // VOCABULARY)) * VOCABULARY + 64 * rows + (16 << 10)

    assert step_memory.drawing(logits, GPU, captured=True) == searched
    assert step_memory.drawing(logits, GPU, captured=False) == max(searched, copied)


@pytest.mark.parametrize("captured", [False, True])
def test_drawing_counts_a_sort_where_nothing_else_draws(captured: bool) -> None:
    logits = TensorType("float16", (3, VOCABULARY))
    old = Target("cuda", (7, 5))

    assert step_memory.drawing(logits, old, captured=captured) > 42 * 3 * VOCABULARY


def test_a_captured_step_counts_its_own_way_to_draw() -> None:
    made = node("precast.gather_rows", value("l", 1, "R", VOCABULARY), x=Ref("x"), rows=Ref("x"))
    found = graph(made, logits="l")
    sizes = {"T": 1, "R": 1, LONGEST: 1}
    eager, captured = (
        symbols.evaluate(step_memory.step_peak(found, GPU, captured=each), sizes) for each in (False, True)
    )

    assert eager - captured == 4 * VOCABULARY + 64 + (16 << 10) - row_bytes()
