"""The launches of sparse attention in Triton. No torch."""

from __future__ import annotations

from typing import NamedTuple

from precast.ir.graph.schema import Dtype, Expr
from precast.ir.graph.symbols import add, ceildiv, maximum, minimum, mul
from precast.kernels.attention.launches import Tile, by_slots, has_large_memory
from precast.kernels.blocks import power_of_two
from precast.kernels.latent_attention.launches import absorbed_tile, head_product, sizes_of, written
from precast.kernels.records import Launch, Pointer, Stride
from precast.kernels.rows import known, overlaps, real
from precast.kernels.sparse_attention.limits import OWN_SCORES
from precast.kernels.use import Use

PROGRAMS = 132
"""Programs that share what is selected: one for each multiprocessor of an H100."""
SCORE_PARTS = (256, 64, 16, 4)
"""Programs that share the tiles of a sequence's keys, by the slots for sequences that a step has: in each range enough
to have two on each multiprocessor, where each has three tiles on their way."""
NOTE_PARTS = (16, 16, 4, 2)
"""Programs that share its scores afterwards, in the same ranges: no more than there are multiprocessors, since each
looks for the bound by itself."""
SCANNED = 8192
"""Scores of a row that a program looks at together."""
GROUPS = 8192
"""Groups of a row's scores, of whose maxima a bound follows."""
ATTEND_PARTS = (32, 8, 4, 1)
"""Parts of what is selected for a token, by the tokens of a step in the same ranges. Each has two tiles on their way at
once; what more parts find is more to write and to join: with 128 heads 256 KiB a part."""
JOINED = 8192
"""Elements of partial results that are joined at a time, at most."""
_KERNELS = "precast.kernels.sparse_attention."


def write_index_keys(use: Use) -> tuple[Launch, ...]:
    """`precast.write_index_keys`, in one launch: latents whose keys have no rope part."""
    return (written(use, "k"),)


class _Workspace(NamedTuple):
    """Byte offsets of what the launches of a selection leave for one another, and all of it.

    By slot of all page lists: scores and maxima of sequences with one query, what is noted of these as places and
    scores. By sequence: their counts. By program: scores of prompts, and what is noted of these.
    """

    scores: Expr
    maxima: Expr
    keys: Expr
    noted: Expr
    counts: Expr
    own: Expr
    own_noted: Expr
    end: Expr


def select_workspace(use: Use) -> Expr:
    """The bytes of scores, and of what is noted of them."""
    return _select_places(use).end


def select_keys(use: Use) -> tuple[Launch, ...]:
    """`precast.paged_select_keys` and `precast.paged_select_entries`: the scores of sequences with one query, what is
    noted of them, then what is selected of all sequences."""
    sequences = add(use.shape("cu_seqlens")[0], -1)
    tile, places = _score_tile(use), _select_places(use)
    scores, maxima, keys, noted, counts, own, own_noted = (
        Pointer("workspace", "int32", offset) for offset in places[:-1]
    )
    lengths = tuple(Pointer(name) for name in ("cu_seqlens", "kv_lens", "page_indptr", "page_start"))
    strands = _strands(use)
    score = Launch(
        kernel=_KERNELS + "triton_select:score_kernel",
        grid=(sequences, by_slots(sequences, SCORE_PARTS)),
        args=(scores, maxima, *given(), strands, *select_strides()),
        constants={**_selecting(use), **_scoring(use)},
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        pdl=overlaps(use),
    )
    parts = by_slots(sequences, NOTE_PARTS)
    note = Launch(
        kernel=_KERNELS + "triton_select:note_kernel",
        grid=(sequences, parts),
        args=(keys, noted, counts, scores, maxima, *lengths, mul(strands, tile.n)),
        constants={**_selecting(use), "GROUPS": GROUPS, "BLOCK": SCANNED},
        num_warps=16,
        pdl=overlaps(use),
    )
    return score, note, _select(use, (scores, keys, noted, counts), own, own_noted, parts)


def _own_bytes(use: Use) -> tuple[Expr, Expr]:
    """Bytes of prompts' scores, and of what is noted of them, for all programs."""
    return mul(16, ceildiv(_own_places(use), 4)), PROGRAMS * 2 * _room(use) * 4


def _select(use: Use, of_one_query: tuple[Pointer, ...], own: Pointer, own_noted: Pointer, parts: Expr) -> Launch:
    """What is selected for all queries. `of_one_query`: scores of sequences with one, and what is noted of them in
    `parts`."""
    tokens, tile = use.shape("q")[1], _score_tile(use)
    return Launch(
        kernel=_KERNELS + "triton_select:select_kernel",
        grid=(minimum(tokens, PROGRAMS),),
        args=(Pointer("out.0"), *of_one_query, own, own_noted, *given(), tokens,
              add(use.shape("cu_seqlens")[0], -1), _own_places(use), parts, *select_strides()),
        constants={**_selecting(use), **_scoring(use), "BLOCK_Q": _queries(use), "GROUPS": GROUPS, "ROOM": _room(use),
                   "BLOCK": SCANNED},
        num_warps=8,
        num_stages=tile.num_stages,
        pdl=overlaps(use),
    )  # fmt: skip


def given() -> tuple[Pointer, ...]:
    """The op's tensors."""
    return tuple(Pointer(name) for name in (
        "q", "weights", "cache", "cu_seqlens", "kv_lens", "page_indices", "page_indptr", "page_start"))  # fmt: skip


def select_strides() -> tuple[Stride, ...]:
    return (*(Stride("q", axis) for axis in (1, 2, 3)), *(Stride("weights", axis) for axis in (1, 2)),
            *(Stride("cache", axis) for axis in (0, 1)))  # fmt: skip


def _selecting(use: Use) -> dict[str, int | float | bool | str]:
    return {
        "COUNT": count_of(use),
        "RATE": use.constant("rate") or 1,
        "PAGE_SIZE": known(use, "cache", 1),
        "PDL": overlaps(use),
    }


def _scoring(use: Use) -> dict[str, int | float | bool | str]:
    tile, size = _score_tile(use), known(use, "q", 3)
    return {
        "HEADS": known(use, "q", 2),
        "SIZE": size,
        "BLOCK_H": tile.m,
        "BLOCK_N": tile.n,
        "BLOCK_D": max(16, power_of_two(size)),
        "SCALE": real(use, "scale"),
        "PRECISION": "ieee" if use.width("q") > 2 else "tf32",
    }


class Attended(NamedTuple):
    """Byte offsets of queries and results in the latents' space, and of partial results and their weights; the end."""

    queries: Expr
    results: Expr
    partial: Expr
    weights: Expr
    end: Expr


def attend_workspace(use: Use) -> Expr:
    """The bytes of queries and results in the latents' space, and of partial results with their weights."""
    return attended_bytes(use, _attend_parts(use))


def attend(use: Use) -> tuple[Launch, ...]:
    """`precast.paged_sparse_latent_attention`: queries into the latents' space, attention there, and results out."""
    sizes, tile, parts = sizes_of(use), absorbed_tile(use), _attend_parts(use)
    tokens, count = use.shape("q")[1], known(use, "selected", 2)
    heads = min(power_of_two(sizes.heads), tile.m)
    attention = Launch(
        kernel=_KERNELS + "triton_attend:attend_kernel",
        grid=(tokens, -(-sizes.heads // heads), parts),
        args=attending(use, parts),
        constants={
            **_latents(use),
            "COUNT": count,
            "PAGE_SIZE": sizes.page,
            "NOPE": sizes.nope,
            "ROPE": sizes.rope,
            "BLOCK_M": max(16, heads),
            "BLOCK_N": tile.n,
            "BLOCK_R": max(16, power_of_two(sizes.rope)),
            "SCALE": real(use, "scale"),
            "PRECISION": "ieee" if sizes.bytes > 2 else "tf32",
        },
        num_warps=tile.num_warps,
        num_stages=_attend_stages(use),
        pdl=overlaps(use),
    )
    into, out_of = attend_products(use, parts)
    return into, attention, joined(use, parts), out_of


def attending(use: Use, parts: Expr) -> tuple[Pointer | Stride | Expr | None, ...]:
    """The arguments of what attends to latents, in `parts`."""
    queries, results, partial, weights = _attended(use, parts)
    return (
        results, partial, weights, queries, Pointer("q"), Pointer("cache"), Pointer("selected"),
        Pointer("sinks") if use.has("sinks") else None,
        *(Pointer(name) for name in ("cu_seqlens", "kv_lens", "page_indices", "page_indptr", "page_start")),
        add(use.shape("cu_seqlens")[0], -1), parts, *(Stride("q", axis) for axis in (1, 2, 3)),
        *(Stride("cache", axis) for axis in (0, 1)), *(Stride("selected", axis) for axis in (1, 2)),
    )  # fmt: skip


def joined(use: Use, parts: Expr) -> Launch:
    """What the parts of each token found, joined: no launch where each token is one part."""
    tokens = use.shape("q")[1]
    _, results, partial, weights = _attended(use, parts)
    constants = _latents(use)
    return Launch(
        kernel=_KERNELS + "triton_attend:join_kernel",
        grid=(mul(tokens, minimum(add(parts, -1), 1)), sizes_of(use).heads),
        args=(results, partial, weights, parts),
        constants={**constants, "PARTS": max(1, JOINED // int(constants["BLOCK_C"]))},
        pdl=overlaps(use),
    )


def attend_products(use: Use, parts: Expr, *, few: bool = False) -> tuple[Launch, Launch]:
    """Queries into the latents' space, and results out of it. `few`: as `head_product` takes it."""
    sizes = sizes_of(use)
    queries, results, *_ = _attended(use, parts)
    by_token = tuple(Stride("q", axis) for axis in (1, 2, 3))
    by_row = (sizes.heads * sizes.latent, sizes.latent, 1)
    return (
        head_product(use, queries, Pointer("q"), by_token, to_latent=True, few=few),
        head_product(use, Pointer("out.0"), results, by_row, to_latent=False, few=few),
    )


def attended_bytes(use: Use, parts: Expr, *, most_tokens: int | None = None) -> Expr:
    """The bytes of what launches leave for one another, in steps of so many tokens at most; some even in a step of
    none."""
    tokens = use.shape("q")[1]
    return add(_attend_places(use, parts, tokens if most_tokens is None else minimum(tokens, most_tokens)).end, 16)


def _attended(use: Use, parts: Expr) -> tuple[Pointer, ...]:
    """Queries, results, partial results and weights."""
    places, dtype = _attend_places(use, parts, use.shape("q")[1]), sizes_of(use).dtype
    kinds: tuple[Dtype, ...] = (dtype, dtype, "float32", "float32")
    return tuple(Pointer("workspace", kind, place) for kind, place in zip(kinds, places[:-1], strict=True))


def _latents(use: Use) -> dict[str, int | float | bool | str]:
    sizes = sizes_of(use)
    block_c = max(16, power_of_two(sizes.latent))
    return {"HEADS": sizes.heads, "LATENT": sizes.latent, "BLOCK_C": block_c, "PDL": overlaps(use)}


def _attend_stages(use: Use) -> int:
    """Of three loads one after the other, of an entry's position, its page and its latent. In 7 stages two of each are
    on their way, in 3 latents are waited for; with 16 bits these are 181 KiB of shared memory."""
    is_large = use.width("q") == 2 and use.target.capability in ((9, 0), (10, 0), (10, 3))
    return 7 if is_large else absorbed_tile(use).num_stages


def _attend_parts(use: Use) -> Expr:
    """Parts of what is selected for a token, no more than there are tiles in it."""
    most = -(-known(use, "selected", 2) // absorbed_tile(use).n)
    return by_slots(use.shape("q")[1], tuple(min(parts, most) for parts in ATTEND_PARTS))


def _attend_places(use: Use, num_parts: Expr, tokens: Expr) -> Attended:
    """Each in whole vectors."""
    sizes = sizes_of(use)
    rows = mul(tokens, sizes.heads)
    # One part is none: its program has the result.
    parts = mul(num_parts, minimum(add(num_parts, -1), 1))
    each = (
        *([mul(16, ceildiv(mul(rows, sizes.latent, sizes.bytes), 16))] * 2),
        mul(rows, parts, 4 * sizes.latent),
        mul(rows, parts, 8),
    )
    return Attended(*(add(*each[:i]) for i in range(len(each) + 1)))


def _score_tile(use: Use) -> Tile:
    """Rows of one query's heads, and keys that are scored together."""
    rows = max(16, power_of_two(known(use, "q", 2)))
    if use.width("q") > 2:
        return Tile(rows, 16, 4, 1)
    # A key's page is read before the key: of 7 stages 3 are keys on their way; of 3 only 1, and products wait for it.
    return Tile(rows, 64, 4, 7 if has_large_memory(use) else 3)


def _queries(use: Use) -> int:
    """Queries of a prompt that a program scores at a time: rows enough to use a loaded key often."""
    rows = max(16, power_of_two(known(use, "q", 2)))
    return max(1, (32 if use.width("q") > 2 else 128) // rows)


def count_of(use: Use) -> int:
    """How many keys are selected."""
    count = use.constant("count")
    assert isinstance(count, int), "count is a number"
    return count


def _room(use: Use) -> int:
    """Places that are selected from: more than reach the bound where scores lie as it falls out."""
    return min(GROUPS, 2 * power_of_two(count_of(use)))


def _strands(use: Use) -> Expr:
    """Strands of a sequence's tiles, as many for each program, so that there are maxima of GROUPS groups at least."""
    groups = -(-GROUPS // _score_tile(use).n)
    strands = tuple(-(-max(parts, groups) // parts) * parts for parts in SCORE_PARTS)
    return by_slots(add(use.shape("cu_seqlens")[0], -1), strands)


def _select_places(use: Use) -> _Workspace:
    """Each in whole vectors."""
    sequences = add(use.shape("cu_seqlens")[0], -1)
    counts = mul(sequences, add(by_slots(sequences, NOTE_PARTS), 1))
    each = (
        *([mul(4, slots_of(use))] * 4),
        mul(16, ceildiv(counts, 4)),
        *_own_bytes(use),
    )
    return _Workspace(*(add(*each[:i]) for i in range(len(each) + 1)))


def slots_of(use: Use) -> Expr:
    """Of all page lists, in whole vectors."""
    return mul(4, ceildiv(mul(use.shape("page_indices")[0], use.shape("cache")[1]), 4))


def _own_places(use: Use) -> Expr:
    """Scores of prompts that there is room for: of all programs, or as many as is allowed, if that is one tile's."""
    a_tile = mul(_queries(use), slots_of(use))
    return minimum(mul(minimum(use.shape("q")[1], PROGRAMS), a_tile), maximum(OWN_SCORES, a_tile))
