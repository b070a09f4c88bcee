"""Samples of embedding, gathered rows and gated activation."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from op_samples.draw import Draw, Sample
from op_samples.quantised import fp8
from precast.ir.ops.rows_tokens import ACTIVATIONS


def embedding(draw: Draw) -> Iterator[Sample]:
    yield {"ids": draw.integers(0, 11, 1, 7), "weight": draw.normal(11, 33), "scale": 33**0.5}
    yield {"ids": draw.integers(0, 5, 1, 1, dtype=torch.int32), "weight": draw.normal(5, 8)}
    yield {"ids": draw.integers(0, 5, 1, 0), "weight": draw.normal(5, 8), "scale": 2.5}
    yield {"ids": draw.integers(0, 5, 7), "weight": draw.integers(-9, 9, 5, 3)}


def sharded_embedding(draw: Draw) -> Iterator[Sample]:
    yield {"ids": draw.integers(0, 33, 1, 9), "weight": draw.normal(11, 33), "start": 11, "scale": 33**0.5}
    yield {"ids": draw.integers(0, 5, 1, 4, dtype=torch.int32), "weight": draw.normal(5, 8), "start": 0}
    yield {"ids": draw.integers(0, 5, 1, 3), "weight": draw.normal(2, 8), "start": 40}
    yield {"ids": draw.integers(0, 5, 1, 0), "weight": draw.normal(5, 8), "start": 2, "scale": 2.5}


def quantised_embedding(draw: Draw) -> Iterator[Sample]:
    yield {"ids": draw.integers(0, 11, 1, 7), **_table(draw, 11, 33, (11, 33)), "scale": 33**0.5}
    yield {"ids": draw.integers(0, 11, 1, 5), **_table(draw, 11, 33, (4, 8))}
    yield {"ids": draw.integers(0, 5, 1, 1, dtype=torch.int32), **_table(draw, 5, 8, (1, 8)), "scale": 0.3}
    yield {"ids": draw.integers(0, 5, 1, 0), **_table(draw, 5, 8, (1, 3)), "scale": 2.5}
    yield {"ids": draw.integers(0, 300, 7), **_table(draw, 300, 3, (128, 128))}


def quantised_sharded_embedding(draw: Draw) -> Iterator[Sample]:
    yield {"ids": draw.integers(0, 33, 1, 9), **_table(draw, 11, 33, (4, 8)), "start": 11, "scale": 33**0.5}
    yield {"ids": draw.integers(0, 5, 1, 4, dtype=torch.int32), **_table(draw, 5, 8, (10, 8)), "start": 0}
    yield {"ids": draw.integers(0, 5, 1, 3), **_table(draw, 2, 8, (1, 8)), "start": 40}
    yield {"ids": draw.integers(0, 5, 1, 0), **_table(draw, 5, 8, (1, 3)), "start": 2, "scale": 2.5}


def _table(draw: Draw, rows: int, width: int, block: tuple[int, int]) -> Sample:
    """A table of `rows`, or a rank's part of one, whose values are rounded to the sample's dtype."""
    return {**fp8(draw, rows, width, block), "dtype": draw.dtype}


def sinkhorn(draw: Draw) -> Iterator[Sample]:
    yield {"x": draw.uniform(1, 7, 16, low=0.1), "size": 4, "iterations": 20, "eps": 1e-6}
    yield {"x": draw.uniform(5, 9, low=0.1), "size": 3, "iterations": 1, "eps": 0.5}
    yield {"x": draw.uniform(1, 3, 30, low=0.1)[..., 7:11], "size": 2, "iterations": 3, "eps": 1e-6}
    yield {"x": draw.uniform(1, 0, 4, low=0.1), "size": 2, "iterations": 2, "eps": 1e-6}
    yield {"x": draw.uniform(2, 3, 1, low=0.1), "size": 1, "iterations": 2, "eps": 1e-6}


def gather_rows(draw: Draw) -> Iterator[Sample]:
    yield {"x": draw.normal(1, 7, 33), "rows": draw.of([6, 0, 3, 3], torch.int64)}
    yield {"x": draw.normal(1, 1, 8), "rows": draw.of([0], torch.int64)}
    yield {"x": draw.normal(1, 4, 16)[..., :5], "rows": draw.of([], torch.int64)}


def gated_activation(draw: Draw) -> Iterator[Sample]:
    for kind in ACTIVATIONS:
        yield {"x": draw.normal(1, 5, 34, scale=3.0), "kind": kind}
        yield {"x": draw.normal(1, 1, 2), "kind": kind}
    yield {"x": draw.normal(1, 6, 4).transpose(0, 1), "kind": "silu"}
    yield {"x": draw.normal(1, 0, 8), "kind": "gelu"}


def gated_linear(draw: Draw) -> Iterator[Sample]:
    for kind in ACTIVATIONS:
        given = {"input": draw.normal(1, 5, 9), "weight": draw.normal(34, 9, scale=0.3), "kind": kind}
        yield {**given, "bias": None}
        yield {**given, "bias": draw.normal(34)}
    weight = draw.normal(2, 17, scale=0.2)
    yield {"input": draw.normal(1, 1, 17), "weight": weight, "bias": None, "kind": "silu"}
    yield {"input": draw.normal(1, 6, 34)[..., 1::2], "weight": weight, "bias": draw.normal(2), "kind": "silu"}
    yield {"input": draw.normal(1, 0, 17), "weight": weight, "bias": None, "kind": "gelu"}


SAMPLES = {
    ("precast.embedding", 1): embedding,
    ("precast.sharded_embedding", 1): sharded_embedding,
    ("precast.quantised_embedding", 1): quantised_embedding,
    ("precast.quantised_sharded_embedding", 1): quantised_sharded_embedding,
    ("precast.sinkhorn", 1): sinkhorn,
    ("precast.gather_rows", 1): gather_rows,
    ("precast.gated_activation", 1): gated_activation,
    ("precast.gated_linear", 1): gated_linear,
}
