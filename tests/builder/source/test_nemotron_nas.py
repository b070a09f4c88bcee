"""Llama-Nemotron: a Llama whose layers differ, and what its configs may say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from reference import hf_logits
from transformers import LlamaConfig

from precast.builder.build import build
from precast.builder.source import nemotron_nas
from precast.builder.source.model_class import model_class
from precast.builder.source.nemotron_nas import DeciLMForCausalLM, NemotronNasConfig
from precast.builder.source.shrink import random_model
from precast.builder.source.source import open_source
from precast.check.agreement import PROMPTS, agreement
from precast.ir.errors import BuildError

PUBLISHED = Path(__file__).parents[2] / "configs" / "nvidia--Llama-3_3-Nemotron-Super-49B-v1"
SIZES = {"vocab_size": 131, "hidden_size": 64, "num_attention_heads": 4, "max_position_embeddings": 256}
NO_ATTENTION = {"n_heads_in_group": None, "no_op": True}
NO_FEED_FORWARD = {"ffn_mult": None, "no_op": True}


def block(attention: dict[str, Any] | None = None, ffn: dict[str, Any] | None = None) -> dict[str, Any]:
    """A layer of 4 heads that share 2 key heads, of 256 inner elements; with these entries changed."""
    return {
        "attention": {"n_heads_in_group": 2, "no_op": False, "window_length": None, **(attention or {})},
        "ffn": {"ffn_mult": 6.0, "no_op": False, "sparsify": None, **(ffn or {})},
    }


def config_of(*blocks: dict[str, Any]) -> NemotronNasConfig:
    nemotron_nas.register()
    return NemotronNasConfig(**SIZES, num_hidden_layers=len(blocks), block_configs=list(blocks))


def logits(model: Any) -> torch.Tensor:
    return torch.cat(hf_logits(model, PROMPTS))


def llama_of(model: Any) -> Any:
    """A Llama of as many layers, with the model's params; what it has beside them gives nothing."""
    llama = random_model(
        LlamaConfig(**SIZES, num_hidden_layers=len(model.model.layers), num_key_value_heads=2, intermediate_size=256)
    )
    with torch.no_grad():
        for layer in llama.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    llama.load_state_dict(model.state_dict(), strict=False)
    return llama


@pytest.mark.parametrize(
    "blocks",
    [
        pytest.param((block(), block()), id="whole layers"),
        pytest.param((block(), block(attention=NO_ATTENTION)), id="no attention"),
        pytest.param((block(ffn=NO_FEED_FORWARD), block()), id="no feed-forward part"),
        pytest.param((block(NO_ATTENTION, NO_FEED_FORWARD), block()), id="nothing"),
    ],
)
def test_what_is_left_of_a_layer_is_a_llamas(blocks: tuple[dict[str, Any], ...]) -> None:
    model = random_model(config_of(*blocks))

    torch.testing.assert_close(logits(model), logits(llama_of(model)))


def test_sizes_are_those_that_the_blocks_say() -> None:
    model = DeciLMForCausalLM(config_of(block(), block({"n_heads_in_group": 4}, {"ffn_mult": 6.1})))

    first, second = model.model.layers
    assert (first.self_attn.k_proj.out_features, second.self_attn.k_proj.out_features) == (32, 16)
    assert (first.mlp.up_proj.out_features, second.mlp.up_proj.out_features) == (256, 512)
    assert {name.split(".")[0] for name in model.state_dict()} == {"model", "lm_head"}


def test_it_builds_and_gives_what_its_model_gives(tmp_path: Path) -> None:
    config = config_of(block(), block(NO_ATTENTION), block({"n_heads_in_group": 1}, {"ffn_mult": 7.0}))
    model = random_model(config)
    model.save_pretrained(tmp_path / "checkpoint")

    bundle = build(tmp_path / "checkpoint", tmp_path / "bundle", dtype="float32")
    found = agreement(bundle, tmp_path / "checkpoint", model)

    assert (found.logits_equal, found.tokens_equal) == (True, True)
    assert bundle.manifest.model.architecture == "DeciLMForCausalLM"


def test_the_published_config_needs_no_code() -> None:
    source = open_source(PUBLISHED)

    assert model_class(source.config) is DeciLMForCausalLM
    assert not source.has_code
    sizes = {source.config.of_layer(index).intermediate_size for index in range(80)}
    assert sizes == {2816, 5632, 7168, 14336, 17920, 28672}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention": {"window_length": 64}}, r"block_configs\[1\].attention has window_length, expected none"),
        ({"attention": {"replace_with_linear": True}}, "attention has replace_with_linear, expected none"),
        ({"ffn": {"sparsify": {"by": 2}}}, "ffn has sparsify, expected none"),
        ({"ffn": {"ffn_mult": None}}, "ffn has no ffn_mult"),
        ({"attention": {"n_heads_in_group": None}}, "attention has no n_heads_in_group"),
    ],
)
def test_other_layers_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config_of(block(), block(**changes))


def test_a_layer_without_a_block_is_refused(tmp_path: Path) -> None:
    entries = json.loads((PUBLISHED / "config.json").read_text(encoding="utf-8")) | {"num_hidden_layers": 81}
    (tmp_path / "config.json").write_text(json.dumps(entries), encoding="utf-8")

    with pytest.raises(BuildError, match="block_configs has 80 layers, expected num_hidden_layers, 81") as refused:
        open_source(tmp_path)
    assert refused.value.code == "config-invalid"
