"""Attention of prompts on Hopper against its definition: in the interpreter, over what stands for Gluon, and on GPUs.

`test_triton.py` runs this file in a process of its own.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import gluon_on_cpu
import pytest
import torch
import triton.language as tl
from msgspec import structs
from op_samples.attention import paged_sample
from op_samples.draw import Draw

from precast.kernels.attention import launches
from precast.kernels.attention.launches import Tile
from precast.kernels.attention.paged import PAGED_ATTENTION, paged_attention
from precast.kernels.choices import records_of
from precast.kernels.launch import as_function

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if IS_INTERPRETED else "cuda")
RECORDS = {each.name: each for each in records_of("precast.paged_attention", 1)}
if IS_INTERPRETED:
    hopper: Any = gluon_on_cpu.module("precast.kernels.attention.hopper")
    SEQUENCES = [(5, 5), (1, 33), (0, 4), (19, 91), (1, 1), (40, 40)]
    TILES = [(128, Tile(32, 16, 4, 3))]
else:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs compute capability 9.0", allow_module_level=True)
    SEQUENCES = [(5, 5), (1, 333), (0, 4), (190, 910), (1, 1), (400, 400), (129, 257)]
    TILES = [
        (64, Tile(128, 64, 4, 4)), (64, Tile(128, 128, 4, 3)), (128, Tile(128, 64, 4, 5)), (128, Tile(128, 128, 4, 3)),
        (256, Tile(128, 64, 4, 2)),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"window": 20},
        {"window": 70, "cut": True},
        {"chunk": 24, "soft_cap": 5.0},
        {"sinks": 6, "slopes": 6},
    ],
    ids=str,
)
@pytest.mark.parametrize(("size", "tile"), TILES)
def test_prompts(
    more: dict[str, Any], size: int, tile: Tile, same: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = Draw(torch.float16, DEVICE)
    given = {
        name: draw.uniform(x, dtype=torch.float32) if name in ("sinks", "slopes") else x for name, x in more.items()
    }
    sample = paged_sample(draw, SEQUENCES, heads=6, kv_heads=2, size=size, page_size=8, padding=3, **given)
    if IS_INTERPRETED:
        monkeypatch.setattr(launches, "PROGRAMS", 6)
        monkeypatch.setattr(hopper, "SEQUENCES", tl.constexpr(4))
    record = structs.replace(
        RECORDS["triton.paged_attention.hopper"],
        runs=lambda use: (launches.hopper_launch(use, tile), *launches.hopper(use)[1:]),
    )

    found = as_function(record)(**sample)

    same(PAGED_ATTENTION, found, paged_attention(**sample))
