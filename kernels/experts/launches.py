"""The launches of experts in Triton, and the memory between them. No torch and no triton here.

How a product is cut into tiles depends on how many tokens an expert has on average, at most, in a record's sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from precast.ir.graph.schema import Dtype, Expr
from precast.ir.graph.symbols import add, ceildiv, floordiv, minimum, mul
from precast.kernels.blocks import power_of_two
from precast.kernels.records import Launch, Launches, Pointer, Stride
from precast.kernels.use import Use

_GROUPED = "precast.kernels.experts.triton"
_FEW = "precast.kernels.experts.triton_few"
_ORDER_BLOCKS = (1024, 8192)
"""Pairs that `order_kernel` looks at together, at least and at most: an iteration waits for what it has loaded. Each of
its programs, one an expert, reads all pairs."""
_COUNT_BLOCK, _COUNTS, _OTHERS = 512, 1 << 14, 32
"""Pairs that a program of `count_kernel` and `place_kernel` has; the counts that the latter reads together, and the
pairs that it compares each of its own with at a time."""
_MANY = 1024
"""In steps of more tokens, pairs are counted before they are ordered, and rows are rounded before they are added up."""
_SUM_BLOCK = 1024
_ALIGNED = 256
"""Bytes that each part of a workspace is a multiple of."""


class Tiles(NamedTuple):
    """How a product is cut: rows of tokens at most, rows of the weight, and numbers of each that are summed at a time.

    `swapped`: tokens are the columns of the product, of which matrix instructions take 8, and not its rows. `halvings`:
    a tile with at most half, a quarter, ... of the rows is multiplied as a smaller one, so often halved.
    """

    m: int
    n: int
    k: int
    num_warps: int
    num_stages: int
    swapped: bool
    halvings: int = 0


class Strips(NamedTuple):
    """How a product with one row is cut: rows of each expert's weight, and numbers of each that are read at a time.

    `pieces` of `k` numbers are on their way to registers together, or `num_stages` to shared memory.
    """

    n: int
    k: int
    num_warps: int
    pieces: int = 1
    num_stages: int = 1


_PIECES, _STRIP_STAGES = 4, 4
"""Pieces of a row that fit into registers, and those of a longer row that are in shared memory."""


class Sizes(NamedTuple):
    """Experts, experts of a token, width of the activations, width between the products; pairs of token and expert."""

    num_experts: int
    top_k: int
    width: int
    inner: int
    pairs: Expr
    tokens: Expr


def sizes_of(use: Use) -> Sizes | None:
    """The sizes of `precast.experts`; None if one that kernels are compiled for isn't known at load."""
    down = [use.number("down", axis) for axis in range(3)]
    top_k = use.number("expert_ids", 1)
    num_experts, width, inner = down
    if num_experts is None or width is None or inner is None or top_k is None:
        return None
    tokens = use.shape("x")[0]
    return Sizes(num_experts, top_k, width, inner, mul(top_k, tokens), tokens)


def few(up: Strips | None = None, down: Strips | None = None) -> Launches:
    """Of `precast.experts`: each pair reads its expert, two launches."""
    return lambda use: _few(use, up, down)


def few_workspace(use: Use) -> Expr:
    """The activated rows, in float32."""
    sizes = _known(use)
    return mul(4 * sizes.inner, sizes.pairs)


def grouped(tokens: int | None, up: Tiles | None = None, down: Tiles | None = None) -> Launches:
    """Of `precast.experts`, of up to `tokens` tokens: pairs in the order of experts, four launches; five of many
    tokens."""
    return lambda use: _grouped(use, tokens, up, down)


def grouped_workspace(tokens: int | None) -> Callable[[Use], Expr]:
    """The order of pairs, what is between the products, and the rows of all pairs."""
    return lambda use: _parts(use, tokens).end


def ordered(use: Use) -> tuple[Launch, ...]:
    """Of `precast.grouped_linear`: rows in the order of experts, two launches."""
    num_experts, size_n, size_k = (use.number("weight", axis) for axis in range(3))
    assert num_experts is not None
    assert size_n is not None
    assert size_k is not None
    rows, places = use.shape("x")[0], places_of(use.shape("x")[0], num_experts, is_counted=True)
    tiles = tiles_of(None, None, use, "weight", gated=False)
    product = {
        **_ungated(num_experts, 1, size_k, size_n, "bias", use), "GATHERS": True, "SCATTERS": True, "ZEROES": True,
    }  # fmt: skip
    pointers = (Pointer("out.0"), Pointer("x"), Pointer("weight"), given(use, "bias"))
    return (
        *order_of(use, places, rows, (step_of(use, "expert_ids", 0), 0), 1, num_experts, None),
        _product(use, pointers, places, ("x", "weight", "bias"), rows, num_experts + 1, product, tiles),
    )


def ordered_workspace(use: Use) -> Expr:
    """The order of rows."""
    num_experts = use.number("weight", 0)
    assert num_experts is not None
    return places_of(use.shape("x")[0], num_experts, is_counted=True).end


def up_strips(size: int, num_bytes: int) -> Strips:
    """The strips of the first product's rows of `size` elements of `num_bytes`.

    Several rows at a time, in short pieces: on an H200 one token of Qwen3-30B-A3B took 23 us, and 29 with strips of 4
    and 1 rows in pieces of 1024. Of long rows registers hold a part only: more is kept on a thread's stack.
    """
    k = min(power_of_two(size), 1024 // num_bytes)
    pieces = -(-size // k)
    return Strips(8, k, 4, pieces) if pieces <= _PIECES else Strips(8, k, 4, num_stages=_STRIP_STAGES)


def down_strips(size: int, num_bytes: int) -> Strips:
    """The strips of the second product's rows of `size` elements of `num_bytes`."""
    return Strips(4, min(power_of_two(size), 512 // num_bytes), 4, num_stages=_STRIP_STAGES)


def tiles_of(tokens: int | None, average: float | None, use: Use, name: str, *, gated: bool) -> Tiles:
    """The tiles of a product with the weight `name`, in steps of up to `tokens`, of which an expert has `average` at
    most; None: of any number."""
    chosen = _WIDE if use.width(name) > 2 else _GATED if gated else _PLAIN
    tiles = next(
        tiles
        for most_tokens, most_average, tiles in chosen
        if (most_tokens is None or (tokens is not None and tokens <= most_tokens))
        and (most_average is None or (average is not None and average <= most_average))
    )
    stage = (tiles.m + (2 if gated else 1) * tiles.n) * tiles.k * use.width(name)
    return tiles._replace(num_stages=max(2, min(tiles.num_stages, shared_bytes(use.target.capability) // stage)))


def shared_bytes(capability: tuple[int, int]) -> int:
    """Shared memory that a program may take: CUDA's table of compute capabilities."""
    return (227 if capability[0] in (9, 10) else 163 if capability == (8, 0) else 99) * 1024


_GATED = (
    (16, None, Tiles(16, 32, 128, 2, 4, True)),
    (None, 32, Tiles(64, 64, 64, 4, 3, True, 2)),
    (None, 128, Tiles(128, 64, 64, 4, 3, True, 3)),
    (None, None, Tiles(128, 128, 64, 8, 4, False)),
)
_PLAIN = (
    (16, None, Tiles(16, 64, 64, 4, 5, True)),
    (None, 32, Tiles(64, 64, 64, 4, 4, True, 2)),
    (None, 128, Tiles(128, 128, 64, 4, 3, True, 3)),
    (None, None, Tiles(128, 256, 64, 8, 4, False)),
)
_WIDE = (
    (None, 16, Tiles(16, 32, 32, 4, 2, False)),
    (None, None, Tiles(64, 32, 32, 4, 2, False, 2)),
)  # fmt: skip
"""Tiles of a gated product and of a plain one, and of both in float32: of steps of so many tokens at most, of which an
expert has so many on average; None: of any number.

Each weight that is used should be read once, so tiles are as many rows as an expert may have, and those with fewer are
multiplied as such: a router may send half of all tokens to few experts.
"""


# --- few tokens ----------------------------------------------------------------------------------------------------


def _few(use: Use, up: Strips | None, down: Strips | None) -> tuple[Launch, ...]:
    sizes = _known(use)
    up = up or up_strips(sizes.width, use.width("up"))
    down = down or down_strips(sizes.inner, use.width("down"))
    common = {"NUM_EXPERTS": sizes.num_experts, "TOP_K": sizes.top_k}
    h = Pointer("workspace", "float32")
    ids = (step_of(use, "expert_ids", 0), step_of(use, "expert_ids", 1))
    weights = (step_of(use, "expert_weights", 0), step_of(use, "expert_weights", 1))
    first = Launch(
        f"{_FEW}:up_kernel",
        (ceildiv(sizes.inner, up.n), sizes.pairs),
        (
            h, Pointer("x"), Pointer("expert_ids"), Pointer("up"), given(use, "up_bias"),
            step_of(use, "x", 0), step_of(use, "x", 1), *ids, *_steps(use, "up"), *_steps(use, "up_bias", 2),
        ),
        {
            **common, "SIZE_K": sizes.width, "SIZE_N": sizes.inner, "HAS_BIAS": use.has("up_bias"), **between_of(use),
            "BLOCK_N": up.n, "BLOCK_K": up.k, "PIECES": up.pieces, "STAGES": up.num_stages, "PDL": has_pdl(use),
        },
        up.num_warps,
        pdl=has_pdl(use),
    )  # fmt: skip
    second = Launch(
        f"{_FEW}:down_kernel",
        (ceildiv(sizes.width, down.n), sizes.tokens),
        (
            Pointer("out.0"), h, Pointer("expert_ids"), Pointer("expert_weights"), Pointer("down"),
            given(use, "down_bias"), *ids, *weights, *_steps(use, "down"), *_steps(use, "down_bias", 2),
        ),
        {
            **common, "SIZE_K": sizes.inner, "SIZE_N": sizes.width, "HAS_BIAS": use.has("down_bias"),
            "BLOCK_J": power_of_two(sizes.top_k), "BLOCK_N": down.n, "BLOCK_K": down.k,
            "PIECES": down.pieces, "STAGES": down.num_stages, "PDL": has_pdl(use),
        },
        down.num_warps,
        pdl=has_pdl(use),
    )  # fmt: skip
    return (first, second)


# --- many tokens ---------------------------------------------------------------------------------------------------


class Places(NamedTuple):
    """Where the order of pairs lies in a workspace, with what is counted for it, and where these end."""

    starts: Pointer
    pairs: Pointer
    counts: Pointer
    end: Expr


class _Parts(NamedTuple):
    """What lies in a workspace: the order of pairs, rows between the products, rows of all pairs; its end."""

    places: Places
    h: Pointer
    rows: Pointer
    end: Expr


def places_of(pairs: Expr, num_experts: int, *, is_counted: bool) -> Places:
    """The places of so many pairs, from the begin of a workspace on."""
    second = aligned(4 * (num_experts + 2))
    third = add(second, aligned(mul(4, pairs)))
    counted = mul(4 * power_of_two(num_experts + 2), ceildiv(pairs, _COUNT_BLOCK)) if is_counted else 0
    return Places(
        Pointer("workspace", "int32"), Pointer("workspace", "int32", second), Pointer("workspace", "int32", third),
        add(third, aligned(counted)),
    )  # fmt: skip


def _parts(use: Use, tokens: int | None) -> _Parts:
    sizes = _known(use)
    x = use.operands["x"].type.dtype
    # Rows that wait for their sum are rounded where there are so many that their bytes cost time.
    kept: Dtype = x if are_many(tokens) else "float32"
    places = places_of(sizes.pairs, sizes.num_experts, is_counted=are_many(tokens))
    second = add(places.end, aligned(mul(use.width("x") * sizes.inner, sizes.pairs)))
    end = add(second, aligned(mul((4 if kept == "float32" else 2) * sizes.width, sizes.pairs)))
    return _Parts(places, Pointer("workspace", x, places.end), Pointer("workspace", kept, second), end)


def _grouped(use: Use, tokens: int | None, up: Tiles | None, down: Tiles | None) -> tuple[Launch, ...]:
    sizes, parts = _known(use), _parts(use, tokens)
    average = None if tokens is None else tokens * sizes.top_k / sizes.num_experts
    up = up or tiles_of(tokens, average, use, "up", gated=bool(use.constant("gated")))
    down = down or tiles_of(tokens, average, use, "down", gated=False)
    experts, pairs = sizes.num_experts, sizes.pairs
    most = None if tokens is None or are_many(tokens) else tokens * sizes.top_k
    first = {
        **_ungated(experts, sizes.top_k, sizes.width, sizes.inner, "up_bias", use), **between_of(use), "GATHERS": True,
    }  # fmt: skip
    second = {**_ungated(experts, sizes.top_k, sizes.inner, sizes.width, "down_bias", use), "SCATTERS": True}
    ups = (parts.h, Pointer("x"), Pointer("up"), given(use, "up_bias"))
    downs = (parts.rows, parts.h, Pointer("down"), given(use, "down_bias"))
    ids = (step_of(use, "expert_ids", 0), step_of(use, "expert_ids", 1))
    return (
        *order_of(use, parts.places, pairs, ids, sizes.top_k, experts, most),
        _product(use, ups, parts.places, ("x", "up", "up_bias"), pairs, experts, first, up),
        _product(use, downs, parts.places, (sizes.inner, "down", "down_bias"), pairs, experts, second, down),
        sum_of(use, parts.rows, sizes),
    )


def sum_of(use: Use, rows: Pointer, sizes: Sizes) -> Launch:
    """The weighted sum of the `rows` of each token's pairs."""
    ids = (step_of(use, "expert_ids", 0), step_of(use, "expert_ids", 1))
    weights = (step_of(use, "expert_weights", 0), step_of(use, "expert_weights", 1))
    return Launch(
        f"{_GROUPED}:sum_kernel",
        (ceildiv(sizes.width, _SUM_BLOCK), sizes.tokens),
        (Pointer("out.0"), rows, Pointer("expert_ids"), Pointer("expert_weights"), *ids, *weights),
        {
            "NUM_EXPERTS": sizes.num_experts, "TOP_K": sizes.top_k, "SIZE": sizes.width, "BLOCK": _SUM_BLOCK,
            "PDL": has_pdl(use),
        },
        pdl=has_pdl(use),
    )  # fmt: skip


def are_many(tokens: int | None) -> bool:
    """Whether steps of up to `tokens`, or of any number, can have more than _MANY."""
    return tokens is None or tokens > _MANY


def order_of(
    use: Use, places: Places, pairs: Expr, steps: tuple[Stride | int, ...], top_k: int, num_experts: int,
    most: int | None,
) -> tuple[Launch, ...]:  # fmt: skip
    """The launches that list up to `most` pairs in the order of experts; None: any number of them."""
    constants = {"TOP_K": top_k, "NUM_EXPERTS": num_experts, "PDL": has_pdl(use)}
    ids = (Pointer("expert_ids"), pairs, *steps)
    if most is not None:
        least, largest = _ORDER_BLOCKS
        block = max(least, min(power_of_two(most), largest))
        return (
            Launch(
                f"{_GROUPED}:order_kernel", (num_experts + 1,), (places.starts, places.pairs, *ids),
                {**constants, "BLOCK": block}, max(4, block // 512), pdl=has_pdl(use),
            ),
        )  # fmt: skip
    grid = (ceildiv(pairs, _COUNT_BLOCK),)
    experts_block = power_of_two(num_experts + 2)
    constants |= {"EXPERTS_BLOCK": experts_block, "BLOCK": _COUNT_BLOCK}
    return (
        Launch(f"{_GROUPED}:count_kernel", grid, (places.counts, *ids), constants, pdl=has_pdl(use)),
        Launch(
            f"{_GROUPED}:place_kernel", grid, (places.starts, places.pairs, places.counts, *ids),
            {**constants, "ROWS": max(1, min(_COUNTS // experts_block, 64)), "OTHERS": _OTHERS}, 16, pdl=has_pdl(use),
        ),
    )  # fmt: skip


def _product(
    use: Use,
    pointers: tuple[Pointer | None, ...],
    places: Places,
    names: tuple[str | int, str, str],
    pairs: Expr,
    groups: int,
    constants: Mapping[str, int | float | bool | str],
    tiles: Tiles,
) -> Launch:
    """A launch of `grouped_kernel`: results, rows, weight and bias; `names` of the last three, or the rows' width."""
    x, weight, bias = names
    rows = (step_of(use, x, 0), step_of(use, x, 1)) if isinstance(x, str) else (x, 1)
    precision = "ieee" if use.operands["x"].type.dtype == "float32" else "tf32"
    # Each group that has rows has at most one tile that isn't full.
    most = add(floordiv(pairs, tiles.m), minimum(pairs, groups))
    return Launch(
        f"{_GROUPED}:grouped_kernel",
        (ceildiv(int(constants["SIZE_N"]), tiles.n), most),
        (*pointers, places.starts, places.pairs, *rows, *_steps(use, weight), *_steps(use, bias, 2)),
        {
            **constants, "SWAPPED": tiles.swapped, "LEAST_M": tiles.m >> tiles.halvings,
            "HALVINGS": tiles.halvings, "BLOCK_N": tiles.n, "BLOCK_K": tiles.k,
            "PRECISION": precision, "PDL": has_pdl(use),
        },
        tiles.num_warps,
        tiles.num_stages,
        pdl=has_pdl(use),
    )  # fmt: skip


def _ungated(
    num_experts: int, top_k: int, size_k: int, size_n: int, bias: str, use: Use
) -> dict[str, int | float | bool | str]:
    """Constants of `grouped_kernel` for a product alone, of rows as they lie."""
    return {
        "NUM_EXPERTS": num_experts, "EXPERTS_BLOCK": power_of_two(num_experts + 1), "TOP_K": top_k, "SIZE_K": size_k,
        "SIZE_N": size_n, "HAS_BIAS": use.has(bias), "IS_GATED": False, "ACTIVATION": "", "ALPHA": 1.0, "LIMIT": 0.0,
        "OFFSET": 0.0, "GATHERS": False, "SCATTERS": False, "ZEROES": False,
    }  # fmt: skip


def between_of(use: Use) -> dict[str, int | float | bool | str]:
    """Constants of what stands between the products."""
    activation, alpha, offset = use.constant("activation"), use.constant("alpha"), use.constant("offset")
    assert isinstance(activation, str)
    return {
        "IS_GATED": bool(use.constant("gated")), "ACTIVATION": activation,
        "ALPHA": 1.0 if alpha is None else float(alpha),
        "LIMIT": float(use.constant("limit") or 0.0), "OFFSET": float(offset or 0.0),
    }  # fmt: skip


def has_pdl(use: Use) -> bool:
    """Whether kernels may begin before the one in front of them has ended."""
    return use.target.capability >= (9, 0)


def _known(use: Use) -> Sizes:
    sizes = sizes_of(use)
    assert sizes is not None, "the record's condition"
    return sizes


def given(use: Use, name: str) -> Pointer | None:
    """An optional tensor, or None."""
    return Pointer(name) if use.has(name) else None


def _steps(use: Use, name: str, rank: int = 3) -> tuple[Stride | int, ...]:
    return tuple(step_of(use, name, axis) for axis in range(rank))


def step_of(use: Use, name: str, axis: int) -> Stride | int:
    """The stride of an axis; 1 where it is the last of a tensor without gaps, and 0 where there is no tensor."""
    if not use.has(name):
        return 0
    operand = use.operands[name]
    is_last = axis == len(operand.type.shape) - 1
    return 1 if is_last and operand.is_contiguous else Stride(name, axis)


def aligned(num_bytes: Expr) -> Expr:
    """So many bytes, or a few more, so that what comes next begins well."""
    return mul(_ALIGNED, ceildiv(num_bytes, _ALIGNED))
