"""The launches of the delta rule in Triton (`precast.kernels.delta_rule.triton`), and the sizes of their tiles.

No torch here.
"""

from __future__ import annotations

from typing import NamedTuple

from precast.ir.graph.schema import Expr
from precast.ir.graph.symbols import add, ceildiv, floordiv, minimum, mul
from precast.kernels.blocks import power_of_two
from precast.kernels.delta_rule.limits import EPSILON
from precast.kernels.records import Condition, Launch, Pointer, Stride
from precast.kernels.rows import known, overlaps, real
from precast.kernels.use import Use

FEW = 32
"""Tokens of a step whose sequences are walked, however they are spread over them."""
WALKED = 8
"""Tokens of a sequence that is walked beside sequences in chunks: as a rule one, or some that were guessed."""
LARGEST = 256
"""Elements of a key that is computed in chunks: a chunk's keys and queries lie in a multiprocessor's shared memory."""
_KERNELS = "precast.kernels.delta_rule.triton:"
_ALIGNED = 256


class Columns(NamedTuple):
    """The columns of the state that a program has, and its warps."""

    e: int
    num_warps: int


class Tile(NamedTuple):
    """The sizes of the chunks' kernels: tokens of a chunk, columns of the state; warps, and how loads are pipelined."""

    chunk: int
    e: int
    num_warps: int
    num_stages: int


def has_row_decays(use: Use) -> bool:
    """Whether a decay has a number for each element of the key."""
    return use.has("decay") and len(use.shape("decay")) == 4


HAS_KNOWN_SIZES = Condition(
    "heads and sizes that are known",
    lambda use: None not in (*(use.number("q", axis) for axis in (2, 3)), *(use.number("v", axis) for axis in (2, 3))),
)
FITS_CHUNKS = Condition(
    f"keys of up to {LARGEST} elements, and decays of whole heads",
    lambda use: (use.number("q", 3) or 0) <= LARGEST and not has_row_decays(use),
)


def columns(size: int, value_size: int, *, is_few: bool) -> Columns:
    """Of a walk: 64 numbers of the state for each of 128 threads; in steps of few tokens 32, so that more programs run.

    Whole lines of memory are read of each row of the state: 32 columns and more take two thirds of the time of 16.
    """
    d = power_of_two(size)
    e = min(power_of_two(value_size), max(8, (4096 if is_few else 8192) // d))
    return Columns(e, min(4, max(1, d * e // (1024 if is_few else 2048))))


def tile_of(use: Use) -> Tile:
    """Of chunks: 64 tokens where their keys and queries leave room for those of the next chunk."""
    size = max(16, power_of_two(known(use, "q", 3)))
    value = max(16, power_of_two(known(use, "v", 3)))
    is_large = use.target.capability in ((9, 0), (10, 0), (10, 3))
    num_warps = 4 if size <= 128 else 8
    if use.operands["q"].type.dtype == "bfloat16":
        if size > 128:
            return Tile(32, min(16, value), num_warps, 1)
        return Tile(64 if is_large else 32, min(32, value), num_warps, 2 if is_large else 1)
    return Tile(32 if size <= 128 else 16, min(16, value), 8 if use.width("q") == 4 else num_warps, 1)


def few(use: Use) -> tuple[Launch, ...]:
    """Both forms in one launch, token by token, for steps of few tokens."""
    return walk(use, is_few=True)


def walk(use: Use, *, most: int = 0, is_few: bool = False) -> tuple[Launch, ...]:
    """Both forms in one launch, token by token; of sequences of up to `most` tokens if it isn't 0, and of padding."""
    size, value_size = known(use, "q", 3), known(use, "v", 3)
    sizes = columns(size, value_size, is_few=is_few)
    return (
        Launch(
            kernel=_KERNELS + "walk_kernel",
            grid=(ceildiv(value_size, sizes.e), known(use, "v", 2), add(_sequences(use), 1)),
            args=(
                *(_pointer(use, name) for name in ("out.0", "q", "k", "v", "decay", "beta")),
                *_held(use),
                _sequences(use),
                use.shape("q")[1],
                *(Stride(name, axis) for name in "qkv" for axis in (1, 2, 3)),
                *_decay_strides(use),
                *(Stride("beta", axis) for axis in (1, 2)),
                *_state_strides(use),
            ),
            constants={
                **_rule(use),
                "BY_ROW": has_row_decays(use),
                "MOST": most,
                "HEADS": known(use, "v", 2),
                "GROUP": known(use, "v", 2) // known(use, "q", 2),
                "SIZE": size,
                "VALUE_SIZE": value_size,
                "BLOCK_D": power_of_two(size),
                "BLOCK_E": sizes.e,
                "PDL": overlaps(use),
            },
            num_warps=sizes.num_warps,
            pdl=overlaps(use),
        ),
    )


def chunked(use: Use) -> tuple[Launch, ...]:
    """Both forms: short sequences and padding as `walk` has them, long ones in chunks. The three find their own."""
    return (*walk(use, most=WALKED), _prepare(use), _pass(use))


def _prepare(use: Use) -> Launch:
    tile, tokens = tile_of(use), use.shape("q")[1]
    # Each sequence may end with a part of a chunk.
    chunks = add(floordiv(tokens, tile.chunk), _longer(use))
    return Launch(
        kernel=_KERNELS + "prepare_kernel",
        grid=(chunks, known(use, "v", 2)),
        args=(
            *_between(use),
            *(_pointer(use, name) for name in ("q", "k", "decay", "beta", "cu_seqlens")),
            _sequences(use),
            tokens,
            *(Stride(name, axis) for name in "qk" for axis in (1, 2, 3)),
            *_decay_strides(use)[:2],
            *(Stride("beta", axis) for axis in (1, 2)),
        ),
        constants={**_rule(use), **_tile_constants(use, tile)},
        # Of four warps, two programs fit a multiprocessor: one computes while the other waits.
        num_warps=4 if use.width("q") == 2 and known(use, "q", 3) <= 128 else 8,
        num_stages=1,
        pdl=overlaps(use),
    )


def _pass(use: Use) -> Launch:
    tile = tile_of(use)
    return Launch(
        kernel=_KERNELS + "pass_kernel",
        grid=(ceildiv(known(use, "v", 3), tile.e), known(use, "v", 2), _longer(use)),
        args=(
            Pointer("out.0"),
            *_between(use),
            *(Pointer(name) for name in "qkv"),
            *_held(use),
            _sequences(use),
            use.shape("q")[1],
            *(Stride(name, axis) for name in "qkv" for axis in (1, 2, 3)),
            *_state_strides(use),
        ),
        constants={
            **_tile_constants(use, tile),
            "HEADS": known(use, "v", 2),
            "VALUE_SIZE": known(use, "v", 3),
            "BLOCK_E": tile.e,
            "SPLIT": use.operands["q"].type.dtype == "bfloat16",
        },
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        pdl=overlaps(use),
    )


def _tile_constants(use: Use, tile: Tile) -> dict[str, int | float | bool | str]:
    return {
        "MOST": WALKED,
        "GROUP": known(use, "v", 2) // known(use, "q", 2),
        "SIZE": known(use, "q", 3),
        "BLOCK_D": max(16, power_of_two(known(use, "q", 3))),
        "CHUNK": tile.chunk,
        "PRECISION": "tf32" if use.width("q") == 2 else "ieee",
        "AS_GIVEN": use.operands["q"].type.dtype != "float16",
        "PDL": overlaps(use),
    }


def _rule(use: Use) -> dict[str, float]:
    return {"SCALE": real(use, "scale"), "EPSILON": EPSILON if use.constant("normalise") else 0.0}


def chunk_bytes(use: Use) -> Expr:
    """The workspace of `chunked`: for each token and head two rows of a chunk's size, and four factors."""
    return add(mul(2, _matrix_bytes(use)), mul(16, known(use, "v", 2), use.shape("q")[1]))


def _matrix_bytes(use: Use) -> Expr:
    """For each token and head a row of a chunk's size; rounded up, for what lies after it."""
    row = 4 * tile_of(use).chunk * known(use, "v", 2)
    return mul(_ALIGNED, ceildiv(mul(row, use.shape("q")[1]), _ALIGNED))


def _between(use: Use) -> tuple[Pointer, ...]:
    """What `prepare_kernel` leaves to `pass_kernel`: inverses, scores, factors."""
    return tuple(Pointer("workspace", "float32", mul(i, _matrix_bytes(use))) for i in range(3))


def _pointer(use: Use, name: str) -> Pointer | None:
    return Pointer(name) if name == "out.0" or use.has(name) else None


def _held(use: Use) -> tuple[Pointer | None, ...]:
    """The state and its metadata; the form without a cache has none but the sequences' bounds."""
    return tuple(_pointer(use, name) for name in ("state", "slots", "cu_seqlens", "kv_lens"))


def _sequences(use: Use) -> Expr:
    return add(use.shape("cu_seqlens")[0], -1)


def _longer(use: Use) -> Expr:
    """So many sequences can have more tokens than are walked."""
    return minimum(_sequences(use), floordiv(use.shape("q")[1], WALKED + 1))


def _decay_strides(use: Use) -> tuple[Stride | int, ...]:
    """Of tokens, heads and rows of the state."""
    if not use.has("decay"):
        return (0, 0, 0)
    return (Stride("decay", 1), Stride("decay", 2), Stride("decay", 3) if has_row_decays(use) else 0)


def _state_strides(use: Use) -> tuple[Stride | int, ...]:
    return tuple(Stride("state", axis) if use.has("state") else 0 for axis in range(4))
