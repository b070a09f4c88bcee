"""The cache plans of published shapes, as the builder makes them, and the memory that serving leaves for caches."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

from precast.ir.artifact import Bundle
from precast.ir.graph.schema import CachePlan
from support import shapes

GPU_BYTES = 141 * 10**9
"""Of an H200."""
USED_SHARE = 0.9
"""Of a GPU's memory: weights and caches. The rest is for activations, kernels and graphs."""


@dataclasses.dataclass(frozen=True)
class Serving:
    """`weight_bytes` on `num_gpus` GPUs, for sequences of up to `max_length` tokens.

    Several GPUs split the heads and states of each page, so their memory counts as one. Latents can't be split: for
    them `num_gpus` is 1, and the weights are one GPU's share of them.
    """

    num_gpus: int
    weight_bytes: int
    max_length: int

    @property
    def cache_bytes(self) -> int:
        return round(USED_SHARE * self.num_gpus * GPU_BYTES) - self.weight_bytes


SERVED: dict[str, Serving] = {
    # bytes of the published checkpoints: bfloat16, GPT-OSS in MXFP4, DeepSeek-V3 in FP8 over 8 GPUs
    "gemma-3-27b": Serving(1, 54 * 10**9, 131_072),
    "gemma-4-26b-a4b": Serving(1, 52 * 10**9, 131_072),
    "gpt-oss-120b": Serving(1, 65 * 10**9, 131_072),
    "qwen3-next-80b-a3b": Serving(2, 163 * 10**9, 131_072),
    "nemotron-h-56b": Serving(2, 112 * 10**9, 8_192),
    "deepseek-v3": Serving(1, 689 * 10**9 // 8, 131_072),
}

LONG_SEQUENCES = "gemma-3-12b"
"""The shape of `support/long_sequences.py`, whose memory is given there."""

_BUILD = "import sys, precast; precast.build(sys.argv[1], sys.argv[2])"


def plan_of(shape: str, folder: Path) -> CachePlan:
    """The plan in the shape's bundle, which is built in `folder` (a process of its own) unless it is there."""
    path = folder / f"{shape}.bundle"
    if not path.exists():
        config = shapes.write_config(shape, folder / shape)
        subprocess.run([sys.executable, "-c", _BUILD, str(config), str(path)], check=True)
    return Bundle.open(path).graph.caches
