"""After each pass of a build, the graph's logits compared with those of transformers' model."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from reference import evaluate, hf_logits, relative_error
from torch import fx
from transformers.core_model_loading import revert_weight_conversion

from precast.builder import pipeline

PROMPTS = (
    [5, 9, 70, 33, 12, 88, 3, 41, 100, 7, 64, 20, 11],
    [17],
    [99, 4, 4, 120, 56, 31, 8, 77, 23, 61, 14, 90, 2, 3, 5, 6, 9, 29],
)
NORMALISED = "merge_duplicates"  # from here on, no node names the device that it was traced on


def packed_inputs(prompts: Sequence[Sequence[int]]) -> dict[str, torch.Tensor]:
    """The inputs of the graph before caches: the sequences in one row, each after the one before it."""
    lengths = [len(prompt) for prompt in prompts]
    positions = [position for length in lengths for position in range(length)]
    spans = [length for length in lengths for _ in range(length)]
    return {
        "input_ids": torch.tensor([list(itertools.chain(*prompts))]),
        "positions": torch.tensor([positions]),
        "rope_lengths": torch.tensor([spans]),
        "cu_seqlens": torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32),
    }


def run_graph(graph: fx.Graph, ctx: Any, state: dict[str, torch.Tensor], prompts: Any = PROMPTS) -> torch.Tensor:
    """The logits `[T, V]` of a graph without caches, with the weights of `state`."""
    available = packed_inputs(prompts)
    available |= {place: info.value for place, info in ctx.constants.items()}
    available |= {place: evaluate(info.recipe, state) for place, info in ctx.params.items()}
    wanted = [node.name for node in graph.nodes if node.op == "placeholder"]
    with torch.no_grad():
        out = fx.Interpreter(fx.GraphModule({}, graph)).run(*[available[name] for name in wanted])
    return out["logits"][0]


def computation(graph: fx.Graph, ctx: Any) -> tuple[Any, ...]:
    """Equal to that of an earlier pass if all that is computed has stayed as it was."""
    nodes = [(node, node.target, node.args, node.kwargs) for node in graph.nodes]
    recipes = {place: info.recipe for place, info in ctx.params.items()}
    return nodes, recipes, {place: id(info.value) for place, info in ctx.constants.items()}


class Comparison:
    """Takes part in the next build, whose model it has: compares after each pass that runs before there are caches, and
    changes something."""

    def __init__(self, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.state = revert_weight_conversion(model, dict(model.state_dict()))
        self.expected = torch.cat(hf_logits(model, PROMPTS))
        self.compared: list[str] = []
        self.last = ""
        self._run = pipeline.run
        monkeypatch.setattr(pipeline, "run", self._observed)

    def _observed(self, graph: fx.Graph, ctx: Any, todo: tuple[Any, ...], **options: Any) -> Any:
        if self.last:  # the passes of caches and of plans
            return self._run(graph, ctx, todo, **options)
        self.last = todo[-1].name
        seen: list[Any] = [None]

        def compare(step: Any, graph: fx.Graph) -> None:
            if step.name != NORMALISED and not self.compared:
                return
            self.compared.append(step.name)
            now = computation(graph, ctx)
            if now != seen[-1]:
                seen.append(now)
                error = relative_error(run_graph(graph, ctx, self.state), self.expected)
                assert error < 1e-5, f"after {step.name}: {error}"

        return self._run(graph, ctx, todo, **options, observe=compare)
