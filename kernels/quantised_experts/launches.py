"""The launches of experts in few bits, and the memory between them. No torch and no triton here.

Pairs are put into order, and added up, by the launches of `precast.kernels.experts.launches`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from precast.ir.graph.schema import Const, Dtype, Expr, Items
from precast.ir.graph.symbols import add, ceildiv, floordiv, minimum, mul
from precast.ir.weights.quantised import NVFP4_BLOCK, PACKED
from precast.kernels.blocks import power_of_two
from precast.kernels.experts import launches as experts
from precast.kernels.experts.launches import Sizes, Tiles, given, has_pdl, shared_bytes, step_of
from precast.kernels.quantised_experts.rounding import (
    Rounded,
    is_short,
    rounded_at,
    rounding,
    rounding_of,
    row_scales_of,
)
from precast.kernels.quantised_linear.launches import INPUT_GROUP
from precast.kernels.records import Launch, Launches, Pointer, Stride
from precast.kernels.use import Use

_TRITON = "precast.kernels.quantised_experts.triton"
_VALUES = {
    "mxfp4": ("fp4", "e8m0"), "nvfp4": ("fp4", "e4m3"), "nvfp4_divided": ("fp4", "e4m3"), "packed4": ("int4", "float"),
    "packed8": ("uint8", "float"), "fp8": ("float8", "float"), "int8": ("int8", "float"),
}  # fmt: skip
"""How kernels call a format's values, and its scales."""
_MXFP4_BLOCK = 32
_MOST_TAKEN = 112
"""What may be taken from integers of four bits, at most, besides zeros of four bits: bfloat16 holds 128 and it all."""
_LEAST_K, _LEAST_GROUP = 32, 16
"""The fewest columns of a block, and of a group that a block has several of."""
_BUSY, _LONG = 1024, 1024
"""Warps that keep a GPU busy, and numbers of a row that make two parts of it worth a sum."""
_SUM_BLOCK = 256
_COPIED = 16
"""Bytes of which what is brought to the L2 cache at once is a multiple."""
_WARP_GROUPS = 8
"""Warps of tiles that are multiplied by the matrix instructions of warp groups, which take float8 as it is."""
_LARGE_GROUP = 64
"""Groups of so many columns are blocks: a product with the sum is cheaper than one with each value."""
Constants = dict[str, int | float | bool | str]


def sizes_of(use: Use) -> Sizes | None:
    """The sizes of `precast.quantised_experts`; None if one that kernels are compiled for isn't known at load."""
    num_experts, opened = use.number("up", 0), use.number("up", 1)
    top_k, width = use.number("expert_ids", 1), use.number("x", 1)
    if num_experts is None or opened is None or top_k is None or width is None:
        return None
    tokens = use.shape("x")[0]
    inner = opened // 2 if use.constant("gated") else opened
    return Sizes(num_experts, top_k, width, inner, mul(top_k, tokens), tokens)


def is_taken(use: Use) -> bool:
    """Whether kernels know the sizes, and blocks of columns lie in groups that share a scale."""
    sizes = sizes_of(use)
    if sizes is None:
        return False
    parts = [name for name in use.operands if name.startswith(("up", "down"))]
    whole = all(use.operands[name].is_contiguous for name in parts)
    groups = [_group(use, name, size)[1] for name, size in (("up", sizes.width), ("down", sizes.inner))]
    widths = zip(groups, (sizes.width, sizes.inner), strict=True)
    whole = whole and is_short(use, sizes.width, sizes.inner)
    return whole and all(group >= width or _is_fp4(use) or _is_cut(group) for group, width in widths)


def _is_cut(group: int) -> bool:
    """Whether blocks of columns are whole groups of so many, or lie in one."""
    return group % _LEAST_K == 0 or (group >= _LEAST_GROUP and group == power_of_two(group))


def has_float8(use: Use) -> bool:
    """Whether the GPU has instructions for what is stored in float8, or rounded to it, if anything is."""
    stored = [use.operands[name].type.dtype for name in ("up", "up_scales")]
    is_float8 = "float8_e4m3fn" in stored or rounding_of(use).startswith("fp8")
    return not is_float8 or use.target.capability >= (8, 9)


def few(
    up: Tiles | None = None, down: Tiles | None = None, *, splits: int | None = None, asks_ahead: bool = False
) -> Launches:
    """Each pair is a tile: both products, and the sum.

    `splits`: parts of the second product's sums; None: as many as GPUs need to be busy. `asks_ahead`: its weights are
    brought to the L2 cache while the first one runs, if the GPU can.
    """
    return lambda use: _few(use, up, down, splits or splits_of(known(use)), asks_ahead=asks_ahead)


def few_workspace(use: Use) -> Expr:
    """What is rounded, what is between the products, and the rows of all pairs."""
    return _rows(use, 0, parts=splits_of(known(use))).end


def splits_of(sizes: Sizes) -> int:
    """Parts of the second product's sums, where each pair is a tile: its warps have 16 rows, and a token's pairs alone
    should be of more than 7 for each of 132 multiprocessors, if rows are long enough."""
    return 2 if -(-sizes.width // 16) * sizes.top_k < _BUSY and sizes.inner >= _LONG else 1


def grouped(tokens: int | None, up: Tiles | None = None, down: Tiles | None = None) -> Launches:
    """In steps of up to `tokens`: the order of pairs, both products, and the sum."""
    return lambda use: _grouped(use, tokens, up, down)


def grouped_workspace(tokens: int | None) -> Callable[[Use], Expr]:
    """The order of pairs, what is rounded, what is between the products, and the rows of all pairs."""
    return lambda use: _ordered_rows(use, tokens, _places(use, tokens)).end


class _Rows(NamedTuple):
    """Where activated rows lie in a workspace, those of all pairs after them, what tokens' rows and activated ones are
    rounded to, if they are, and its end."""

    h: Pointer
    rows: Pointer
    x_rounded: Rounded | None
    h_rounded: Rounded | None
    end: Expr


def _rows(use: Use, start: Expr, kept: Dtype = "float32", parts: int = 1) -> _Rows:
    """From a byte on; the rows of pairs are `kept` in a type, in so many parts."""
    sizes = known(use)
    second = add(start, experts.aligned(mul(use.width("x") * sizes.inner, sizes.pairs)))
    num_bytes = parts * (4 if kept == "float32" else 2)
    end = add(second, experts.aligned(mul(num_bytes * sizes.width, sizes.pairs)))
    x_rounded = h_rounded = None
    if rounding_of(use) != "none":
        is_exact = {name: _is_exact(use, name, size) for name, size in (("up", sizes.width), ("down", sizes.inner))}
        x_rounded = rounded_at(use, end, sizes.tokens, sizes.width, is_exact=is_exact["up"])
        h_rounded = rounded_at(use, x_rounded.end, sizes.pairs, sizes.inner, is_exact=is_exact["down"])
        end = h_rounded.end
    return _Rows(
        Pointer("workspace", use.operands["x"].type.dtype, start), Pointer("workspace", kept, second), x_rounded,
        h_rounded, end,
    )  # fmt: skip


def _is_exact(use: Use, name: str, size_k: int) -> bool:
    """Whether numbers of eight bits are multiplied as they are, of rows and of the weight `name` alike.

    Not of rows in float32: tensor cores add up products of float8 with fewer digits.
    """
    format, kind = use.constant("format"), rounding_of(use)
    fits = (format == "fp8" and kind.startswith("fp8")) or (format == "int8" and kind == "int8_token")
    group = _group(use, name, size_k)[1]
    in_blocks = group >= size_k or not _has_several(group)
    return fits and in_blocks and use.width("x") == 2 and not use.has(f"{name}_zeros")


def _has_several(group: int) -> bool:
    """Whether a block of columns has several groups of so many."""
    return group < _LARGE_GROUP and group == power_of_two(group)


def _ordered_rows(use: Use, tokens: int | None, places: experts.Places) -> _Rows:
    """After the order of pairs. Rows are rounded where there are so many that their bytes cost time."""
    return _rows(use, places.end, use.operands["x"].type.dtype if experts.are_many(tokens) else "float32")


def _places(use: Use, tokens: int | None) -> experts.Places:
    sizes = known(use)
    return experts.places_of(sizes.pairs, sizes.num_experts, is_counted=experts.are_many(tokens))


def _few(use: Use, up: Tiles | None, down: Tiles | None, splits: int, *, asks_ahead: bool) -> tuple[Launch, ...]:
    sizes, rows = known(use), _rows(use, 0, parts=splits)
    is_wide = use.width("x") > 2
    up, down = up or (_FEW_WIDE if is_wide else _FEW_UP), down or (_FEW_WIDE if is_wide else _FEW_DOWN)
    before, first, between, second = _products(use, rows, None, up, down)
    asks_ahead = asks_ahead and has_pdl(use) and _row_bytes(use, sizes.inner) % _COPIED == 0
    return (
        *before,
        first._replace(constants={**first.constants, "RELEASES_LATE": True}),
        *between,
        second._replace(
            grid=(*second.grid, splits), constants={**second.constants, "SPLITS": splits, "ASKS_AHEAD": asks_ahead}
        ),
        sum_of_pairs(use, rows.rows, splits),
    )


def sum_of_pairs(use: Use, rows: Pointer, splits: int) -> Launch:
    """The weighted sum of the `rows` of each token's pairs, [splits, pairs, width] in float32."""
    sizes = known(use)
    ids = (step_of(use, "expert_ids", 0), step_of(use, "expert_ids", 1))
    weights = (step_of(use, "expert_weights", 0), step_of(use, "expert_weights", 1))
    return Launch(
        f"{_TRITON}:sum_kernel",
        (ceildiv(sizes.width, _SUM_BLOCK), sizes.tokens),
        (Pointer("out.0"), rows, Pointer("expert_ids"), Pointer("expert_weights"), sizes.pairs, *ids, *weights),
        {
            "NUM_EXPERTS": sizes.num_experts, "TOP_K": sizes.top_k, "SPLITS": splits, "SIZE": sizes.width,
            "BLOCK_J": power_of_two(splits * sizes.top_k), "BLOCK": _SUM_BLOCK, "PDL": has_pdl(use),
        },
        pdl=has_pdl(use),
    )  # fmt: skip


def _grouped(use: Use, tokens: int | None, up: Tiles | None, down: Tiles | None) -> tuple[Launch, ...]:
    sizes, places = known(use), _places(use, tokens)
    rows = _ordered_rows(use, tokens, places)
    average = None if tokens is None else tokens * sizes.top_k / sizes.num_experts
    most = None if tokens is None or experts.are_many(tokens) else tokens * sizes.top_k
    ids = (step_of(use, "expert_ids", 0), step_of(use, "expert_ids", 1))
    is_wide = use.width("x") > 2
    up = up or _tiles_of(tokens, average, _WIDE if is_wide else _GATED if use.constant("gated") else _PLAIN)
    down = down or _tiles_of(tokens, average, _WIDE if is_wide else _PLAIN)
    before, first, between, second = _products(use, rows, places, up, down)
    return (
        *experts.order_of(use, places, sizes.pairs, ids, sizes.top_k, sizes.num_experts, most),
        *before, first, *between, second,
        experts.sum_of(use, rows.rows, sizes),
    )  # fmt: skip


_FEW_UP = Tiles(8, 32, 128, 4, 4, True)
_FEW_DOWN = Tiles(8, 32, 128, 2, 4, True)
_FEW_WIDE = Tiles(8, 32, 32, 4, 2, True)
_GATED = (
    (16, None, Tiles(16, 32, 128, 2, 4, True, 1)),
    (None, 32, Tiles(64, 32, 64, 2, 4, True, 2)),
    (None, None, Tiles(128, 64, 64, 8, 3, True, 3)),
)
_PLAIN = (
    (16, None, Tiles(16, 64, 128, 2, 4, True, 1)),
    (None, 32, Tiles(64, 64, 64, 2, 4, True, 2)),
    (None, None, Tiles(128, 128, 64, 8, 3, True, 3)),
)
_WIDE = ((None, None, Tiles(32, 32, 32, 4, 2, True, 2)),)
"""Tiles of a gated product and of a plain one, and of both in float32: of steps of so many tokens at most, of which an
expert has so many on average; None: of any number.

Two warps are too few for the matrix instructions of a warp group, which Hopper has for large tiles. Those of a warp
take values where they were made; before the others, each byte is taken out of a register by itself.
"""


def _tiles_of(
    tokens: int | None, average: float | None, chosen: tuple[tuple[int | None, int | None, Tiles], ...]
) -> Tiles:
    return next(
        tiles
        for most_tokens, most_average, tiles in chosen
        if (most_tokens is None or (tokens is not None and tokens <= most_tokens))
        and (most_average is None or (average is not None and average <= most_average))
    )


def _products(
    use: Use, rows: _Rows, places: experts.Places | None, up: Tiles, down: Tiles
) -> tuple[tuple[Launch, ...], Launch, tuple[Launch, ...], Launch]:
    """What comes before the first product, that, what comes between them, and the second one; by pairs where there are
    no places."""
    sizes = known(use)
    activated = experts.between_of(use)
    plain: Constants = {"IS_GATED": False, "ACTIVATION": "", "ALPHA": 1.0, "LIMIT": 0.0, "OFFSET": 0.0}
    first: Constants = {**activated, "SIZE_K": sizes.width, "SIZE_N": sizes.inner, "GATHERS": True, "SCATTERS": False}
    second: Constants = {**plain, "SIZE_K": sizes.inner, "SIZE_N": sizes.width, "GATHERS": False, "SCATTERS": True}
    x = (step_of(use, "x", 0), step_of(use, "x", 1))
    x_rows, h_rows, h = Pointer("x"), rows.h, (sizes.inner, 1)
    is_even = sizes.width % 2 == 0 and (use.operands["x"].is_contiguous or rows.x_rounded is not None)
    before: tuple[Launch, ...] = ()
    between: tuple[Launch, ...] = ()
    if rows.x_rounded is not None and rows.h_rounded is not None:
        before = (rounding(use, rows.x_rounded, x_rows, sizes.tokens, sizes.width, x),)
        between = (rounding(use, rows.h_rounded, h_rows, sizes.pairs, sizes.inner, h),)
        x_rows, h_rows, x = rows.x_rounded.rows, rows.h_rounded.rows, (sizes.width, 1)
    x_scales, h_scales = (None if each is None else each.scales for each in (rows.x_rounded, rows.h_rounded))
    return (
        before,
        _product(use, "up", (rows.h, x_rows, x_scales), x, places, {**first, "X_IN_PAIRS": is_even}, up),
        between,
        _product(use, "down", (rows.rows, h_rows, h_scales), h, places, {**second, "X_IN_PAIRS": True}, down),
    )


def _product(
    use: Use, name: str, pointers: tuple[Pointer, Pointer, Pointer | None], x_steps: tuple[Stride | int, ...],
    places: experts.Places | None, constants: Mapping[str, int | float | bool | str], tiles: Tiles,
) -> Launch:  # fmt: skip
    """A launch of `product_kernel`: of results, rows and their scales, and the weight `name`."""
    sizes = known(use)
    stored = _stored(use, name, int(constants["SIZE_K"]))
    is_half = use.width("x") == 2 and stored["VALUES"] in ("fp4", "int4")
    is_exact = _is_exact(use, name, int(constants["SIZE_K"]))
    # Large tiles are products of eight bits on both sides, whose sums are multiplied by scales, block by block.
    most_k = INPUT_GROUP if is_exact and tiles.num_warps >= _WARP_GROUPS else tiles.k
    block_k = _block_k(most_k, int(stored["GROUP_K"]), int(constants["SIZE_K"]), is_fp4=_is_fp4(use))
    most = sizes.pairs
    if places is not None:
        # Each expert that has rows has at most one tile that isn't full.
        most = add(floordiv(sizes.pairs, tiles.m), minimum(sizes.pairs, sizes.num_experts))
    ids = (step_of(use, "expert_ids", 0), step_of(use, "expert_ids", 1))
    parts = (name, f"{name}_scales", f"{name}_zeros", f"{name}_global_scale", f"{name}_bias")
    return Launch(
        f"{_TRITON}:product_kernel",
        (ceildiv(int(constants["SIZE_N"]), tiles.n), most),
        (
            *pointers[:2], *(given(use, part) for part in parts), pointers[2],
            Pointer("expert_ids") if places is None else None,
            *((None, None) if places is None else (places.starts, places.pairs)), *x_steps, *ids,
        ),
        {
            **constants, **stored, "NUM_EXPERTS": sizes.num_experts,
            "EXPERTS_BLOCK": power_of_two(sizes.num_experts + 1), "TOP_K": sizes.top_k,
            "HAS_BIAS": use.has(f"{name}_bias"), "BY_PAIR": places is None,
            "X_IN_PAIRS": bool(constants["X_IN_PAIRS"]) and is_half, "LEAST_M": tiles.m >> tiles.halvings,
            "HALVINGS": tiles.halvings, "BLOCK_N": tiles.n, "BLOCK_K": block_k, "ROW_SCALES": row_scales_of(use),
            "PRECISION": "ieee" if use.operands["x"].type.dtype == "float32" else "tf32",
            "SPLITS": 1, "RELEASES_LATE": False, "ASKS_AHEAD": False, "PDL": has_pdl(use),
        },
        tiles.num_warps,
        _stages(use, tiles, block_k, 1 if is_exact else use.width("x"), is_gated=bool(constants["IS_GATED"])),
        pdl=has_pdl(use),
    )  # fmt: skip


def _stored(use: Use, name: str, size_k: int) -> Constants:
    """Constants of how the weight `name` is stored, whose rows are `size_k` long."""
    format = str(use.constant("format"))
    values, scales = _VALUES[format]
    rows, columns = _group(use, name, size_k)
    zeros, offset = 0, int(use.constant("zero_offset") or 0)
    if use.has(f"{name}_zeros"):
        zeros = 32 // PACKED[format] if format in PACKED else -8
    whole = 0
    if use.has(f"{name}_global_scale"):
        whole = 1 if use.number(f"{name}_global_scale", 1) == 1 else 2
    is_half = use.operands["x"].type.dtype == "bfloat16" and use.target.capability >= (9, 0)
    in_pairs = is_half and (values == "fp4" or 0 <= offset <= _MOST_TAKEN)
    return {
        "VALUES": values, "SCALES": scales, "GROUP_N": rows, "GROUP_K": columns, "ZEROS": zeros, "ZERO_OFFSET": offset,
        "WHOLE": whole, "IS_DIVIDED": format == "nvfp4_divided", "IN_PAIRS": in_pairs,
    }  # fmt: skip


def _group(use: Use, name: str, size_k: int) -> tuple[int, int]:
    """Rows and columns that share a scale of the weight `name`, whose rows are `size_k` long: a whole block of columns
    at least, if all columns do."""
    rows, columns = shared_by(use, name, size_k)
    return rows, columns if columns < size_k or _is_fp4(use) else max(columns, _LEAST_K, power_of_two(size_k))


def shared_by(use: Use, name: str, size_k: int) -> tuple[int, int]:
    """Rows and columns that share a scale of the weight `name`."""
    format = use.constant("format")
    if format == "mxfp4":
        return 1, _MXFP4_BLOCK
    if format in ("nvfp4", "nvfp4_divided"):
        return 1, NVFP4_BLOCK
    if format in PACKED:
        groups = use.number(f"{name}_scales", 2)
        assert groups is not None, "sizes of weights are known at load"
        return 1, size_k // groups
    block = use.node.args[f"{name}_block"]
    assert isinstance(block, Items)
    rows, columns = (each.value for each in block.items if isinstance(each, Const))
    assert isinstance(rows, int)
    assert isinstance(columns, int)
    return rows, columns


def _row_bytes(use: Use, size_k: int) -> int:
    """Bytes of a row of so many values."""
    return size_k // 2 if _VALUES[str(use.constant("format"))][0] in ("fp4", "int4") else size_k


def _block_k(most: int, group: int, size_k: int, *, is_fp4: bool) -> int:
    """Columns of a block, at most so many: several groups, all of FP4 and small ones, or a part of one."""
    most = min(most, max(_LEAST_K, power_of_two(size_k)))
    if is_fp4 or group >= size_k or _has_several(group):
        return most
    while group % most:
        most //= 2
    return most


def _stages(use: Use, tiles: Tiles, block_k: int, width: int, *, is_gated: bool) -> int:
    """Blocks that are on their way to shared memory, as many as fit into it; numbers of rows have `width` bytes."""
    weight = (2 if is_gated else 1) * tiles.n * block_k
    stage = weight + tiles.m * block_k * width
    return max(2, min(tiles.num_stages, shared_bytes(use.target.capability) // stage))


def _is_fp4(use: Use) -> bool:
    return _VALUES[str(use.constant("format"))][0] == "fp4"


def known(use: Use) -> Sizes:
    """The sizes, where kernels are compiled for them."""
    sizes = sizes_of(use)
    assert sizes is not None, "the record's condition"
    return sizes
