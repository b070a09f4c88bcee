"""Logits and parameters of `precast.sample` on which implementations could differ: ties, infinities, ends of ranges."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

INF, NAN = float("inf"), float("nan")
_DTYPES = {"top_k": torch.int32, "seeds": torch.int64, "steps": torch.int64}
_OFF: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seeds": 0, "steps": 0}

FILTERS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0, "top_k": 3, "top_p": 0.5},
    {"temperature": 0.7},
    {"temperature": 3.0, "top_k": 5},
    {"top_k": 1},
    {"top_k": 40, "top_p": 0.9},
    {"top_p": 0.9},
    {"temperature": 2.0, "top_p": 0.5},
    {"min_p": 0.05},
    {"temperature": 5.0, "top_k": 300, "top_p": 0.999},
    {"temperature": 4.0, "top_k": 20, "min_p": 0.3},
    {"temperature": 2.0, "top_p": 0.7, "min_p": 0.01},
    {"temperature": 50.0, "top_k": 100, "top_p": 0.6, "min_p": 0.02},
    {"temperature": 50.0, "top_p": 0.8},
    {"top_k": 1 << 30, "top_p": 1e-9},
    {"top_p": 0.0},
    {"top_p": 1.0 - 2.0**-24, "temperature": 8.0},
    {"min_p": 1.0},
    {"min_p": 1.5},
    {"min_p": 1.5, "top_k": 2, "top_p": 0.5},
]
"""Parameters of a row, where they are not those of a row without filters."""


def arguments(logits: torch.Tensor, rows: list[dict[str, Any]], *, seed: int = 0) -> dict[str, torch.Tensor]:
    """The arguments of one call: row r asks for `rows[r % len(rows)]`, with a seed and a step of its own."""
    asked = [
        {"seeds": seed * 1_000_003 + r * 7919 - 5, "steps": r % 11, **rows[r % len(rows)]} for r in range(len(logits))
    ]
    made = {
        name: torch.tensor([row.get(name, off) for row in asked]).to(_DTYPES.get(name, torch.float32))
        for name, off in _OFF.items()
    }
    return {"logits": logits, **{name: value.to(logits.device) for name, value in made.items()}}


def logits_of(rows: int, size: int, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """Kinds of logits [rows, size] by name, on the host; the same numbers in every run."""
    generator = torch.Generator().manual_seed(size)
    normal = torch.randn(rows, size, generator=generator)
    yield "normal", (3 * normal).to(dtype)
    yield "all equal", torch.full((rows, size), -2.5, dtype=dtype)
    yield "few levels", torch.randint(-2, 3, (rows, size), generator=generator).to(dtype)
    yield "one far above", torch.where(torch.arange(size) == size // 2, 30.0, normal).to(dtype)
    yield "one far below", torch.where(torch.arange(size) == size // 2, -6e4, normal).to(dtype)
    yield "mostly minus infinity", normal.masked_fill(torch.arange(size) % 9 != size % 9, -INF).to(dtype)
    yield "not contiguous", (3 * torch.randn(rows + 1, size + 3, 2, generator=generator)).to(dtype)[1:, 2:-1, 1]
    yield "broken", _broken(rows, size, generator).to(dtype)


def _broken(rows: int, size: int, generator: torch.Generator) -> torch.Tensor:
    """Rows with NaN, without a finite logit, with infinities and the largest numbers, and sound ones between them."""
    logits = torch.randn(rows, size, generator=generator)
    logits[0::7, size // 3] = NAN
    logits[1::7] = -INF
    logits[2::7] = INF
    logits[3::7, size // 2] = INF
    logits[4::7, 1:] = -INF
    logits[5::7, -1] = 6e4
    return logits
