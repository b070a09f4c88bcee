"""From a module to an FX graph: `torch.export` with keyword inputs and a symbolic number of tokens.

The graph takes `input_ids`, `positions` and `rope_lengths` `[1, T]`, and `cu_seqlens` `[B + 1]`, by name, and its
params and buffers as placeholders; it returns `{"logits": [1, T, V]}`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import re
from typing import cast

import torch
import torch._dynamo.config as dynamo_config
import torch.export._trace as exporter
from torch._dynamo.exc import UserError
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import config as fx_config
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from transformers import PreTrainedModel

from precast.builder.capture.experts import routed_experts
from precast.builder.capture.marks import routed_functions
from precast.builder.capture.modules import routed_modules
from precast.builder.capture.routing import Trace, routed_attention, tracing
from precast.builder.graph.context import FxGraph, tensor
from precast.builder.graph.nodes import placeholder
from precast.builder.limits import MAX_SEQUENCES, MAX_TOKENS
from precast.builder.replaced import replaced
from precast.ir.errors import BuildError, PrecastError
from precast.ir.graph import symbols
from precast.ir.graph.schema import Expr
from precast.ir.ops.op import ShapeError


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
    symbols: dict[str, Expr]
    """The exporter's symbol -> ours: `T`, `B + 1`."""


class _KeywordModel(torch.nn.Module):
    """The model as a function of the packed batch's inputs, all by keyword."""

    def __init__(self, model: PreTrainedModel, max_seq_len: int) -> None:
        super().__init__()
        self.model = model
        self.max_seq_len = max_seq_len

    def forward(
        self, *, input_ids: torch.Tensor, positions: torch.Tensor, rope_lengths: torch.Tensor, cu_seqlens: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        with tracing(Trace(cu_seqlens, rope_lengths, self.max_seq_len)) as trace:
            out = self.model(input_ids=input_ids, position_ids=positions, use_cache=False, return_dict=True)
        return {"logits": out.logits} | {f"padding_{i}": mask for i, mask in enumerate(trace.paddings)}


def export(model: PreTrainedModel, max_seq_len: int) -> Exported:
    """Traces the model, whose tensors on the meta device become fake ones on the CPU: they compute shapes, nothing
    more, and go together with the tensors that a model's code makes from numbers, whose values stay known.

    Raises BuildError: "export-failed" with the exporter's reason when the model's code can't be traced,
    "config-invalid" for sizes that an op refuses.
    """
    ids = torch.zeros(1, 7, dtype=torch.int64)
    inputs = {
        "input_ids": ids,
        "positions": ids.clone(),
        "rope_lengths": ids.clone(),
        "cu_seqlens": torch.zeros(5, dtype=torch.int32),
    }
    module = _KeywordModel(model, max_seq_len)
    try:
        with (
            torch.no_grad(),
            _quick_and_quiet(),
            _use_lazy_graph_module(True),  # nobody runs the graphs that the exporter has in between
            _results_kept(model),
            routed_attention(),
            routed_functions(model),
            routed_modules(model),
            routed_experts(),
        ):
            _make_fake(model)
            try:
                return _unpack(_trace(module, inputs, 1, MAX_TOKENS))
            except UserError:
                # Tables of masks end at the longest sequence, and `min(limit, T) <= T` is not seen to be true. What
                # depends on them goes with the attention, or is refused with what else looks across tokens.
                return _unpack(_trace(module, inputs, 2, max_seq_len - 1, asserts=True))
    except PrecastError as error:
        raise error.inside(type(model).__name__) from None
    except ShapeError as error:  # an op of ours refuses sizes that only the config can have said
        raise BuildError(
            "config-invalid",
            f"the config gives a bundle that would be refused: {error}",
            where=type(model).__name__,
            fix="check the numbers in the config",
        ) from None
    except Exception as error:  # the exporter raises what the model's own code raises
        raise BuildError(
            "export-failed", f"{type(model).__name__} can't be traced: {type(error).__name__}: {_reason(error)}"
        ) from error


def _quick_and_quiet() -> contextlib.AbstractContextManager[None]:
    """Leaves out of a trace what nobody reads.

    A model's own `torch.no_grad()` does nothing: no gradients are on, and the exporter, which takes each for a region
    of its own, would spend more time on cutting them out and putting them back than on the trace. Nodes carry no stack
    traces, a tenth of the time. And the exporter doesn't print the graph that it has so far, and its guesses, to
    standard error when it can't go on: our error says what it met, and where.
    """
    return replaced(
        *((torch.no_grad, name, lambda *_: None) for name in ("__enter__", "__exit__")),
        (fx_config, "do_not_emit_stack_traces", True),
        (exporter, "print", lambda *_, **__: None),
        *((logging.getLogger(name), "disabled", True) for name in _LOGGERS),
    )


def _results_kept(model: PreTrainedModel) -> contextlib.AbstractContextManager[None]:
    """Lets fake tensors keep what each operation gives, for the next one like it, in models of many layers.

    To keep a result takes half as long as the operation: in three layers that is a third of the trace more, in
    twenty-four a quarter less.
    """
    layers = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    return cast(
        contextlib.AbstractContextManager[None],
        dynamo_config.patch(fake_tensor_cache_enabled=layers is None or layers > _FEW_LAYERS),
    )


_FEW_LAYERS = 6
_LOGGERS = ("torch.export._trace", "torch._subclasses.fake_tensor", "torch.fx.experimental.symbolic_shapes")


def _make_fake(model: PreTrainedModel) -> None:
    """Puts a fake tensor on the CPU in the place of each of the module's tensors on the meta device."""
    made: dict[int, torch.Tensor] = {}
    with FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True):
        for module in model.modules():
            for table in (module._parameters, module._buffers):
                for name, value in table.items():
                    if value is None or value.device.type != "meta":
                        continue
                    if id(value) not in made:  # tied tensors stay one
                        fake = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
                        made[id(value)] = torch.nn.Parameter(fake, False) if table is module._parameters else fake
                    table[name] = made[id(value)]  # type: ignore[assignment]


def _trace(
    module: _KeywordModel, inputs: dict[str, torch.Tensor], low: int, high: int, *, asserts: bool = False
) -> torch.export.ExportedProgram:
    """Traces for any number of tokens in `low .. high`; with `asserts`, what can't be shown for all of them is asserted
    in the graph, instead of refused."""
    tokens = torch.export.Dim("T", min=low, max=high)
    sequences = torch.export.Dim("B1", min=2, max=MAX_SEQUENCES + 1)
    shapes = {name: {1: tokens} for name in ("input_ids", "positions", "rope_lengths")} | {"cu_seqlens": {0: sequences}}
    return torch.export.export(
        module, (), kwargs=inputs, dynamic_shapes=shapes, strict=False,
        prefer_deferred_runtime_asserts_over_guards=asserts,
    )  # fmt: skip


def _reason(error: Exception) -> str:
    """What the error says, in one line: without the exporter's advice, and with the line of the model's code that it
    stands for, where it names one."""
    text = str(error)
    said = " ".join(_ADVICE.split(text, maxsplit=1)[0].split()[:_MOST_WORDS]) or "no reason given"
    place = _PLACE.search(text)
    if place is None:
        return said
    file, line, code = place.groups()
    return f"{said.removesuffix('.')}, at {code.strip()} ({'/'.join(file.split('/')[-2:])}:{line})"


_MOST_WORDS = 60
_ADVICE = re.compile(
    r"\(unhinted: |\(Size-like symbols: |consider using data-dependent|Caused by: |For more information|"
    r"For extended logs|The following call raised|The error above occurred|Suggested fixes:"
)
"""Where the exporter's message goes on to how it may be debugged."""
_PLACE = re.compile(r'The following call raised this error:\n *File "(.+)", line (\d+), in .*\n(.+)')
"""The line of the model's code."""


def _unpack(program: torch.export.ExportedProgram) -> Exported:
    signature = program.graph_signature
    graph = _consistent(program.graph_module.graph)
    (output,) = [node for node in graph.nodes if node.op == "output"]
    names = ("logits", *(f"padding_{index}" for index in range(len(output.args[0]) - 1)))
    output.args = (dict(zip(names, output.args[0], strict=True)),)
    persistent = dict(signature.inputs_to_buffers)
    volatile = set(signature.non_persistent_buffers)
    params = {place: target.removeprefix("model.") for place, target in signature.inputs_to_parameters.items()}
    params |= {p: t.removeprefix("model.") for p, t in persistent.items() if t not in volatile}
    literals = {
        place: cast(torch.Tensor, program.constants[target])
        for place, target in signature.inputs_to_lifted_tensor_constants.items()
    }
    tokens = tensor(placeholder(graph, "input_ids")).shape[1]
    bounds = tensor(placeholder(graph, "cu_seqlens")).shape[0]
    return Exported(
        graph=graph,
        params=params,
        buffers={p: t.removeprefix("model.") for p, t in persistent.items() if t in volatile},
        literals=literals,
        symbols={str(tokens): "T", str(bounds): symbols.add("B", 1)},
    )


def _consistent(graph: torch.fx.Graph) -> FxGraph:
    """The graph, or a copy where the exporter left nodes that use others which don't know of it."""
    if any(node not in source.users for node in graph.nodes for source in node.all_input_nodes):
        copy = torch.fx.Graph()
        copy.output(copy.graph_copy(graph, {}))
        graph = copy
    return cast(FxGraph, graph)
