"""Every family, the whole line: a checkpoint as `save_pretrained` writes it, built, verified, loaded, compared.

Logits and greedy tokens are those of transformers, in float32, while prompts of unequal length arrive at different
times and are computed in chunks of at most seven tokens. To trace a model takes longer than all else that is done with
it, so one trace serves all comparisons of a variant: the graph after each pass, the bundle, the engine.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import families
import pytest
from click.testing import CliRunner
from pass_by_pass import Comparison
from reference import hf_greedy, hf_logits, is_greedy, relative_error
from transformers import (
    Llama4Config,
    Llama4ForConditionalGeneration,
    LlamaConfig,
    VoxtralConfig,
    VoxtralForConditionalGeneration,
)

import precast
from precast.check.agreement import NUM_TOKENS, PROMPTS, arrive_one_after_another
from precast.cli.main import main
from precast.ir.errors import BuildError
from precast.ir.weights import fit
from precast.ir.weights.checkpoint import CheckpointFiles

# One of each kind of layer: what the commands do is the same for the others.
COMMANDS = frozenset(
    ("llama", "gpt2", "gemma3", "deepseek_v3-dense", "mixtral", "gpt_oss", "qwen3_next", "nemotron_h", "mamba2")
)


@pytest.mark.parametrize("variant", families.VARIANTS)
def test_logits_and_tokens_are_those_of_transformers(
    variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = families.make_model(variant)
    model.save_pretrained(tmp_path / "ckpt")
    passes = Comparison(model, monkeypatch) if variant in families.PASS_BY_PASS else None

    bundle = precast.build(tmp_path / "ckpt", tmp_path / "b", dtype="float32")

    assert passes is None or passes.compared[-1] == passes.last
    fit.check(bundle.graph, bundle.manifest.checkpoint, CheckpointFiles.open(tmp_path / "ckpt"))
    answers = compare_logits_and_answer(model, tmp_path)
    if variant in families.LENGTH_CHANGES_RESULTS:
        use_cache = variant not in families.CACHE_CHANGES_RESULTS
        assert answers == [hf_greedy(model, prompt, NUM_TOKENS, use_cache=use_cache) for prompt in PROMPTS]
    else:
        assert all(is_greedy(model, prompt, answer) for prompt, answer in zip(PROMPTS, answers, strict=True))
    if variant in COMMANDS:
        assert answer_of_the_commands(tmp_path) == hf_greedy(model, PROMPTS[0], 8)


def answer_of_the_commands(folder: Path) -> list[int]:
    """What the README's commands make of the checkpoint `ckpt` and its bundle `b`."""
    checkpoint, bundle = str(folder / "ckpt"), str(folder / "b")
    command = CliRunner()
    assert command.invoke(main, ["verify", bundle, "--weights", checkpoint]).exit_code == 0
    ran = command.invoke(
        main,
        ["run", bundle, "--weights", checkpoint, "--device", "cpu", "--token-ids", ",".join(map(str, PROMPTS[0])),
         "--max-tokens", "8", "--ignore-eos", "--json"],
    )  # fmt: skip
    assert ran.exit_code == 0, ran.output
    found: list[int] = json.loads(ran.stdout)["outputs"][0]["token_ids"]
    return found


def compare_logits_and_answer(model: Any, folder: Path) -> list[list[int]]:
    """The answers of the bundle `b` with the weights of `ckpt`, whose logits are the model's."""
    with precast.load(
        folder / "b", weights=folder / "ckpt", device="cpu", max_num_seqs=3, max_num_tokens=7, cache_bytes=1 << 22
    ) as engine:
        for prompt, expected in zip(PROMPTS, hf_logits(model, PROMPTS), strict=True):
            assert relative_error(engine.logits(list(prompt)), expected) < 1e-4
        answers = arrive_one_after_another(engine, PROMPTS, NUM_TOKENS)
    assert [len(answer) for answer in answers] == [NUM_TOKENS] * len(PROMPTS)
    return answers


def llama4_with_images() -> Any:
    """A multimodal Llama 4: the text decoder of a variant, and a small image encoder."""
    vision = {
        "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64, "image_size": 28,
        "patch_size": 14, "vision_output_dim": 24, "projector_input_dim": 24, "projector_output_dim": 24,
    }  # fmt: skip
    text = families.make_model("llama4")
    config = Llama4Config(text_config=text.config.to_dict(), vision_config=vision)
    model = Llama4ForConditionalGeneration(config).eval()
    model.language_model.load_state_dict(text.state_dict())
    return model


def test_text_decoder_of_a_multimodal_directory(tmp_path: Path) -> None:
    model = llama4_with_images()
    model.save_pretrained(tmp_path / "ckpt")
    assert any("vision_model" in name for name in model.state_dict())

    bundle = precast.build(tmp_path / "ckpt", tmp_path / "b", dtype="float32")

    assert (bundle.manifest.model.architecture, bundle.manifest.model.model_type) == ("Llama4ForCausalLM", "llama4")
    groups = {group.name: group.spec.chunk for group in bundle.graph.caches.groups}
    assert groups == {"chunk6": 6, "full": None}
    answers = compare_logits_and_answer(model, tmp_path)
    assert all(is_greedy(model, prompt, answer) for prompt, answer in zip(PROMPTS, answers, strict=True))


def test_text_decoder_of_a_model_that_hears(tmp_path: Path) -> None:
    audio = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    text = {
        "model_type": "llama", "vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
    }  # fmt: skip
    config = VoxtralConfig(audio_config=audio, text_config=text, projector_hidden_act="gelu")
    assert isinstance(config.text_config, LlamaConfig)
    model = VoxtralForConditionalGeneration(config).eval()
    model.save_pretrained(tmp_path / "ckpt")

    bundle = precast.build(tmp_path / "ckpt", tmp_path / "b", dtype="float32")

    assert bundle.manifest.model.model_type == "voxtral"
    answers = compare_logits_and_answer(model, tmp_path)
    assert all(is_greedy(model, prompt, answer) for prompt, answer in zip(PROMPTS, answers, strict=True))


@pytest.mark.parametrize(
    ("variant", "why", "code"),
    [
        ("gemma3-sees-later-tokens", "attention sees tokens that come later", "model-unsupported"),
        ("gemma4-sees-later-tokens", "attention sees tokens that come later", "model-unsupported"),
        ("gemma3-dynamic-rope", "length-dependent rope per layer type", "feature-unsupported"),
    ],
)
def test_what_cannot_work_is_refused(variant: str, why: str, code: str, tmp_path: Path) -> None:
    with pytest.raises(BuildError, match=why) as error:
        precast.build(families.make_config(variant), tmp_path / "b", dtype="float32")

    assert error.value.code == code
