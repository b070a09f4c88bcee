"""What the latent attention ops have in common: the keys and values of each head, made from what all heads share.

    k[j, h] = (W[h, :Dn] @ latent[j], k_rope[j])
    v[j, h] = W[h, Dn:] @ latent[j]                             W = weight as [H, Dn + Dv, C]

A query head has a key head of its own, so that attention is that of `precast.kernels.attention.attend` with H key
heads. The rope part of a key is the same for all heads.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class LatentScoring(NamedTuple):
    """How keys are scored, the same for all sequences of a call."""

    scale: float
    window: int | None = None


class Sizes(NamedTuple):
    """The sizes of a call. A head's key has `nope + rope` elements, a token's cache `latent + rope`."""

    heads: int
    nope: int
    rope: int
    latent: int
    value: int


def sizes_of(q: torch.Tensor, weight: torch.Tensor, rope: int, value_size: int) -> Sizes:
    """From `q` [1, T, H, Dn + Dr] and `weight` [H * (Dn + Dv), C].

    Raises ValueError for a weight that doesn't fit the heads.
    """
    heads, nope, latent = q.shape[2], q.shape[3] - rope, weight.shape[1]
    if nope < 0 or weight.shape[0] != heads * (nope + value_size):
        raise ValueError(
            f"weight: expected {heads} * ({nope} + {value_size}) rows, for heads of {q.shape[3]} of which {rope} are "
            f"shared, and values of {value_size}; found {weight.shape[0]}"
        )
    return Sizes(heads, nope, rope, latent, value_size)


def split(weight: torch.Tensor, sizes: Sizes) -> tuple[torch.Tensor, torch.Tensor]:
    """The parts of `weight` that make keys [H, Dn, C] and values [H, Dv, C], as views."""
    heads = weight.view(sizes.heads, sizes.nope + sizes.value, sizes.latent)
    return heads[:, : sizes.nope], heads[:, sizes.nope :]


def expand(
    latent: torch.Tensor, k_rope: torch.Tensor, weight: torch.Tensor, sizes: Sizes
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys [..., H, Dn + Dr] and values [..., H, Dv] of `latent` [..., C] and `k_rope` [..., Dr], all of one dtype."""
    both = torch.nn.functional.linear(latent, weight)
    both = both.view(*latent.shape[:-1], sizes.heads, sizes.nope + sizes.value)
    shared = k_rope[..., None, :].expand(*k_rope.shape[:-1], sizes.heads, sizes.rope)
    return torch.cat((both[..., : sizes.nope], shared), dim=-1), both[..., sizes.nope :]
