"""The launches of latent attention in Triton (`precast.kernels.latent_attention.triton`). No torch."""

from __future__ import annotations

from typing import NamedTuple

from precast.ir.graph.schema import Dtype, Expr
from precast.ir.graph.symbols import add, ceildiv, floordiv, minimum, mul
from precast.kernels.attention.launches import Splits, Tile, by_slots, has_large_memory
from precast.kernels.blocks import num_warps, power_of_two
from precast.kernels.records import Launch, Pointer, Stride
from precast.kernels.rotary_write_kv.launches import LARGEST_FLOAT8
from precast.kernels.rows import known, overlaps, real
from precast.kernels.use import Use

SMALL_STEP = 64
"""Tokens of a step that are all absorbed, whatever sequences they are of."""
FEW_TOKENS = 16
"""Tokens of a step up to which products with the weight have the least rows that the tensor cores take."""
PROGRAMS = 132
"""Programs that share tiles: one for each multiprocessor of an H100; twice as many where two fit there."""
PARTS = (64, 8, 4, 1)
"""Parts of a sequence's keys at most, by `SLOTS`: one or two sequences alone, or eight in parts, fill a GPU; beyond 32
slots each sequence is one part."""
LEAST_KEYS = (128, 256, 256, 256)
"""Keys of a part at least, by `SLOTS`."""
JOINED = 8192
"""Elements of partial results that are joined at a time, at most."""
_WEIGHT_TILE = 1 << 14
"""Elements of the weight that a program asks for at once, before it does anything else: 32 KiB of half precision."""
_KERNELS = "precast.kernels.latent_attention.triton:"


class Sizes(NamedTuple):
    """Heads, the parts of a query and of a cached token, and a value; slots of a page; the query's dtype and bytes."""

    heads: int
    nope: int
    rope: int
    latent: int
    value: int
    page: int
    dtype: Dtype
    bytes: int


class Tiles(NamedTuple):
    """Of each kernel: rows and keys, in `expand` tokens and elements of a latent that are multiplied at a time."""

    split: Tile
    expand: Tile
    context: Tile
    prefix: Tile


class Workspace(NamedTuple):
    """Byte offsets of what launches leave for one another, and all of it.

    By row, a token or a sequence: the absorbed queries, what attention gives in the latents' space, partial results and
    their weights. By token: keys and values, and the sums of exponentials.
    """

    queries: Expr
    results: Expr
    partial: Expr
    weights: Expr
    keys: Expr
    values: Expr
    sums: Expr
    end: Expr


def sizes_of(use: Use) -> Sizes:
    """The sizes of a use that the model fixes."""
    latent, cached = known(use, "weight", 1), known(use, "cache", 2)
    heads, query = (known(use, "q", axis) for axis in (2, 3))
    rope = cached - latent
    value = use.constant("value_size")
    assert isinstance(value, int), "value_size is a number"
    dtype = use.operands["q"].type.dtype
    return Sizes(heads, query - rope, rope, latent, value, known(use, "cache", 1), dtype, use.width("q"))


def workspace(use: Use, *, most_tokens: int | None) -> Workspace:
    """Of a step of at most so many tokens, all of them absorbed; None: of any step."""
    sizes, tokens = sizes_of(use), use.shape("q")[1]
    rows = mul(_rows(use, most_tokens), sizes.heads)
    own = 0 if most_tokens else mul(tokens, sizes.heads)
    each = (
        _aligned(mul(rows, sizes.latent, sizes.bytes)),
        _aligned(mul(rows, sizes.latent, sizes.bytes)),
        mul(rows, splits_of(use).most, 4 * sizes.latent),
        _aligned(mul(rows, splits_of(use).most, 8)),
        _aligned(mul(own, sizes.nope + sizes.rope, sizes.bytes)),
        _aligned(mul(own, sizes.value, sizes.bytes)),
        mul(4, own),
    )
    return Workspace(*(add(*each[:i]) for i in range(len(each) + 1)))


def held(use: Use, *, most_tokens: int | None) -> Expr:
    """The bytes of `workspace`; some even in a step of no tokens, whose launches name places in it too."""
    return add(workspace(use, most_tokens=most_tokens).end, 16)


def paged(use: Use, *, most_tokens: int | None, tiles: Tiles | None = None) -> tuple[Launch, ...]:
    """`precast.paged_latent_attention`.

    `most_tokens`: of the steps that it is for, if all of their tokens are absorbed. `tiles`: None for `tiles_of`.
    """
    tiles = tiles or tiles_of(use)
    absorbed = _absorbed(use, most_tokens, tiles.split)
    return absorbed if most_tokens else (*absorbed, *_expanded(use, tiles))


def splits_of(use: Use) -> Splits:
    """By the slots for sequences that a step has, as in attention (`precast.kernels.attention.launches.splits_of`)."""
    return Splits(*(by_slots(_sequences(use), each) for each in (PARTS, LEAST_KEYS, LEAST_KEYS)))


def tiles_of(use: Use) -> Tiles:
    """What is chosen for the sizes of a use."""
    return Tiles(absorbed_tile(use), _expanding_tile(use), _context_tile(use), _prefix_tile(use))


def absorbed_tile(use: Use) -> Tile:
    """Of absorbed queries: heads enough to use a loaded latent often, as far as registers and shared memory go."""
    heads, width = known(use, "q", 2), use.width("q")
    if width > 2 or not has_large_memory(use):
        return Tile(16, 16 if width > 2 else 32, 4, 1 if width > 2 else 2)
    # With 64 rows, latents that are converted from 8 bits spill registers.
    m = min(32 if use.width("cache") == 1 else 64, max(16, power_of_two(heads)))
    return Tile(m, 32, 8 if m > 16 else 4, 2)


def write_latent(use: Use) -> tuple[Launch, ...]:
    """`precast.write_latent`, in one launch."""
    return (written(use, "latent", "k_rope"),)


def written(use: Use, latents: str, rope: str = "", *, rate: int = 1) -> Launch:
    """The launch that writes `latents` [1, T, C] and, if they have some, their `rope` parts [1, T, R] into a cache: one
    for each `rate` tokens."""
    size, rope_size, has_pdl = known(use, latents, 2), known(use, rope, 2) if rope else 0, overlaps(use)
    given = latents, rope or latents
    return Launch(
        kernel=_KERNELS + "write_latent_kernel",
        grid=(use.shape(latents)[1],),
        args=(
            *(Pointer(name) for name in (*given, "cache", "slot_mapping")),
            mul(*use.shape("cache")[:2]),
            *(Stride(name, axis) for name in given for axis in (1, 2)),
            *(Stride("cache", axis) for axis in range(3)),
            Stride("slot_mapping", 0),
        ),
        constants={
            "PAGE_SIZE": known(use, "cache", 1),
            "RATE": rate,
            "LATENT": size,
            "ROPE": rope_size,
            "BLOCK_C": power_of_two(size),
            "BLOCK_R": power_of_two(rope_size) if rope else 1,
            "LIMIT": LARGEST_FLOAT8 if use.width("cache") == 1 else 0.0,
            "PDL": has_pdl,
        },
        num_warps=num_warps(power_of_two(size)),
        pdl=has_pdl,
    )


def _absorbed(use: Use, most_tokens: int | None, tile: Tile) -> tuple[Launch, ...]:
    """Every token of a small step, or the sequences of one query."""
    sizes, place = sizes_of(use), workspace(use, most_tokens=most_tokens)
    queries, results = (Pointer("workspace", sizes.dtype, offset) for offset in (place.queries, place.results))
    by_token, by_row = _strides()[:3], (sizes.heads * sizes.latent, sizes.latent, 1)
    return (
        _product(use, queries, Pointer("q"), by_token, most_tokens, to_latent=True),
        *_split(use, place, most_tokens, tile),
        _product(use, Pointer("out.0"), results, by_row, most_tokens, to_latent=False),
    )  # fmt: skip


def head_product(
    use: Use, made: Pointer, given: Pointer, strides: tuple[Stride | int, ...], *, to_latent: bool,
    few: bool = False,
) -> Launch:  # fmt: skip
    """Of every token: into the latents' space, by the key's part of the weight, or out of it, by the value's. `few`: of
    no more than `FEW_TOKENS`."""
    rows = use.shape("q")[1]
    launch = _product(use, made, given, strides, FEW_TOKENS if few else SMALL_STEP, to_latent=to_latent)
    *grid, _ = launch.grid
    block_t = launch.constants["BLOCK_T"]
    assert isinstance(block_t, int), "a number of rows"
    return launch._replace(grid=(*grid, ceildiv(rows, block_t)))


def _product(
    use: Use,
    made: Pointer,
    given: Pointer,
    strides: tuple[Stride | int, ...],
    most_tokens: int | None,
    *,
    to_latent: bool,
) -> Launch:
    """The same of a step of so many tokens at most, or of its sequences with one query."""
    sizes, has_pdl = sizes_of(use), overlaps(use, "weight")
    inner, size = (sizes.nope, sizes.latent) if to_latent else (sizes.latent, sizes.value)
    block_t = 16 if sizes.bytes > 2 or (most_tokens or SMALL_STEP) <= FEW_TOKENS else 64
    block_k = max(16, power_of_two(inner))
    elements = _WEIGHT_TILE // 4 if sizes.bytes > 2 else _WEIGHT_TILE
    block_n = min(max(16, elements // block_k), max(16, power_of_two(size)))
    return Launch(
        kernel=_KERNELS + "head_product_kernel",
        grid=(sizes.heads, -(-size // block_n), ceildiv(_rows(use, most_tokens), block_t)),
        args=(made, given, Pointer("weight"), Pointer("cu_seqlens"), use.shape("q")[1], _sequences(use), *strides),
        constants={
            "MOST_QUERIES": 0 if most_tokens else 1,
            "OF_TOKENS": to_latent,
            "TO_TOKENS": not to_latent,
            "TRANSPOSED": not to_latent,
            "HEADS": sizes.heads,
            "WEIGHT_ROWS": sizes.nope + sizes.value,
            "FIRST_ROW": 0 if to_latent else sizes.nope,
            "LATENT": sizes.latent,
            "INNER": inner,
            "SIZE": size,
            "BLOCK_T": block_t,
            "BLOCK_K": block_k,
            "BLOCK_N": block_n,
            "PRECISION": _precision(sizes),
            "PDL": has_pdl,
        },
        num_warps=8 if block_t > 16 else 4,
        pdl=has_pdl,
    )


def _split(use: Use, place: Workspace, most_tokens: int | None, tile: Tile) -> tuple[Launch, Launch]:
    """Attention in the latents' space, and its parts, joined; nothing is launched to join where all are whole."""
    sizes, splits = sizes_of(use), splits_of(use)
    tokens, sequences = use.shape("q")[1], _sequences(use)
    heads = min(sizes.heads, tile.m)
    queries = tile.m // heads if most_tokens else 1
    # Padding is a sequence too.
    tiles = add(floordiv(tokens, queries), sequences, 1) if most_tokens else add(sequences, 1)
    result = Pointer("workspace", sizes.dtype, place.results)
    partial = (Pointer("workspace", "float32", place.partial), Pointer("workspace", "float32", place.weights))
    shared = {
        "MOST_QUERIES": 0 if most_tokens else 1,
        "PAGE_SIZE": sizes.page,
        "HEADS": sizes.heads,
        "BLOCK_Q": queries,
        "BLOCK_N": tile.n,
        "WINDOW": _window(use),
        "PDL": overlaps(use),
    }
    block_c = max(16, power_of_two(sizes.latent))
    first = Launch(
        kernel=_KERNELS + "split_kernel",
        grid=(tiles, -(-sizes.heads // heads), splits.most),
        args=(result, *partial, Pointer("workspace", sizes.dtype, place.queries), Pointer("q"), Pointer("cache"),
              *_lists(True), tokens, sequences, *splits, *_strides()),
        constants=shared
        | {
            "BLOCK_H": heads,
            "BLOCK_M": tile.m,
            "BLOCK_C": block_c,
            "BLOCK_R": max(16, power_of_two(sizes.rope)),
            **_scoring(use, sizes),
        },
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        pdl=overlaps(use),
    )  # fmt: skip
    second = Launch(
        kernel="precast.kernels.attention.triton_merge:merge_kernel",
        grid=(mul(tiles, minimum(add(splits.most, -1), 1)), sizes.heads),
        args=(result, *partial, *_lists(False), tokens, sequences, *splits),
        constants=shared
        | {
            "LEAST_QUERIES": 1,
            "TO_TOKENS": bool(most_tokens),
            "VALUE_SIZE": sizes.latent,
            "BLOCK_V": block_c,
            "PARTS": max(1, JOINED // block_c),
            "CHUNK": 0,
            "EARLY": False,
        },
        pdl=overlaps(use),
    )
    return first, second


def _expanded(use: Use, tiles: Tiles) -> tuple[Launch, ...]:
    """Sequences of several queries: their own tokens as keys and values, attention to them, and to what was before."""
    sizes, place = sizes_of(use), workspace(use, most_tokens=None)
    tokens, sequences = use.shape("q")[1], _sequences(use)
    keys, values = (Pointer("workspace", sizes.dtype, offset) for offset in (place.keys, place.values))
    sums = Pointer("workspace", "float32", place.sums)
    paging = (Pointer("cache"), Pointer("weight"), *_lists(True), sequences)
    made = sizes.nope + sizes.value
    tile = tiles.expand
    block_n = min(128, max(16, power_of_two(made)))
    # Each sequence that has tiles has two tokens, and one tile that may be filled in part.
    tiles_bound = add(floordiv(tokens, tile.m), minimum(sequences, floordiv(tokens, 2)))
    constants = {key: value for key, value in _scoring(use, sizes).items() if key != "SCALE"}
    expand = Launch(
        kernel=_KERNELS + "expand_kernel",
        grid=(minimum(mul(tiles_bound, sizes.heads * -(-made // block_n)), 2 * PROGRAMS),),
        args=(keys, values, *paging, Stride("cache", 0), Stride("cache", 1)),
        constants=constants
        | {
            "PAGE_SIZE": sizes.page,
            "HEADS": sizes.heads,
            "VALUE": sizes.value,
            "BLOCK_T": tile.m,
            "BLOCK_N": block_n,
            "BLOCK_K": tile.n,
            "BLOCK_R": power_of_two(sizes.rope),
            "PDL": overlaps(use),
        },
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        pdl=overlaps(use),
    )
    tile = tiles.prefix
    prefix = Launch(
        kernel=_KERNELS + "prefix_kernel",
        grid=(PROGRAMS,),
        args=(Pointer("out.0"), sums, Pointer("q"), *paging, *_strides()),
        constants={
            "PAGE_SIZE": sizes.page,
            "HEADS": sizes.heads,
            "VALUE": sizes.value,
            "BLOCK_M": tile.m,
            "BLOCK_N": tile.n,
            "BLOCK_C": max(16, power_of_two(sizes.latent)),
            "BLOCK_R": max(16, power_of_two(sizes.rope)),
            "BLOCK_D": 16 if sizes.bytes > 2 else 32,
            "WINDOW": _window(use),
            "PDL": overlaps(use),
            **_scoring(use, sizes),
        },
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        pdl=overlaps(use),
    )
    return expand, _context(use, keys, values, sums, tiles.context), prefix


def _context(use: Use, keys: Pointer, values: Pointer, sums: Pointer, tile: Tile) -> Launch:
    """Attention of sequences of several queries to their own tokens."""
    sizes = sizes_of(use)
    tokens, sequences = use.shape("q")[1], _sequences(use)
    size = sizes.nope + sizes.rope
    tiles = add(floordiv(tokens, tile.m), 1, minimum(sequences, floordiv(tokens, 2)))
    strides = (sizes.heads * size, 0, size, 1, sizes.heads * sizes.value, 0, sizes.value, 1)
    # Of packed tokens a slot is a token, and there are no pages.
    placed = (0, strides[0], *strides[2:4], 0, strides[4], *strides[6:])
    return Launch(
        kernel="precast.kernels.attention.triton_context:context_kernel",
        grid=(minimum(mul(tiles, sizes.heads), 2 * PROGRAMS),),
        args=(Pointer("out.0"), sums, None, None, Pointer("q"), keys, values, None, None, Pointer("cu_seqlens"),
              None, None, None, None, tokens, sequences, *(Stride("q", axis) for axis in (1, 2, 3)), *placed),
        constants={
            "LEAST_QUERIES": 2,
            "PAGE_SIZE": 1,
            "HEADS": sizes.heads,
            "KV_HEADS": sizes.heads,
            "SIZE": size,
            "VALUE_SIZE": sizes.value,
            "BLOCK_H": 1,
            "BLOCK_Q": tile.m,
            "BLOCK_M": tile.m,
            "BLOCK_N": tile.n,
            "BLOCK_D": max(16, power_of_two(size)),
            "BLOCK_V": max(16, power_of_two(sizes.value)),
            "SCALE": real(use, "scale"),
            "SOFT_CAP": 0.0,
            "WINDOW": _window(use),
            "CHUNK": 0,
            "PRECISION": _precision(sizes),
            "EARLY": False,
            "PDL": overlaps(use),
        },
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        pdl=overlaps(use),
    )  # fmt: skip


def _context_tile(use: Use) -> Tile:
    sizes = sizes_of(use)
    widest = power_of_two(max(sizes.nope + sizes.rope, sizes.value, 16))
    if sizes.bytes > 2:
        return Tile(32, max(16, min(32, 4096 // widest)), 8 if widest > 64 else 4, 1)
    if has_large_memory(use):
        return Tile(128, 64, 8, 2)
    return Tile(64, 16 if widest > 128 else 32, 4, 2)


def _expanding_tile(use: Use) -> Tile:
    """Tokens, and elements of a latent that are multiplied at a time."""
    if use.width("q") > 2:
        return Tile(32, 32, 4, 1)
    return Tile(128, 64, 8, 3) if has_large_memory(use) else Tile(64, 64, 4, 2)


def _prefix_tile(use: Use) -> Tile:
    if use.width("q") > 2:
        return Tile(16, 16, 4, 1)
    return Tile(64, 32, 8, 2) if has_large_memory(use) else Tile(16, 32, 4, 1)


def _scoring(use: Use, sizes: Sizes) -> dict[str, int | float | bool | str]:
    return {
        "NOPE": sizes.nope,
        "LATENT": sizes.latent,
        "ROPE": sizes.rope,
        "SCALE": real(use, "scale"),
        "PRECISION": _precision(sizes),
    }


def _precision(sizes: Sizes) -> str:
    return "ieee" if sizes.bytes > 2 else "tf32"


def _window(use: Use) -> int:
    """How far queries see; 0 for no window."""
    window = use.constant("window")
    assert window is None or isinstance(window, int)
    return window or 0


def _lists(with_pages: bool) -> tuple[Pointer, ...]:
    names = ("cu_seqlens", "kv_lens", *(("page_indices",) if with_pages else ()), "page_indptr", "page_start")
    return tuple(Pointer(name) for name in names)


def _strides() -> tuple[Stride, ...]:
    return (*(Stride("q", axis) for axis in (1, 2, 3)), Stride("cache", 0), Stride("cache", 1))


def _rows(use: Use, most_tokens: int | None) -> Expr:
    """Rows of what is absorbed: tokens, or sequences and padding."""
    return minimum(use.shape("q")[1], most_tokens) if most_tokens else add(_sequences(use), 1)


def _sequences(use: Use) -> Expr:
    return add(use.shape("cu_seqlens")[0], -1)


def _aligned(num_bytes: Expr) -> Expr:
    """Rounded up to a multiple of 16 bytes, which loads of several elements want."""
    return mul(16, ceildiv(num_bytes, 16))
