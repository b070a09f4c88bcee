"""A family that neither transformers nor precast knows, made of known parts, builds without a change of any code."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from custom_model import FULL, SCAN, WINDOW, PatchworkConfig, register

import precast
from precast.builder.source.shrink import random_model
from precast.check.agreement import agreement
from precast.check.check import compare
from precast.ir.memory.caches import groups
from precast.ir.ops.flops import precast_share


@pytest.fixture(autouse=True)
def _registered() -> None:
    register()


@pytest.mark.parametrize(
    "layers",
    [
        pytest.param((WINDOW, SCAN, FULL, SCAN), id="hybrid"),
        pytest.param((FULL, WINDOW, WINDOW), id="attention alone"),
        pytest.param((SCAN, SCAN), id="states alone"),
    ],
)
def test_logits_and_tokens_are_those_of_its_own_code(layers: tuple[str, ...], tmp_path: Path) -> None:
    model = random_model(PatchworkConfig(layers))
    for layer in model.layers:
        torch.nn.init.normal_(layer.mixture.correction)
    model.save_pretrained(tmp_path / "checkpoint")

    bundle = precast.build(tmp_path / "checkpoint", tmp_path / "bundle", dtype="float32")
    found = agreement(bundle, tmp_path / "checkpoint", model)

    assert found.logits_error < 1e-4
    assert found.tokens_equal


def test_its_parts_are_ops_and_caches_of_their_kinds(tmp_path: Path) -> None:
    bundle = precast.build(PatchworkConfig(), tmp_path / "bundle")

    assert {"precast.paged_attention", "precast.stateful_causal_conv", "precast.stateful_state_space_scan",
            "precast.experts", "precast.route", "precast.rotary_write_kv"} <= bundle.manifest.ops.keys()  # fmt: skip
    assert sorted(len(group.slots) for group in groups(bundle.graph.caches)) == [1, 1, 2, 2]
    assert precast_share(bundle.graph) > 0.98


def test_it_is_checked_as_any_other() -> None:
    compare(PatchworkConfig())
