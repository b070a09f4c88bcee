"""What the step sizes of state space scans and selective scans hold (`precast.kernels.state_space_scan.steps`)."""

from __future__ import annotations

from precast.ir.graph.schema import Expr
from precast.ir.graph.symbols import add, mul
from precast.kernels.use import Use, copied, numbers, wide


def step_sizes(use: Use) -> Expr:
    """The steps before and after one of the operations that make them; the bias in their type."""
    steps = mul(2 * wide(use.operands["x"]), numbers(use.operands["dt"]))
    if not use.has("dt_bias"):
        return steps
    bias = use.operands["dt_bias"]
    return add(steps, mul(copied(bias), numbers(bias)))
