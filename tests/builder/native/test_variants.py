"""The kernels of a layer take the launch of any step, and launches are what torch's tensors make them."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import families
import msgspec
import pytest
import torch
from program_steps import step_inputs

from precast.bench.steps import sizes_of
from precast.builder.build import build
from precast.builder.native.variants import ALONE, Variant, World, engine_launches, of_worlds, variants
from precast.ir.graph.logit_parts import in_parts
from precast.ir.graph.schema import Cast, Graph, Param, Quantise, Read, Repack, Slice, TensorType, Tie, Transpose, Value
from precast.ir.graph.world import bound, unsharded
from precast.ir.memory import caches
from precast.ir.native import takes
from precast.ir.weights import recipes
from precast.ir.weights.tensorfile import element_bytes
from precast.kernels.choices import cases, records_of
from precast.kernels.collectives.launches import Among
from precast.kernels.dequantise.launches import PARTS, STORED, Part, quantising_key
from precast.kernels.dtypes import BY_NAME
from precast.kernels.launch import launched_of
from precast.kernels.records import Launch, Pointer, Record, Stride
from precast.kernels.registry import Implementation, function_of
from precast.kernels.step_launches import (
    Address,
    DrawnPart,
    GraphLaunches,
    part_drawing_launches,
    step_launches,
    sums_launched,
)
from precast.kernels.use import GPU, Target, Use
from precast.kernels.without_torch.copies import REARRANGED, REPACKED, rearranged_key, repacked_key
from precast.loader.cache.memory import CacheMemory
from precast.loader.program.restore import restore
from precast.loader.torch_device import CpuDevice

FAMILIES = ("llama", "gemma3", "qwen3_moe", "mamba2", "deepseek_v3")
CPU = torch.device("cpu")
CACHES = ("k_cache", "v_cache", "cache", "state")
"""The arguments of ops that are tensors of caches."""
STEPS = ([(1, 1)], [(1, 5), (1, 33)], [(16, 16), (1, 2), (1, 40)], [(17, 17)], [(1, 3)] * 16, [(70, 80), (3, 3)])


@pytest.fixture(scope="module", params=FAMILIES)
def graph(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Graph:
    path = tmp_path_factory.mktemp("built") / "bundle"
    return unsharded(build(families.make_config(request.param), path, dtype="bfloat16").graph)


@pytest.mark.parametrize(("family", "world"), [("llama", World(2, 1)), ("qwen3_moe", World(4, 2))])
def test_every_rank_of_a_world_finds_its_kernels(family: str, world: World, tmp_path: Path) -> None:
    """Those of its graph, of sums over the ranks, and of drawing from parts; and one rank those that it had alone."""
    whole, draw = build(families.make_config(family), tmp_path / "bundle", dtype="bfloat16").graph, random.Random(5)
    by_key: dict[str, list[Variant]] = {}
    for variant in of_worlds(whole, GPU, (), [ALONE, world]):
        by_key.setdefault(variant.key, []).append(variant)

    assert all(variant in by_key[variant.key] for variant in of_worlds(whole, GPU, (), [ALONE]))
    asked = set[str]()
    for rank in range(world.tp):
        graph, target = bound(whole, {"rank": rank, **world._asdict()}), GPU._replace(tp=world.tp)
        among, parts = Among(rank, world.tp), in_parts(graph)
        assert parts is not None
        launches = GraphLaunches(graph, target)
        for _ in range(8):
            sizes = random_sizes(graph, draw)
            drawn = DrawnPart(among, parts.size, parts.columns)
            for launch in (*engine_launches(launches, sizes),
                           *part_drawing_launches("bfloat16", target, sizes["R"], drawn)):  # fmt: skip
                if launch.key:
                    found, values = by_key.get(launch.key, []), launch.values()
                    assert any(takes(each.aligned, each.ones, (), values) for each in found), launch
                    asked.add(launch.launch.kernel.rpartition(":")[2])
        sums = sums_launched(graph, target, among)
        asked |= {each.launch.kernel.rpartition(":")[2] for each in sums}
        assert all(each.key in by_key for each in sums)
    assert asked > {"one_shot", "norm_one_shot", "scanned", "drawn", "scan_kernel", "rms_norm_kernel"}
    assert ("two_shot" in asked) == (world.tp > 2)


def random_sizes(graph: Graph, draw: random.Random) -> dict[str, int]:
    """Of a step of up to 1024 tokens."""
    tokens = draw.randint(1, 1024)
    sequences = draw.randint(1, tokens)
    others = {symbol.name: draw.randint(1, 5000) for symbol in graph.symbols}
    return others | {"T": tokens, "B": sequences, "R": draw.randint(1, sequences)}


@pytest.mark.parametrize("gpu", [Target.parse("sm_80"), GPU, GPU.without_torch], ids=["sm_80", "sm_90", "no torch"])
def test_the_launch_of_any_step_finds_its_kernel(graph: Graph, gpu: Target) -> None:
    draw = random.Random(7)
    by_key: dict[str, list[Any]] = {}
    for variant in variants(graph, [gpu]):
        by_key.setdefault(variant.key, []).append(variant)

    asked = 0
    for _ in range(40):
        for launch in engine_launches(GraphLaunches(graph, gpu), random_sizes(graph, draw)):
            if launch.key:
                found, values = by_key.get(launch.key, []), launch.values()
                assert any(takes(each.aligned, each.ones, (), values) for each in found), launch
                asked += 1
    assert asked > 500
    assert max(map(len, by_key.values())) <= 2


@pytest.mark.parametrize("is_turned", [False, True], ids=["as stored", "turned"])
def test_params_whose_rows_and_columns_are_exchanged_have_a_copy(is_turned: bool, graph: Graph) -> None:
    """For elements of their size, and larger ones: the driver alone copies them so while they are read."""
    param = next(param for param in graph.params if len(param.type.shape) == 2)
    read = Read("w", tuple(reversed(param.type.shape)) if is_turned else param.type.shape)  # type: ignore[arg-type]
    recipe = Cast(Transpose(read, 0, 1) if is_turned else read, param.type.dtype)
    others = tuple(each for each in graph.params if each is not param)
    plain = tuple(msgspec.structs.replace(each, recipe=Tie(param.name)) for each in others)
    changed = msgspec.structs.replace(graph, params=(msgspec.structs.replace(param, recipe=recipe), *plain))

    found = {variant.key for variant in variants(changed, [GPU])}

    keys = {size: rearranged_key(dtype)[0] for size, dtype in REARRANGED.items()}
    assert [size for size, key in keys.items() if key in found] == ([2, 4] if is_turned else [])


@pytest.mark.parametrize("part", [None, "values", "zeros", "groups"])
def test_params_of_words_in_another_order_have_a_kernel(
    part: Literal["values", "zeros", "groups"] | None, graph: Graph
) -> None:
    read = Read("w", (16, 3), "int32")
    recipe = read if part is None else Slice(Repack(read, part), 1, 0, 1)
    param = Param("w", TensorType("int32", recipes.shape(recipe)), recipe)  # type: ignore[arg-type]
    others = tuple(msgspec.structs.replace(each, recipe=Tie("w")) for each in graph.params)
    changed = msgspec.structs.replace(graph, params=(param, *others))

    found = {variant.key for variant in variants(changed, [GPU])}

    assert [each for each in REPACKED if repacked_key(each)[0] in found] == [part] * (part is not None)


@pytest.mark.parametrize("part", [None, *PARTS])
def test_params_that_are_quantised_while_they_are_read_have_kernels(part: Part | None, graph: Graph) -> None:
    """For each type that a checkpoint may have, and for what puts the results where they belong."""
    read = Read("w", (300, 200))
    recipe = Cast(read, "float32") if part is None else Transpose(Quantise(read, part, (128, 128)), 0, 1)
    param = Param("w", TensorType(PARTS.get(part, "float32"), recipes.shape(recipe)), recipe)  # type: ignore[arg-type]
    others = tuple(msgspec.structs.replace(each, recipe=Tie("w")) for each in graph.params)
    changed = msgspec.structs.replace(graph, params=(param, *others))

    found = {variant.key for variant in variants(changed, [GPU])}

    wanted = {(each, stored): quantising_key(each, (128, 128), stored)[0] for each in PARTS for stored in STORED}
    assert {each for each, key in wanted.items() if key in found} == ({(part, s) for s in STORED} if part else set())
    copied = {element_bytes(PARTS[part])} if part else set()
    assert {size for size, dtype in REARRANGED.items() if rearranged_key(dtype)[0] in found} >= copied


def test_launches_are_what_torch_s_tensors_make_them(graph: Graph) -> None:
    watched: list[tuple[Any, ...]] = []
    program = restore(graph, device=CPU, choose=lambda use: recorded(use, watched), target=GPU)
    memory = CacheMemory(graph.caches, 8, CpuDevice())
    params = [Value(param.name, param.type) for param in graph.params]
    static = {value.name: zeros(value) for value in (*params, *graph.constants)} | dict(memory.tensors)
    program.bind(static)
    for sequences in STEPS:
        inputs = step_inputs(graph, sequences, CPU)
        sizes = sizes_of((*graph.inputs, *caches.tensors(graph.caches)), static | inputs)
        watched.clear()
        program(**inputs)

        expected = [numbers(launch.args) for node in step_launches(graph, GPU, sizes) for launch in node.launches]
        assert len(watched) == len(expected) > 5
        assert watched == expected, sequences


def zeros(value: Value) -> torch.Tensor:
    """A tensor of a value's type, whose sizes are numbers."""
    return torch.zeros([int(size) for size in value.type.shape], dtype=BY_NAME[value.type.dtype])  # type: ignore[arg-type]


def numbers(args: Sequence[Any]) -> tuple[Any, ...]:
    """The arguments of a launch, of pointers the byte at which they begin."""
    return tuple(arg.offset if isinstance(arg, Address) else arg for arg in args)


def recorded(use: Use, into: list[tuple[Any, ...]]) -> tuple[Implementation, ...]:
    """What computes a use on a GPU; launches are noted and not made."""
    return tuple(_implementation(case.sizes, case.choice.record, use, into) for case in cases(use))


def _implementation(sizes: Any, record: Record, use: Use, into: list[tuple[Any, ...]]) -> Implementation:
    if isinstance(record.runs, str):
        # A function of Triton's kernels has no device here: the reference computes the same.
        is_torch = record.kind in ("torch", "view")
        others = records_of(record.op, use.node.version)
        known = record if is_torch else next(each for each in others if each.name.startswith("reference."))
        return Implementation(sizes, function_of(known), known.allocates, known.control == "host")
    launched, launches = launched_of(record, use), record.runs(use)

    def note(*, sizes: Sequence[int] = (), out: Any = (), **given: Any) -> None:
        values = dict(zip(launched.expressions, sizes, strict=True))
        tensors = dict(_named(given)) | {f"out.{i}": x for i, x in enumerate([out] if torch.is_tensor(out) else out)}
        for tensor in (x for name, x in tensors.items() if name.startswith("out.")):
            tensor.zero_()
        into.extend(_noted(launch, tensors, values) for launch in launches)

    return Implementation(sizes, note, record.allocates, expressions=launched.expressions)


def _named(given: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    for name, value in given.items():
        if torch.is_tensor(value):
            yield name, value
        elif isinstance(value, (list, tuple)):
            yield from ((f"{name}.{i}", each) for i, each in enumerate(value) if torch.is_tensor(each))


def _noted(launch: Launch, tensors: Mapping[str, torch.Tensor], values: Mapping[Any, int]) -> tuple[Any, ...]:
    def number(arg: Any) -> Any:
        if isinstance(arg, Pointer):
            begin = arg.offset if isinstance(arg.offset, int) else values[arg.offset]
            if arg.tensor == "workspace":
                return begin
            tensor = tensors[arg.tensor]
            if arg.tensor in CACHES:  # it begins somewhere in the arena
                return begin
            return tensor.storage_offset() * tensor.element_size() + begin
        if isinstance(arg, Stride):
            return tensors[arg.tensor].stride(arg.axis)
        return arg if arg is None or isinstance(arg, (int, float)) else values[arg]

    return tuple(map(number, launch.args))
