"""Element types: torch's objects for the names that bundles use, and the type that an op computes in."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch

from precast.ir.graph.schema import Dtype

BY_NAME: Mapping[Dtype, torch.dtype] = MappingProxyType(
    {
        "bool": torch.bool,
        "int8": torch.int8,
        "uint8": torch.uint8,
        "int32": torch.int32,
        "int64": torch.int64,
        "float8_e4m3fn": torch.float8_e4m3fn,
        "float16": torch.float16,
        "bfloat16": torch.bfloat16,
        "float32": torch.float32,
        "float64": torch.float64,
    }
)

NAMES: Mapping[torch.dtype, Dtype] = MappingProxyType({dtype: name for name, dtype in BY_NAME.items()})

HALF = (torch.float16, torch.bfloat16)
FLOAT = (*HALF, torch.float32, torch.float64)


def widened(x: torch.Tensor) -> torch.Tensor:
    """`x` in the type that references compute in: float32, or float64 where `x` is float64."""
    return x if x.dtype == torch.float64 else x.float()
