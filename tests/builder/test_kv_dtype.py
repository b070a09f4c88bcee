"""The option `kv_dtype`: which caches it makes of 8 bits, which it leaves alone, and what it is refused for."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import families
import pytest
import torch
from fx_text import SmallGraph, read_graph, write_graph

from precast.builder import pipeline, snapshot
from precast.builder.build import build
from precast.builder.graph.context import KvScales, Options, tensor
from precast.builder.lower.lower import lower
from precast.builder.passes.cache.insert_caches import insert_caches, insert_states
from precast.builder.passes.plan.plan_pages import plan_pages
from precast.builder.source.source import open_source
from precast.ir.errors import BuildError
from precast.ir.graph.schema import Graph, Group, Node, Scale, StateGroup
from precast.ir.memory import caches
from precast.ir.verify.verifier import verify

FLOAT8 = Options("bfloat16", 64, kv_dtype="float8_e4m3fn")
FROM_CONFIG = Options("bfloat16", 64, kv_dtype="float8_e4m3fn", kv_from_config=True)
BFLOAT16 = Options("bfloat16", 64)
INPUTS = """
input_ids: input(int64, 1, T)
cu_seqlens: input(int32, B1)
wide: input(bfloat16, 1, T, 20)
narrow: input(bfloat16, 1, T, 10)
latent: input(bfloat16, 1, T, 6)
k_rope: input(bfloat16, 1, T, 2)
weight: param(bfloat16, 28, 6)
taps: param(bfloat16, 20, 4)
q = aten.reshape(wide, [1, -1, 4, 5])
k = aten.reshape(narrow, [1, -1, 2, 5])
"""
PLAIN = "full = precast.attention(q, k, k, None, cu_seqlens, scale=0.5)\n"
WINDOW = "near = precast.attention(q, q, q, None, cu_seqlens, scale=0.5, window=8)\n"
LATENT = "shared = precast.latent_attention(q, latent, k_rope, weight, cu_seqlens, value_size=4, scale=0.5)\n"
CONV = "conv = precast.causal_conv(wide, taps, None, cu_seqlens, activation='silu')\n"
ALL = "return full, near, shared, conv"


def planned(text: str, options: Options) -> SmallGraph:
    source = read_graph(INPUTS + text, options=options)
    steps = [dataclasses.replace(step, requires=()) for step in (insert_states, insert_caches, plan_pages)]
    pipeline.run(source.graph, source.ctx, tuple(steps))
    return source


# --- the pass ----------------------------------------------------------------------------------------------------


def test_pages_are_of_8_bits_and_states_stay() -> None:
    source = planned(PLAIN + WINDOW + LATENT + CONV + ALL, FLOAT8)

    found = {group.name: group.spec.dtype for group in caches.groups(source.ctx.caches)}
    assert found == {
        "full": "float8_e4m3fn", "window8": "float8_e4m3fn", "latent_full": "float8_e4m3fn", "conv_20x3": "bfloat16",
    }  # fmt: skip
    types = {value.name: value.type.dtype for value in caches.tensors(source.ctx.caches)}
    assert types == {
        **dict.fromkeys(("layers.0.k", "layers.0.v", "layers.1.k", "layers.1.v", "layers.2.latent"), "float8_e4m3fn"),
        "conv_20x3.0.conv": "bfloat16",
    }
    placeholders = {
        source.ctx.cache_tensors[node.name].name: tensor(node).dtype
        for node in source.graph.nodes
        if node.name in source.ctx.cache_tensors
    }
    assert placeholders == {name: getattr(torch, kind) for name, kind in types.items()}


def test_the_graph_is_that_of_a_wide_cache_but_for_the_dtype() -> None:
    """No op is added, none computes in 8 bits, and results have the dtype that they had."""
    narrow, wide = (planned(PLAIN + LATENT + "return full, shared", options) for options in (FLOAT8, BFLOAT16))

    assert write_graph(narrow.graph, narrow.ctx) == write_graph(wide.graph, wide.ctx)
    graphs = [lower(each.graph, each.ctx) for each in (narrow, wide)]
    assert verify(graphs[0]) == ()
    results = [{value.name: value.type for node in graph.main for value in node.outputs} for graph in graphs]
    assert results[0] == results[1]
    assert "float8_e4m3fn" not in {kind.dtype for kind in results[0].values()}


def test_a_token_takes_half_the_bytes() -> None:
    narrow, wide = (
        planned(PLAIN + LATENT + "return full, shared", options).ctx.caches for options in (FLOAT8, BFLOAT16)
    )

    for small, large in zip(narrow.groups, wide.groups, strict=True):
        assert caches.token_bytes(small) * 2 == caches.token_bytes(large)
    assert [caches.token_bytes(group) for group in narrow.groups] == [2 * 2 * 5, 6 + 2]


def test_a_config_says_it_of_keys_and_values_alone() -> None:
    """Latents, for which checkpoints have no scales, and models that keep only states are as they would be without."""
    source = planned(PLAIN + LATENT + "return full, shared", FROM_CONFIG)

    assert {group.name: group.spec.dtype for group in source.ctx.caches.groups} == {
        "full": "float8_e4m3fn", "latent_full": "bfloat16",
    }  # fmt: skip
    planned(CONV + "return conv", FROM_CONFIG)


# --- scales ------------------------------------------------------------------------------------------------------

SCALES = {"layers.7.attn": KvScales(("b.k_scale",), ("b.v_scale",)), "layers.3.attn": KvScales(("a.k",), ("a.v",))}


def scaled(text: str, options: Options, path: str = "layers.3.attn") -> SmallGraph:
    """After `insert_caches` on a graph whose attention was traced in the layer `path`."""
    source = read_graph(INPUTS + text, options=options)
    source.ctx.scales = SCALES
    for node in source.graph.nodes:
        node.meta["nn_module_stack"] = {"0": ("model", ""), "1": (f"model.{path}", ""), "2": ("model.inner", "")}
    pipeline.run(source.graph, source.ctx, (dataclasses.replace(insert_caches, requires=()),))
    return source


def test_each_layer_that_writes_has_scales_and_who_shares_its_keys_reads_by_them() -> None:
    source = scaled(PLAIN + PLAIN.replace("full", "again") + "return full, again", FLOAT8)

    params = {info.name: info.recipe for info in source.ctx.params.values() if isinstance(info.recipe, Scale)}
    assert params == {"layers.3.attn.k_scale": Scale(("a.k",)), "layers.3.attn.v_scale": Scale(("a.v",))}
    graph = lower(source.graph, source.ctx)
    assert verify(graph) == ()
    using = [node.op for node in nodes_of(graph) if {"k_scale", "v_scale"} <= node.args.keys()]
    assert using == ["precast.write_kv", "precast.paged_attention", "precast.paged_attention"]


@pytest.mark.parametrize(("text", "options"), [(PLAIN + "return full", BFLOAT16), (LATENT + "return shared", FLOAT8)])
def test_what_has_no_scales(text: str, options: Options) -> None:
    """A cache of the model's dtype, and latents."""
    graph = lower(*(lambda source: (source.graph, source.ctx))(scaled(text, options)))

    assert not any("k_scale" in node.args for node in nodes_of(graph))


def test_a_layer_whose_scales_have_no_known_names_is_refused() -> None:
    with pytest.raises(BuildError, match="inner: keys and values of 8 bits, and no known names") as error:
        scaled(PLAIN + "return full", FLOAT8, path="layers.5.attn")

    assert error.value.code == "feature-unsupported"
    assert "kv_dtype model" in str(error.value.fix)


def nodes_of(graph: Graph) -> list[Node]:
    steps = [*graph.main, *(node for block in graph.blocks for node in block.nodes)]
    return [step for step in steps if isinstance(step, Node)]


@pytest.mark.parametrize(
    ("text", "kept"),
    [(CONV + "return conv", "only states, which keep their dtype"), ("y = aten.neg(wide)\nreturn y", "no caches")],
    ids=["states", "nothing"],
)
def test_a_model_without_keys_and_values_is_refused(text: str, kept: str) -> None:
    with pytest.raises(BuildError, match=kept) as error:
        planned(text, FLOAT8)

    assert error.value.code == "option-invalid"
    assert "kv_dtype" in str(error.value)
    planned(text, BFLOAT16)


# --- the build ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", ["llama", "gemma3", "deepseek_v3-dense"])
def test_a_build_with_8_bits(variant: str, tmp_path: Path) -> None:
    bundle = build(families.make_config(variant), tmp_path / "b", max_seq_len=64, kv_dtype="fp8_e4m3")

    groups = caches.groups(bundle.graph.caches)
    assert {group.spec.dtype for group in groups} == {"float8_e4m3fn"}
    assert all(isinstance(group, Group) for group in groups)
    assert bundle.manifest.model.dtype != "float8_e4m3fn"


def test_a_build_of_pages_beside_states(tmp_path: Path) -> None:
    bundle = build(families.make_config("qwen3_next"), tmp_path / "b", max_seq_len=64, kv_dtype="fp8_e4m3")

    kinds = {(type(group), group.spec.dtype) for group in caches.groups(bundle.graph.caches)}
    assert (Group, "float8_e4m3fn") in kinds
    assert {dtype for kind, dtype in kinds if kind is StateGroup} == {"float32"}
    assert {dtype for kind, dtype in kinds if kind is Group} == {"float8_e4m3fn"}


def test_a_build_of_states_alone_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="kv_dtype is given, but the model has no keys") as error:
        build(families.make_config("mamba2"), tmp_path / "b", max_seq_len=64, kv_dtype="fp8_e4m3")

    assert error.value.code == "option-invalid"
    assert error.value.fix == "leave kv_dtype out"
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize("kv_dtype", ["fp8", "fp8_e5m2", "float8_e4m3fn", "int8", "bfloat16", "", None, 8, ["a"]])
def test_a_dtype_that_is_not_known(kv_dtype: Any, tmp_path: Path) -> None:
    with pytest.raises(BuildError) as error:
        build(families.make_config("llama"), tmp_path / "b", kv_dtype=kv_dtype)

    assert error.value.code == "option-invalid"
    assert error.value.message == f"kv_dtype is {kv_dtype}, expected one of auto, model, fp8_e4m3"
    assert error.value.fix == "use kv_dtype='model', for caches of the model's dtype"
    assert not (tmp_path / "b").exists()


QUANTISED = {"quant_method": "modelopt", "quant_algo": None, "kv_cache_quant_algo": "FP8"}


@pytest.mark.parametrize(
    ("kv_dtype", "quantised", "dtype", "num_scales"),
    [
        ("auto", QUANTISED, "float8_e4m3fn", 2 * 4),
        ("fp8_e4m3", QUANTISED, "float8_e4m3fn", 2 * 4),
        ("model", QUANTISED, "float32", 0),
        ("auto", QUANTISED | {"kv_cache_quant_algo": None}, "float32", 0),
        ("fp8_e4m3", QUANTISED | {"kv_cache_quant_algo": None}, "float8_e4m3fn", 2 * 4),
        ("auto", None, "float32", 0),
        ("fp8_e4m3", None, "float8_e4m3fn", 0),
    ],
)
def test_what_counts_of_the_option_and_the_config(
    kv_dtype: str, quantised: dict[str, Any] | None, dtype: str, num_scales: int, tmp_path: Path
) -> None:
    """Layers are equal, whatever their scales."""
    config = families.make_config("llama")
    config.num_hidden_layers = 4
    if quantised:
        config.quantization_config = quantised
    bundle = build(config, tmp_path / "b", dtype="float32", max_seq_len=64, kv_dtype=kv_dtype)

    scales = [param.name for param in bundle.graph.params if isinstance(param.recipe, Scale)]
    assert {group.spec.dtype for group in caches.groups(bundle.graph.caches)} == {dtype}
    assert len(scales) == num_scales
    assert not scales or scales[0] == "model.layers.0.self_attn.k_scale"
    assert len(bundle.graph.blocks) == 2  # the first layer adds no residual


def test_scales_are_in_a_snapshot(tmp_path: Path) -> None:
    config, options = families.make_config("llama"), {"max_seq_len": 64, "snapshots": tmp_path / "snapshots"}
    config.quantization_config = QUANTISED
    first = build(config, tmp_path / "first", **options)
    again = build(config, tmp_path / "again", **options)

    assert [each.provenance["from_snapshot"] for each in (first, again)] == [False, True]
    assert again.digest == first.digest


def test_another_kv_dtype_starts_from_the_snapshot(tmp_path: Path) -> None:
    config, options = families.make_config("llama"), {"max_seq_len": 64, "snapshots": tmp_path / "snapshots"}
    wide = build(config, tmp_path / "wide", **options)
    quick = build(config, tmp_path / "quick", **options, kv_dtype="fp8_e4m3")
    again = build(config, tmp_path / "again", **options)
    fresh = build(config, tmp_path / "fresh", max_seq_len=64, kv_dtype="fp8_e4m3")

    assert [each.provenance["from_snapshot"] for each in (wide, quick, again)] == [False, True, True]
    assert quick.digest == fresh.digest
    assert wide.digest == again.digest != quick.digest


def test_the_kv_dtype_is_not_in_the_key() -> None:
    source = open_source(families.make_config("llama"))
    early, _ = pipeline.split(pipeline.passes(), "shard")

    assert snapshot.key(source, FLOAT8, early) == snapshot.key(source, BFLOAT16, early)
