"""Chunks of tokens: what decays from where to where in a chunk, and the scan over chunks that linear attention, state
space scans and the delta rule share.

Decays are logarithms and only ever summed, never subtracted: the exponential of a sum of numbers up to 0 can't
overflow, and no difference of two large sums loses the small one between them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn import functional

from precast.kernels.linear_attention.limits import CHUNK, ROWWISE_CHUNK


def chunk_size(tokens: int, decay: torch.Tensor) -> int:
    """Tokens of a chunk for sequences of `tokens` and `decay` [..., 1 or D]."""
    return min(tokens, CHUNK if decay.shape[-1] == 1 else ROWWISE_CHUNK)


def split(x: torch.Tensor, size: int) -> torch.Tensor:
    """`x` [n, L, H, F] as [n, H, G, size, F], with zeros after the last token."""
    padded = functional.pad(x, (0, 0, 0, 0, 0, -x.shape[1] % size))
    return padded.unflatten(1, (-1, size)).permute(0, 3, 1, 2, 4).contiguous()


def join(x: torch.Tensor, tokens: int) -> torch.Tensor:
    """[n, H, G, size, F] as [n, L, H, F], without what `split` added."""
    return x.permute(0, 2, 3, 1, 4).flatten(1, 2)[:, :tokens]


class Reach(NamedTuple):
    """Decay factors of chunks: `arriving` [..., size, 1 or D] from before the chunk to after each token, `leaving`
    from after each token to the chunk's end, `whole` [..., 1 or D, 1] over all of it."""

    arriving: torch.Tensor
    leaving: torch.Tensor
    whole: torch.Tensor


def reach(decay: torch.Tensor) -> Reach:
    """The factors of chunks with `decay` [..., size, 1 or D]."""
    arriving = decay.cumsum(-2).exp()
    later = functional.pad(decay[..., 1:, :], (0, 0, 0, 1))
    leaving = later.flip(-2).cumsum(-2).flip(-2).exp()
    return Reach(arriving, leaving, arriving[..., -1, :, None])


def products(rows: tuple[torch.Tensor, ...], k: torch.Tensor, decay: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """For each of `rows` [..., size, D]: its product with each key of `k` up to its own, decayed from key to row.

    Lower triangles [..., size, size], zero above the diagonal; `decay` [..., size, 1 or D].
    """
    if decay.shape[-1] == 1:
        factors = _pairwise(decay[..., 0])
        return tuple(torch.matmul(row, k.transpose(-1, -2)) * factors for row in rows)
    size = k.shape[-2]
    found = tuple(k.new_zeros((*k.shape[:-1], size)) for _ in rows)
    # gone[..., i, :] is the decay from key i to row i + lag.
    gone = torch.zeros_like(k)
    for lag in range(size):
        if lag > 0:
            gone = gone[..., 1:, :] + decay[..., 1 : size - lag + 1, :]
        keys = k[..., : size - lag, :] * gone.exp()
        for matrix, row in zip(found, rows, strict=True):
            matrix.diagonal(-lag, -2, -1).copy_((row[..., lag:, :] * keys).sum(-1))
    return found


def _pairwise(decay: torch.Tensor) -> torch.Tensor:
    """[..., size, size]: the decay factor from token j to token i at [i, j], zero where j comes after i."""
    size = decay.shape[-1]
    ones = torch.ones(size, size, dtype=torch.bool, device=decay.device)
    steps = decay[..., None].expand(*decay.shape, size).masked_fill(~ones.tril(-1), 0)
    return steps.cumsum(-2).exp().masked_fill(ones.triu(1), 0)


def scan(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Linear attention over whole sequences: `q`, `k` [n, L, H, D], `v` [n, L, H, E], `decay` [n, L, H, 1 or D].

    `state` [n, H, D, E]; (y [n, L, H, E], state after the last token). Zeros after a sequence's end change nothing.
    """
    tokens = q.shape[1]
    size = chunk_size(tokens, decay)
    q, k, v, decay = (split(x, size) for x in (q, k, v, decay))
    (inner,) = products((q,), k, decay)
    y = torch.matmul(inner, v)
    factors = reach(decay)
    q, k = q * factors.arriving, (k * factors.leaving).transpose(-1, -2)
    for g in range(q.shape[2]):
        y[:, :, g] += torch.matmul(q[:, :, g], state)
        state = state * factors.whole[:, :, g] + torch.matmul(k[:, :, g], v[:, :, g])
    return join(y, tokens), state
