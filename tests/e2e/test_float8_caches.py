"""Keys, values and latents of 8 bits: the tokens are those of transformers with a cache that rounds what it keeps.

That cache is transformers' own, whose `update` hands back what is rounded, a prompt's own keys too. What comes out must
not depend on how a prompt was cut into chunks, who was preempted, or whose prefix was reused.

A number halfway between two of 8 bits may be rounded up on one machine and down on another, and the logits then differ
by a thousandth. Exact keys and values make them differ by several hundredths.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import precast
from precast.builder.source.shrink import random_model, shrink
from precast.check.agreement import hf_logits, relative_error
from precast.ir.artifact import Bundle
from precast.ir.graph.schema import LatentSpec, StateSpec
from precast.ir.memory import caches
from precast.loader.engine.engine import Engine
from precast.loader.engine.params import SamplingParams

MODEL_TYPES = ("llama", "gemma3_text", "gemma4_text", "gpt_oss", "deepseek_v3", "deepseek_v32", "qwen3_next")
"""Keys and values; windows; two head sizes, layers that share; sinks; latents, and such as are selected by keys of
their own; pages beside states in float32."""

SHARED = [3 + (7 * i) % 118 for i in range(70)]
PROMPTS = [[*SHARED, 5, 9, 70], [17], [*SHARED, 33, 12, 88, 3, 41], [*SHARED[:40], 99, 4, 4, 120, 56]]
NUM_TOKENS = 20
LONGEST = max(map(len, PROMPTS)) + NUM_TOKENS
CHUNKS = (9, 200)
"""Tokens that a step computes at most: prompts in several steps, and several prompts in one."""
TIE = 0.03
"""Logits nearer than this, in standard deviations, are equal."""


class Float8Cache(DynamicCache):
    """Keeps keys, values, latents and what these are selected by as float8_e4m3fn would: rounded, saturated, in
    float32."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return super().update(rounded(key_states), rounded(value_states), *args, **kwargs)

    def update_indexer(self, key_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return super().update_indexer(rounded(key_states), *args, **kwargs)


def rounded(x: torch.Tensor) -> torch.Tensor:
    return x.clamp(-448, 448).to(torch.float8_e4m3fn).to(x.dtype)


def float8_logits(model: Any, tokens: Sequence[int]) -> torch.Tensor:
    """transformers' logits `[T, V]` over such a cache, computed at once."""
    cache = Float8Cache(config=model.config)
    with torch.no_grad():
        return model(input_ids=torch.tensor([list(tokens)]), past_key_values=cache, use_cache=True).logits[0].clone()


@pytest.mark.filterwarnings("ignore")  # of the models' own code
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_tokens_are_those_of_transformers_with_a_cache_of_8_bits(model_type: str, tmp_path: Path) -> None:
    model = random_model(shrink(CONFIG_MAPPING[model_type]()))
    model.save_pretrained(tmp_path / "ckpt")
    bundle = precast.build(tmp_path / "ckpt", tmp_path / "b", dtype="float32", page_size=8, kv_dtype="fp8_e4m3")
    assert_planned(bundle, model_type)

    answers = []
    for chunk in CHUNKS:
        with loaded(tmp_path, chunk, sequences=12) as engine:
            assert_logits(engine, model)
            answers += [answered(engine), answered(engine)]
            assert engine.stats.tokens_reused > 0
    with loaded(tmp_path, CHUNKS[0], sequences=1) as engine:
        answers.append(answered(engine))
        preempt_youngest(engine)
        answers.append(answered(engine))
        assert engine.stats.preemptions > 0

    found = {(*prompt, *tokens) for answer in answers for prompt, tokens in zip(PROMPTS, answer, strict=True)}
    assert all(is_likeliest(model, list(tokens)) for tokens in found)


def is_likeliest(model: Any, tokens: list[int]) -> bool:
    """Whether each of the last `NUM_TOKENS` tokens is the likeliest one after those before it."""
    logits = float8_logits(model, tokens[:-1])[-NUM_TOKENS:]
    chosen = logits.gather(1, torch.tensor(tokens[-NUM_TOKENS:])[:, None])[:, 0]
    return bool((chosen >= logits.max(1).values - TIE * logits.std(1)).all())


def assert_planned(bundle: Bundle, model_type: str) -> None:
    specs = [group.spec for group in caches.groups(bundle.graph.caches)]
    assert {spec.dtype for spec in specs if not isinstance(spec, StateSpec)} == {"float8_e4m3fn"}
    assert {spec.dtype for spec in specs if isinstance(spec, StateSpec)} <= {"float32"}
    assert any(isinstance(spec, LatentSpec) for spec in specs) == model_type.startswith("deepseek_v3")


def assert_logits(engine: Engine, model: Any) -> None:
    """They are those over rounded keys and values, which are not those over exact ones."""
    prompt = PROMPTS[0]
    expected, (exact,) = float8_logits(model, prompt), hf_logits(model, [prompt])
    assert relative_error(exact, expected) > 2e-2
    assert relative_error(engine.logits(prompt), expected) < relative_error(exact, expected) / 10


def loaded(folder: Path, chunk: int, *, sequences: int) -> Engine:
    """An engine with memory for so many of the longest sequences."""
    plan = caches.with_slabs(Bundle.open(folder / "b").graph.caches)
    slabs = caches.slabs_for(plan, sequences, LONGEST, chunk)
    return precast.load(
        folder / "b", weights=folder / "ckpt", device="cpu", max_num_seqs=4, max_num_tokens=chunk,
        cache_bytes=slabs * plan.slab_bytes,
    )  # fmt: skip


def answered(engine: Engine) -> list[list[int]]:
    params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
    answers = [output.token_ids for output in engine.generate(PROMPTS, params)]
    assert [len(answer) for answer in answers] == [NUM_TOKENS] * len(PROMPTS)
    return answers


def preempt_youngest(engine: Engine) -> None:
    """One more request, preempted in decode, goes on as if it had not been."""
    engine.submit(PROMPTS[0], SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True))
    tokens: list[int] = []
    preempted = False
    while engine.has_work:
        tokens += [token for event in engine.step() for token in event.token_ids]
        if len(tokens) == 5 and not preempted:
            (running,) = engine._scheduler.decoding.requests
            engine._land()  # nobody is preempted with a step in flight
            engine._scheduler.preempt(running)
            preempted = True
    assert len(tokens) == NUM_TOKENS
