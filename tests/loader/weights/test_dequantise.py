"""Quantised checkpoints, packed by hand in each format, loaded into params and compared with the formulas."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import quantised
import torch
from hypothesis import given
from recipe_cases import Tensors, evaluate, params_graph, read, recipe_sets
from safetensors.torch import save_file

from precast.ir.errors import WeightsError
from precast.ir.graph.schema import Cast, Concat, Dequantise, Each, Quantise, Read, Recipe, Reshape, Slice, Transpose
from precast.ir.manifest import Checkpoint
from precast.ir.weights.checkpoint import CheckpointFiles
from precast.loader.torch_device import open_device
from precast.loader.weights import stream as weights
from precast.loader.weights.stream import Weights, load_weights
from precast.loader.weights.views import View, split

DEVICES = [torch.device("cpu"), pytest.param(torch.device("cuda"), marks=pytest.mark.gpu)]
on_each_device = pytest.mark.parametrize("device", DEVICES, ids=str)


def load(directory: Path, recipes: Mapping[str, Recipe], tensors: Tensors, device: torch.device) -> Weights:
    """The params that `recipes` make of a checkpoint with `tensors`."""
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / "model.safetensors")
    graph = params_graph(recipes, tensors)
    return load_weights(graph, Checkpoint(), CheckpointFiles.open(directory), device=open_device(device))


def assert_made(made: Weights, recipes: Mapping[str, Recipe], tensors: Tensors) -> None:
    """Each param is, to the bit, what its recipe says."""
    for name, recipe in recipes.items():
        expected = evaluate(recipe, tensors)
        assert made.tensors[name].dtype == expected.dtype
        assert torch.equal(made.tensors[name].cpu(), expected), f"{name}: {recipe}"


def four_bits(rows: int, columns: int) -> torch.Tensor:
    return torch.randint(0, 16, (rows, columns))


def float8(*shape: int) -> torch.Tensor:
    return (torch.randn(shape) * 40).to(torch.float8_e4m3fn)


# --- formulas ----------------------------------------------------------------------------------------------------


@on_each_device
def test_awq(tmp_path: Path, device: torch.device) -> None:
    """40 inputs in groups of 8, 24 outputs."""
    values, zeros, scales = four_bits(40, 24), four_bits(5, 24), torch.rand(5, 24).half()
    tensors = {
        "qweight": quantised.pack(values, quantised.AWQ_ORDER),
        "qzeros": quantised.pack(zeros, quantised.AWQ_ORDER),
        "scales": scales,
    }
    recipe = Dequantise(read("qweight", tensors), read("scales", tensors), "awq", zeros=read("qzeros", tensors))

    made = load(tmp_path, {"w": Transpose(recipe, 0, 1)}, tensors, device)

    groups = torch.arange(40) // 8
    expected = ((values - zeros[groups]).float() * scales.float()[groups]).t()
    assert torch.equal(made.tensors["w"].cpu(), expected)


@on_each_device
@pytest.mark.parametrize(("offset", "format"), [(1, "gptq"), (0, "gptq_v2")], ids=str)
def test_gptq_in_the_order_of_activations(tmp_path: Path, device: torch.device, offset: int, format: str) -> None:
    """40 inputs in groups of 16, the last one shorter, in any order; 16 outputs."""
    values, zeros, scales = four_bits(40, 16), four_bits(3, 16), torch.rand(3, 16).half()
    groups = (torch.randperm(40) // 16).int()
    tensors = {
        "qweight": quantised.pack(values.t(), quantised.IN_ORDER).t(),
        "qzeros": quantised.pack(zeros, quantised.IN_ORDER),
        "scales": scales,
        "g_idx": groups,
    }
    recipe = Dequantise(
        read("qweight", tensors),
        read("scales", tensors),
        "gptq",
        zeros=read("qzeros", tensors),
        groups=read("g_idx", tensors),
        zero_offset=offset,
    )

    made = load(tmp_path, {"w": Transpose(recipe, 0, 1)}, tensors, device)

    expected = ((values - zeros[groups] - offset).float() * scales.float()[groups]).t()
    assert torch.equal(made.tensors["w"].cpu(), expected)


def test_groups_that_have_no_scales_are_refused(tmp_path: Path) -> None:
    tensors = {
        "qweight": torch.zeros(1, 8, dtype=torch.int32),
        "qzeros": torch.zeros(1, 1, dtype=torch.int32),
        "scales": torch.ones(1, 8),
        "g_idx": torch.tensor([0, 0, 0, 1, 0, 0, 0, 0], dtype=torch.int32),
    }
    qweight, scales, qzeros, g_idx = (read(name, tensors) for name in ("qweight", "scales", "qzeros", "g_idx"))
    recipe = Dequantise(qweight, scales, "gptq", zeros=qzeros, groups=g_idx)
    save_file(tensors, tmp_path / "model.safetensors")
    fitting = params_graph({"w": recipe}, tensors | {"g_idx": tensors["g_idx"] * 0})

    with pytest.raises(WeightsError, match=r"g_idx: the group at \[3\] is 1, expected 0 to 0"):
        load_weights(fitting, Checkpoint(), CheckpointFiles.open(tmp_path), device=open_device("cpu"))


def test_a_scale_beyond_what_is_computed_with_is_refused(tmp_path: Path) -> None:
    """It is a finite number as it is stored, and none in float32."""
    tensors = {"w": float8(4, 8), "s": torch.full((1, 1), 1e300, dtype=torch.float64)}
    recipe = Dequantise(read("w", tensors), Read("s", (1, 1)), "fp8", (4, 8))

    with pytest.raises(WeightsError, match="s: a scale is not a finite number of at least 0 in float32") as error:
        load(tmp_path, {"w": recipe}, tensors, torch.device("cpu"))

    assert error.value.where == str(tmp_path)


@on_each_device
def test_mxfp4(tmp_path: Path, device: torch.device) -> None:
    """Every byte, with exponents from the smallest to the largest: what transformers makes of them."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    tensors = {
        "blocks": torch.arange(2 * 4 * 2 * 16).reshape(2, 4, 2, 16).to(torch.uint8),
        "scales": torch.tensor([0, 1, 60, 100, 126, 127, 128, 129, 140, 200, 240, 250, 252, 125, 124, 123])
        .reshape(2, 4, 2)
        .to(torch.uint8),
    }
    recipe = Transpose(Dequantise(read("blocks", tensors), read("scales", tensors), "mxfp4"), 1, 2)
    recipes = {"w": recipe, "low": Cast(recipe, "bfloat16")}

    made = load(tmp_path, recipes, tensors, device)

    expected = convert_moe_packed_tensors(tensors["blocks"], tensors["scales"], dtype=torch.float32)
    assert torch.equal(made.tensors["w"].cpu(), expected)
    assert torch.equal(made.tensors["low"].cpu(), expected.bfloat16())


@on_each_device
@pytest.mark.parametrize(
    ("shape", "block", "scales"),
    [
        ((10, 7), (10, 7), (1, 1)),
        ((10, 7), (1, 7), (10, 1)),
        ((10, 7), (4, 3), (3, 3)),
        ((3, 10, 7), (4, 4), (3, 3, 2)),
        ((3, 10, 7), (10, 7), (3, 1, 1)),
    ],
    ids=["tensor", "channel", "block", "stacked blocks", "stacked tensors"],
)
def test_float8(
    tmp_path: Path, device: torch.device, shape: tuple[int, ...], block: tuple[int, int], scales: tuple[int, ...]
) -> None:
    tensors = {"w": float8(*shape), "s": torch.rand(scales)}
    recipes = {"w": Dequantise(read("w", tensors), read("s", tensors), "fp8", block)}

    made = load(tmp_path, recipes, tensors, device)

    each = tensors["s"].repeat_interleave(block[0], -2).repeat_interleave(block[1], -1)[..., : shape[-2], : shape[-1]]
    assert torch.equal(made.tensors["w"].cpu(), tensors["w"].float() * each)


@on_each_device
@pytest.mark.parametrize("stored", [torch.float8_e8m0fnu, torch.uint8])
def test_scales_that_are_powers_of_two(stored: torch.dtype, tmp_path: Path, device: torch.device) -> None:
    """E8M0: each of its numbers is a scale of one value, and is read by itself, and as a row, too. What is stored as
    uint8 is E8M0 where the recipe says so."""
    exponents = torch.arange(255, dtype=torch.uint8).view(1, 255)
    tensors = {"w": float8(1, 255), "s": exponents.view(stored)}
    scales = Read("s", (1, 255), "float8_e8m0fnu" if stored == torch.uint8 else None)
    recipes = {
        "w": Dequantise(read("w", tensors), scales, "fp8", (1, 1)),
        "s": Cast(scales, "float32"),
        "t": Cast(Transpose(scales, 0, 1), "bfloat16"),
    }

    made = load(tmp_path, recipes, tensors, device).tensors

    powers = torch.ldexp(torch.ones(1, 255, dtype=torch.float64), exponents.int() - 127)
    assert torch.equal(made["s"].cpu().double(), powers)
    assert torch.equal(made["t"].cpu().double(), powers.t())
    assert torch.equal(made["w"].cpu(), (tensors["w"].double() * powers).float())


def nvfp4(rows: int, columns: int) -> Tensors:
    return {
        "w": torch.randint(0, 256, (rows, columns // 2)).to(torch.uint8),
        "s": (torch.rand(rows, columns // 16) * 448).to(torch.float8_e4m3fn),
        "t": torch.rand(1) + 0.01,
    }


@on_each_device
@pytest.mark.parametrize("format", ["nvfp4", "nvfp4_divided"])
def test_nvfp4(tmp_path: Path, device: torch.device, format: Any) -> None:
    """Every byte, of which the lower half is the first value; the highest bit of a half is the sign.

    ModelOpt multiplies a block's scale with that of the whole matrix, compressed-tensors divides it.
    """
    tensors = nvfp4(16, 32) | {"w": torch.arange(256).reshape(16, 16).to(torch.uint8)}
    recipe = Dequantise(
        read("w", tensors), read("s", tensors), format, global_scale=Reshape(read("t", tensors), (1, 1))
    )

    made = load(tmp_path, {"w": recipe}, tensors, device)

    numbers = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    halves = torch.stack((tensors["w"] % 16, tensors["w"] // 16), -1).flatten(1).int()
    values = numbers[halves % 8] * torch.where(halves >= 8, -1, 1)
    scales = tensors["s"].float() * tensors["t"] if format == "nvfp4" else tensors["s"].float() / tensors["t"]
    assert torch.equal(made.tensors["w"].cpu(), values * scales.repeat_interleave(16, 1))


@on_each_device
@pytest.mark.parametrize("order", [False, True], ids=["in order", "by activation"])
@pytest.mark.parametrize("zeros", [False, True], ids=["symmetric", "zeros"])
@pytest.mark.parametrize("bits", [4, 8])
def test_packed_integers(tmp_path: Path, device: torch.device, bits: int, zeros: bool, order: bool) -> None:
    """compressed-tensors stores signed numbers plus half of their range: 11 outputs, 48 inputs in groups of 16."""
    half = 1 << bits - 1
    values, points = (torch.randint(-half, half, shape) for shape in ((11, 48), (11, 3)))
    groups = (torch.randperm(48) if order else torch.arange(48)) // 16
    tensors = {"w": quantised.pack_bits(values + half, bits), "s": torch.rand(11, 3).bfloat16()}
    if zeros:
        tensors["z"] = quantised.pack_bits((points + half).t(), bits).t().contiguous()
    if order:
        tensors["g"] = groups.int()
    made_of = [read(name, tensors) if name in tensors else None for name in "zg"]
    offset = 0 if zeros else half
    recipe = Dequantise(
        read("w", tensors), read("s", tensors), f"packed{bits}", None, *made_of, zero_offset=offset  # type: ignore[arg-type,misc]
    )  # fmt: skip

    made = load(tmp_path, {"w": recipe}, tensors, device)

    signed = values - (points[:, groups] if zeros else 0)
    assert torch.equal(made.tensors["w"].cpu(), signed.float() * tensors["s"].float()[:, groups])


def affine(bits: int) -> tuple[Recipe, Tensors, torch.Tensor]:
    """MLX's groups, with words of uint32: 11 outputs, 96 inputs in groups of 32, and what they mean."""
    tensors, dense = quantised.mlx("w.weight", torch.zeros(11, 96), bits, 32)
    words = Read("w.weight", (11, 96 * bits // 32), "int32")
    scales, biases = (read(f"w.{part}", tensors) for part in ("scales", "biases"))
    return Dequantise(words, scales, f"packed{bits}", biases=biases), tensors, dense  # type: ignore[arg-type]


@on_each_device
@pytest.mark.parametrize("bits", [4, 8])
def test_groups_with_biases(tmp_path: Path, device: torch.device, bits: int) -> None:
    recipe, tensors, expected = affine(bits)
    recipes = {"w": recipe, "part": Slice(Slice(recipe, 0, 3, 5), 1, 40, 30), "low": Cast(recipe, "bfloat16")}
    save_file(tensors, tmp_path / "model.safetensors")
    graph = params_graph(recipes, tensors | {"w.weight": tensors["w.weight"].view(torch.int32)})

    made = load_weights(graph, Checkpoint(), CheckpointFiles.open(tmp_path), device=open_device(device)).tensors

    assert torch.equal(made["w"].cpu(), expected)
    assert torch.equal(made["part"].cpu(), expected[3:8, 40:70])
    assert torch.equal(made["low"].cpu(), expected.bfloat16())


def test_a_part_of_groups_with_biases_reads_its_groups_alone(tmp_path: Path) -> None:
    """Inputs 40 to 69 are of the second group and the third, which have 32 each; of 5 outputs."""
    recipe, tensors, _ = affine(4)
    save_file(tensors, tmp_path / "model.safetensors")
    recipes = {"p": Slice(Slice(recipe, 0, 3, 5), 1, 40, 30)}
    graph = params_graph(recipes, tensors | {"w.weight": tensors["w.weight"].view(torch.int32)})

    made = load_weights(graph, Checkpoint(), CheckpointFiles.open(tmp_path), device=open_device("cpu"))

    assert made.bytes_needed == 5 * (64 // 2 + 2 * 2 + 2 * 2)


@on_each_device
@pytest.mark.parametrize("zeros", [False, True])
def test_int8(tmp_path: Path, device: torch.device, zeros: bool) -> None:
    tensors = {
        "w": torch.randint(-128, 128, (10, 7)).to(torch.int8),
        "s": torch.rand(10, 1),
        "z": torch.randint(-128, 128, (10, 1)).to(torch.int8),
    }
    points = read("z", tensors) if zeros else None
    recipes = {"w": Dequantise(read("w", tensors), read("s", tensors), "int8", (1, 7), points)}

    made = load(tmp_path, recipes, tensors if zeros else {name: tensors[name] for name in "ws"}, device)

    signed = tensors["w"].float() - (tensors["z"].float() if zeros else 0)
    assert torch.equal(made.tensors["w"].cpu(), signed * tensors["s"])


# --- within other recipes ----------------------------------------------------------------------------------------


def experts() -> tuple[dict[str, Recipe], Tensors]:
    """Experts in float8, stored one by one, stacked into gate and up, beside a bfloat16 router."""
    tensors: Tensors = {"router": torch.randn(5, 6).bfloat16()}
    for name in ("gate", "up"):
        for i in range(5):
            tensors[f"experts.{i}.{name}"] = float8(8, 6)
            tensors[f"experts.{i}.{name}.scale"] = torch.rand(2, 2)
    parts = [
        Each(
            Cast(
                Dequantise(
                    Read(f"experts.*.{name}", (8, 6), "float8_e4m3fn"),
                    Read(f"experts.*.{name}.scale", (2, 2)),
                    "fp8",
                    (4, 4),
                ),
                "bfloat16",
            ),
            0,
            5,
        )
        for name in ("gate", "up")
    ]
    gate_up = Concat(tuple(parts), 1)
    interleaved = Reshape(Transpose(Reshape(gate_up, (5, 2, 8, 6)), 1, 2), (5, 16, 6))
    recipes: dict[str, Recipe] = {
        "router": read("router", tensors),
        "gate_up": gate_up,
        "some": Slice(gate_up, 0, 1, 3),
        "transposed": Transpose(gate_up, 1, 2),
        "interleaved": interleaved,
        "flat": Reshape(Transpose(parts[0], 0, 2), (240,)),
    }  # fmt: skip
    return recipes, tensors


@on_each_device
@pytest.mark.parametrize("round_bytes", [1, 200, weights.ROUND_BYTES])
def test_experts_of_few_bits(
    tmp_path: Path, device: torch.device, round_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "ROUND_BYTES", round_bytes)
    recipes, tensors = experts()

    made = load(tmp_path, recipes, tensors, device)

    assert_made(made, recipes, tensors)


@on_each_device
def test_interleaved_experts_of_stacked_tensors(tmp_path: Path, device: torch.device) -> None:
    """GPT-OSS: rows of gate and up take turns; each expert is made for itself."""
    tensors = {
        "blocks": torch.randint(0, 256, (3, 8, 2, 16)).to(torch.uint8),
        "scales": torch.randint(120, 135, (3, 8, 2)).to(torch.uint8),
    }
    stored = Transpose(Dequantise(read("blocks", tensors), read("scales", tensors), "mxfp4"), 1, 2)
    rows = Transpose(stored, 1, 2)
    recipes = {"w": Cast(Reshape(Transpose(Reshape(rows, (3, 4, 2, 64)), 1, 2), (3, 8, 64)), "bfloat16")}

    made = load(tmp_path, recipes, tensors, device)

    assert_made(made, recipes, tensors)


@on_each_device
def test_a_slice_of_stacked_experts(tmp_path: Path, device: torch.device) -> None:
    tensors = {"w": float8(5, 10, 8), "s": torch.rand(5, 3, 2)}
    part = Slice(Dequantise(read("w", tensors), read("s", tensors), "fp8", (4, 4)), 0, 2, 3)

    made = load(tmp_path, {"w": part}, tensors, device)

    assert_made(made, {"w": part}, tensors)


@pytest.mark.parametrize(
    ("view", "size", "blocks"),
    [
        (View(0, (3, 4), (4, 1)), 4, [(0, View(0, (4,), (1,))), (1, View(0, (4,), (1,))), (2, View(0, (4,), (1,)))]),
        (View(9, (2, 2), (1, 8)), 8, [(1, View(1, (2,), (1,))), (2, View(1, (2,), (1,)))]),
        (View(9, (2, 2), (1, 2)), 8, [(1, View(1, (2, 2), (1, 2)))]),
        (View(4, (1, 2), (100, 1)), 4, [(1, View(0, (1, 2), (100, 1)))]),
        (View(3, (2, 2), (4, 1)), 4, None),
        (View(0, (2, 2), (6, 1)), 4, None),
        (View(0, (2, 2), (8, 4)), 4, None),
    ],
)
def test_views_by_block(view: View, size: int, blocks: list[tuple[int, View]] | None) -> None:
    """Where a view of stacked matrices is in; the other view goes along."""
    found = split(view, View(0, view.shape, view.strides), size)

    assert (found and [(block, inside) for block, inside, _ in found]) == blocks
    if found and len(found) > 1:
        step = max(view.strides)
        assert [there.offset for _, _, there in found] == [index * step for index in range(len(found))]


def test_experts_that_a_slice_leaves_out_are_not_read(tmp_path: Path) -> None:
    tensors = {"w": float8(4, 10, 8), "s": torch.rand(4, 1, 1)}
    whole = Dequantise(read("w", tensors), read("s", tensors), "fp8", (10, 8))

    made = load(tmp_path, {"w": Slice(whole, 0, 2, 1)}, tensors, torch.device("cpu"))

    assert_made(made, {"w": Slice(whole, 0, 2, 1)}, tensors)
    assert made.bytes_needed == 80 + 4


def check(case: tuple[dict[str, Recipe], Tensors], device: torch.device) -> None:
    recipes, tensors = case
    with tempfile.TemporaryDirectory() as directory:
        assert_made(load(Path(directory), recipes, tensors, device), recipes, tensors)


@given(recipe_sets(quantised=True))
def test_any_recipes(case: tuple[dict[str, Recipe], Tensors]) -> None:
    check(case, torch.device("cpu"))


@pytest.mark.gpu
@given(recipe_sets(quantised=True))
def test_any_recipes_on_a_gpu(case: tuple[dict[str, Recipe], Tensors]) -> None:
    check(case, torch.device("cuda"))


# --- quantised while they are read -------------------------------------------------------------------------------


@on_each_device
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_values_and_scales_of_a_matrix_are_made_of_one_read(
    dtype: torch.dtype, device: torch.device, tmp_path: Path
) -> None:
    tensors = {f"w{i}": torch.randn(130, 200).to(dtype) for i in range(5)}
    recipes = {
        f"{name}.{part}": Quantise(read(name, tensors), part, (128, 128))
        for name in tensors
        for part in ("values", "scales")
    }

    made = load(tmp_path, recipes, tensors, device)

    assert_made(made, recipes, tensors)
    assert made.bytes_read == sum(tensor.nbytes for tensor in tensors.values())


@pytest.mark.parametrize(("block", "num_read"), [((1, 64), 4 * 64), ((40, 1), 40 * 10)])
def test_a_part_of_a_row_or_column_reads_all_that_has_its_scale(
    block: tuple[int, int], num_read: int, tmp_path: Path
) -> None:
    """Rows 5 to 8, columns 40 to 49: whole rows where each has a scale, whole columns where each of these has one."""
    tensors = {"w": torch.randn(40, 64)}
    recipe = Slice(Slice(Quantise(read("w", tensors), "values", block), 0, 5, 4), 1, 40, 10)

    made = load(tmp_path, {"p": recipe}, tensors, torch.device("cpu"))

    assert_made(made, {"p": recipe}, tensors)
    assert made.bytes_needed == 4 * num_read


def test_a_part_of_a_matrix_reads_its_blocks_alone(tmp_path: Path) -> None:
    """Rows 5 to 8 lie in blocks of rows 4 to 11, of which all columns are read that are in blocks 2 and 3."""
    tensors = {"w": torch.randn(40, 64)}
    values = Slice(Slice(Quantise(read("w", tensors), "values", (4, 16)), 0, 5, 4), 1, 40, 10)
    scales = Slice(Quantise(read("w", tensors), "scales", (4, 16)), 0, 9, 1)

    for recipe, rows, columns in ((values, 8, 32), (scales, 4, 64)):
        made = load(tmp_path, {"p": recipe}, tensors, torch.device("cpu"))

        assert_made(made, {"p": recipe}, tensors)
        assert made.bytes_needed == 4 * rows * columns
