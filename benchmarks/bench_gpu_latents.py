"""On a GPU: microseconds of latent attention a layer, launch by launch, beside what its bytes and products need.

Claims: decoding sequences, absorbed, are read at the memory's rate or multiplied near the rate of products, whichever
is slower; a prompt costs little more than attention over keys and values of every head. DeepSeek-V3's sizes in
bfloat16, in pages of 16 tokens in random order, as many layers as are more than the L2 cache holds. Counted are the
latents that are seen and the weight, once; of prompts the products of expanded keys and values, and of what was cached
before.

    python benchmarks/bench_gpu_latents.py [--sweep] [--seconds N] [--out FILE]

`--sweep` also tries other tiles, and reports the best for each case.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from bench_gpu_attention import Case, product_rate, read_rate
from support import harness
from support.gpu_times import microseconds
from support.launch_compiler import compile_launch

from precast.ir.graph.schema import Const, Node, Ref, TensorType, Value
from precast.ir.memory.liveness import Operand
from precast.kernels.attention.launches import Tile
from precast.kernels.choices import resolve
from precast.kernels.dtypes import NAMES
from precast.kernels.latent_attention import launches
from precast.kernels.latent_attention.launches import FEW_TOKENS, SMALL_STEP, Tiles
from precast.kernels.launch import Launched
from precast.kernels.records import Launch
from precast.kernels.use import Target, Use

PAGE_SIZE, MORE_THAN_L2, MOST_LAYERS = 16, 192 << 20, 48
HEADS, NOPE, ROPE, LATENT, VALUE = 128, 128, 64, 512, 128
CASES = [Case(seqs, 1, tokens) for seqs in (1, 8, 64, 256) for tokens in (256, 4096)] + [
    Case(1, 1, 32768), Case(1, 4096, 4096), Case(4, 2000, 2000), Case(1, 1024, 8192),
]  # fmt: skip
SPLIT = [Tile(64, 32, 8, 3), Tile(64, 64, 8, 1), Tile(64, 64, 8, 2), Tile(64, 16, 8, 4), Tile(32, 32, 4, 2),
         Tile(32, 64, 8, 2), Tile(16, 64, 4, 2)]  # fmt: skip
CONTEXT = [Tile(128, 64, 8, 3), Tile(128, 32, 8, 3), Tile(128, 128, 8, 2), Tile(64, 64, 4, 2), Tile(64, 64, 4, 3)]
EXPAND = [Tile(128, 64, 8, 4), Tile(128, 64, 4, 3), Tile(128, 32, 8, 4), Tile(64, 64, 4, 4)]
PREFIX = [Tile(64, 32, 8, 3), Tile(64, 64, 8, 1), Tile(64, 16, 8, 3), Tile(64, 32, 8, 1)]

Arguments = dict[str, Any]


def layers_of(case: Case, device: str) -> list[Arguments]:
    """What each layer is called with, its result among it, over one buffer of pages."""
    pages = -(-case.tokens // PAGE_SIZE)
    total, tokens = case.seqs * pages, case.seqs * case.queries
    a_layer = total * PAGE_SIZE * (LATENT + ROPE) * 2
    count = min(MOST_LAYERS, max(2, -(-MORE_THAN_L2 // (a_layer + 2 * HEADS * (NOPE + VALUE) * LATENT))))

    def normal(*size: int) -> torch.Tensor:
        made = torch.empty(*size, dtype=torch.bfloat16, device=device)
        return made if device == "meta" else made.normal_(0, LATENT**-0.5 if size[-1] == LATENT else 1.0)

    arena, q = normal(total, count, PAGE_SIZE, LATENT + ROPE), normal(1, tokens, HEADS, NOPE + ROPE)
    steps = torch.arange(case.seqs + 1, dtype=torch.int32)
    lists = {
        "cu_seqlens": steps * case.queries,
        "kv_lens": torch.full((case.seqs,), case.tokens, dtype=torch.int32),
        "page_indices": torch.randperm(total, generator=torch.Generator().manual_seed(0)).int(),
        "page_indptr": steps * pages,
        "page_start": torch.zeros(case.seqs, dtype=torch.int32),
    }
    shared = {"q": q, **{name: x.to(device) for name, x in lists.items()}, "scale": (NOPE + ROPE) ** -0.5,
              "value_size": VALUE, "window": None}  # fmt: skip
    out = torch.empty(1, tokens, HEADS, VALUE, dtype=torch.bfloat16, device=device)
    weights = [normal(HEADS * (NOPE + VALUE), LATENT) for _ in range(count)]
    return [shared | {"cache": arena[:, i], "weight": weights[i], "out": out} for i in range(count)]


def use_of(arguments: Arguments, capability: tuple[int, int]) -> Use:
    """The use that a call is; all sizes are known, and no op makes the weight."""
    given = {name: x for name, x in arguments.items() if name != "out"}
    types = {name: TensorType(NAMES[x.dtype], tuple(x.shape)) for name, x in given.items() if torch.is_tensor(x)}
    args = {name: Ref(name) if torch.is_tensor(x) else Const(x) for name, x in given.items() if x is not None}
    out = arguments["out"]
    node = Node("precast.paged_latent_attention", args, (Value("y", TensorType(NAMES[out.dtype], tuple(out.shape))),))
    operands = {name: Operand(kind, True, name != "weight") for name, kind in types.items()}
    return Use(node, operands, Target("cuda", capability))


def launches_of(use: Use, case: Case, tiles: Tiles | None = None) -> tuple[Launch, ...]:
    """Those of the record that a step of these sizes gets; or with other tiles."""
    tokens = case.seqs * case.queries
    if tiles is None:
        runs = resolve(use, {"T": tokens, "B": case.seqs}).record.runs
        assert not isinstance(runs, str), "latent attention on GPUs is launches"
        return runs(use)
    most = FEW_TOKENS if tokens <= FEW_TOKENS else SMALL_STEP if tokens <= SMALL_STEP else None
    return launches.paged(use, most_tokens=most, tiles=tiles)


def tiles_for(use: Use, case: Case) -> Iterator[Tiles]:
    """What is tried: one kernel's tile at a time."""
    built_in = launches.tiles_of(use)
    if case.queries == 1:
        yield from (built_in._replace(split=tile) for tile in SPLIT)
        return
    yield from (built_in._replace(context=tile) for tile in CONTEXT)
    yield from (built_in._replace(expand=tile) for tile in EXPAND)
    if case.tokens > case.queries:
        yield from (built_in._replace(prefix=tile) for tile in PREFIX)


def compile_one(job: tuple[Case, Tiles | None, tuple[int, int]]) -> str:
    """For another process: what went wrong, if something did."""
    case, tiles, capability = job
    try:
        given = layers_of(case, "meta")[0]
        tensors = {name: x for name, x in given.items() if torch.is_tensor(x)} | {"out.0": given["out"]}
        tensors["workspace"] = torch.empty(1 << 40, dtype=torch.uint8, device="meta")
        for launch in launches_of(use_of(given, capability), case, tiles):
            compile_launch(launch, tensors)
    except Exception as error:  # noqa: BLE001 - one case doesn't end the others
        return f"{job[:2]}: {error}"
    return ""


def compile_all(*, sweep: bool) -> float:
    """Compiles what will be tried, on all cores; the seconds it took."""
    began, capability = time.perf_counter(), torch.cuda.get_device_capability()
    jobs: list[tuple[Case, Tiles | None, tuple[int, int]]] = [(case, None, capability) for case in CASES]
    for case in (Case(1, 1, 256), Case(1, 1024, 8192)) if sweep else ():
        use = use_of(layers_of(case, "meta")[0], capability)
        jobs += [(case, tiles, capability) for tiles in tiles_for(use, case)]
    with ProcessPoolExecutor(max(1, min(14, (os.cpu_count() or 2) - 2)), mp_context=get_context("spawn")) as pool:
        problems = {each for each in pool.map(compile_one, jobs) if each}
    for problem in sorted(problems)[:5]:
        print("not compiled:", problem[:300], file=sys.stderr)
    return time.perf_counter() - began


def microseconds_of(found: tuple[Launch, ...], layers: list[Arguments], num_bytes: int, *, runs: int = 5) -> float:
    """A layer's, of these launches."""
    launched = Launched(found, num_bytes)
    often = layers * -(-6 // len(layers))
    return round(microseconds([partial(launched, **each) for each in often], runs=runs), 2)


def needed(case: Case) -> dict[str, float]:
    """Gigabytes and teraflops of a layer, as the module's docstring counts them."""
    before = case.tokens - case.queries
    latents = case.seqs * case.tokens * (LATENT + ROPE) * 2
    weight = HEADS * (NOPE + VALUE) * LATENT
    own = case.seqs * case.queries * (case.queries + 1) // 2 if case.queries > 1 else 0
    absorbed = case.seqs * case.queries * (before if case.queries > 1 else case.tokens)
    flops = 2 * HEADS * (own * (NOPE + ROPE + VALUE) + absorbed * (2 * LATENT + ROPE))
    return {"gb": (latents + 2 * weight) / 1e9, "tflop": (flops + 2 * case.seqs * case.queries * weight) / 1e12}


def measure(case: Case, *, sweep: bool, deadline: float) -> dict[str, Any]:
    """One row of the table."""
    layers = layers_of(case, "cuda")
    use = use_of(layers[0], torch.cuda.get_device_capability())
    found = launches_of(use, case)
    num_bytes = launches.held(use, most_tokens=SMALL_STEP if case.seqs * case.queries <= SMALL_STEP else None)
    assert isinstance(num_bytes, int), "all sizes are known"
    us = microseconds_of(found, layers, num_bytes)
    need = needed(case)
    floor = max(1e6 * need["gb"] / read_rate(), 1e6 * need["tflop"] / product_rate())
    row: dict[str, Any] = {"us": us, "floor_us": round(floor, 2), "of_floor": round(us / floor, 2)}
    row["launches"] = {
        f"{i} {each.kernel.partition(':')[2]}": microseconds_of((each,), layers, num_bytes, runs=3)
        for i, each in enumerate(found)
        if 0 not in each.grid
    }
    if sweep:
        row["tried"] = try_all(case, use, layers, num_bytes, deadline)
    return row


def try_all(case: Case, use: Use, layers: list[Arguments], num_bytes: int, deadline: float) -> list[list[Any]]:
    """The fastest tiles, and those that were wrong."""
    microseconds_of(launches_of(use, case), layers, num_bytes, runs=1)
    expected, built_in = layers[0]["out"].clone(), launches.tiles_of(use)
    found: list[list[Any]] = []
    for tiles in tiles_for(use, case):
        if time.perf_counter() > deadline:
            break
        told = next(f"{name} {tuple(x)}" for name, x in tiles._asdict().items() if x != getattr(built_in, name))
        try:
            us = microseconds_of(launches_of(use, case, tiles), layers, num_bytes, runs=3)
        except Exception as error:  # noqa: BLE001 - one case doesn't end the others
            found.append([float("inf"), told, str(error)[:60]])
            continue
        difference = float((layers[0]["out"].float() - expected.float()).abs().max())
        found.append([us, told, *(["wrong", difference] if not difference < 0.05 else [])])
    found.sort(key=lambda each: each[0])
    return [*found[:5], *(each for each in found[5:] if len(each) > 2)]


def attempt(call: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """One case doesn't end the others."""
    try:
        return call()
    except Exception as error:  # noqa: BLE001
        return {"error": f"{type(error).__name__}: {error}"[:300]}


def main() -> None:
    """Measure and write `results/gpu_latents.json`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=harness.RESULTS / "gpu_latents.json")
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--seconds", type=float, default=60, help="after so many nothing new is tried")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("needs a CUDA GPU: nothing measured")
        return
    compiled = compile_all(sweep=arguments.sweep)
    deadline = time.perf_counter() + arguments.seconds
    table: dict[str, Any] = {}
    for case in CASES:
        table[case.text] = attempt(partial(measure, case, sweep=arguments.sweep, deadline=deadline))
        print(f"{case.text}: {json.dumps(table[case.text])}", flush=True)
        torch.cuda.empty_cache()
    rates = {"read_gb_per_s": read_rate(), "product_tflop_per_s": product_rate()}
    print(json.dumps(rates), "compile seconds", round(compiled, 1), flush=True)
    text = json.dumps({"claim": "gpu_latents", "machine": harness.machine(), "figures": {**rates, "rows": table}})
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
