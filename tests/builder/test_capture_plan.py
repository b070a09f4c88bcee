"""A build plans which steps are captured, and the bundle says so."""

from __future__ import annotations

from pathlib import Path

import families
import msgspec

from precast.builder.build import build
from precast.ir.artifact import Bundle
from precast.ir.graph.schema import CapturePlan
from precast.ir.memory.capture import capture_plan


def test_the_bundle_holds_the_sizes_of_captured_steps(tmp_path: Path) -> None:
    families.make_config("llama").save_pretrained(tmp_path / "model")

    built = build(tmp_path / "model", tmp_path / "b")

    opened = Bundle.open(tmp_path / "b").graph
    assert opened.capture == built.graph.capture != CapturePlan()
    assert opened.capture == capture_plan(msgspec.structs.replace(opened, capture=CapturePlan()))
