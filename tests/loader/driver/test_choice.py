"""Which backend a load takes, and what it says where it can't take the one that is asked for."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from support.no_torch import BLOCK

from precast.builder.build import build
from precast.ir.errors import RequestError, TargetError
from precast.loader.driver import context
from precast.loader.load import load
from precast.loader.timeline import Timeline


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import LlamaConfig

    config = LlamaConfig(
        vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4,
        max_position_embeddings=64,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("bundle") / "tiny.bundle"
    build(config, path, dtype="bfloat16")
    return path


def test_a_backend_has_one_of_two_names(bundle: Path, tmp_path: Path) -> None:
    backend: Any = "cuda"
    with pytest.raises(RequestError, match="backend is 'cuda', expected one of driver, torch") as error:
        load(bundle, weights=tmp_path, backend=backend)
    assert error.value.code == "engine-option-invalid"


@pytest.mark.parametrize("device", ["cpu", "cuda:x", "meta"])
def test_the_driver_runs_on_gpus(bundle: Path, tmp_path: Path, device: str) -> None:
    with pytest.raises(RequestError, match="expected 'cuda' or a certain GPU like 'cuda:1' for the driver backend"):
        load(bundle, weights=tmp_path, device=device, backend="driver")


class _Loaded(Exception):
    """Torch's load was called."""


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with a driver, whose GPU nobody needs: no bundle here has a native layer. Torch's load says so."""

    def loaded(options: Any, timeline: Timeline) -> None:
        raise _Loaded(getattr(options.bundle, "path", "not opened"))

    def begun(device: object) -> Future[context.Begun]:
        return Future()

    monkeypatch.setattr(context, "begin", begun)
    monkeypatch.setattr("precast.loader.torch_load.load_with_torch", loaded)


@pytest.mark.usefixtures("gpu")
def test_why_torch_is_taken_is_said_in_the_timeline(bundle: Path, tmp_path: Path) -> None:
    timeline = Timeline()
    with pytest.raises(_Loaded, match=r"tiny\.bundle"):
        load(bundle, weights=tmp_path, device="cuda", timeline=timeline)
    backend, _ = timeline.phases
    assert backend.name == "backend"
    assert backend.note == "torch, as the driver alone doesn't run the model: the bundle has no native layer"
    assert backend.note in timeline.text()
    assert timeline.to_dict()["phases"][0]["note"] == backend.note


@pytest.mark.usefixtures("gpu")
def test_the_driver_is_not_replaced_where_it_is_asked_for(bundle: Path, tmp_path: Path) -> None:
    with pytest.raises(TargetError, match="the bundle has no native layer") as error:
        load(bundle, weights=tmp_path, backend="driver")
    assert error.value.code == "backend-unfit"


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("options", [{"device": "cpu"}, {"backend": "torch"}])
def test_nothing_is_tried_where_torch_is_asked_for(bundle: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    timeline = Timeline()
    with pytest.raises(_Loaded, match="not opened"):
        load(bundle, weights=tmp_path, timeline=timeline, **options)
    assert [phase.name for phase in timeline.phases] == ["import"]


LOAD = """
import sys
import precast
try:
    precast.load(sys.argv[1], weights=sys.argv[2], device=sys.argv[3])
except precast.TargetError as error:
    print(error.code, error, sep=": ")
"""


def test_torch_that_is_not_installed_is_named(bundle: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", BLOCK + LOAD, str(bundle), str(tmp_path), "cpu"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith("dependency-missing: ")
    assert "torch is to serve the model, and torch is not installed" in run.stdout
    assert "pip install 'precast[torch]'" in run.stdout
