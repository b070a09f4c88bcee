"""Each family becomes canonical ops and no others, and is the same when it is rebuilt from a snapshot."""

from __future__ import annotations

from pathlib import Path

import families
import pytest

from precast.builder.build import build
from precast.ir.schema import Call

# What stays beside our own ops: products, views, sums of parallel branches, scales and soft caps, and what latent
# attention's rotated part of a head is put together with.
PLAIN = {
    "aten.linear.default", "aten.reshape.default", "aten.slice.Tensor", "aten.add.Tensor", "aten.mul.Tensor",
    "aten.div.Tensor", "aten.tanh.default", "aten.gelu.default", "aten.cat.default", "aten.transpose.int",
}  # fmt: skip

FIRST_OF_FAMILY = {model_type: name for name, (model_type, _) in reversed(families.VARIANTS.items())}


@pytest.mark.parametrize("variant", sorted(FIRST_OF_FAMILY.values()))
def test_a_family_in_bfloat16(variant: str, tmp_path: Path) -> None:
    config = families.make_config(variant)

    first = build(config, tmp_path / "first", dtype="bfloat16", snapshots=tmp_path / "snapshots")
    again = build(config, tmp_path / "again", dtype="bfloat16", snapshots=tmp_path / "snapshots")

    assert {op for op in first.manifest.ops if op.startswith("aten.")} <= PLAIN
    assert len(first.graph.blocks) <= 3
    assert sum(isinstance(step, Call) for step in first.graph.main) == config.num_hidden_layers
    assert again.provenance["from_snapshot"] is True
    assert again.digest == first.digest
