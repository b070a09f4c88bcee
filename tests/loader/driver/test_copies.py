"""Params whose rows and columns are exchanged, and words in another order, by copies on a GPU by hand, which does what
the kernels do, and by the kernels on a real one."""

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
from typing import Any, Literal

import numpy as np
import pytest
import quantised
import torch
from driver_by_hand import CudaDriver
from graph_text import parse_graph
from recipe_cases import evaluate, params_graph, read
from safetensors.torch import save_file

from precast.builder.native.layer import native_layer, target_named
from precast.ir.errors import TargetError, WeightsError
from precast.ir.graph.schema import Cast, Concat, Dtype, Graph, Quantise, Recipe, Repack, Slice, Stack, Transpose
from precast.ir.manifest import Checkpoint
from precast.ir.native import NO_ARGUMENT, NativeKernel, NativeLayer, NativeParam
from precast.ir.weights.checkpoint import CheckpointFiles
from precast.ir.weights.tensorfile import element_bytes
from precast.kernels.dequantise.launches import PARTS, Part, quantising, quantising_key
from precast.kernels.dequantise.quantise import quantised as of_matrix
from precast.kernels.dtypes import BY_NAME
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
from precast.loader.device import Buffer, host_bytes
from precast.loader.driver import library, param_plan, quantise_plan, weights
from precast.loader.driver.context import begin
from precast.loader.driver.copies import Copies
from precast.loader.driver.device import DriverDevice
from precast.loader.weights.parts import Target
from precast.loader.weights.read_plan import Copy, Job, Plan
from precast.loader.weights.views import View

_IMAGE = b"\x7fELF"
_DIGEST = hashlib.sha256(_IMAGE).hexdigest()
_ROWS, _COLUMNS = (rearranged().constants[name] for name in ("ROWS", "COLUMNS"))
_WORD_ROWS, _WORD_COLUMNS = (repacked("values").constants[name] for name in ("ROWS", "COLUMNS"))


Kind = int | str | tuple[Part, tuple[int, int], Dtype]


def layer_for(*kinds: Kind) -> NativeLayer:
    """A layer that copies elements of so many bytes, repacks these parts of weights, and makes these parts of matrices
    that are quantised: with a scale for each of such blocks, of such a type."""
    kernels = []
    for kind in kinds:
        if isinstance(kind, tuple):
            launch, (key, _) = quantising(*kind[:2]), quantising_key(*kind)
        else:
            launch = rearranged() if isinstance(kind, int) else repacked(kind)
            key, _ = rearranged_key(REARRANGED[kind]) if isinstance(kind, int) else repacked_key(kind)
        params = tuple(NativeParam("pointer" if i < 2 else "int64", i) for i in range(len(launch.args)))
        params += (NativeParam("pointer", NO_ARGUMENT),) * 2
        name = f"{kind[0]} of {kind[2]}" if isinstance(kind, tuple) else f"{kind}"
        kernels.append(NativeKernel(launch.kernel, key, _DIGEST, f"copy_{name}", 128, 0, params))
    return NativeLayer("sm_90", 12000, {}, {}, tuple(kernels), {_DIGEST: _IMAGE})


class Gpu(CudaDriver):
    """Does what `copy_kernel`, `repack_kernel` and `quantise_kernel` do."""

    def __init__(self) -> None:
        super().__init__()
        self.num_copies = self.num_repacked = self.num_quantised = 0
        self.sizes: set[int] = set()  # of the elements that were copied
        self._functions: dict[int, str] = {}

    def cuModuleGetFunction(self, found: Any, module: Any, name: bytes) -> int:
        self._number(found)
        self._functions[found._obj.value] = name.rstrip(b"\0").rpartition(b"_")[2].decode()
        return 0

    def cuLaunchKernelEx(self, config: int, function: int, arguments: int, extra: Any) -> int:
        grid, kind = library.Config.from_address(config).grid, self._functions[function]
        if " of " in kind:
            self.num_quantised += 1
            return self._quantise(*kind.split(" of "), grid, arguments)  # type: ignore[arg-type]
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
        self.sizes.add(each)
        return 0

    def _quantise(self, part: Part, stored: Dtype, grid: Any, arguments: int) -> int:
        places = (ctypes.c_void_p * 6).from_address(arguments)
        x, out, rows, columns, *block = (ctypes.c_int64.from_address(place or 0).value for place in places)
        assert grid[0] == math.ceil(rows / block[0]) * math.ceil(columns / block[1])
        data = bytearray(ctypes.string_at(x, rows * columns * element_bytes(stored)))
        matrix = torch.frombuffer(data, dtype=BY_NAME[stored]).view(rows, columns)
        made = of_matrix(matrix, part, (block[0], block[1])).view(torch.uint8).numpy().tobytes()
        ctypes.memmove(out, made, len(made))
        return 0

    def _repack(self, part: str, grid: Any, arguments: int) -> int:
        places = (ctypes.c_void_p * 10).from_address(arguments)
        x, out, rows, columns, *steps = (ctypes.c_int64.from_address(place or 0).value for place in places)
        assert grid[0] * _WORD_ROWS >= rows
        assert grid[1] * _WORD_COLUMNS >= columns
        each = range(1 if part == "zeros" else 8)
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


def load(folder: Path, graph: Graph, tensors: Mapping[str, torch.Tensor], layer: NativeLayer) -> dict[str, bytes]:
    """The bytes of a graph's params, as a load leaves them on the GPU."""
    save_file({name: each.contiguous() for name, each in tensors.items()}, folder / "model.safetensors")
    context = begin("cuda")
    device = context.result().device
    what = param_plan.planned(graph, Checkpoint(), CheckpointFiles.open(folder))
    params = weights.placed(what, graph, device)
    weights.stream(what, params, weights.Ring(context), device, layer)
    return {
        target.name: bytes_of(device, params.buffers[target.name], param_plan.target_bytes(target))
        for target in what.plan.targets
        if target.name is not None
    }


def bytes_of(device: DriverDevice, buffer: Buffer, num_bytes: int) -> bytes:
    there = device.alloc(num_bytes, pinned=True)
    with device.use():
        device.copy(there, buffer)
    device.synchronize()
    return bytes(host_bytes(there))


@pytest.fixture
def loaded(gpu: Gpu, tmp_path: Path) -> Loaded:
    return lambda *given: load(tmp_path, *given)


TENSORS = {
    "awq": torch.randint(-(1 << 31), 1 << 31, (48, 5)).int(),
    "awq.zeros": torch.randint(-(1 << 31), 1 << 31, (3, 5)).int(),
    "words": torch.randint(-(1 << 31), 1 << 31, (24, 40)).int(), "a": torch.randn(10, 12).half(),
    "b": torch.randn(6, 12).half(), "bytes": torch.randint(0, 256, (9, 5)).to(torch.uint8),
    "plain": torch.randn(7, 3).bfloat16(),
}  # fmt: skip


def turned(name: str, tensors: Mapping[str, torch.Tensor] = TENSORS) -> Recipe:
    rank = tensors[name].dim()
    return Transpose(read(name, tensors), rank - 2, rank - 1)


RECIPES: dict[str, Recipe] = {
    "words": turned("words"), "straight": read("words", TENSORS), "part": Slice(turned("words"), 1, 8, 16),
    "joined": Concat((turned("a"), turned("b")), 1), "stack": Stack((turned("words"), turned("words")), 1),
    "values": Repack(read("awq", TENSORS), "values"), "zeros": Repack(read("awq.zeros", TENSORS), "zeros"),
    "groups": Repack(read("awq", TENSORS), "groups"),
    "some groups": Slice(Slice(Repack(read("awq", TENSORS), "groups"), 1, 8, 16), 0, 2, 3),
    "few groups": Slice(Repack(read("awq", TENSORS), "groups"), 1, 0, 5),
    "columns": Slice(Repack(read("awq", TENSORS), "values"), 1, 1, 3),
    "rows": Slice(Repack(read("awq", TENSORS), "values"), 0, 8, 16),
    "together": Concat((Repack(read("awq", TENSORS), "values"),) * 2, 0),
    "mixed": Concat((Repack(read("awq.zeros", TENSORS), "zeros"), Slice(turned("words"), 1, 0, 3)), 0),
    "uneven": Slice(Repack(read("awq", TENSORS), "values"), 0, 4, 8),
    "bytes": turned("bytes"), "plain": read("plain", TENSORS), "cast": Cast(turned("b"), "float32"),
}  # fmt: skip


def expected(recipes: Mapping[str, Recipe], tensors: Mapping[str, torch.Tensor] = TENSORS) -> dict[str, bytes]:
    made = {name: evaluate(recipe, tensors).contiguous() for name, recipe in recipes.items()}
    return {name: tensor.flatten().view(torch.uint8).numpy().tobytes() for name, tensor in made.items()}


@pytest.mark.parametrize("buffer_bytes", [1 << 20, 1 << 10])
@pytest.mark.parametrize("sizes", [(1, 2, 4, "values", "zeros", "groups"), (4,), ("values",), ()], ids=str)
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


ROWS = {"rows": torch.randint(0, 256, (4, 3, 2, 12)).to(torch.uint8)}


@pytest.mark.parametrize(("sizes", "widest"), [((1, 2, 4), 4), ((1, 2), 2), ((1,), 1)], ids=str)
@pytest.mark.parametrize(("begin", "length", "most"), [(0, 12, 4), (4, 4, 4), (2, 10, 2), (0, 9, 1), (1, 8, 1)])
def test_short_rows_are_copied_in_words(
    begin: int, length: int, most: int, sizes: tuple[int, ...], widest: int, loaded: Loaded, gpu: Gpu
) -> None:
    """As large ones as the layer has a kernel for, and as rows and what is between them are multiples of."""
    whole = Transpose(read("rows", ROWS), 1, 2)
    recipes: dict[str, Recipe] = {"whole": whole, "part": Slice(whole, 3, begin, length)}

    found = loaded(params_graph(recipes, ROWS), ROWS, layer_for(*sizes))

    assert found == expected(recipes, ROWS)
    assert gpu.sizes == {widest, min(most, widest)}


def test_what_is_cast_or_moved_is_made_on_the_host_and_all_else_by_kernels(gpu: Gpu, tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    what = param_plan.planned(params_graph(RECIPES, TENSORS), Checkpoint(), CheckpointFiles.open(tmp_path))

    made = {
        sizes: Copies(what, layer_for(*sizes), begin("cuda").result().device).targets
        for sizes in ((1, 2, 4, "values", "zeros", "groups"), (2,), ("values",), ("groups",), (4, "values"))
    }

    names = {sizes: {what.plan.targets[i].name for i in targets} for sizes, targets in made.items()}
    others = {"plain", "cast", "uneven", "few groups"}
    of_values, turned = {"values", "columns", "rows", "together"}, {"words", "straight", "part", "stack"}
    assert names == {
        (1, 2, 4, "values", "zeros", "groups"): RECIPES.keys() - others, (2,): {"joined"}, ("values",): of_values,
        ("groups",): {"groups", "some groups"}, (4, "values"): of_values | turned,
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
        with pytest.raises(WeightsError, match=r"s: the scale at \[1, 4\] is nan"):
            loaded(parse_graph(QUANTISED), tensors, layer_for(4))
    else:
        found = loaded(parse_graph(QUANTISED), tensors, layer_for(4))
        assert found == {name: tensors[name].t().contiguous().view(torch.uint8).numpy().tobytes() for name in "ws"}


BLOCKS = (128, 128)
MATRICES = {
    "a": torch.randn(200, 150).bfloat16(), "b": torch.randn(128, 150).bfloat16(), "c": torch.randn(40, 8).half(),
    "d": torch.randn(9, 40), "experts": torch.randn(3, 6, 10).bfloat16(),
}  # fmt: skip


def part(name: str, which: Part, block: tuple[int, int]) -> Recipe:
    return Quantise(read(name, MATRICES), which, block)


def joined(which: Part) -> Recipe:
    return Concat((part("a", which, BLOCKS), part("b", which, BLOCKS)), 0)


AT_LOAD: dict[str, Recipe] = {
    "values": joined("values"), "scales": joined("scales"), "c": part("c", "values", (1, 8)),
    "c.scales": part("c", "scales", (1, 8)), "turned": Transpose(part("d", "values", (9, 1)), 0, 1),
    "turned.scales": Transpose(part("d", "scales", (9, 1)), 0, 1),
    "some": Slice(part("a", "values", BLOCKS), 0, 60, 90),
    "experts": part("experts", "values", (1, 10)), "experts.scales": part("experts", "scales", (1, 10)),
    "plain": read("b", MATRICES),
}  # fmt: skip
QUANTISED_KINDS: tuple[Kind, ...] = tuple(
    (which, block, stored)
    for which in PARTS
    for block, stored in ((BLOCKS, "bfloat16"), ((1, 8), "float16"), ((9, 1), "float32"), ((1, 10), "bfloat16"))
)  # fmt: skip


@pytest.mark.parametrize("round_bytes", [1, 70_000, 1 << 30])
def test_matrices_are_quantised_while_they_are_read(
    round_bytes: int, gpu: Gpu, loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantise_plan, "ROUND_BYTES", round_bytes)

    found = loaded(params_graph(AT_LOAD, MATRICES), MATRICES, layer_for(1, 4, *QUANTISED_KINDS))

    assert found == expected(AT_LOAD, MATRICES)
    assert gpu.num_quantised > len(AT_LOAD)


@pytest.mark.parametrize("round_bytes", [1, 70_000])
def test_a_matrix_is_read_once_for_its_values_and_scales(
    round_bytes: int, gpu: Gpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantise_plan, "ROUND_BYTES", round_bytes)
    save_file(MATRICES, tmp_path / "model.safetensors")
    what = param_plan.planned(params_graph(AT_LOAD, MATRICES), Checkpoint(), CheckpointFiles.open(tmp_path))
    context = begin("cuda")
    device = context.result().device
    params = weights.placed(what, params_graph(AT_LOAD, MATRICES), device)

    read = weights.stream(what, params, weights.Ring(context), device, layer_for(1, 4, *QUANTISED_KINDS))

    of_slice = MATRICES["a"][:128].nbytes  # its blocks are those of other computations, but it is another matrix
    assert read == param_plan.bytes_needed(what)
    assert read <= sum(each.nbytes for each in MATRICES.values()) + MATRICES["b"].nbytes + of_slice


def test_memory_for_what_is_read_is_asked_for_with_the_params(
    gpu: Gpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_file(MATRICES, tmp_path / "model.safetensors")
    graph = params_graph(AT_LOAD, MATRICES)
    what = param_plan.planned(graph, Checkpoint(), CheckpointFiles.open(tmp_path))
    device = begin("cuda").result().device
    params = param_plan.planned_bytes(what)
    gpu.limits["device"] = params + (90 << 10)

    with pytest.raises(TargetError, match=r"what is quantised while it is read, and .* are free") as refused:
        weights.placed(what, graph, device)
    assert refused.value.code == "device-memory"
    monkeypatch.setattr(quantise_plan, "ROUND_BYTES", 1)
    weights.placed(what, graph, device)


def test_a_layer_that_does_not_quantise_is_named(tmp_path: Path) -> None:
    save_file(MATRICES, tmp_path / "model.safetensors")
    what = param_plan.planned(params_graph(AT_LOAD, MATRICES), Checkpoint(), CheckpointFiles.open(tmp_path))

    assert param_plan.lacking(what, layer_for(1, 4, *QUANTISED_KINDS)) == ""
    for less in ((1, *QUANTISED_KINDS), (1, 4, *QUANTISED_KINDS[1:])):
        assert param_plan.lacking(what, layer_for(*less)) == (
            "the native layer has no kernels that quantise weights while they are read"
        )


WITH_SCALES = """
inputs { %x: float32[1, T, 8] } symbols { T: 1.. }
params {
  %w: float8_e4m3fn[4, 8] = quantise(values, read("w", [4, 8]), block=[1, 8])
  %s: float32[4, 1] = quantise(scales, read("w", [4, 8]), block=[1, 8])
}
main { %y = precast.quantised_linear(input=%x, weight=%w, scales=%s, format="fp8", block=[1, 8]) return y=%y }
"""


def test_weights_that_are_no_numbers_are_found_by_their_scales(loaded: Loaded) -> None:
    tensors = {"w": torch.ones(4, 8).bfloat16()}
    tensors["w"][2, 5] = torch.nan

    with pytest.raises(WeightsError, match=r"w: the weight at \[2, 5\] is nan"):
        loaded(parse_graph(WITH_SCALES), tensors, layer_for(1, 4, *((p, (1, 8), "bfloat16") for p in PARTS)))


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
    assert repacked_arguments("groups", (1, 8, 1 << 22), (8, 1, 1), (8, 1, 8)) is None


# --- on a GPU by hand, and on a real one -------------------------------------------------------------------------

ODD = {
    "words": torch.randint(-(1 << 31), 1 << 31, (131, 67)).int(), "floats": torch.randn(5, 131),
    "halves": torch.randn(259, 33).half(), "others": torch.randn(7, 33).half(),
    "numbers": torch.randn(37, 133).bfloat16(), "bytes": torch.randint(0, 256, (67, 261)).to(torch.uint8),
    "more bytes": torch.randint(0, 256, (3, 261)).to(torch.uint8),
    "float8": torch.randn(33, 47).to(torch.float8_e4m3fn), "cube": torch.randn(3, 35, 130).half(),
    "awq": torch.randint(-(1 << 31), 1 << 31, (280, 35)).int(),
    "awq.zeros": torch.randint(-(1 << 31), 1 << 31, (35, 35)).int(),
}  # fmt: skip
"""Of sizes that fill no tile, or some and a part."""


def odd(name: str) -> Recipe:
    return turned(name, ODD)


ODD_RECIPES: dict[str, Recipe] = {
    **{name: odd(name) for name in ("words", "floats", "numbers", "float8", "cube")},
    "some rows": Slice(odd("words"), 0, 3, 41), "some columns": Slice(odd("numbers"), 1, 5, 27),
    "outer": Transpose(read("cube", ODD), 0, 2), "joined": Concat((odd("halves"), odd("others")), 1),
    "joined bytes": Concat((odd("more bytes"), odd("bytes")), 1),
    "stack": Stack((odd("words"), odd("words")), 1),
    "values": Repack(read("awq", ODD), "values"), "zeros": Repack(read("awq.zeros", ODD), "zeros"),
    "groups": Repack(read("awq", ODD), "groups"),
    "some groups": Slice(Slice(Repack(read("awq", ODD), "groups"), 1, 8, 160), 0, 3, 29),
    "some outputs": Slice(Repack(read("awq", ODD), "values"), 0, 8, 160),
    "some inputs": Slice(Repack(read("awq", ODD), "values"), 1, 3, 29),
    "values beside values": Concat((Repack(read("awq", ODD), "values"),) * 2, 1),
    "zeros beside words": Concat(
        (Slice(odd("words"), 0, 1, 35), Repack(read("awq.zeros", ODD), "zeros")), 1
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def compiled() -> NativeLayer:
    """For the GPU at hand: what loads of all these params launch."""
    name = "sm_{}{}".format(*torch.cuda.get_device_capability())
    return native_layer(params_graph(ODD_RECIPES, ODD), target_named(name))


@pytest.fixture(params=["by hand", pytest.param("cuda", marks=pytest.mark.gpu)])
def layer(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> NativeLayer:
    """The kernels of a GPU, which the driver is of from now on."""
    if request.param == "by hand":
        request.getfixturevalue("gpu")
        return layer_for(1, 2, 4, "values", "zeros", "groups")
    monkeypatch.setattr(weights, "THREADS", 2)
    found: NativeLayer = request.getfixturevalue("compiled")
    return found


@pytest.mark.parametrize("buffer_bytes", [1 << 20, 1 << 12])
def test_kernels_make_what_the_host_makes(
    buffer_bytes: int, layer: NativeLayer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All params, of sizes that fill no tile, with parts that begin at any element."""
    for module in (param_plan, weights):
        monkeypatch.setattr(module, "BUFFER_BYTES", buffer_bytes)
    graph = params_graph(ODD_RECIPES, ODD)

    on_host, on_device = (load(tmp_path, graph, ODD, each) for each in (layer_for(), layer))

    what = param_plan.planned(graph, Checkpoint(), CheckpointFiles.open(tmp_path))
    by_kernels = Copies(what, layer, begin("cuda").result().device).targets
    assert {what.plan.targets[i].name for i in by_kernels} == ODD_RECIPES.keys()
    wanted = expected(ODD_RECIPES, ODD)
    assert {name for name in wanted if on_host[name] != wanted[name]} == set()
    assert {name for name in wanted if on_device[name] != wanted[name]} == set()


GUARD = 0x5A


@pytest.mark.parametrize("dtype", ["uint8", "bfloat16", "float32"])
@pytest.mark.parametrize(("first", "target_first"), [(0, 0), (1, 3), (5, 2)])
@pytest.mark.parametrize("shape", [(1, 1), (33, 129), (2, 3, 40, 7)], ids=str)
def test_a_copy_writes_its_elements_and_nothing_else(
    dtype: Dtype, first: int, target_first: int, shape: tuple[int, ...], layer: NativeLayer, tmp_path: Path
) -> None:
    """From and to addresses that are multiples of an element's size alone, with gaps between rows."""
    each = BY_NAME[dtype].itemsize
    source = View(first, shape, tuple(reversed(dense(shape[::-1]))))  # the first axis is the innermost
    target = View(target_first, shape, dense((*shape[:-1], shape[-1] + 2)))

    given, found = copied(Copy(dtype, 16, source, 0, target, ()), layer, tmp_path)

    wanted = np.full(len(found), GUARD, np.uint8)
    elements = given[16:].view(f"V{each}")
    elements_of(wanted.view(f"V{each}"), target)[...] = elements_of(elements, source)
    assert found == wanted.tobytes()


@pytest.mark.parametrize("first", [0, 3])
@pytest.mark.parametrize(
    ("part", "shape"),
    [
        ("values", (17, 8, 33)), ("values", (1, 8, 1)), ("zeros", (17, 33)), ("groups", (17, 8, 33)),
        ("groups", (1, 8, 1)),
    ],
)  # fmt: skip
def test_repacking_writes_its_words_and_nothing_else(
    part: Literal["values", "zeros", "groups"], shape: tuple[int, ...], first: int, layer: NativeLayer, tmp_path: Path
) -> None:
    rows, columns = math.prod(shape[:-1]), shape[-1]
    pitch = {"values": rows // 8, "zeros": rows, "groups": 8 * columns}[part] + 1
    steps = {"values": (1, pitch, 8 * pitch), "zeros": (1, pitch), "groups": (pitch, 1, 8)}[part]
    source = View(first, shape, (columns, 1) if part == "zeros" else (8 * columns, columns, 1))
    target = View(first + 2, shape, steps)

    given, found = copied(Copy("int32", 16, source, 0, target, (), part), layer, tmp_path)

    words = given[16:].view(np.int32)[first : first + rows * columns].reshape(rows, columns)
    made = quantised.repacked(torch.from_numpy(words.copy()), part).numpy()
    wanted = np.full(len(found) // 4, GUARD * 0x01010101, np.int32)
    elements_of(wanted, View(first + 2, made.shape, (pitch, 1)))[...] = made
    assert found == wanted.tobytes()


def dense(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a tensor without gaps."""
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def elements_of(memory: Any, view: View) -> Any:
    """A writable view of numpy's."""
    strides = [step * memory.itemsize for step in view.strides]
    return np.lib.stride_tricks.as_strided(memory[view.offset :], view.shape, strides)


def copied(copy: Copy, layer: NativeLayer, folder: Path) -> tuple[Any, bytes]:
    """What was staged, and the memory of the target after the copy, as many bytes as it reaches and some more."""
    device = begin("cuda").result().device
    save_file({"plain": TENSORS["plain"]}, folder / "model.safetensors")
    graph = params_graph({"plain": read("plain", TENSORS)}, TENSORS)
    what = param_plan.planned(graph, Checkpoint(), CheckpointFiles.open(folder))
    plan = Plan((Target("x", copy.dtype, copy.destination.shape),), (Job("", (), (copy,), 0, 0),), ())
    copies = Copies(what._replace(plan=plan, on_device=frozenset((0,))), layer, device)
    assert copies.targets == {0}
    staged, guards = (
        device.alloc(copy.offset + bytes_reached(view, copy.dtype) + 48, pinned=True)
        for view in (copy.source, copy.destination)
    )
    given = np.frombuffer(host_bytes(staged), np.uint8)
    given[:] = np.random.default_rng(1).integers(0, 256, len(given))
    host_bytes(guards)[:] = bytes([GUARD]) * len(host_bytes(guards))
    target = device.alloc(len(host_bytes(guards)))
    with device.use():
        device.copy(target, guards)
        copies.put(copy, staged.pointer, target.pointer, device.current)
    return given.copy(), bytes_of(device, target, target.shape[0])


def bytes_reached(view: View, dtype: Dtype) -> int:
    """Of a view, with what lies in front of it; a multiple of 16."""
    last = view.offset + sum((size - 1) * step for size, step in zip(view.shape, view.strides, strict=True))
    return -(-BY_NAME[dtype].itemsize * (last + 1) // 16) * 16
