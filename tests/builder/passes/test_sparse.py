"""Sparse attention: the selection of keys and the attention to these, and the caches of both."""

from __future__ import annotations

import dataclasses

import pytest
from fx_text import SmallGraph, apply, assert_rewrites, read_graph, write_graph

from precast.builder import pipeline
from precast.builder.capture.routing import trace_ops
from precast.builder.graph.context import Options
from precast.builder.passes.cache.insert_caches import insert_caches
from precast.builder.passes.match.sparse_attention import match_sparse_attention
from precast.ir.errors import BuildError
from precast.ir.graph.schema import IndexSpec, LatentSpec, PagedSpec

SELECTION = """
input_ids: input(int64, 1, T)
cu_seqlens: input(int32, B1)
iq: input({dtype}, 1, T, 6, 4)
ik: input({dtype}, 1, T, 4)
iw: input(float32, 1, T, 6)
q: input({dtype}, 1, T, 4, 5)
latent: input({dtype}, 1, T, 5)
k_rope: input({dtype}, 1, T, 2)
weight: param({dtype}, 28, 5)
sinks: param({dtype}, 4)
size = aten.sym_size.int(ik, 1)
mask = precast_trace.causal_mask(cu_seqlens, size, window={window}, chunk=None, dtype={dtype})
seen = aten.select.int(mask, 1, 0)
turned = aten.transpose.int(ik, 2, 1)
{wide}
{scaled}
heads = aten.relu({products})
rows = aten.unsqueeze(iw, 2)
sums = aten.matmul({weighted})
scores = aten.squeeze.dim(sums, 2)
hidden = {combine}(scores, seen)
best, places = aten.topk(hidden, 2{largest})
selected = aten.to.dtype(places, int32)
"""
ATTENTION = """
one_head = aten.reshape(latent, [1, 1, -1, 5])
product = aten.linear(one_head, weight)
parts = aten.reshape(product, [1, -1, 4, 7])
heads_first = aten.transpose.int(parts, 1, 2)
k_nope = aten.slice.Tensor(heads_first, 3, 0, 3, 1)
values = aten.slice.Tensor(heads_first, 3, 3, 7, 1)
rope = aten.reshape(k_rope, [1, 1, -1, 2])
shared = aten.expand(rope, [1, 4, -1, 2])
keys = aten.cat([k_nope, shared], 3)
k = aten.transpose.int(keys, 1, 2)
v = aten.transpose.int(values, 1, 2)
"""
FLOAT32 = "keys_row = aten.unsqueeze(turned, 1)\nproducts = aten.matmul(iq, keys_row)"
WIDENED = """
q_wide = aten.to.dtype(iq, float32)
k_wide = aten.to.dtype(turned, float32)
keys_row = aten.unsqueeze(k_wide, 1)
products = aten.matmul(q_wide, keys_row)
"""
USUAL = {
    "dtype": "float32", "window": "None", "wide": FLOAT32, "scaled": "scaled = aten.mul.Tensor(products, 0.5)",
    "products": "scaled", "weighted": "rows, heads", "combine": "aten.add.Tensor", "largest": "",
}  # fmt: skip
SPARSE = "y = precast_trace.sparse_attention(q, k, v, selected, None, cu_seqlens, scale=0.25)\nreturn y"


@pytest.fixture(autouse=True)
def traced_ops() -> None:
    trace_ops()


def traced(attention: str = SPARSE, latents: str = ATTENTION, **changes: str) -> str:
    return SELECTION.format(**{**USUAL, **changes}) + latents + attention


def test_a_selection_and_attention_to_it() -> None:
    assert_rewrites(
        match_sparse_attention,
        traced(),
        """
        v0 = precast.select_keys(iq, ik, iw, cu_seqlens, scale=0.5, count=2)
        v1 = precast.sparse_latent_attention(q, latent, k_rope, weight, v0, None, cu_seqlens, value_size=4, scale=0.25)
        return v1
        """,
    )


def test_sinks_stay() -> None:
    text = apply(match_sparse_attention, traced(SPARSE.replace("None", "sinks"))).text

    assert "precast.sparse_latent_attention(q, latent, k_rope, weight, v0, sinks, cu_seqlens" in text


def test_a_scale_of_one_is_not_written() -> None:
    text = apply(match_sparse_attention, traced(scaled="", products="products")).text

    assert "precast.select_keys(iq, ik, iw, cu_seqlens, scale=1.0, count=2)" in text


def test_half_precision_is_widened_by_the_op() -> None:
    text = apply(match_sparse_attention, traced(dtype="bfloat16", wide=WIDENED)).text

    assert "precast.select_keys(iq, ik, iw, cu_seqlens, scale=0.5, count=2)" in text
    assert "aten.to.dtype" not in text


TWO_LAYERS = """
y = precast_trace.sparse_attention(q, k, v, selected, None, cu_seqlens, scale=0.25)
z = precast_trace.sparse_attention(q, k, v, selected, None, cu_seqlens, scale=0.5)
return y, z
"""


def test_layers_share_a_selection() -> None:
    text = apply(match_sparse_attention, traced(TWO_LAYERS)).text

    assert text.count("precast.select_keys") == 1
    assert text.count("weight, v0, None, cu_seqlens") == 2


@pytest.mark.parametrize(
    "differs",
    [
        pytest.param({"window": "3"}, id="a window"),
        pytest.param({"combine": "aten.sub.Tensor"}, id="the mask taken away"),
        pytest.param({"largest": ", -1, False"}, id="the smallest"),
        pytest.param({"scaled": "scaled = aten.mul.Tensor(products, products)"}, id="a product by itself"),
        pytest.param({"products": "scaled", "weighted": "rows, products"}, id="heads below zero"),
    ],
)
def test_near_a_selection(differs: dict[str, str]) -> None:
    refused(traced(**differs), "selects keys in a way that precast doesn't know")


def test_keys_of_each_head_are_refused() -> None:
    plain = "k = aten.cat([q, q], 2)\nk = aten.slice.Tensor(k, 2, 0, 4, 1)\nv = aten.mul.Tensor(q, 2.0)\n"

    refused(traced(latents=plain), "attends to some keys of each head, expected latents that all heads share")


def refused(text: str, message: str) -> None:
    source = read_graph(text)
    with pytest.raises(BuildError, match=message) as error:
        pipeline.run(source.graph, source.ctx, (dataclasses.replace(match_sparse_attention, requires=()),))
    assert error.value.code == "feature-unsupported"
    assert error.value.fix is not None
    assert "max_seq_len of at most 2" in error.value.fix


# --- caches ------------------------------------------------------------------------------------------------------


def planned(options: Options) -> SmallGraph:
    source = read_graph(traced(TWO_LAYERS), options=options)
    steps = tuple(dataclasses.replace(step, requires=()) for step in (match_sparse_attention, insert_caches))
    assert all(record.changed for record in pipeline.run(source.graph, source.ctx, steps))
    return source


def test_keys_of_the_index_have_a_cache_of_their_own() -> None:
    source = planned(Options("float32", 64, 16))

    lines = write_graph(source.graph, source.ctx).splitlines()
    assert lines[:2] == [
        "v0 = precast.write_index_keys(ik, cache_indexers_0_index, slot_mapping_index)",
        "v1 = precast.paged_select_keys(iq, cache_indexers_0_index, iw, cu_seqlens, kv_lens, page_indices_index, "
        "page_indptr_index, page_start_index, scale=0.5, count=2)",
    ]
    assert lines[3].startswith(
        "v3 = precast.paged_sparse_latent_attention(q, cache_layers_0_latent, weight, v1, None, cu_seqlens, kv_lens, "
        "page_indices_latent_full,"
    )
    groups = source.ctx.caches.groups
    assert [(group.name, [slot.name for slot in group.slots], group.spec) for group in groups] == [
        ("index", ["indexers.0"], IndexSpec(4, "float32", 16)),
        ("latent_full", ["layers.0"], LatentSpec(5, 2, "float32", 16)),
    ]
    (tensor,) = groups[0].slots[0].tensors
    assert (tensor.name, tensor.type.shape) == ("indexers.0.index", ("P_pool0", 16, 4))


def test_keys_of_the_index_are_of_the_caches_dtype() -> None:
    groups = planned(Options("float32", 64, 16, kv_dtype="float8_e4m3fn")).ctx.caches.groups

    assert [group.spec.dtype for group in groups] == ["float8_e4m3fn", "float8_e4m3fn"]


BLOCKS = """
input_ids: input(int64, 1, T)
cu_seqlens: input(int32, B1)
iq: input(float32, 1, T, 2, 4)
ik: input(float32, 1, T, 4)
q: input(float32, 1, T, 4, 8)
k: input(float32, 1, T, 2, 8)
v: input(float32, 1, T, 2, 8)
selected = precast.select_blocks(iq, ik, cu_seqlens, count=2, block_size=3, local=1)
y = precast.block_sparse_attention(q, k, v, selected, cu_seqlens, scale=0.5, block_size=3)
z = precast.attention(q, v, k, None, cu_seqlens, scale=0.5)
return y, z
"""


def test_blocks_are_selected_and_attended_to_in_caches() -> None:
    """Keys and values lie in one group with those of attention to all keys."""
    source = read_graph(BLOCKS)
    pipeline.run(source.graph, source.ctx, (dataclasses.replace(insert_caches, requires=()),))

    assert write_graph(source.graph, source.ctx).splitlines()[:4] == [
        "v0 = precast.write_index_keys(ik, cache_indexers_0_index, slot_mapping_index)",
        "v1 = precast.paged_select_blocks(iq, cache_indexers_0_index, cu_seqlens, kv_lens, page_indices_index, "
        "page_indptr_index, page_start_index, count=2, block_size=3, local=1)",
        "v2 = precast.write_kv(k, v, cache_layers_0_k, cache_layers_0_v, slot_mapping_full)",
        "v3 = precast.paged_block_sparse_attention(q, cache_layers_0_k, cache_layers_0_v, v1, cu_seqlens, kv_lens, "
        "page_indices_full, page_indptr_full, page_start_full, scale=0.5, block_size=3)",
    ]
    assert [(group.name, [slot.name for slot in group.slots], group.spec) for group in source.ctx.caches.groups] == [
        ("index", ["indexers.0"], IndexSpec(4, "float32", 16)),
        ("full", ["layers.0", "layers.1"], PagedSpec(2, 8, 8, "float32", 16)),
    ]
