"""rotary_tables@1: angle[t, r] = positions[t] * inv_freq[r] (or inv_freq[t, r]), in float32;
returns (cos(angle) * scale, sin(angle) * scale) rounded to `dtype`.

Tables are made from positions in each step and never stored: they would be hundreds of megabytes.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from precast.kernels.spec import ELEMENTWISE, Draw, OpSpec, Sample


def rotary_tables(
    positions: torch.Tensor, inv_freq: torch.Tensor, *, scale: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines [1, T, R] in `dtype` for absolute `positions` [1, T] int64.

    `inv_freq` is float32: [R], one set for all tokens, or [1, T, R], one for each.
    """
    angle = positions[..., None].float() * inv_freq
    return (angle.cos() * scale).to(dtype), (angle.sin() * scale).to(dtype)


def _samples(draw: Draw) -> Iterator[Sample]:
    positions = draw.of([[0, 1, 2, 0, 131071]], torch.int64)
    yield {
        "positions": positions,
        "inv_freq": draw.uniform(7, dtype=torch.float32),
        "scale": 1.0,
        "dtype": draw.dtype,
    }
    yield {
        "positions": positions,
        "inv_freq": draw.uniform(1, 5, 3, dtype=torch.float32),
        "scale": 1.19,
        "dtype": draw.dtype,
    }
    yield {
        "positions": positions[:, :0],
        "inv_freq": draw.uniform(4, dtype=torch.float32),
        "scale": 0.5,
        "dtype": draw.dtype,
    }


# `inv_freq` has R alone, or all of 1 T R.
ROTARY_TABLES = OpSpec(
    name="precast.rotary_tables",
    axes={"positions": "1 T", "inv_freq": "... R"},
    results={"cos": "1 T R", "sin": "1 T R"},
    dtypes={"positions": (torch.int64,), "inv_freq": (torch.float32,)},
    reference=rotary_tables,
    samples=_samples,
    # Argument reduction of large angles differs between devices in the last bits of float32.
    tolerances={**ELEMENTWISE, torch.float32: ELEMENTWISE[torch.float32]._replace(atol=1e-5)},
)
