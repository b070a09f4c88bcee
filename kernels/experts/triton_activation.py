"""What stands between the two products of an expert, in Triton: `precast.kernels.experts.experts.activate`, float32."""

# To pyright a kernel that is called by another returns nothing.
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

_SQRT_HALF = tl.constexpr(0.7071067811865476)
_SQRT_8_OVER_PI = tl.constexpr(1.5957691216057308)


@triton.jit
def sigmoid(a):  # type: ignore[no-untyped-def]
    """1 / (1 + exp(-a))."""
    return 1.0 / (1.0 + tl.exp(-a))


@triton.jit
def activated(a, ACTIVATION: tl.constexpr, ALPHA: tl.constexpr):  # type: ignore[no-untyped-def]
    """act(a); NaN stays NaN. `ALPHA` is silu's, for which its sigmoid takes `ALPHA * a`."""
    if ACTIVATION == "silu":
        a *= sigmoid(a * ALPHA)
    elif ACTIVATION == "gelu":
        a *= 0.5 * (1.0 + tl.erf(a * _SQRT_HALF))
    elif ACTIVATION == "gelu_tanh":
        # 0.5 * (1 + tanh(u)) is sigmoid(2 * u).
        a *= sigmoid((a + 0.044715 * a * a * a) * _SQRT_8_OVER_PI)
    else:
        a = tl.where(a < 0.0, 0.0, a)
        if ACTIVATION == "relu2":
            a *= a
    return a


@triton.jit
def gated(gate, value, ACTIVATION: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, OFFSET: tl.constexpr):  # type: ignore[no-untyped-def]
    """act(clamp(gate, max=LIMIT)) * (clamp(value, -LIMIT, LIMIT) + OFFSET); a `LIMIT` of 0 is none."""
    if LIMIT > 0.0:
        gate = tl.where(gate > LIMIT, LIMIT, gate)
        value = tl.where(value > LIMIT, LIMIT, tl.where(value < -LIMIT, -LIMIT, value))
    return activated(gate, ACTIVATION, ALPHA) * (value + OFFSET)
