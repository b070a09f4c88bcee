"""The driver backend on a GPU: its device, and a model that is served without torch and gives the tokens of torch."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from ptx import ADD
from support.no_torch import BLOCK

from precast.loader.device import Buffer, host_bytes
from precast.loader.driver.device import DriverDevice
from precast.loader.driver.library import DriverError

pytestmark = pytest.mark.gpu

COUNT = 100


@pytest.fixture
def device() -> Iterator[DriverDevice]:
    opened = DriverDevice(0)
    with opened.use():
        yield opened


def numbers(device: DriverDevice, buffer: Buffer) -> list[int]:
    """What memory of the device holds, as int32."""
    there = device.alloc(4 * COUNT, pinned=True)
    device.copy(there, buffer)
    device.synchronize()
    found: list[int] = np.frombuffer(host_bytes(there), np.int32).tolist()
    return found


def test_memory_is_zeroed_copied_and_changed_by_kernels(device: DriverDevice) -> None:
    source, target = device.alloc(4 * COUNT), device.alloc(4 * COUNT)
    device.zero(source)
    kernel = device.load(ADD + b"\0", "add")
    device.launch(kernel, (COUNT, 1, 1), (1, 1, 1), [source, 5])
    device.copy(target, source)
    assert numbers(device, target) == [5] * COUNT


def test_a_graph_runs_again_on_what_is_there_then(device: DriverDevice) -> None:
    target = device.alloc(4 * COUNT)
    device.zero(target)
    kernel = device.load(ADD + b"\0", "add")
    with device.capture() as graph:
        device.launch(kernel, (COUNT, 1, 1), (1, 1, 1), [target, 2])
        device.launch(kernel, (COUNT, 1, 1), (1, 1, 1), [target, 1])
    assert numbers(device, target) == [0] * COUNT
    graph.replay()
    graph.replay()
    assert numbers(device, target) == [6] * COUNT


def test_a_capture_that_fails_leaves_the_stream_usable(device: DriverDevice) -> None:
    target = device.alloc(4 * COUNT)
    device.zero(target)
    with pytest.raises(ZeroDivisionError), device.capture():
        raise ZeroDivisionError
    kernel = device.load(ADD + b"\0", "add")
    device.launch(kernel, (COUNT, 1, 1), (1, 1, 1), [target, 2])
    assert numbers(device, target) == [2] * COUNT


def test_events_order_streams_and_time_them(device: DriverDevice) -> None:
    target, other = device.alloc(4 * COUNT), device.stream()
    kernel = device.load(ADD + b"\0", "add")
    device.zero(target)
    first, last = device.event(timed=True), device.event(timed=True)
    first.record()
    with device.use(other):
        first.wait(other)
        device.launch(kernel, (COUNT, 1, 1), (1, 1, 1), [target, 2])
        last.record()
    last.synchronize()
    assert device.seconds_between(first, last) > 0
    assert numbers(device, target) == [2] * COUNT


def test_memory_that_there_is_not_is_known_as_such(device: DriverDevice) -> None:
    with pytest.raises(DriverError, match="OUT_OF_MEMORY") as error:
        device.alloc(1 << 50)
    assert device.is_out_of_memory(error.value)
    assert device.free_bytes() > 0


SERVE = """
import json, sys
bundle, weights, backend, digest, capture = sys.argv[1:]
import precast
engine = precast.load(
    bundle, weights=weights, backend=backend, native=digest, capture=capture, max_num_seqs=8, max_num_tokens=256,
    cache_bytes=16 << 20,
)
prompts = [[3, 5, 7], [11] * 40, list(range(20, 90)), [9], [7 * i * i % 500 for i in range(250)]]
found = []
for drawn in ({}, {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "seed": 3}):
    params = precast.SamplingParams(max_tokens=24, ignore_eos=True, **drawn)
    found += [output.token_ids for output in engine.generate(prompts, params)]
print(json.dumps([found, engine.stats.graphs, "torch" in sys.modules]))
"""


def served(bundle: Path, weights: Path, backend: str, digest: str, capture: str) -> Any:
    """Answers, graphs, and whether torch was imported, of a process that serves the bundle."""
    code = (BLOCK if backend == "driver" else "") + SERVE
    command = [sys.executable, "-c", code, str(bundle), str(weights), backend, digest, capture]
    run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])


class Model(NamedTuple):
    """A bundle with a layer, its digest, and its checkpoint."""

    bundle: Path
    digest: str
    weights: Path


def assert_tokens_are_those_of_torch(model: Model, capture: str) -> None:
    ours, graphs, has_torch = served(model.bundle, model.weights, "driver", model.digest, capture)
    theirs, their_graphs, _ = served(model.bundle, model.weights, "torch", model.digest, capture)

    assert not has_torch
    assert ours == theirs
    assert graphs == their_graphs


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    pytest.importorskip("transformers", minversion="5.17")
    from safetensors.torch import save_file
    from transformers import LlamaConfig, LlamaForCausalLM

    from precast.builder.build import build

    folder = tmp_path_factory.mktemp("model")
    config = LlamaConfig(
        vocab_size=512, hidden_size=256, intermediate_size=384, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=512, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    made = build(config, folder / "llama.bundle", dtype="bfloat16", targets=["sm_90"])
    (folder / "weights").mkdir()
    save_file(LlamaForCausalLM(config).bfloat16().state_dict(), folder / "weights" / "model.safetensors")
    return Model(folder / "llama.bundle", made.digest, folder / "weights")


@pytest.mark.parametrize("capture", ["off", "before"])
def test_a_model_gives_the_tokens_that_torch_gives(model: Model, capture: str) -> None:
    assert_tokens_are_those_of_torch(model, capture)


SPARSE: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 128,
    "num_hidden_layers": 3, "num_attention_heads": 16, "num_key_value_heads": 16, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "n_shared_experts": 1, "first_k_dense_replace": 2, "n_group": 1, "topk_group": 1,
    "q_lora_rank": 128, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
    "index_n_heads": 64, "index_head_dim": 128, "index_topk": 64, "max_position_embeddings": 8192, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
"""DeepSeek-V3.2's sizes of heads, and far fewer of all else."""


@pytest.fixture(scope="module")
def sparse(tmp_path_factory: pytest.TempPathFactory) -> Model:
    pytest.importorskip("transformers", minversion="5.17")
    from transformers import AutoConfig, AutoModelForCausalLM

    from precast.builder.build import build

    folder = tmp_path_factory.mktemp("sparse")
    config = AutoConfig.for_model("deepseek_v32", **SPARSE)
    made = build(config, folder / "sparse.bundle", dtype="bfloat16", targets=["sm_90"])
    AutoModelForCausalLM.from_config(config).bfloat16().save_pretrained(folder / "weights")
    return Model(folder / "sparse.bundle", made.digest, folder / "weights")


@pytest.mark.parametrize("capture", ["off", "before"])
def test_sparse_attention_gives_the_tokens_that_torch_gives(sparse: Model, capture: str) -> None:
    """Captured steps have page lists as long as they may become, and keep scores for all of their slots."""
    assert_tokens_are_those_of_torch(sparse, capture)


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """A llama whose embeddings are stored in FP8, and nothing else, in rows that no block of a kernel ends with."""
    pytest.importorskip("transformers", minversion="5.17")
    import torch
    from safetensors.torch import save_file
    from transformers import LlamaConfig, LlamaForCausalLM

    from precast.builder.build import build

    folder = tmp_path_factory.mktemp("tables")
    entries = {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_convert": ["embed_tokens"],
               "modules_to_not_convert": ["model.layers", "lm_head"]}  # fmt: skip
    config = LlamaConfig(
        vocab_size=512, hidden_size=264, intermediate_size=384, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=512, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    tensors = LlamaForCausalLM(config).bfloat16().state_dict()
    name = "model.embed_tokens.weight"
    tensors |= {name: (tensors[name] * 1000).to(torch.float8_e4m3fn), f"{name}_scale": torch.tensor([1.3e-3])}
    written = {**config.to_dict(), "architectures": ["LlamaForCausalLM"], "quantization_config": entries}
    (folder / "weights").mkdir()
    save_file(tensors, folder / "weights" / "model.safetensors")
    (folder / "weights" / "config.json").write_text(json.dumps(written), encoding="utf-8")
    made = build(folder / "weights", folder / "tables.bundle", dtype="bfloat16", targets=["sm_90"])
    return Model(folder / "tables.bundle", made.digest, folder / "weights")


@pytest.mark.parametrize("capture", ["off", "before"])
def test_tables_in_few_bits_give_the_tokens_that_torch_gives(tables: Model, capture: str) -> None:
    """The table is read, and its rows are looked up, without torch."""
    assert_tokens_are_those_of_torch(tables, capture)


@pytest.mark.slow
def test_a_load_that_is_killed_at_any_moment_leaves_nothing_on_the_gpu(model: Model, device: DriverDevice) -> None:
    command = [sys.executable, "-m", "precast", "run", model.bundle, "--weights", model.weights, "--token-ids", "1"]
    command += ["--backend", "driver", "--allow-native", model.digest, "--max-tokens", "1", "--cache-bytes", "16777216"]
    moments, before, codes = random.Random(0), device.free_bytes(), []

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL) * 6:
        with subprocess.Popen([*map(str, command)], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            with suppress(subprocess.TimeoutExpired):
                process.wait(moments.uniform(0.05, 1.0))
            process.send_signal(number)
            process.communicate(timeout=60)
            codes.append((number, process.returncode))

    # Before its own answers are in place, Python's ends it; a run may also have been done.
    allowed = {signal.SIGINT: {0, 1, 130, -2}, signal.SIGTERM: {0, 143, -15}, signal.SIGKILL: {0, -9}}
    assert all(code in allowed[number] for number, code in codes), codes
    assert any(code for _, code in codes)
    assert device.free_bytes() == before
    assert served(model.bundle, model.weights, "driver", model.digest, "off")[1] == 0
