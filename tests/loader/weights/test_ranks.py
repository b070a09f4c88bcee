"""What ranks read of a checkpoint: each its own bytes, and together all of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from recipe_cases import Tensors, params_graph, read
from safetensors.torch import save_file

from precast.ir.graph import symbols
from precast.ir.graph.schema import Concat, Each, Read, Recipe, Slice
from precast.ir.manifest import Checkpoint
from precast.ir.weights.checkpoint import CheckpointFiles
from precast.loader.placement import Placement, bind_world
from precast.loader.torch_device import CpuDevice
from precast.loader.weights.stream import Weights, load_weights

WIDE = 8192
"""Columns: half and a quarter of a row of float32 are pages."""


def part(recipe: Recipe, dim: int, total: int) -> Slice:
    """This rank's part of dimension `dim`, which has `total` elements."""
    length = symbols.floordiv(total, "tp")
    return Slice(recipe, dim, symbols.mul("rank", length), length)


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def qkv() -> tuple[Recipe, int, Tensors]:
    tensors = {"q": normal(8, WIDE), "k": normal(4, WIDE), "v": normal(4, WIDE)}
    return Concat(tuple(part(read(name, tensors), 0, len(tensors[name])) for name in tensors), 0), 0, tensors


def columns() -> tuple[Recipe, int, Tensors]:
    tensors = {"o": normal(12, WIDE)}
    return part(read("o", tensors), 1, WIDE), 1, tensors


def experts() -> tuple[Recipe, int, Tensors]:
    tensors = {f"experts.{i}.up": normal(8, 64) + i for i in range(4)}
    return Each(part(Read("experts.*.up", (8, 64), "float32"), 0, 8), 0, 4), 1, tensors


def of_rank(folder: Path, tensors: Tensors, recipe: Recipe, rank: int, tp: int) -> Weights:
    graph = params_graph({"p": recipe}, tensors, {"tp": tp, "rank": rank})
    bound = bind_world(graph, Placement(rank, tp, 1, CpuDevice()))
    return load_weights(bound, Checkpoint(), CheckpointFiles.open(folder), device=CpuDevice())


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("made", [qkv, columns, experts])
def test_parts_are_the_whole_and_no_byte_is_read_twice(
    made: Callable[[], tuple[Recipe, int, Tensors]], tp: int, tmp_path: Path
) -> None:
    """Of a row of `columns` half, or a quarter, is what the system reads at a time, or more."""
    recipe, dim, tensors = made()
    save_file(tensors, tmp_path / "model.safetensors")

    alone = of_rank(tmp_path, tensors, recipe, 0, 1)
    ranks = [of_rank(tmp_path, tensors, recipe, rank, tp) for rank in range(tp)]

    parts = [each.tensors["p"] for each in ranks]
    if made is qkv:  # each rank has a part of each of the three
        apart = [part.split([8 // tp, 4 // tp, 4 // tp]) for part in parts]
        parts = [torch.cat(same) for same in zip(*apart, strict=True)]
    assert torch.equal(torch.cat(parts, dim), alone.tensors["p"])
    assert sum(each.bytes_needed for each in ranks) == alone.bytes_needed
    assert [each.bytes_read for each in ranks] == [alone.bytes_needed // tp] * tp
