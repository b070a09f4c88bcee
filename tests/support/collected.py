"""Collectives as one rank calls them; a module of its own, which the processes of a test import too."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed

from precast.kernels.collectives.collectives import all_gather, all_reduce, reduce_scatter
from precast.kernels.collectives.group import Group
from precast.kernels.collectives.processes import connect

SHAPES = ((1, 5, 12), (1, 0, 12), (24,), (12, 1, 3))
CASES = [(shape, dtype) for shape in SHAPES for dtype in (torch.float32, torch.bfloat16)]
Tensors = list[torch.Tensor]


def given(rank: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """What a rank gives: other numbers on each."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(rank)).to(dtype)


def collect(group: Group, shape: tuple[int, ...], dtype: torch.dtype) -> Tensors:
    """Each collective, along each dimension that has enough."""
    x, size = given(group.rank, shape, dtype), group.size
    found = [all_reduce(x, group=group)]
    found += [all_gather(x, dim=dim, group=group, size=size) for dim in range(-len(shape), len(shape))]
    whole = [dim for dim in range(-len(shape), len(shape)) if shape[dim] % size == 0]
    return [*found, *(reduce_scatter(x, dim=dim, group=group, size=size) for dim in whole)]


def one_of_several(rank: int, size: int, folder: Path) -> None:
    """A process over gloo: writes what it computed of all cases."""
    torch.set_num_threads(1)
    store = distributed.FileStore(str(folder / "store"), size)
    group = connect(store, rank, size, torch.device("cpu"), timedelta(minutes=5))
    assert not distributed.is_initialized()
    torch.save([collect(group, *case) for case in CASES], folder / f"{rank}.pt")
    all_reduce(torch.ones(1), group=group)  # nobody leaves before all have what they need
