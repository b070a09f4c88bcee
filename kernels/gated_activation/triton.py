"""The gate of a feed-forward layer in Triton: one launch reads both halves and writes their product."""

from __future__ import annotations

import triton
import triton.language as tl

from precast.kernels.triton_chain import wait_for_previous


@triton.jit
def activated(x, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    """silu, gelu or gelu_tanh of `x`, float32."""
    if KIND == "silu":
        y = x * tl.sigmoid(x)
    elif KIND == "gelu":
        y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    else:
        tl.static_assert(KIND == "gelu_tanh")
        # (1 + tanh(z)) / 2 = sigmoid(2 z)
        y = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    return y


@triton.jit
def gated_activation_kernel(  # type: ignore[no-untyped-def]
    y_ptr,
    x_ptr,
    inner,
    x_stride_o,
    x_stride_i,
    x_stride_f,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    KIND: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program a block of BLOCK elements of a row of the result, which has WIDTH."""
    blocks: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    row = tl.program_id(0) // blocks
    f = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    outer = (row // inner).to(tl.int64)
    within = (row % inner).to(tl.int64)
    x_ptr += outer * x_stride_o + within * x_stride_i
    wait_for_previous(PDL)

    gate = tl.load(x_ptr + f * x_stride_f, mask=f < WIDTH, other=0.0)
    value = tl.load(x_ptr + (WIDTH + f) * x_stride_f, mask=f < WIDTH, other=0.0)
    y = activated(gate.to(tl.float32), KIND) * value.to(tl.float32)
    tl.store(y_ptr + row.to(tl.int64) * WIDTH + f, y.to(gate.dtype), mask=f < WIDTH)
