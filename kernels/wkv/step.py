"""Sums of exponentials, and of values times them, beside the largest exponent, which is taken out of both: nothing
overflows, and of small ones nothing is lost."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Sums(NamedTuple):
    """sum(exp(e) v) = exp(top) * values, sum(exp(e)) = exp(top) * weights, for exponents e of at most `top`."""

    values: torch.Tensor
    weights: torch.Tensor
    top: torch.Tensor


def begun(state: torch.Tensor) -> Sums:
    """The sums in `state` [..., 3, C]. Sums over nothing, as in a state of zeros, have no largest exponent."""
    values, weights, top = state.unbind(-2)
    return Sums(values, weights, torch.where(weights == 0, float("-inf"), top))


def kept(sums: Sums) -> torch.Tensor:
    """The sums as a state [..., 3, C]."""
    return torch.stack(sums, dim=-2)


def one(k: torch.Tensor, v: torch.Tensor) -> Sums:
    """The sums over one exponent; of the shape of `k` and `v`."""
    return Sums(v, torch.ones_like(v), k)


def added(left: Sums, decay: torch.Tensor | float, right: Sums) -> Sums:
    """The sums over both, with `decay` added to the exponents of `left`. `right` isn't empty."""
    top = torch.maximum(left.top + decay, right.top)
    old, new = torch.exp(left.top + decay - top), torch.exp(right.top - top)
    return Sums(old * left.values + new * right.values, old * left.weights + new * right.weights, top)


def mean(sums: Sums) -> torch.Tensor:
    """The values' mean, weighted with the exponentials."""
    return sums.values / sums.weights
