"""From a module to an FX graph: `torch.export` with keyword inputs and a symbolic number of tokens.

The graph takes `input_ids`, `positions` and `rope_lengths` `[1, T]`, and `cu_seqlens` `[B + 1]`, by name, and its
params and buffers as placeholders; it returns `{"logits": [1, T, V]}`.
"""

from __future__ import annotations

import dataclasses
from typing import cast

import torch
from transformers import PreTrainedModel

from precast.builder.fx_types import FxGraph
from precast.builder.routing import Trace, routed_attention, tracing
from precast.ir.errors import BuildError, PrecastError

MAX_TOKENS = 1 << 20
MAX_SEQUENCES = 1 << 16


@dataclasses.dataclass
class Exported:
    """A traced model: its graph, and what its placeholders stand for."""

    graph: FxGraph
    params: dict[str, str]
    """Placeholder -> the parameter's (or persistent buffer's) name in the module."""
    buffers: dict[str, str]
    """Placeholder -> the non-persistent buffer's name in the module."""
    literals: dict[str, torch.Tensor]
    """Placeholder -> a tensor that the model's code makes from numbers."""
    symbols: dict[str, str]
    """The exporter's symbol -> ours (`T`, `B`)."""


class _KeywordModel(torch.nn.Module):
    """The model as a function of the packed batch's inputs, all by keyword."""

    def __init__(self, model: PreTrainedModel, max_seq_len: int) -> None:
        super().__init__()
        self.model = model
        self.max_seq_len = max_seq_len

    def forward(
        self, *, input_ids: torch.Tensor, positions: torch.Tensor, rope_lengths: torch.Tensor, cu_seqlens: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        with tracing(Trace(cu_seqlens, rope_lengths, self.max_seq_len)):
            out = self.model(input_ids=input_ids, position_ids=positions, use_cache=False, return_dict=True)
        return {"logits": out.logits}


def export(model: PreTrainedModel, max_seq_len: int) -> Exported:
    """Traces the model on the meta device.

    Raises BuildError("export-failed") with the exporter's reason when the model's code can't be traced.
    """
    tokens, sequences = torch.export.Dim("T", min=1, max=MAX_TOKENS), torch.export.Dim("B1", min=2, max=MAX_SEQUENCES)
    ids = torch.zeros(1, 7, dtype=torch.int64, device="meta")
    inputs = {
        "input_ids": ids,
        "positions": ids.clone(),
        "rope_lengths": ids.clone(),
        "cu_seqlens": torch.zeros(5, dtype=torch.int32, device="meta"),
    }
    shapes = {name: {1: tokens} for name in ("input_ids", "positions", "rope_lengths")} | {"cu_seqlens": {0: sequences}}
    try:
        with torch.no_grad(), routed_attention():
            program = torch.export.export(
                _KeywordModel(model, max_seq_len), (), kwargs=inputs, dynamic_shapes=shapes, strict=False
            )
    except PrecastError as error:
        raise error.inside(type(model).__name__) from None
    except Exception as error:  # the exporter raises what the model's own code raises
        raise BuildError(
            "export-failed", f"{type(model).__name__} can't be traced: {type(error).__name__}: {_reason(error)}"
        ) from error
    return _unpack(program)


def _reason(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:3]) or "no reason given"


def _unpack(program: torch.export.ExportedProgram) -> Exported:
    signature = program.graph_signature
    graph = cast(FxGraph, program.graph_module.graph)
    (output,) = [node for node in graph.nodes if node.op == "output"]
    output.args = (dict(zip(("logits",), output.args[0], strict=True)),)
    persistent = dict(signature.inputs_to_buffers)
    volatile = set(signature.non_persistent_buffers)
    params = {place: target.removeprefix("model.") for place, target in signature.inputs_to_parameters.items()}
    params |= {p: t.removeprefix("model.") for p, t in persistent.items() if t not in volatile}
    literals = {
        place: cast(torch.Tensor, program.constants[target])
        for place, target in signature.inputs_to_lifted_tensor_constants.items()
    }
    return Exported(
        graph=graph,
        params=params,
        buffers={p: t.removeprefix("model.") for p, t in persistent.items() if t in volatile},
        literals=literals,
        symbols=_symbols(graph),
    )


def _symbols(graph: FxGraph) -> dict[str, str]:
    found = {}
    for node in graph.nodes:
        if node.op == "placeholder" and node.name == "input_ids":
            found[str(node.meta["val"].shape[1])] = "T"
        elif node.op == "placeholder" and node.name == "cu_seqlens":
            found[str(node.meta["val"].shape[0])] = "B1"
    return found
