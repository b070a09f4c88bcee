"""Ops that read nothing on the host, in a CUDA graph: captured with one step, it computes any other of its sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from captured_steps import STEPS, latent_step, stateful_step
from op_samples.draw import Draw, Sample

from precast.kernels import registry
from precast.kernels.choices import runnable

CUDA = torch.device("cuda")
SPECS = {spec.name: spec for spec in registry.specs()}
CASES: dict[str, dict[str, Any]] = {
    "stateful_causal_conv": {"channels": 300, "taps": 4},
    "stateful_state_space_scan": {"size": 64, "width": 128},
    "stateful_delta_rule": {"size": 128, "value": 96},
    "stateful_linear_attention": {"size": 72, "value": 64, "rowwise": True},
    "stateful_selective_scan": {"channels": 300, "width": 16},
    "stateful_wkv": {"channels": 300},
    "stateful_linear_recurrence": {"channels": 300},
    "paged_latent_attention": {"heads": 20, "nope": 32, "rope": 16, "latent": 128, "value": 32},
}


def sample_of(op: str, step: str, device: torch.device) -> Sample:
    draw = Draw(torch.bfloat16, device, seed=list(STEPS).index(step))
    if op == "paged_latent_attention":
        return with_pages(latent_step(draw, step, **CASES[op]))
    return stateful_step(op.removeprefix("stateful_"), draw, step, **CASES[op])


def with_pages(sample: Sample) -> Sample:
    """The sample with 100 pages in the cache, whatever it needs: those of one step are as many as of another."""
    cache = sample["cache"]
    more = cache.new_full((100 - len(cache), *cache.shape[1:]), float("nan"))
    return sample | {"cache": torch.cat((cache, more))}


@pytest.mark.gpu
@pytest.mark.parametrize("op", CASES)
def test_a_captured_step_serves_every_other(op: str, same: Callable[..., None]) -> None:
    spec = SPECS[f"precast.{op}"]
    record = next(each for each in runnable(spec.name, 1, registry.target_of(CUDA)) if each.control == "static")
    function = registry.function_of(record)
    given = sample_of(op, "mixed", CUDA)
    function(**given)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = function(**given)

    for step in STEPS:
        wanted = sample_of(op, step, torch.device("cpu"))
        for name, x in wanted.items():
            if isinstance(x, torch.Tensor):
                given[name].copy_(x)
        found.fill_(float("nan"))
        graph.replay()

        same(spec, found.cpu(), spec.reference(**wanted))
        for name in spec.definition.mutated:
            same(spec, given[name].cpu(), wanted[name])


@pytest.mark.parametrize("op", CASES)
def test_steps_have_one_shape(op: str) -> None:
    shapes = []
    for step in STEPS:
        sample = sample_of(op, step, torch.device("cpu"))
        shapes.append({name: x.shape for name, x in sample.items() if isinstance(x, torch.Tensor)})

    assert all(each == shapes[0] for each in shapes)
