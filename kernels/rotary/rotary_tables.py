"""rotary_tables@1: angle[t, r] = positions[t] * inv_freq[r] (or inv_freq[t, r]), in float32;
returns (cos(angle) * scale, sin(angle) * scale) rounded to `dtype`.

Tables are made from positions in each step and never stored: they would be hundreds of megabytes.
"""

from __future__ import annotations

import torch

from precast.kernels.spec import ELEMENTWISE, OpSpec


def rotary_tables(
    positions: torch.Tensor, inv_freq: torch.Tensor, *, scale: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines [1, T, R] in `dtype` for absolute `positions` [1, T] int64.

    `inv_freq` is float32: [R], one set for all tokens, or [1, T, R], one for each.
    """
    angle = positions[..., None].float() * inv_freq
    return (angle.cos() * scale).to(dtype), (angle.sin() * scale).to(dtype)


# `inv_freq` has R alone, or all of 1 T R.
ROTARY_TABLES = OpSpec(
    name="precast.rotary_tables",
    axes={"positions": "1 T", "inv_freq": "... R"},
    results={"cos": "1 T R", "sin": "1 T R"},
    dtypes={"positions": (torch.int64,), "inv_freq": (torch.float32,)},
    reference=rotary_tables,
    # Argument reduction of large angles differs between devices in the last bits of float32.
    tolerances={**ELEMENTWISE, torch.float32: ELEMENTWISE[torch.float32]._replace(atol=1e-5)},
)
