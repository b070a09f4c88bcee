"""The walks over states in Triton against the references. `test_triton.py` runs this file twice, in processes of its
own: in Triton's interpreter, which reads TRITON_INTERPRET when a kernel is defined, and on a GPU, as they are compiled.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch
from captured_steps import STEPS, TOKENS, stateful_step
from op_samples.draw import Draw, Sample
from op_samples.sequences import without_states
from op_samples.table import samples_of
from strided import with_strided_caches

from precast.kernels import registry
from precast.kernels.spec import OpSpec

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if IS_INTERPRETED else "cuda")
# The interpreter holds bfloat16 as integers, and multiplies them as such.
HALF = torch.float16 if IS_INTERPRETED else torch.bfloat16
SPECS = {spec.name: spec for spec in registry.specs()}
NAMES = ("state_space_scan", "linear_attention")
SMALL: dict[str, dict[str, Any]] = {
    "state_space_scan": {"size": 5, "width": 16},
    "linear_attention": {"size": 10, "value": 5, "rowwise": True, "heads": 1},
}
ODD: list[tuple[str, dict[str, Any]]] = [
    *SMALL.items(),
    ("state_space_scan", {"size": 12, "width": 128, "heads": 2, "groups": 1}),
    ("state_space_scan", {"size": 3, "width": 256, "heads": 3, "groups": 3}),
    ("linear_attention", {"size": 96, "value": 10, "heads": 2}),
    ("linear_attention", {"size": 256, "value": 3, "heads": 1}),
]
LARGE: list[tuple[str, dict[str, Any]]] = [
    ("state_space_scan", {"size": 64, "width": 128, "heads": 80, "groups": 1}),
    ("state_space_scan", {"size": 64, "width": 256, "heads": 24, "groups": 8}),
    ("linear_attention", {"size": 128, "value": 128, "heads": 64}),
    ("linear_attention", {"size": 72, "value": 96, "rowwise": True}),
]
"""Sizes of models, which the interpreter would take minutes for."""


def walked(name: str) -> Callable[..., torch.Tensor]:
    """The implementation in Triton of `precast.<name>`."""
    module = import_module(f"precast.kernels.{name.removeprefix('stateful_')}.triton")
    function: Callable[..., torch.Tensor] = getattr(module, name)
    return function


def agrees(spec: OpSpec, function: Callable[..., torch.Tensor], sample: Sample, same: Callable[..., None]) -> None:
    """Both give the same result and states, of which those that nobody writes stay as they are, bit by bit."""
    at_home = {name: x.cpu().clone() if isinstance(x, torch.Tensor) else x for name, x in sample.items()}
    expected = spec.reference(**at_home)
    found = function(**sample)

    same(spec, found.cpu(), expected)
    if "state" in sample:
        same(spec, sample["state"].cpu(), at_home["state"])


@pytest.mark.parametrize("name", [prefix + name for name in NAMES for prefix in ("stateful_", "")])
def test_samples(name: str, same: Callable[..., None]) -> None:
    spec = SPECS[f"precast.{name}"]
    for sample in samples_of(spec, Draw(torch.float32, DEVICE)):
        if IS_INTERPRETED and sample["cu_seqlens"].diff().numel() and sample["cu_seqlens"].diff().max() > 16:
            continue  # token by token, and each takes milliseconds
        agrees(spec, walked(name), sample, same)


@pytest.mark.parametrize(("name", "sizes"), ODD if IS_INTERPRETED else [*ODD, *LARGE], ids=str)
def test_odd_sizes(name: str, sizes: dict[str, Any], same: Callable[..., None]) -> None:
    sample = stateful_step(name, Draw(HALF, DEVICE), "mixed", **sizes)

    agrees(SPECS[f"precast.stateful_{name}"], walked(f"stateful_{name}"), sample, same)


@pytest.mark.parametrize("step", [step for step in STEPS if step != "mixed"])
@pytest.mark.parametrize("name", NAMES)
def test_steps_of_one_shape(name: str, step: str, same: Callable[..., None]) -> None:
    sample = stateful_step(name, Draw(torch.float32, DEVICE), step, **SMALL[name])

    agrees(SPECS[f"precast.stateful_{name}"], walked(f"stateful_{name}"), sample, same)


@pytest.mark.parametrize("name", NAMES)
def test_results_are_written_into_what_is_given(name: str, same: Callable[..., None]) -> None:
    spec = SPECS[f"precast.stateful_{name}"]
    sample = stateful_step(name, Draw(torch.float32, DEVICE), "mixed", **SMALL[name])
    for kept, given in (("stateful_", sample), ("", without_states(sample))):
        expected = SPECS[f"precast.{kept}{name}"].reference(**{**given, **_states(given)})
        out = torch.full_like(expected, float("nan"))

        assert walked(kept + name)(**given, out=out) is out
        same(spec, out, expected)
        assert not out[:, TOKENS - 2 :].any()


def _states(sample: Sample) -> Sample:
    return {"state": sample["state"].clone()} if "state" in sample else {}


@pytest.mark.parametrize("name", NAMES)
def test_slots_far_apart(name: str, same: Callable[..., None]) -> None:
    sample = stateful_step(name, Draw(torch.float32, DEVICE), "full", **SMALL[name])
    spread, between = with_strided_caches(sample)

    agrees(SPECS[f"precast.stateful_{name}"], walked(f"stateful_{name}"), spread, same)
    assert all(bool((gap == 0xFF).all()) for gap in between)


def test_one_warp_walks_over_most_states() -> None:
    from precast.kernels.linear_attention.triton import blocks

    for size in (1, 5, 16, 64, 72, 96, 128, 256, 512):
        for value in (1, 5, 64, 128, 256, 8192):
            found = blocks(size, value)

            assert found.d >= size
            assert found.d * found.e <= 2048 * found.num_warps
            assert found.num_warps == 1 or size > 256
