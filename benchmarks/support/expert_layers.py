"""Layers of experts for `bench_gpu_experts.py`: shapes of models, ways to cut products, launches, tensors, times."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from precast.ir.graph.schema import Const, Node, Ref, TensorType, Value
from precast.ir.memory.liveness import Operand
from precast.kernels.choices import records_of
from precast.kernels.dtypes import BY_NAME
from precast.kernels.experts import launches
from precast.kernels.experts.launches import Strips, Tiles
from precast.kernels.experts.records import STEPS
from precast.kernels.launch import Launched
from precast.kernels.records import Launch
from precast.kernels.use import Target, Use
from support.gpu_times import replay_microseconds
from support.launch_compiler import compile_launch

FEW = 8
"""Up to so many tokens each pair may read its expert."""


class Shape(NamedTuple):
    """A layer of experts: how many, how many of a token, widths; `rule` of the activation; layers to go through."""

    experts: int
    top_k: int
    width: int
    inner: int
    layers: int
    has_bias: bool = False
    rule: tuple[tuple[str, Any], ...] = ()

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert's weights."""
        return 2 * 3 * self.width * self.inner


SHAPES = {
    "qwen3-30b-a3b": Shape(128, 8, 2048, 768, 6),
    "gpt-oss-20b": Shape(
        32, 4, 2880, 2880, 6, True, (("alpha", 1.702), ("limit", 7.0), ("offset", 1.0))
    ),
    "deepseek-v3": Shape(256, 8, 7168, 2048, 2),
    "qwen3-next": Shape(512, 10, 2048, 512, 4),
}  # fmt: skip
UP_STRIPS = (
    Strips(8, 512, 4, 4), Strips(8, 512, 4, 1, 4), Strips(8, 512, 4, 1, 3), Strips(4, 1024, 4, 1, 4),
    Strips(4, 512, 4, 1, 6),
)  # fmt: skip
DOWN_STRIPS = (
    Strips(4, 256, 4, 2), Strips(4, 256, 4, 1, 4), Strips(8, 128, 4, 1, 4), Strips(8, 128, 4, 1, 6),
    Strips(16, 64, 4, 1, 6),
)  # fmt: skip
NARROW = (
    Tiles(16, 32, 128, 2, 4, True), Tiles(16, 64, 128, 4, 3, True), Tiles(16, 64, 64, 4, 5, True),
    Tiles(64, 64, 64, 4, 3, True, 2), Tiles(64, 64, 64, 4, 4, True, 2),
)  # fmt: skip
MIDDLE = (
    Tiles(32, 64, 64, 4, 4, True), Tiles(32, 64, 64, 4, 4, True, 1), Tiles(64, 64, 64, 4, 3, True, 2),
    Tiles(64, 64, 64, 4, 4, True, 2), Tiles(64, 128, 64, 8, 3, True, 2), Tiles(128, 64, 64, 4, 3, True, 3),
)  # fmt: skip
WIDE = (
    Tiles(128, 128, 64, 8, 4, False), Tiles(128, 128, 64, 8, 4, False, 1), Tiles(128, 128, 64, 8, 4, True, 3),
    Tiles(128, 64, 64, 4, 3, True, 3), Tiles(256, 64, 64, 8, 4, True, 4),
)  # fmt: skip
DOWN_WIDE = (
    Tiles(128, 256, 64, 8, 4, False), Tiles(128, 256, 64, 8, 4, False, 1), Tiles(128, 128, 64, 4, 3, True, 3),
    Tiles(128, 128, 64, 8, 3, False, 1), Tiles(256, 128, 64, 8, 4, True, 4),
)  # fmt: skip


def tiles_for(tokens: int) -> tuple[tuple[Tiles, ...], tuple[Tiles, ...]]:
    """What is tried for the first and for the second product."""
    if tokens > 1024:
        return WIDE, DOWN_WIDE
    return (MIDDLE, MIDDLE) if tokens > 64 else (NARROW, NARROW)


# --- launches ----------------------------------------------------------------------------------------------------


def use_of(shape: Shape, tokens: int) -> Use:
    """A layer as a node, all sizes of which are known."""
    types = {
        "x": TensorType("bfloat16", (tokens, shape.width)), "expert_ids": TensorType("int64", (tokens, shape.top_k)),
        "expert_weights": TensorType("bfloat16", (tokens, shape.top_k)),
        "up": TensorType("bfloat16", (shape.experts, 2 * shape.inner, shape.width)),
        "down": TensorType("bfloat16", (shape.experts, shape.width, shape.inner)),
    }  # fmt: skip
    if shape.has_bias:
        types["up_bias"] = TensorType("bfloat16", (shape.experts, 2 * shape.inner))
        types["down_bias"] = TensorType("bfloat16", (shape.experts, shape.width))
    constants = {"activation": "silu", "gated": True, **dict(shape.rule)}
    args = {name: Ref(name) for name in types} | {name: Const(value) for name, value in constants.items()}
    node = Node("precast.experts", args, (Value("y", types["x"]),), 1)
    capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else (9, 0)
    return Use(node, {name: Operand(kind, True) for name, kind in types.items()}, Target("cuda", capability))


def few_launches(use: Use, up: Strips | None = None, down: Strips | None = None) -> tuple[Launch, ...]:
    """Two launches, in which each pair reads its expert."""
    return launches.few(up, down)(use)


def grouped_launches(use: Use, tokens: int, up: Tiles | None = None, down: Tiles | None = None) -> tuple[Launch, ...]:
    """Four launches over pairs in the order of experts, or five, as a step of so many tokens has them."""
    return launches.grouped(bound_of(tokens), up, down)(use)


def bound_of(tokens: int) -> int | None:
    """Up to how many tokens the steps of a record have that takes so many; None: any number."""
    return next((most for most in STEPS if tokens <= most), None)


def compile_all(job: tuple[str, tuple[int, ...], int, int]) -> int:
    """In a process of its own: what is going to be launched for a shape in steps of so many tokens, into Triton's
    cache; every `step`-th from `first` on. How many failed."""
    name, steps, first, step = job
    os.environ["OMP_NUM_THREADS"] = "1"
    use, found = use_of(SHAPES[name], 16), list[Launch]()
    if any(tokens <= FEW for tokens in steps):
        found += [few_launches(use, up=each)[0] for each in UP_STRIPS]
        found += [few_launches(use, down=each)[1] for each in DOWN_STRIPS]
        found += few_launches(use)
    for tokens in steps:
        ups, downs = tiles_for(tokens)
        found += grouped_launches(use, tokens)
        found += [grouped_launches(use, tokens, up=each)[-3] for each in ups]
        found += [grouped_launches(use, tokens, down=each)[-2] for each in downs]
    different = {repr((each.kernel, sorted(each.constants.items()), each[4:], each.args)): each for each in found}
    failed = 0
    for launch in list(different.values())[first::step]:
        try:
            _warm_up(launch, use)
        except Exception:  # noqa: BLE001 - its row says so
            failed += 1
    return failed


def _warm_up(launch: Launch, use: Use) -> None:
    types = {name: operand.type for name, operand in use.operands.items()} | {"out.0": use.result}
    empty = {
        name: torch.empty([int(size) for size in kind.shape], dtype=BY_NAME[kind.dtype], device="meta")  # type: ignore[arg-type]
        for name, kind in types.items()
    }
    compile_launch(launch, empty)


def run(found: Sequence[Launch], tensors: dict[str, torch.Tensor]) -> None:
    """Launch all of them; of sizes that are known."""
    arguments = {name: tensor for name, tensor in tensors.items() if name != "out.0"}
    Launched(found)(out=tensors["out.0"], **arguments)


def built_in(use: Use, tokens: int) -> tuple[Launch, ...]:
    """What the op's records launch for so many tokens."""
    for record in records_of("precast.experts", 1):
        low, high = record.sizes.get("T", (0, None))
        if record.kind == "triton" and low <= tokens and (high is None or tokens <= high):
            assert not isinstance(record.runs, str)
            return record.runs(use)
    raise LookupError("no record in Triton")


def compile_for(cases: Sequence[tuple[str, tuple[int, ...]]]) -> None:
    """Compile in as many processes as there are cores what is measured of shapes, in steps of so many tokens."""
    started = time.perf_counter()
    workers = max(1, min(14, (os.cpu_count() or 2) - 2))
    jobs = [(name, steps, first, workers) for first in range(workers) for name, steps in cases]
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        failed = sum(pool.map(compile_all, jobs, chunksize=1))
    print(f"compiled in {time.perf_counter() - started:.0f} s, {failed} failed", flush=True)


# --- on the GPU --------------------------------------------------------------------------------------------------


def weights_of(shape: Shape) -> list[dict[str, torch.Tensor]]:
    """Each layer's weights."""

    def normal(*size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.bfloat16, device="cuda").normal_(0, 0.02)

    made = []
    for _ in range(shape.layers):
        layer = {
            "up": normal(shape.experts, 2 * shape.inner, shape.width),
            "down": normal(shape.experts, shape.width, shape.inner),
        }  # fmt: skip
        if shape.has_bias:
            layer["up_bias"] = normal(shape.experts, 2 * shape.inner)
            layer["down_bias"] = normal(shape.experts, shape.width)
        made.append(layer)
    return made


def inputs_of(
    shape: Shape, tokens: int, weights: list[dict[str, torch.Tensor]], used: int | None = None
) -> list[dict[str, torch.Tensor]]:
    """Each layer's arguments, with experts drawn at random, its result and room for all workspaces.

    `used`: of so many experts of the layer.
    """
    generator = torch.Generator("cuda").manual_seed(tokens)
    made = []
    for layer in weights:
        scores = torch.rand(tokens, shape.experts, generator=generator, device="cuda")
        hidden = torch.randperm(shape.experts, generator=generator, device="cuda")[used or shape.experts :]
        scores[:, hidden] = -1.0
        x = torch.randn(tokens, shape.width, generator=generator, device="cuda").bfloat16()
        made.append(
            {
                **layer, "x": x, "expert_ids": scores.topk(shape.top_k, dim=1).indices.contiguous(),
                "expert_weights": torch.rand(tokens, shape.top_k, generator=generator, device="cuda").bfloat16(),
                "out.0": torch.empty_like(x),
            }
        )  # fmt: skip
    rows = tokens * shape.top_k + 8 * shape.experts
    room = rows * (6 * shape.width + 4 * shape.inner + 2048) + (1 << 20)
    workspace = torch.empty(room, dtype=torch.uint8, device="cuda")
    for each in made:
        each["workspace"] = workspace
    return made


def layers_us(found: Sequence[Launch], layers: list[dict[str, torch.Tensor]], budget_ms: float = 8.0) -> float:
    """Microseconds a layer of these launches, layer after layer."""

    def once() -> None:
        for _ in range(2 if len(layers) < 4 else 1):
            for tensors in layers:
                run(found, tensors)

    return replay_microseconds(once, budget_ms=budget_ms) / (len(layers) * (2 if len(layers) < 4 else 1))


def tried(
    options: Sequence[Any], of: Callable[[Any], Sequence[Launch]], layers: list[dict[str, torch.Tensor]],
    budget_ms: float = 8.0,
) -> dict[Any, float | str]:  # fmt: skip
    """Microseconds a layer by option; what went wrong instead of those that can't be launched."""
    found: dict[Any, float | str] = {}
    for option in options:
        try:
            found[option] = round(layers_us(of(option), layers, budget_ms), 2)
        except Exception as error:  # noqa: BLE001 - one option must not stop the others
            found[option] = f"{type(error).__name__}: {error}"[:80]
    return found


def best(found: dict[Any, float | str]) -> Any:
    """The fastest option."""
    return min((each for each in found if isinstance(found[each], float)), key=lambda each: found[each])


def named(found: dict[Any, float | str]) -> dict[str, float | str]:
    """Options as text, the fastest first."""
    order = sorted(found, key=lambda each: found[each] if isinstance(found[each], float) else 1e9)
    return {" ".join(map(str, (int(x) for x in each))): found[each] for each in order}
