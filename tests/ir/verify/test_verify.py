"""Every rule of the verifier: what it lets pass, and what it refuses. Each case is an edit of one valid graph."""

from __future__ import annotations

import re
from typing import NamedTuple, get_args

import pytest
from graph_lexer import TextError, Word, words
from graph_text import parse_graph
from hypothesis import given, settings
from hypothesis import strategies as st

from examples import tiny_graph
from precast.ir import limits
from precast.ir.errors import BundleError
from precast.ir.graph.schema import Dtype, Graph
from precast.ir.manifest import ModelInfo
from precast.ir.verify import cache_rules as verify_caches
from precast.ir.verify.verifier import RULES, Violation, check, verify

# Two groups of caches in two pools: a window on layer 0, none on layer 1, which main itself writes and reads.
BASE = """
symbols { T: 1.. B: 1.. R: 1.. N_local: 0.. N_full: 0.. P_small: 0.. P_large: 0.. tp: 1..8 }
inputs {
  %input_ids: int64[1, T]
  %cu_seqlens: int32[(B + 1)]
  %kv_lens: int32[B]
  %logit_rows: int64[R]
  %indices_local: int32[N_local] %indptr_local: int32[(1 + B)] %start_local: int32[B] %slots_local: int64[T]
  %indices_full: int32[N_full] %indptr_full: int32[(1 + B)] %start_full: int32[B] %slots_full: int64[T]
}
params {
  %embed: float32[32, 16] = cast(read("embed", [32, 16]), float32)
  %head: float32[32, 16] = tie(%embed)
  %norm: float32[16] = read("norm", [16], float32)
  %qkv: float32[32, 16] = concat([
    cast(reshape(read("q", [4, 4, 16]), [16, 16]), float32),
    cast(slice(read("kv", [24, 16]), dim=0, start=8, length=16), float32)
  ], dim=0)
}
constants { %scale: float32[] }
pool small(pages=P_small)
pool large(pages=P_large)
group local(
  pool=small,
  spec=paged(num_kv_heads=2, head_size=4, value_size=4, dtype=float32, page_size=8, window=32),
  page_indices=%indices_local, page_indptr=%indptr_local, page_start=%start_local, slot_mapping=%slots_local
) {
  slot layers.0(%layers.0.k: float32[P_small, 8, 2, 4], %layers.0.v: float32[P_small, 8, 2, 4])
}
group full(
  pool=large,
  spec=paged(num_kv_heads=2, head_size=4, value_size=4, dtype=float32, page_size=16, window=none),
  page_indices=%indices_full, page_indptr=%indptr_full, page_start=%start_full, slot_mapping=%slots_full
) {
  slot layers.1(%layers.1.k: float32[P_large, 16, 2, 4], %layers.1.v: float32[P_large, 16, 2, 4])
}
block layer {
  inputs {
    %x: float32[1, T, 16]
    %cu: int32[(B + 1)] %kv_lens: int32[B]
    %indices: int32[N_local] %indptr: int32[(B + 1)] %start: int32[B] %slots: int64[T]
  }
  params { %w: float32[16] %qkv: float32[32, 16] %scale: float32[] }
  caches { %k_cache: float32[P_small, 8, 2, 4] %v_cache: float32[P_small, 8, 2, 4] }
  %n: float32[1, T, 16] = precast.rms_norm(x=%x, weight=%w, eps=1e-06, cast_before_scale=true)
  %fused: float32[1, T, 32] = aten.linear.default(input=%n, weight=%qkv)
  %q2: float32[1, T, 16] = aten.slice.Tensor(self=%fused, dim=2, start=0, end=16)
  %k2: float32[1, T, 8] = aten.slice.Tensor(self=%fused, dim=2, start=16, end=24)
  %v2: float32[1, T, 8] = aten.slice.Tensor(self=%fused, dim=2, start=24, end=32)
  %q: float32[1, T, 4, 4] = aten.reshape.default(self=%q2, shape=[1, T, 4, 4])
  %k: float32[1, T, 2, 4] = aten.reshape.default(self=%k2, shape=[1, T, 2, 4])
  %v: float32[1, T, 2, 4] = aten.reshape.default(self=%v2, shape=[1, T, 2, 4])
  precast.write_kv(k=%k, v=%v, k_cache=%k_cache, v_cache=%v_cache, slot_mapping=%slots)
  %o: float32[1, T, 4, 4] = precast.paged_attention(q=%q, k_cache=%k_cache, v_cache=%v_cache, sinks=none,
    cu_seqlens=%cu, kv_lens=%kv_lens, page_indices=%indices, page_indptr=%indptr, page_start=%start,
    scale=0.5, window=32)
  %flat: float32[1, T, 16] = aten.reshape.default(self=%o, shape=[1, T, 16])
  %y: float32[1, T, 16] = aten.mul.Tensor(self=%flat, other=%scale)
  return %y, %k, %v
}
main {
  %h0: float32[1, T, 16] = precast.embedding(ids=%input_ids, weight=%embed)
  %h1: float32[1, T, 16], %k1: float32[1, T, 2, 4], %v1: float32[1, T, 2, 4] = call layer(
    x=%h0, cu=%cu_seqlens, kv_lens=%kv_lens, indices=%indices_local, indptr=%indptr_local, start=%start_local,
    slots=%slots_local,
    w=%norm, qkv=%qkv, scale=%scale, k_cache=%layers.0.k, v_cache=%layers.0.v)
  precast.write_kv(k=%k1, v=%v1, k_cache=%layers.1.k, v_cache=%layers.1.v, slot_mapping=%slots_full)
  %q1: float32[1, T, 4, 4] = aten.reshape.default(self=%h1, shape=[1, T, 4, 4])
  %o1: float32[1, T, 4, 4] = precast.paged_attention(q=%q1, k_cache=%layers.1.k, v_cache=%layers.1.v, sinks=none,
    cu_seqlens=%cu_seqlens, kv_lens=%kv_lens,
    page_indices=%indices_full, page_indptr=%indptr_full, page_start=%start_full,
    scale=0.5)
  %h2: float32[1, T, 16] = aten.reshape.default(self=%o1, shape=[1, T, 16])
  %last: float32[1, R, 16] = precast.gather_rows(x=%h2, rows=%logit_rows)
  %logits: float32[1, R, 32] = aten.linear.default(input=%last, weight=%head)
  return logits=%logits
}
"""

MODEL = ModelInfo("TinyForCausalLM", "tiny", "float32", vocab_size=32, max_seq_len=64, num_layers=2, num_parameters=0)


class Case(NamedTuple):
    rule: str
    edits: tuple[tuple[str, str], ...]
    message: str = ""
    also: tuple[str, ...] = ()

    def graph(self) -> Graph:
        source = BASE
        for old, new in self.edits:
            assert old in source, f"{old!r} is not in the base graph"
            source = source.replace(old, new)
        return parse_graph(source)


def ok(rule: str, *edits: tuple[str, str]) -> Case:
    return Case(rule, edits)


def bad(rule: str, message: str, *edits: tuple[str, str], also: tuple[str, ...] = ()) -> Case:
    """Refused by `rule` with a message that matches, by the rules `also` besides, and by no other."""
    return Case(rule, edits, message, also)


def step(source: str) -> tuple[str, str]:
    """The edit that puts further steps into main, behind the call."""
    return "  %q1: float32[1, T, 4, 4] =", f"  {source}\n  %q1: float32[1, T, 4, 4] ="


def sizes(*captured: int) -> tuple[str, str]:
    """The edit that gives the graph a capture plan."""
    return "block layer {", f"capture(sizes={list(captured)})\nblock layer {{"


def constant(source: str) -> tuple[str, str]:
    return "constants {", f"constants {{ {source}"


def block(source: str) -> tuple[str, str]:
    return "main {", f"block {source}\nmain {{"


def param(source: str) -> tuple[str, str]:
    return "params {\n  %embed", f"params {{\n  {source}\n  %embed"


def shards(source: str) -> tuple[str, str]:
    """The edit that gives the graph a shard plan."""
    return "block layer {", f"shards {{ {source} }}\nblock layer {{"


def row(**changes: str) -> tuple[str, str]:
    """A shard plan of one row, which is in order but for the changes."""
    fields = {
        "kind": '"attention"', "block": '"layer"', "mode": '"row"', "params": "[%qkv]", "nodes": "[%fused]",
        "units": "4", "collective": '"all_reduce"', "group": '"tp"', "reason": '""',
    } | changes  # fmt: skip
    return shards(f"row({', '.join(f'{name}={value}' for name, value in fields.items())})")


def part(local: str) -> tuple[str, str]:
    """A param of which a rank has so many of 16 columns."""
    return param(
        f"%part: float32[16, {local}] = "
        f'slice(read("part", [16, 16], float32), dim=1, start=floordiv((rank * 16), tp), length={local})'
    )


def vocabulary(local: str, units: int) -> tuple[tuple[str, str], ...]:
    """A table of so many tokens' rows, of which a rank has `local`, in a plan for up to 4 ranks."""
    recipe = f'slice(read("table", [128, 16], float32), dim=0, start=0, length={local})'
    plan = "world(tp=1, ep=[1]) world(tp=2, ep=[1]) world(tp=4, ep=[1])"
    fields = f'kind="embedding", block="", mode="vocab", params=[%table], nodes=[], units={units}'
    none = 'collective="", group="", reason=""'
    return WORLD, shards(f"{plan} row({fields}, {none})"), param(f"%table: float32[{local}, 16] = {recipe}")


WORLD = ("tp: 1..8 }", "tp: 1..8 rank: 0..7 ep: 1..4 }")
WORLDS = shards("world(tp=1, ep=[1]) world(tp=2, ep=[1, 2]) world(tp=4, ep=[2])")
MINE = "start=floordiv((rank * 16), tp), end=(floordiv((rank * 16), tp) + ceildiv(16, tp))"
PRODUCT = f"%mine = aten.slice.Tensor(self=%h1, dim=2, {MINE}) %sum = aten.linear.default(input=%mine, weight=%part)"
NEGATE = block("negate { inputs { %x: float32[1, T, 16] } %y = aten.neg.default(self=%x) return %y }")
ONE_POOL = (
    ("pool=large", "pool=small"),
    ("pool large(pages=P_large)", ""),
    ("page_size=16", "page_size=8"),
    ("float32[P_large, 16, 2, 4]", "float32[P_small, 8, 2, 4]"),
)
CHUNKS = (
    ("page_size=8, window=32", "page_size=8, window=none, chunk=32"),
    ("scale=0.5, window=32)", "scale=0.5, chunk=32)"),
)
WRITE = "precast.write_kv(k=%k1, v=%v1, k_cache=%layers.1.k, v_cache=%layers.1.v, slot_mapping=%slots_full)"
LONG = "a" * 256
SIGHT = "%seen = precast.attention(q=%{0}, k=%{0}, v=%{0}, sinks=none, cu_seqlens=%{1}, scale=0.5)"
NO_CACHES = (
    (BASE[BASE.index("  %indices_local") : BASE.index("}\nparams")], ""),
    (BASE[BASE.index("pool small") : BASE.index("block layer")], ""),
    (BASE[BASE.index("block layer") : BASE.index("main {")], ""),
    (BASE[BASE.index("  %h1: float32") : BASE.index("  %last")], ""),
    ("x=%h2", "x=%h0"),
)


def slabs(num_bytes: int, per_slab: int) -> tuple[str, str]:
    """The edit that gives the plan slabs; pages take 512 bytes in pool small, 1024 in pool large."""
    pools = f"slabs(bytes={num_bytes})\npool small(pages=P_small, pages_per_slab={per_slab})"
    return "pool small(pages=P_small)", pools


def pages_of(page_size: int, heads: str) -> tuple[tuple[str, str], ...]:
    """The edits that give the pages of pool large so many tokens and heads."""
    return (
        ("heads=2, head_size=4, value_size=4, dtype=float32, page_size=16",
         f"heads={heads}, head_size=4, value_size=4, dtype=float32, page_size={page_size}"),
        ("float32[P_large, 16, 2, 4]", f"float32[P_large, {page_size}, {heads}, 4]"),
    )  # fmt: skip


TWO_CALLS = (
    (
        "main {",
        "block plain { inputs { %x: float32[1, T, 16] } params { %w: float32[16] }"
        " %y: float32[1, T, 16] = precast.rms_norm(x=%x, weight=%w, eps=1e-06, cast_before_scale=true)"
        " return %y }\nmain {",
    ),
    ("  %last:", "  %h3: float32[1, T, 16] = call plain(x=%h2, w=%norm)\n  %last:"),
)
"""A second layer, without a cache."""

ACCEPTED = [
    ok("IR001", constant(f"%_A.0..b: int8[] %{LONG}: int8[]")),
    ok("IR002", constant("%c: int8[floordiv((T * 8), max(tp, 1)), mod(T, 3), (T + -1)]")),
    ok("IR003", constant(f"%c: int8[{', '.join(['0'] * limits.MAX_RANK)}]")),
    ok("IR004", step("%c = aten.clamp.default(self=%h1, min=-inf, max=9223372036854775807)")),
    ok("IR010", ("tp: 1..8", "tp: 0..0")),
    ok("IR011", constant("%c: int8[ceildiv(T, tp)]")),
    ok("IR012", ("%fused", "%h0_in_block"), ("%n:", "%h0:"), ("input=%n", "input=%h0")),
    ok("IR013", step("%a = aten.neg.default(self=%h1) %b = aten.neg.default(self=%a)")),
    ok("IR014", ("logits=%logits", "logits=%logits, again=%logits, ids=%input_ids, table=%embed")),
    ok("IR020", step("%c = aten.neg.default@1(self=%h1)")),
    ok("IR021", step("%c = aten.add.Tensor(self=%h1, other=2) %d = aten.add.Tensor(self=%h1, other=T)")),
    ok("IR021", step("%c = aten.clamp.default(self=%h1, min=none, max=1)")),
    ok("IR021", step("%c = aten.linear.default(input=%h1, weight=%qkv, bias=none)")),
    ok("IR022", ("%q1: float32[1, T, 4, 4] =", "%q1: float32[1, floordiv((2 * T), 2), 4, 4] =")),
    ok("IR023", step(WRITE)),
    ok("IR030", NEGATE, step("%a = call negate(x=%h1) %b = call negate(x=%a)")),
    ok("IR031", ("w=%norm, qkv=%qkv, scale=%scale,", "scale=%scale, qkv=%qkv, w=%norm,")),
    ok("IR032", ("%cu: int32[(B + 1)] %kv_lens", "%cu: int32[(1 + B)] %kv_lens")),
    ok(
        "IR033",
        block("flip { inputs { %x: float32[16] } %y = aten.neg.default(self=%x) return %y }"),
        step("%a = call flip(x=%norm)"),
    ),
    ok("IR034", ("%k1: float32[1, T, 2, 4]", "%k1: float32[1, T, (1 + 1), 4]")),
    ok("IR034", block("echo { inputs { %x: float32[1, T, 16] } return %x }"), step("%a = call echo(x=%h1)")),
    ok(
        "IR035",
        param(
            '%p: float16[16, 1] = slice(transpose(stack([cast(read("a", [16]), float16), '
            'read("b", [16], float16)], dim=0), 0, 1), dim=1, start=1, length=1)'
        ),
    ),
    ok(
        "IR035",
        param(
            '%p: float8_e4m3fn[3, 5] = quantise(values, read("a", [3, 5]), block=[2, 2]) '
            '%q: float32[2, 3] = quantise(scales, read("a", [3, 5]), block=[2, 2])'
        ),
    ),
    ok("IR035", param('%p: float32[1] = scale(["a.k_scale", "a.k_proj.k_scale"], default=0.5)')),
    ok("IR036", param('%early: float32[2] = tie(%late) %late: float32[2] = read("late", [2], float32)')),
    ok("IR040", ("pool=large", "pool=local"), ("pool large(", "pool local("), ("slot layers.1(", "slot local(")),
    ok("IR041", *ONE_POOL),
    ok("IR042", ("P_small: 0..", "P_small: 1..100")),
    ok("IR043", ("window=32", "window=1")),
    ok("IR043", *CHUNKS, ("chunk=32", "chunk=1")),
    ok("IR044", ("num_kv_heads=2", "num_kv_heads=(1 + 1)")),
    ok("IR045", *ONE_POOL, ("window=32", "window=4")),
    ok("IR046", ("%indptr_full: int32[(1 + B)]", "%indptr_full: int32[(B + 1)]")),
    ok("IR047", ("scale=0.5)", "scale=0.5, window=7)")),
    ok("IR047", *CHUNKS),
    ok("IR047", ("scale=0.5)", "scale=0.5, chunk=7)")),
    ok("IR048", slabs(1024, 2)),
    ok("IR048", slabs(2048, 2)),  # pages of 512 bytes, 1024 apart
    ok("IR049", *pages_of(limits.MAX_PAGE_TOKENS, "2")),
    ok(
        "IR035",
        param(
            "%p: int8[floordiv(16, tp)] = "
            'slice(read("p", [16], int8), dim=0, start=(rank * floordiv(16, tp)), length=floordiv(16, tp))'
        ),
        ("tp: 1..8", "tp: 1..8 rank: 0..7"),
    ),
    ok("IR050", ("  %logit_rows: int64[R]", "  %logit_rows: int64[R] %rope_lengths: int64[1, T]")),
    ok(
        "IR051",
        ("%cu: int32[(B + 1)] %kv", "%cu2: int32[(B + 1)] %kv"),
        ("cu=%cu_seqlens", "cu2=%cu_seqlens"),
        ("cu_seqlens=%cu,", "cu_seqlens=%cu2,"),
    ),
    ok(
        "IR052",
        step(
            "%i = aten.mul.Tensor(self=%input_ids, other=-3) %j = aten.clamp.default(self=%i, min=0, max=31) "
            "%e = precast.embedding(ids=%j, weight=%embed)"
        ),
    ),
    ok(
        "IR052",
        ("%norm: float32[16] =", '%at: float32[66, 16] = read("at", [66, 16], float32)\n  %norm: float32[16] ='),
        ("  %logit_rows: int64[R]", "  %logit_rows: int64[R] %positions: int64[1, T]"),
        step("%i = aten.add.Tensor(self=%positions, other=2) %e = precast.embedding(ids=%i, weight=%at)"),
    ),
    ok(
        "IR052",
        param('%half: float32[16, 16] = read("half", [16, 16], float32)'),
        step(
            "%in = aten.lt.Scalar(self=%input_ids, other=16) %out = aten.logical_not.default(self=%in) "
            "%i = aten.masked_fill.Scalar(self=%input_ids, mask=%out, value=0) "
            "%e = precast.embedding(ids=%i, weight=%half)"
        ),
    ),
    ok("IR052", step("%v, %i = aten.topk.default(self=%h1, k=3) %g = aten.gather.default(self=%h1, dim=-1, index=%i)")),
    ok("IR053", step("%c = aten.select.int(self=%h1, dim=1, index=-1) %d = aten.select.int(self=%h1, dim=1, index=0)")),
    ok("IR053", step("%c = aten.slice.Tensor(self=%h1, dim=1, start=1, end=T)")),
    ok("IR054", step("%c = aten.one_hot.default(self=%input_ids, num_classes=1000000)")),
    ok(
        "IR054",
        param(f'%wide: int8[{2**29}] = read("wide", [{2**29}], int8)'),
        step(f"%c = aten.one_hot.default(self=%input_ids, num_classes={2**28})"),
    ),
    ok("IR055", *NO_CACHES),
    ok("IR055", ("logits=%logits", "logits=%logits, norm=%norm")),
    ok("IR056", *NO_CACHES, ("  %kv_lens: int32[B]", "  %rope_lengths: int64[1, T]")),
    ok("IR057", *NO_CACHES, ("  %cu_seqlens: int32[(B + 1)]\n", ""), ("  %kv_lens: int32[B]\n", "")),
    ok("IR058", sizes(1, 2, 4, 3)),
    ok("IR058", sizes(limits.MAX_CAPTURED_TOKENS)),
    ok("IR058", ("T: 1..", "T: 2..8"), sizes(8, 2)),
    ok("IR058", sizes(*range(1, limits.MAX_CAPTURED_SIZES + 1))),
    ok("IR060", WORLD, WORLDS),
    ok("IR060", shards("world(tp=1, ep=[1])")),
    ok("IR061", WORLD, WORLDS, part("ceildiv(16, tp)")),
    ok("IR061", *vocabulary("ceildiv(101, tp)", 101)),
    ok("IR062", row()),
    ok("IR062", row(mode='"replicated"', collective='""', group='""', reason='"it is small"', nodes="[]")),
    ok("IR062", row(block='""', params="[%embed]", nodes="[%last]")),
    ok("IR063", WORLD, part("ceildiv(16, tp)"), step(f'{PRODUCT} %all = precast.all_reduce(x=%sum, group="tp")')),
    ok(
        "IR063",
        WORLD,
        part("ceildiv(16, tp)"),
        step(
            f"{PRODUCT} %flat = aten.reshape.default(self=%sum, shape=[T, 16])"
            " %twice = aten.add.Tensor(self=%flat, other=%flat) %half = aten.mul.Tensor(self=%twice, other=0.5)"
            ' %all = precast.all_reduce(x=%half, group="tp")'
        ),
    ),
    ok("IR064", shards('world(tp=1, ep=[1]) override(pattern="norm", choice="replicate")')),
    ok("IR064", shards("world(tp=1, ep=[1]) pipeline(layers=[1, 1])"), *TWO_CALLS),
]

NOT_A_NAME = "expected letters, digits, _ and ., at most 256, no digit first"
REJECTED = [
    bad("IR001", f"'a b': {NOT_A_NAME}", constant('%"a b": int8[]')),
    bad("IR001", f"'': {NOT_A_NAME}", constant('%"": int8[]')),
    bad("IR001", f"'0a': {NOT_A_NAME}", constant('%"0a": int8[]')),
    bad("IR001", NOT_A_NAME, constant(f"%{LONG}a: int8[]")),
    bad("IR001", NOT_A_NAME, constant('%"x\\n": int8[]')),
    bad("IR001", "'ä'", ("logits=%logits", '"ä"=%logits')),
    bad("IR001", "'T-'", ("T: 1..", 'T: 1.. "T-": 0..')),
    bad("IR001", "'a/b'", ("block layer {", 'block "a/b" {'), ("call layer(", 'call "a/b"(')),
    bad("IR001", "'a/b'", ("%fused", '%"a/b"')),
    bad("IR001", "'a/b'", ("pool small(", 'pool "a/b"('), ("pool=small", 'pool="a/b"')),
    bad("IR001", "'../x'", ("group local(", 'group "../x"(')),
    bad("IR001", "'../x'", ("slot layers.0(", 'slot "../x"(')),
    bad("IR002", "floordiv divides by zero", constant("%c: int8[floordiv(T, (B + (-1 * B)))]")),
    bad("IR002", "mod has 3 arguments", constant("%c: int8[mod(T, 2, 3)]")),
    bad("IR002", "add has 1 arguments", constant("%c: int8[add(T)]")),
    bad("IR002", "more than", constant("%c: int8[" + " * ".join(["((T + B)"] + ["(R + 1)"] * 40) + ")]")),
    bad("IR002", "more than", constant("%c: int8[(" + " * ".join(["T"] * 65) + ")]")),
    bad("IR002", "ceildiv divides", step("%c: int8[] = aten.reshape.default(self=%h1, shape=[1, ceildiv(T, 0), 16])")),
    bad("IR002", "max has 0", param('%p: int8[1] = slice(read("p", [2], int8), dim=0, start=max(), length=1)')),
    bad("IR003", "-1 is no size", constant("%c: int8[T, -1]")),
    bad("IR003", "is no size", constant("%c: int8[9223372036854775808]")),
    bad("IR003", "17 dimensions", constant(f"%c: int8[{', '.join(['1'] * 17)}]")),
    bad("IR004", "eps: not a number", ("eps=1e-06", "eps=nan")),
    bad(
        "IR004",
        "end: an integer beyond 64 bits",
        step("%c: float32[] = aten.slice.Tensor(self=%h1, dim=1, start=0, end=9223372036854775808)"),
    ),
    bad(
        "IR004",
        "shape: an integer beyond",
        step("%c: float32[] = aten.reshape.default(self=%h1, shape=[-9223372036854775809])"),
    ),
    bad("IR010", r"expected 0 <= min <= max, found -1\.\.8", ("tp: 1..8", "tp: -1..8")),
    bad("IR010", r"found 9\.\.8", ("tp: 1..8", "tp: 9..8")),
    bad("IR010", "symbol tp: is declared twice", ("tp: 1..8", "tp: 1..8 tp: 1..8")),
    bad("IR011", "main %c: the symbol S is not declared", constant("%c: int8[(S + 1)]")),
    bad("IR011", "symbol S", step("%c = aten.add.Tensor(self=%h1, other=S)")),
    bad("IR011", "symbol S", param('%p: int8[1] = slice(read("p", [2], int8), dim=0, start=S, length=1)')),
    bad(
        "IR011",
        "symbol S",
        param(
            '%p: int8[2] = concat([slice(read("p", [2], int8), dim=0, start=S, length=1), read("q", [1], int8)], dim=0)'
        ),
    ),
    bad(
        "IR011",
        r"block layer\[1\].*symbol S",
        ("%fused: float32[1, T, 32]", "%fused: float32[1, S, 32]"),
        also=("IR022",),
    ),
    bad("IR012", "main: %input_ids is defined twice", constant("%input_ids: int8[]")),
    bad(
        "IR012",
        "%norm is defined twice",
        (
            "%head: float32[32, 16] = tie(%embed)",
            '%head: float32[32, 16] = tie(%embed) %norm: float32[16] = read("norm", [16], float32)',
        ),
    ),
    bad("IR012", "%scale is defined twice", ("%layers.0.k", "%scale"), also=("IR032", "IR033")),
    bad("IR012", "%h0 is defined twice", step("%h0 = aten.neg.default(self=%h1)")),
    bad(
        "IR012",
        "%same is defined twice",
        step("%same, %same = precast.rotary_tables(positions=%input_ids, inv_freq=%norm, scale=1.0, dtype=float32)"),
    ),
    bad("IR012", r"block layer\[4\].*%k2 is defined twice", ("%v2:", "%k2:"), also=("IR013",)),
    bad(
        "IR012",
        "block layer: %w is defined twice",
        ("params { %w: float32[16]", "params { %w: float32[16] %w: float32[16]"),
    ),
    bad("IR012", "block negate: is declared twice", NEGATE, NEGATE, step("%a = call negate(x=%h1)")),
    bad(
        "IR013",
        r"main\[3\] aten.neg.default: %nothing is not defined",
        step("%c: int8[] = aten.neg.default(self=%nothing)"),
    ),
    bad("IR013", "%h2 is used before it is defined", step("%c: float32[1, T, 16] = aten.neg.default(self=%h2)")),
    bad("IR013", "%c is used before", step("%c: float32[1, T, 16] = aten.neg.default(self=%c)")),
    bad("IR013", r"main\[1\] call layer: %h2 is used before", ("x=%h0, cu", "x=%h2, cu")),
    bad("IR013", "%nothing is not", step("%c: float32[1, T, 16] = aten.cat.default(tensors=[%h1, %nothing], dim=0)")),
    bad("IR013", r"block layer\[0\].*%h0 is not defined", ("rms_norm(x=%x,", "rms_norm(x=%h0,")),
    bad("IR014", "main: returns %lost, which is not defined", ("logits=%logits", "logits=%lost")),
    bad("IR014", "block layer: returns %lost", ("return %y, %k, %v", "return %y, %k, %lost")),
    bad("IR014", "returns %layers.1.k, which is a cache", ("logits=%logits", "logits=%logits, k=%layers.1.k")),
    bad("IR014", "returns %k_cache, which is a cache", ("return %y, %k,", "return %y, %k_cache,"), also=("IR034",)),
    bad("IR014", "expected at least one output", ("return logits=%logits", "return")),
    bad("IR020", "my.op@1 is unknown: no op of the table has this name", step("my.op()")),
    bad(
        "IR020",
        "aten.neg.default@2 is unknown: known versions are 1",
        step("%c: int8[] = aten.neg.default@2(self=%h1)"),
    ),
    bad("IR020", r"block layer\[0\]", ("precast.rms_norm(", "precast.rms_norm@7(")),
    bad("IR020", "aten.neg@1", step("%c: int8[] = aten.neg(self=%h1)")),
    bad("IR021", "eps: required, not given", ("eps=1e-06, ", "")),
    bad(
        "IR021", "epsilon: not an argument; the arguments are x, weight, eps", ("eps=1e-06,", "eps=1e-06, epsilon=1.0,")
    ),
    bad("IR021", "eps: expected float, found int 1", ("eps=1e-06", "eps=1")),
    bad("IR021", "eps: expected float, found none", ("eps=1e-06", "eps=none")),
    bad("IR021", "cast_before_scale: expected bool, found int 1", ("cast_before_scale=true", "cast_before_scale=1")),
    bad("IR021", r"self: expected Tensor, found \[a tensor\]", step("%c: int8[] = aten.neg.default(self=[%h1])")),
    bad("IR021", "self: expected Tensor, found int 3", step("%c: int8[] = aten.neg.default(self=3)")),
    bad("IR021", "dim: expected int, found bool True", step("%c: int8[] = aten.unsqueeze.default(self=%h1, dim=true)")),
    bad("IR021", "dim: expected int, found float", step("%c: int8[] = aten.unsqueeze.default(self=%h1, dim=1.0)")),
    bad("IR021", r"shape: expected int\[\], found int 1", step("%c: int8[] = aten.reshape.default(self=%h1, shape=1)")),
    bad(
        "IR021",
        r"shape: expected int\[\], found \[int 1, a tensor\]",
        step("%c: int8[] = aten.reshape.default(self=%h1, shape=[1, %h1])"),
    ),
    bad(
        "IR021",
        r"tensors: expected Tensor\[\], found \[a tensor, int 1\]",
        step("%c: int8[] = aten.cat.default(tensors=[%h1, 1])"),
    ),
    bad("IR021", "other: expected Scalar, found a tensor", step("%c: int8[] = aten.rsub.Scalar(self=%h1, other=%h1)")),
    bad("IR021", "other: expected .*, found str 'x'", step('%c: int8[] = aten.add.Tensor(self=%h1, other="x")')),
    bad("IR021", "dtype: expected Dtype, found str", step('%c: int8[] = aten.to.dtype(self=%h1, dtype="int8")')),
    bad(
        "IR021",
        "approximate: expected str, found a dtype",
        step("%c: int8[] = aten.gelu.default(self=%h1, approximate=int8)"),
    ),
    bad("IR021", r"window: expected int\?, found float", ("scale=0.5)", "scale=0.5, window=1.5)")),
    bad("IR021", r"soft_cap: expected float\?, found int", ("scale=0.5)", "scale=0.5, soft_cap=30)")),
    bad("IR021", r"weight: expected Tensor\?, found a size", ("weight=%w, eps", "weight=T, eps")),
    bad(
        "IR022",
        r"%q1: expected float32\[1, T, 4, 4\], found float32\[1, T, 4, 3\]",
        ("%q1: float32[1, T, 4, 4]", "%q1: float32[1, T, 4, 3]"),
        also=(),
    ),
    bad(
        "IR022",
        r"%fused: expected float32\[1, T, 32\], found float16\[1, T, 32\]",
        ("%fused: float32[1, T, 32]", "%fused: float16[1, T, 32]"),
    ),
    bad("IR022", "weight: expected shape", ("weight=%w, eps", "weight=%qkv, eps")),
    bad("IR022", "expected 1 results, found 2", step("%c: float32[1, T, 16], %d: int8[] = aten.neg.default(self=%h1)")),
    bad(
        "IR022",
        "expected 2 results, found 1",
        step(
            "%c: float32[1, T, 16] = "
            "precast.rotary_tables(positions=%input_ids, inv_freq=%norm, scale=1.0, dtype=float32)"
        ),
    ),
    bad("IR022", "expected 0 results, found 1", ("precast.write_kv(k=%k,", "%c: int8[] = precast.write_kv(k=%k,")),
    bad(
        "IR022",
        "more than",
        step("%c: float32[1] = aten.reshape.default(self=%big, shape=[1])"),
        constant(
            "%big: float32[" + ", ".join(["(T + B)", "(R + N_full)", "(T + 3)", "(R + 7)", "(B + 9)", "(tp + 1)"]) + "]"
        ),
    ),
    bad(
        "IR023",
        "main.*writes %h0, which is no cache",
        step("precast.write_kv(k=%k1, v=%v1, k_cache=%h0, v_cache=%layers.1.v, slot_mapping=%slots_full)"),
        also=("IR022", "IR047"),
    ),
    bad(
        "IR023",
        "writes %k, which is no cache",
        ("k_cache=%k_cache, v_cache=%v_cache, slot_mapping", "k_cache=%k, v_cache=%v_cache, slot_mapping"),
        also=("IR022", "IR047"),
    ),
    bad("IR023", "writes %layers.1.k twice", step(WRITE.replace("%layers.1.v", "%layers.1.k")), also=("IR047",)),
    bad("IR030", r"main\[3\] call negative: there is no block of this name", step("call negative(x=%h1)")),
    bad("IR030", "block negate: nothing calls it", NEGATE),
    bad("IR031", r"main\[1\] call layer: w is not bound", ("w=%norm, ", "")),
    bad("IR031", "k_cache is not bound", ("k_cache=%layers.0.k, ", ""), also=("IR047",)),
    bad("IR031", "x2 is nothing that the block takes", ("    x=%h0,", "    x=%h0, x2=%h0,")),
    bad("IR032", r"x: expected float32\[1, T, 16\], found int64\[1, T\]", ("x=%h0, cu", "x=%input_ids, cu")),
    bad("IR032", r"w: expected float32\[16\], found float32\[\]", ("w=%norm", "w=%scale")),
    bad(
        "IR032",
        r"start: expected int32\[B\], found int32\[N_full\]",
        ("start=%start_local,\n    slots", "start=%indices_full, slots"),
        also=("IR047",),
    ),
    bad(
        "IR032",
        "k_cache: expected",
        ("k_cache=%layers.0.k, v_cache=%layers.0.v)", "k_cache=%layers.1.k, v_cache=%layers.1.v)"),
        also=("IR047",),
    ),
    bad(
        "IR033",
        "k_cache: expected a tensor of a cache slot, each once, found %h0",
        ("k_cache=%layers.0.k,", "k_cache=%h0,"),
        also=("IR032", "IR047"),
    ),
    bad(
        "IR033",
        "v_cache: expected a tensor of a cache slot, each once",
        ("v_cache=%layers.0.v)", "v_cache=%layers.0.k)"),
        also=("IR047",),
    ),
    bad(
        "IR033",
        "w: expected a param or a constant, found %bent",
        ("w=%norm", "w=%bent"),
        ("  %h0: float32", "  %bent = aten.neg.default(self=%norm)\n  %h0: float32"),
    ),
    bad(
        "IR033",
        "x: expected no cache, found %layers.1.k",
        block("flip { inputs { %x: float32[P_large, 16, 2, 4] } %y = aten.neg.default(self=%x) return %y }"),
        step("%a = call flip(x=%layers.1.k)"),
    ),
    bad("IR034", "expected 3 results, found 2", (", %v1: float32[1, T, 2, 4] = call", " = call"), ("v=%v1", "v=%k1")),
    bad(
        "IR034",
        r"%k1: expected float32\[1, T, 2, 4\], found float32\[1, T, 8\]",
        ("%k1: float32[1, T, 2, 4]", "%k1: float32[1, T, 8]"),
        also=("IR022",),
    ),
    bad(
        "IR035",
        r"param %norm: expected float32\[16\], the recipe makes \[15\]",
        ('read("norm", [16]', 'read("norm", [15]'),
    ),
    bad("IR035", "expected float32, the recipe makes bfloat16", ("[16], float32)\n", "[16], bfloat16)\n")),
    bad("IR035", "makes the dtype of the checkpoint: it needs a cast", ("[16], float32)\n", "[16])\n")),
    bad(
        "IR035",
        "param %p: parts of different dtypes",
        param('%p: int8[2] = concat([read("a", [1]), read("b", [1], int8)], dim=0)'),
    ),
    bad("IR035", "don't fit", param('%p: int8[2] = concat([read("a", [1], int8), read("b", [1, 1], int8)], dim=0)')),
    bad("IR035", "no parts", param("%p: int8[2] = stack([], dim=0)")),
    # After one of the same recipe that is good, and after one that is as bad.
    bad("IR035", "%q: expected int8", param('%p: int8[4] = read("a", [4], int8) %q: int8[5] = read("b", [4], int8)')),
    bad("IR035", "%q: expected int8", param('%p: int8[5] = read("a", [4], int8) %q: int8[5] = read("b", [4], int8)')),
    bad("IR035", "dimension 2 is not one of 2", param('%p: int8[1, 1] = transpose(read("a", [1, 1], int8), 0, 2)')),
    bad("IR035", "has other elements", param('%p: int8[5] = reshape(read("a", [2, 3], int8), [5])')),
    bad("IR035", "are past the 8", param('%p: int8[5] = slice(read("a", [8], int8), dim=0, start=4, length=5)')),
    bad("IR035", "negative", param('%p: int8[5] = slice(read("a", [8], int8), dim=0, start=-1, length=5)')),
    bad("IR035", "negative", param('%p: int8[6] = reshape(reshape(read("a", [6], int8), [-2, -3]), [6])')),
    bad("IR035", "negative size", param('%p: int8[6] = reshape(read("a", [-2, -3], int8), [6])')),
    bad(
        "IR035", "tie to embed: a tie is a recipe of its own", param("%p: float32[32, 16] = cast(tie(%embed), float32)")
    ),
    bad(
        "IR035",
        "a scale is a recipe of its own",
        param('%p: float32[1, 1] = reshape(scale(["s"], default=1.0), [1, 1])'),
    ),
    bad(
        "IR035",
        "is made of what is stored, not of another one",
        param(
            '%p: float32[2, 2] = dequantise(fp8, quantise(values, read("a", [2, 2]), block=[2, 2]), read("s", [1, 1]), '
            "block=[2, 2], zeros=none, groups=none, zero_offset=0)"
        ),
    ),
    bad(
        "IR035",
        "quantise: of int8, expected a floating type",
        param('%p: float32[1, 1] = quantise(scales, read("a", [2, 2], int8), block=[2, 2])'),
    ),
    bad(
        "IR035", "quantise: a block of", param('%p: float32[1, 1] = quantise(scales, read("a", [2, 2]), block=[0, 2])')
    ),
    bad("IR035", "expected rows and columns", param('%p: float32[1] = quantise(scales, read("a", [2]), block=[2, 2])')),
    bad("IR035", "the default is 0.0, expected a number above 0", param('%p: float32[1] = scale(["s"], default=0.0)')),
    bad(
        "IR035",
        "expected bfloat16, the recipe makes float32",
        param('%p: bfloat16[1] = scale(["s"], default=1.0)'),
    ),
    bad("IR036", "param %head: tied to %nothing, which is no param", ("tie(%embed)", "tie(%nothing)")),
    bad("IR036", "tied to %scale, which is no param", ("tie(%embed)", "tie(%scale)")),
    bad("IR036", "param %p: tied to %head, which is tied itself", param("%p: float32[32, 16] = tie(%head)")),
    bad("IR036", "tied to %head, which is tied itself", ("tie(%embed)", "tie(%head)")),
    bad(
        "IR036",
        r"tied to %embed: expected float32\[32, 16\], found float32\[16, 32\]",
        param("%p: float32[16, 32] = tie(%embed)"),
    ),
    bad(
        "IR040",
        "pool small: is declared twice",
        ("pool large(", "pool small("),
        ("pool=large", "pool=small"),
        also=("IR044", "IR045"),
    ),
    bad("IR040", "group local: is declared twice", ("group full(", "group local(")),
    bad("IR040", "slot layers.0: is declared twice", ("slot layers.1(", "slot layers.0(")),
    bad("IR041", "group full: there is no pool huge", ("pool=large", "pool=huge"), also=()),
    bad("IR041", "pool spare: no group uses it", ("pool large(", "pool spare(pages=tp)\npool large(")),
    bad(
        "IR041",
        "group none: expected at least one slot",
        (
            "group full(",
            """group none(pool=large,
        spec=paged(num_kv_heads=2, head_size=4, value_size=4, dtype=float32, page_size=16, window=none),
        page_indices=%i, page_indptr=%p, page_start=%s, slot_mapping=%m) {}
        group full(""",
        ),
        (
            "  %logit_rows: int64[R]",
            "%logit_rows: int64[R] %i: int32[N_full] %p: int32[(B + 1)] %s: int32[B] %m: int64[T]",
        ),
    ),
    bad(
        "IR042",
        "pool large: its pages are counted by P_lost, which is no declared symbol",
        ("P_large: 0..", ""),
        ("P_large", "P_lost"),
        also=("IR011",),
    ),
    bad("IR042", "symbol P_small: counts the pages of two pools", ("pages=P_large", "pages=P_small"), also=("IR044",)),
    bad(
        "IR042",
        "pool large: its pages are counted by R, which is a size of an input",
        ("P_large: 0..", ""),
        ("P_large", "R"),
    ),
    bad("IR043", "group local: window: expected at least 1, found 0", ("window=32)", "window=0)"), also=("IR022",)),
    bad("IR043", "group local: chunk: expected at least 1, found 0", *CHUNKS, ("chunk=32", "chunk=0"), also=("IR022",)),
    bad(
        "IR043",
        "group local: expected a window or chunks, found window 32 and chunk 8",
        ("page_size=8, window=32", "page_size=8, window=32, chunk=8"),
        also=("IR047",),
    ),
    bad(
        "IR043",
        "page_size: expected at least 1, found 0",
        ("page_size=8", "page_size=0"),
        ("[P_small, 8, ", "[P_small, 0, "),
        also=("IR049",),
    ),
    bad("IR043", "head_size: expected at least 1, found -4", ("head_size=4", "head_size=-4"), also=("IR044",)),
    bad("IR043", "value_size: expected at least 1", ("value_size=4", "value_size=0"), also=("IR044",)),
    bad("IR043", "num_kv_heads: expected at least 1", ("num_kv_heads=2", "num_kv_heads=0"), also=("IR044",)),
    bad("IR044", "slot layers.0: expected tensors .*16, 2, 4.*found", ("page_size=8", "page_size=16")),
    bad(
        "IR044",
        "slot layers.1",
        ("value_size=4, dtype=float32, page_size=16", "value_size=6, dtype=float32, page_size=16"),
    ),
    bad("IR044", "slot layers.1", ("dtype=float32, page_size=16", "dtype=float16, page_size=16")),
    bad(
        "IR044",
        "slot layers.1",
        (
            "num_kv_heads=2, head_size=4, value_size=4, dtype=float32, page_size=16",
            "num_kv_heads=1, head_size=4, value_size=4, dtype=float32, page_size=16",
        ),
    ),
    bad(
        "IR044",
        "slot layers.1.*found float32",
        (", %layers.1.v: float32[P_large, 16, 2, 4])", ")"),
        ("v_cache=%layers.1.v", "v_cache=%layers.1.k"),
        also=("IR023",),
    ),
    bad(
        "IR045",
        "group full: its pages have another geometry than those of local",
        ("pool=large", "pool=small"),
        ("pool large(pages=P_large)", ""),
        ("P_large: 0..", ""),
        ("P_large", "P_small"),
    ),
    bad(
        "IR046",
        "group full: %lost is no input of the graph",
        ("page_start=%start_full, slot_mapping", "page_start=%lost, slot_mapping"),
        also=("IR047",),
    ),
    bad(
        "IR046",
        "group full: %norm is no input",
        ("slot_mapping=%slots_full\n", "slot_mapping=%norm\n"),
        also=("IR047",),
    ),
    bad(
        "IR046",
        r"%indices_full: expected int32\[any\], found int64\[N_full\]",
        ("%indices_full: int32", "%indices_full: int64"),
        also=("IR022",),
    ),
    bad(
        "IR046",
        r"%indptr_full: expected int32\[\(1 \+ B\)\], found int32\[B\]",
        ("%indptr_full: int32[(1 + B)]", "%indptr_full: int32[B]"),
        also=("IR022",),
    ),
    bad(
        "IR046",
        r"%slots_full: expected int64\[T\], found int64\[1, T\]",
        ("%slots_full: int64[T]", "%slots_full: int64[1, T]"),
        also=("IR022",),
    ),
    bad(
        "IR046",
        "input start_local: is the metadata of two groups, or twice of one",
        ("page_start=%start_full", "page_start=%start_local"),
    ),
    bad(
        "IR047",
        r"main\[4\] precast.paged_attention: page_start: expected %start_full of .* full, found %start_local",
        ("page_start=%start_full,\n    scale", "page_start=%start_local,\n    scale"),
    ),
    bad(
        "IR047",
        r"main\[2\] precast.write_kv: slot_mapping: expected %slots_full",
        ("slot_mapping=%slots_full)", "slot_mapping=%slots_local)"),
    ),
    bad(
        "IR047",
        r"main\[1\] call layer, block layer\[8\] precast.write_kv: slot_mapping: expected %slots_local",
        ("slots=%slots_local,", "slots=%slots_full,"),
    ),
    bad(
        "IR047",
        r"block layer\[9\].*window: expected 32, that of group local",
        ("scale=0.5, window=32)", "scale=0.5, window=31)"),
    ),
    bad("IR047", "window: expected 32", ("scale=0.5, window=32)", "scale=0.5)")),
    bad("IR047", "chunk: expected 32, that of group local", *CHUNKS, ("scale=0.5, chunk=32)", "scale=0.5, chunk=31)")),
    bad("IR047", "chunk: expected 32", *CHUNKS, ("scale=0.5, chunk=32)", "scale=0.5)")),
    bad(
        "IR047",
        "v_cache: expected %layers.1.v of slot layers.1",
        step(WRITE.replace("%layers.1.v", "%layers.0.v")),
        also=("IR022",),
    ),
    bad(
        "IR047",
        r"k_cache: expected %layers.1.k .* found %layers.1.v",
        step(WRITE.replace("%layers.1.k", "%tmp").replace("%layers.1.v", "%layers.1.k").replace("%tmp", "%layers.1.v")),
    ),
    bad(
        "IR047",
        "k_cache: expected a tensor of a cache slot",
        ("k_cache=%layers.1.k, v_cache=%layers.1.v, sinks", "k_cache=%copy, v_cache=%layers.1.v, sinks"),
        step("%copy = aten.neg.default(self=%layers.1.k)"),
    ),
    bad("IR048", "pool small: 2 pages a slab, in a plan without slabs", slabs(0, 2)),
    bad("IR048", "caches: slab_bytes: expected 0 to .*, found -1024", slabs(-1024, 2)),
    bad("IR048", "caches: slab_bytes: expected 0 to .*, found 9223372036854775808", slabs(2**63, 2)),
    bad("IR048", "pool small: pages_per_slab: expected at least 1, found 0", slabs(1024, 0)),
    bad("IR048", "expected a multiple of 256 bytes a page, found 3 pages in a slab of 2048 bytes", slabs(2048, 3)),
    bad("IR048", "expected a multiple of 256 bytes a page, found 1 pages in a slab of 1100 bytes", slabs(1100, 1)),
    bad("IR048", "pool small: a page of group local takes 512 bytes, and has 256", slabs(1024, 4)),
    bad("IR048", "pool large: a page of group full takes 1024 bytes, and has 512", slabs(512, 1)),
    bad("IR048", "pool small: serves two groups despite slabs", slabs(1024, 2), *ONE_POOL),
    bad("IR049", "group full: sizes: expected integers", slabs(1024, 2), *pages_of(16, "B"), also=("IR022",)),
    *(
        bad("IR049", "group full: sizes: expected integers", *pages_of(16, heads), also=("IR022",))
        for heads in ("B", "(tp + -1)", "floordiv(8, (tp + -1))")
    ),
    bad("IR049", "page_size: expected at most 4096, found 4097", *pages_of(4097, "2")),
    bad("IR049", f"page_size: expected .*, found {2**46}", *pages_of(2**46, "2")),
    bad("IR049", f"a page takes {2**41} bytes, expected at most {2**36}", *pages_of(16, str(2**32)), also=("IR022",)),
    bad(
        "IR035",
        "T: has no value when weights are read; expected ep, rank, tp",
        param('%p: int8[1] = slice(read("p", [16], int8), dim=0, start=T, length=1)'),
    ),
    bad(
        "IR035",
        "slice: 16 and 1 more are past the 16 of dimension 0, where tp is 8, rank is 7, ep is 1",
        param('%p: int8[1] = slice(read("p", [16], int8), dim=0, start=(rank + 9), length=1)'),
        ("tp: 1..8", "tp: 1..8 rank: 0..7"),
    ),
    bad(
        "IR035",
        "slice: -1 is negative, where tp is 1, rank is 0, ep is 1",
        param('%p: int8[1] = slice(read("p", [16], int8), dim=0, start=(rank + -1), length=1)'),
        ("tp: 1..8", "tp: 1..8 rank: 0..7"),
    ),
    bad(
        "IR050",
        r"input %kv_lens: expected int32\[B\], found int64\[B\]",
        ("  %kv_lens: int32", "  %kv_lens: int64"),
        also=("IR022", "IR032"),
    ),
    bad(
        "IR050",
        r"input %input_ids: expected int64\[1, T\], found int64\[1, 7\]",
        ("%input_ids: int64[1, T]", "%input_ids: int64[1, 7]"),
        also=("IR022",),
    ),
    bad(
        "IR051",
        r"main\[5\] .*cu_seqlens: expected the graph's input %cu_seqlens, found %wrong",
        ("  %q1:", "  %wrong = aten.add.Tensor(self=%cu_seqlens, other=1000000)\n  %q1:"),
        ("cu_seqlens=%cu_seqlens, kv_lens", "cu_seqlens=%wrong, kv_lens"),
    ),
    bad(
        "IR051",
        r"block layer\[9\] .*kv_lens: expected the graph's input %kv_lens, found %start_full",
        ("cu=%cu_seqlens, kv_lens=%kv_lens", "cu=%cu_seqlens, kv_lens=%start_full"),
    ),
    bad(
        "IR051",
        "cu_seqlens: expected the graph's input %cu_seqlens, found a value made in the graph",
        ("  %o: ", "  %cu_seqlens = aten.add.Tensor(self=%cu, other=1000000)\n  %o: "),
        ("cu_seqlens=%cu,", "cu_seqlens=%cu_seqlens,"),
    ),
    bad(
        "IR051",
        "rows: expected the graph's input %logit_rows, found %slots_full",
        ("%last: float32[1, R, 16]", "%last: float32[1, T, 16]"),
        ("%logits: float32[1, R", "%logits: float32[1, T"),
        ("rows=%logit_rows", "rows=%slots_full"),
        also=("IR055",),
    ),
    bad(
        "IR051",
        r"x: expected the T tokens of a step, found float32\[1, R, 16\]",
        (
            "%logits: float32",
            "%few: float32[1, R, 16] = precast.gather_rows(x=%last, rows=%logit_rows)\n  %logits: float32",
        ),
        ("input=%last", "input=%few"),
    ),
    bad(
        "IR052",
        r"ids: expected indices that are known to be 0 to 31, found 1000000 to 1000031 in %far",
        ("  %h0: ", "  %far = aten.add.Tensor(self=%input_ids, other=1000000)\n  %h0: "),
        ("ids=%input_ids", "ids=%far"),
    ),
    bad(
        "IR052",
        "ids: .* 0 to 30, found 0 to 31 in %input_ids",
        ("%embed: float32[32, 16]", "%embed: float32[31, 16]"),
        ("[32, 16]), float32)", "[31, 16]), float32)"),
        ("%head: float32[32", "%head: float32[31"),
        ("%logits: float32[1, R, 32]", "%logits: float32[1, R, 31]"),
    ),
    bad(
        "IR052",
        "ids: .* 0 to 31, found 0 to 32 in %input_ids",
        ("%head: float32[32, 16] = tie(%embed)", '%head: float32[33, 16] = read("head", [33, 16], float32)'),
        ("%logits: float32[1, R, 32]", "%logits: float32[1, R, 33]"),
    ),
    bad(
        "IR052",
        "ids: .* 0 to 31, found 0 to 63 in %positions",
        ("  %logit_rows: int64[R]", "  %logit_rows: int64[R] %positions: int64[1, T]"),
        ("ids=%input_ids", "ids=%positions"),
    ),
    bad(
        "IR052",
        "index: .* 0 to 1, found 0 to 15",
        step(
            "%v, %i = aten.topk.default(self=%h1, k=3) %two = aten.slice.Tensor(self=%h1, dim=2, start=0, end=2) "
            "%g = aten.gather.default(self=%two, dim=-1, index=%i)"
        ),
    ),
    bad("IR052", "self: .* 0 to 30, found 0 to 31", step("%c = aten.one_hot.default(self=%input_ids, num_classes=31)")),
    bad("IR053", "index: 1 isn't known to lie in dimension 1", step("%c = aten.select.int(self=%h1, dim=1, index=1)")),
    bad("IR053", "index: -2 isn't known to lie", step("%c = aten.select.int(self=%h1, dim=-2, index=-2)")),
    bad("IR053", "index: expected a number, found a size", step("%c = aten.select.int(self=%h1, dim=1, index=T)")),
    bad("IR053", "k: 2 isn't known to lie", step("%c, %d = aten.topk.default(self=%h1, k=2, dim=1)")),
    bad(
        "IR053",
        r"start: \(-1 \* T\) isn't known to be at least 0",
        step("%c = aten.slice.Tensor(self=%h1, dim=1, start=(-1 * T), end=0)"),
    ),
    bad(
        "IR053",
        r"\(-5 \+ T\) isn't known to be at least 0",
        step("%c = aten.slice.Tensor(self=%h1, dim=1, start=5, end=T)"),
    ),
    bad(
        "IR052",
        r"block look\[0\] precast.embedding: ids: expected indices .* 0 to 31, found 0 to 40 in %at",
        block(
            "look { inputs { %at: int64[1, T] } params { %w: float32[32, 16] } "
            "%e = precast.embedding(ids=%at, weight=%w) return %e }"
        ),
        step(
            " ".join(
                f"%i{most} = aten.clamp.default(self=%input_ids, min={0 if most < 40 else 40}, max={most}) "
                f"%e{most} = call look(at=%i{most}, w=%embed)"
                for most in (*range(20, 31), 40)
            )
        ),
    ),
    bad(
        "IR054",
        f"takes {2**31 + 16} bytes in the smallest step, expected at most {2**31}",
        param(f'%wide: int8[{2**29}] = read("wide", [{2**29}], int8)'),
        step(f"%c = aten.one_hot.default(self=%input_ids, num_classes={2**28 + 2})"),
    ),
    bad(
        "IR054",
        f"takes {2**43} bytes in the smallest step, expected at most {2**28}",
        step(f"%c = aten.one_hot.default(self=%input_ids, num_classes={2**40})"),
    ),
    bad(
        "IR055",
        "expected an output logits that the graph computes, found %head, which the graph is given",
        ("logits=%logits", "logits=%head"),
    ),
    bad("IR055", "found no output logits", ("logits=%logits", "scores=%logits")),
    bad("IR055", r"logits: expected \[1, R, V\] .*, found float32\[1, T, 16\]", ("logits=%logits", "logits=%h2")),
    bad(
        "IR056",
        r"input %mask: bool\[1, T\]: no step gives it; expected some of cu_seqlens, indices_full, .*, start_local$",
        ("  %logit_rows: int64[R]", "  %logit_rows: int64[R] %mask: bool[1, T]"),
    ),
    bad(
        "IR056",
        r"input %indices_local: .*; expected some of cu_seqlens, input_ids, kv_lens, logit_rows, positions, rope_len",
        *NO_CACHES[1:],
    ),
    bad(
        "IR057",
        r"main\[3\] precast.attention: sees the tokens of this step alone",
        step(SIGHT.format("k1", "cu_seqlens")),
    ),
    bad(
        "IR057",
        r"block look\[0\] precast.attention: sees",
        block(
            "look { inputs { %x: float32[1, T, 2, 4] %cu: int32[(B + 1)] } "
            f"{SIGHT.format('x', 'cu')} return %seen }}"
        ),
        step("%a = call look(x=%k1, cu=%cu_seqlens)"),
    ),
    bad("IR058", "capture: the size 4 stands there twice", sizes(1, 4, 2, 4)),
    bad("IR058", "capture: expected steps of 1 to 16384 tokens, found 0", ("T: 1..", "T: 0.."), sizes(0)),
    bad("IR058", "expected steps of 1 to 16384 tokens, found 16385", sizes(8, limits.MAX_CAPTURED_TOKENS + 1)),
    bad("IR058", "expected steps of 2 to 8 tokens, found 1", ("T: 1..", "T: 2..8"), sizes(2, 1, 8)),
    bad("IR058", "expected steps of 2 to 8 tokens, found 9", ("T: 1..", "T: 2..8"), sizes(9)),
    bad("IR058", "129 sizes; at most 128 are allowed", sizes(*range(1, limits.MAX_CAPTURED_SIZES + 2))),
    bad("IR060", "expected the world of one rank first", WORLD, shards("world(tp=2, ep=[1])")),
    bad("IR060", "world 2: is declared twice", WORLD, shards("world(tp=1, ep=[1]) " + 2 * "world(tp=2, ep=[1]) ")),
    bad("IR060", "divide the ranks, found 1, 3", WORLD, shards("world(tp=1, ep=[1]) world(tp=4, ep=[1, 3])")),
    bad("IR060", "divide the ranks, found none", WORLD, shards("world(tp=1, ep=[1]) world(tp=4, ep=[])")),
    bad("IR060", "the symbol rank is not declared", shards("world(tp=1, ep=[1]) world(tp=4, ep=[1])")),
    bad("IR060", "tp is 16, outside of", WORLD, shards("world(tp=1, ep=[1]) world(tp=16, ep=[1])")),
    bad("IR060", "257 worlds; at most 256", WORLD, shards(257 * "world(tp=1, ep=[1]) ")),
    bad("IR061", r"floordiv\(2, tp\) is no size where tp is 4", WORLD, WORLDS, part("floordiv(2, tp)")),
    bad("IR061", "101 tokens, expected more than 75 and at most 100", *vocabulary("floordiv(101, tp)", 101)),
    bad("IR061", "6 tokens, expected more than 6 and at most 6", *vocabulary("ceildiv(6, tp)", 6)),
    bad("IR062", "there is no block lost", row(block='"lost"')),
    bad("IR062", "%x is no param", row(params="[%x]")),
    bad("IR062", "%lost is nothing that block layer makes", row(nodes="[%lost]")),
    bad("IR062", "expected a reason", row(mode='"replicated"')),
    bad("IR062", "expected a reason", row(reason='"why not"')),
    bad("IR062", "a group where there is a collective", row(group='""')),
    bad("IR063", "%sum, a part of a sum, is never summed", WORLD, part("ceildiv(16, tp)"), step(PRODUCT)),
    bad(
        "IR063",
        "takes %sum, a part of a sum, before it is summed",
        WORLD,
        part("ceildiv(16, tp)"),
        step(f"{PRODUCT} %n = aten.silu.default(self=%sum)"),
        also=(),
    ),
    bad(
        "IR063",
        "takes %sum, a part of a sum, before it is summed",
        WORLD,
        part("ceildiv(16, tp)"),
        step(f'{PRODUCT} %n = aten.add.Tensor(self=%sum, other=%h1) %all = precast.all_reduce(x=%n, group="tp")'),
    ),
    bad(
        "IR063",
        "%all is no part of a sum",
        WORLD,
        part("ceildiv(16, tp)"),
        step(f'{PRODUCT} %all = precast.all_reduce(x=%sum, group="tp") %two = precast.all_reduce(x=%all, group="tp")'),
    ),
    bad("IR064", "each of a call or more, and 1 calls in all", shards("world(tp=1, ep=[1]) pipeline(layers=[1, 1])")),
    bad("IR064", "two stages or more, each", shards("world(tp=1, ep=[1]) pipeline(layers=[2])"), *TWO_CALLS),
    bad("IR064", "pipeline 2: is declared twice", shards(2 * "pipeline(layers=[1, 1]) "), *TWO_CALLS),
    bad("IR064", "at most 64 stages", shards(f"pipeline(layers={[1] * 65})"), *TWO_CALLS),
    bad("IR064", "1025 overrides", shards(1025 * 'override(pattern="norm", choice="row") ')),
]


def test_the_base_graph_is_valid() -> None:
    assert verify(parse_graph(BASE), MODEL) == ()


@pytest.mark.parametrize("case", ACCEPTED, ids=lambda case: f"{case.rule}-{case.edits[0][1][:30]}")
def test_a_rule_lets_this_pass(case: Case) -> None:
    assert case.graph() != parse_graph(BASE) or case.rule == "IR031"
    assert verify(case.graph(), MODEL) == ()


@pytest.mark.parametrize("case", REJECTED, ids=lambda case: f"{case.rule}-{case.message[:40]}")
def test_a_rule_refuses_this(case: Case) -> None:
    found = verify(case.graph(), MODEL)
    assert {violation.rule for violation in found} == {case.rule, *case.also}
    lines = [f"{item.where}: {item.message}" for item in found if item.rule == case.rule]
    assert any(re.search(case.message, line) for line in lines), lines


def test_every_rule_is_seen_to_accept_and_to_refuse() -> None:
    ids = [rule.id for rule in RULES]
    assert ids == sorted(set(ids))
    assert {case.rule for case in ACCEPTED} == set(ids)
    assert {case.rule for case in REJECTED} == set(ids)


def test_all_violations_are_reported_at_once() -> None:
    source = BASE.replace("weight=%w, eps=1e-06", "weight=%w, eps=1").replace("tie(%embed)", "tie(%lost)")
    with pytest.raises(BundleError, match="breaks 2 of the language's rules") as error:
        check(parse_graph(source))
    assert error.value.code == "graph-invalid"
    assert "IR021 block layer[0] precast.rms_norm: eps: expected float, found int 1" in error.value.message
    assert "IR036 param %head: tied to %lost, which is no param" in error.value.message


def test_a_long_list_of_violations_is_counted() -> None:
    names = " ".join(f"%c{i}: int8[S{i}]" for i in range(limits.MAX_LISTED + 3))
    with pytest.raises(BundleError, match="and 3 more"):
        check(parse_graph(BASE.replace("constants {", "constants { " + names)))


def test_a_fault_is_reported_where_it_is_first_met() -> None:
    source = BASE.replace("constants {", "constants { %c: int8[S] %d: int8[S]").replace(
        "scale=0.5)", "scale=0.5) %e: int8[S] = x.y()"
    )
    (violation,) = (violation for violation in verify(parse_graph(source)) if violation.rule == "IR011")
    assert violation.where == "main %c"


def test_cache_ops_are_counted_over_all_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify_caches, "MAX_CACHE_OPS", 4)
    assert verify(tiny_graph(2)) == ()
    (violation,) = verify(tiny_graph(3))
    assert (violation.rule, violation.where) == ("IR047", "main[4] call layer")


def test_a_valid_graph_passes_the_check() -> None:
    check(tiny_graph(3))


WORDS = list(words(BASE))[:-1]
SYMBOLS = {symbol.name for symbol in parse_graph(BASE).symbols}


def sort_of(word: Word) -> str:
    """What a word can be exchanged with and still parse; "" for nothing."""
    if word.kind != "name":
        return word.kind if word.kind in ("ref", "int", "float", "string") else ""
    if word.text in get_args(Dtype):
        return "dtype"
    return "symbol" if word.text in SYMBOLS else "op" if "." in word.text else ""


EXCHANGES = [
    (index, other.text)
    for index, word in enumerate(WORDS)
    for other in WORDS
    if sort_of(word) and sort_of(word) == sort_of(other)
]


@settings(max_examples=300)
@given(st.lists(st.sampled_from(EXCHANGES), min_size=1, max_size=4))
def test_a_spoilt_graph_never_breaks_the_verifier(exchanges: list[tuple[int, str]]) -> None:
    spoilt = [word.text for word in WORDS]
    for index, text in exchanges:
        spoilt[index] = text
    graph = parsed(" ".join(spoilt))
    assert graph is None or all(isinstance(violation, Violation) for violation in verify(graph))


def parsed(source: str) -> Graph | None:
    try:
        return parse_graph(source)
    except TextError:
        return None


def test_groups_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_GROUPS", 1)
    (violation,) = verify(parse_graph(BASE))
    assert (violation.rule, violation.where) == ("IR049", "caches")
    assert violation.message == "expected at most 1 groups, found 2"
