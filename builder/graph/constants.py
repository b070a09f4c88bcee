"""Constants as bytes, row-major and little endian, and back."""

from __future__ import annotations

import torch

from precast.ir.graph.schema import Value


def tensor_bytes(value: torch.Tensor) -> bytes:
    """The tensor's elements."""
    return bytes(value.contiguous().reshape(-1).view(torch.uint8).numpy()) if value.numel() else b""


def tensor_from_bytes(value: Value, data: bytes) -> torch.Tensor:
    """The tensor of `value`'s type, whose sizes are numbers, with these elements."""
    shape = [size for size in value.type.shape if isinstance(size, int)]
    flat = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    return flat.view(getattr(torch, value.type.dtype)).reshape(shape)
