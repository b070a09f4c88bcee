"""What computes experts in few bits: Triton on GPUs; else each expert is dequantised when its tokens are multiplied.

On Hopper steps of few tokens read weights by a stream of their own, and others multiply tiles by warp groups.
How Triton's kernels cut their work depends on how many tokens a step has.
"""

from __future__ import annotations

import itertools
from typing import Any

from precast.ir.graph.schema import Expr
from precast.ir.graph.symbols import add, largest, mul
from precast.kernels.experts.records import STEPS
from precast.kernels.quantised_experts import launches, streamed, tiles
from precast.kernels.quantised_experts.rounding import rounding_of
from precast.kernels.quantised_experts.sizes import sizes_of
from precast.kernels.quantised_linear.launches import LONGEST_ROUNDED
from precast.kernels.records import Condition, Record, nothing, reference_on_cpu
from precast.kernels.use import Use

_DEQUANTISED = 24
"""Bytes that are held for each number of a matrix while it is dequantised, at most: its value in float32, and two
intermediate results with their indices."""
_ROW = 6
"""Rows that are held at once beside an expert's: of the pairs, in the widest type, sorted and put back."""
_ROUNDED = 6
"""More of them while they are rounded."""


def _one_by_one(use: Use) -> Expr:
    """One expert's matrix while it is dequantised, and the rows of all pairs."""
    sizes = sizes_of(use)
    matrix = mul(_DEQUANTISED, largest((mul(sizes.opened, sizes.width), mul(sizes.width, sizes.inner))))
    copies = _ROW if rounding_of(use) == "none" else _ROW + _ROUNDED
    each = mul(copies * max(4, use.width("x")), largest((sizes.opened, sizes.width)))
    return add(matrix, mul(sizes.pairs, each), mul(64, sizes.pairs), mul(64, sizes.num_experts))


_TRITON: dict[str, Any] = {
    "op": "precast.quantised_experts", "kind": "triton", "devices": ("cuda",), "min_capability": (8, 0),
    "allocates": False, "dtypes": {"x": ("float16", "bfloat16", "float32")},
}  # fmt: skip
_IS_STORED = (
    Condition(
        "groups of 16 or a multiple of 32, sizes that are known at load, at most"
        f" {LONGEST_ROUNDED} numbers in rows that are rounded",
        launches.is_taken,
    ),
    Condition("compute capability 8.9 or higher for float8", launches.has_float8),
)
_FEW = 2
"""Up to so many tokens hardly two share an expert, so that three launches are better than four."""


def _few(most: int) -> Record:
    """Up to `most` tokens: each pair of a token and an expert reads its weights."""
    return Record(
        name="triton.quantised_experts_of_few", **_TRITON, takes=_IS_STORED, sizes={"T": (0, most)},
        workspace=launches.few_workspace,
        runs=launches.few(),
    )  # fmt: skip


def _grouped(least: int, most: int | None) -> Record:
    """Tokens in the order of experts."""
    return Record(
        name="triton.quantised_experts" + ("" if most is None else f"_to_{most}"), **_TRITON, takes=_IS_STORED,
        sizes={"T": (least, most)}, workspace=launches.grouped_workspace(most), runs=launches.grouped(most),
    )  # fmt: skip


_RUNS = "precast.kernels.quantised_experts.one_by_one:quantised_experts"

RECORDS = (
    *streamed.RECORDS,
    *tiles.RECORDS,
    _few(_FEW),
    *(_grouped(least + 1, most) for least, most in itertools.pairwise((_FEW, *STEPS))),
    _grouped(STEPS[-1] + 1, None),
    Record(
        name="torch.quantised_experts_of_read_groups", op="precast.quantised_experts", devices=("cuda",),
        control="host", workspace=_one_by_one, runs=_RUNS,
    ),
    Record(
        name="torch.quantised_experts_one_by_one", op="precast.quantised_experts", devices=("cpu",), control="host",
        workspace=nothing, runs=_RUNS,
    ),
    reference_on_cpu("precast.quantised_experts", "quantised_experts.quantised_experts"),
)  # fmt: skip
