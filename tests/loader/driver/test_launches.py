"""What the CUDA driver reads of a launch: from the memory that it is given, laid out as in `cuda.h`."""

from __future__ import annotations

import ctypes
import struct
from typing import NamedTuple

import pytest

from precast.loader.driver import library
from precast.loader.driver.launches import Prepared


class Read(NamedTuple):
    """What one launch said."""

    function: int
    grid: tuple[int, ...]
    block: tuple[int, ...]
    shared_bytes: int
    stream: int
    attributes: list[tuple[int, int]]
    args: list[bytes]


class Driver:
    """Reads launches of kernels with `num_args` arguments; `status` is what it answers."""

    def __init__(self) -> None:
        self.num_args, self.status = 0, 0
        self.launches: list[Read] = []

    def launch(self, config: int, function: int, args: int, extra: object) -> int:
        """As `cuLaunchKernelEx`."""
        *sizes, stream, attributes, count = struct.unpack("7IxxxxQQI", ctypes.string_at(config, 52))
        # An attribute has 72 bytes: what it is, and behind 8 bytes its value.
        found = [struct.unpack("IxxxxI", ctypes.string_at(attributes + 72 * i, 12)) for i in range(count)]
        places = (ctypes.c_uint64 * self.num_args).from_address(args)
        values = [ctypes.string_at(place, 8) for place in places]
        self.launches.append(Read(function, tuple(sizes[:3]), tuple(sizes[3:6]), sizes[6], stream, found, values))
        return self.status


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
    assert struct.unpack("Q", pointer) == (1 << 40,)
    assert struct.unpack("q", number) == (-1,)
    assert struct.unpack("f", real[:4]) == (2.5,)
    assert null == bytes(8)
    assert struct.unpack("i", small[:4]) == (7,)


def test_a_launch_that_waits_for_the_one_in_front_has_no_attributes(driver: Driver) -> None:
    Prepared(1, (1, 1, 1), (32, 1, 1), 0, []).launch(5)

    assert driver.launches[0].attributes == []


def test_a_refusal_is_an_error_with_its_status(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "name_of", lambda status: f"status {status}")
    driver.status = 701

    with pytest.raises(library.DriverError, match="refuses cuLaunchKernelEx: status 701") as error:
        Prepared(1, (1, 1, 1), (32, 1, 1), 0, []).launch(5)

    assert error.value.status == 701
