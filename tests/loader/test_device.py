"""The torch backend of the device interface: the same behaviour on a CPU and on a GPU."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from ptx import ADD

from precast.ir.errors import TargetError
from precast.loader.device import Buffer, Device, Kernel, host_bytes
from precast.loader.torch_device import ALLOCATOR_VARIABLES, cut_blocks_to_size, open_device, tensor_of


def add(grid: tuple[int, int, int], block: object, args: Any, *rest: object) -> None:
    """What the kernel does, on a CPU."""
    memory, number = args
    memory[: grid[0]] += number


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    opened = open_device(request.param)
    with opened.use():
        yield opened


def int32(device: Device, *values: int) -> Buffer:
    buffer = device.alloc(4 * len(values)).view(0, (len(values),), dtype="int32")
    tensor_of(buffer).copy_(torch.tensor(values))
    return buffer


def values(device: Device, buffer: Buffer) -> list[int]:
    device.synchronize()
    found: list[int] = tensor_of(buffer).tolist()
    return found


def kernel_of(device: Device) -> Kernel:
    return device.load(ADD, "add") if device.kind == "cuda" else add


def test_memory_is_seen_as_tensors_without_a_copy(device: Device) -> None:
    buffer = device.alloc(64)
    assert (buffer.dtype, buffer.shape, buffer.strides) == ("uint8", (64,), (1,))
    whole = tensor_of(buffer)
    assert whole.data_ptr() == buffer.pointer
    assert str(whole.device) == device.name
    assert device.name.partition(":")[0] == device.kind
    whole.copy_(torch.arange(64))
    strided = tensor_of(buffer.view(4, (3, 2), strides=(4, 1)))
    assert strided.tolist() == [[4, 5], [8, 9], [12, 13]]
    floats = tensor_of(buffer.view(8, (2, 3), strides=(1, 2), dtype="float16"))
    assert floats.dtype == torch.float16
    assert floats.data_ptr() == buffer.pointer + 8


def test_a_buffer_keeps_its_memory_alive(device: Device) -> None:
    part = device.alloc(1 << 16).view(256, (4,), dtype="int32")
    assert tensor_of(part).data_ptr() == part.pointer


def test_pinned_memory_is_the_hosts(device: Device) -> None:
    buffer = device.alloc(16, pinned=True)
    pinned = tensor_of(buffer)
    assert pinned.device.type == "cpu"
    assert pinned.is_pinned() == (device.kind == "cuda")
    view = host_bytes(buffer)
    view[2:4] = b"ab"
    assert pinned[2:4].tolist() == [97, 98]
    del buffer, pinned
    torch.empty(16, dtype=torch.uint8).fill_(0)
    assert bytes(view[2:4]) == b"ab"
    assert len(host_bytes(device.alloc(0, pinned=True))) == 0


def test_copies_and_launches(device: Device) -> None:
    source, target = int32(device, 1, 2, 3), int32(device, 0, 0, 0)
    device.copy(target, source)
    device.launch(kernel_of(device), (2, 1, 1), (1, 1, 1), [target, 10])
    assert values(device, target) == [11, 12, 3]


def test_what_is_captured_runs_when_it_is_replayed(device: Device) -> None:
    source, target, kernel = int32(device, 1, 2, 3), int32(device, 0, 0, 0), kernel_of(device)
    with device.capture() as graph:
        device.copy(target, source)
        device.launch(kernel, (3, 1, 1), (1, 1, 1), [target, 10])
    assert values(device, target) == [0, 0, 0]
    for first in (5, 6):
        tensor_of(source)[0] = first
        graph.replay()
        assert values(device, target) == [first + 10, 12, 13]
    device.copy(source, target)
    assert values(device, source) == [16, 12, 13]


def test_work_of_a_stream_is_waited_for(device: Device) -> None:
    first, second, third = int32(device, 1), int32(device, 0), int32(device, 0)
    stream, made, done = device.stream(), device.event(), device.event()
    made.record()
    made.wait(stream)
    device.copy(second, first, stream)
    with device.use(stream):
        device.copy(third, second)
        done.record()
    done.synchronize()
    assert tensor_of(third).tolist() == [1]


def test_captures_of_a_thread_share_a_stream(device: Device) -> None:
    assert device.capture_stream() is device.capture_stream()


def test_the_time_between_two_events(device: Device) -> None:
    first, second, last = (device.event(timed=True) for _ in range(3))
    began = time.perf_counter()
    first.record()
    tensor = torch.zeros(1 << 20, device=device.name)
    second.record()
    for _ in range(9):
        tensor += 1
    last.record()
    last.synchronize()
    spent = time.perf_counter() - began
    parts = device.seconds_between(first, second), device.seconds_between(second, last)
    assert all(0 < part < spent for part in parts)
    assert sum(parts) == pytest.approx(device.seconds_between(first, last), abs=1e-5)


def test_memory_that_is_free(device: Device) -> None:
    assert 2**20 < device.free_bytes() < 2**50


def test_a_cpu_loads_no_kernels() -> None:
    with pytest.raises(TargetError, match="kernel add is for a GPU") as error:
        open_device("cpu").load(ADD, "add")
    assert error.value.code == "device-invalid"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there() -> None:
    for device in ("cuda", "cuda:1", torch.device("cuda", 0)):
        with pytest.raises(TargetError, match=r"device is cuda.* sees 0 CUDA devices") as error:
            open_device(device)
        assert (error.value.code, error.value.exit_code) == ("device-missing", 4)
    assert open_device(None).name == "cpu"


def test_a_device_that_is_not_supported() -> None:
    with pytest.raises(TargetError, match="device is meta") as error:
        open_device("meta")
    assert error.value.code == "device-invalid"


# --- torch's allocator of GPU memory, set to cut blocks to size -----------------------------------------------------

MIB = 1 << 20


def test_a_cpu_has_no_such_setting() -> None:
    assert not cut_blocks_to_size(torch.device("cpu"))


@pytest.mark.parametrize("variable", ALLOCATOR_VARIABLES)
def test_what_the_user_has_set_stays(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "max_split_size_mb:512")

    assert not cut_blocks_to_size(torch.device("cuda"))


def test_a_torch_without_the_setting_keeps_its_default(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ALLOCATOR_VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.delattr(torch._C, "_accelerator_setAllocatorSettings")

    assert not cut_blocks_to_size(torch.device("cuda"))


@pytest.mark.gpu
def test_a_tensor_leaves_the_rest_of_a_free_block(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ALLOCATOR_VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    assert cut_blocks_to_size(torch.device("cuda"))
    several = [torch.empty(5 * MIB, dtype=torch.uint8, device="cuda") for _ in range(9)]
    del several[1::2]
    before = torch.cuda.memory_allocated()

    kept = [torch.empty(4 * MIB + 512 * i, dtype=torch.uint8, device="cuda") for i in range(8)]

    assert torch.cuda.memory_allocated() - before == sum(each.nbytes for each in kept)
