"""The launches of attention to selected blocks in Triton. No torch."""

from __future__ import annotations

from precast.ir.graph.schema import Expr
from precast.ir.graph.symbols import add, ceildiv, minimum, mul
from precast.kernels.attention.launches import by_slots, has_large_memory
from precast.kernels.blocks import power_of_two
from precast.kernels.records import Launch, Pointer, Stride
from precast.kernels.rows import known, overlaps, real
from precast.kernels.use import Use

SMALL_STEP = 64
"""Tokens of a step up to which a sequence's blocks are scored in parts."""
SELECT_PARTS = 64
"""Such parts, a power of two."""
ROWS = 64
"""Rows, each a query and a head, for which a loaded key is used, if that is one query's at least."""
TILE = 64
"""Keys of small blocks in a tile, at most."""
ATTEND_PARTS = (16, 8, 2, 1)
"""Parts of what is selected for a token, by the tokens of a step in ranges."""
JOINED = 8192
"""Elements of partial results that are joined at a time, at most."""
_KERNELS = "precast.kernels.block_sparse_attention."
_METADATA = ("cu_seqlens", "kv_lens", "page_indices", "page_indptr", "page_start")


def select_workspace(use: Use, *, is_small: bool) -> Expr:
    """The bytes of the best blocks of each part: their scores and numbers."""
    return add(mul(2, _found(use, _select_parts(is_small))), 16)


def select_blocks(use: Use, *, is_small: bool) -> tuple[Launch, ...]:
    """`precast.paged_select_blocks`: the best blocks of each part, then of all. `is_small`: in several parts."""
    tokens, sequences = use.shape("q")[1], add(use.shape("cu_seqlens")[0], -1)
    heads, size, parts = known(use, "q", 2), known(use, "q", 3), _select_parts(is_small)
    block_h = power_of_two(heads)
    queries = max(1, ROWS // block_h)
    is_wide = use.width("q") > 2
    values, numbers = (Pointer("workspace", "int32", place) for place in (0, _found(use, parts)))
    shared = {
        "COUNT": number(use, "count"),
        "PARTS": parts,
        "HEADS": heads,
        "BLOCK_C": power_of_two(number(use, "count")),
        "PDL": overlaps(use),
    }
    score = Launch(
        kernel=_KERNELS + "triton_select:score_kernel",
        # Each sequence has at most one tile that isn't full.
        grid=(minimum(tokens, add(ceildiv(tokens, queries), sequences)), parts),
        args=(values, numbers, Pointer("q"), Pointer("cache"), *map(Pointer, _METADATA), sequences,
              *(Stride("q", axis) for axis in (1, 2, 3)), *(Stride("cache", axis) for axis in (0, 1))),
        constants={
            **shared,
            "BLOCK_SIZE": number(use, "block_size"),
            "LOCAL": number(use, "local"),
            "PAGE_SIZE": known(use, "cache", 1),
            "SIZE": size,
            "BLOCK_Q": queries,
            "BLOCK_H": block_h,
            "BLOCK_N": min(32 if is_wide else 128, max(16, power_of_two(number(use, "block_size")))),
            "BLOCK_D": max(16, power_of_two(size)),
            "PRECISION": "ieee" if is_wide else "tf32",
        },
        num_warps=4,
        num_stages=1 if is_wide else 3 if has_large_memory(use) else 2,
        pdl=overlaps(use),
    )  # fmt: skip
    select = Launch(
        kernel=_KERNELS + "triton_select:select_kernel",
        grid=(tokens, heads),
        args=(Pointer("out.0"), values, numbers, Pointer("cu_seqlens"), sequences),
        constants=shared,
        num_warps=1,
        pdl=overlaps(use),
    )
    return score, select


def attend_workspace(use: Use) -> Expr:
    """The bytes of partial results with their weights; none where each token is one part."""
    return add(mul(_partial_rows(use), 4, add(known(use, "v_cache", 3), 2)), 16)


def attend(use: Use) -> tuple[Launch, ...]:
    """`precast.paged_block_sparse_attention`: parts of what is selected, joined."""
    tokens, parts = use.shape("q")[1], _attend_parts(use)
    heads, size, value = known(use, "q", 2), known(use, "q", 3), known(use, "v_cache", 3)
    kv_heads, groups = known(use, "k_cache", 2), known(use, "selected", 2)
    units, is_wide = max(kv_heads, groups), use.width("q") > 2
    block_d, block_v = (max(16, power_of_two(each)) for each in (size, value))
    most = max(16, (8192 if has_large_memory(use) else 4096) // max(block_d, block_v) // (4 if is_wide else 1))
    block_size = number(use, "block_size")
    tail = int(use.constant("tail") is True)
    are_together = block_size < 16 and block_size == power_of_two(block_size)
    block_n = min(most, TILE if are_together else max(16, power_of_two(block_size)))
    partial = Pointer("workspace", "float32", 0)
    weights = Pointer("workspace", "float32", mul(_partial_rows(use), 4, value))
    attention = Launch(
        kernel=_KERNELS + "triton_attend:attend_kernel",
        grid=(tokens, units, parts),
        args=(Pointer("out.0"), partial, weights,
              *(Pointer(name) for name in ("q", "k_cache", "v_cache", "selected")),
              *(Pointer(name) if use.has(name) else None for name in ("k_scale", "v_scale")),
              *map(Pointer, _METADATA), add(use.shape("cu_seqlens")[0], -1), parts,
              *(Stride("q", axis) for axis in (1, 2, 3)), *(Stride("k_cache", axis) for axis in range(3)),
              *(Stride("v_cache", axis) for axis in range(3)), *(Stride("selected", axis) for axis in (1, 2, 3))),
        constants={
            "COUNT": known(use, "selected", 3),
            "TAIL": tail,
            "BLOCK_SIZE": block_size,
            "PAGE_SIZE": known(use, "k_cache", 1),
            "HEADS": heads,
            "KV_HEADS": kv_heads,
            "GROUPS": groups,
            "UNITS": units,
            "SIZE": size,
            "VALUE_SIZE": value,
            "BLOCK_M": max(16, power_of_two(heads // units)),
            "BLOCK_N": block_n,
            "TOGETHER": block_n // block_size if are_together else 1,
            "BLOCK_D": block_d,
            "BLOCK_V": block_v,
            "BLOCK_C": power_of_two(known(use, "selected", 3) + tail),
            "SCALE": real(use, "scale"),
            "PRECISION": "ieee" if is_wide else "tf32",
            "PDL": overlaps(use),
        },
        num_warps=4,
        num_stages=1 if is_wide else 3 if has_large_memory(use) else 2,
        pdl=overlaps(use),
    )  # fmt: skip
    join = Launch(
        kernel="precast.kernels.sparse_attention.triton_attend:join_kernel",
        # None where each token is one part.
        grid=(mul(tokens, minimum(add(parts, -1), 1)), heads),
        args=(Pointer("out.0"), partial, weights, parts),
        constants={"HEADS": heads, "LATENT": value, "BLOCK_C": block_v, "PARTS": max(1, JOINED // block_v),
                   "PDL": overlaps(use)},
        pdl=overlaps(use),
    )  # fmt: skip
    return attention, join


def number(use: Use, name: str) -> int:
    """The value of a literal argument, an integer."""
    value = use.constant(name)
    assert isinstance(value, int), f"{name} is a number"
    return value


def _select_parts(is_small: bool) -> int:
    return SELECT_PARTS if is_small else 1


def _found(use: Use, parts: int) -> Expr:
    """The bytes of an integer for each of the best blocks of all parts, of all heads."""
    return mul(4 * parts * power_of_two(number(use, "count")), *use.shape("q")[1:3])


def _attend_parts(use: Use) -> Expr:
    """Parts of what is selected for a token, no more than there are blocks in it."""
    most = known(use, "selected", 3) + (use.constant("tail") is True)
    return by_slots(use.shape("q")[1], tuple(min(parts, most) for parts in ATTEND_PARTS))


def _partial_rows(use: Use) -> Expr:
    """Partial results of all heads. One part is none: its program has the result."""
    parts = _attend_parts(use)
    return mul(*use.shape("q")[1:3], parts, minimum(add(parts, -1), 1))
