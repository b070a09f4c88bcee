"""quantised_embedding@1: y[..., d] = w[ids[...], d] * scale, w the values of a table in few bits, rounded to `dtype`.

What w is, `docs/format/v1.md` says at `dequantise`: the same parts and the same formulas, in float32. The scale is
first rounded to `dtype`. So it is `embedding` of a table that is dequantised while it loads, bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from precast.kernels.dequantise.dequantise import Quantised, dequantise
from precast.kernels.embedding.embedding import scaled
from precast.kernels.spec import ELEMENTWISE, OpSpec

STORED = (torch.float8_e4m3fn,)
SCALES = (torch.float32, torch.bfloat16, torch.float16)


def quantised_embedding(
    ids: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    *,
    format: str,
    block: Sequence[int],
    dtype: torch.dtype,
    scale: float = 1.0,
) -> torch.Tensor:
    """The rows of `weight` [V, D] that `ids` [...] (int64 or int32) name, dequantised, times `scale`; [..., D] in
    `dtype`. `block` are the rows and columns that share one of the `scales`. Other rows are not read.

    An id outside of `0..V-1` raises IndexError on a CPU and stops the program on a GPU.
    """
    named = ids.flatten()
    # Few ops of torch's take float8: the bytes are looked up.
    rows = torch.nn.functional.embedding(named, weight.view(torch.uint8)).view(weight.dtype)
    of_rows = scales.index_select(0, named // block[0])
    values = dequantise(Quantised(rows, of_rows, format=format, block=(1, block[1]))).to(dtype)
    return scaled(values, scale).reshape(*ids.shape, weight.shape[1])


QUANTISED_EMBEDDING = OpSpec(
    name="precast.quantised_embedding",
    axes={"ids": "...", "weight": "V D", "scales": "*"},
    results={"y": "... D"},
    dtypes={"ids": (torch.int64, torch.int32), "weight": STORED, "scales": SCALES},
    reference=quantised_embedding,
    tolerances=ELEMENTWISE,
)
