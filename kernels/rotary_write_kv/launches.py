"""The launch that norms and turns queries and keys, and writes keys and values."""

from __future__ import annotations

from precast.ir.graph.symbols import mul
from precast.kernels.blocks import num_warps, power_of_two
from precast.kernels.records import Launch, Pointer, Stride
from precast.kernels.rows import known, real
from precast.kernels.use import Use

_TILE = 1024
"""Elements of heads that one program takes together."""
LARGEST_FLOAT8 = 448.0


def rotary_write_kv(use: Use) -> tuple[Launch, ...]:
    """One launch."""
    (heads, size), (kv_heads, value) = ([known(use, name, axis) for axis in (2, 3)] for name in ("q", "v"))
    pairs, page_size = known(use, "cos", -1), known(use, "k_cache", 1)
    block_h = min(max(_TILE // power_of_two(size), 1), power_of_two(max(heads, kv_heads)))
    has_pdl, has_norm = use.target.capability >= (9, 0), use.constant("eps") is not None
    weights = [name if use.has(name) else None for name in ("q_weight", "k_weight")]
    return (
        Launch(
            kernel="precast.kernels.rotary_write_kv.triton:rotary_write_kv_kernel",
            grid=(use.shape("q")[1], -(-heads // block_h) - (-kv_heads // block_h)),
            args=(
                Pointer("out.0"),
                *(Pointer(name) for name in ("q", "k", "v", "cos", "sin")),
                *(None if name is None else Pointer(name) for name in weights),
                *(Pointer(name) for name in ("k_cache", "v_cache", "slot_mapping")),
                *(Pointer(name) if use.has(name) else None for name in ("k_scale", "v_scale")),
                mul(*use.shape("k_cache")[:2]),
                real(use, "eps"),
                *(Stride(name, axis) for name in ("q", "k", "v") for axis in (1, 2, 3)),
                *(Stride(table, axis) for table in ("cos", "sin") for axis in (1, 2)),
                *(0 if name is None else Stride(name, 0) for name in weights),
                *(Stride(cache, axis) for cache in ("k_cache", "v_cache") for axis in range(4)),
                Stride("slot_mapping", 0),
            ),
            constants={
                "HEADS": heads,
                "KV_HEADS": kv_heads,
                "SIZE": size,
                "VALUE_SIZE": value,
                "PAIRS": pairs,
                "PAGE_SIZE": page_size,
                "INTERLEAVED": bool(use.constant("interleaved")),
                "HAS_NORM": has_norm,
                "OFFSET": real(use, "offset"),
                "CAST_BEFORE_SCALE": bool(use.constant("cast_before_scale")),
                "LIMIT": LARGEST_FLOAT8 if use.width("k_cache") == 1 else 0.0,
                "BLOCK_H": block_h,
                "BLOCK_R": power_of_two(pairs),
                "BLOCK_REST": power_of_two(size - 2 * pairs),
                "BLOCK_V": power_of_two(value),
                "PDL": has_pdl,
            },
            num_warps=num_warps(block_h * power_of_two(size)),
            pdl=has_pdl,
        ),
    )
