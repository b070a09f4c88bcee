"""Samples of collectives, of a group of one rank: a name connects nobody. `test_collectives.py` has more ranks."""

from __future__ import annotations

from collections.abc import Iterator

from op_samples.draw import Draw, Sample


def all_reduce(draw: Draw) -> Iterator[Sample]:
    yield {"x": draw.normal(1, 7, 33), "group": "tp"}
    yield {"x": draw.normal(1, 6, 10)[..., :5], "group": "tp"}
    yield {"x": draw.normal(1, 0, 8), "group": "tp"}
    yield {"x": draw.normal(), "group": "tp"}


def along(draw: Draw) -> Iterator[Sample]:
    yield {"x": draw.normal(1, 7, 33), "dim": -1, "group": "tp", "size": 1}
    yield {"x": draw.normal(6, 10)[..., :5], "dim": 0, "group": "tp", "size": 1}
    yield {"x": draw.normal(1, 6, 4).transpose(0, 1), "dim": 1, "group": "tp", "size": 1}
    yield {"x": draw.normal(1, 0, 8), "dim": 2, "group": "tp", "size": 1}


SAMPLES = {
    ("precast.all_gather", 1): along,
    ("precast.all_reduce", 1): all_reduce,
    ("precast.reduce_scatter", 1): along,
}
