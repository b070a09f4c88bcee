"""Fused ops for tests: operands with odd sizes, and steps over them. `half` stands for a type of 16 bits."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from graph_text import parse_steps

from precast.ir.graph.infer import apply_shape_rule
from precast.ir.graph.schema import Arg, Node, Ref, Steps, TensorType, Value
from precast.ir.ops import table as ops


class Case(NamedTuple):
    """A fused op: its operands as (dtype, shape), and its steps as text. `exact`: all steps are of one rounding."""

    operands: tuple[tuple[str, tuple[int, ...]], ...]
    steps: str
    exact: bool = True


NORM = """{
  %s0 = aten.to.dtype(self=%x0, dtype=float32), %s1 = aten.pow.Tensor_Scalar(self=%s0, exponent=2),
  %s2 = aten.mean.dim(self=%s1, dim=[-1], keepdim=true), %s3 = aten.add.Tensor(self=%s2, other=1e-06),
  %s4 = aten.pow.Tensor_Scalar(self=%s3, exponent=-0.5), %s5 = aten.mul.Tensor(self=%s0, other=%s4),
  %s6 = aten.mul.Tensor(self=%s5, other=%x1), %s7 = aten.to.dtype(self=%s6, dtype=half),
  %s8 = aten.add.Tensor(self=%x2, other=%s7), return %s7, %s8
}"""


def _chain(*calls: str) -> str:
    steps = [f"%s{i} = aten.{call}" for i, call in enumerate(calls)]
    return "{" + ", ".join(steps) + f", return %s{len(calls) - 1}" + "}"


def _of(*ops: str) -> str:
    """Functions of one tensor, one after the other."""
    return _chain(*(f"{op}(self=%{'x0' if i == 0 else f's{i - 1}'})" for i, op in enumerate(ops)))


_COMPARED = ", ".join(
    f"%s{i} = aten.{name}.Scalar(self=%x0, other=0.3), "
    f"%s{i + 1} = aten.where.self(condition=%s{i}, self=%x1, other=%{of})"
    for i, name, of in ((0, "gt", "x2"), (2, "le", "s1"), (4, "ne", "s3"))
)

CASES: dict[str, Case] = {
    "norm and sum": Case((("half", (1, 7, 48)), ("float32", (48,)), ("half", (1, 7, 48))), NORM, exact=False),
    "norm of heads": Case((("half", (1, 5, 3, 12)), ("float32", (12,)), ("half", (1, 5, 1, 12))), NORM, exact=False),
    "one row": Case((("half", (1, 1, 1000)), ("float32", (1000,)), ("half", (1, 1, 1000))), NORM, exact=False),
    "one column": Case((("half", (1, 9, 1)), ("float32", (1,)), ("half", (1, 9, 1))), NORM, exact=False),
    "two sums": Case(
        (("half", (1, 67, 37)), ("half", (1, 67, 37)), ("half", (1, 67, 37))),
        _chain("add.Tensor(self=%x0, other=%x1)", "add.Tensor(self=%x2, other=%s0)"),
    ),
    "more columns than a tile": Case(
        (("half", (1, 3, 2500)),),
        _chain("div.Tensor(self=%x0, other=3.0)", "mul.Tensor(self=%s0, other=0.7)"),
    ),
    "soft cap": Case(
        (("half", (1, 3, 131)),),
        _chain("div.Tensor(self=%x0, other=3.0)", "tanh.default(self=%s0)", "mul.Tensor(self=%s1, other=3.0)"),
        exact=False,
    ),
    "gate of each row": Case(
        (("half", (11, 1)), ("half", (11, 48)), ("half", (11, 48))),
        _chain("sigmoid.default(self=%x0)", "mul.Tensor(self=%s0, other=%x1)", "add.Tensor(self=%x2, other=%s1)"),
        exact=False,
    ),
    "product and sum are rounded one by one": Case(
        (("float32", (4, 97)), ("float32", (4, 97)), ("float32", (97,))),
        _chain(
            "mul.Tensor(self=%x0, other=%x1)", "add.Tensor(self=%s0, other=%x2)", "rsub.Scalar(self=%s1, other=1.5)"
        ),
    ),
    "weights alone": Case(
        (("float32", (5,)), ("half", (1, 6, 5)), ("float32", (5,))),
        _chain(
            "exp.default(self=%x0)",
            "neg.default(self=%s0)",
            "to.dtype(self=%x1, dtype=float32)",
            "add.Tensor(self=%s2, other=%x2)",
            "softplus.default(self=%s3)",
            "mul.Tensor(self=%s1, other=%s4)",
        ),
        exact=False,
    ),
    "bent otherwise": Case(
        (("half", (3, 9)),),
        _chain("softplus.default(self=%x0, beta=0.5, threshold=1)", "mul.Tensor(self=%s0, other=2)"),
        exact=False,
    ),
    "numbers without dimensions": Case(
        (("float32", ()), ("half", (1, 3, 20)), ("float32", ())),
        _chain(
            "mul.Tensor(self=%x0, other=%x2)",
            "to.dtype(self=%s0, dtype=half)",
            "mul.Tensor(self=%x1, other=%s1)",
            "sub.Tensor(self=%s2, other=%x1)",
        ),
    ),
    "no dimensions at all": Case(
        (("float32", ()), ("float32", ())),
        _chain("mul.Tensor(self=%x0, other=%x1)", "add.Tensor(self=%s0, other=1.0)"),
    ),
    "sparse rows": Case(
        (("half", (1, 5, 80)), ("half", ())),
        _chain(
            "mean.dim(self=%x0, dim=[-1], keepdim=true)",
            "to.dtype(self=%x0, dtype=float32)",
            "mean.dim(self=%s1, dim=[2], keepdim=true)",
            "sub.Tensor(self=%s1, other=%s2)",
            "mul.Tensor(self=%s3, other=%s3)",
            "sum.dim_IntList(self=%s4, dim=[-1], keepdim=true)",
            "div.Tensor(self=%s5, other=80)",
            "sqrt.default(self=%s6)",
            "to.dtype(self=%s7, dtype=half)",
            "mul.Tensor(self=%s8, other=%x1)",
            "add.Tensor(self=%s0, other=%s9)",
            "sub.Tensor(self=%x0, other=%s10)",
            "relu.default(self=%s11)",
            'gelu.default(self=%s12, approximate="tanh")',
        ),
        exact=False,
    ),
    "sums of rows": Case(
        (("half", (2, 3, 33)),),
        _chain("abs.default(self=%x0)", "sum.dim_IntList(self=%s0, dim=[-1], keepdim=true)", "log.default(self=%s1)"),
        exact=False,
    ),
    "axes that some lack": Case(
        (("half", (3, 1, 5, 8)), ("half", (1, 4, 1, 8)), ("half", (5, 1)), ("half", (3, 1, 1, 1))),
        _chain("add.Tensor(self=%x0, other=%x1)", "mul.Tensor(self=%s0, other=%x2)", "sub.Tensor(self=%s1, other=%x3)"),
    ),
    "choices": Case(
        (("half", (6, 40)), ("half", (6, 40)), ("half", (6, 40))),
        "{" + _COMPARED + ", return %s5}",
    ),
    "masks": Case(
        (("bool", (6, 1)), ("half", (6, 13)), ("bool", (6, 13))),
        _chain(
            "logical_not.default(self=%x0)",
            "masked_fill.Scalar(self=%x1, mask=%s0, value=-inf)",
            "minimum.default(self=%x2, other=%s0)",
            "masked_fill.Scalar(self=%s1, mask=%s2, value=2.5)",
            "mul.Tensor(self=%s3, other=%x2)",
        ),
    ),
    "positions": Case(
        (("int64", (1, 30)), ("int32", (1, 1))),
        _chain(
            "add.Tensor(self=%x0, other=%x1)",
            "clamp.default(self=%s0, min=1)",
            "to.dtype(self=%s1, dtype=float32)",
            "log.default(self=%s2)",
            "clamp.default(self=%s3, min=0.5, max=3.0)",
            "to.dtype(self=%s4, dtype=half)",
        ),
        exact=False,
    ),
    "largest and smallest": Case(
        (("half", (3, 21)), ("half", (3, 21))),
        _chain(
            "maximum.default(self=%x0, other=%x1)",
            "minimum.default(self=%s0, other=%x0)",
            "clamp.default(self=%s1, min=-0.5, max=0.7)",
            "pow.Tensor_Scalar(self=%s2, exponent=2)",
            "eq.Tensor(self=%s3, other=%x0)",
            "where.self(condition=%s4, self=%x0, other=%s3)",
        ),
    ),
    "powers": Case(
        (("float32", (2, 50)),),
        _chain(
            "abs.default(self=%x0)",
            "add.Tensor(self=%s0, other=0.5)",
            "pow.Tensor_Scalar(self=%s1, exponent=-1)",
            "pow.Tensor_Scalar(self=%s2, exponent=0.5)",
            "rsqrt.default(self=%s3)",
            "pow.Tensor_Scalar(self=%s4, exponent=3)",
            "pow.Tensor_Scalar(self=%s5, exponent=-0.5)",
        ),
        exact=False,
    ),
    "waves": Case((("float32", (2, 50)),), _of("cos.default", "sin.default", "expm1.default"), exact=False),
    "curves": Case(
        (("half", (2, 50)),), _of("silu.default", "gelu.default", "exp.default", "log1p.default"), exact=False
    ),
}


def sample(case: Case, half: torch.dtype, device: torch.device) -> dict[str, Any]:
    """The arguments of one call. Operands are slices of wider tensors, so that they have gaps."""
    given: dict[str, Any] = {}
    for i, (name, shape) in enumerate(case.operands):
        dtype = half if name == "half" else getattr(torch, name)
        wide = (*shape[:-1], shape[-1] + 3) if shape else (1,)
        drawn = torch.randn(wide, generator=torch.Generator().manual_seed(i))
        value = (drawn * 20).to(dtype) if name.startswith("int") else drawn > 0 if name == "bool" else drawn.to(dtype)
        given[f"x{i}"] = (value[..., : shape[-1]] if shape else value[0]).to(device)
    return given | {"steps": steps_of(case, half)}


def node_of(case: Case, half: torch.dtype) -> tuple[Node, dict[str, TensorType]]:
    """The node, whose operands are named as its arguments are, and their types."""
    names = {name: str(half).removeprefix("torch.") if name == "half" else name for name, _ in case.operands}
    types = {f"x{i}": TensorType(names[name], shape) for i, (name, shape) in enumerate(case.operands)}  # type: ignore[arg-type]
    args: dict[str, Arg] = {name: Ref(name) for name in types} | {"steps": steps_of(case, half)}
    op = ops.lookup("precast.fused")
    assert op is not None
    made = apply_shape_rule(op, args, types)
    return Node(op.name, args, tuple(Value(f"y{i}", kind) for i, kind in enumerate(made))), types


def steps_of(case: Case, half: torch.dtype) -> Steps:
    """The steps, for this type of 16 bits, or for float32."""
    return parse_steps(case.steps.replace("dtype=half", f"dtype={str(half).removeprefix('torch.')}"))
