"""`precast build --check`: equal models are packed and say so, others are refused by their first layer that differs."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from recitation import Command, run_precast
from transformers import AutoConfig, PreTrainedConfig, logging

import precast
from precast.builder import pipeline
from precast.builder.graph.context import FxGraph, PassContext
from precast.builder.passes.graph_pass import Pass, graph_pass
from precast.check.check import compare
from precast.ir.artifact import Bundle
from precast.ir.errors import BuildError

Spoil = Callable[[Callable[[FxGraph], bool]], None]


@pytest.fixture
def spoil(monkeypatch: pytest.MonkeyPatch) -> Spoil:
    """`spoil(edit)`: from now on, builds have a pass with a mistake in it, before caches are inserted."""
    early, late = pipeline.split(pipeline.PASSES, "shard")

    def add(edit: Callable[[FxGraph], bool]) -> None:
        @graph_pass(stage="match", version=1)
        def mistake(graph: FxGraph, ctx: PassContext) -> bool:
            """a -> b"""
            return edit(graph)

        found: tuple[Pass, ...] = (*early, mistake, *late)
        monkeypatch.setattr(pipeline, "PASSES", found)

    return add


def scale_attention(graph: FxGraph, index: int) -> bool:
    """Another scale in the attention of one layer."""
    nodes = [node for node in graph.nodes if node.target is torch.ops.precast.attention.default]
    nodes[index].kwargs = {**nodes[index].kwargs, "scale": 0.1}
    return True


def config(model_type: str = "llama") -> PreTrainedConfig:
    return AutoConfig.for_model(model_type, num_hidden_layers=3)


@pytest.mark.parametrize(
    ("model_type", "index", "layer"), [("llama", 0, "model.layers.0"), ("gpt2", 1, "transformer.h.1")]
)
def test_first_layer_that_differs_is_named(model_type: str, index: int, layer: str, spoil: Spoil) -> None:
    spoil(lambda graph: scale_attention(graph, index))

    with pytest.raises(BuildError, match=rf"logits differ by .*difference is in {re.escape(layer)}\n") as error:
        compare(config(model_type))

    assert error.value.code == "check-failed"


def test_what_differs_behind_the_layers_is_said_to(spoil: Spoil) -> None:
    def spoil_head(graph: FxGraph) -> bool:
        norms = [node for node in graph.nodes if "rms_norm" in str(node.target)]
        norms[-1].kwargs = {**norms[-1].kwargs, "eps": 10.0}
        return True

    spoil(spoil_head)

    with pytest.raises(BuildError, match=r"the first difference is in what comes after model\.layers\.2"):
        compare(config())


def test_manifest_and_inspect_say_whether_it_was_checked(tmp_path: Path, bundle: Path, command: Command) -> None:
    """And off a terminal the check is silent."""
    config().save_pretrained(tmp_path / "model")

    checked = run_precast("build", tmp_path / "model", "-o", tmp_path / "checked", "--check", "--dtype", "float32")

    assert (checked.returncode, checked.stderr) == (0, "")
    assert "checked      yes: equal to transformers, made tiny" in checked.stdout
    assert Bundle.open(tmp_path / "checked").manifest.checked
    assert "checked      no" in command("inspect", bundle).stdout
    assert not Bundle.open(bundle).manifest.checked


def test_equal_models_pass_and_transformers_messages_stay_as_they_were() -> None:
    before = (logging.get_verbosity(), logging.is_progress_bar_enabled())
    logging.set_verbosity_info()
    logging.enable_progress_bar()

    compare(config())

    found = (logging.get_verbosity(), logging.is_progress_bar_enabled())
    logging.set_verbosity(before[0])
    assert found == (logging.INFO, True)


def test_a_difference_packs_nothing(tmp_path: Path, spoil: Spoil, command: Command) -> None:
    config().save_pretrained(tmp_path / "model")
    spoil(lambda graph: scale_attention(graph, 0))

    ran = command("build", tmp_path / "model", "-o", tmp_path / "bundle", "--check")

    assert ran.exit_code == 1
    assert "code: check-failed" in ran.stderr
    assert not (tmp_path / "bundle").exists()


def test_what_the_check_raises_ends_the_build(tmp_path: Path) -> None:
    def refuse(found: PreTrainedConfig) -> None:
        raise BuildError("check-failed", f"{found.model_type} refused")

    with pytest.raises(BuildError, match="llama refused"):
        precast.build(config(), tmp_path / "bundle", check=refuse)

    assert not (tmp_path / "bundle").exists()
