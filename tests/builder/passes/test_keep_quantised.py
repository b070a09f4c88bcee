"""Weights in few bits become params of their own: graphs in, graphs out; what stays as it is, with the reason."""

from __future__ import annotations

import pytest
from graph_text import parse_graph

from precast.builder.graph.rounding import Rounding
from precast.builder.passes.lower.keep_quantised import Dequantised, Unrounded, keep_quantised
from precast.ir.graph.schema import Graph, Read
from precast.ir.graph.text import format_graph, format_recipe, format_step, format_type
from precast.ir.graph.world import unsharded
from precast.ir.verify.verifier import verify


def fp8(name: str, rows: int, columns: int, scales: tuple[int, int] = (1, 1)) -> str:
    """The recipe of a weight in float8 with so many scales."""
    block = f"[{-(-rows // scales[0])}, {-(-columns // scales[1])}]"
    return (
        f'cast(dequantise(fp8, read("{name}", [{rows}, {columns}], float8_e4m3fn), read("{name}.s", {list(scales)}),'
        f" block={block}, zeros=none, groups=none, zero_offset=0), bfloat16)"
    )


def experts(name: str, rows: int, columns: int) -> str:
    return (
        f'cast(dequantise(fp8, read("{name}", [2, {rows}, {columns}], float8_e4m3fn), read("{name}.s", [2, {rows}, 1]),'
        f" block=[1, {columns}], zeros=none, groups=none, zero_offset=0), bfloat16)"
    )


def graph(params: dict[str, str], main: str, blocks: str = "") -> Graph:
    """A graph over x [1, T, 16], tokens [T, 16] and their experts, with these params: type and recipe each."""
    given = "\n".join(f"%{name}: bfloat16{made}" for name, made in params.items())
    return parse_graph(f"""
symbols {{ T: 1..64 }}
inputs {{ %x: bfloat16[1, T, 16] %ids: int64[1, T] %tokens: bfloat16[T, 16] %chosen: int64[T, 1]
          %shares: bfloat16[T, 1] }}
params {{ {given} }}
{blocks}
main {{ {main} }}
""")


def kept(before: Graph) -> tuple[Graph, list[Dequantised]]:
    """The graph after the pass, which is as right as it was, and what is dequantised."""
    left: list[Dequantised] = []
    after = keep_quantised(before, left)
    assert verify(after) == verify(before)
    return after, left


def test_a_linear_layer_takes_what_is_stored() -> None:
    before = graph(
        {"w": f"[6, 16] = {fp8('w', 6, 16)}", "b": '[6] = read("b", [6], bfloat16)'},
        "%y = aten.linear.default(input=%x, weight=%w, bias=%b) return y=%y",
    )

    after, left = kept(before)

    assert [format_step(step) for step in after.main] == [
        "%y: bfloat16[1, T, 6] = precast.quantised_linear@1(input=%x, weight=%w, scales=%w.scales, bias=%b,"
        ' format="fp8", block=[6, 16])'
    ]
    assert {param.name: (param.type.dtype, format_recipe(param.recipe)) for param in after.params} == {
        "w": ("float8_e4m3fn", 'read("w", [6, 16], float8_e4m3fn)'),
        "w.scales": ("float32", 'cast(read("w.s", [1, 1]), float32)'),
        "b": ("bfloat16", 'read("b", [6], bfloat16)'),
    }
    assert left == []


LINEAR = "%y = aten.linear.default(input=%x, weight=%w) return y=%y"


def rounded(rounding: Rounding, recipe: str = fp8("w", 6, 16)) -> tuple[Graph, list[Dequantised | Unrounded]]:
    left: list[Dequantised | Unrounded] = []
    before = graph({"w": f"[6, 16] = {recipe}"}, LINEAR)
    after = keep_quantised(before, left, roundings={"w": rounding})
    assert verify(after) == verify(before)
    return after, left


def test_the_input_of_a_linear_layer_is_rounded() -> None:
    after, left = rounded(Rounding("fp8_token"))

    assert [format_step(step) for step in after.main] == [
        "%y: bfloat16[1, T, 6] = precast.quantised_linear@1(input=%x, weight=%w, scales=%w.scales,"
        ' format="fp8", block=[6, 16], activation="fp8_token")'
    ]
    assert left == []


@pytest.mark.parametrize(("shape", "recipe"), [((1,), 'read("i", [1])'), ((), 'reshape(read("i", []), [1])')])
def test_the_input_is_rounded_by_the_checkpoint_s_scale(shape: tuple[int, ...], recipe: str) -> None:
    after, _ = rounded(Rounding("fp8_tensor", Read("i", shape)))

    assert [format_step(step) for step in after.main] == [
        "%y: bfloat16[1, T, 6] = precast.quantised_linear@1(input=%x, weight=%w, scales=%w.scales,"
        ' input_scale=%w.input_scale, format="fp8", block=[6, 16], activation="fp8_tensor")'
    ]
    (scale,) = [param for param in after.params if param.name == "w.input_scale"]
    assert (format_type(scale.type), format_recipe(scale.recipe)) == ("float32[1]", f"cast({recipe}, float32)")


def test_the_input_is_bounded_first() -> None:
    after, _ = rounded(Rounding("fp8_token", bound=1200.0))

    assert [format_step(step) for step in after.main] == [
        "%y_input: bfloat16[1, T, 16] = aten.clamp.default@1(self=%x, min=-1200.0, max=1200.0)",
        "%y: bfloat16[1, T, 6] = precast.quantised_linear@1(input=%y_input, weight=%w, scales=%w.scales,"
        ' format="fp8", block=[6, 16], activation="fp8_token")',
    ]


def test_an_input_that_is_not_rounded_has_a_reason() -> None:
    after, left = rounded(Rounding(reason="it is not known"))

    assert "activation" not in format_graph(after)
    assert left == [Unrounded("w", "it is not known")]


def test_layers_of_a_block_whose_inputs_are_rounded_in_other_ways() -> None:
    before = graph({name: f"[16, 16] = {fp8(name, 16, 16, (2, 2))}" for name in ("v", "w")}, CALLS, BLOCK)
    left: list[Dequantised | Unrounded] = []

    after = keep_quantised(before, left, roundings={"v": Rounding("fp8_token"), "w": Rounding("int8_token")})

    assert after == before
    reason = "the layers that share its block store it in other ways"
    assert left == [
        Dequantised("v", reason), Dequantised("w", reason),
        Unrounded("v", "the weight is dequantised"), Unrounded("w", "the weight is dequantised"),
    ]  # fmt: skip


BLOCK = """block b {
  inputs { %x: bfloat16[1, T, 16] }
  params { %w: bfloat16[16, 16] }
  %y = aten.linear.default(input=%x, weight=%w)
  return %y
}"""
CALLS = "%y = call b(x=%x, w=%v) %z = call b(x=%y, w=%w) return z=%z"


def test_layers_of_a_block_bind_their_own_parts() -> None:
    params = {name: f"[16, 16] = {fp8(name, 16, 16, (2, 2))}" for name in ("v", "w")}

    after, left = kept(graph(params, CALLS, BLOCK))

    assert [value.name for value in after.blocks[0].params] == ["w", "w.scales"]
    assert [format_step(step) for step in after.blocks[0].nodes] == [
        "%y: bfloat16[1, T, 16] = precast.quantised_linear@1(input=%x, weight=%w, scales=%w.scales,"
        ' format="fp8", block=[8, 8])'
    ]
    assert [step.args for step in after.main] == [
        {"x": "x", "w": "v", "w.scales": "v.scales"}, {"x": "y", "w": "w", "w.scales": "w.scales"},
    ]  # fmt: skip
    assert left == []


@pytest.mark.parametrize("other", [fp8("w", 16, 16), 'cast(read("w", [16, 16]), bfloat16)'])
def test_layers_of_a_block_that_are_stored_otherwise(other: str) -> None:
    params = {"v": f"[16, 16] = {fp8('v', 16, 16, (2, 2))}", "w": f"[16, 16] = {other}"}
    before = graph(params, CALLS, BLOCK)

    after, left = kept(before)

    assert after == before
    assert {each.reason for each in left} == {"the layers that share its block store it in other ways"}
    assert "v" in {each.param for each in left}


@pytest.mark.parametrize(
    ("nodes", "reason"),
    [
        ("%y = aten.linear.default(input=%x, weight=%w) %z = aten.linear.default(input=%y, weight=%w)",
         "more than one op takes it"),
        ("%p = aten.transpose.int(self=%w, dim0=0, dim1=1) %y = aten.linear.default(input=%x, weight=%p)",
         "aten.transpose.int takes it"),
    ],
)  # fmt: skip
def test_what_is_taken_otherwise(nodes: str, reason: str) -> None:
    before = graph({"w": f"[16, 16] = {fp8('w', 16, 16)}"}, f"{nodes} return y=%y")

    after, left = kept(before)

    assert after == before
    assert left == [Dequantised("w", reason)]


LOOKED_UP = (
    "%i = aten.clamp.default(self=%ids, min=0, max=39) %y = precast.embedding(ids=%i, weight=%w, scale=2.0) return y=%y"
)


def test_an_embedding_takes_what_is_stored() -> None:
    after, left = kept(graph({"w": f"[40, 16] = {fp8('w', 40, 16)}"}, LOOKED_UP))

    assert format_step(after.main[-1]) == (
        "%y: bfloat16[1, T, 16] = precast.quantised_embedding@1(ids=%i, weight=%w, scales=%w.scales,"
        ' format="fp8", block=[40, 16], dtype=bfloat16, scale=2.0)'
    )
    assert {param.name: (format_type(param.type), format_recipe(param.recipe)) for param in after.params} == {
        "w": ("float8_e4m3fn[40, 16]", 'read("w", [40, 16], float8_e4m3fn)'),
        "w.scales": ("float32[1, 1]", 'cast(read("w.s", [1, 1]), float32)'),
    }
    assert left == []


@pytest.mark.parametrize(
    "rounding", [Rounding("fp8_token"), Rounding("fp8_tensor", Read("i", (1,))), Rounding(reason="it is not known")]
)
def test_nothing_rounds_ids(rounding: Rounding) -> None:
    """Whatever a config says of the inputs of all that it quantises."""
    left: list[Dequantised | Unrounded] = []
    before = graph({"w": f"[40, 16] = {fp8('w', 40, 16)}"}, LOOKED_UP)

    assert keep_quantised(before, left, roundings={"w": rounding}) == keep_quantised(before)
    assert left == []


def test_parts_of_a_table_with_a_scale_for_all_keep_it() -> None:
    parts = ", ".join(fp8("w", 20, 16).replace('read("w"', f'read("w.{i}"') for i in range(2))

    after, _ = kept(graph({"w": f"[40, 16] = concat([{parts}], dim=0)"}, LOOKED_UP))

    assert [format_type(param.type) for param in after.params] == ["float8_e4m3fn[40, 16]", "float32[1, 1]"]


def test_parts_of_a_table_with_scales_of_their_own() -> None:
    """Each row gets that of its part."""
    parts = ", ".join(fp8(f"w.{i}", 20, 16) for i in range(2))

    after, left = kept(graph({"w": f"[40, 16] = concat([{parts}], dim=0)"}, LOOKED_UP))

    assert [format_type(param.type) for param in after.params] == ["float8_e4m3fn[40, 16]", "float32[40, 1]"]
    assert format_step(after.main[-1]).endswith('format="fp8", block=[1, 16], dtype=bfloat16, scale=2.0)')
    assert left == []


TWO_RANKS = """
symbols {{ T: 1..64 ep: 1..1 rank: 0..1 tp: 1..2 }}
inputs {{ %ids: int64[1, T] }}
params {{ %w: bfloat16[floordiv(40, tp), 16] = slice({recipe},
          dim=0, start=(floordiv(40, tp) * rank), length=floordiv(40, tp)) }}
shards {{ world(tp=1, ep=[1]) world(tp=2, ep=[1])
  row(kind="embedding", block="", mode="vocab", params=[%w], nodes=[%y], units=40, collective="all_reduce", group="tp",
      reason="") }}
main {{ %y = precast.sharded_embedding(ids=%ids, weight=%w, start=(floordiv(40, tp) * rank))
       %z = precast.all_reduce(x=%y, group="tp") return z=%z }}
"""


@pytest.mark.parametrize(
    ("scales", "shape", "block", "split"),
    [
        ((1, 1), "[1, 1]", "[40, 16]", ("w",)),
        ((40, 1), "[floordiv(40, tp), 1]", "[1, 16]", ("w", "w.scales")),
        ((10, 2), "[floordiv(40, tp), 2]", "[1, 8]", ("w", "w.scales")),
    ],
)
def test_a_rank_has_its_rows_of_a_table_and_their_scales(
    scales: tuple[int, int], shape: str, block: str, split: tuple[str, ...]
) -> None:
    after, left = kept(parse_graph(TWO_RANKS.format(recipe=fp8("w", 40, 16, scales))))

    assert format_step(after.main[0]) == (
        "%y: bfloat16[1, T, 16] = precast.quantised_sharded_embedding@1(ids=%ids, weight=%w, scales=%w.scales,"
        f' start=(floordiv(40, tp) * rank), format="fp8", block={block}, dtype=bfloat16)'
    )
    assert [format_type(param.type) for param in after.params] == [
        "float8_e4m3fn[floordiv(40, tp), 16]", f"float32{shape}",
    ]  # fmt: skip
    assert after.shards.rows[0].params == split
    assert left == []


def test_one_rank_looks_up_rows_of_the_whole_table() -> None:
    alone = unsharded(kept(parse_graph(TWO_RANKS.format(recipe=fp8("w", 40, 16))))[0])

    assert [format_step(step) for step in alone.main] == [
        "%y: bfloat16[1, T, 16] = precast.quantised_embedding@1(ids=%ids, weight=%w, scales=%w.scales,"
        ' format="fp8", block=[40, 16], dtype=bfloat16)'
    ]


def test_a_table_of_another_format() -> None:
    stored = (
        'cast(dequantise(int8, read("w", [40, 16], int8), read("s", [40, 1]), block=[1, 16], zeros=none, groups=none,'
        " zero_offset=0), bfloat16)"
    )
    before = graph({"w": f"[40, 16] = {stored}"}, LOOKED_UP)

    after, left = kept(before)

    assert after == before
    assert left == [Dequantised("w", "precast.quantised_embedding takes fp8, and not int8")]


def test_a_table_that_a_head_is_tied_to() -> None:
    before = graph(
        {"w": f"[40, 16] = {fp8('w', 40, 16)}", "head": "[40, 16] = tie(%w)"},
        "%y = precast.embedding(ids=%ids, weight=%w) %z = aten.linear.default(input=%y, weight=%head) return z=%z",
    )
    left: list[Dequantised | Unrounded] = []

    assert keep_quantised(before, left, roundings={"w": Rounding("fp8_token")}) == before
    assert left == [Dequantised("w", "another param is tied to it"), Unrounded("w", "the weight is dequantised")]


def test_what_others_are_tied_to() -> None:
    before = graph(
        {"w": f"[16, 16] = {fp8('w', 16, 16)}", "head": "[16, 16] = tie(%w)"},
        "%y = aten.linear.default(input=%x, weight=%w) %z = aten.linear.default(input=%y, weight=%head) return z=%z",
    )

    after, left = kept(before)

    assert after == before
    assert left == [Dequantised("w", "another param is tied to it")]


def chosen(up: str, down: str) -> Graph:
    return graph(
        {"up": f"[2, 6, 16] = {up}", "down": f"[2, 16, 6] = {down}"},
        "%y = precast.experts(x=%tokens, expert_ids=%chosen, expert_weights=%shares, up=%up, down=%down, up_bias=none,"
        ' down_bias=none, activation="silu", gated=false) return y=%y',
    )


def test_experts_take_what_is_stored() -> None:
    after, left = kept(chosen(experts("up", 6, 16), experts("down", 16, 6)))

    assert [format_step(step) for step in after.main] == [
        "%y: bfloat16[T, 16] = precast.quantised_experts@1(x=%tokens, expert_ids=%chosen, expert_weights=%shares,"
        " up=%up, down=%down, up_scales=%up.scales, down_scales=%down.scales, up_zeros=none, down_zeros=none,"
        ' up_global_scale=none, down_global_scale=none, up_bias=none, down_bias=none, format="fp8",'
        ' up_block=[1, 16], down_block=[1, 6], activation="silu", gated=false)'
    ]
    assert left == []


def test_experts_of_which_one_weight_is_not_quantised() -> None:
    before = chosen(experts("up", 6, 16), 'cast(read("down", [2, 16, 6]), bfloat16)')

    after, left = kept(before)

    assert after == before
    assert left == [Dequantised("up", "precast.experts takes weights of different formats")]


def at_load(name: str, rows: int, columns: int) -> str:
    """The recipe of a weight that gets a scale for each row while it is read."""
    stored, block = f'read("{name}", [{rows}, {columns}])', f"block=[1, {columns}]"
    made = ", ".join(f"quantise({part}, {stored}, {block})" for part in ("values", "scales"))
    return f"dequantise(fp8, {made}, {block}, zeros=none, groups=none, zero_offset=0)"


def settled(recipe: str) -> tuple[Graph, list[Dequantised | Unrounded]]:
    """The graph of a linear layer of such a weight after the pass, from which on it is right, and what stays."""
    left: list[Dequantised | Unrounded] = []
    after = keep_quantised(graph({"w": f"[6, 16] = cast({recipe}, bfloat16)"}, LINEAR), left)
    assert not verify(after)
    return after, left


STORED = 'read("w", [16, 6])'


@pytest.mark.parametrize(
    ("recipe", "values", "scales"),
    [
        (at_load("w", 6, 16), 'quantise(values, read("w", [6, 16]), block=[1, 16])',
         'quantise(scales, read("w", [6, 16]), block=[1, 16])'),
        (f"transpose({at_load('w', 16, 6)}, 0, 1)", f"transpose(quantise(values, {STORED}, block=[16, 1]), 0, 1)",
         f"transpose(quantise(scales, {STORED}, block=[16, 1]), 0, 1)"),
    ],
)  # fmt: skip
def test_outputs_get_a_scale_each_also_where_they_are_columns_of_what_is_stored(
    recipe: str, values: str, scales: str
) -> None:
    after, left = settled(recipe)

    assert {param.name: format_recipe(param.recipe) for param in after.params} == {"w": values, "w.scales": scales}
    assert [format_step(step) for step in after.main] == [
        "%y: bfloat16[1, T, 6] = precast.quantised_linear@1(input=%x, weight=%w, scales=%w.scales,"
        ' format="fp8", block=[1, 16])'
    ]
    assert left == []


def test_inputs_never_get_a_scale_each() -> None:
    """Of two matrices with their inputs side by side each row has two scales."""
    recipe = f"concat([{at_load('a', 6, 5)}, {at_load('b', 6, 11)}], dim=1)"
    stored = 'concat([read("a", [6, 5]), read("b", [6, 11])], dim=1)'

    after, left = settled(recipe)

    assert left == [Dequantised("w", "its outputs are neither the rows nor the columns of what is stored")]
    assert [format_recipe(param.recipe) for param in after.params] == [f"cast({stored}, bfloat16)"]


def test_nothing_is_said_of_the_inputs_of_what_is_read_as_it_is_stored() -> None:
    left: list[Dequantised | Unrounded] = []
    before = graph(
        {"w": f"[16, 16] = cast({at_load('w', 16, 16)}, bfloat16)", "head": "[16, 16] = tie(%w)"},
        "%y = aten.linear.default(input=%x, weight=%w) %z = aten.linear.default(input=%y, weight=%head) return z=%z",
    )

    keep_quantised(before, left, roundings={"w": Rounding("fp8_token")})

    assert left == [Dequantised("w", "another param is tied to it")]


def test_a_graph_without_quantised_weights_is_left_alone() -> None:
    before = graph(
        {"w": '[6, 16] = read("w", [6, 16], bfloat16)'}, "%y = aten.linear.default(input=%x, weight=%w) return y=%y"
    )

    assert kept(before) == (before, [])
    assert format_graph(kept(before)[0]) == format_graph(before)
