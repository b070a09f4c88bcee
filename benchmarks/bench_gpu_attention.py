"""On a GPU: microseconds of paged attention a layer, beside what its bytes and products need.

Claims: decoding sequences are read at the memory's rate, prompts computed near the rate of torch's own attention over
tensors without pages. Shapes are published ones in bfloat16, in pages of 16 tokens in random order, as many layers
as are more than the L2 cache holds, in one CUDA graph. The read rate is that of a sum over 4 GB, the rate of products
that of 8192 x 8192 x 8192; a causal product counts the pairs that are visible.

    python benchmarks/bench_gpu_attention.py [--sweep] [--prompts-only] [--seconds N] [--out FILE] [--models MODEL ...]

`--sweep` also tries other tiles and numbers of parts, and reports the best for each case. With `--prompts-only` there
are prompts alone, and each choice is a line, with the largest difference from what torch computes.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import torch
from support import harness
from support.gpu_times import microseconds
from support.launch_compiler import compile_launch

from precast.ir.graph.schema import Const, Node, Ref, TensorType, Value
from precast.ir.memory.liveness import Operand
from precast.kernels.attention import launches as attention
from precast.kernels.attention.launches import Splits, Tile
from precast.kernels.choices import resolve
from precast.kernels.dtypes import NAMES
from precast.kernels.launch import launched_of
from precast.kernels.records import Launch, Record
from precast.kernels.use import Target, Use

PAGE_SIZE = 16
MORE_THAN_L2 = 192 << 20
MOST_LAYERS = 96
MOST_DIFFERENT = 0.05
"""Of any element, between kernels."""


class Model(NamedTuple):
    """The attention of a model: query and key heads, their size, and how far they see."""

    heads: int
    kv_heads: int
    size: int
    window: int | None = None


MODELS = {
    "llama-8b": Model(32, 8, 128),
    "gemma-12b": Model(16, 8, 256, 1024),
    "qwen-30b": Model(32, 4, 128),
    "gpt-oss-20b": Model(64, 8, 64, 128),
}


class Case(NamedTuple):
    """Sequences, each of `queries` tokens of a context of `tokens`."""

    seqs: int
    queries: int
    tokens: int

    @property
    def text(self) -> str:
        """As the table names it."""
        return f"{self.seqs} x {self.queries} of {self.tokens}"


DECODE = [Case(seqs, 1, tokens) for seqs in (1, 8, 64, 256) for tokens in (256, 4096)] + [Case(1, 1, 32768)]
PREFILL = [Case(1, 4096, 4096), Case(4, 8000, 8000), Case(1, 1024, 8192)]

CONTEXT_TILES = {
    64: [Tile(128, 64, 4, 3)],
    128: [Tile(128, 64, 8, 3), Tile(64, 64, 4, 2)],
    256: [Tile(128, 64, 8, 2), Tile(64, 64, 4, 2)],
}
HOPPER_TILES = {
    64: [Tile(128, 128, 4, 3), Tile(128, 64, 4, 4)],
    128: [Tile(128, 128, 4, 3), Tile(128, 64, 4, 5), Tile(128, 64, 4, 3)],
    256: [Tile(128, 64, 4, 2)],
}
SPLIT_TILES = {
    64: [Tile(16, 64, 4, 3), Tile(16, 128, 4, 3), Tile(16, 64, 2, 3), Tile(16, 32, 2, 3)],
    128: [Tile(16, 64, 4, 3), Tile(16, 64, 4, 2), Tile(16, 32, 4, 4), Tile(16, 32, 4, 3), Tile(16, 32, 4, 2),
          Tile(16, 32, 2, 3), Tile(16, 32, 2, 2), Tile(16, 128, 8, 2)],
    256: [Tile(16, 32, 4, 3), Tile(16, 32, 4, 2), Tile(16, 32, 4, 4), Tile(16, 64, 8, 2), Tile(16, 16, 4, 4),
          Tile(16, 16, 4, 3), Tile(16, 16, 2, 3)],
}  # fmt: skip
PROGRAMS = (132, 264, 528)
AHEAD = (64, 128, 256)
SPLITS = [Splits(1, 64)] + [Splits(most, least) for least in (64, 256) for most in (2, 4, 8, 16, 32, 64)]


class Given(NamedTuple):
    """What one layer is called with."""

    arguments: dict[str, Any]
    out: torch.Tensor


def use_of(arguments: dict[str, Any], out: torch.Tensor, capability: tuple[int, int]) -> Use:
    """The use that a call is; all sizes are known."""
    types = {name: TensorType(NAMES[x.dtype], tuple(x.shape)) for name, x in arguments.items() if torch.is_tensor(x)}
    args = {name: Ref(name) if torch.is_tensor(x) else Const(x) for name, x in arguments.items() if x is not None}
    node = Node("precast.paged_attention", args, (Value("y", TensorType(NAMES[out.dtype], tuple(out.shape))),))
    return Use(node, {name: Operand(kind, True) for name, kind in types.items()}, Target("cuda", capability))


def layers_of(model: Model, case: Case, device: str) -> list[Given]:
    """Layers over one buffer of pages, as the loader's arena has them; sequences' lists are cut to the window."""
    seen = case.tokens if model.window is None else min(case.tokens, model.window - 1 + case.queries)
    start = (case.tokens - seen) // PAGE_SIZE * PAGE_SIZE
    pages = -(-(case.tokens - start) // PAGE_SIZE)
    total = case.seqs * pages
    layer_bytes = total * PAGE_SIZE * model.kv_heads * model.size * 4
    count = min(MOST_LAYERS, max(2 if case.queries > 1 else 1, -(-MORE_THAN_L2 // layer_bytes)))
    arena = torch.empty(total, count, 2, PAGE_SIZE, model.kv_heads, model.size, dtype=torch.bfloat16, device=device)
    if device == "cuda":
        arena.normal_()
    q = torch.empty(1, case.seqs * case.queries, model.heads, model.size, dtype=torch.bfloat16, device=device)
    if device == "cuda":
        q.normal_()
    steps = torch.arange(case.seqs + 1, dtype=torch.int32)
    generator = torch.Generator().manual_seed(0)
    lists = {
        "cu_seqlens": steps * case.queries,
        "kv_lens": torch.full((case.seqs,), case.tokens, dtype=torch.int32),
        "page_indices": torch.randperm(total, generator=generator).int(),
        "page_indptr": steps * pages,
        "page_start": torch.full((case.seqs,), start, dtype=torch.int32),
    }
    lists = {name: x.to(device) for name, x in lists.items()}
    return [
        Given({"q": q, "k_cache": arena[:, i, 0], "v_cache": arena[:, i, 1], "sinks": None, **lists,
               "scale": model.size**-0.5, "window": model.window, "soft_cap": None, "slopes": None, "chunk": None},
              torch.empty_like(q))
        for i in range(count)
    ]  # fmt: skip


class Choice(NamedTuple):
    """What is tried: the tile of each kernel, None for what records choose, and how work is shared."""

    context: Tile | None = None
    split: Tile | None = None
    splits: Splits | None = None
    programs: int | None = None
    pdl: bool = True
    hopper: Tile | None = None
    ahead: int | None = None
    early: bool = True


PLAIN = Choice(context=Tile(128, 64, 8, 2), early=False)
"""Kernels that others are compared with: Triton's, one after the other."""


def launches_of(use: Use, case: Case, choice: Choice) -> tuple[Launch, ...]:
    """The launches of a choice."""
    if choice._replace(pdl=True, early=True) == Choice():
        found = chosen_launches(use, case)
    else:
        is_small = case.seqs * case.queries <= attention.SMALL_STEP
        slots = range(case.seqs, case.seqs + 1)
        tile = choice.split or attention.split_tile(use, slots if is_small else None)
        ahead = attention.AHEAD if choice.ahead is None else choice.ahead
        splits = choice.splits or attention.splits_of(use)
        small = attention.split_launches(use, tile, splits, is_small=is_small, ahead=ahead)
        if choice.context:
            large = attention.context_launch(use, choice.context, programs=choice.programs)
        elif choice.hopper:
            large = attention.hopper_launch(use, choice.hopper, programs=choice.programs)
        else:
            large = chosen_launches(use, case)[0]
        found = small if is_small else (large, *small)
    if not choice.early:
        found = tuple(each._replace(constants={**each.constants, "EARLY": False}) for each in found)
    return found if choice.pdl else tuple(_alone(each) for each in found)


def _alone(launch: Launch) -> Launch:
    """The launch without overlap."""
    return launch._replace(pdl=False, constants={**launch.constants, "PDL": False})


def chosen_launches(use: Use, case: Case) -> tuple[Launch, ...]:
    """Those of the record that a step of these sizes gets."""
    runs = resolve(use, {"T": case.seqs * case.queries, "B": case.seqs}).record.runs
    assert not isinstance(runs, str), "attention on GPUs is launches"
    return runs(use)


def record_of(model: Model, case: Case, choice: Choice) -> Record:
    """The choice as a record."""
    num_bytes = 4 * 128 * (case.seqs + 1) * model.heads * (model.size + 2)
    return Record(
        name="tried", op="precast.paged_attention", runs=lambda use: launches_of(use, case, choice),
        workspace=lambda use: num_bytes, allocates=False,
    )  # fmt: skip


def choices_of(model: Model, case: Case) -> Iterator[Choice]:
    """Tiles first; how work is shared is tried with the best of them."""
    yield Choice()
    yield PLAIN
    if case.queries > 1:
        yield from (Choice(hopper=tile) for tile in HOPPER_TILES.get(model.size, ()))
        yield from (Choice(context=tile) for tile in CONTEXT_TILES[model.size])
    else:
        yield from (Choice(split=tile) for tile in SPLIT_TILES[model.size])


def shared_choices_of(case: Case, best: Choice) -> Iterator[Choice]:
    """How work is shared."""
    if case.queries > 1:
        yield from (best._replace(programs=programs) for programs in PROGRAMS)
    else:
        useful = [each for each in SPLITS if (each.most - 1) * each.least_keys < case.tokens]
        yield best._replace(early=False)
        yield best._replace(pdl=False)
        yield from (best._replace(ahead=ahead) for ahead in AHEAD)
        yield from (best._replace(splits=each) for each in useful if each.most * case.seqs <= 2048)


def compile_case(model: Model, case: Case, choice: Choice, capability: tuple[int, int]) -> None:
    """Compiles the launches of a choice into Triton's cache on disk."""
    given = layers_of(model, case, "meta")[0]
    use = use_of(given.arguments, given.out, capability)
    tensors = {name: x for name, x in given.arguments.items() if torch.is_tensor(x)} | {"out.0": given.out}
    tensors["workspace"] = torch.empty(1 << 40, dtype=torch.uint8, device="meta")
    for launch in launches_of(use, case, choice):
        compile_launch(launch, tensors)


def compile_one(job: tuple[Any, ...]) -> str:
    """For another process: what went wrong, if something did."""
    try:
        compile_case(*job)
    except Exception as error:  # noqa: BLE001 - one case doesn't end the others
        return f"{job[1:3]}: {error}"
    return ""


def compile_all(names: list[str], cases: list[Case], *, sweep: bool) -> float:
    """Compiles what will be tried, on all cores; the seconds it took."""
    began = time.perf_counter()
    capability = torch.cuda.get_device_capability()
    jobs = []
    for name in names:
        for case in cases:
            for choice in choices_of(MODELS[name], case) if sweep else [Choice()]:
                # Lengths don't matter.
                same = Case(1, 1024, 1024) if case.queries > 1 else case._replace(tokens=256)
                jobs.append((MODELS[name], same, choice, capability))
    # What the others need besides comes first.
    jobs.sort(key=lambda job: job[2] != Choice())
    jobs = list(dict.fromkeys(jobs))
    with ProcessPoolExecutor(max(1, min(14, (os.cpu_count() or 2) - 2)), mp_context=get_context("spawn")) as pool:
        problems = {each for each in pool.map(compile_one, jobs) if each}
    for problem in sorted(problems)[:5]:
        print("not compiled:", problem[:300], file=sys.stderr)
    return time.perf_counter() - began


def calls_of(given: list[Given], model: Model, case: Case, choice: Choice) -> list[Callable[[], Any]]:
    """A call for each layer."""
    use = use_of(given[0].arguments, given[0].out, torch.cuda.get_device_capability())
    launched = launched_of(record_of(model, case, choice), use)
    return [lambda each=each: launched(out=each.out, **each.arguments) for each in repeated(given)]  # type: ignore[misc]


def repeated(given: list[Given]) -> list[Given]:
    """The layers, as often as makes six calls: one alone would be measured with the graph's own launch."""
    return given * -(-6 // len(given))


def visible_pairs(model: Model, case: Case) -> int:
    """Of a query and a key that it sees, in all sequences."""
    first = case.tokens - case.queries
    window = model.window or case.tokens
    return case.seqs * sum(min(first + i + 1, window) for i in range(case.queries))


def rate(model: Model, case: Case, us: float) -> dict[str, float]:
    """Bytes of keys and values that are seen, or products, in a second."""
    if case.queries == 1:
        seen = case.seqs * min(case.tokens, model.window or case.tokens)
        return {"gb_per_s": round(seen * model.kv_heads * model.size * 4 / us / 1e3, 1)}
    return {"tflop_per_s": round(4 * visible_pairs(model, case) * model.heads * model.size / us / 1e6, 1)}


@cache
def read_rate() -> float:
    """Bytes a second of one sum over 4 GB, in GB/s."""
    x = torch.ones(1 << 30, device="cuda")
    return round(x.numel() * 4 / microseconds([lambda: x.sum()] * 2) / 1e3, 1)


@cache
def product_rate() -> float:
    """TFLOP/s of a product in bfloat16."""
    x = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    return round(2 * 8192**3 / microseconds([lambda: x @ x] * 4) / 1e6, 1)


def baseline(model: Model, case: Case) -> float | None:
    """torch's own attention over tensors without pages, where it computes the same."""
    if case.queries != case.tokens or model.window is not None:
        return None
    shape = (case.seqs, case.queries)
    q = torch.randn(*shape, model.heads, model.size, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    k, v = (torch.randn(*shape, model.kv_heads, model.size, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
            for _ in range(2))  # fmt: skip
    attend = torch.nn.functional.scaled_dot_product_attention
    return round(microseconds([lambda: attend(q, k, v, is_causal=True, enable_gqa=True)] * 2), 1)


def measure(model: Model, case: Case, *, sweep: bool, deadline: float) -> dict[str, Any]:
    """One row of the table."""
    given = layers_of(model, case, "cuda")
    microseconds(calls_of(given, model, case, PLAIN), runs=1)
    expected = given[0].out.clone()
    us = microseconds(calls_of(given, model, case, Choice()))
    row: dict[str, Any] = {"us": round(us, 2), **rate(model, case, us)}
    if not (difference := float((given[0].out - expected).abs().max())) < MOST_DIFFERENT:
        row["wrong"] = difference
    if (other := baseline(model, case)) is not None:
        row["torch_us"] = other
    if sweep:
        row["tried"] = try_all(model, case, given, expected, deadline)
    return row


def try_all(model: Model, case: Case, given: list[Given], expected: torch.Tensor, deadline: float) -> list[list[Any]]:
    """The five fastest choices, and those that were wrong."""
    found: list[list[Any]] = []

    def attempt(choice: Choice) -> float:
        if time.perf_counter() > deadline:
            return float("inf")
        try:
            us = microseconds(calls_of(given, model, case, choice), runs=3)
        except Exception as error:  # noqa: BLE001 - one case doesn't end the others
            found.append([float("inf"), told(choice), str(error)[:80]])
            return float("inf")
        difference = float((given[0].out - expected).abs().max())
        found.append([round(us, 2), told(choice), *(["wrong", difference] if not difference < MOST_DIFFERENT else [])])
        return us

    timed = [(attempt(choice), choice) for choice in choices_of(model, case)]
    best = min(timed, key=lambda each: each[0])[1]
    for choice in shared_choices_of(case, best):
        attempt(choice)
    found.sort(key=lambda each: each[0])
    return [*found[:8], *(each for each in found[8:] if len(each) > 2 or each[1] == told(PLAIN))]


def reference(model: Model, case: Case, given: Given) -> torch.Tensor:
    """The last 128 queries of the last sequence, by torch in float32."""
    x = given.arguments
    first_page, start = int(x["page_indptr"][-2]), int(x["page_start"][-1])
    pages = x["page_indices"][first_page:].long()
    q = x["q"][0, -128:].float().transpose(0, 1)
    k, v = (x[name][pages].flatten(0, 1)[: case.tokens - start].float().transpose(0, 1)
            for name in ("k_cache", "v_cache"))  # fmt: skip
    k, v = (each.repeat_interleave(model.heads // model.kv_heads, 0) for each in (k, v))
    distance = torch.arange(case.tokens - 128, case.tokens, device="cuda")[:, None] - torch.arange(
        start, case.tokens, device="cuda"
    )
    visible = (distance >= 0) & (distance < (model.window or case.tokens))
    scores = (q @ k.transpose(1, 2) * model.size**-0.5).masked_fill(~visible, float("-inf"))
    return (scores.softmax(-1) @ v).transpose(0, 1)


def print_prompts(model: Model, name: str, case: Case) -> None:
    """A line for each choice of a prompt."""
    given = layers_of(model, case, "cuda")
    expected = reference(model, case, given[0])
    for choice in choices_of(model, case):
        try:
            for each in given:
                each.out.fill_(torch.nan)
            us = microseconds(calls_of(given, model, case, choice), runs=3)
            found = given[0].out[0, -128:].float()
            row: dict[str, Any] = {**rate(model, case, us), "error": float((found - expected).abs().max())}
            row["nan"] = int(given[0].out.isnan().sum())
            if choice == PLAIN:
                plain = given[0].out.clone()
            elif choice.hopper:
                row["from_plain"] = float((given[0].out - plain).abs().max())
        except Exception as error:  # noqa: BLE001 - one case doesn't end the others
            us, row = float("nan"), {"failed": str(error)[:200]}
        print(f"{name}, {case.text}: {us:8.1f} us {json.dumps(row)} {told(choice)}", flush=True)
    print(f"{name}, {case.text}: torch {baseline(model, case)} us", flush=True)


def told(choice: Choice) -> str:
    """Only what differs from what records choose."""
    parts = {name: tuple(x) if isinstance(x, tuple) else x for name, x in choice._asdict().items()}
    return " ".join(f"{name}={x}" for name, x in parts.items() if x is not None and x is not True)


def main() -> None:
    """Measure and write `results/gpu_attention.json`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=harness.RESULTS / "gpu_attention.json")
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--prompts-only", action="store_true")
    parser.add_argument("--seconds", type=float, default=150, help="of trying, shared by the cases")
    parser.add_argument("--models", nargs="*", default=list(MODELS))
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("needs a CUDA GPU: nothing measured")
        return
    cases = PREFILL + ([] if arguments.prompts_only else DECODE)
    compiled = compile_all(arguments.models, cases, sweep=arguments.sweep or arguments.prompts_only)
    if arguments.prompts_only:
        for name in arguments.models:
            for case in cases:
                print_prompts(MODELS[name], name, case)
                torch.cuda.empty_cache()
        return
    table: dict[str, Any] = {}
    for name in arguments.models:
        for case in cases:
            deadline = time.perf_counter() + arguments.seconds / (len(cases) * len(arguments.models))
            try:
                row = measure(MODELS[name], case, sweep=arguments.sweep, deadline=deadline)
            except Exception as error:  # noqa: BLE001 - one case doesn't end the others
                row = {"error": str(error)[:300]}
            table[f"{name}, {case.text}"] = row
            print(f"{name}, {case.text}: {json.dumps(row)}", flush=True)
            torch.cuda.empty_cache()
    rates = {"read_gb_per_s": read_rate(), "product_tflop_per_s": product_rate()}
    print(json.dumps(rates), "compile seconds", round(compiled, 1), flush=True)
    text = json.dumps({"claim": "gpu_attention", "machine": harness.machine(), "figures": {**rates, "rows": table}})
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
