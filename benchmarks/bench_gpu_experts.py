"""On a GPU: microseconds of a layer of experts, against the bytes that it must read, or against a plain product.

Shapes of Qwen3-30B-A3B, GPT-OSS-20B and DeepSeek-V3, in bfloat16, with tokens sent to experts at random. Layers with
weights of their own follow one another in a CUDA graph, so that the L2 cache doesn't hold what the next one reads. The
machine's rates, of reading and of a matrix product, are measured in the same run, and so is what PyTorch's grouped
product takes. Each way to cut the products is tried, and the fastest is reported beside the one that is built in.

Goal: up to 256 tokens a layer takes at most 1.25 times as long as the machine reads the experts that are used, and 10
us more; at 4096 tokens its products run at 55 % of the machine's rate at least. A router takes at most 6 us for up to
256 tokens, and chooses as the definition does.

    python benchmarks/bench_gpu_experts.py [--out FILE] [SHAPE ...]

`--sweep` takes half a minute instead: steps of `CASES`, in some of which all tokens go to a few experts, as those of a
model with random weights do. Each way to cut a product is a figure on one line, the fastest first, beside the floor of
bytes and products; nothing is written.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from support import harness
from support.launch_compiler import compile_launch

from precast.ir.graph.schema import Const, Node, Ref, TensorType, Value
from precast.ir.memory.liveness import Operand
from precast.kernels import registry
from precast.kernels.choices import records_of
from precast.kernels.dtypes import BY_NAME
from precast.kernels.experts import grouped, launches
from precast.kernels.experts.launches import Strips, Tiles
from precast.kernels.experts.records import STEPS
from precast.kernels.launch import Launched
from precast.kernels.records import Launch, Record
from precast.kernels.route.route import route
from precast.kernels.use import Target, Use

TOKENS = (1, 8, 64, 256, 4096)
FEW = 8
"""Up to so many tokens each pair may read its expert."""
SLACK, MICROSECONDS, OF_PRODUCT, ROUTED = 1.25, 10.0, 0.55, 6.0


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
CASES = (
    ("qwen3-next", 2048, 512), ("qwen3-next", 4096, 512), ("qwen3-30b-a3b", 1, 128), ("qwen3-30b-a3b", 64, 128),
    ("qwen3-30b-a3b", 4096, 128), ("gpt-oss-20b", 1, 32), ("gpt-oss-20b", 8, 6), ("gpt-oss-20b", 64, 6),
    ("gpt-oss-20b", 4096, 6), ("deepseek-v3", 1, 256), ("deepseek-v3", 4096, 256),
)  # fmt: skip
"""What `--sweep` measures: a shape, tokens, and to how many of its experts they go."""
ROUTERS: dict[str, tuple[int, dict[str, Any]]] = {
    "qwen3-30b-a3b": (128, {"scoring": "softmax", "top_k": 8, "normalise": True, "dtype": torch.bfloat16}),
    "gpt-oss-20b": (
        32, {"scoring": "softmax", "top_k": 4, "choice": "logits", "normalise": False, "dtype": torch.bfloat16},
    ),
    "deepseek-v3": (
        256,
        {
            "scoring": "sigmoid", "top_k": 8, "num_groups": 8, "top_groups": 4, "normalise": True, "epsilon": 1e-20,
            "scale": 2.5, "dtype": torch.float32,
        },
    ),
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


# --- measuring ---------------------------------------------------------------------------------------------------


def microseconds(once: Callable[[], object], *, runs: int = 5, budget_ms: float = 8.0) -> float:
    """The median of `runs` times of a replay of `once`, each of as many replays as take `budget_ms`."""
    once()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        once()
    graph.replay()

    def timed(replays: int) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(replays):
            graph.replay()
        end.record()
        end.synchronize()
        return 1000 * start.elapsed_time(end) / replays

    replays = max(1, min(50, int(1000 * budget_ms / max(timed(1), 1.0))))
    return statistics.median(timed(replays) for _ in range(runs))


def read_bytes_per_second() -> float:
    """How fast the machine sums 8 GB."""
    x = torch.ones(1 << 31, dtype=torch.float32, device="cuda")
    return 4 * x.numel() / (microseconds(lambda: x.sum()) / 1e6)


def product_flops_per_second() -> float:
    """How fast the machine multiplies square matrices of 8192 in bfloat16."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * 8192**3 / (microseconds(lambda: a @ b, budget_ms=40) / 1e6)


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
    room = tokens * shape.top_k * (4 * shape.width + 4 * shape.inner + 64) + (1 << 20)
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

    return microseconds(once, budget_ms=budget_ms) / (len(layers) * (2 if len(layers) < 4 else 1))


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


def measure(
    shape: Shape, tokens: int, weights: list[dict[str, torch.Tensor]], rates: dict[str, float]
) -> dict[str, Any]:
    """A row of the table."""
    layers, use = inputs_of(shape, tokens, weights), use_of(shape, tokens)
    used = statistics.mean(len(each["expert_ids"].unique()) for each in layers)
    num_bytes, flops = used * shape.expert_bytes, 2 * tokens * shape.top_k * shape.expert_bytes / 2
    row: dict[str, Any] = {"experts_used": round(used, 1), "floor_us": round(1e6 * num_bytes / rates["read"], 1)}
    rule = {"activation": "silu", "gated": True, "up_bias": None, "down_bias": None, **dict(shape.rule)}

    def today() -> list[torch.Tensor]:
        skipped = ("out.0", "workspace")
        return [grouped.experts(**{**rule, **{k: v for k, v in x.items() if k not in skipped}}) for x in layers]

    expected = today()[0].float()
    row["torch_us"] = round(microseconds(today) / len(layers), 1)
    ways: dict[str, Sequence[Launch]] = {"built_in": _built_in(use, tokens)}
    if tokens <= FEW:
        ups = tried(UP_STRIPS, lambda each: few_launches(use, up=each)[:1], layers)
        downs = tried(DOWN_STRIPS, lambda each: few_launches(use, down=each)[1:], layers)
        row |= {"few up": named(ups), "few down": named(downs)}
        ways["few"] = few_launches(use, best(ups), best(downs))
    order = layers_us(grouped_launches(use, tokens)[:-3], layers)
    # What follows takes the order of the last layer.
    up_tiles, down_tiles = tiles_for(tokens)
    ups = tried(up_tiles, lambda each: grouped_launches(use, tokens, up=each)[-3:-2], layers)
    downs = tried(down_tiles, lambda each: grouped_launches(use, tokens, down=each)[-2:-1], layers)
    total = layers_us(grouped_launches(use, tokens)[-1:], layers)
    row |= {"order_us": round(order, 2), "sum_us": round(total, 2), "up": named(ups), "down": named(downs)}
    ways["grouped"] = grouped_launches(use, tokens, best(ups), best(downs))
    for way, found in ways.items():
        run(found, layers[0])
        error = (layers[0]["out.0"].float() - expected).abs().max() / expected.abs().max()
        row[f"{way}_us"], row[f"{way}_error"] = round(layers_us(found, layers), 1), round(error.item(), 5)
    if tokens in (1, 64):
        alone = [launch._replace(pdl=False) for launch in ways["grouped" if tokens > FEW else "few"]]
        row["without_overlap_us"] = round(layers_us(alone, layers), 1)
    fastest = min(row[f"{way}_us"] for way in ways)
    row["bytes_of_read_rate"] = round(num_bytes / (row["built_in_us"] / 1e6) / rates["read"], 3)
    row["flops_of_product_rate"] = round(flops / (row["built_in_us"] / 1e6) / rates["product"], 3)
    row["best_us"] = fastest
    limit = max(SLACK * row["floor_us"] + MICROSECONDS, 1e6 * flops / rates["product"] / OF_PRODUCT)
    row["is_goal_met"] = row["built_in_us"] <= limit
    return row


def _built_in(use: Use, tokens: int) -> tuple[Launch, ...]:
    """What the op's records launch for so many tokens."""
    for record in records_of("precast.experts", 1):
        low, high = record.sizes.get("T", (0, None))
        if record.kind == "triton" and low <= tokens and (high is None or tokens <= high):
            assert not isinstance(record.runs, str)
            return record.runs(use)
    raise LookupError("no record in Triton")


def measure_router(name: str, tokens: int) -> dict[str, Any]:
    """The router's kernel against the definition."""
    experts, rule = ROUTERS[name]
    generator = torch.Generator("cuda").manual_seed(tokens)
    logits = torch.randn(tokens, experts, generator=generator, device="cuda")
    logits = logits if rule["dtype"] == torch.float32 else logits.bfloat16()
    bias = torch.randn(experts, generator=generator, device="cuda") if name == "deepseek-v3" else None
    ours: Record = next(record for record in records_of("precast.route", 1) if record.kind == "triton")
    function: Any = registry.function_of(ours)
    out = (torch.empty(tokens, rule["top_k"], dtype=rule["dtype"], device="cuda"),
           torch.empty(tokens, rule["top_k"], dtype=torch.int64, device="cuda"))  # fmt: skip
    weights, ids = function(logits, bias, **rule)
    expected, expected_ids = route(logits, bias, **rule)

    def several() -> None:
        for _ in range(10):
            function(logits, bias, **rule, out=out)

    found = microseconds(several) / 10
    error = (weights.float() - expected.float()).abs().max().item() if torch.equal(ids, expected_ids) else None
    return {
        "microseconds": round(found, 2), "torch_us": round(microseconds(lambda: route(logits, bias, **rule)), 1),
        "different_ids": int((ids != expected_ids).sum()), "largest_error": error,
    }  # fmt: skip


# --- a sweep -----------------------------------------------------------------------------------------------------


def sweep(rates: dict[str, float]) -> None:
    """Print `CASES`, a shape after the other."""
    for name in dict.fromkeys(name for name, _, _ in CASES):
        weights = weights_of(SHAPES[name])
        for case in CASES:
            if case[0] == name:
                try:
                    _sweep_case(*case, weights, rates)
                except Exception as error:  # noqa: BLE001 - one case must not stop the others
                    print(case, f"{type(error).__name__}: {error}"[:300], flush=True)
        del weights
        torch.cuda.empty_cache()


def _sweep_case(
    name: str, tokens: int, used: int, weights: list[dict[str, torch.Tensor]], rates: dict[str, float]
) -> None:
    shape = SHAPES[name]
    layers, use = inputs_of(shape, tokens, weights, used), use_of(shape, tokens)
    used_here = statistics.mean(len(each["expert_ids"].unique()) for each in layers)
    by_bytes = 1e6 * used_here * shape.expert_bytes / rates["read"]
    by_products = 1e6 * tokens * shape.top_k * shape.expert_bytes / rates["product"]
    built_in, expected = _built_in(use, tokens), _expected(shape, layers[0])
    run(built_in, layers[0])
    print(
        f"{name}, {tokens} tokens, {used_here:.1f} experts: {layers_us(built_in, layers):.1f} us, error"
        f" {_error(layers[0], expected):.4f}; bytes {by_bytes:.1f} us, products {by_products:.1f};"
        f" order {layers_us(grouped_launches(use, tokens)[:-3], layers):.1f},"
        f" sum {layers_us(grouped_launches(use, tokens)[-1:], layers):.1f}",
        flush=True,
    )

    def line(title: str, options: Sequence[Any], of: Callable[[Any], Sequence[Launch]], part: slice) -> None:
        """All options, of each the part of its launches that it decides; what all of them compute is compared."""
        errors = {}
        for option in options:
            try:
                run(of(option), layers[0])
                errors[option] = _error(layers[0], expected)
            except Exception:  # noqa: BLE001 - its figure says why
                errors[option] = float("nan")
        run(of(options[0]), layers[-1])
        layers_us(of(options[0])[part], layers, 20.0)  # clocks are those of work from the first figure on
        found = named(tried(options, lambda option: of(option)[part], layers, budget_ms=3.0))
        wrong = [" ".join(map(str, map(int, option))) for option, error in errors.items() if not error < 0.02]
        print(f"  {title}:", "; ".join(f"{key}: {value}" for key, value in found.items()), flush=True)
        if wrong:
            print(f"  WRONG {title}:", "; ".join(wrong), flush=True)

    if tokens == 1:
        line("few up", UP_STRIPS, lambda each: few_launches(use, up=each), slice(0, 1))
        line("few down", DOWN_STRIPS, lambda each: few_launches(use, down=each), slice(1, 2))
        return
    ups, downs = tiles_for(tokens)
    line("up", ups, lambda each: grouped_launches(use, tokens, up=each), slice(-3, -2))
    line("down", downs, lambda each: grouped_launches(use, tokens, down=each), slice(-2, -1))


def _expected(shape: Shape, layer: dict[str, torch.Tensor]) -> torch.Tensor:
    """What PyTorch computes of a layer."""
    rule = {"activation": "silu", "gated": True, "up_bias": None, "down_bias": None, **dict(shape.rule)}
    given = {name: value for name, value in layer.items() if name not in ("out.0", "workspace")}
    return grouped.experts(**(rule | given)).float()


def _error(layer: dict[str, torch.Tensor], expected: torch.Tensor) -> float:
    """The largest error of what was computed last, as a share of the largest number."""
    return ((layer["out.0"].float() - expected).abs().max() / expected.abs().max()).item()


def compile_for(cases: Sequence[tuple[str, tuple[int, ...]]]) -> None:
    """Compile in as many processes as there are cores what is measured of shapes, in steps of so many tokens."""
    started = time.perf_counter()
    workers = max(1, min(14, (os.cpu_count() or 2) - 2))
    jobs = [(name, steps, first, workers) for first in range(workers) for name, steps in cases]
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        failed = sum(pool.map(compile_all, jobs, chunksize=1))
    print(f"compiled in {time.perf_counter() - started:.0f} s, {failed} failed", flush=True)


def main() -> None:
    """Measure and write `results/gpu_experts.json`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=harness.RESULTS / "gpu_experts.json")
    parser.add_argument("--sweep", action="store_true", help="time every way to cut products, and write nothing")
    parser.add_argument("shapes", nargs="*", default=list(ROUTERS))
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("needs a CUDA GPU: nothing measured")
        return
    started = time.perf_counter()
    shapes = list(dict.fromkeys(name for name, _, _ in CASES)) if arguments.sweep else arguments.shapes
    steps = {name: tuple(tokens for each, tokens, _ in CASES if each == name) for name in shapes}
    compile_for([(name, steps[name] if arguments.sweep else TOKENS) for name in shapes])
    rates = {"read": read_bytes_per_second(), "product": product_flops_per_second()}
    figures: dict[str, Any] = {
        "read_tb_per_s": round(rates["read"] / 1e12, 3), "product_tflop_per_s": round(rates["product"] / 1e12, 1),
        "routers": {}, "rows": {},
    }  # fmt: skip
    print(json.dumps(figures), flush=True)
    if arguments.sweep:
        sweep(rates)
        print(f"{time.perf_counter() - started:.1f} s")
        return
    for name in arguments.shapes:
        for tokens in TOKENS:
            _row(figures["routers"], f"{name}, {tokens}", lambda name=name, tokens=tokens: measure_router(name, tokens))
        weights = weights_of(SHAPES[name])
        for tokens in TOKENS:
            _row(
                figures["rows"], f"{name}, {tokens}",
                lambda name=name, tokens=tokens, weights=weights: measure(SHAPES[name], tokens, weights, rates),
            )  # fmt: skip
        del weights
        torch.cuda.empty_cache()
    rows, routers = figures["rows"].values(), figures["routers"].items()
    figures["is_goal_met"] = all(row.get("is_goal_met", False) for row in rows)
    figures["is_router_goal_met"] = all(
        row.get("different_ids") == 0 and (key.endswith(" 4096") or row["microseconds"] <= ROUTED)
        for key, row in routers
    )
    figures["seconds"] = round(time.perf_counter() - started, 1)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"claim": "gpu_experts", "machine": harness.machine(), "figures": figures}, indent=2)
    arguments.out.write_text(text + "\n")
    print(f"{figures['seconds']} s, {arguments.out}")


def _row(rows: dict[str, Any], key: str, made: Callable[[], dict[str, Any]]) -> None:
    """One row; what went wrong instead, if anything does."""
    try:
        rows[key] = made()
    except Exception as error:  # noqa: BLE001 - one row must not stop the others
        rows[key] = {"error": f"{type(error).__name__}: {error}"[:300]}
    short = {name: value for name, value in rows[key].items() if not isinstance(value, dict)}
    firsts = {name: next(iter(value.items())) for name, value in rows[key].items() if isinstance(value, dict) and value}
    print(key, json.dumps(short), json.dumps(firsts), flush=True)


if __name__ == "__main__":
    main()
