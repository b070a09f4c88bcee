"""Several ranks without torch, over a driver that computes nothing: how they load, serve, agree and end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from fake_driver import environment, with_layer

from precast.builder.build import build
from precast.builder.native.variants import World
from precast.ir.artifact import Bundle

CONFIG: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 0, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True,
}  # fmt: skip
SERVE = """
import json, os, sys
import precast
from precast.ir.errors import PrecastError
bundle, weights, digest, options = sys.argv[1:]
options = json.loads(options)
try:
    engine = precast.load(
        bundle, weights=weights, backend="driver", native=digest, max_num_seqs=8, max_num_tokens=64,
        cache_bytes=8 << 20, allow_config_mismatch=True, timeouts={"end": 10, "step": 30}, **options["load"],
    )
    lead = engine._runner._lead
    params = precast.SamplingParams(max_tokens=4, ignore_eos=True)
    found = [each.token_ids for each in engine.generate([[3, 5], [7] * 20], params)]
    if options["kills"]:
        os.kill(lead._processes[1], options["kills"])
        while True:
            engine.generate([[3]], params)
    stats = engine.stats
    said = {
        "tokens": found, "graphs": stats.graphs, "compilations": stats.compilations,
        "ranks": sorted(engine.timeline.ranks),
        "notes": [phase.note for phase in engine.timeline.phases if phase.note],
    }
    engine.close()
except PrecastError as error:
    said = {"code": error.code, "message": str(error)}
print(json.dumps(said))
print("torch" in sys.modules)
"""


class Place(NamedTuple):
    """A folder with bundles of a tiny model, by the worlds of their layers, and its weights."""

    folder: Path
    bundles: dict[str, Bundle]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("ranks")
    config = AutoConfig.for_model("qwen3_moe", **CONFIG)
    plain = build(config, folder / "plain.bundle", dtype="bfloat16")
    AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(folder / "weights")
    worlds = {"one": [World(1, 1)], "two": [World(2, 1), World(2, 2)]}
    bundles = {name: with_layer(plain, folder / f"{name}.bundle", each) for name, each in worlds.items()}
    return Place(folder, bundles | {"plain": plain})


def served(place: Place, load: dict[str, Any], *, bundle: str = "two", kills: int = 0, **more: str) -> dict[str, Any]:
    """What a process says that serves a bundle so."""
    opened = place.bundles[bundle]
    options = json.dumps({"load": load, "kills": kills})
    command: Sequence[str] = [
        sys.executable, "-P", "-c", SERVE, str(opened.path), str(place.folder / "weights"), opened.digest, options
    ]  # fmt: skip
    run = subprocess.run(
        command, capture_output=True, text=True, timeout=240, check=False, env=environment(place.folder, **more)
    )
    assert run.returncode == 0, run.stderr
    said, has_torch = run.stdout.splitlines()
    assert has_torch == "False"
    found: dict[str, Any] = json.loads(said)
    return found


@pytest.mark.parametrize(
    ("world", "capture"), [({"tp": 2}, "off"), ({"tp": 2, "ep": 2}, "before")], ids=["ranks", "experts"]
)
def test_ranks_serve_without_torch(place: Place, world: dict[str, int], capture: str) -> None:
    found = served(place, {**world, "capture": capture})

    assert found.get("tokens") == [[0] * 4, [0] * 4], found
    assert (found["ranks"], found["compilations"]) == ([1], 0)
    assert (found["graphs"] > 3) == (capture == "before")
    assert any("it is allowed by the bundle's digest" in note for note in found["notes"])


def test_a_rank_that_is_lost_ends_the_others(place: Place) -> None:
    found = served(place, {"tp": 2}, kills=signal.SIGKILL)

    assert found["code"] == "rank-lost"
    assert "was ended by SIGKILL" in found["message"]


REFUSED = {
    "no NCCL": ({"tp": 2}, "two", {"FAKE_CUDA_ALONE": "1"}, "dependency-missing",
                "NCCL can't be loaded: rank 0: libnccl.so.2 is not installed"),
    "a layer of other worlds": ({"tp": 2}, "one", {}, "backend-unfit",
                                "the native layer doesn't fit: it was compiled for tp=1, not for tp=2"),
    "no layer": ({"tp": 2}, "plain", {}, "backend-unfit", "the bundle has no native layer"),
    "one rank of a layer for two": ({}, "two", {}, "backend-unfit",
                                    "it was compiled for tp=2 and tp=2,ep=2, not for tp=1"),
    "stages": ({"pp": 2}, "two", {}, "backend-unfit", "stages send each other what they have by torch"),
    "sequences of their own": (
        {"tp": 2, "dp": 2}, "two", {}, "backend-unfit", "ranks that have sequences of their own have torch"
    ),
    "a launcher": ({"tp": 2}, "two", {"RANK": "0", "WORLD_SIZE": "2"}, "backend-unfit", "rendezvous, which is torch's"),
    "a certain GPU": ({"tp": 2, "device": "cuda:1"}, "two", {}, "engine-option-invalid", "a GPU of its own"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_ranks_without_torch_do_not_do_is_said(place: Place, case: str) -> None:
    load, bundle, more, code, message = REFUSED[case]

    found = served(place, load, bundle=bundle, **more)

    assert found["code"] == code
    assert str(message) in found["message"]
    if code == "backend-unfit":
        assert "backend='torch'" in found["message"]


def test_nothing_of_a_world_is_left(place: Place, tmp_path: Path) -> None:
    found = served(place, {"tp": 2, "capture": "off"}, TMPDIR=str(tmp_path))
    assert "tokens" in found, found
    assert os.listdir(tmp_path) == []
