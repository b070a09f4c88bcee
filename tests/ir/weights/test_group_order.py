"""Tensors that say of which group each input is, against groups of neighbours in order."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path

import pytest

from precast.ir.errors import WeightsError
from precast.ir.graph.schema import Graph, Param, Read, TensorType
from precast.ir.manifest import Checkpoint
from precast.ir.weights import fit, group_order
from precast.ir.weights.checkpoint import CheckpointFiles
from precast.ir.weights.sources import LocalFolder
from precast.ir.weights.tensorfile import encode


def fault(folder: Path, groups: Sequence[int], size: int) -> str:
    """What is found in a checkpoint that has these groups."""
    data = struct.pack(f"<{len(groups)}i", *groups)
    tensors = {"a": ("int32", (2,), struct.pack("<2i", 8, 8)), "g": ("int32", (len(groups),), data)}
    (folder / "model.safetensors").write_bytes(encode(tensors))
    return group_order.fault(CheckpointFiles.open(folder), "g", size)


@pytest.mark.parametrize("at_a_time", [1, 3, 5, 100])
@pytest.mark.parametrize("size", [0, 1, 4, 7, 10, 11, 2**62])
def test_groups_in_order(size: int, at_a_time: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_order, "_COMPARED", at_a_time)

    assert fault(tmp_path, [i // size if size else 0 for i in range(10)], size) == ""


@pytest.mark.parametrize("at_a_time", [1, 3, 5, 100])
@pytest.mark.parametrize(
    ("groups", "size", "message"),
    [
        ([0, 0, 0, 1, 1, 0], 3, "input 5 is of group 0, expected 1"),
        ([0, 0, -1, 1, 1, 1], 3, "input 2 is of group -1, expected 0"),
        ([1, 1, 1, 0, 0, 0], 3, "input 0 is of group 1, expected 0"),
        ([0, 0, 0, 1, 1, 1], 2, "input 2 is of group 0, expected 1"),
        ([0, 0, 0, 1, 1, 1], 0, "input 3 is of group 1, expected 0"),
    ],
)
def test_groups_in_another_order(
    groups: list[int], size: int, message: str, at_a_time: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_order, "_COMPARED", at_a_time)

    assert fault(tmp_path, groups, size) == message


def test_no_inputs(tmp_path: Path) -> None:
    assert fault(tmp_path, [], 4) == ""


@pytest.mark.parametrize(("dtype", "shape"), [("int64", (2,)), ("int32", (2, 2)), ("int32", ())])
def test_what_are_no_groups(dtype: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    content = bytes((8 if dtype == "int64" else 4) * (4 if shape == (2, 2) else 2 if shape else 1))
    (tmp_path / "model.safetensors").write_bytes(encode({"g": (dtype, shape, content)}))

    found = group_order.fault(CheckpointFiles.open(tmp_path), "g", 4)

    assert found == f"expected int32 [inputs], found {dtype} {list(shape)}"


@pytest.mark.parametrize("readers", [None, 3])
def test_of_what_no_recipe_reads_all_is_reported(readers: int | None, tmp_path: Path) -> None:
    """`c.g_idx` is read: it may have any order."""
    found = {"a.g_idx": (0, 0, 1, 1), "b.g_idx": (1, 1, 0, 0), "c.g_idx": (1, 1, 0, 0), "d.g_idx": (0, 1, 2, 3)}
    data = {name: ("int32", (4,), struct.pack("<4i", *groups)) for name, groups in found.items()}
    (tmp_path / "model.safetensors").write_bytes(encode(data))
    folder = LocalFolder(tmp_path)
    folder.readers = readers
    graph = Graph((), (), (Param("c", TensorType("int32", (4,)), Read("c.g_idx", (4,), "int32")),), (), (), (), {})
    rules = Checkpoint(ignored=("*.g_idx",), groups_in_order={"*.g_idx": 2})

    with pytest.raises(WeightsError) as error:
        fit.check(graph, rules, CheckpointFiles.open(folder))

    assert error.value.message.splitlines()[2:] == [
        "    b.g_idx: input 0 is of group 1, expected 0",
        "    d.g_idx: input 1 is of group 1, expected 0",
    ]
    assert "  2 tensors of groups in another order than the config's desc_act says" in error.value.message
