"""One bundle on one process and on several: the same tokens and logits, for a model of each kind of layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import families
import pytest
import torch
from reference import hf_logits, relative_error

import precast
from precast.check.agreement import NUM_TOKENS, PROMPTS, arrive_one_after_another

CASES = [
    pytest.param("llama", {"tp": 2}, id="dense"),
    pytest.param("qwen3_moe", {"tp": 2, "ep": 2}, id="experts"),
    pytest.param("deepseek_v3", {"tp": 2}, id="latent"),
    pytest.param("deepseek_v4", {"tp": 2, "ep": 2}, id="entries"),
    pytest.param("nemotron_h", {"tp": 2}, id="hybrid"),
    pytest.param("gpt_oss", {"tp": 2}, id="windows"),
    pytest.param("gemma4-three-share", {"tp": 2}, id="shared kv"),
    pytest.param("deepseek_v3", {"tp": 2, "ep": 2, "dp": 2}, id="latent, sequences of their own"),
    pytest.param("nemotron_h", {"tp": 2, "dp": 2}, id="hybrid, sequences of their own"),
    pytest.param("gpt_neox", {"tp": 2, "dp": 2}, id="one sum, sequences of their own"),
    pytest.param("llama-tied-bias", {"pp": 2}, id="stages"),
    pytest.param("nemotron_h", {"pp": 3}, id="three stages of a hybrid"),
    pytest.param("gpt_oss", {"tp": 2, "pp": 2}, id="stages of two ranks"),
    pytest.param("gemma3n", {"pp": 4}, id="stages beside shared kv"),
]


@pytest.fixture(autouse=True)
def one_thread_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine that runs tests has few cores."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.mark.parametrize(("variant", "several"), CASES)
def test_ranks_give_the_tokens_of_one_process(variant: str, several: dict[str, int], tmp_path: Path) -> None:
    """Prompts arrive at different times, and are computed in chunks. Logits are transformers', too."""
    model = families.make_model(variant)
    model.save_pretrained(tmp_path / "ckpt")
    precast.build(tmp_path / "ckpt", tmp_path / "b", dtype="float32")
    options: dict[str, Any] = {"device": "cpu", "max_num_seqs": 3, "max_num_tokens": 7, "cache_bytes": 1 << 22}

    found = []
    for world in ({}, several):
        with precast.load(tmp_path / "b", weights=tmp_path / "ckpt", **options, **world) as engine:
            logits = [engine.logits(list(prompt)) for prompt in PROMPTS]
            found.append((logits, arrive_one_after_another(engine, PROMPTS, NUM_TOKENS)))

    (alone, answers), (shared, shared_answers) = found
    theirs = hf_logits(model, PROMPTS)
    assert all(relative_error(a, b) < 1e-4 for a, b in zip(shared, theirs, strict=True))
    assert all(relative_error(a, b) < 1e-4 for a, b in zip(shared, alone, strict=True))
    assert shared_answers == answers


@pytest.mark.gpu
@pytest.mark.parametrize("variant", ["deepseek_v3", "gpt_neox"])
def test_two_gpus_with_sequences_of_their_own_give_the_logits_of_one(variant: str, tmp_path: Path) -> None:
    """Experts and latents, and a model whose layers have one sum; in captured steps, and op by op for the logits."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA GPUs")
    families.make_model(variant).save_pretrained(tmp_path / "ckpt")
    precast.build(tmp_path / "ckpt", tmp_path / "b", dtype="float32")
    options: dict[str, Any] = {
        "device": "cuda", "max_num_seqs": 4, "max_num_tokens": 16, "capture": "before", "backend": "torch",
        "cache_bytes": 1 << 24,
    }  # fmt: skip

    found = []
    for world in ({}, {"tp": 2, "dp": 2}):
        with precast.load(tmp_path / "b", weights=tmp_path / "ckpt", **options, **world) as engine:
            answers = arrive_one_after_another(engine, PROMPTS, NUM_TOKENS)
            found.append(([engine.logits(list(prompt)) for prompt in PROMPTS], answers))
            assert engine.stats.captured_steps > 0

    (alone, answers), (shared, shared_answers) = found
    assert all(relative_error(a.cpu(), b.cpu()) < 1e-3 for a, b in zip(shared, alone, strict=True))
    assert [len(answer) for answer in shared_answers] == [len(answer) for answer in answers]
