"""Weights from servers on this machine: the same params as from a directory, and errors that end the load."""

from __future__ import annotations

import gc
import itertools
import json
import signal
from collections.abc import Callable, Iterator
from functools import partial as bind
from pathlib import Path

import pytest
import torch
from file_server import FileServer, Request, drop_after, ranged, serving, silent
from recipe_cases import params_graph, read
from safetensors.torch import save_file

from precast.ir.errors import WeightsError
from precast.ir.graph.schema import Cast, Concat, Graph, Slice, Transpose
from precast.ir.manifest import Checkpoint
from precast.ir.weights import config_facts
from precast.ir.weights.checkpoint import CheckpointFiles
from precast.loader.sources.open import folder_of
from precast.loader.sources.remote import Waits
from precast.loader.torch_device import open_device
from precast.loader.weights.stream import load_weights

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
TENSORS = {f"w{i}": torch.randn(700, 300 + i) for i in range(6)} | {"q": torch.randn(64, 33)}
RECIPES = {
    "whole": read("w0", TENSORS),
    "rows": Slice(read("w1", TENSORS), 0, 30, 600),
    "columns": Slice(read("w2", TENSORS), 1, 7, 90),
    "both": Concat((read("w3", TENSORS), read("w3", TENSORS)), 0),
    "turned": Transpose(read("w4", TENSORS), 0, 1),
    "cast": Cast(read("q", TENSORS), "bfloat16"),
}
RULES = Checkpoint(unused=("w5",))
AT_ONCE = Waits(timeout=60.0, pauses=(0.0, 0.0, 0.0))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two shards and their index."""
    folder = tmp_path_factory.mktemp("checkpoint")
    names = [f"model-{i}-of-2.safetensors" for i in range(2)]
    weight_map = {tensor: names[i % 2] for i, tensor in enumerate(TENSORS)}
    for name in names:
        save_file({tensor: TENSORS[tensor] for tensor, file in weight_map.items() if file == name}, folder / name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "config.json").write_text('{"a": 1}')
    return folder


def contents(checkpoint: Path) -> dict[str, bytes]:
    """What a server has."""
    return {f"ckpt/{file.name}": file.read_bytes() for file in checkpoint.iterdir()}


def graph() -> Graph:
    return params_graph(RECIPES, TENSORS)


def load(server: FileServer, device: str = "cpu", waits: Waits = AT_ONCE) -> dict[str, torch.Tensor]:
    """The params, from the server."""
    files = CheckpointFiles.open(folder_of(f"{server.address}/ckpt/", waits))
    return load_weights(graph(), RULES, files, device=open_device(device)).tensors


@pytest.mark.parametrize("device", DEVICES)
def test_the_same_params_as_from_a_directory(device: str, checkpoint: Path) -> None:
    here = load_weights(graph(), RULES, CheckpointFiles.open(checkpoint), device=open_device(device)).tensors

    with serving(contents(checkpoint)) as server:
        there = load(server, device)

    assert list(here) == list(there)
    assert all(torch.equal(here[name], there[name]) for name in here)
    assert {name for name, _ in server.requests} == {*contents(checkpoint), "ckpt/model.safetensors"} - {
        "ckpt/config.json"
    }


def test_failures_that_pass_change_nothing(checkpoint: Path) -> None:
    here = load_weights(graph(), RULES, CheckpointFiles.open(checkpoint), device=open_device("cpu")).tensors
    bad = [lambda request: request.answer(503), bind(drop_after, 1000), bind(drop_after, 100_000)]

    def every_third(request: Request) -> None:
        turn = len(request.server.requests)
        (bad[turn // 3 % 3] if turn % 3 == 0 and request.file in request.server.files else ranged)(request)

    with serving(contents(checkpoint), every_third) as server:
        there = load(server)

    assert all(torch.equal(here[name], there[name]) for name in here)


def test_no_byte_is_asked_for_twice(checkpoint: Path) -> None:
    with serving(contents(checkpoint)) as server:
        files = CheckpointFiles.open(folder_of(f"{server.address}/ckpt", AT_ONCE))
        server.requests.clear()
        made = load_weights(graph(), RULES, files, device=open_device("cpu"))

    asked: dict[str, list[tuple[int, int]]] = {}
    for name, span in server.requests:
        first, last = span.removeprefix("bytes=").split("-")
        asked.setdefault(name, []).append((int(first), int(last) + 1))
    assert sum(end - start for spans in asked.values() for start, end in spans) == made.bytes_read
    for spans in asked.values():
        spans.sort()
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))


def test_one_file(checkpoint: Path) -> None:
    name = "model-0-of-2.safetensors"
    with serving(contents(checkpoint)) as server:
        files = CheckpointFiles.open(folder_of(f"{server.address}/ckpt/{name}", AT_ONCE))

    assert list(files.tensors) == list(CheckpointFiles.open(checkpoint / name).tensors)
    assert {asked for asked, _ in server.requests} == {f"ckpt/{name}"}


def test_the_config_is_read(checkpoint: Path) -> None:
    with serving(contents(checkpoint)) as server:
        there = folder_of(f"{server.address}/ckpt", AT_ONCE)

        assert config_facts.read_config(there) == {"a": 1}
        del server.files["ckpt/config.json"]
        assert config_facts.read_config(there) is None


# --- what ends a load --------------------------------------------------------------------------------------------


def missing(name: str) -> Callable[[dict[str, bytes]], object]:
    return lambda files: files.pop(f"ckpt/{name}")


@pytest.mark.parametrize(
    ("change", "code", "message"),
    [
        (lambda files: files.clear(), "checkpoint-missing", "expected model.safetensors or model.safetensors.index"),
        (missing("model-1-of-2.safetensors"), "checkpoint-shard-missing", "1 of 2 shards are missing"),
        (lambda files: files.update({"ckpt/model.safetensors.index.json": b"{"}), "checkpoint-index", "doesn't parse"),
        (lambda files: files.update({"ckpt/model.safetensors": b"short"}), "checkpoint-header", "expected at least 8"),
        (
            lambda files: files.update({"ckpt/model.safetensors": (10**7).to_bytes(8, "little") + b"{}"}),
            "checkpoint-header",
            "ends at byte 10000008, the file at byte 10",
        ),
    ],
    ids=["empty", "shard", "index", "short", "cut"],
)  # fmt: skip
def test_checkpoints_that_are_none(
    change: Callable[[dict[str, bytes]], object], code: str, message: str, checkpoint: Path
) -> None:
    with serving(contents(checkpoint)) as server:
        change(server.files)
        with pytest.raises(WeightsError) as caught:
            load(server)

    assert caught.value.code == code
    assert message in caught.value.message
    assert str(caught.value.where).startswith(f"{server.address}/ckpt")
    assert caught.value.fix


def test_an_error_ends_the_requests_that_hang(checkpoint: Path) -> None:
    """The shards' tensors are asked for at once; one answer is an error, the others never come."""
    with serving(contents(checkpoint)) as server:
        files = CheckpointFiles.open(folder_of(f"{server.address}/ckpt", Waits(timeout=3600.0)))
        server.behave = lambda request: request.answer(403) if "model-0" in request.file else silent(request)
        with pytest.raises(WeightsError) as caught:
            load_weights(graph(), RULES, files, device=open_device("cpu"))

    assert caught.value.code == "checkpoint-denied"


def interrupting_once() -> Callable[[Request], None]:
    """With the first request comes an interrupt, which doesn't wake the main thread: the server's takes it. No request
    is answered.
    """
    turns = iter([lambda: signal.raise_signal(signal.SIGINT)])

    def answer(request: Request) -> None:
        next(turns, lambda: None)()
        silent(request)

    return answer


@pytest.fixture
def uncollected() -> Iterator[None]:
    """No garbage is collected: Python drops an interrupt that comes while an object is finalized."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("uncollected")
def test_an_interrupt_ends_a_load_from_a_server_that_hangs(checkpoint: Path) -> None:
    with serving(contents(checkpoint)) as server:
        files = CheckpointFiles.open(folder_of(f"{server.address}/ckpt", Waits(timeout=3600.0)))
        server.behave = interrupting_once()
        with pytest.raises(KeyboardInterrupt):
            load_weights(graph(), RULES, files, device=open_device("cpu"))


@pytest.mark.usefixtures("uncollected")
def test_an_interrupt_ends_the_reading_of_headers(checkpoint: Path) -> None:
    with serving(contents(checkpoint), interrupting_once()) as server, pytest.raises(KeyboardInterrupt):
        CheckpointFiles.open(folder_of(f"{server.address}/ckpt", Waits(timeout=3600.0)))
