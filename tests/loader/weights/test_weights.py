"""Checkpoints written by the safetensors library, loaded by recipes, compared with the recipes evaluated in torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from recipe_cases import Tensors, evaluate, params_graph, read, recipe_sets
from safetensors.torch import save_file

from precast.ir.errors import TargetError, WeightsError
from precast.ir.graph.schema import (
    Apply,
    Cast,
    Concat,
    Graph,
    Param,
    Read,
    Recipe,
    Reshape,
    Scale,
    Slice,
    Stack,
    TensorType,
    Tie,
    Transpose,
)
from precast.ir.manifest import Checkpoint
from precast.ir.weights import recipes as ir_recipes
from precast.ir.weights.checkpoint import CheckpointFiles, StoredTensor
from precast.ir.weights.sources import LocalFolder
from precast.kernels import dtypes
from precast.loader.device import Buffer
from precast.loader.placement import Placement, bind_world
from precast.loader.torch_device import CpuDevice, open_device
from precast.loader.weights.parts import param_parts
from precast.loader.weights.read_plan import Granularity, Job, Ranges, plan_reads
from precast.loader.weights.stream import Weights, load_weights
from precast.loader.weights.workers import (
    BUFFER_BYTES,
    NUM_BUFFERS,
    PinnedBuffers,
    apply_copy,
    move_all,
    read_all,
    through_buffer,
)

DEVICES = [torch.device("cpu"), pytest.param(torch.device("cuda"), marks=pytest.mark.gpu)]
on_each_device = pytest.mark.parametrize("device", DEVICES, ids=str)


def save(directory: Path, tensors: Tensors, shards: int = 1) -> CheckpointFiles:
    """Write the tensors as one file or as shards with an index, and open them as a checkpoint."""
    if shards == 1:
        save_file(tensors, directory / "model.safetensors")
        return CheckpointFiles.open(directory)
    names = [f"model-{i + 1:05}-of-{shards:05}.safetensors" for i in range(shards)]
    weight_map = {tensor: names[i % shards] for i, tensor in enumerate(tensors)}
    for name in names:
        save_file({tensor: tensors[tensor] for tensor, file in weight_map.items() if file == name}, directory / name)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return CheckpointFiles.open(directory)


def load(
    directory: Path,
    recipes: Mapping[str, Recipe],
    tensors: Tensors,
    device: torch.device,
    *,
    shards: int = 1,
    rules: Checkpoint | None = None,
) -> Weights:
    """The params that `recipes` make of a checkpoint with `tensors`."""
    files = save(directory, tensors, shards)
    return load_weights(params_graph(recipes, tensors), rules or Checkpoint(), files, device=open_device(device))


def assert_made(made: Mapping[str, torch.Tensor], recipes: Mapping[str, Recipe], tensors: Tensors) -> None:
    """Each param is, to the bit, what its recipe says."""
    assert list(made) == list(recipes)
    for name, recipe in recipes.items():
        expected = evaluate(recipe, tensors)
        assert made[name].dtype == expected.dtype
        assert made[name].is_contiguous()
        assert torch.equal(made[name].cpu(), expected), f"{name}: {recipe}"


def every_kind() -> tuple[dict[str, Recipe], Tensors]:
    """A param for each kind of recipe, over odd shapes, and what real models combine them to."""
    tensors = {
        "q": torch.randn(33, 17),
        "k": torch.randn(11, 17),
        "half": torch.randn(7, 5, 3).bfloat16(),
        "heads": torch.randn(3 * 3 * 4, 10).half(),
        "scalar": torch.tensor(2.5),
        "mask": torch.rand(13) > 0.5,
        "ids": torch.arange(21, dtype=torch.int64),
        "small": torch.randn(6, 6).to(torch.float8_e4m3fn),
        "unused": torch.randn(50, 50),
    }
    q, k, half, heads = (read(name, tensors) for name in ("q", "k", "half", "heads"))
    recipes: dict[str, Recipe] = {
        "read": q,
        "scalar": read("scalar", tensors),
        "mask": read("mask", tensors),
        "ids": read("ids", tensors),
        "float8": read("small", tensors),
        "from_float8": Cast(read("small", tensors), "float32"),
        "slice_rows": Slice(q, 0, 5, 9),
        "slice_columns": Slice(q, 1, 3, 4),
        "concat_rows": Concat((q, k, q), 0),
        "concat_columns": Concat((q, q), 1),
        "stack_first": Stack((k, k, k), 0),
        "stack_last": Stack((q, q), 2),
        "transpose": Transpose(q, 0, 1),
        "transpose_outer": Transpose(half, 0, 2),
        "reshape": Reshape(half, (5, 21)),
        "cast": Cast(q, "bfloat16"),
        "cast_up": Cast(half, "float64"),
        "any_float": Cast(read("half", tensors, any_float=True), "bfloat16"),
        "cast_twice": Cast(Cast(q, "float16"), "float32"),
        "keys_of_heads": Reshape(Slice(Reshape(heads, (3, 3, 4, 10)), 1, 1, 1), (12, 10)),
        "unpermuted": Reshape(Transpose(Reshape(heads, (3, 6, 2, 10)), 1, 2), (36, 10)),
        "gate_up": Reshape(Stack((k, k), 1), (22, 17)),
        "transposed_join": Transpose(Concat((Cast(q, "bfloat16"), Cast(k, "bfloat16")), 0), 0, 1),
        "window_of_a_join": Slice(Reshape(Concat((q, q), 1), (66, 17)), 0, 7, 30),
        "flat_transposed": Reshape(Transpose(q, 0, 1), (33 * 17,)),
    }
    return recipes, tensors


# --- what is made ------------------------------------------------------------------------------------------------


@on_each_device
@pytest.mark.parametrize("shards", [1, 3])
def test_every_kind_of_recipe(tmp_path: Path, device: torch.device, shards: int) -> None:
    recipes, tensors = every_kind()

    made = load(tmp_path, recipes, tensors, device, shards=shards, rules=Checkpoint(ignored=("unu*",)))

    assert_made(made.tensors, recipes, tensors)


def execute_plan(files: CheckpointFiles, params: Sequence[Param], device: torch.device, sizes: Granularity) -> Tensors:
    """The params, made by a plan of another granularity than `load_weights` uses."""
    assembly = param_parts(params, lambda name: files.tensors[name].dtype)
    plan = plan_reads(assembly, files.tensors.__getitem__, sizes)
    made = [torch.empty(target.shape, dtype=dtypes.BY_NAME[target.dtype], device=device) for target in plan.targets]

    with PinnedBuffers(open_device(device)) as buffers:
        memory = [tensor.flatten().view(torch.uint8) for tensor in made]
        num_bytes = read_all(plan, memory, buffers, files)
        move_all(plan, memory)

    assert num_bytes == sum(ranges.num_bytes for job in plan.jobs for ranges in job.ranges)
    return {target.name: tensor for target, tensor in zip(plan.targets, made, strict=True) if target.name is not None}


def check_granularities(case: tuple[dict[str, Recipe], Tensors], device: torch.device) -> None:
    recipes, tensors = case
    with tempfile.TemporaryDirectory() as directory:
        files = save(Path(directory), tensors)
        params = params_graph(recipes, tensors).params
        for sizes in (Granularity(), Granularity(job=64, direct=16, gap=0), Granularity(job=200, direct=24, gap=9)):
            assert_made(execute_plan(files, params, device, sizes), recipes, tensors)


@given(recipe_sets())
def test_any_recipes_by_any_plan(case: tuple[dict[str, Recipe], Tensors]) -> None:
    check_granularities(case, torch.device("cpu"))


@pytest.mark.gpu
@given(recipe_sets())
def test_any_recipes_by_any_plan_on_a_gpu(case: tuple[dict[str, Recipe], Tensors]) -> None:
    check_granularities(case, torch.device("cuda"))


@given(recipe_sets())
def test_a_buffer_holds_all_that_a_device_needs_of_a_job(case: tuple[dict[str, Recipe], Tensors]) -> None:
    """What a GPU's worker does, without a GPU: all bytes into one buffer, then uploads and copies out of it."""
    recipes, tensors = case
    with tempfile.TemporaryDirectory() as directory:
        files = save(Path(directory), tensors)
        content = torch.frombuffer(bytearray((Path(directory) / "model.safetensors").read_bytes()), dtype=torch.uint8)
    assembly = param_parts(params_graph(recipes, tensors).params, lambda name: files.tensors[name].dtype)
    plan = plan_reads(assembly, files.tensors.__getitem__, Granularity(job=200, direct=24, gap=9))
    made = [torch.empty(target.shape, dtype=dtypes.BY_NAME[target.dtype]) for target in plan.targets]
    memory = [tensor.flatten().view(torch.uint8) for tensor in made]

    for job in plan.jobs:
        buffer = torch.empty(job.size, dtype=torch.uint8)
        places, uploads = through_buffer(job)
        for start, length, place in places:
            buffer[place : place + length] = content[start : start + length]
        for start, end, target, offset in uploads:
            memory[target][offset : offset + end - start] = buffer[start:end]
        for copy in job.copies:
            apply_copy(copy, buffer[: job.buffer_bytes], memory)

    if not plan.moves:
        named = zip(plan.targets, made, strict=True)
        assert_made({str(target.name): tensor for target, tensor in named}, recipes, tensors)


def test_rows_that_end_up_beside_each_other_are_one_upload() -> None:
    ranges = (
        Ranges(0, 4, ((3, 10),), 0, 8),
        Ranges(40, 5, (), 0, 20),
        Ranges(45, 2, (), None, 0),
        Ranges(47, 3, (), 1, 0),
    )
    job = Job(Path("a.safetensors"), ranges, (), 16, 26)

    places, uploads = through_buffer(job)

    assert places == [(0, 4, 16), (10, 4, 20), (20, 4, 24), (40, 5, 28), (45, 2, 0), (47, 3, 33)]
    assert uploads == [(16, 33, 0, 8), (33, 36, 1, 0)]


@on_each_device
def test_tensors_larger_than_a_job(tmp_path: Path, device: torch.device) -> None:
    tensors = {"w": torch.randn(3001, 2003), "v": torch.randn(1999, 1501).bfloat16(), "rows": torch.randn(130, 20_011)}
    recipes: dict[str, Recipe] = {
        "w": read("w", tensors),
        "transposed": Transpose(read("v", tensors), 0, 1),
        "cast_columns": Cast(Slice(read("rows", tensors), 1, 111, 17_000), "bfloat16"),
        "columns": Slice(read("rows", tensors), 1, 18_000, 2_000),
    }

    made = load(tmp_path, recipes, tensors, device)

    assert_made(made.tensors, recipes, tensors)


@on_each_device
def test_a_tensor_needed_in_two_orders_is_read_once(tmp_path: Path, device: torch.device) -> None:
    tensors = {"w": torch.randn(2500, 2003)}
    recipes: dict[str, Recipe] = {"w": read("w", tensors), "transposed": Transpose(read("w", tensors), 0, 1)}

    made = load(tmp_path, recipes, tensors, device)

    assert_made(made.tensors, recipes, tensors)
    assert made.bytes_read == made.bytes_needed == 2500 * 2003 * 4


@pytest.mark.gpu
def test_buffers_may_be_pinned_beforehand(tmp_path: Path) -> None:
    tensors = {f"w{i}": torch.randn(1000, 1000) for i in range(12)}
    recipes = {name: read(name, tensors) for name in tensors}
    files = save(tmp_path, tensors)
    device = open_device("cuda")

    with PinnedBuffers(device) as buffers:
        made = load_weights(params_graph(recipes, tensors), Checkpoint(), files, device=device, buffers=buffers)

    assert_made(made.tensors, recipes, tensors)


class PinsLittle(CpuDevice):
    """A GPU on a host that pins two buffers."""

    kind: Any = "cuda"
    pinned = 0

    def alloc(self, num_bytes: int, *, pinned: bool = False) -> Buffer:
        self.pinned += pinned
        if pinned and self.pinned > 2:
            raise RuntimeError("CUDA error: out of memory")
        return super().alloc(num_bytes, pinned=pinned)


def test_a_host_that_pins_little_gives_other_memory_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    with PinnedBuffers(PinsLittle()) as buffers:
        taken = [buffers.take() for _ in range(NUM_BUFFERS)]

    assert {len(each.raw) for each in taken} == {BUFFER_BYTES}
    said = [record.message for record in caplog.records if record.name == "precast"]
    assert said == ["warning: the host pins no more memory: weights pass through other memory, and take longer"]


@on_each_device
def test_tied_params_share_memory(tmp_path: Path, device: torch.device) -> None:
    tensors = {"embed": torch.randn(9, 5)}

    made = load(tmp_path, {"head": Tie("embed"), "embed": read("embed", tensors)}, tensors, device)

    assert list(made.tensors) == ["head", "embed"]
    assert made.tensors["head"].data_ptr() == made.tensors["embed"].data_ptr()
    assert torch.equal(made.tensors["head"].cpu(), tensors["embed"])
    assert made.bytes_read == 180


def test_names_with_an_optional_prefix_are_found(tmp_path: Path) -> None:
    tensors = {"transformer.h.0.w": torch.randn(4, 3), "wte": torch.randn(5, 3)}
    files = save(tmp_path, tensors)
    named = {"h.0.w": tensors["transformer.h.0.w"], "transformer.wte": tensors["wte"]}
    graph = params_graph({"w": read("h.0.w", named), "e": read("transformer.wte", named)}, named)

    made = load_weights(graph, Checkpoint(optional_prefixes=("transformer.",)), files, device=CpuDevice())

    assert torch.equal(made.tensors["w"], tensors["transformer.h.0.w"])
    assert torch.equal(made.tensors["e"], tensors["wte"])


def test_symbols_choose_the_shard(tmp_path: Path) -> None:
    tensors = {"w": torch.randn(8, 6)}
    files = save(tmp_path, tensors)
    rows = Apply("floordiv", (8, "tp"))
    shard = {"p": Slice(read("w", tensors), 0, Apply("mul", ("rank", rows)), rows)}
    graph = params_graph(shard, tensors, {"tp": 4, "rank": 2})

    placement = Placement(2, 4, 1, CpuDevice())
    made = load_weights(bind_world(graph, placement), Checkpoint(), files, device=placement.device)

    assert torch.equal(made.tensors["p"], tensors["w"][4:6])
    assert made.bytes_read == made.bytes_needed == 48


@on_each_device
def test_params_begin_where_wide_loads_may(tmp_path: Path, device: torch.device) -> None:
    tensors = {f"b{i}": torch.randn(i + 1) for i in range(5)}

    made = load(tmp_path, {name: read(name, tensors) for name in tensors}, tensors, device)

    assert all(tensor.data_ptr() % 16 == 0 for tensor in made.tensors.values())
    assert len({tensor.data_ptr() for tensor in made.tensors.values()}) == 5


# --- what is read ------------------------------------------------------------------------------------------------


def test_nothing_is_read_that_no_param_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {"w": torch.randn(40, 4096), "unused": torch.randn(1000), "v": torch.randn(64, 64)}
    recipes: dict[str, Recipe] = {"p": Slice(read("w", tensors), 1, 1024, 512), "q": read("v", tensors)}
    files = save(tmp_path, tensors)
    reads: list[tuple[int, int]] = []
    preadv = os.preadv

    def recording(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        count = preadv(descriptor, buffers, offset)
        reads.append((offset, offset + count))
        return count

    monkeypatch.setattr(os, "preadv", recording)
    made = load_weights(params_graph(recipes, tensors), Checkpoint(ignored=("unused",)), files, device=CpuDevice())

    w, v = files.tensors["w"], files.tensors["v"]
    rows = [w.offset + 4 * (4096 * row + 1024) for row in range(40)]
    assert sorted(reads) == sorted([*((start, start + 2048) for start in rows), (v.offset, v.offset + v.nbytes)])
    assert made.bytes_read == made.bytes_needed == 40 * 2048 + v.nbytes


MEASURE_PEAK = """
import os, resource, sys
from pathlib import Path
import msgspec, torch
from precast.ir.weights.checkpoint import CheckpointFiles, StoredTensor
from precast.ir.weights.sources import LocalFolder
from precast.ir.graph.schema import Graph
from precast.ir.manifest import Checkpoint
from precast.loader.torch_device import CpuDevice
from precast.loader.weights.stream import load_weights

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
torch.set_num_threads(1)
root = Path(sys.argv[1])
graph = msgspec.json.decode((root / "graph.json").read_bytes(), type=Graph)
before = peak()
made = load_weights(graph, Checkpoint(), CheckpointFiles.open(root), device=CpuDevice())
print(peak() - before, sum(tensor.nbytes for tensor in made.tensors.values()))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="sets the cores that a process may use")
def test_memory_holds_the_model_once(tmp_path: Path) -> None:
    tensors = {f"w{i}": torch.zeros(4096, 4096, dtype=torch.bfloat16) for i in range(4)}
    recipes = {name: Transpose(read(name, tensors), 0, 1) for name in tensors}
    save(tmp_path, tensors)
    (tmp_path / "graph.json").write_bytes(msgspec.json.encode(params_graph(recipes, tensors)))

    run = subprocess.run([sys.executable, "-c", MEASURE_PEAK, str(tmp_path)], capture_output=True, text=True)

    assert run.returncode == 0, run.stderr
    grown, model = map(int, run.stdout.split())
    assert model == 4 << 25
    # One core: two threads, each with a buffer of 16 MiB; and as much again for all else.
    assert grown < model + (64 << 20)


# --- what does not fit -------------------------------------------------------------------------------------------


def test_all_mismatches_are_reported_before_anything_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = {"shape": torch.zeros(3, 4), "dtype": torch.zeros(4, dtype=torch.float64), "extra": torch.zeros(2)}
    expected = {"shape": torch.zeros(3, 5), "dtype": torch.zeros(4), "missing": torch.zeros(7)}
    files = save(tmp_path, stored)
    graph = params_graph({name: read(name, expected) for name in expected}, expected)
    monkeypatch.delattr(os, "preadv")

    with pytest.raises(WeightsError) as caught:
        load_weights(graph, Checkpoint(), files, device=CpuDevice())

    assert caught.value.code == "weights-mismatch"
    for word in ("missing", "shape: expected [3, 5], found [3, 4]", "dtype: expected float32, found float64", "extra"):
        assert word in str(caught.value)


@on_each_device
def test_a_file_that_became_shorter_is_an_error(tmp_path: Path, device: torch.device) -> None:
    tensors = {f"w{i}": torch.randn(1000, 1000) for i in range(12)}
    files = save(tmp_path, tensors, shards=2)
    second = next(tmp_path.glob("*-00002-of-*"))
    size = second.stat().st_size
    os.truncate(second, size - 1)

    graph = params_graph({n: read(n, tensors) for n in tensors}, tensors)
    with pytest.raises(WeightsError, match=f"it had {size} bytes, and has {size - 1} now") as caught:
        load_weights(graph, Checkpoint(), files, device=open_device(device))

    assert caught.value.code == "checkpoint-changed"
    assert caught.value.where == str(second)


def test_a_file_that_is_gone_is_an_error(tmp_path: Path) -> None:
    tensors = {"w": torch.randn(3)}
    files = save(tmp_path, tensors)
    (tmp_path / "model.safetensors").unlink()

    with pytest.raises(WeightsError, match="No such file") as caught:
        load_weights(params_graph({"w": read("w", tensors)}, tensors), Checkpoint(), files, device=CpuDevice())

    assert caught.value.code == "checkpoint-read"


def test_params_beyond_all_memory_are_refused_before_their_reads_are_planned(tmp_path: Path) -> None:
    shape = (2**50,)
    stored = StoredTensor("sparse", "bfloat16", shape, 0, 2**51)
    param = Param("p", TensorType("bfloat16", shape), Cast(Read("w", shape), "bfloat16"))
    graph = params_graph({}, {})
    files = CheckpointFiles(LocalFolder(tmp_path), {"w": stored})

    with pytest.raises(TargetError) as caught:
        load_weights(msgspec.structs.replace(graph, params=(param,)), Checkpoint(), files, device=CpuDevice())

    assert caught.value.code == "device-memory"
    assert "2251799.81 GB" in caught.value.message


@pytest.mark.gpu
def test_params_that_do_not_fit_the_gpu_are_refused(tmp_path: Path) -> None:
    tensors = {"w": torch.zeros(1 << 20)}
    files = save(tmp_path, tensors)
    four_gib = Stack((read("w", tensors),) * 1024, 0)
    graph = params_graph({"p": four_gib}, {"w": torch.zeros(1 << 20, device="meta")})
    copies = 1 + torch.cuda.mem_get_info()[1] // (4 << 30)
    params = tuple(Param(f"p{i}", graph.params[0].type, four_gib) for i in range(copies))

    with pytest.raises(TargetError) as caught:
        load_weights(
            __import__("msgspec").structs.replace(graph, params=params),
            Checkpoint(),
            files,
            device=open_device("cuda"),
        )

    assert caught.value.code == "device-memory"


def test_the_recipes_of_these_tests_are_valid() -> None:
    recipes, tensors = every_kind()
    for param in params_graph(recipes, tensors).params:
        assert ir_recipes.shape(param.recipe) == param.type.shape


# --- scales of caches --------------------------------------------------------------------------------------------

SCALES: dict[str, Recipe] = {"k": Scale(("x.k_scale", "x.k_proj.k_scale")), "v": Scale(("x.v_scale",), 0.5)}


def loaded_scales(directory: Path, tensors: Tensors, device: torch.device) -> dict[str, torch.Tensor]:
    files = save(directory, {"w": torch.zeros(3), **tensors})
    params = (
        Param("w", TensorType("float32", (3,)), Read("w", (3,), "float32")),
        *(Param(name, TensorType("float32", (1,)), recipe) for name, recipe in SCALES.items()),
    )
    graph = Graph((), (), params, (), (), (), {})
    return load_weights(graph, Checkpoint(), files, device=open_device(device)).tensors


@on_each_device
def test_scales_of_a_checkpoint_or_their_defaults(device: torch.device, tmp_path: Path) -> None:
    stored = {"x.k_proj.k_scale": torch.tensor(0.375).bfloat16(), "x.v_scale": torch.tensor([0.1])}
    for tensors, expected in ((stored, (0.375, 0.1)), ({}, (1.0, 0.5))):
        found = loaded_scales(tmp_path, tensors, device)

        for name, value in zip("kv", expected, strict=True):
            assert torch.equal(found[name].cpu(), torch.tensor([value]))


@pytest.mark.parametrize("value", [0.0, -0.5, float("nan"), float("inf"), 1e39])
def test_scales_that_are_no_numbers_above_0_are_refused(value: float, tmp_path: Path) -> None:
    stored = {"x.k_scale": torch.tensor(value, dtype=torch.float64), "x.v_scale": torch.tensor(1.0)}

    with pytest.raises(WeightsError, match=r"k is .*expected numbers above 0") as caught:
        loaded_scales(tmp_path, stored, torch.device("cpu"))

    assert caught.value.code == "scale-invalid"
    assert caught.value.where == str(tmp_path)


def test_half_of_the_scales_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"x\.v_scale: expected floating point") as caught:
        loaded_scales(tmp_path, {"x.k_scale": torch.tensor(1.0)}, torch.device("cpu"))

    assert caught.value.code == "weights-mismatch"
