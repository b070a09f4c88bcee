"""The launch of `listed.cu`: weights of four bits whose inputs are of groups in any order, on Hopper. No torch."""

from __future__ import annotations

from precast.ir.graph.schema import Dtype
from precast.ir.graph.symbols import ceildiv, numel
from precast.kernels.quantised_linear import launches
from precast.kernels.records import Condition, Launch, Pointer, Record
from precast.kernels.use import Use

MOST_ROWS = 64
"""Of the input. Each 16 of them read the weight again; of more it is made whole."""
_ROWS, _OUTPUTS = 16, 32
"""Of a block."""
_MANY_WARPS, _FEW_WARPS = 16, 8
"""Of a block: many where each block has a multiprocessor to itself, else two share one."""
_NUM_SMS = 132
"""Streaming multiprocessors of H100 SXM, H200 and GH200."""
_GROUP_BYTES = 16 * _OUTPUTS // 4
"""What a block has of a group: of four outputs 16 bytes."""
_WARP_BYTES = 4 * _ROWS * _OUTPUTS
"""A warp's sums, which take the place of the groups in the end."""
_MOST_BYTES, _ALL_COPIES_BYTES = 227 << 10, 113 << 10
"""What a block may have, and what leaves room for a second one."""
_MOST_OFFSET = 16
_HALF: tuple[Dtype, ...] = ("bfloat16", "float16")


def _table_bytes(use: Use, copies: int) -> int:
    """The list of groups, and what a block has of each."""
    sizes = launches.sizes_of(use)
    return 0 if sizes is None else -(-2 * sizes.inputs // 128) * 128 + copies * (sizes.num_groups + 1) * _GROUP_BYTES


def _copies(use: Use) -> int:
    """Of what a block has of its groups: four, in which lanes read at once, or one where there are too many groups."""
    return 4 if _table_bytes(use, 4) <= _ALL_COPIES_BYTES else 1


def _has_listed_groups(use: Use) -> bool:
    offset = use.constant("zero_offset") or 0
    is_listed = use.constant("format") == "gptq" and use.has("groups") and launches.sizes_of(use) is not None
    return is_listed and isinstance(offset, int) and 0 <= offset <= _MOST_OFFSET


def _has_whole_words(use: Use) -> bool:
    sizes = launches.sizes_of(use)
    return sizes is not None and sizes.inputs % 8 == 0 and sizes.outputs % 8 == 0


def _has_rows(use: Use) -> bool:
    """Which are tokens, along one axis, without gaps."""
    shape = use.shape("input")
    rows = shape[-2] if len(shape) > 1 else None
    is_along_one = (rows == "T" or (isinstance(rows, int) and rows <= MOST_ROWS)) and all(n == 1 for n in shape[:-2])
    return is_along_one and use.operands["input"].is_contiguous and use.constant("activation") in (None, "none")


def _is_static(use: Use) -> bool:
    """All parts of the weight are read before the kernels in front have ended."""
    given = (use.operands[name] for name in ("weight", "scales", "zeros", "groups", "bias") if use.has(name))
    return all(each.is_contiguous and not each.is_activation for each in given)


def _launches(use: Use) -> tuple[Launch, ...]:
    sizes, copies = launches.sizes_of(use), _copies(use)
    assert sizes is not None
    rows, tiles = numel(use.shape("input")[:-1]), -(-sizes.outputs // _OUTPUTS)
    warps = _MANY_WARPS if tiles <= _NUM_SMS else _FEW_WARPS
    return (
        Launch(
            "precast.kernels.quantised_linear/listed.cu:product_listed",
            grid=(tiles, ceildiv(rows, _ROWS)),
            args=(
                *(Pointer(name) for name in ("out.0", "input", "weight", "scales", "zeros", "groups")),
                Pointer("bias") if use.has("bias") else None, rows, sizes.outputs, sizes.inputs, sizes.num_groups,
            ),
            constants={
                "FLOAT16": use.dtype == "float16", "SCALES_FLOAT16": use.operands["scales"].type.dtype == "float16",
                "OFFSET": f"{use.constant('zero_offset') or 0}", "BIAS": use.has("bias"),
                "COPIES": copies, "WARPS": warps,
            },
            block=32 * warps,
            shared_bytes=max(_table_bytes(use, copies), warps * _WARP_BYTES),
            pdl=True,
        ),
    )  # fmt: skip


LISTED = Record(
    name="cuda.quantised_linear_listed", op="precast.quantised_linear", kind="cuda", devices=("cuda",),
    min_capability=(9, 0), max_capability=(9, 0), allocates=False, sizes={"T": (1, MOST_ROWS)},
    dtypes=dict.fromkeys(("input", "bias"), _HALF), workspace=lambda _: 0, runs=_launches,
    takes=(
        Condition(f"gptq, with the group of each input, and an offset of at most {_MOST_OFFSET}", _has_listed_groups),
        Condition("inputs and outputs that are multiples of 8", _has_whole_words),
        Condition("rows that are tokens, along one axis, without gaps, and aren't rounded", _has_rows),
        Condition("scales of float16, or of the input's type",
                  lambda use: use.operands["scales"].type.dtype in ("float16", use.dtype)),
        Condition("parts of the weight and a bias in row-major order that no op makes", _is_static),
        Condition("groups that fit into shared memory", lambda use: _table_bytes(use, _copies(use)) <= _MOST_BYTES),
    ),
)  # fmt: skip
