"""Scales of cached keys and values: what a checkpoint calls them, that it has all or none, and what they may be."""

from __future__ import annotations

import pytest

from precast.ir.errors import RecipeError, WeightsError
from precast.ir.graph.schema import Cast, Graph, Param, Read, Reshape, Scale, TensorType
from precast.ir.manifest import Checkpoint
from precast.ir.weights import fit, recipes, scales
from precast.ir.weights.checkpoint import CheckpointFiles, StoredTensor
from precast.ir.weights.fit import Problem
from precast.ir.weights.sources import LocalFolder

RULES = Checkpoint(ignored=("*_scale",))
K, V = Scale(("a.k_scale", "a.k_proj.k_scale")), Scale(("a.v_scale", "a.v_proj.v_scale"))
ONE = TensorType("float32", (1,))
GRAPH = Graph((), (), (Param("k", ONE, K), Param("v", ONE, V)), (), (), (), {})


def files(*names: str, shape: tuple[int, ...] = (), dtype: str = "bfloat16") -> CheckpointFiles:
    tensors = {name: StoredTensor("model.safetensors", dtype, shape, 0, 0) for name in names}
    return CheckpointFiles(LocalFolder("/ckpt"), tensors)


def test_a_scale_is_one_float32_number() -> None:
    assert (recipes.shape(K), recipes.dtype(K), recipes.leaves(K)) == ((1,), "float32", ())


@pytest.mark.parametrize("default", [0.0, -1.0, float("nan"), float("inf")])
def test_defaults_that_can_not_be(default: float) -> None:
    with pytest.raises(RecipeError, match=f"the default is {default}, expected a number above 0"):
        recipes.shape(Scale(("a",), default))


def test_a_scale_without_a_name() -> None:
    with pytest.raises(RecipeError, match="no tensors"):
        recipes.shape(Scale(()))


def test_a_checkpoint_has_all_scales_or_none() -> None:
    assert fit.problems(GRAPH, RULES, files()) == []
    assert fit.problems(GRAPH, RULES, files("a.k_proj.k_scale", "a.v_scale")) == []
    assert fit.problems(GRAPH, RULES, files("a.k_scale")) == [
        Problem("missing", "a.v_scale", "expected floating point [], as there are other scales")
    ]


def test_scales_by_names_that_are_not_known_are_not_passed_over() -> None:
    other = files("a.kv_cache.k_scale", "a.kv_cache.v_scale")

    assert fit.problems(GRAPH, RULES, other) == [
        Problem("missing", "a.k_scale", "expected floating point [], as there are scales by other names, such as"
                                        " a.kv_cache.k_scale")
    ]  # fmt: skip
    assert fit.problems(GRAPH, Checkpoint(ignored=("*_scale",), unused=("a.kv_cache.*",)), other) == []


def test_a_scale_that_is_read_is_not_unexpected() -> None:
    other = files("a.k_scale", "a.v_scale", "a.v_proj.v_scale")

    (problem,) = fit.problems(GRAPH, Checkpoint(), other)

    assert (problem.kind, problem.tensor) == ("unexpected", "a.v_proj.v_scale")


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_one_number_in_any_shape(shape: tuple[int, ...]) -> None:
    assert fit.problems(GRAPH, RULES, files("a.k_scale", "a.v_scale", shape=shape)) == []


@pytest.mark.parametrize("shape", [(2,), (8, 1), (0,)])
def test_several_numbers_are_no_scale(shape: tuple[int, ...]) -> None:
    found = fit.problems(GRAPH, RULES, files("a.k_scale", "a.v_scale", shape=shape))

    assert [(problem.kind, problem.tensor) for problem in found] == [("shape", "a.k_scale"), ("shape", "a.v_scale")]
    assert "expected one number, found [" in found[0].message


def test_an_integer_is_no_scale() -> None:
    found = fit.problems(GRAPH, RULES, files("a.k_scale", "a.v_scale", dtype="int8"))

    assert {problem.kind for problem in found} == {"dtype"}


def test_what_is_there_is_read_and_the_rest_is_the_default() -> None:
    there = fit.require(GRAPH, RULES, files("a.k_proj.k_scale", "a.v_scale"))
    k, v = scales.settled(GRAPH.params, there)

    assert list(there) == ["a.k_scale", "a.v_scale"]
    assert k.recipe == Reshape(Cast(Read("a.k_scale", ()), "float32"), (1,))
    assert v.recipe == Reshape(Cast(Read("a.v_scale", ()), "float32"), (1,))
    assert scales.settled(GRAPH.params, fit.require(GRAPH, RULES, files())) == GRAPH.params


def test_numbers_that_are_no_scales_are_named() -> None:
    scales.check({"k": 0.5, "v": 1e-30}, "ckpt")
    bad = {"k": 0.0, "v": -1.0, "w": float("nan"), "x": float("inf"), "y": 1.0}

    with pytest.raises(WeightsError) as caught:
        scales.check(bad, "ckpt")

    assert caught.value.code == "scale-invalid"
    assert "k is 0.0, v is -1.0, w is nan, x is inf; expected numbers above 0" in caught.value.message
    assert caught.value.where == "ckpt"
    assert "download or copy the checkpoint again" in str(caught.value.fix)
