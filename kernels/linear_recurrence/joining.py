"""How a linear recurrence joins its decayed state with the next input: by their sum or their maximum."""

from __future__ import annotations

from collections.abc import Callable

import torch

from precast.ir.ops.rows_states import RECURRENCES


def joining(kind: str) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """The function of the decayed state and the next input. Raises ValueError for a kind other than sum and max."""
    if kind not in RECURRENCES:
        raise ValueError(f"kind: expected one of {', '.join(RECURRENCES)}, found {kind!r}")
    return torch.add if kind == "sum" else torch.maximum
