"""Token ids of a step of which some were drawn in the step before, which the host doesn't know yet."""

from __future__ import annotations

from collections.abc import Callable

import torch

from precast.ir.graph import symbols
from precast.kernels.embedding.known_ids import launches
from precast.kernels.launch import Launched
from precast.kernels.registry import target_of
from precast.kernels.use import Target

Known = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""`ids` [T] int64 and `drawn` [R] int64 in; `ids`, [T], out, with `drawn[row]` in the place of `-1 - row`, and 0 where
that is no token."""


def known_ids_on(device: torch.device, target: Target | None = None) -> Known:
    """What computes them on a device; `device` has Triton, or it is done by torch's ops.

    `target` is what the device is, with the kernels that are at hand; None: `target_of` it.
    """
    target = target or target_of(device)
    return _launched(target) if device.type == "cuda" and "triton" in target.kinds else known_ids


def known_ids(ids: torch.Tensor, drawn: torch.Tensor) -> torch.Tensor:
    """By torch's ops."""
    return torch.where(ids < 0, drawn[(-1 - ids).clamp_(min=0)], ids).clamp_(min=0)


def _launched(target: Target) -> Known:
    launched = Launched(launches(target.capability >= (9, 0)), native=target.native)

    def known(ids: torch.Tensor, drawn: torch.Tensor) -> torch.Tensor:
        found, given = torch.empty_like(ids), {"T": len(ids)}
        sizes = [symbols.evaluate(expr, given) for expr in launched.expressions]
        launched(ids=ids, drawn=drawn, out=found, sizes=sizes)
        return found

    return known
