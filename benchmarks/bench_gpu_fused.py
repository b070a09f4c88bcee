"""On a GPU: microseconds of fused ops, against their steps one by one, both replayed as CUDA graphs.

Claim: a chain of arithmetic that no named op covers takes one launch, and about the time of reading its operands and
writing its results once. Steps and sizes are those of published models, in bfloat16. A graph has one op many times in
a row, so that small operands lie in the L2 cache, as they do when another op has just made them. The results are
compared too: with the steps one by one on the GPU, and on the CPU.

    python benchmarks/bench_gpu_fused.py [--out FILE]
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from support import harness

from precast.ir.graph.schema import Const, DtypeArg, Items, Ref, Step, Steps
from precast.kernels.choices import records_of
from precast.kernels.fused.fused import fused
from precast.kernels.launch import as_function

TOKENS = (1, 16, 256, 2048)
REPEATS = 20
"""The same op in one graph."""

BF16, F32 = torch.bfloat16, torch.float32


class Case(NamedTuple):
    """A fused op of a published model: its operands for so many tokens, and its steps."""

    operands: tuple[tuple[torch.dtype, tuple[int, ...]], ...]
    steps: Steps


def _steps(*calls: tuple[str, Mapping[str, Any]], returns: tuple[str, ...] = ()) -> Steps:
    """Steps of these ops: arguments "x0" and "s0" are names, other values are themselves."""

    def arg(value: Any) -> Any:
        if isinstance(value, str):
            return Ref(value)
        if isinstance(value, torch.dtype):
            return DtypeArg("float32" if value is F32 else "bfloat16")
        return Items(tuple(map(Const, value))) if isinstance(value, list) else Const(value)

    made = tuple(Step(f"aten.{op}", {key: arg(value) for key, value in args.items()}) for op, args in calls)
    return Steps(made, returns or (f"s{len(made) - 1}",))


def _norm(first: int, x: str, weight: str) -> list[tuple[str, Mapping[str, Any]]]:
    """The norm of Gemma 3n and Gemma 4, as they write it; eight steps from s<first> on."""
    s = [f"s{first + i}" for i in range(8)]
    return [
        ("to.dtype", {"self": x, "dtype": F32}),
        ("pow.Tensor_Scalar", {"self": s[0], "exponent": 2}),
        ("mean.dim", {"self": s[1], "dim": [-1], "keepdim": True}),
        ("add.Tensor", {"self": s[2], "other": 1e-6}),
        ("pow.Tensor_Scalar", {"self": s[3], "exponent": -0.5}),
        ("mul.Tensor", {"self": s[0], "other": s[4]}),
        ("mul.Tensor", {"self": s[5], "other": weight}),
        ("to.dtype", {"self": s[6], "dtype": BF16}),
    ]


def cases(tokens: int) -> dict[str, Case]:
    """By name, for steps of so many tokens."""
    rows = min(tokens, 64)
    return {
        "gemma 4: norm, residual, norm of 2560": Case(
            ((BF16, (1, tokens, 2560)), (F32, (2560,)), (BF16, (1, tokens, 2560)), (F32, (2560,))),
            _steps(
                *_norm(0, "x0", "x1"), ("add.Tensor", {"self": "x2", "other": "s7"}), *_norm(9, "s8", "x3"),
                returns=("s8", "s16"),
            ),
        ),
        "gemma 4: norm of 8 heads of 256": Case(
            ((BF16, (1, tokens, 8, 256)), (F32, (256,))), _steps(*_norm(0, "x0", "x1"))
        ),
        "gemma 2: soft cap of 256,000 logits": Case(
            ((BF16, (1, rows, 256_000)),),
            _steps(
                ("div.Tensor", {"self": "x0", "other": 30.0}), ("tanh.default", {"self": "s0"}),
                ("mul.Tensor", {"self": "s1", "other": 30.0}),
            ),
        ),
        "cohere 2: two sums of 4096": Case(
            ((BF16, (1, tokens, 4096)),) * 3,
            _steps(("add.Tensor", {"self": "x0", "other": "x1"}), ("add.Tensor", {"self": "s0", "other": "x2"})),
        ),
        "qwen3-next: gate of the shared expert of 2048": Case(
            ((BF16, (tokens, 1)), (BF16, (tokens, 2048)), (BF16, (tokens, 2048))),
            _steps(
                ("sigmoid.default", {"self": "x0"}), ("mul.Tensor", {"self": "s0", "other": "x1"}),
                ("add.Tensor", {"self": "x2", "other": "s1"}),
            ),
        ),
        "qwen3-next: gated output of 32 heads of 128": Case(
            ((F32, (tokens * 32, 128)), (BF16, (tokens * 32, 128))),
            _steps(
                ("to.dtype", {"self": "x1", "dtype": F32}), ("silu.default", {"self": "s0"}),
                ("mul.Tensor", {"self": "x0", "other": "s1"}), ("to.dtype", {"self": "s2", "dtype": BF16}),
            ),
        ),
    }  # fmt: skip


def arguments(case: Case, device: str) -> dict[str, Any]:
    """The op's arguments, the same numbers on every device."""
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(shape, generator=generator).to(dtype) for dtype, shape in case.operands]
    tensors = {f"x{i}": tensor for i, tensor in enumerate(drawn)}
    return {name: tensor.to(device) for name, tensor in tensors.items()} | {"steps": case.steps}


def microseconds(function: Callable[..., Any], given: Mapping[str, Any], *, runs: int = 5) -> float:
    """The median over `runs` of a call's time in a graph of `REPEATS` calls."""
    function(**given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [function(**given) for _ in range(REPEATS)]
    graph.replay()
    times = []
    for _ in range(runs):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1000 * start.elapsed_time(end) / REPEATS)
    del kept
    return statistics.median(times)


def _tuple(found: Any) -> tuple[torch.Tensor, ...]:
    return found if isinstance(found, tuple) else (found,)


def _different(found: Any, expected: Any) -> float:
    """The part of the elements that are not the same to the last bit."""
    pairs = list(zip(_tuple(found), _tuple(expected), strict=True))
    return max(float((a.cpu() != b.cpu()).float().mean()) for a, b in pairs)


def _error(found: Any, expected: Any) -> float:
    """The norm of the difference over the norm of what is expected."""
    pairs = list(zip(_tuple(found), _tuple(expected), strict=True))
    return max(float((a.cpu().float() - b.cpu().float()).norm() / b.cpu().float().norm()) for a, b in pairs)


def measure(case: Case) -> dict[str, Any]:
    """One row of the table."""
    launched = as_function(records_of("precast.fused", 1)[0])
    given = arguments(case, "cuda")
    found, one_by_one, at_home = launched(**given), fused(**given), fused(**arguments(case, "cpu"))
    ours, theirs = microseconds(launched, given), microseconds(fused, given)
    tensors = [value for value in given.values() if isinstance(value, torch.Tensor)]
    num_bytes = sum(x.nbytes for x in (*tensors, *_tuple(found)))
    return {
        "microseconds": round(ours, 2),
        "one_by_one_microseconds": round(theirs, 2),
        "times_as_fast": round(theirs / ours, 2),
        "gigabytes_a_second": round(num_bytes / ours / 1000, 1),
        "different_from_gpu": round(_different(found, one_by_one), 6),
        "different_from_cpu": round(_different(found, at_home), 6),
        "error_to_cpu": float(f"{_error(found, at_home):.2e}"),
    }


def main() -> None:
    """Measure and write `results/gpu_fused.json`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=harness.RESULTS / "gpu_fused.json")
    out = parser.parse_args().out
    if not torch.cuda.is_available():
        print("needs a CUDA GPU: nothing measured")
        return
    table: dict[str, Any] = {}
    for tokens in TOKENS:
        for name, case in cases(tokens).items():
            try:
                table[f"{name}, {tokens} tokens"] = measure(case)
            except Exception as error:  # noqa: BLE001 - a case that fails is a row, and the others are measured
                table[f"{name}, {tokens} tokens"] = {"error": f"{type(error).__name__}: {error}"[:400]}
    measured = [row for row in table.values() if "error" not in row]
    figures = {
        "rows": table,
        "least_times_as_fast": min((row["times_as_fast"] for row in measured), default=0),
        "largest_error_to_cpu": max((row["error_to_cpu"] for row in measured), default=0),
        "failed": len(table) - len(measured),
    }
    harness.write(out, "gpu_fused", figures)


if __name__ == "__main__":
    main()
