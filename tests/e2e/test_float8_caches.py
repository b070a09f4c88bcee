"""Keys, values and latents of 8 bits: the tokens are those of transformers with a cache that rounds what it keeps, with
or without the scales of a quantised checkpoint.

That cache is transformers' own, whose `update` hands back what is rounded, a prompt's own keys too. What comes out must
not depend on how a prompt was cut into chunks, who was preempted, or whose prefix was reused.

A number halfway between two of 8 bits may be rounded up on one machine and down on another, and the logits then differ
by a thousandth. Exact keys and values make them differ by several hundredths.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from model_sweep import COMPLETIONS
from safetensors.torch import load_file, save_file
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

MODEL_TYPES = (
    "llama", "gemma3_text", "gemma4_text", "gpt_oss", "deepseek_v3", "deepseek_v32", "minimax_m3_vl_text", "qwen3_next",
)  # fmt: skip
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


Scales = list[tuple[float, float]]
"""Of the keys and the values of each layer."""


class Float8Cache(DynamicCache):
    """Keeps keys, values, latents and what these are selected by as float8_e4m3fn would: divided by scales, rounded,
    saturated; in float32, and times the scales again."""

    scales: Scales

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> Any:
        k_scale, v_scale = self.scales[layer_idx]
        kept = rounded(key_states, k_scale), rounded(value_states, v_scale)
        return super().update(*kept, layer_idx, *args, **kwargs)

    def update_indexer(self, key_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return super().update_indexer(rounded(key_states), *args, **kwargs)


def rounded(x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    return (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).to(x.dtype) * scale


def _round_first(keep: Callable[[torch.Tensor], torch.Tensor], keys: torch.Tensor) -> torch.Tensor:
    return keep(rounded(keys))


def float8_logits(model: Any, tokens: Sequence[int], scales: Scales | None = None) -> torch.Tensor:
    """transformers' logits `[T, V]` over such a cache, computed at once."""
    cache = Float8Cache(config=model.config)
    cache.scales = scales or [(1.0, 1.0)] * model.config.num_hidden_layers
    for layer in cache.layers:
        if hasattr(layer, "update_index"):
            layer.update_index = partial(_round_first, layer.update_index)
    with torch.no_grad():
        return model(input_ids=torch.tensor([list(tokens)]), past_key_values=cache, use_cache=True).logits[0].clone()


@pytest.mark.filterwarnings("ignore")  # of the models' own code
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_tokens_are_those_of_transformers_with_a_cache_of_8_bits(model_type: str, tmp_path: Path) -> None:
    model = random_model(shrink(CONFIG_MAPPING[model_type](**COMPLETIONS.get(model_type, {}))))
    model.save_pretrained(tmp_path / "ckpt")
    bundle = precast.build(tmp_path / "ckpt", tmp_path / "b", dtype="float32", page_size=8, kv_dtype="fp8_e4m3")
    assert_planned(bundle, model_type)

    assert_answers(tmp_path, model)


QUANTISED: dict[str, dict[str, Any]] = {
    "modelopt": {"quant_method": "modelopt", "quant_algo": None, "kv_cache_quant_algo": "FP8"},
    "fbgemm": {"quant_method": "fbgemm_fp8", "modules_to_not_convert": ["model", "lm_head"], "kv_cache_scheme": "FP8"},
    "compressed-tensors": {
        "quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["re:.*"],
        "config_groups": {"group_0": {
            "targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", "strategy": "tensor"},
        }},
        "kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True},
    },
}  # fmt: skip
"""Configs that say of keys and values alone that they are quantised."""


@pytest.mark.filterwarnings("ignore")  # of the models' own code
@pytest.mark.parametrize(
    ("model_type", "method", "name"),
    [
        ("llama", "modelopt", "{}_proj.{}_scale"),
        ("llama", "fbgemm", "{}_scale"),
        ("gemma4_text", "compressed-tensors", "{1}_scale"),
        ("gpt_oss", "compressed-tensors", "{}_proj.output_scale"),
    ],
)
def test_scales_of_the_checkpoint_count(model_type: str, method: str, name: str, tmp_path: Path) -> None:
    """By the config alone: nobody asks for 8 bits. No scale is a power of two, and some keys saturate."""
    model = random_model(shrink(CONFIG_MAPPING[model_type]()))
    scales = [(0.011 * (layer + 1), 0.007 * (layer + 2)) for layer in range(model.config.num_hidden_layers)]
    model.save_pretrained(tmp_path / "ckpt")
    stored = {
        f"model.layers.{layer}.self_attn." + name.format(which, which): torch.tensor(scale)
        for layer, pair in enumerate(scales)
        for which, scale in zip("kv", pair, strict=True)
    }
    add_to_checkpoint(tmp_path / "ckpt", stored, QUANTISED[method])
    bundle = precast.build(tmp_path / "ckpt", tmp_path / "b", dtype="float32", page_size=8)
    assert_planned(bundle, model_type)

    assert_answers(tmp_path, model, scales)


def add_to_checkpoint(folder: Path, tensors: dict[str, torch.Tensor], quantised: dict[str, Any]) -> None:
    """More tensors for a checkpoint of one file, and what its config says of them."""
    file, config = folder / "model.safetensors", folder / "config.json"
    save_file(load_file(file) | tensors, file)
    config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": quantised}))


def assert_answers(tmp_path: Path, model: Any, scales: Scales | None = None) -> None:
    """The likeliest tokens, whatever the chunks; prefixes are reused, and who was preempted goes on."""
    answers = []
    for chunk in CHUNKS:
        with loaded(tmp_path, chunk, sequences=12) as engine:
            assert_logits(engine, model, scales)
            answers += [answered(engine), answered(engine)]
            assert engine.stats.tokens_reused > 0
    with loaded(tmp_path, CHUNKS[0], sequences=1) as engine:
        answers.append(answered(engine))
        preempt_youngest(engine)
        answers.append(answered(engine))
        assert engine.stats.preemptions > 0

    found = {(*prompt, *tokens) for answer in answers for prompt, tokens in zip(PROMPTS, answer, strict=True)}
    assert all(is_likeliest(model, list(tokens), scales) for tokens in found)


def is_likeliest(model: Any, tokens: list[int], scales: Scales | None) -> bool:
    """Whether each of the last `NUM_TOKENS` tokens is the likeliest one after those before it."""
    logits = float8_logits(model, tokens[:-1], scales)[-NUM_TOKENS:]
    chosen = logits.gather(1, torch.tensor(tokens[-NUM_TOKENS:])[:, None])[:, 0]
    return bool((chosen >= logits.max(1).values - TIE * logits.std(1)).all())


def assert_planned(bundle: Bundle, model_type: str) -> None:
    specs = [group.spec for group in caches.groups(bundle.graph.caches)]
    assert {spec.dtype for spec in specs if not isinstance(spec, StateSpec)} == {"float8_e4m3fn"}
    assert {spec.dtype for spec in specs if isinstance(spec, StateSpec)} <= {"float32"}
    assert any(isinstance(spec, LatentSpec) for spec in specs) == model_type.startswith("deepseek_v3")


def assert_logits(engine: Engine, model: Any, scales: Scales | None) -> None:
    """They are those over rounded keys and values, which are not those over exact ones."""
    prompt = PROMPTS[0]
    expected, (exact,) = float8_logits(model, prompt, scales), hf_logits(model, [prompt])
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
