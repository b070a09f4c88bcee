"""What ranks read of a checkpoint: each its own bytes, and together all of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
from recipe_cases import Tensors, params_graph, read
from safetensors.torch import save_file

from precast.ir.errors import WeightsError
from precast.ir.graph import symbols
from precast.ir.graph.schema import Concat, Dequantise, Each, Read, Recipe, Repack, Slice
from precast.ir.manifest import Checkpoint
from precast.ir.weights import recipes
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


def repacked_rows() -> tuple[Recipe, int, Tensors]:
    tensors = {"w": words(16, WIDE)}
    return part(Repack(read("w", tensors), "values"), 0, 8 * WIDE), 0, tensors


def repacked_columns() -> tuple[Recipe, int, Tensors]:
    tensors = {"w": words(64, 8)}
    return part(Repack(read("w", tensors), "values"), 1, 8), 1, tensors


def repacked_zeros() -> tuple[Recipe, int, Tensors]:
    tensors = {f"experts.{i}.z": words(4, WIDE) + i for i in range(2)}
    return Each(part(Repack(Read("experts.*.z", (4, WIDE), "int32"), "zeros"), 0, WIDE), 0, 2), 1, tensors


def repacked_groups() -> tuple[Recipe, int, Tensors]:
    tensors = {"z": words(8 * WIDE, 3)}
    return part(Slice(Repack(read("z", tensors), "groups"), 1, 0, 20), 0, WIDE), 0, tensors


def of_rank(folder: Path, tensors: Tensors, recipe: Recipe, rank: int, tp: int) -> Weights:
    graph = params_graph({"p": recipe}, tensors, {"tp": tp, "rank": rank})
    bound = bind_world(graph, Placement(rank, tp, 1, CpuDevice()))
    return load_weights(bound, Checkpoint(), CheckpointFiles.open(folder), device=CpuDevice())


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize(
    "made", [qkv, columns, experts, repacked_rows, repacked_columns, repacked_zeros, repacked_groups]
)
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


def test_a_tensor_that_another_rank_reads_is_expected(tmp_path: Path) -> None:
    """Of two tensors in one param each rank reads one."""
    tensors = {"a": normal(8, 4), "b": normal(8, 4)}
    save_file(tensors, tmp_path / "model.safetensors")
    both = part(Concat((read("a", tensors), read("b", tensors)), 0), 0, 16)
    files, device = CheckpointFiles.open(tmp_path), CpuDevice()

    for rank, name in enumerate(tensors):
        graph = params_graph({"p": both}, tensors, {"tp": 2, "rank": rank})
        bound = bind_world(graph, Placement(rank, 2, 1, device))
        assert [each.tensor for each in recipes.leaves(bound.params[0].recipe)] == [name]
        with pytest.raises(WeightsError, match="1 tensor unexpected"):
            load_weights(bound, Checkpoint(), files, device=device)
        found = load_weights(bound, Checkpoint(), files, device=device, whole=graph)
        assert torch.equal(found.tensors["p"], tensors[name])


def fp8() -> tuple[Dequantise, Tensors]:
    tensors = {"w": (normal(48, 64) * 40).to(torch.float8_e4m3fn), "s": normal(6, 4).abs()}
    return Dequantise(read("w", tensors), read("s", tensors), "fp8", block=(8, 16)), tensors


def fp8_of_one_scale() -> tuple[Dequantise, Tensors]:
    tensors = {"w": (normal(48, 64) * 40).to(torch.float8_e4m3fn), "s": normal(1, 1).abs()}
    return Dequantise(read("w", tensors), read("s", tensors), "fp8", block=(48, 64)), tensors


def fp8_experts() -> tuple[Dequantise, Tensors]:
    tensors = {f"{i}.w": (normal(32, 64) * (i + 9)).to(torch.float8_e4m3fn) for i in range(4)}
    tensors |= {f"{i}.s": normal(4, 4).abs() + i for i in range(4)}
    values, scales = Read("*.w", (32, 64), "float8_e4m3fn"), Read("*.s", (4, 4), "float32")
    return Dequantise(Each(values, 0, 4), Each(scales, 0, 4), "fp8", block=(8, 16)), tensors


def mxfp4() -> tuple[Dequantise, Tensors]:
    numbers = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (8, 4, 16), generator=numbers, dtype=torch.uint8)
    tensors = {"w": blocks, "s": torch.randint(120, 130, (8, 4), generator=numbers, dtype=torch.uint8)}
    return Dequantise(read("w", tensors), read("s", tensors), "mxfp4"), tensors


def words(*shape: int) -> torch.Tensor:
    return torch.randint(-(2**31), 2**31, shape, generator=torch.Generator().manual_seed(1), dtype=torch.int32)


def awq() -> tuple[Dequantise, Tensors]:
    tensors = {"w": words(64, 8), "s": normal(8, 64).half(), "z": words(8, 8)}
    w, s, z = (read(name, tensors) for name in "wsz")
    return Dequantise(w, s, "awq", zeros=z), tensors


def gptq() -> tuple[Dequantise, Tensors]:
    groups = torch.arange(64).flip(0) // 8
    tensors = {"w": words(8, 64), "s": normal(8, 64).half(), "z": words(8, 8), "g": groups.int()}
    w, s, z, g = (read(name, tensors) for name in "wszg")
    return Dequantise(w, s, "gptq", zeros=z, groups=g, zero_offset=1), tensors


def gptq_in_order() -> tuple[Dequantise, Tensors]:
    recipe, tensors = gptq()
    return msgspec.structs.replace(recipe, groups=None), {
        name: tensor for name, tensor in tensors.items() if name != "g"
    }


def nvfp4() -> tuple[Dequantise, Tensors]:
    numbers = torch.Generator().manual_seed(0)
    values = torch.randint(0, 256, (12, 32), generator=numbers, dtype=torch.uint8)
    tensors = {"w": values, "s": (normal(12, 4).abs() * 40).to(torch.float8_e4m3fn), "t": normal(1, 1).abs()}
    w, s, t = (read(name, tensors) for name in "wst")
    return Dequantise(w, s, "nvfp4", global_scale=t), tensors


def nvfp4_experts() -> tuple[Dequantise, Tensors]:
    numbers = torch.Generator().manual_seed(0)
    values = torch.randint(0, 256, (4, 12, 32), generator=numbers, dtype=torch.uint8)
    scales = (normal(4, 12, 4).abs() * 40).to(torch.float8_e4m3fn)
    tensors = {"w": values, "s": scales, "t": normal(4, 1, 1).abs()}
    w, s, t = (read(name, tensors) for name in "wst")
    return Dequantise(w, s, "nvfp4", global_scale=t), tensors


def packed4() -> tuple[Dequantise, Tensors]:
    tensors = {"w": words(32, 8), "s": normal(32, 4).bfloat16(), "z": words(4, 4)}
    w, s, z = (read(name, tensors) for name in "wsz")
    return Dequantise(w, s, "packed4", zeros=z), tensors


def packed4_of_one_group() -> tuple[Dequantise, Tensors]:
    tensors = {"w": words(12, 8), "s": normal(12, 1).bfloat16()}
    return Dequantise(read("w", tensors), read("s", tensors), "packed4", zero_offset=8), tensors


def packed8() -> tuple[Dequantise, Tensors]:
    groups = torch.arange(64).flip(0) // 16
    tensors = {"w": words(12, 16), "s": normal(12, 4).bfloat16(), "g": groups.int()}
    w, s, g = (read(name, tensors) for name in "wsg")
    return Dequantise(w, s, "packed8", groups=g, zero_offset=128), tensors


def packed8_with_words_across_ranks() -> tuple[Dequantise, Tensors]:
    """Of zeros, three rows of a rank begin within a word; of columns, groups of six do."""
    tensors = {"w": words(12, 6), "s": normal(12, 4).bfloat16(), "z": words(3, 4)}
    w, s, z = (read(name, tensors) for name in "wsz")
    return Dequantise(w, s, "packed8", zeros=z), tensors


def gptq_with_words_across_ranks() -> tuple[Dequantise, Tensors]:
    """Of rows, 24 of a rank begin within a group of 16; of columns, four begin within a word of zeros."""
    tensors = {"w": words(6, 16), "s": normal(3, 16).half(), "z": words(3, 2)}
    w, s, z = (read(name, tensors) for name in "wsz")
    return Dequantise(w, s, "gptq", zeros=z, zero_offset=1), tensors


def int8() -> tuple[Dequantise, Tensors]:
    values = torch.arange(12 * 64).reshape(12, 64).to(torch.int8)
    tensors = {"w": values, "s": normal(12, 1), "z": torch.arange(12).reshape(12, 1).to(torch.int8)}
    w, s, z = (read(name, tensors) for name in "wsz")
    return Dequantise(w, s, "int8", (1, 64), zeros=z), tensors


@pytest.mark.parametrize(
    ("made", "dim", "size", "tp"),
    [
        (packed8_with_words_across_ranks, 0, 12, 4),
        (packed8_with_words_across_ranks, 1, 24, 8),
        (gptq_with_words_across_ranks, 0, 48, 2),
        (gptq_with_words_across_ranks, 1, 16, 4),
    ],
)
def test_a_part_that_begins_within_a_word_and_a_group(
    made: Callable[[], tuple[Dequantise, Tensors]], dim: int, size: int, tp: int, tmp_path: Path
) -> None:
    recipe, tensors = made()
    save_file(tensors, tmp_path / "model.safetensors")

    alone = of_rank(tmp_path, tensors, part(recipe, dim, size), 0, 1)
    ranks = [of_rank(tmp_path, tensors, part(recipe, dim, size), rank, tp) for rank in range(tp)]

    assert torch.equal(torch.cat([each.tensors["p"] for each in ranks], dim), alone.tensors["p"])


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("dim", [-2, -1])
@pytest.mark.parametrize(
    "made",
    [
        fp8, fp8_of_one_scale, fp8_experts, mxfp4, awq, gptq, gptq_in_order, nvfp4, nvfp4_experts, packed4,
        packed4_of_one_group, packed8, int8,
    ],
)  # fmt: skip
def test_of_values_in_few_bits_a_rank_reads_its_part(
    made: Callable[[], tuple[Dequantise, Tensors]], dim: int, tp: int, tmp_path: Path
) -> None:
    """Values that share a scale or a word stay together: of four ranks, two may read the same rows of a block."""
    recipe, tensors = made()
    save_file(tensors, tmp_path / "model.safetensors")
    shape = [int(size) for size in recipes.shape(recipe)]  # type: ignore[call-overload]
    split = part(recipe, dim % len(shape), shape[dim])

    alone = of_rank(tmp_path, tensors, split, 0, 1)
    ranks = [of_rank(tmp_path, tensors, split, rank, tp) for rank in range(tp)]

    assert torch.equal(torch.cat([each.tensors["p"] for each in ranks], dim), alone.tensors["p"])
    values = sum(tensor.nbytes for name, tensor in tensors.items() if name.endswith("w"))
    others = alone.bytes_needed - values
    most = values * (1.34 if made is fp8 and tp == 4 and dim == -2 else 1) / tp + others
    assert all(each.bytes_needed <= most for each in ranks)
