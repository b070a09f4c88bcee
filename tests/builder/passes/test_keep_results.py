"""Each pass, on each family: the graph's logits stay those of transformers' model."""

from __future__ import annotations

import itertools
from typing import Any

import families
import pytest
import torch
from reference import evaluate, hf_logits, relative_error
from torch import fx
from transformers.core_model_loading import revert_weight_conversion

from precast.builder import pipeline
from precast.builder.capture.capture import Captured, capture
from precast.builder.graph.context import Options
from precast.builder.passes.graph_pass import Pass
from precast.builder.source.source import limit, open_source
from precast.kernels.registry import register

PROMPTS = (
    [5, 9, 70, 33, 12, 88, 3, 41, 100, 7, 64, 20, 11],
    [17],
    [99, 4, 4, 120, 56, 31, 8, 77, 23, 61, 14, 90, 2, 3, 5, 6, 9, 29],
)
NORMALISED = "merge_duplicates"  # from here on, no node names the device that it was traced on


def packed_inputs(prompts: Any) -> dict[str, torch.Tensor]:
    """The inputs of the graph before caches: sequences one behind the other."""
    lengths = [len(prompt) for prompt in prompts]
    positions = [position for length in lengths for position in range(length)]
    spans = [length for length in lengths for _ in range(length)]
    return {
        "input_ids": torch.tensor([list(itertools.chain(*prompts))]),
        "positions": torch.tensor([positions]),
        "rope_lengths": torch.tensor([spans]),
        "cu_seqlens": torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32),
    }


def run_graph(graph: fx.Graph, captured: Captured, state: dict[str, torch.Tensor]) -> torch.Tensor:
    """The logits `[T, V]` of a graph without caches."""
    available = packed_inputs(PROMPTS)
    available |= {place: info.value for place, info in captured.ctx.constants.items()}
    available |= {place: evaluate(info.recipe, state) for place, info in captured.ctx.params.items()}
    wanted = [node.name for node in graph.nodes if node.op == "placeholder"]
    with torch.no_grad():
        out = fx.Interpreter(fx.GraphModule({}, graph)).run(*[available[name] for name in wanted])
    return out["logits"][0]


@pytest.mark.parametrize("variant", families.PASS_BY_PASS)
def test_logits_after_each_pass(variant: str) -> None:
    register()
    model = families.make_model(variant)
    state = revert_weight_conversion(model, dict(model.state_dict()))
    expected = torch.cat(hf_logits(model, PROMPTS))
    config = families.make_config(variant)
    captured = capture(open_source(config), Options("float32", limit(config, None)))
    passes, _ = pipeline.split(pipeline.passes(), "shard")
    compared = []

    def compare(step: Pass, graph: fx.Graph) -> None:
        if step.name == NORMALISED or compared:
            compared.append(step.name)
            error = relative_error(run_graph(graph, captured, state), expected)
            assert error < 1e-5, f"after {step.name}: {error}"

    pipeline.run(captured.graph, captured.ctx, passes, observe=compare)

    assert compared[-1] == passes[-1].name
