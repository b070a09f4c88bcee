"""How inputs of linear layers and of experts are rounded, as those who publish quantised checkpoints define it: in
plain PyTorch, and in float32."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

Rounding = Callable[[torch.Tensor], torch.Tensor]
"""Of an input [..., I]."""
FLOAT8_MAX = 448.0


def float8(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """compressed-tensors' `quantize` and `dequantize` (`quantization/lifecycle/forward.py`) for numbers of 8 bits."""
    return (x / scale).clamp(-FLOAT8_MAX, FLOAT8_MAX).to(torch.float8_e4m3fn).float() * scale


def float8_tokens(x: torch.Tensor, bound: float = math.inf) -> torch.Tensor:
    """compressed-tensors' `calculate_qparams` for tokens: amax over half of the range of float8_e4m3fn. With a bound,
    FBGEMM's `quantize_fp8_per_row`: amax is cut to `scale_ub`."""
    return float8(x, x.abs().amax(-1, keepdim=True).clamp(max=bound) / FLOAT8_MAX)


def float8_groups(x: torch.Tensor) -> torch.Tensor:
    """DeepSeek-V3's `act_quant` (`inference/kernel.py`): amax / 448 of each 128 neighbours of a row."""
    return torch.cat([float8_tokens(group) for group in x.split(128, -1)], -1)


def float8_groups_e8m0(x: torch.Tensor) -> torch.Tensor:
    """DeepSeek-V3.1's `act_quant` with `round_scale`: the next power of two. Here by logarithms, in float64."""

    def rounded(group: torch.Tensor) -> torch.Tensor:
        most = group.abs().amax(-1, keepdim=True).double()
        return float8(group, torch.exp2((most / FLOAT8_MAX).log2().ceil()).float())

    return torch.cat([rounded(group) for group in x.split(128, -1)], -1)


_ABOVE, _BELOW = 448 + 2.0**-15, 448 - 2.0**-15
"""The float32 numbers next to 448."""
POWERS_OF_TWO = [
    (448.0, 1.0), (_ABOVE, 2.0), (_BELOW, 1.0), (224.0, 0.5), (1.0, 2.0**-8), (6.0, 2.0**-6),
    (448 * 2.0**100, 2.0**100), (448 * 2.0**-100, 2.0**-100), (_ABOVE * 2.0**-100, 2.0**-99),
    ((2 - 2.0**-23) * 2.0**127, 2.0**120),
    (448 * 2.0**-126, 2.0**-126), (_ABOVE * 2.0**-126, 2.0**-125), (_BELOW * 2.0**-126, 2.0**-126),
    (2.0**-140, 2.0**-126), (0.0, 0.0), (math.inf, math.inf), (math.nan, math.nan),
]  # fmt: skip
"""The largest magnitude of a group, a float32 number, and the scale that is a power of two."""


def int8_tokens(x: torch.Tensor) -> torch.Tensor:
    """vLLM's `dynamic_scaled_int8_quant` (`csrc/quantization/w8a8/int8/scaled_quant.cu`): amax / 127 of each token, to
    the nearest integer, ties to even."""
    scale = x.abs().amax(-1, keepdim=True) / 127
    return (x / scale).round().clamp(-128, 127) * scale


def in_parts(rounding: Rounding, count: int) -> Rounding:
    """Of an input that so many ranks have parts of: each rounds its own."""
    return lambda x: torch.cat([rounding(part) for part in x.chunk(count, -1)], -1)


def round_inputs(model: Any, which: str, rounding: Callable[[str], Rounding]) -> None:
    """Let the linear layers whose weights `which` describes round their inputs; `rounding`: by the layer's name."""
    for name, layer in model.named_modules():
        if isinstance(layer, torch.nn.Linear) and re.fullmatch(which, f"{name}.weight"):
            layer.register_forward_pre_hook(functools.partial(_rounded, rounding(name)))


def _rounded(rounding: Rounding, layer: torch.nn.Module, inputs: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
    return (rounding(inputs[0].float()),)


def round_experts(model: Any, rounding: Rounding) -> None:
    """Let the experts of a model of transformers, which multiply by `linear` in turn, round the rows before both of
    their products."""
    model.set_experts_implementation("eager")
    for name, layer in model.named_modules():
        if name.endswith(".experts"):
            layer.forward = functools.partial(_with_rounded_rows, rounding, layer.forward)


def _with_rounded_rows(rounding: Rounding, forward: Callable[..., torch.Tensor], *args: Any) -> torch.Tensor:
    with _RoundedProducts(rounding):
        return forward(*args)


class _RoundedProducts(TorchFunctionMode):
    """In which `linear` rounds its input."""

    def __init__(self, rounding: Rounding) -> None:
        super().__init__()
        self._rounding = rounding

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is functional.linear:
            args = (self._rounding(args[0].float()), *args[1:])
        return func(*args, **(kwargs or {}))


def static(scales: Mapping[str, torch.Tensor], suffix: str) -> Callable[[str], Rounding]:
    """By the scale that the checkpoint has beside the weight of each layer."""
    return lambda name: functools.partial(float8, scale=scales[name + suffix])
