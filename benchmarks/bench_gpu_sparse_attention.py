"""On a GPU: microseconds of sparse attention a layer, up to each launch, beside what its bytes and products need.

Claims: at 131,072 tokens of context a decoding sequence takes little more than to read its index keys, and the 2,048
latents that are selected by them; latents that are not selected cost nothing. DeepSeek-V3.2's sizes in bfloat16, in
pages of 16 tokens in random order, as many layers as are more than the L2 cache holds. What is selected, and what
attention to it gives, is compared with the definitions, which compute on the GPU too.

    python benchmarks/bench_gpu_sparse_attention.py [--out FILE] [--only TEXT]

Rows of `both` have the two of a layer one after the other, as a step runs them: kernels overlap. Their `reads_us` is
what four launches take that compute nothing: they read the keys and the weight of queries; the scores; the latents; the
weight of values. Each waits for the one in front, which says what is read or what it is multiplied with, and is the
weight stream (`kernels/linear/stream.cu`) over one matrix of as many bytes.
A row's `until` has the microseconds of the first launch, of the first two, and so on, each with the number and the name
of the last one; a launch takes what it adds. `triton_us`: Triton's kernels alone, in the same run. `differs`
is 0 where the definition selects the same.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from bench_gpu_attention import Case, product_rate, read_rate
from bench_gpu_stream import streamed
from support import harness
from support.gpu_times import microseconds

from precast.ir.graph.schema import Const, Node, Ref, TensorType, Value
from precast.ir.memory.liveness import Operand
from precast.kernels.choices import records_of, resolve
from precast.kernels.dtypes import NAMES
from precast.kernels.launch import Launched
from precast.kernels.linear.stream_plan import TILE
from precast.kernels.records import Launch
from precast.kernels.sparse_attention.paged_select_keys import paged_select_keys
from precast.kernels.sparse_attention.paged_sparse_latent_attention import paged_sparse_latent_attention
from precast.kernels.use import Target, Use

PAGE_SIZE, MORE_THAN_L2, MOST_LAYERS = 16, 192 << 20, 8
HEADS, NOPE, ROPE, LATENT, VALUE = 128, 128, 64, 512, 128
INDEX_HEADS, INDEX_SIZE, COUNT = 64, 128, 2048
CASES = [
    Case(1, 1, 131072), Case(8, 1, 131072), Case(32, 1, 131072), Case(1, 1, 32768), Case(64, 1, 16384),
    Case(1, 1, 2000), Case(1, 1024, 131072), Case(1, 4096, 4096),
]  # fmt: skip

Arguments = dict[str, Any]
OPS: dict[str, Callable[..., torch.Tensor]] = {
    "paged_select_keys": paged_select_keys,
    "paged_sparse_latent_attention": paged_sparse_latent_attention,
}


def layers_of(case: Case) -> list[tuple[Arguments, Arguments]]:
    """What the selection and the attention of each layer are called with, their results among it."""
    pages = -(-case.tokens // PAGE_SIZE)
    total, tokens = case.seqs * pages, case.seqs * case.queries
    a_layer = total * PAGE_SIZE * (INDEX_SIZE + LATENT + ROPE) * 2
    count = min(MOST_LAYERS, max(2, -(-MORE_THAN_L2 // a_layer)))

    def normal(*size: int, scale: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device="cuda").normal_(0, scale)

    steps = torch.arange(case.seqs + 1, dtype=torch.int32)
    lists = {
        "cu_seqlens": steps * case.queries,
        "kv_lens": torch.full((case.seqs,), case.tokens, dtype=torch.int32),
        "page_indices": torch.randperm(total, generator=torch.Generator().manual_seed(0)).int(),
        "page_indptr": steps * pages,
        "page_start": torch.zeros(case.seqs, dtype=torch.int32),
    }
    lists = {name: x.cuda() for name, x in lists.items()}
    index, arena = normal(total, count, PAGE_SIZE, INDEX_SIZE), normal(total, count, PAGE_SIZE, LATENT + ROPE)
    q, weights = normal(1, tokens, INDEX_HEADS, INDEX_SIZE), normal(1, tokens, INDEX_HEADS, dtype=torch.float32)
    queries, weight = normal(1, tokens, HEADS, NOPE + ROPE), normal(HEADS * (NOPE + VALUE), LATENT, scale=LATENT**-0.5)
    selected = torch.empty(1, tokens, COUNT, dtype=torch.int32, device="cuda")
    out = torch.empty(1, tokens, HEADS, VALUE, dtype=torch.bfloat16, device="cuda")
    select = {"q": q, "weights": weights, **lists, "scale": INDEX_SIZE**-0.5, "count": COUNT, "out": selected}
    attend = {"q": queries, "weight": weight, "selected": selected, "sinks": None, **lists,
              "scale": (NOPE + ROPE) ** -0.5, "value_size": VALUE, "out": out}  # fmt: skip
    return [(select | {"cache": index[:, i]}, attend | {"cache": arena[:, i]}) for i in range(count)]


def use_of(op: str, arguments: Arguments) -> Use:
    """The use that a call is; all sizes are known, and no op makes the weight."""
    given = {name: x for name, x in arguments.items() if name != "out" and x is not None}
    types = {name: TensorType(NAMES[x.dtype], tuple(x.shape)) for name, x in given.items() if torch.is_tensor(x)}
    args = {name: Ref(name) if torch.is_tensor(x) else Const(x) for name, x in given.items()}
    out = arguments["out"]
    node = Node(f"precast.{op}", args, (Value("y", TensorType(NAMES[out.dtype], tuple(out.shape))),))
    operands = {name: Operand(kind, True, name != "weight") for name, kind in types.items()}
    return Use(node, operands, Target("cuda", torch.cuda.get_device_capability()))


def microseconds_of(found: tuple[Launch, ...], layers: list[Arguments], num_bytes: int, *, runs: int = 5) -> float:
    """A layer's, of these launches."""
    launched = Launched(found, num_bytes)
    often = layers * -(-6 // len(layers))
    return round(microseconds([partial(launched, **each) for each in often], runs=runs), 2)


def needed(op: str, case: Case) -> dict[str, float]:
    """Gigabytes and teraflops of a layer: of what is read at least once, and of the products."""
    tokens, seen = case.seqs * case.queries, case.tokens - (case.queries - 1) / 2
    if op == "paged_select_keys":
        keys = case.seqs * case.tokens if case.tokens > COUNT else 0
        flops = 2 * tokens * seen * INDEX_HEADS * (INDEX_SIZE + 1) if case.tokens > COUNT else 0
        return {"gb": (2 * keys * INDEX_SIZE + 4 * tokens * COUNT) / 1e9, "tflop": flops / 1e12}
    latents = case.seqs * min(case.tokens, case.queries * COUNT) * (LATENT + ROPE) * 2
    weight = HEADS * (NOPE + VALUE) * LATENT
    flops = 2 * tokens * (HEADS * min(seen, COUNT) * (2 * LATENT + ROPE) + weight)
    return {"gb": (latents + 2 * weight) / 1e9, "tflop": flops / 1e12}


def differences(op: str, arguments: Arguments) -> float:
    """The share of positions that differ from the definition's, or the largest difference of a result; the first
    sequence's last tokens alone, where there are many."""
    given = {name: x for name, x in arguments.items() if name != "out"}
    if arguments["q"].shape[1] > 64:
        return -1.0
    expected, found = OPS[op](**given), arguments["out"]
    if op == "paged_select_keys":
        same = [len(set(a.tolist()) & set(b.tolist())) / len(set(b.tolist()))
                for a, b in zip(found[0], expected[0], strict=True)]  # fmt: skip
        return round(1 - min(same), 6)
    return round(float((found.float() - expected.float()).abs().max()), 5)


def chosen(op: str, arguments: Arguments, case: Case) -> tuple[tuple[Launch, ...], int]:
    """The launches of an op, and the bytes that they leave for one another."""
    use = use_of(op, arguments)
    record = resolve(use, {"T": case.seqs * case.queries, "B": case.seqs}).record
    assert not isinstance(record.runs, str), "sparse attention on GPUs is launches"
    found, num_bytes = record.runs(use), record.workspace(use)
    assert isinstance(num_bytes, int), "all sizes are known"
    return found, num_bytes


def floor_of(op: str, case: Case) -> float:
    """Microseconds that its bytes or its products need."""
    need = needed(op, case)
    return max(1e6 * need["gb"] / read_rate(), 1e6 * need["tflop"] / product_rate())


def reads_in_turn(case: Case) -> float:
    """Microseconds of a layer's reads, one after the other, by launches that do nothing else."""
    weight = HEADS * (NOPE + VALUE) * LATENT
    keys, latents = case.seqs * case.tokens, case.seqs * min(case.tokens, COUNT)
    each = 2 * keys * INDEX_SIZE + weight, 4 * keys, 2 * latents * (LATENT + ROPE), weight
    width, product = 4096, streamed(pdl=True, COPIES_ALONE=1)
    rows = [-(-num_bytes // (2 * width * TILE)) * TILE for num_bytes in each]
    count = max(2, -(-MORE_THAN_L2 // sum(each)))
    layers = [[torch.zeros(some, width, dtype=torch.bfloat16, device="cuda") for some in rows] for _ in range(count)]
    x, y = torch.zeros(1, width, dtype=torch.bfloat16, device="cuda"), torch.empty(1, max(rows)).bfloat16().cuda()

    def layer(weights: list[torch.Tensor]) -> None:
        for one in weights:
            product(x, one, y[:, : len(one)])

    return round(microseconds([partial(layer, each) for each in layers * -(-6 // count)]), 2)


def measure_both(layers: list[tuple[Arguments, Arguments]], case: Case) -> dict[str, Any]:
    """The row of both ops."""
    calls = [Launched(*chosen(op, layers[0][i], case)) for i, op in enumerate(OPS)]

    def layer(*given: Arguments) -> None:
        for call, arguments in zip(calls, given, strict=True):
            call(**arguments)

    us = microseconds([partial(layer, *each) for each in layers * -(-6 // len(layers))])
    floor = sum(floor_of(op, case) for op in OPS)
    reads = reads_in_turn(case)
    return {
        "us": round(us, 2), "floor_us": round(floor, 2), "reads_us": reads, "ratio": round(us / floor, 2),
        "ratio_of_reads": round(reads / floor, 2),
    }  # fmt: skip


def measure(op: str, layers: list[Arguments], case: Case) -> dict[str, Any]:
    """One row of the table."""
    found, num_bytes = chosen(op, layers[0], case)
    (triton,) = (each for each in records_of(f"precast.{op}", 1) if each.name == f"triton.{op}")
    assert not isinstance(triton.runs, str), "and so is it in Triton"
    use = use_of(op, layers[0])
    held = triton.workspace(use)
    assert isinstance(held, int), "all sizes are known"
    in_triton = microseconds_of(triton.runs(use), layers, held)
    us = microseconds_of(found, layers, num_bytes)
    row: dict[str, Any] = {
        "us": us, "floor_us": round(floor_of(op, case), 2), "triton_us": in_triton, "workspace_mib": num_bytes >> 20
    }  # fmt: skip
    row["until"] = {
        f"{i} {each.kernel.partition(':')[2]}": microseconds_of(found[: i + 1], layers, num_bytes, runs=3)
        for i, each in enumerate(found)
    }
    microseconds_of(found, layers[:1], num_bytes, runs=1)
    row["differs"] = differences(op, layers[0])
    return row


def attempt(call: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """One case doesn't end the others."""
    try:
        return call()
    except Exception as error:  # noqa: BLE001
        return {"error": f"{type(error).__name__}: {error}"[:300]}


def main() -> None:
    """Measure and write `results/gpu_sparse_attention.json`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=harness.RESULTS / "gpu_sparse_attention.json")
    parser.add_argument(
        "--only", default="", help="rows whose names have this alone, such as 'select_keys, 1 x 1 of 131072'"
    )
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("needs a CUDA GPU: nothing measured")
        return
    table: dict[str, Any] = {}
    for case in CASES:
        named = {op: f"{op}, {case.text}" for op in OPS if arguments.only in f"{op}, {case.text}"}
        of_both = f"both, {case.text}"
        layers = layers_of(case) if named or arguments.only in of_both else []
        for i, op in enumerate(OPS):
            if op not in named:
                continue
            row = attempt(partial(measure, op, [layer[i] for layer in layers], case))
            table[named[op]] = row
            print(f"{named[op]}: {json.dumps(row)}", flush=True)
        if arguments.only in of_both and case.queries == 1:
            table[of_both] = attempt(partial(measure_both, layers, case))
            print(f"{of_both}: {json.dumps(table[of_both])}", flush=True)
        del layers
        torch.cuda.empty_cache()
    rates = {"read_gb_per_s": read_rate(), "product_tflop_per_s": product_rate()}
    print(json.dumps(rates), flush=True)
    text = json.dumps(
        {"claim": "gpu_sparse_attention", "machine": harness.machine(), "figures": {**rates, "rows": table}}
    )
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
