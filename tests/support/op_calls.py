"""A call of each of our own ops by the types of its arguments, and what the op gives: what shape rules accept."""

from __future__ import annotations

from typing import Any

from graph_text import parse_steps

from precast.ir.graph.schema import Apply, Dtype, Expr, TensorType
from precast.ir.graph.symbols import mul

T1 = Apply("add", ("T", 1))
HEADS, PAIRS = Apply("floordiv", (16, "tp")), Apply("floordiv", (8, "tp"))
Args = dict[str, Any]
GATHERED = Apply("mul", (HEADS, "tp"))
ALONG: Args = {"dim": 1, "group": "tp", "size": "tp"}


def t(dtype: Dtype, *shape: Expr) -> TensorType:
    return TensorType(dtype, shape)


def f32(*shape: Expr) -> TensorType:
    return TensorType("float32", shape)


Q, K, PAGES = t("bfloat16", 1, "T", 8, 16), t("bfloat16", 1, "T", 2, 16), t("bfloat16", "P", 4, 2, 16)
PAGES8 = t("float8_e4m3fn", "P", 4, 2, 16)
SCALES: Args = {"k_scale": f32(1), "v_scale": f32(1)}
B1 = Apply("add", ("B", 1))
PAGED: Args = {
    "q": Q, "k_cache": PAGES, "v_cache": PAGES, "sinks": None, "cu_seqlens": t("int32", B1), "kv_lens": t("int32", "B"),
    "page_indices": t("int32", "N"), "page_indptr": t("int32", B1), "page_start": t("int32", "B"), "window": None,
}  # fmt: skip
PACKED: Args = {"q": Q, "k": K, "v": K, "sinks": None, "cu_seqlens": t("int32", B1), "window": None}
WRITE: Args = {"k": K, "v": K, "k_cache": PAGES, "v_cache": PAGES, "slot_mapping": t("int64", "T")}
TURNED: Args = {
    **WRITE, "q": Q, "cos": f32(1, "T", 8), "sin": f32(1, "T", 8), "q_weight": f32(16), "k_weight": f32(16),
    "eps": 1e-6,
}  # fmt: skip
LATENT: Args = {"latent": f32(1, "T", 16), "k_rope": f32(1, "T", 3)}
LATENT_HEADS: Args = {"q": f32(1, "T", 4, 10), "weight": f32(60, 16), "cu_seqlens": t("int32", B1), "value_size": 8}
LATENT_PAGES: Args = {
    **LATENT_HEADS, "cache": f32("P", 4, 19), "kv_lens": t("int32", "B"), "page_indices": t("int32", "N"),
    "page_indptr": t("int32", B1), "page_start": t("int32", "B"),
}  # fmt: skip
INDEX_KEYS: Args = {"q": f32(1, "T", 3, 6), "weights": f32(1, "T", 3), "count": 5}
SELECT: Args = {**INDEX_KEYS, "k": f32(1, "T", 6), "cu_seqlens": t("int32", B1)}
SELECT_PAGES: Args = {
    **INDEX_KEYS, "cache": f32("P", 4, 6), **{name: LATENT_PAGES[name] for name in (
        "cu_seqlens", "kv_lens", "page_indices", "page_indptr", "page_start")},
}  # fmt: skip
BLOCKS_OF: Args = {"q": f32(1, "T", 2, 6), "count": 5, "block_size": 3, "local": 1}
SELECT_BLOCKS: Args = {**BLOCKS_OF, "k": f32(1, "T", 6), "cu_seqlens": t("int32", B1)}
SELECT_BLOCKS_PAGES: Args = {**SELECT_PAGES, **BLOCKS_OF}
del SELECT_BLOCKS_PAGES["weights"]
BLOCKS: Args = {"selected": t("int32", 1, "T", 2, 5), "block_size": 3}
BLOCKS_PACKED: Args = {name: x for name, x in PACKED.items() if name not in ("sinks", "window")} | BLOCKS
BLOCKS_PAGES: Args = {name: x for name, x in PAGED.items() if name not in ("sinks", "window")} | BLOCKS
WRITE_INDEX: Args = {"k": f32(1, "T", 6), "cache": f32("P", 4, 6), "slot_mapping": t("int64", "T")}
ENTRY_HEADS: Args = {"q": f32(1, "T", 3, 6), "scale": 0.5, "rate": 4}
ENTRIES: Args = {**ENTRY_HEADS, "entries": f32(1, "T", 6), "cu_seqlens": t("int32", B1)}
ENTRY_PAGES: Args = {
    **ENTRY_HEADS, "cache": f32("P", 2, 6), **{name: LATENT_PAGES[name] for name in (
        "cu_seqlens", "kv_lens", "page_indices", "page_indptr", "page_start")},
}  # fmt: skip
WRITE_ENTRIES: Args = {
    "entries": f32(1, "T", 6), "cache": f32("P", 2, 6), "slot_mapping": t("int64", "T"), "rate": 4,
}  # fmt: skip
NAMED_ENTRIES: Args = {"selected": t("int32", 1, "T", 5)}
ENTRY_CHOICE: Args = {"weights": f32(1, "T", 3), "count": 5}
SELECTED: Args = {"selected": t("int32", 1, "T", 5), "sinks": None}
FUSED: Args = {
    "x0": f32(1, "T", 8), "x1": f32(8), "steps": parse_steps(
        "{%s0 = aten.silu.default(self=%x0), %s1 = aten.silu.default(self=%x1), "
        "%s2 = aten.mul.Tensor(self=%s0, other=%s1), return %s2}"
    ),
}  # fmt: skip
GPTQ: Args = {
    "input": f32(1, "T", 48), "weight": t("int32", 6, 24), "scales": t("float16", 3, 24), "zeros": t("int32", 3, 3),
    "groups": t("int32", 48), "bias": f32(24), "format": "gptq", "zero_offset": 1,
}  # fmt: skip
FP8: Args = {
    "input": t("bfloat16", 1, "T", 45), "weight": t("float8_e4m3fn", 27, 45), "scales": f32(7, 6), "format": "fp8",
    "block": (4, 8), "activation": "fp8_tensor", "input_scale": f32(1),
}  # fmt: skip
ROUNDED: Args = {
    "input": t("float8_e4m3fn", 1, "T", 45), "input_scales": f32(1, "T", 1), "weight": t("float8_e4m3fn", 27, 45),
    "scales": f32(7, 6), "input_scale": None, "bias": t("bfloat16", 27), "format": "fp8", "block": (4, 8),
    "dtype": "bfloat16", "activation": "fp8_token",
}  # fmt: skip
# what a rank has of a layer: of its inputs, with one scale for the whole; of its rows, in blocks; of its groups
FP8_OF_A_RANK: Args = {
    "input": t("bfloat16", 1, "T", mul(128, PAIRS)), "weight": t("float8_e4m3fn", 512, mul(128, PAIRS)),
    "scales": f32(1, 1), "format": "fp8", "block": (512, 1024),
}  # fmt: skip
FP8_OF_ROWS: Args = {
    "input": t("bfloat16", 1, "T", 256), "weight": t("float8_e4m3fn", mul(128, PAIRS), 256),
    "scales": f32(PAIRS, 2), "format": "fp8", "block": (128, 128), "bias": t("bfloat16", mul(128, PAIRS)),
}  # fmt: skip
TABLE: Args = {
    "ids": t("int64", 1, "T"), "weight": t("float8_e4m3fn", 99, 27), "scales": f32(25, 4), "format": "fp8",
    "block": (4, 8), "dtype": "bfloat16",
}  # fmt: skip
TABLE_OF_A_RANK: Args = {
    **TABLE, "weight": t("float8_e4m3fn", mul(128, PAIRS), 27), "scales": f32(1, 27), "block": (1024, 1),
    "start": mul(128, PAIRS),
}  # fmt: skip
PACKED4: Args = {
    "input": t("bfloat16", 1, "T", mul(64, PAIRS)), "weight": t("int32", 512, mul(8, PAIRS)),
    "scales": t("bfloat16", 512, mul(2, PAIRS)), "zeros": t("int32", 64, mul(2, PAIRS)), "format": "packed4",
}  # fmt: skip
MXFP4: Args = {
    "input": f32("T", 64), "weight": t("uint8", 9000, 2, 16), "scales": t("uint8", 9000, 2), "format": "mxfp4",
}  # fmt: skip
NVFP4: Args = {
    "input": f32(1, "T", 48), "weight": t("uint8", mul(16, PAIRS), 24),
    "scales": t("float8_e4m3fn", mul(16, PAIRS), 3), "global_scale": f32(mul(16, PAIRS), 1), "format": "nvfp4",
}  # fmt: skip
WRITE_LATENT: Args = {**LATENT, "cache": f32("P", 4, 19), "slot_mapping": t("int64", "T")}
SCAN_CHANNELS: Args = {
    "x": f32(1, "T", 6), "dt": f32(1, "T", 6), "a": f32(6, 5), "b": f32(1, "T", 5), "c": f32(1, "T", 5), "d": f32(6),
    "dt_bias": f32(6), "softplus": True,
}  # fmt: skip
SCAN_HEADS: Args = {
    "x": f32(1, "T", 6, 4), "dt": f32(1, "T", 6), "a": f32(6), "b": f32(1, "T", 2, 5), "c": f32(1, "T", 2, 5),
    "d": f32(6), "dt_bias": f32(6), "softplus": True, "dt_min": 0.0, "dt_max": float("inf"),
}  # fmt: skip
DELTA: Args = {
    "q": f32(1, "T", 2, 5), "k": f32(1, "T", 2, 5), "v": f32(1, "T", 6, 4), "decay": f32(1, "T", 6),
    "beta": f32(1, "T", 6), "scale": 1.0, "normalise": True,
}  # fmt: skip
# op, its arguments but for states and metadata, a sequence's state, the result
STATES: list[tuple[str, Args, TensorType, TensorType]] = [
    (
        "causal_conv",
        {"x": f32(1, "T", 6), "weight": f32(6, 4), "bias": f32(6), "activation": "silu"},
        f32("P", 6, 3),
        f32(1, "T", 6),
    ),
    (
        "compress",
        {"kv": f32(1, "T", 12), "gate": f32(1, "T", 12), "bias": f32(8, 6)},
        f32("P", 2, 8, 12),
        f32(1, "T", 6),
    ),
    ("selective_scan", SCAN_CHANNELS, f32("P", 6, 5), f32(1, "T", 6)),
    ("state_space_scan", SCAN_HEADS, f32("P", 6, 4, 5), f32(1, "T", 6, 4)),
    ("delta_rule", DELTA, f32("P", 6, 5, 4), f32(1, "T", 6, 4)),
    (
        "linear_attention",
        {"q": f32(1, "T", 6, 5), "k": f32(1, "T", 6, 5), "v": f32(1, "T", 6, 4), "decay": f32(6), "scale": 1.0},
        f32("P", 6, 5, 4),
        f32(1, "T", 6, 4),
    ),
    ("linear_recurrence", {"x": f32(1, "T", 6), "factor": f32(1, "T", 6)}, f32("P", 6), f32(1, "T", 6)),
    (
        "wkv",
        {"k": f32(1, "T", 6), "v": f32(1, "T", 6), "decay": f32(6), "first": f32(6)},
        f32("P", 3, 6),
        f32(1, "T", 6),
    ),
]
BOUNDS: Args = {"cu_seqlens": t("int32", B1)}
SLOTS: Args = {**BOUNDS, "slots": t("int32", "B"), "kv_lens": t("int32", "B")}
ROUTE: Args = {"logits": f32("T", 12), "bias": f32(12), "scoring": "sigmoid", "top_k": 4, "dtype": "float16"}
GROUPED: Args = {
    "x": f32("T", 6), "weight": f32(3, 8, 6), "bias": f32(3, 8), "expert_ids": t("int64", "T"),
}  # fmt: skip
EXPERTS: Args = {
    "x": f32("T", 6), "expert_ids": t("int64", "T", 2), "expert_weights": f32("T", 2), "up": f32(3, 8, 6),
    "down": f32(3, 6, 4), "up_bias": f32(3, 8), "down_bias": f32(3, 6), "activation": "silu", "gated": True,
}  # fmt: skip
F8 = "float8_e4m3fn"
BLOCK_EXPERTS: Args = {
    "x": f32("T", 6), "expert_ids": t("int64", "T", 2), "expert_weights": f32("T", 2), "up": t(F8, 3, 8, 6),
    "down": t(F8, 3, 6, 4), "up_scales": f32(3, 3, 2), "down_scales": f32(3, 2, 2), "up_bias": f32(3, 8),
    "down_bias": f32(3, 6), "format": "fp8", "up_block": (3, 4), "down_block": (3, 2), "activation": "silu",
    "gated": True,
}  # fmt: skip
PACKED_EXPERTS: Args = {
    "x": f32("T", 16), "expert_ids": t("int64", "T", 2), "expert_weights": f32("T", 2), "up": t("int32", 3, 16, 2),
    "down": t("int32", 3, 16, 1), "up_scales": f32(3, 16, 4), "down_scales": f32(3, 16, 1),
    "up_zeros": t("int32", 3, 2, 4), "down_zeros": t("int32", 3, 2, 1), "up_bias": None, "down_bias": None,
    "format": "packed4", "zero_offset": 1, "activation": "relu", "gated": True,
}  # fmt: skip
NVFP4_EXPERTS: Args = {
    "x": f32("T", 16), "expert_ids": t("int64", "T", 2), "expert_weights": f32("T", 2), "up": t("uint8", 3, 32, 8),
    "down": t("uint8", 3, 16, 16), "up_scales": t(F8, 3, 32, 1), "down_scales": t(F8, 3, 16, 2),
    "up_global_scale": f32(3, 32, 1), "down_global_scale": f32(3, 1, 1), "up_bias": None, "down_bias": None,
    "format": "nvfp4", "activation": "relu2", "gated": False,
}  # fmt: skip
ROPE: Args = {"lengths": t("int64", 1, "T"), "short": f32(8), "long": f32(8), "kind": "longrope"}
TABLES: Args = {"positions": t("int64", 1, "T"), "inv_freq": f32(8), "dtype": "bfloat16"}
ROTARY: Args = {"x": Q, "cos": f32(1, "T", 8), "sin": f32(1, "T", 8)}
SAMPLE: Args = {
    "logits": f32("B", 99), "temperature": f32("B"), "top_k": t("int32", "B"), "top_p": f32("B"), "min_p": f32("B"),
    "seeds": t("int64", "B"), "steps": t("int64", "B"),
}  # fmt: skip
NORM: Args = {"x": f32(1, "T", 8), "weight": f32(8)}
GATED: Args = {"input": f32(1, "T", 8), "weight": f32(6, 8), "bias": f32(6), "kind": "silu"}
STREAM: Args = {**NORM, "residual": f32(1, "T", 8)}
TWO_NORMS: Args = {**STREAM, "inner_weight": f32(8)}

OURS: list[tuple[str, Args, tuple[TensorType, ...]]] = [
    ("embedding", {"ids": t("int64", 1, "T"), "weight": f32(99, 8)}, (f32(1, "T", 8),)),
    ("embedding", {"ids": t("int64", "T"), "weight": t("int64", 99, 8)}, (t("int64", "T", 8),)),
    ("sharded_embedding", {"ids": t("int64", 1, "T"), "weight": f32(99, 8), "start": 99}, (f32(1, "T", 8),)),
    ("quantised_embedding", TABLE, (t("bfloat16", 1, "T", 27),)),
    ("quantised_embedding", {**TABLE, "scales": f32(1, 1), "block": (99, 27)}, (t("bfloat16", 1, "T", 27),)),
    ("quantised_sharded_embedding", {**TABLE, "start": 99}, (t("bfloat16", 1, "T", 27),)),
    ("quantised_sharded_embedding", TABLE_OF_A_RANK, (t("bfloat16", 1, "T", 27),)),
    ("rms_norm", NORM, (f32(1, "T", 8),)),
    ("rms_norm", {**NORM, "weight": None}, (f32(1, "T", 8),)),
    ("residual_rms_norm", STREAM, (f32(1, "T", 8), f32(1, "T", 8))),
    ("norm_residual_norm", TWO_NORMS, (f32(1, "T", 8), f32(1, "T", 8))),
    ("layer_norm", {**NORM, "bias": f32(8)}, (f32(1, "T", 8),)),
    ("layer_norm", {**NORM, "weight": None, "bias": None}, (f32(1, "T", 8),)),
    ("rope_frequencies", ROPE, (f32(1, "T", 8),)),
    ("rope_frequencies", {**ROPE, "long": None, "kind": "dynamic"}, (f32(1, "T", 8),)),
    ("rotary_tables", TABLES, (t("bfloat16", 1, "T", 8),) * 2),
    ("rotary_tables", {**TABLES, "inv_freq": f32(1, "T", 8)}, (t("bfloat16", 1, "T", 8),) * 2),
    ("rotary", ROTARY, (Q,)),
    ("rotary", {**ROTARY, "cos": f32(1, "T", 3), "sin": f32(1, "T", 3)}, (Q,)),
    ("rotary", {**ROTARY, "cos": f32(1, "T", PAIRS), "sin": f32(1, "T", PAIRS)}, (Q,)),
    ("gated_activation", {"x": f32(1, "T", 6), "kind": "silu"}, (f32(1, "T", 3),)),
    ("gated_activation", {"x": f32("T", Apply("mul", ("H", 2))), "kind": "gelu"}, (f32("T", "H"),)),
    ("gated_linear", GATED, (f32(1, "T", 3),)),
    ("gated_linear", {**GATED, "bias": None, "kind": "gelu_tanh"}, (f32(1, "T", 3),)),
    ("quantised_linear", GPTQ, (f32(1, "T", 24),)),
    ("quantised_linear", {**GPTQ, "groups": None}, (f32(1, "T", 24),)),
    ("quantised_linear", FP8, (t("bfloat16", 1, "T", 27),)),
    ("quantised_linear", FP8_OF_A_RANK, (t("bfloat16", 1, "T", 512),)),
    ("quantised_linear", FP8_OF_ROWS, (t("bfloat16", 1, "T", mul(128, PAIRS)),)),
    ("quantised_linear", PACKED4, (t("bfloat16", 1, "T", 512),)),
    ("quantised_linear", MXFP4, (f32("T", 9000),)),
    ("quantised_linear", NVFP4, (f32(1, "T", mul(16, PAIRS)),)),
    ("rounded_linear", ROUNDED, (t("bfloat16", 1, "T", 27),)),
    (
        "rounded_rms_norm",
        {**NORM, "activation": "fp8_token"},
        (t("float8_e4m3fn", 1, "T", 8), f32(1, "T", 1)),
    ),
    (
        "rounded_rms_norm",
        {**NORM, "weight": None, "activation": "fp8_tensor", "input_scale": f32(1)},
        (t("float8_e4m3fn", 1, "T", 8), f32(1, "T", 1)),
    ),
    (
        "rounded_residual_rms_norm",
        {**STREAM, "activation": "int8_token"},
        (t("int8", 1, "T", 8), f32(1, "T", 1), f32(1, "T", 8)),
    ),
    (
        "rounded_gated_activation",
        {"x": f32(1, "T", 600), "kind": "silu", "activation": "fp8_group"},
        (t("float8_e4m3fn", 1, "T", 300), f32(1, "T", 3)),
    ),
    (
        "rounded_gated_activation",
        {"x": f32(1, "T", 600), "kind": "silu", "activation": "fp8_group_e8m0"},
        (t("float8_e4m3fn", 1, "T", 300), f32(1, "T", 3)),
    ),
    ("fused", FUSED, (f32(1, "T", 8),)),
    ("attention", PACKED, (Q,)),
    ("attention", {**PACKED, "v": t("bfloat16", 1, "T", 2, 24), "window": 7}, (t("bfloat16", 1, "T", 8, 24),)),
    ("attention", {**PACKED, "q": t("bfloat16", 1, "T", HEADS, 16)}, (t("bfloat16", 1, "T", HEADS, 16),)),
    ("attention", {**PACKED, "slopes": f32(8), "chunk": 7}, (Q,)),
    (
        "attention",
        {**PACKED, "q": t("bfloat16", 1, "T", HEADS, 16), "slopes": f32(HEADS), "window": 3},
        (t("bfloat16", 1, "T", HEADS, 16),),
    ),
    ("attention", {**PACKED, "bias": f32(1, "T", 8, 33)}, (Q,)),
    ("write_kv", WRITE, ()),
    ("write_kv", {**WRITE, "k_cache": PAGES8, "v_cache": PAGES8}, ()),
    ("write_kv", {**WRITE, "k_cache": PAGES8, "v_cache": PAGES8, **SCALES}, ()),
    ("rotary_write_kv", TURNED, (Q,)),
    ("rotary_write_kv", {**TURNED, "k_cache": PAGES8, "v_cache": PAGES8, **SCALES}, (Q,)),
    ("rotary_write_kv", {**TURNED, "q_weight": None}, (Q,)),
    (
        "rotary_write_kv",
        {**TURNED, "q_weight": None, "k_weight": None, "eps": None, "k_cache": PAGES8, "v_cache": PAGES8},
        (Q,),
    ),
    ("write_latent", {**WRITE_LATENT, "cache": t("float8_e4m3fn", "P", 4, 19)}, ()),
    ("paged_attention", {**PAGED, "k_cache": PAGES8, "v_cache": PAGES8}, (Q,)),
    ("paged_attention", {**PAGED, "k_cache": PAGES8, "v_cache": PAGES8, **SCALES}, (Q,)),
    ("paged_latent_attention", {**LATENT_PAGES, "cache": t("float8_e4m3fn", "P", 4, 19)}, (f32(1, "T", 4, 8),)),
    ("paged_attention", PAGED, (Q,)),
    ("paged_attention", {**PAGED, "sinks": f32(8), "window": 1}, (Q,)),
    ("paged_attention", {**PAGED, "slopes": f32(8), "chunk": 1}, (Q,)),
    ("paged_attention", {**PAGED, "bias": t("bfloat16", 1, "T", 8, 1)}, (Q,)),
    ("paged_attention", {**PAGED, "v_cache": t("bfloat16", "P", 4, 2, 3)}, (t("bfloat16", 1, "T", 8, 3),)),
    *((name, {**args, **BOUNDS}, (result,)) for name, args, _, result in STATES),
    *((f"stateful_{name}", {**args, **SLOTS, "state": state}, (result,)) for name, args, state, result in STATES),
    ("route", ROUTE, (t("float16", "T", 4), t("int64", "T", 4))),
    ("grouped_linear", GROUPED, (f32("T", 8),)),
    ("experts", EXPERTS, (f32("T", 6),)),
    ("quantised_experts", BLOCK_EXPERTS, (f32("T", 6),)),
    ("quantised_experts", PACKED_EXPERTS, (f32("T", 16),)),
    ("quantised_experts", NVFP4_EXPERTS, (f32("T", 16),)),
    ("latent_attention", {**LATENT, **LATENT_HEADS}, (f32(1, "T", 4, 8),)),
    ("write_latent", WRITE_LATENT, ()),
    ("paged_latent_attention", LATENT_PAGES, (f32(1, "T", 4, 8),)),
    ("write_index_keys", {**WRITE_INDEX, "cache": t("float8_e4m3fn", "P", 4, 6)}, ()),
    ("write_index_keys", WRITE_INDEX, ()),
    ("select_keys", SELECT, (t("int32", 1, "T", 5),)),
    ("paged_select_keys", {**SELECT_PAGES, "cache": t("float8_e4m3fn", "P", 4, 6)}, (t("int32", 1, "T", 5),)),
    ("paged_select_keys", SELECT_PAGES, (t("int32", 1, "T", 5),)),
    ("write_entries", {**WRITE_ENTRIES, "cache": t("float8_e4m3fn", "P", 2, 6)}, ()),
    ("write_entries", WRITE_ENTRIES, ()),
    ("entry_attention", {**ENTRIES, **NAMED_ENTRIES}, (f32(1, "T", 3, 6), f32(1, "T", 3))),
    ("entry_attention", {**ENTRIES, "rate": 1, "window": 3}, (f32(1, "T", 3, 6), f32(1, "T", 3))),
    ("paged_entry_attention", {**ENTRY_PAGES, **NAMED_ENTRIES}, (f32(1, "T", 3, 6), f32(1, "T", 3))),
    ("paged_entry_attention", {**ENTRY_PAGES, "rate": 1, "window": 3}, (f32(1, "T", 3, 6), f32(1, "T", 3))),
    ("select_entries", {**ENTRIES, **ENTRY_CHOICE}, (t("int32", 1, "T", 5),)),
    ("paged_select_entries", {**ENTRY_PAGES, **ENTRY_CHOICE}, (t("int32", 1, "T", 5),)),
    ("sparse_latent_attention", {**LATENT, **LATENT_HEADS, **SELECTED}, (f32(1, "T", 4, 8),)),
    (
        "paged_sparse_latent_attention",
        {**LATENT_PAGES, **SELECTED, "sinks": t("bfloat16", 4), "cache": t("float8_e4m3fn", "P", 4, 19)},
        (f32(1, "T", 4, 8),),
    ),
    ("paged_sparse_latent_attention", {**LATENT_PAGES, **SELECTED}, (f32(1, "T", 4, 8),)),
    ("select_blocks", SELECT_BLOCKS, (t("int32", 1, "T", 2, 5),)),
    ("select_blocks", {**SELECT_BLOCKS, "local": 0}, (t("int32", 1, "T", 2, 5),)),
    (
        "paged_select_blocks",
        {**SELECT_BLOCKS_PAGES, "cache": t("float8_e4m3fn", "P", 4, 6)},
        (t("int32", 1, "T", 2, 5),),
    ),
    ("paged_select_blocks", SELECT_BLOCKS_PAGES, (t("int32", 1, "T", 2, 5),)),
    ("block_sparse_attention", BLOCKS_PACKED, (Q,)),
    ("paged_block_sparse_attention", {**BLOCKS_PAGES, "selected": t("int32", 1, "T", 4, 5)}, (Q,)),
    ("paged_block_sparse_attention", {**BLOCKS_PAGES, "k_cache": PAGES8, "v_cache": PAGES8, **SCALES}, (Q,)),
    ("paged_block_sparse_attention", BLOCKS_PAGES, (Q,)),
    ("sinkhorn", {"x": f32(1, "T", 9), "size": 3, "iterations": 20, "eps": 1e-6}, (f32(1, "T", 9),)),
    ("gather_rows", {"x": f32(1, "T", 8), "rows": t("int64", "R")}, (f32(1, "R", 8),)),
    ("sample", SAMPLE, (t("int64", "B"),)),
    ("all_reduce", {"x": f32(1, "T", 8), "group": "tp"}, (f32(1, "T", 8),)),
    ("all_reduce_residual_rms_norm", {**STREAM, "group": "tp"}, (f32(1, "T", 8), f32(1, "T", 8))),
    ("all_gather", {"x": f32(1, "T", HEADS), **ALONG, "dim": -1}, (f32(1, "T", GATHERED),)),
    ("all_gather", {"x": f32(1, 3, 8), **ALONG, "size": 2}, (f32(1, 6, 8),)),
    ("reduce_scatter", {"x": f32(1, "T", 16), **ALONG, "dim": 2}, (f32(1, "T", HEADS),)),
    ("reduce_scatter", {"x": f32(1, 6, 8), **ALONG, "size": 3}, (f32(1, 2, 8),)),
    ("send", {"x": t("bfloat16", 1, "T", 8), "group": "pp", "target": 1}, ()),
    ("receive", {"shape": (1, "T", 8), "dtype": "bfloat16", "group": "pp", "source": 0}, (t("bfloat16", 1, "T", 8),)),
]
