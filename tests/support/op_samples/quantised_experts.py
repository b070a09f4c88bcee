"""Samples of experts whose weights are in few bits: each format, with each of its parts."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial

import torch

from op_samples.draw import Draw, Sample
from op_samples.quantised import fp8, int8, mxfp4, nvfp4, packed

Make = Callable[[Draw, int, int], Sample]
"""Makes the parts of a matrix, of so many outputs and inputs."""
FORMATS: dict[str, Make] = {
    "fp8": fp8, "mxfp4": mxfp4, "nvfp4": nvfp4, "nvfp4_divided": partial(nvfp4, divided=True),
    "packed4": partial(packed, size=16), "packed8": partial(packed, bits=8, size=16), "int8": int8,
}  # fmt: skip
CLAMPED = {"alpha": 1.702, "limit": 0.7, "offset": 1.0}
"""What GPT-OSS has between the products, with a limit that is met."""


def experts(
    draw: Draw, make: Make, tokens: int, top_k: int, num: int, width: int, inner: int, *, gated: bool = True,
    bias: bool = False,
) -> Sample:  # fmt: skip
    """The arguments of one call, whose weights `make` makes."""
    rows = 2 * inner if gated else inner
    up, down = [[make(draw, *shape) for _ in range(num)] for shape in ((rows, width), (width, inner))]
    sample = {
        "x": draw.normal(tokens, width, scale=0.1), "expert_ids": draw.integers(0, num, tokens, top_k),
        "expert_weights": draw.uniform(tokens, top_k),
    }  # fmt: skip
    for part in ("weight", "scales", "zeros", "global_scale"):
        for name, each in (("up", up), ("down", down)):
            given = torch.stack([one[part] for one in each]) if part in each[0] else None
            sample[name if part == "weight" else f"{name}_{part}"] = given
    return sample | {
        "up_bias": draw.normal(num, rows) if bias else None, "down_bias": draw.normal(num, width) if bias else None,
        "format": up[0]["format"], "up_block": up[0].get("block"), "down_block": down[0].get("block"),
        "zero_offset": up[0].get("zero_offset", 0), "activation": "silu", "gated": gated,
    }  # fmt: skip


def quantised_experts(draw: Draw) -> Iterator[Sample]:
    for make in FORMATS.values():
        yield experts(draw, make, 11, 3, 5, 96, 32)
    yield {**experts(draw, mxfp4, 7, 2, 4, 64, 96, bias=True), **CLAMPED}
    small = partial(packed, size=8)
    yield {**experts(draw, small, 5, 2, 3, 32, 40, gated=False, bias=True), "activation": "relu2"}
    yield experts(draw, partial(small, zeros=True), 6, 2, 3, 24, 16)
    yield {**experts(draw, partial(packed, bits=8, zeros=True), 6, 2, 3, 20, 12, gated=False), "activation": "gelu"}
    yield experts(draw, partial(int8, zeros=True), 6, 2, 3, 33, 17)
    yield experts(draw, partial(int8, block=(5, 7), zeros=True), 6, 2, 3, 33, 17)
    yield experts(draw, partial(fp8, block=(80, 80)), 4, 2, 3, 40, 17)
    yield experts(draw, partial(nvfp4, rows=True), 4, 2, 3, 48, 16)
    sample = experts(draw, mxfp4, 20, 4, 5, 32, 32)
    yield {**sample, "expert_weights": draw.uniform(20, 4, dtype=torch.float32)}
    yield {**sample, "expert_ids": draw.integers(-1, 7, 20, 4)}  # some are no expert's
    yield {**sample, "x": draw.normal(40, 32, scale=0.1)[::2], "expert_ids": draw.integers(0, 5, 20, 8)[:, ::2]}
    for tokens in (1, 0):
        yield experts(draw, mxfp4, tokens, 1, 3, 32, 32)


def rounded_experts(draw: Draw) -> Iterator[Sample]:
    """Whose rows are rounded, of weights that are multiplied as they are stored, and of others. Rows have several
    groups of 128, a group and a part, and parts alone; one is of zeros, and some lie apart."""
    blocks, rows = partial(fp8, block=(128, 128)), partial(fp8, block=(1, 512))
    others = [partial(fp8, block=each) for each in ((32, 64), (8, 32), (512, 512))]
    roundings = "fp8_group", "fp8_group_e8m0", "fp8_token"
    for make, rounding in (*itertools.product((blocks, rows), roundings), *zip(others, roundings, strict=True)):
        yield experts(draw, make, 5, 2, 3, 288, 160) | {"rounding": rounding}
    int8_rows = partial(int8, block=(1, 512))
    for make in (int8_rows, partial(int8, block=(8, 32), zeros=True), partial(packed, size=32)):
        yield experts(draw, make, 5, 2, 3, 96, 160, bias=True) | {"rounding": "int8_token"}
    yield experts(draw, mxfp4, 9, 2, 3, 160, 32) | {"rounding": "fp8_group"}
    yield {**experts(draw, rows, 7, 3, 4, 130, 48, bias=True), **CLAMPED, "rounding": "fp8_group"}
    sample = experts(draw, int8_rows, 6, 2, 3, 48, 32, gated=False) | {"rounding": "int8_token", "activation": "relu2"}
    sample["x"][2] = 0
    yield sample
    sample = experts(draw, rows, 8, 2, 3, 160, 32) | {"rounding": "fp8_token"}
    yield {**sample, "x": draw.normal(16, 160, scale=0.1)[::2], "expert_ids": draw.integers(-1, 5, 8, 2)}
    for tokens in (1, 0):
        yield experts(draw, blocks, tokens, 1, 3, 32, 32) | {"rounding": "fp8_group"}


def all_experts(draw: Draw) -> Iterator[Sample]:
    yield from quantised_experts(draw)
    yield from rounded_experts(draw)


SAMPLES = {("precast.quantised_experts", 1): all_experts}
