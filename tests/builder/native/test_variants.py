"""The kernels of a layer take the launch of any step, and launches are what torch's tensors make them."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import families
import pytest
import torch
from program_steps import step_inputs

from precast.bench.steps import sizes_of
from precast.builder.build import build
from precast.builder.native.variants import engine_launches, variants
from precast.ir.graph.schema import Graph, Value
from precast.ir.graph.world import unsharded
from precast.ir.memory import caches
from precast.ir.native import takes
from precast.kernels.choices import cases, records_of
from precast.kernels.dtypes import BY_NAME
from precast.kernels.launch import launched_of
from precast.kernels.records import Launch, Pointer, Record, Stride
from precast.kernels.registry import Implementation, function_of
from precast.kernels.step_launches import Address, GraphLaunches, step_launches
from precast.kernels.use import GPU, Target, Use
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
