"""Ops that read nothing on the host, in a CUDA graph: captured with one step, it computes any other of its sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from captured_steps import STEPS, latent_step, sparse_steps, stateful_step
from op_samples.draw import Draw, Sample
from op_samples.table import samples_of, taking

from precast.kernels import registry
from precast.kernels.choices import fitting
from precast.kernels.launch import use_of_tensors
from precast.kernels.spec import OpSpec

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
    "paged_select_keys": {},
    "paged_sparse_latent_attention": {"heads": 20, "nope": 32, "rope": 16, "latent": 128, "value": 32},
}


def sample_of(op: str, step: str, device: torch.device) -> Sample:
    draw = Draw(torch.bfloat16, device, seed=list(STEPS).index(step))
    if op == "paged_latent_attention":
        return with_pages(latent_step(draw, step, **CASES[op]))
    if op in ("paged_select_keys", "paged_sparse_latent_attention"):
        select, attend = sparse_steps(draw, step, **CASES[op])
        return with_pages(select if op == "paged_select_keys" else attend)
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
    given = sample_of(op, "mixed", CUDA)
    function = registry.function_of(next(each for each in taking(spec, given, CUDA) if each.control == "static"))
    function(**given)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = function(**given)

    for step in STEPS:
        wanted = sample_of(op, step, torch.device("cpu"))
        for name, x in wanted.items():
            if isinstance(x, torch.Tensor):
                given[name].copy_(x)
        found.fill_(float("nan") if found.is_floating_point() else -7)
        graph.replay()

        same(spec, found.cpu(), spec.reference(**wanted))
        for name in spec.definition.mutated:
            same(spec, given[name].cpu(), wanted[name])


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")  # of samples without tokens
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("spec", registry.specs(), ids=lambda spec: f"{spec.name}@{spec.version}")
def test_static_implementations_are_captured(
    spec: OpSpec, dtype: torch.dtype, copied: Callable[[Sample], Sample], same: Callable[..., None]
) -> None:
    captured = 0
    for sample in samples_of(spec, Draw(dtype, CUDA)):
        static = [record for record in taking(spec, sample, CUDA) if record.control == "static"]
        captured += len(static)
        for function in map(registry.function_of, static):
            by_itself, given = copied(sample), copied(sample)
            expected = function(**by_itself)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                found = function(**given)
            graph.replay()

            same(spec, found, expected)
            for name in spec.definition.mutated:
                same(spec, given[name].cpu(), by_itself[name].cpu())
    if not captured:
        pytest.skip("reads metadata on the host")


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, device=CUDA)


# Calls of torch's own ops on x [6, 8], those that sort, index, multiply or fill.
OF_TORCH: dict[str, Callable[[torch.Tensor], dict[str, Any]]] = {
    "argmax.default": lambda x: {"self": x, "dim": 1},
    "clamp.default": lambda x: {"self": x, "min": 0.0, "max": 1.0},
    "cumsum.default": lambda x: {"self": x, "dim": 1},
    "full_like.default": lambda x: {"self": x, "fill_value": 2.5},
    "gather.default": lambda x: {"self": x, "dim": 1, "index": ints(0, 3).expand(6, 2)},
    "linear.default": lambda x: {"input": x, "weight": x},
    "masked_fill.Scalar": lambda x: {"self": x, "mask": x > 0, "value": float("-inf")},
    "matmul.default": lambda x: {"self": x, "other": x.T},
    "max.dim": lambda x: {"self": x, "dim": 1},
    "one_hot.default": lambda x: {"self": ints(0, 3, 7), "num_classes": 8},
    "scatter.src": lambda x: {"self": x, "dim": 1, "index": ints(0, 3).expand(6, 2), "src": x},
    "scatter.value": lambda x: {"self": x, "dim": 1, "index": ints(0, 3).expand(6, 2), "value": 1.0},
    "softmax.int": lambda x: {"self": x, "dim": 1},
    "sort.default": lambda x: {"self": x, "dim": 1},
    "topk.default": lambda x: {"self": x, "k": 3},
    "where.self": lambda x: {"condition": x > 0, "self": x, "other": x},
}


@pytest.mark.gpu
@pytest.mark.parametrize("op", OF_TORCH)
def test_ops_of_torch_are_captured(op: str) -> None:
    given = OF_TORCH[op](torch.randn(6, 8, device=CUDA))
    record = fitting(use_of_tensors(f"aten.{op}", 1, given)._replace(target=registry.target_of(CUDA)), {"T": 6})[0]
    function = registry.function_of(record)
    if not record.allocates:
        name, _, overload = op.partition(".")
        given["out"] = torch.empty_like(getattr(getattr(torch.ops.aten, name), overload)(**given))
    expected = function(**given)
    if not record.allocates:
        expected = given["out"].clone()
        given["out"].zero_()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = function(**given)
    graph.replay()

    torch.testing.assert_close(found if record.allocates else given["out"], expected, rtol=0, atol=0)


@pytest.mark.parametrize("op", CASES)
def test_steps_have_one_shape(op: str) -> None:
    shapes = []
    for step in STEPS:
        sample = sample_of(op, step, torch.device("cpu"))
        shapes.append({name: x.shape for name, x in sample.items() if isinstance(x, torch.Tensor)})

    assert all(each == shapes[0] for each in shapes)
