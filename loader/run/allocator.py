"""How torch's allocator of GPU memory cuts its blocks: to the sizes that `precast.kernels.step_memory` counts."""

from __future__ import annotations

import os

import torch

VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""With these a user configures the allocator."""


def cut_blocks_to_size(device: torch.device) -> bool:
    """From now on give each tensor a block of its own size, rounded up to 512 bytes; whether that was set.

    By default, a tensor above 1 MiB that takes a free block keeps what it leaves of it, up to 1 MiB, so that the same
    step holds more or less, as it happens. Segments that can grow are cut to size (`expandable_segments`). The setting
    is the process's; where the user has made settings of the kind, they stay. PyTorch has no public function for it: a
    version without the one used here keeps its default.
    """
    if device.type != "cuda" or any(name in os.environ for name in VARIABLES):
        return False
    if not hasattr(torch._C, "_accelerator_setAllocatorSettings"):
        return False
    torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    return True
