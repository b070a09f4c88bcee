"""The text form: what it looks like, that it comes back exactly, and where it says that it doesn't parse."""

from __future__ import annotations

import math
from dataclasses import dataclass

import msgspec
import pytest
from graph_lexer import TextError
from graph_text import parse_graph
from hypothesis import given
from hypothesis import strategies as st

from examples import tiny_graph
from precast.ir import limits
from precast.ir.graph import text
from precast.ir.graph.schema import (
    Apply,
    Block,
    CachePlan,
    Call,
    CapturePlan,
    Cast,
    Concat,
    Const,
    Dequantise,
    Dim,
    DtypeArg,
    Each,
    EntrySpec,
    Graph,
    Group,
    IndexSpec,
    Items,
    LatentSpec,
    Node,
    PagedInputs,
    PagedSpec,
    Param,
    Pool,
    Quantise,
    Read,
    Recipe,
    Ref,
    Repack,
    Repeat,
    Reshape,
    Scale,
    ShardPlan,
    ShardRow,
    Slice,
    Slot,
    Stack,
    StateGroup,
    StateSpec,
    Symbol,
    TensorType,
    Tie,
    Transpose,
    Value,
    World,
)
from precast.ir.ops import table as ops

SMALL = """\
symbols {
  T: 1..
  tp: 1..8
}
inputs {
  %x: float32[1, T, 16]
}
params {
  %w: bfloat16[floordiv(16, tp)] = cast(slice(read("norm.weight", [16]), dim=0, start=0, length=floordiv(16, tp)), bfloat16)
  %fused: float32[5, 3] = concat([read("a", [2, 3], float32), transpose(read("b", [3, 3], float32), 0, 1)], dim=0)
  %experts: float32[2, 3, 5] = reshape(stack([read("e.0", [15], float32), read("e.1", [15], float32)], dim=0), [2, 3, 5])
  %tied: float32[5, 3] = tie(%fused)
}
constants {
  %inv_freq: float32[8]
  %zero: float32[]
}
pool main(pages=P)
group local(pool=main, spec=paged(num_kv_heads=floordiv(8, tp), head_size=4, value_size=6, dtype=float16, page_size=16, window=32), page_indices=%a, page_indptr=%b, page_start=%c, slot_mapping=%d) {
  slot layers.0(%layers.0.k: float16[P, 16, floordiv(8, tp), 4], %layers.0.v: float16[P, 16, floordiv(8, tp), 6])
}
capture(sizes=[1, 2, 8, 6])
block layer {
  inputs {
    %x: float32[1, T, 16]
  }
  params {
    %w: bfloat16[16]
  }
  caches {
    %k: float16[P, 16, 8, 4]
  }
  %y: float32[1, T, 16] = precast.rms_norm@1(x=%x, weight=%w, eps=1e-06, cast_before_scale=true)
  %a: int64[T], %b: float32[(T * 2), (T + -1)] = "two"@3(bounds=[0, T, (T + 1)], dtype=int64, kind="gelu", none=none, size=dim(3))
  return %y, %a
}
main {
  %h: float32[1, T, 16], %n: int64[T] = call layer(x=%x, w=%w, k=%layers.0.k)
  my.op@1(far=inf, near=-inf, size=min(T, 7))
  return count=%n, hidden=%h
}
"""  # noqa: E501


def test_this_is_what_it_looks_like() -> None:
    assert text.format_graph(parse_graph(SMALL)) == SMALL


@pytest.mark.parametrize("num_layers", [0, 1, 3])
def test_a_decoder_comes_back_exactly(num_layers: int) -> None:
    graph = tiny_graph(num_layers)
    assert encoded(parse_graph(text.format_graph(graph))) == encoded(graph)


def test_empty_sections_are_left_out() -> None:
    assert text.format_graph(parse_graph("symbols {} main { return }")) == "main {\n  return\n}\n"


def encoded(graph: Graph) -> bytes:
    """Equality that tells 1, 1.0 and True apart."""
    # Empty plans are written like any others: msgspec leaves out the very default, and no equal one.
    capture, shards = CapturePlan(graph.capture.sizes), ShardPlan(graph.shards.worlds, graph.shards.rows)
    graph = msgspec.structs.replace(graph, capture=capture, shards=shards)
    return msgspec.msgpack.encode(graph, order="sorted")


def test_equal_graphs_have_one_text() -> None:
    args = {"eps": Const(1e-6), "weight": Const(None), "x": Ref("x"), "cast_before_scale": Const(True)}
    call = {"b": "y", "a": "x"}
    node = Node("precast.rms_norm", args, ())
    assert text.format_step(node) == text.format_step(Node("precast.rms_norm", dict(reversed(args.items())), ()))
    assert text.format_step(Call("layer", call, ())) == "call layer(a=%x, b=%y)"
    assert text.format_step(Call("layer", call, ()), ["b", "a"]) == "call layer(b=%y, a=%x)"


def test_arguments_are_printed_in_the_order_of_the_signature() -> None:
    node = Node("aten.slice.Tensor", {"end": Dim("T"), "start": Const(0), "self": Ref("x"), "dim": Const(1)}, ())
    assert text.format_step(node) == "aten.slice.Tensor@1(self=%x, dim=1, start=0, end=T)"


@pytest.mark.parametrize(
    ("expr", "expected"),
    [
        (3, "3"),
        ("T", "T"),
        (Apply("add", ("B", 1)), "(B + 1)"),
        (Apply("mul", ("T", Apply("floordiv", ("H", "tp")), 2)), "(T * floordiv(H, tp) * 2)"),
        (Apply("min", ("T", 7, "B")), "min(T, 7, B)"),
        (Apply("add", ("T",)), "add(T)"),
    ],
)
def test_sizes_read_as_written(expr: int | str | Apply, expected: str) -> None:
    assert text.format_type(TensorType("bfloat16", (expr,))) == f"bfloat16[{expected}]"


@pytest.mark.parametrize(
    ("arg", "expected"),
    [
        (Const(1), "1"),
        (Const(1.0), "1.0"),
        (Const(True), "true"),
        (Const(None), "none"),
        (Const("none"), '"none"'),
        (Const(1e300), "1e+300"),
        (Const(-math.inf), "-inf"),
        (Dim("T"), "T"),
        (Dim(3), "dim(3)"),
        (Dim("float32"), "dim(float32)"),
        (Dim("true"), "dim(true)"),
        (Dim("two words"), 'dim("two words")'),
        (DtypeArg("float32"), "float32"),
        (Items((Ref("a"), Const(2), Dim("T"))), "[%a, 2, T]"),
        (Ref("a b"), '%"a b"'),
        (Items(()), "[]"),
    ],
)
def test_arguments_of_different_kinds_read_differently(
    arg: Ref | Const | Dim | DtypeArg | Items, expected: str
) -> None:
    step = Node("my.op", {"x": arg}, ())
    assert text.format_step(step) == f"my.op@1(x={expected})"
    (found,) = parse_graph(f"main {{ my.op@1(x={expected}) return }}").main
    assert encoded_step(found) == encoded_step(step)


def encoded_step(step: Node | Call) -> bytes:
    return msgspec.msgpack.encode(step, order="sorted")


def test_nan_comes_back_for_the_verifier_to_refuse() -> None:
    (found,) = parse_graph("main { my.op(x=nan) return }").main
    assert isinstance(found, Node)
    assert isinstance(found.args["x"], Const)
    assert math.isnan(found.args["x"].value)  # type: ignore[arg-type]


# --- generated graphs ------------------------------------------------------------------------------------------

NAMES = st.one_of(
    st.sampled_from(
        ["x", "y.0", "_w", "T", "min", "dim", "float32", "none", "inf", "call", "return", "inputs", "main"]
    ),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=6),
)
INTS = st.integers(-(2**63), 2**63 - 1)
DTYPES = st.sampled_from(["bool", "int8", "uint8", "int32", "int64", "float8_e4m3fn", "float16", "bfloat16", "float64"])
EXPRS = st.recursive(
    st.one_of(INTS, NAMES),
    lambda inner: st.builds(
        Apply,
        st.sampled_from(["add", "mul", "floordiv", "mod", "min", "max", "ceildiv"]),
        st.lists(inner, max_size=3).map(tuple),
    ),
    max_leaves=5,
)


def tuples(items: st.SearchStrategy, size: int = 2) -> st.SearchStrategy:
    return st.lists(items, max_size=size).map(tuple)


TYPES = st.builds(TensorType, DTYPES, tuples(EXPRS, 3))
VALUES = tuples(st.builds(Value, NAMES, TYPES))
ITEMS = st.one_of(
    st.builds(Ref, NAMES),
    st.builds(Const, st.one_of(st.none(), st.booleans(), INTS, st.floats(allow_nan=False), NAMES)),
    st.builds(Dim, EXPRS),
)
ARGS = st.one_of(ITEMS, st.builds(DtypeArg, DTYPES), st.builds(Items, tuples(ITEMS, 3)))
OPS = st.one_of(NAMES, st.sampled_from([name for name, _ in ops.names()]))
NODES = st.builds(Node, OPS, st.dictionaries(NAMES, ARGS, max_size=3), VALUES, st.integers(0, 3))
CALLS = st.builds(Call, NAMES, st.dictionaries(NAMES, NAMES, max_size=3), VALUES)
BLOCKS = st.builds(Block, NAMES, VALUES, VALUES, VALUES, tuples(NODES), tuples(NAMES))
RECIPES = st.recursive(
    st.one_of(
        st.builds(Read, NAMES, tuples(INTS, 3), st.one_of(st.none(), DTYPES)),
        st.builds(Tie, NAMES),
        st.builds(Scale, tuples(NAMES), st.floats(allow_nan=False, allow_infinity=False)),
    ),
    lambda inner: st.one_of(
        st.builds(Slice, inner, INTS, EXPRS, EXPRS),
        st.builds(Concat, tuples(inner, 3), INTS),
        st.builds(Stack, tuples(inner, 3), INTS),
        st.builds(Transpose, inner, INTS, INTS),
        st.builds(Reshape, inner, tuples(EXPRS)),
        st.builds(Cast, inner, DTYPES),
        st.builds(Each, inner, INTS, INTS, INTS),
        st.builds(Quantise, inner, st.sampled_from(("values", "scales")), st.tuples(INTS, INTS)),
        st.builds(Repeat, inner, INTS, EXPRS),
        st.builds(Repack, inner, st.sampled_from(("values", "zeros", "groups"))),
        st.builds(
            Dequantise,
            inner,
            inner,
            st.sampled_from(("fp8", "mxfp4", "awq", "gptq", "nvfp4", "packed4", "int8")),
            st.one_of(st.none(), st.tuples(INTS, INTS)),
            st.one_of(st.none(), inner),
            st.one_of(st.none(), inner),
            INTS,
            st.one_of(st.none(), inner),
            st.one_of(st.none(), inner),
        ),
    ),
    max_leaves=5,
)
SPECS = st.one_of(
    st.builds(PagedSpec, EXPRS, INTS, INTS, DTYPES, INTS, st.none() | INTS, st.none() | INTS),
    st.builds(LatentSpec, INTS, INTS, DTYPES, INTS, st.none() | INTS),
    st.builds(IndexSpec, INTS, DTYPES, INTS),
    st.builds(EntrySpec, INTS, DTYPES, INTS, INTS, st.none() | INTS),
)
GROUPS = st.builds(
    Group,
    NAMES,
    NAMES,
    SPECS,
    st.builds(PagedInputs, NAMES, NAMES, NAMES, NAMES),
    tuples(st.builds(Slot, NAMES, VALUES)),
)
STATES = st.builds(
    StateGroup,
    NAMES,
    NAMES,
    st.builds(StateSpec, st.sampled_from(["state", "conv"]), tuples(EXPRS, 3), DTYPES),
    NAMES,
    tuples(st.builds(Slot, NAMES, VALUES)),
)
ROWS = st.builds(
    ShardRow,
    NAMES,
    NAMES,
    st.sampled_from(["column", "row", "vocab", "expert", "replicated"]),
    tuples(NAMES),
    tuples(NAMES),
    INTS,
    st.sampled_from(["", "all_reduce", "all_gather"]),
    NAMES,
    NAMES,
)
GRAPHS = st.builds(
    Graph,
    symbols=tuples(st.builds(Symbol, NAMES, INTS, st.one_of(st.none(), INTS))),
    inputs=VALUES,
    params=tuples(st.builds(Param, NAMES, TYPES, RECIPES)),
    constants=VALUES,
    blocks=tuples(BLOCKS),
    main=tuples(st.one_of(NODES, CALLS), 3),
    outputs=st.dictionaries(NAMES, NAMES, max_size=2),
    caches=st.builds(CachePlan, tuples(st.builds(Pool, NAMES, NAMES)), tuples(GROUPS), tuples(STATES)),
    capture=st.builds(CapturePlan, tuples(INTS, 4)),
    shards=st.builds(ShardPlan, tuples(st.builds(World, INTS, tuples(INTS))), tuples(ROWS)),
)


@given(GRAPHS)
def test_any_graph_comes_back_exactly(graph: Graph) -> None:
    found = parse_graph(text.format_graph(graph))
    assert encoded(found) == encoded(graph)
    assert text.format_graph(found) == text.format_graph(graph)


@given(RECIPES)
def test_any_recipe_comes_back_exactly(recipe: Recipe) -> None:
    source = f"params {{ %p: int32[1] = {text.format_recipe(recipe)} }} main {{ return }}"

    assert parse_graph(source).params[0].recipe == recipe


@given(st.text(alphabet=' \n%"\\x1.-:=,@+*()[]{}#mainreturn', max_size=40))
def test_any_text_parses_or_is_refused_with_its_place(source: str) -> None:
    refusal = refuse(source)
    assert refusal is None or (refusal.where)


def refuse(source: str) -> TextError | None:
    try:
        parse_graph(source)
    except TextError as error:
        return error
    return None


# --- what may be left out --------------------------------------------------------------------------------------


def test_versions_and_types_may_be_left_out() -> None:
    short = """
        symbols { T: 1.. }                                  # a comment
        inputs { %x: bfloat16[1, T, 8] }
        params { %w: bfloat16[6, 8] = read("w", [6, 8], bfloat16) }
        block half {
            inputs { %x: bfloat16[1, T, 6] }
            %y = precast.gated_activation(x=%x, kind="silu")
            return %y
        }
        main {
            %wide = aten.linear.default(input=%x, weight=%w)
            %narrow = call half(x=%wide)
            return out=%narrow
        }
    """
    graph = parse_graph(short)
    assert [text.format_step(step) for step in graph.main] == [
        "%wide: bfloat16[1, T, 6] = aten.linear.default@1(input=%x, weight=%w)",
        "%narrow: bfloat16[1, T, 3] = call half(x=%wide)",
    ]
    assert text.format_value(graph.blocks[0].nodes[0].outputs[0]) == "%y: bfloat16[1, T, 3]"


def test_a_type_that_is_given_stays_even_if_it_is_wrong() -> None:
    graph = parse_graph("inputs { %x: float32[3] } main { %y: int8[4] = aten.neg.default(self=%x) return y=%y }")
    assert graph.main[0].outputs == (Value("y", TensorType("int8", (4,))),)


def test_one_of_two_types_may_be_left_out() -> None:
    source = """
        inputs { %p: int64[1, 3] %f: float32[4] }
        main { %c, %s: int8[1] = precast.rotary_tables(positions=%p, inv_freq=%f, scale=1.0, dtype=float16) return }
    """
    assert [text.format_type(value.type) for value in parse_graph(source).main[0].outputs] == [
        "float16[1, 3, 4]",
        "int8[1]",
    ]


# --- refusals --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bad:
    source: str
    line: int
    column: int
    message: str


REFUSED = [
    Bad("", 1, 1, "expected the section 'main', found the end of the text"),
    Bad("main {\n  return\n", 3, 1, "expected a name or '}', found the end of the text"),
    Bad("mian { }", 1, 1, "expected 'symbols' or 'inputs' .* or 'main', found 'mian'"),
    Bad("main { return }\nmain { return }", 2, 1, "a second section 'main'"),
    Bad("symbols { T 1.. }", 1, 13, "expected ':', found '1'"),
    Bad("symbols { T: 1.5 }", 1, 14, r"expected an integer, found '1\.5'"),
    Bad("symbols { T: 1 }", 1, 16, r"expected '\.\.', found '}'"),
    Bad("inputs { x: float32[] }", 1, 10, r"expected a tensor \(%name\) or '}', found 'x'"),
    Bad("inputs { %x: float31[] }", 1, 14, "expected 'bool' or .*, found 'float31'"),
    Bad("inputs {\n  %x: float32[1 2]\n}", 2, 17, "expected ',' or ']', found '2'"),
    Bad("inputs { %x: float32[1 }", 1, 24, "expected ',' or ']', found '}'"),
    Bad("inputs { %x: float32[(T)] }", 1, 24, r"expected '\+' or '\*', found '\)'"),
    Bad("inputs { %x: float32[(T + B * 2)] }", 1, 29, r"expected '\+' or '\)', found '\*'"),
    Bad("inputs { %x: float32[gcd(T, 2)] }", 1, 22, "expected 'add' or .*, found 'gcd'"),
    Bad("inputs { %x: float32[1.5] }", 1, 22, r"expected a size, found '1\.5'"),
    Bad("inputs { %x: float32[T - 1] }", 1, 24, "unexpected '-'"),
    Bad('inputs { %"x: float32[] }', 1, 10, "unexpected '%'"),
    Bad('params { %w: float32[] = read("w, [])\n}', 1, 31, "a string that does not end on its line"),
    Bad('params { %w: float32[] = read("\\q", []) }', 1, 31, "not a string as JSON writes it"),
    Bad('params { %w: float32[] = read("w") }', 1, 34, r"expected ',', found '\)'"),
    Bad("params { %w: float32[] = read(w, []) }", 1, 31, "expected the name of a checkpoint tensor, in quotes"),
    Bad('params { %w: float32[] = load("w", []) }', 1, 26, "expected 'read' or 'slice' .*, found 'load'"),
    Bad('params { %w: float32[] = slice(read("w", []), start=0) }', 1, 47, "expected 'dim', found 'start'"),
    Bad("params { %w: float32[] }", 1, 24, "expected '=', found '}'"),
    Bad("slabs(1024)", 1, 7, "expected 'bytes', found '1024'"),
    Bad("slabs(bytes=1)\nslabs(bytes=1)", 2, 1, "a second section 'slabs'"),
    Bad("capture([1])", 1, 9, r"expected 'sizes', found '\['"),
    Bad("capture(sizes=1)", 1, 15, r"expected '\[', found '1'"),
    Bad("capture(sizes=[1])\ncapture(sizes=[1])", 2, 1, "a second section 'capture'"),
    Bad("pool main(pages=P, slab=2)", 1, 20, "expected 'pages_per_slab'"),
    Bad("pool main(P)", 1, 11, "expected 'pages', found 'P'"),
    Bad(
        "group g(pool=main, spec=dense())",
        1,
        25,
        "expected 'paged' or 'latent' or 'index' or 'entries' or 'state' or 'conv', found 'dense'",
    ),
    Bad("group g(pool=main, spec=state)", 1, 30, r"expected '\(', found '\)'"),
    Bad("group g(pool=main, spec=state(dtype=int8))", 1, 31, "expected 'shape', found 'dtype'"),
    Bad("group g(pool=main, spec=conv(shape=[2], dtype=int8), page_indices=%a)", 1, 54, "expected 'slot_ids'"),
    Bad("block b { %y: float32[] = call b() return }", 1, 32, r"expected '\(', found 'b'"),
    Bad(
        "main { %y: float32[] aten.neg.default(self=%x) return }",
        1,
        22,
        "expected ',' or '=', found 'aten.neg.default'",
    ),
    Bad("main { aten.neg.default(%x) return }", 1, 25, r"expected a name or '\)', found '%x'"),
    Bad("main { aten.neg.default(self=) return }", 1, 30, r"expected a size, found '\)'"),
    Bad("main { my.op(a=1, a=2) return }", 1, 19, "'a' is given twice"),
    Bad("main { my.op(a=[1, [2]]) return }", 1, 20, r"expected a size, found '\['"),
    Bad("main { my.op(a=[float32]) return }", 1, 17, "expected a tensor, a literal or a size, found 'float32'"),
    Bad("main { my.op@x() return }", 1, 14, "expected an integer, found 'x'"),
    Bad("main { return a=%x, a=%y }", 1, 21, "'a' is given twice"),
    Bad("main { return a=x }", 1, 17, r"expected a tensor \(%name\), found 'x'"),
    Bad("main { %y = my.op() return }", 1, 13, "a result has no type, and there is no op my.op@1"),
    Bad("main { %y = aten.neg.default@2(self=%x) return }", 1, 13, "there is no op aten.neg.default@2"),
    Bad("main { %y = aten.neg.default(self=%x) return }", 1, 13, "does not give it: %x is not defined"),
    Bad("main { %y = aten.neg.default(x=1) return }", 1, 13, "self: required, not given; x: not an argument"),
    Bad("main { %y = call b() return }", 1, 18, "there is no block 'b' further up"),
    Bad("block b { return } main { %y = call b() return }", 1, 37, "expected 0 results, found 1"),
    Bad(f"main {{ my.op(a={'7' * 2000}) return }}", 1, 16, "a number of 2000 digits"),
    Bad("main { return } ?", 1, 17, r"unexpected '\?'"),
]


@pytest.mark.parametrize("bad", REFUSED, ids=lambda bad: bad.source[:40])
def test_a_syntax_error_says_where_it_is(bad: Bad) -> None:
    with pytest.raises(TextError, match=bad.message) as error:
        parse_graph(bad.source)
    assert error.value.where == f"line {bad.line}, column {bad.column}"


@pytest.mark.parametrize(
    "source",
    [
        "inputs { %x: float32[" + "(" * 5000,
        "inputs { %x: float32[" + "min(" * 5000,
        "params { %x: float32[] = " + "cast(" * 5000,
        "params { %x: float32[] = " + "concat([" * 5000,
    ],
)
def test_nesting_ends_at_a_limit(source: str) -> None:
    with pytest.raises(TextError, match=f"nested more than {limits.MAX_NESTING} levels deep"):
        parse_graph(source)
