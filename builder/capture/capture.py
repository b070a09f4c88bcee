"""From a source to a graph that passes can work on: factory and export, and the tables of what each name is."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from precast.builder.capture.export import Exported, export
from precast.builder.capture.factory import make_module, make_whole, materialise_buffers
from precast.builder.capture.rope import long_frequencies
from precast.builder.graph.constants import tensor_bytes
from precast.builder.graph.context import ConstantInfo, FxGraph, FxNode, Options, ParamInfo, PassContext
from precast.builder.graph.evaluate import NotComputable, evaluate, example_inputs
from precast.builder.graph.nodes import eliminate_dead_code, placeholder
from precast.builder.source.source import Source
from precast.builder.weights.at_load import reasons
from precast.builder.weights.recipes import ModelCheckpoint
from precast.ir.errors import BuildError
from precast.ir.graph.schema import Recipe, Tie
from precast.ir.manifest import Checkpoint, ModelInfo


@dataclasses.dataclass
class Captured:
    """A traced model: the graph, the passes' context, and what the manifest says of the model."""

    graph: FxGraph
    ctx: PassContext
    model: ModelInfo
    checkpoint: Checkpoint


def capture(source: Source, options: Options) -> Captured:
    """Makes the module on the meta device, traces it, and gathers the values of its small constants."""
    module = make_module(source.config, options.dtype)
    whole = make_whole(source.config, module)
    stored = ModelCheckpoint(module, source.facts.quantisation, whole, source.beside, at_load=options.quantise)
    exported = export(module, options.max_seq_len)
    _keep_used(exported)
    recipes = stored.recipes(exported.params.values())
    params = {place: _param(name, recipes) for place, name in exported.params.items()}
    ctx = PassContext(
        options=options,
        params=params,
        constants=_constants(module, exported),
        symbols=exported.symbols,
        fake_mode=placeholder(exported.graph, "input_ids").meta["val"].fake_mode,
        scales=stored.scales(),
        roundings=stored.roundings() if options.activations == "published" and not options.dequantise else {},
        wide={} if options.quantise is None else reasons(module, recipes),
    )
    _drop_paddings(exported.graph, ctx, int(source.config.get_text_config().vocab_size))
    _share_constants(exported.graph, ctx)
    eliminate_dead_code(exported.graph, ctx)
    used = [exported.params[place] for place in ctx.params]
    return Captured(exported.graph, ctx, _model_info(source, module, options), stored.known_names(used))


def _keep_used(exported: Exported) -> None:
    """Forgets placeholders that no node uses (masks and positions that the routed attention has no use for)."""
    unused = [node for node in exported.graph.nodes if node.op == "placeholder" and not node.users]
    tables: tuple[dict[str, Any], ...] = (exported.params, exported.buffers, exported.literals)
    for node in unused:
        if any(table.pop(node.name, None) is not None for table in tables):
            exported.graph.erase_node(node)


def _drop_paddings(graph: FxGraph, ctx: PassContext, vocab_size: int) -> None:
    """Takes the padding masks that the model made from the graph's outputs.

    Raises BuildError for one that masks a token: it depends on the tokens, which have no padding here.
    """
    (output,) = [node for node in graph.nodes if node.op == "output"]
    paddings = {name: node for name, node in output.args[0].items() if name.startswith("padding_")}
    for node in dict.fromkeys(paddings.values()):
        if not _lets_all_see(node, graph, ctx, vocab_size):
            raise BuildError(
                "feature-unsupported",
                "the model makes a padding mask from the tokens' values, or blocks of tokens that see later ones",
            )
    output.args = ({name: node for name, node in output.args[0].items() if name not in paddings},)


def _lets_all_see(padding: FxNode, graph: FxGraph, ctx: PassContext, vocab_size: int) -> bool:
    """Whether the mask is true for every token of the vocabulary, of which any may be the model's padding."""
    count = min(vocab_size, 1024)
    known = example_inputs(graph, count)
    for start in range(0, vocab_size, count):
        ids = torch.arange(start, start + count).clamp(max=vocab_size - 1)[None]
        known |= {node: ids for node in known if node.name == "input_ids"}
        try:
            seen = evaluate(padding, known, ctx)
        except NotComputable:
            return False
        if not bool(seen.bool().all()):
            return False
    return True


def _param(name: str, recipes: dict[str, Recipe]) -> ParamInfo:
    """The param of a traced name. The tracer sees one of several tied names: all are one param, the one tied to."""
    recipe = recipes[name]
    return ParamInfo(name, recipe) if not isinstance(recipe, Tie) else _param(recipe.param, recipes)


def _constants(module: PreTrainedModel, exported: Exported) -> dict[str, ConstantInfo]:
    longs = {
        f"{path}.long_frequencies": long_frequencies(part)
        for path, part in module.named_modules()
        if hasattr(part, "long_frequencies")
    }
    values = materialise_buffers(module, set(exported.buffers.values()) - set(longs)) | longs
    constants = {place: ConstantInfo(name, values[name]) for place, name in exported.buffers.items()}
    return constants | {
        place: ConstantInfo(f"literal_{index}", value.detach().clone())
        for index, (place, value) in enumerate(exported.literals.items())
    }


def _share_constants(graph: FxGraph, ctx: PassContext) -> None:
    """Equal constants become one: the layers of a model have a copy of a table each."""
    first: dict[tuple[torch.dtype, torch.Size, bytes], FxNode] = {}
    for node in list(graph.nodes):
        value = ctx.constant(node)
        if value is None:
            continue
        same = first.setdefault((value.dtype, value.shape, tensor_bytes(value)), node)
        if same is not node:
            ctx.replace(node, same)
            del ctx.constants[node.name]


def _num_layers(text: PreTrainedConfig) -> int:
    """Of all parts, where a decoder is made of several with layers of their own."""
    own = getattr(text, "num_hidden_layers", None)
    return int(own) if own is not None else sum(_num_layers(getattr(text, name)) for name in text.sub_configs)


def _model_info(source: Source, module: PreTrainedModel, options: Options) -> ModelInfo:
    config = source.config
    text = config.get_text_config()
    return ModelInfo(
        architecture=type(module).__name__,
        model_type=config.model_type,
        dtype=options.dtype,  # type: ignore[arg-type]
        vocab_size=int(text.vocab_size),
        max_seq_len=options.max_seq_len,
        num_layers=_num_layers(text),
        num_parameters=sum(p.numel() for p in module.parameters()),
        eos_token_ids=source.facts.eos_token_ids,
        bos_token_id=source.facts.bos_token_id,
    )
