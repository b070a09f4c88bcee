"""Sampling options and their ranges."""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle
from fractions import Fraction

import numpy as np
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
        ("max_tokens", np.bool_(True)),
        ("max_tokens", np.float64(2)),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", np.float32("nan")),
        ("temperature", 1e39),
        ("temperature", 10**380),
        ("temperature", Fraction(10**380)),
        ("temperature", "0"),
        ("temperature", True),
        ("temperature", None),
        ("top_k", False),
        ("top_k", -2),
        ("top_k", -1.0),
        ("top_k", 0.0),
        ("top_k", 1.0),
        ("top_k", 2**31),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_p", math.nan),
        ("top_p", 10**380),
        ("top_p", True),
        ("min_p", -0.01),
        ("min_p", 1.01),
        ("min_p", math.nan),
        ("min_p", False),
        ("seed", -2),
        ("seed", -1.0),
        ("seed", 2**63),
        ("seed", 1.0),
        ("stop", ""),
        ("stop", ("a", "")),
        ("stop", (b"a",)),
        ("stop", b"a"),
        ("stop", (None,)),
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


@pytest.mark.parametrize("name", ["max_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "stop"])
def test_integers_that_python_does_not_spell_are_refused_all_the_same(name: str) -> None:
    for value in (10**5000, -(10**5000)):
        with pytest.raises(RequestError, match=f"{name} is an integer of 16610 bits, expected "):
            SamplingParams(**{name: value})  # type: ignore[arg-type]
    with pytest.raises(RequestError, match=f"{name} is a set, expected "):
        SamplingParams(**{name: {10**5000}})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "spellings", "value"),
    [
        ("top_k", (-1, 0, np.int32(0)), None),
        ("top_p", (None,), 1.0),
        ("min_p", (None,), 0.0),
        ("seed", (-1, np.int64(-1)), None),
        ("stop", (None, [], ()), ()),
        ("max_tokens", (np.int64(3), np.array(3)), 3),
        ("temperature", (np.float32(0.5), np.float64(0.5), Fraction(1, 2)), 0.5),
        ("top_p", (np.float16(0.5),), 0.5),
    ],
)
def test_other_spellings_of_the_same_are_taken(name: str, spellings: tuple[object, ...], value: object) -> None:
    plain = SamplingParams(**{name: value})  # type: ignore[arg-type]
    for spelling in spellings:
        params = SamplingParams(**{name: spelling})  # type: ignore[arg-type]
        assert params == plain
        assert hash(params) == hash(plain)
        assert type(getattr(params, name)) is type(value)


def test_no_limit_but_the_models() -> None:
    assert SamplingParams(max_tokens=None).max_length(5, 64) == 64
    assert SamplingParams(max_tokens=7).max_length(5, 64) == 12
    assert SamplingParams(max_tokens=60).max_length(5, 64) == 64


def test_one_stop_string_is_one_string() -> None:
    assert SamplingParams(stop="end").stop == ("end",)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")


def test_an_unknown_option_is_refused_by_name() -> None:
    with pytest.raises(RequestError, match="'max_token' is no sampling option; the options are max_tokens, ") as error:
        SamplingParams(max_token=3)  # type: ignore[call-arg]
    assert (error.value.code, error.value.fix) == ("sampling-invalid", "did you mean 'max_tokens'?")


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("max_new_tokens", "did you mean 'max_tokens'?"),
        ("stop_strings", "did you mean 'stop'?"),
        ("do_sample", "a temperature above 0 draws"),
        ("n", "give the prompt so many times"),
        ("min_tokens", "nothing like it"),
        ("logprobs", None),
    ],
)
def test_options_of_other_libraries_are_refused_with_what_to_do(name: str, fix: str | None) -> None:
    with pytest.raises(RequestError, match=f"'{name}' is no sampling option") as error:
        SamplingParams(**{name: 1})  # type: ignore[arg-type]
    assert (fix or "") in (error.value.fix or "")
    assert (error.value.fix is None) == (fix is None)


def test_params_are_values() -> None:
    params = SamplingParams(max_tokens=3, stop="x")
    assert params == copy.deepcopy(params) == pickle.loads(pickle.dumps(params))  # noqa: S301 - our own bytes
    assert hash(params) == hash(SamplingParams(max_tokens=3, stop=("x",)))
    with pytest.raises(AttributeError):
        params.max_tokens = 4  # type: ignore[misc]
