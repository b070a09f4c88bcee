"""gated_linear by torch's product of some rows at once, and Triton's gate over it before the next rows come."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch

from precast.ir.graph import symbols
from precast.ir.graph.schema import Const, Dtype, Node, Ref, TensorType, Value
from precast.ir.memory.liveness import Operand
from precast.kernels import aten_into
from precast.kernels.calls import implements
from precast.kernels.dtypes import NAMES
from precast.kernels.gated_activation import launches
from precast.kernels.gated_linear.limits import MAX_ROWS_AT_ONCE
from precast.kernels.launch import Launched
from precast.kernels.use import Target, Use


@implements("gated_linear")
def gated_linear(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    kind: str,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """`out` [..., F], or new memory: the gated product of `input` [..., I] with `weight` [2F, I] and `bias` [2F]."""
    capability = torch.cuda.get_device_capability(input.device) if input.is_cuda else (0, 0)
    gate = _gate(kind, weight.shape[0], NAMES[input.dtype], Target("cuda", capability))
    return _gated(gate, input, weight, bias, out)


def gating_with(gate: Launched) -> Callable[..., torch.Tensor]:
    """`gated_linear` for the one use whose gate this is."""

    @implements("gated_linear")
    def gated_linear(
        input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See above."""
        return _gated(gate, input, weight, bias, out)

    return gated_linear


def _gated(
    gate: Launched, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor | None
) -> torch.Tensor:
    outputs, inputs = weight.shape
    result = input.new_empty(*input.shape[:-1], outputs // 2) if out is None else out
    rows, gated = input.reshape(-1, inputs), result.view(-1, outputs // 2)
    # As many in each part, so that none is left with a few rows, whose product takes hardly less time.
    num_parts = -(-len(rows) // MAX_ROWS_AT_ONCE)
    rows_at_once = -(-len(rows) // max(num_parts, 1))
    products = input.new_empty(rows_at_once, outputs)
    for begin in range(0, len(rows), max(rows_at_once, 1)):
        part, into = rows[begin : begin + rows_at_once], gated[begin : begin + rows_at_once]
        product = products[: len(part)]
        aten_into.linear(part, weight, bias, out=product)
        gate(x=product, out=into, sizes=[symbols.evaluate(size, {"T": len(part)}) for size in gate.expressions])
    return result


@cache
def _gate(kind: str, outputs: int, dtype: Dtype, target: Target) -> Launched:
    """The launch over rows of products in row-major order, whose number is T."""
    product, result = (TensorType(dtype, ("T", width)) for width in (outputs, outputs // 2))
    node = Node("precast.gated_activation", {"x": Ref("x"), "kind": Const(kind)}, (Value("y", result),))
    return Launched(launches.gated_activation(Use(node, {"x": Operand(product, is_contiguous=True)}, target)))
