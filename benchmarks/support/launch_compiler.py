"""Compiles what launches name into Triton's cache on disk, for processes that share the work."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from precast.kernels.dtypes import BY_NAME
from precast.kernels.named import named
from precast.kernels.records import Launch, Pointer, Stride


def compile_launch(launch: Launch, tensors: Mapping[str, torch.Tensor]) -> None:
    """`tensors` as the launch names them, whatever they hold; sizes are known."""

    def argument(arg: Any) -> Any:
        if isinstance(arg, Pointer):
            return tensors[arg.tensor].dtype if arg.dtype is None else BY_NAME[arg.dtype]
        return tensors[arg.tensor].stride(arg.axis) if isinstance(arg, Stride) else arg

    options = {"num_warps": launch.num_warps, "num_stages": launch.num_stages, "launch_pdl": launch.pdl}
    named(launch.kernel).warmup(*map(argument, launch.args), grid=(1,), **launch.constants, **options)
