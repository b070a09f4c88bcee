"""Layers of experts in few bits for `bench_gpu_quantised_experts.py`: shapes of models, weights, ways to cut them."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from precast.ir.graph.schema import Const, Items, Node, Ref, TensorType, Value
from precast.ir.memory.liveness import Operand
from precast.kernels.dequantise.dequantise import Quantised, dequantise
from precast.kernels.dtypes import BY_NAME
from precast.kernels.experts.launches import Tiles
from precast.kernels.quantised_experts import launches, streamed, tiles
from precast.kernels.records import Launch
from precast.kernels.use import Target, Use
from support.expert_layers import SHAPES, Shape, bound_of
from support.launch_compiler import compile_launch

BLOCK = 128
"""Rows and columns that share a scale of float8."""
FEW = 8
"""Up to so many tokens each pair may read its expert."""


class Case(NamedTuple):
    """A layer, and the format that its weights are published in."""

    shape: Shape
    format: str

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert's weights and scales."""
        values = 3 * self.shape.width * self.shape.inner
        return values // 2 + values // 32 if self.format == "mxfp4" else values + 4 * values // BLOCK**2


CASES = {
    "gpt-oss-20b in mxfp4": Case(SHAPES["gpt-oss-20b"], "mxfp4"),
    "qwen3-30b-a3b in fp8 blocks": Case(SHAPES["qwen3-30b-a3b"], "fp8"),
}  # fmt: skip

SPLITS = (1, 2, 3)
FEW_UP = (
    Tiles(8, 32, 128, 4, 4, True), Tiles(8, 32, 128, 2, 4, True), Tiles(8, 16, 128, 2, 5, True),
    Tiles(8, 32, 256, 4, 3, True), Tiles(8, 64, 128, 4, 3, True), Tiles(8, 32, 64, 4, 6, True),
)  # fmt: skip
FEW_DOWN = (
    Tiles(8, 32, 128, 2, 4, True), Tiles(8, 64, 128, 4, 4, True), Tiles(8, 16, 128, 1, 5, True),
    Tiles(8, 32, 256, 2, 3, True), Tiles(8, 64, 256, 4, 3, True), Tiles(8, 32, 128, 2, 6, True),
)  # fmt: skip
NARROW = (
    Tiles(16, 32, 128, 2, 4, True, 1), Tiles(16, 32, 128, 4, 4, True, 1), Tiles(32, 32, 128, 2, 4, True, 2),
    Tiles(32, 32, 64, 2, 4, True, 1), Tiles(64, 32, 64, 2, 4, True, 2),
)  # fmt: skip
NARROW_DOWN = (
    Tiles(16, 64, 128, 2, 4, True, 1), Tiles(16, 32, 128, 2, 4, True, 1), Tiles(32, 64, 128, 2, 4, True, 2),
    Tiles(32, 64, 64, 2, 4, True, 1), Tiles(64, 64, 64, 2, 4, True, 2),
)  # fmt: skip
WIDE = (
    Tiles(64, 32, 64, 2, 4, True, 2), Tiles(64, 64, 64, 4, 3, True, 2), Tiles(128, 64, 64, 8, 3, True, 3),
    Tiles(128, 64, 64, 4, 3, True, 3), Tiles(128, 64, 128, 8, 2, True, 3),
)  # fmt: skip
WIDE_DOWN = (
    Tiles(64, 64, 64, 2, 4, True, 2), Tiles(64, 128, 64, 4, 3, True, 2), Tiles(128, 128, 64, 8, 3, True, 3),
    Tiles(128, 128, 64, 4, 3, True, 3), Tiles(128, 128, 128, 8, 2, True, 3),
)  # fmt: skip


def tiles_for(tokens: int) -> tuple[tuple[Tiles, ...], tuple[Tiles, ...]]:
    """What is tried for the first and for the second product."""
    return (WIDE, WIDE_DOWN) if tokens > 64 else (NARROW, NARROW_DOWN)


def parts_of(case: Case) -> dict[str, TensorType]:
    """The types of a layer's weights and biases."""
    shape, made = case.shape, {}
    for name, rows, columns in (("up", 2 * shape.inner, shape.width), ("down", shape.width, shape.inner)):
        blocks = (shape.experts, rows, columns // 32)
        if case.format == "mxfp4":
            made |= {name: TensorType("uint8", (*blocks, 16)), f"{name}_scales": TensorType("uint8", blocks)}
        else:
            sizes = (shape.experts, -(-rows // BLOCK), -(-columns // BLOCK))
            made[name] = TensorType("float8_e4m3fn", (shape.experts, rows, columns))
            made[f"{name}_scales"] = TensorType("float32", sizes)
        if shape.has_bias:
            made[f"{name}_bias"] = TensorType("bfloat16", (shape.experts, rows))
    return made


def use_of(case: Case, tokens: int) -> Use:
    """A layer as a node, all sizes of which are known."""
    shape = case.shape
    types = {
        "x": TensorType("bfloat16", (tokens, shape.width)), "expert_ids": TensorType("int64", (tokens, shape.top_k)),
        "expert_weights": TensorType("bfloat16", (tokens, shape.top_k)), **parts_of(case),
    }  # fmt: skip
    constants = {"format": case.format, "activation": "silu", "gated": True, **dict(shape.rule)}
    args: dict[str, Any] = {name: Ref(name) for name in types}
    args |= {name: Const(value) for name, value in constants.items()}
    if case.format == "fp8":
        args |= dict.fromkeys(("up_block", "down_block"), Items((Const(BLOCK), Const(BLOCK))))
    node = Node("precast.quantised_experts", args, (Value("y", types["x"]),), 1)
    capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else (9, 0)
    operands = {name: Operand(kind, True, not name.startswith(("up", "down"))) for name, kind in types.items()}
    return Use(node, operands, Target("cuda", capability))


def few_launches(
    use: Use, up: Tiles | None = None, down: Tiles | None = None, *, splits: int | None = None, asks_ahead: bool = False
) -> tuple[Launch, ...]:
    """Three launches, in which each pair reads its expert."""
    return launches.few(up, down, splits=splits, asks_ahead=asks_ahead)(use)


def grouped_launches(use: Use, tokens: int, up: Tiles | None = None, down: Tiles | None = None) -> tuple[Launch, ...]:
    """Launches over pairs in the order of experts, as a step of so many tokens has them."""
    return launches.grouped(bound_of(tokens), up, down)(use)


def streamed_launches(use: Use, tokens: int) -> dict[str, tuple[Launch, ...]]:
    """The weight stream of 8 columns, and of 16, if it takes a step of so many tokens, or has room for its pairs."""
    found = {}
    for name, few in (("stream", streamed.FEW), ("stream_of_16", streamed.MORE)):
        # A step of as many tokens as there are pairs for, whether a record has it or not.
        few = few._replace(
            tokens=tokens, pairs=max(few.pairs, streamed.MORE.pairs) if tokens > few.tokens else few.pairs
        )
        pairs = tokens * int(use.number("expert_ids", 1) or 0)
        if use.target.capability == (9, 0) and pairs <= few.pairs and streamed.is_taken(use, few):
            found[name] = streamed.run(use, few)
    return found


def tiled_launches(use: Use, tokens: int) -> dict[str, tuple[Launch, ...]]:
    """Tiles of warp groups, as steps of so many tokens have them, if they take the layer."""
    if use.target.capability != (9, 0) or not tiles.is_taken(use):
        return {}
    return {"tiles": tiles.run(use, next(most for most in tiles.STEPS if most is None or tokens <= most))}


def quick_launches(use: Use, tokens: int) -> dict[str, tuple[Launch, ...]]:
    """What is compared without a search: the stream, tiles, and Triton's, as it is built in and otherwise."""
    made = streamed_launches(use, tokens) | tiled_launches(use, tokens)
    if tokens > streamed.FEW.tokens:
        return made | {"grouped": grouped_launches(use, tokens)}
    made |= {"few": few_launches(use), "few_asking_ahead": few_launches(use, asks_ahead=True)}
    made["few_of_256"] = few_launches(use, Tiles(8, 32, 256, 4, 3, True), Tiles(8, 32, 256, 4, 3, True), splits=2)
    return made | ({"grouped": grouped_launches(use, tokens)} if tokens > 2 else {})


# --- weights -------------------------------------------------------------------------------------------------------


def stored_layer(case: Case) -> dict[str, torch.Tensor]:
    """A layer's weights as they are stored: any bits, with scales that make them about as large as those of models."""
    made = {}
    for name, kind in parts_of(case).items():
        sizes, dtype = [int(size) for size in kind.shape], BY_NAME[kind.dtype]  # type: ignore[call-overload]
        if name.endswith("_bias"):
            made[name] = torch.empty(sizes, dtype=dtype, device="cuda").normal_(0, 0.02)
        elif name.endswith("_scales") and case.format == "mxfp4":
            made[name] = torch.randint(118, 122, sizes, dtype=dtype, device="cuda")
        elif name.endswith("_scales"):
            made[name] = torch.empty(sizes, device="cuda").uniform_(0.01, 0.03)
        elif dtype == torch.uint8:
            made[name] = torch.randint(0, 256, sizes, dtype=dtype, device="cuda")
        else:
            made[name] = torch.stack([torch.randn(sizes[1:], device="cuda").to(dtype) for _ in range(sizes[0])])
    return made


def whole_layer(case: Case, layer: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same weights in bfloat16."""
    made = {name: value for name, value in layer.items() if name.endswith("_bias")}
    block = (BLOCK, BLOCK) if case.format == "fp8" else None
    for name in ("up", "down"):
        parts = zip(layer[name], layer[f"{name}_scales"], strict=True)
        each = [dequantise(Quantised(of, scales, format=case.format, block=block)).bfloat16() for of, scales in parts]
        made[name] = torch.stack(each)
    return made


# --- compiling -----------------------------------------------------------------------------------------------------


def compile_all(job: tuple[str, tuple[int, ...], int, int, bool]) -> int:
    """In a process of its own: what is going to be launched for a case in steps of so many tokens, into Triton's
    cache; every `step`-th from `first` on. How many failed."""
    name, steps, first, step, is_quick = job
    os.environ["OMP_NUM_THREADS"] = "1"
    use = use_of(CASES[name], 16)
    found = _quickly(use, steps) if is_quick else _searched(use, steps)
    different = {repr((each.kernel, sorted(each.constants.items()), each[4:], each.args)): each for each in found}
    types = {name: operand.type for name, operand in use.operands.items()} | {"out.0": use.result}
    empty = {
        name: torch.empty([int(size) for size in kind.shape], dtype=BY_NAME[kind.dtype], device="meta")  # type: ignore[call-overload]
        for name, kind in types.items()
    }
    failed = 0
    for launch in list(different.values())[first::step]:
        try:
            compile_launch(launch, empty)
        except Exception:  # noqa: BLE001 - its row says so
            failed += 1
    return failed


def _quickly(use: Use, steps: Sequence[int]) -> list[Launch]:
    """Triton's of what is compared without a search."""
    found = [launch for tokens in steps for way in quick_launches(use, tokens).values() for launch in way]
    return [launch for launch in found if ".cu:" not in launch.kernel]


def _searched(use: Use, steps: Sequence[int]) -> list[Launch]:
    """All that is tried."""
    found = list[Launch]()
    found += [few_launches(use, up=each)[0] for each in FEW_UP] + [few_launches(use, down=each)[1] for each in FEW_DOWN]
    for down in FEW_DOWN:
        found += few_launches(use, None, down, asks_ahead=True)[1:]
        for splits in SPLITS:
            found += few_launches(use, None, down, splits=splits)[1:]
    found += few_launches(use)
    for tokens in steps:
        ups, downs = tiles_for(tokens)
        found += grouped_launches(use, tokens)
        found += [grouped_launches(use, tokens, up=each)[-3] for each in ups]
        found += [grouped_launches(use, tokens, down=each)[-2] for each in downs]
    return found


def compile_for(names: Sequence[str], steps: tuple[int, ...], *, is_quick: bool = False) -> None:
    """Compile in as many processes as there are cores what is measured of these cases."""
    started = time.perf_counter()
    workers = max(1, min(14, (os.cpu_count() or 2) - 2))
    jobs = [(name, steps, first, workers, is_quick) for first in range(workers) for name in names]
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        failed = sum(pool.map(compile_all, jobs, chunksize=1))
    print(f"compiled in {time.perf_counter() - started:.0f} s, {failed} failed", flush=True)
