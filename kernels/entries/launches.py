"""The launches of attention over entries in Triton, and of writes of entries. No torch."""

from __future__ import annotations

from precast.ir.graph.schema import Expr
from precast.ir.graph.symbols import add, minimum, mul
from precast.kernels.attention.launches import by_slots
from precast.kernels.blocks import power_of_two
from precast.kernels.latent_attention.launches import absorbed_tile, written
from precast.kernels.records import Launch, Pointer, Stride
from precast.kernels.rows import known, overlaps, real
from precast.kernels.use import Use

ATTEND_PARTS = (16, 8, 2, 1)
"""Parts of a token's entries, by the tokens of a step in ranges."""
JOINED = 8192
"""Elements of partial results that are joined at a time, at most."""
_KERNELS = "precast.kernels.entries.triton_attend:"


def attend_workspace(use: Use) -> Expr:
    """The bytes of partial results with their weights; none where each token is one part."""
    return add(mul(_partial_rows(use), 4, add(known(use, "q", 3), 2)), 16)


def attend(use: Use) -> tuple[Launch, ...]:
    """`precast.paged_entry_attention`: parts of each token's entries, joined."""
    tokens, heads, size = use.shape("q")[1], known(use, "q", 2), known(use, "q", 3)
    tile, parts = absorbed_tile(use), _parts(use)
    rows, block_d = min(power_of_two(heads), tile.m), max(16, power_of_two(size))
    results = Pointer("out.0"), Pointer("out.1")
    partial = (
        Pointer("workspace", "float32", 0),
        Pointer("workspace", "float32", mul(_partial_rows(use), 4, size)),
    )
    is_named = use.has("selected")
    shared = {"HEADS": heads, "SIZE": size, "BLOCK_D": block_d, "PDL": overlaps(use)}
    attention = Launch(
        kernel=_KERNELS + "attend_kernel",
        grid=(tokens, -(-heads // rows), parts),
        args=(*results, *partial, Pointer("q"), Pointer("cache"), Pointer("selected") if is_named else None,
              *(Pointer(name) for name in ("cu_seqlens", "kv_lens", "page_indices", "page_indptr", "page_start")),
              add(use.shape("cu_seqlens")[0], -1), parts, *(Stride("q", axis) for axis in (1, 2, 3)),
              *(Stride("cache", axis) for axis in (0, 1)),
              *(Stride("selected", axis) if is_named else 0 for axis in (1, 2))),
        constants={
            **shared,
            "COUNT": known(use, "selected", 2) if is_named else 0,
            "RATE": _rate(use),
            "WINDOW": _window(use) or 0,
            "PAGE_SIZE": known(use, "cache", 1),
            "BLOCK_M": max(16, rows),
            "BLOCK_N": tile.n,
            "SCALE": real(use, "scale"),
            "PRECISION": "ieee" if use.width("q") > 2 else "tf32",
        },
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        pdl=overlaps(use),
    )  # fmt: skip
    join = Launch(
        kernel=_KERNELS + "join_kernel",
        # None where each token is one part.
        grid=(mul(tokens, minimum(add(parts, -1), 1)), heads),
        args=(*results, *partial, parts),
        constants={**shared, "PARTS": max(1, JOINED // block_d)},
        pdl=overlaps(use),
    )
    return attention, join


def write_entries(use: Use) -> tuple[Launch, ...]:
    """`precast.write_entries`, in one launch: latents without a rope part, of the last tokens of blocks."""
    return (written(use, "entries", rate=_rate(use)),)


def _rate(use: Use) -> int:
    rate = use.constant("rate")
    assert isinstance(rate, int), "rate is a number"
    return rate


def _window(use: Use) -> int | None:
    window = use.constant("window")
    assert window is None or isinstance(window, int), "window is a number"
    return window


def _parts(use: Use) -> Expr:
    """Parts of a token's entries, no more than there are tiles in those that it sees at most, if that is known."""
    most = known(use, "selected", 2) if use.has("selected") else _window(use)
    tiles = max(ATTEND_PARTS) if most is None else -(-most // absorbed_tile(use).n)
    return by_slots(use.shape("q")[1], tuple(min(parts, tiles) for parts in ATTEND_PARTS))


def _partial_rows(use: Use) -> Expr:
    """Partial results of all heads. One part is none: its program has the result."""
    parts = _parts(use)
    return mul(*use.shape("q")[1:3], parts, minimum(add(parts, -1), 1))
