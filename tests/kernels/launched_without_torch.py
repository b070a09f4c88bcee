"""What stands in for torch's own ops, against torch: odd sizes, gaps, other orders of axes, mixed dtypes; in Triton's
interpreter and on GPUs. `test_triton.py` runs this file in a process of its own.
"""

from __future__ import annotations

import os
from operator import attrgetter
from typing import Any

import pytest
import quantised
import torch

from precast.kernels.launch import as_function
from precast.kernels.without_torch.copies import repacked, repacked_arguments
from precast.kernels.without_torch.records import RECORDS
from precast.kernels.without_torch.triton import repack_kernel

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if IS_INTERPRETED else "cuda")
# The interpreter holds bfloat16 as integers, and computes with those.
HALF = torch.float16 if IS_INTERPRETED else torch.bfloat16
TRITON = {record.op.removeprefix("aten."): record for record in RECORDS if record.kind == "triton"}

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The same in each run, with gaps between its rows."""
    wide = torch.randn((*shape[:-1], shape[-1] + 3), generator=torch.Generator().manual_seed(sum(shape)))
    return wide.to(dtype)[..., 1 : shape[-1] + 1]


X, Y = draw(1, 7, 3, 20), draw(1, 7, 3, 20) + 0.2
POSITIVE = X.abs() + 0.1
MASK = X > 0
COUNTS = torch.arange(14).reshape(2, 7) - 5
LARGE = COUNTS * 1234567890123456789
CASES: dict[str, list[dict[str, Any]]] = {
    "add.Tensor": [
        {"self": X, "other": Y}, {"self": X.to(HALF), "other": 1.7}, {"self": COUNTS, "other": 3},
        {"self": X.transpose(1, 2), "other": draw(3, 1, 20)}, {"self": draw(5, 1), "other": draw(1, 9)},
        {"self": draw(2, 3, 4, 5), "other": draw(4, 1)},
    ],
    "bitwise_not.default": [{"self": MASK}],
    "bitwise_xor.Tensor": [{"self": COUNTS, "other": 3 * COUNTS[:, :1]}, {"self": COUNTS * 2**40, "other": LARGE}],
    "cat.default": [
        {"tensors": [X, Y[..., :7]], "dim": -1}, {"tensors": [X.to(HALF), Y.to(HALF), X[:, :4].to(HALF)], "dim": 1},
        {"tensors": [COUNTS.t(), COUNTS.t()], "dim": 0}, {"tensors": [draw(5), draw(2)], "dim": 0},
        {"tensors": [X.permute(3, 1, 0, 2), Y.permute(3, 1, 0, 2)], "dim": 3},
    ],
    "clamp.default": [{"self": X, "min": -0.5, "max": 0.7}, {"self": X.to(HALF), "max": 0.7}],
    "eq.Scalar": [{"self": COUNTS, "other": 2}, {"self": MASK, "other": 0}],
    "floor.default": [{"self": 3 * X}],
    "full_like.default": [{"self": X.to(HALF), "fill_value": 2.5}, {"self": COUNTS, "fill_value": -3}],
    "gather.default": [
        {"self": X, "dim": -1, "index": (draw(1, 7, 3, 5) * 9).long() % 20},
        {"self": X.to(HALF).transpose(1, 2), "dim": 3, "index": (draw(1, 3, 7, 9) * 9).long() % 20},
        {"self": COUNTS, "dim": 1, "index": COUNTS[:, ::2] % 7}, {"self": draw(1030), "dim": 0, "index": COUNTS[1]},
    ],
    "gelu.default": [{"self": X.to(HALF), "approximate": "tanh"}, {"self": X}],
    "log.default": [{"self": POSITIVE}],
    "log1p.default": [{"self": POSITIVE}],
    "logical_not.default": [{"self": MASK}],
    "masked_fill.Scalar": [{"self": COUNTS, "mask": COUNTS > 0, "value": 9}],
    "matmul.default": [
        {"self": draw(35, 40), "other": draw(40, 33)}, {"self": draw(5, 8), "other": draw(1, 7, 8).transpose(1, 2)},
        {"self": draw(1, 6, 4, 5), "other": draw(1, 6, 5, 5)}, {"self": draw(7, 6, 1, 8), "other": draw(6, 8, 8)},
        {"self": draw(3, 2, 9, 4).to(HALF), "other": draw(3, 1, 4, 70).to(HALF)},
    ],
    "maximum.default": [{"self": MASK, "other": Y > 0}, {"self": X, "other": Y}],
    "minimum.default": [{"self": MASK, "other": Y > 0}],
    "mean.dim": [{"self": X, "dim": [1], "keepdim": True}, {"self": X.to(HALF), "dim": [-1]}],
    "mul.Tensor": [{"self": X.to(HALF), "other": Y.to(HALF)}, {"self": X.to(HALF), "other": Y}],
    "pow.Tensor_Scalar": [{"self": X, "exponent": 2}],
    "remainder.Tensor": [
        {"self": COUNTS, "other": torch.tensor([3])}, {"self": LARGE, "other": COUNTS.abs() + 7},
        {"self": COUNTS, "other": torch.tensor([[-4], [5]])}, {"self": COUNTS.int(), "other": COUNTS.int() * 2 + 1},
    ],
    "rsqrt.default": [{"self": POSITIVE}],
    "softmax.int": [
        {"self": X, "dim": -1}, {"self": 9 * draw(1, 5, 4, 4), "dim": 3}, {"self": X.to(HALF), "dim": -1},
        {"self": X.to(HALF).transpose(1, 2), "dim": -1, "dtype": torch.float32}, {"self": draw(3, 1500), "dim": 1},
        {"self": X.masked_fill(MASK, float("-inf")), "dim": -1}, {"self": draw(7), "dim": 0},
        {"self": X, "dim": -1, "dtype": HALF},
    ],
    "sqrt.default": [{"self": POSITIVE}],
    "sum.dim_IntList": [
        {"self": X, "dim": [1]}, {"self": X.to(HALF), "dim": [2], "keepdim": True}, {"self": COUNTS, "dim": [0]},
        {"self": X.transpose(0, 3), "dim": [-1]}, {"self": LARGE, "dim": [1]},
    ],
    "topk.default": [
        {"self": X, "k": 4}, {"self": X.argsort(dim=-1).to(HALF).transpose(1, 2), "k": 20, "dim": 3, "sorted": False},
        {"self": draw(3, 1500), "k": 7, "dim": 1}, {"self": draw(9), "k": 1},
        {"self": torch.tensor([[2.0, float("-inf"), -0.5, float("nan"), float("inf")]]), "k": 5},
    ],
    "to.dtype": [
        {"self": X, "dtype": HALF}, {"self": MASK, "dtype": torch.float32}, {"self": COUNTS, "dtype": torch.int32},
        {"self": 3 * X, "dtype": torch.int64}, {"self": X.to(HALF).transpose(1, 2), "dtype": torch.float32},
    ],
    "where.self": [{"condition": MASK, "self": X, "other": Y}],
}  # fmt: skip
"""Calls by op; of others `self` and `other`, a scalar or a tensor."""


def calls(op: str) -> list[dict[str, Any]]:
    if op in CASES:
        return CASES[op]
    if op.endswith(".Scalar"):
        return [{"self": X, "other": 0.7}]
    return [{"self": X, "other": Y}] if op.endswith(".Tensor") else [{"self": X.to(HALF)}, {"self": X}]


def moved(value: Any) -> Any:
    if isinstance(value, list):
        return [moved(each) for each in value]
    return value.to(DEVICE) if isinstance(value, torch.Tensor) else value


@pytest.mark.parametrize("op", TRITON)
def test_launches_give_what_torch_gives(op: str) -> None:
    for given in calls(op):
        results = as_function(TRITON[op])(**{name: moved(value) for name, value in given.items()})
        wanted = overload(op)(**given | ({"sorted": True} if "sorted" in given else {}))
        pairs = zip(results, wanted, strict=True) if isinstance(results, tuple) else [(results, wanted)]
        for found, expected in pairs:
            assert (found.dtype, found.shape, found.is_contiguous()) == (expected.dtype, expected.shape, True)
            # Sums have an order of their own, and functions differ by a unit or two in the last place.
            step = 0.0 if not expected.is_floating_point() else 32 * torch.finfo(expected.dtype).eps
            torch.testing.assert_close(found.cpu(), expected, rtol=step, atol=step, equal_nan=True)


def test_of_equal_elements_the_first_are_the_largest() -> None:
    x = torch.tensor([[1.0, 2.0, 2.0, 0.0, 2.0], [-0.0, 0.0, -1.0, 0.0, -3.0]], device=DEVICE)

    _, numbers = as_function(TRITON["topk.default"])(self=x, k=4)

    assert numbers.tolist() == [[1, 2, 4, 0], [0, 1, 3, 2]]


@pytest.mark.parametrize("part", ["values", "zeros", "groups"])
@pytest.mark.parametrize(("rows", "columns"), [(24, 3), (280, 70)])
def test_words_are_repacked(part: str, rows: int, columns: int) -> None:
    """Tiles are of 16 or 128 inputs, and 32 words of eight outputs."""
    words = torch.randint(-(2**31), 2**31, (rows, columns), generator=torch.Generator().manual_seed(1)).int()
    wanted = quantised.repacked(words, part)
    each, launch = 1 if part == "zeros" else 8, repacked(part)
    x, out = words.to(DEVICE), torch.zeros_like(wanted, device=DEVICE, memory_format=torch.contiguous_format)
    step = wanted.shape[1]
    places = {"values": (1, step, 8 * step), "zeros": (1, step), "groups": (step, 1, 8)}
    apart = ((rows // 8, 8, columns), (8 * columns, columns, 1)) if each == 8 else ((rows, columns), (columns, 1))
    found = repacked_arguments(part, *apart, places[part])
    assert found is not None
    grid, numbers = found
    assert grid[0] * launch.constants["ROWS"] * each >= rows  # type: ignore[operator]

    repack_kernel[grid](x, out, *numbers, **launch.constants)

    assert torch.equal(out.cpu(), wanted)


def overload(op: str) -> Any:
    """The op as torch has it."""
    return attrgetter(op)(torch.ops.aten)
