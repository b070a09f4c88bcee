"""Small graphs written by hand, for tests of the artifact's language.

`tiny_graph` is a whole decoder in miniature: an embedding, calls of one block (norm, fused qkv, rotary, paged
attention, residual), a norm, and a head over the wanted rows that is tied to the embedding.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

from graph_parts import ints, node, value

from precast.ir.artifact import Bundle, write_bundle
from precast.ir.encoding import FORMAT
from precast.ir.graph.schema import (
    Apply,
    Block,
    CachePlan,
    Call,
    Cast,
    Concat,
    Const,
    DtypeArg,
    Expr,
    Graph,
    Group,
    Node,
    PagedInputs,
    PagedSpec,
    Param,
    Pool,
    Read,
    Ref,
    Slot,
    Symbol,
    TensorType,
    Tie,
)
from precast.ir.manifest import Checkpoint, Manifest, ModelInfo, PassRecord

HIDDEN, HEADS, KV_HEADS, HEAD, VOCAB, PAGE = 16, 4, 2, 4, 32, 8
QKV = (HEADS + 2 * KV_HEADS) * HEAD
PAGES: tuple[Expr, ...] = ("P_main", PAGE, KV_HEADS, HEAD)


# B + 1, in the normal form of precast.ir.graph.symbols
BOUNDS: Expr = Apply("add", (1, "B"))

METADATA = (
    value("cu_seqlens", BOUNDS, dtype="int32"),
    value("kv_lens", "B", dtype="int32"),
    value("page_indices_full", "N_full", dtype="int32"),
    value("page_indptr_full", BOUNDS, dtype="int32"),
    value("page_start_full", "B", dtype="int32"),
    value("slot_mapping_full", "T", dtype="int64"),
)


def _slice(source: str, name: str, start: int, end: int) -> Node:
    return node(
        "aten.slice.Tensor",
        value(name, 1, "T", end - start),
        self=Ref(source),
        dim=Const(2),
        start=Const(start),
        end=Const(end),
    )


def _heads(source: str, name: str, heads: int) -> Node:
    return node(
        "aten.reshape.default", value(name, 1, "T", heads, HEAD), self=Ref(source), shape=ints(1, "T", heads, HEAD)
    )


def _rotate(source: str, name: str, heads: int) -> Node:
    return node(
        "precast.rotary",
        value(name, 1, "T", heads, HEAD),
        x=Ref(source),
        cos=Ref("cos"),
        sin=Ref("sin"),
        interleaved=Const(False),
    )


def _norm(source: str, weight: str, name: str) -> Node:
    return node(
        "precast.rms_norm",
        value(name, 1, "T", HIDDEN),
        x=Ref(source),
        weight=Ref(weight),
        eps=Const(1e-6),
        cast_before_scale=Const(True),
    )


def decoder_block() -> Block:
    """One layer: x [1, T, 16] -> y [1, T, 16], writing and reading its pages of keys and values."""
    query, key = HEADS * HEAD, KV_HEADS * HEAD
    return Block(
        name="layer",
        inputs=(
            value("x", 1, "T", HIDDEN),
            value("cos", 1, "T", HEAD // 2),
            value("sin", 1, "T", HEAD // 2),
            *METADATA,
        ),
        params=(value("norm", HIDDEN), value("qkv", QKV, HIDDEN), value("out", HIDDEN, HEADS * HEAD)),
        caches=(value("k_cache", *PAGES), value("v_cache", *PAGES)),
        nodes=(
            _norm("x", "norm", "normed"),
            node("aten.linear.default", value("fused", 1, "T", QKV), input=Ref("normed"), weight=Ref("qkv")),
            _slice("fused", "q_flat", 0, query),
            _slice("fused", "k_flat", query, query + key),
            _slice("fused", "v_flat", query + key, QKV),
            _heads("q_flat", "q_plain", HEADS),
            _heads("k_flat", "k_plain", KV_HEADS),
            _heads("v_flat", "v", KV_HEADS),
            _rotate("q_plain", "q", HEADS),
            _rotate("k_plain", "k", KV_HEADS),
            node(
                "precast.write_kv",
                k=Ref("k"),
                v=Ref("v"),
                k_cache=Ref("k_cache"),
                v_cache=Ref("v_cache"),
                slot_mapping=Ref("slot_mapping_full"),
            ),
            node(
                "precast.paged_attention",
                value("attended", 1, "T", HEADS, HEAD),
                q=Ref("q"),
                k_cache=Ref("k_cache"),
                v_cache=Ref("v_cache"),
                sinks=Const(None),
                cu_seqlens=Ref("cu_seqlens"),
                kv_lens=Ref("kv_lens"),
                page_indices=Ref("page_indices_full"),
                page_indptr=Ref("page_indptr_full"),
                page_start=Ref("page_start_full"),
                scale=Const(0.5),
            ),
            node(
                "aten.reshape.default",
                value("flat", 1, "T", HEADS * HEAD),
                self=Ref("attended"),
                shape=ints(1, "T", HEADS * HEAD),
            ),
            node("aten.linear.default", value("projected", 1, "T", HIDDEN), input=Ref("flat"), weight=Ref("out")),
            node("aten.add.Tensor", value("y", 1, "T", HIDDEN), self=Ref("x"), other=Ref("projected")),
        ),
        outputs=("y",),
    )


def _layer_params(layer: int) -> tuple[Param, ...]:
    stored = f"model.layers.{layer}."
    parts = tuple(
        Read(f"{stored}self_attn.{part}_proj.weight", (heads * HEAD, HIDDEN))
        for part, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS))
    )
    out = Read(f"{stored}self_attn.o_proj.weight", (HIDDEN, HEADS * HEAD))
    norm = Read(f"{stored}input_layernorm.weight", (HIDDEN,))
    return (
        Param(f"layers.{layer}.norm", TensorType("bfloat16", (HIDDEN,)), Cast(norm, "bfloat16")),
        Param(f"layers.{layer}.qkv", TensorType("bfloat16", (QKV, HIDDEN)), Cast(Concat(parts, 0), "bfloat16")),
        Param(f"layers.{layer}.out", TensorType("bfloat16", (HIDDEN, HEADS * HEAD)), Cast(out, "bfloat16")),
    )


def _layer_call(layer: int) -> Call:
    bound = {
        "x": f"h{layer}",
        "cos": "cos",
        "sin": "sin",
        "norm": f"layers.{layer}.norm",
        "qkv": f"layers.{layer}.qkv",
        "out": f"layers.{layer}.out",
        "k_cache": f"layers.{layer}.k",
        "v_cache": f"layers.{layer}.v",
    }
    return Call("layer", bound | {item.name: item.name for item in METADATA}, (value(f"h{layer + 1}", 1, "T", HIDDEN),))


def _main(num_layers: int) -> tuple[Node | Call, ...]:
    table = (1, "T", HEAD // 2)
    return (
        node(
            "precast.rotary_tables",
            value("cos", *table),
            value("sin", *table),
            positions=Ref("positions"),
            inv_freq=Ref("inv_freq"),
            scale=Const(1.0),
            dtype=DtypeArg("bfloat16"),
        ),
        node("precast.embedding", value("h0", 1, "T", HIDDEN), ids=Ref("input_ids"), weight=Ref("embed")),
        *(_layer_call(layer) for layer in range(num_layers)),
        _norm(f"h{num_layers}", "norm", "last"),
        node("precast.gather_rows", value("wanted", 1, "R", HIDDEN), x=Ref("last"), rows=Ref("logit_rows")),
        node("aten.linear.default", value("logits", 1, "R", VOCAB), input=Ref("wanted"), weight=Ref("head")),
    )


def tiny_graph(num_layers: int = 2) -> Graph:
    """A decoder of `num_layers` calls of one block, hidden size 16, 4 query and 2 kv heads of 4, vocabulary 32."""
    slots = tuple(
        Slot(f"layers.{i}", (value(f"layers.{i}.k", *PAGES), value(f"layers.{i}.v", *PAGES))) for i in range(num_layers)
    )
    group = Group(
        name="full",
        pool="main",
        spec=PagedSpec(KV_HEADS, HEAD, HEAD, "bfloat16", PAGE),
        inputs=PagedInputs("page_indices_full", "page_indptr_full", "page_start_full", "slot_mapping_full"),
        slots=slots,
    )
    embed = TensorType("bfloat16", (VOCAB, HIDDEN))
    norm = Read("model.norm.weight", (HIDDEN,))
    return Graph(
        symbols=(Symbol("T", 1), Symbol("B", 1), Symbol("R", 1), Symbol("N_full"), Symbol("P_main")),
        inputs=(
            value("input_ids", 1, "T", dtype="int64"),
            value("positions", 1, "T", dtype="int64"),
            *METADATA,
            value("logit_rows", "R", dtype="int64"),
        ),
        params=(
            Param("embed", embed, Cast(Read("model.embed_tokens.weight", (VOCAB, HIDDEN)), "bfloat16")),
            *(param for layer in range(num_layers) for param in _layer_params(layer)),
            Param("norm", TensorType("bfloat16", (HIDDEN,)), Cast(norm, "bfloat16")),
            Param("head", embed, Tie("embed")),
        ),
        constants=(value("inv_freq", HEAD // 2, dtype="float32"),),
        blocks=(decoder_block(),),
        main=_main(num_layers),
        outputs={"logits": "logits"},
        caches=CachePlan(pools=(Pool("main", "P_main"),), groups=(group,)),
    )


def tiny_manifest(num_layers: int = 2) -> Manifest:
    """The manifest of `tiny_graph(num_layers)`, before its blobs are known."""
    used = (
        "aten.add.Tensor",
        "aten.linear.default",
        "aten.reshape.default",
        "aten.slice.Tensor",
        "precast.embedding",
        "precast.gather_rows",
        "precast.paged_attention",
        "precast.rms_norm",
        "precast.rotary",
        "precast.rotary_tables",
        "precast.write_kv",
    )
    return Manifest(
        format=FORMAT,
        model=ModelInfo("TinyForCausalLM", "tiny", "bfloat16", VOCAB, 64, num_layers, 1, eos_token_ids=(2,)),
        ops=dict.fromkeys(used, 1),
        checkpoint=Checkpoint(optional_prefixes=("model.",), ignored=("*.rotary_emb.inv_freq",)),
        passes=(PassRecord("fuse_qkv", "match", 1, True, {"aten.linear.default": -4}),),
        built_with={"precast": "0.1.0"},
        blobs=(),
    )


def tiny_constants() -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """The constants that `tiny_graph` declares."""
    return {"inv_freq": ("float32", (HEAD // 2,), struct.pack("<2f", 1.0, 0.01))}


TINY_FILES = {"chat_template.jinja": b"{{ messages }}", "tokenizer.json": b'{"version": "1.0"}'}


def write_tiny(path: Path, num_layers: int = 2, **changes: Any) -> Bundle:
    """Write the bundle of `tiny_graph(num_layers)`; `changes` replace arguments of `write_bundle`."""
    content = {
        "manifest_without_blobs": tiny_manifest(num_layers),
        "graph": tiny_graph(num_layers),
        "constants": tiny_constants(),
        "files": TINY_FILES,
        "provenance": {"host": "example"},
    }
    return write_bundle(path, **(content | changes))
