"""Token ids of a step of which some were drawn in the step before, which the host doesn't know yet."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch

from precast.ir.graph import symbols
from precast.kernels.embedding.known_ids import launches
from precast.kernels.launch import Launched
from precast.kernels.registry import target_of

Known = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""`ids` [T] int64 and `drawn` [R] int64 in; `ids`, [T], out, with `drawn[row]` in the place of `-1 - row`, and 0 where
that is no token."""


def known_ids_on(device: torch.device) -> Known:
    """What computes them on a device; `device` has Triton, or it is done by torch's ops."""
    target = target_of(device)
    return _launched(target.capability >= (9, 0)) if device.type == "cuda" and "triton" in target.kinds else known_ids


def known_ids(ids: torch.Tensor, drawn: torch.Tensor) -> torch.Tensor:
    """By torch's ops."""
    return torch.where(ids < 0, drawn[(-1 - ids).clamp_(min=0)], ids).clamp_(min=0)


@cache
def _launched(has_pdl: bool) -> Known:
    launched = Launched(launches(has_pdl))

    def known(ids: torch.Tensor, drawn: torch.Tensor) -> torch.Tensor:
        found, given = torch.empty_like(ids), {"T": len(ids)}
        sizes = [symbols.evaluate(expr, given) for expr in launched.expressions]
        launched(ids=ids, drawn=drawn, out=found, sizes=sizes)
        return found

    return known
