"""What computes experts: Triton on GPUs; products of rows sorted by expert elsewhere, one after the other on CPUs.

How Triton's kernels cut their work depends on how many tokens a step has. torch's grouped product is for GPUs without
Triton: one launch on Hopper (9.x) and Blackwell (10.x) alone. Elsewhere torch reads the groups' ends on the host and
multiplies them one by one.
"""

from __future__ import annotations

import itertools
from typing import Any

from precast.ir.graph.schema import Expr
from precast.ir.graph.symbols import add, largest, minimum, mul
from precast.kernels.experts import launches
from precast.kernels.experts.limits import GATHERED_ELEMENTS, VECTOR
from precast.kernels.records import Condition, Record, nothing, reference_on_cpu
from precast.kernels.use import Use, copied, numbers, size, wide, width


def _experts(use: Use) -> Expr:
    """Rows sorted by expert: the first product, the activation in float32, the second, rows put back and weighted."""
    x, down = use.operands["x"], use.operands["down"]
    full, narrow, copy = wide(x), width(x), copied(x)
    (_, made, outer), inner = use.shape("up"), down.type.shape[2]
    gated = use.constant("gated")
    # A gate and its values, limited; what is activated, the values with their offset, the product.
    limits = 2 if gated and use.constant("limit") is not None else 0
    extras = limits + (3 if gated or use.constant("alpha") not in (None, 1.0) else 2)
    rows = numbers(use.operands["expert_ids"])
    opened = add(mul(narrow, outer), mul((3 if use.has("up_bias") else 2) * narrow, made))
    closed = add(mul(full + (narrow if copy else 0), inner), mul((3 if use.has("down_bias") else 2) * narrow, outer))
    stages = (
        add(mul(rows, opened), _gathered(use, "up", rows)),
        mul(rows, add(mul(narrow + copy, made), mul(extras * full, inner))),
        add(mul(rows, closed), _gathered(use, "down", rows)),
        mul(rows, 2 * narrow + copy + full, outer),
    )
    places = add(mul(64, rows), mul(64, use.shape("up")[0]))
    summed = add(mul(rows, 2 * narrow + full, outer), mul(full, numbers(x)))
    return add(largest((add(largest(stages), mul(-1, size(x))), summed)), places)


def _grouped_linear(use: Use) -> Expr:
    """Rows sorted by expert and their products; then the products put back."""
    rows, narrow = use.shape("x")[0], use.width("x")
    products = mul((2 if use.has("bias") else 1) * narrow, use.shape("weight")[1])
    places = add(mul(64, rows), mul(64, use.shape("weight")[0]))
    return add(mul(rows, add(mul(narrow, use.shape("x")[1]), products)), places, _gathered(use, "weight", rows))


def _gathered(use: Use, name: str, rows: Expr) -> Expr:
    """Weights gathered row by row, where a GPU has no grouped product for them."""
    weight = use.operands[name]
    if _is_grouped(use, name):
        return 0
    one = mul(*weight.type.shape[1:])
    return mul(width(weight), minimum(mul(rows, one), largest((GATHERED_ELEMENTS, one))))


def _is_grouped(use: Use, name: str) -> bool:
    """Whether torch has a grouped product for this weight."""
    sizes = (use.number(name, 1), use.number(name, 2))
    is_whole = all(size is not None and size % VECTOR == 0 for size in sizes)
    return use.operands[name].type.dtype == "bfloat16" and is_whole


def _in_one_launch(use: Use) -> bool:
    weights = [name for name in ("up", "down", "weight") if use.has(name)]
    return use.target.capability[0] in (9, 10) or not any(_is_grouped(use, name) for name in weights)


_TRITON: dict[str, Any] = {
    "kind": "triton", "devices": ("cuda",), "min_capability": (8, 0), "allocates": False,
    "dtypes": {"x": ("float16", "bfloat16", "float32")},
}  # fmt: skip
_SIZED = Condition("sizes of experts that are known at load", lambda use: launches.sizes_of(use) is not None)
_WHOLE = Condition(
    "sizes of weights that are known at load",
    lambda use: None not in [use.number("weight", axis) for axis in range(3)],
)
_FEW = 2
"""Up to so many tokens, hardly two of which share an expert, so that two launches are better than four.

On an H200 one token of Qwen3-30B-A3B took 23 us in this way and 30 in the other, of GPT-OSS 20B 57 and 65; eight tokens
140 and 127, 379 and 241, for tokens that share an expert read it twice. In between, times that grow with the bytes that
are read meet at 2 to 5 tokens.
"""
STEPS = (16, 64, 256, 1024, 4096)
"""Up to so many tokens tiles are of one size each; above, of the largest."""


def _few(most: int) -> Record:
    """Up to `most` tokens: each pair of a token and an expert reads its weights."""
    return Record(
        name="triton.experts_of_few", op="precast.experts", **_TRITON, takes=(_SIZED,), sizes={"T": (0, most)},
        workspace=launches.few_workspace, runs=launches.few(),
    )  # fmt: skip


def _grouped(least: int, most: int | None) -> Record:
    """Tokens in the order of experts."""
    return Record(
        name="triton.experts" if most is None else f"triton.experts_to_{most}", op="precast.experts", **_TRITON,
        takes=(_SIZED,), sizes={"T": (least, most)}, workspace=launches.grouped_workspace(most),
        runs=launches.grouped(most),
    )  # fmt: skip


_LAUNCHED = Condition("compute capability 9 or 10 for grouped products of bfloat16", _in_one_launch)

RECORDS = (
    _few(_FEW),
    *(_grouped(least + 1, most) for least, most in itertools.pairwise((_FEW, *STEPS))),
    _grouped(STEPS[-1] + 1, None),
    Record(
        name="torch.experts", op="precast.experts", devices=("cuda",), workspace=_experts, takes=(_LAUNCHED,),
        runs="precast.kernels.experts.grouped:experts",
    ),
    Record(
        name="torch.experts_of_read_groups", op="precast.experts", devices=("cuda",), control="host",
        workspace=_experts, runs="precast.kernels.experts.grouped:experts",
    ),
    Record(
        name="torch.experts_one_by_one", op="precast.experts", devices=("cpu",), control="host", workspace=nothing,
        runs="precast.kernels.experts.grouped:experts",
    ),
    reference_on_cpu("precast.experts", "experts.experts"),
    Record(
        name="triton.grouped_linear", op="precast.grouped_linear", **_TRITON, takes=(_WHOLE,),
        workspace=launches.ordered_workspace, runs=launches.ordered,
    ),
    Record(
        name="torch.grouped_linear", op="precast.grouped_linear", devices=("cuda",), workspace=_grouped_linear,
        takes=(_LAUNCHED,), runs="precast.kernels.experts.grouped:grouped_linear",
    ),
    Record(
        name="torch.grouped_linear_of_read_groups", op="precast.grouped_linear", devices=("cuda",), control="host",
        workspace=_grouped_linear, runs="precast.kernels.experts.grouped:grouped_linear",
    ),
    Record(
        name="torch.grouped_linear_one_by_one", op="precast.grouped_linear", devices=("cpu",), control="host",
        workspace=nothing, runs="precast.kernels.experts.grouped:grouped_linear",
    ),
    reference_on_cpu("precast.grouped_linear", "experts.grouped_linear"),
)  # fmt: skip
