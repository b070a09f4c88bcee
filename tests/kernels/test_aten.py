"""Torch's own ops: the table names their arguments as torch does, and records that write into `out` say the same."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

import pytest
import torch

from precast.ir.ops import table as ops
from precast.kernels import registry
from precast.kernels.aten import RECORDS
from precast.kernels.records import Record

NAMES = [name for name, _ in ops.names() if name.startswith("aten.")]
X = torch.tensor([[0.3, -1.5, 2.0, 0.7], [1.1, 0.2, -0.4, 3.0], [0.9, 0.5, 0.1, -2.0]])
Y = X.flip(0).contiguous() + 0.1
POSITIVE = X.abs()
ROWS = torch.tensor([[0, 2, 1, 1]])
ARGUMENTS: dict[str, dict[str, Any]] = {
    "addmm.default": {"self": torch.randn(5), "mat1": X, "mat2": torch.randn(4, 5)},
    "argmax.default": {"self": X, "dim": 1},
    "bitwise_not.default": {"self": ROWS},
    "bitwise_xor.Tensor": {"self": ROWS, "other": ROWS + 5},
    "cat.default": {"tensors": [X, Y], "dim": 1},
    "clamp.default": {"self": X, "min": -1, "max": 1},
    "cumsum.default": {"self": X, "dim": 1},
    "full_like.default": {"self": X, "fill_value": 7},
    "gather.default": {"self": X, "dim": 0, "index": ROWS},
    "gelu.default": {"self": X, "approximate": "tanh"},
    "linear.default": {"input": X[None], "weight": torch.randn(5, 4), "bias": torch.randn(5)},
    "log.default": {"self": POSITIVE},
    "log1p.default": {"self": POSITIVE},
    "logical_not.default": {"self": X > 0},
    "matmul.default": {"self": X.expand(2, 3, 4), "other": torch.randn(2, 4, 3)},
    "mean.dim": {"self": X, "dim": [-1], "keepdim": True},
    "pow.Tensor_Scalar": {"self": X, "exponent": 2},
    "remainder.Tensor": {"self": ROWS - 2, "other": ROWS.t() + 3},
    "rsqrt.default": {"self": POSITIVE},
    "scatter.src": {"self": X, "dim": 0, "index": ROWS, "src": Y},
    "scatter.value": {"self": X, "dim": 0, "index": ROWS, "value": 9.0},
    "softmax.int": {"self": X, "dim": -1},
    "softplus.default": {"self": X, "beta": 1, "threshold": 20},
    "sqrt.default": {"self": POSITIVE},
    "sum.dim_IntList": {"self": X, "dim": [0], "keepdim": False},
    "to.dtype": {"self": X, "dtype": torch.bfloat16},
    "where.self": {"condition": X > 0, "self": X, "other": Y},
    **{f"{name}.Scalar": {"self": X, "other": 0.7} for name in ("eq", "ne", "ge", "gt", "le", "lt")},
    **{
        name: {"self": X, "other": Y}
        for name in ("add.Tensor", "div.Tensor", "mul.Tensor", "sub.Tensor", "maximum.default", "minimum.default")
    },
    **{f"{name}.Tensor": {"self": X, "other": Y} for name in ("eq", "ne", "ge", "gt", "le", "lt")},
}
"""Of the ops that take more than `self`, or not any `self`."""


def overload(name: str) -> Any:
    """The op as torch has it, which returns its results."""
    return attrgetter(name)(torch.ops)


@pytest.mark.parametrize("name", NAMES)
def test_the_table_has_torchs_argument_names(name: str) -> None:
    torch_args = {arg.name: arg for arg in overload(name)._schema.arguments}
    definition = ops.lookup(name)

    assert definition is not None
    assert {arg.name for arg in definition.args} <= set(torch_args)
    # What the table leaves out must have a default, and be what torch's default says.
    required = {arg.name for arg in torch_args.values() if not arg.has_default_value()}
    assert required <= {arg.name for arg in definition.args}


def test_every_op_has_a_record() -> None:
    assert {record.op for record in RECORDS} == set(NAMES)


INTO = [record for record in RECORDS if not record.allocates]


@pytest.mark.parametrize("record", INTO, ids=[record.name for record in INTO])
def test_what_is_written_into_out_is_what_torch_returns(record: Record) -> None:
    arguments = ARGUMENTS.get(record.op.removeprefix("aten."), {"self": X})
    expected = overload(record.op)(**arguments)
    out = torch.full_like(expected, 55)

    registry.function_of(record)(**arguments, out=out)

    assert torch.equal(out, expected)


@pytest.mark.parametrize("bias", [None, torch.randn(5)])
def test_a_linear_layer_takes_rows_with_gaps(bias: torch.Tensor | None) -> None:
    (record,) = (record for record in RECORDS if record.op == "aten.linear.default")
    x, weight = torch.randn(1, 3, 8)[..., 2:6], torch.randn(5, 4)
    out = torch.empty(1, 3, 5)

    registry.function_of(record)(input=x, weight=weight, bias=bias, out=out)

    assert torch.equal(out, torch.nn.functional.linear(x, weight, bias))


@pytest.mark.parametrize("name", ["add.Tensor", "div.Tensor"])
def test_a_number_is_taken_for_a_tensor(name: str) -> None:
    (record,) = (record for record in RECORDS if record.op == f"aten.{name}")
    out = torch.empty_like(X)

    registry.function_of(record)(self=X, other=2, out=out)

    assert torch.equal(out, overload(record.op)(X, 2))


def test_a_tensor_of_the_dtype_is_its_own_result() -> None:
    same = next(record for record in RECORDS if record.name == "torch.to.dtype")

    assert registry.function_of(same)(self=X, dtype=torch.float32) is X
