"""Checkpoints that transformers writes, made into params by recipes: what the model had, to the bit."""

from __future__ import annotations

import json
import re
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
import torch
import transformers
from reference import evaluate
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from precast.builder.capture.factory import make_module, make_whole
from precast.builder.source.shrink import random_model, shrink
from precast.builder.weights.recipes import ModelCheckpoint, unused_patterns
from precast.ir.graph.schema import Cast, Concat, Each, Graph, Param, Read, Recipe, TensorType, Tie
from precast.ir.manifest import Checkpoint
from precast.ir.weights import fit
from precast.ir.weights import recipes as ir_recipes
from precast.ir.weights.checkpoint import CheckpointFiles
from precast.loader.torch_device import open_device
from precast.loader.weights.stream import load_weights

Tensors = dict[str, torch.Tensor]


def recipes_of(model: transformers.PreTrainedModel) -> dict[str, Recipe]:
    """A recipe for each entry of the model's state dict."""
    return ModelCheckpoint(model).recipes(model.state_dict())


def on_meta(config: Any) -> Any:
    """The model of a config without memory."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def params_graph(recipes: dict[str, Recipe], state: Tensors) -> Graph:
    """A graph of params alone, of the types that a state dict has."""
    types = {
        name: TensorType(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        for name, tensor in state.items()
    }  # type: ignore[arg-type]
    return Graph((), (), tuple(Param(name, types[name], recipe) for name, recipe in recipes.items()), (), (), (), {})


class Saved(NamedTuple):
    """A small random model and its checkpoint."""

    state: Tensors
    meta: Any
    tensors: Tensors
    files: CheckpointFiles


def save(model_type: str, directory: Path, **changes: Any) -> Saved:
    config = shrink(AutoConfig.for_model(model_type, **changes))
    model = random_model(config)
    model.save_pretrained(directory)
    tensors = {name: tensor for file in directory.glob("*.safetensors") for name, tensor in load_file(file).items()}
    return Saved(dict(model.state_dict()), on_meta(config), tensors, CheckpointFiles.open(directory))


@pytest.mark.parametrize(
    "model_type",
    [
        "gpt2", "gpt_neox", "mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3", "deepseek_v4", "jamba", "phimoe",
        "granitemoe", "ernie4_5_moe", "kimi_linear", "olmo_hybrid", "hrm_text", "inkling2_text", "nemotron_h", "zamba2",
        "gemma3", "qwen3_5_moe", "llama4_text", "longcat_flash", "jetmoe",
    ],
)  # fmt: skip
def test_params_are_what_was_saved(model_type: str, tmp_path: Path) -> None:
    saved = save(model_type, tmp_path)

    recipes = recipes_of(saved.meta)
    rules = ModelCheckpoint(saved.meta).known_names(used=recipes)

    assert recipes.keys() == saved.state.keys()
    for name, recipe in recipes.items():
        if not isinstance(recipe, Tie):
            assert torch.equal(evaluate(recipe, saved.tensors), saved.state[name]), name
    made = load_weights(params_graph(recipes, saved.state), rules, saved.files, device=open_device("cpu"))
    for name, tensor in saved.state.items():
        assert torch.equal(made.tensors[name], tensor), name


def test_experts_of_the_hub_are_stacked_and_fused(tmp_path: Path) -> None:
    config = shrink(AutoConfig.for_model("mixtral", num_local_experts=8))
    (experts, fused, hidden) = on_meta(config).state_dict()["model.layers.1.mlp.experts.gate_up_proj"].shape

    recipe = recipes_of(on_meta(config))["model.layers.1.mlp.experts.gate_up_proj"]

    def each(name: str) -> Recipe:
        tensor = f"model.layers.1.block_sparse_moe.experts.*.{name}.weight"
        return Each(Read(tensor, (fused // 2, hidden)), 0, experts)

    assert recipe == Cast(Concat((each("w1"), each("w3")), 1), "float32")


def test_recipes_are_as_long_for_many_experts_as_for_few() -> None:
    def size(experts: int) -> int:
        config = AutoConfig.for_model(
            "qwen3_moe",
            num_experts=experts,
            hidden_size=64,
            moe_intermediate_size=16,
            num_hidden_layers=2,
            vocab_size=99,
        )
        return len(msgspec.msgpack.encode(list(recipes_of(on_meta(config)).values())))

    assert size(512) - size(8) < 100


# --- multimodal checkpoints --------------------------------------------------------------------------------------


def test_what_the_text_decoder_leaves_out_is_listed_as_unused(tmp_path: Path) -> None:
    saved = save("gemma3", tmp_path)
    text = [name for name in saved.state if "vision" not in name and "multi_modal" not in name]
    stored = ModelCheckpoint(saved.meta)

    recipes, rules = stored.recipes(text), stored.known_names(text)

    assert rules.unused == ("multi_modal_projector.*", "vision_tower.*")
    assert any(name.startswith("vision_tower.") for name in saved.tensors)
    graph = params_graph(recipes, saved.state)
    assert fit.problems(graph, rules, saved.files) == []
    everything = msgspec.structs.replace(rules, unused=())
    assert {problem.kind for problem in fit.problems(graph, everything, saved.files)} == {"unexpected"}


def test_a_text_model_reads_its_part_of_a_multimodal_checkpoint() -> None:
    meta = on_meta(shrink(AutoConfig.for_model("qwen3_5_text")))
    names = {read.tensor for recipe in recipes_of(meta).values() for read in ir_recipes.leaves(recipe)}
    multimodal = {name.replace("model.", "model.language_model.", 1) for name in names}

    rules = ModelCheckpoint(meta).known_names()

    assert rules.prefixes == {"model.": "model.language_model."}
    assert {fit.resolve(name, multimodal, rules) for name in names} == multimodal
    assert {fit.resolve(name, names, rules) for name in names} == names


@pytest.mark.parametrize("model_type", ["llama4", "mllama"])
def test_what_stands_beside_a_text_decoder_is_listed_as_unused(model_type: str) -> None:
    config = shrink(AutoConfig.for_model(model_type))
    module = make_module(config, "float32")
    whole = make_whole(config, module)
    assert whole is not None

    alone = ModelCheckpoint(module).known_names(module.state_dict())
    rules = ModelCheckpoint(module, whole=whole).known_names(module.state_dict())

    assert alone.unused == ()
    assert rules.unused == ("multi_modal_projector.*", "vision_model.*")


@pytest.mark.parametrize("model_type", ["llama", "llama4_text", "gemma3", "mixtral"])
def test_a_model_that_is_no_part_has_no_whole(model_type: str) -> None:
    config = shrink(AutoConfig.for_model(model_type))

    assert make_whole(config, make_module(config, "float32")) is None


def test_a_whole_that_cannot_be_made_leaves_its_tensors_unexpected() -> None:
    config = shrink(AutoConfig.for_model("emu3"))  # its image part, as small, has too few channels for its norms

    assert make_whole(config, make_module(config, "float32")) is None


KIMI = Path(__file__).parents[2] / "configs" / "nvidia--Kimi-K2.5-NVFP4" / "config.json"


@pytest.mark.parametrize("is_published", [True, False])
def test_names_are_the_publishers_and_those_of_transformers_are_read(is_published: bool, tmp_path: Path) -> None:
    config = shrink(AutoConfig.for_model("kimi_k25"))
    model = random_model(config)
    model.save_pretrained(tmp_path)
    written = load_file(tmp_path / "model.safetensors")
    published = {name.replace("language_model.model.blocks.", "language_model.model.layers."): tensor
                 for name, tensor in written.items()}  # fmt: skip
    if is_published:
        save_file(published, tmp_path / "model.safetensors")
    state = {name: tensor for name, tensor in model.state_dict().items() if "language_model" in name}
    stored = ModelCheckpoint(make_module(config, "float32"))

    recipes, rules = stored.recipes(state), stored.known_names(state)
    graph = params_graph(recipes, state)
    made = load_weights(graph, rules, CheckpointFiles.open(tmp_path), device=open_device("cpu"))

    assert written.keys() != published.keys()
    kept = json.loads(KIMI.read_text(encoding="utf-8"))["quantization_config"]["ignore"]
    read = [read.tensor for recipe in recipes.values() for read in ir_recipes.leaves(recipe)]
    assert "language_model.model.layers.0.self_attn*" in kept
    assert any(fnmatch(name, "language_model.model.layers.0.self_attn*") for name in read)
    for name, tensor in state.items():
        assert torch.equal(made.tensors[name], tensor), name


@pytest.mark.parametrize("is_published", [True, False])
def test_deepseek_v4_s_names(is_published: bool, tmp_path: Path) -> None:
    """The hub's names have no prefix, and tell norms apart that transformers calls alike."""
    config = shrink(AutoConfig.for_model("deepseek_v4"))
    model = random_model(config)
    model.save_pretrained(tmp_path)
    written = load_file(tmp_path / "model.safetensors")
    published = {_of_v4(name): tensor for name, tensor in written.items()}
    if is_published:
        save_file(published, tmp_path / "model.safetensors")
    state = model.state_dict()
    stored = ModelCheckpoint(make_module(config, "float32"))

    recipes, rules = stored.recipes(state), stored.known_names(state)
    made = load_weights(params_graph(recipes, state), rules, CheckpointFiles.open(tmp_path), device=open_device("cpu"))

    assert {"embed.weight", "head.weight", "norm.weight", "hc_head_fn", "layers.0.ffn.experts.0.w1.weight",
            "layers.0.attn.kv_norm.weight", "layers.2.attn.compressor.norm.weight", "layers.2.attn.indexer.wq_b.weight",
            "layers.0.ffn.gate.tid2eid"} <= published.keys()  # fmt: skip
    for name, tensor in state.items():
        assert torch.equal(made.tensors[name], tensor), name


def _of_v4(name: str) -> str:
    name = name.removeprefix("model.").replace("embed_tokens.", "embed.").replace("hc_head.hc_", "hc_head_")
    return re.sub(r"(layers\.\d+\.attn)\.norm\.", r"\1.kv_norm.", name)


# --- experts without weights -------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_of_hub", [True, False])
def test_rows_of_experts_without_weights_may_be_stored(is_of_hub: bool, tmp_path: Path) -> None:
    saved = save("longcat_flash", tmp_path, n_routed_experts=4, zero_expert_num=2)
    config = saved.meta.config
    module = make_module(config, "float32")
    stored = ModelCheckpoint(module, whole=make_whole(config, module))
    beyond = [name for name in saved.tensors if any(f".experts.{n}." in name for n in (4, 5))]
    if is_of_hub:
        save_file({name: saved.tensors[name] for name in saved.tensors.keys() - beyond}, tmp_path / "model.safetensors")
    state = {name: saved.state[name][: len(tensor)] for name, tensor in module.state_dict().items()}

    graph = params_graph(stored.recipes(state), state)
    made = load_weights(graph, stored.known_names(state), CheckpointFiles.open(tmp_path), device=open_device("cpu"))

    assert beyond
    for name, tensor in state.items():
        assert torch.equal(made.tensors[name], tensor), name


@pytest.mark.parametrize(
    ("names", "used", "patterns"),
    [
        (["a.b", "a.c", "v.x.w", "v.y"], ["a.b", "a.c"], ["v.*"]),
        (["a.b", "a.c"], ["a.b"], ["a.c"]),
        (["a.b", "a.c"], ["a.b", "a.c"], []),
        (["l.0.a.w", "l.1.a.w", "l.0.b.w", "l.1.b.w", "l.1.b.v"], ["l.0.a.w", "l.1.a.w"], ["l.*.b.*"]),
        (["l.0.a", "l.0.b", "l.1.b", "l.1.c"], ["l.0.a", "l.1.b"], ["l.*.c", "l.0.b"]),
        (["a.b", "a.b.c"], ["a.b.c"], ["a.b"]),
        (["l.0.e.0.w", "l.1.e.0.w", "l.0.e.1.w", "l.1.e.1.w"], ["l.0.e.0.w", "l.1.e.0.w"], ["l.*.e.1.*"]),
        (["l.0.e.0.w", "l.0.e.1.w", "l.1.e.1.w"], ["l.0.e.0.w", "l.1.e.1.w"], ["l.0.e.1.*"]),
    ],
)  # fmt: skip
def test_unused_patterns(names: list[str], used: list[str], patterns: list[str]) -> None:
    assert list(unused_patterns(names, used)) == patterns


def test_a_model_that_is_all_used_leaves_nothing_out() -> None:
    meta = on_meta(shrink(AutoConfig.for_model("mixtral")))

    assert ModelCheckpoint(meta).known_names(used=meta.state_dict()).unused == ()
    assert ModelCheckpoint(meta).known_names().unused == Checkpoint().unused
