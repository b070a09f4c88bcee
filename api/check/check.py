"""`precast build --check`: the model made tiny, built, run, and compared with transformers on random weights.

What is compared is the whole line: tracing, passes, recipes, caches and kernels of the CPU. Where it differs, the
first layer is named whose result does. Nothing here imports transformers before the builder has looked at its version.
"""

from __future__ import annotations

import contextlib
import re
import tempfile
from collections.abc import Iterator
from itertools import chain, combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from precast.builder.build import build
from precast.builder.source.model_class import own_code
from precast.builder.source.shrink import random_model, shrink
from precast.check.agreement import PROMPTS, TOLERANCE, agreement, relative_error, run_packed
from precast.check.shards import TOLERANCE as SHARDS_TOLERANCE
from precast.check.shards import proofs
from precast.ir.artifact import Bundle
from precast.ir.errors import BuildError
from precast.ir.graph.schema import Call, Graph, Value

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

MAX_RANKS = 4
"""Over which the tiny model is split; more would divide hardly anything that it has."""

_LAYER = re.compile(r".*?\.\d+(?=\.)")
"""The outermost numbered module of a path."""


def compare(config: PreTrainedConfig) -> None:
    """Compare what is built of `config`, made tiny, with transformers, in float32 on the CPU: logits and tokens.

    Then its ranks are compared with it, in all worlds of 2 and 4 that it can be split over. Raises BuildError:
    `check-failed` names the first layer that differs, or the world; else what building the tiny model raises.
    """
    with _quiet_transformers(), tempfile.TemporaryDirectory() as folder:
        model = random_model(shrink(config))
        weights = Path(folder) / "checkpoint"
        model.save_pretrained(weights)
        has_code = own_code(config) is not None  # it got here because that is allowed
        bundle = build(weights, Path(folder) / "bundle", dtype="float32", allow_remote_code=has_code)
        found = agreement(bundle, weights, model)
        if not found.logits_equal:
            where = _first_difference(bundle, weights, model)
            raise _failed(config, f"its logits differ by {found.logits_error:.1e} (relative)", where)
        wrong = next((proof for proof in proofs(bundle, weights, most=MAX_RANKS) if not proof.holds), None)
    if not found.tokens_equal:
        raise _failed(config, "its logits are equal, but the tokens generated from its caches are not", "the caches")
    if wrong is not None:
        raise BuildError(
            "check-failed",
            f"made tiny and split over {wrong.text}, this {config.model_type} model doesn't compute what it does on "
            f"one: its logits differ by {wrong.error:.1e} (relative), expected less than {SHARDS_TOLERANCE:.0e}",
            fix="report it with the config.json; a build without the check packs the bundle all the same",
        )


@contextlib.contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Keeps transformers' bars and warnings from standard error: they are about the tiny model, which nobody asked for.
    Errors stay."""
    from transformers import logging as messages

    verbosity, had_bars = messages.get_verbosity(), messages.is_progress_bar_enabled()
    messages.set_verbosity_error()
    messages.disable_progress_bar()
    try:
        yield
    finally:
        messages.set_verbosity(verbosity)
        if had_bars:
            messages.enable_progress_bar()


def _failed(config: PreTrainedConfig, how: str, where: str) -> BuildError:
    return BuildError(
        "check-failed",
        f"made tiny and given random weights, this {config.model_type} model doesn't compute what transformers "
        f"computes: {how}, expected less than {TOLERANCE:.0e}; the first difference is in {where}",
        fix="report it with the config.json; a build without the check packs the bundle all the same",
    )


def _first_difference(bundle: Bundle, weights: Path, model: PreTrainedModel) -> str:
    """The first layer, in the order of the graph, none of whose results is what transformers' layer returns."""
    prompt = list(PROMPTS[0])
    expected = _layer_outputs(model, prompt)
    results = _layer_results(bundle.graph)
    for layer, hidden in expected.items():
        if layer in results:
            found = [_computed(bundle, weights, value, prompt) for value in results[layer]]
            if not any(
                relative_error(torch.stack(list(parts)).sum(0), hidden) < TOLERANCE for parts in _parts(found, hidden)
            ):
                return layer
    return f"what comes after {next(reversed(expected))}" if expected else "the model, which has no layers"


def _parts(found: list[torch.Tensor], hidden: torch.Tensor) -> Iterator[tuple[Any, ...]]:
    """Each result of a layer, and each two: a layer's last addition may be done by the next one."""
    fitting = [tensor for tensor in found if tensor.shape == hidden.shape]
    return chain(combinations(fitting, 1), combinations(fitting, 2))


def _layer_outputs(model: PreTrainedModel, prompt: list[int]) -> dict[str, torch.Tensor]:
    """What each of transformers' layers returns for the prompt, `[T, D]`, by the layer's path, in their order."""
    outputs: dict[str, torch.Tensor] = {}

    def keep(path: str) -> Any:
        def hook(module: torch.nn.Module, args: Any, output: Any) -> None:
            first = output[0] if isinstance(output, (tuple, list)) else output
            if isinstance(first, torch.Tensor) and first.dim() == 3:
                outputs[path] = first[0].clone()

        return hook

    layers = [(path, module) for path, module in model.named_modules() if path and _layer_of(f"{path}.") == path]
    hooks = [module.register_forward_hook(keep(path)) for path, module in layers]
    with torch.no_grad():
        model(input_ids=torch.tensor([prompt]), use_cache=False)
    for hook in hooks:
        hook.remove()
    return outputs


def _layer_results(graph: Graph) -> dict[str, list[Value]]:
    """What the last call of each layer returns, by the path that the names of its params begin with."""
    results: dict[str, list[Value]] = {}
    params = {param.name for param in graph.params}
    for step in graph.main:
        if isinstance(step, Call):
            path = next((_layer_of(name) for name in step.args.values() if name in params), None)
            if path is not None:
                results[path] = [value for value in step.outputs if len(value.type.shape) == 3]
    return results


def _layer_of(path: str) -> str | None:
    match = _LAYER.match(path)
    return match[0] if match else None


def _computed(bundle: Bundle, weights: Path, value: Value, prompt: list[int]) -> torch.Tensor:
    """The value for each token of the prompt, `[T, D]`: the graph is run with it in the place of the logits."""
    graph = msgspec.structs.replace(bundle.graph, outputs={"logits": value.name})
    opened = msgspec.structs.replace(bundle, graph=graph)
    return run_packed(opened, weights, [prompt])[0]
