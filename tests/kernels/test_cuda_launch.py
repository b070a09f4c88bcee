"""What the driver gets of a launch, read from its own structures: a function in the place of `cuLaunchKernelEx`."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from noted_launches import Driver, Launched

pytest.importorskip("cuda.bindings")

from cuda.bindings import driver

from precast.kernels import cuda_launch, gpu_launch
from precast.kernels.cuda_launch import At, Kernel
from precast.kernels.native import Native
from precast.kernels.records import Launch, Pointer, Stride

STREAM = 0x7F00_1000


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver()
    call: Any = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 4)(made.launch)
    monkeypatch.setattr(cuda_launch, "launch_function", lambda: call)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: STREAM + device, raising=False)
    return made


def test_a_launch_has_its_constants_and_what_it_is_given(noted: Driver) -> None:
    """The last one that it is given is no argument of the kernel's: Triton leaves out those that became constants."""
    args = [At(1), None, 2.5, At(0), 7, -1, At(1)]
    kernel = Kernel(driver.CUfunction(99), args, num_given=3, num_threads=96, shared_bytes=300)
    noted.num_args = len(args)
    half = struct.unpack("<I", struct.pack("<f", 2.5))[0]

    kernel.launch((5, 1, 2), [2**40, -3, 1], STREAM)
    kernel.launch((1, 1, 1), [8, 9, 1], 0)

    minus = 2**64
    first, second = noted.launches
    assert first == Launched(
        99, (5, 1, 2), (96, 1, 1), 300, STREAM, [], [minus - 3, 0, half, 2**40, 7, minus - 1, minus - 3]
    )
    assert second == first._replace(grid=(1, 1, 1), stream=0, args=[9, 0, half, 8, 7, minus - 1, 9])


def test_a_kernel_may_begin_before_the_one_in_front_has_ended(noted: Driver) -> None:
    Kernel(driver.CUfunction(99), [], num_given=0, num_threads=1, pdl=True).launch((1, 1, 1), [])

    serialization = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    assert noted.launches[0].attributes == [(int(serialization), 1)]


def test_a_refusal_says_the_drivers_name_for_it(noted: Driver) -> None:
    noted.status = 700
    with pytest.raises(RuntimeError, match="the CUDA driver refuses: CUDA_ERROR_ILLEGAL_ADDRESS"):
        Kernel(driver.CUfunction(99), [], num_given=0, num_threads=1).launch((1, 1, 1), [])


def test_arguments_are_read_from_tensors_and_sizes(noted: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_launch, "function_of", lambda named, constants, device: driver.CUfunction(device))
    args = (Pointer("x"), Stride("x", 1), None, "T", Pointer("workspace", "float32", "T"), 0.0, 3, Pointer("x"), "B")
    launch = Launch("f.cu:k", ("B", 4), args, block=32)
    run = gpu_launch.run_of(launch, {"B": 0, "T": 1}, lambda tensors, sizes: [], 2, nowhere())
    x, workspace = torch.zeros(3, 4).t(), torch.zeros(99, dtype=torch.uint8)
    noted.num_args = len(args)

    run({"x": x, "workspace": workspace}, (6, 5))
    run({"x": x, "workspace": workspace}, (0, 5))

    (found,) = noted.launches
    assert (found.function, found.grid, found.stream) == (2, (6, 4, 1), STREAM + 2)
    assert found.args == [x.data_ptr(), 4, 0, 5, workspace.data_ptr() + 5, 0, 3, x.data_ptr(), 6]


def nowhere() -> gpu_launch.Lookup:
    """Where no kernel is found, so that each is compiled, and counted."""
    return gpu_launch.Lookup(Native(), "a launch")


class Compiled:
    """In the place of Triton's compiler: notes the arguments that it compiles for."""

    def __init__(self) -> None:
        self.seen: list[Sequence[Any]] = []

    def __call__(self, launch: Launch, given: gpu_launch._Given, args: Sequence[Any]) -> Kernel:
        self.seen.append(args)
        return Kernel(driver.CUfunction(len(self.seen)), given.args, num_given=given.num_given, num_threads=128)


def test_tritons_kernels_are_told_apart_by_kinds_of_arguments(noted: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """1 is a constant; multiples of 16 and numbers of 64 bits have kernels of their own. Each is compiled once."""
    compiled = Compiled()
    monkeypatch.setattr(gpu_launch, "_compiled", compiled)
    launch = Launch("m:k", ("T",), (Pointer("x"), "T"))

    def read_args(tensors: Mapping[str, torch.Tensor], sizes: Sequence[int]) -> list[Any]:
        return [tensors["x"].data_ptr() % 16, sizes[0]]

    lookup = nowhere()
    run = gpu_launch.run_of(launch, {"T": 0}, read_args, 0, lookup)
    aligned = torch.zeros(64, dtype=torch.uint8)
    assert aligned.data_ptr() % 16 == 0
    noted.num_args = 2
    cases = [
        (0, 5),
        (0, 7),
        (0, 1),
        (0, 32),
        (0, 2**31 + 1),
        (0, 2**31),
        (3, 5),
        (3, 1),
        (8, 5),
        (0, 5),
        (3, 7),
        (0, 64),
    ]
    for start, size in cases:
        run({"x": aligned[start:]}, (size,))

    assert [each.function for each in noted.launches] == [1, 1, 2, 3, 4, 5, 6, 7, 6, 1, 6, 3]
    assert lookup.native.compilations == 7
    assert [tuple(each) for each in compiled.seen] == [
        (0, 5), (0, 1), (0, 32), (0, 2**31 + 1), (0, 2**31), (3, 5), (3, 1),
    ]  # fmt: skip
    assert [tuple(each.args) for each in noted.launches] == [(aligned.data_ptr() + at, size) for at, size in cases]


def test_what_is_remembered_of_arguments_has_a_bound(noted: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = Compiled()
    monkeypatch.setattr(gpu_launch, "_compiled", compiled)
    monkeypatch.setattr(gpu_launch, "_MANY", 3)
    launch = Launch("m:k", (1,), (Pointer("x"), "T"))
    wanted = gpu_launch._Kernels(launch, gpu_launch._Given(launch, {"T": 0}), 0, nowhere())
    kernels = gpu_launch._Triton(wanted, lambda tensors, sizes: [])
    for size in range(3, 15):
        kernels.kernel_for([16], [size], {}, (size,))

    assert len(kernels._by_values) <= 3
    assert len(compiled.seen) == 1
