"""Layers: found by their module, stored once when they are equal, and cut where others interrupt them."""

from __future__ import annotations

from fx_text import read_graph

from precast.builder.lower.lower import lower
from precast.builder.passes.cache.insert_caches import insert_caches
from precast.ir.graph.schema import Call, Graph
from precast.ir.graph.text import format_graph
from precast.ir.verify.verifier import verify


def outlined(text: str, *, caches: bool = False) -> Graph:
    source = read_graph(text)
    if caches:
        assert insert_caches.run(source.graph, source.ctx)
    graph = lower(source.graph, source.ctx)
    assert verify(graph) == ()
    return graph


def steps(graph: Graph) -> list[str]:
    """What main does: the names of the blocks that it calls, and its own ops."""
    return [step.block if isinstance(step, Call) else step.op for step in graph.main]


LAYER = """
with layer("layers.{n}"):
    a{n} = aten.linear(x{n}, w{n})
    x{next} = aten.add.Tensor(a{n}, {constant})
"""


def layers(*constants: float) -> str:
    """Layers `x + constant` of a product, one behind the other."""
    params = "".join(f"w{n}: param(float32, 8, 8)\n" for n in range(len(constants)))
    body = "".join(LAYER.format(n=n, next=n + 1, constant=value) for n, value in enumerate(constants))
    return "x0: input(float32, 1, T, 8)\n" + params + body + f"return x{len(constants)}"


def test_equal_layers_share_a_block() -> None:
    graph = outlined(layers(1.0, 1.0, 1.0))

    assert [block.name for block in graph.blocks] == ["layer0"]
    assert steps(graph) == ["layer0", "layer0", "layer0"]
    assert [step.args for step in graph.main if isinstance(step, Call)] == [
        {"input0": "x0", "param0": "w0"},
        {"input0": "add_0", "param0": "w1"},
        {"input0": "add_1", "param0": "w2"},
    ]
    assert graph.outputs == {"logits": "add_2"}


def test_a_constant_that_differs_makes_another_block() -> None:
    graph = outlined(layers(1.0, 2.0, 1.0))

    assert steps(graph) == ["layer0", "layer1", "layer0"]


def test_numbers_of_two_types_make_two_blocks() -> None:
    assert steps(outlined(layers(1.0, 1))) == ["layer0", "layer1"]


def test_a_shape_that_differs_makes_another_block() -> None:
    graph = outlined(
        """
        x: input(float32, 1, T, 8)
        z: input(float32, 1, T, 4)
        with layer("layers.0"):
            a = aten.neg(x)
        with layer("layers.1"):
            b = aten.neg(z)
        c = aten.cat([a, b], 2)
        return c
        """
    )

    assert steps(graph) == ["layer0", "layer1", "aten.cat.default"]


def test_another_wiring_makes_another_block() -> None:
    graph = outlined(
        """
        x: input(float32, 1, T, 8)
        y: input(float32, 1, T, 8)
        with layer("layers.0"):
            a = aten.neg(x)
            b = aten.sub.Tensor(a, y)
        with layer("layers.1"):
            c = aten.neg(b)
            d = aten.sub.Tensor(y, c)
        return d
        """
    )

    assert steps(graph) == ["layer0", "layer1"]


def test_what_is_used_outside_is_returned() -> None:
    graph = outlined(
        """
        x: input(float32, 1, T, 8)
        with layer("layers.0"):
            a = aten.neg(x)
            b = aten.tanh(a)
            c = aten.add.Tensor(a, b)
        with layer("layers.1"):
            d = aten.neg(c)
            e = aten.tanh(d)
            f = aten.add.Tensor(d, e)
        g = aten.add.Tensor(b, f)
        return g
        """
    )

    # one returns two values, the other one: they are not the same function
    assert [block.outputs for block in graph.blocks] == [("tanh_0", "add_0"), ("add_0",)]


def test_nodes_outside_of_layers_stay_in_main() -> None:
    text = layers(1.0, 1.0).replace("return x2", "y = aten.tanh(x2)\nreturn y")

    assert steps(outlined(text)) == ["layer0", "layer0", "aten.tanh.default"]


def test_a_layer_that_is_interrupted_is_cut_there() -> None:
    graph = outlined(
        """
        x: input(float32, 1, T, 8)
        with layer("layers.0"):
            a = aten.neg(x)
        b = aten.tanh(a)
        with layer("layers.0"):
            c = aten.neg(b)
        with layer("layers.1"):
            d = aten.neg(c)
            e = aten.neg(d)
        return e
        """
    )

    assert steps(graph) == ["layer0", "aten.tanh.default", "layer0", "layer1"]
    assert [len(block.nodes) for block in graph.blocks] == [1, 2]


def test_names_inside_a_block_are_its_own() -> None:
    (block,) = outlined(layers(1.0, 1.0)).blocks

    assert [value.name for value in (*block.inputs, *block.params)] == ["input0", "param0"]
    assert [value.name for node in block.nodes for value in node.outputs] == ["linear_0", "add_0"]


CACHED = """
input_ids: input(int64, 1, T)
cu_seqlens: input(int32, B1)
q: input(float32, 1, T, 2, 4)
with layer("layers.0"):
    a = precast.attention(q, q, q, None, cu_seqlens, scale=0.5)
with layer("layers.1"):
    b = precast.attention(a, a, a, None, cu_seqlens, scale=0.5)
return b
"""


def test_each_call_has_cache_tensors_of_its_own() -> None:
    graph = outlined(CACHED, caches=True)

    assert steps(graph) == ["layer0", "layer0"]
    calls = [step for step in graph.main if isinstance(step, Call)]
    assert [call.args["cache0"] for call in calls] == ["layers.0.k", "layers.1.k"]
    assert [call.args["cache1"] for call in calls] == ["layers.0.v", "layers.1.v"]


def test_a_run_that_only_writes_stays_in_main() -> None:
    """A layer that writes a cache for others to read makes no value, and a block returns one."""
    source = read_graph(CACHED)
    insert_caches.run(source.graph, source.ctx)
    for node in source.graph.nodes:
        if node.op == "call_function" and "write_kv" in str(node.target):
            node.meta["nn_module_stack"] = {"layer": ("layers.9", "")}

    graph = lower(source.graph, source.ctx)

    assert verify(graph) == ()
    assert steps(graph) == ["precast.write_kv", "layer0", "precast.write_kv", "layer0"]


def test_the_text_form_shows_one_layer() -> None:
    assert format_graph(outlined(layers(*[1.0] * 20))).count("aten.linear.default") == 1


def test_unused_params_are_left_out() -> None:
    graph = outlined(layers(1.0).replace("w0: param(float32, 8, 8)", "w0: param(float32, 8, 8)\nv: param(float32, 8)"))

    assert [param.name for param in graph.params] == ["w0"]
