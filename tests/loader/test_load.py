"""From a bundle and a checkpoint on disk to an engine: phases, sizes, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tiny import HEAD, KV_HEADS, random_weights, reference_answer, tiny_graph, tiny_model
from tokenizers_by_hand import letters

from precast.ir.bundle import Bundle, ops_of, write_bundle
from precast.ir.errors import BundleError, RequestError, TargetError, WeightsError
from precast.ir.schema import Checkpoint, Manifest
from precast.loader.load import activation_allowance, free_memory, load, open_device, size_pools
from precast.loader.sampling import SamplingParams
from precast.loader.timeline import Phase, Timeline

WEIGHTS = random_weights()
GRAPH = tiny_graph()
ONE_TOKEN = 3 * 2 * KV_HEADS * HEAD * 4  # bytes in three layers
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bundle") / "tiny.bundle"
    inv_freq = WEIGHTS["inv_freq"]
    write_bundle(
        path,
        manifest_without_blobs=Manifest((1, 0), tiny_model(), ops_of(GRAPH), Checkpoint(), (), {}, ()),
        graph=GRAPH,
        constants={"inv_freq": ("float32", tuple(inv_freq.shape), inv_freq.numpy().tobytes())},
        files={"tokenizer.json": letters(48)},
        provenance={},
    )
    return path


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint")
    save_file({name: tensor for name, tensor in WEIGHTS.items() if name != "inv_freq"}, path / "model.safetensors")
    return path


def test_a_bundle_and_a_checkpoint_become_tokens(bundle: Path, checkpoint: Path) -> None:
    with load(str(bundle), weights=str(checkpoint), device="cpu", max_num_tokens=7) as engine:
        outputs = engine.generate([[5], [9] * 17], SamplingParams(max_tokens=9))
        assert [output.token_ids for output in outputs] == [
            reference_answer(WEIGHTS, prompt, 9) for prompt in ([5], [9] * 17)
        ]
        assert all(output.text for output in outputs)
        phases = {phase.name: phase for phase in engine.timeline.phases}
        assert list(phases) == ["context", "bundle", "weights", "pools", "first token"]
        assert all(phase.seconds is not None for phase in phases.values())
        size = sum(tensor.nbytes for name, tensor in WEIGHTS.items() if name != "inv_freq")
        assert phases["weights"].bytes == phases["weights"].counters["bytes_needed"] == size
        # the 16 sequences of 64 tokens, the model's limit
        assert phases["pools"].bytes == 16 * 64 * ONE_TOKEN
        assert phases["pools"].counters["pages_small"] == 2 * phases["pools"].counters["pages_large"] == 256
        assert json.loads(engine.timeline.to_json())["phases"][-1]["name"] == "first token"


@pytest.mark.gpu
def test_a_gpu_is_filled_with_as_many_pages_as_can_be_used(bundle: Path, checkpoint: Path) -> None:
    with load(bundle, weights=checkpoint, device="cuda", max_num_seqs=5) as engine:
        assert engine.stats.pools["large"].pages == 5 * 64 // 8
        (output,) = engine.generate([[9] * 17], SamplingParams(max_tokens=9))
        assert output.token_ids == reference_answer(WEIGHTS, [9] * 17, 9)


def test_an_opened_bundle_and_a_begun_timeline_are_carried_on(bundle: Path, checkpoint: Path) -> None:
    timeline = Timeline()
    timeline.add("import", start=timeline.origin, seconds=0.5)
    engine = load(Bundle.open(bundle), weights=checkpoint, device=CPU, timeline=timeline)
    assert engine.timeline is timeline
    assert [phase.name for phase in timeline.phases] == ["import", "context", "bundle", "weights", "pools"]
    engine.generate(["hello"], SamplingParams(max_tokens=1))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs is 0, expected an integer of at least 1"),
        ({"max_num_tokens": True}, "max_num_tokens is True"),
        ({"max_num_tokens": 1.5}, "max_num_tokens is 1.5"),
        ({"cache_bytes": 0}, "cache_bytes is 0"),
        ({"device": "gpu"}, "device is 'gpu', expected 'cpu', 'cuda'"),
        ({"device": 3.5}, "device is 3.5"),
    ],
)
def test_options_that_are_refused(options: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message) as error:
        load("no such bundle", weights="no such checkpoint", **options)
    assert error.value.code == "engine-option-invalid"


def test_what_is_not_there_is_named(bundle: Path, checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(BundleError) as error:
        load(tmp_path / "none", weights=checkpoint, device="cpu")
    assert error.value.code == "bundle-missing"
    with pytest.raises(WeightsError) as other:
        load(bundle, weights=tmp_path / "none", device="cpu")
    assert other.value.code == "checkpoint-missing"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there() -> None:
    for device in ("cuda", "cuda:1", torch.device("cuda", 0)):
        with pytest.raises(TargetError, match=r"device is cuda.* sees 0 CUDA devices") as error:
            load("no such bundle", weights="no such checkpoint", device=device)
        assert (error.value.code, error.value.exit_code) == ("device-missing", 4)
    assert open_device(None) == CPU


def test_a_device_that_is_not_supported() -> None:
    with pytest.raises(TargetError, match="device is meta") as error:
        open_device("meta")
    assert error.value.code == "device-invalid"


def sized(**options: Any) -> tuple[dict[str, int], Phase]:
    phase = Phase("pools", 0.0)
    defaults = {"max_num_seqs": 256, "max_num_tokens": 8192, "max_seq_len": 64, "cache_bytes": None}
    return size_pools(GRAPH, phase, device=CPU, **{**defaults, **options}), phase


@pytest.mark.parametrize(
    ("options", "tokens"),
    [
        ({}, 16 * 64),
        ({"max_num_seqs": 3}, 3 * 64),
        ({"max_seq_len": 2048}, 16 * 2048),
        ({"max_seq_len": 4096}, 16 * 2048),
        ({"max_seq_len": 100_000}, 100_000),  # one of the longest
        ({"cache_bytes": 5 * 8 * ONE_TOKEN + 1}, 5 * 8),
        ({"cache_bytes": 2**25, "max_num_seqs": 2}, 2 * 64),  # more would never be used
    ],
)
def test_tokens_that_the_cache_holds(options: Any, tokens: int) -> None:
    pages, phase = sized(**options)
    assert pages == {"small": tokens // 4, "large": tokens // 8}
    assert phase.bytes == tokens * ONE_TOKEN
    assert phase.counters["bytes_for_cache"] >= phase.bytes


def test_a_cache_without_room_for_a_page() -> None:
    with pytest.raises(RequestError, match=r"hold no page of each pool: a page takes .* 512 of pool small") as error:
        sized(cache_bytes=8 * ONE_TOKEN - 1)
    assert error.value.code == "cache-too-small"


def test_more_cache_than_memory() -> None:
    with pytest.raises(TargetError, match="bytes are free on cpu") as error:
        sized(cache_bytes=2**60)
    assert error.value.code == "device-memory"


def test_free_memory_is_some() -> None:
    assert 2**20 < free_memory(CPU) < 2**50


def test_room_for_activations_is_arithmetic_over_the_graph() -> None:
    # the largest value is [1, T, 16] float32, or the logits [1, R, 48]
    assert activation_allowance(GRAPH, max_num_seqs=2, max_num_tokens=100) == 4 * 100 * 16 * 4 + 48 * 2 * 48
    assert activation_allowance(GRAPH, max_num_seqs=200, max_num_tokens=100) == 4 * 100 * 48 * 4 + 48 * 100 * 48
