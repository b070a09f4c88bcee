"""all_reduce_residual_rms_norm@1: s = residual + all_reduce(x), rounded after each sum; y = rms_norm(s, weight);
returns (y, s).

What stands between two layers of a model that ranks share: one launch, and one wait for the other ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from precast.kernels.collectives.collectives import all_reduce
from precast.kernels.collectives.group import Group, Norm, NormsSums
from precast.kernels.dtypes import FLOAT
from precast.kernels.rms_norm.residual_rms_norm import residual_rms_norm
from precast.kernels.spec import TWICE, OpSpec


def all_reduce_residual_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    *,
    eps: float,
    offset: float = 0.0,
    cast_before_scale: bool,
    group: Group | str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The norm of `residual` plus the ranks' sum of `x` [..., D], and that sum; of `x`'s shape and dtype."""
    total = all_reduce(x, group=group)
    return residual_rms_norm(total, residual, weight, eps=eps, offset=offset, cast_before_scale=cast_before_scale)


def all_reduce_residual_rms_norm_into(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    *,
    eps: float,
    offset: float = 0.0,
    cast_before_scale: bool,
    group: Group | str,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `all_reduce_residual_rms_norm`, into `out`: at once if the group can."""
    norm = Norm(eps, offset, cast_before_scale)
    out = (x.new_empty(x.shape), x.new_empty(x.shape)) if out is None else out
    if isinstance(group, NormsSums) and group.all_reduce_norm(*out, x, residual, weight, norm):
        return out
    normed = _residual_rms_norm(x.device)
    normed(x=all_reduce(x, group=group), residual=residual, weight=weight, **norm._asdict(), out=out)
    return out


@cache
def _residual_rms_norm(device: torch.device) -> Callable[..., Any]:
    """`precast.residual_rms_norm` by Triton."""
    from precast.kernels import registry  # which imports the modules of all ops

    return registry.resolve("precast.residual_rms_norm", 1, device)


ALL_REDUCE_RESIDUAL_RMS_NORM = OpSpec(
    name="precast.all_reduce_residual_rms_norm",
    axes={"x": "... D", "residual": "... D", "weight": "D"},
    results={"y": "... D", "s": "... D"},
    dtypes={"x": FLOAT, "residual": FLOAT, "weight": FLOAT},
    reference=all_reduce_residual_rms_norm,
    tolerances=TWICE,
)
