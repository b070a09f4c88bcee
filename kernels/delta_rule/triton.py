"""The delta rule in Triton: the scan of `precast.kernels.linear_attention.triton` with a beta."""

from __future__ import annotations

import torch

from precast.kernels.delta_rule.step import EPSILON
from precast.kernels.linear_attention.step import token_decays
from precast.kernels.linear_attention.triton import Rule, scan
from precast.kernels.stateful.forms import forms
from precast.kernels.stateful.triton import zeros
from precast.kernels.stateful.walks import Slots


def _apply(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor | None,
    beta: torch.Tensor,
    held: Slots,
    scale: float,
    normalise: bool,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """`precast.delta_rule`, see `precast.kernels.delta_rule.delta_rule`; into `out`, if given."""
    out = zeros(out, q, v.shape)
    each = None if decay is None else token_decays(decay, v)[0, ..., None]
    rule = Rule(each, beta=beta[0], epsilon=EPSILON if normalise else None)
    scan(out[0], q[0], k[0], v[0], held, scale, rule)
    return out


delta_rule, stateful_delta_rule = forms("delta_rule", _apply)
