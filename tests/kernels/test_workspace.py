"""What records say of workspaces against what the implementations allocate on a GPU, for prompts, chunks, decoding, and
mixtures; and the bound for CPUs, which is not measured.

Sizes are large enough that tensors outweigh indices. Of a batch records know the number of sequences alone, so they may
be far above what one batch takes; for one sequence they must be near.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from allocations import peak_bytes
from op_samples import quantised, quantised_experts
from op_samples.draw import Draw
from op_samples.sequences import without_states
from op_samples.table import step_of

from precast.ir.graph import symbols
from precast.ir.graph.schema import Const, DtypeArg, Node, Ref, TensorType, Value
from precast.ir.memory.liveness import Operand
from precast.kernels import registry
from precast.kernels.choices import CPU_COPIES, CPU_COPIES_OF_OTHERS, cases, fitting, runnable, workspace
from precast.kernels.dtypes import NAMES
from precast.kernels.quantised_linear.quantised_linear import few_bits
from precast.kernels.sampling import sample as sampling
from precast.kernels.sampling.records import greedy_workspace
from precast.kernels.use import GPU, LONGEST, Target, Use

Sequences = list[tuple[int, int]]
Sample = dict[str, Any]

ROUNDED = 128 << 10
"""Bytes that the allocator's blocks may be larger than what was asked for."""
CUDA = torch.device("cuda")

ONE: list[Sequences] = [[(520, 520)], [(256, 700)]]
SEVERAL: list[Sequences] = [[(150, 150), (140, 200)], [(1, 50)] * 24, [(1, 300)] * 3 + [(100, 100), (3, 90)], [(1, 9)]]


def _normal(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.randn(shape).to(dtype)


def _tokens(sequences: Sequences) -> int:
    return sum(tokens for tokens, _ in sequences)


def _bounds(sequences: Sequences) -> Sample:
    bounds = [0, *itertools.accumulate(tokens for tokens, _ in sequences)]
    return {
        "cu_seqlens": torch.tensor(bounds, dtype=torch.int32),
        "kv_lens": torch.tensor([context for _, context in sequences], dtype=torch.int32),
    }


def _states(sequences: Sequences, dtype: torch.dtype, *shape: int) -> Sample:
    slots = torch.arange(len(sequences), dtype=torch.int32)
    return {"state": torch.zeros(len(sequences) + 1, *shape, dtype=dtype), "slots": slots, **_bounds(sequences)}


def _pages(sequences: Sequences) -> Sample:
    ends = [0, *itertools.accumulate(-(-context // 16) for _, context in sequences)]
    return {
        **_bounds(sequences),
        "page_indices": torch.arange(ends[-1], dtype=torch.int32),
        "page_indptr": torch.tensor(ends, dtype=torch.int32),
        "page_start": torch.zeros(len(sequences), dtype=torch.int32),
    }


def _conv(sequences: Sequences, dtype: torch.dtype) -> Sample:
    count, channels = _tokens(sequences), 512
    return {
        "x": _normal(dtype, 1, count, channels), "weight": _normal(dtype, channels, 4), "bias": None,
        **_states(sequences, dtype, channels, 3), "activation": "silu",
    }  # fmt: skip


def _state_space(sequences: Sequences, dtype: torch.dtype) -> Sample:
    count, heads = _tokens(sequences), 8
    return {
        "x": _normal(dtype, 1, count, heads, 64), "dt": _normal(dtype, 1, count, heads), "a": -torch.ones(heads),
        "b": _normal(dtype, 1, count, 2, 128), "c": _normal(dtype, 1, count, 2, 128), "d": torch.ones(heads),
        "dt_bias": torch.ones(heads), **_states(sequences, torch.float32, heads, 64, 128),
        "softplus": True, "dt_min": 0.0, "dt_max": float("inf"),
    }  # fmt: skip


def _selective(sequences: Sequences, dtype: torch.dtype) -> Sample:
    count, channels = _tokens(sequences), 512
    return {
        "x": _normal(dtype, 1, count, channels), "dt": _normal(dtype, 1, count, channels),
        "a": -torch.ones(channels, 16), "b": _normal(dtype, 1, count, 16), "c": _normal(dtype, 1, count, 16),
        "d": torch.ones(channels), "dt_bias": torch.ones(channels),
        **_states(sequences, torch.float32, channels, 16), "softplus": True,
    }  # fmt: skip


def _linear_attention(sequences: Sequences, dtype: torch.dtype, *, rowwise: bool = False) -> Sample:
    count, heads, size = _tokens(sequences), 6, 128
    decay = (1, count, heads, size) if rowwise else (1, count, heads)
    return {
        **{name: _normal(dtype, 1, count, heads, size) for name in "qkv"}, "decay": -torch.rand(decay),
        **_states(sequences, torch.float32, heads, size, size), "scale": 0.1,
    }  # fmt: skip


def _delta_rule(sequences: Sequences, dtype: torch.dtype, *, rowwise: bool = False) -> Sample:
    count, heads = _tokens(sequences), 6
    made = _linear_attention(sequences, dtype, rowwise=rowwise)
    few = {name: _normal(dtype, 1, count, 3, 128) for name in "qk"}
    return {**made, **few, "beta": _normal(dtype, 1, count, heads), "normalise": True}


def _recurrence(sequences: Sequences, dtype: torch.dtype) -> Sample:
    shape = (1, _tokens(sequences), 512)
    return {"x": _normal(dtype, *shape), "factor": torch.rand(shape).to(dtype),
            **_states(sequences, torch.float32, 512), "kind": "sum"}  # fmt: skip


def _wkv(sequences: Sequences, dtype: torch.dtype) -> Sample:
    shape = (1, _tokens(sequences), 512)
    return {"k": _normal(dtype, *shape), "v": _normal(dtype, *shape), "decay": -torch.rand(512),
            "first": torch.rand(512), **_states(sequences, torch.float32, 3, 512)}  # fmt: skip


def _attention(sequences: Sequences, dtype: torch.dtype, kv: torch.dtype | None = None, **rule: Any) -> Sample:
    pages = _pages(sequences)
    cache = (len(pages["page_indices"]), 16, 4, 64)
    return {
        "q": _normal(dtype, 1, _tokens(sequences), 16, 64), "k_cache": _normal(kv or dtype, *cache),
        "v_cache": _normal(kv or dtype, *cache), "sinks": None, **pages, "scale": 0.1, **rule,
    }  # fmt: skip


def _latent_attention(sequences: Sequences, dtype: torch.dtype, kv: torch.dtype | None = None) -> Sample:
    pages = _pages(sequences)
    return {
        "q": _normal(dtype, 1, _tokens(sequences), 16, 96),
        "cache": _normal(kv or dtype, len(pages["page_indices"]), 16, 288),
        "weight": _normal(dtype, 16 * (64 + 64), 256), **pages, "scale": 0.1, "value_size": 64,
    }  # fmt: skip


def _experts(sequences: Sequences, dtype: torch.dtype, **rule: Any) -> Sample:
    count = _tokens(sequences)
    return {
        "x": _normal(dtype, count, 256), "expert_ids": torch.randint(0, 8, (count, 4)),
        "expert_weights": _normal(dtype, count, 4), "up": _normal(dtype, 8, 256, 256),
        "down": _normal(dtype, 8, 256, 128), "up_bias": None, "down_bias": None, "activation": "silu", "gated": True,
        **rule,
    }  # fmt: skip


def _quantised_experts(sequences: Sequences, dtype: torch.dtype, **rule: Any) -> Sample:
    draw = Draw(dtype, torch.device("cpu"))
    return {**quantised_experts.experts(draw, quantised.mxfp4, _tokens(sequences), 4, 8, 256, 128), **rule}


def _route(sequences: Sequences, dtype: torch.dtype) -> Sample:
    return {
        "logits": _normal(dtype, _tokens(sequences), 256), "bias": torch.ones(256), "scoring": "sigmoid", "top_k": 8,
        "num_groups": 8, "top_groups": 4, "normalise": True, "dtype": dtype,
    }  # fmt: skip


def _rotary(sequences: Sequences, dtype: torch.dtype) -> Sample:
    count = _tokens(sequences)
    return {"x": _normal(dtype, 1, count, 8, 64), "cos": _normal(dtype, 1, count, 24),
            "sin": _normal(dtype, 1, count, 24), "interleaved": True}  # fmt: skip


def _norm(sequences: Sequences, dtype: torch.dtype, **rule: Any) -> Sample:
    return {"x": _normal(dtype, 1, _tokens(sequences), 512), "weight": _normal(dtype, 512), "eps": 1e-5, **rule}


def _write(sequences: Sequences, dtype: torch.dtype, kv: torch.dtype | None = None) -> Sample:
    count = _tokens(sequences)
    return {
        "latent": _normal(dtype, 1, count, 256), "k_rope": _normal(dtype, 1, count, 32),
        "cache": _normal(kv or dtype, 100, 16, 288), "slot_mapping": torch.arange(count),
    }  # fmt: skip


def _write_kv(sequences: Sequences, dtype: torch.dtype, kv: torch.dtype | None = None, **scales: Any) -> Sample:
    count = _tokens(sequences)
    return {
        "k": _normal(dtype, 1, count, 4, 64), "v": _normal(dtype, 1, count, 4, 48),
        "k_cache": _normal(kv or dtype, 100, 16, 4, 64), "v_cache": _normal(kv or dtype, 100, 16, 4, 48),
        "slot_mapping": torch.arange(count), **scales,
    }  # fmt: skip


def _index_keys(sequences: Sequences, dtype: torch.dtype, kv: torch.dtype | None = None) -> Sample:
    count = _tokens(sequences)
    return {
        "k": _normal(dtype, 1, count, 128), "cache": _normal(kv or dtype, 100, 16, 128),
        "slot_mapping": torch.arange(count),
    }  # fmt: skip


def _scored(sequences: Sequences, dtype: torch.dtype) -> Sample:
    count = _tokens(sequences)
    return {
        "q": _normal(dtype, 1, count, 8, 128), "k": _normal(dtype, 1, count, 128), "weights": torch.rand(1, count, 8),
        "cu_seqlens": _bounds(sequences)["cu_seqlens"], "scale": 0.1, "count": 64,
    }  # fmt: skip


def _scored_pages(sequences: Sequences, dtype: torch.dtype) -> Sample:
    pages = _pages(sequences)
    made = {**_scored(sequences, dtype), **pages}
    del made["k"]
    return {**made, "cache": _normal(dtype, len(pages["page_indices"]), 16, 128)}


def _matrices(sequences: Sequences, dtype: torch.dtype) -> Sample:
    return {"x": torch.rand(1, _tokens(sequences), 256).to(dtype) + 1, "size": 16, "iterations": 3, "eps": 1e-6}


def _entries(sequences: Sequences, dtype: torch.dtype, rate: int = 4) -> Sample:
    count = _tokens(sequences)
    return {
        "q": _normal(dtype, 1, count, 8, 128), "entries": _normal(dtype, 1, count, 128), "selected": None,
        "cu_seqlens": _bounds(sequences)["cu_seqlens"], "scale": 0.1, "rate": rate,
    }  # fmt: skip


def _entry_pages(sequences: Sequences, dtype: torch.dtype, rate: int = 4, **more: Any) -> Sample:
    pages = _pages(sequences)
    made = {**_entries(sequences, dtype, rate), **pages, **more}
    del made["entries"]
    return {**made, "cache": _normal(dtype, len(pages["page_indices"]), 16 // rate, 128)}


def _named(make: Callable[..., Sample], sequences: Sequences, dtype: torch.dtype) -> Sample:
    least = min(context for _, context in sequences) // 4
    return {**make(sequences, dtype), "selected": torch.randint(-1, least, (1, _tokens(sequences), 64)).int()}


def _scored_entries(make: Callable[..., Sample], sequences: Sequences, dtype: torch.dtype) -> Sample:
    made = make(sequences, dtype)
    del made["selected"]
    return {**made, "weights": torch.rand(made["q"].shape[:3]), "count": 64}


def _written_entries(sequences: Sequences, dtype: torch.dtype, kv: torch.dtype | None = None) -> Sample:
    count = _tokens(sequences)
    return {
        "entries": _normal(dtype, 1, count, 128), "cache": _normal(kv or dtype, 100, 4, 128),
        "slot_mapping": torch.arange(count), "rate": 4,
    }  # fmt: skip


def _blocks(sequences: Sequences, dtype: torch.dtype, rate: int, overlaps: bool) -> Sample:
    count, series = _tokens(sequences), 2 if overlaps else 1
    return {
        "kv": _normal(dtype, 1, count, 128 * series), "gate": _normal(dtype, 1, count, 128 * series),
        "bias": _normal(dtype, rate * series, 128), **_states(sequences, dtype, 2, rate * series, 128 * series),
    }  # fmt: skip


def _selected(make: Callable[..., Sample], sequences: Sequences, dtype: torch.dtype) -> Sample:
    least = min(context for _, context in sequences)
    selected = torch.randint(0, least, (1, _tokens(sequences), 64), dtype=torch.int32)
    return {**make(sequences, dtype), "selected": selected, "sinks": None}


def _scored_blocks(sequences: Sequences, dtype: torch.dtype) -> Sample:
    made = {**_scored(sequences, dtype), "block_size": 32, "count": 4, "local": 1}
    return {name: x for name, x in made.items() if name not in ("weights", "scale")}


def _scored_blocks_in_pages(sequences: Sequences, dtype: torch.dtype) -> Sample:
    made = {**_scored_pages(sequences, dtype), "block_size": 32, "count": 4, "local": 1}
    return {name: x for name, x in made.items() if name not in ("weights", "scale")}


def _selected_blocks(make: Callable[..., Sample], sequences: Sequences, dtype: torch.dtype, **rule: Any) -> Sample:
    made = make(sequences, dtype, **rule)
    del made["sinks"]
    selected = torch.randint(0, 4, (1, _tokens(sequences), 4, 4), dtype=torch.int32)
    return {**made, "selected": selected, "block_size": 32}


def _without_states(sequences: Sequences, dtype: torch.dtype, make: Callable[..., Sample], **rule: Any) -> Sample:
    return without_states(make(sequences, dtype, **rule))


def _packed(sequences: Sequences, dtype: torch.dtype, **rule: Any) -> Sample:
    count = _tokens(sequences)
    return {
        "q": _normal(dtype, 1, count, 16, 64), "k": _normal(dtype, 1, count, 4, 64),
        "v": _normal(dtype, 1, count, 4, 64), "sinks": None, "cu_seqlens": _bounds(sequences)["cu_seqlens"],
        "scale": 0.1, **rule,
    }  # fmt: skip


def _latents(sequences: Sequences, dtype: torch.dtype) -> Sample:
    count = _tokens(sequences)
    return {
        "q": _normal(dtype, 1, count, 16, 96), "latent": _normal(dtype, 1, count, 256),
        "k_rope": _normal(dtype, 1, count, 32), "weight": _normal(dtype, 16 * (64 + 64), 256),
        "cu_seqlens": _bounds(sequences)["cu_seqlens"], "scale": 0.1, "value_size": 64,
    }  # fmt: skip


def _grouped(sequences: Sequences, dtype: torch.dtype, *, bias: bool) -> Sample:
    count = _tokens(sequences)
    return {
        "x": _normal(dtype, count, 256), "weight": _normal(dtype, 8, 512, 256),
        "bias": _normal(dtype, 8, 512) if bias else None, "expert_ids": torch.zeros(count, dtype=torch.int64),
    }  # fmt: skip


def _residual_norm(sequences: Sequences, dtype: torch.dtype, **rule: Any) -> Sample:
    made = _norm(sequences, dtype, **rule)
    return {"x": made.pop("x"), "residual": _normal(dtype, 1, _tokens(sequences), 512), **made}


def _two_norms(sequences: Sequences, dtype: torch.dtype, **rule: Any) -> Sample:
    return _residual_norm(sequences, dtype, **rule) | {"inner_weight": _normal(dtype, 512)}


def _turned(sequences: Sequences, dtype: torch.dtype, **rule: Any) -> Sample:
    made, count = _write_kv(sequences, dtype), _tokens(sequences)
    tables = {name: _normal(dtype, 1, count, 32) for name in ("cos", "sin")}
    return {"q": _normal(dtype, 1, count, 16, 64), **made, **tables, "q_weight": None, "k_weight": None,
            "interleaved": False, **rule}  # fmt: skip


def _gated(sequences: Sequences, dtype: torch.dtype) -> Sample:
    return {"x": _normal(dtype, 1, _tokens(sequences), 1024), "kind": "silu"}


def _gated_product(sequences: Sequences, dtype: torch.dtype) -> Sample:
    weight = _normal(dtype, 1024, 256)
    return {"input": _normal(dtype, 1, _tokens(sequences), 256), "weight": weight, "bias": None, "kind": "silu"}


def _quantised_product(sequences: Sequences, dtype: torch.dtype, make: Callable[..., Sample]) -> Sample:
    draw = Draw(dtype, torch.device("cpu"))
    return quantised.call(draw.normal(1, _tokens(sequences), 512), make(draw, 1024, 512))


def _rounded_product(sequences: Sequences, dtype: torch.dtype, activation: str) -> Sample:
    draw = Draw(dtype, torch.device("cpu"))
    values, scales = few_bits(draw.normal(1, _tokens(sequences), 512, dtype=torch.float32), activation)
    given = {"input": values.contiguous(), "input_scales": scales.contiguous(), **quantised.fp8(draw, 1024, 512)}
    return {**given, "input_scale": None, "bias": None, "dtype": dtype, "activation": activation}


def _rounded(sequences: Sequences, dtype: torch.dtype, make: Callable[..., Sample], **how: Any) -> Sample:
    return {**make(sequences, dtype, **how), "input_scale": None, "activation": "fp8_group"}


def _embedded(sequences: Sequences, dtype: torch.dtype, **how: Any) -> Sample:
    ids = torch.randint(0, 50, (1, _tokens(sequences)))
    return {"ids": ids, "weight": _normal(dtype, 50, 512), "scale": 2.0, **how}


def _embedded_few_bits(sequences: Sequences, dtype: torch.dtype, block: tuple[int, int], **how: Any) -> Sample:
    made = _embedded(sequences, dtype, **how)
    return {**made, **quantised.fp8(Draw(dtype, torch.device("cpu")), 50, 512, block), "dtype": dtype}


def _tables(sequences: Sequences, dtype: torch.dtype) -> Sample:
    positions = torch.arange(_tokens(sequences))[None]
    return {"positions": positions, "inv_freq": torch.rand(64), "scale": 1.0, "dtype": dtype}


def _frequencies(sequences: Sequences, dtype: torch.dtype) -> Sample:
    lengths = torch.arange(_tokens(sequences))[None]
    return {"lengths": lengths, "short": torch.rand(64), "long": None, "kind": "dynamic", "original_length": 64,
            "factor": 2.0, "base": 10000.0}  # fmt: skip


def _gathered(sequences: Sequences, dtype: torch.dtype) -> Sample:
    return {"x": _normal(dtype, 1, _tokens(sequences), 512), "rows": torch.arange(_tokens(sequences))}


def _reduced(sequences: Sequences, dtype: torch.dtype, **how: Any) -> Sample:
    return {"x": _normal(dtype, 1, _tokens(sequences), 512), "group": "tp", **how}


ALONG_ROWS = {"dim": -1, "size": 1}
FLOAT8 = {"kv": torch.float8_e4m3fn}
SCALES = {"k_scale": torch.ones(1), "v_scale": torch.ones(1)}


CASES: dict[str, tuple[str, Callable[..., Sample], dict[str, Any], float]] = {
    # name: (op, its arguments, more of them, how far above one sequence's measured bytes the table may be)
    "conv": ("stateful_causal_conv", _conv, {}, 1.1),
    "state space": ("stateful_state_space_scan", _state_space, {}, 1.1),
    "selective": ("stateful_selective_scan", _selective, {}, 1.3),
    "linear attention": ("stateful_linear_attention", _linear_attention, {}, 1.1),
    "linear attention, rows": ("stateful_linear_attention", _linear_attention, {"rowwise": True}, 1.25),
    "delta rule": ("stateful_delta_rule", _delta_rule, {}, 1.1),
    "delta rule, rows": ("stateful_delta_rule", _delta_rule, {"rowwise": True}, 1.2),
    "recurrence": ("stateful_linear_recurrence", _recurrence, {}, 1.25),
    "wkv": ("stateful_wkv", _wkv, {}, 1.2),
    "attention": ("paged_attention", _attention, {}, 1.15),
    "attention, capped": ("paged_attention", _attention, {"soft_cap": 30.0}, 1.6),
    "attention, 8 bits": ("paged_attention", _attention, FLOAT8, 1.2),
    "attention, scaled": ("paged_attention", _attention, {**FLOAT8, **SCALES}, 1.2),
    "attention, capped, 8 bits": ("paged_attention", _attention, {**FLOAT8, "soft_cap": 30.0}, 1.6),
    "latent attention": ("paged_latent_attention", _latent_attention, {}, 1.6),
    "latent attention, 8 bits": ("paged_latent_attention", _latent_attention, FLOAT8, 1.6),
    "experts": ("experts", _experts, {}, 1.1),
    "experts, limited": ("experts", _experts, {"limit": 7.0, "alpha": 1.7, "offset": 1.0}, 1.1),
    "quantised experts": ("quantised_experts", _quantised_experts, {}, 3.0),
    "quantised experts, limited": ("quantised_experts", _quantised_experts, {"limit": 7.0, "offset": 1.0}, 3.0),
    "quantised experts, rounded": ("quantised_experts", _quantised_experts, {"rounding": "fp8_group"}, 3.0),
    "route": ("route", _route, {}, 2.0),
    "rotary": ("rotary", _rotary, {}, 1.1),
    "rms norm": ("rms_norm", _norm, {"cast_before_scale": True}, 1.05),
    "rms norm, wide": ("rms_norm", _norm, {"cast_before_scale": False, "offset": 1.0}, 1.05),
    "layer norm": ("layer_norm", _norm, {"bias": torch.ones(512)}, 1.05),
    "write latent": ("write_latent", _write, {}, 1.05),
    "write latent, 8 bits": ("write_latent", _write, FLOAT8, 1.05),
    "write kv": ("write_kv", _write_kv, {}, 1.25),
    "write kv, 8 bits": ("write_kv", _write_kv, FLOAT8, 1.15),
    "write kv, scaled": ("write_kv", _write_kv, {**FLOAT8, **SCALES}, 1.3),
    **{
        f"{name}, without a cache": (name, _without_states, {"make": make}, tolerance)
        for name, make, tolerance in (
            ("causal_conv", _conv, 1.25),
            ("compress", partial(_blocks, rate=4, overlaps=True), 2.5),
            ("state_space_scan", _state_space, 1.1),
            ("selective_scan", _selective, 1.3),
            ("linear_attention", _linear_attention, 1.15),
            ("delta_rule", _delta_rule, 1.15),
            ("linear_recurrence", _recurrence, 1.25),
            ("wkv", _wkv, 1.2),
        )
    },
    "attention, without a cache": ("attention", _packed, {}, 1.2),
    "latent attention, without a cache": ("latent_attention", _latents, {}, 1.6),
    "index keys": ("write_index_keys", _index_keys, {}, 1.25),
    "index keys, 8 bits": ("write_index_keys", _index_keys, FLOAT8, 1.25),
    "select keys": ("paged_select_keys", _scored_pages, {}, 2.0),
    "select keys, without a cache": ("select_keys", _scored, {}, 2.5),
    "write entries": ("write_entries", _written_entries, {}, 2.0),
    "write entries, 8 bits": ("write_entries", _written_entries, FLOAT8, 2.0),
    "entries": ("paged_entry_attention", _entry_pages, {}, 2.5),
    "entries of a window": ("paged_entry_attention", _entry_pages, {"rate": 1, "window": 40}, 2.5),
    "selected entries": ("paged_entry_attention", partial(_named, _entry_pages), {}, 2.5),
    "entries, without a cache": ("entry_attention", _entries, {}, 2.5),
    "select entries": ("paged_select_entries", partial(_scored_entries, _entry_pages), {}, 2.5),
    "select entries, without a cache": ("select_entries", partial(_scored_entries, _entries), {}, 2.5),
    "compress": ("stateful_compress", _blocks, {"rate": 16, "overlaps": False}, 2.5),
    "compress, overlapping": ("stateful_compress", _blocks, {"rate": 4, "overlaps": True}, 2.5),
    "sparse attention": ("paged_sparse_latent_attention", partial(_selected, _latent_attention), {}, 2.0),
    "sparse attention, without a cache": ("sparse_latent_attention", partial(_selected, _latents), {}, 3.5),
    "select blocks": ("paged_select_blocks", _scored_blocks_in_pages, {}, 2.5),
    "select blocks, without a cache": ("select_blocks", _scored_blocks, {}, 2.5),
    "block sparse attention": ("paged_block_sparse_attention", partial(_selected_blocks, _attention), {}, 2.5),
    "block sparse attention, 8 bits": (
        "paged_block_sparse_attention",
        partial(_selected_blocks, _attention),
        {**FLOAT8, **SCALES},
        2.5,
    ),
    "block sparse attention, without a cache": (
        "block_sparse_attention",
        partial(_selected_blocks, _packed),
        {},
        2.5,
    ),
    "grouped linear": ("grouped_linear", _grouped, {"bias": False}, 1.1),
    "grouped linear, bias": ("grouped_linear", _grouped, {"bias": True}, 1.1),
    "residual rms norm": ("residual_rms_norm", _residual_norm, {"cast_before_scale": True}, 1.05),
    "norm, residual norm": ("norm_residual_norm", _two_norms, {"cast_before_scale": False, "offset": 1.0}, 1.5),
    "rotary, write kv": ("rotary_write_kv", _turned, {}, 2.0),
    "norm, rotary, write kv": ("rotary_write_kv", _turned, {"eps": 1e-6}, 2.0),
    "gated activation": ("gated_activation", _gated, {}, 1.05),
    "gated linear": ("gated_linear", _gated_product, {}, 1.05),
    **{
        f"quantised linear, {name}": ("quantised_linear", _quantised_product, {"make": make}, 2.0)
        for name, make in (
            ("fp8", quantised.fp8),
            ("points", partial(quantised.int8, zeros=True)),
            ("packed", partial(quantised.packed, size=64)),
            ("nvfp4", quantised.nvfp4),
            ("packed, points", partial(quantised.packed, size=64, zeros=True)),
        )
    },
    "rounded linear": ("rounded_linear", _rounded_product, {"activation": "fp8_token"}, 1.5),
    "rounded norm": ("rounded_rms_norm", _rounded, {"make": _norm, "cast_before_scale": True}, 2.0),
    "rounded residual norm": (
        "rounded_residual_rms_norm",
        _rounded,
        {"make": _residual_norm, "cast_before_scale": True},
        2.0,
    ),
    "rounded gate": ("rounded_gated_activation", _rounded, {"make": _gated}, 2.0),
    "sinkhorn": ("sinkhorn", _matrices, {}, 3.0),
    "embedding": ("embedding", _embedded, {}, 1.05),
    "sharded embedding": ("sharded_embedding", _embedded, {"start": 20}, 1.25),
    "quantised embedding": ("quantised_embedding", _embedded_few_bits, {"block": (50, 512)}, 1.25),
    "quantised embedding, finer": ("quantised_embedding", _embedded_few_bits, {"block": (1, 4)}, 1.25),
    "quantised sharded embedding": (
        "quantised_sharded_embedding",
        _embedded_few_bits,
        {"block": (1, 512), "start": 20},
        1.25,
    ),
    "rotary tables": ("rotary_tables", _tables, {}, 1.25),
    "rope frequencies": ("rope_frequencies", _frequencies, {}, 2.5),
    "gather rows": ("gather_rows", _gathered, {}, 1.05),
    "all reduce": ("all_reduce", _reduced, {}, 1.05),
    "all reduce, residual rms norm": (
        "all_reduce_residual_rms_norm",
        _residual_norm,
        {"cast_before_scale": True, "group": "tp"},
        1.05,
    ),
    "all gather": ("all_gather", _reduced, ALONG_ROWS, 1.05),
    "reduce scatter": ("reduce_scatter", _reduced, ALONG_ROWS, 2.0),
    "write kv, half of it": ("write_kv", _write_kv, {"kv": torch.float16}, 1.25),
}


SPECS = {spec.name: spec for spec in registry.specs() if spec.version == 1}


def measured_and_predicted(op: str, sample: Sample, device: torch.device = CUDA) -> dict[str, tuple[int, int]]:
    """Bytes of the op's results and workspace on the device, by each record that computes it in steps of this size."""
    name = f"precast.{op}"
    sample = {key: value.to(device) if isinstance(value, torch.Tensor) else value for key, value in sample.items()}

    def run(function: Callable[..., Any]) -> Any:
        with torch.inference_mode():
            return function(**sample)

    # The last of an op's records takes most: what the others take, the choice of a use says below.
    made = run(registry.function_of(runnable(name, 1, registry.target_of(device))[-1]))
    results = () if made is None else made if isinstance(made, tuple) else (made,)
    outputs = tuple(Value(f"y{i}", _type(result)) for i, result in enumerate(results))
    given = {key: value for key, value in sample.items() if isinstance(value, torch.Tensor)}
    operands = {key: Operand(_type(value), value.is_contiguous()) for key, value in given.items()}
    node = Node(name, {key: _arg(key, value) for key, value in sample.items()}, outputs)
    held = sum(result.nbytes for result in results)
    longest = max(sample["kv_lens"].tolist()) if "kv_lens" in sample else 0
    del made, results
    use = Use(node, operands, registry.target_of(device))
    found, fits = {}, fitting(use, step_of(SPECS[name], sample))
    for record in {case.choice.record.name: case.choice.record for case in cases(use)}.values():
        if record not in fits:
            continue
        function = registry.function_of(record)
        run(function)  # compiles
        said = symbols.evaluate(record.workspace(use), {LONGEST: longest})
        found[record.name] = (peak_bytes(partial(run, function), device), held + said)
    return found


def _type(x: torch.Tensor) -> TensorType:
    return TensorType(NAMES[x.dtype], tuple(x.shape))


def _arg(name: str, value: Any) -> Ref | Const | DtypeArg:
    if isinstance(value, torch.Tensor):
        return Ref(name)
    return DtypeArg(NAMES[value]) if isinstance(value, torch.dtype) else Const(value)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_one_sequence_takes_what_the_record_says(case: str) -> None:
    op, make, rule, tolerance = CASES[case]
    for sequences in ONE:
        for dtype in (torch.bfloat16, torch.float32):
            for name, (found, expected) in measured_and_predicted(op, make(sequences, dtype, **rule)).items():
                assert found - ROUNDED <= expected <= tolerance * found + ROUNDED, (
                    f"{name}, {sequences}, {dtype}: {expected / found:.3f} of the measured"
                )


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_batches_never_take_more(case: str) -> None:
    op, make, rule, _ = CASES[case]
    for sequences in SEVERAL:
        for name, (found, expected) in measured_and_predicted(op, make(sequences, torch.bfloat16, **rule)).items():
            assert found <= expected + ROUNDED, f"{name}, {sequences}: {expected / found:.3f} of the measured"


@pytest.mark.parametrize("make", [
    quantised.fp8, partial(quantised.int8, zeros=True), partial(quantised.gptq, size=16, order=True),
    partial(quantised.packed, size=16), partial(quantised.packed, size=16, zeros=True),
])  # fmt: skip
def test_a_cpu_dequantises_in_what_the_record_says(make: Callable[..., Sample]) -> None:
    """One token, so that nothing but the weight counts. Floats of four bits take more on a CPU than on a GPU: it copies
    operands whose types differ.
    """
    cpu = torch.device("cpu")
    sample = _quantised_product([(1, 1)], torch.float32, make)
    ((found, expected),) = measured_and_predicted("quantised_linear", sample, cpu).values()

    assert found - ROUNDED // 2 <= expected <= 1.15 * found, f"{expected / found:.3f} of the measured"


@pytest.mark.parametrize("target", [Target("cpu"), GPU], ids=lambda target: target.text)
@pytest.mark.parametrize("make", [_attention, _latent_attention])
def test_sizes_of_no_pages_can_be_evaluated(make: Callable[..., Sample], target: Target) -> None:
    """As the loader does for a cache that not one page fits into."""
    sample = make([(1, 1)], torch.float64)
    given = {key: value for key, value in sample.items() if isinstance(value, torch.Tensor)}
    operands = {key: Operand(_type(value), value.is_contiguous()) for key, value in given.items()}
    operands["page_indices"] = Operand(TensorType("int32", ("N",)), is_contiguous=True)
    op = "attention" if "k_cache" in sample else "latent_attention"
    result = Value("y", TensorType("float64", (1, 1, 16, 64)))
    node = Node(f"precast.paged_{op}", {key: _arg(key, value) for key, value in sample.items()}, (result,))
    taken = workspace(Use(node, operands, target))

    nothing, something = (symbols.evaluate(taken, {"N": pages, LONGEST: 16 * pages}) for pages in (0, 900))
    assert 0 <= nothing < something


ROWS = [1, 2, 6, 40, 41, 60, 100, 256]


@pytest.mark.gpu
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("version", [1, 2])
def test_sampling_takes_what_the_record_says(rows: int, version: int) -> None:
    given = _drawn(rows, 100_000)
    for record in runnable("precast.sample", version, registry.target_of(CUDA)):
        function = registry.function_of(record)
        function(**given)
        found = peak_bytes(partial(function, **given), CUDA)
        expected = symbols.evaluate(record.workspace(_sampling(given["logits"], version)), {})

        assert found <= expected + ROUNDED, f"{record.name}: {expected / found:.4f} of the measured"
        assert expected <= 1.1 * found + ROUNDED, f"{record.name}: {expected / found:.4f} of the measured"


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("rows", ROWS)
def test_the_likeliest_tokens_take_what_is_said(rows: int, device: str) -> None:
    logits = torch.randn(rows, 100_000, device=device).bfloat16()
    sampling.greedy(logits)
    found = peak_bytes(lambda: sampling.greedy(logits), torch.device(device))
    expected = symbols.evaluate(greedy_workspace(_sampling(logits, 2)), {})

    assert found <= expected <= 1.1 * found + ROUNDED, f"{expected / found:.4f} of the measured"


def _sampling(logits: torch.Tensor, version: int) -> Use:
    tokens = Value("tokens", TensorType("int64", (len(logits),)))
    node = Node("precast.sample", {"logits": Ref("logits")}, (tokens,), version)
    return Use(node, {"logits": Operand(_type(logits), True)}, GPU)


def _drawn(rows: int, size: int) -> Sample:
    flat = {"temperature": torch.ones(rows), "top_p": torch.full((rows,), 0.9), "min_p": torch.full((rows,), 0.1)}
    others = {"seeds": torch.arange(rows), "steps": torch.arange(rows), "top_k": torch.full((rows,), 50).int()}
    each = {name: values.to(CUDA) for name, values in {**flat, **others}.items()}
    return {"logits": torch.randn(rows, size, device=CUDA).bfloat16(), **each}


def test_a_cpu_holds_so_many_copies() -> None:
    x, weight = TensorType("bfloat16", ("T", 3)), TensorType("bfloat16", (5, 3))
    node = Node(
        "aten.linear.default", {"input": Ref("x"), "weight": Ref("w")}, (Value("y", TensorType("bfloat16", ("T", 5))),)
    )
    operands = {"input": Operand(x, True), "weight": Operand(weight, True, is_activation=False)}
    held = symbols.evaluate(workspace(Use(node, operands, Target("cpu"))), {"T": 7})

    assert held == CPU_COPIES * 2 * (7 * 3 + 7 * 5) + CPU_COPIES_OF_OTHERS * 2 * 5 * 3


def test_every_op_of_our_own_is_measured() -> None:
    holds_nothing = {"precast.send", "precast.receive"}  # whose group of one is on no device
    assert {f"precast.{op}" for op, *_ in CASES.values()} | {"precast.sample"} | holds_nothing == {
        spec.name for spec in registry.specs()
    }
