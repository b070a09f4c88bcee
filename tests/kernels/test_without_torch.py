"""What stands in for torch's own ops is chosen where torch is not installed, and nowhere else."""

from __future__ import annotations

import pytest

from precast.ir.errors import TargetError
from precast.ir.graph.schema import Arg, Const, Dim, Dtype, Items, Node, Ref, TensorType, Value
from precast.kernels.choices import cases, records_of, resolve
from precast.kernels.records import Record
from precast.kernels.use import GPU, Use, use_of
from precast.kernels.without_torch.records import RECORDS


def use_with(
    op: str, result: tuple[int | str, ...], tensors: dict[str, tuple[int | str, ...]], dtype: Dtype = "bfloat16",
    **args: Arg,
) -> Use:  # fmt: skip
    types = {name: TensorType(dtype, shape) for name, shape in tensors.items()}
    node = Node(op, {**{name: Ref(name) for name in tensors}, **args}, (Value("y", TensorType(dtype, result)),))
    return use_of(node, types, GPU, {"weight"})


ADD = use_with("aten.add.Tensor", (1, "T", 8), {"self": (1, "T", 8), "other": (8,)})
LINEAR = use_with("aten.linear.default", (1, "T", 9), {"input": (1, "T", 7), "weight": (9, 7)})
SUM = use_with("aten.sum.dim_IntList", (1, 8), {"self": (1, 5, 8)}, dim=Items((Const(1),)))


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: str(record.name))
def test_torch_stands_in_front(record: Record) -> None:
    names = [each.name for each in records_of(record.op, 1)]

    assert names[-1] == record.name
    assert any(name.startswith("torch.") for name in names[:-1])


@pytest.mark.parametrize(
    ("use", "torch", "other"),
    [
        (ADD, "torch.add.Tensor", "triton.add.Tensor"), (LINEAR, "torch.linear.default", "cublaslt.linear_of_any_rows"),
        (SUM, "torch.sum.dim_IntList", "triton.sum.dim_IntList"),
    ],
)  # fmt: skip
def test_the_choice_depends_on_torch(use: Use, torch: str, other: str) -> None:
    assert resolve(use, {"T": 3}).record.name == torch
    assert resolve(use._replace(target=GPU.without_torch), {"T": 3}).record.name == other


def test_views_need_nothing() -> None:
    view = use_with("aten.reshape.default", ("T", 8), {"self": (1, "T", 8)}, shape=Items((Dim("T"), Const(8))))

    assert cases(view._replace(target=GPU.without_torch)) == cases(view)


@pytest.mark.parametrize(
    "use",
    [
        use_with("aten.add.Tensor", (1, "T", 8), {"self": (1, "T", 8)}, other=Dim("T")),
        use_with("aten.pow.Tensor_Scalar", (4,), {"self": (4,)}, exponent=Const(1.7)),
        use_with("aten.bitwise_not.default", (4,), {"self": (4,)}, "int64"),
        use_with("aten.exp.default", (4,), {"self": (4,)}, "float64"),
        use_with("aten.exp.default", (2, 3, 4, 5, 6), {"self": (2, 3, 4, 5, 6)}),
        use_with("aten.sum.dim_IntList", (8,), {"self": (4, 5, 8)}, dim=Items((Const(0), Const(1)))),
        use_with("aten.sum.dim_IntList", (8,), {"self": ("T", 8)}, dim=Items((Const(0),))),
        use_with("aten.linear.default", (3, "T", 9), {"input": (3, "T", 7), "weight": (9, 7)}),
        use_with("aten.matmul.default", (4,), {"self": (4, 4), "other": (4,)}),
    ],
    ids=lambda use: use.text,
)
def test_what_no_launch_computes_is_refused(use: Use) -> None:
    with pytest.raises(TargetError, match="torch is not installed"):
        resolve(use._replace(target=GPU.without_torch), {"T": 3})
