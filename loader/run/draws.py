"""How tokens are drawn in a step, as the arrays that the device gets."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from precast.kernels.sampling.limits import PARAMETERS
from precast.loader.run.batch import Arrays, Padding
from precast.loader.schedule.decoding import DecodeBatch
from precast.loader.schedule.requests import GREEDY, Chunk

DTYPES = PARAMETERS
"""The arguments of `precast.sample`: the fields of `Draw`, and how many tokens the answer has: its noise needs it."""


def draw_arrays(rows: DecodeBatch, chunks: Iterable[Chunk] = ()) -> Arrays:
    """The arguments of `precast.sample` by name, `[R]` each: for the `rows` that decode, and `chunks` that draw."""
    arrays = dict(zip(DTYPES, rows.draws(), strict=True))
    drawing = [(*chunk.request.draw, chunk.request.num_generated) for chunk in chunks if chunk.samples]
    if not drawing:
        return arrays
    more = (np.array(column, dtype) for column, dtype in zip(zip(*drawing, strict=True), DTYPES.values(), strict=True))
    return {name: np.concatenate(both) for name, *both in zip(arrays, arrays.values(), more, strict=True)}


def draw_padding(num_rows: int) -> dict[str, Padding]:
    """What makes the arrays `num_rows` long: rows that take the likeliest token."""
    return {name: Padding(num_rows, fill) for name, fill in zip(DTYPES, (*GREEDY, 0), strict=True)}
