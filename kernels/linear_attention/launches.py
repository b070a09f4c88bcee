"""The launches of linear attention and state space scans in Triton, and the sizes of their tiles. No torch, no triton.

A state space scan is linear attention with c as query, b as key, x as value, decays a * step, and the state transposed.
"""

from __future__ import annotations

from typing import NamedTuple

from precast.ir.graph.schema import Expr
from precast.ir.graph.symbols import add, ceildiv, floordiv, minimum, mul
from precast.kernels.blocks import power_of_two
from precast.kernels.records import Condition, Launch, Pointer, Stride
from precast.kernels.rows import known, real
from precast.kernels.stateful.form_records import sequences_of
from precast.kernels.use import Use

WALKED = 16
"""Tokens of a sequence that are computed one by one, at most, in steps that have chunks as well."""
MOST_ROWS = 256
"""Rows of a state, the size of its keys, that chunks are computed with."""
_NO_LIMIT = 1 << 30
ENOUGH = 256
"""Programs that fill a GPU."""
LEAST_SEGMENT = 256
"""Tokens of a segment at least: each is computed twice, its states and its results, and leaves a state in memory."""
_LONG = 4096
"""Tokens of a sequence whose segments fill it."""
_WALKED_TILE = 4096
"""Elements of a state that a program of `walk_kernel` holds: 32 for each thread of 4 warps."""


_PASSED = 1024
"""Numbers of a state that a program takes from segment to segment."""


class Tile(NamedTuple):
    """How chunks are computed: tokens of a chunk, columns of the state that a program has, warps, stages of loads."""

    chunk: int
    e: int
    num_warps: int
    num_stages: int


class _Names(NamedTuple):
    """How an op calls its query, key, value and decays; which axes of a state [P, H, ...] are its rows and columns."""

    q: str
    k: str
    v: str
    decay: str
    rows: int
    columns: int


_ATTENTION = _Names("q", "k", "v", "decay", 2, 3)
_SCAN = _Names("c", "b", "x", "a", 3, 2)


def _names(use: Use) -> _Names:
    return _ATTENTION if use.node.op.endswith("linear_attention") else _SCAN


def _has_known_sizes(use: Use) -> bool:
    names = _names(use)
    return all(use.number(name, axis) for name in (names.k, names.v) for axis in (2, 3))


def _has_chunks(use: Use) -> bool:
    names = _names(use)
    return not _is_by_row(use) and (use.number(names.k, 3) or 0) <= MOST_ROWS


HAS_KNOWN_SIZES = Condition("heads and sizes of them that are known at load", _has_known_sizes)
HAS_CHUNKS = Condition(f"one decay for a head, and keys of at most {MOST_ROWS} elements", _has_chunks)


def walk(use: Use) -> tuple[Launch, ...]:
    """One launch, in which all sequences are computed token by token."""
    return (_walk(use, _NO_LIMIT),)


def walk_and_chunks(use: Use, tile: Tile | None = None) -> tuple[Launch, ...]:
    """Sequences of more than `WALKED` tokens in chunks, the others token by token.

    Two launches, or four where a long sequence is cut into segments: states after segments, and before them, go first.
    """
    tile, segment = tile or tile_of(use), segment_tokens(use)
    before = (_chunks(use, tile, segment, is_first=True), _pass(use, segment)) if segment else ()
    return (*before, _chunks(use, tile, segment), _walk(use, WALKED))


def segment_tokens(use: Use) -> int:
    """Tokens of a segment; 0 where the heads of one sequence are enough programs, and it is not cut."""
    names = _names(use)
    programs = known(use, names.v, 2) * -(-known(use, names.v, 3) // 32)
    return 0 if 2 * programs > ENOUGH else max(power_of_two(_LONG * programs // ENOUGH), LEAST_SEGMENT)


def segments_workspace(use: Use) -> Expr:
    """A state for each segment, of sequences that have several, and the sum of its decays; in float32."""
    return _segments(use).end


class _Segments(NamedTuple):
    """Where they lie."""

    states: Pointer | None
    decays: Pointer | None
    end: Expr


def _segments(use: Use) -> _Segments:
    """A sequence of several segments has up to twice as many places as it has whole ones."""
    names, segment = _names(use), segment_tokens(use)
    if not segment:
        return _Segments(None, None, 0)
    places = mul(add(floordiv(mul(2, use.shape(names.v)[1]), segment), 1), known(use, names.v, 2))
    end = mul(4, places, known(use, names.k, 3), known(use, names.v, 3))
    aligned = mul(256, ceildiv(end, 256))
    return _Segments(
        Pointer("workspace", "float32"), Pointer("workspace", "float32", aligned), add(aligned, mul(4, places))
    )


def tile_of(use: Use) -> Tile:
    """Chunks of bfloat16 are products on the tensor cores, as large as those with the state; others are small."""
    names = _names(use)
    rows, columns = known(use, names.k, 3), max(power_of_two(known(use, names.v, 3)), 16)
    if not _is_exact(use):
        return Tile(16, 16, 8, 1)
    return Tile(64, min(columns, 32), 4, 2) if rows <= 128 else Tile(64, min(columns, 32), 8, 2)


def _walk(use: Use, walked: int) -> Launch:
    names = _names(use)
    rows, columns = known(use, names.k, 3), known(use, names.v, 3)
    block_d = power_of_two(rows)
    block_e = min(power_of_two(columns), max(_WALKED_TILE // block_d, 8))
    is_by_row = _is_by_row(use)
    decay = (*_decay_strides(use), Stride(names.decay, 3) if is_by_row else 0)
    sequences = sequences_of(use)
    return Launch(
        "precast.kernels.linear_attention.triton:walk_kernel",
        (-(-columns // block_e), known(use, names.v, 2), add(sequences, 1)),
        (*_pointers(use), sequences, use.shape(names.v)[1], *_numbers(use), *_strides(use, decay)),
        {
            **_constants(use), "BLOCK_D": block_d, "BLOCK_E": block_e, "BY_ROW": is_by_row, "WALKED": walked,
        },
        num_warps=min(max(block_d * block_e // 1024, 1), 8),
        pdl=_has_pdl(use),
    )  # fmt: skip


def _chunks(use: Use, tile: Tile, segment: int, *, is_first: bool = False) -> Launch:
    names, parts = _names(use), _segments(use)
    is_wide = any(use.width(name) == 4 for name in names[:3])
    sequences = sequences_of(use)
    # So many sequences can have more tokens than are walked.
    tokens = use.shape(names.v)[1]
    longer = minimum(sequences, floordiv(tokens, WALKED + 1))
    programs = add(floordiv(tokens, segment), longer) if segment else longer
    return Launch(
        "precast.kernels.linear_attention.triton:chunks_kernel",
        (-(-known(use, names.v, 3) // tile.e), known(use, names.v, 2), programs),
        (
            *_pointers(use), parts.states, parts.decays, sequences, *_numbers(use),
            *_strides(use, _decay_strides(use)),
        ),
        {
            **_constants(use), "SEGMENT": segment, "IS_FIRST": is_first,
            "BLOCK_D": max(power_of_two(known(use, names.k, 3)), 16), "BLOCK_E": tile.e,
            "WALKED": WALKED, "CHUNK": tile.chunk, "EXACT": _is_exact(use),
            "PRECISION": "ieee" if is_wide else "tf32x3",
        },
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        pdl=_has_pdl(use),
    )  # fmt: skip


def _pass(use: Use, segment: int) -> Launch:
    names, parts = _names(use), _segments(use)
    numbers = known(use, names.k, 3) * known(use, names.v, 3)
    sequences = sequences_of(use)
    held = (Pointer(name) if use.has(name) else None for name in ("state", "slots", "cu_seqlens", "kv_lens"))
    constants = _constants(use)
    return Launch(
        "precast.kernels.linear_attention.triton:pass_kernel",
        (
            -(-numbers // _PASSED), known(use, names.v, 2),
            minimum(sequences, floordiv(use.shape(names.v)[1], segment + 1)),
        ),
        (*held, parts.states, parts.decays, sequences, *_state_strides(use)),
        {
            **{name: constants[name] for name in ("HEADS", "SIZE", "VALUE_SIZE", "PDL")}, "BLOCK": _PASSED,
            "SEGMENT": segment,
        },
        pdl=_has_pdl(use),
    )  # fmt: skip


def _pointers(use: Use) -> tuple[Pointer | None, ...]:
    names = _names(use)
    optional = (names.decay, "dt", "dt_bias", "d", "state", "slots", "cu_seqlens", "kv_lens")
    given = (Pointer(name) if use.has(name) else None for name in optional)
    return (Pointer("out.0"), *(Pointer(name) for name in names[:3]), *given)


def _numbers(use: Use) -> tuple[float, float, float]:
    """The factor of queries, and the least and the largest step."""
    is_scan = _names(use) is _SCAN
    return (1.0 if is_scan else real(use, "scale"), real(use, "dt_min"), real(use, "dt_max"))


def _strides(use: Use, decay: tuple[Stride | int, ...]) -> tuple[Stride | int, ...]:
    names = _names(use)
    steps = tuple(Stride("dt", axis) if use.has("dt") else 0 for axis in (1, 2))
    heads = tuple(Stride(name, 0) if use.has(name) else 0 for name in ("dt_bias", "d"))
    tokens = tuple(Stride(name, axis) for name in names[:3] for axis in (1, 2, 3))
    return (*tokens, *decay, *steps, *heads, *_state_strides(use))


def _state_strides(use: Use) -> tuple[Stride | int, ...]:
    """Over slots, heads, rows and columns."""
    names = _names(use)
    return tuple(Stride("state", axis) if use.has("state") else 0 for axis in (0, 1, names.rows, names.columns))


def _decay_strides(use: Use) -> tuple[Stride | int, Stride | int]:
    """Over tokens and heads; a decay of a head has no tokens."""
    name = _names(use).decay
    if not use.has(name):
        return 0, 0
    return (0, Stride(name, 0)) if len(use.shape(name)) == 1 else (Stride(name, 1), Stride(name, 2))


def _constants(use: Use) -> dict[str, int | float | bool | str]:
    names = _names(use)
    heads = known(use, names.v, 2)
    return {
        "HEADS": heads, "GROUP": heads // known(use, names.k, 2), "SIZE": known(use, names.k, 3),
        "VALUE_SIZE": known(use, names.v, 3), "SOFTPLUS": bool(use.constant("softplus")), "PDL": _has_pdl(use),
    }  # fmt: skip


def _is_exact(use: Use) -> bool:
    """Whether products are of bfloat16 as it is loaded."""
    return all(use.operands[name].type.dtype == "bfloat16" for name in _names(use)[:3])


def _is_by_row(use: Use) -> bool:
    name = _names(use).decay
    return use.has(name) and len(use.shape(name)) == 4


def _has_pdl(use: Use) -> bool:
    return use.target.capability >= (9, 0)
