"""Finds which keys a mask function of transformers lets a query see, by asking it.

It is a function of positions, `(batch, head, query, key) -> bool`, put together from others: nothing of what it is
made of can be read, but it can be evaluated anywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import _disable_current_modes

from precast.ir.errors import BuildError
from precast.kernels.attention.attend import visible_keys


class Reach(NamedTuple):
    """Which of the keys before it a query sees, as `precast.attention` takes it; both None: all of them."""

    window: int | None = None
    chunk: int | None = None


def find_reach(mask_function: Callable[..., Any], max_seq_len: int) -> Reach:
    """What a mask function lets queries see in sequences of up to `max_seq_len` tokens.

    The number of keys that the last query sees is the window, if there is one; the first query that doesn't see the key
    before it begins the second chunk, if there are chunks. Either finding is compared with the function: on a grid of
    small positions and around the edges that it would have, and for the last query over all keys.
    Raises BuildError: `model-unsupported` for a function that lets a query see later keys, `feature-unsupported` for
    another one that is neither a causal window nor causal chunks.
    """
    with _disable_current_modes():
        small = torch.arange(min(max_seq_len, 64))
        if bool((_evaluate(mask_function, small[:, None], small[None]) & (small > small[:, None])).any()):
            _refuse_later_keys()
        at = torch.arange(max_seq_len)
        last = _evaluate(mask_function, at[-1:, None], at[None])[0]
        window = int(last.sum())
        reach = Reach() if window == max_seq_len else Reach(window=window)
        if window > 0 and _is_followed(mask_function, reach, [window, max_seq_len], max_seq_len):
            return reach
        joined = _evaluate(mask_function, at[1:], at[:-1])
        breaks = (~joined).nonzero()
        chunk = int(breaks[0]) + 1 if len(breaks) else max_seq_len
        edges = [chunk, 2 * chunk, max_seq_len // chunk * chunk, max_seq_len]
        is_regular = torch.equal(joined, at[1:] % chunk != 0)
        if is_regular and _is_followed(mask_function, Reach(chunk=chunk), edges, max_seq_len):
            return Reach(chunk=chunk)
    raise BuildError(
        "feature-unsupported",
        "the model's attention mask is neither causal nor a causal sliding window, nor made of causal chunks",
        fix="precast builds full attention, sliding windows and chunks of equal length",
    )


def _refuse_later_keys() -> None:
    raise BuildError(
        "model-unsupported",
        "the model's attention sees tokens that come later, expected a decoder",
        fix="precast builds decoders; encoders and prefix language models are out of its scope",
    )


def _is_followed(function: Callable[..., Any], reach: Reach, edges: list[int], max_seq_len: int) -> bool:
    """Whether the function is this finding, on the positions where it might not be."""
    near = [at for edge in edges for at in range(max(edge - 3, 0), min(edge + 3, max_seq_len))]
    positions = torch.tensor(sorted({*range(min(max_seq_len, 64)), *near}))
    found = _evaluate(function, positions[:, None], positions[None])
    if bool((found & (positions > positions[:, None])).any()):
        _refuse_later_keys()
    at = torch.arange(max_seq_len)
    last = _evaluate(function, at[-1:, None], at[None])
    return torch.equal(found, visible_keys(positions, positions, *reach)) and torch.equal(
        last, visible_keys(at[-1:], at, *reach)
    )


def _evaluate(function: Callable[..., Any], query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    zero = torch.zeros((), dtype=torch.int64)
    result = function(zero, zero, query, key)
    return torch.as_tensor(result, dtype=torch.bool).expand(torch.broadcast_shapes(query.shape, key.shape))
