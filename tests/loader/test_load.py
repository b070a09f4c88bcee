"""From a bundle and a checkpoint on disk to an engine: phases, sizes, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import save_file
from tiny import random_weights, reference_answer, tiny_graph, tiny_model
from tokenizers_by_hand import letters

from precast.ir.artifact import Bundle, ops_of, write_bundle
from precast.ir.bundle.versions import FORMAT
from precast.ir.errors import BundleError, RequestError, TargetError, WeightsError
from precast.ir.graph import symbols
from precast.ir.graph.schema import Graph
from precast.ir.manifest import Checkpoint, Manifest
from precast.ir.memory import activations, caches
from precast.loader.engine.sampling import SamplingParams
from precast.loader.load import CUDA_FRACTION, CUDA_RESERVE, free_memory, load, open_device, size_arena, step_bytes
from precast.loader.timeline import Phase, Timeline

WEIGHTS = random_weights()
GRAPH = tiny_graph()
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
SLAB = 1024  # one page of pool small, two of pool large
SLABS_OF_64 = 64 // 4 + 64 // 8 // 2  # for a sequence of 64 tokens


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("bundle") / "tiny.bundle", GRAPH)


def write(path: Path, graph: Graph) -> Path:
    """The bundle of the tiny model with this graph."""
    inv_freq = WEIGHTS["inv_freq"]
    write_bundle(
        path,
        manifest_without_blobs=Manifest(FORMAT, tiny_model(), ops_of(graph), Checkpoint(), (), {}, ()),
        graph=graph,
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
        # 16 sequences of 64 tokens, the model's limit: 8 pages, and those for the window of 6 and steps of 7 tokens
        assert phases["pools"].bytes == 16 * (8 // 2 + 4) * SLAB
        assert phases["pools"].counters["slabs"] * phases["pools"].counters["slab_bytes"] == phases["pools"].bytes
        assert json.loads(engine.timeline.to_json())["phases"][-1]["name"] == "first token"


@pytest.mark.parametrize("reuses", [True, False])
def test_prefixes_are_reused_unless_that_is_switched_off(bundle: Path, checkpoint: Path, reuses: bool) -> None:
    with load(bundle, weights=checkpoint, device="cpu", reuse_prefixes=reuses) as engine:
        first, second = (engine.generate([[9] * 17], SamplingParams(max_tokens=3)) for _ in range(2))
        assert first == second
        assert (engine.stats.tokens_reused, engine.stats.prefix_spans) == ((16, 2) if reuses else (0, 0))


@pytest.mark.gpu
def test_a_gpu_is_filled_with_as_many_pages_as_can_be_used(bundle: Path, checkpoint: Path) -> None:
    with load(bundle, weights=checkpoint, device="cuda", max_num_seqs=5) as engine:
        assert engine.stats.slabs == 5 * SLABS_OF_64
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
        ({"bundle": None}, "bundle is None, expected a path or a Bundle"),
        ({"weights": None}, "weights is None, expected the path of a checkpoint"),
    ],
)
def test_options_that_are_refused(options: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message) as error:
        load(**{"bundle": "no such bundle", "weights": "no such checkpoint", **options})
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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"max_num_seqs": 2, "max_num_tokens": 2**40},
            "max_num_tokens is 1099511627776, and a step of this bundle takes at most 512",
        ),
        ({"max_num_seqs": 33}, "max_num_seqs is 33, and a step of this bundle takes at most 32"),
    ],
)
def test_steps_that_no_graph_takes(options: Any, message: str, tmp_path: Path) -> None:
    limits = {"T": 512, "B": 32}
    symbols = tuple(msgspec.structs.replace(each, max=limits.get(each.name)) for each in GRAPH.symbols)
    limited = write(tmp_path / "limited.bundle", msgspec.structs.replace(GRAPH, symbols=symbols))
    with pytest.raises(RequestError, match=message) as error:
        load(limited, weights="no such checkpoint", device="cpu", **options)
    assert error.value.code == "engine-option-invalid"


def sized(**options: Any) -> tuple[int, Phase]:
    phase = Phase("pools", 0.0)
    defaults = {"max_num_seqs": 256, "max_num_tokens": 8192, "max_seq_len": 64, "cache_bytes": None, "free": 2**34}
    return size_arena(GRAPH, phase, **{"device": CPU, **defaults, **options}), phase


@pytest.mark.parametrize(
    ("options", "slabs"),
    [
        ({}, 16 * SLABS_OF_64),
        ({"max_num_seqs": 3}, 3 * SLABS_OF_64),
        ({"max_seq_len": 2048}, 16 * 32 * SLABS_OF_64),
        ({"max_seq_len": 4096}, 16 * 32 * SLABS_OF_64),
        # one of the longest: all of the full layer, and of the window's layers what one step and the window hold
        ({"max_seq_len": 200_000}, 200_000 // 8 // 2 + (6 - 1 + 8192) // 4 + 1),
        ({"free": 2 * 40 * SLAB}, 40),  # half of the memory
        ({"cache_bytes": 5 * SLAB + 1}, 5),
        ({"cache_bytes": 2**25, "max_num_seqs": 2}, 2**25 // SLAB),  # for prefixes, if not for sequences
    ],
)
def test_slabs_of_an_arena_on_a_cpu(options: Any, slabs: int) -> None:
    found, phase = sized(**options)
    assert found == slabs
    assert phase.bytes == slabs * SLAB
    counters = phase.counters
    assert (counters["slabs"], counters["slab_bytes"], counters["bytes_for_cache"]) == (slabs, SLAB, phase.bytes)


@pytest.mark.parametrize("spare", [0, 10**6, 10**9])
def test_slabs_of_an_arena_on_a_gpu_are_arithmetic(spare: int) -> None:
    options = {"max_num_seqs": 64, "max_num_tokens": 8192, "max_seq_len": 10**6}
    plan = caches.with_slabs(GRAPH.caches)
    needed = step_bytes(GRAPH, plan, CUDA, **options)
    free = CUDA_RESERVE + needed(0) + spare + 10**7
    found, phase = sized(device=CUDA, free=free, **options)

    def left_for(slabs: int) -> float:
        return (free - CUDA_RESERVE - needed(slabs)) * CUDA_FRACTION

    assert found * SLAB <= left_for(found)
    assert (found + 1) * SLAB > left_for(found + 1)
    assert phase.counters["bytes_for_activations"] == needed(found)
    assert phase.counters["bytes_free"] == free


def test_a_gpu_keeps_what_its_sequences_cannot_fill() -> None:
    assert sized(device=CUDA, free=2**34, max_num_seqs=5)[0] == 5 * SLABS_OF_64


@pytest.mark.parametrize(
    "options",
    [
        {"cache_bytes": 2 * SLAB - 1},
        {"cache_bytes": 1},
        {"free": 3 * SLAB},
        {"free": 100},
        {"device": CUDA, "free": CUDA_RESERVE + 2**20},
        {"device": CUDA, "max_num_tokens": 10**9},
        {"device": CUDA, "free": 100},
        {"device": CUDA, "cache_bytes": 1},
    ],
)
def test_a_cache_without_room_for_the_shortest_sequence(options: Any) -> None:
    numbers = r"the cache has \d slabs of 1024 bytes, and the shortest sequence needs 2.* 512 bytes in pool large"
    with pytest.raises(RequestError, match=numbers + r".* activations take up to \d+, and \d+ are set aside") as error:
        sized(**options)
    assert error.value.code == "cache-too-small"
    assert "give at least 2048 cache_bytes" in str(error.value)


def test_shared_pages_stand_in_the_list_of_each_that_shares_them() -> None:
    plan = caches.with_slabs(GRAPH.caches)
    sizes = {"max_num_seqs": 30, "max_num_tokens": 256, "max_seq_len": 640}
    needed = step_bytes(GRAPH, plan, CPU, **sizes)

    # 30 sequences of 600 tokens that begin with the same 592: 74 pages that all have, and one of each one's own
    lists = {group.name: 30 * 75 if group.name == "far" else 30 * 3 for group in plan.groups}
    longest = activations.step_sizes(GRAPH, max_num_tokens=30, max_num_seqs=30, max_seq_len=600, num_pages=lists)
    assert needed(74 + 30) >= symbols.evaluate(activations.step_peak(GRAPH, "cpu"), longest)
    assert needed(1) < needed(20) < needed(40) == needed(4000)  # 80 pages of a slab's two are 640 tokens


def test_a_step_of_as_many_sequences_as_tokens_may_be_one_prompt() -> None:
    plan, sizes = caches.with_slabs(GRAPH.caches), {"max_num_tokens": 256, "max_seq_len": 10**6}
    prompt, several = (step_bytes(GRAPH, plan, CPU, max_num_seqs=count, **sizes)(10**6) for count in (1, 256))

    assert several >= prompt


def test_no_sequence_is_longer_than_its_pool() -> None:
    plan, sizes = caches.with_slabs(GRAPH.caches), {"max_num_seqs": 30, "max_num_tokens": 256}
    pool, model = (step_bytes(GRAPH, plan, CPU, max_seq_len=length, **sizes)(40) for length in (40 * 2 * 8, 10**6))

    assert model == pool


@pytest.mark.parametrize("options", [{}, {"device": CUDA}, {"device": CUDA, "cache_bytes": 2**34 - 2**20}])
def test_more_cache_than_memory(options: Any) -> None:
    with pytest.raises(
        TargetError, match=r"cache_bytes is \d+, and \d+ bytes are free on .* after the weights"
    ) as error:
        sized(**{"cache_bytes": 2**34 + 1, **options})
    assert error.value.code == "device-memory"


def test_free_memory_is_some() -> None:
    assert 2**20 < free_memory(CPU) < 2**50
