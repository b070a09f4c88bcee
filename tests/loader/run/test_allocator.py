"""Torch's allocator of GPU memory, set to cut blocks to size."""

from __future__ import annotations

import pytest
import torch

from precast.loader.run.allocator import VARIABLES, cut_blocks_to_size

MIB = 1 << 20


def test_a_cpu_has_no_such_setting() -> None:
    assert not cut_blocks_to_size(torch.device("cpu"))


@pytest.mark.parametrize("variable", VARIABLES)
def test_what_the_user_has_set_stays(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "max_split_size_mb:512")

    assert not cut_blocks_to_size(torch.device("cuda"))


def test_a_torch_without_the_setting_keeps_its_default(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.delattr(torch._C, "_accelerator_setAllocatorSettings")

    assert not cut_blocks_to_size(torch.device("cuda"))


@pytest.mark.gpu
def test_a_tensor_leaves_the_rest_of_a_free_block(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    assert cut_blocks_to_size(torch.device("cuda"))
    several = [torch.empty(5 * MIB, dtype=torch.uint8, device="cuda") for _ in range(9)]
    del several[1::2]
    before = torch.cuda.memory_allocated()

    kept = [torch.empty(4 * MIB + 512 * i, dtype=torch.uint8, device="cuda") for i in range(8)]

    assert torch.cuda.memory_allocated() - before == sum(each.nbytes for each in kept)
