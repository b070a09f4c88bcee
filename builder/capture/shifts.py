"""What routed modules say of the tokens before a token, in ops that know where sequences begin."""

from __future__ import annotations

import torch

from precast.builder.capture.routing import current_trace


def delayed(x: torch.Tensor, by: int) -> torch.Tensor:
    """Each token's row of `x` [1, T, C] is that of the one `by` before it, zero before a sequence's first."""
    if by == 0:
        return x
    taps = torch.eye(1, by + 1, dtype=x.dtype).expand(x.shape[2], by + 1)
    return torch.ops.precast.causal_conv(x, taps, None, current_trace().cu_seqlens, activation="none")


def ids_before(ids: torch.Tensor, count: int) -> tuple[torch.Tensor, ...]:
    """Of `ids` [1, T], those of the tokens 1 to `count` before each, 0 before a sequence's first; float32, which has
    all that a vocabulary has."""
    taps = torch.eye(count, count + 1).flip(0)
    x = ids.to(torch.float32)[..., None].expand(-1, -1, count)
    found = torch.ops.precast.causal_conv(x, taps, None, current_trace().cu_seqlens, activation="none")
    return found.unbind(-1)
