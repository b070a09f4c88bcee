"""Samples of rotary embeddings and their tables."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from op_samples.draw import Draw, Sample


def rotary(draw: Draw) -> Iterator[Sample]:
    for tokens, heads, size, pairs in ((5, 3, 16, 8), (1, 1, 80, 16), (4, 2, 7, 3), (0, 2, 8, 4), (2, 1, 6, 0)):
        angle = draw.uniform(1, tokens, pairs, high=6.3, dtype=torch.float32)
        for interleaved in (False, True):
            yield {
                "x": draw.normal(1, tokens, heads, size),
                "cos": angle.cos().to(draw.dtype),
                "sin": angle.sin().to(draw.dtype),
                "interleaved": interleaved,
            }
    # Key heads as a slice of the fused query, key and value; tables in float32.
    angle = draw.uniform(1, 3, 4, high=6.3, dtype=torch.float32)
    fused = draw.normal(1, 3, 4, 8)
    yield {"x": fused[:, :, 2:3], "cos": angle.cos(), "sin": angle.sin(), "interleaved": False}


def rope_frequencies(draw: Draw) -> Iterator[Sample]:
    short, long = draw.uniform(5, dtype=torch.float32), draw.uniform(5, dtype=torch.float32)
    lengths = draw.of([[1, 63, 64, 65, 66, 500, 131072]], torch.int64)
    for kind in ("longrope", "dynamic"):
        yield {
            "lengths": lengths,
            "short": short,
            "long": long if kind == "longrope" else None,
            "kind": kind,
            "original_length": 64,
            "factor": 4.0,
            "base": 10000.0,
        }
    yield {
        "lengths": lengths[:, :0],
        "short": short,
        "long": None,
        "kind": "dynamic",
        "original_length": 64,
        "factor": 2.0,
        "base": 1e6,
    }


def rotary_tables(draw: Draw) -> Iterator[Sample]:
    positions = draw.of([[0, 1, 2, 0, 131071]], torch.int64)
    yield {
        "positions": positions,
        "inv_freq": draw.uniform(7, dtype=torch.float32),
        "scale": 1.0,
        "dtype": draw.dtype,
    }
    yield {
        "positions": positions,
        "inv_freq": draw.uniform(1, 5, 3, dtype=torch.float32),
        "scale": 1.19,
        "dtype": draw.dtype,
    }
    yield {
        "positions": positions[:, :0],
        "inv_freq": draw.uniform(4, dtype=torch.float32),
        "scale": 0.5,
        "dtype": draw.dtype,
    }


SAMPLES = {
    ("precast.rotary", 1): rotary,
    ("precast.rope_frequencies", 1): rope_frequencies,
    ("precast.rotary_tables", 1): rotary_tables,
}
