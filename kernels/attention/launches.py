"""The launches of attention in Triton (`precast.kernels.attention.triton_tiles`), and the sizes of tiles. No torch."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from precast.ir.graph.schema import Expr
from precast.ir.graph.symbols import add, floordiv, minimum, mul
from precast.kernels.blocks import power_of_two
from precast.kernels.records import Launch, Pointer, Stride
from precast.kernels.rotary_write_kv.launches import LARGEST_FLOAT8
from precast.kernels.use import Use

SMALL_STEP = 64
"""Tokens of a step that small tiles alone compute, whatever sequences they are of."""
PROGRAMS = 264
"""Programs that share the large tiles: two for each multiprocessor of an H100."""
SLOTS = (2, 8, 32)
"""The ends of ranges of slots for sequences, for each of which keys are split in another way."""
FEW_SLOTS, MANY_SLOTS = SLOTS[0], SLOTS[-1] + 1
"""Slots up to which, and from which on, small steps have tiles of their own."""
WANTED_PROGRAMS = (1024, 256, 256)
"""Programs that read keys at once, if each of them gets some, by `SLOTS`. On an H200, a head of 128 elements: one
sequence of 4096 keys takes 26 us in 32 parts and 27 us in 8, one of 32768 is fastest in 64. Eight of 4096 take 51 us in
4 parts, 61 us in 8 and 74 us in 16: 256 programs are two for each multiprocessor, the others wait for their turn."""
LEAST_PARTS, MOST_PARTS = 4, 128
"""Of a sequence's keys, where they are split."""
FEW_KEYS, MANY_KEYS = 64, 256
"""Keys of a part at least, in steps of few slots and of many."""
WHOLE_KEYS, WHOLE_WIDE_KEYS = 512, 128
"""Keys of a sequence that are not split, with heads of up to 128 elements and with larger ones. On an H200, 8 sequences
of 256 keys take 9 us in one part and 17 us in 4; with heads of 256 elements 4 parts are faster, by 1 us."""
PARTS = 4096
"""Elements of partial results that are joined at a time, at most, if that is one part at least."""
AHEAD = 0
"""Keys that a program with a small tile has the L2 cache fetch while the kernel in front still runs."""


class Tile(NamedTuple):
    """The sizes of a kernel's tiles: rows, each a query and a head, and keys of a step; how they are spread over warps
    and pipelined."""

    m: int
    n: int
    num_warps: int
    num_stages: int


class Splits(NamedTuple):
    """Into how many parts the keys of a small tile are split at most, how many keys a part has at least, and how many
    keys are not split at all."""

    most: Expr
    least_keys: Expr
    whole_keys: Expr = 0


def has_large_memory(use: Use) -> bool:
    """Whether a block may have 160 KiB of shared memory; other GPUs have 99 KiB."""
    return use.target.capability in ((8, 0), (8, 7), (9, 0), (10, 0), (10, 3))


def context_tile(use: Use, keys: str = "k_cache", values: str = "v_cache") -> Tile:
    """Of sequences with many queries: rows enough to use a loaded key often."""
    size = power_of_two(max(_number(use, keys, 3), _number(use, values, 3), 16))
    if use.width("q") > 2:
        return Tile(32, max(16, min(32, 4096 // size)), 8 if size > 64 else 4, 1)
    is_large = has_large_memory(use)
    if size > 256:
        return Tile(64 if is_large else 32, 16, 8, 2)
    if size > 128:
        return Tile(128, 64, 8, 2) if is_large else Tile(64, 16, 4, 2)
    if size > 64:
        return Tile(128, 64, 8, 3) if is_large else Tile(128, 32, 8, 2)
    return Tile(128, 64, 4, 3)


def hopper_tile(use: Use) -> Tile:
    """Of sequences with many queries, for warps with roles: as many stages as shared memory has room for."""
    return Tile(128, 64, 4, 5 if _number(use, "k_cache", 3) > 64 else 4)


def split_tile(use: Use, slots: range | None = None) -> Tile:
    """Of sequences with few queries: the least rows that the tensor cores take, and many keys on their way.

    `slots`: how many slots for sequences the step may have, None for any. Times are of an H200.
    """
    size = power_of_two(max(_number(use, "k_cache", 3), _number(use, "v_cache", 3), 16))
    is_wide, is_large = use.width("q") > 2, has_large_memory(use)
    if slots is not None and is_large and not is_wide:
        if slots[-1] <= FEW_SLOTS and size == 128:
            # One sequence of 4096 keys: 26 us, in steps of 64 keys 74 us.
            return Tile(16, 128, 8, 2)
        if size == 256:
            # 64 sequences that see 1024 keys: 135 us, in 3 stages 157 us.
            return Tile(16, 32, 4, 4)
        if slots[0] >= MANY_SLOTS and size == 128:
            # 64 sequences of 256 keys: 26 us, in 3 stages 29 us; less memory lets more programs run at once.
            return Tile(16, 64, 4, 2)
    n = max(16, min(64, (8192 if is_large else 4096) // size) // (2 if is_wide else 1))
    return Tile(16, n, 4, 1 if is_wide else 3)


def splits_of(use: Use) -> Splits:
    """By the slots for sequences that a step has, and nothing else that steps differ in.

    Few slots: so many parts that all of a GPU reads one sequence. More: a few parts all the same, because one of the
    sequences may be much longer than the others; the short ones are whole. One or two slots leave most of a GPU idle,
    and split short sequences too. Many slots fill it alone: 64 sequences of 256 keys take 22 us whole and 26 us in
    parts, 256 of 4096 keys 976 us and 1030 us. A sequence gets the same result whatever others are in the step, if that
    has slots within the same range.
    """
    heads, size = _number(use, "k_cache", 2), max(_number(use, "k_cache", 3), _number(use, "v_cache", 3))
    most = [
        max(LEAST_PARTS, min(MOST_PARTS, programs // (slots * heads)))
        for slots, programs in zip(SLOTS, WANTED_PROGRAMS, strict=True)
    ]
    whole = WHOLE_KEYS if size <= 128 else WHOLE_WIDE_KEYS
    values = ((*most, 1), (FEW_KEYS, FEW_KEYS, MANY_KEYS, MANY_KEYS), (0, whole, whole, whole))
    return Splits(*(by_slots(_sequences(use), each) for each in values))


@cache
def by_slots(slots: Expr, values: tuple[int, ...]) -> Expr:
    """The first value up to `SLOTS[0]` slots, the next one up to `SLOTS[1]`; the last one for more."""
    found: Expr = values[-1]
    for most, value, following in zip(SLOTS, values, values[1:], strict=False):
        # 1 for more slots than `most`, else 0.
        is_more = floordiv(minimum(slots, most + 1), most + 1)
        found = add(found, value - following, mul(following - value, is_more))
    return found


def paged(use: Use, *, is_small: bool, slots: range | None = None) -> tuple[Launch, ...]:
    """`precast.paged_attention`.

    `is_small`: in small tiles only, for steps of few tokens. Else sequences of several queries have large ones.
    `slots`: as `split_tile` takes them.
    """
    small = split_launches(use, split_tile(use, slots), splits_of(use), is_small=is_small)
    return small if is_small else (*context(use), *small)


def hopper(use: Use) -> tuple[Launch, ...]:
    """`precast.paged_attention` for steps of many tokens, on Hopper."""
    return (*hopper_context(use), *split_launches(use, split_tile(use), splits_of(use), is_small=False))


def context(use: Use) -> tuple[Launch, ...]:
    """Sequences with several queries, in steps of many tokens."""
    return (context_launch(use, context_tile(use)),)


def hopper_context(use: Use) -> tuple[Launch, ...]:
    """The same by the kernel whose warps have roles."""
    return (hopper_launch(use, hopper_tile(use)),)


def few_queries(use: Use, *, slots: range) -> tuple[Launch, ...]:
    """Sequences with several queries, in steps of few tokens; `slots` as `split_tile` takes them."""
    return split_launches(use, split_tile(use, slots), splits_of(use), is_small=True, least_queries=2)


def partial_bytes(use: Use, *, is_small: bool) -> Expr:
    """The workspace of `paged`: partial results, and for each the highest score and the total of the weights."""
    heads, value_size = _number(use, "q", 2), _number(use, "v_cache", 3)
    return mul(4 * heads * (value_size + 2), splits_of(use).most, _rows(use, is_small))


def packed(use: Use) -> tuple[Launch, ...]:
    """`precast.attention`: large tiles."""
    return (context_launch(use, context_tile(use, "k", "v"), keys="k", values="v"),)


def context_launch(
    use: Use, tile: Tile, *, keys: str = "k_cache", values: str = "v_cache", programs: int | None = None
) -> Launch:
    """Sequences of several queries, in large tiles; without pages, sequences of one query too."""
    is_paged = keys == "k_cache"
    shape = _heads(use, tile, keys)
    tokens, sequences = use.shape("q")[1], _sequences(use)
    least = 2 if is_paged else 1
    # Each sequence that has tiles has `least` tokens, and one tile that may be filled in part.
    tiles = add(floordiv(tokens, shape.queries), 1, minimum(sequences, floordiv(tokens, least)))
    items = mul(tiles, _number(use, keys, 2), shape.groups)
    return Launch(
        kernel="precast.kernels.attention.triton_context:context_kernel",
        grid=(minimum(items, programs or PROGRAMS),),
        args=(Pointer("out.0"), None, *_scales(use), *_tensors(use, keys, values),
              *_lists(use, is_paged, True), tokens, sequences, *_strides(keys, values)),
        constants={
            "LEAST_QUERIES": least,
            "PAGE_SIZE": _number(use, keys, 1) if is_paged else 1,
            **_tile_constants(use, tile, shape, keys, values),
        },
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        pdl=overlaps(use),
    )  # fmt: skip


def hopper_launch(use: Use, tile: Tile, *, programs: int | None = None) -> Launch:
    """`context_launch` of a cache, by the kernel whose warps have roles: a program has a multiprocessor for itself."""
    plain = context_launch(use, tile, programs=programs or PROGRAMS // 2)
    needless = ("SIZE", "VALUE_SIZE", "BLOCK_V", "PRECISION")
    constants = {name: value for name, value in plain.constants.items() if name not in needless}
    result, _, _, _, *args = plain.args  # sums of exponentials and scales are wanted of the plain kernel alone
    # Shared memory of a block is 227 KiB, of which barriers take a little.
    size, width = _number(use, "k_cache", 3), use.width("q")
    left = 226 * 1024 - 2 * tile.num_stages * tile.n * size * width
    more = {"STAGES": tile.num_stages, "Q_STAGES": min(2, left // (tile.m * size * width)),
            "REGISTERS": 224 if size > 128 else 216}  # fmt: skip
    return plain._replace(
        kernel="precast.kernels.attention.hopper:context_kernel",
        args=(result, *args),
        constants=constants | more,
        num_warps=4,
        num_stages=1,
    )


def split_launches(
    use: Use, tile: Tile, splits: Splits, *, is_small: bool, least_queries: int = 1, ahead: int = AHEAD
) -> tuple[Launch, ...]:
    """Small tiles: of all sequences of a small step that have `least_queries`, of those with one query in other steps;
    and their parts, joined.

    Nothing is launched to join them where no sequence has more than one: the grid is empty then.
    """
    shape = _heads(use, tile, "k_cache", None if is_small else 1)
    tokens, sequences = use.shape("q")[1], _sequences(use)
    heads, value_size = _number(use, "q", 2), _number(use, "v_cache", 3)
    # Padding is a sequence too.
    tiles = add(floordiv(tokens, shape.queries), sequences, 1) if is_small else add(sequences, 1)
    rows = _rows(use, is_small)
    parts = mul(rows, heads, splits.most)
    partial = (Pointer("workspace", "float32"), Pointer("workspace", "float32", mul(4, parts, value_size)))
    constants = {
        "MOST_QUERIES": 0 if is_small else 1,
        "LEAST_QUERIES": least_queries,
        "PAGE_SIZE": _number(use, "k_cache", 1),
    }
    first = Launch(
        kernel="precast.kernels.attention.triton_split:split_kernel",
        grid=(tiles, _number(use, "k_cache", 2) * shape.groups, splits.most),
        args=(Pointer("out.0"), *partial, *_scales(use), *_tensors(use, "k_cache", "v_cache"),
              *_lists(use, True, True), tokens, sequences, *splits, *_strides("k_cache", "v_cache")),
        constants=constants | _tile_constants(use, tile, shape, "k_cache", "v_cache") | {"AHEAD": ahead_of(use, ahead)},
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        pdl=overlaps(use),
    )  # fmt: skip
    columns = max(16, power_of_two(value_size))
    second = Launch(
        kernel="precast.kernels.attention.triton_merge:merge_kernel",
        grid=(mul(tiles, minimum(add(splits.most, -1), 1)), heads),
        args=(Pointer("out.0"), *partial, *_lists(use, True, False), tokens, sequences, *splits),
        constants=constants
        | {
            "TO_TOKENS": True,
            "HEADS": heads,
            "VALUE_SIZE": value_size,
            "BLOCK_Q": shape.queries,
            "BLOCK_N": tile.n,
            "BLOCK_V": columns,
            "PARTS": max(1, PARTS // columns),
            **_reach(use),
            "EARLY": _is_early(use),
            "PDL": overlaps(use),
        },
        num_warps=4,
        num_stages=3,
        pdl=overlaps(use),
    )
    return first, second


def write_kv(use: Use) -> tuple[Launch, ...]:
    """One launch that copies keys and values into the cache: a program for each token and head."""
    size, value_size = _number(use, "k", 3), _number(use, "v", 3)
    return (
        Launch(
            kernel="precast.kernels.attention.triton_write_kv:write_kv_kernel",
            grid=use.shape("k")[1:3],
            args=(
                *(Pointer(name) for name in ("k", "v", "k_cache", "v_cache", "slot_mapping")),
                *_scales(use),
                mul(*use.shape("k_cache")[:2]),
                *(Stride(name, axis) for name in ("k", "v") for axis in (1, 2, 3)),
                *(Stride(name, axis) for name in ("k_cache", "v_cache") for axis in range(4)),
            ),
            constants={
                "PAGE_SIZE": _number(use, "k_cache", 1),
                "SIZE": size,
                "VALUE_SIZE": value_size,
                "BLOCK_D": power_of_two(size),
                "BLOCK_V": power_of_two(value_size),
                "LIMIT": LARGEST_FLOAT8 if use.width("k_cache") == 1 else 0.0,
            },
        ),
    )


def ahead_of(use: Use, keys: int) -> int:
    """`keys` where the GPU can fetch them by whole heads, else 0."""
    row_bytes = {_number(use, name, 3) * use.width(name) for name in ("k_cache", "v_cache")}
    return keys if _is_early(use) and all(size % 16 == 0 for size in row_bytes) else 0


class _Shape(NamedTuple):
    """Of a tile: queries, heads of a key head's group, and how many tiles such a group has side by side."""

    queries: int
    heads: int
    groups: int


def _heads(use: Use, tile: Tile, keys: str, queries: int | None = None) -> _Shape:
    group = _number(use, "q", 2) // _number(use, keys, 2)
    heads = min(group, tile.m)
    return _Shape(queries or tile.m // heads, heads, -(-group // heads))


def _rows(use: Use, is_small: bool) -> Expr:
    """Rows of partial results: tokens, or slots for sequences and padding."""
    tokens = use.shape("q")[1]
    if not is_small:
        return add(_sequences(use), 1)
    return tokens if isinstance(tokens, int) else minimum(tokens, SMALL_STEP)


def _sequences(use: Use) -> Expr:
    return add(use.shape("cu_seqlens")[0], -1)


def _number(use: Use, name: str, axis: int) -> int:
    found = use.number(name, axis)
    assert found is not None, f"axis {axis} of {name} is fixed by the model"
    return found


def _tensors(use: Use, keys: str, values: str) -> tuple[Pointer | None, ...]:
    given = [Pointer(name) if use.has(name) else None for name in ("sinks", "slopes")]
    return (Pointer("q"), Pointer(keys), Pointer(values), *given)


def _scales(use: Use) -> tuple[Pointer | None, ...]:
    return tuple(Pointer(name) if use.has(name) else None for name in ("k_scale", "v_scale"))


def _lists(use: Use, is_paged: bool, with_pages: bool) -> tuple[Pointer | None, ...]:
    names = ("kv_lens", *(("page_indices",) if with_pages else ()), "page_indptr", "page_start")
    return (Pointer("cu_seqlens"), *(Pointer(name) if is_paged else None for name in names))


def _strides(keys: str, values: str) -> tuple[Stride | int, ...]:
    """Of the query's tokens, heads and elements; of pages, slots, heads and elements. In a page elements are close."""
    query = tuple(Stride("q", axis) for axis in (1, 2, 3))
    cached = (
        (*(Stride(name, axis) for axis in (0, 1, 2)), 1 if name.endswith("_cache") else Stride(name, 3))
        for name in (keys, values)
    )
    return (*query, *(stride for each in cached for stride in each))


def _reach(use: Use) -> dict[str, int]:
    """How far queries see; 0 for no window and no chunks."""
    window, chunk = use.constant("window"), use.constant("chunk")
    assert window is None or isinstance(window, int)
    assert chunk is None or isinstance(chunk, int)
    return {"WINDOW": window or 0, "CHUNK": chunk or 0}


def _tile_constants(use: Use, tile: Tile, shape: _Shape, keys: str, values: str) -> dict[str, int | float | bool | str]:
    size, value_size = _number(use, keys, 3), _number(use, values, 3)
    scale, soft_cap = use.constant("scale"), use.constant("soft_cap")
    assert isinstance(scale, (int, float))
    assert soft_cap is None or isinstance(soft_cap, (int, float))
    return {
        "HEADS": _number(use, "q", 2),
        "KV_HEADS": _number(use, keys, 2),
        "SIZE": size,
        "VALUE_SIZE": value_size,
        "BLOCK_H": shape.heads,
        "BLOCK_Q": shape.queries,
        "BLOCK_M": tile.m,
        "BLOCK_N": tile.n,
        "BLOCK_D": max(16, power_of_two(size)),
        "BLOCK_V": max(16, power_of_two(value_size)),
        "SCALE": float(scale),
        "SOFT_CAP": float(soft_cap or 0.0),
        **_reach(use),
        "PRECISION": "ieee" if use.width("q") > 2 else "tf32",
        "EARLY": _is_early(use),
        "PDL": overlaps(use),
    }


def overlaps(use: Use) -> bool:
    """Whether kernels may begin before those in front of them have ended."""
    return use.target.capability >= (9, 0)


def _is_early(use: Use) -> bool:
    """Whether kernels read where sequences and pages are before they wait for the kernel in front.

    Inputs of the step, as those of a cache are, are there before its first kernel.
    """
    return overlaps(use) and use.has("page_indices")
