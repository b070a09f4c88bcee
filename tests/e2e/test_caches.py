"""Greedy tokens are those of transformers while sequences are evicted, preempted, resumed, chunked, and share prefixes.

Models with windows, two head sizes, shared keys and values, sinks, latents, selected latents, selected blocks, windows
beside entries that blocks are compressed to, states beside pages, states alone.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import families
import pytest
import torch
from model_sweep import COMPLETIONS
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import precast
from precast.builder.source.shrink import random_model, shrink
from precast.check.agreement import is_greedy
from precast.ir.artifact import Bundle
from precast.ir.memory import caches
from precast.loader.engine.engine import Engine
from precast.loader.engine.params import SamplingParams
from precast.loader.engine.results import EngineStats

MODEL_TYPES = {
    # model type: whether it has windows
    "gemma3_text": True,
    "gemma3n_text": True,
    "gemma4_text": True,
    "gpt_oss": True,
    "qwen3_next": False,
    "nemotron_h": False,
    "deepseek_v3": False,
    "deepseek_v32": False,
    "glm_moe_dsa": False,
    "minimax_m3_vl_text": False,
    "deepseek_v4": True,
    "mamba2": False,
    "falcon_h1": False,
    "lfm2": False,
}

SHARED = [3 + (7 * i) % 118 for i in range(70)]
"""More than a block of any of them, the 64 tokens of a model with states alone included."""
PROMPTS = [
    [*SHARED, 5, 9, 70],
    [17],
    [*SHARED, 33, 12, 88, 3, 41],
    [*SHARED[:40], 99, 4, 4, 120, 56],
    [*SHARED, 5, 9, 70, 8],
]
NUM_TOKENS, CHUNK = 24, 9
LONGEST = max(map(len, PROMPTS)) + NUM_TOKENS


@pytest.mark.filterwarnings("ignore")  # of the models' own code
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_tokens_are_those_of_transformers_however_memory_flows(model_type: str, tmp_path: Path) -> None:
    model = random_model(shrink(CONFIG_MAPPING[model_type](**COMPLETIONS.get(model_type, {}))))
    model.save_pretrained(tmp_path / "ckpt")
    precast.build(tmp_path / "ckpt", tmp_path / "b", dtype="float32", page_size=8)

    with loaded(tmp_path, sequences=1) as engine:
        answers = answered(engine, PROMPTS)
        preempt_youngest(engine, PROMPTS[0])
        answers += answered(engine, PROMPTS)
        tight = engine.stats
        assert is_idle(engine)
    with loaded(tmp_path, sequences=12) as engine:
        answers += [*answered(engine, PROMPTS), *answered(engine, PROMPTS)]
        roomy = engine.stats
        assert is_idle(engine)

    # Mostly the same four times.
    found = {(tuple(prompt), tuple(answer)) for prompt, answer in zip(PROMPTS * 4, answers, strict=True)}
    for prompt, answer in found:
        assert len(answer) == NUM_TOKENS
        assert is_greedy(model, prompt, answer)
    assert tight.preemptions > 0
    assert roomy.preemptions == 0
    assert roomy.tokens_reused >= 4 * 64
    evicted = [sum(usage.pages_evicted for usage in stats.pools.values()) > 0 for stats in (tight, roomy)]
    assert evicted == [MODEL_TYPES[model_type]] * 2


@pytest.mark.filterwarnings("ignore")  # of the models' own code
@pytest.mark.parametrize("variant", ["phi3-longrope", "llama-rope-dynamic"])
def test_prefixes_are_shared_by_sequences_of_one_rotation_only(variant: str, tmp_path: Path) -> None:
    model = families.make_model(variant)
    model.save_pretrained(tmp_path / "ckpt")
    precast.build(tmp_path / "ckpt", tmp_path / "b", dtype="float32", page_size=8)
    limit = 16 if variant == "phi3-longrope" else model.config.max_position_embeddings
    lengths = (limit - 7, limit - 7, limit + 9, limit - 2, limit + 30, limit + 9)
    prompts = [[3 + (7 * i) % 118 for i in range(length)] for length in lengths]
    expected = [generated(model, prompt) for prompt in prompts]

    reused = []
    for sequences in (1, 9):
        with loaded(tmp_path, sequences=sequences, longest=limit + 30 + NUM_TOKENS) as engine:
            assert answered(engine, prompts) == expected
            preempt_youngest(engine, prompts[0])
            assert [answered(engine, [prompt]) for prompt in prompts] == [[tokens] for tokens in expected]
            reused.append(engine.stats.tokens_reused)
            assert engine.stats.preemptions > 0
            assert is_idle(engine)
    assert min(reused) > 0


def generated(model: Any, prompt: list[int]) -> list[int]:
    """The greedy tokens of transformers with its cache, which rotates keys by the length of their time.

    By a copy of the model: it keeps the frequencies of the longest sequence it has seen.
    """
    model, ids = copy.deepcopy(model), torch.tensor([prompt])
    model.generation_config.eos_token_id = None
    found = model.generate(ids, max_new_tokens=NUM_TOKENS, do_sample=False, attention_mask=torch.ones_like(ids))
    tokens: list[int] = found[0, len(prompt) :].tolist()
    return tokens


def loaded(folder: Path, *, sequences: int, longest: int = LONGEST) -> Engine:
    """An engine with memory for so many of the longest sequences."""
    bundle = Bundle.open(folder / "b")
    plan = caches.with_slabs(bundle.graph.caches)
    slabs = caches.slabs_for(plan, sequences, longest, CHUNK)
    return precast.load(
        bundle, weights=folder / "ckpt", device="cpu", max_num_seqs=4, max_num_tokens=CHUNK,
        cache_bytes=slabs * plan.slab_bytes,
    )  # fmt: skip


def answered(engine: Engine, prompts: Sequence[list[int]]) -> list[list[int]]:
    params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
    return [output.token_ids for output in engine.generate(prompts, params)]


def preempt_youngest(engine: Engine, prompt: list[int]) -> None:
    """One more request, preempted in decode: a model whose states fill no slab never lacks pages by itself."""
    request = engine.submit(prompt, SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True))
    before = engine.stats.preemptions
    tokens: list[int] = []
    while engine.has_work:
        tokens += [token for event in engine.step() for token in event.token_ids]
        if len(tokens) == 5 and engine.stats.preemptions == before:
            (running,) = engine._scheduler.decoding.requests
            assert running.id == request
            engine._land()  # nobody is preempted with a step in flight
            engine._scheduler.preempt(running)
    assert len(tokens) == NUM_TOKENS


def is_idle(engine: Engine) -> bool:
    """Whether every page is given back, once known prefixes are given up."""
    engine.forget_prefixes()
    stats: EngineStats = engine.stats
    return stats.slabs_free == stats.slabs and not any(usage.pages_in_use for usage in stats.pools.values())
