"""Ops of torch's that have no form of their own that writes into `out`; by the names and arguments of the op table."""

from __future__ import annotations

import torch


def linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, out: torch.Tensor) -> None:
    """`input` [..., I] times `weight` [O, I] transposed, plus `bias` [O], into `out` [..., O]; rounded once."""
    rows, result = input.reshape(-1, weight.shape[1]), out.view(-1, weight.shape[0])
    if bias is None:
        torch.mm(rows, weight.t(), out=result)
    else:
        torch.addmm(bias, rows, weight.t(), out=result)


def to_dtype(self: torch.Tensor, dtype: torch.dtype, *, out: torch.Tensor) -> None:
    """`self` in the dtype of `out`."""
    out.copy_(self)


def full_like(self: torch.Tensor, fill_value: float, *, out: torch.Tensor) -> None:
    """`fill_value` in each element of `out`."""
    out.fill_(fill_value)


def relu(self: torch.Tensor, *, out: torch.Tensor) -> None:
    """`self`, and 0 where that is negative; NaN stays NaN."""
    torch.clamp(self, min=0, out=out)
