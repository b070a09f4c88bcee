"""Sampling options and their ranges."""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle

import pytest

from precast.ir.errors import RequestError
from precast.loader.engine.params import MAX_INT64, SamplingParams


def test_defaults_are_greedy() -> None:
    params = SamplingParams()
    assert dataclasses.asdict(params) == {
        "max_tokens": 64, "temperature": 0.0, "top_k": None, "top_p": 1.0, "min_p": 0.0, "seed": None, "stop": (),
        "ignore_eos": False,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", 2.0),
        ("max_tokens", True),
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", "0"),
        ("temperature", None),
        ("top_k", 0),
        ("top_k", -1),
        ("top_k", 1.0),
        ("top_k", 2**31),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_p", math.nan),
        ("min_p", -0.01),
        ("min_p", 1.01),
        ("min_p", math.nan),
        ("seed", -1),
        ("seed", 2**63),
        ("seed", 1.0),
        ("stop", ""),
        ("stop", ("a", "")),
        ("stop", (b"a",)),
        ("stop", 3),
        ("ignore_eos", 1),
    ],
)
def test_values_outside_their_range_are_refused(name: str, value: object) -> None:
    with pytest.raises(RequestError) as error:
        SamplingParams(**{name: value})  # type: ignore[arg-type]
    assert error.value.code == "sampling-invalid"
    assert error.value.message.startswith(f"{name} is {value!r}, expected ")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 1),
        ("temperature", 0),
        ("temperature", 2.5),
        ("top_k", 1),
        ("top_p", 1),
        ("top_p", 1e-9),
        ("min_p", 1),
        ("seed", 0),
        ("seed", MAX_INT64),
        ("stop", ("a",)),
    ],
)
def test_values_at_the_edge_are_taken(name: str, value: object) -> None:
    assert getattr(SamplingParams(**{name: value}), name) == value  # type: ignore[arg-type]


def test_one_stop_string_is_one_string() -> None:
    assert SamplingParams(stop="end").stop == ("end",)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")


def test_an_unknown_option_is_refused_by_name() -> None:
    with pytest.raises(RequestError, match="'max_token' is no sampling option; the options are max_tokens, ") as error:
        SamplingParams(max_token=3)  # type: ignore[call-arg]
    assert (error.value.code, error.value.fix) == ("sampling-invalid", "did you mean 'max_tokens'?")


def test_params_are_values() -> None:
    params = SamplingParams(max_tokens=3, stop="x")
    assert params == copy.deepcopy(params) == pickle.loads(pickle.dumps(params))  # noqa: S301 - our own bytes
    assert hash(params) == hash(SamplingParams(max_tokens=3, stop=("x",)))
    with pytest.raises(AttributeError):
        params.max_tokens = 4  # type: ignore[misc]
