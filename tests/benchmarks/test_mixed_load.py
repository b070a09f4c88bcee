"""The mixed load: what is measured of it, what the schedule reaches by a formula, and the whole script on a CPU."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from pathlib import Path
from typing import Any, ClassVar

import bench_gpu_mixed_load
import pytest
from bench_gpu_mixed_load import LONG, SATURATED, UNLIMITED, goals
from bench_scheduler import graph_of
from support import random_checkpoints
from support.mixed_load import (
    GOAL_PADDING,
    GOAL_RATIO,
    Load,
    arrivals,
    at_once,
    counted,
    long_prompts,
    over_time,
    percentiles,
)
from support.simulated_engine import SimulatedEngine, StepTime

import precast
from precast.ir.memory.capture import in_order
from precast.loader.engine.results import EngineStats
from precast.loader.schedule.requests import Step

PLAN = graph_of((None,), 0, 16).caches
SIZES = in_order(1024)
LOAD = Load()


def simulated(**options: Any) -> SimulatedEngine:
    return SimulatedEngine(PLAN, SIZES, LOAD, **options)


# --- the schedule, by a formula ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "step_time",
    [StepTime(), StepTime(attend=2 * StepTime().attend), StepTime(token=45e-6), StepTime(weights=30e-3)],
    ids=["H200", "slow attention", "slow products", "large model"],
)
def test_long_prompts_hold_up_nobody_for_three_times_the_median(step_time: StepTime) -> None:
    engine = simulated(step_time=step_time)

    found = long_prompts(engine, engine, LOAD)

    assert found["ratio"] < GOAL_RATIO
    assert found["padding_percent"] <= GOAL_PADDING
    assert not engine.has_work


def test_without_a_budget_they_do() -> None:
    engine = simulated(max_prefill_tokens=LOAD.max_num_tokens)

    assert long_prompts(engine, engine, LOAD)["ratio"] > 10 * GOAL_RATIO


def test_pauses_now_and_then_change_nothing() -> None:
    """Every hundredth step takes a second more, and the first of each size."""

    class Paused(StepTime):
        counts: ClassVar = Counter[int]()

        def seconds(self, step: Step, num_computed: int, *, is_captured: bool) -> float:
            self.counts[num_computed] += 1
            pauses = self.counts[num_computed] == 1 or self.counts.total() % 100 == 0
            return super().seconds(step, num_computed, is_captured=is_captured) + pauses

    budgets = []
    for kind in (StepTime, Paused):
        engine = simulated(step_time=kind())
        budgets.append(long_prompts(engine, engine, LOAD)["prefill_budget"])
    assert budgets[1] >= 0.7 * budgets[0]


def test_little_is_padded_and_little_lost() -> None:
    engine, unlimited = simulated(), simulated(max_prefill_tokens=LOAD.max_num_tokens)
    most, most_unlimited = (at_once(each, each, LOAD) for each in (engine, unlimited))

    assert most["requests_per_s"] > 0.9 * most_unlimited["requests_per_s"]
    for share in LOAD.shares:
        found = over_time(engine, engine, LOAD, share * most["requests_per_s"])
        assert found["padding_percent"] <= GOAL_PADDING
        assert found["inter_token_ms"]["p99"] < GOAL_RATIO * found["inter_token_ms"]["p50"]
        assert found["tokens_decoded"] == found["requests"] * (LOAD.answer_tokens - 1)


# --- what is measured ----------------------------------------------------------------------------------------------


def test_percentiles() -> None:
    assert percentiles(n / 1000 for n in range(1, 201)) == {"p50": 100.0, "p99": 198.0}
    assert percentiles([0.5]) == {"p50": 500.0, "p99": 500.0}
    assert percentiles([]) == {"p50": 0.0, "p99": 0.0}


def test_arrivals_are_the_same_in_each_run_and_as_many_as_the_rate_says() -> None:
    found = arrivals(10.0, 100.0, seed=0)

    assert found == arrivals(10.0, 100.0, seed=0) != arrivals(10.0, 100.0, seed=1)
    assert found == sorted(found)
    assert found[-1] < 100
    assert 900 < len(found) < 1100
    assert len(arrivals(1e-6, 1.0, seed=0)) == 1


def test_what_happened_between_two_snapshots_is_counted() -> None:
    before = EngineStats(steps=3, eager_steps=3, eager_reasons={"a": 2, "b": 1}, tokens_prefilled=50)
    after = EngineStats(steps=9, eager_steps=4, captured_steps=5, eager_reasons={"a": 2, "b": 2}, tokens_prefilled=110,
                        tokens_decoded=20, tokens_padded=20)  # fmt: skip

    found = counted(before, after)

    assert (found["steps"], found["captured_steps"], found["eager_reasons"]) == (6, 5, {"b": 1})
    assert found["padding_percent"] == 20.0, "of 60, 20 and 20"


def test_goals_that_were_not_measured_are_not_met() -> None:
    found = {SATURATED: {"padding_percent": 15.1}, LONG: {"error": "RuntimeError: no memory"}}
    assert [goal["met"] for goal in goals(found).values()] == [False, False, False]
    found = {SATURATED: {"padding_percent": 15.0}, LONG: {"ratio": 2.99, "padding_percent": 1.0}}
    assert [goal["met"] for goal in goals(found).values()] == [True, True, True]


# --- the script ----------------------------------------------------------------------------------------------------

TINY = Load(
    prompt_tokens=12, answer_tokens=4, num_at_once=5, seconds=0.2, num_decoding=2, long_prompt_tokens=40, num_long=2,
    long_every=0.01, vocab=60, max_num_seqs=4, max_num_tokens=16,
)  # fmt: skip


def test_the_script_on_a_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 64, "hidden_size": 32,
        "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
        "torch_dtype": "float32", "max_position_embeddings": 4096, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    bundle = precast.build(tmp_path, tmp_path / "tiny.bundle")
    random_checkpoints.write(bundle, tmp_path / "checkpoint")

    found = bench_gpu_mixed_load.measure(tmp_path / "tiny.bundle", tmp_path / "checkpoint", TINY, device="cpu")

    assert capsys.readouterr().err == ""
    assert set(found) == {"captured", "eager", "goals"}
    levels = {SATURATED, "50 % of saturation", "80 % of saturation", LONG}
    assert set(found["eager"]) == levels
    assert set(found["captured"]) == {*levels, UNLIMITED}
    for engine in ("captured", "eager"):
        for name, one in found[engine].items():
            assert "error" not in one
            replayed = one["captured_steps"] + one["piecewise_steps"]
            assert (replayed, one["eager_steps"])[:: 1 if engine == "captured" else -1] == (one["steps"], 0)
            if name not in (LONG, UNLIMITED):
                assert one["tokens_prefilled"] == one["requests"] * TINY.prompt_tokens
    asked = {engine: found[engine]["50 % of saturation"]["requests"] for engine in ("captured", "eager")}
    assert asked["captured"] == asked["eager"], "both get the same requests"
    json.dumps(found)


def test_a_load_that_fails_leaves_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    load = dataclasses.replace(LOAD, num_at_once=0, seconds=0.5, num_long=1)
    engine = simulated()

    found = bench_gpu_mixed_load.loads(engine, engine, load, 10.0)

    assert "ValueError" in found[SATURATED]["error"]
    assert "ratio" in found[LONG]
    assert "Traceback" in capsys.readouterr().err
