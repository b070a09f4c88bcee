"""Samples of both versions of `sample`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from op_samples.draw import Draw, Sample


def sample_1(draw: Draw) -> Iterator[Sample]:
    def sample(rows: int, size: int, **more: Any) -> Sample:
        return {
            "logits": draw.normal(rows, size, scale=3.0),
            "temperature": draw.of([(0.0, 0.7, 1.0, 2.5)[row % 4] for row in range(rows)], torch.float32),
            "top_k": draw.of([(0, 3, 1, 1000)[row % 4] for row in range(rows)], torch.int32),
            "top_p": draw.of([(1.0, 0.9, 0.3)[row % 3] for row in range(rows)], torch.float32),
            "min_p": draw.of([(0.0, 0.1)[row % 2] for row in range(rows)], torch.float32),
            "seeds": draw.integers(-(2**63), 2**63 - 1, rows),
            "steps": draw.integers(0, 1000, rows),
            **more,
        }

    def flat(rows: int, value: float, dtype: torch.dtype) -> torch.Tensor:
        return draw.of([value] * rows, dtype)

    yield sample(12, 33)
    yield sample(1, 1)
    yield sample(0, 5)
    yield sample(4, 7, logits=draw.of([[float("-inf")] * 7] * 4, draw.dtype))
    yield sample(5, 257, temperature=flat(5, 0.0, torch.float32))
    yield sample(
        5,
        257,
        temperature=flat(5, 1.0, torch.float32),
        top_k=flat(5, 0, torch.int32),
        top_p=flat(5, 1.0, torch.float32),
        min_p=flat(5, 0.0, torch.float32),
    )


def sample_2(draw: Draw) -> Iterator[Sample]:
    yield from sample_1(draw)
    broken = draw.normal(7, 9)
    broken[0] = float("-inf")
    broken[1, 4] = float("nan")
    broken[2] = float("inf")
    broken[3, 1:] = float("-inf")
    broken[4, 2] = float("inf")
    for more in ({}, {"temperature": draw.of([0.0] * 7, torch.float32)}):
        yield {name: x[:7] for name, x in next(sample_1(draw)).items()} | {"logits": broken, **more}


SAMPLES = {("precast.sample", 1): sample_1, ("precast.sample", 2): sample_2}
