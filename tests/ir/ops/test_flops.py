"""The floating-point work of nodes, blocks and graphs, and the share of it in `precast` ops, by hand."""

from __future__ import annotations

from typing import Any

import pytest

from precast.ir.graph.schema import (
    Block,
    CachePlan,
    Call,
    Const,
    Graph,
    Items,
    Node,
    Param,
    Pool,
    Read,
    Ref,
    Slot,
    StateGroup,
    StateSpec,
    Symbol,
    TensorType,
    Value,
)
from precast.ir.ops.flops import TOKENS, node_work, precast_share, work


def made(op: str, shapes: dict[str, tuple[int, ...]], out: tuple[int, ...], **constants: Any) -> float:
    """The work of a node that reads all of `shapes` by these names."""
    args = {name: Ref(name) for name in shapes} | {name: Const(value) for name, value in constants.items()}
    node = Node(op, args, (Value("y", TensorType("float32", out)),))
    return node_work(node, {**shapes, "y": out})


def test_matrix_products_take_two_operations_for_each_product_of_elements() -> None:
    assert made("aten.linear.default", {"input": (1, 5, 8), "weight": (3, 8)}, (1, 5, 3)) == 2 * 5 * 8 * 3
    assert made("aten.matmul.default", {"self": (4, 5, 8), "other": (4, 8, 3)}, (4, 5, 3)) == 2 * 4 * 5 * 8 * 3
    assert made("aten.addmm.default", {"self": (3,), "mat1": (5, 8), "mat2": (8, 3)}, (5, 3)) == 2 * 5 * 8 * 3


@pytest.mark.parametrize(("window", "seen"), [({}, 1 + 2 + 3 + 4), ({"window": 2}, 1 + 2 + 2 + 2), ({"window": 9}, 10)])
@pytest.mark.parametrize("op", ["precast.attention", "precast.paged_attention"])
def test_attention_looks_back_at_what_its_window_holds(op: str, window: dict[str, int], seen: int) -> None:
    found = made(op, {"q": (1, 4, 6, 8)}, (1, 4, 6, 5), **window)

    assert found == 2 * seen * 6 * (8 + 5)


def test_experts_work_for_those_chosen_only() -> None:
    shapes = {"x": (7, 16), "expert_ids": (7, 2), "up": (64, 24, 16), "down": (64, 16, 12)}

    assert made("precast.experts", shapes, (7, 16)) == 2 * 7 * 2 * (24 * 16 + 16 * 12)


def test_quantised_experts_work_as_others_do() -> None:
    """In any format, however many values an element of what is stored holds."""
    given = {"x": (7, 16), "expert_ids": (7, 2)}
    stored: dict[str, dict[str, tuple[int, ...]]] = {
        "mxfp4": {"up": (64, 24, 1, 16), "up_scales": (64, 24, 1)},
        "packed4": {"up": (64, 24, 2), "up_scales": (64, 24, 2)},
    }
    for name, parts in stored.items():
        for gated, inner in ((True, 12), (False, 24)):
            found = made("precast.quantised_experts", given | parts, (7, 16), format=name, gated=gated)

            assert found == 2 * 7 * 2 * (24 * 16 + inner * 16)


def test_states_work_for_each_element_and_token() -> None:
    scan = {"x": (1, 7, 4, 8), "b": (1, 7, 2, 16)}
    rule = {"k": (1, 7, 2, 8), "v": (1, 7, 4, 16)}

    assert made("precast.stateful_state_space_scan", scan, (1, 7, 4, 8)) == 6 * 7 * 4 * 8 * 16
    assert made("precast.delta_rule", rule, (1, 7, 4, 16)) == 8 * 7 * 4 * 16 * 8
    assert made("precast.linear_recurrence", {"x": (1, 7, 6)}, (1, 7, 6)) == 2 * 7 * 6
    assert made("precast.stateful_wkv", {"v": (1, 7, 6)}, (1, 7, 6)) == 8 * 7 * 6
    assert made("precast.causal_conv", {"x": (1, 7, 6), "weight": (6, 4)}, (1, 7, 6)) == 2 * 7 * 6 * 4


def test_moves_are_free_and_the_rest_counts_elements() -> None:
    assert made("aten.reshape.default", {"self": (2, 6)}, (3, 4)) == 0
    assert made("aten.add.Tensor", {"self": (2, 6), "other": (6,)}, (2, 6)) == 12
    assert made("aten.sum.dim_IntList", {"self": (2, 6)}, (2, 1)) == 12


def value(name: str, *shape: int | str) -> Value:
    return Value(name, TensorType("float32", shape))


def graph(*main: Node | Call) -> Graph:
    """x `[1, T, 8]` and w `[8, 8]`; the block `twice` does a linear layer and adds its input."""
    block = Block(
        name="twice",
        inputs=(value("i", 1, "T", 8),),
        params=(value("p", 8, 8),),
        caches=(),
        nodes=(
            Node("aten.linear.default", {"input": Ref("i"), "weight": Ref("p")}, (value("a", 1, "T", 8),)),
            Node("aten.add.Tensor", {"self": Ref("a"), "other": Ref("i")}, (value("b", 1, "T", 8),)),
        ),
        outputs=("b",),
    )
    return Graph(
        symbols=(Symbol("T", 1),),
        inputs=(value("x", 1, "T", 8),),
        params=(Param("w", TensorType("float32", (8, 8)), Read("w", (8, 8))),),
        constants=(),
        blocks=(block,),
        main=main,
        outputs={"logits": "y"},
    )


def call(source: str, result: str) -> Call:
    return Call("twice", {"i": source, "p": "w"}, (value(result, 1, "T", 8),))


def test_each_call_of_a_block_counts() -> None:
    linear, add = 2 * TOKENS * 8 * 8, TOKENS * 8

    assert work(graph(call("x", "y"))) == (linear, linear + add)
    assert work(graph(call("x", "z"), call("z", "y"))) == (2 * linear, 2 * (linear + add))


def test_share_is_that_of_precast_ops_and_linear_layers() -> None:
    norm = Node("precast.rms_norm", {"x": Ref("x"), "weight": Const(None)}, (value("y", 1, "T", 8),))
    tanh = Node("aten.tanh.default", {"self": Ref("x")}, (value("y", 1, "T", 8),))

    assert precast_share(graph(norm)) == 1.0
    assert precast_share(graph(tanh)) == 0.0
    assert precast_share(graph(call("x", "y"))) == pytest.approx(16 / 17)


def test_share_of_a_graph_without_work() -> None:
    assert precast_share(graph()) == 1.0


def test_a_node_of_main_may_read_a_cache() -> None:
    """States with T pages, of six: a mean over them reads each element of all."""
    states = Value("state", TensorType("float32", ("T", 6)))
    mean = Node(
        "aten.mean.dim", {"self": Ref("state"), "dim": Items((Const(1),))}, (Value("y", TensorType("float32", ("T",))),)
    )
    group = StateGroup("g", "p", StateSpec("state", (6,), "float32"), "ids", (Slot("s", (states,)),))
    plan = CachePlan(pools=(Pool("p", "T"),), states=(group,))

    assert work(Graph((Symbol("T", 1),), (), (), (), (), (mean,), {"y": "y"}, plan)) == (0, 6 * TOKENS)
