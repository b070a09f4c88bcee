"""What captured steps take of a GPU's memory, against what the load sets apart; and what happens where it runs out.

The models are small, but as wide as it takes for activations to outweigh what libraries keep for themselves.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from support import random_checkpoints

import precast
from precast.ir.artifact import Bundle
from precast.loader.engine.engine import Engine
from precast.loader.engine.params import SamplingParams

pytestmark = pytest.mark.gpu

LIBRARIES = 48 << 20
"""Bytes that `sizing.CUDA_RESERVE` is for: cuBLAS takes 32 MiB for the stream on which steps are captured."""
LEAST_SHARE = 0.1
"""Of what is set apart, captures take so much at least: else the cache is made too small for nothing."""
PROMPTS = [[5, 6, 7], list(range(3, 103))]
GREEDY = SamplingParams(max_tokens=8, ignore_eos=True)

_BASE: dict[str, Any] = {
    "vocab_size": 65536, "hidden_size": 1024, "intermediate_size": 3072, "max_position_embeddings": 2048,
    "num_attention_heads": 16, "num_key_value_heads": 4, "num_hidden_layers": 4, "head_dim": 64,
    "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "qwen3_moe": {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 512, "norm_topk_prob": True},
    "nemotron_h": {
        "hybrid_override_pattern": "M-*-", "mamba_num_heads": 32, "mamba_head_dim": 64, "ssm_state_size": 128,
        "n_groups": 4, "chunk_size": 128,
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where each model is built once."""
    return tmp_path_factory.mktemp("models")


@contextmanager
def engine_of(family: str, folder: Path, dtype: str = "bfloat16", **options: Any) -> Iterator[Engine]:
    """The family with random weights, of which nothing is captured yet."""
    from transformers import AutoConfig

    bundle, weights = folder / f"{family}.{dtype}.bundle", folder / f"{family}.{dtype}"
    if not bundle.exists():
        precast.build(AutoConfig.for_model(family, **_BASE, **FAMILIES[family]), bundle, dtype=dtype)
        random_checkpoints.write(Bundle.open(bundle), weights)
    with precast.load(
        bundle, weights=weights, device="cuda", cache_bytes=256 << 20, allow_config_mismatch=True, **options
    ) as engine:
        yield engine


def warm_up(engine: Engine) -> None:
    """What a first run leaves stays: kernels, workspaces of libraries, and free memory of torch for the largest."""
    runner = engine._runner
    with runner.device.use(), torch.inference_mode():
        for size in runner.captures._pending:
            step = runner._step_of(size)
            step.prepare()
            for call in step.pieces():
                call.replay()
    torch.cuda.synchronize()


def bytes_in_use() -> int:
    """Of the GPU, by whomever."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return total - free


@pytest.mark.parametrize("family", FAMILIES)
def test_captures_take_no_more_than_is_set_apart(family: str, folder: Path) -> None:
    with engine_of(family, folder) as engine:
        warm_up(engine)
        before = bytes_in_use()
        engine.wait_until_captured()
        taken = bytes_in_use() - before
        (pools,) = (phase for phase in engine.timeline.phases if phase.name == "pools")
        counted = pools.counters["bytes_for_graphs"]
        assert engine.stats.graphs >= 20
        assert LEAST_SHARE * counted <= taken <= counted + LIBRARIES, f"{taken:,} bytes of {counted:,} set apart"


def test_engines_that_end_give_their_memory_back(folder: Path) -> None:
    """What the device has free after the third is what it had after the first, but for a little."""
    free = []
    for _ in range(3):
        with engine_of("qwen3", folder) as engine:
            engine.wait_until_captured()
        free.append(torch.cuda.mem_get_info()[0])
    assert free[2] > free[0] - (8 << 20), f"{free}, torch holds {torch.cuda.memory_reserved():,}"


def test_replays_allocate_nothing(folder: Path) -> None:
    with engine_of("qwen3", folder) as engine:
        engine.wait_until_captured()
        engine.generate(PROMPTS, GREEDY)
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        engine.generate(PROMPTS, GREEDY)
        assert engine.stats.eager_steps == 0
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


def test_memory_that_runs_out_in_a_capture_ends_capturing_and_nothing_else(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Torch may take no more of the GPU than it has: enough for steps op by op, and nothing for the graphs' pool."""
    with engine_of("qwen3", folder, "float32", capture="off") as plain:
        expected = [output.token_ids for output in plain.generate(PROMPTS, GREEDY)]
    with engine_of("qwen3", folder, "float32") as engine:
        warm_up(engine)
        _, total = torch.cuda.mem_get_info()
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (1 << 20)) / total)
        try:
            engine.wait_until_captured()
            assert [output.token_ids for output in engine.generate(PROMPTS, GREEDY)] == expected
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        stats = engine.stats
    assert (stats.graphs, stats.graphs_pending) == (0, 0)
    assert stats.eager_reasons == {"memory ran out for graphs": stats.steps}
    (said,) = (record.getMessage() for record in caplog.records if record.name == "precast")
    assert said.startswith("warning: memory ran out for graphs: a step of ")


@pytest.mark.parametrize("times", [1, 5])
def test_interrupted_captures_give_their_memory_back(folder: Path, times: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupted as its first size is all but captured, as often as somebody tries; then captured, and right."""
    with engine_of("qwen3", folder, "float32", capture="off") as plain:
        expected = [output.token_ids for output in plain.generate(PROMPTS, GREEDY)]
    with engine_of("qwen3", folder, "float32") as engine:
        warm_up(engine)
        before = torch.cuda.memory_allocated()

        def interrupted(**_: Any) -> Any:
            if torch.cuda.is_current_stream_capturing():
                raise KeyboardInterrupt
            return sample(**_)

        sample = engine._runner._drawing._sample_captured
        monkeypatch.setattr(engine._runner._drawing, "_sample_captured", interrupted)
        for _ in range(times):
            with pytest.raises(KeyboardInterrupt):
                engine.wait_until_captured()
        # cuBLAS keeps what it took for the stream.
        assert torch.cuda.memory_allocated() <= before + LIBRARIES
        monkeypatch.undo()
        engine.wait_until_captured()
        assert engine.stats.graphs >= 20
        assert [output.token_ids for output in engine.generate(PROMPTS, GREEDY)] == expected
