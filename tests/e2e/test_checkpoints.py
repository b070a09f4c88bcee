"""Checkpoints as people have them: without the base prefix, in shards, in another dtype, with leftovers, and broken."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import families
import pytest
import torch
from click.testing import CliRunner
from reference import hf_logits, relative_error
from safetensors.torch import load_file, save_file

import precast
from precast.cli.main import main

PROMPT = [5, 9, 70, 33, 12, 88]


def logits_error(folder: Path, model: Any, dtype: str = "float32") -> float:
    """Builds from the checkpoint directory, loads it, and compares with transformers."""
    precast.build(folder, folder / "b", dtype=dtype)
    with precast.load(folder / "b", weights=folder, device="cpu", cache_bytes=1 << 20) as engine:
        return relative_error(engine.logits(PROMPT), hf_logits(model, [PROMPT])[0])


def rewritten(folder: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    """The checkpoint's tensors as `change` gives them back."""
    file = folder / "model.safetensors"
    save_file(change(load_file(file)), file)


def test_names_without_the_base_prefix_and_leftovers_of_old_versions(tmp_path: Path) -> None:
    model = families.make_model("gpt2")
    model.save_pretrained(tmp_path)

    def as_on_the_hub(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        bare = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
        return bare | {f"h.{i}.attn.bias": torch.ones(1, 1, 8, 8, dtype=torch.uint8) for i in range(3)}

    rewritten(tmp_path, as_on_the_hub)
    assert logits_error(tmp_path, model) < 1e-5


def test_shards(tmp_path: Path) -> None:
    model = families.make_model("qwen3")
    model.save_pretrained(tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    assert logits_error(tmp_path, model) < 1e-5


def test_a_tied_head_that_is_stored_as_well(tmp_path: Path) -> None:
    model = families.make_model("llama-tied-bias")
    model.save_pretrained(tmp_path)
    rewritten(tmp_path, lambda tensors: tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()})
    assert logits_error(tmp_path, model) < 1e-5


def test_a_tied_head_without_the_embedding(tmp_path: Path) -> None:
    model = families.make_model("llama-tied-bias")
    model.save_pretrained(tmp_path)
    rewritten(tmp_path, lambda tensors: {n.replace("model.embed_tokens", "lm_head"): t for n, t in tensors.items()})
    assert logits_error(tmp_path, model) < 1e-5


def test_a_tied_head_with_a_content_of_its_own_is_refused(tmp_path: Path) -> None:
    families.make_model("llama-tied-bias").save_pretrained(tmp_path)
    rewritten(tmp_path, lambda tensors: tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"] + 1})
    precast.build(tmp_path, tmp_path / "b")
    with pytest.raises(precast.WeightsError, match=r"lm_head\.weight: expected the content of model\.embed_tokens"):
        precast.load(tmp_path / "b", weights=tmp_path, device="cpu")


def test_a_bfloat16_checkpoint_in_a_float32_bundle(tmp_path: Path) -> None:
    model = families.make_model("gemma3")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    model.save_pretrained(tmp_path)
    rewritten(tmp_path, lambda tensors: {name: tensor.bfloat16() for name, tensor in tensors.items()})
    assert logits_error(tmp_path, model) < 1e-5


def test_everything_that_is_wrong_is_said_at_once(tmp_path: Path) -> None:
    families.make_model("llama").save_pretrained(tmp_path)
    bundle = str(tmp_path / "b")
    precast.build(tmp_path, bundle)

    def break_four(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        del tensors["model.norm.weight"]
        tensors["model.stranger.weight"] = torch.zeros(3)
        tensors["lm_head.weight"] = tensors["lm_head.weight"][:-1].contiguous()
        tensors["model.layers.1.mlp.up_proj.weight"] = tensors["model.layers.1.mlp.up_proj.weight"].to(torch.int8)
        return tensors

    rewritten(tmp_path, break_four)
    wrong = ["model.norm.weight", "model.stranger.weight", "lm_head.weight", "model.layers.1.mlp.up_proj.weight"]

    refused = CliRunner().invoke(main, ["verify", bundle, "--weights", str(tmp_path)])
    assert refused.exit_code == 1
    assert all(name in refused.stderr for name in wrong)
    with pytest.raises(precast.WeightsError) as error:
        precast.load(bundle, weights=tmp_path, device="cpu")
    assert error.value.code == "weights-mismatch"
    assert all(name in str(error.value) for name in wrong)
