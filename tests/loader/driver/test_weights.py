"""Params made on the host, without torch, against what the recipes mean in torch."""

from __future__ import annotations

import itertools
import math
import tempfile
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from file_server import serving
from hypothesis import assume, given
from recipe_cases import FLOATS, Tensors, evaluate, params_graph, recipe_sets
from safetensors.torch import save_file

from precast.ir.graph.schema import (
    Cast,
    Dtype,
    Graph,
    Param,
    Quantise,
    Read,
    Recipe,
    Repeat,
    Scale,
    Slice,
    TensorType,
    Transpose,
)
from precast.ir.manifest import Checkpoint
from precast.ir.weights.checkpoint import CheckpointFiles
from precast.kernels.dtypes import BY_NAME
from precast.loader.driver.on_host import converted, move_all
from precast.loader.driver.param_plan import planned, uncovered
from precast.loader.driver.weights import do_job
from precast.loader.sources.open import folder_of
from precast.loader.weights.files import opened
from precast.loader.weights.jobs import Worker, share

if TYPE_CHECKING:
    import numpy.typing as npt


def files_of(folder: Path, tensors: Tensors) -> CheckpointFiles:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return CheckpointFiles.open(folder)


class OnTheHost(dict[int, "npt.NDArray[np.uint8]"]):
    """Targets, all of which are made on the host."""

    @property
    def targets(self) -> Collection[int]:
        return self.keys()


def bits(tensor: torch.Tensor) -> bytes:
    # Of one element `contiguous` keeps any stride.
    return tensor.clone(memory_format=torch.contiguous_format).flatten().view(torch.uint8).numpy().tobytes()


@given(recipe_sets())
def test_any_recipes(case: tuple[dict[str, Recipe], Tensors]) -> None:
    recipes, tensors = case
    with tempfile.TemporaryDirectory() as directory:
        files = files_of(Path(directory), tensors)
        what = planned(params_graph(recipes, tensors), Checkpoint(), files)
        assume(not uncovered(what))
        targets = what.plan.targets
        made = OnTheHost({
            i: np.empty(math.prod(target.shape) * BY_NAME[target.dtype].itemsize, np.uint8)
            for i, target in enumerate(targets)
        })  # fmt: skip
        with opened(files, {job.file for job in what.plan.jobs}) as sources:
            for job in what.plan.jobs:
                do_job(job, sources[job.file], 0, memoryview(b""), {}, made, 0)
        move_all(what.plan, made)

    found = {target.name: made[i].tobytes() for i, target in enumerate(targets) if target.name is not None}
    assert found == {name: bits(evaluate(recipes[name], tensors)) for name in found}


@pytest.mark.parametrize(("source", "target"), list(itertools.product(FLOATS, FLOATS)))
def test_numbers_are_rounded_as_torch_does(source: Dtype, target: Dtype) -> None:
    halves = torch.arange(0x10000, dtype=torch.int32).to(torch.int16)
    given = {
        "bfloat16": halves.view(torch.bfloat16), "float16": halves.view(torch.float16),
        "float32": (torch.arange(1 << 16, dtype=torch.int64) * 65537 + 12345).to(torch.int32).view(torch.float32),
        "float64": torch.randn(1 << 16, dtype=torch.float64) * 10.0 ** torch.randint(-50, 50, (1 << 16,)),
    }[source]  # fmt: skip
    raw = given.view(torch.int16).numpy().view(np.uint16) if source == "bfloat16" else given.numpy()

    found = converted(raw, source, target)

    expected = given.to(BY_NAME[target])
    held = torch.from_numpy(found.astype(np.int32)).to(torch.int16).view(torch.bfloat16) if target == "bfloat16" else (
        torch.from_numpy(found)
    )  # fmt: skip
    assert torch.equal(held.isnan(), expected.isnan())
    assert torch.equal(held.nan_to_num(nan=0.0), expected.nan_to_num(nan=0.0))


@pytest.mark.parametrize("stored", [torch.float8_e8m0fnu, torch.uint8])
@pytest.mark.parametrize("target", FLOATS)
def test_exponents_are_powers_of_two(target: Dtype, stored: torch.dtype, tmp_path: Path) -> None:
    """All of E8M0, also of what is stored as uint8, with rows and columns exchanged; float16 holds few of them."""
    tensors = {"a": torch.arange(256, dtype=torch.uint8).view(16, 16).view(stored)}
    read = Read("a", (16, 16), "float8_e8m0fnu" if stored == torch.uint8 else None)
    recipe = Cast(Transpose(read, 0, 1), target)

    what = planned(params_graph({"a": recipe}, tensors), Checkpoint(), files_of(tmp_path, tensors))
    made = OnTheHost({0: np.empty(256 * BY_NAME[target].itemsize, np.uint8)})
    with opened(what.files, {job.file for job in what.plan.jobs}) as sources:
        for job in what.plan.jobs:
            do_job(job, sources[job.file], 0, memoryview(b""), {}, made, 0)

    assert uncovered(what) == ""
    found = torch.from_numpy(made[0]).view(BY_NAME[target]).view(16, 16).t().flatten().double()
    expected = torch.tensor([2.0 ** (e - 127) for e in range(255)], dtype=torch.float64).to(BY_NAME[target]).double()
    assert torch.equal(found[:255], expected)
    assert found[255].isnan()


def test_what_is_read_into_place_is_not_made_on_the_host(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(40, 8).bfloat16(), "b": torch.randn(40, 8)}
    files = files_of(tmp_path, tensors)
    recipes = {"a": params_read("a", tensors), "b": Cast(params_read("b", tensors), "bfloat16")}

    what = planned(params_graph(recipes, tensors), Checkpoint(), files)

    assert {what.plan.targets[i].name for i in what.on_host} == {"b"}
    assert uncovered(what) == ""


def test_a_server_s_files_give_the_same_by_fewer_requests(tmp_path: Path) -> None:
    """Columns of a wide tensor: here each row is read by itself, from a server a whole job of them at once."""
    tensors = {"a": torch.randn(8, 40_000)}
    files_of(tmp_path, tensors)
    content = (tmp_path / "model.safetensors").read_bytes()
    graph = params_graph({"a": Slice(params_read("a", tensors), 1, 0, 20_000)}, tensors)

    with serving({"m/model.safetensors": content}) as server:
        files = CheckpointFiles.open(folder_of(f"{server.address}/m"))
        what = planned(graph, Checkpoint(), files)
        made = np.empty(8 * 20_000 * 4, np.uint8)

        @contextmanager
        def worker() -> Iterator[Worker]:
            yield lambda job, source: do_job(job, source, 0, memoryview(b""), {}, OnTheHost({0: made}), 0)

        before = len(server.requests)
        share(what.plan.jobs, worker, 4, what.files)
        num_requests = len(server.requests) - before

    here = planned(graph, Checkpoint(), CheckpointFiles.open(tmp_path))
    assert made.tobytes() == bits(tensors["a"][:, :20_000])
    assert num_requests <= 2 < sum(len(list(ranges.each())) for job in here.plan.jobs for ranges in job.ranges)


def test_types_that_are_not_converted_are_named(tmp_path: Path) -> None:
    tensors = {"a": torch.zeros(4, 4, dtype=torch.float8_e4m3fn)}
    files = files_of(tmp_path, tensors)

    what = planned(params_graph({"a": Cast(params_read("a", tensors), "bfloat16")}, tensors), Checkpoint(), files)

    assert uncovered(what) == "the checkpoint's tensors are converted from float8_e4m3fn to bfloat16"


@pytest.mark.parametrize("block", [(128, 128), (1, 8)], ids=["blocks", "channels"])
def test_weights_that_are_quantised_while_they_are_read(block: tuple[int, int], tmp_path: Path) -> None:
    def why(change: Callable[[Recipe], Recipe], dtype: torch.dtype = torch.float32) -> str:
        tensors = {"a": torch.zeros(4, 8, dtype=dtype)}
        graph = params_graph({"a": change(Quantise(params_read("a", tensors), "scales", block))}, tensors)
        return uncovered(planned(graph, Checkpoint(), files_of(tmp_path, tensors)))

    assert why(lambda scales: scales) == ""
    assert why(lambda scales: Transpose(scales, 0, 1), torch.bfloat16) == ""
    assert why(lambda scales: scales, torch.float64) == "weights of float64 are quantised while they are read"
    rearranged = "weights that are quantised while they are read are rearranged"
    assert why(lambda scales: Cast(scales, "bfloat16")) == rearranged
    assert why(lambda scales: Repeat(scales, 0, 2)) == rearranged


def test_scales_are_read_or_filled(tmp_path: Path) -> None:
    tensors = {"a": torch.ones(3), "x.k_scale": torch.tensor(0.5), "x.v_scale": torch.tensor(0.25)}
    one = TensorType("float32", (1,))
    params = tuple(Param(which, one, Scale((f"x.{which}_scale",), 2.0)) for which in "kv")
    first = Param("a", TensorType("float32", (3,)), Read("a", (3,), "float32"))
    graph = Graph((), (), (first, *params), (), (), (), {})

    there = planned(graph, Checkpoint(), files_of(tmp_path, tensors))
    absent = planned(graph, Checkpoint(), files_of(tmp_path, {"a": tensors["a"]}))

    assert there.scales == absent.scales == ("k", "v")
    assert (there.assembly.filled, absent.assembly.filled) == ({}, {1: 2.0, 2: 2.0})
    assert uncovered(there) == uncovered(absent) == ""
    assert [each.name for each in absent.plan.targets] == ["a", "k", "v"]


def params_read(name: str, tensors: Tensors) -> Recipe:
    from recipe_cases import read

    return read(name, tensors)
