"""What the CUDA driver reads of a launch: from the memory that it is given, laid out as in `cuda.h`."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import pytest
from noted_launches import Driver

from precast.ir.errors import TargetError
from precast.ir.native import NativeKernel, NativeLayer
from precast.kernels.native import Native
from precast.loader.driver import library
from precast.loader.driver.device import LoadedKernel
from precast.loader.driver.kernels import Kernels
from precast.loader.driver.launches import Prepared


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver()
    monkeypatch.setattr(library, "function", lambda name: {"cuLaunchKernelEx": made.launch}[name])
    return made


def test_a_launch_is_read_as_it_was_prepared(driver: Driver) -> None:
    driver.num_args = 5
    prepared = Prepared(77, (3, 2, 1), (128, 1, 1), 4096, [1 << 40, -1, 2.5, None, 7], pdl=True)

    prepared.launch(99)
    prepared.launch(100)

    first, second = driver.launches
    assert first[:6] == (77, (3, 2, 1), (128, 1, 1), 4096, 99, [(6, 1)])
    assert second == first._replace(stream=100)
    pointer, number, real, null, small = first.args
    (bits_of_real,) = struct.unpack("I", struct.pack("f", 2.5))
    assert (pointer, number, null) == (1 << 40, 2**64 - 1, 0)
    assert (real % 2**32, small % 2**32) == (bits_of_real, 7)  # of 4 bytes


def test_a_launch_that_waits_for_the_one_in_front_has_no_attributes(driver: Driver) -> None:
    Prepared(1, (1, 1, 1), (32, 1, 1), 0, []).launch(5)

    assert driver.launches[0].attributes == []


def test_a_refusal_is_an_error_with_its_status(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "name_of", lambda status: f"status {status}")
    driver.status = 701

    with pytest.raises(library.DriverError, match="refuses cuLaunchKernelEx: status 701") as error:
        Prepared(1, (1, 1, 1), (32, 1, 1), 0, []).launch(5)

    assert error.value.status == 701


def no_library() -> object:
    raise OSError("libcuda.so.1: cannot open shared object file: No such file or directory")


@pytest.mark.parametrize(
    ("opened", "message", "fix"),
    [
        (
            no_library,
            "the CUDA driver can't be loaded: libcuda.so.1: cannot open shared object file",
            "install the driver",
        ),
        (object, "the CUDA driver has no cuInit", "install a driver of CUDA 12 or newer"),
    ],
    ids=["missing", "too old"],
)
def test_a_driver_that_is_missing_or_too_old_is_named(
    opened: Callable[[], object], message: str, fix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "_library", opened)

    with pytest.raises(TargetError, match=re.escape(message)) as error:
        library.function.__wrapped__("cuInit")

    assert error.value.code == "device-missing"
    assert fix in str(error.value)


# --- kernels of a layer --------------------------------------------------------------------------------------------


class Loading:
    """A device that says what is loaded; `at` is called before each."""

    def __init__(self, at: Callable[[int], None] = lambda count: None) -> None:
        self.images: list[bytes] = []
        self._at = at

    def use(self) -> AbstractContextManager[None]:
        return nullcontext()

    def load(self, image: bytes, name: str) -> LoadedKernel:
        self._at(len(self.images))
        self.images.append(image)
        return LoadedKernel(None, len(self.images))  # type: ignore[arg-type]


def layer_of(count: int) -> NativeLayer:
    """So many kernels of Triton's, of which the last two are in one image under one name."""
    names = [f"{min(index, count - 2)}" for index in range(count)]
    kernels = [
        NativeKernel("precast.kernels.m:f", str(index), name, "f", 32, 0, ()) for index, name in enumerate(names)
    ]
    images = {name: name.encode() for name in names}
    return NativeLayer("sm_90", 12000, compilers={}, sources={}, kernels=tuple(kernels), images=images)


def test_all_kernels_of_a_layer_are_loaded_once() -> None:
    layer, device = layer_of(4), Loading()

    Kernels(Native(layer), device).load_all(layer)  # type: ignore[arg-type]

    assert device.images == [b"0", b"1", b"2"]


def test_loading_ends_after_the_kernel_that_it_is_at() -> None:
    layer = layer_of(9)
    device = Loading(lambda count: kernels.stop() if count == 3 else None)
    kernels = Kernels(Native(layer), device)  # type: ignore[arg-type]

    kernels.load_all(layer)

    assert device.images == [b"0", b"1", b"2", b"3"]
