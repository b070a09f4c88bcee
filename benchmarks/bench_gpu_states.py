"""On a GPU: microseconds of state space scans, linear attention and causal convolutions, against what must be moved.

Shapes of Nemotron-H-8B and -56B, and of MiniMax's lightning attention, in bfloat16: steps in which 1 or 64 sequences
decode, prompts of 4096 tokens, and 63 that decode beside a prompt. The floor of a call is the larger of two times: that
of its bytes, states read and written once, at the rate of a copy of 1 GiB, and that of its products in chunks at the
rate of a product of matrices of 8192; both rates are measured in the same run. Calls follow one another in a CUDA graph
over other slots and other tokens, so that the L2 cache doesn't hold what the next one reads. `torch_microseconds` is
PyTorch's implementation, waits for the host among them.

`drift`: the root mean square of differences from the definition in float32, over that of its result, with bfloat16
tokens; `rounding` is what remains if the definition's own result is rounded to bfloat16, `transformers_drift` that of
transformers' function for the same op over the same tokens. `--tiles` also tries other tiles for prompts.

    python benchmarks/bench_gpu_states.py [--tiles] [--out FILE]
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from support import harness
from support.gpu_times import microseconds

from precast.kernels import registry
from precast.kernels.choices import records_of
from precast.kernels.launch import as_function
from precast.kernels.linear_attention.launches import Tile, walk_and_chunks
from precast.kernels.records import Record

Sample = dict[str, Any]
CUDA = "cuda"
TILES = (
    Tile(64, 32, 4, 1), Tile(64, 32, 4, 3), Tile(64, 32, 8, 1), Tile(64, 32, 8, 2), Tile(64, 64, 4, 1),
    Tile(64, 64, 8, 1), Tile(64, 64, 8, 2), Tile(64, 16, 4, 2), Tile(32, 32, 4, 2), Tile(32, 64, 4, 2),
    Tile(128, 32, 8, 1),
)  # fmt: skip
CHUNK = 64
"""Tokens of a chunk, of which the floor counts products."""
FEW_TOKENS = 512
"""Of the prompts whose drift is measured: the definition goes token by token."""


class Case(NamedTuple):
    """An op with its arguments for so many tokens; numbers of a state, and of a token's products with it, a head."""

    op: str
    make: Callable[[int], Sample]
    state: tuple[int, ...]
    heads: int = 0


def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return (scale * torch.randn(shape, device=CUDA)).bfloat16()


def scan(tokens: int, heads: int, size: int, groups: int, width: int) -> Sample:
    fused = normal(1, tokens, heads * size + 2 * groups * width)
    x, b, c = fused.split([heads * size, groups * width, groups * width], -1)
    return {
        "x": x.unflatten(2, (heads, size)), "dt": normal(1, tokens, heads),
        "a": -torch.rand(heads, device=CUDA) * 8 - 0.5,
        "b": b.unflatten(2, (groups, width)), "c": c.unflatten(2, (groups, width)), "d": normal(heads),
        "dt_bias": normal(heads) - 2, "softplus": True, "dt_min": 0.0, "dt_max": float("inf"),
    }  # fmt: skip


def attention(tokens: int, heads: int, size: int) -> Sample:
    q, k, v = normal(1, tokens, heads, 3 * size, scale=0.5).split(size, -1)
    return {"q": q, "k": k, "v": v, "decay": -torch.rand(heads, device=CUDA), "scale": 1.0}


def conv(tokens: int, channels: int) -> Sample:
    wide = normal(1, tokens, channels + 8192)
    return {
        "x": wide[..., 8192:], "weight": normal(channels, 4), "bias": normal(channels), "activation": "silu",
    }  # fmt: skip


CASES: dict[str, Case] = {
    "Nemotron-H-8B scan": Case("state_space_scan", lambda t: scan(t, 128, 64, 8, 128), (128, 64, 128), 128),
    "Nemotron-H-56B scan": Case("state_space_scan", lambda t: scan(t, 256, 64, 8, 256), (256, 64, 256), 256),
    "Nemotron-H-8B scan, a rank of 8": Case("state_space_scan", lambda t: scan(t, 16, 64, 1, 128), (16, 64, 128), 16),
    "MiniMax attention": Case("linear_attention", lambda t: attention(t, 64, 128), (64, 128, 128), 64),
    "Nemotron-H-8B conv": Case("causal_conv", lambda t: conv(t, 10240), (10240, 3)),
}
STEPS: dict[str, list[tuple[int, int]]] = {
    # (tokens, context with them) of each sequence
    "decode 1": [(1, 100)],
    "decode 64": [(1, 100)] * 64,
    "prompt 4096": [(4096, 4096)],
    "63 beside a prompt": [(1, 100)] * 63 + [(1024, 1024)],
}


def held(case: Case, step: Sequence[tuple[int, int]], first: int, states: torch.Tensor) -> Sample:
    """States and metadata of a step whose sequences have the slots from `first` on."""
    bounds = [0, *itertools.accumulate(tokens for tokens, _ in step)]
    metadata = {
        "slots": [(first + i) % len(states) for i in range(len(step))], "cu_seqlens": bounds,
        "kv_lens": [context for _, context in step],
    }  # fmt: skip
    return {"state": states} | {
        name: torch.tensor(values, dtype=torch.int32, device=CUDA) for name, values in metadata.items()
    }


def states_of(case: Case, count: int) -> torch.Tensor:
    dtype = torch.bfloat16 if case.op == "causal_conv" else torch.float32
    return torch.randn(count, *case.state, device=CUDA, dtype=dtype) * 0.1


def rates() -> dict[str, float]:
    """Bytes a second that a copy of 1 GiB reads and writes; operations a second of a product of bfloat16."""
    x = torch.empty(1 << 30, dtype=torch.uint8, device=CUDA)
    y = torch.empty_like(x)
    moved = 2 * x.numel() / microseconds([lambda: y.copy_(x)] * 10) * 1e6
    a = normal(8192, 8192)
    product = torch.empty_like(a)
    computed = 2 * 8192**3 / microseconds([lambda: torch.matmul(a, a, out=product)] * 10) * 1e6
    return {"bytes_per_second": moved, "flops_per_second": computed}


def floor_us(case: Case, sample: Sample, step: Sequence[tuple[int, int]], machine: dict[str, float]) -> float:
    """The least microseconds of a call."""
    read = [x for name, x in sample.items() if isinstance(x, torch.Tensor) and name != "state"]
    result = sample["x" if "x" in sample else "v"]
    state = sample["state"][0].numel() * sample["state"].element_size()
    moved = sum(x.numel() * x.element_size() for x in (*read, result)) + 2 * state * len(step)
    flops = 0
    if case.heads:
        wide, narrow = case.state[1:]
        chunked = sum(count for count, _ in step if count > 1)
        flops = 2 * case.heads * chunked * (2 * wide * narrow + CHUNK * (wide + narrow) // 2)
    return 1e6 * max(moved / machine["bytes_per_second"], flops / machine["flops_per_second"])


def ring(
    function: Callable[..., Any], case: Case, step: Sequence[tuple[int, int]], *, graph: bool = True
) -> list[Callable[[], Any]]:
    """Calls over tokens and slots of their own, at least 12 of them."""
    tokens = sum(count for count, _ in step)
    copies = 4 if tokens > 64 else 16
    states = states_of(case, max(2 * len(step), 24))
    samples = [case.make(tokens) | held(case, step, i * len(step), states) for i in range(copies)]
    outs = [torch.empty_like(s["x" if "x" in s else "v"], memory_format=torch.contiguous_format) for s in samples]

    def call(sample: Sample, out: torch.Tensor) -> Callable[[], Any]:
        return (lambda: function(**sample, out=out)) if graph else (lambda: function(**sample))

    calls = [call(sample, out) for sample, out in zip(samples, outs, strict=True)]
    return list(itertools.islice(itertools.cycle(calls), max(12, copies)))


def on_host(calls: Sequence[Callable[[], Any]]) -> float:
    """Microseconds of a call by the clock, with its waits."""
    calls[0]()
    torch.cuda.synchronize()
    started = time.perf_counter()
    for call in calls[:3]:
        call()
    torch.cuda.synchronize()
    return 1e6 * (time.perf_counter() - started) / 3


def record_of(case: Case, tokens: int, kind: str = "triton") -> Record:
    """The first record of a kind that takes steps of so many tokens."""
    for record in records_of(f"precast.stateful_{case.op}", 1):
        least, most = record.sizes.get("T", (0, None))
        if record.kind == kind and least <= tokens and (most is None or tokens <= most):
            return record
    raise AssertionError(f"{case.op}: no record of {kind}")


def row(case: Case, step: Sequence[tuple[int, int]], machine: dict[str, float]) -> dict[str, Any]:
    """A line of the table."""
    tokens = sum(count for count, _ in step)
    ours = microseconds(ring(as_function(record_of(case, tokens)), case, step))
    sample = case.make(tokens) | held(case, step, 0, states_of(case, len(step)))
    least = floor_us(case, sample, step, machine)
    found = {"microseconds": round(ours, 1), "floor": round(least, 1), "of_floor": round(ours / least, 2)}
    plain = registry.function_of(record_of(case, tokens, "torch"))
    found["torch_microseconds"] = round(on_host(ring(plain, case, step, graph=False)), 0)
    return found


def drift(case: Case) -> dict[str, float]:
    """How far results of a prompt are from the definition."""
    step = [(FEW_TOKENS, FEW_TOKENS)]
    sample = case.make(FEW_TOKENS) | held(case, step, 0, states_of(case, 1))
    wide = {
        name: x.float() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for name, x in sample.items()
    }
    reference = next(spec.reference for spec in registry.specs() if spec.name == f"precast.stateful_{case.op}")
    states = {"state": sample["state"].clone()}
    expected = reference(**wide | {"state": wide["state"].clone()})
    found = as_function(record_of(case, FEW_TOKENS))(**sample | states)
    measured = {"drift": off(found, expected), "rounding": off(expected.bfloat16(), expected)}
    with contextlib.suppress(ImportError):
        theirs = transformers_result(case, sample)
        if theirs is not None:
            measured["transformers_drift"] = off(theirs, expected)
    return {name: float(f"{value:.2e}") for name, value in measured.items()}


def off(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.float() - expected).square().mean().sqrt() / expected.square().mean().sqrt())


def transformers_result(case: Case, sample: Sample) -> torch.Tensor | None:
    """What transformers' own function gives, in the dtypes that its layers call it with."""
    if case.op == "state_space_scan":
        from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan

        return mamba2_chunk_scan(
            sample["x"], sample["dt"], sample["a"], sample["b"], sample["c"], chunk_size=256, D=sample["d"],
            dt_bias=sample["dt_bias"], dt_softplus=True, dt_limit=(0.0, float("inf")),
        )  # fmt: skip
    if case.op == "causal_conv":
        from transformers.models.mamba2.modeling_mamba2 import causal_conv1d_fn

        x = sample["x"].transpose(1, 2)
        return causal_conv1d_fn(x, sample["weight"], sample["bias"], "silu").transpose(1, 2)
    return lightning(sample)


def lightning(sample: Sample) -> torch.Tensor:
    """The sums of MiniMaxLightningAttention of transformers, block by block, in the dtype of its tokens."""
    block = 256
    q, k, v = (sample[name].transpose(1, 2) for name in "qkv")
    slope = -sample["decay"][:, None, None]
    i = torch.arange(block, device=CUDA) + 1
    into, out_of = torch.exp(-slope * i[:, None]), torch.exp(-slope * (block - i[:, None]))
    apart = slope[None] * (i[:, None] - i[None, :])
    within = torch.exp(torch.where(apart >= 0, -apart, -torch.inf))
    state = torch.zeros(1, *q.shape[1:2], q.shape[-1], v.shape[-1], device=CUDA, dtype=v.dtype)
    results = []
    for first in range(0, q.shape[2], block):
        own = slice(first, first + block)
        weights = torch.matmul(q[:, :, own], k[:, :, own].transpose(-1, -2)) * within.to(q.dtype)
        results.append(torch.matmul(weights, v[:, :, own]) + torch.matmul(q[:, :, own] * into.to(q.dtype), state))
        added = torch.matmul((k[:, :, own] * out_of.to(k.dtype)).transpose(-1, -2), v[:, :, own])
        state = state * torch.exp(-slope * block).to(state.dtype) + added
    return torch.cat(results, 2).transpose(1, 2)


def tried(case: Case) -> dict[str, Any]:
    """Microseconds of a prompt by tile, the fastest first; in its place what went wrong."""
    found: dict[str, Any] = {}
    for tile in TILES:
        record = tiled(case, tile)
        name = " ".join(map(str, tile))
        found[name] = attempt(lambda r=record: round(microseconds(ring(as_function(r), case, STEPS["prompt 4096"])), 1))
    return dict(sorted(found.items(), key=lambda item: item[1] if isinstance(item[1], float) else 1e9))


def tiled(case: Case, tile: Tile) -> Record:
    """What computes prompts, with other tiles."""
    return msgspec.structs.replace(record_of(case, 4096), runs=partial(walk_and_chunks, tile=tile))


def compile_one(job: tuple[str, Tile | None]) -> None:
    """In a process of its own: what `main` is going to launch, into Triton's cache."""
    name, tile = job
    case = CASES[name]
    with contextlib.suppress(Exception):  # its row says so
        for tokens in (1, 64) if tile is None else (64,):
            record = record_of(case, tokens) if tile is None else tiled(case, tile)
            as_function(record)(**case.make(tokens), **held(case, [(tokens, tokens)], 0, states_of(case, 1)))
        torch.cuda.synchronize()


def compile_all(with_tiles: bool) -> None:
    """All launches, some processes at a time."""
    jobs: list[tuple[str, Tile | None]] = [(name, None) for name in CASES]
    jobs += [(name, tile) for name, case in CASES.items() if case.heads and with_tiles for tile in TILES]
    with multiprocessing.get_context("spawn").Pool(max(1, min(8, (os.cpu_count() or 2) - 2))) as pool:
        pool.map(compile_one, jobs, chunksize=1)


def attempt(measure: Callable[[], Any]) -> Any:
    """What it gives, or what went wrong: the others are measured all the same."""
    try:
        return measure()
    except Exception as error:  # noqa: BLE001
        return f"{type(error).__name__}: {error}"[:160]


def main() -> None:
    """Measure and write `results/gpu_states.json`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiles", action="store_true")
    parser.add_argument("--out", type=Path, default=harness.RESULTS / "gpu_states.json")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    started = time.perf_counter()
    compile_all(arguments.tiles)
    print(f"compiled after {time.perf_counter() - started:.0f} s", flush=True)
    with torch.inference_mode():
        machine = rates()
        figures: dict[str, Any] = {name: round(rate / 1e9) for name, rate in machine.items()}
        figures = {"copy_gigabytes_per_second": figures["bytes_per_second"], "cases": {},
                   "product_gigaflops_per_second": figures["flops_per_second"]}  # fmt: skip
        print({name: value for name, value in figures.items() if name != "cases"})
        for name, case in CASES.items():
            made = {step: attempt(partial(row, case, sequences, machine)) for step, sequences in STEPS.items()}
            made["drift"] = attempt(partial(drift, case))
            if arguments.tiles and case.heads:
                made["tiles"] = tried(case)
            figures["cases"][name] = made
            shown = (f"{key}: {value}" for key, value in made.items() if key != "tiles")
            print(name, *shown, str(made.get("tiles", ""))[:400], sep="\n    ", flush=True)
    figures["seconds"] = round(time.perf_counter() - started)
    with contextlib.redirect_stdout(io.StringIO()):
        harness.write(arguments.out, "gpu_states", figures)


if __name__ == "__main__":
    main()
