"""What the definition of `precast.sample` computes for one logit, in Triton and in the same roundings: x, its weight,
its noise. exp, log and log1p are those of CUDA's libdevice, as PyTorch's on a GPU are: `tl.exp` is another.
"""

# To pyright libdevice's functions are other types than kernels, and triton has no knobs.
# pyright: reportAssignmentType=false, reportAttributeAccessIssue=false

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import libdevice

# Both are finite float32: the largest, and the largest below 1.
_LARGEST = tl.constexpr(3.4028234663852886e38)
_BELOW_ONE = tl.constexpr(1.0 - 2.0**-24)

INFINITE = tl.constexpr(0x7F800000)
"""The magnitude of minus infinity."""

if triton.knobs.runtime.interpret:
    # The interpreter has no libdevice, and numpy's functions for `tl.exp` and `tl.log`.
    @triton.jit
    def exp(x):  # type: ignore[no-untyped-def]
        """The exponential."""
        return tl.exp(x)

    @triton.jit
    def log(x):  # type: ignore[no-untyped-def]
        """The natural logarithm."""
        return tl.log(x)

    @triton.jit
    def log1p(x):  # type: ignore[no-untyped-def]
        """log(1 + x) for x above -1 that isn't 0, by way of float64: the quotient mends what the sum rounded."""
        x = x.to(tl.float64)
        total = 1.0 + x
        return (tl.log(total) * (x / (total - 1.0))).to(tl.float32)

else:
    exp, log, log1p = libdevice.exp, libdevice.log, libdevice.log1p


@triton.jit
def finite(logit):  # type: ignore[no-untyped-def]
    """The float32 of a logit, at most the largest finite one."""
    return tl.minimum(logit.to(tl.float32), _LARGEST)


@triton.jit
def top_of(largest):  # type: ignore[no-untyped-def]
    """What is subtracted from all logits of a row: its largest, within the finite numbers."""
    return tl.maximum(finite(largest), -_LARGEST)


@triton.jit
def scaled(logit, top, temperature):  # type: ignore[no-untyped-def]
    """x of a logit: at most 0, and minus infinity for minus infinity. The division is correctly rounded."""
    return tl.math.div_rn(finite(logit) - top, temperature)


@triton.jit
def magnitude(x):  # type: ignore[no-untyped-def]
    """The bits of -x as int32, for x of at most 0: the smaller the larger x is, equal for equals."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def weight(x):  # type: ignore[no-untyped-def]
    """exp(x) in units of 2^-40, rounded to even, int64; exact in float32, whose steps are 1 from 2^23 on."""
    units = exp(x) * 1099511627776.0
    return tl.where(units < 8388608.0, (units + 8388608.0) - 8388608.0, units).to(tl.int64)


@triton.jit
def logit_of(x, top, temperature):  # type: ignore[no-untyped-def]
    """A logit that every token has at least of which `scaled` gives `x` or more, whatever is rounded here and there."""
    step = x * temperature * 1.000001 - temperature * 1e-37
    return top + step - (tl.abs(top) + tl.abs(step)) * 1e-6


@triton.jit
def _mixed(x):  # type: ignore[no-untyped-def]
    """`precast.kernels.sampling.noise._mix_`, for uint32."""
    x ^= x >> 16
    x *= 0x21F0AAAD
    x ^= x >> 15
    x *= 0x735A2D97
    x ^= x >> 15
    return x


@triton.jit
def _half(x, SHIFT: tl.constexpr):  # type: ignore[no-untyped-def]
    return ((x >> SHIFT) & 0xFFFFFFFF).to(tl.uint32)


@triton.jit
def keys(seed, step):  # type: ignore[no-untyped-def]
    """The two words of a row, uint32, from its seed and step, int64."""
    first = _mixed(_half(seed, 0) ^ 0x9E3779B9)
    second = _mixed(_half(seed, 0) + 0x85EBCA6B)
    first = _mixed(first ^ _half(seed, 32))
    second = _mixed(second + _half(seed, 32))
    first = _mixed(first ^ _half(step, 0))
    second = _mixed(second + _half(step, 0))
    first = _mixed(first ^ _half(step, 32))
    second = _mixed(second + _half(step, 32))
    return first, second


@triton.jit
def uniform(first, second, index):  # type: ignore[no-untyped-def]
    """Uniform float32 above 0 and below 1, of tokens `index` of a row with these words."""
    word = _mixed(_mixed(index.to(tl.uint32) ^ first) ^ second)
    return tl.minimum((word.to(tl.float32) + 0.5) * 2.3283064365386963e-10, _BELOW_ONE)


@triton.jit
def gumbel(uniform):  # type: ignore[no-untyped-def]
    """Gumbel noise, float32, of uniform numbers."""
    return -log(-log1p(-uniform))
