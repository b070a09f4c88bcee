"""What is compiled for a target, without a GPU: the same bytes every time, in a bundle and as it is launched."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from precast.builder.native.layer import check_worlds, compilers, native_layer, target_named, worlds_named
from precast.builder.native.variants import World
from precast.ir import encoding, native
from precast.ir.errors import BuildError
from precast.ir.graph.schema import Const, Graph, Node, Param, Read, Ref, Symbol, TensorType, Value
from precast.ir.native import NO_ARGUMENT, NativeLayer
from precast.kernels.native import Native
from precast.kernels.sources import file_digest
from precast.kernels.step_launches import step_launches
from precast.kernels.use import Target

WIDTH = 64


def graph(dtype: str = "bfloat16") -> Graph:
    """A norm and a product of few rows: one kernel of Triton's, and two ways of one in CUDA C++."""
    x, h, y = (Value(name, TensorType(dtype, (1, "T", WIDTH))) for name in "xhy")  # type: ignore[arg-type]
    params = {"norm": (WIDTH,), "weight": (WIDTH, WIDTH)}
    norm = {"x": Ref("x"), "weight": Ref("norm"), "eps": Const(1e-6), "cast_before_scale": Const(True)}
    return Graph(
        symbols=(Symbol("T", 1), Symbol("B", 1), Symbol("R", 1)),
        inputs=(x,),
        params=tuple(Param(name, TensorType(dtype, shape), Read(name, shape)) for name, shape in params.items()),  # type: ignore[arg-type]
        constants=(),
        blocks=(),
        main=(
            Node("precast.rms_norm", norm, (h,)),
            Node("aten.linear.default", {"input": Ref("h"), "weight": Ref("weight")}, (y,)),
        ),
        outputs={"y": "y"},
    )


@pytest.fixture(scope="module")
def layer() -> NativeLayer:
    return native_layer(graph(), target_named("sm_90"))


def test_a_layer_has_a_kernel_for_each_launch(layer: NativeLayer) -> None:
    held = Native(layer)
    launches = [
        launch
        for tokens in (1, 2, 3, 8, 16, 77)
        for node in step_launches(graph(), Target.parse("sm_90"), {"T": tokens, "B": 1, "R": 1})
        for launch in node.launches
        if launch.key
    ]

    found = [held.find(launch.key, launch.values()) for launch in launches]
    assert {kernel.function for kernel in found if kernel} == {"rms_norm_kernel", "stream_linear"}
    assert None not in found
    assert len(found) == 6 + 4
    native.check(layer)


def test_a_layer_says_what_it_is_made_of(layer: NativeLayer) -> None:
    assert layer.target == "sm_90"
    assert layer.compilers.keys() == {"nvrtc", "ptxas", "triton"}
    assert layer.driver == 1000 * int(layer.compilers["nvrtc"].partition(".")[0])
    assert {"precast.kernels.rms_norm.triton", "precast.kernels.linear/stream.cu"} < layer.sources.keys()
    assert all(file_digest(name) == digest for name, digest in layer.sources.items())


def test_kernels_of_triton_s_end_with_pointers_that_nobody_gives(layer: NativeLayer) -> None:
    (norm,) = [kernel for kernel in layer.kernels if kernel.function == "rms_norm_kernel"]
    (stream, *_) = [kernel for kernel in layer.kernels if kernel.function == "stream_linear"]

    assert [param.argument for param in norm.params][-2:] == [NO_ARGUMENT, NO_ARGUMENT]
    assert set(norm.ones) == {11, 16}  # elements of a row lie side by side
    assert not {param.argument for param in norm.params} & set(norm.ones)
    assert {param.type for param in stream.params} == {"pointer", "int64"}
    assert (stream.aligned, stream.ones, stream.threads) == ((), (), 320)


def test_the_bytes_are_the_same_in_another_process_and_folder(layer: NativeLayer, tmp_path: Path) -> None:
    """Another temporary directory, another order of hashes, no cache."""
    written = tmp_path / "layer"
    script = (
        "import sys; sys.path[:0] = sys.argv[2:]; from pathlib import Path; from test_layer import *; "
        "found = encoding.encode_native(native_layer(graph(), target_named('sm_90'))); "
        "Path(sys.argv[1]).write_bytes(found)"
    )
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    environment = os.environ | {"TMPDIR": str(folder), "PYTHONHASHSEED": "7", "TRITON_CACHE_DIR": str(folder)}
    subprocess.run(
        [sys.executable, "-c", script, str(written), str(Path(__file__).parent)], check=True, cwd=tmp_path,
        env=environment,
    )  # fmt: skip

    assert written.read_bytes() == encoding.encode_native(layer)


def test_each_target_has_its_own_code(layer: NativeLayer) -> None:
    other = native_layer(graph("float32"), target_named("sm_80"))

    assert (other.target, other.driver) == ("sm_80", 12000)
    assert other.compilers.keys() == {"ptxas", "triton"}  # there is no CUDA C++ for it
    assert not other.images.keys() & layer.images.keys()
    assert not any(kernel.pdl for kernel in other.kernels)


def test_worlds_are_named_by_their_ranks() -> None:
    assert worlds_named([]) == (World(1, 1),)
    assert worlds_named(["tp=4,ep=2", "tp=2", "tp=1", "tp=2"]) == (World(1, 1), World(2, 1), World(4, 2))


@pytest.mark.parametrize("text", ["2", "tp=0", "tp=2,ep=0", "tp=3,ep=2", "ep=2", "tp=2, ep=2", "tp=99999", 2])
def test_a_world_that_there_is_not_is_refused(text: Any) -> None:
    with pytest.raises(BuildError, match=f"world is .*{text}.*, expected ranks such as tp=2") as error:
        worlds_named([text])
    assert error.value.code == "option-invalid"


def test_a_world_that_the_model_is_not_split_over_is_refused() -> None:
    with pytest.raises(BuildError, match=r"tp=2: tp is 2, and the bundle can be split over 1 ranks") as error:
        check_worlds(graph(), [World(1, 1), World(2, 1)])
    assert error.value.code == "option-invalid"


def test_a_layer_says_for_which_worlds_it_is(layer: NativeLayer) -> None:
    again = native_layer(graph(), target_named("sm_90"), worlds=[World(1, 1)])
    more = native_layer(graph(), target_named("sm_90"), worlds=worlds_named(["tp=1", "tp=2"]))

    assert encoding.encode_native(again) == encoding.encode_native(layer)
    assert (layer.worlds, more.worlds) == ((), ((1, 1), (2, 1)))
    assert more.kernels[: len(layer.kernels)] == layer.kernels  # a graph that no ranks share launches no others
    native.check(more)


def test_a_target_that_there_is_not_is_refused() -> None:
    with pytest.raises(BuildError, match=r"sm_75.*sm_80, sm_86") as error:
        target_named("sm_75")
    assert error.value.code == "option-invalid"


def test_where_no_compiler_is_nothing_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("precast.builder.native.layer.is_installed", lambda: False)
    with pytest.raises(BuildError, match="nvidia-cuda-nvrtc is not installed") as error:
        compilers(Target.parse("sm_90"))
    assert error.value.code == "dependency-missing"


def test_a_launch_that_a_layer_has_no_kernel_for_finds_none(layer: NativeLayer) -> None:
    (norm,) = [kernel for kernel in layer.kernels if kernel.function == "rms_norm_kernel"]
    fits = [0 if place in norm.aligned else int(place in norm.ones) for place in range(17)]
    held = Native(layer)

    assert held.find(norm.key, fits) == norm
    assert held.image(norm) == layer.images[norm.image]
    for place, value in ((norm.aligned[0], 8), (norm.ones[0], 2), (6, 2**31)):
        assert held.find(norm.key, [*fits[:place], value, *fits[place + 1 :]]) is None
    assert held.find("0" * 64, fits) is None
    assert Native().find(norm.key, fits) is None


def test_the_first_kernel_that_takes_a_launch_is_found(layer: NativeLayer) -> None:
    (norm,) = [kernel for kernel in layer.kernels if kernel.function == "rms_norm_kernel"]
    general = msgspec.structs.replace(norm, aligned=(), function="general")
    held = Native(msgspec.structs.replace(layer, kernels=(norm, general)))
    fits = [0 if place in norm.aligned else int(place in norm.ones) for place in range(17)]

    assert held.find(norm.key, fits) == norm
    assert held.find(norm.key, [8, *fits[1:]]) == general
