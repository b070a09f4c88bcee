"""Tensors with the same random numbers on every device, of which samples are made."""

from __future__ import annotations

from typing import Any

import torch

Sample = dict[str, Any]
"""Arguments of one call, by the names of the signature."""


class Draw:
    """Draws the tensors of samples: the same numbers on every device, floats in the sample's `dtype`."""

    def __init__(self, dtype: torch.dtype, device: torch.device, seed: int = 0) -> None:
        self.dtype = dtype
        self.device = device
        self._generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int, scale: float = 1.0, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Normally distributed floats with standard deviation `scale`."""
        return self.to(torch.randn(shape, generator=self._generator) * scale, dtype or self.dtype)

    def uniform(
        self, *shape: int, low: float = 0.0, high: float = 1.0, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """Floats in `low..high`."""
        return self.to(torch.rand(shape, generator=self._generator) * (high - low) + low, dtype or self.dtype)

    def integers(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        """Integers in `low..high`, `high` left out."""
        return self.to(torch.randint(low, high, shape, generator=self._generator), dtype)

    def permutation(self, count: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        """The integers below `count` in random order."""
        return self.to(torch.randperm(count, generator=self._generator), dtype)

    def of(self, values: object, dtype: torch.dtype) -> torch.Tensor:
        """These values, on the sample's device."""
        return self.to(torch.tensor(values), dtype)

    def to(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """`x` on the sample's device."""
        return x.to(device=self.device, dtype=dtype)
