"""rope_frequencies@1: f[t, r], the inverse frequencies of each token, for rope types whose frequencies depend on the
length of the token's sequence.

- `longrope`: f[t] = long where lengths[t] > original_length, else short.
- `dynamic` (NTK): f[t] = short where lengths[t] <= original_length, else with dim = 2R and L = lengths[t]
      base' = base * (factor * L / original_length - (factor - 1)) ^ (dim / (dim - 2))
      f[t, r] = 1 / base' ^ (2r / dim)

Computed in float32.
"""

from __future__ import annotations

import torch

from precast.kernels.spec import ELEMENTWISE, OpSpec


def rope_frequencies(
    lengths: torch.Tensor,
    short: torch.Tensor,
    long: torch.Tensor | None,
    *,
    kind: str,
    original_length: int,
    factor: float,
    base: float,
) -> torch.Tensor:
    """Inverse frequencies [1, T, R] float32 for tokens in sequences of `lengths` [1, T] int64 tokens.

    `short` and `long` [R] float32 hold those of sequences up to `original_length` tokens, and (longrope) beyond it.
    Raises ValueError for another kind, for longrope without `long`, and for dynamic with fewer than two pairs.
    """
    beyond = (lengths > original_length)[..., None]
    if kind == "dynamic":
        return torch.where(beyond, _ntk(lengths, short, original_length, factor, base), short)
    if kind != "longrope":
        raise ValueError(f"kind: expected longrope or dynamic, found {kind!r}")
    if long is None:
        raise ValueError("long: longrope takes two sets of frequencies, found one")
    return torch.where(beyond, long, short)


def _ntk(lengths: torch.Tensor, short: torch.Tensor, original_length: int, factor: float, base: float) -> torch.Tensor:
    dim = 2 * short.shape[0]
    if dim <= 2:
        raise ValueError(f"short: dynamic takes two frequencies or more, found {short.shape[0]}")
    # Shorter sequences are replaced by the caller; the floor keeps the power's base positive for them.
    length = lengths.clamp(min=original_length)
    growth = factor * length / original_length - (factor - 1)
    bases = base * growth ** (dim / (dim - 2))
    exponents = torch.arange(0, dim, 2, dtype=torch.int64, device=short.device).float() / dim
    return 1.0 / bases[..., None] ** exponents


ROPE_FREQUENCIES = OpSpec(
    name="precast.rope_frequencies",
    axes={"lengths": "1 T", "short": "R", "long": "R"},
    results={"f": "1 T R"},
    dtypes={"lengths": (torch.int64,), "short": (torch.float32,), "long": (torch.float32,)},
    reference=rope_frequencies,
    tolerances=ELEMENTWISE,
)
