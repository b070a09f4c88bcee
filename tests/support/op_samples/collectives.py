"""Samples of collectives, of a group of one rank: a name connects nobody. `test_collectives.py` has more ranks."""

from __future__ import annotations

from collections.abc import Iterator

from op_samples.draw import Draw, Sample
from op_samples.norms import residual_rms_norm


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


def all_reduce_residual_rms_norm(draw: Draw) -> Iterator[Sample]:
    for sample in residual_rms_norm(draw):
        yield sample | {"group": "tp"}


def send(draw: Draw) -> Iterator[Sample]:
    yield {"x": draw.normal(1, 7, 33), "group": "pp", "target": 1}
    yield {"x": draw.normal(6, 10)[..., :5], "group": "pp", "target": 0}
    yield {"x": draw.normal(1, 0, 8), "group": "pp", "target": 2}


def receive(draw: Draw) -> Iterator[Sample]:
    for shape in ([1, 7, 33], [1, 0, 8], [5]):
        yield {"shape": shape, "dtype": draw.normal(1).dtype, "group": "pp", "source": 0}


SAMPLES = {
    ("precast.all_gather", 1): along,
    ("precast.all_reduce", 1): all_reduce,
    ("precast.all_reduce_residual_rms_norm", 1): all_reduce_residual_rms_norm,
    ("precast.receive", 1): receive,
    ("precast.reduce_scatter", 1): along,
    ("precast.send", 1): send,
}
