"""rotary_write_kv@1: q' = rotary(norm(q, q_weight)); write_kv(rotary(norm(k, k_weight)), v, by the
scales that there are); returns q'.

The norm is `rms_norm` over each head, with or without a weight, if `eps` is given, and else none. What each of these
ops returns is rounded to its argument's dtype, as where they stand alone.
"""

from __future__ import annotations

import torch

from precast.kernels.attention.write_kv import write_kv
from precast.kernels.dtypes import FLOAT
from precast.kernels.rms_norm.rms_norm import rms_norm
from precast.kernels.rotary.rotary import rotary
from precast.kernels.spec import TWICE, OpSpec
from precast.kernels.storage import STORED


def rotary_write_kv(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    interleaved: bool,
    eps: float | None = None,
    offset: float = 0.0,
    cast_before_scale: bool = False,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """`q` [1, T, H, D], normed and turned by `cos`, `sin` [1, T, R]; of its dtype, new memory.

    `k` [1, T, K, D] likewise and `v` [1, T, K, Dv] are written into `k_cache` [P, S, K, D] and `v_cache` [P, S, K, Dv],
    to `slot_mapping` [T] int64, divided by `k_scale`, `v_scale` [1] float32, as `write_kv` does. `q_weight` and
    `k_weight` are [D], of norms only.
    """

    def turned(x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        if eps is not None:
            x = rms_norm(x, weight, eps=eps, offset=offset, cast_before_scale=cast_before_scale)
        return rotary(x, cos, sin, interleaved=interleaved)

    write_kv(turned(k, k_weight), v, k_cache, v_cache, slot_mapping, k_scale=k_scale, v_scale=v_scale)
    return turned(q, q_weight)


ROTARY_WRITE_KV = OpSpec(
    name="precast.rotary_write_kv",
    axes={
        "q": "1 T H D", "k": "1 T K D", "v": "1 T K E", "cos": "1 T R", "sin": "1 T R", "q_weight": "D",
        "k_weight": "D", "k_cache": "P S K D", "v_cache": "P S K E", "slot_mapping": "T", "k_scale": "1",
        "v_scale": "1",
    },
    results={"y": "1 T H D"},
    dtypes={
        **dict.fromkeys(("q", "k", "v", "cos", "sin", "q_weight", "k_weight"), FLOAT),
        "k_cache": STORED, "v_cache": STORED, "slot_mapping": (torch.int64,), "k_scale": (torch.float32,),
        "v_scale": (torch.float32,),
    },
    reference=rotary_write_kv,
    tolerances=TWICE,
)  # fmt: skip
