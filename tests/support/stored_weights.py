"""Checkpoints of random models, quantised by a test, compared with what transformers loads of the same values."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import quantised
import torch
from quantised import Stored
from reference import evaluate
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from precast.builder.capture.factory import make_module
from precast.builder.source.shrink import random_model
from precast.builder.weights.recipes import ModelCheckpoint
from precast.ir.graph.schema import Graph, Param, TensorType, Tie
from precast.ir.weights.checkpoint import CheckpointFiles
from precast.ir.weights.fit import resolve
from precast.ir.weights.recipes import each_leaf
from precast.loader.torch_device import open_device
from precast.loader.weights.stream import load_weights

Tensors = dict[str, torch.Tensor]


Quantise = Callable[[str, torch.Tensor], Stored | None]


SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 131,
    "num_key_value_heads": 2, "head_dim": 16,
}  # fmt: skip


def config_of(model_type: str, **changes: Any) -> Any:
    return AutoConfig.for_model(model_type, **{**SIZES, **changes})


def gemma4(**changes: Any) -> Any:
    experts = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32}
    return config_of("gemma4_text", vocab_size_per_layer_input=131, hidden_size_per_layer_input=0, **experts, **changes)


def check(config: Any, entries: dict[str, Any], quantise: Quantise, folder: Path, *, dtype: str = "float32") -> None:
    """Quantises a random model's checkpoint, tensor by tensor, and compares what becomes of it with transformers."""
    plain, stored = folder / "plain", folder / "stored"
    random_model(config).save_pretrained(plain)
    dense = load_file(plain / "model.safetensors")
    files: Tensors = {}
    for name, tensor in dense.items():
        made = quantise(name, tensor)
        files |= {name: tensor} if made is None else made[0]
        dense[name] = tensor if made is None else made[1].contiguous()
    assert files.keys() != dense.keys(), "nothing was quantised"
    save_file(dense, plain / "model.safetensors", metadata={"format": "pt"})
    stored.mkdir()
    save_file({name: tensor.contiguous() for name, tensor in files.items()}, stored / "model.safetensors")
    expected = AutoModelForCausalLM.from_pretrained(plain, dtype=getattr(torch, dtype)).state_dict()
    meta = make_module(config, dtype)

    checkpoint = ModelCheckpoint(meta, entries)
    recipes, rules = checkpoint.recipes(expected), checkpoint.known_names(expected)

    types = {name: TensorType(str(tensor.dtype)[6:], tuple(tensor.shape)) for name, tensor in expected.items()}  # type: ignore[arg-type]
    params = tuple(Param(name, types[name], made) for name, made in recipes.items())
    graph = Graph((), (), params, (), (), (), {})
    loaded = load_weights(graph, rules, CheckpointFiles.open(stored), device=open_device("cpu"))
    for name, recipe in recipes.items():
        assert torch.equal(loaded.tensors[name], expected[name]), name
        if not isinstance(recipe, Tie):
            found = {read.tensor: files[str(resolve(read.tensor, files, rules))] for read in each_leaf(recipe)}
            assert torch.equal(evaluate(recipe, found), expected[name]), name


def linear(name: str) -> bool:
    """Projections inside of layers."""
    return ".layers." in name and name.endswith("_proj.weight")


def fp8(suffix: str, block: tuple[int, int] | None, shape: Callable[[torch.Tensor], tuple[int, ...]]) -> Quantise:
    def quantise(name: str, tensor: torch.Tensor) -> Stored | None:
        return quantised.float8(name, tensor, block, suffix, shape(tensor)) if linear(name) else None

    return quantise


def but(part: str, quantise: Quantise) -> Quantise:
    """Leaves the tensors of this part as they are."""
    return lambda name, tensor: None if part in name else quantise(name, tensor)


def blocks(tensor: torch.Tensor) -> tuple[int, ...]:
    return -(-tensor.shape[0] // 32), -(-tensor.shape[1] // 32)


def projections(stored: Callable[[str, torch.Tensor], Stored]) -> Quantise:
    """Quantises projections inside of layers."""
    return lambda name, tensor: stored(name, tensor) if linear(name) else None
