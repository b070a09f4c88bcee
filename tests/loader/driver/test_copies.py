"""Params whose rows and columns are exchanged, and words in another order, by copies on a GPU by hand, which does what
the kernels do."""

from __future__ import annotations

import ctypes
import gc
import hashlib
import itertools
import math
import operator
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import quantised
import torch
from driver_by_hand import CudaDriver
from graph_text import parse_graph
from recipe_cases import evaluate, params_graph, read
from safetensors.torch import save_file

from precast.ir.errors import WeightsError
from precast.ir.graph.schema import Cast, Concat, Graph, Recipe, Repack, Slice, Stack, Transpose
from precast.ir.manifest import Checkpoint
from precast.ir.native import NO_ARGUMENT, NativeKernel, NativeLayer, NativeParam
from precast.ir.weights.checkpoint import CheckpointFiles
from precast.kernels.without_torch import copies
from precast.kernels.without_torch.copies import (
    REARRANGED,
    rearranged,
    rearranged_arguments,
    rearranged_key,
    repacked,
    repacked_arguments,
    repacked_key,
)
from precast.loader.driver import library, param_plan, weights
from precast.loader.driver.context import begin
from precast.loader.driver.copies import Copies

_IMAGE = b"\x7fELF"
_DIGEST = hashlib.sha256(_IMAGE).hexdigest()
_ROWS, _COLUMNS = (rearranged().constants[name] for name in ("ROWS", "COLUMNS"))
_WORD_ROWS, _WORD_COLUMNS = (repacked("values").constants[name] for name in ("ROWS", "COLUMNS"))


def layer_for(*kinds: int | str) -> NativeLayer:
    """A layer that copies elements of so many bytes, and repacks these parts of weights."""
    kernels = []
    for kind in kinds:
        launch = rearranged() if isinstance(kind, int) else repacked(kind)
        key, _ = rearranged_key(REARRANGED[kind]) if isinstance(kind, int) else repacked_key(kind)
        params = tuple(NativeParam("pointer" if i < 2 else "int64", i) for i in range(len(launch.args)))
        params += (NativeParam("pointer", NO_ARGUMENT),) * 2
        kernels.append(NativeKernel(launch.kernel, key, _DIGEST, f"copy_{kind}", 128, 0, params))
    return NativeLayer("sm_90", 12000, {}, {}, tuple(kernels), {_DIGEST: _IMAGE})


class Gpu(CudaDriver):
    """Does what `copy_kernel` and `repack_kernel` do."""

    def __init__(self) -> None:
        super().__init__()
        self.num_copies = self.num_repacked = 0
        self._functions: dict[int, str] = {}

    def cuModuleGetFunction(self, found: Any, module: Any, name: bytes) -> int:
        self._number(found)
        self._functions[found._obj.value] = name.rstrip(b"\0").rpartition(b"_")[2].decode()
        return 0

    def cuLaunchKernelEx(self, config: int, function: int, arguments: int, extra: Any) -> int:
        grid, kind = library.Config.from_address(config).grid, self._functions[function]
        if not kind.isdigit():
            self.num_repacked += 1
            return self._repack(kind, grid, arguments)
        places = (ctypes.c_void_p * 15).from_address(arguments)
        x, out, rows, columns, *rest = (ctypes.c_int64.from_address(place or 0).value for place in places)
        sizes, x_steps, out_steps, each = rest[:3], rest[3:7], rest[7:], int(kind)
        assert grid[0] * _ROWS >= rows
        assert grid[1] * _COLUMNS >= columns
        for row in range(rows):
            place = (row // sizes[2] // sizes[1] % sizes[0], row // sizes[2] % sizes[1], row % sizes[2])
            for column in range(columns):
                source, target = (sum(map(operator.mul, (*place, column), steps)) for steps in (x_steps, out_steps))
                ctypes.memmove(out + each * target, x + each * source, each)
        self.num_copies += 1
        return 0

    def _repack(self, part: str, grid: Any, arguments: int) -> int:
        places = (ctypes.c_void_p * 10).from_address(arguments)
        x, out, rows, columns, *steps = (ctypes.c_int64.from_address(place or 0).value for place in places)
        assert grid[0] * _WORD_ROWS >= rows
        assert grid[1] * _WORD_COLUMNS >= columns
        each = range(8 if part == "values" else 1)
        for row, column in itertools.product(range(rows), range(columns)):
            sources = [x + 4 * sum(map(operator.mul, (row, i, column), steps[:3])) for i in each]
            words = torch.tensor([[ctypes.c_int32.from_address(source).value] for source in sources]).int()
            for i, word in zip(each, quantised.repacked(words, part).flatten().tolist(), strict=True):
                ctypes.c_int32.from_address(out + 4 * sum(map(operator.mul, (row, i, column), steps[3:]))).value = word
        return 0


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    made = Gpu()
    monkeypatch.setattr(library, "function", made.function)
    monkeypatch.setattr(weights, "THREADS", 2)
    yield made
    for thread in threading.enumerate():
        if thread.name.startswith(("precast-context", "precast-pinning")):
            thread.join()
    gc.collect()
    assert made.held == {"device": 0, "pinned": 0}


Loaded = Callable[..., dict[str, bytes]]


@pytest.fixture
def loaded(gpu: Gpu, tmp_path: Path) -> Loaded:
    """The bytes of a graph's params, as a load leaves them on the GPU."""

    def load(graph: Graph, tensors: Mapping[str, torch.Tensor], layer: NativeLayer) -> dict[str, bytes]:
        save_file({name: each.contiguous() for name, each in tensors.items()}, tmp_path / "model.safetensors")
        context = begin("cuda")
        device = context.result().device
        what = param_plan.planned(graph, Checkpoint(), CheckpointFiles.open(tmp_path))
        params = weights.placed(what, graph, device)
        weights.stream(what, params, weights.Ring(context), device, layer)
        return {
            param.name: ctypes.string_at(params.buffers[param.name].pointer, param_plan.target_bytes(target))
            for param in graph.params
            for target in what.plan.targets
            if target.name == param.name
        }

    return load


TENSORS = {
    "awq": torch.randint(-(1 << 31), 1 << 31, (48, 5)).int(),
    "awq.zeros": torch.randint(-(1 << 31), 1 << 31, (3, 5)).int(),
    "words": torch.randint(-(1 << 31), 1 << 31, (24, 40)).int(), "a": torch.randn(10, 12).half(),
    "b": torch.randn(6, 12).half(), "bytes": torch.randint(0, 256, (9, 5)).to(torch.uint8),
    "plain": torch.randn(7, 3).bfloat16(),
}  # fmt: skip


def turned(name: str) -> Recipe:
    return Transpose(read(name, TENSORS), 0, 1)


RECIPES: dict[str, Recipe] = {
    "words": turned("words"), "straight": read("words", TENSORS), "part": Slice(turned("words"), 1, 8, 16),
    "joined": Concat((turned("a"), turned("b")), 1), "stack": Stack((turned("words"), turned("words")), 1),
    "values": Repack(read("awq", TENSORS), "values"), "zeros": Repack(read("awq.zeros", TENSORS), "zeros"),
    "columns": Slice(Repack(read("awq", TENSORS), "values"), 1, 1, 3),
    "rows": Slice(Repack(read("awq", TENSORS), "values"), 0, 8, 16),
    "together": Concat((Repack(read("awq", TENSORS), "values"),) * 2, 0),
    "mixed": Concat((Repack(read("awq.zeros", TENSORS), "zeros"), Slice(turned("words"), 1, 0, 3)), 0),
    "uneven": Slice(Repack(read("awq", TENSORS), "values"), 0, 4, 8),
    "bytes": turned("bytes"), "plain": read("plain", TENSORS), "cast": Cast(turned("b"), "float32"),
}  # fmt: skip


def expected(recipes: Mapping[str, Recipe]) -> dict[str, bytes]:
    made = {name: evaluate(recipe, TENSORS).contiguous() for name, recipe in recipes.items()}
    return {name: tensor.flatten().view(torch.uint8).numpy().tobytes() for name, tensor in made.items()}


@pytest.mark.parametrize("buffer_bytes", [1 << 20, 1 << 10])
@pytest.mark.parametrize("sizes", [(1, 2, 4, "values", "zeros"), (4,), ("values",), ()], ids=str)
def test_what_the_layer_copies_is_as_what_the_host_makes(
    sizes: tuple[int | str, ...], buffer_bytes: int, loaded: Loaded, gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one job, and in jobs of a few rows each, of which one row may be alone. A tensor that several params need is
    more than a small buffer holds."""
    for module in (param_plan, weights):
        monkeypatch.setattr(module, "BUFFER_BYTES", buffer_bytes)

    found = loaded(params_graph(RECIPES, TENSORS), TENSORS, layer_for(*sizes))

    assert found == expected(RECIPES)
    assert (gpu.num_copies > 0) == (4 in sizes)
    assert (gpu.num_repacked > 0) == ("values" in sizes)


def test_what_is_cast_or_moved_is_made_on_the_host_and_all_else_by_kernels(gpu: Gpu, tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    what = param_plan.planned(params_graph(RECIPES, TENSORS), Checkpoint(), CheckpointFiles.open(tmp_path))

    made = {
        sizes: Copies(what, layer_for(*sizes), begin("cuda").result().device).targets
        for sizes in ((1, 2, 4, "values", "zeros"), (2,), ("values",), (4, "values"))
    }

    names = {sizes: {what.plan.targets[i].name for i in targets} for sizes, targets in made.items()}
    others = {"plain", "cast", "uneven"}
    of_values, turned = {"values", "columns", "rows", "together"}, {"words", "straight", "part", "stack"}
    assert names == {
        (1, 2, 4, "values", "zeros"): RECIPES.keys() - others, (2,): {"joined"}, ("values",): of_values,
        (4, "values"): of_values | turned,
    }  # fmt: skip


QUANTISED = """
inputs { %x: float32[1, T, 16] } symbols { T: 1.. }
params {
  %w: int32[6, 2] = transpose(read("w", [2, 6], int32), 0, 1)
  %s: float32[6, 2] = transpose(read("s", [2, 6], float32), 0, 1)
}
main { %y = precast.quantised_linear(input=%x, weight=%w, scales=%s, format="packed4", zero_offset=8) return y=%y }
"""


@pytest.mark.parametrize("value", [1.5, torch.nan])
def test_scales_are_looked_at_on_their_way(value: float, loaded: Loaded) -> None:
    scales = torch.ones(2, 6)
    scales[1, 4] = value
    tensors = {"w": torch.arange(12).int().view(2, 6), "s": scales}

    if math.isnan(value):
        with pytest.raises(WeightsError, match="s: a scale that is no finite number"):
            loaded(parse_graph(QUANTISED), tensors, layer_for(4))
    else:
        found = loaded(parse_graph(QUANTISED), tensors, layer_for(4))
        assert found == {name: tensors[name].t().contiguous().view(torch.uint8).numpy().tobytes() for name in "ws"}


def test_what_the_kernel_does_not_take() -> None:
    assert rearranged_arguments((2, 2, 2, 2, 2), (1,) * 5, (1,) * 5) is None
    assert rearranged_arguments((1 << 24,), (1,), (2,)) is None
    assert rearranged_arguments((3, 5), (5, 1), (1, 3)) == (
        (1, 1, 1), (3, 5, 1, 1, 3, 0, 0, 5, 1, 0, 0, 1, 3)
    )  # fmt: skip
    assert len(copies.rearranged().args) == 2 + 13
    assert repacked_arguments("zeros", (2, 2, 2), (4, 2, 1), (1, 2, 4)) is None
    assert repacked_arguments("zeros", (3,), (5,), (1,)) == ((1, 1, 1), (1, 3, 0, 0, 5, 0, 0, 1))
    assert repacked_arguments("values", (1, 8, 1 << 22), (8, 1, 1), (1, 1, 8)) is None
