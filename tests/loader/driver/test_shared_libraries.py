"""In which order a start opens shared libraries: of the start of a process, over a driver that computes nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from fake_driver import environment, with_layer

from precast.builder.build import build
from precast.builder.native.variants import World
from precast.loader.driver import shared_libraries

START = """
import json, sys, threading, time
waits = []
def note(event, given):
    if event in ("ctypes.dlopen", "ctypes.dlsym") or (event == "import" and given[1]):
        waits.append((time.perf_counter(), threading.current_thread().name, f"{event} {given[:2]}"))
sys.addaudithook(note)
import precast
engine = precast.load(
    sys.argv[1], weights=sys.argv[2], backend="driver", native=sys.argv[3], max_num_seqs=8, max_num_tokens=64,
    cache_bytes=8 << 20, allow_config_mismatch=True, capture="off",
)
(launches,) = (each.start for each in engine.timeline.phases if each.name == "launches")
engine.close()
print(json.dumps([each[1:] for each in waits if each[0] < engine.timeline.origin + launches]))
"""
OPENING = "precast-libraries"


def test_nothing_waits_until_cublaslt_is_opened(tmp_path: Path) -> None:
    """Until products are prepared, which wait for it, no other thread opens a library or looks for a function."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=64, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    plain = build(config, tmp_path / "plain.bundle", dtype="bfloat16")
    LlamaForCausalLM(config).bfloat16().save_pretrained(tmp_path / "weights")
    bundle = with_layer(plain, tmp_path / "llama.bundle", [World(1, 1)])
    command = [sys.executable, "-P", "-c", START, bundle.path, tmp_path / "weights", bundle.digest]

    run = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, timeout=240, check=False, env=environment(tmp_path)
    )

    assert run.returncode == 0, run.stderr
    waits = json.loads(run.stdout.splitlines()[-1])
    began = next(i for i, (thread, what) in enumerate(waits) if thread.startswith(OPENING) and "cublasLt" in what)
    assert any("numpy" in what for _, what in waits[:began])
    assert [what for thread, what in waits[began:] if not thread.startswith(OPENING)] == []


@pytest.mark.parametrize("given", [None, "26"])
def test_threads_that_numpy_makes_sleep_unless_somebody_has_said_otherwise(
    given: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, seen = "OPENBLAS_THREAD_TIMEOUT", set[str | None]()
    monkeypatch.setattr(shared_libraries, "import_module", lambda _: seen.add(os.environ.get(name)))
    monkeypatch.setattr(shared_libraries.library, "look_up_all", lambda: None)
    monkeypatch.delenv(name, raising=False)
    if given is not None:
        monkeypatch.setenv(name, given)

    shared_libraries.import_all()

    assert seen == {given or "4"}
    assert os.environ.get(name) == given
