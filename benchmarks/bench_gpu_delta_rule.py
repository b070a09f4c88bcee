"""On a GPU: microseconds of the gated delta rule, the selective scan and wkv, beside what memory and products allow.

Claims: a decode step of the delta rule reads and writes the states as fast as a copy of a large tensor does; a prompt
is computed without reading the host, in a fraction of the time of the chunks in PyTorch. Shapes are those of Qwen3-Next
(32 value heads, 16 key heads, sizes 128), of Falcon Mamba (8192 channels, 16 rows) and of RWKV (4096 channels), in
bfloat16. Calls are captured many times in a row in a CUDA graph; each reads states of its own. Other sizes of tiles are
measured beside the chosen ones.

    python benchmarks/bench_gpu_delta_rule.py [--out FILE]
"""

from __future__ import annotations

import argparse
import contextlib
import io
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch
from support import harness
from support.gpu_times import copy_rate, microseconds

from precast.kernels import registry
from precast.kernels.choices import records_of
from precast.kernels.delta_rule import launches
from precast.kernels.records import Record

KEYS, HEADS, SIZE = 16, 32, 128
STATE_BYTES = 64 << 20
"""Of states that are read between two readings of one, where a step has fewer: they don't stay in the cache."""
MOST_CALLS = 64
WALKS = ((8, 1), (16, 1), (16, 2), (32, 2), (32, 4), (64, 4))
"""Columns of the state of a program that walks, and warps."""
TILES = ((64, 32, 4, 2), (64, 16, 4, 2))
"""Tokens of a chunk, columns, warps and stages of the pass over chunks: none that keeps anything on the stack."""
Sample = dict[str, Any]


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda").bfloat16()


def bounds(lengths: list[int], slots: torch.Tensor, state: torch.Tensor) -> Sample:
    """Sequences that have had one token before."""
    ends = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
    return {"state": state, "slots": slots, "cu_seqlens": ends, "kv_lens": ends.diff() + 1}


def delta_rule(lengths: list[int], slots: torch.Tensor, state: torch.Tensor) -> Sample:
    total = sum(lengths)
    return {
        **{name: normal(1, total, heads, SIZE) for name, heads in (("q", KEYS), ("k", KEYS), ("v", HEADS))},
        "decay": -0.3 * torch.rand(1, total, HEADS, device="cuda"), "beta": normal(1, total, HEADS).sigmoid(),
        **bounds(lengths, slots, state), "scale": SIZE**-0.5, "normalise": True,
    }  # fmt: skip


def selective_scan(lengths: list[int], slots: torch.Tensor, state: torch.Tensor) -> Sample:
    total, channels, width = sum(lengths), *state.shape[1:]
    return {
        **{name: normal(1, total, channels) for name in ("x", "dt")},
        **{name: normal(1, total, width) for name in ("b", "c")},
        "a": -torch.rand(channels, width, device="cuda"), "d": torch.ones(channels, device="cuda"),
        "dt_bias": torch.full((channels,), -3.0, device="cuda"), **bounds(lengths, slots, state), "softplus": True,
    }  # fmt: skip


def wkv(lengths: list[int], slots: torch.Tensor, state: torch.Tensor) -> Sample:
    total, channels = sum(lengths), state.shape[2]
    ones = torch.ones(channels, device="cuda")
    return {"k": normal(1, total, channels), "v": normal(1, total, channels), "decay": -ones, "first": ones,
            **bounds(lengths, slots, state)}  # fmt: skip


OPS: dict[str, tuple[Callable[..., Sample], tuple[int, ...]]] = {
    "delta_rule": (delta_rule, (HEADS, SIZE, SIZE)),
    "selective_scan": (selective_scan, (8192, 16)),
    "wkv": (wkv, (3, 4096)),
}
"""The arguments of an op, and the shape of its state."""


def record_of(op: str, variant: str = "") -> Record:
    name = f"triton.stateful_{op}{variant}"
    return next(each for each in records_of(f"precast.stateful_{op}", 1) if each.name == name)


def samples(op: str, lengths: list[int], *, least: int = 1) -> list[Sample]:
    """Calls of so many sequences, at least `least` of them, with slots of their own in one state."""
    make, shape = OPS[op]
    one = 4 * torch.Size(shape).numel()
    count = min(MOST_CALLS, max(least, STATE_BYTES // (one * len(lengths)))) if least > 1 else 1
    state = 0.1 + 0.1 * torch.rand(count * len(lengths), *shape, device="cuda")
    slots = torch.randperm(len(state), device="cuda").int().view(count, -1)
    return [make(lengths, own, state) for own in slots]


def moved(sample: Sample) -> int:
    """Bytes that must be read and written: the arguments, the results, the states twice."""
    given = sum(x.nbytes for name, x in sample.items() if isinstance(x, torch.Tensor) and name != "state")
    value = sample.get("v", sample.get("x"))
    assert value is not None
    return given + value.nbytes + 2 * len(sample["slots"]) * sample["state"][0].nbytes


def agreement(op: str, run: Callable[..., torch.Tensor], lengths: list[int]) -> float:
    """The largest difference from PyTorch's implementation, in units of the largest number."""
    other = next(each for each in records_of(f"precast.stateful_{op}", 1) if each.name == f"torch.stateful_{op}")
    (sample,) = samples(op, lengths)
    kept = sample["state"].clone()
    expected = registry.function_of(other)(**sample | {"state": kept})
    found = run(**sample)
    pairs = ((found, expected), (sample["state"], kept))
    return max(float((x.float() - y.float()).abs().max() / y.abs().max()) for x, y in pairs)


def timed(op: str, record: Record, lengths: list[int], *, least: int) -> dict[str, Any]:
    """Microseconds of a call, and its difference from PyTorch's."""
    run = registry.function_of(record)
    made = samples(op, lengths, least=least)
    outs = [run(**sample) for sample in made]
    calls: list[Callable[[], Any]] = [
        lambda sample=sample, out=out: run(**sample, out=out) for sample, out in zip(made, outs, strict=True)
    ]
    calls *= max(1, 5 // len(calls))
    return {"microseconds": round(microseconds(calls), 2), "worst_difference": f"{agreement(op, run, lengths):.1e}"}


def decode(op: str, sequences: int, bytes_per_second: float) -> dict[str, Any]:
    """A step of one token for each sequence."""
    record = record_of(op, ".few" if op == "delta_rule" and sequences <= launches.FEW else "")
    found = timed(op, record, [1] * sequences, least=8)
    (sample,) = samples(op, [1] * sequences)
    return {**found, "floor_microseconds": round(1e6 * moved(sample) / bytes_per_second, 2)}


@contextlib.contextmanager
def choosing(name: str, value: Any) -> Iterator[None]:
    """Another choice of sizes than that of `precast.kernels.delta_rule.launches`."""
    chosen = getattr(launches, name)
    setattr(launches, name, lambda *_, **__: value)
    try:
        yield
    finally:
        setattr(launches, name, chosen)


def tried(variant: str, lengths: list[int], *, least: int) -> str:
    """Microseconds of the delta rule, and its difference from PyTorch's."""
    return " ".join(map(str, timed("delta_rule", record_of("delta_rule", variant), lengths, least=least).values()))


def walks(sequences: int) -> dict[str, Any]:
    """The delta rule's decode step with other columns and warps."""
    found = {}
    for e, warps in WALKS:
        with choosing("columns", launches.Columns(e, warps)):
            found[f"{e} x {warps}"] = attempt(lambda: tried(".walk", [1] * sequences, least=8))
    return found


def parts(lengths: list[int]) -> dict[str, float]:
    """Microseconds of each launch of the delta rule in chunks by itself, which reads whatever lies in the workspace."""
    record = record_of("delta_rule")
    found = {}
    for i, name in enumerate(("walk", "prepare", "pass")):
        alone = msgspec.structs.replace(record, runs=lambda use, i=i: launches.chunked(use)[i : i + 1])
        run = registry.function_of(alone)
        (sample,) = samples("delta_rule", lengths)
        found[name] = round(microseconds([lambda: run(**sample)] * 5), 1)  # noqa: B023 - called at once
    return found


def prefill(op: str, lengths: list[int], bytes_per_second: float, flops_per_second: float) -> dict[str, Any]:
    """Whole prompts, and the same by PyTorch, which reads the host."""
    found = timed(op, record_of(op), lengths, least=1)
    (sample,) = samples(op, lengths)
    floor = moved(sample) / bytes_per_second
    if op == "delta_rule":
        # Of a token and head: k and q by keys of a chunk, inverse and scores by values; k, q and k^T by the state.
        flops = 2 * sum(lengths) * HEADS * (4 * 64 * SIZE + 3 * SIZE * SIZE)
        floor += flops / flops_per_second
    other = next(each for each in records_of(f"precast.stateful_{op}", 1) if each.name == f"torch.stateful_{op}")
    run = registry.function_of(other)
    return {
        **found,
        "floor_microseconds": round(1e6 * floor, 1),
        "pytorch_microseconds": round(eager(lambda: run(**sample)), 1),
    }


def tiles(lengths: list[int]) -> dict[str, Any]:
    """The delta rule's prompts with other tiles."""
    found = {}
    for tile in TILES:
        with choosing("tile_of", launches.Tile(*tile)):
            found[" x ".join(map(str, tile))] = attempt(lambda: tried("", lengths, least=1))
    return found


def eager(call: Callable[[], Any]) -> float:
    """Microseconds of a call that waits for the GPU: the median of three."""
    call()
    times = []
    for _ in range(3):
        torch.cuda.synchronize()
        started = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append(1e6 * (time.perf_counter() - started))
    return statistics.median(times)


def product_rate() -> float:
    """Operations a second of a product of 8192 x 8192 in bfloat16."""
    x, y = normal(8192, 8192), normal(8192, 8192)
    return 2 * 8192**3 / microseconds([lambda: x @ y] * 5) * 1e6


def attempt(case: Callable[[], Any]) -> Any:
    """What the case gives, or why it failed: the others are measured all the same."""
    try:
        return case()
    except Exception as error:  # noqa: BLE001 - whatever it is
        return {"failed": f"{type(error).__name__}: {error}"[:300]}


def main() -> None:
    """Measure and write `results/gpu_delta_rule.json`, a line for each case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=harness.RESULTS / "gpu_delta_rule.json")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    started = time.perf_counter()
    with torch.inference_mode():
        memory, products = copy_rate(), product_rate()
        figures: dict[str, Any] = {
            "copy_gigabytes_per_second": round(memory / 1e9),
            "product_teraflops": round(products / 1e12),
        }
        print(figures)
        prompts: dict[str, list[int]] = {"4096": [4096], "8 x 512": [512] * 8}
        cases: dict[str, Callable[[], Any]] = {
            **{f"{op}, {n} decode": lambda op=op, n=n: decode(op, n, memory) for op in OPS for n in (1, 64)},
            **{
                f"{op}, {name}": lambda op=op, lengths=lengths: prefill(op, lengths, memory, products)
                for op in OPS
                for name, lengths in prompts.items()
            },
            **{f"parts, {name}": lambda lengths=lengths: parts(lengths) for name, lengths in prompts.items()},
            **{f"walks, {n}": lambda n=n: walks(n) for n in (1, 64)},
            **{f"tiles, {name}": lambda lengths=lengths: tiles(lengths) for name, lengths in prompts.items()},
        }
        for name, case in cases.items():
            figures[name] = attempt(case)
            print(f"{name} | {figures[name]}", flush=True)
    figures["seconds"] = round(time.perf_counter() - started)
    print(f"{figures['seconds']} s")
    with contextlib.redirect_stdout(io.StringIO()):
        harness.write(arguments.out, "gpu_delta_rule", figures)


if __name__ == "__main__":
    main()
