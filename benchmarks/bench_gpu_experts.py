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
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from support import harness
from support.expert_layers import (
    DOWN_STRIPS,
    FEW,
    SHAPES,
    UP_STRIPS,
    Shape,
    best,
    built_in,
    compile_for,
    few_launches,
    grouped_launches,
    inputs_of,
    layers_us,
    named,
    run,
    tiles_for,
    tried,
    use_of,
    weights_of,
)  # fmt: skip
from support.gpu_times import product_flops_per_second, read_bytes_per_second, replay_microseconds

from precast.kernels import registry
from precast.kernels.choices import records_of
from precast.kernels.experts import grouped
from precast.kernels.records import Launch, Record
from precast.kernels.route.route import route

TOKENS = (1, 8, 64, 256, 4096)
SLACK, MICROSECONDS, OF_PRODUCT, ROUTED = 1.25, 10.0, 0.55, 6.0
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


def measure(
    shape: Shape, tokens: int, weights: list[dict[str, torch.Tensor]], rates: dict[str, float]
) -> dict[str, Any]:
    """A row of the table."""
    layers, use = inputs_of(shape, tokens, weights), use_of(shape, tokens)
    used = statistics.mean(len(each["expert_ids"].unique()) for each in layers)
    num_bytes, flops = used * shape.expert_bytes, 2 * tokens * shape.top_k * shape.expert_bytes / 2
    row: dict[str, Any] = {"experts_used": round(used, 1), "floor_us": round(1e6 * num_bytes / rates["read"], 1)}
    expected = _expected(shape, layers[0]).float()
    row["torch_us"] = round(replay_microseconds(lambda: [_expected(shape, x) for x in layers]) / len(layers), 1)
    ways: dict[str, Sequence[Launch]] = {"built_in": built_in(use, tokens)}
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
        error = _error(layers[0], expected)
        row[f"{way}_us"], row[f"{way}_error"] = round(layers_us(found, layers), 1), round(error, 5)
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

    found = replay_microseconds(several) / 10
    error = (weights.float() - expected.float()).abs().max().item() if torch.equal(ids, expected_ids) else None
    return {
        "microseconds": round(found, 2), "torch_us": round(replay_microseconds(lambda: route(logits, bias, **rule)), 1),
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
    today, expected = built_in(use, tokens), _expected(shape, layers[0]).float()
    run(today, layers[0])
    print(
        f"{name}, {tokens} tokens, {used_here:.1f} experts: {layers_us(today, layers):.1f} us, error"
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
    return grouped.experts(**(rule | given))


def _error(layer: dict[str, torch.Tensor], expected: torch.Tensor) -> float:
    """The largest error of what was computed last, as a share of the largest number."""
    return ((layer["out.0"].float() - expected).abs().max() / expected.abs().max()).item()


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
