"""The selective scan for speed in PyTorch: tiles of tokens side by side, so that a sequence of L tokens takes about
3 * sqrt(L) steps instead of L.

First every tile runs from a state of zero, which gives what it adds; then the states at the tiles' beginnings follow
one after the other; then every tile runs from its own beginning. All factors are exponentials of numbers up to 0.
"""

from __future__ import annotations

import math

import torch
from torch.nn import functional

from precast.kernels.selective_scan.limits import MIN_TILE
from precast.kernels.selective_scan.selective_scan import scan_channels
from precast.kernels.stateful.forms import forms
from precast.kernels.stateful.walks import together

# Tiles do the arithmetic twice. On a CPU that pays while a step costs more to start than to compute: measured on one
# core, up to states of about this many numbers.
_MAX_CPU_STATE = 4096


def _tile_size(tokens: int, state: torch.Tensor) -> int:
    if state.device.type == "cpu" and state.numel() > _MAX_CPU_STATE:
        return tokens
    return min(tokens, max(MIN_TILE, math.isqrt(tokens)))


def _in_tiles(
    value: torch.Tensor, dt: torch.Tensor, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`value`, `dt` [n, L, C], `a` [C, N], `b`, `c` [n, L, N], `state` [n, C, N]; (y [n, L, C], last state)."""
    tokens = value.shape[1]
    size = _tile_size(tokens, state)
    value, dt, b, c = (functional.pad(z, (0, 0, 0, -tokens % size)).unflatten(1, (-1, size)) for z in (value, dt, b, c))

    def advanced(h: torch.Tensor, i: int) -> torch.Tensor:
        """The tiles' states `h` [n, G, C, N] after their token i."""
        return torch.exp(a * dt[:, :, i, :, None]) * h + value[:, :, i, :, None] * b[:, :, i, None, :]

    h = state[:, None]
    if value.shape[1] > 1:
        added = torch.zeros_like(h).expand(-1, value.shape[1], -1, -1)
        for i in range(size):
            added = advanced(added, i)
        whole = dt.sum(2)
        begun = [state]
        for g in range(value.shape[1] - 1):
            begun.append(torch.exp(a * whole[:, g, :, None]) * begun[-1] + added[:, g])
        h = torch.stack(begun, 1)
    rows = []
    for i in range(size):
        h = advanced(h, i)
        rows.append(torch.matmul(h, c[:, :, i, :, None])[..., 0])
    return torch.stack(rows, 2).flatten(1, 2)[:, :tokens], h[:, -1]


selective_scan, stateful_selective_scan = forms("selective_scan", scan_channels, together, _in_tiles)
