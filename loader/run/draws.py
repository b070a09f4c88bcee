"""How tokens are drawn in a step, as the arrays that the device gets."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from precast.ir.graph.schema import Dtype
from precast.loader.run.batch import Arrays


class Draw(NamedTuple):
    """How the token of one row of logits is drawn: the arguments of `precast.sample` for it.

    `top_k` 0 keeps all tokens. `num_generated` counts the tokens that the answer has so far: the noise depends on it.
    """

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    num_generated: int


DTYPES: dict[str, Dtype] = {
    "temperature": "float32", "top_k": "int32", "top_p": "float32", "min_p": "float32", "seeds": "int64",
    "steps": "int64",
}  # fmt: skip
"""The arguments of `precast.sample`, in the order of the fields of `Draw`."""


GREEDY = Draw(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, num_generated=0)
"""The likeliest token."""


def draw_arrays(draws: Sequence[Draw], num_rows: int = 0) -> Arrays:
    """The arguments of `precast.sample` by name, `[R]` each; those of `GREEDY` fill them up to `num_rows`."""
    draws = [*draws, *itertools.repeat(GREEDY, num_rows - len(draws))]
    columns = zip(*draws, strict=True) if draws else itertools.repeat((), len(DTYPES))
    return {name: np.array(column, dtype) for (name, dtype), column in zip(DTYPES.items(), columns, strict=True)}
