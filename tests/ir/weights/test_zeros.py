"""Tensors that must be all 0, as the model has none of them."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from precast.ir.errors import WeightsError
from precast.ir.graph.schema import Graph
from precast.ir.manifest import Checkpoint
from precast.ir.weights import fit, zeros
from precast.ir.weights.checkpoint import CheckpointFiles
from precast.ir.weights.tensorfile import encode


@pytest.mark.parametrize("at_a_time", [1, 3, 100])
@pytest.mark.parametrize(
    ("values", "size", "message"),
    [
        ((0.0, 0.0, 0.0, 0.0), 4, ""),
        ((0.0, -0.0, 0.0, 0.0), 0, ""),
        ((), 0, ""),
        ((0.0, 0.0, 0.0, 1e-7), 4, "element 3 is not 0"),
        ((0.0, float("nan")), 0, "element 1 is not 0"),
        ((0.0, 0.0), 4, "expected float32 or float16 or bfloat16 [4], found float16 [2]"),
    ],
)
def test_zeros(
    values: tuple[float, ...], size: int, message: str, at_a_time: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zeros, "_READ", at_a_time)
    data = struct.pack(f"<{len(values)}e", *values)
    (tmp_path / "model.safetensors").write_bytes(encode({"a.bias": ("float16", (len(values),), data)}))

    assert zeros.fault(CheckpointFiles.open(tmp_path), "a.bias", size) == message


def test_integers_are_no_zeros(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(encode({"a.bias": ("int32", (2,), bytes(8))}))

    assert "found int32 [2]" in zeros.fault(CheckpointFiles.open(tmp_path), "a.bias", 2)


def test_of_what_no_recipe_reads_all_is_reported(tmp_path: Path) -> None:
    tensors = {f"{name}.bias": ("float32", (1,), struct.pack("<f", at)) for at, name in enumerate("abc")}
    (tmp_path / "model.safetensors").write_bytes(encode(tensors))
    rules = Checkpoint(ignored=("*.bias",), zeros={"*.bias": 1})

    with pytest.raises(WeightsError) as error:
        fit.check(Graph((), (), (), (), (), (), {}), rules, CheckpointFiles.open(tmp_path))

    assert error.value.message.splitlines()[2:] == ["    b.bias: element 0 is not 0", "    c.bias: element 0 is not 0"]
