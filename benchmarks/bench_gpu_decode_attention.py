"""On a GPU: microseconds that attention adds to a layer of a decode step, by how its launches are made.

Claims: attention of single tokens over short contexts takes hardly more than a launch that does nothing, and over long
ones the time of their bytes. A graph holds layers in a row, each of the launches that stand around attention: for up to
8 sequences the product of query, key and value (the weight stream), rotation and write, attention, and the output's
product; for more, rotation and write alone. The same graph without attention is subtracted. Shapes are published ones
in bfloat16, in pages of 16 tokens in random order.

    python benchmarks/bench_gpu_decode_attention.py [--seconds N] [--out FILE] [--few] [--models NAME ...]

With `--few` steps are of up to 8 sequences, else of more. Of these the kernel alone is timed, without the launches for
sequences of several tokens that stand in front of it.

Every row compares what was tried with Triton's kernels, one after the other, and says `wrong` where results differ; and
`race` where a chain gives other bits than the same sums read after the kernel in front.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import bench_gpu_attention as attention
import torch
from bench_gpu_attention import MODELS, PLAIN, Case, Choice, Given, Model
from support import harness

from precast.kernels import cuda_launch
from precast.kernels.attention.decode import MANY as MANY_SLOTS
from precast.kernels.attention.decode import (
    MOST_FEW,
    MOST_SHARED_BYTES,
    Decode,
    decode_launch,
    decode_of,
    shared_bytes,
)
from precast.kernels.attention.launches import FEW_SLOTS, Splits, Tile, split_tile
from precast.kernels.choices import records_of
from precast.kernels.cuda_source import Constants, compiled
from precast.kernels.launch import as_function, launched_of
from precast.kernels.linear.stream_plan import MAX_ROWS
from precast.kernels.records import Record

LAYERS = 32
SOURCE = "attention/decode.cu"
WIDTH = 4096
"""Of the hidden state, and the products around attention."""
FEW_CASES = {
    "llama-8b": [Case(1, 1, 256), Case(8, 1, 256), Case(1, 1, 4096), Case(8, 1, 4096), Case(1, 1, 32768),
                 Case(2, 1, 1024)],
    "gemma-12b": [Case(1, 1, 256), Case(1, 1, 4096), Case(8, 1, 256), Case(8, 1, 4096)],
    "gpt-oss-20b": [Case(1, 1, 256), Case(8, 1, 256)],
    "qwen-30b": [Case(1, 1, 256), Case(8, 1, 256), Case(1, 1, 32768)],
}  # fmt: skip
MANY_CASES = {
    "llama-8b": [Case(16, 1, 150), Case(16, 1, 2048), Case(24, 1, 2048), Case(32, 1, 150), Case(32, 1, 2048),
                 Case(48, 1, 150), Case(48, 1, 4096), Case(64, 1, 150), Case(64, 1, 4096), Case(96, 1, 2048),
                 Case(256, 1, 150)],
    "gpt-oss-20b": [Case(32, 1, 150), Case(64, 1, 150), Case(256, 1, 150)],
    "gemma-12b": [Case(16, 1, 150), Case(32, 1, 150), Case(64, 1, 150), Case(64, 1, 4096)],
}  # fmt: skip
"""Of more than eight sequences."""
FEW = [
    Decode(8, 4, 2), Decode(8, 4, 4), Decode(8, 2, 2), Decode(8, 2, 4), Decode(8, 8, 2), Decode(4, 4, 2),
    Decode(4, 4, 1), Decode(4, 4, 4), Decode(4, 8, 2), Decode(2, 4, 2), Decode(2, 4, 4),
    Decode(2, 8, 1), Decode(2, 8, 2), Decode(2, 8, 3), Decode(1, 8, 2), Decode(1, 16, 1),
]  # fmt: skip
MANY = [
    Decode(1, 1, 3), Decode(1, 1, 6), Decode(1, 2, 2), Decode(1, 2, 3), Decode(1, 4, 1), Decode(1, 4, 2),
    Decode(1, 4, 3), Decode(1, 8, 2),
]  # fmt: skip
WIDE, NARROW = Tile(16, 128, 8, 2), Tile(16, 64, 4, 3)
OTHERS = {
    1: [Choice(split=tile, splits=Splits(most, 64)) for tile in (WIDE, NARROW) for most in (1, 2, 4)],
    8: [Choice(split=tile, splits=Splits(1, 64)) for tile in (WIDE, NARROW)],
}
"""Of Triton's kernels, over short contexts with heads of 128 elements, by sequences."""


class Layer(NamedTuple):
    """What the launches in front of attention take, and the weights of both products."""

    weights: tuple[torch.Tensor, torch.Tensor]
    fused: torch.Tensor
    turned: dict[str, Any]


def chosen(model: Model, case: Case) -> Decode:
    """What records have in a step of so many tokens."""
    given = attention.layers_of(model, case, "meta")[0]
    ends = [FEW_SLOTS, MOST_FEW, *(most for most in MANY_SLOTS if most)]
    slots = next((most for most in ends if case.seqs <= most), None)
    return decode_of(attention.use_of(given.arguments, given.out, (9, 0)), slots)


def decodes_of(model: Model, case: Case) -> list[Decode]:
    """Those that fit, and what records have."""
    tried = [*(FEW if case.seqs <= MAX_ROWS else MANY), chosen(model, case)]
    return [each for each in dict.fromkeys(tried) if shared_bytes(model.size, each) <= MOST_SHARED_BYTES]


def record_of(model: Model, case: Case, tried: Decode | Choice) -> Record:
    """What is tried, as a record."""
    if isinstance(tried, Choice):
        return attention.record_of(model, case, tried)
    return Record(
        name="tried", op="precast.paged_attention", runs=lambda use: (decode_launch(use, tried),),
        workspace=lambda use: 0, allocates=False,
    )  # fmt: skip


def calls_of(given: list[Given], model: Model, case: Case, tried: Decode | Choice) -> list[Callable[[], None]]:
    """Attention of each layer."""
    use = attention.use_of(given[0].arguments, given[0].out, torch.cuda.get_device_capability())
    launched = launched_of(record_of(model, case, tried), use)
    return [lambda each=each: launched(out=each.out, **each.arguments) for each in given]  # type: ignore[misc]


def compile_source(constants: Constants) -> tuple[Constants, bytes]:
    """For another process: NVRTC compiles one source at a time."""
    return constants, compiled(SOURCE, constants, (9, 0))


def compile_all(cases: dict[str, list[Case]]) -> None:
    """Everything that will be tried, on all cores."""
    jobs, sources = [], set()
    for name in cases:
        for case in cases[name]:
            same = case._replace(tokens=256)
            given = attention.layers_of(MODELS[name], same, "meta")[0]
            use = attention.use_of(given.arguments, given.out, (9, 0))
            for each in decodes_of(MODELS[name], case):
                sources.add(tuple(decode_launch(use, each).constants.items()))
            jobs += [(MODELS[name], same, each, (9, 0)) for each in (PLAIN, *triton_of(MODELS[name], name, case))]
    with ProcessPoolExecutor(max(1, min(14, (os.cpu_count() or 2) - 2)), mp_context=get_context("spawn")) as pool:
        problems = pool.map(attention.compile_one, list(dict.fromkeys(jobs)))
        made = dict(pool.map(compile_source, sources))
        for problem in {each for each in problems if each}:
            print("not compiled:", problem[:300], file=sys.stderr)

    def found(file: str, constants: Constants, capability: tuple[int, int]) -> bytes:
        return made.get(constants) or compiled(file, constants, capability)

    cuda_launch.compiled = found


def triton_of(model: Model, name: str, case: Case) -> list[Choice]:
    """Triton's kernels: as its own record has them, and over short contexts some others."""
    is_short = name == "llama-8b" and case.tokens <= 256
    slots = range(case.seqs, case.seqs + 1)
    given = attention.layers_of(model, case, "meta")[0]
    plain = Choice(split=split_tile(attention.use_of(given.arguments, given.out, (9, 0)), slots))
    return [plain, *(OTHERS.get(case.seqs, []) if is_short else [])]


def layers_of(model: Model, case: Case, given: list[Given]) -> Iterator[Layer]:
    """What stands in front of each layer's attention."""
    tokens, columns = case.seqs, (model.heads + 2 * model.kv_heads) * model.size

    def drawn(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, device="cuda") * shape[-1] ** -0.5).bfloat16()

    weights = [(drawn(columns, WIDTH), drawn(WIDTH, model.heads * model.size)) for _ in range(4)]
    cos, sin = (torch.rand(1, tokens, model.size // 2, device="cuda").bfloat16() for _ in range(2))
    lists = given[0].arguments
    last = lists["page_indptr"][1:].long() - 1
    slot = (case.tokens - 1) % attention.PAGE_SIZE
    slots = lists["page_indices"][last].long() * attention.PAGE_SIZE + slot
    for i, each in enumerate(given):
        fused = torch.randn(1, tokens, columns, device="cuda").bfloat16()
        q, k, v = (
            x.unflatten(-1, (-1, model.size))
            for x in fused.split([n * model.size for n in (model.heads, model.kv_heads, model.kv_heads)], -1)
        )
        turned = {
            "q": q, "k": k, "v": v, "cos": cos, "sin": sin, "q_weight": None, "k_weight": None,
            "k_cache": each.arguments["k_cache"], "v_cache": each.arguments["v_cache"], "slot_mapping": slots,
            "interleaved": False, "eps": None, "offset": 0.0, "cast_before_scale": False,
        }  # fmt: skip
        yield Layer(weights[i % 4], fused, turned)


def takes(record: Record, tokens: int) -> bool:
    """Whether a step of so many tokens is within the sizes of a record."""
    low, high = record.sizes["T"]
    return low <= tokens and (high is None or tokens <= high)


class Chain:
    """Layers in a row."""

    def __init__(self, model: Model, case: Case, given: list[Given]) -> None:
        self.given = (given * LAYERS)[:LAYERS]
        self.layers = (list(layers_of(model, case, given)) * LAYERS)[:LAYERS]
        self._has_products = case.seqs <= MAX_ROWS
        self._turn = as_function(records_of("precast.rotary_write_kv", 1)[0])
        streams = [each for each in records_of("aten.linear.default", 1) if each.kind == "cuda" and "T" in each.sizes]
        # Each takes some numbers of rows.
        self._multiply = as_function(next((each for each in streams if takes(each, case.seqs)), streams[0]))
        self.hidden = torch.randn(1, case.seqs, WIDTH, device="cuda").bfloat16()
        self.result = torch.empty_like(self.hidden)

    def run(self, calls: list[Callable[[], None]] | None) -> None:
        """One step. `calls`: attention of each layer, None for none."""
        hidden = self.hidden
        for i, (each, layer) in enumerate(zip(self.given, self.layers, strict=True)):
            if self._has_products:
                self._multiply(input=hidden, weight=layer.weights[0], bias=None, out=layer.fused)
            self._turn(**layer.turned, out=each.arguments["q"])
            if calls is not None:
                calls[i % len(calls)]()
            if self._has_products:
                self._multiply(input=each.out.flatten(2), weight=layer.weights[1], bias=None, out=self.result)
                hidden = self.result

    def microseconds(self, calls: list[Callable[[], None]] | None, *, runs: int = 7) -> float:
        """The median time of a layer, captured in one graph."""
        self.run(calls)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.run(calls)
        for _ in range(2):
            graph.replay()
        times = []
        for _ in range(runs):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(1000 * start.elapsed_time(end) / LAYERS)
        return statistics.median(times)


def measure(name: str, case: Case, deadline: float) -> dict[str, Any]:
    """One row of the table: what each choice adds to a layer, the fastest first."""
    model = MODELS[name]
    given = attention.layers_of(model, case, "cuda")[:LAYERS]
    tried: list[Decode | Choice] = [*triton_of(model, name, case), *decodes_of(model, case)]
    calls_of(given[:1], model, case, PLAIN)[0]()
    expected = given[0].out.clone()
    chain = Chain(model, case, given)
    seen = case.seqs * min(case.tokens, model.window or case.tokens)
    row: dict[str, Any] = {"bytes_us": round(seen * model.kv_heads * model.size * 4 / 4.38e6, 2),
                           "chosen": told(chosen(model, case))}  # fmt: skip
    problems, differences = [], {}
    for each in tried:
        given[0].out.fill_(float("nan"))
        calls_of(given[:1], model, case, each)[0]()
        differences[told(each)] = difference = float((given[0].out - expected).abs().max())
        if not difference < attention.MOST_DIFFERENT:
            problems.append(f"wrong {told(each)}: {difference}")
    # Beside the graph without attention, each time: clocks change.
    row["alone"] = round(chain.microseconds(None), 2)
    found, bits = {}, {}
    for each in tried:
        if time.perf_counter() > deadline:
            problems.append("out of time")
            break
        try:
            found[told(each)] = round(chain.microseconds(calls_of(given, model, case, each)) - row["alone"], 2)
        except Exception as error:  # noqa: BLE001 - one case doesn't end the others
            problems.append(f"{told(each)}: {str(error)[:120]}")
            continue
        if isinstance(each, Decode):
            result = (chain.result if case.seqs <= MAX_ROWS else given[0].out).clone()
            if not torch.equal(bits.setdefault((each.cluster, each.warps), result), result):
                problems.append(f"race {told(each)}")
    row["alone again"] = round(chain.microseconds(None), 2)
    row["problems"] = problems
    row["us"] = dict(sorted(found.items(), key=lambda item: item[1]))
    return row


def told(tried: Decode | Choice) -> str:
    """What is tried, in a word."""
    if isinstance(tried, Choice):
        return f"triton {attention.told(tried)}".strip()
    return f"{tried.cluster}x{tried.warps}x{tried.stages}"


def main() -> None:
    """Measure and write the results."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seconds", type=float, default=60, help="after which nothing more is tried")
    parser.add_argument("--few", action="store_true")
    parser.add_argument("--models", nargs="*", default=list(FEW_CASES))
    arguments = parser.parse_args()
    given = FEW_CASES if arguments.few else MANY_CASES
    out = arguments.out or harness.RESULTS / f"gpu_decode_attention{'_few' * arguments.few}.json"
    cases = {name: each for name, each in given.items() if name in arguments.models}
    if not torch.cuda.is_available():
        print("needs a CUDA GPU: nothing measured")
        return
    began = time.perf_counter()
    deadline = began + arguments.seconds
    compile_all(cases)
    print("compiled in", round(time.perf_counter() - began, 1), flush=True)
    out.parent.mkdir(parents=True, exist_ok=True)
    machine = harness.machine()
    table: dict[str, Any] = {}
    for name in cases:
        for case in cases[name]:
            try:
                row = measure(name, case, deadline)
            except Exception as error:  # noqa: BLE001 - one case doesn't end the others
                row = {"error": str(error)[:300]}
            table[f"{name}, {case.text}"] = row
            print(f"{name}, {case.text}: {json.dumps(row)}", flush=True)
            found = {"claim": "gpu_decode_attention", "machine": machine, "figures": {"rows": table}}
            out.write_text(json.dumps(found) + "\n")
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
