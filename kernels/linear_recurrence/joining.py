"""How a recurrence takes up its next input."""

from __future__ import annotations

from collections.abc import Callable

import torch

from precast.ir.ops.rows_states import RECURRENCES


def joining(kind: str) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """What is done with the state, multiplied, and an input. Raises ValueError for a kind that isn't sum or max."""
    if kind not in RECURRENCES:
        raise ValueError(f"kind: expected one of {', '.join(RECURRENCES)}, found {kind!r}")
    return torch.add if kind == "sum" else torch.maximum
