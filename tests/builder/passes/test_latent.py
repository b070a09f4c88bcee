"""Latent attention: the writes that its keys are made with, its rotary embeddings, the attention itself, its cache."""

from __future__ import annotations

import dataclasses

import pytest
from fx_text import SmallGraph, apply, assert_leaves, assert_rewrites, read_graph, write_graph

from precast.builder import pipeline
from precast.builder.graph.context import Options
from precast.builder.graph.nodes import eliminate_dead_code
from precast.builder.lower.lower import lower
from precast.builder.passes.cache.insert_caches import insert_caches
from precast.builder.passes.graph_pass import Pass
from precast.builder.passes.match.latent_attention import match_latent_attention
from precast.builder.passes.match.rotary import match_paired_rotary
from precast.builder.passes.match.rotary_tables import match_complex_rotary
from precast.builder.passes.normalise.writes import assemble_copies
from precast.ir.graph.schema import LatentSpec, Pool


def run(step: Pass, source: SmallGraph) -> bool:
    """Whether the pass changes the graph. Nothing is computed."""
    (record,) = pipeline.run(source.graph, source.ctx, (dataclasses.replace(step, requires=()),))
    return record.changed


# --- writes ------------------------------------------------------------------------------------------------------

WRITES = """
a: input(float32, 1, 7, 3)
b: input({dtype}, 1, 7, {size})
new = aten.new_empty.default(a, [1, 7, 5])
first = aten.slice.Tensor(new, {dim}, 0, 3)
second = aten.slice.Tensor(new, {dim}, {start}, {end}, {step})
{before}
d = aten.copy_.default({one})
{between}
e = aten.copy_.default({other})
y = aten.neg(new)
return {result}
"""
COVERED = {
    "dtype": "float32", "size": "2", "dim": "2", "start": "3", "end": "5", "step": "1", "before": "", "one": "first, a",
    "between": "", "other": "second, b", "result": "y",
}  # fmt: skip


@pytest.mark.parametrize(
    "differs",
    [
        pytest.param({}, id="in order"),
        pytest.param({"one": "second, b", "other": "first, a"}, id="last part first"),
        pytest.param({"dim": "-1", "start": "-2", "end": "9223372036854775807"}, id="counted from the end"),
    ],
)
def test_parts_become_the_whole(differs: dict[str, str]) -> None:
    assert_rewrites(
        assemble_copies,
        WRITES.format(**{**COVERED, **differs}),
        """
        v0 = aten.cat.default([a, b], 2)
        v1 = aten.neg.default(v0)
        return v1
        """,
    )


@pytest.mark.parametrize(
    "differs",
    [
        pytest.param({"start": "2", "end": "4"}, id="overlapping parts"),
        pytest.param({"start": "4", "size": "1"}, id="a gap"),
        pytest.param({"end": "4", "size": "1"}, id="an open end"),
        pytest.param({"step": "2", "size": "1"}, id="every second element"),
        pytest.param({"size": "1"}, id="a part that is repeated"),
        pytest.param({"dtype": "float64"}, id="a part that is converted"),
        pytest.param({"before": "x = aten.neg(new)", "result": "x, y"}, id="read before it is written"),
        pytest.param({"between": "x = aten.neg(new)", "result": "x, y"}, id="read before all is written"),
        pytest.param({"between": "aten.neg_.default(a)"}, id="a part changes in between"),
        pytest.param({"other": "first, a"}, id="one part twice"),
        pytest.param({"result": "d, y"}, id="a part has a use of its own"),
    ],
)
def test_writes_that_stay(differs: dict[str, str]) -> None:
    source = read_graph(WRITES.format(**{**COVERED, **differs}))
    eliminate_dead_code(source.graph, source.ctx)
    before = write_graph(source.graph, source.ctx)

    assert not run(assemble_copies, source)
    assert write_graph(source.graph, source.ctx) == before


# --- rotary ------------------------------------------------------------------------------------------------------

PAIRED = """
x: input(float32, 1, {shape})
cos: input(float32, 1, T, {pairs})
sin: input(float32, 1, T, {pairs})
wide_cos = aten.cat([cos, cos], 2)
wide_sin = aten.cat([sin, sin], 2)
part_cos = aten.slice.Tensor(wide_cos, 2, 0, {end}, 1)
part_sin = aten.slice.Tensor(wide_sin, 2, 0, {end}, 1)
c = aten.unsqueeze(part_cos, {heads_dim})
s = aten.unsqueeze(part_sin, {heads_dim})
a = aten.slice.Tensor(x, 3, 0, 6, 2)
b = aten.slice.Tensor(x, 3, 1, 6, 2)
ac = aten.mul.Tensor(a, c)
bs = aten.mul.Tensor(b, s)
bc = aten.mul.Tensor(b, c)
as_ = aten.mul.Tensor({last}, s)
first = aten.{minus}.Tensor(ac, bs)
second = aten.add.Tensor(bc, as_)
y = aten.cat([{parts}], 3)
return y
"""
TURNED = {
    "shape": "4, T, 6", "pairs": "3", "end": "3", "heads_dim": "1", "last": "a", "minus": "sub",
    "parts": "first, second",
}  # fmt: skip


def test_pairs_that_are_taken_apart() -> None:
    assert_rewrites(
        match_paired_rotary,
        PAIRED.format(**TURNED),
        """
        v0 = aten.slice.Tensor(x, 3, 0, 6, 2)
        v1 = aten.slice.Tensor(x, 3, 1, 6, 2)
        v2 = aten.cat.default([v0, v1], 3)
        v3 = aten.transpose.int(v2, 1, 2)
        v4 = precast.rotary(v3, cos, sin, interleaved=False)
        v5 = aten.transpose.int(v4, 1, 2)
        return v5
        """,
    )


def test_heads_behind_tokens_are_not_exchanged() -> None:
    text = apply(match_paired_rotary, PAIRED.format(**{**TURNED, "shape": "T, 4, 6", "heads_dim": "2"})).text

    assert "precast.rotary(v2, cos, sin, interleaved=False)" in text
    assert "transpose" not in text


@pytest.mark.parametrize(
    "differs",
    [
        pytest.param({"minus": "add"}, id="two sums"),
        pytest.param({"last": "b"}, id="one half twice"),
        pytest.param({"parts": "second, first"}, id="halves exchanged"),
        pytest.param({"pairs": "1", "end": "1"}, id="one angle for all pairs"),
        pytest.param({"pairs": "2", "end": "3"}, id="angles of another pair"),
        pytest.param({"shape": "1, T, 6", "heads_dim": "2"}, id="tables of tokens over heads"),
    ],
)
def test_near_a_paired_rotary(differs: dict[str, str]) -> None:
    assert_leaves(match_paired_rotary, PAIRED.format(**{**TURNED, **differs}))


# A number of tokens that is known: torch's fake function of `polar` makes a number of a symbol.
COMPLEX = """
positions: input({positions}, 1, {rows})
inv_freq: constant(float32, {inv_freq})
x: input({dtype}, 1, {shape})
{angles}
ones = aten.{ones}(angles)
turns = aten.polar(ones, angles)
{scaled}
x32 = aten.to.dtype(x, float32)
pairs = aten.reshape(x32, {split})
numbers = aten.view_as_complex(pairs)
row = aten.unsqueeze(turns, {heads_dim})
turned = aten.mul.Tensor(numbers, row)
real = aten.view_as_real(turned)
flat = aten.reshape(real, {flat})
y = aten.to.dtype(flat, {dtype})
return y
"""
PRODUCTS = """
column = aten.unsqueeze(positions, 2)
wide = aten.to.dtype(column, float32)
angles = aten.mul.Tensor(wide, inv_freq)
"""
OUTER = """
row = aten.unsqueeze(positions, 1)
wide = aten.to.dtype(row, float32)
outer = aten.matmul(inv_freq, wide)
angles = aten.transpose.int(outer, 1, 2)
"""
POLAR = {
    "angles": PRODUCTS, "positions": "int64", "rows": "7", "inv_freq": "[1.0, 0.5, 0.25]", "dtype": "bfloat16",
    "shape": "4, 7, 6", "ones": "ones_like", "scaled": "", "split": "[1, 4, -1, 3, 2]", "heads_dim": "1",
    "flat": "[1, 4, -1, 6]",
}  # fmt: skip


def test_products_of_complex_numbers() -> None:
    assert_rewrites(
        match_complex_rotary,
        COMPLEX.format(**POLAR),
        """
        v0 = precast.rotary_tables(positions, inv_freq, scale=1.0, dtype=float32)
        v1 = v0[0]
        v2 = v0[1]
        v3 = aten.transpose.int(x, 1, 2)
        v4 = precast.rotary(v3, v1, v2, interleaved=True)
        v5 = aten.transpose.int(v4, 1, 2)
        return v5
        """,
    )


def test_complex_heads_behind_tokens_with_a_scale() -> None:
    differs = {
        "shape": "7, 4, 6", "split": "[1, -1, 4, 3, 2]", "heads_dim": "2", "flat": "[1, -1, 4, 6]",
        "scaled": "turns = aten.mul.Tensor(turns, 1.5)",
    }  # fmt: skip

    text = apply(match_complex_rotary, COMPLEX.format(**{**POLAR, **differs})).text

    assert "scale=1.5, dtype=float32" in text
    assert "precast.rotary(x, v1, v2, interleaved=True)" in text
    assert "transpose" not in text


def test_complex_heads_turned_by_an_outer_product() -> None:
    differs = {"angles": OUTER, "inv_freq": "[[[1.0], [0.5], [0.25]]]"}

    text = apply(match_complex_rotary, COMPLEX.format(**{**POLAR, **differs})).text

    assert "v0 = aten.reshape.default(inv_freq, [-1])" in text
    assert "v1 = precast.rotary_tables(positions, v0, scale=1.0, dtype=float32)" in text
    assert "polar" not in text


@pytest.mark.parametrize(
    "differs",
    [
        pytest.param({"angles": OUTER, "inv_freq": "[[[1.0]]]"}, id="one angle for all pairs, in a column"),
        pytest.param({"ones": "exp"}, id="another length"),
        pytest.param({"positions": "float32"}, id="positions that are no integers"),
        pytest.param({"inv_freq": "[1.0]"}, id="one angle for all pairs"),
        pytest.param({"rows": "1"}, id="one position for all tokens"),
        pytest.param({"scaled": "turns = aten.conj_physical(turns)"}, id="turned the other way"),
        pytest.param({"flat": "[1, 2, -1, 12]"}, id="heads put together"),
    ],
)
def test_near_a_complex_rotary(differs: dict[str, str]) -> None:
    assert_leaves(match_complex_rotary, COMPLEX.format(**{**POLAR, **differs}))


# --- attention ---------------------------------------------------------------------------------------------------

LATENT = """
cu_seqlens: input(int32, B1)
q: input(float32, 1, T, 4, {q_size})
{inputs}
latent: input(float32, {latent}, 5)
k_rope: input(float32, 1, T, 2)
weight: param(float32, {rows}, 5)
bias: param(float32, {rows})
one_head = aten.reshape(latent, [{one_head}, 5])
product = aten.linear(one_head, weight{bias})
heads = aten.reshape(product, [1, -1, {kv_heads}, {size}])
heads_first = aten.transpose.int(heads, 1, 2)
k_nope = aten.slice.Tensor(heads_first, 3, {k_start}, {k_end}, {step})
values = aten.slice.Tensor(heads_first, 3, {v_start}, {v_end}, 1)
rope = aten.reshape(k_rope, [1, 1, -1, 2])
shared = aten.expand(rope, [1, {kv_heads}, -1, 2])
{between}
keys = aten.cat([{parts}], 3)
k = aten.transpose.int(keys, 1, 2)
v = aten.transpose.int(values, 1, 2)
y = precast.attention(q, k, v, {sinks}, cu_seqlens, scale=0.5{keywords})
return y
"""
USUAL = {
    "q_size": "5", "inputs": "", "latent": "1, T", "one_head": "1, 1, -1", "rows": "28", "bias": "", "kv_heads": "4",
    "size": "7", "k_start": "0", "k_end": "3", "step": "1", "v_start": "3", "v_end": "7", "between": "",
    "parts": "k_nope, shared", "sinks": "None", "keywords": "",
}  # fmt: skip


def test_keys_and_values_of_a_latent() -> None:
    assert_rewrites(
        match_latent_attention,
        LATENT.format(**USUAL),
        """
        v0 = precast.latent_attention(q, latent, k_rope, weight, cu_seqlens, value_size=4, scale=0.5)
        return v0
        """,
    )


def test_the_window_stays() -> None:
    text = apply(match_latent_attention, LATENT.format(**{**USUAL, "keywords": ", window=3, soft_cap=None"})).text

    assert "weight, cu_seqlens, value_size=4, scale=0.5, window=3)" in text


def test_the_shared_part_in_front_moves_to_the_end() -> None:
    assert_rewrites(
        match_latent_attention,
        LATENT.format(**{**USUAL, "parts": "shared, k_nope"}),
        """
        v0 = aten.slice.Tensor(q, 3, 2, 5, 1)
        v1 = aten.slice.Tensor(q, 3, 0, 2, 1)
        v2 = aten.cat.default([v0, v1], 3)
        v3 = precast.latent_attention(v2, latent, k_rope, weight, cu_seqlens, value_size=4, scale=0.5)
        return v3
        """,
    )


QUERIES = """
first: input(float32, 1, 4, T, {first})
second: input(float32, 1, 4, T, {second})
both = aten.cat([first, second], 3)
q = aten.transpose.int(both, 1, 2)
"""


@pytest.mark.parametrize(
    ("sizes", "parts", "expected"),
    [((3, 2), "k_nope, shared", "[v0, v1]"), ((2, 3), "shared, k_nope", "[v1, v0]")],
    ids=["shared last", "shared first"],
)
def test_queries_of_two_parts_are_exchanged_before_they_are_put_together(
    sizes: tuple[int, int], parts: str, expected: str
) -> None:
    queries = QUERIES.format(first=sizes[0], second=sizes[1])
    source = LATENT.replace("q: input(float32, 1, T, 4, {q_size})", queries)

    text = apply(match_latent_attention, source.format(**{**USUAL, "parts": parts})).text

    assert text.splitlines() == [
        "v0 = aten.transpose.int(first, 1, 2)",
        "v1 = aten.transpose.int(second, 1, 2)",
        f"v2 = aten.cat.default({expected}, 3)",
        "v3 = precast.latent_attention(v2, latent, k_rope, weight, cu_seqlens, value_size=4, scale=0.5)",
        "return v3",
    ]


def test_queries_of_other_parts_are_taken_as_they_are() -> None:
    queries = QUERIES.format(first=1, second=4)
    source = LATENT.replace("q: input(float32, 1, T, 4, {q_size})", queries).format(**USUAL)

    assert "precast.latent_attention(v1, latent" in apply(match_latent_attention, source).text


HEADS_LAST = """
cu_seqlens: input(int32, B1)
q: input(float32, 1, T, 4, 5)
latent: input(float32, 1, T, 5)
k_rope: input(float32, 1, T, 1, 2)
weight: param(float32, 28, 5)
product = aten.linear(latent, weight)
heads = aten.reshape(product, [1, -1, 4, 7])
k_nope = aten.slice.Tensor(heads, 3, 0, 3, 1)
v = aten.slice.Tensor(heads, 3, 3, 7, 1)
shared = aten.expand(k_rope, [1, -1, 4, 2])
k = aten.cat([k_nope, shared], 3)
y = precast.attention(q, k, v, None, cu_seqlens, scale=0.5)
return y
"""


def test_heads_behind_tokens() -> None:
    assert_rewrites(
        match_latent_attention,
        HEADS_LAST,
        """
        v0 = aten.reshape.default(k_rope, [1, -1, 2])
        v1 = precast.latent_attention(q, latent, v0, weight, cu_seqlens, value_size=4, scale=0.5)
        return v1
        """,
    )


def test_shared_keys_are_found_behind_an_exchange() -> None:
    copies = "first = aten.expand(k_rope, [1, 4, -1, 2])\nshared = aten.transpose.int(first, 1, 2)"
    text = HEADS_LAST.replace("1, T, 1, 2", "1, 1, T, 2").replace("shared = aten.expand(k_rope, [1, -1, 4, 2])", copies)

    assert "precast.latent_attention(q, latent, v0, weight" in apply(match_latent_attention, text).text


def test_one_head_needs_no_copies() -> None:
    text = HEADS_LAST.replace("1, T, 4, 5", "1, T, 1, 5").replace("28", "7").replace("-1, 4, 7", "-1, 1, 7")
    text = text.replace("shared = aten.expand(k_rope, [1, -1, 4, 2])\n", "").replace("shared", "k_rope")

    assert "precast.latent_attention(q, latent, v0, weight" in apply(match_latent_attention, text).text


@pytest.mark.parametrize(
    "differs",
    [
        pytest.param({"bias": ", bias"}, id="a bias"),
        pytest.param({"inputs": "sinks: input(float32, 4)", "sinks": "sinks"}, id="sinks"),
        pytest.param({"keywords": ", soft_cap=5.0"}, id="a soft cap"),
        pytest.param({"keywords": ", chunk=3"}, id="chunks"),
        pytest.param({"k_start": "4", "k_end": "7", "v_start": "0", "v_end": "4"}, id="values in front of keys"),
        pytest.param({"size": "8", "rows": "32", "v_start": "4", "v_end": "8"}, id="something between key and value"),
        pytest.param({"size": "8", "rows": "32"}, id="something behind the value"),
        pytest.param({"size": "8", "rows": "32", "k_start": "1", "k_end": "4", "v_start": "4", "v_end": "8"},
                     id="something in front of the key"),
        pytest.param({"v_start": "2"}, id="the value begins in the key"),
        pytest.param({"step": "2", "q_size": "4"}, id="every second element"),
        pytest.param({"kv_heads": "2", "rows": "14"}, id="heads of a group share a key"),
        pytest.param({"between": "shared = aten.mul.Tensor(shared, 2.0)"}, id="a shared part that is no copy"),
        pytest.param({"between": "k_nope = aten.mul.Tensor(k_nope, 2.0)"}, id="a key that is scaled"),
        pytest.param({"between": "values = aten.mul.Tensor(values, 2.0)"}, id="a value that is scaled"),
        pytest.param({"parts": "k_nope, shared, shared", "q_size": "7"}, id="three parts"),
        pytest.param({"latent": "1, T, 2", "one_head": "1, -1, 2", "rows": "14"}, id="latents of two groups of heads"),
        pytest.param(
            {"inputs": "other: param(float32, 28, 5)", "between": """
other_product = aten.linear(one_head, other)
other_heads = aten.reshape(other_product, [1, -1, 4, 7])
other_first = aten.transpose.int(other_heads, 1, 2)
values = aten.slice.Tensor(other_first, 3, 3, 7, 1)
"""},
            id="values of another product",
        ),
    ],
)  # fmt: skip
def test_near_latent_attention(differs: dict[str, str]) -> None:
    assert_leaves(match_latent_attention, LATENT.format(**{**USUAL, **differs}))


# --- caches ------------------------------------------------------------------------------------------------------

LAYER = """
q{n} = aten.reshape(wide, [1, -1, 4, 5])
y{n} = precast.latent_attention(q{n}, latent{size}, k_rope, weight{size}, cu_seqlens, value_size=4, scale=0.5{window})
"""
INPUTS = """
input_ids: input(int64, 1, T)
cu_seqlens: input(int32, B1)
wide: input(bfloat16, 1, T, 20)
latent6: input(bfloat16, 1, T, 6)
latent8: input(bfloat16, 1, T, 8)
k_rope: input(bfloat16, 1, T, 2)
weight6: param(bfloat16, 28, 6)
weight8: param(bfloat16, 28, 8)
"""


def layer(n: int, *, size: int = 6, window: int | None = None) -> str:
    return LAYER.format(n=n, size=size, window="" if window is None else f", window={window}")


def planned(*layers: str) -> SmallGraph:
    returned = ", ".join(f"y{n}" for n in range(len(layers)))
    source = read_graph(INPUTS + "".join(layers) + f"return {returned}", options=Options("bfloat16", 64, 16))
    assert run(insert_caches, source)
    return source


def test_latent_attention_writes_and_reads_its_cache() -> None:
    source = planned(layer(0, window=8))

    assert write_graph(source.graph, source.ctx).splitlines() == [
        "v0 = aten.reshape.default(wide, [1, -1, 4, 5])",
        "v1 = precast.write_latent(latent6, k_rope, cache_layers_0_latent, slot_mapping_latent_window8)",
        "v2 = precast.paged_latent_attention(v0, cache_layers_0_latent, weight6, cu_seqlens, kv_lens, "
        "page_indices_latent_window8, page_indptr_latent_window8, page_start_latent_window8, value_size=4, scale=0.5, "
        "window=8)",
        "return v2",
    ]


def test_the_plan_of_latents() -> None:
    plan = planned(layer(0), layer(1, size=8), layer(2), layer(3, window=8)).ctx.caches

    assert [(group.name, group.pool, [slot.name for slot in group.slots]) for group in plan.groups] == [
        ("latent_full_6x2", "pool0", ["layers.0"]),  # layer 2 has the latents of layer 0, and reads its cache
        ("latent_full_8x2", "pool1", ["layers.1"]),
        ("latent_window8", "pool2", ["layers.3"]),
    ]
    assert plan.pools == tuple(Pool(f"pool{i}", f"P_pool{i}") for i in range(3))
    assert plan.groups[0].spec == LatentSpec(6, 2, "bfloat16", 16)
    (tensor,) = plan.groups[0].slots[0].tensors
    assert (tensor.name, tensor.type.dtype, tensor.type.shape) == ("layers.0.latent", "bfloat16", ("P_pool0", 16, 8))


def test_latents_beside_keys_and_values() -> None:
    plain = """
k1 = aten.reshape(wide, [1, -1, 2, 10])
q1 = aten.reshape(wide, [1, -1, 2, 10])
y1 = precast.attention(q1, k1, k1, None, cu_seqlens, scale=0.5)
"""
    source = planned(layer(0), plain)
    names = {(group.name, group.pool, group.slots[0].name) for group in source.ctx.caches.groups}

    assert names == {("latent_full", "pool0", "layers.0"), ("full", "pool1", "layers.1")}
    assert lower(source.graph, source.ctx).caches == source.ctx.caches
