"""The launches of `score.cu`, `pick.cu` and `prompts.cu`: the selection of keys on Hopper. No torch.

Of few tokens each is a row, which scores keys for itself. In other steps rows are the sequences with one query, and the
queries of others share the keys that they score, by `prompts.cu`.
"""

from __future__ import annotations

from typing import NamedTuple

from precast.ir.graph.schema import Expr
from precast.ir.graph.symbols import add, maximum, minimum, mul
from precast.kernels.records import Condition, Launch, Pointer
from precast.kernels.rows import known, real
from precast.kernels.sparse_attention.launches import count_of, given, select_strides, slots_of
from precast.kernels.sparse_attention.limits import OWN_SCORES
from precast.kernels.use import Use

FEW_TOKENS = 8
"""Of a step, up to which each is a row, with room for the scores of all slots: 32 bytes a slot."""
NUM_SMS = 132
"""Streaming multiprocessors of H100 SXM, H200 and GH200: the blocks that share the keys of all rows."""
SCORING_WARPS, RING_BYTES = 12, 128 << 10
"""Warps of a block that scores keys, of which four bring them, and the memory of its ring."""
_KEYS = 64
"""Of a stage of a ring."""
PICKING_WARPS = 16
"""Of a block that picks the keys of a row."""


class Pick(NamedTuple):
    """How a row's scores are divided: blocks of a cluster, scores that each has in shared memory, how many blocks a
    multiprocessor has at once, and how many bytes of that memory a block asks for at least."""

    cluster: int
    near: int
    together: int
    memory: int = 0


FEW_ROWS, SOME_ROWS, MANY_ROWS = Pick(8, 16384, 1, 120 << 10), Pick(8, 16384, 2), Pick(4, 8192, 3)
"""All of 131,072 keys are near, or of 32,768. A block of few has a multiprocessor to itself: those that are free first
would be given several, which took a tenth longer for 8 rows on an H100. Of many there are three: with two, an H200 has
room for 62 clusters, and 64 rows took longer."""
SOME_SLOTS = 32
"""For sequences, up to which long rows are worth more blocks each."""
PROMPT_WARPS, PROMPT_STAGES, PROMPT_NEAR = 12, 4, 20480
"""Of a block that selects for prompts: its warps, stages of 64 keys on their way, and scores of a row that it has in
shared memory when it picks."""

TAKES = (
    Condition(
        "8, 16, 32, 64 or 128 heads, of 64 or 128 elements",
        lambda use: use.number("q", 2) in (8, 16, 32, 64, 128) and use.number("q", 3) in (64, 128),
    ),
    Condition(
        "a cache of the query's type",
        lambda use: use.operands["cache"].type.dtype == use.operands["q"].type.dtype,
    ),
    Condition("a scale above 0", lambda use: real(use, "scale") > 0),
)


def token_bytes(use: Use) -> Expr:
    """The bytes of the scores of few tokens, each of which has room for all slots."""
    return mul(4, minimum(use.shape("q")[1], FEW_TOKENS), slots_of(use))


def of_tokens(use: Use) -> tuple[Launch, ...]:
    """`precast.paged_select_keys` and `precast.paged_select_entries` of few tokens."""
    return _launches(use, Pointer("workspace", "int32"), use.shape("q")[1], FEW_ROWS)


def sequence_bytes(use: Use) -> Expr:
    """The bytes of the scores of sequences with one query, and of what is selected by for others."""
    return mul(4, add(slots_of(use), _prompt_places(use)))


def of_sequences(use: Use, *, how: Pick) -> tuple[Launch, ...]:
    """The same of any tokens."""
    prompts = _prompts(use, Pointer("workspace", "int32", mul(4, slots_of(use))))
    return (*_launches(use, Pointer("workspace", "int32"), _sequences(use), how), prompts)


def _prompts(use: Use, scores: Pointer) -> Launch:
    size, columns = known(use, "q", 3), _queries(use) * known(use, "q", 2)
    return Launch(
        kernel="precast.kernels.sparse_attention/prompts.cu:select_prompts",
        grid=(NUM_SMS, 1, 1),
        args=(
            Pointer("out.0"), scores, *given(), use.shape("q")[1], _sequences(use), _prompt_places(use),
            *select_strides(),
        ),
        constants={
            **_selecting(use), "BY_TOKEN": True, "FLOAT16": use.operands["q"].type.dtype == "float16",
            "HEADS": known(use, "q", 2), "SIZE": size, "SCALE": real(use, "scale"), "TOKENS": _queries(use),
            "STAGES": PROMPT_STAGES, "CLUSTER": 1, "WARPS": PROMPT_WARPS, "NEAR": PROMPT_NEAR,
        },
        block=32 * PROMPT_WARPS,
        shared_bytes=prompt_bytes(columns, size, PROMPT_STAGES, PROMPT_NEAR),
        pdl=True,
    )  # fmt: skip


def prompt_bytes(columns: int, size: int, stages: int, near: int) -> int:
    """What a block that selects for prompts needs: a ring of keys, heads, and to pick."""
    return 2 * size * (_KEYS * stages + columns) + 16 * stages + shared_bytes(PROMPT_WARPS, near)


def _queries(use: Use) -> int:
    """Of a prompt, which a block scores together: 256 heads at most."""
    return 4 if known(use, "q", 2) <= 64 else 2


def _prompt_places(use: Use) -> Expr:
    """Room for scores of prompts: for all blocks, or as many as is allowed, if that is one's."""
    a_tile = mul(_queries(use), slots_of(use))
    return minimum(mul(minimum(use.shape("q")[1], NUM_SMS), a_tile), maximum(OWN_SCORES, a_tile))


def _launches(use: Use, scores: Pointer, rows: Expr, how: Pick) -> tuple[Launch, ...]:
    heads, size = known(use, "q", 2), known(use, "q", 3)
    stages = RING_BYTES // (_KEYS * size * 2)
    shared = {**_selecting(use), "BY_TOKEN": how is FEW_ROWS}
    sizes = (rows, _sequences(use), slots_of(use))
    score = Launch(
        kernel="precast.kernels.sparse_attention/score.cu:score_keys",
        grid=(NUM_SMS, 1, 1),
        args=(scores, *given(), *sizes, *select_strides()),
        constants={
            **shared, "FLOAT16": use.operands["q"].type.dtype == "float16", "HEADS": heads, "SIZE": size,
            "SCALE": real(use, "scale"), "STAGES": stages,
        },
        block=32 * SCORING_WARPS,
        shared_bytes=score_bytes(heads, size, stages),
        pdl=True,
    )  # fmt: skip
    lengths = tuple(Pointer(name) for name in ("cu_seqlens", "kv_lens", "page_indptr", "page_start"))
    pick = Launch(
        kernel="precast.kernels.sparse_attention/pick.cu:pick_keys",
        grid=(how.cluster, rows, 1),
        args=(Pointer("out.0"), scores, *lengths, *sizes),
        constants={
            **shared,
            "CLUSTER": how.cluster,
            "WARPS": PICKING_WARPS,
            "NEAR": how.near,
            "TOGETHER": how.together,
        },
        block=32 * PICKING_WARPS,
        shared_bytes=max(how.memory, shared_bytes(PICKING_WARPS, how.near)),
        pdl=True,
    )
    return score, pick


def _selecting(use: Use) -> dict[str, int | float | bool | str]:
    return {"COUNT": count_of(use), "RATE": use.constant("rate") or 1, "PAGE_SIZE": known(use, "cache", 1)}


def score_bytes(heads: int, size: int, stages: int) -> int:
    """What a block that scores keys needs: a ring of keys, heads for each warp group, and barriers."""
    return 2 * size * (_KEYS * stages + 2 * max(16, heads)) + 16 * stages


def shared_bytes(warps: int, near: int) -> int:
    """What a block that picks needs: counts of bins, scores of one, numbers of warps and of all, and scores."""
    return 32 * warps * (2 * 4 + 8 + 4) + (warps + 1) // 2 * 16 + 48 + 4 * near


def _sequences(use: Use) -> Expr:
    return add(use.shape("cu_seqlens")[0], -1)
